//! `install --check`: starts one throw-away sandbox through containerd, as a pod's is started,
//! follows the collector's file of its boot, and removes the sandbox. Reports whether GPU guests of
//! a configuration work, and if not, the failure and its cure.
//!
//! Invariants: once requested, the sandbox is removed, or the way to remove it is printed; no other
//! sandbox, and nothing of the configuration, is touched.

mod program;
mod shim_config;

use crate::doing::Doing;
use crate::kata::drop_in::Found;
use crate::kata::kata_config::KataConfig;
use anyhow::{Context, Result, bail};
use kata_gpu_collect::check;
use kata_gpu_collect::follow::sandbox;
use kata_gpu_host::processes;
use kata_gpu_report::analysis::loaded::{Loaded, load};
use kata_gpu_report::data::text::{Ink, Screen, ascii_json, printable, printable_start};
use kata_gpu_report::terminal::stdout::print_with;
use kata_gpu_report::views::boot_page;
use kata_gpu_report::views::follow::progress::Outcome;
use kata_gpu_wire::failure::{self, Diagnosis, Reason};
use kata_gpu_wire::names;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use serde_json::json;
use shim_config::Runtime;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

/// containerd namespace of the sandbox, used by nothing else.
const NAMESPACE: &str = "kata-gpu-boot";
/// Path of the container's program in its root.
const PROGRAM: &str = "wait";
/// Time limit of each containerd command of the removal.
const REMOVAL: Duration = Duration::from_secs(60);
/// Removal attempts: a shim reports a killed task as running for a moment.
const REMOVALS: u32 = 6;
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_secs(1);
/// Time for the collector to write its last records of a sandbox that did not start.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// Directories in which Kata's runtimes keep a directory for each sandbox.
const DIRECTORIES: [&str; 4] = [
    "/run/vc/sbs",
    "/run/vc/vm",
    "/run/kata",
    "/run/kata-containers/shared/sandboxes",
];
/// Longest part of an error of containerd that is shown, in bytes.
const MAX_ERROR: usize = 2000;

/// Options of the check.
#[derive(clap::Args, Clone, Debug)]
pub struct Check {
    /// Start a sandbox of this file (with a /) or runtime; does it work?
    #[arg(
        long = "check",
        value_name = "FILE|RUNTIME",
        conflicts_with_all = [
            "kata_config", "initrd", "image", "params", "unset", "kata_version",
            "dry_run", "force", "node", "remove",
        ]
    )]
    pub what: Option<String>,
    /// With --check: a device for the sandbox, like /dev/vfio/42.
    #[arg(long = "device", value_name = "PATH", requires = "what")]
    devices: Vec<PathBuf>,
    /// With --check: containerd's client and its options, like "k3s ctr".
    #[arg(long, value_name = "COMMAND", requires = "what", default_value = "ctr")]
    ctr: String,
    /// With --check: give up after so many seconds.
    #[arg(long, value_name = "SECONDS", requires = "what", default_value_t = 600)]
    give_up: u64,
}

/// Runs `install --check`.
pub fn run(what: &str, args: &Check, dir: &Path, json: bool) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime");
    match runtime.and_then(|runtime| runtime.block_on(check(what, args, dir, json))) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("kata-gpu-boot: {}", printable(&format!("{error:#}")));
            ExitCode::from(2)
        }
    }
}

/// Observations of the sandbox.
#[derive(Debug, Default)]
struct Seen {
    /// Seconds until containerd had started the sandbox, or its error.
    started: Option<Result<f64, String>>,
    boot: sandbox::Boot,
    outcome: Option<Outcome>,
    /// Reason for giving up.
    gave_up: Option<String>,
    /// Leftovers of the sandbox, and the way to remove them.
    left: Option<String>,
}

