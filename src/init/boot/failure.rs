//! Messages for the time when no stream is left, and the only place that powers off.
//!
//! The rule: a guest that can still run a container runs on. One GPU's failure never affects
//! another, and no deadline on a GPU that is still initialising ends anything: a killed attach can
//! leave a GPU unusable until it is reset.

use crate::machine::kernel_log;
use kata_gpu_wire::names;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

/// Prints a sentence on the console and in the kernel log, for the time when no stream is left.
pub fn report(sentence: &str) {
    let line = sentence.replace(char::is_control, " ");
    // Both may be missing in a broken guest; there is no third place.
    // An alert: the kernel's console takes no less while a GPU is enabled.
    let _unused = kernel_log::write(1, &format!("kata-gpu-init: {line}"));
    // Not blocking: a console without a reader must not stop PID 1 or the keeper. The line is then
    // lost.
    let console = OpenOptions::new()
        .write(true)
        .custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY)
        .open("/dev/console");
    let _unused = console
        .and_then(|mut console| console.write_all(format!("kata-gpu-init: {line}\n").as_bytes()));
}

/// Right of a process that is not PID 1 to end the guest. Only PID 1 makes it, and children inherit
/// it by fork: no process of a host, and no test, ever has one.
#[derive(Clone, Copy, Debug)]
pub struct PowerOffRight(());

impl PowerOffRight {
    pub fn of_pid_1() -> Option<Self> {
        (std::process::id() == 1).then_some(Self(()))
    }

    /// Ends the guest in place of PID 1, which is the agent by now. The caller has logged why.
    pub fn power_off(&self) -> ! {
        end()
    }
}

/// Reports the reason and ends the guest. Outside PID 1 (a test, a mistaken call on a host) only
/// the process ends.
pub fn power_off(reason: &str) -> ! {
    tracing::error!(name: names::POWER_OFF, error = reason);
    report(&format!("{reason}: powering off"));
    if std::process::id() == 1 {
        end()
    }
    std::process::exit(1)
}

fn end() -> ! {
    nix::unistd::sync();
    // RB_POWER_OFF returns only without permission. Then exit: the kernel panics if PID 1 does.
    let _unused = nix::sys::reboot::reboot(nix::sys::reboot::RebootMode::RB_POWER_OFF);
    std::process::exit(1)
}
