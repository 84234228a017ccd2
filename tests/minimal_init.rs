//! The yardstick of the benchmarks: an init that only mounts what a guest needs, reopens the console and becomes the agent.

use kata_gpu_init::{clock, mounts};
use std::fs::OpenOptions;
use std::os::fd::OwnedFd;

pub fn run() -> ! {
    let start = clock::boottime_ns();
    let _unused = mounts::make(mounts::EARLY);
    if let Ok(console) = OpenOptions::new().read(true).write(true).open("/dev/console") {
        let console: OwnedFd = console.into();
        let _unused = nix::unistd::dup2_stdin(&console)
            .and_then(|()| nix::unistd::dup2_stdout(&console))
            .and_then(|()| nix::unistd::dup2_stderr(&console));
    }
    let _unused = std::fs::write("/dev/kmsg", format!("<6>minimal-init: start {start}\n"));
    let _unused = std::fs::write("/dev/kmsg", format!("<6>minimal-init: exec {}\n", clock::boottime_ns()));
    let error = nix::unistd::execv::<std::ffi::CString>(c"/usr/bin/kata-agent", &[c"/usr/bin/kata-agent".into()]);
    println!("minimal-init: execute /usr/bin/kata-agent: {error:?}");
    std::process::exit(1)
}
