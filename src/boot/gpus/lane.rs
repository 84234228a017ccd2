//! The enable lane: turns on one GPU's memory decoding at a time, which is when the host maps its BARs. Who is next is the schedule's.

use super::lane_cpu::{LaneCpu, Spare};
use super::late::Progress;
use super::schedule::Held;
use crate::bind::{PciSysfs, SysfsError};
use crate::clock::boottime_ns;
use crate::events::{After, Step, StepId, names};
use crate::pci::PciAddress;
use crate::step;
use nix::errno::Errno;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The lane, shared by all GPUs' tasks.
pub struct Lane {
    sysfs: PciSysfs,
    state: Mutex<State>,
}

struct State {
    /// Until the first enabling.
    spare: Option<Spare>,
    /// While GPUs are being enabled.
    cpu: Option<Arc<LaneCpu>>,
    /// What the next enabling comes after.
    after: After,
    wait: Option<Step>,
}

impl Lane {
    /// A lane whose first enabling comes after these steps. `spare`: a vCPU for it, where there is one.
    pub fn new(sysfs: PciSysfs, spare: Option<Spare>, after: After) -> Self {
        Self { sysfs, state: Mutex::new(State { spare, cpu: None, after, wait: None }) }
    }

    /// Enables a GPU; returns its step and how long that took. `holds`: what kept it waiting.
    pub async fn enable(&self, gpu: PciAddress, holds: &[Held], progress: &Arc<Progress>) -> Result<(StepId, Duration), String> {
        let cpu = self.begin(holds);
        let step = step!(names::GPU_ENABLE, gpu = %gpu, after = ?self.lock().after);
        let (id, sysfs, progress) = (step.id(), self.sysfs.clone(), Arc::clone(progress));
        let enabling = tokio::task::spawn_blocking(move || step.run(|| enable(&sysfs, gpu, cpu.as_deref(), &progress)));
        let result = enabling.await.map_err(|panicked| panicked.to_string()).and_then(|result| result.map_err(|e| e.to_string()));
        self.lock().after = After(vec![id]);
        result.map(|took| (id, took))
    }

    /// The lane waits before it enables this GPU.
    pub fn wait(&self, gpu: PciAddress) {
        let mut state = self.lock();
        let empty = tracing::field::Empty;
        let wait = step!(names::LANE_WAIT, gpu = %gpu, after = ?state.after, held_by = empty);
        state.after.0.push(wait.id());
        state.wait = Some(wait);
    }

    /// Binds a GPU that is not enabled, on the lane's vCPU; blocks until the driver's probe is over.
    pub fn bind(&self, gpu: PciAddress) -> Result<(), SysfsError> {
        let cpu = self.lock().cpu.clone();
        match cpu.and_then(|cpu| cpu.process().bind(gpu)) {
            Some(result) => result.map_err(|errno| self.sysfs.not_bound(gpu, errno)),
            None => self.sysfs.bind(gpu),
        }
    }

    /// The step of the last enabling.
    pub fn last_enabling(&self) -> Option<StepId> {
        self.lock().after.0.first().copied()
    }

    /// Gives the vCPU back: no GPU is to be enabled any more.
    pub fn over(&self) {
        let mut state = self.lock();
        drop((state.spare.take(), state.cpu.take()));
    }

    /// Keeps the driver's threads that initialise GPUs off the lane's vCPU.
    pub fn keep_driver_off(&self) {
        if let Some(cpu) = &self.lock().cpu {
            cpu.keep_driver_off();
        }
    }

    /// Ends the wait and reserves the vCPU, once.
    fn begin(&self, holds: &[Held]) -> Option<Arc<LaneCpu>> {
        let mut state = self.lock();
        if let Some(wait) = state.wait.take() {
            let parts: Vec<String> = holds.iter().map(|(hold, took)| format!("{} {} ms", hold.as_str(), took.as_millis())).collect();
            wait.note("held_by", parts.join(", ").as_str());
        }
        if let Some(spare) = state.spare.take() {
            state.cpu = Some(spare.reserve());
        }
        state.cpu.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Enables in the lane's process, or in this one where there is none.
fn enable(sysfs: &PciSysfs, gpu: PciAddress, cpu: Option<&LaneCpu>, progress: &Progress) -> Result<Duration, SysfsError> {
    if let Some(process) = cpu.map(LaneCpu::process) {
        progress.on_thread(process.pid());
        if let Some((result, took)) = process.enable(gpu) {
            return result.map(|()| took).map_err(|errno: Errno| sysfs.not_enabled(gpu, errno));
        }
    }
    progress.on_this_thread();
    let began_ns = boottime_ns();
    sysfs.enable(gpu)?;
    Ok(Duration::from_nanos(boottime_ns().saturating_sub(began_ns)))
}
