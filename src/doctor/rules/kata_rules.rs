//! Rules about Kata's configuration: the guest's file, its console, plugging, deadlines.

use super::checked::{Checked, Evidence, Gap, evidence, unknown};
use super::host_facts::{HostFacts, Kata};
use super::kernel_rules::{fine, found};
use kata_gpu_report::analysis::statistics::Summary;

/// Exit of a guest for one byte on an emulated serial port.
const EXIT_SECONDS: f64 = 10e-6;
/// Share of a deadline that boots may take before a slower one would be given up.
const NEAR: f64 = 0.8;

/// A value of the hypervisor's section as evidence.
fn of_key(kata: &Kata, key: &str) -> Evidence {
    match kata.hypervisor(key) {
        Some((value, file)) => evidence(file, format!("{key} = {value}")),
        None => evidence(&kata.path, format!("{key} is not set")),
    }
}

/// Words of the guests' kernel command line: of running VMs, else of the configuration.
fn guest_words(facts: &HostFacts) -> Result<(String, Vec<&str>), Gap> {
    let running = facts
        .vms
        .iter()
        .find_map(|vm| Some((vm.proc("cmdline"), vm.options("-append").last()?)));
    let (from, text) = match running {
        Some(found) => found,
        None => {
            let kata = facts.kata()?;
            let value = kata.hypervisor("kernel_params");
            (
                value.map_or(kata.path.clone(), |(_, file)| file.clone()),
                value.map_or("", |(text, _)| text),
            )
        }
    };
    Ok((from, text.split_whitespace().collect()))
}

pub fn agent_log(facts: &HostFacts) -> Checked {
    let (from, words) = guest_words(facts)?;
    let level = words
        .iter()
        .rev()
        .find_map(|word| word.strip_prefix("agent.log="))
        .unwrap_or("info");
    let debug = facts
        .kata()
        .ok()
        .and_then(|kata| kata.values.get("agent.kata.enable_debug"));
    let mut seen = vec![evidence(from, format!("agent.log={level}"))];
    seen.extend(
        debug.map(|(value, file)| evidence(file, format!("enable_debug = {value} of the agent"))),
    );
    found(
        seen,
        "remove agent.log=debug and enable_debug of [agent.kata]: each line leaves the guest",
    )
    .when(["debug", "trace"].contains(&level) || debug.is_some_and(|(value, _)| value == "true"))
}

pub fn console(facts: &HostFacts) -> Checked {
    let (from, words) = guest_words(facts)?;
    let consoles: Vec<&str> = words
        .iter()
        .filter_map(|word| word.strip_prefix("console="))
        .collect();
    let is_serial = consoles.iter().any(|console| console.starts_with("ttyS"));
    let quiet = words.contains(&"quiet");
    let seen = vec![evidence(
        from,
        format!(
            "console={}{}",
            consoles.join(","),
            if quiet { " quiet" } else { "" }
        ),
    )];
    if !is_serial {
        return fine(seen);
    }
    let problem = found(
        seen,
        "console=hvc0 instead of ttyS0, or quiet: each byte on an emulated serial port is an exit",
    );
    match Summary::of(&facts.boots.console_bytes) {
        Some(bytes) => {
            let of = format!(
                "10 us an exit, {} bytes of console in the median boot here",
                bytes.median_ns
            );
            problem
                .model(bytes.median_ns as f64 * EXIT_SECONDS, of)
                .checked()
        }
        None => problem.checked(),
    }
}

pub fn guest_initrd(facts: &HostFacts) -> Checked {
    let kata = facts.kata()?;
    let Some(guest) = &kata.guest else {
        return unknown(format!(
            "{}: neither image nor initrd could be looked at",
            kata.path
        ));
    };
    let compression = guest.compression.unwrap_or("not compressed");
    let seen = vec![evidence(
        &guest.path,
        format!("{} MiB, {compression}", guest.bytes >> 20),
    )];
    found(
        seen,
        "image instead of initrd: the kernel unpacks the whole archive before the init \
         runs; or a smaller archive",
    )
    .when(guest.is_initrd)
}

