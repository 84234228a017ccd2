//! Rules about Kata's configuration: the guest's file, its console, plugging, deadlines.

use super::checked::{Checked, Gap, Look, unknown};
use super::host_facts::HostFacts;
use kata_gpu_report::analysis::statistics::Summary;

/// Exit of a guest for one byte on an emulated serial port.
const EXIT_SECONDS: f64 = 10e-6;
/// Share of a deadline that boots may take before a slower one would be given up.
const NEAR: f64 = 0.8;

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
            let params = kata.hypervisor("kernel_params");
            let file = params.map_or(&kata.path, |(_, file)| file);
            (file.clone(), kata.value("kernel_params"))
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
    let mut look = Look::of(from, format!("agent.log={level}"));
    look.is_bad = ["debug", "trace"].contains(&level);
    if let Ok(kata) = facts.kata()
        && let Some((value, file)) = kata.values.get("agent.kata.enable_debug")
    {
        look.is_bad |= value == "true";
        look.add(file, format!("enable_debug = {value} of the agent"));
    }
    let cure =
        "remove agent.log=debug and enable_debug of [agent.kata]: each line leaves the guest";
    Ok(look.cure(cure))
}

pub fn console(facts: &HostFacts) -> Checked {
    let (from, words) = guest_words(facts)?;
    let consoles: Vec<&str> = words
        .iter()
        .filter_map(|word| word.strip_prefix("console="))
        .collect();
    let is_serial = consoles.iter().any(|console| console.starts_with("ttyS"));
    let quiet = words.contains(&"quiet");
    let look = Look::of(
        from,
        format!(
            "console={}{}",
            consoles.join(","),
            if quiet { " quiet" } else { "" }
        ),
    );
    let mut look = look.cure(
        "console=hvc0 instead of ttyS0, or quiet: each byte on an emulated serial port is an exit",
    );
    if let Some(bytes) = Summary::of(&facts.boots.console_bytes) {
        let of = format!(
            "10 us an exit, {} bytes of console in the median boot here",
            bytes.median_ns
        );
        look = look.model(bytes.median_ns as f64 * EXIT_SECONDS, of);
    }
    look.when(is_serial)
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
    Look::of(
        &guest.path,
        format!("{} MiB, {compression}", guest.bytes >> 20),
    )
    .cure(
        "image instead of initrd: the kernel unpacks the whole archive before the init \
         runs; or a smaller archive",
    )
    .when(guest.is_initrd)
}

pub fn firmware(facts: &HostFacts) -> Checked {
    let kata = facts.kata()?;
    let keys = ["firmware", "confidential_guest", "machine_type"];
    Look::from(keys.map(|key| kata.evidence(key)).to_vec())
        .cure(
            "firmware = \"\": OVMF enumerates PCI and maps all BARs before the kernel does so \
             again",
        )
        .unsure()
        .when(!kata.value("firmware").is_empty() && !kata.is_on("confidential_guest"))
}

pub fn hot_plug(facts: &HostFacts) -> Checked {
    let kata = facts.kata()?;
    let ports = ["cold_plug_vfio", "hot_plug_vfio"];
    let [cold, hot] = ports.map(|key| !["", "no-port"].contains(&kata.value(key)));
    if !cold && !hot {
        return unknown(format!(
            "{}: neither cold_plug_vfio nor hot_plug_vfio has a port",
            kata.path
        ));
    }
    Look::from(ports.map(|key| kata.evidence(key)).to_vec())
        .cure(
            "cold_plug_vfio = \"root-port\": GPUs are there when the init scans, and \
             their BARs have room without a second assignment",
        )
        .when(!cold)
}

pub fn root_ports(facts: &HostFacts) -> Checked {
    let kata = facts.kata()?;
    let keys = ["pcie_root_port", "hot_plug_vfio"];
    let ports: usize = kata.value("pcie_root_port").parse().unwrap_or(0);
    let gpus = facts.some_gpus()?.len();
    Look::from(keys.map(|key| kata.evidence(key)).to_vec())
        .cure(format!(
            "pcie_root_port = {gpus}: a GPU without a port waits, and its sandbox fails"
        ))
        .when(kata.value("hot_plug_vfio") == "root-port" && ports < gpus)
}

pub fn vcpus(facts: &HostFacts) -> Checked {
    let kata = facts.kata()?;
    let Some((cpus, _)) = kata.hypervisor("default_vcpus") else {
        return unknown(format!("{}: default_vcpus is not set", kata.path));
    };
    Look::from(vec![kata.evidence("default_vcpus")])
        .cure(
            "default_vcpus = 2 or more: the enabling of a GPU occupies one, and agent \
             and containers wait for it",
        )
        .when(["1", "1.0"].contains(&cpus.as_str()))
}

pub fn deadlines(facts: &HostFacts) -> Checked {
    let kata = facts.kata()?;
    let boots = facts.boots.some()?;
    let mut look = Look::default();
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
        look.is_bad |= limit > 0.0 && longest > limit * NEAR;
        look.add(
            file,
            format!("{key} = {limit} s; longest {what} here: {longest:.1} s"),
        );
    }
    if look.evidence.is_empty() {
        return unknown(
            "neither dial_timeout nor create_container_timeout is set, or no boot here \
                 shows the time",
        );
    }
    Ok(look.cure("a longer timeout: a boot over it is given up and begins again"))
}
