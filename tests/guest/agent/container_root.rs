//! A container's root, made as kata-agent 4.1.0 makes it: mounts in the order of the OCI spec, with
//! the mount points they need, then device nodes; and the change to it.
//!
//! Faithful also where it matters to what is mounted: a mount point that is there is truncated, a
//! link at a mount point is followed within the root, nothing is mounted below /proc. Not made:
//! SELinux labels, user namespaces.

use super::container;
use super::mount_options::Options;
use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, umask};
use nix::sys::statfs::{PROC_SUPER_MAGIC, statfs};
use oci_spec::runtime::{LinuxDevice, Mount, Spec};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};

const NONE: Option<&str> = None;
/// Most links on the way to a mount point.
const MAX_LINKS: usize = 255;
/// Nodes that every container has in /dev: name and minor number, of major number 1 or 5.
const DEFAULT_NODES: [(&str, u64, u64); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("tty", 5, 0),
    ("urandom", 1, 9),
    ("random", 1, 8),
];
/// Links in /dev, and where they lead.
const DEV_LINKS: [(&str, &str); 5] = [
    ("kcore", "/proc/kcore"),
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
];
/// Files of /proc that may be mounted over: those that lxcfs has.
const PROC_FILES: [&str; 8] = [
    "/proc/cpuinfo",
    "/proc/diskstats",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/swaps",
    "/proc/uptime",
    "/proc/loadavg",
    "/proc/net/dev",
];

/// How a process comes to have the container's root as its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    PivotRoot,
    /// On the kernel's own rootfs, of an initrd, where pivot_root is refused.
    Move,
}

const CHANGES: [(&str, Change); 2] = [("pivot", Change::PivotRoot), ("move", Change::Move)];

impl Change {
    /// Its word on a command line.
    pub fn word(self) -> &'static str {
        CHANGES
            .iter()
            .find(|(_, change)| *change == self)
            .map_or("", |(word, _)| word)
    }

    pub fn from_word(word: &str) -> Option<Self> {
        CHANGES
            .iter()
            .find(|(known, _)| *known == word)
            .map(|(_, change)| *change)
    }

    /// By the type of the file system on `/`.
    pub fn of(root_type: &str) -> Self {
        if root_type == "rootfs" {
            Self::Move
        } else {
            Self::PivotRoot
        }
    }
}

/// Makes the root of a spec, in a mount namespace of this process's own; gives its path.
pub fn make(spec: &Spec) -> Result<PathBuf> {
    let path = spec.root().as_ref().context("the spec has no root")?.path();
    let root =
        fs::canonicalize(path).with_context(|| format!("canonicalize {}", path.display()))?;
    mount(NONE, "/", NONE, MsFlags::MS_SLAVE | MsFlags::MS_REC, NONE).context("make / a slave")?;
    mount(
        Some(&root),
        &root,
        NONE,
        MsFlags::MS_BIND | MsFlags::MS_REC,
        NONE,
    )
    .context("bind the root to itself")?;
    let mut guests_dev = false;
    for m in spec.mounts().iter().flatten() {
        guests_dev |= make_mount(&root, m)?;
    }
    // A /dev of the guest's own has everything already.
    if !guests_dev {
        let devices = spec
            .linux()
            .as_ref()
            .and_then(|l| l.devices().clone())
            .unwrap_or_default();
        make_dev(&root, &devices)?;
    }
    Ok(root)
}

/// The destination of a mount, if kata-agent takes it: its error for another one has the text, and
/// goes to the runtime.
pub fn destination(m: &Mount) -> Result<&str> {
    let destination = m.destination().to_str().context("its path is no text")?;
    ensure!(
        destination.starts_with('/') && !destination.contains(".."),
        "the mount destination {destination} is invalid"
    );
    Ok(destination)
}

/// Makes one mount; true where it is the guest's /dev.
fn make_mount(root: &Path, m: &Mount) -> Result<bool> {
    let destination = destination(m)?;
    mount_at(root, destination, m).with_context(|| format!("mount {destination}"))
}

