//! What the agent does when it is PID 1, in its order, and where it then powers off without a word.

use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};

/// Type, target, flags of the agent's own mounts.
const MOUNTS: &[(&str, &str, MsFlags)] = &[
    ("proc", "/proc", MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC)),
    ("sysfs", "/sys", MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC)),
    ("devtmpfs", "/dev", MsFlags::MS_NOSUID),
    ("tmpfs", "/dev/shm", MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV)),
    ("devpts", "/dev/pts", MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC)),
    ("tmpfs", "/run", MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV)),
];

/// Ends the guest as the real agent does when something above fails: no message anywhere.
pub fn power_off_silently() -> ! {
    if std::process::id() == 1 {
        let _unused = reboot(RebootMode::RB_POWER_OFF);
    }
    std::process::exit(1)
}

/// The mounts, each unless its type is there already: another type gets covered.
pub fn mount_all() {
    for (fs, target, flags) in MOUNTS {
        if top_type(target).as_deref() == Some(fs) {
            continue;
        }
        let made = std::fs::create_dir_all(target).is_ok() && mount(Some(*fs), *target, Some(*fs), *flags, None::<&str>).is_ok();
        if !made {
            power_off_silently();
        }
    }
}

fn top_type(target: &str) -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/mounts").ok()?;
    mounts
        .lines()
        .rev()
        .map(|l| l.split(' ').collect::<Vec<_>>())
        .find(|w| w.get(1) == Some(&target))
        .and_then(|w| w.get(2).map(|t| (*t).to_string()))
}

/// The rest: cgroup2, ptmx, session. `/` must be a mount point, `/dev/ptmx` must be there, and PID 1 must not be a leader yet.
pub fn become_init(command_line: &str) {
    if top_type("/").is_none() {
        power_off_silently();
    }
    if command_line.split_ascii_whitespace().any(|w| w == "cgroup_no_v1=all") {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_RELATIME;
        if mount(Some("cgroup2"), "/sys/fs/cgroup", Some("cgroup2"), flags, Some("nsdelegate")).is_err() {
            power_off_silently();
        }
    }
    let ptmx = std::fs::remove_file("/dev/ptmx").and_then(|()| std::os::unix::fs::symlink("/dev/pts/ptmx", "/dev/ptmx"));
    if ptmx.is_err() || nix::unistd::setsid().is_err() {
        power_off_silently();
    }
}
