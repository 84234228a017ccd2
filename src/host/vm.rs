//! A VM for the demo and the tests: QEMU, and vhost-device-vsock beside it, which needs no kernel
//! module on the host.
//!
//! Invariants:
//! - Both processes end with [`Vm`], and with this process, however it ends: each has a thread of
//!   its own that starts it, waits for it and reaps it. (The kernel's parent-death signal goes off
//!   when the *thread* that forked ends, so no other thread may do it.)
//! - Nothing is polled: the socket is awaited by inotify, the end of a process through a pipe that
//!   closes.
//! - A signal is only ever sent to a process that is not reaped yet.
//!
//! Not a VM manager: no network, disks only for reading, one serial console into a file, and the
//! host side of vsock as unix sockets: what the guest connects to at host port P arrives at
//! `<uds>_P`, which must listen by then.
#![allow(unsafe_code, reason = "pre_exec: a VMM dies with its parent")]

use super::kernel_file;
use super::qemu_machine::{self, Qemu};
use anyhow::{Context, Result, bail};
use kata_gpu_wire::arch::Arch;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, getpid, getppid, pipe2};
use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// Configuration of a VM.
#[derive(Clone, Debug)]
pub struct VmConfig {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    /// A raw image, /dev/vda in the guest, read-only.
    pub disk: Option<PathBuf>,
    /// Bytes that this image gives in a second, at most.
    pub disk_rate: Option<u64>,
    /// More raw images, read-only, each with its serial in the guest.
    pub serial_disks: Vec<(String, PathBuf)>,
    /// The kernel's command line, unchanged.
    pub append: String,
    pub memory_mib: u32,
    pub cpus: u32,
    /// An existing directory for logs and sockets. Its path must be short: see [`Vm::start`].
    pub work_dir: PathBuf,
    /// The program `vhost-device-vsock`; None: the guest has no vsock device.
    pub vhost_device_vsock: Option<PathBuf>,
}

/// A running (or ended) VM. Dropping it kills it.
pub struct Vm {
    // Fields are dropped in this order: QEMU ends before the process behind its vsock device.
    qemu: Process,
    _vsock: Option<Process>,
    uds: PathBuf,
    console: PathBuf,
}

/// The guest's vsock address. 0 to 2 are reserved, and 3 is common in manual use.
const GUEST_CID: u32 = 4;
/// Limit of the start of vhost-device-vsock, which binds its socket within milliseconds.
const VSOCK_DEADLINE: Duration = Duration::from_secs(10);
/// `sun_path` of struct sockaddr_un, with its terminating zero.
const UNIX_PATH_MAX: usize = 108;
/// Length of `_` and the largest port, 4294967295.
const PORT_SUFFIX: usize = 11;
/// Unix socket in place of the guest's vsock: connect and write `CONNECT <port>` to reach the
/// guest; the guest's own connections arrive at `<it>_<port>`.
pub fn uds_path(work_dir: &Path) -> PathBuf {
    work_dir.join("vsock")
}

impl Vm {
    /// Process id of QEMU; None after its end.
    pub fn pid(&self) -> Option<i32> {
        match *self
            .qemu
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
        {
            State::Running(pid) => Some(pid.as_raw()),
            State::Ended(_) => None,
        }
    }

