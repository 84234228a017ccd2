//! The enable lane: turns on one GPU's memory decoding at a time, upon which the host maps the
//! GPU's BARs. The schedule decides the order.

use super::deadlines::Limit;
use super::lane_cpu::{LaneCpu, Spare};
use super::late::Progress;
use super::schedule_messages::Held;
use crate::gpu::bind::{PciSysfs, SysfsError};
use crate::gpu::pci::SYS;
use crate::machine::clock::boottime_ns;
use crate::machine::kernel_console;
use crate::machine::kernel_console::Quiet;
use crate::machine::threads;
use crate::machine::threads::Panicked;
use crate::step;
use crate::stream::sinks::console::Gate;
use crate::stream::sinks::redirect::Redirect;
use crate::stream::{After, RunningStep, StepId};
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use nix::errno::Errno;
use nix::unistd::Pid;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Interval at which another vCPU is woken while one is gone: before it idles again, it takes over
/// tasks that wait there. Nothing else has it do so: an idle vCPU is woken for that by the tick of
/// a busy one, which is the one that is gone.
const TICK: Duration = Duration::from_millis(10);

/// The lane, shared by all GPUs' tasks.
pub struct Lane {
    sysfs: PciSysfs,
    /// Parent of the mount points of procfs, sysfs and devtmpfs.
    root: PathBuf,
    gate: Gate,
    state: Mutex<State>,
}

struct State {
    /// vCPU and process for the lane, until the first enabling.
    spare: Option<Spare>,
    /// The lane's vCPU, from the first enabling to the last.
    cpu: Option<Arc<LaneCpu>>,
    /// Steps that precede the next enabling.
    after: After,
    wait: Option<RunningStep>,
    /// GPU that was enabled last.
    last: Option<PciAddress>,
    /// Count of works under way that keep the console quiet, and the kernel's level to restore.
    enabling: u32,
    quiet: Option<Quiet>,
    /// Terminal for the agent's lines meanwhile, from the first such work to the last.
    redirect: Option<Redirect>,
}

impl Lane {
    /// A lane whose first enabling comes after these steps. `root`: parent of `proc`, `sys` and
    /// `dev`.
    pub fn new(
        sysfs: PciSysfs,
        root: &Path,
        spare: Option<Spare>,
        gate: Gate,
        after: After,
    ) -> Self {
        Self {
            sysfs,
            root: root.into(),
            gate,
            state: Mutex::new(State {
                spare,
                cpu: None,
                after,
                wait: None,
                last: None,
                enabling: 0,
                quiet: None,
                redirect: None,
            }),
        }
    }

    /// Enables a GPU; returns the step and its duration, or the kernel's refusal. `holds`: the
    /// reasons of the wait before.
    pub async fn enable(
        self: &Arc<Self>,
        gpu: PciAddress,
        holds: &[Held],
        progress: &Arc<Progress>,
    ) -> Result<Result<(StepId, Duration), SysfsError>, Panicked> {
        self.end_wait(gpu, holds);
        let (lane, progress) = (Arc::clone(self), Arc::clone(progress));
        let enabling = move || {
            let cpu = lane.reserve();
            let step = step!(names::GPU_ENABLE, gpu = %gpu, after = ?lane.lock().after);
            lane.lock().after = After(vec![step.id()]);
            (
                step.id(),
                step.run(|| enable(&lane.sysfs, gpu, cpu.as_deref(), &progress)),
            )
        };
        // The thread begins when the console is quiet.
        let enabling = async { threads::run(enabling).await };
        let (step, result) = self.quiet_while(enabling).await?;
        Ok(result.map(|took| (step, took)))
    }

    /// Keeps the console quiet during work that enables a GPU: a line on it would spin another vCPU
    /// until the host is free again. Wakes every [`TICK`]. Both are bounded: an enabling may hang.
    pub async fn quiet_while<F: Future>(&self, work: F) -> F::Output {
        let quiet = ConsoleQuiet::new(self);
        let (mut work, began) = (pin!(work), Instant::now());
        while began.elapsed() < Limit::ConsoleQuiet.after() {
            if let Ok(result) = timeout(TICK, &mut work).await {
                return result;
            }
        }
        drop(quiet);
        work.await
    }