async fn check(what: &str, args: &Check, dir: &Path, json: bool) -> Result<bool> {
    let runtime = Runtime::find(what)?;
    check::ask(dir).context(
        "the boot could not be followed; start the collector (kata-gpu-boot collect), or \
                  name its directory with --dir",
    )?;
    let screen = if json {
        Screen::PLAIN
    } else {
        Screen::of_stdout()
    };
    if !json {
        let config = printable(&runtime.config.to_string_lossy());
        eprintln!(
            "kata-gpu-boot: starting a sandbox of {config} with {}",
            printable(&runtime.shim)
        );
    }
    let sandbox = Sandbox::new(&runtime, args)?;
    let mut seen = watch(&sandbox, args, dir, screen).await?;
    seen.left = sandbox.remove().await;
    let loaded = seen.boot.file.as_deref().map(|path| load(path, None));
    let loaded = loaded.transpose()?;
    let troubles = troubles(&seen, loaded.as_ref(), &runtime.config);
    report(&seen, loaded.as_ref(), &troubles, &runtime, json, screen)?;
    Ok(troubles.is_empty())
}

/// A requested sandbox; its root is removed on drop.
struct Sandbox {
    id: String,
    root: PathBuf,
    /// containerd's client with its options.
    ctr: Vec<String>,
    run: Vec<String>,
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // At worst, the root stays in the temporary directory.
        let _left = fs::remove_dir_all(&self.root);
    }
}

impl Sandbox {
    fn new(runtime: &Runtime, args: &Check) -> Result<Self> {
        let ctr: Vec<String> = args.ctr.split_whitespace().map(str::to_string).collect();
        if ctr.is_empty() {
            bail!("--ctr names no program");
        }
        let waits = program::waits()
            .context("--check knows no program for a container on this architecture yet")?;
        // The id must be unique: the sandbox's processes are found by it.
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let id = format!("kata-gpu-check-{}-{:x}", std::process::id(), now.as_nanos());
        let root = std::env::temp_dir().join(&id);
        // Fail if the directory exists: its owner could change the program that the guest runs.
        fs::create_dir(&root).with_context(|| {
            format!(
                "make {}: remove the remains of an earlier check",
                root.display()
            )
        })?;
        let program = root.join(PROGRAM);
        let written = fs::write(&program, waits)
            .and_then(|()| fs::set_permissions(&program, fs::Permissions::from_mode(0o755)));
        let mut sandbox = Self {
            id,
            root,
            ctr,
            run: Vec::new(),
        };
        written.doing("write", &program)?;
        sandbox.run = sandbox.words(runtime, &args.devices);
        Ok(sandbox)
    }

    fn words(&self, runtime: &Runtime, devices: &[PathBuf]) -> Vec<String> {
        let path = |path: &Path| path.to_string_lossy().into_owned();
        let mut words: Vec<String> = ["run", "--detach", "--null-io", "--runtime"]
            .map(str::to_string)
            .into();
        words.extend([
            runtime.shim.clone(),
            "--runtime-config-path".into(),
            path(&runtime.config),
        ]);
        words.extend(
            devices
                .iter()
                .flat_map(|device| ["--device".into(), path(device)]),
        );
        words.extend([
            "--rootfs".into(),
            path(&self.root),
            self.id.clone(),
            format!("/{PROGRAM}"),
        ]);
        words
    }

