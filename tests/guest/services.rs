//! Stands for NVIDIA's daemons in tests: nvidia-persistenced, nv-fabricmanager, nvlsm,
//! nv-hostengine, dcgm-exporter, nvidia-imex. The initrd has each as a script whose interpreter is
//! this program: the script's name says which daemon this is.
//!
//! Interfaces as the real ones have them: nvidia-persistenced and nv-hostengine daemonise, and
//! their foreground parents exit with 0 when the daemon is ready and with 1 when it has failed
//! (nv-hostengine's with 0 after a failure, too); so does fabric manager with DAEMONIZE=1.
//! persistenced opens all GPUs, one after another, makes its socket then, and logs with syslog;
//! fabric manager and nvidia-imex refuse a configuration that they do not know, and log to syslog
//! where it asks for that; nvlsm makes its socket, nv-hostengine its port. Fabric manager reports
//! how many GPUs are up at its start.
//!
//! Times as the real ones have them (`bench fabric`): an open of a GPU takes its initialisation,
//! unless the GPU is up already; with `--uvm-persistence-mode` persistenced waits after each open
//! for that GPU's fabric, 30 s at most, and goes on with a warning; fabric manager completes the
//! fabric some time after the last GPU is up. The fabric's state is the simulated driver's
//! (`nvidia.fabric_state`); a driver without a fabric has none of these waits.
//!
//! Behaviour by the kernel command line: `standin.NAME=WORD[+WORD..]` with words of
//!
//! | word | what the daemon does |
//! |---|---|
//! | `fail` | fails before it is ready: its parent exits with 1 |
//! | `crash` | kills itself before it is ready |
//! | `no-socket` | nvlsm: makes no socket |
//! | `hang` | never becomes ready |
//! | `flood` | writes 20,000 lines to its output and to syslog |
//! | `dies:MS` | ends with status 3 this long after it became ready |
//! | `dies-once:MS` | the same, in its first life of this boot |
//! | `fabric:MS` | fabric manager: completes the fabric this long after the last GPU is up; 5000 |
//! | `never-completes` | fabric manager: leaves the fabric in progress |
//! | `never-completes:K` | the same for the K-th GPU alone |
//! | `fabric-wait:MS` | persistenced: longest wait for each GPU's fabric; 30000 |
//! | `status` | writes its state in /proc: account, capabilities, OOM score, cgroup |

use kata_gpu_init::gpu::driver_proc::information;
use kata_gpu_init::gpu::pci;
use kata_gpu_wire::pci_address::PciAddress;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, setsid};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Socket of persistenced.
const SOCKET: &str = "/run/nvidia-persistenced/socket";
/// Wait of persistenced for each GPU of an incomplete fabric.
const FABRIC_WAIT_MS: u64 = 30_000;
/// From the last GPU's initialisation to a complete fabric. No figure of a real one is public.
const FABRIC_MS: u64 = 5000;
/// The driver's parameter that is the fabric's state.
const FABRIC_STATE: &str = "/sys/module/nvidia/parameters/fabric_state";
/// NVML_GPU_FABRIC_STATE_*.
const NOT_SUPPORTED: u32 = 0;
const IN_PROGRESS: u32 = 2;
const COMPLETED: u32 = 3;
/// Interval at which the fabric and the GPUs are looked at.
const LOOK: Duration = Duration::from_millis(20);
/// Lines by which the incumbent takes the daemons for ready; persistenced's is its own.
pub const FABRIC_MANAGER_MARKER: &str = "FM starting NvLink Inband";
pub const PERSISTENCED_MARKER: &str = "Local RPC services initialized";

/// Exit status of the foreground parent of a daemon that has failed.
const FAILED: i32 = 1;
/// Socket of nvlsm for fabric manager.
const NVLSM_SOCKET: &str = "/run/nvidia-fabricmanager/fm_sm_ipc.socket";
/// Port of nv-hostengine.
const HOST_ENGINE: &str = "127.0.0.1:5555";
/// The configuration asks for syslog.
static SYSLOG: AtomicBool = AtomicBool::new(false);

/// The daemon's life. `words` are the script's path and the daemon's arguments.
pub fn run(words: &[String]) -> ! {
    let name = words
        .first()
        .and_then(|path| path.rsplit('/').next())
        .unwrap_or_default()
        .to_string();
    let arguments = words.get(1..).unwrap_or_default();
    let faults = faults(&name);
    say(&name, &format!("starts with {}", arguments.join(" ")));
    let mut daemonises = matches!(name.as_str(), "nvidia-persistenced" | "nv-hostengine");
    if let Some(at) = arguments.iter().position(|word| word == "-c") {
        match configuration(&name, arguments.get(at + 1).map_or("", String::as_str)) {
            Ok(in_background) => daemonises |= in_background,
            Err(error) => {
                say(&name, &error);
                std::process::exit(FAILED);
            }
        }
    }
    if daemonises {
        daemonise(&name, arguments, &faults)
    } else {
        serve(&name, arguments, &faults, || {})
    }
}

