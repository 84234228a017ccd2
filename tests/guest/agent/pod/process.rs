//! A container's processes, as the real agent starts them: `init pod CHANGE BUNDLE CGROUPS`. The
//! first makes the PID namespace, forks the second and ends; the second waits until it is in its
//! cgroup, makes its root, runs the hooks, changes to the root and waits at `exec.fifo`.
//!
//! Reports are lines of JSON on standard input, a socket. One line comes back: the process is in
//! its cgroup.

use super::super::container_hooks;
use super::super::container_root::{self, Change};
use super::{NAMESPACES, work};
use anyhow::{Context, Result, anyhow};
use kata_gpu_init::machine::sys::fork_single_threaded;
use nix::fcntl::{OFlag, open};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::SigSet;
use nix::sys::stat::Mode;
use oci_spec::runtime::Spec;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// This word follows that of a container's process.
pub const WORD: &str = "pod";
/// Name under which this program does nothing, as a container that was given no program.
pub const PARKED: &str = "parked";

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Report {
    /// PID of the second process, as the agent sees it.
    Pid(i32),
    Hook(String),
    HookFailed(String),
    /// Waits for its start.
    Ready,
    Failed(String),
}

fn report(mut to: &UnixStream, what: &Report) {
    let line = serde_json::to_string(what).unwrap_or_default() + "\n";
    let _unused = to.write_all(line.as_bytes()); // nobody is left to report to
}

/// The life of both processes.
pub fn run(words: &[String]) -> ! {
    let socket = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map(UnixStream::from);
    let Ok(socket) = socket else {
        std::process::exit(1)
    };
    if let Err(error) = first(words, &socket) {
        report(&socket, &Report::Failed(format!("{error:#}")));
        std::process::exit(1);
    }
    std::process::exit(0)
}

fn first(words: &[String], socket: &UnixStream) -> Result<()> {
    let [change, bundle, version] = words else {
        return Err(anyhow!("unknown words {words:?}"));
    };
    let change = Change::from_word(change).context("no such change of root")?;
    let (bundle, unified) = (PathBuf::from(bundle), version == "v2");
    work::spend(work::CHILD);
    unshare(CloneFlags::CLONE_NEWPID).context("make a PID namespace")?;
    let second = |(): ()| -> i32 {
        if let Err(error) = become_program(change, &bundle, unified, socket) {
            report(socket, &Report::Failed(format!("{error:#}")));
        }
        1
    };
    let (pid, ()) =
        fork_single_threaded((), second).map_err(|(errno, ())| anyhow!("fork: {errno}"))?;
    report(socket, &Report::Pid(pid.as_raw()));
    Ok(())
}

/// Returns only with an error.
fn become_program(
    change: Change,
    bundle: &Path,
    unified: bool,
    mut socket: &UnixStream,
) -> Result<()> {
    let spec = Spec::load(bundle.join("config.json")).context("read config.json")?;
    let mut go = [0];
    socket.read_exact(&mut go).context("wait for the cgroup")?;
    for (name, flag) in [
        ("ipc", CloneFlags::CLONE_NEWIPC),
        ("uts", CloneFlags::CLONE_NEWUTS),
    ] {
        let file = File::open(Path::new(NAMESPACES).join(name));
        let file = file.with_context(|| format!("open the pod's {name} namespace"))?;
        setns(file, flag).with_context(|| format!("join the pod's {name} namespace"))?;
    }
    unshare(CloneFlags::CLONE_NEWNS).context("make a mount namespace")?;
    if unified {
        unshare(CloneFlags::CLONE_NEWCGROUP).context("make a cgroup namespace")?;
    }
    let path_only = |path: PathBuf| open(&path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty());
    let fifo = path_only(bundle.join("exec.fifo"))?;
    let stdin = File::options()
        .read(true)
        .write(true)
        .open(bundle.join("stdin"))?;
    let parked = File::open(PARKED_PROGRAM).ok();
    let root = container_root::make(&spec)?;
    let id = bundle.file_name().unwrap_or_default().to_string_lossy();
    let state = container_hooks::state(&id, bundle, std::process::id());
    let hooks = spec
        .hooks()
        .as_ref()
        .and_then(|h| h.create_container().clone())
        .unwrap_or_default();
    for hook in container_hooks::run(&hooks, &state) {
        let text = |what: &str| {
            format!(
                "{} ({:.1} ms): {what}",
                hook.name,
                hook.took.as_secs_f64() * 1e3
            )
        };
        match &hook.result {
            Ok(output) => report(socket, &Report::Hook(text(output))),
            Err(error) => report(socket, &Report::HookFailed(text(error))),
        }
    }
    container_root::enter(&root, change)?;
    container_root::finish(&spec)?;
    work::spend(work::BECOME);
    nix::unistd::setsid().context("make a session")?;
    nix::unistd::dup2_stdin(&stdin)?;
    SigSet::empty().thread_set_mask()?;
    report(socket, &Report::Ready);
    wait_for_start(&fifo)?;
    become_last(&spec, parked)
}

/// Blocks until the agent has opened the other end and written.
fn wait_for_start(fifo: &OwnedFd) -> Result<()> {
    let mut byte = [0];
    let mut file =
        File::open(format!("/proc/self/fd/{}", fifo.as_raw_fd())).context("open exec.fifo")?;
    file.read_exact(&mut byte)?;
    Ok(())
}

/// A copy of this program that is not the agent's file, for containers without a program.
pub const PARKED_PROGRAM: &str = "/run/kata-containers.parked";

fn become_last(spec: &Spec, parked: Option<File>) -> Result<()> {
    let process = spec.process().as_ref().context("the spec has no process")?;
    let variables = process
        .env()
        .iter()
        .flatten()
        .filter_map(|v| v.split_once('='));
    let error = match process.args().as_deref().and_then(<[String]>::split_first) {
        Some((program, words)) => Command::new(program)
            .args(words)
            .env_clear()
            .envs(variables)
            .exec(),
        None => match parked {
            Some(file) => {
                let path = format!("/proc/self/fd/{}", file.as_raw_fd());
                Command::new(path).arg0(PARKED).env_clear().exec()
            }
            None => loop {
                std::thread::park();
            },
        },
    };
    Err(error).context("execute the container's program")
}

/// The life of a container without a program.
pub fn park() -> ! {
    loop {
        std::thread::park();
    }
}
