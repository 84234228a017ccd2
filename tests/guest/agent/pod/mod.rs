//! A pod at the real agent's cost: the same steps of the kernel, in the same order, as kata-agent
//! 4.1.0 takes them for a sandbox and its containers, and about as much computing between them
//! ([`work`]). Requests come over ttRPC ([`super::server`]), or on the command line with
//! `testagent.cost=real`.
//!
//! Order, the same as the real agent's: CDI devices are resolved before the pod's one lock is
//! taken; everything from the bundle to the running child is under that lock; a container's first
//! process waits at `exec.fifo` from its creation to its start. Not made: seccomp, capabilities,
//! users other than root, storages, network.

mod cgroups;
pub mod process;
mod work;

use super::cdi;
use super::config::Config;
use super::container_run::{self, BUNDLES};
use super::{container_root, log, pid1, words};
use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::fcntl::OFlag;
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::Mode;
use oci_spec::runtime::Spec;
use process::Report;
use serde_json::json;
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Directory of the pod's namespaces.
const NAMESPACES: &str = "/run/sandbox-ns";
/// The pod's cgroup, where a container names none.
const CGROUP: &str = "/kubepods/besteffort/pod";
/// The pause container that `testagent.cost=real` makes by itself.
const PAUSE: &str = "pause";
/// Annotation that distinguishes a pause container from others.
const TYPE: &str = "io.kubernetes.cri.container-type";
/// Paths of /proc and /sys that containerd masks in a container.
pub const MASKED: [&str; 9] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/sys/firmware",
];
/// Paths of /proc that containerd makes read-only in a container.
pub const READ_ONLY: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// A container to create.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    pub id: String,
    /// Directory that becomes its root; none: an empty one.
    pub root: Option<PathBuf>,
    /// Its program and the program's arguments; none: a process that does nothing.
    pub arguments: Vec<String>,
    /// CDI devices.
    pub devices: Vec<String>,
    /// Annotations that the runtime writes to the spec, CDI devices included.
    pub annotations: HashMap<String, String>,
    pub hooks: bool,
    pub cgroup: Option<String>,
}

/// A container that was created.
struct Created {
    stdin: Arc<File>,
    stdout: Arc<File>,
    fifo: PathBuf,
}

#[derive(Default)]
struct State {
    containers: HashMap<String, Created>,
}

/// The guest's pod.
pub struct Pod {
    config: Config,
    state: Mutex<State>,
}

/// How a creation went.
pub struct Outcome {
    pub tries: u64,
    pub spec: Spec,
}

