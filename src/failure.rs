//! Words when no stream is left to tell, and the only place that powers off.
//!
//! The rule: a guest that can still run a container runs on. One GPU's failure is never another
//! one's, and no deadline on a GPU that is still initialising ends anything: a killed attach can
//! leave a GPU unusable until it is reset.

use crate::events::{kmsg, names};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

/// Says a sentence wherever somebody may read it when no stream is left: console and kernel log.
pub fn tell(sentence: &str) {
    let line: String = sentence.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // Both may be missing in a broken guest; there is no third place.
    let _unused = kmsg::write(3, &format!("kata-gpu-init: {line}"));
    // Not blocking: a console that nobody reads must not stop PID 1 or the keeper. Then the line is
    // lost.
    let console = OpenOptions::new().write(true).custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY).open("/dev/console");
    let _unused = console.and_then(|mut console| console.write_all(format!("kata-gpu-init: {line}\n").as_bytes()));
}

/// Right of a process that is not PID 1 to end the guest. Only PID 1 makes it, and leaves it to its
/// children by fork: no process of a host, and no test, ever has one.
#[derive(Clone, Copy, Debug)]
pub struct Heir(());

impl Heir {
    pub fn of_pid_1() -> Option<Self> {
        (std::process::id() == 1).then_some(Self(()))
    }

    /// Ends the guest in place of PID 1, which is the agent by now. The caller has told the reason.
    pub fn power_off(&self) -> ! {
        end()
    }
}

/// Ends the guest, after the reason was told. As anything but PID 1 (a test, a mistaken call on a
/// host) it only ends the process.
pub fn power_off(reason: &str) -> ! {
    tracing::error!(name: names::POWER_OFF, error = reason);
    tell(&format!("{reason}: powering off"));
    if std::process::id() == 1 {
        end()
    }
    std::process::exit(1)
}

fn end() -> ! {
    nix::unistd::sync();
    // RB_POWER_OFF returns only when it is not permitted, and then there is nothing left but to
    // end: of PID 1 the kernel panics.
    let _unused = nix::sys::reboot::reboot(nix::sys::reboot::RebootMode::RB_POWER_OFF);
    std::process::exit(1)
}
