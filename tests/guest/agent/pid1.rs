//! Steps of the agent when it is PID 1, in its order, with the failures after which it powers off
//! without a message.
//!
//! Faithful to the order and the conditions of 4.1.0, also where they look odd: a target counts as
//! mounted by its *first* line of /proc/mounts. The agent tolerates a /dev that cannot be mounted,
//! and failures to take the terminal, to set PATH and to set the host name; every other failure is
//! final.

use crate::sys;
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use std::fmt::Display;
use std::fs;
use std::io;

/// A mount that the agent makes by itself.
struct InitMount {
    fs: &'static str,
    target: &'static str,
    flags: MsFlags,
    data: &'static str,
}

const NO_DEV: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);
const NO_EXEC: MsFlags = NO_DEV.union(MsFlags::MS_NOEXEC);

/// In this order, before the kernel command line is read.
const MOUNTS: &[InitMount] = &[
    InitMount {
        fs: "proc",
        target: "/proc",
        flags: NO_EXEC,
        data: "",
    },
    InitMount {
        fs: "sysfs",
        target: "/sys",
        flags: NO_EXEC,
        data: "",
    },
    InitMount {
        fs: "devtmpfs",
        target: "/dev",
        flags: MsFlags::MS_NOSUID,
        data: "",
    },
    InitMount {
        fs: "tmpfs",
        target: "/dev/shm",
        flags: NO_DEV,
        data: "",
    },
    InitMount {
        fs: "devpts",
        target: "/dev/pts",
        flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC),
        data: "",
    },
    InitMount {
        fs: "tmpfs",
        target: "/run",
        flags: NO_DEV,
        data: "",
    },
];

const CGROUPS: &str = "/sys/fs/cgroup";
const CGROUP2: InitMount = InitMount {
    fs: "cgroup2",
    target: CGROUPS,
    flags: NO_EXEC.union(MsFlags::MS_RELATIME),
    data: "nsdelegate",
};
/// The controllers it knows in version 1; it mounts those that /proc/cgroups has enabled.
const CONTROLLERS: [&str; 13] = [
    "cpu",
    "cpuacct",
    "blkio",
    "cpuset",
    "memory",
    "devices",
    "freezer",
    "net_cls",
    "perf_event",
    "net_prio",
    "hugetlb",
    "pids",
    "rdma",
];

/// Ends the guest as the real agent does when a step fails: no message anywhere, because its log
/// has no reader yet.
pub fn power_off_silently() -> ! {
    nix::unistd::sync();
    // Returns only on failure, and then there is nothing left to try.
    let _unused = reboot(RebootMode::RB_POWER_OFF);
    std::process::exit(1)
}

/// The mounts, each unless its type is there already: another type gets covered.
pub fn mount_all() {
    for m in MOUNTS {
        // A directory that cannot be made is final, a devtmpfs that cannot be mounted is not.
        if fs::create_dir_all(m.target).is_err() || (make(m).is_err() && m.fs != "devtmpfs") {
            power_off_silently();
        }
    }
}

fn make(m: &InitMount) -> nix::Result<()> {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    if first_type(&mounts, m.target) == Some(m.fs) {
        return Ok(());
    }
    mount(Some(m.fs), m.target, Some(m.fs), m.flags, Some(m.data))
}

/// The type of the first file system that was mounted on a target, not of the one on top. A line
/// that is not one of /proc/mounts ends the search.
fn first_type<'a>(mounts: &'a str, target: &str) -> Option<&'a str> {
    mounts
        .lines()
        .map(|l| l.split(' ').collect::<Vec<_>>())
        .take_while(|words| words.len() == 6)
        .find(|w| w[1] == target)
        .map(|w| w[2])
}

/// The rest of what it does as PID 1: cgroups, /dev/ptmx, a session of its own, the console as
/// terminal, environment and host name.
///
/// Fails where PID 1 is the leader of a session or group already, and where there is no /dev/ptmx.
pub fn become_init(unified_cgroups: bool) {
    let leader = || -> Result<(), Box<dyn std::error::Error>> {
        if unified_cgroups {
            fs::create_dir_all(CGROUP2.target)?;
            make(&CGROUP2)?;
        } else {
            mount_cgroups_v1()?;
        }
        fs::remove_file("/dev/ptmx")?;
        std::os::unix::fs::symlink("/dev/pts/ptmx", "/dev/ptmx")?;
        nix::unistd::setsid()?;
        Ok(())
    };
    if leader().is_err() {
        power_off_silently();
    }
    let _unused = sys::take_terminal(); // the real agent ignores a failure
    if let Err(errno) = sys::set_path_single_threaded("/bin:/sbin/:/usr/bin/:/usr/sbin/") {
        super::log::info("failed to set PATH", &[("error", &errno.to_string())]);
    }
    let name = fs::read_to_string("/etc/hostname").unwrap_or_else(|_| "localhost".into());
    if nix::unistd::sethostname(name.split(' ').next().unwrap_or_default().trim()).is_err() {
        super::log::info("failed to set hostname", &[]);
    }
}

