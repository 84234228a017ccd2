//! Rules about Kata's configuration: the guest's file, its console, plugging, deadlines.

use super::checked::{Checked, Gap, Look, unknown};
use super::host_facts::HostFacts;
use kata_gpu_image::kata::gpu_needs::{CDI_TIMEOUT_S, DEADLINES, Deadline, Limits, cdi_timeouts};
use kata_gpu_report::analysis::statistics::Summary;

/// Exit of a guest for one byte on an emulated serial port.
const EXIT_SECONDS: f64 = 10e-6;

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
    let plugging = kata.plugging();
    if [plugging.cold, plugging.hot] == [None; 2] {
        return unknown(format!(
            "{}: neither cold_plug_vfio nor hot_plug_vfio is set",
            kata.path
        ));
    }
    let cure = if plugging.is_closed() {
        "cold_plug_vfio = \"root-port\": without a port in one of both, no pod gets a GPU"
    } else {
        "cold_plug_vfio = \"root-port\": GPUs are there when the init scans, and \
             their BARs have room without a second assignment"
    };
    Look::from(ports.map(|key| kata.evidence(key)).to_vec())
        .cure(cure)
        .when(!plugging.is_cold())
}

pub fn root_ports(facts: &HostFacts) -> Checked {
    let kata = facts.kata()?;
    let keys = ["pcie_root_port", "hot_plug_vfio", "cold_plug_vfio"];
    let gpus = facts.some_gpus()?.len();
    Look::from(keys.map(|key| kata.evidence(key)).to_vec())
        .cure(format!(
            "pcie_root_port = {gpus}: a GPU without a port waits, and its sandbox fails"
        ))
        .when(kata.plugging().lacks_ports(gpus))
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
    let boots = &facts.boots;
    let (mut look, mut unread) = (Look::default(), None);
    let mut add = |from: &str, key: &str, limits: Limits, value: &str| {
        let Ok(seconds) = value.parse() else {
            return unread = Some(Gap::unreadable(from, value));
        };
        let took = match limits {
            Limits::Agent => &boots.agent_ready,
            Limits::Boot => &boots.up,
            Limits::Gpus => &boots.after_agent,
        };
        let deadline = Deadline {
            limits,
            seconds,
            longest: took.iter().max().map(|ns| *ns as f64 / 1e9),
        };
        if deadline.longest.is_some() || deadline.is_short() {
            look.is_bad |= deadline.is_short();
            let (seconds, longest) = (deadline.seconds, deadline.shown_longest());
            look.add(from, format!("{key} = {seconds} s{longest}"));
        }
    };
    for (key, limits) in DEADLINES {
        if let Some((value, file)) = kata.values.get(key) {
            add(file, key, limits, value);
        }
    }
    let (from, words) = guest_words(facts)?;
    let given = cdi_timeouts(words.into_iter()).next();
    let default = CDI_TIMEOUT_S.to_string();
    add(
        &from,
        "agent.cdi_timeout",
        Limits::Gpus,
        given.unwrap_or(&default),
    );
    // A value that nobody can read hides no other one that is bad.
    if let Some(gap) = unread.filter(|_| !look.is_bad) {
        return Err(gap);
    }
    if look.evidence.is_empty() {
        boots.some()?;
        return unknown("no boot here shows the times that Kata and its agent limit");
    }
    Ok(look.cure("a longer timeout: a boot over it is given up and begins again"))
}
