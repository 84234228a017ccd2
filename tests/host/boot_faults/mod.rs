//! A failure means that one system call that fails once, for want of memory, of processes or for an
//! I/O error, costs the guest its agent or its GPUs. The init boots as PID 1 of a process namespace
//! of this machine, without PCI functions; a tracer ([`SOURCE`]) makes one of its calls fail.

use crate::hooks::container::program;
use crate::{make_dir, write};
use kata_gpu_test_guest::own_mounts::in_own_mounts;
use nix::errno::Errno;
use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The tracer.
const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/host/boot_faults/fault.c");
const COMMAND_LINE: &str =
    "gpuinit.lockdown=off gpuinit.events.vsock=off gpuinit.reset=off gpuinit.log=info\n";
/// End of a guest that hangs.
const HANG: Duration = Duration::from_secs(60);
const NONE: Option<&str> = None;
/// Number of times that a call fails which fails for good.
const ALWAYS: usize = 1_000_000;

/// Calls whose one failure costs nothing: name, number, how many of the first ones, error.
const ONCE: &[(&str, libc::c_long, usize, Errno)] = &[
    ("fork", libc::SYS_fork, 1, Errno::EAGAIN),
    ("fork", libc::SYS_fork, 1, Errno::ENOMEM),
    ("clone", libc::SYS_clone, 1, Errno::EAGAIN),
    ("socketpair", libc::SYS_socketpair, 1, Errno::EMFILE),
    ("execve", libc::SYS_execve, 1, Errno::ENOMEM),
    ("execve", libc::SYS_execve, 1, Errno::EAGAIN),
    ("mount", libc::SYS_mount, 3, Errno::ENOMEM),
    ("mkdir", libc::SYS_mkdir, 2, Errno::ENOSPC),
    ("dup2", libc::SYS_dup2, 3, Errno::EINTR),
    ("prlimit64", libc::SYS_prlimit64, 1, Errno::EPERM),
    ("write", libc::SYS_write, 2, Errno::EIO),
];

/// A guest's directories, with the mounts that only this thread sees.
struct Guest {
    root: PathBuf,
    devices: PathBuf,
    console: File,
}

impl Guest {
    /// Must be called with mounts of its own.
    fn new(tmp: &Path, init: &Path) -> Self {
        let root = tmp.join("root");
        make_dir(&root);
        let tmpfs = |at: &Path| mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), NONE);
        let bind = |from: &Path, to: &Path| {
            mount(
                Some(from),
                to,
                NONE,
                MsFlags::MS_BIND | MsFlags::MS_REC,
                NONE,
            )
            .unwrap();
            let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
            mount(NONE, to, NONE, read_only, NONE).unwrap();
        };
        tmpfs(&root).unwrap();
        for name in ["proc", "sys", "dev", "run", "tmp", "etc", "var", "usr/bin"] {
            make_dir(root.join(name));
        }
        // Libraries of a program that is not static.
        for name in ["lib", "lib64", "usr/lib"] {
            make_dir(root.join(name));
            if Path::new("/").join(name).is_dir() {
                bind(&Path::new("/").join(name), &root.join(name));
            }
        }
        for name in ["init", "usr/bin/kata-agent"] {
            write(root.join(name), "");
            bind(init, &root.join(name));
        }
        write(root.join("command-line"), COMMAND_LINE);
        bind(Path::new("/sys"), &root.join("sys"));
        let pci = root.join("sys/bus/pci/devices");
        if pci.is_dir() {
            tmpfs(&pci).unwrap();
        }
        // A directory of the machine's devtmpfs, which the init mounts over anything else.
        let devices = Path::new("/dev").join(format!("kata-gpu-faults-{}", std::process::id()));
        make_dir(&devices);
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        mknod(&devices.join("null"), SFlag::S_IFCHR, mode, makedev(1, 3)).unwrap();
        nix::unistd::mkfifo(&devices.join("console"), mode).unwrap();
        let console = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(devices.join("console"))
            .unwrap();
        mount(
            Some(&devices),
            &root.join("dev"),
            NONE,
            MsFlags::MS_BIND,
            NONE,
        )
        .unwrap();
        Self {
            root,
            devices,
            console,
        }
    }

    /// Boots with these calls failing; returns the tracer's line, and the console's text up to
    /// `wanted`.
    fn boot(&mut self, tracer: &Path, fault: [String; 4], wanted: &str) -> (String, String) {
        let mut child = Command::new(tracer)
            .arg(&self.root)
            .args(&fault)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let end = Instant::now() + HANG;
        let (mut console, mut part) = (String::new(), [0; 4096]);
        while !console.contains(wanted) {
            match self.console.read(&mut part) {
                Ok(read) => console += &String::from_utf8_lossy(&part[..read]),
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
            assert!(
                Instant::now() < end,
                "{fault:?}: {line} {wanted:?}: {console}"
            );
        }
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success(), "{fault:?}");
        // The next guest has a /run of its own.
        let _unused = umount2(&self.root.join("run"), MntFlags::MNT_DETACH);
        let _unused = umount2(&self.root.join("proc"), MntFlags::MNT_DETACH);
        (line.trim().to_string(), console)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _unused = umount2(&self.root, MntFlags::MNT_DETACH);
        let _unused = fs::remove_dir_all(&self.devices);
    }
}

#[test]
fn one_failed_call_of_pid_1_costs_neither_the_agent_nor_the_worker() {
    if !cfg!(target_arch = "x86_64") {
        return eprintln!("skipped: the tracer knows the registers of x86-64");
    }
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("skipped: not root, which namespaces need");
    }
    let Some(init) = program() else { return };
    let tmp = kata_gpu_test_support::temp_dir();
    let tracer = tmp.path().join("fault");
    let compiled = Command::new("cc")
        .args(["-o"])
        .arg(&tracer)
        .arg(SOURCE)
        .status();
    match compiled {
        Ok(status) => assert!(status.success(), "cc: {status}"),
        Err(error) => return eprintln!("skipped: cc: {error}"),
    }
    in_own_mounts(|| {
        let mut guest = Guest::new(tmp.path(), &init);
        let fault = |call: libc::c_long, first: usize, count: usize, errno: Errno| {
            [
                call,
                first as _,
                count as _,
                libc::c_long::from(errno as i32),
            ]
            .map(|n| n.to_string())
        };
        let mut failed = 0;
        for (name, call, calls, errno) in ONCE {
            for first in 1..=*calls {
                let fault = fault(*call, first, 1, *errno);
                let (line, console) = guest.boot(&tracer, fault, "\"msg\":\"settled\"");
                let at = format!("{name} {first} {errno}: {line}: {console}");
                assert!(
                    line.starts_with("agent ") && !console.contains("a bug"),
                    "{at}"
                );
                failed += usize::from(line == "agent 1");
            }
        }
        // Calls that another C library makes in their place are not counted.
        assert!(failed >= ONCE.len() - 2, "{failed} calls failed");
        // Negative control: a call that fails for good is seen.
        let fork = [libc::SYS_fork, libc::SYS_clone].map(|call| {
            let fault = fault(call, 1, ALWAYS, Errno::EAGAIN);
            guest.boot(&tracer, fault, "kata-gpu-init").1
        });
        assert!(
            fork.iter().any(|c| c.contains("no GPU will be brought up")),
            "{fork:?}"
        );
        let exec = fault(libc::SYS_execve, 1, ALWAYS, Errno::ENOMEM);
        let (line, console) = guest.boot(&tracer, exec, "powering off");
        assert!(
            line.starts_with("ended ") && console.contains("ENOMEM"),
            "{line}: {console}"
        );
    });
}
