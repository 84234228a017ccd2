//! Lines for the console while GPUs are enabled: in each enabling one as the agent writes its own,
//! and some to the device under its own name, which nothing redirects. Of these only one that finds
//! the device idle reaches for it; another one is left to the interrupt that ends the one before.

use super::guest::{connect, on_first_cpu};
use crate::agent::log;
use kata_gpu_init::machine::clock::boottime_ns;
use kata_gpu_init::stream::sinks::redirect::console_device;
use kata_gpu_wire::names;
use nix::unistd::dup2_stdout;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::time::Duration;

/// Message of the line about each write, once all GPUs are settled: `to`, and its begin and end in
/// ns of the boot clock.
pub const MESSAGE: &str = "line written";
/// Message behind these.
pub const OVER: &str = "lines over";
/// Values of `to`; each line has its own.
pub const AGENTS: &str = "as the agent";
pub const DEVICES: &str = "to the device";
/// Lines to the device in one enabling, and the pause between two.
const LINES: usize = 10;
const PAUSE: Duration = Duration::from_millis(20);

/// Writes lines in each enabling.
pub fn run() {
    on_first_cpu();
    let (mut written, device) = (Vec::new(), console_device(Path::new("/")));
    let Some(stream) = connect() else { return };
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let has = |what: &str, name: &str| {
            line.contains(&format!("\"kind\":\"{what}\",\"name\":\"{name}\""))
        };
        if has("begin", names::GPU_ENABLE) {
            let line = || writeln!(io::stdout().lock(), "a line written {AGENTS}");
            written.push((AGENTS, timed(line)));
            for _ in 0..LINES {
                written.push((DEVICES, timed(|| to_device(&device))));
                std::thread::sleep(PAUSE);
            }
        }
        if has("event", names::SETTLED) {
            break;
        }
    }
    for (to, (from_ns, to_ns, error)) in written {
        let fields = [
            ("to", to),
            ("from_ns", &from_ns.to_string()),
            ("to_ns", &to_ns.to_string()),
            ("error", &error),
        ];
        log::info(MESSAGE, &fields);
    }
    log::info(OVER, &[]);
}

fn to_device(device: &io::Result<File>) -> io::Result<()> {
    match device {
        Ok(device) => writeln!(&mut &*device, "a line written {DEVICES}"),
        Err(error) => Err(io::Error::other(error.to_string())),
    }
}

fn timed(write: impl FnOnce() -> io::Result<()>) -> (u64, u64, String) {
    let from_ns = boottime_ns();
    let error = write().err().map(|error| error.to_string());
    (from_ns, boottime_ns(), error.unwrap_or_default())
}

/// From now on this process writes its lines to the console's device.
pub fn write_to_device() {
    let replaced = console_device(Path::new("/")).and_then(|device| Ok(dup2_stdout(device)?));
    if let Err(error) = replaced {
        log::error("console's device", &[("error", &error.to_string())]);
    }
}
