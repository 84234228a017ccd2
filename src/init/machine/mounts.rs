//! File systems of a guest: those needed before anything else, and those that the agent would mount
//! if it were PID 1.
//!
//! Types matter as much as paths: the agent mounts each of these itself unless the same *type* is
//! mounted already; another type on /run would be covered, and the CDI spec with it. Nothing here
//! mounts over a mount of the right type.

use crate::machine::files::errno;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use std::path::Path;

/// A mount.
pub struct Mount {
    pub fs: &'static str,
    pub target: &'static str,
    flags: MsFlags,
    data: &'static str,
}

const NO_EXEC: MsFlags = MsFlags::MS_NOSUID
    .union(MsFlags::MS_NODEV)
    .union(MsFlags::MS_NOEXEC);

/// Mounts made before everything else, in this order: /proc first, because it lists the mounts.
pub const EARLY: &[Mount] = &[
    Mount {
        fs: "proc",
        target: "/proc",
        flags: NO_EXEC,
        data: "",
    },
    Mount {
        fs: "sysfs",
        target: "/sys",
        flags: NO_EXEC,
        data: "",
    },
    Mount {
        fs: "devtmpfs",
        target: "/dev",
        flags: MsFlags::MS_NOSUID,
        data: "mode=0755",
    },
    Mount {
        fs: "tmpfs",
        target: "/run",
        flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV),
        data: "mode=0755",
    },
];

/// Mounts that the agent makes as PID 1 and leaves to its init otherwise (`gpuinit.agent=child`).
pub const FOR_AGENT_AS_CHILD: &[Mount] = &[
    Mount {
        fs: "tmpfs",
        target: "/dev/shm",
        flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV),
        data: "mode=1777",
    },
    Mount {
        fs: "devpts",
        target: "/dev/pts",
        flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC),
        data: "mode=0620,ptmxmode=0666",
    },
];

const CGROUP2: Mount = Mount {
    fs: "cgroup2",
    target: CGROUPS,
    flags: NO_EXEC,
    data: "nsdelegate",
};
/// Mount point of both cgroup versions.
const CGROUPS: &str = "/sys/fs/cgroup";
/// Controllers of version 1 that the agent mounts (kata-agent 4.1.0), where the kernel has them.
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

/// The error of a mount.
fn failed(fs: &str, target: &str, errno: Errno) -> String {
    let why = match errno {
        Errno::ENODEV => " (the kernel was built without it)",
        Errno::ENOENT => " (the image has no such directory and it could not be made)",
        _ => "",
    };
    format!("mount {fs} on {target}: {errno}{why}")
}

/// Makes all mounts of a table that are missing. A failure does not stop the others; the errors are
/// returned.
pub fn make(table: &[Mount]) -> Vec<String> {
    table.iter().filter_map(|m| make_one(m).err()).collect()
}

/// Mounts the version of cgroups that the agent would mount as PID 1 (`gpuinit.agent=child`): 2 if
/// the kernel command line asks for it, else 1, each controller by itself, in a tmpfs that is
/// read-only afterwards.
pub fn make_cgroups(command_line: &str) -> Vec<String> {
    if is_unified(command_line) {
        return make(&[CGROUP2]);
    }
    // Without the list there is no controller; the agent reports that.
    let controllers = controllers(&std::fs::read_to_string("/proc/cgroups").unwrap_or_default());
    let tmpfs = |flags: MsFlags| {
        mount(
            Some("tmpfs"),
            CGROUPS,
            Some("tmpfs"),
            NO_EXEC | flags,
            Some("mode=755"),
        )
    };
    if !is_mounted("tmpfs", CGROUPS)
        && let Err(errno) = tmpfs(MsFlags::empty())
    {
        return vec![failed("tmpfs", CGROUPS, errno)];
    }
    let mut errors = Vec::new();
    for name in controllers {
        let target = Path::new(CGROUPS).join(name);
        let made = std::fs::create_dir_all(&target).map_err(|e| errno(&e));
        match made
            .and_then(|()| mount(Some("cgroup"), &target, Some("cgroup"), NO_EXEC, Some(name)))
        {
            Ok(()) | Err(Errno::EBUSY) => {}
            Err(errno) => errors.push(failed("cgroup", name, errno)),
        }
    }
    // Count memory of a container's children as the container's; kernels since 5.11 always do.
    let _unused = std::fs::write(Path::new(CGROUPS).join("memory/memory.use_hierarchy"), "1");
    if let Err(errno) = tmpfs(MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY) {
        errors.push(failed("tmpfs", CGROUPS, errno));
    }
    errors
}

