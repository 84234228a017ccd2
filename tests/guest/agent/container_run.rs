//! Running a container on a root of its own: kata-agent's processes from the bundle to the program.
//!
//! The agent starts itself again, as kata-agent does: a first process makes the PID namespace and
//! waits, a second one, PID 1 in it, makes the root, runs the hooks, changes to the root and
//! becomes the program. Both send their reports as lines of JSON on their standard input, a socket.
//! Not made: cgroups, seccomp, capabilities, users other than root, network and user namespaces; a
//! program starts at once, without `StartContainer`.

use super::container_hooks;
use super::container_root::{self, Change};
use super::pod;
use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::fcntl::OFlag;
use nix::sched::{CloneFlags, unshare};
use oci_spec::runtime::Spec;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The roots that a guest has for containers, each in a folder of its name.
pub const ROOTS: &str = "/containers";
/// Directory of bundles, the same as the real agent's.
pub const BUNDLES: &str = "/run/kata-containers";
/// Program of a container, unless its spec names another.
pub const PROGRAM: &str = "/usr/bin/cuda-program";
/// This program under this word is a container's process.
pub const WORD: &str = "init";
/// And with this one after it, the second of the two.
const SECOND: &str = "root";

/// Report of a container's process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Report {
    Hook(String),
    HookFailed(String),
    /// Reason why there is no container.
    Failed(String),
    /// Exit status of the program.
    Status(String),
}

/// A container that has run.
#[derive(Debug, Default)]
pub struct Ended {
    /// Output of the program, standard error included.
    pub output: String,
    pub status: String,
    /// Hooks that succeeded: name, time and output.
    pub hooks: Vec<String>,
    pub failed_hooks: Vec<String>,
}

/// The OCI spec of a container, as containerd writes it for Kata, without what is not made here.
pub fn spec(root: &Path) -> Result<Spec> {
    let flags = ["nosuid", "noexec", "nodev"];
    let mount = |destination: &str, kind: &str, options: &[&str]| {
        let source = if kind == "tmpfs" { "tmpfs" } else { kind };
        json!({ "destination": destination, "type": kind, "source": source, "options": options })
    };
    let spec = json!({
        "ociVersion": "1.0.2",
        "root": { "path": root },
        "process": {
            "user": { "uid": 0, "gid": 0 },
            "cwd": "/",
            "args": [PROGRAM],
            // The second as NVIDIA's images have it. The others make glibc's loader say where it
            // searched.
            "env": [
                "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "NVIDIA_VISIBLE_DEVICES=all",
                "LD_DEBUG=libs",
                "LD_DEBUG_OUTPUT=/run/loader",
            ],
        },
        "mounts": [
            mount("/proc", "proc", &flags),
            mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
            mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666",
                "mode=0620", "gid=5"]),
            mount("/dev/shm", "tmpfs", &[&flags[..], &["mode=1777", "size=65536k"]].concat()),
            mount("/sys", "sysfs", &[&flags[..], &["ro"]].concat()),
            mount("/run", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        ],
        "linux": {},
    });
    serde_json::from_value(spec).context("the agent's own spec")
}

/// Copies a guest's root into a bundle for a container: each has its own. Gives the bundle and the
/// root in it.
pub fn bundle(container: &str, root: &str) -> Result<(PathBuf, PathBuf)> {
    let bundle = Path::new(BUNDLES).join(container);
    let rootfs = bundle.join("rootfs");
    copy_tree(&Path::new(ROOTS).join(root), &rootfs)?;
    Ok((bundle, rootfs))
}

/// Copies directories, links and regular files, with their modes.
pub fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let copy = |from: &Path, to: &Path| -> Result<()> {
        let kind = fs::symlink_metadata(from)?.file_type();
        if kind.is_symlink() {
            std::os::unix::fs::symlink(fs::read_link(from)?, to)?;
        } else if kind.is_dir() {
            fs::create_dir_all(to)?;
            fs::set_permissions(to, fs::metadata(from)?.permissions())?;
            for entry in fs::read_dir(from)? {
                let name = entry?.file_name();
                copy_tree(&from.join(&name), &to.join(&name))?;
            }
        } else {
            fs::copy(from, to)?;
        }
        Ok(())
    };
    copy(from, to).with_context(|| format!("copy {} to {}", from.display(), to.display()))
}

