//! Programs of others under their own names, with the times at which they begin and end. A script
//! with the line `#!/usr/bin/test-programs stamped` stands at a program's path, the program itself
//! in `/stamped`, under the same file name.
//!
//! The console gets `stamped: NAME begin NS` and, where the program is a child,
//! `stamped: NAME end NS STATUS`, in ns of CLOCK_BOOTTIME. PID 1 becomes the program instead.

use crate::minimal_init::reopen_console;
use kata_gpu_init::machine::clock::boottime_ns;
use nix::mount::{MsFlags, mount};
use std::ffi::CString;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::process::Command;

/// Name of this program in a script's first line.
pub const NAME: &str = "stamped";

/// Runs or becomes the program; `words` are the script's path and the program's arguments.
pub fn run(words: &[String]) -> ! {
    let begin = boottime_ns();
    let name = words.first().and_then(|path| path.rsplit('/').next());
    let name = name.unwrap_or_default();
    let program = format!("/{NAME}/{name}");
    let arguments = words.get(1..).unwrap_or_default();
    if std::process::id() == 1 {
        become_program(name, &program, arguments, begin);
    }
    stamp(&format!("{name} begin {begin}"));
    let status = Command::new(&program).args(arguments).status();
    let code = match status {
        Ok(status) => status.code().unwrap_or(1),
        Err(error) => {
            stamp(&format!("{name}: execute {program}: {error}"));
            1
        }
    };
    stamp(&format!("{name} end {} {code}", boottime_ns()));
    std::process::exit(code)
}

fn become_program(name: &str, program: &str, arguments: &[String], begin: u64) -> ! {
    // Kata's kernels mount devtmpfs for an init on a disk; nobody does for one in an initrd.
    if !Path::new("/dev/null").exists() {
        let devtmpfs = Some("devtmpfs");
        let _unused = mount(devtmpfs, "/dev", devtmpfs, MsFlags::MS_NOSUID, None::<&str>);
    }
    reopen_console();
    stamp(&format!("{name} begin {begin}"));
    let words = std::iter::once(program).chain(arguments.iter().map(String::as_str));
    let words: Vec<CString> = words.filter_map(|word| CString::new(word).ok()).collect();
    if let Some(path) = words.first() {
        let error = nix::unistd::execv(path, &words).err();
        stamp(&format!("{name}: execute {program}: {error:?}"));
    }
    std::process::exit(1)
}

/// A line on the console: standard output of the incumbent's children leads to /dev/null.
fn stamp(text: &str) {
    let _unused = OpenOptions::new()
        .write(true)
        .open("/dev/console")
        .and_then(|mut console| console.write_all(format!("{NAME}: {text}\n").as_bytes()));
}