    /// Starts vhost-device-vsock (if configured), then QEMU. Fails if a file is missing, a program
    /// cannot be started, vhost-device-vsock does not listen in time, or the work directory's path
    /// is too long for a unix socket in it (about 90 bytes). A bad command line of QEMU shows as an
    /// early exit, with the message in `work_dir/qemu.log`.
    pub fn start(config: &VmConfig) -> Result<Vm> {
        for (what, path) in [("kernel", &config.kernel), ("initrd", &config.initrd)] {
            File::open(path).with_context(|| format!("vm: open {what} {}", path.display()))?;
        }
        let arch = kernel_file::arch(&config.kernel).context("vm")?;
        let uds = uds_path(&config.work_dir);
        check_socket_path(&uds)?;
        let console = config.work_dir.join("console.log");
        // Readers may open the file before QEMU truncates it, so it must be empty already.
        File::create(&console).with_context(|| format!("vm: create {}", console.display()))?;

        let vhost_user = config.work_dir.join("vhost");
        let vsock = match &config.vhost_device_vsock {
            None => None,
            Some(program) => Some(start_vsock(program, &vhost_user, &uds, &config.work_dir)?),
        };
        let Qemu {
            program, package, ..
        } = *qemu_machine::of(arch);
        let mut command = Command::new(program);
        command.args(qemu_arguments(
            config,
            arch,
            &console,
            vsock.as_ref().map(|_| vhost_user.as_path()),
            kvm_works(arch),
        ));
        let qemu = Process::start(program, command, &config.work_dir.join("qemu.log"))
            .with_context(|| format!("vm: start {program} (Debian package {package})"))?;
        Ok(Vm {
            qemu,
            _vsock: vsock,
            uds,
            console,
        })
    }

    /// See [`uds_path`].
    pub fn uds(&self) -> &Path {
        &self.uds
    }

    /// File with the output of the guest's serial console.
    pub fn console(&self) -> &Path {
        &self.console
    }

    /// Exit status of QEMU, or None while it runs.
    pub fn exited(&mut self) -> Result<Option<ExitStatus>> {
        self.wait(Duration::ZERO)
    }

    /// Waits until QEMU ends (the guest has powered off or reset, or it was killed), at most
    /// `timeout`; None: QEMU still runs.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<ExitStatus>> {
        self.qemu.wait(timeout)
    }

    /// Kills QEMU at once. Safe to call again.
    pub fn kill(&mut self) {
        self.qemu.kill();
    }
}

/// Whether KVM can be used for a guest. On x86-64 /dev/kvm may exist and open where it does not
/// work, so the CPU must report virtualisation; arm64's /proc/cpuinfo has no such flag.
pub fn kvm_works(arch: Arch) -> bool {
    let reports = || cpu_virtualises(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default());
    arch == Arch::OURS
        && (arch == Arch::Aarch64 || reports())
        && File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_ok()
}

fn cpu_virtualises(cpuinfo: &str) -> bool {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| {
            line.split_whitespace()
                .any(|flag| flag == "vmx" || flag == "svm")
        })
}

fn check_socket_path(uds: &Path) -> Result<()> {
    let length = uds.as_os_str().len();
    let limit = UNIX_PATH_MAX - 1 - PORT_SUFFIX;
    if length > limit {
        bail!(
            "vm: {} has {length} bytes, a vsock socket path may have {limit}: use a \
                 work directory with a shorter path",
            uds.display()
        );
    }
    if uds.to_str().is_none_or(|text| text.contains(',')) {
        bail!(
            "vm: {} has a comma in it or is not UTF-8, which QEMU options cannot carry: \
                 use another work directory",
            uds.display()
        );
    }
    Ok(())
}

fn start_vsock(program: &Path, vhost_user: &Path, uds: &Path, work_dir: &Path) -> Result<Process> {
    for path in [vhost_user, uds] {
        match fs::remove_file(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                bail!("vm: remove old socket {}: {e}", path.display())
            }
            _ => {}
        }
    }
    let watch = FileWatch::new(work_dir)?; // before the start, or its socket could come unseen
    let mut command = Command::new(program);
    command.arg("--vm").arg(format!(
        "guest-cid={GUEST_CID},socket={},uds-path={}",
        vhost_user.display(),
        uds.display()
    ));
    let log = work_dir.join("vhost-device-vsock.log");
    let process = Process::start("vhost-device-vsock", command, &log)
        .with_context(|| format!("vm: start {}", program.display()))?;
    // bind() makes the file, listen() follows within microseconds; QEMU needs many milliseconds
    // before it connects.
    let deadline = Instant::now() + VSOCK_DEADLINE;
    while !vhost_user.exists() {
        if let Some(status) = process.wait(Duration::ZERO)? {
            bail!(
                "vm: vhost-device-vsock ended with {status} before it listened; its log: {}",
                tail(&log)
            );
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!(
                "vm: vhost-device-vsock made no {} within {VSOCK_DEADLINE:?}; its log: {}",
                vhost_user.display(),
                tail(&log)
            );
        }
        watch.wait(process.ended.as_fd(), left)?;
    }
    Ok(process)
}

