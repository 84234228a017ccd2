//! A whole host as tests/emulated-host/build has made it: Debian with systemd, whose root gets
//! what to do over a serial port.

use super::{Outcome, Silent, TestContext};
use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kata_gpu_host::vm::{Process, kvm_works};
use kata_gpu_wire::arch::Arch;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// No 16-byte compare and exchange: QEMU 7.2 damages the flags where one is interrupted, which the
/// kernel's allocator does not survive. With SVM, so that it has KVM, and room for its guests'
/// BARs.
const CPU: &str = "qemu64,+svm,+npt,cx16=off,phys-bits=46";
/// Command line of the host's kernel. Mitigations cost an emulated processor much. A clocksource
/// watchdog that is late on a busy machine takes the TSC for unstable, and guests then have no
/// ptp_kvm. Devices of the host itself pass the IOMMU by.
const KERNEL: &str = "intel_iommu=on iommu=pt root=/dev/nvme0n1 rw console=ttyS0 quiet panic=-1 \
    no_timer_check mitigations=off apparmor=0 audit=0 systemd.show_status=0 tsc=reliable";
/// How long one thing may take. Beside four busy loops, on two processors, a guest took 120 s to
/// its GPUs.
const DEADLINE: Duration = Duration::from_secs(570);
/// How long a script may run: beside four busy loops the longest took 40 s.
const ANSWER: Duration = Duration::from_secs(240);
/// Time without an answer after which the host gets an interrupt. On QEMU 7.2 the timer's interrupt
/// sometimes stays in the APIC and is never taken while a guest runs under KVM; the timer fires
/// once, so that none follows. Another interrupt often ends that, not always: [`Silent`] is what is
/// left.
const NUDGE: Duration = Duration::from_secs(10);
/// QEMU commands that bring an interrupt, in turn: a device's, then one that cannot be masked.
const NUDGES: [&str; 2] = ["sendkey shift", "nmi"];
/// Least pause between two looks at something on the host, and in times of a look: each takes time
/// of what is waited for, on a busy machine most of it.
const PAUSE: Duration = Duration::from_millis(300);
const PAUSE_TIMES: u32 = 3;
/// Pause between two attempts to connect: nothing announces the socket.
const LOOK: Duration = Duration::from_millis(20);

/// Processors, memory, functions and kernel of a host.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    cpus: u32,
    memory_mib: u32,
    /// Functions to pass through to guests: see [`Size::with_gpus`].
    gpus: u32,
    /// See [`Size::with_kernel_of`].
    suite: Option<&'static str>,
    /// See [`Size::with_parameters`].
    parameters: &'static str,
    /// See [`Size::without_acs`].
    acs: bool,
    /// See [`Size::with_far_memory`].
    far_memory_mib: u32,
}

impl Size {
    const NONE: Self = Self {
        cpus: 0,
        memory_mib: 0,
        gpus: 0,
        suite: None,
        parameters: "",
        acs: true,
        far_memory_mib: 0,
    };
    /// For a host without guests of its own.
    pub const PLAIN: Self = Self {
        cpus: 2,
        memory_mib: 1024,
        gpus: 0,
        ..Self::NONE
    };
    /// For two guests and what they boot. One processor: KVM patches the scheduler's code as its
    /// first guest comes and its last one goes (preempt_notifier_key), and of several emulated
    /// processors one can run into the breakpoint of such a patch when it is over ("Oops: int3" in
    /// __schedule, seen with Linux 6.12.107 on QEMU 7.2.22).
    pub const WITH_GUESTS: Self = Self {
        cpus: 1,
        memory_mib: 2560,
        gpus: 0,
        ..Self::NONE
    };
    /// For pods of Kata's: its programs, and three guests.
    pub const WITH_PODS: Self = Self {
        cpus: 1,
        memory_mib: 4096,
        gpus: 0,
        ..Self::NONE
    };
    /// For a cluster's node: Kubernetes' programs, and a guest. Idle they take most of one emulated
    /// processor.
    pub const AS_NODE: Self = Self {
        cpus: 2,
        memory_mib: 4096,
        gpus: 0,
        ..Self::NONE
    };

    /// The same, and this many functions that stand for GPUs, behind an IOMMU of the host: NVMe
    /// controllers, whose memory buffer is a prefetchable BAR of any size.
    pub const fn with_gpus(self, gpus: u32) -> Self {
        Self { gpus, ..self }
    }

