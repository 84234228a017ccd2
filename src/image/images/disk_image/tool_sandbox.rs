//! Runs fsck.erofs in a sandbox: as nobody or the caller, without
//! capabilities, in namespaces of their own, with the system's programs read-only, no network, and
//! one directory for input and output.
//!
//! The program and its argument are fixed. This program executes itself again to enter
//! the namespaces while it has one thread.

use crate::doing::Doing;
use crate::images::entry_text::escaped;
use crate::images::scratch_dir::ScratchDir;
use anyhow::{Context, Result, bail, ensure};
use memchr::memmem;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{Gid, Uid, chdir, getegid, geteuid, pivot_root, setgid, setgroups, setuid};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Paths in the directory, as the sandboxed programs see them.
const DIRECTORY: &str = "/work";
const IMAGE: &str = "/work/root.img";
/// Directory of the new root, in the work directory.
const ROOT: &str = "root";
/// Directories of programs and their libraries.
const SYSTEM: [&str; 7] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];
const PROGRAMS: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
/// User id of nobody, which root becomes.
const NOBODY: u32 = 65_534;
const MAX_MEMORY: u64 = 4 << 30;
const MAX_CPU_S: u64 = 900;
/// Exit status if the program was not started.
const NOT_STARTED: u8 = 125;
/// Lines of a program's output in an error.
const LINES: usize = 3;
const CURE: &str = "user namespaces are needed: allow them (sysctl user.max_user_namespaces above \
                    0, kernel.unprivileged_userns_clone=1, \
kernel.apparmor_restrict_unprivileged_userns=0), or do this outside the container";

/// The program, and its package.
const PROGRAM: &str = "fsck.erofs";
const PACKAGE: &str = "erofs-utils";

fn program() -> Result<PathBuf> {
    PROGRAMS
        .iter()
        .map(|directory| Path::new(directory).join(PROGRAM))
        .find(|path| path.exists())
        .with_context(|| format!("{PROGRAM} is missing: install the package {PACKAGE}"))
}

/// A directory for input and output, removed at the end. Its parent belongs to the caller, so other
/// processes of nobody cannot reach it.
#[derive(Debug)]
pub struct Work {
    _own: ScratchDir,
    inside: PathBuf,
}

impl Work {
    pub fn new() -> Result<Self> {
        let own = ScratchDir::new("image")?;
        let work = Self {
            inside: own.path().join("work"),
            _own: own,
        };
        let make = |path: &Path| fs::create_dir(path).doing("make directory", path);
        make(&work.inside)?;
        make(&work.inside.join(ROOT))?;
        Ok(work)
    }

    /// The host's path of a path in the sandbox.
    pub fn path(&self, inside: &str) -> PathBuf {
        self.inside
            .join(inside.trim_start_matches(DIRECTORY).trim_start_matches('/'))
    }

    pub fn image(&self) -> PathBuf {
        self.path(IMAGE)
    }

    /// Checks the image; returns whether it is sound, and the end of the program's output.
    pub fn check(&self) -> Result<(bool, String)> {
        program()?;
        if becomes_nobody() {
            let own = |path: &Path| {
                std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).doing("give away", path)
            };
            own(&self.inside)?;
            for entry in fs::read_dir(&self.inside).doing("read", &self.inside)? {
                own(&entry?.path())?;
            }
        }
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["image", "in-sandbox"])
            .arg(&self.inside)
            .env_clear()
            .env("LC_ALL", "C")
            .stdin(Stdio::null());
        let output = command
            .output()
            .context("run this program again for a sandbox")?;
        let text: Vec<u8> = [output.stdout, output.stderr].concat();
        let lines: Vec<String> = text
            .split(|b| *b == b'\n')
            .filter(|line| !line.is_empty())
            .map(escaped)
            .collect();
        let said = lines
            .get(lines.len().saturating_sub(LINES)..)
            .unwrap_or_default()
            .join("; ");
        ensure!(
            output.status.code() != Some(i32::from(NOT_STARTED)),
            "{said}"
        );
        // fsck.erofs exits with 0 despite a wrong checksum.
        let is_error = memmem::find(&text, b"<E>").is_some();
        Ok((
            output.status.success() && !is_error,
            if said.is_empty() {
                output.status.to_string()
            } else {
                said
            },
        ))
    }
}

/// Whether the caller is root and can become nobody. In a user namespace that does not map nobody,
/// root is an unprivileged user outside already.
fn becomes_nobody() -> bool {
    let covers = |line: &str| {
        let mut numbers = line
            .split_whitespace()
            .map(|word| word.parse::<u64>().unwrap_or(0));
        let (first, _, count) = (
            numbers.next().unwrap_or(0),
            numbers.next(),
            numbers.next().unwrap_or(0),
        );
        (first..first.saturating_add(count)).contains(&u64::from(NOBODY))
    };
    let maps = |path: &str| fs::read_to_string(path).is_ok_and(|map| map.lines().any(covers));
    geteuid().is_root() && maps("/proc/self/uid_map") && maps("/proc/self/gid_map")
}