    /// containerd's client with these arguments.
    fn ctr<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = Command::new(&self.ctr[0]);
        command
            .args(&self.ctr[1..])
            .args(["--namespace", NAMESPACE])
            .args(words);
        // A terminal's SIGINT is for this program alone, which then removes the sandbox.
        command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command
    }

    /// Starts the sandbox; returns the duration in seconds, or containerd's error.
    async fn start(&self) -> Result<f64, String> {
        let before = Instant::now();
        match self
            .ctr(self.run.iter().map(String::as_str))
            .kill_on_drop(true)
            .output()
            .await
        {
            Err(error) => Err(format!("run {}: {error}", self.ctr[0])),
            Ok(output) if output.status.success() => Ok(before.elapsed().as_secs_f64()),
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                Err(printable_start(&text.trim(), MAX_ERROR))
            }
        }
    }

    /// Processes of the sandbox besides containerd's client: shim, VMM, file server. Only root's
    /// processes count: any process can have the sandbox's public name in its command line. (The
    /// VMM of Kata's rootless mode is missing; it takes no GPU.)
    fn processes(&self) -> Vec<Pid> {
        let root = self.root.as_os_str().as_encoded_bytes();
        let is_sandboxs = |words: &[u8]| {
            let is_client = words.split(|byte| *byte == 0).any(|word| word == root);
            !is_client && memchr::memmem::find(words, self.id.as_bytes()).is_some()
        };
        let all = processes::of_user(Path::new("/proc"), geteuid().as_raw());
        all.into_iter()
            .filter(|(_, words)| is_sandboxs(words))
            .map(|(pid, _)| pid)
            .collect()
    }

    /// Ends a sandbox that is still being started: its shim accepts no command before the start is
    /// done, and a client that exits leaves the shim behind.
    fn end_start(&self) {
        for process in self.processes() {
            // The process may have ended already.
            let _ended = kill(process, Signal::SIGKILL);
        }
    }

    /// Removes the sandbox; if parts remain, returns the way to remove them.
    async fn remove(&self) -> Option<String> {
        let id = self.id.as_str();
        let said = async |words: &[&str]| {
            let mut command = self.ctr(words.iter().copied());
            command.kill_on_drop(true);
            match tokio::time::timeout(REMOVAL, command.output()).await {
                Err(_late) => Err(format!("no answer within {REMOVAL:?}")),
                Ok(Err(error)) => Err(error.to_string()),
                Ok(Ok(output)) if output.status.success() => Ok(()),
                Ok(Ok(output)) => Err(String::from_utf8_lossy(&output.stderr).trim().to_string()),
            }
        };
        let is_gone = |error: &str| error.contains("not found");
        // The task may have ended already.
        let _ended = said(&["tasks", "kill", "--signal", "KILL", id]).await;
        for again in 0..REMOVALS {
            if again > 0 {
                tokio::time::sleep(PAUSE).await;
            }
            match said(&["tasks", "rm", "--force", id]).await {
                Err(error) if !is_gone(&error) => {}
                _ => break,
            }
        }
        if let Some(error) = said(&["containers", "rm", id])
            .await
            .err()
            .filter(|error| !is_gone(error))
        {
            let ctr = format!("{} --namespace {NAMESPACE}", self.ctr.join(" "));
            return Some(format!(
                "sandbox {id} is still there ({error}): {ctr} tasks rm --force {id}; {ctr} \
                 containers rm {id}"
            ));
        }
        for _ in 0..REMOVALS {
            if self.processes().is_empty() {
                return self.directories();
            }
            tokio::time::sleep(PAUSE).await;
        }
        let pids: Vec<String> = self.processes().iter().map(Pid::to_string).collect();
        Some(format!(
            "processes of sandbox {id} are still there: kill {}",
            pids.join(" ")
        ))
    }

    /// Directories that Kata has left: the Go runtime cannot remove a sandbox that never started.
    fn directories(&self) -> Option<String> {
        let all = DIRECTORIES
            .iter()
            .map(|dir| Path::new(dir).join(&self.id))
            .filter(|path| path.exists());
        let all: Vec<String> = all.map(|path| path.display().to_string()).collect();
        (!all.is_empty()).then(|| {
            format!(
                "Kata has left {}; no process of the sandbox runs, and a restart of the node \
                     removes the rest",
                all.join(", ")
            )
        })
    }
}

