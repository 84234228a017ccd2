//! Functions on the PCI bus when the bring-up starts, and the topology that follows from them.
//!
//! VPD is read here, before the lane enables a GPU, and only where the topology depends on it: a
//! read beside an enabling would wait for the host with a CPU of the guest.

use super::driver::{self, Image};
use super::previous::Previous;
use super::stock::look_again;
use crate::config::Config;
use crate::gpu::pci;
use crate::gpu::pci::{Gpu, SYS, Scan};
use crate::gpu::topology;
use crate::gpu::topology::{Decision, Facts, Functions, NVLINK_DISABLED};
use crate::gpu::vpd;
use crate::machine::{confidential, threads};
use crate::step;
use crate::stream::{After, StepId};
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::time::Instant;

/// Longest wait of the GPUs for VPD, which takes milliseconds from a sound function. A function
/// that takes longer counts as an ordinary one.
const VPD_WAIT: Duration = Duration::from_secs(2);

/// Functions of the boot scan.
pub struct Found {
    pub gpus: Vec<Gpu>,
    switches: usize,
    management: Vec<PciAddress>,
    /// The last step of the scan.
    pub step: StepId,
}

impl Found {
    pub fn functions(self) -> Functions {
        Functions {
            gpus: self.gpus.len(),
            switches: self.switches,
            management: self.management,
        }
    }
}

/// Scans the bus, and reports the number of GPUs and missing ones. An earlier worker's decision
/// spares the VPD.
pub async fn run(config: &Config, previous: Option<&Previous>, started: StepId) -> Found {
    let (scan, mut step) = scan(Path::new(SYS), config, started).await;
    let behind_network = scan
        .gpus
        .iter()
        .any(|gpu| pci::has_switches_behind_network(gpu.device));
    let decided = previous.is_some_and(|previous| previous.topology.is_some());
    let needs_vpd = topology::needs_vpd(
        scan.gpus.len(),
        scan.switches.len(),
        behind_network,
        config.topology,
    );
    let management = if decided || !needs_vpd || scan.mellanox.is_empty() {
        Vec::new()
    } else {
        let (management, read) = management(&scan.mellanox, step).await;
        step = read;
        management
    };
    Found {
        gpus: scan.gpus,
        switches: scan.switches.len(),
        management,
        step,
    }
}

async fn scan(sysfs: &Path, config: &Config, started: StepId) -> (Scan, StepId) {
    let step = step!(names::PCI_SCAN, after = ?After(vec![started]), gpus = tracing::field::Empty);
    let id = step.id();
    let is_whole =
        |scan: &io::Result<Scan>| scan.as_ref().is_ok_and(|scan| scan.unreadable.is_empty());
    let scan = match look_again(|| pci::scan(sysfs), is_whole).await {
        Ok(scan) => scan,
        Err(error) => {
            step.fail(&error);
            Scan::default()
        }
    };
    for error in &scan.unreadable {
        tracing::warn!(name: names::PCI_SCAN, error);
    }
    step.note("gpus", scan.gpus.len() as u64);
    drop(step);
    if let Some(expected) = config.expected_gpus.filter(|e| *e > scan.gpus.len()) {
        let found = scan.gpus.len();
        let error = format!(
            "gpuinit.gpus={expected}, but the guest's PCI bus has {found}: \
             look at the VM's devices on the host"
        );
        tracing::error!(name: names::PCI_SCAN, error);
    }
    (scan, id)
}

/// Functions that manage NVSwitches, by their VPD, all read at once; and the step of the reading.
async fn management(functions: &[PciAddress], scanned: StepId) -> (Vec<PciAddress>, StepId) {
    let step = step!(
        names::PCI_VPD, after = ?After(vec![scanned]), functions = functions.len() as u64,
        management = tracing::field::Empty,
    );
    let id = step.id();
    let until = Instant::now() + VPD_WAIT;
    let reading: Vec<_> = functions
        .iter()
        .copied()
        .map(|function| {
            (
                function,
                threads::run(move || vpd::read(Path::new(SYS), function)),
            )
        })
        .collect();
    let mut management = Vec::new();
    for (function, reading) in reading {
        let error = match tokio::time::timeout_at(until, reading).await {
            Ok(Ok(Ok(vpd))) => {
                management.extend(
                    vpd.filter(|vpd| vpd::manages_switches(vpd))
                        .map(|_| function),
                );
                continue;
            }
            Ok(Ok(Err(error))) => error.to_string(),
            Ok(Err(panicked)) => panicked.to_string(),
            Err(_) => format!("read the VPD of {function}: no answer for {VPD_WAIT:?}"),
        };
        let error = format!(
            "{error}: taken for an ordinary network function; gpuinit.topology=blackwell-fabric \
                if it manages NVSwitches"
        );
        tracing::warn!(name: names::PCI_VPD, function = %function, error);
    }
    step.note("management", management.len() as u64);
    (management, id)
}

/// Decides the topology, and reports it.
pub fn decide(config: &Config, image: &Image, functions: Functions) -> Decision {
    let decision = topology::decide(Facts {
        functions,
        expected_gpus: config.expected_gpus,
        confidential: confidential::is_confidential(),
        asked: config.topology,
        nvlink: config.nvlink,
        option: image.nvlink_option(),
        loaded: driver::is_in_kernel(),
    });
    report(&decision);
    decision
}

/// Reports a decision.
pub fn report(decision: &Decision) {
    let management = &decision.functions.management;
    let functions = management
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(" ");
    tracing::info!(
        name: names::TOPOLOGY,
        topology = %decision.topology,
        gpus = decision.functions.gpus as u64,
        switches = decision.functions.switches as u64,
        management = management.len() as u64,
        functions = (!functions.is_empty()).then_some(functions),
        reason = decision.reason,
        decided_by = %decision.source,
        nvlink = if decision.nvlink_disable { NVLINK_DISABLED } else { "unchanged" },
        nvlink_reason = decision.nvlink_reason,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::pci::tests::make_gpu;
    use kata_gpu_test_support::temp_dir;

    #[tokio::test]
    async fn a_gpu_that_cannot_be_read_for_a_moment_is_in_the_scan() {
        let folder = temp_dir();
        let [_, unreadable, _] = ["0001:00:03.0", "0001:00:04.0", "0001:00:05.0"]
            .map(|gpu| make_gpu(folder.path(), gpu).join("class"));
        std::fs::write(&unreadable, "").unwrap();
        assert_eq!(pci::scan(folder.path()).unwrap().unreadable.len(), 1);
        let config = Config::default();
        let scanning = scan(folder.path(), &config, StepId::next());
        let heals = async { std::fs::write(&unreadable, "0x030200").unwrap() };
        let ((scan, _), ()) = tokio::join!(biased; scanning, heals);
        assert_eq!((scan.gpus.len(), scan.unreadable.len()), (3, 0));
    }
}
