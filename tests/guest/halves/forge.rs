//! Words of the driver that are not the driver's: what a container can bring into the kernel's log
//! and onto the console.

use crate::agent::children::start_watched;
use crate::sys;
use nix::unistd::{Gid, Uid, setgid, setuid};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Name that the program is started under.
pub const NAME: &str = "forger";
/// Name of its thread: as long as one can be.
const COMM: &std::ffi::CStr = c"NVRM: Xid (PCI:";
/// Nobody's, of no group.
const NOBODY: u32 = 65534;
/// Folder of the program, whose file name goes on where the thread's name ends.
const FOLDER: &str = "/forge";
/// Has the kernel log what dies of a signal; on by default on x86-64 only.
const EXCEPTION_TRACE: &str = "/proc/sys/debug/exception-trace";

/// Dies without privileges and without a GPU, so that the kernel logs
/// `NVRM: Xid (PCI:[PID]: segfault at .. in FILE[..]`.
pub fn run() {
    setgid(Gid::from_raw(NOBODY)).expect("setgid");
    setuid(Uid::from_raw(NOBODY)).expect("setuid");
    nix::sys::prctl::set_name(COMM).expect("set the thread's name");
    sys::fault();
}

/// Starts that program for the GPU at an address; returns its pid.
pub fn start(gpu: &str) -> Result<u32, String> {
    let device = gpu.strip_suffix(".0").unwrap_or(gpu);
    let file = Path::new(FOLDER).join(format!("{device}): 79, "));
    std::fs::write(EXCEPTION_TRACE, "1").map_err(|e| format!("write {EXCEPTION_TRACE}: {e}"))?;
    std::fs::create_dir_all(FOLDER).map_err(|e| format!("make {FOLDER}: {e}"))?;
    std::fs::copy("/proc/self/exe", &file).map_err(|e| format!("copy: {e}"))?;
    start_watched(Command::new(&file).arg0(NAME)).map_err(|e| format!("run {file:?}: {e}"))
}

/// Prints a line as a container's program can, into the kernel's log and onto the console.
pub fn print(text: &str) -> Result<(), String> {
    for (path, line) in [
        ("/dev/kmsg", format!("<3>{text}\n")),
        ("/dev/console", format!("{text}\n")),
    ] {
        OpenOptions::new()
            .write(true)
            .open(path)
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .map_err(|e| format!("print to {path}: {e}"))?;
    }
    Ok(())
}