fn mount_at(root: &Path, destination: &str, m: &Mount) -> Result<bool> {
    let mut options = Options::parse(m.options().iter().flatten().map(String::as_str));
    let kind = match m.typ().as_deref() {
        None | Some("none") if options.is_bind() => "bind",
        Some("cgroup") => {
            return make_cgroup_mount(&inside(root, destination)?, options.flags).map(|()| false);
        }
        kind => kind.unwrap_or_default(),
    };
    let source = m.source().as_ref().context("it has no source")?;
    if destination == "/dev" {
        options.flags &= !MsFlags::MS_RDONLY;
    }
    let target = inside(root, destination)?;
    let source = if kind == "bind" {
        check_proc(destination, source)?;
        let source = fs::canonicalize(source)
            .with_context(|| format!("canonicalize its source {}", source.display()))?;
        make_mount_point(&source, &target)?;
        source
    } else {
        let _unused = fs::create_dir_all(&target); // the mount reports what is wrong with it
        source.clone()
    };
    let data = Some(options.data.as_str()).filter(|d| !d.is_empty());
    mount(Some(&source), &target, Some(kind), options.flags, data)
        .with_context(|| format!("from {}", source.display()))?;
    if options.needs_remount() {
        mount(
            Some(&target),
            &target,
            NONE,
            options.flags | MsFlags::MS_REMOUNT,
            NONE,
        )
        .context("its flags")?;
    }
    if kind == "bind" && !options.propagation.is_empty() {
        mount(NONE, &target, NONE, options.propagation, NONE).context("its propagation")?;
    }
    Ok(destination == "/dev" && kind == "bind")
}

/// Binds a directory or file to another.
pub fn bind(source: &Path, target: &Path) -> Result<()> {
    mount(Some(source), target, NONE, MsFlags::MS_BIND, NONE)
        .with_context(|| format!("bind {} to {}", source.display(), target.display()))
}

/// Mounts the cgroups as the guest has them at /sys/fs/cgroup: the file system of version 2, or a
/// tmpfs with a hierarchy per controller.
fn make_cgroup_mount(target: &Path, flags: MsFlags) -> Result<()> {
    const CGROUPS: &str = "/sys/fs/cgroup";
    let _unused = fs::create_dir_all(target); // the mount reports what is wrong with it
    if Path::new(CGROUPS).join("cgroup.controllers").exists() {
        mount(
            Some("cgroup2"),
            target,
            Some("cgroup2"),
            flags & !MsFlags::MS_RDONLY,
            NONE,
        )
        .context("version 2")?;
    } else {
        mount(
            Some("tmpfs"),
            target,
            Some("tmpfs"),
            flags & !MsFlags::MS_RDONLY,
            Some("mode=755"),
        )
        .context("version 1")?;
        for entry in fs::read_dir(CGROUPS)?
            .flatten()
            .filter(|e| e.path().join("cgroup.procs").exists())
        {
            let own = target.join(entry.file_name());
            fs::create_dir_all(&own)?;
            bind(&entry.path(), &own)?;
        }
    }
    mount(
        Some(target),
        target,
        NONE,
        flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND,
        NONE,
    )
    .context("its flags")
}

/// A file or directory to mount this source over. A file that is there loses its content.
fn make_mount_point(source: &Path, target: &Path) -> Result<()> {
    let directory = if source.is_dir() {
        target
    } else {
        target.parent().context("it has no parent")?
    };
    fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
    if !source.is_dir() {
        // A file that is there and not writable can be mounted over all the same.
        let _unused = fs::File::create(target);
    }
    fs::metadata(target)
        .with_context(|| format!("make {}", target.display()))
        .map(drop)
}