impl Pod {
    pub fn new(config: Config) -> Self {
        Self {
            config,
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The namespaces that its containers share.
    pub fn create_sandbox(&self) -> Result<()> {
        work::spend(work::SANDBOX);
        let _state = self.lock();
        let _unused = fs::remove_dir_all(BUNDLES); // mostly not there
        fs::create_dir_all(BUNDLES)?;
        fs::create_dir_all(NAMESPACES)?;
        for (name, flag) in [
            ("ipc", CloneFlags::CLONE_NEWIPC),
            ("uts", CloneFlags::CLONE_NEWUTS),
        ] {
            let path = Path::new(NAMESPACES).join(name);
            File::create(&path)?;
            let keep = move || -> Result<()> {
                unshare(flag)?;
                let namespace = format!("/proc/self/task/{}/ns/{name}", nix::unistd::gettid());
                container_root::bind(Path::new(&namespace), &path)
            };
            let kept = std::thread::spawn(keep)
                .join()
                .map_err(|_| anyhow!("the thread has panicked"))?;
            kept.with_context(|| format!("keep {name}"))?;
        }
        Ok(())
    }

    /// Creates a container, up to the moment where its first process waits for its start.
    pub fn create(&self, asked: &Asked) -> Result<Outcome> {
        work::spend(work::REQUEST);
        let bundle = Path::new(BUNDLES).join(&asked.id);
        let mut spec = spec(asked, &bundle.join("rootfs"))?;
        words::asked(&spec).write();
        words::no_storages().write();
        let mut tries = 0;
        if asked.devices.is_empty() {
            // The real one does not look into a pause container's annotations.
            if asked.annotations.get(TYPE).map(String::as_str) != Some("sandbox") {
                words::no_devices().write();
            }
        } else {
            let of = self.config.cdi_timeout_s;
            let mut failed_try = |number: u64, error: &str| {
                words::waiting(number.saturating_sub(1), of, error).write()
            };
            let (seconds, fail_fast) = (self.config.cdi_timeout_s, self.config.fail_fast);
            let (devices, sleep) = (&asked.devices, &std::thread::sleep);
            let failed = &mut failed_try;
            let injected = cdi::inject(
                cdi::chosen(),
                &mut spec,
                cdi::DIRECTORY,
                devices,
                seconds,
                fail_fast,
                sleep,
                failed,
            );
            tries = injected.map_err(|(tries, error)| anyhow!("{error} (try {tries})"))?;
            work::spend(work::DEVICES);
            words::injected(&spec).write();
        }
        if !asked.hooks {
            spec.set_hooks(None);
        }
        let mut state = self.lock();
        ensure!(
            !state.containers.contains_key(&asked.id),
            "there is a container {}",
            asked.id
        );
        let first = state.containers.is_empty();
        words::making(&asked.id).write();
        let created = self.make(asked, &bundle, &spec, first);
        let created =
            created.inspect_err(|error| words::start_failed(&format!("{error:#}")).write())?;
        words::made(&asked.id).write();
        words::created().write();
        state.containers.insert(asked.id.clone(), created);
        Ok(Outcome { tries, spec })
    }

    fn make(&self, asked: &Asked, bundle: &Path, spec: &Spec, first: bool) -> Result<Created> {
        let rootfs = bundle.join("rootfs");
        fs::create_dir_all(&rootfs)?;
        if let Some(root) = &asked.root {
            container_root::bind(root, &rootfs)
                .with_context(|| format!("bind {}", root.display()))?;
        }
        if asked.arguments.is_empty() && !Path::new(process::PARKED_PROGRAM).exists() {
            let copied = fs::copy("/proc/self/exe", process::PARKED_PROGRAM);
            copied.context("copy the program of containers without one")?;
        }
        spec.save(bundle.join("config.json"))
            .context("write config.json")?;
        std::os::unix::fs::chown(bundle, Some(0), Some(0))?;
        let path = asked
            .cgroup
            .clone()
            .unwrap_or_else(|| format!("{CGROUP}/{}", asked.id));
        let (pod, _) = path.rsplit_once('/').context("a cgroup without a pod")?;
        let cgroups = cgroups::Cgroups::of(self.config.unified_cgroups);
        work::spend(if first {
            work::FIRST_CGROUP
        } else {
            work::CGROUP
        });
        if first && !pod.is_empty() {
            cgroups.create(pod)?;
        }
        cgroups.create(&path)?;
        let fifo = bundle.join("exec.fifo");
        let stdin_path = bundle.join("stdin");
        let mode = Mode::from_bits_truncate(0o644);
        nix::unistd::mkfifo(&fifo, mode).context("exec.fifo")?;
        nix::unistd::mkfifo(&stdin_path, mode).context("stdin")?;
        // Open for both, or the open would wait for the other end.
        let stdin = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&stdin_path)?;
        let (stdout, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let (ours, theirs) = UnixStream::pair()?;
        let root_type = pid1::root_type().map_err(anyhow::Error::msg)?;
        let mut child = Command::new("/proc/self/exe");
        let change = container_root::Change::of(&root_type);
        child
            .args([container_run::WORD, process::WORD, change.word()])
            .arg(bundle);
        child.arg(if self.config.unified_cgroups {
            "v2"
        } else {
            "v1"
        });
        child
            .stdin(OwnedFd::from(theirs))
            .stdout(writer.try_clone()?)
            .stderr(writer);
        // Reaped with all others.
        let _child = child.spawn().context("start a process for the container")?;
        drop(child); // with it the descriptors that keep both ends open
        let mut reports = BufReader::new(ours.try_clone()?).lines();
        let mut next = || -> Result<Report> {
            let line = reports
                .next()
                .context("the container's process has ended")??;
            Ok(serde_json::from_str(&line)?)
        };
        let Report::Pid(pid) = next()? else {
            bail!("the container's process reports no pid")
        };
        words::child_pid(&asked.id, pid).write();
        words::process_command(&asked.id, &asked.arguments).write();
        work::spend(work::HAND_OVER);
        cgroups.attach(&path, pid)?;
        cgroups.set(&path)?;
        cgroups.allow(&[pod, &path], spec)?;
        (&ours).write_all(b"\n")?;
        loop {
            match next()? {
                Report::Hook(text) => {
                    log::info("hook", &[("container", &asked.id), ("ran", &text)])
                }
                Report::HookFailed(text) => {
                    log::error("hook failed", &[("container", &asked.id), ("ran", &text)]);
                }
                Report::Ready => break,
                Report::Failed(error) => bail!("{error}"),
                Report::Pid(_) => bail!("the container's process reports its pid twice"),
            }
        }
        Ok(Created {
            stdin: Arc::new(stdin),
            stdout: Arc::new(File::from(stdout)),
            fifo,
        })
    }

    /// Lets a created container run its program.
    pub fn start(&self, id: &str) -> Result<()> {
        work::spend(work::START);
        let state = self.lock();
        let created = state
            .containers
            .get(id)
            .with_context(|| format!("no container {id}"))?;
        OpenOptions::new()
            .write(true)
            .open(&created.fifo)?
            .write_all(&[0])?;
        words::started(id).write();
        Ok(())
    }

    fn of_created<T>(&self, id: &str, get: impl FnOnce(&Created) -> T) -> Result<T> {
        self.lock()
            .containers
            .get(id)
            .map(get)
            .with_context(|| format!("no container {id}"))
    }

    /// Reads the next output of a container's program, at most so many bytes. Blocks until there is
    /// some.
    pub fn read(&self, id: &str, most: usize) -> Result<Vec<u8>> {
        let stdout = self.of_created(id, |created| Arc::clone(&created.stdout))?;
        let mut bytes = vec![0; most];
        let length = stdout.as_ref().read(&mut bytes)?;
        ensure!(length > 0, "container {id} writes nothing any more");
        bytes.truncate(length);
        Ok(bytes)
    }

    pub fn write(&self, id: &str, bytes: &[u8]) -> Result<()> {
        let stdin = self.of_created(id, |created| Arc::clone(&created.stdin))?;
        Ok(stdin.as_ref().write_all(bytes)?)
    }

    /// The sandbox and its pause container, without being asked for them.
    pub fn begin(&self) -> Result<()> {
        words::rpc("create_sandbox").write();
        self.create_sandbox()?;
        words::rpc("create_container").write();
        let annotations = HashMap::from([(TYPE.to_string(), "sandbox".to_string())]);
        self.create(&Asked {
            id: PAUSE.into(),
            annotations,
            ..Asked::default()
        })?;
        words::rpc("start_container").write();
        self.start(PAUSE)
    }
}

/// Costs the real agent's computing between exec and its first answer.
pub fn start_up() {
    work::spend(work::START_UP);
}

/// The OCI spec, as Kata's runtime sends it.
pub fn spec(asked: &Asked, rootfs: &Path) -> Result<Spec> {
    let mut spec = serde_json::to_value(container_run::spec(rootfs)?)?;
    spec["process"]["args"] = json!(asked.arguments);
    spec["process"]["env"] =
        json!(["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]);
    let flags = ["nosuid", "noexec", "nodev", "relatime", "ro"];
    let mounts = spec["mounts"]
        .as_array_mut()
        .context("a spec without mounts")?;
    let added = [
        ("/dev/mqueue", "mqueue", &flags[..3]),
        ("/sys/fs/cgroup", "cgroup", &flags),
    ];
    for (destination, kind, options) in added {
        let mount =
            json!({ "destination": destination, "type": kind, "source": kind, "options": options });
        mounts.push(mount);
    }
    spec["linux"] = json!({ "maskedPaths": MASKED, "readonlyPaths": READ_ONLY });
    spec["annotations"] = json!(asked.annotations);
    serde_json::from_value(spec).context("the pod's own spec")
}
