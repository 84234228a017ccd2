//! The init as PID 1 of a guest in namespaces of this machine, with kernel, driver and GPUs of the
//! machine ([`SCRIPT`]). The driver is loaded and the GPUs are bound there already: what runs is
//! everything from the scan on: each GPU's open, its publication, hooks, NVML.

use crate::machine::{Machine, command as limited, make_directory, program};
use anyhow::{Context, Result, anyhow, bail, ensure};
use kata_gpu_test_guest::agent::container_run::{PROGRAM, ROOTS, copy_tree};
use kata_gpu_test_guest::own_mounts::in_own_mounts;
use kata_gpu_tests::vm::harness::AgentLine;
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Line, Record};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::pty::openpty;
use nix::sys::stat::{Mode, SFlag, mknod};
use std::fs::{self, File, Permissions};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Makes the mounts that keep the machine as it is, and becomes the init.
const SCRIPT: &str = include_str!("guest");
/// Runs a command (the words after the first) in a cgroup namespace whose root is the cgroup that
/// the first word names. Its processes are in a leaf of it alone, so that the agent can switch
/// controllers on. A mount of cgroups in such a namespace leaves the options of the machine's
/// alone.
const CGROUP_SCRIPT: &str = r#"set -e
cgroup=$1; shift
mkdir "$cgroup" "$cgroup/agent"
echo $$ >"$cgroup/cgroup.procs"
exec unshare --cgroup sh -ec 'echo $$ >"$1/agent/cgroup.procs"; shift; exec "$@"' guest "$cgroup" "$@""#;
/// Nodes that every Linux has in /dev; those of the driver are made by the init.
const NODES: [&str; 10] = [
    "console", "full", "kmsg", "null", "ptmx", "random", "tty", "urandom", "vsock", "zero",
];
/// Parameters of every guest: nothing is loaded, bound, reset or locked, nothing goes to the host.
const PARAMETERS: &str = "gpuinit.bind=insmod gpuinit.reset=off gpuinit.lockdown=off \
    gpuinit.events.vsock=off gpuinit.log=debug cgroup_no_v1=all";
/// Longest wait for the guest, which ends a hang: a GPU's initialisation takes seconds.
const DEADLINE: Duration = Duration::from_secs(180);
const NONE: Option<&str> = None;

/// A guest that has settled, and has ended.
pub struct Guest {
    /// The event stream, a record a line.
    pub stream: String,
    pub console: String,
    /// The CDI spec.
    pub spec: String,
}

impl Guest {
    /// The agent's lines with this message.
    pub fn lines(&self, message: &str) -> impl Iterator<Item = AgentLine> {
        self.console
            .lines()
            .filter_map(AgentLine::parse)
            .filter(move |line| line.get("msg") == message)
    }

    fn line(&self, message: &str, container: &str) -> Option<AgentLine> {
        self.lines(message)
            .find(|line| line.get("container") == container)
    }

    /// Output of a container's program.
    pub fn output(&self, container: &str) -> Result<String> {
        let line = self
            .line("container ended", container)
            .with_context(|| format!("container {container}: {}", self.console))?;
        ensure!(
            line.get("failed hooks").is_empty(),
            "container {container}: {line:?}"
        );
        Ok(line.get("output").to_string())
    }

    /// Why a container was not created.
    pub fn failed(&self, container: &str) -> Option<String> {
        self.line("container failed", container)
            .map(|line| line.get("error").to_string())
    }
}

/// A guest that runs; it ends with this value.
pub struct Running {
    /// Its file system.
    pub root: PathBuf,
    child: Child,
    console: Arc<Mutex<Vec<u8>>>,
    /// Open for as long as the guest runs: a terminal that nobody has open ends its reader.
    _terminal: OwnedFd,
    _directories: Directories,
}

/// Directories on the machine that are a guest's, removed with this value, which comes after the
/// guest's end.
struct Directories {
    root: PathBuf,
    devices: PathBuf,
    cgroup: PathBuf,
}