fn qemu_arguments(
    config: &VmConfig,
    arch: Arch,
    console: &Path,
    vhost_user: Option<&Path>,
    kvm: bool,
) -> Vec<String> {
    let Qemu {
        cpu,
        kvm_cpu,
        machine,
        first_slot,
        ..
    } = *qemu_machine::of(arch);
    let mut arguments: Vec<String> = [
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
        "-display",
        "none",
    ]
    .map(String::from)
    .into();
    let mut slots = first_slot.map(|first| first..32);
    let mut place = |device: String| match slots.as_mut().and_then(Iterator::next) {
        Some(slot) => format!("{device},addr={slot:#x}"),
        None => device,
    };
    let mut add = |name: &str, value: String| arguments.extend([name.to_string(), value]);
    add(
        "-accel",
        if kvm { "kvm" } else { "tcg,thread=multi" }.into(),
    );
    add("-cpu", if kvm { kvm_cpu } else { cpu }.into());
    add("-machine", format!("{machine},memory-backend=ram"));
    // vhost-device-vsock reads and writes the guest's rings in place, so the memory must be a
    // shared file.
    add(
        "-object",
        format!(
            "memory-backend-memfd,id=ram,size={}M,share=on",
            config.memory_mib
        ),
    );
    add("-m", format!("{}M", config.memory_mib));
    add("-smp", config.cpus.to_string());
    add("-kernel", config.kernel.display().to_string());
    add("-initrd", config.initrd.display().to_string());
    add("-append", config.append.clone());
    add(
        "-chardev",
        format!("file,id=console,path={}", console.display()),
    );
    add("-serial", "chardev:console".into());
    if let Some(path) = &config.disk {
        let rate = config
            .disk_rate
            .map(|rate| format!("throttling.bps-read={rate},"));
        add(
            "-drive",
            format!(
                "if=none,id=disk,format=raw,readonly=on,{}file={}",
                rate.unwrap_or_default(),
                path.display()
            ),
        );
        add("-device", place("virtio-blk-pci,drive=disk".into()));
    }
    for (at, (serial, path)) in config.serial_disks.iter().enumerate() {
        add(
            "-drive",
            format!(
                "if=none,id=serial{at},format=raw,readonly=on,file={}",
                path.display()
            ),
        );
        add(
            "-device",
            place(format!("virtio-blk-pci,drive=serial{at},serial={serial}")),
        );
    }
    if let Some(path) = vhost_user {
        add(
            "-chardev",
            format!("socket,id=vsock,path={}", path.display()),
        );
        add(
            "-device",
            place("vhost-user-vsock-pci,chardev=vsock".into()),
        );
    }
    arguments
}

/// The last lines of a log, for an error message.
fn tail(log: &Path) -> String {
    let text = fs::read(log)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_else(|e| e.to_string());
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join(" | ")
}

/// Watch for new files in a directory.
struct FileWatch(Inotify);

impl FileWatch {
    fn new(directory: &Path) -> Result<FileWatch> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)
            .context("vm: inotify_init")?;
        inotify
            .add_watch(
                directory,
                AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO,
            )
            .with_context(|| format!("vm: watch the work directory {}", directory.display()))?;
        Ok(FileWatch(inotify))
    }

    /// Returns when a file appeared, `other` is ready, or the time is over; the caller checks
    /// which.
    fn wait(&self, other: BorrowedFd<'_>, timeout: Duration) -> Result<()> {
        poll_until(
            &mut [
                PollFd::new(self.0.as_fd(), PollFlags::POLLIN),
                PollFd::new(other, PollFlags::POLLIN),
            ],
            timeout,
        )?;
        match self.0.read_events() {
            Ok(_) | Err(Errno::EAGAIN) => Ok(()),
            Err(e) => Err(e).context("vm: read inotify"),
        }
    }
}

