//! `kata-gpu-boot demo`: boots the simulator guest in QEMU and watches it, from the first
//! instruction to the last container.
//!
//! `collect` and `show` do the collecting, showing and judging; this file combines them with a VM.
//! The demo fails with one line of reasons when anything in the boot failed.

use super::boots::block_on;
use super::collect::report;
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use kata_gpu_collect::follow::files::{Files, Which};
use kata_gpu_collect::{Collector, Config, LINES_QUEUE};
use kata_gpu_host::kernel_file;
use kata_gpu_host::sleep::sleep_until;
use kata_gpu_host::tail::Tail;
use kata_gpu_host::vm::{Vm, VmConfig, kvm_works, uds_path};
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::data::agent_log;
use kata_gpu_report::data::agent_log::{AgentEvent, AgentLog, MAX_CONSOLE_LINE};
use kata_gpu_report::data::boot_dir::read_boot;
use kata_gpu_report::data::boot_file::{FileLine, HostEvent, HostLine};
use kata_gpu_report::data::framing::{Lines, Piece};
use kata_gpu_report::data::text::{Screen, printable, printable_start};
use kata_gpu_report::terminal::stdout::print;
use kata_gpu_report::terminal::stdout::write_lines;
use kata_gpu_report::views::live::Live;
use kata_gpu_report::views::summary::summary;
use kata_gpu_report::views::table::Table;
use kata_gpu_wire::arch::Arch;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{DEFAULT_PORT, Kind};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

const HELP: &str = "\
The kernel, its PCI and driver core, vsock and the init are real; kernel modules stand in for the
GPUs and NVIDIA's driver. Two containers are requested as soon as the agent is ready: one with GPU
0, one with all. Exit status: 0 all came up, 2 something failed.

Examples (initrd/setup and initrd/pack make kernel and initrd; initrd/demo does it all):
  kata-gpu-boot demo --kernel target/kernel/vmlinuz --initrd target/demo.cpio
  # a slow host, one GPU after another
  kata-gpu-boot demo --kernel K --initrd I --host slow --init serial
  # keep console log and events, and print their paths
  kata-gpu-boot demo --kernel K --initrd I --keep";

/// Boot a guest with simulated GPUs and watch it.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    /// The guest's kernel.
    #[arg(long)]
    kernel: PathBuf,
    /// The guest's initrd, as initrd/pack makes it.
    #[arg(long)]
    initrd: PathBuf,
    /// Number of GPUs.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=16))]
    gpus: u32,
    /// Time that the host takes to map one GPU's BARs: slow = 2 s, fast = 3 ms.
    #[arg(long, value_enum, default_value_t = HostSpeed::Fast)]
    host: HostSpeed,
    /// Strategy of binding the GPUs to the driver.
    #[arg(long, value_parser = BINDS, default_value = "auto")]
    bind: String,
    /// Strategy of initialising the GPUs.
    #[arg(long, value_parser = ["parallel", "serial"], default_value = "parallel")]
    init: String,
    /// Keep console log and events, and print their paths.
    #[arg(long)]
    keep: bool,
    /// The program vhost-device-vsock [default: target/tools/bin, then PATH].
    #[arg(long, value_name = "PATH")]
    vhost_device_vsock: Option<PathBuf>,
    /// Directory for the events and the console log, which are kept.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Show details too.
    #[arg(short, long)]
    verbose: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum HostSpeed {
    Slow,
    Fast,
}

/// Values of the guest's parameter gpuinit.bind.
const BINDS: [&str; 4] = ["insmod", "pipelined", "concurrent", "auto"];
/// From the start of the VM until everything must be done.
const TIME_LIMIT: Duration = Duration::from_secs(120);
/// Time limit for QEMU's status after a child's end.
const REAP_DEADLINE: Duration = Duration::from_secs(1);
const MEMORY_MIB: u32 = 1024;
/// Two vCPUs: steps can run at once.
const CPUS: u32 = 2;
/// Containers of the guest, name and devices, in the format of the test agent's parameter.
const CONTAINERS: [(&str, &str); 2] = [("first", "0"), ("all", "all")];
/// Longest piece of the console that an error quotes.
const MAX_QUOTE: usize = 160;

