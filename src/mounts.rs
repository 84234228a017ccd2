//! The file systems of a guest: what must be there before anything else, and what the agent would mount if it were PID 1.
//!
//! Types matter as much as paths: the agent mounts each of these itself unless the same *type* is there already; another type on /run would
//! be covered, and the CDI spec with it. Nothing here mounts over a mount of the right type.

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use std::fmt;
use std::path::Path;

/// One mount.
pub struct Mount {
    pub fs: &'static str,
    pub target: &'static str,
    flags: MsFlags,
    data: &'static str,
}

const NO_EXEC: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);

/// Before everything else, in this order: /proc first, because it tells what is mounted.
pub const EARLY: &[Mount] = &[
    Mount { fs: "proc", target: "/proc", flags: NO_EXEC, data: "" },
    Mount { fs: "sysfs", target: "/sys", flags: NO_EXEC, data: "" },
    Mount { fs: "devtmpfs", target: "/dev", flags: MsFlags::MS_NOSUID, data: "mode=0755" },
    Mount { fs: "tmpfs", target: "/run", flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV), data: "mode=0755" },
];

/// What the agent mounts as PID 1 and leaves to its init otherwise (`gpuinit.agent=child`).
pub const FOR_AGENT_AS_CHILD: &[Mount] = &[
    Mount { fs: "tmpfs", target: "/dev/shm", flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV), data: "mode=1777" },
    Mount { fs: "devpts", target: "/dev/pts", flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC), data: "mode=0620,ptmxmode=0666" },
    Mount { fs: "cgroup2", target: "/sys/fs/cgroup", flags: NO_EXEC, data: "nsdelegate" },
];

/// A mount that could not be made.
#[derive(Debug)]
pub struct MountError {
    fs: &'static str,
    target: &'static str,
    errno: Errno,
}

impl fmt::Display for MountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mount {} on {}: {}", self.fs, self.target, self.errno)?;
        match self.errno {
            Errno::ENODEV => write!(f, " (the kernel was built without it)"),
            Errno::ENOENT => write!(f, " (the image has no such directory and it could not be made)"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for MountError {}

/// Makes all mounts of a table that are not there yet. A mount that fails does not stop the others; the errors are returned.
pub fn make(table: &[Mount]) -> Vec<MountError> {
    table.iter().filter_map(|m| make_one(m).err()).collect()
}

fn make_one(m: &Mount) -> Result<(), MountError> {
    let failed = |errno| MountError { fs: m.fs, target: m.target, errno };
    if is_mounted(m.fs, m.target) {
        return Ok(());
    }
    // The directory may be part of the image, or may lie in a file system that was mounted a moment ago.
    match std::fs::create_dir_all(m.target) {
        Ok(()) => {}
        Err(e) => return Err(failed(Errno::from_raw(e.raw_os_error().unwrap_or(nix::libc::EIO)))),
    }
    match mount(Some(m.fs), m.target, Some(m.fs), m.flags, Some(m.data)) {
        // The kernel's word for "this very file system is mounted here"; seen for devtmpfs and sysfs when /proc could not tell.
        Ok(()) | Err(Errno::EBUSY) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

/// Whether the topmost mount on `target` is of type `fs`. Without /proc: no.
fn is_mounted(fs: &str, target: &str) -> bool {
    std::fs::read_to_string("/proc/self/mounts").is_ok_and(|mounts| top_type(&mounts, target) == Some(fs))
}

/// Type of the last mount on `target` in the text of /proc/mounts.
fn top_type<'a>(mounts: &'a str, target: &str) -> Option<&'a str> {
    let mut top = None;
    for line in mounts.lines() {
        let mut words = line.split(' ').skip(1);
        if words.next() == Some(target) {
            top = words.next();
        }
    }
    top
}

/// Makes `/var/run` lead to `/run`, where the agent looks for CDI specs. `root` is `/` in a guest.
///
/// Error: `/var/run` is a directory with something in it, or cannot be replaced; the text has the cure.
pub fn link_var_run(root: &Path) -> Result<(), String> {
    let link = root.join("var/run");
    if let (Ok(there), Ok(run)) = (std::fs::canonicalize(&link), std::fs::canonicalize(root.join("run")))
        && there == run
    {
        return Ok(());
    }
    std::fs::create_dir_all(root.join("var")).map_err(|e| format!("make /var: {e}"))?;
    // An empty directory, or a link to somewhere else: both are leftovers of an image build.
    let removed = match std::fs::symlink_metadata(&link) {
        Ok(meta) if meta.is_dir() => std::fs::remove_dir(&link),
        Ok(_) => std::fs::remove_file(&link),
        Err(_) => Ok(()), // not there
    };
    removed
        .and_then(|()| std::os::unix::fs::symlink("../run", &link))
        .map_err(|e| format!("make /var/run a link to /run: {e}: kata-agent will not find the CDI spec; put the link into the image"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_topmost_mount_counts() {
        let mounts = "rootfs / rootfs rw 0 0\ntmpfs /run tmpfs rw 0 0\noverlay /run overlay rw 0 0\nproc /proc proc rw 0 0\n";
        assert_eq!(top_type(mounts, "/run"), Some("overlay"));
        assert_eq!(top_type(mounts, "/proc"), Some("proc"));
        assert_eq!(top_type(mounts, "/sys"), None);
    }

    #[test]
    fn proc_comes_first_and_every_type_is_the_one_the_agent_expects() {
        assert_eq!(EARLY[0].target, "/proc");
        let table: Vec<(&str, &str)> = EARLY.iter().chain(FOR_AGENT_AS_CHILD).map(|m| (m.fs, m.target)).collect();
        assert_eq!(
            table,
            [
                ("proc", "/proc"),
                ("sysfs", "/sys"),
                ("devtmpfs", "/dev"),
                ("tmpfs", "/run"),
                ("tmpfs", "/dev/shm"),
                ("devpts", "/dev/pts"),
                ("cgroup2", "/sys/fs/cgroup"),
            ]
        );
    }

    #[test]
    fn var_run_leads_to_run_whatever_the_image_has_there() {
        let base = std::env::temp_dir().join(format!("kata-gpu-init-var-run-{}", std::process::id()));
        for case in ["missing", "empty directory", "wrong link", "right link", "full directory"] {
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
            let result = link_var_run(&root);
            assert_eq!(result.is_ok(), case != "full directory", "{case}: {result:?}");
            let leads = std::fs::canonicalize(&link).unwrap() == std::fs::canonicalize(root.join("run")).unwrap();
            assert_eq!(leads, case != "full directory", "{case}");
        }
        std::fs::remove_dir_all(&base).unwrap();
    }
}
