//! The yardstick of the benchmarks: an init that only mounts what a guest needs, reopens the
//! console and becomes the agent.

use crate::hardware::kmsg;
use kata_gpu_init::machine::{clock, mounts};
use std::ffi::CStr;
use std::fs::OpenOptions;
use std::os::fd::OwnedFd;

const AGENT: &CStr = c"/usr/bin/kata-agent";

pub fn run() -> ! {
    let start = clock::boottime_ns();
    let _unused = mounts::make(mounts::EARLY);
    reopen_console();
    kmsg(&format!("minimal-init: start {start}"));
    kmsg(&format!("minimal-init: exec {}", clock::boottime_ns()));
    become_agent()
}

/// An initrd does not get devtmpfs from the kernel: what was opened before it was mounted is no
/// console.
pub fn reopen_console() {
    if let Ok(console) = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/console")
    {
        let console: OwnedFd = console.into();
        let _unused = nix::unistd::dup2_stdin(&console)
            .and_then(|()| nix::unistd::dup2_stdout(&console))
            .and_then(|()| nix::unistd::dup2_stderr(&console));
    }
}

/// Executes the agent, with the signal mask as it is.
pub fn become_agent() -> ! {
    let error = nix::unistd::execv::<std::ffi::CString>(AGENT, &[AGENT.into()]).err();
    println!("execute {AGENT:?}: {error:?}");
    std::process::exit(1)
}