/// Refuses a bind mount over the container's /proc, or into it. By the path's text alone.
fn check_proc(destination: &str, source: &Path) -> Result<()> {
    if PROC_FILES.contains(&destination) {
        return Ok(());
    }
    if destination == "/proc" {
        ensure!(
            statfs(source)?.filesystem_type() == PROC_SUPER_MAGIC,
            "{} is not of type proc",
            source.display()
        );
        return Ok(());
    }
    ensure!(!destination.starts_with("/proc"), "it is inside /proc");
    Ok(())
}

/// Resolves a path of the container, with links followed as if the root were `/`. A name that is
/// not there is kept as it is.
fn inside(root: &Path, path: &str) -> Result<PathBuf> {
    let mut left = PathBuf::from(path);
    for _ in 0..MAX_LINKS {
        let mut done = PathBuf::new();
        let mut link = None;
        let mut components = left.components();
        while let Some(component) = components.next() {
            match component {
                Component::Normal(name) => match root.join(&done).join(name).read_link() {
                    Ok(to) => {
                        // An absolute one begins at the root again: join does that.
                        link = Some(done.join(to).join(components.as_path()));
                        break;
                    }
                    Err(_) => done.push(name),
                },
                Component::ParentDir => drop(done.pop()),
                Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
            }
        }
        match link {
            Some(path) => left = path,
            None => return Ok(root.join(done)),
        }
    }
    bail!("{path} has too many links")
}

fn make_dev(root: &Path, devices: &[LinuxDevice]) -> Result<()> {
    let dev = root.join("dev");
    for (name, to) in DEV_LINKS {
        if name != "kcore" || Path::new(to).exists() {
            symlink(to, dev.join(name)).with_context(|| format!("link /dev/{name}"))?;
        }
    }
    let mask = umask(Mode::empty());
    for (name, major, minor) in DEFAULT_NODES {
        let number = nix::sys::stat::makedev(major, minor);
        let mode = Mode::from_bits_truncate(0o666);
        nix::sys::stat::mknod(
            &dev.join(name),
            nix::sys::stat::SFlag::S_IFCHR,
            mode,
            number,
        )
        .with_context(|| format!("make /dev/{name}"))?;
    }
    for device in devices {
        container::node(root, device).map_err(anyhow::Error::msg)?;
    }
    umask(mask);
    let _unused = fs::remove_file(dev.join("ptmx")); // mostly not there
    symlink("pts/ptmx", dev.join("ptmx")).context("link /dev/ptmx")
}

/// Makes the container's root this process's.
pub fn enter(root: &Path, change: Change) -> Result<()> {
    match change {
        Change::PivotRoot => pivot(root).context("pivot_root")?,
        Change::Move => move_root(root).context("move the root")?,
    }
    std::env::set_current_dir("/")?;
    umask(Mode::from_bits_truncate(0o022));
    Ok(())
}

fn pivot(root: &Path) -> Result<()> {
    let old = fs::File::open("/")?;
    std::env::set_current_dir(root)?;
    // The old root lies on top of the new one until it is unmounted.
    nix::unistd::pivot_root(".", ".")?;
    nix::unistd::fchdir(&old)?;
    mount(NONE, ".", NONE, MsFlags::MS_SLAVE | MsFlags::MS_REC, NONE)?;
    umount2(".", MntFlags::MNT_DETACH)?;
    Ok(())
}

/// The guest's proc and sysfs go first: what is moved over keeps what is below from sight only as
/// long as nobody finds a way down.
fn move_root(root: &Path) -> Result<()> {
    std::env::set_current_dir(root)?;
    for (point, kind) in mounts(&fs::read_to_string("/proc/self/mountinfo")?) {
        if (kind != "proc" && kind != "sysfs") || Path::new(point).starts_with(root) {
            continue;
        }
        mount(NONE, point, NONE, MsFlags::MS_SLAVE | MsFlags::MS_REC, NONE)
            .with_context(|| format!("make {point} a slave"))?;
        match umount2(point, MntFlags::MNT_DETACH) {
            Err(Errno::EINVAL | Errno::EPERM) => {
                mount(Some("tmpfs"), point, Some("tmpfs"), MsFlags::empty(), NONE)?
            }
            other => other.with_context(|| format!("unmount {point}"))?,
        }
    }
    mount(Some(root), "/", NONE, MsFlags::MS_MOVE, NONE)?;
    nix::unistd::chroot(".")?;
    Ok(())
}

