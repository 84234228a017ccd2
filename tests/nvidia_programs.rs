//! Output of NVIDIA's own programs, in the form in which ours is compared with it: on a machine
//! with GPUs (tests/real-gpu), and as it was recorded there (tests/fixtures/real-gpu).

use anyhow::{Result, ensure};
use kata_gpu_wire::nvml_messages::{Device, Facts};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Fields of `nvidia-smi --query-gpu=.. --format=csv,noheader,nounits` that [`smi_lines`] has.
pub const SMI_QUERY: &str =
    "pci.bus_id,uuid,name,driver_version,persistence_mode,ecc.mode.current,power.limit";

/// Lines of nvidia-smi with these facts of our helper for NVML.
pub fn smi_lines(facts: &Facts) -> Vec<String> {
    // As nvidia-smi prints what a GPU does not have.
    let or_not = |value: Option<String>| value.unwrap_or_else(|| "[N/A]".into());
    let text = |value: &Option<String>| or_not(value.clone());
    let switch = |value: Option<bool>| {
        or_not(value.map(|on| if on { "Enabled" } else { "Disabled" }.into()))
    };
    let line = |gpu: &Device| {
        let watts = or_not(
            gpu.power_limit_mw
                .map(|milliwatts| format!("{:.2}", f64::from(milliwatts) / 1000.0)),
        );
        // nvidia-smi prints eight digits of the domain.
        let address = gpu
            .address
            .map(|at| format!("0000{}", at.to_string().to_uppercase()))
            .unwrap_or_default();
        let values = [
            address,
            text(&gpu.uuid),
            text(&gpu.name),
            text(&facts.driver),
            switch(gpu.persistence),
            switch(gpu.ecc),
        ];
        format!("{}, {watts}", values.join(", "))
    };
    facts.devices.iter().map(line).collect()
}

/// Parts of a CDI spec that a container gets with a device: paths in the guest of its mounts,
/// paths of its nodes with their numbers.
fn gets(spec: &Value, device: &str) -> BTreeSet<String> {
    let items = |edits: &Value, list: &str| edits[list].as_array().cloned().unwrap_or_default();
    let own = items(spec, "devices")
        .into_iter()
        .find(|d| d["name"] == device)
        .map(|d| d["containerEdits"].clone());
    let mut all = BTreeSet::new();
    for edits in [Some(spec["containerEdits"].clone()), own]
        .into_iter()
        .flatten()
    {
        all.extend(
            items(&edits, "mounts")
                .iter()
                .filter_map(|m| m["hostPath"].as_str().map(str::to_string)),
        );
        let number = |node: &Value, key: &str| node[key].as_u64().unwrap_or(0);
        let node = |n: &Value| {
            Some(format!(
                "{} {}:{}",
                n["path"].as_str()?,
                number(n, "major"),
                number(n, "minor")
            ))
        };
        all.extend(items(&edits, "deviceNodes").iter().filter_map(node));
    }
    all
}

/// Checks that a container gets of a device what `nvidia-ctk cdi generate` gives it, as far as that
/// is of the driver's root, and nothing more. Links are not compared: it makes them by hooks.
pub fn same_as_nvidia_ctk(
    ours: &Value,
    theirs: &Value,
    device: &str,
    driver_root: &Path,
) -> Result<()> {
    let of_driver =
        |item: &String| item.starts_with("/dev/") || Path::new(item).starts_with(driver_root);
    let theirs: BTreeSet<String> = gets(theirs, device).into_iter().filter(of_driver).collect();
    let ours = gets(ours, device);
    ensure!(
        theirs.len() > 10,
        "nvidia-ctk gives device {device} {theirs:?}"
    );
    let (missing, more): (Vec<_>, Vec<_>) = (
        theirs.difference(&ours).collect(),
        ours.difference(&theirs).collect(),
    );
    ensure!(
        missing.is_empty() && more.is_empty(),
        "device {device}: not in ours {missing:?}, in ours alone {more:?}"
    );
    Ok(())
}