/// `image in-sandbox`: enters the namespaces and runs the program there.
pub fn run_inside(directory: &Path) -> ExitCode {
    let run = || -> Result<u8> {
        let program = program()?;
        enter(directory)?;
        let status = Command::new(program)
            .arg(IMAGE)
            .env_clear()
            .env("LC_ALL", "C")
            .status()
            .with_context(|| format!("run {PROGRAM}"))?;
        match status.code() {
            Some(code) => Ok(code as u8),
            None => bail!(
                "{PROGRAM}: {status}: it needs more than {MAX_MEMORY} bytes of memory or \
                 {MAX_CPU_S} s, or has failed"
            ),
        }
    };
    match run() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::from(NOT_STARTED)
        }
    }
}

fn enter(directory: &Path) -> Result<()> {
    // Enter first: nobody may lack access to the parent directories, and a descriptor would belong
    // to the former mount namespace.
    chdir(directory).doing("enter", directory)?;
    if becomes_nobody() {
        setgroups(&[]).context("leave all groups")?;
        setgid(Gid::from_raw(NOBODY)).context("become group nobody")?;
        setuid(Uid::from_raw(NOBODY)).context("become user nobody")?;
        // Otherwise the process's own files in /proc belong to root.
        prctl::set_dumpable(true).context("open /proc/self again")?;
    }
    prctl::set_pdeathsig(Signal::SIGKILL).context("end with the caller")?;
    prctl::set_no_new_privs().context("set no_new_privs")?;
    let (uid, gid) = (geteuid(), getegid());
    let own = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC;
    unshare(own).map_err(|errno| anyhow::anyhow!("make namespaces: {errno}: {CURE}"))?;
    let write = |path: &str, text: String| {
        fs::write(path, text).with_context(|| format!("write {path}: {CURE}"))
    };
    write("/proc/self/setgroups", "deny".into())?;
    write("/proc/self/uid_map", format!("{NOBODY} {uid} 1"))?;
    write("/proc/self/gid_map", format!("{NOBODY} {gid} 1"))?;
    mounts().context(CURE)?;
    let image = fs::metadata(IMAGE).with_context(|| format!("look at {IMAGE}"))?;
    for (resource, limit) in [
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_CPU, MAX_CPU_S),
        (Resource::RLIMIT_AS, MAX_MEMORY),
        (Resource::RLIMIT_FSIZE, image.len()),
    ] {
        // A stricter limit of the caller's stays: nobody may raise it.
        let (_, most) = getrlimit(resource).with_context(|| format!("read {resource:?}"))?;
        let limit = limit.min(most);
        setrlimit(resource, limit, limit).with_context(|| format!("limit {resource:?}"))?;
    }
    Ok(())
}

/// Mounts the system's programs and the current directory, and nothing else.
fn mounts() -> Result<()> {
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("keep mounts to itself")?;
    let root = Path::new(ROOT);
    let restricted = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(
        Some("none"),
        root,
        Some("tmpfs"),
        restricted,
        Some("size=1m,mode=755"),
    )
    .context("mount a tmpfs")?;
    for name in SYSTEM {
        let (from, to) = (Path::new("/").join(name), root.join(name));
        let Ok(meta) = fs::symlink_metadata(&from) else {
            continue;
        };
        if meta.is_symlink() {
            let target = fs::read_link(&from).doing("read link", &from)?;
            symlink(target, &to).with_context(|| format!("make link {name}"))?;
        } else {
            fs::create_dir(&to).with_context(|| format!("make {name}"))?;
            mount(
                Some(&from),
                &to,
                none,
                MsFlags::MS_BIND | MsFlags::MS_REC,
                none,
            )
            .doing("bind", &from)?;
            let flags = MsFlags::MS_BIND
                | MsFlags::MS_REMOUNT
                | MsFlags::MS_RDONLY
                | restricted
                | locked(&to)?;
            mount(none, &to, none, flags, none)
                .with_context(|| format!("make {} read-only", from.display()))?;
        }
    }
    let inside = root.join(DIRECTORY.trim_start_matches('/'));
    fs::create_dir(&inside).context("make the directory for input and output")?;
    mount(Some("."), &inside, none, MsFlags::MS_BIND, none)
        .context("bind the directory for input and output")?;
    chdir(root).context("enter the new root")?;
    pivot_root(".", ".").context("change the root")?;
    umount2(".", MntFlags::MNT_DETACH).context("leave the old root")?;
    chdir("/").context("enter the new root")
}

/// Mount flags that a user namespace may not clear.
fn locked(path: &Path) -> Result<MsFlags> {
    let flags = statvfs(path)
        .map_err(|errno: Errno| anyhow::anyhow!("look at {}: {errno}", path.display()))?
        .flags();
    let pairs = [
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        #[cfg(not(target_env = "musl"))] // nix lacks the flag; a remount keeps relatime anyway
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ];
    Ok(pairs
        .into_iter()
        .filter(|(fs, _)| flags.contains(*fs))
        .fold(MsFlags::empty(), |all, (_, ms)| all | ms))
}
