//! The enable lane: one GPU at a time, in PCI order, has its memory decoding switched on, which is when the host maps its BARs. With a plain module
//! load there is no lane: the driver's probe enables.

use super::lateness::{self, Progress};
use super::strategy::lane_waits;
use crate::bind::PciSysfs;
use crate::config::Bind;
use crate::events::{After, StepId, names};
use crate::pci::{Gpu, PciAddress};
use crate::step;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// A GPU's place in the lane.
pub struct Turn {
    /// The step in which the host mapped its BARs.
    pub enabled: oneshot::Receiver<Result<StepId, String>>,
    /// Dropped when the GPU is published, or has failed.
    pub over: oneshot::Sender<()>,
}

struct Waiting {
    gpu: PciAddress,
    enabled: oneshot::Sender<Result<StepId, String>>,
    is_over: oneshot::Receiver<()>,
}

/// Starts the lane; must be called inside the runtime. Calls `measured` with what the first GPU took, or None when there is no lane. One turn for
/// each GPU, in their order.
pub fn start(bind: Bind, sysfs: &PciSysfs, gpus: &[Gpu], measured: impl FnOnce(Option<Duration>) + Send + 'static) -> Vec<Option<Turn>> {
    if bind == Bind::Insmod || gpus.is_empty() {
        measured(None);
        return gpus.iter().map(|_| None).collect();
    }
    let (mut waiting, mut turns) = (Vec::new(), Vec::new());
    for gpu in gpus {
        let ((enabled, receiver), (over, is_over)) = (oneshot::channel(), oneshot::channel());
        waiting.push(Waiting { gpu: gpu.address, enabled, is_over });
        turns.push(Some(Turn { enabled: receiver, over }));
    }
    tokio::spawn(run(bind, sysfs.clone(), waiting, measured));
    turns
}

async fn run(bind: Bind, sysfs: PciSysfs, waiting: Vec<Waiting>, measured: impl FnOnce(Option<Duration>)) {
    let mut before = After::default();
    let (mut measured, mut waits) = (Some(measured), false);
    for Waiting { gpu, enabled, is_over } in waiting {
        let (step, sysfs) = (step!(names::GPU_ENABLE, gpu = %gpu, after = ?before), sysfs.clone());
        let id = step.id();
        before = After(vec![id]);
        let progress = Progress::new("enable");
        let watchdog = lateness::watch(gpu, progress.clone());
        let started = Instant::now();
        let enabling = tokio::task::spawn_blocking(move || {
            progress.on_this_thread();
            step.run(|| sysfs.enable(gpu)).map(|()| id).map_err(|e| e.to_string())
        });
        let result = enabling.await.unwrap_or_else(|panicked| Err(panicked.to_string()));
        drop(watchdog);
        // The GPU's task is gone only when the GPU is, or the whole runtime.
        let _unused = enabled.send(result);
        if let Some(measured) = measured.take() {
            waits = lane_waits(bind, started.elapsed());
            measured(Some(started.elapsed()));
        }
        if waits {
            // The sender is never used, only dropped: that is the sign.
            let _over = is_over.await;
        }
    }
}