/// A child process with a thread of its own; killed and reaped when dropped.
pub struct Process {
    state: Arc<Mutex<State>>,
    /// Pipe without data: it reaches its end when the process is reaped.
    ended: OwnedFd,
    thread: Option<std::thread::JoinHandle<()>>,
}

enum State {
    /// Not reaped: its number cannot be reused.
    Running(Pid),
    Ended(ExitStatus),
}

impl Process {
    /// Starts the process, with its output in a file.
    pub fn start(name: &'static str, mut command: Command, log: &Path) -> Result<Process> {
        let output = File::create(log).with_context(|| format!("create {}", log.display()))?;
        command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        let parent = getpid();
        // SAFETY: between fork and exec only prctl and getppid are called, both async-signal-safe;
        // nothing is allocated or locked.
        unsafe {
            command.pre_exec(move || {
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
                // The parent may have died before prctl: then no signal would ever come.
                if getppid() == parent {
                    Ok(())
                } else {
                    Err(Errno::ESRCH.into())
                }
            });
        }
        let (ended, end) = pipe2(OFlag::O_CLOEXEC).context("pipe")?;
        let (sender, started) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                let child = match command.spawn() {
                    Ok(child) => child,
                    Err(e) => return drop(sender.send(Err(e))),
                };
                let pid = Pid::from_raw(child.id() as i32);
                let state = Arc::new(Mutex::new(State::Running(pid)));
                if sender.send(Ok(Arc::clone(&state))).is_ok() {
                    reap(pid, child, &state);
                }
                drop(end); // only now: who wakes up finds the state set
            })
            .context("start a thread")?;
        let state = started
            .recv()
            .context("the thread that starts it ended")?
            .context("exec")?;
        Ok(Process {
            state,
            ended,
            thread: Some(thread),
        })
    }

    /// Exit status; None if the process still runs after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Result<Option<ExitStatus>> {
        let deadline = Instant::now() + timeout;
        loop {
            if let State::Ended(status) = *self.state.lock().unwrap_or_else(PoisonError::into_inner)
            {
                return Ok(Some(status));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            poll_until(
                &mut [PollFd::new(self.ended.as_fd(), PollFlags::POLLIN)],
                left,
            )?;
        }
    }

    fn kill(&self) {
        // Under the lock, so that the process is not reaped (and its number reused) in between.
        if let State::Running(pid) = *self.state.lock().unwrap_or_else(PoisonError::into_inner) {
            // The kill cannot fail: the process is ours and at worst a zombie.
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if let Some(thread) = self.thread.take() {
            // The thread ends once the killed process is reaped; its panic was printed already.
            let _ = thread.join();
        }
    }
}

/// Waits for the end of a process, then reaps it under the lock that signals take.
fn reap(pid: Pid, mut child: Child, state: &Mutex<State>) {
    // WNOWAIT leaves a zombie. An error (only EINTR is possible) only makes the lock be held while
    // waiting.
    while waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) == Err(Errno::EINTR) {}
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    if let Ok(status) = child.wait() {
        *state = State::Ended(status);
    }
}

