//! Guest halves of VM tests: run by the test agent for `testagent.guest=NAME`, in the guest.

use crate::agent::{cdi, log};
use std::path::Path;

/// Name and program of each guest half.
pub const GUEST_HALVES: &[(&str, fn())] = &[("growing-list", growing_list), ("counters", counters), ("listener", listener)];

/// Publishes as a naive generator would: only what is ready so far. The agent must fail on it, which is why nothing else here does so.
fn growing_list() {
    let spec = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"env":["A=B"]}}]}"#;
    let temporary = Path::new(cdi::DIRECTORY).join("x.tmp");
    let written = std::fs::create_dir_all(cdi::DIRECTORY)
        .and_then(|()| std::fs::write(&temporary, spec))
        .and_then(|()| std::fs::rename(&temporary, Path::new(cdi::DIRECTORY).join("nvidia.yaml")));
    log::info("growing list published", &[("error", &written.err().map_or_else(String::new, |e| e.to_string()))]);
}

/// Reports the simulator's counters of every GPU when all GPUs that can settle have, which the test says by starting the half late enough: it looks
/// every 100 ms of the guest's time for as long as the VM lives, and reports each change.
fn counters() {
    let mut last = String::new();
    loop {
        let mut all = Vec::new();
        for entry in std::fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten() {
            let text = std::fs::read_to_string(entry.path().join("sim")).unwrap_or_default();
            all.push(format!("{} {}", entry.file_name().to_string_lossy(), text.split_whitespace().collect::<Vec<_>>().join(" ")));
        }
        all.sort();
        let now = all.join("; ");
        if now != last && !now.is_empty() {
            log::info("counters", &[("all", &now)]);
            last = now;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

/// Reads the stream from the guest's unix listener until `settled`, and reports what it saw.
fn listener() {
    use std::io::{BufRead, BufReader};
    let path = "/run/kata-gpu-init/events.sock";
    let mut tries = 0;
    let stream = loop {
        match std::os::unix::net::UnixStream::connect(path) {
            Ok(stream) => break stream,
            Err(e) if tries > 100 => return log::error("listener", &[("error", &format!("connect {path}: {e}"))]),
            Err(_) => tries += 1,
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    };
    let (mut records, mut first) = (0_u64, String::new());
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        if records == 0 {
            first.clone_from(&line);
        }
        records += 1;
        if line.contains("\"name\":\"settled\"") {
            break;
        }
    }
    let file = std::fs::read_to_string("/run/kata-gpu-init/boot.ndjson").unwrap_or_default();
    let mode = std::fs::metadata(path).map_or(0, |m| std::os::unix::fs::MetadataExt::mode(&m) & 0o777);
    log::info(
        "listener",
        &[
            ("records", &records.to_string()),
            ("first", &first),
            ("file_lines", &file.lines().count().to_string()),
            ("mode", &format!("{mode:o}")),
        ],
    );
}
