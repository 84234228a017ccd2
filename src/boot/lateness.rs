//! Reports of GPUs that take long: after 10, 30 and 60 s, then every minute, with the step and what the kernel is doing for it. Nothing is ended by
//! a report.

use crate::events::names;
use crate::pci::PciAddress;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::AbortHandle;

/// When a GPU that is not settled is reported: after these, then every [`REPORT_EVERY`].
const REPORTS: [Duration; 3] = [Duration::from_secs(10), Duration::from_secs(30), Duration::from_secs(60)];
const REPORT_EVERY: Duration = Duration::from_secs(60);
/// The driver's kernel threads that initialise adapters, as the kernel shows their names.
pub const OPEN_THREAD: &str = "nv_open_q";
/// Frames of a stack that are told.
const FRAMES: usize = 8;

/// Where a GPU is: the step, and the thread that is in the kernel for it.
pub struct Progress {
    step: Mutex<&'static str>,
    /// 0: none of ours.
    thread: AtomicI32,
}

impl Progress {
    pub fn new(step: &'static str) -> Arc<Self> {
        Arc::new(Self { step: Mutex::new(step), thread: AtomicI32::new(0) })
    }

    pub fn step(&self, step: &'static str) {
        *self.step.lock().unwrap_or_else(PoisonError::into_inner) = step;
        self.thread.store(0, Ordering::Relaxed);
    }

    /// The calling thread is the one that waits for this step.
    pub fn on_this_thread(&self) {
        self.on_thread(nix::unistd::gettid());
    }

    /// The thread that waits for this step, of whichever process.
    pub fn on_thread(&self, thread: nix::unistd::Pid) {
        self.thread.store(thread.as_raw(), Ordering::Relaxed);
    }
}

/// Reports until it is dropped.
pub struct Watchdog(AbortHandle);

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts to watch; must be called inside the runtime.
pub fn watch(gpu: PciAddress, progress: Arc<Progress>) -> Watchdog {
    Watchdog(tokio::spawn(report(gpu, progress)).abort_handle())
}

async fn report(gpu: PciAddress, progress: Arc<Progress>) {
    let started = tokio::time::Instant::now();
    let mut deadline = REPORTS.into_iter();
    let mut last = Duration::ZERO;
    loop {
        last = deadline.next().unwrap_or(last + REPORT_EVERY);
        tokio::time::sleep_until(started + last).await; // a deadline, on nobody's path
        let step = *progress.step.lock().unwrap_or_else(PoisonError::into_inner);
        let stack = stack(Path::new("/proc"), progress.thread.load(Ordering::Relaxed));
        tracing::warn!(name: names::GPU_LATE, gpu = %gpu, step, waited_ms = last.as_millis() as u64, stack);
    }
}

/// What the kernel is doing: the stack of our thread, and those of the driver's threads that are initialising. Empty where the kernel does not tell.
fn stack(proc: &Path, thread: i32) -> String {
    let mut stacks = Vec::new();
    if thread != 0
        && let Ok(text) = std::fs::read_to_string(proc.join(format!("{thread}/stack")))
    {
        stacks.extend(frames(&text));
    }
    for entry in std::fs::read_dir(proc).into_iter().flatten().flatten() {
        let process = entry.path();
        let is_open_thread = std::fs::read_to_string(process.join("comm")).is_ok_and(|comm| comm.starts_with(OPEN_THREAD));
        if is_open_thread && let Some(frames) = std::fs::read_to_string(process.join("stack")).ok().as_deref().and_then(frames) {
            // One that waits for work initialises nothing.
            if !is_idle(&frames) {
                stacks.push(format!("{OPEN_THREAD}: {frames}"));
            }
        }
    }
    stacks.join("; ")
}

/// Whether a kernel thread is in its own loop and nowhere else.
fn is_idle(frames: &str) -> bool {
    const LOOP: &[&str] = &["_main_loop", "kthread_worker_fn", "kthread", "ret_from_fork", "ret_from_fork_asm"];
    frames.split(" < ").all(|frame| LOOP.contains(&frame))
}

/// The functions of a stack, innermost first. None for a text without any.
fn frames(text: &str) -> Option<String> {
    let names: Vec<&str> = text
        .lines()
        // "[<0>] nv_open_gpu+0x12/0x340 [nvidia]"
        .filter_map(|line| line.split_whitespace().nth(1))
        .map(|frame| frame.split('+').next().unwrap_or(frame))
        .take(FRAMES)
        .collect();
    (!names.is_empty()).then(|| names.join(" < "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_is_told_by_its_functions_innermost_first() {
        let text = "[<0>] msleep+0x29/0x40\n[<0>] nv_probe+0xf1/0x260 [nvidia]\n[<0>] local_pci_probe+0x3e/0x80\n";
        assert_eq!(frames(text).as_deref(), Some("msleep < nv_probe < local_pci_probe"));
        assert_eq!(frames(""), None);
        assert!(is_idle("_main_loop < kthread < ret_from_fork") && !is_idle("msleep < nv_open_work < kthread_worker_fn < kthread"));
        assert_eq!(frames(&text.repeat(9)).map(|f| f.matches(" < ").count()), Some(FRAMES - 1));
    }
}