    /// The same with the kernel of another suite: a file `vmlinux-SUITE` of
    /// tests/emulated-host/build.
    pub const fn with_kernel_of(self, suite: Option<&'static str>) -> Self {
        Self { suite, ..self }
    }

    /// The same with more parameters of the kernel.
    pub const fn with_parameters(self, parameters: &'static str) -> Self {
        Self { parameters, ..self }
    }

    /// The same with all functions behind ports of one device without ACS: one IOMMU group.
    pub const fn without_acs(self) -> Self {
        Self { acs: false, ..self }
    }

    /// The same with a second NUMA node, which has this memory and no processor.
    pub const fn with_far_memory(self, mib: u32) -> Self {
        Self {
            far_memory_mib: mib,
            ..self
        }
    }
}

impl Size {
    /// Size of the large BAR of a function that stands for a GPU.
    pub const BAR_BYTES: u64 = (BAR_MIB as u64) << 20;

    /// QEMU's machine. KVM's own interrupt controller cannot be behind an IOMMU.
    fn machine(self, by_kvm: bool) -> &'static str {
        match (self.gpus, by_kvm) {
            (0, _) => "q35",
            (_, false) => "q35,default_bus_bypass_iommu=on",
            (_, true) => "q35,default_bus_bypass_iommu=on,kernel-irqchip=split",
        }
    }

    /// QEMU's arguments for processors and memory.
    fn memory(self) -> Vec<String> {
        let (near, far) = (self.memory_mib, self.far_memory_mib);
        let mut words = vec![
            "-smp".into(),
            self.cpus.to_string(),
            "-m".into(),
            format!("{}M", near + far),
        ];
        if far > 0 {
            let cpus = format!("cpus=0-{},", self.cpus - 1);
            for (node, (mib, cpus)) in [(near, cpus.as_str()), (far, "")].into_iter().enumerate() {
                words.extend([
                    "-object".into(),
                    format!("memory-backend-ram,id=node{node},size={mib}M"),
                ]);
                words.extend([
                    "-numa".into(),
                    format!("node,nodeid={node},{cpus}memdev=node{node}"),
                ]);
            }
        }
        words
    }

    /// QEMU's arguments for the functions to pass through. The IOMMU is Intel's, which all kernels
    /// here have built in, has page tables and remaps interrupts; it is in front of their bus
    /// alone. By default its addresses have 39 bits, and BARs lie above.
    fn functions(self) -> Vec<String> {
        let mut words = vec![];
        if self.gpus > 0 {
            words.extend(
                [
                    "-device",
                    "intel-iommu,intremap=on,aw-bits=48",
                    "-device",
                    "pxb-pcie,id=gpus,bus_nr=128",
                ]
                .map(str::to_string),
            );
        }
        for k in 0..self.gpus {
            let reserve = 2 * BAR_MIB;
            let acs = if self.acs {
                String::new()
            } else {
                format!(",multifunction=on,addr=0.{k},disable-acs=on")
            };
            words.extend([
                "-device".into(),
                format!(
                    "pcie-root-port,id=port{k},bus=gpus,chassis={k},slot={k},\
                    pref64-reserve={reserve}M{acs}"
                ),
            ]);
            words.extend([
                "-device".into(),
                format!("nvme,serial=gpu{k},bus=port{k},cmb_size_mb={BAR_MIB}"),
            ]);
        }
        words
    }
}

/// Size of the large BAR of a function that stands for a GPU, in MiB. The host's kernel pins it
/// page by page for each mapping, which takes an emulated processor 0.2 to 0.4 s.
const BAR_MIB: u32 = 512;

/// A host that runs; what it writes to its disk is there after a reboot, and gone with the machine.
pub struct EmulatedHost {
    _qemu: Process,
    commands: BufReader<UnixStream>,
    monitor: PathBuf,
    /// Each script, after the seconds that it took; below one that failed, its output.
    log: File,
}

impl EmulatedHost {
    /// How a test ends where its disk was not made: it is skipped, unless the run requires it.
    pub fn skipped(context: &TestContext) -> Result<Option<Outcome>> {
        let disk = context.target.join("emulated-host/disk.img");
        if disk.exists() {
            return Ok(None);
        }
        let reason = format!(
            "there is no {}: tests/emulated-host/build makes it, or says why not",
            disk.display()
        );
        ensure!(
            std::env::var_os("REQUIRE_EMULATED_HOST").is_none(),
            "{reason}, and REQUIRE_EMULATED_HOST is set"
        );
        Ok(Some(Outcome::Skipped(reason)))
    }