    /// Begins the step of the wait before this GPU's enabling.
    pub fn wait(&self, gpu: PciAddress) {
        let mut state = self.lock();
        let empty = tracing::field::Empty;
        let wait = step!(names::LANE_WAIT, gpu = %gpu, after = ?state.after, held_by = empty);
        state.after.0.push(wait.id());
        state.wait = Some(wait);
    }

    /// Moves a process that will enable a GPU to the lane's vCPU: of two vCPUs that need the host
    /// at once, both would be gone.
    pub fn move_here(&self, process: Pid) {
        if let Some(cpu) = &self.lock().cpu {
            cpu.move_here(process);
        }
    }

    /// Runs work that enables a GPU by itself, on the lane's vCPU and the calling thread.
    pub fn run_there<T>(&self, work: impl FnOnce() -> T) -> T {
        match self.reserve() {
            Some(cpu) => cpu.run_there(work),
            None => work(),
        }
    }

    /// Step of the last enabling, if there was one.
    pub fn last_enabling(&self) -> Option<StepId> {
        let state = self.lock();
        state.last.and_then(|_| state.after.0.first().copied())
    }

    /// Releases the vCPU after the last enabling.
    pub fn over(&self) {
        let mut state = self.lock();
        drop((state.spare.take(), state.cpu.take()));
        if state.enabling == 0 {
            state.redirect = None;
        }
    }

    /// Keeps the driver's threads that initialise GPUs off the lane's vCPU.
    pub fn keep_driver_off(&self) {
        if let Some(cpu) = &self.lock().cpu {
            cpu.keep_driver_off();
        }
    }

    /// Ends the step of the wait for this GPU, and reports holds that reached the limit.
    fn end_wait(&self, gpu: PciAddress, holds: &[Held]) {
        let (wait, last) = {
            let mut state = self.lock();
            (state.wait.take(), state.last.replace(gpu))
        };
        if let Some(wait) = wait {
            let parts: Vec<String> = holds
                .iter()
                .map(|(hold, took)| format!("{} {} ms", hold.name(), took.as_millis()))
                .collect();
            wait.note("held_by", parts.join(", ").as_str());
        }
        let longest = Limit::LaneHold.after();
        for (hold, _) in holds.iter().filter(|(_, took)| *took >= longest) {
            let gpu = last.unwrap_or(gpu);
            let error = format!(
                "a {} of a GPU before or at {gpu} has held the next one's enabling for \
                    {longest:?}: going on without waiting for it",
                hold.name()
            );
            tracing::warn!(name: names::GPU_ENABLE, gpu = %gpu, error);
        }
    }

    /// Returns the lane's vCPU. The first call reserves it and blocks for some milliseconds.
    fn reserve(&self) -> Option<Arc<LaneCpu>> {
        // Reserve without the lock: other tasks may need it meanwhile.
        let spare = self.lock().spare.take();
        let reserved = spare.map(|spare| spare.reserve(Path::new(SYS)));
        let first = reserved.is_some();
        let cpu = {
            let mut state = self.lock();
            state.cpu = reserved.or(state.cpu.take());
            state.cpu.clone()
        };
        if let Some(cpu) = cpu.as_ref().filter(|_| !first) {
            cpu.keep_interrupts_off();
        }
        cpu
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        threads::lock(&self.state)
    }
}

/// Keeps the console silent until dropped: the kernel's lines stay in its log, the init's and the
/// agent's come afterwards.
struct ConsoleQuiet<'a>(&'a Lane);

