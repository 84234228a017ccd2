//! Processes of a VM: its VMM, by process id or by Kata's sandbox, and the shim that started it.
//!
//! Names come from command lines, which any process chooses. A process counts as a VMM if it is
//! root's or a shim of Kata's that is root's started it, for a VMM of another user
//! ([`Vmm::is_sure`]); a CID counts if the process holds a vhost-vsock device. Nobody else's
//! process is recorded as another VM, nor does its trace lie beside another VM's boot.

use crate::rules::host_facts::bytes_of;
use anyhow::{Context, Result, bail};
use kata_gpu_host::{processes, qemu};
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Limit of a file of /proc: a command line of QEMU with 16 GPUs has 10 kB.
const MAX_TEXT: u64 = 128 * 1024;
/// Beginnings of the names of VMM programs.
const VMMS: [&str; 4] = [
    "qemu-system-",
    "qemu-kvm",
    "cloud-hypervisor",
    "firecracker",
];
/// Clock ticks a second in /proc/PID/stat: USER_HZ, 100 on every architecture that Kata runs on.
const TICK_NS: i64 = 10_000_000;
/// Limit of parents that are looked at.
const MAX_PARENTS: usize = 8;
const ROOT: u32 = 0;
/// Device of a VM's CID, which a QEMU has open, and limit of a process's files that are looked at.
const VSOCK: &str = "/dev/vhost-vsock";
const MAX_FILES: usize = 65_536;

/// Limit of functions at VFIO that are looked up.
const MAX_DEVICES: usize = 4096;

/// A VM's process.
#[derive(Clone, Debug)]
pub struct Vmm {
    pub pid: u32,
    /// Its words, each ended by a zero byte. Its threads and a copy of it have the same.
    words: Vec<u8>,
    proc: PathBuf,
    /// The caller named the process by its number.
    is_asked_for: bool,
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)
        .ok()?
        .take(MAX_TEXT)
        .read_to_end(&mut bytes)
        .ok()?;
    Some(bytes)
}

/// Words of a process's command line.
fn words(proc: &Path, pid: u32) -> Option<Vec<u8>> {
    read(&proc.join(pid.to_string()).join("cmdline"))
}

/// Whether these words are those of a VMM.
fn is_vmm(words: &[u8]) -> bool {
    let path = words.split(|b| *b == 0).next().unwrap_or_default();
    let program = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
    VMMS.iter().any(|name| program.starts_with(name.as_bytes()))
}

impl Vmm {
    /// The VMM with this process id; None where there is none, or it is no VMM.
    pub fn at(proc: &Path, pid: u32) -> Option<Self> {
        Self::any(proc, pid).filter(|process| is_vmm(&process.words))
    }

    fn any(proc: &Path, pid: u32) -> Option<Self> {
        Some(Self {
            pid,
            words: words(proc, pid)?,
            proc: proc.to_path_buf(),
            is_asked_for: false,
        })
    }

    /// The process with this id, whatever its program is called.
    pub fn of_pid(proc: &Path, pid: u32) -> Result<Self> {
        let mut process = Self::any(proc, pid)
            .with_context(|| format!("--pid {pid}: there is no such process"))?;
        if process.words.is_empty() {
            bail!("--pid {pid}: it has no program: a thread of the kernel, or it has ended");
        }
        process.is_asked_for = true;
        Ok(process)
    }

    /// Whether a recording takes this VM as the next one: Kata's, or one with functions of VFIO.
    /// Command lines of Kata's have the sandbox's name, or its directory.
    pub fn is_guest_of_gpus(&self) -> bool {
        ["vfio", "sandbox-", "/run/vc/", "/run/kata"]
            .iter()
            .any(|text| self.names(text))
    }

    /// Whether no unprivileged user can have made this process look like a VMM.
    pub fn is_sure(&self) -> bool {
        let is_roots = |pid| processes::is_of_user(&self.proc, pid, ROOT);
        // A command line of another user's process is not even read: its owner can make a reader
        // wait.
        let is_shim = |pid: u32| {
            let words = is_roots(pid).then(|| words(&self.proc, pid)).flatten();
            let words = words.unwrap_or_default();
            let program = words.split(|b| *b == 0).next().unwrap_or_default();
            memchr::memmem::find(program, b"shim-kata").is_some()
        };
        is_roots(self.pid) || self.parents().any(is_shim)
    }