/// Runs `demo`.
pub fn run(args: &Args) -> Result<()> {
    block_on(demo(args))
}

async fn demo(args: &Args) -> Result<()> {
    let vhost_device_vsock = find_vhost_device_vsock(args.vhost_device_vsock.as_deref())?;
    // Directory for temporary files, not --dir: socket paths must be short.
    let work = nix::unistd::mkdtemp(&std::env::temp_dir().join("kata-gpu-demo-XXXXXX"))
        .context("make a work directory")?;
    let arch = kernel_file::arch(&args.kernel)?;
    let config = VmConfig {
        kernel: args.kernel.clone(),
        initrd: args.initrd.clone(),
        disk: None,
        disk_rate: None,
        serial_disks: vec![],
        append: command_line(args, arch),
        memory_mib: MEMORY_MIB,
        cpus: CPUS,
        work_dir: work.clone(),
        vhost_device_vsock: Some(vhost_device_vsock),
    };
    let console = work.join("console.log");
    let events = args.dir.clone().unwrap_or_else(|| work.clone());
    let outcome = watch_boot(args, config, arch, &events).await;
    match outcome {
        Ok(boot_file) => {
            let mut kept = console;
            if args.dir.is_some() {
                let beside = boot_file.with_extension("console");
                std::fs::copy(&kept, &beside)
                    .with_context(|| format!("copy {} to {}", kept.display(), beside.display()))?;
                kept = beside;
            }
            if args.dir.is_some() || args.keep {
                println!(
                    "events: {}\nconsole log: {}",
                    boot_file.display(),
                    kept.display()
                );
            }
            if args.dir.is_some() || !args.keep {
                std::fs::remove_dir_all(&work)
                    .with_context(|| format!("remove {}", work.display()))?;
            }
            Ok(())
        }
        // A console log stays for inspection.
        Err(error) if console.exists() => bail!(
            "demo failed: {error:#} (console log: {})",
            console.display()
        ),
        Err(error) => {
            std::fs::remove_dir_all(&work).with_context(|| format!("remove {}", work.display()))?;
            Err(error)
        }
    }
}

fn command_line(args: &Args, arch: Arch) -> String {
    let enable_ms = match args.host {
        HostSpeed::Slow => 2000,
        HostSpeed::Fast => 3,
    };
    let (bind, init) = (&args.bind, &args.init);
    let containers: Vec<String> = CONTAINERS
        .iter()
        .map(|(name, devices)| format!("{name}:{devices}"))
        .collect();
    format!(
        "console={} rdinit=/hardware panic=-1 cgroup_no_v1=all fakepci.gpus={} \
         fakepci.enable_ms={enable_ms} nvidia.probe_ms=3 \
         nvidia.s1_ms=300 nvidia.s2_ms=1300 nvidia.s3_ms=500 gpuinit.bind={bind} \
         gpuinit.init={init} \
         testagent.cost=real testagent.containers={}",
        kata_gpu_host::qemu_machine::of(arch).console,
        args.gpus,
        containers.join(";")
    )
}