/// Starts the sandbox, and watches its boot until the boot is over or no record can follow.
async fn watch(sandbox: &Sandbox, args: &Check, dir: &Path, screen: Screen) -> Result<Seen> {
    let mut interrupt = signal(SignalKind::interrupt()).context("catch SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("catch SIGTERM")?;
    let mut seen = Seen::default();
    let deadline = tokio::time::Instant::now() + Duration::from_secs(args.give_up);
    let mut last_words = None;
    let mut failed = None;
    {
        let start = sandbox.start();
        let boot = sandbox::boot_of(&sandbox.id, dir, screen, &mut seen.boot);
        tokio::pin!(start, boot);
        while seen.outcome.is_none() || seen.started.is_none() {
            tokio::select! {
                started = &mut start, if seen.started.is_none() => {
                    if started.is_err() {
                        last_words = Some(tokio::time::Instant::now() + LAST_WORDS);
                    }
                    seen.started = Some(started);
                }
                outcome = &mut boot, if seen.outcome.is_none() && failed.is_none() =>
                match outcome {
                    Ok(outcome) => seen.outcome = Some(outcome),
                    Err(error) => failed = Some(error),
                },
                () = tokio::time::sleep_until(last_words.unwrap_or(deadline)) => {
                    if last_words.is_none() {
                        seen.gave_up = Some(format!("within {} s (--give-up)", args.give_up));
                    }
                    break;
                }
                _ = interrupt.recv() => {
                    seen.gave_up = Some("before it was interrupted".into());
                    break;
                }
                _ = terminate.recv() => {
                    seen.gave_up = Some("before it was terminated".into());
                    break;
                }
            }
            if failed.is_some() && seen.started.is_some() {
                break;
            }
        }
        if seen.started.is_none() {
            sandbox.end_start();
            // The check has given up already; the removal reports leftovers.
            let _error = tokio::time::timeout(REMOVAL, start).await;
        }
    }
    if let Some(error) = failed {
        seen.gave_up = Some(format!("for this reason: {error:#}"));
    }
    Ok(seen)
}

/// Errors of containerd's client alone, which no sandbox has a part in, with their cures.
const OF_CLIENT: [(&str, &str); 2] = [
    (
        "containerd.sock",
        "run it as root on a node where containerd runs; another socket: --ctr \"ctr --address \
         SOCKET\"",
    ),
    (
        "No such file or directory (os error 2)",
        "install containerd's client, or name it: --ctr \"k3s ctr\"",
    ),
];

/// Why the sandbox does not work, and rows of the catalogue that explain it.
#[derive(Debug)]
struct Trouble<'a> {
    text: String,
    causes: Vec<Diagnosis<'a>>,
}

impl Trouble<'_> {
    fn unexplained(text: String) -> Self {
        Self {
            text,
            causes: Vec::new(),
        }
    }
}

/// Why the sandbox does not work; empty if it works. The guest's own failure stands first: the
/// runtime's error often follows from it.
fn troubles<'a>(seen: &'a Seen, boot: Option<&'a Loaded>, config: &Path) -> Vec<Trouble<'a>> {
    let mut all = Vec::new();
    match (&seen.outcome, &seen.boot.file) {
        (Some(Outcome::Ready { .. }), _) => {}
        (Some(Outcome::Failed(why)), _) => all.push(Trouble {
            text: format!("the boot failed: {why}"),
            causes: boot.map(causes).unwrap_or_default(),
        }),
        (None, Some(_)) => {
            let until = seen
                .gave_up
                .as_deref()
                .unwrap_or("before the sandbox ended");
            all.push(Trouble::unexplained(format!(
                "the boot did not end {until}; {}",
                seen.boot.last_seen()
            )));
        }
        (None, None) => all.push(Trouble::unexplained(format!(
            "no event of its boot has come: {}",
            silent(config)
        ))),
    }
    match &seen.started {
        Some(Ok(_)) => {}
        Some(Err(error)) => all.push(of_runtime(error, boot)),
        None => {
            let until = seen.gave_up.as_deref().unwrap_or_default();
            all.push(Trouble::unexplained(format!(
                "containerd did not start the sandbox {until}: see the guest's log"
            )));
        }
    }
    all.extend(seen.left.clone().map(Trouble::unexplained));
    all
}

/// Rows of the failures in the guest, each once.
fn causes(loaded: &Loaded) -> Vec<Diagnosis<'_>> {
    let mut all: Vec<Diagnosis> = Vec::new();
    let failed = loaded.file.records.iter();
    for record in failed.filter(|record| record.name == names::GPU_FAILED) {
        let text = |key| record.fields.text(key);
        let reason = text("reason").and_then(Reason::named);
        let is_new = |reason: &Reason| all.iter().all(|found| found.reason != *reason);
        all.extend(
            reason
                .filter(is_new)
                .map(|reason| Diagnosis::known(reason, text("words"))),
        );
    }
    let ended = loaded.boot.power_off.as_deref();
    all.extend(ended.map(|why| {
        failure::of_guest(why).unwrap_or(Diagnosis::known(Reason::PoweredOff, Some(why)))
    }));
    all
}