/// Version 1: a tmpfs with a directory per controller, then read-only. A kernel without
/// memory.use_hierarchy is the end, also when there is nothing else to mount.
fn mount_cgroups_v1() -> io::Result<()> {
    let tmpfs = |flags| {
        mount(
            Some("tmpfs"),
            CGROUPS,
            Some("tmpfs"),
            NO_EXEC | flags,
            Some("mode=755"),
        )
    };
    let controllers = enabled_controllers(&fs::read_to_string("/proc/cgroups")?);
    if controllers.contains(&"devices") {
        fs::create_dir_all(CGROUPS)?;
        if first_type(&fs::read_to_string("/proc/mounts")?, CGROUPS) != Some("tmpfs") {
            tmpfs(MsFlags::empty())?;
        }
        for controller in controllers {
            let target = format!("{CGROUPS}/{controller}");
            fs::create_dir_all(&target)?;
            if first_type(&fs::read_to_string("/proc/mounts")?, &target) != Some("cgroup") {
                mount(
                    Some("cgroup"),
                    target.as_str(),
                    Some("cgroup"),
                    CGROUP2.flags,
                    Some(controller),
                )?;
            }
        }
        tmpfs(MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY)?;
    }
    fs::write("/sys/fs/cgroup/memory/memory.use_hierarchy", "1")
}

/// Columns of /proc/cgroups, tab-separated: name, hierarchy, number of cgroups, enabled.
fn enabled_controllers(text: &str) -> Vec<&'static str> {
    let enabled = |line: &str| {
        let fields: Vec<&str> = line.split('\t').collect();
        let whole = !line.starts_with('#')
            && fields.len() >= 4
            && fields[3] != "0"
            && fields[1..4].iter().all(|f| f.parse::<u64>().is_ok());
        if whole {
            CONTROLLERS.into_iter().find(|c| *c == fields[0])
        } else {
            None
        }
    };
    text.lines().filter_map(enabled).collect()
}

/// Type of the file system on `/`. The sandbox needs `/` to be a mount point, also when the agent
/// is not PID 1; in a chroot to a plain directory it is not one.
pub fn root_type() -> Result<String, String> {
    const MOUNTSTATS: &str = "/proc/self/mountstats";
    let text = fs::read_to_string(MOUNTSTATS).map_err(|e| format!("read {MOUNTSTATS}: {e}"))?;
    type_in_mountstats(&text, "/")
        .map(str::to_string)
        .ok_or_else(|| format!("no file system is mounted on / in {MOUNTSTATS}"))
}

fn type_in_mountstats<'a>(text: &'a str, target: &str) -> Option<&'a str> {
    let words = format!(" mounted on {target} with fstype ");
    text.lines()
        .filter(|l| l.starts_with("device "))
        .find_map(|l| l.split_once(&words))
        .map(|(_, fs)| fs)
}

/// How a failure after the log has come up ends the agent: silently as PID 1 all the same, with a
/// message and an exit status otherwise.
pub fn give_up(as_pid1: bool, error: &dyn Display) -> ! {
    if as_pid1 {
        power_off_silently();
    }
    eprintln!("Error: {error}");
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "rootfs / rootfs rw 0 0\ntmpfs /run tmpfs rw,nosuid 0 0\nnone /run ramfs \
        rw 0 0\nnone /var/run ramfs rw 0 0\n";

    #[test]
    fn the_first_mount_on_a_target_counts() {
        assert_eq!(first_type(MOUNTS, "/run"), Some("tmpfs"));
        assert_eq!(first_type(MOUNTS, "/"), Some("rootfs"));
        assert_eq!(first_type(MOUNTS, "/proc"), None);
        assert_eq!(first_type("cut\nproc /proc proc rw 0 0\n", "/proc"), None);
    }

    #[test]
    fn a_root_that_is_no_mount_point_is_noticed() {
        let text = "device rootfs mounted on / with fstype rootfs\ndevice proc mounted on /proc \
            with fstype proc\n";
        assert_eq!(type_in_mountstats(text, "/"), Some("rootfs"));
        assert_eq!(
            type_in_mountstats("device proc mounted on /proc with fstype proc\n", "/"),
            None
        );
    }

    #[test]
    fn controllers_that_are_off_or_unknown_are_left_out() {
        let text = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t0\t70\t1\n\
            memory\t0\t70\t0\ndevices\t0\t70\t1\nmisc\t0\t1\t1\ncut\t0\n";
        assert_eq!(enabled_controllers(text), ["cpu", "devices"]);
    }
}