/// Whether the agent uses version 2, by the words that the agent searches for.
fn is_unified(command_line: &str) -> bool {
    let words = || command_line.split_ascii_whitespace();
    let systemd = words()
        .filter_map(|w| w.strip_prefix("systemd.unified_cgroup_hierarchy="))
        .next_back();
    words().any(|w| w == "cgroup_no_v1=all")
        || systemd.is_some_and(|v| v == "true" || v.parse::<u64>().is_ok_and(|n| n != 0))
}

/// Enabled controllers in the text of /proc/cgroups: name, hierarchy, number of cgroups, enabled.
fn controllers(text: &str) -> Vec<&'static str> {
    let enabled = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [name, _, _, "1"] = fields[..] else {
            return None;
        };
        CONTROLLERS.into_iter().find(|c| *c == name)
    };
    text.lines().filter_map(enabled).collect()
}

fn make_one(m: &Mount) -> Result<(), String> {
    let failed = |errno| failed(m.fs, m.target, errno);
    if is_new_each_time(m.fs) && is_mounted(m.fs, m.target) {
        return Ok(());
    }
    let mount_it = || mount(Some(m.fs), m.target, Some(m.fs), m.flags, Some(m.data));
    let mut result = mount_it();
    if result == Err(Errno::ENOENT) {
        // The directory may be missing in the image, or in the file system that was mounted a
        // moment ago.
        std::fs::create_dir_all(m.target).map_err(|e| failed(errno(&e)))?;
        result = mount_it();
    }
    match result {
        Ok(()) | Err(Errno::EBUSY) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

/// Whether each mount of this type is a file system of its own, which would cover what is in one
/// that is mounted already: proc since Linux 5.8, devpts since 4.7. Of other types the kernel has
/// one, and returns EBUSY.
fn is_new_each_time(fs: &str) -> bool {
    matches!(fs, "tmpfs" | "proc" | "devpts")
}

/// The text of /proc/self/mounts; empty without /proc.
pub fn text() -> String {
    std::fs::read_to_string("/proc/self/mounts").unwrap_or_default()
}

/// Whether the topmost mount on `target` is of type `fs`. False without /proc.
fn is_mounted(fs: &str, target: &str) -> bool {
    top_type(&text(), target) == Some(fs)
}

/// Type of the last mount on `target` in the text of /proc/mounts.
fn top_type<'a>(mounts: &'a str, target: &str) -> Option<&'a str> {
    let on_target = parsed(mounts).filter(|[_, at, _]| *at == target);
    on_target.last().map(|[.., fs]| fs)
}

/// Device, target and type of each mount in the text of /proc/mounts, which has paths without
/// links.
pub fn parsed(mounts: &str) -> impl Iterator<Item = [&str; 3]> {
    mounts.lines().filter_map(|line| {
        let mut words = line.split(' ');
        Some([words.next()?, words.next()?, words.next()?])
    })
}

/// Mounts a directory on another.
pub fn bind(from: &Path, to: &Path) -> nix::Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)
}

