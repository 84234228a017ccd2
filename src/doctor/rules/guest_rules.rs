//! Rules about guests, by what their own streams show in the boots of this host.

use super::checked::{Basis, Checked, Gap, Look, unknown};
use super::host_facts::{HostFacts, MajorMinor};
use super::own_boots::{CLOCKSOURCE, CONFIDENTIAL, KERNEL, UNPACKED};
use kata_gpu_report::analysis::statistics::Summary;
use kata_gpu_wire::catalogue::derived;
use kata_gpu_wire::names;

/// Linux with huge pfnmaps.
const HUGE_PFNMAPS: MajorMinor = MajorMinor(6, 12);
/// One access to a function's configuration, which leaves the guest.
const ACCESS_SECONDS: f64 = 10e-6;
/// Enumeration from here on is worth a look.
const LONG_PCI_SECONDS: f64 = 0.1;
/// Time without an explanation from here on is worth a look.
const LONG_GAP_SECONDS: f64 = 1.0;
/// A confidential guest of 800 GiB takes 4 minutes to accept its memory.
const ACCEPT_SECONDS_PER_BYTE: f64 = 240.0 / (800u64 << 30) as f64;

/// All values of a fact; a gap where no boot has it.
fn values<'a>(facts: &'a HostFacts, fact: &str) -> Result<Vec<(&'a str, usize)>, Gap> {
    let values = facts.boots.some()?.values(fact);
    if values.is_empty() {
        unknown(format!("no boot here has a record about it ({fact})"))
    } else {
        Ok(values)
    }
}

fn listed(values: &[(&str, usize)]) -> String {
    values
        .iter()
        .map(|(value, boots)| format!("{value} in {boots} boot(s)"))
        .collect::<Vec<_>>()
        .join(", ")
}

pub fn kernel(facts: &HostFacts) -> Checked {
    let values = values(facts, KERNEL)?;
    let is_old =
        |release: &str| MajorMinor::parse(release).is_none_or(|version| version < HUGE_PFNMAPS);
    Look::of("kernel of guests", listed(&values))
        .cure("a guest kernel from 6.12 on: huge pfnmaps are needed in host and guest")
        .unsure()
        .when(values.iter().any(|(release, _)| is_old(release)))
}

pub fn pci(facts: &HostFacts) -> Checked {
    facts.boots.some()?;
    let Some(seconds) = facts.boots.median(derived::KERNEL_PCI) else {
        return unknown("no boot here has the kernel's lines of PCI enumeration");
    };
    Look::of(
        derived::KERNEL_PCI,
        format!(
            "median {seconds:.3} s, as long as {:.0} config accesses of 10 us",
            seconds / ACCESS_SECONDS
        ),
    )
    .cure(
        "fewer root ports and buses (pcie_root_port), and a guest kernel that reaches \
         configuration space by MMIO (q35)",
    )
    .unsure()
    .when(seconds >= LONG_PCI_SECONDS)
}

pub fn modules(facts: &HostFacts) -> Checked {
    // A module that needed no unpacking has no field: only the load itself shows that it was seen.
    facts.boots.some()?;
    let unpacked = facts.boots.values(UNPACKED);
    if facts.boots.median(names::MODULE_LOAD).is_none() {
        return unknown("no boot here has the load of a module");
    }
    let shown = match unpacked.is_empty() {
        true => "no module was unpacked by the init".into(),
        false => listed(&unpacked),
    };
    Look::of(names::MODULE_LOAD, shown)
        .cure(
            "modules without compression in the image, or a guest kernel with \
             CONFIG_MODULE_DECOMPRESS",
        )
        .when(!unpacked.is_empty())
}

pub fn firmware(_: &HostFacts) -> Checked {
    unknown("no record of the stream has the load of the GPU's firmware: it lies inside gpu.init")
}

pub fn acceptance(facts: &HostFacts) -> Checked {
    let values = values(facts, CONFIDENTIAL)?;
    let mut look = Look::of("confidential guests", listed(&values))
        .cure(
            "accept_memory=lazy in the guest (its default), and no more memory than the pod needs",
        )
        .unsure();
    if let Ok((bytes, _)) = facts.guest_memory() {
        look = look.model(
            bytes as f64 * ACCEPT_SECONDS_PER_BYTE,
            "about 4 minutes for 800 GiB",
        );
    }
    look.when(values.iter().any(|(value, _)| *value == "true"))
}

pub fn clocksource(facts: &HostFacts) -> Checked {
    let values = values(facts, CLOCKSOURCE)?;
    let is_slow = |name: &str| {
        ![
            "tsc",
            "kvm-clock",
            "arch_sys_counter",
            "hyperv_clocksource_tsc_page",
        ]
        .contains(&name)
    };
    Look::of("clocksource of guests", listed(&values))
        .cure(
            "kvm-clock or tsc: each look at the clock leaves the guest (cpu_features of the \
         configuration, invtsc)",
        )
        .when(values.iter().any(|(name, _)| is_slow(name)))
}

pub fn gaps(facts: &HostFacts) -> Checked {
    let boots = facts.boots.some()?;
    let Some(gaps) = Summary::of(&boots.unexplained) else {
        return unknown("no boot here has two milestones");
    };
    let seconds = gaps.median_ns as f64 / 1e9;
    Look::of(
        "time that no step explains",
        format!("median {seconds:.3} s"),
    )
    .cure(
        "kata-gpu-boot show BOOT --by gap names the gaps; the console's log next to the \
         boot's file fills them",
    )
    .cost(
        seconds,
        Basis::Measured(format!("coverage, median of {} boot(s) here", boots.count)),
    )
    .when(seconds >= LONG_GAP_SECONDS)
}