    /// kata-gpu-boot without its symbols, for one.
    pub fn program(context: &TestContext) -> Result<PathBuf> {
        let built = std::env::var_os("KATA_GPU_BOOT")
            .map_or_else(|| context.target.join("debug/kata-gpu-boot"), PathBuf::from);
        let stripped = context.work_dir.join("kata-gpu-boot");
        std::fs::create_dir_all(&context.work_dir)?;
        let done = Command::new("strip")
            .arg("-o")
            .arg(&stripped)
            .arg(&built)
            .status()
            .context("strip")?;
        ensure!(done.success(), "strip {}: {done}", built.display());
        Ok(stripped)
    }

    /// Starts it, and unpacks `files` (name of a file in the host, and the file) there.
    pub fn start(
        context: &TestContext,
        name: &str,
        size: Size,
        files: &[(&str, &Path)],
    ) -> Result<Self> {
        let work_dir = context.work_dir.join(name);
        let _unused = std::fs::remove_dir_all(&work_dir);
        std::fs::create_dir_all(&work_dir)
            .with_context(|| format!("make {}", work_dir.display()))?;
        let archive = pack(&work_dir, files)?;
        let socket = work_dir.join("commands");
        let made = |file: &str| {
            context
                .target
                .join("emulated-host")
                .join(file)
                .display()
                .to_string()
        };
        let mut command = Command::new("qemu-system-x86_64");
        command.args("-nodefaults -no-user-config -display none".split(' '));
        let by_kvm = kvm_works(Arch::OURS) && kvm_nests();
        command.args(["-machine", size.machine(by_kvm)]);
        command.args(size.memory());
        if by_kvm {
            command.args(["-accel", "kvm", "-cpu", "host"])
        } else {
            command.args(["-accel", "tcg,thread=multi,tb-size=512", "-cpu", CPU])
        };
        let kernel = size
            .suite
            .map_or("vmlinux".into(), |suite| format!("vmlinux-{suite}"));
        command.args([
            "-kernel",
            &made(&kernel),
            "-append",
            &format!("{KERNEL} {}", size.parameters),
        ]);
        command.args([
            "-serial",
            &format!("file:{}", work_dir.join("console.log").display()),
        ]);
        for (id, file, mode) in [
            ("disk", made("disk.img"), "snapshot=on"),
            ("files", archive.display().to_string(), "readonly=on"),
        ] {
            command.args([
                "-drive",
                &format!("if=none,id={id},format=raw,{mode},file={file}"),
            ]);
        }
        // Disks of two kinds: the kernel numbers several of one kind in any order.
        command.args([
            "-device",
            "nvme,drive=disk,serial=disk",
            "-device",
            "virtio-blk-pci,drive=files",
        ]);
        command.args([
            "-device",
            "virtio-serial-pci",
            "-device",
            "virtserialport,chardev=commands,name=commands",
        ]);
        command.args([
            "-chardev",
            &format!(
                "socket,id=commands,server=on,wait=off,path={}",
                socket.display()
            ),
        ]);
        let monitor = work_dir.join("monitor");
        command.args([
            "-monitor",
            &format!("unix:{},server=on,wait=off", monitor.display()),
        ]);
        // Behind the others, which would go to their bus.
        command.args(size.functions());
        // A snapshot is a file that has no name.
        command.env("TMPDIR", &work_dir);
        let qemu = Process::start("qemu-system-x86_64", command, &work_dir.join("qemu.log"))?;
        let commands = connect(&qemu, &socket)
            .with_context(|| format!("see {}", work_dir.join("qemu.log").display()))?;
        let log = File::create(work_dir.join("commands.log"))?;
        let mut host = Self {
            _qemu: qemu,
            commands,
            monitor,
            log,
        };
        host.until_ready()?;
        host.run_long(
            "the host's files",
            "modprobe virtio_blk && tar -C / -xf /dev/vda",
            DEADLINE,
        )?;
        Ok(host)
    }

    /// Waits until the system is up.
    fn until_ready(&mut self) -> Result<()> {
        let start = Instant::now();
        while self.line()? != "ready" {}
        writeln!(self.log, "{:5.1} up", start.elapsed().as_secs_f64())?;
        Ok(())
    }