    fn parents(&self) -> impl Iterator<Item = u32> + '_ {
        let parent = |pid: &u32| stat(&self.proc, *pid).map(|(_, parent, _)| parent);
        std::iter::successors(parent(&self.pid), parent).take(MAX_PARENTS)
    }

    /// Whether the process has this file open.
    fn holds(&self, path: &str) -> bool {
        let files = fs::read_dir(self.proc.join(self.pid.to_string()).join("fd"));
        let mut files = files.into_iter().flatten().flatten().take(MAX_FILES);
        files.any(|file| fs::read_link(file.path()).is_ok_and(|to| to == Path::new(path)))
    }

    /// The VMM whose command line has Kata's id of the sandbox, or its beginning.
    pub fn of_sandbox(proc: &Path, sandbox: &str) -> Result<Self> {
        if sandbox.len() < 4 {
            bail!("--vm {sandbox}: give at least four characters of Kata's sandbox id");
        }
        let all = fs::read_dir(proc)
            .with_context(|| format!("read {}", proc.display()))?
            .flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let mut found: Vec<Self> = pids
            .filter_map(|pid| Self::at(proc, pid))
            .filter(|vmm| vmm.names(sandbox) && vmm.is_sure())
            .collect();
        match (found.pop(), found.len()) {
            (Some(vmm), 0) => Ok(vmm),
            (Some(vmm), _) => bail!(
                "--vm {sandbox}: {} and others have it on their command line: give more \
                     of it, or --pid",
                vmm.pid
            ),
            (None, _) => bail!(
                "--vm {sandbox}: no VMM has it on its command line: `crictl pods` has \
                     ids; without --vm the next VM is recorded"
            ),
        }
    }

    fn names(&self, text: &str) -> bool {
        memchr::memmem::find(&self.words, text.as_bytes()).is_some()
    }

    /// Whether a thread is of the VMM, or of a copy of it that has become a daemon.
    pub fn has(&self, tid: u32) -> bool {
        tid == self.pid || words(&self.proc, tid).as_ref() == Some(&self.words)
    }

    pub fn lives(&self) -> bool {
        words(&self.proc, self.pid).as_ref() == Some(&self.words)
    }

    pub fn threads(&self) -> Vec<u32> {
        let tasks = fs::read_dir(self.proc.join(self.pid.to_string()).join("task"))
            .into_iter()
            .flatten()
            .flatten();
        tasks
            .filter_map(|task| task.file_name().to_str()?.parse().ok())
            .collect()
    }

    /// Whether a boot's peer, as the collector names it, is this VM.
    pub fn is_peer(&self, peer: &str) -> bool {
        let is_known = self.is_asked_for || self.is_sure();
        self.is_called(peer) && is_known && (!peer.starts_with("cid ") || self.holds(VSOCK))
    }

    fn is_called(&self, peer: &str) -> bool {
        match peer.strip_prefix("cid ") {
            Some(cid) => cid
                .parse()
                .is_ok_and(|cid: u32| qemu::cid(&self.words) == Some(cid)),
            // The path of a socket in the sandbox's directory.
            None => peer
                .split('/')
                .any(|part| part.len() >= 16 && self.names(part)),
        }
    }

    /// Memory by kind, in bytes.
    pub fn memory(&self) -> BTreeMap<String, u64> {
        const KINDS: [(&str, &str); 5] = [
            ("VmRSS", "resident"),
            ("RssAnon", "anonymous"),
            ("RssShmem", "shared"),
            ("HugetlbPages", "huge"),
            ("VmPTE", "page-tables"),
        ];
        let status = read(&self.proc.join(self.pid.to_string()).join("status")).unwrap_or_default();
        let status = String::from_utf8_lossy(&status);
        let kinds = KINDS.into_iter();
        kinds
            .filter_map(|(name, kind)| Some((kind.to_string(), bytes_of(&status, name)?)))
            .collect()
    }

    /// Start of the shim that started it, on CLOCK_BOOTTIME, with its process id.
    pub fn shim(&self) -> Option<(u32, i64)> {
        self.parents().find_map(|pid| {
            let (comm, _, started_ns) = stat(&self.proc, pid)?;
            let is_shim = comm.contains("shim-kata")
                || comm.starts_with("containerd-shim")
                || comm.starts_with("kata-shim");
            is_shim.then_some((pid, started_ns))
        })
    }
}

