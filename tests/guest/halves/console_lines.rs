//! Lines for the console while a GPU is enabled: one as the agent writes its own, and one to the
//! device under its own name, which nothing redirects.

use super::guest::{on_first_cpu, wait_for, wait_for_begin};
use crate::agent::log;
use kata_gpu_init::machine::clock::boottime_ns;
use kata_gpu_wire::names;
use nix::unistd::dup2_stdout;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;

/// Message of the line about each write, once all GPUs are settled: `to`, and its begin and end in
/// ns of the boot clock.
pub const MESSAGE: &str = "line written";
/// Values of `to`; each line has its own.
pub const AGENTS: &str = "as the agent";
pub const DEVICES: &str = "to the device";

/// Writes both lines in the first enabling.
pub fn run() {
    on_first_cpu();
    let device = device();
    wait_for_begin(names::GPU_ENABLE);
    let agents = timed(|| writeln!(io::stdout().lock(), "a line written {AGENTS}"));
    let devices = timed(|| writeln!(&device?, "a line written {DEVICES}"));
    wait_for(names::SETTLED);
    for (to, (from_ns, to_ns, error)) in [(AGENTS, agents), (DEVICES, devices)] {
        let (from_ns, to_ns) = (from_ns.to_string(), to_ns.to_string());
        let times = [("from_ns", from_ns.as_str()), ("to_ns", to_ns.as_str())];
        let [from, until] = times;
        log::info(MESSAGE, &[("to", to), from, until, ("error", &error)]);
    }
}

fn timed(write: impl FnOnce() -> io::Result<()>) -> (u64, u64, String) {
    let from_ns = boottime_ns();
    let error = write().err().map(|error| error.to_string());
    (from_ns, boottime_ns(), error.unwrap_or_default())
}

/// The console's device.
fn device() -> io::Result<File> {
    let active = std::fs::read_to_string("/sys/class/tty/console/active")?;
    let name = active.split_ascii_whitespace().last();
    let name = name.ok_or_else(|| io::Error::other("no console is active"))?;
    OpenOptions::new()
        .write(true)
        .custom_flags(nix::libc::O_NOCTTY)
        .open(format!("/dev/{name}"))
}

/// From now on this process writes its lines to the console's device.
pub fn write_to_device() {
    let replaced = device().and_then(|device| Ok(dup2_stdout(device)?));
    if let Err(error) = replaced {
        log::error("console's device", &[("error", &error.to_string())]);
    }
}