/// Trouble by the error of containerd, the shim or the VMM.
fn of_runtime<'a>(error: &'a str, boot: Option<&Loaded>) -> Trouble<'a> {
    let text = format!("containerd did not start the sandbox: {error}");
    if let Some((_, cure)) = OF_CLIENT.iter().find(|(words, _)| error.contains(words)) {
        return Trouble::unexplained(format!("{text}; {cure}"));
    }
    let found =
        failure::of_sandbox(error).unwrap_or(Diagnosis::known(Reason::SandboxFailed, Some(error)));
    // A guest whose records came, and that did not end, ran when the runtime gave up.
    let ran = boot.is_some_and(|loaded| loaded.boot.power_off.is_none());
    Trouble {
        text,
        causes: vec![if ran { found.while_guest_ran() } else { found }],
    }
}

/// Cure for a guest that sends nothing.
fn silent(config: &Path) -> String {
    let config_text = config.display();
    match KataConfig::read(config).map(|config| matches!(config.ours, Found::Ours { .. })) {
        Ok(false) => format!(
            "the configuration has no guest of ours: kata-gpu-boot install --kata-config \
             {config_text} --initrd FILE"
        ),
        _ => format!(
            "kata-gpu-boot install --kata-config {config_text} --dry-run shows whether the guest \
             is installed; the guest's log is in \
             containerd's log with enable_debug in [hypervisor] and [runtime], and with level = \
             \"debug\" in containerd's [debug]"
        ),
    }
}

fn report(
    seen: &Seen,
    loaded: Option<&Loaded>,
    troubles: &[Trouble],
    runtime: &Runtime,
    json: bool,
    screen: Screen,
) -> Result<()> {
    let started = seen
        .started
        .as_ref()
        .and_then(|started| started.as_ref().ok());
    if json {
        let boot = loaded
            .map(|loaded| serde_json::to_value(&loaded.boot))
            .transpose()
            .context("write the boot as JSON")?;
        let causes: Vec<_> = troubles
            .iter()
            .flat_map(|trouble| &trouble.causes)
            .map(|found| {
                json!({
                    "reason": found.reason.name(),
                    "what": found.reason.what(),
                    "whose": found.reason.whose().name(),
                    "sure": found.sure.name(),
                    "cure": found.cure,
                })
            })
            .collect();
        let json = json!({
            "action": "checked",
            "works": troubles.is_empty(),
            "reasons": troubles.iter().map(|trouble| &trouble.text).collect::<Vec<_>>(),
            "causes": causes,
            "config": runtime.config.to_string_lossy(),
            "shim": runtime.shim,
            "started_s": started,
            "file": seen.boot.file.as_ref().map(|path| path.to_string_lossy()),
            "boot": boot,
        });
        let text = ascii_json(&json).context("write JSON")?;
        return print_with(|out| Ok(writeln!(out, "{text}")?));
    }
    print_with(|out| {
        if let Some(Loaded { file, boot }) = loaded {
            boot_page::write(&boot_page::Page::new(file, boot), screen, out)?;
        }
        let works = troubles.is_empty();
        let verdict = verdict(seen, works);
        let ink = if works { Ink::Good } else { Ink::Error };
        let (word, rest) = verdict.split_once(':').unwrap_or((&verdict, ""));
        writeln!(out, "\n{}:{rest}", screen.paint(ink, word))?;
        for trouble in troubles {
            writeln!(out, "  {}", printable(&trouble.text))?;
            for found in &trouble.causes {
                let (reason, sure) = (found.reason, found.sure);
                writeln!(out, "    {reason} ({sure}): {}", reason.what())?;
                writeln!(out, "    cure ({}): {}", reason.whose(), found.cure)?;
            }
        }
        Ok(())
    })
}

