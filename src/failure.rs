//! What happens when something fails, decided in one place; and the only place that powers off.
//!
//! The rule: a guest that can still run a container runs on. One GPU's failure is never another one's, and no deadline on a GPU that is
//! still initialising ends anything: a killed attach can leave a GPU unusable until it is reset.

use crate::events::{kmsg, names};
use std::fs::OpenOptions;
use std::io::Write;

/// Everything that can go wrong in a boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A file system of `mounts::EARLY`.
    Mount,
    /// `/var/run` does not lead to `/run`.
    VarRun,
    /// A process could not be forked: no GPU will come up, but the agent runs.
    Fork,
    /// The agent's program could not be executed.
    AgentExec,
    /// The agent ended (`gpuinit.agent=child` only: otherwise it is PID 1, and the kernel panics).
    AgentEnded,
    /// The worker ended: GPUs stay as they are, the keeper holds them open.
    Worker,
    /// A kernel module could not be loaded.
    Module,
    /// A GPU could not be enabled, bound, opened or initialised.
    Gpu,
    /// The CDI spec could not be written.
    Publish,
    /// A sink cannot deliver.
    Sink,
}

/// What follows from a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consequence {
    /// It is reported; everything else goes on.
    GoOn,
    /// Nothing useful can run any more: say why, then power off.
    PowerOff,
}

/// The policy.
pub fn consequence(failure: Failure) -> Consequence {
    match failure {
        Failure::AgentExec | Failure::AgentEnded => Consequence::PowerOff,
        // The agent makes these mounts itself, and tells its own story if it cannot.
        Failure::Mount | Failure::VarRun => Consequence::GoOn,
        Failure::Fork | Failure::Worker | Failure::Module | Failure::Gpu | Failure::Publish | Failure::Sink => Consequence::GoOn,
    }
}

/// Says a sentence wherever somebody may read it when no stream is left: console and kernel log.
pub fn tell(sentence: &str) {
    let line: String = sentence.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // Both may be missing in a broken guest; there is no third place.
    let _unused = kmsg::write(3, &format!("kata-gpu-init: {line}"));
    let _unused =
        OpenOptions::new().write(true).open("/dev/console").and_then(|mut c| c.write_all(format!("kata-gpu-init: {line}\n").as_bytes()));
}

/// Ends the guest, after the reason was told. As anything but PID 1 (a test, a mistaken call on a host) it only ends the process.
pub fn power_off(reason: &str) -> ! {
    tracing::error!(name: names::POWER_OFF, error = reason);
    tell(&format!("{reason}: powering off"));
    if std::process::id() == 1 {
        nix::unistd::sync();
        // RB_POWER_OFF returns only when it is not permitted, and then there is nothing left but to end: the kernel panics.
        let _unused = nix::sys::reboot::reboot(nix::sys::reboot::RebootMode::RB_POWER_OFF);
    }
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_agents_end_ends_the_guest() {
        use Failure::*;
        let all = [Mount, VarRun, Fork, AgentExec, AgentEnded, Worker, Module, Gpu, Publish, Sink];
        let fatal: Vec<Failure> = all.into_iter().filter(|f| consequence(*f) == Consequence::PowerOff).collect();
        assert_eq!(fatal, [AgentExec, AgentEnded]);
    }
}