impl Running {
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&self.console.lock().unwrap_or_else(PoisonError::into_inner))
            .into_owned()
    }

    fn stream(&self) -> String {
        fs::read_to_string(self.root.join("run/kata-gpu-init/boot.ndjson")).unwrap_or_default()
    }

    /// Waits until stream and console have what is waited for.
    pub fn wait(&mut self, wanted: impl Fn(&str, &str) -> bool) -> Result<Guest> {
        let end = Instant::now() + DEADLINE;
        loop {
            let (stream, console) = (self.stream(), self.console());
            if wanted(&stream, &console) {
                // Read last: the init reports each look at the spec.
                let spec = fs::read_to_string(self.root.join("run/cdi/nvidia.yaml"))
                    .context("read the guest's spec")?;
                return Ok(Guest {
                    stream,
                    console,
                    spec,
                });
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("the guest has ended: {status}: {console}\n{stream}");
            }
            ensure!(
                Instant::now() < end,
                "not within {DEADLINE:?}: {console}\n{stream}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _unused = self.child.kill(); // unshare's option ends the guest with it
        let _unused = self.child.wait();
    }
}

impl Drop for Directories {
    fn drop(&mut self) {
        until_done(|| !self.devices.exists() || fs::remove_dir_all(&self.devices).is_ok());
        // The guest's namespace has its own mounts; these are the ones made before it.
        let _unused = umount2(&self.root, MntFlags::MNT_DETACH);
        // Never what a mount that is still there leads to: the directory is empty now, or stays.
        let _unused = fs::remove_dir(&self.root);
        remove_cgroups(&self.cgroup);
    }
}

/// Removes a cgroup and those below it, whose processes are ending.
fn remove_cgroups(cgroup: &Path) {
    for entry in fs::read_dir(cgroup)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|e| e.path().is_dir())
    {
        remove_cgroups(&entry.path());
    }
    until_done(|| !cgroup.exists() || fs::remove_dir(cgroup).is_ok());
}

/// Tries for some seconds: processes that were killed end one after another.
fn until_done(done: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(5);
    while !done() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Records of this name that the guest has made. The kernel's log, which the init reads from its
/// beginning, has those of earlier guests.
pub fn named(stream: &str, name: &str) -> Vec<Record> {
    let record = |line: &str| match decode(line.as_bytes()) {
        Ok(Line::Record(record)) => Some(*record),
        _ => None,
    };
    let records: Vec<Record> = stream.lines().filter_map(record).collect();
    let Some(start_ns) = records
        .iter()
        .find(|r| r.name == names::INIT_START)
        .map(|r| r.boottime_ns)
    else {
        return Vec::new();
    };
    records
        .into_iter()
        .filter(|r| r.name == name && r.boottime_ns >= start_ns)
        .collect()
}

/// Boots a guest of the test agent with these words on its command line, and waits until it has
/// settled, each of its containers has ended or failed, and stream and console have what is waited
/// for.
pub fn boot(
    machine: &Machine,
    words: &str,
    until: impl Fn(&str, &str) -> bool + Sync,
) -> Result<Guest> {
    let containers = words
        .split(['=', ';'])
        .filter(|word| word.contains(':'))
        .count();
    with(
        machine,
        &machine.folder.program("kata-agent"),
        words,
        |guest| {
            guest.wait(|stream, console| {
                let ended = |line: &AgentLine| {
                    ["container ended", "container failed"].contains(&line.get("msg"))
                };
                let over = console
                    .lines()
                    .filter_map(AgentLine::parse)
                    .filter(ended)
                    .count();
                over >= containers
                    && !named(stream, names::SETTLED).is_empty()
                    && until(stream, console)
            })
        },
    )
}

/// Boots a guest of this agent, and does something with it.
pub fn with<T: Send>(
    machine: &Machine,
    agent: &Path,
    words: &str,
    act: impl FnOnce(&mut Running) -> Result<T> + Send,
) -> Result<T> {
    in_own_mounts(|| act(&mut start(machine, agent, words)?))
}

fn start(machine: &Machine, agent: &Path, words: &str) -> Result<Running> {
    let name = format!("kata-gpu-real-{}", std::process::id());
    let of_guest = |parent: &Path| parent.join(&name);
    let root = of_guest(&std::env::temp_dir());
    make_directory(&root)?;
    let (devices, cgroup) = (
        of_guest(Path::new("/dev")),
        of_guest(Path::new("/sys/fs/cgroup")),
    );
    let directories = Directories {
        root: root.clone(),
        devices: devices.clone(),
        cgroup: cgroup.clone(),
    };
    mount(
        Some("tmpfs"),
        &root,
        Some("tmpfs"),
        MsFlags::empty(),
        Some("mode=755"),
    )?;
    make_root(machine, agent, &root).context("make the guest's root")?;
    // The guest's /run, which this side reads.
    mount(
        Some("tmpfs"),
        &root.join("run"),
        Some("tmpfs"),
        MsFlags::empty(),
        Some("mode=755"),
    )?;
    let command_line = root.join("command-line");
    fs::write(&command_line, format!("{PARAMETERS} {words}\n"))?;

    let terminal = openpty(None, None).context("open a terminal")?;
    for descriptor in [&terminal.master, &terminal.slave] {
        fcntl(descriptor, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    }
    let tty = nix::unistd::ttyname(&terminal.slave)?;
    let console = Arc::new(Mutex::new(Vec::new()));
    let (mut from, to) = (File::from(terminal.master), Arc::clone(&console));
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        // A terminal that nobody has open any more returns an error.
        while let Ok(read @ 1..) = from.read(&mut bytes) {
            to.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .extend_from_slice(&bytes[..read]);
        }
    });
    // The guest ends with this program, too.
    let mut command = Command::new(program("setpriv").context("no setpriv (util-linux)")?);
    command
        .args(["--pdeathsig", "KILL", "sh", "-c", CGROUP_SCRIPT, "guest"])
        .arg(&cgroup);
    command.args([
        "unshare",
        "--fork",
        "--kill-child",
        "--pid",
        "--mount",
        "--uts",
        "--ipc",
        "sh",
        "-c",
        SCRIPT,
        "guest",
    ]);
    command.arg(&root).arg(&command_line).arg(tty).arg(&devices);
    make_devices(&devices)?;
    let child = command.spawn().context("start unshare")?;
    Ok(Running {
        root,
        child,
        console,
        _terminal: terminal.slave,
        _directories: directories,
    })
}