/// A line: the sandbox works, or not.
fn verdict(seen: &Seen, works: bool) -> String {
    let started = match &seen.started {
        Some(Ok(seconds)) => format!("containerd had started the sandbox after {seconds:.1} s"),
        _ => "the sandbox did not start".into(),
    };
    if !works {
        return format!("does not work: {started}");
    }
    let gpus = match &seen.outcome {
        Some(Outcome::Ready { gpus: 0, .. }) => {
            "it was given no GPU (--device gives it one)".into()
        }
        Some(Outcome::Ready { gpus, at_ns }) => format!(
            "all {gpus} GPUs were usable {:.1} s after kernel start",
            *at_ns as f64 / 1e9
        ),
        _ => String::new(),
    };
    format!("works: {started}, {gpus}; it is removed again")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(started: Option<Result<f64, String>>, outcome: Option<Outcome>) -> Seen {
        let mut seen = Seen {
            started,
            outcome,
            ..Seen::default()
        };
        seen.boot.file = Some("/b/x.ndjson".into());
        seen
    }

    fn of(seen: &Seen) -> String {
        let all = troubles(seen, None, Path::new("/nonexistent/c.toml"));
        let texts: Vec<String> = all.into_iter().map(|trouble| trouble.text).collect();
        texts.join("\n")
    }

    #[test]
    fn a_failed_check_has_a_cure_and_a_passed_one_has_no_reason() {
        let ready = || {
            Some(Outcome::Ready {
                gpus: 8,
                at_ns: 3_000_000_000,
            })
        };
        let good = seen(Some(Ok(18.2)), ready());
        assert_eq!(of(&good), "");
        let line = verdict(&good, true);
        assert_eq!(
            line,
            "works: containerd had started the sandbox after 18.2 s, all 8 GPUs were usable 3.0 s \
             after kernel start; it is removed again"
        );

        let failed = seen(
            Some(Ok(1.0)),
            Some(Outcome::Failed("GPU 3 failed in gpu.init: no".into())),
        );
        assert_eq!(of(&failed), "the boot failed: GPU 3 failed in gpu.init: no");
        let refused = seen(
            Some(Err("Could not access KVM kernel module: /dev/kvm".into())),
            None,
        );
        assert!(
            of(&refused).contains(
                "containerd did not start the sandbox: Could not access KVM kernel module: /dev/kvm"
            ),
            "{}",
            of(&refused)
        );
        let silent = Seen {
            boot: sandbox::Boot::default(),
            ..seen(Some(Ok(1.0)), None)
        };
        assert!(
            of(&silent)
                .contains("no event of its boot has come: kata-gpu-boot install --kata-config"),
            "{}",
            of(&silent)
        );
        let late = Seen {
            gave_up: Some("within 600 s (--give-up)".into()),
            ..seen(Some(Ok(1.0)), None)
        };
        assert!(
            of(&late).starts_with(
                "the boot did not end within 600 s (--give-up); no record of it has come"
            ),
            "{}",
            of(&late)
        );
        let left = Seen {
            left: Some("sandbox x is still there".into()),
            ..good
        };
        assert_eq!(of(&left), "sandbox x is still there");
        let started = seen(None, ready());
        assert!(
            of(&started).contains("did not start the sandbox"),
            "{}",
            of(&started)
        );
    }
    #[test]
    fn a_longer_timeout_is_the_cure_only_where_the_guest_ran() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/fixtures/boots/made-8-gpus-one-hangs.ndjson");
        let boot = load(&path, None).unwrap();
        let found = |error, boot| {
            let trouble = of_runtime(error, boot);
            (trouble.causes.first()).map(|found| (found.reason.name(), found.cure.to_string()))
        };
        let silent = "Failed to Check if grpc server is working: rpc error: code = \
                      DeadlineExceeded desc = timed out connecting to vsock 12:1024";
        let (reason, cure) = found(silent, None).unwrap();
        assert_eq!(reason, "agent-no-answer");
        assert!(!cure.contains("raise dial_timeout"), "{cure}");
        let (reason, cure) = found(silent, Some(&boot)).unwrap();
        assert_eq!(reason, "agent-late");
        assert!(cure.contains("raise dial_timeout"), "{cure}");
        for (error, wanted) in [
            (
                "Could not access KVM kernel module: Permission denied",
                "no-kvm",
            ),
            (
                "qemu: vfio 0000:41:00.0: group 7 is not viable",
                "vfio-group",
            ),
            ("an error that nobody knows", "sandbox-failed"),
        ] {
            assert_eq!(found(error, Some(&boot)).unwrap().0, wanted, "{error}");
        }
        assert_eq!(
            found("dial unix /run/containerd/containerd.sock", None),
            None
        );
    }
}
