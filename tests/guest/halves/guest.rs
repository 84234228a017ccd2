//! Guest halves of VM tests: run by the test agent for `testagent.guest=NAME`, in the guest.

use super::{console_lines, extensions, hot_plug_loop, hot_plug_soak, liar, script, stalls};
use crate::agent::{cdi, log};
use kata_gpu_init::machine::clock::boottime_ns;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Name and program of each guest half.
pub const GUEST_HALVES: &[(&str, fn())] = &[
    ("growing-list", growing_list),
    ("listener", listener),
    ("rss", rss),
    ("root", root),
    ("resident", resident),
    ("child", child),
    ("script", script::run),
    ("hot-plug-soak", hot_plug_soak::run),
    ("hot-plug-loop", hot_plug_loop::run),
    ("samples", samples),
    ("console-lines", console_lines::run),
    ("clocks", clocks),
    ("extensions", extensions::report),
    ("late-disks", extensions::late_disks),
    ("liar", liar::run),
    ("stalls", stalls::run),
];

/// Publishes as a naive generator would: only what is ready so far. The agent must fail on it,
/// which is why nothing else here does so.
fn growing_list() {
    let spec = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"env":["A=B"]}}]}"#;
    let temporary = Path::new(cdi::DIRECTORY).join("x.tmp");
    let written = std::fs::create_dir_all(cdi::DIRECTORY)
        .and_then(|()| std::fs::write(&temporary, spec))
        .and_then(|()| std::fs::rename(&temporary, Path::new(cdi::DIRECTORY).join("nvidia.yaml")));
    log::info(
        "growing list published",
        &[(
            "error",
            &written.err().map_or_else(String::new, |e| e.to_string()),
        )],
    );
}

/// The simulator's counters of every bound GPU: `ADDRESS key: value ..`, separated by `; `.
pub fn all_counters() -> String {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc/driver/nvidia/gpus")
        .into_iter()
        .flatten()
        .flatten()
    {
        let text = std::fs::read_to_string(entry.path().join("sim")).unwrap_or_default();
        all.push(format!(
            "{} {}",
            entry.file_name().to_string_lossy(),
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        ));
    }
    all.sort();
    all.join("; ")
}