/// Name, parent and start on CLOCK_BOOTTIME of a process.
fn stat(proc: &Path, pid: u32) -> Option<(String, u32, i64)> {
    parse_stat(&String::from_utf8_lossy(&read(
        &proc.join(pid.to_string()).join("stat"),
    )?))
}

/// `PID (COMM) STATE PPID ..`, the start as field 22: proc_pid_stat(5). COMM may have anything in
/// it.
fn parse_stat(stat: &str) -> Option<(String, u32, i64)> {
    let (comm, rest) = stat.split_once('(')?.1.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    let ticks: i64 = fields.get(19)?.parse().ok()?;
    Some((
        comm.to_string(),
        fields.get(1)?.parse().ok()?,
        ticks.checked_mul(TICK_NS)?,
    ))
}

/// `resource` of a function in sysfs.
pub fn resource(sys: &Path, function: PciAddress) -> String {
    let path = sys
        .join("bus/pci/devices")
        .join(function.to_string())
        .join("resource");
    read(&path)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default()
}

/// Functions by their names below /dev/vfio/devices.
pub fn vfio_devices(sys: &Path) -> HashMap<String, PciAddress> {
    let entries = fs::read_dir(sys.join("class/vfio-dev"))
        .into_iter()
        .flatten()
        .flatten()
        .take(MAX_DEVICES);
    let device = |entry: fs::DirEntry| {
        let link = fs::read_link(entry.path().join("device")).ok()?;
        let function = link.file_name()?.to_str()?.parse().ok()?;
        Some((entry.file_name().to_str()?.to_string(), function))
    };
    entries.filter_map(device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::{TempDir, temp_dir};

    fn process(proc: &TempDir, pid: u32, words: &str, stat: &str) {
        process_of(proc, pid, 0, words, stat);
    }

    fn process_of(proc: &TempDir, pid: u32, uid: u32, words: &str, stat: &str) {
        let dir = proc.path().join(pid.to_string());
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("cmdline"), words.replace(' ', "\0")).unwrap();
        fs::write(dir.join("stat"), stat).unwrap();
        fs::write(
            dir.join("status"),
            format!(
                "Name:\tq\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{pid}\n\
                 VmRSS:\t  600000 kB\nHugetlbPages:\t  2048 kB\nVmPTE:\t 12 kB\n"
            ),
        )
        .unwrap();
        fs::create_dir(dir.join("fd")).unwrap();
        std::os::unix::fs::symlink(VSOCK, dir.join("fd/3")).unwrap();
    }

    fn stat(comm: &str, parent: u32, ticks: u64) -> String {
        format!("1 ({comm}) S {parent} 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 3 0 {ticks} 0 0")
    }

    #[test]
    fn what_a_user_calls_like_a_vmm_is_no_vm_and_has_no_boot() {
        let proc = temp_dir();
        let qemu = "/opt/kata/bin/qemu-system-x86_64 -name sandbox-0a1b2c3d -device \
                    vhost-vsock-pci,guest-cid=33";
        let shim = "/usr/bin/containerd-shim-kata-v2 -id 0a1b2c3d";
        process(&proc, 7, shim, &stat("containerd-shim", 1, 1));
        process_of(&proc, 17, 1000, shim, &stat("containerd-shim", 1, 1));
        // Root's; another user's below Kata's shim; a stranger's; one below a shim of its own.
        for (pid, uid, parent) in [(8, 0, 1), (9, 990, 7), (10, 1000, 1), (11, 1000, 17)] {
            process_of(&proc, pid, uid, qemu, &stat("qemu", parent, 1));
        }
        let at = |pid| Vmm::at(proc.path(), pid).unwrap();
        let sure = [8, 9, 10, 11].map(|pid| (at(pid).is_sure(), at(pid).is_peer("cid 33")));
        assert_eq!(
            sure,
            [(true, true), (true, true), (false, false), (false, false)]
        );
        let asked = Vmm::of_pid(proc.path(), 10).unwrap();
        assert!(asked.is_peer("cid 33"), "whoever records has chosen it");
        // The name alone does not keep the sandbox's VM from being found.
        fs::remove_dir_all(proc.path().join("9")).unwrap();
        assert_eq!(Vmm::of_sandbox(proc.path(), "0a1b2c3d").unwrap().pid, 8);
        fs::remove_file(proc.path().join("8/fd/3")).unwrap();
        assert!(!at(8).is_peer("cid 33"), "it has no CID at all");
    }

    #[test]
    fn a_vmm_is_found_by_its_sandbox_and_its_shim_by_its_children() {
        let proc = temp_dir();
        process(
            &proc,
            7,
            "/usr/bin/containerd-shim-kata-v2 -id 0a1b2c3d",
            &stat("containerd-shim", 1, 4200),
        );
        process(
            &proc,
            8,
            "/opt/kata/bin/qemu-system-x86_64 -name sandbox-0a1b2c3d -device \
                 vhost-vsock-pci,guest-cid=33",
            &stat("q) S 9 (", 7, 4300),
        );
        process(
            &proc,
            9,
            "less qemu-system-x86_64-0a1b2c3d",
            &stat("less", 1, 1),
        );
        let vmm = Vmm::of_sandbox(proc.path(), "0a1b2c").unwrap();
        assert_eq!((vmm.pid, vmm.shim()), (8, Some((7, 42_000_000_000))));
        assert!(
            vmm.is_peer("cid 33")
                && !vmm.is_peer("cid 3")
                && !vmm.is_peer("/run/vc/vm/other/root/kata.hvsock")
        );
        assert!(vmm.has(8) && vmm.lives() && !vmm.has(9) && !vmm.has(99));
        assert_eq!(
            vmm.memory(),
            [
                ("resident".to_string(), 600_000 << 10),
                ("huge".into(), 2 << 20),
                ("page-tables".into(), 12 << 10)
            ]
            .into()
        );
        assert!(
            Vmm::of_sandbox(proc.path(), "ffff")
                .unwrap_err()
                .to_string()
                .contains("the next VM")
        );
        assert!(
            Vmm::of_sandbox(proc.path(), "0a")
                .unwrap_err()
                .to_string()
                .contains("four characters")
        );
        process(
            &proc,
            10,
            "qemu-system-x86_64 -name build -drive file=disk",
            &stat("q", 1, 1),
        );
        process(&proc, 11, "", &stat("kworker/0:1", 2, 1));
        assert!(vmm.is_guest_of_gpus() && !Vmm::at(proc.path(), 10).unwrap().is_guest_of_gpus());
        assert!(
            Vmm::of_pid(proc.path(), 11)
                .unwrap_err()
                .to_string()
                .contains("no program")
        );
        assert!(Vmm::at(proc.path(), 9).is_none() && Vmm::of_pid(proc.path(), 99).is_err());
    }

    #[test]
    fn a_function_at_vfio_is_known_by_its_device_node() {
        let sys = temp_dir();
        let dir = sys.path().join("class/vfio-dev");
        for (name, target) in [
            ("vfio0", "../../../0000:81:00.0"),
            ("vfio1", "../../../virtual"),
        ] {
            fs::create_dir_all(dir.join(name)).unwrap();
            std::os::unix::fs::symlink(target, dir.join(name).join("device")).unwrap();
        }
        assert_eq!(
            vfio_devices(sys.path()),
            [("vfio0".to_string(), "0000:81:00.0".parse().unwrap())].into()
        );
        assert!(vfio_devices(&sys.path().join("nothing")).is_empty());
    }
}