fn faults(name: &str) -> Vec<String> {
    let line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let key = format!("standin.{name}=");
    let value = line
        .split_ascii_whitespace()
        .find_map(|word| word.strip_prefix(&key))
        .unwrap_or_default();
    value
        .split('+')
        .filter(|word| !word.is_empty())
        .map(str::to_string)
        .collect()
}

/// A line of the daemon's log: stdout, or syslog where its configuration asks for that.
fn say(name: &str, text: &str) {
    if SYSLOG.load(Ordering::Relaxed) {
        return log(name, text);
    }
    println!("{name}[{}]: {text}", std::process::id());
    let _unused = std::io::stdout().flush();
}

/// The same to syslog, as syslog(3) writes it.
fn log(name: &str, text: &str) {
    syslog(29, name, text);
}

/// An error in syslog.
fn log_error(name: &str, text: &str) {
    syslog(27, name, text);
}

fn syslog(priority: u8, name: &str, text: &str) {
    if let Ok(socket) = UnixDatagram::unbound() {
        let _unused = socket.send_to(
            format!("<{priority}>Jan  1 00:00:00 {name}: {text}").as_bytes(),
            "/dev/log",
        );
    }
}

/// Reads a configuration as the real ones do: `KEY=VALUE` with known keys. Returns whether the
/// daemon leaves the foreground.
fn configuration(name: &str, path: &str) -> Result<bool, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| format!("failed to open config file {path}: {e}"))?;
    let known = |key: &str| {
        [
            "LOG_",
            "DAEMONIZE",
            "FABRIC_MODE",
            "PARTITION_RAIL_POLICY",
            "STATE_FILE_NAME",
            "TOPOLOGY_FILE_PATH",
            "UNIX_SOCKET_PATH",
            "IMEX_",
        ]
        .iter()
        .any(|prefix| key.starts_with(prefix))
    };
    let mut values = std::collections::HashMap::new();
    for line in text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        let (key, value) = line
            .split_once('=')
            .ok_or_else(|| format!("config file {path}: no value in {line:?}"))?;
        if !known(key) {
            return Err(format!("config file {path}: unknown option {key}"));
        }
        values.insert(key.to_string(), value.to_string());
    }
    let of = |key: &str| values.get(key).map_or("", String::as_str);
    if name == "nv-fabricmanager" && !matches!(of("FABRIC_MODE"), "0" | "1" | "2") {
        return Err(format!(
            "config file {path}: FABRIC_MODE is {:?}",
            of("FABRIC_MODE")
        ));
    }
    if !matches!(of("PARTITION_RAIL_POLICY"), "" | "greedy" | "symmetric") {
        return Err(format!(
            "config file {path}: PARTITION_RAIL_POLICY is {:?}",
            of("PARTITION_RAIL_POLICY")
        ));
    }
    // The log of the real ones with an empty file name is in different places by their
    // documentation and by observation.
    let in_background = match (of("DAEMONIZE"), of("LOG_USE_SYSLOG")) {
        ("0", "1") => false,
        ("1", "1") => true,
        other => {
            return Err(format!(
                "config file {path}: this stand-in logs to syslog alone: {other:?}"
            ));
        }
    };
    if of("FABRIC_MODE_RESTART") == "1" && !Path::new(of("STATE_FILE_NAME")).exists() {
        return Err(format!(
            "config file {path}: a restart without the state file {}",
            of("STATE_FILE_NAME")
        ));
    }
    if of("FABRIC_MODE") == "1" {
        let _unused = std::fs::write(of("STATE_FILE_NAME"), "active partitions");
    }
    SYSLOG.store(true, Ordering::Relaxed);
    let restart = if of("FABRIC_MODE_RESTART") == "1" {
        " again"
    } else {
        ""
    };
    say(
        name,
        &format!(
            "mode {} rails {}{restart}",
            of("FABRIC_MODE"),
            of("PARTITION_RAIL_POLICY")
        ),
    );
    Ok(in_background)
}