/// Connects to the guest's unix listener, which is there some time after the agent.
pub fn connect() -> Option<std::os::unix::net::UnixStream> {
    let mut tries = 0;
    loop {
        match std::os::unix::net::UnixStream::connect(EVENTS) {
            Ok(stream) => return Some(stream),
            Err(e) if tries > 100 => {
                log::error("listener", &[("error", &format!("connect {EVENTS}: {e}"))]);
                return None;
            }
            Err(_) => tries += 1,
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

/// Waits until the init's stream has an event of this name.
pub fn wait_for(name: &str) {
    wait_for_line(&format!("\"kind\":\"event\",\"name\":\"{name}\""));
}

/// Waits until a step of this name has begun.
pub fn wait_for_begin(name: &str) {
    wait_for_line(&format!("\"kind\":\"begin\",\"name\":\"{name}\""));
}

fn wait_for_line(wanted: &str) {
    use std::io::{BufRead, BufReader};
    let Some(stream) = connect() else { return };
    let _seen = BufReader::new(stream)
        .lines()
        .map_while(Result::ok)
        .any(|line| line.contains(wanted));
}

/// The init's unix listener.
const EVENTS: &str = "/run/kata-gpu-init/events.sock";

/// Reads the stream from the guest's unix listener until `settled`, and reports what it saw.
fn listener() {
    use std::io::{BufRead, BufReader};
    let Some(stream) = connect() else { return };
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
    let mode =
        std::fs::metadata(EVENTS).map_or(0, |m| std::os::unix::fs::MetadataExt::mode(&m) & 0o777);
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

/// Reports the resident memory of the init's two processes once everything is settled.
fn rss() {
    listener(); // returns when settled has come
    let init = Path::new("/init");
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        if std::fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == init) {
            let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
            let value = |key: &str| {
                status
                    .lines()
                    .find_map(|l| l.strip_prefix(key))
                    .map(|v| v.trim().to_string())
                    .unwrap_or_default()
            };
            // The keeper's parent is PID 1; the worker's is the keeper.
            let process = if value("PPid:") == "1" {
                "keeper"
            } else {
                "worker"
            };
            log::info(
                "rss",
                &[
                    ("process", process),
                    ("VmRSS", &value("VmRSS:")),
                    ("threads", &value("Threads:")),
                ],
            );
        }
    }
}

/// Reports what the root is, and whether anything can be written to it.
fn root() {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let line = mounts
        .lines()
        .rfind(|line| line.split(' ').nth(1) == Some("/"))
        .unwrap_or_default();
    let written = std::fs::write("/written", "").map_or_else(|e| e.to_string(), |()| "yes".into());
    log::info("root", &[("mount", line), ("written", &written)]);
}

/// Reports, once a `readahead` step has ended, how much of each firmware file is in memory.
fn resident() {
    wait_for_line("\"kind\":\"end\",\"name\":\"readahead\"");
    let entries = |directory: &Path| std::fs::read_dir(directory).into_iter().flatten().flatten();
    for version in entries(Path::new("/lib/firmware/nvidia")) {
        for file in entries(&version.path()) {
            let seen =
                std::fs::File::open(file.path()).and_then(|file| crate::sys::resident(&file));
            let text = match seen {
                Ok((pages, of)) => [pages, of].map(|n| n.to_string()),
                Err(error) => [error.to_string(), String::new()],
            };
            let file = file.file_name();
            let fields = [
                ("file", &*file.to_string_lossy()),
                ("pages", &text[0]),
                ("of", &text[1]),
            ];
            log::info("resident", &fields);
        }
    }
}

/// Reports the boot clock's time, in a line that has the wall clock's.
fn clocks() {
    log::info("clocks", &[("boottime_ns", &boottime_ns().to_string())]);
}

/// Leaves the agent a dead child, and says so.
fn child() {
    use std::process::{Command, Stdio};
    let ended = Command::new("/proc/self/exe")
        .arg("--version")
        .stdout(Stdio::piped())
        .spawn()
        .and_then(|child| {
            let (pid, mut text) = (child.id(), String::new());
            // The end of its output is the end of its life; it is not waited for.
            std::io::Read::read_to_string(
                &mut child.stdout.ok_or(std::io::ErrorKind::BrokenPipe)?,
                &mut text,
            )
            .map(|_| (pid, text))
        });
    match ended {
        Ok((pid, text)) => log::info(
            "child has ended",
            &[("child-pid", &pid.to_string()), ("output", text.trim())],
        ),
        Err(error) => log::error("child", &[("error", &error.to_string())]),
    }
}

/// Directory in which the kernel shows interrupts.
const INTERRUPTS: &str = "/proc/irq";

/// Until all GPUs are settled, and once more then: writes the console's level and the interrupts'
/// masks to the console, with the times before and after the look. Each sample also opens the
/// init's executable, as a hook does, so that the init has a record to write.
///
/// The lines go to the console's device: nothing keeps them back while a GPU is enabled.
fn samples() {
    on_first_cpu();
    console_lines::write_to_device();
    let settled = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&settled);
    std::thread::spawn(move || {
        use std::io::{BufRead, BufReader};
        let Some(stream) = connect() else { return };
        if BufReader::new(stream)
            .lines()
            .map_while(Result::ok)
            .any(|line| line.contains("\"name\":\"settled\""))
        {
            seen.store(true, Ordering::Release);
        }
    });
    let mut last = String::new();
    loop {
        let over = settled.load(Ordering::Acquire);
        let _unused = std::fs::File::open("/init");
        let from_ns = boottime_ns();
        let printk = std::fs::read_to_string("/proc/sys/kernel/printk").unwrap_or_default();
        let masks = masks();
        let to_ns = boottime_ns();
        let times = [
            ("from_ns", from_ns.to_string()),
            ("to_ns", to_ns.to_string()),
            ("when", if over { "settled" } else { "" }.into()),
        ];
        let [from, to, when] = &times;
        let shown = if masks == last && !over {
            "same"
        } else {
            &masks
        };
        let frame = [
            (from.0, from.1.as_str()),
            (to.0, &to.1),
            (when.0, &when.1),
            ("printk", printk.trim()),
            ("masks", shown),
        ];
        log::info("sample", &frame);
        if over {
            return;
        }
        last = masks;
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

/// Keeps the calling thread on the first CPU: a sleep that began on the lane's would end with the
/// enabling.
pub fn on_first_cpu() {
    let mut first = nix::sched::CpuSet::new();
    let pinned = first
        .set(0)
        .and_then(|()| nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &first));
    if let Err(errno) = pinned {
        log::error("stay on CPU 0", &[("error", &errno.to_string())]);
    }
}

/// Name and mask of every interrupt that has a handler, and the default of new ones:
/// `NAME=MASK;..`.
fn masks() -> String {
    let mask = |file: std::path::PathBuf| {
        std::fs::read_to_string(file)
            .unwrap_or_default()
            .trim()
            .to_string()
    };
    let mut all = vec![format!(
        "default={}",
        mask(Path::new(INTERRUPTS).join("default_smp_affinity"))
    )];
    for entry in std::fs::read_dir(INTERRUPTS)
        .into_iter()
        .flatten()
        .flatten()
    {
        let handlers = std::fs::read_dir(entry.path())
            .into_iter()
            .flatten()
            .flatten()
            .filter(|e| e.path().is_dir());
        let mut names: Vec<String> = handlers
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        if !names.is_empty() {
            let number = entry.file_name().to_string_lossy().into_owned();
            all.push(format!(
                "{number} {}={}",
                names.join("+"),
                mask(entry.path().join("smp_affinity"))
            ));
        }
    }
    all.sort();
    all.join(";")
}