/// Makes the guest's /dev: a directory of the machine's, as another one would have to be mounted,
/// and the init mounts that over all but this.
fn make_devices(devices: &Path) -> Result<()> {
    make_directory(devices)?;
    for name in ["pts", "shm"] {
        fs::create_dir(devices.join(name))?;
    }
    for name in NODES {
        // A machine may have no vsock, and may have a link in the place of ptmx.
        let Ok(stat) = nix::sys::stat::stat(&Path::new("/dev").join(name)) else {
            continue;
        };
        let node = devices.join(name);
        mknod(&node, SFlag::S_IFCHR, Mode::empty(), stat.st_rdev)
            .with_context(|| format!("make {}", node.display()))?;
        fs::set_permissions(&node, Permissions::from_mode(stat.st_mode))?;
    }
    Ok(fs::set_permissions(devices, Permissions::from_mode(0o755))?)
}

/// Makes the root of a guest with the driver's files where packages have them.
fn make_root(machine: &Machine, agent: &Path, root: &Path) -> Result<()> {
    for folder in [
        "proc", "sys", "dev", "run", "tmp", "etc", "var", "usr/bin", "usr/sbin",
    ] {
        fs::create_dir_all(root.join(folder))?;
    }
    let containers = root.join(ROOTS.trim_start_matches('/'));
    for name in ["root", "faulty"] {
        copy_tree(&machine.folder.program("root"), &containers.join(name))?;
    }
    fs::copy(
        machine.folder.program("cuda-fault"),
        containers
            .join("faulty")
            .join(PROGRAM.trim_start_matches('/')),
    )?;
    fs::copy(machine.folder.program("kata-gpu-init"), root.join("init"))?;
    fs::copy(agent, root.join("usr/bin/kata-agent"))
        .with_context(|| format!("copy {}", agent.display()))?;
    fs::copy(
        machine.folder.program("kata-gpu-nvml"),
        root.join("usr/bin/kata-gpu-nvml"),
    )?;
    symlink("usr/bin", root.join("bin"))?;
    let libraries = root.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
    fs::create_dir_all(&libraries)?;
    bind(&machine.libraries, &libraries)?;
    if let Some(smi) = program("nvidia-smi") {
        let target = root.join("usr/bin/nvidia-smi");
        File::create(&target)?;
        bind(&fs::canonicalize(smi)?, &target)?;
    }
    make_glibc(machine, root)?;
    // The driver is in the kernel: it is not loaded, but the index must name it.
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let modules = root.join("lib/modules").join(kernel.trim());
    fs::create_dir_all(&modules)?;
    Ok(fs::write(
        modules.join("modules.dep"),
        "extra/nvidia.ko:\nextra/nvidia-uvm.ko: extra/nvidia.ko\n",
    )?)
}

/// The machine's loader and the libraries that NVML and its helper need.
fn make_glibc(machine: &Machine, root: &Path) -> Result<()> {
    let mut command = limited("ldd");
    command
        .arg(machine.folder.program("kata-gpu-nvml"))
        .arg(machine.libraries.join("libnvidia-ml.so.1"));
    let text = crate::machine::run(&mut command)?;
    // `NAME => FILE (ADDRESS)`; a line `FILE:` names what the lines below belong to.
    let files: Vec<&str> = text
        .split_whitespace()
        .filter(|word| word.starts_with('/') && !word.ends_with(':'))
        .collect();
    ensure!(files.len() >= 2, "ldd lists no libraries: {text}");
    for file in files {
        let file = Path::new(file);
        // The loader lies where programs name it; others in a folder that it searches.
        let loader = file
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("ld-linux"));
        let folder = if loader {
            file.parent()
        } else {
            Some(Path::new("/lib"))
        }
        .context("a library's folder")?;
        let folder = root.join(folder.strip_prefix("/").unwrap_or(folder));
        fs::create_dir_all(&folder)?;
        fs::copy(
            file,
            folder.join(file.file_name().context("a library's name")?),
        )
        .with_context(|| format!("copy {}", file.display()))?;
    }
    Ok(())
}

fn bind(source: &Path, target: &Path) -> Result<()> {
    let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(Some(source), target, NONE, MsFlags::MS_BIND, NONE)
        .map_err(|e| anyhow!("bind {} to {}: {e}", source.display(), target.display()))?;
    Ok(mount(NONE, target, NONE, read_only, NONE)?)
}