/// Daemonises; the parent exits when the daemon has reported.
fn daemonise(name: &str, arguments: &[String], faults: &[String]) -> ! {
    let Ok((reader, writer)) = nix::unistd::pipe() else {
        std::process::exit(FAILED)
    };
    let (mut reader, mut writer) = (std::fs::File::from(reader), std::fs::File::from(writer));
    let is_host_engine = name == "nv-hostengine";
    let (name, arguments, faults) = (name.to_string(), arguments.to_vec(), faults.to_vec());
    let forked = kata_gpu_init::machine::sys::fork_single_threaded((), move |()| {
        let _unused = setsid();
        serve(&name, &arguments, &faults, move || {
            let _unused = writer.write_all(b"0");
        })
    });
    // The end of the pipe without a byte is the end of the daemon.
    let mut report = [0_u8; 1];
    let status = match forked {
        Ok(_) if matches!(std::io::Read::read(&mut reader, &mut report), Ok(1)) => 0,
        // The real one's parent reports success after a failure, too.
        Ok(_) if is_host_engine => 0,
        Ok(_) | Err(_) => FAILED,
    };
    std::process::exit(status)
}

/// Life of the daemon before and after it is ready.
fn serve(name: &str, arguments: &[String], faults: &[String], ready: impl FnOnce()) -> ! {
    let has = |fault: &str| faults.iter().any(|word| word == fault);
    let number = |fault: &str| {
        faults.iter().find_map(|word| {
            word.strip_prefix(fault)?
                .strip_prefix(':')?
                .parse::<u64>()
                .ok()
        })
    };
    log(name, "started");
    if has("status") {
        say(name, &status());
    }
    if has("flood") {
        for number in 0..20_000 {
            println!("line {number} of a flood");
            log(name, &format!("line {number} of a flood"));
        }
        let _unused = std::io::stdout().flush();
    }
    if has("hang") {
        sleep();
    }
    if has("crash") {
        say(name, "about to crash\x1b[2J");
        let _unused = kill(Pid::this(), Signal::SIGKILL);
    }
    if has("fail") {
        log_error(name, "Failed to query NVIDIA devices");
        say(name, "failed to initialize");
        std::process::exit(FAILED);
    }
    let mut held = Vec::new();
    match name {
        "nvidia-persistenced" => {
            let uvm = arguments
                .iter()
                .any(|word| word == "--uvm-persistence-mode");
            let longest = Duration::from_millis(number("fabric-wait").unwrap_or(FABRIC_WAIT_MS));
            held = persist(name, uvm.then_some(longest));
        }
        "nv-fabricmanager" => {
            let time = Duration::from_millis(number("fabric").unwrap_or(FABRIC_MS));
            // The real one opens GPUs at its start; which of them, and whether for long, is not
            // known. An open here would take the initialisation from whoever opens them next.
            let all = gpus();
            say(
                name,
                &format!(
                    "found {} of {} GPUs up",
                    all.iter().filter(|gpu| is_up(gpu)).count(),
                    all.len()
                ),
            );
            let stuck = if has("never-completes") {
                Some(None)
            } else {
                number("never-completes").map(|place| Some(place as usize))
            };
            std::thread::spawn(move || complete_fabric(time, stuck));
            log(name, FABRIC_MANAGER_MARKER);
        }
        _ => {}
    }
    let _ports = (name == "nv-hostengine").then(|| TcpListener::bind(HOST_ENGINE));
    let _nvlsm = (name == "nvlsm" && !has("no-socket")).then(|| UnixListener::bind(NVLSM_SOCKET));
    let _listener = (name == "nvidia-persistenced").then(|| {
        let _unused = std::fs::create_dir_all("/run/nvidia-persistenced");
        let _unused = std::fs::remove_file(SOCKET);
        UnixListener::bind(SOCKET)
    });
    if name == "nvidia-persistenced" {
        log(name, PERSISTENCED_MARKER);
    }
    say(name, "is ready");
    ready();
    let marker = format!("/run/standin.{name}");
    let again = Path::new(&marker).exists();
    let _unused = std::fs::write(&marker, "");
    if let Some(ms) = number("dies").or(number("dies-once").filter(|_| !again)) {
        std::thread::sleep(Duration::from_millis(ms));
        say(name, "last words");
        std::process::exit(3);
    }
    // The GPUs stay open for as long as the daemon lives.
    std::mem::forget(held);
    sleep()
}

/// GPUs on the bus, in PCI order.
fn gpus() -> Vec<PciAddress> {
    pci::scan(Path::new("/sys"))
        .map(|scan| scan.gpus.iter().map(|gpu| gpu.address).collect())
        .unwrap_or_default()
}

/// State of a GPU's adapter, as the simulated driver has it.
fn adapter(gpu: &PciAddress) -> String {
    std::fs::read_to_string(format!("/proc/driver/nvidia/gpus/{gpu}/sim")).unwrap_or_default()
}

