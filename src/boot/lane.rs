//! The enable lane: one GPU at a time, in PCI order, has its memory decoding switched on, which is when the host maps its BARs. With a plain module
//! load there is no lane: the driver's probe enables.

use super::batch::Batches;
use super::busy::{Activity, Busy};
use super::lane_cpu::LaneCpu;
use super::lateness::{self, Progress, Watchdog};
use super::strategy::{SLOW_ENABLE, lane_waits};
use crate::bind::PciSysfs;
use crate::config::Bind;
use crate::events::{After, StepId, names};
use crate::pci::{Gpu, PciAddress};
use crate::step;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A GPU's turn in the lane: the step in which the host mapped its BARs. Where that takes long, the lane waits while anybody holds it: with this, the
/// GPU's own task does.
pub type Turn = oneshot::Receiver<Result<(StepId, Busy), String>>;

/// A GPU that is being enabled, on a thread of its own.
pub struct Enabling {
    gpu: PciAddress,
    step: StepId,
    started: Instant,
    result: JoinHandle<Result<StepId, String>>,
    _watchdog: Watchdog,
}

impl Enabling {
    /// Starts; must be called inside the runtime.
    pub fn start(sysfs: &PciSysfs, gpu: PciAddress, after: &After, cpu: Option<Arc<LaneCpu>>) -> Self {
        let (step, sysfs, progress) = (step!(names::GPU_ENABLE, gpu = %gpu, after = ?after), sysfs.clone(), Progress::new("enable"));
        let id = step.id();
        let watchdog = lateness::watch(gpu, progress.clone());
        let result = tokio::task::spawn_blocking(move || {
            let enable = || match &cpu {
                Some(cpu) => {
                    progress.on_thread(cpu.process().pid());
                    match cpu.process().enable(gpu) {
                        Some(result) => result.map_err(|errno| sysfs.not_enabled(gpu, errno)),
                        None => sysfs.enable(gpu),
                    }
                }
                None => {
                    progress.on_thread(nix::unistd::gettid());
                    sysfs.enable(gpu)
                }
            };
            step.run(enable).map(|()| id).map_err(|e| e.to_string())
        });
        Self { gpu, step: id, started: Instant::now(), result, _watchdog: watchdog }
    }

    /// How long it takes, and whether that is slow: known when it is over, or when it has taken as long as a slow one.
    pub async fn measure(&mut self) -> (Duration, bool) {
        let over = tokio::time::timeout(SLOW_ENABLE, &mut self.result).await;
        let took = self.started.elapsed();
        if let Ok(result) = over {
            // Awaited once, and wanted again.
            self.result = tokio::spawn(std::future::ready(result.unwrap_or_else(|panicked| Err(panicked.to_string()))));
        }
        (took, took >= SLOW_ENABLE)
    }

    pub fn step(&self) -> StepId {
        self.step
    }

    async fn end(self) -> Result<StepId, String> {
        self.result.await.unwrap_or_else(|panicked| Err(panicked.to_string()))
    }
}

struct Waiting {
    gpu: PciAddress,
    enabled: oneshot::Sender<Result<(StepId, Busy), String>>,
}

/// What the lane has to do with the GPUs' tasks.
pub struct Traffic {
    /// Who keeps it from enabling the next GPU.
    pub held: Arc<Activity>,
    /// It is at this while it enables one.
    pub enabling: Arc<Activity>,
    /// It tells them when it is over.
    pub batches: Arc<Batches>,
}

/// Starts the lane; must be called inside the runtime. One turn for each GPU, in their order. `first` is the first GPU's enabling where that has been
/// started already.
pub fn start(
    bind: Bind,
    sysfs: &PciSysfs,
    gpus: &[Gpu],
    first: Option<Enabling>,
    cpu: Option<Arc<LaneCpu>>,
    traffic: Traffic,
) -> Vec<Option<Turn>> {
    if bind == Bind::Insmod {
        return gpus.iter().map(|_| None).collect();
    }
    let (mut waiting, mut turns) = (Vec::new(), Vec::new());
    for gpu in gpus {
        let (enabled, turn) = oneshot::channel();
        waiting.push(Waiting { gpu: gpu.address, enabled });
        turns.push(Some(turn));
    }
    traffic.batches.lane(!waiting.is_empty());
    tokio::spawn(run(sysfs.clone(), waiting, first, cpu, traffic));
    turns
}

/// For how long the lane may be held. What holds it takes a good part of a second; a GPU that hangs, or is lost, would hold it for ever.
pub const LONGEST_HOLD: Duration = Duration::from_secs(10);

/// Keeps the vCPU until the last one is enabled.
async fn run(sysfs: PciSysfs, waiting: Vec<Waiting>, mut first: Option<Enabling>, cpu: Option<Arc<LaneCpu>>, traffic: Traffic) {
    let (mut before, mut hanging) = (After::default(), 0);
    let mut waiting = waiting.into_iter().peekable();
    while let Some(Waiting { gpu, enabled }) = waiting.next() {
        let at_it = traffic.enabling.begin();
        let enabling = first.take_if(|e| e.gpu == gpu).unwrap_or_else(|| Enabling::start(&sysfs, gpu, &before, cpu.clone()));
        before = After(vec![enabling.step]);
        let started = enabling.started;
        // The GPU's task is gone only when the GPU is, or the whole runtime.
        let _unused = enabled.send(enabling.end().await.map(|step| (step, traffic.held.begin())));
        drop(at_it);
        if waiting.peek().is_some() && lane_waits(started.elapsed()) {
            let wait = step!(names::LANE_WAIT, gpu = %gpu, after = ?before);
            if tokio::time::timeout(LONGEST_HOLD, traffic.held.at_most(hanging)).await.is_err() {
                // Waited for once, not once for each GPU that is still to be enabled.
                hanging = traffic.held.count();
                let error = format!(
                    "a GPU before or at {gpu} has held the next one's enabling for {LONGEST_HOLD:?}: going on without waiting for it"
                );
                tracing::warn!(name: names::GPU_ENABLE, gpu = %gpu, error);
            }
            before.0.push(wait.id());
        }
    }
    drop(cpu);
    traffic.batches.lane(false);
}