/// Makes `/var/run` a link to `/run`, because the agent reads CDI specs there; where an image's
/// files or a read-only root do not let it, binds `/run` there. `root` is `/` in a guest.
///
/// Error: neither is possible; the text has the cure.
pub fn link_var_run(
    root: &Path,
    bind: impl FnOnce(&Path, &Path) -> nix::Result<()>,
) -> Result<(), String> {
    let link = root.join("var/run");
    if std::fs::read_link(&link).is_ok_and(|to| {
        to == Path::new("../run") || root == Path::new("/") && to == Path::new("/run")
    }) {
        return Ok(()); // as images have it
    }
    if let (Ok(there), Ok(run)) = (
        std::fs::canonicalize(&link),
        std::fs::canonicalize(root.join("run")),
    ) && there == run
    {
        return Ok(());
    }
    // A failure recurs below, where it is reported.
    let _unused = std::fs::create_dir_all(root.join("var"));
    // An empty directory, or a link to somewhere else: both are leftovers of an image build.
    let removed = match std::fs::symlink_metadata(&link) {
        Ok(meta) if meta.is_dir() => std::fs::remove_dir(&link),
        Ok(_) => std::fs::remove_file(&link),
        Err(_) => Ok(()), // not there
    };
    removed
        .and_then(|()| std::os::unix::fs::symlink("../run", &link))
        .or_else(|e| {
            bind(&root.join("run"), &link).map_err(|b| {
                format!(
                    "make /var/run a link to /run: {e}; mount /run there: {b}: kata-agent will not \
                     find the CDI spec; put the link into the image"
                )
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn the_topmost_mount_counts() {
        let mounts = "rootfs / rootfs rw 0 0\ntmpfs /run tmpfs rw 0 0\noverlay /run overlay rw 0 \
            0\nproc /proc proc rw 0 0\n";
        assert_eq!(top_type(mounts, "/run"), Some("overlay"));
        assert_eq!(top_type(mounts, "/proc"), Some("proc"));
        assert_eq!(top_type(mounts, "/sys"), None);
    }

    #[test]
    fn types_of_which_the_kernel_has_one_are_left_to_it() {
        let new: Vec<&str> = EARLY
            .iter()
            .chain(FOR_AGENT_AS_CHILD)
            .map(|m| m.fs)
            .filter(|fs| is_new_each_time(fs))
            .collect();
        assert_eq!(new, ["proc", "tmpfs", "tmpfs", "devpts"]);
        assert!(!is_new_each_time("sysfs") && !is_new_each_time("devtmpfs"));
    }

    #[test]
    fn proc_comes_first_and_every_type_is_the_one_the_agent_expects() {
        assert_eq!(EARLY[0].target, "/proc");
        let table: Vec<(&str, &str)> = EARLY
            .iter()
            .chain(FOR_AGENT_AS_CHILD)
            .map(|m| (m.fs, m.target))
            .collect();
        assert_eq!(
            table,
            [
                ("proc", "/proc"),
                ("sysfs", "/sys"),
                ("devtmpfs", "/dev"),
                ("tmpfs", "/run"),
                ("tmpfs", "/dev/shm"),
                ("devpts", "/dev/pts"),
            ]
        );
    }

    #[test]
    fn cgroups_have_the_version_that_the_agent_takes() {
        for (words, unified) in [
            ("console=ttyS0", false),
            ("console=ttyS0 cgroup_no_v1=all quiet\n", true),
            ("cgroup_no_v1=memory", false),
            ("systemd.unified_cgroup_hierarchy=1", true),
            (
                "systemd.unified_cgroup_hierarchy=1 systemd.unified_cgroup_hierarchy=0",
                false,
            ),
        ] {
            assert_eq!(is_unified(words), unified, "{words}");
        }
        let text = "#subsys_name\thierarchy\tnum_cgroups\tenabled\n\
            cpu\t0\t70\t1\nmemory\t0\t70\t0\ndevices\t0\t70\t1\nmisc\t0\t1\t1\ncut\t0\n";
        assert_eq!(controllers(text), ["cpu", "devices"]);
    }

    #[test]
    fn var_run_leads_to_run_whatever_the_image_has_there() {
        let folder = temp_dir();
        let base = folder.path();
        for case in [
            "missing",
            "empty directory",
            "wrong link",
            "right link",
            "full directory",
        ] {
            let root = base.join(case);
            std::fs::create_dir_all(root.join("run")).unwrap();
            std::fs::create_dir_all(root.join("var")).unwrap();
            let link = root.join("var/run");
            match case {
                "empty directory" => std::fs::create_dir(&link).unwrap(),
                "wrong link" => std::os::unix::fs::symlink("/nowhere", &link).unwrap(),
                "right link" => std::os::unix::fs::symlink("../run", &link).unwrap(),
                "full directory" => std::fs::create_dir_all(link.join("x")).unwrap(),
                _ => {}
            }
            let mut bound = None;
            let result = link_var_run(&root, |from, to| {
                bound = Some((from.to_path_buf(), to.to_path_buf()));
                Ok(())
            });
            assert!(result.is_ok(), "{case}: {result:?}");
            let is_bound = case == "full directory";
            assert_eq!(
                bound,
                is_bound.then(|| (root.join("run"), link.clone())),
                "{case}"
            );
            if is_bound {
                let error = link_var_run(&root, |_, _| Err(Errno::EPERM)).unwrap_err();
                assert!(error.contains("will not find the CDI spec"), "{error}");
            }
            let leads = std::fs::canonicalize(&link).unwrap()
                == std::fs::canonicalize(root.join("run")).unwrap();
            assert_eq!(leads, case != "full directory", "{case}");
        }
    }
}