/// Mount point and type of each line of mountinfo.
fn mounts(mountinfo: &str) -> impl Iterator<Item = (&str, &str)> {
    mountinfo.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        Some((before.split(' ').nth(4)?, after.split(' ').next()?))
    })
}

/// Finishes the root from within: read-only paths and masked paths.
pub fn finish(spec: &Spec) -> Result<()> {
    let read_only = |path: &str, flags: MsFlags| {
        mount(
            Some(path),
            path,
            NONE,
            flags | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY,
            NONE,
        )
        .with_context(|| format!("make {path} read-only"))
    };
    for m in spec
        .mounts()
        .iter()
        .flatten()
        .filter(|m| m.destination() == Path::new("/dev"))
    {
        let options = Options::parse(m.options().iter().flatten().map(String::as_str));
        if options.flags.contains(MsFlags::MS_RDONLY) {
            read_only("/dev", options.flags)?;
        }
    }
    if let Some(linux) = spec.linux() {
        for path in linux.masked_paths().iter().flatten() {
            match bind(Path::new("/dev/null"), Path::new(path)) {
                Err(error) if !is_of_no_use(&error) => return Err(error),
                _ => {}
            }
        }
        for path in linux.readonly_paths().iter().flatten() {
            match mount(
                Some(path.as_str()),
                path.as_str(),
                NONE,
                MsFlags::MS_BIND | MsFlags::MS_REC,
                NONE,
            ) {
                Err(Errno::ENOENT) => continue,
                other => other.with_context(|| format!("bind {path}"))?,
            }
            read_only(path, MsFlags::MS_BIND | MsFlags::MS_REC)?;
        }
    }
    if spec
        .root()
        .as_ref()
        .and_then(|r| r.readonly())
        .unwrap_or_default()
    {
        read_only("/", MsFlags::MS_BIND | MsFlags::MS_NODEV)?;
    }
    Ok(())
}

/// A masked path that is not there, or is a directory: the real agent passes over both.
fn is_of_no_use(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<Errno>(),
        Some(Errno::ENOENT | Errno::ENOTDIR)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn links_on_the_way_to_a_mount_point_stay_in_the_root() {
        let folder = temp_dir();
        let root = folder.path();
        fs::create_dir_all(root.join("usr/lib")).unwrap();
        for (link, to) in [
            ("lib", "usr/lib"),
            ("abs", "/usr/lib"),
            ("out", "../../../etc"),
            ("usr/lib/libcuda.so.1", "libcuda.so.535"),
            ("loop", "loop"),
        ] {
            symlink(to, root.join(link)).unwrap();
        }
        for (path, wanted) in [
            ("/lib/libcuda.so.1", "usr/lib/libcuda.so.535"),
            ("/abs/a/b", "usr/lib/a/b"),
            ("/out/ld.so.cache", "etc/ld.so.cache"),
            ("/new/./file", "new/file"),
        ] {
            assert_eq!(inside(root, path).unwrap(), root.join(wanted), "{path}");
        }
        assert!(
            inside(root, "/loop/x")
                .unwrap_err()
                .to_string()
                .contains("too many links")
        );
    }

    #[test]
    fn nothing_is_bound_below_proc() {
        for (destination, source, taken) in [
            ("/proc/driver/nvidia/params", "/dev/null", false),
            ("/process", "/dev/null", false),
            ("/proc", "/tmp", false),
            ("/proc", "/proc", true),
            ("/proc/meminfo", "/dev/null", true),
            ("/usr/proc/x", "/dev/null", true),
        ] {
            assert_eq!(
                check_proc(destination, Path::new(source)).is_ok(),
                taken,
                "{destination} {source}"
            );
        }
    }
}