    fn line(&mut self) -> Result<String> {
        let start = Instant::now();
        let mut line = String::new();
        let mut nudges = NUDGES.into_iter().cycle();
        let mut nudged: Vec<&str> = Vec::new();
        loop {
            match self.commands.read_line(&mut line) {
                Ok(0) => bail!("the emulated host has ended"),
                Ok(_) => {
                    if !nudged.is_empty() {
                        writeln!(self.log, "      answered after {nudged:?}")?;
                    }
                    return Ok(line.trim().to_string());
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock && start.elapsed() < ANSWER => {
                    nudged.extend(nudges.next());
                    // One that QEMU refuses is followed by another.
                    let _unused = nudged.last().map(|nudge| self.ask_qemu(nudge));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return Err(Silent(format!(
                        "the emulated host has stopped: no answer within {ANSWER:?}; {}",
                        self.processors()
                    ))
                    .into());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Status, registers and APIC of the emulated processors, to see why they have stopped.
    fn processors(&self) -> String {
        match self.ask_qemu("info status\ninfo registers -a\ninfo lapic") {
            // Without its prompt, and what no kernel's state depends on.
            Ok(text) => {
                let other = |line: &&str| {
                    !["(qemu)", "FPR", "FCW", "XMM"]
                        .iter()
                        .any(|start| line.starts_with(start))
                };
                text.lines().filter(other).collect::<Vec<_>>().join("\n")
            }
            Err(error) => format!("QEMU's monitor: {error}"),
        }
    }

    /// Gives QEMU's monitor commands; gives what it says until it says nothing for a second.
    fn ask_qemu(&self, commands: &str) -> std::io::Result<String> {
        let mut monitor = UnixStream::connect(&self.monitor)?;
        monitor.set_read_timeout(Some(Duration::from_secs(1)))?;
        writeln!(monitor, "{commands}")?;
        let mut answer = Vec::new();
        let _until_it_is_silent = monitor.read_to_end(&mut answer);
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// Runs a script of bash as root; gives whether it succeeds, and its output.
    fn ask(&mut self, script: &str) -> Result<(String, String)> {
        let start = Instant::now();
        writeln!(self.commands.get_mut(), "{}", STANDARD.encode(script))?;
        let answer = self.line().with_context(|| format!("run {script:?}"))?;
        ensure!(
            answer != "ready",
            "the emulated host has started anew amid {script:?}: its console.log says why"
        );
        let (status, output) = answer.split_once(' ').unwrap_or((&answer, ""));
        writeln!(
            self.log,
            "{:5.1} {status} {script:?}",
            start.elapsed().as_secs_f64()
        )?;
        let output = STANDARD
            .decode(output)
            .with_context(|| format!("answer {answer:?}"))?;
        let output = String::from_utf8_lossy(&output).trim().to_string();
        if status != "0" && !output.is_empty() {
            writeln!(self.log, "      {output}")?;
        }
        Ok((status.into(), output))
    }

    /// Runs a script of bash as root; gives its output, and fails where it fails.
    pub fn run(&mut self, script: &str) -> Result<String> {
        let (status, output) = self.ask(script)?;
        ensure!(status == "0", "{script:?} ended with {status}: {output}");
        Ok(output)
    }

    /// Runs a script until it succeeds.
    pub fn until(&mut self, what: &str, script: &str) -> Result<String> {
        self.repeat(what, script, DEADLINE, PAUSE_TIMES)
    }

    /// Runs a script until it succeeds that waits by itself for some time, as often as that takes.
    pub fn until_waited(&mut self, what: &str, script: &str, deadline: Duration) -> Result<String> {
        let start = Instant::now();
        loop {
            let (status, output) = self.ask_long(what, script, deadline)?;
            if status == "0" {
                return Ok(output);
            }
            ensure!(
                start.elapsed() < deadline,
                "no {what} within {deadline:?}: {script:?} ends with {status}: {output}"
            );
        }
    }

    /// Runs a script that may take longer than [`ANSWER`]; gives its output, and fails where it
    /// fails.
    pub fn run_long(&mut self, what: &str, script: &str, deadline: Duration) -> Result<String> {
        let (status, output) = self.ask_long(what, script, deadline)?;
        ensure!(status == "0", "{script:?} ended with {status}: {output}");
        Ok(output)
    }

    /// Runs a script beside short looks at whether it has ended: a look that took longer than
    /// [`NUDGE`] would bring interrupts to a host that has not stopped.
    fn ask_long(
        &mut self,
        what: &str,
        script: &str,
        deadline: Duration,
    ) -> Result<(String, String)> {
        self.run(&format!(
            "rm -f /run/long.*; cat >/run/long.script <<'END OF SCRIPT'\n{script}\nEND OF SCRIPT\n\
             (bash /run/long.script >/run/long.output 2>&1; echo $? >/run/long.ended; \
             mv /run/long.ended /run/long.status) >/dev/null 2>&1 &"
        ))?;
        let look = "for look in {1..3}; do test -e /run/long.status && exit; sleep 1; done; false";
        self.repeat(what, look, deadline, 0)?;
        self.ask("cat /run/long.output; exit $(cat /run/long.status)")
    }

    /// `pause`: in times of a look.
    fn repeat(
        &mut self,
        what: &str,
        script: &str,
        deadline: Duration,
        pause: u32,
    ) -> Result<String> {
        let start = Instant::now();
        loop {
            let asked = Instant::now();
            let (status, output) = self.ask(script)?;
            let took = asked.elapsed();
            if status == "0" {
                return Ok(output);
            }
            ensure!(
                start.elapsed() < deadline,
                "no {what} within {deadline:?}: {script:?} ends with {status}: {output}"
            );
            std::thread::sleep(PAUSE.max(took * pause));
        }
    }

    /// Gives the functions that stand for GPUs to VFIO; returns their PCI addresses.
    pub fn vfio(&mut self) -> Result<Vec<String>> {
        let addresses = self.run(
            "modprobe -a vfio_iommu_type1 vfio-pci && cd /sys/bus/pci/devices
            for gpu in $(grep -l 0x010802 */class | grep -v ^0000:00 | cut -d/ -f1); do
                echo vfio-pci > $gpu/driver_override && echo $gpu > $gpu/driver/unbind && echo \
                    $gpu > /sys/bus/pci/drivers_probe && echo $gpu
            done",
        )?;
        self.until(
            "all GPUs at VFIO",
            &format!(
                "test $(ls -d /sys/bus/pci/drivers/vfio-pci/0* | wc -l) = {}",
                addresses.lines().count()
            ),
        )?;
        Ok(addresses.lines().map(str::to_string).collect())
    }

    /// Reboots, on the same disk.
    pub fn reboot(&mut self) -> Result<()> {
        // Without its answer: whoever gives it is stopped, too.
        writeln!(
            self.commands.get_mut(),
            "{}",
            STANDARD.encode("systemctl reboot")
        )?;
        self.until_ready()
    }
}

/// Whether a guest under this machine's KVM has KVM itself.
fn kvm_nests() -> bool {
    let allowed = |module: &str| {
        let parameter = std::fs::read_to_string(format!("/sys/module/{module}/parameters/nested"));
        parameter.is_ok_and(|text| ["1", "Y"].contains(&text.trim()))
    };
    ["kvm_amd", "kvm_intel"].into_iter().any(allowed)
}

/// An archive of the files.
/// A file of src/collect/deploy.
pub fn deployed(name: &str) -> PathBuf {
    Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../src/collect/deploy"
    ))
    .join(name)
}

fn pack(work_dir: &Path, files: &[(&str, &Path)]) -> Result<PathBuf> {
    let tree = work_dir.join("files");
    for (name, file) in files {
        let to = tree.join(name.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().context("a file in a directory")?)?;
        std::fs::copy(file, &to).with_context(|| format!("copy {}", file.display()))?;
    }
    let archive = tar(work_dir, "files.tar", &tree, &["."])?;
    std::fs::remove_dir_all(tree)?;
    Ok(archive)
}

/// Makes an archive, in `work_dir`, of these files of a folder; all are root's in it.
pub(super) fn tar(work_dir: &Path, name: &str, folder: &Path, files: &[&str]) -> Result<PathBuf> {
    let archive = work_dir.join(name);
    let done = Command::new("tar")
        .args(["--owner=0", "--group=0", "-C"])
        .arg(folder)
        .arg("-cf")
        .arg(&archive)
        .args(files)
        .status();
    let done = done.context("tar")?;
    ensure!(done.success(), "tar {}: {done}", folder.display());
    Ok(archive)
}

fn connect(qemu: &Process, socket: &Path) -> Result<BufReader<UnixStream>> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Ok(stream) = UnixStream::connect(socket) {
            stream.set_read_timeout(Some(NUDGE))?;
            return Ok(BufReader::new(stream));
        }
        if let Some(status) = qemu.wait(LOOK)? {
            bail!("QEMU ended with {status}");
        }
        ensure!(
            Instant::now() < deadline,
            "QEMU made no socket within {DEADLINE:?}"
        );
    }
}