fn is_up(gpu: &PciAddress) -> bool {
    adapter(gpu).contains("adapter: up")
}

/// State of the fabric of the GPU at this place; the last value goes for the rest.
fn fabric_state(place: usize) -> u32 {
    let text = std::fs::read_to_string(FABRIC_STATE).unwrap_or_default();
    let values: Vec<u32> = text
        .trim()
        .split(',')
        .map_while(|value| value.parse().ok())
        .collect();
    values
        .get(place)
        .or(values.last())
        .copied()
        .unwrap_or(NOT_SUPPORTED)
}

fn set_fabric_state(name: &str, state: &str) {
    if let Err(error) = std::fs::write(FABRIC_STATE, state) {
        say(name, &format!("write {FABRIC_STATE}: {error}"));
    }
}

/// Nodes of a guest where nobody has made any: libnvidia-cfg makes those that persistenced opens.
fn make_missing_nodes() -> Result<(), String> {
    if Path::new("/dev/nvidiactl").exists() {
        return Ok(());
    }
    let scan = pci::scan(Path::new("/sys")).map_err(|e| e.to_string())?;
    let made = crate::serial_init::make_nodes(&scan);
    made.map(drop).map_err(|e| e.to_string())
}

/// persistenced's work: opens each GPU, which initialises one that is down, and waits for its
/// fabric for at most `fabric_wait`. Returns the descriptors.
fn persist(name: &str, fabric_wait: Option<Duration>) -> Vec<File> {
    if let Err(error) = make_missing_nodes() {
        log_error(name, &error);
    }
    let mut held = Vec::new();
    for (place, address) in gpus().into_iter().enumerate() {
        let node = information(Path::new("/proc"), address)
            .map(|found| format!("/dev/nvidia{}", found.minor));
        let opened = node.map_err(|e| e.to_string()).and_then(|node| {
            let open = OpenOptions::new().read(true).write(true).open(&node);
            open.map_err(|e| format!("open {node}: {e}"))
        });
        match opened {
            Ok(file) => held.push(file),
            Err(error) => {
                log_error(name, &format!("device {address} - {error}"));
                continue;
            }
        }
        let start = Instant::now();
        while let Some(longest) = fabric_wait
            && !matches!(fabric_state(place), NOT_SUPPORTED | COMPLETED)
        {
            if start.elapsed() >= longest {
                log(
                    name,
                    &format!(
                        "device {address} - the fabric is not ready after {} s",
                        longest.as_secs_f64()
                    ),
                );
                break;
            }
            std::thread::sleep(LOOK);
        }
        log(
            name,
            &format!("device {address} - persistence mode enabled."),
        );
    }
    held
}

/// Fabric manager's work: takes the fabric from `not started` to `completed`, `time` after the last
/// GPU is up or has failed. `stuck`: no GPU completes, or that one does not.
fn complete_fabric(time: Duration, stuck: Option<Option<usize>>) {
    const NAME: &str = "nv-fabricmanager";
    // A service VM, or a guest without a simulated fabric. A complete fabric stays complete.
    if matches!(fabric_state(0), NOT_SUPPORTED | COMPLETED) {
        return;
    }
    set_fabric_state(NAME, &IN_PROGRESS.to_string());
    let all = gpus();
    while !all
        .iter()
        .all(|gpu| is_up(gpu) || adapter(gpu).contains("adapter: failed"))
    {
        std::thread::sleep(LOOK);
    }
    std::thread::sleep(time);
    let state = |place| {
        if stuck.is_some_and(|of| of.is_none_or(|stuck| stuck == place)) {
            IN_PROGRESS
        } else {
            COMPLETED
        }
    };
    let states: Vec<String> = (0..all.len())
        .map(|place| state(place).to_string())
        .collect();
    set_fabric_state(NAME, &states.join(","));
    say(NAME, "configured all the available GPUs and NVSwitches");
}

/// Fields of /proc/self/status, the OOM score and the cgroup, as `KEY=VALUE` words.
fn status() -> String {
    let read =
        |name: &str| std::fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
    let text = read("status");
    let mut words = vec!["status".to_string()];
    for key in [
        "Uid",
        "Gid",
        "Groups",
        "NoNewPrivs",
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
    ] {
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
            .unwrap_or_default();
        words.push(format!(
            "{key}={}",
            value.split_whitespace().collect::<Vec<_>>().join(",")
        ));
    }
    words.push(format!("oom={}", read("oom_score_adj").trim()));
    words.push(format!("cgroup={}", read("cgroup").trim()));
    words.join(" ")
}

fn sleep() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}