/// Runs the container of a spec to its end. `program` is this program's own file; `bundle` a
/// directory for `config.json`, which hooks read.
pub fn run(program: &Path, bundle: &Path, spec: &Spec, change: Change) -> Result<Ended> {
    if let Some(hooks) = spec.hooks() {
        #[allow(deprecated)] // prestart is deprecated, and the real agent runs it
        let others = [
            hooks.prestart(),
            hooks.start_container(),
            hooks.poststart(),
            hooks.poststop(),
        ];
        ensure!(
            others.iter().all(|h| h.iter().flatten().next().is_none()),
            "the test agent runs createContainer hooks only"
        );
    }
    spec.save(bundle.join("config.json"))
        .context("write config.json")?;
    let (ours, theirs) = UnixStream::pair()?;
    let (output, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    let mut first = Command::new(program);
    first.args([WORD, change.word()]).arg(bundle);
    first
        .stdin(OwnedFd::from(theirs))
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let mut child = first
        .spawn()
        .with_context(|| format!("start {}", program.display()))?;
    drop(first); // with it the descriptors that keep both ends open
    let mut text = Vec::new();
    File::from(output).read_to_end(&mut text)?;
    let mut ended = Ended {
        output: String::from_utf8_lossy(&text).into_owned(),
        ..Ended::default()
    };
    for line in BufReader::new(ours).lines() {
        match serde_json::from_str(&line?)? {
            Report::Hook(text) => ended.hooks.push(text),
            Report::HookFailed(text) => ended.failed_hooks.push(text),
            Report::Failed(error) => bail!("{error}"),
            Report::Status(status) => ended.status = status,
        }
    }
    let _unused = child.wait(); // the agent as PID 1 reaps all its children elsewhere
    Ok(ended)
}

/// The life of a container's process: `init pivot|move [root] BUNDLE`.
pub fn process(words: &[String]) -> ! {
    if let [word, words @ ..] = words
        && word == pod::process::WORD
    {
        pod::process::run(words);
    }
    let Ok(report) = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map(UnixStream::from)
    else {
        std::process::exit(1)
    };
    let result = match words {
        [change, bundle] => first(change, bundle, &report),
        [change, second, bundle] if second == SECOND => {
            become_program(change, Path::new(bundle), &report)
        }
        _ => Err(anyhow!("unknown words {words:?}")),
    };
    if let Err(error) = result {
        send(&report, &Report::Failed(format!("{error:#}")));
        std::process::exit(1);
    }
    std::process::exit(0)
}

fn send(mut report: &UnixStream, what: &Report) {
    let line = serde_json::to_string(what).unwrap_or_default() + "\n";
    let _unused = report.write_all(line.as_bytes()); // nobody is left to report to
}

fn first(change: &str, bundle: &str, report: &UnixStream) -> Result<()> {
    unshare(CloneFlags::CLONE_NEWPID).context("make a PID namespace")?;
    let stdin = OwnedFd::from(report.try_clone()?);
    let status = Command::new("/proc/self/exe")
        .args([WORD, change, SECOND, bundle])
        .stdin(stdin)
        .status()?;
    send(report, &Report::Status(status.to_string()));
    Ok(())
}

/// Returns only with an error.
fn become_program(change: &str, bundle: &Path, report: &UnixStream) -> Result<()> {
    let change = Change::from_word(change).context("no such change of root")?;
    nix::unistd::dup2_stdin(File::open("/dev/null").context("open /dev/null")?)?;
    let spec = Spec::load(bundle.join("config.json")).context("read config.json")?;
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS)
        .context("make namespaces")?;
    let root = container_root::make(&spec)?;
    let id = bundle.file_name().unwrap_or_default().to_string_lossy();
    let state = container_hooks::state(&id, bundle, std::process::id());
    let hooks = spec
        .hooks()
        .as_ref()
        .and_then(|h| h.create_container().clone())
        .unwrap_or_default();
    for hook in container_hooks::run(&hooks, &state) {
        let said = |text: &str| {
            format!(
                "{} ({:.1} ms): {text}",
                hook.name,
                hook.took.as_secs_f64() * 1e3
            )
        };
        match &hook.result {
            Ok(text) => send(report, &Report::Hook(said(text))),
            Err(error) => send(report, &Report::HookFailed(said(error))),
        }
    }
    container_root::enter(&root, change)?;
    container_root::finish(&spec)?;
    nix::unistd::setsid().context("make a session")?;
    let process = spec.process().as_ref().context("the spec has no process")?;
    let (program, words) = process
        .args()
        .as_deref()
        .and_then(<[String]>::split_first)
        .context("the process has no program")?;
    // The last of several values counts: the real agent sets them one after another.
    let variables = process
        .env()
        .iter()
        .flatten()
        .filter_map(|v| v.split_once('='));
    let error = Command::new(program)
        .args(words)
        .env_clear()
        .envs(variables)
        .exec();
    Err(error).with_context(|| format!("execute {program}"))
}