/// poll() for any duration that restarts after a signal.
fn poll_until(fds: &mut [PollFd<'_>], timeout: Duration) -> Result<()> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Round up: a poll of 0 ms would spin through the last millisecond.
        let milliseconds = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
        let timeout = if left.is_zero() {
            PollTimeout::ZERO
        } else {
            PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX)
        };
        match poll(fds, timeout) {
            Err(Errno::EINTR) => {}
            result => return result.map(drop).context("vm: poll"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::HANG;
    use std::io::{BufRead, BufReader, Write};

    fn config(work_dir: &Path) -> VmConfig {
        VmConfig {
            kernel: "/k/vmlinuz".into(),
            initrd: "/k/initrd".into(),
            disk: None,
            disk_rate: None,
            serial_disks: vec![],
            append: "console=ttyS0 a,b".into(),
            memory_mib: 1024,
            cpus: 2,
            work_dir: work_dir.into(),
            vhost_device_vsock: None,
        }
    }

    fn temp_dir(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("kata-gpu-vm-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn a_vsock_device_is_there_only_when_asked_for() {
        let config = config(Path::new("/w"));
        let without = qemu_arguments(
            &config,
            Arch::X86_64,
            Path::new("/w/console.log"),
            None,
            false,
        )
        .join(" ");
        assert!(!without.contains("vhost-user"), "{without}");
        assert!(
            without.contains("-accel tcg,thread=multi") && without.contains("share=on"),
            "{without}"
        );
        let with = qemu_arguments(
            &config,
            Arch::X86_64,
            Path::new("/w/console.log"),
            Some(Path::new("/w/vhost")),
            true,
        )
        .join(" ");
        assert!(
            with.contains("-device vhost-user-vsock-pci,chardev=vsock")
                && with.contains("-accel kvm"),
            "{with}"
        );
    }

    #[test]
    fn an_arm64_guest_has_its_machine_and_no_device_below_slot_16() {
        let config = VmConfig {
            disk: Some("/k/disk".into()),
            serial_disks: vec![("a".into(), "/k/a".into())],
            ..config(Path::new("/w"))
        };
        let text = |arch| {
            qemu_arguments(
                &config,
                arch,
                Path::new("/w/c"),
                Some(Path::new("/w/vhost")),
                false,
            )
            .join(" ")
        };
        let arm = text(Arch::Aarch64);
        assert!(
            arm.contains("-cpu neoverse-n1 -machine virt,gic-version=3,memory-backend=ram"),
            "{arm}"
        );
        for device in [
            "drive=disk,addr=0x10",
            "serial=a,addr=0x11",
            "chardev=vsock,addr=0x12",
        ] {
            assert!(arm.contains(device), "{arm}");
        }
        let x86 = text(Arch::X86_64);
        assert!(
            x86.contains("-cpu max,phys-bits=46 -machine q35,memory-backend=ram")
                && !x86.contains("addr="),
            "{x86}"
        );
        assert!(
            Arch::ALL
                .into_iter()
                .all(|arch| arch == Arch::OURS || !kvm_works(arch)),
            "KVM for a foreign guest"
        );
    }

    #[test]
    fn kvm_is_used_only_where_the_cpu_virtualises() {
        assert!(cpu_virtualises("processor : 0\nflags\t\t: fpu vmx sse\n"));
        assert!(cpu_virtualises("flags : svm"));
        assert!(!cpu_virtualises("flags : fpu svml vmxnet\nbugs : vmx\n"));
    }

    #[test]
    fn a_work_directory_with_a_long_path_is_refused_with_its_cure() {
        let long = PathBuf::from(format!("/{}", "x".repeat(91)));
        let error = check_socket_path(&uds_path(&long)).unwrap_err().to_string();
        assert!(
            error.contains("98 bytes")
                && error.contains("may have 96")
                && error.contains("shorter"),
            "{error}"
        );
        assert!(
            check_socket_path(&uds_path(&PathBuf::from(format!("/{}", "x".repeat(89))))).is_ok()
        );
        assert!(check_socket_path(Path::new("/a,b/vsock")).is_err());
    }

    #[test]
    fn a_missing_kernel_is_named() {
        let error = Vm::start(&config(Path::new("/nowhere")))
            .err()
            .expect("started without a kernel");
        assert!(
            format!("{error:#}").contains("open kernel /k/vmlinuz"),
            "{error:#}"
        );
    }

    #[test]
    fn a_process_outlives_its_starting_thread_and_ends_when_dropped() {
        let dir = temp_dir("process");
        let log = dir.join("log");
        let mut command = Command::new("sleep");
        command.arg("1000");
        let process = std::thread::spawn(move || Process::start("sleep", command, &log).unwrap())
            .join()
            .unwrap();
        // If that thread's end killed the process, it would be gone within milliseconds.
        assert!(process.wait(Duration::from_millis(200)).unwrap().is_none());
        let State::Running(pid) = *process.state.lock().unwrap() else {
            panic!("ended")
        };
        drop(process);
        assert_eq!(
            kill(pid, None),
            Err(Errno::ESRCH),
            "still there, or a zombie"
        );
        fs::remove_dir_all(dir).unwrap();
    }

    /// Environment variable of the test's child: the FIFO that its process has open.
    const PARENT: &str = "KATA_GPU_VM_TEST_FIFO";

    #[test]
    fn a_process_ends_with_its_parent_however_that_ends() {
        if let Some(fifo) = std::env::var_os(PARENT) {
            // The parent: starts a process and never ends by itself.
            let mut command = Command::new("sleep");
            command.arg("1000");
            let process = Process::start("sleep", command, Path::new(&fifo)).unwrap();
            writeln!(File::options().append(true).open(&fifo).unwrap(), "started").unwrap();
            let _status = process.wait(Duration::from_secs(1000));
            return;
        }
        let dir = temp_dir("parent");
        let fifo = dir.join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let name = "vm::tests::a_process_ends_with_its_parent_however_that_ends";
        let mut parent = Command::new(std::env::current_exe().unwrap());
        parent
            .args(["--exact", name])
            .env(PARENT, &fifo)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut parent = parent.spawn().unwrap();
        // Both open the FIFO for writing, so its end comes when both are gone.
        let mut reader = BufReader::new(File::open(&fifo).unwrap());
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert_eq!(line, "started\n");
        let open = poll(
            &mut [PollFd::new(reader.get_ref().as_fd(), PollFlags::POLLIN)],
            PollTimeout::from(200_u8),
        )
        .unwrap();
        assert_eq!(open, 0, "the process is gone before its parent");
        parent.kill().unwrap();
        parent.wait().unwrap();
        poll_until(
            &mut [PollFd::new(reader.get_ref().as_fd(), PollFlags::POLLIN)],
            HANG,
        )
        .unwrap();
        let flags = OFlag::from_bits_retain(
            nix::fcntl::fcntl(reader.get_ref(), nix::fcntl::FcntlArg::F_GETFL).unwrap(),
        );
        nix::fcntl::fcntl(
            reader.get_ref(),
            nix::fcntl::FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK),
        )
        .unwrap();
        line.clear();
        assert_eq!(
            reader.read_line(&mut line).map_err(|e| e.kind()),
            Ok(0),
            "the process has outlived its parent"
        );
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_end_of_a_process_wakes_who_waits() {
        let dir = temp_dir("end");
        let mut command = Command::new("sh");
        command.args(["-c", "exit 3"]);
        let process = Process::start("sh", command, &dir.join("log")).unwrap();
        let status = process.wait(HANG).unwrap().expect("did not end");
        assert_eq!(status.code(), Some(3));
        process.kill(); // of no effect, and no error
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error() {
        let dir = temp_dir("missing");
        let started = Process::start(
            "none",
            Command::new("/nonexistent/program"),
            &dir.join("log"),
        );
        assert!(started.is_err());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn an_early_end_of_vhost_device_vsock_is_reported_with_output() {
        let dir = temp_dir("early");
        // ls has no option --vm: it prints an error and exits with 2.
        let error = start_vsock(
            Path::new("/bin/ls"),
            &dir.join("vhost"),
            &dir.join("vsock"),
            &dir,
        )
        .err()
        .expect("started");
        let text = format!("{error:#}");
        assert!(
            text.contains("exit status: 2") && text.contains("--vm"),
            "{text}"
        );
        fs::remove_dir_all(dir).unwrap();
    }
}