impl<'a> ConsoleQuiet<'a> {
    fn new(lane: &'a Lane) -> Self {
        let mut state = lane.lock();
        state.enabling += 1;
        if state.enabling == 1 {
            lane.gate.hold();
            // A level that cannot be set costs a line on the console.
            state.quiet = kernel_console::quiet(&lane.root.join("proc"))
                .ok()
                .flatten();
            // So does an agent that has mounted no pseudo-terminals yet.
            let start = || Redirect::start(&lane.root, lane.gate.clone()).ok();
            state.redirect = state.redirect.take().or_else(start);
            if let Some(redirect) = &mut state.redirect {
                redirect.begin();
            }
        }
        Self(lane)
    }
}

impl Drop for ConsoleQuiet<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.enabling -= 1;
        if state.enabling == 0 {
            drop(state.quiet.take());
            if let Some(redirect) = &mut state.redirect {
                redirect.end();
            }
            self.0.gate.release();
        }
    }
}

/// Enables in the lane's process, or in this one where there is no such process.
fn enable(
    sysfs: &PciSysfs,
    gpu: PciAddress,
    cpu: Option<&LaneCpu>,
    progress: &Progress,
) -> Result<Duration, SysfsError> {
    if let Some(process) = cpu.map(LaneCpu::process) {
        if let Some(pid) = process.pid().get() {
            progress.on_thread(pid);
        }
        if let Some((result, took)) = process.enable(gpu) {
            return result
                .map(|()| took)
                .map_err(|errno: Errno| sysfs.not_enabled(gpu, errno));
        }
    }
    progress.on_this_thread();
    let began_ns = boottime_ns();
    sysfs.enable(gpu)?;
    Ok(Duration::from_nanos(boottime_ns().saturating_sub(began_ns)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use nix::sys::stat::Mode;

    #[tokio::test]
    async fn another_vcpu_is_woken_while_one_is_gone() {
        let folder = temp_dir();
        let sysfs = PciSysfs::at(folder.path());
        let lane = Lane::new(
            sysfs,
            folder.path(),
            None,
            Gate::default(),
            After::default(),
        );
        let (mut polls, began) = (0, Instant::now());
        let work = std::future::poll_fn(|_| {
            polls += 1;
            match polls {
                5 => std::task::Poll::Ready(()),
                _ => std::task::Poll::Pending,
            }
        });
        // Each wake polls twice; nothing else polls this work again. A hang ends.
        let hang = Duration::from_secs(60);
        timeout(hang, lane.quiet_while(work)).await.unwrap();
        assert!(began.elapsed() >= TICK * 2, "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn the_console_is_quiet_while_a_gpu_is_enabled() {
        let folder = temp_dir();
        let gpu: PciAddress = "0001:00:03.0".parse().unwrap();
        let function = folder.path().join(format!("bus/pci/devices/{gpu}"));
        std::fs::create_dir_all(&function).unwrap();
        let settings = folder.path().join("proc/sys/kernel");
        std::fs::create_dir_all(&settings).unwrap();
        let printk = settings.join("printk");
        std::fs::write(&printk, "7\t4\t1\t7\n").unwrap();
        // An enabling that lasts until the FIFO is read.
        let enable = function.join("enable");
        nix::unistd::mkfifo(&enable, Mode::S_IRWXU).unwrap();
        let (sysfs, gate) = (PciSysfs::at(folder.path()), Gate::default());
        let after = After::default();
        let lane = Arc::new(Lane::new(sysfs, folder.path(), None, gate.clone(), after));
        let is_quiet = || {
            let text = std::fs::read_to_string(&printk).unwrap();
            (gate.is_held(), text.starts_with("2"))
        };
        let reading = async {
            let quiet = is_quiet();
            let read = tokio::task::spawn_blocking(move || std::fs::read_to_string(&enable));
            assert_eq!(read.await.unwrap().unwrap(), "1");
            quiet
        };
        let progress = Arc::default();
        let (enabled, quiet) = tokio::join!(biased; lane.enable(gpu, &[], &progress), reading);
        assert!(matches!(enabled, Ok(Ok(_))), "not enabled");
        assert_eq!((quiet, is_quiet()), ((true, true), (false, false)));
    }
}