fn find_vhost_device_vsock(given: Option<&Path>) -> Result<PathBuf> {
    const NAME: &str = "vhost-device-vsock";
    if let Some(path) = given {
        ensure!(
            path.is_file(),
            "{}: no such program: omit --vhost-device-vsock, or run initrd/setup",
            path.display()
        );
        return Ok(path.to_path_buf());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places =
        std::iter::once(PathBuf::from("target/tools/bin")).chain(std::env::split_paths(&path));
    let program = places.map(|dir| dir.join(NAME)).find(|p| p.is_file());
    program.with_context(|| {
        format!(
            "{NAME} is neither in target/tools/bin nor in PATH: run initrd/setup, or name it with \
             --vhost-device-vsock"
        )
    })
}

/// Awaited records that have been seen.
#[derive(Debug)]
struct Progress {
    /// File of the boot, once the guest has connected.
    file: Option<OsString>,
    settled: bool,
    waiting_for: BTreeSet<String>,
}

impl Progress {
    fn new() -> Self {
        Self {
            file: None,
            settled: false,
            waiting_for: CONTAINERS.map(|(name, _)| name.to_string()).into(),
        }
    }

    fn line(&mut self, line: &FileLine) {
        if let FileLine::Record(record) = line {
            self.settled |= record.kind == Kind::Event && record.name == names::SETTLED;
        }
    }

    fn agent(&mut self, event: &AgentEvent) {
        match event {
            AgentEvent::ContainerCreated { container, .. }
            | AgentEvent::ContainerFailed { container, .. } => {
                self.waiting_for.remove(container);
            }
            AgentEvent::Start { .. }
            | AgentEvent::Ready
            | AgentEvent::Rpc { .. }
            | AgentEvent::ContainerAsked { .. }
            | AgentEvent::CdiTryFailed { .. }
            | AgentEvent::Injected { .. }
            | AgentEvent::ContainerStarted { .. }
            | AgentEvent::HookFailed { .. }
            | AgentEvent::Bound(_) => {}
        }
    }

    fn complete(&self) -> bool {
        self.settled && self.waiting_for.is_empty()
    }
}

/// Boots, watches, prints the summary. Returns the boot's file; error: the faults of the boot.
async fn watch_boot(args: &Args, config: VmConfig, arch: Arch, events: &Path) -> Result<PathBuf> {
    let mut interrupt = signal(SignalKind::interrupt()).context("catch SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("catch SIGTERM")?;
    let mut child = signal(SignalKind::child()).context("catch SIGCHLD")?;
    let screen = Screen::of_stdout();

    // The collector listens before the VM starts: the guest connects to an existing socket.
    let (sender, mut told) = mpsc::channel(LINES_QUEUE);
    let collecting = Config {
        uds: vec![uds_path(&config.work_dir)],
        ..Config::new(events.to_path_buf(), DEFAULT_PORT)
    };
    let collector = Collector::bind(&collecting, sender)?;
    let mut files = Files::watch(events, Which::Boots)?;
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(collector.run(stopped));

    let machine = if kvm_works(arch) {
        "KVM"
    } else {
        "no KVM here, so the kernel takes some seconds to start"
    };
    eprintln!("booting {} GPU(s) on {arch} in QEMU ({machine})", args.gpus);
    let limit = Instant::now() + TIME_LIMIT;
    let mut vm = tokio::task::spawn_blocking(move || Vm::start(&config))
        .await
        .context("start the VM")??;
    let mut console = Tail::open(vm.console())?;
    let mut console_lines = (Lines::new(MAX_CONSOLE_LINE), AgentLog::default());

    let table = Table { screen };
    let mut live = Live::new(table, args.verbose, Instant::now());
    let mut progress = Progress::new();
    let mut headed = false;
    // Reason for an end before all GPUs were settled and all containers done.
    let ended = loop {
        if progress.complete() {
            break None;
        }
        tokio::select! {
            names = files.changed() => for name in names? {
                take_file(&mut files, name, &mut live, &mut progress)?;
            },
            Some(text) = told.recv() => report(&text),
            bytes = console.read_more() => take_console(&bytes?, &mut console_lines, &mut live, &mut progress),
            () = sleep_until(live.deadline()) => {}
            () = sleep_until(Some(limit)) => {
                break Some(format!("{} s were over", TIME_LIMIT.as_secs()));
            }
            _ = child.recv() => {
                if let Some(status) = vm.wait(REAP_DEADLINE)? {
                    break Some(format!("the VM ended ({status})"));
                }
            }
            _ = interrupt.recv() => break Some("interrupted".to_string()),
            _ = terminate.recv() => break Some("interrupted".to_string()),
        }
        let mut lines = live.due(Instant::now());
        if !lines.is_empty() && !headed {
            headed = true;
            lines.insert(0, table.head());
        }
        write_lines(&lines).context("write to standard output")?;
    };

    // Records that were on their way still count.
    stop.send_replace(true);
    running
        .await
        .context("the collector stopped unexpectedly")??;
    while let Ok(names) = tokio::time::timeout(Duration::ZERO, files.changed()).await {
        for name in names? {
            take_file(&mut files, name, &mut live, &mut progress)?;
        }
    }
    while let Ok(text) = told.try_recv() {
        report(&text);
    }
    vm.kill();
    take_console(
        &console.read_now()?,
        &mut console_lines,
        &mut live,
        &mut progress,
    );
    write_lines(&live.finish(Instant::now())).context("write to standard output")?;

    let console_text =
        std::fs::read(vm.console()).with_context(|| format!("read {}", vm.console().display()))?;
    let Some(file) = &progress.file else {
        bail!("{}", without_stream(ended.as_deref(), &console_text));
    };
    let path = events.join(file);
    let agent = agent_log::read(&*console_text).context("read the console log")?;
    let boot = Boot::new(&read_boot(&path)?, &agent);
    print(&format!("\n{}\n", summary(&boot, &screen).join("\n")))?;
    let wrong = judge(&boot, &progress, ended.as_deref(), args.gpus, &console_text);
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    Ok(path)
}

/// Takes the new lines of the boot's file; of several files, only the first one is the boot's.
fn take_file(
    files: &mut Files,
    name: OsString,
    live: &mut Live,
    progress: &mut Progress,
) -> Result<()> {
    if *progress.file.get_or_insert_with(|| name.clone()) != name {
        return Ok(());
    }
    files.read(&name, |line| {
        progress.line(&line);
        match line {
            FileLine::Record(record) => live.record(&record, Instant::now()),
            FileLine::Host(HostLine {
                event: HostEvent::Clock(sample),
                ..
            }) => live.clock(sample),
            FileLine::Header(..) | FileLine::Pong | FileLine::Host(_) => {}
        }
    })
}

fn take_console(
    bytes: &[u8],
    (lines, log): &mut (Lines, AgentLog),
    live: &mut Live,
    progress: &mut Progress,
) {
    lines.push(bytes, |piece| {
        let Piece::Line(line) = piece else { return };
        log.line(line, |line| {
            progress.agent(&line.event);
            live.agent(line, Instant::now());
        });
    });
}

/// Reason for a missing event stream.
fn without_stream(ended: Option<&str>, console: &[u8]) -> String {
    let how = ended.unwrap_or("everything was done");
    format!("{how} before any event came; {}", last_words(console))
}

/// The most informative line of the console about an end.
fn last_words(console: &[u8]) -> String {
    let lines = || {
        console
            .split(|b| matches!(b, b'\n' | b'\r'))
            .filter(|line| !line.trim_ascii().is_empty())
    };
    let panic = lines().find(|line| line.windows(12).any(|w| w == b"Kernel panic"));
    match panic.or_else(|| lines().next_back()) {
        Some(line) => format!("console: {}", printable_start(line.trim_ascii(), MAX_QUOTE)),
        None => "the console is empty".to_string(),
    }
}

/// All faults of a boot.
fn judge(
    boot: &Boot,
    progress: &Progress,
    ended: Option<&str>,
    gpus: u32,
    console: &[u8],
) -> Vec<String> {
    let mut wrong = Vec::new();
    if let Some(ended) = ended {
        let mut waiting: Vec<String> = Vec::new();
        if !progress.settled {
            waiting.push("the GPUs to settle".into());
        }
        waiting.extend(
            progress
                .waiting_for
                .iter()
                .map(|c| format!("container {c}")),
        );
        wrong.push(format!(
            "{ended} while waiting for {}; {}",
            waiting.join(", "),
            last_words(console)
        ));
    }
    if let Some(reason) = &boot.power_off {
        wrong.push(format!("the guest powered off: {}", printable(reason)));
    }
    for gpu in boot.failed_gpus() {
        let reason = gpu.failed.as_ref();
        let reason = reason.map_or(String::new(), |f| printable(&f.reason));
        wrong.push(format!("GPU {} failed: {reason}", gpu.address));
    }
    let found = boot.gpus.iter().filter(|g| g.found_ns.is_some()).count();
    if found != gpus as usize && boot.settled_ns.is_some() {
        wrong.push(format!("asked for {gpus} GPUs, the guest found {found}"));
    }
    for container in &boot.containers {
        if let Some(error) = &container.error {
            wrong.push(format!("container {} failed: {error}", container.name));
        }
    }
    let lost = boot
        .lost
        .records
        .saturating_add(boot.lost.reported_by_guest);
    if lost > 0 {
        wrong.push(format!("{lost} record(s) lost"));
    }
    let garbage = boot.garbage_lines.saturating_add(boot.damaged_lines);
    if garbage > 0 {
        wrong.push(format!(
            "{garbage} line(s) of the stream were not of the format"
        ));
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_report::data::boot_file::BootFile;
    use kata_gpu_test_support::tests_dir;
    use std::fs::File;

    fn boot() -> (BootFile, Vec<agent_log::AgentLine>) {
        let at = |end| tests_dir(&format!("fixtures/boots/hand-made-3-gpus-one-fails.{end}"));
        (
            read_boot(&at("ndjson")).unwrap(),
            agent_log::read(File::open(at("console")).unwrap()).unwrap(),
        )
    }

    fn progress(file: &BootFile, agent: &[agent_log::AgentLine]) -> Progress {
        let mut progress = Progress::new();
        for record in &file.records {
            progress.line(&FileLine::Record(record.clone()));
        }
        agent.iter().for_each(|line| progress.agent(&line.event));
        progress
    }

    #[test]
    fn a_boot_is_complete_when_settled_with_all_containers_done() {
        let (file, agent) = boot();
        assert!(progress(&file, &agent).complete());
        assert!(!progress(&file, &agent[..agent.len() - 1]).complete());
        let mut unsettled = file.clone();
        unsettled.records.retain(|r| r.name != names::SETTLED);
        assert!(!progress(&unsettled, &agent).complete());
    }

    #[test]
    fn everything_that_failed_is_named() {
        let (file, agent) = boot();
        let wrong = judge(
            &Boot::new(&file, &agent),
            &progress(&file, &agent),
            None,
            3,
            b"",
        );
        assert_eq!(wrong.len(), 2, "{wrong:#?}");
        assert!(
            wrong[0].starts_with("GPU 0001:00:02.0 failed: gpu.init: open /dev/nvidia1"),
            "{wrong:#?}"
        );
        assert!(
            wrong[1].starts_with("container all failed: \\x1b[31mfail fast"),
            "{wrong:#?}"
        );
    }

    #[test]
    fn a_good_boot_has_nothing_wrong_and_a_short_one_has() {
        let (mut file, mut agent) = boot();
        file.records.retain(|r| r.name != names::GPU_FAILED);
        agent.pop();
        agent.push(agent_log::AgentLine {
            realtime_ns: 0,
            event: AgentEvent::ContainerCreated {
                container: "all".into(),
                devices: "all".into(),
                tries: None,
                pause: false,
            },
        });
        let state = progress(&file, &agent);
        let boot = Boot::new(&file, &agent);
        assert_eq!(judge(&boot, &state, None, 3, b""), [""; 0]);
        assert_eq!(
            judge(&boot, &state, None, 8, b""),
            ["asked for 8 GPUs, the guest found 3"]
        );
        file.seqs.insert(1000);
        assert!(
            judge(&Boot::new(&file, &agent), &state, None, 3, b"")[0].ends_with("record(s) lost")
        );
    }

    #[test]
    fn a_vm_that_ends_early_is_quoted() {
        let console = b"[ 1.0] hello\r\n[ 2.0] Kernel panic - not syncing: \x1b[31mno init\r\n[ \
                        2.1] Rebooting\r\n";
        let said = without_stream(Some("the VM ended (exit status: 0)"), console);
        assert!(
            said.contains("Kernel panic - not syncing: \\x1b[31mno init"),
            "{said}"
        );
        assert!(last_words(b"a\n\nlast\r\n\r\n").ends_with("last"));
        assert_eq!(last_words(b""), "the console is empty");
    }
}
