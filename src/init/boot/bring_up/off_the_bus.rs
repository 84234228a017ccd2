//! Xid 79: the driver reports that a GPU has fallen off the bus. A line of a log is a claim, and
//! takes no GPU from containers: the GPU fails if it does not answer itself.
//!
//! A GPU that is gone reads all ones. Of config space, class and revision are read: VFIO answers
//! vendor and device id from its own copy (vfio_pci_config.c: virtualised), whatever the GPU does.
//! The read is one access, waits for nothing of the driver's, and can wait for the host while that
//! maps a BAR; hence a thread of its own, with a limit.

use super::failed::Failed;
use super::schedule_messages::GpuId;
use super::shared::Shared;
use crate::machine::threads;
use kata_gpu_wire::failure::{FailedStep, Reason};
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use std::sync::Arc;
use std::time::Duration;

/// Number of the error.
pub const XID: u32 = 79;
/// Limit of the check: several enablings of the slowest kind known (3.7 s). A GPU that was not read
/// by then stays.
const LIMIT: Duration = Duration::from_secs(15);

/// Reports that error of a GPU, which fails if it does not answer.
pub async fn heed(shared: Arc<Shared>, gpu: GpuId) {
    // One thread at most is lost to a GPU whose reads never end.
    if !shared.seen.set_checked(gpu, true) {
        return report_xid(gpu.address, XID, None);
    }
    let (sysfs, seen) = (shared.sysfs.clone(), Arc::clone(&shared));
    let checking = threads::run(move || {
        let answers = sysfs.answers(gpu.address);
        seen.seen.set_checked(gpu, false);
        answers
    });
    let answers = match tokio::time::timeout(LIMIT, checking).await {
        Ok(Ok(Ok(answers))) => Some(answers),
        // Too late, a panic (reported by its hook), or unreadable: nothing is known.
        Err(_) | Ok(Err(_) | Ok(Err(_))) => None,
    };
    report_xid(gpu.address, XID, answers);
    if answers != Some(false) {
        return;
    }
    // Noted first: the GPU's own task looks when it has reported the GPU as usable.
    shared.seen.set_off_the_bus(gpu);
    if shared.dispatch.is_usable(gpu) {
        shared.give_up(gpu, 0, failure()).await;
    }
}

/// Reports an error that the driver reports; `answers`: whether the GPU does, where it was read.
pub fn report_xid(gpu: PciAddress, number: u32, answers: Option<bool>) {
    let checked = match answers {
        Some(true) => ", whose config space answers: it stays",
        Some(false) => ", whose config space reads all ones",
        None => "",
    };
    let error = format!("the driver reports Xid {number} of GPU {gpu}{checked}");
    tracing::error!(name: names::GPU_XID, gpu = %gpu, xid = u64::from(number), answers, error);
}

/// The failure of a GPU that was usable.
pub fn failure() -> Failed {
    Failed::new(
        FailedStep::Running,
        Some(Reason::OffTheBus),
        "Xid 79: it was usable, and has fallen off the bus: its config space (class and revision) \
            reads all ones"
            .into(),
    )
}