pub fn firmware(facts: &HostFacts) -> Checked {
    let kata = facts.kata()?;
    let set = |key: &str| {
        kata.hypervisor(key)
            .is_some_and(|(value, _)| !value.is_empty())
    };
    let seen = vec![
        of_key(kata, "firmware"),
        of_key(kata, "confidential_guest"),
        of_key(kata, "machine_type"),
    ];
    found(
        seen,
        "firmware = \"\": OVMF enumerates PCI and maps all BARs before the kernel does so again",
    )
    .unsure()
    .when(set("firmware") && !kata.is_on("confidential_guest"))
}

pub fn hot_plug(facts: &HostFacts) -> Checked {
    let kata = facts.kata()?;
    let port = |key: &str| {
        kata.hypervisor(key)
            .map(|(value, _)| value.as_str())
            .filter(|value| !value.is_empty() && *value != "no-port")
    };
    let seen = vec![
        of_key(kata, "cold_plug_vfio"),
        of_key(kata, "hot_plug_vfio"),
    ];
    match (port("cold_plug_vfio"), port("hot_plug_vfio")) {
        (Some(_), _) => fine(seen),
        (None, Some(_)) => found(
            seen,
            "cold_plug_vfio = \"root-port\": GPUs are there when the init scans, and \
                 their BARs have room without a second assignment",
        )
        .checked(),
        (None, None) => unknown(format!(
            "{}: neither cold_plug_vfio nor hot_plug_vfio has a port",
            kata.path
        )),
    }
}

pub fn root_ports(facts: &HostFacts) -> Checked {
    let kata = facts.kata()?;
    let is_hot = kata
        .hypervisor("hot_plug_vfio")
        .is_some_and(|(value, _)| value == "root-port");
    let seen = vec![
        of_key(kata, "pcie_root_port"),
        of_key(kata, "hot_plug_vfio"),
    ];
    let ports: usize = kata
        .hypervisor("pcie_root_port")
        .and_then(|(value, _)| value.parse().ok())
        .unwrap_or(0);
    let gpus = facts.some_gpus()?.len();
    found(
        seen,
        format!("pcie_root_port = {gpus}: a GPU without a port waits, and its sandbox fails"),
    )
    .when(is_hot && ports < gpus)
}

pub fn vcpus(facts: &HostFacts) -> Checked {
    let kata = facts.kata()?;
    let seen = vec![of_key(kata, "default_vcpus")];
    match kata
        .hypervisor("default_vcpus")
        .map(|(value, _)| value.as_str())
    {
        Some("1" | "1.0") => {
            let cure = "default_vcpus = 2 or more: the enabling of a GPU occupies one, and agent \
                 and containers wait for it";
            found(seen, cure).checked()
        }
        Some(_) => fine(seen),
        None => unknown(format!("{}: default_vcpus is not set", kata.path)),
    }
}

pub fn deadlines(facts: &HostFacts) -> Checked {
    let kata = facts.kata()?;
    let boots = facts.boots.some()?;
    let mut seen = Vec::new();
    let mut is_near = false;
    for (key, what, took) in [
        (
            "agent.kata.dial_timeout",
            "until the agent answered",
            &boots.agent_ready,
        ),
        (
            "runtime.create_container_timeout",
            "until the last milestone",
            &boots.whole,
        ),
    ] {
        let Some(longest) = took.iter().max().map(|ns| *ns as f64 / 1e9) else {
            continue;
        };
        let Some((value, file)) = kata.values.get(key) else {
            continue;
        };
        let limit: f64 = value.parse().map_err(|_| Gap::unreadable(file, value))?;
        is_near |= limit > 0.0 && longest > limit * NEAR;
        seen.push(evidence(
            file,
            format!("{key} = {limit} s; longest {what} here: {longest:.1} s"),
        ));
    }
    if seen.is_empty() {
        return unknown(
            "neither dial_timeout nor create_container_timeout is set, or no boot here \
                 shows the time",
        );
    }
    found(
        seen,
        "a longer timeout: a boot over it is given up and begins again",
    )
    .when(is_near)
}
