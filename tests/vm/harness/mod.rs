//! VM tests and their means: boot a guest with a command line and a changed initrd,
//! receive its stream, read its console.

mod cluster;
mod console;
mod cpio;
mod cri;
mod emulated_host;
mod kata;
mod kvm_guest;
mod receiver;

pub use cluster::{Cluster, NODE, PATIENCE, PROJECT};
pub use console::{AgentLine, Console};
pub use cri::RUNTIME;
pub use emulated_host::{EmulatedHost, Size, deployed};
pub use kata::{BOOTS, KataHost, Setup, Shim, agent};
pub use kvm_guest::{KERNEL as KVM_KERNEL, KvmGuest, KvmImage, SHARED};
pub use receiver::{Listener, Receiver};

use anyhow::{Context, Result, anyhow, bail, ensure};
use kata_gpu_host::vm::{Vm, VmConfig, uds_path};
use kata_gpu_wire::arch::Arch;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

/// Command line of a confidential guest, as far as the init sees it; its events go to the host.
pub const CONFIDENTIAL: &str = "hardware.file=tdx_guest gpuinit.events.vsock=on";

/// How long anything in a test may take on the host's clock, TCG and a busy machine included. Never
/// the thing that is tested.
pub const DEADLINE: Duration = Duration::from_secs(180);

/// Time for a record that the guest's console has already.
const UNDERWAY: Duration = Duration::from_secs(10);
/// Time for a guest whose connection was closed to come again: it tries at least once a second.
const RECONNECTED: Duration = Duration::from_secs(30);

/// How the creation of a container ends, in the test agent's notes.
const ENDS: [&str; 2] = ["container created", "container failed"];

/// The machine under a test, which is not what the test is about, has stopped: the emulated host,
/// or the vsock daemon of a guest. The text says where.
#[derive(Debug)]
pub struct Silent(String);

impl std::error::Error for Silent {}
impl std::fmt::Display for Silent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// How a test ended, if it did not fail.
pub enum Outcome {
    Passed,
    /// Passed, and this is worth printing.
    Measured(String),
    Skipped(String),
}

/// One test.
pub struct VmTest {
    /// A sentence, in words joined by underscores.
    pub name: &'static str,
    pub run: fn(&TestContext) -> Result<Outcome>,
}

/// Architecture of a test's guests, and its folders.
#[derive(Clone)]
pub struct TestContext {
    pub arch: Arch,
    /// Files that guests of that architecture boot: cargo's folder, or arm64/ in it.
    pub target: PathBuf,
    /// For the test's logs.
    pub work_dir: PathBuf,
    /// Cargo's folder.
    cargo: PathBuf,
}

impl TestContext {
    /// `name`: of the work folder.
    pub fn new(cargo: PathBuf, arch: Arch, name: &str) -> Self {
        let target = match arch {
            Arch::X86_64 => cargo.clone(),
            Arch::Aarch64 => cargo.join("arm64"),
        };
        Self {
            arch,
            work_dir: target.join("vm").join(name),
            target,
            cargo,
        }
    }

    /// A program for guests: kata-gpu-init, or kata-agent (the test agent).
    pub fn guest_program(&self, name: &str) -> PathBuf {
        self.cargo
            .join(format!("{}-unknown-linux-musl/release", self.arch))
            .join(name)
    }

    /// The guests' kernel: for x86-64 as tests/setup has unpacked it.
    pub fn kernel(&self) -> PathBuf {
        let name = match self.arch {
            Arch::X86_64 => "kernel/vmlinux",
            Arch::Aarch64 => "kernel/vmlinuz",
        };
        self.target.join(name)
    }

    /// Version of the kernel that guests boot.
    pub fn kernel_version(&self) -> Result<String> {
        let path = self.target.join("kernel/version");
        let text = std::fs::read_to_string(&path);
        let text = text.with_context(|| format!("read {} (initrd/setup makes it)", path.display()));
        Ok(text?.trim().to_string())
    }

    /// Folder of that kernel's modules in a guest's root.
    pub fn modules(&self) -> Result<String> {
        Ok(format!("lib/modules/{}", self.kernel_version()?))
    }

    /// The host's program.
    pub fn host_program(&self) -> PathBuf {
        std::env::var_os("KATA_GPU_BOOT")
            .map_or_else(|| self.cargo.join("release/kata-gpu-boot"), PathBuf::from)
    }

    /// Clock of a guest's kernel under emulation.
    pub fn clocksource(&self) -> &'static str {
        match self.arch {
            Arch::X86_64 => "hpet",
            Arch::Aarch64 => "arch_sys_counter",
        }
    }
}

/// Beginning of a machine's RAM, in MiB.
const fn ram_begins(arch: Arch) -> u64 {
    match arch {
        Arch::X86_64 => 0,
        Arch::Aarch64 => 1024,
    }
}
/// RAM of a guest whose GPUs have registers, and the kernel's part of it, in MiB.
const WITH_REGISTERS: (u32, u64) = (2048, 1536);

/// NVIDIA's module as tests/real-driver/build left it.
pub struct RealDriver {
    /// Path of the module in the initrd.
    module_path: String,
    module: Vec<u8>,
    pub version: String,
    folder: PathBuf,
    arch: Arch,
}

impl RealDriver {
    /// Finds the built driver. None when it was not built.
    pub fn find(context: &TestContext) -> Result<Option<Self>> {
        let folder = context.target.join("real-driver");
        let Ok(module) = std::fs::read(folder.join("nvidia.ko")) else {
            return Ok(None);
        };
        let version = std::fs::read_to_string(folder.join("version"))?
            .trim()
            .to_string();
        Ok(Some(Self {
            module_path: format!("{}/nvidia.ko", context.modules()?),
            module,
            version,
            folder,
            arch: context.arch,
        }))
    }

    /// NVIDIA's own nvidia-persistenced with what it needs: paths in the initrd with contents.
    pub fn persistenced(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let root = self.folder.join("persistenced");
        let mut files = Vec::new();
        // As that script lays it out: the loader's folder differs.
        let libs = format!("usr/lib/{}", self.arch.facts().triplet);
        let loaders = if self.arch == Arch::X86_64 {
            "lib64"
        } else {
            "lib"
        };
        for folder in ["usr/bin", loaders, "etc", &libs] {
            let entries = std::fs::read_dir(root.join(folder))
                .with_context(|| format!("read {}/{folder}", root.display()))?;
            for entry in entries {
                let entry = entry?;
                let name = entry
                    .file_name()
                    .into_string()
                    .map_err(|name| anyhow!("a file is named {name:?}"))?;
                files.push((format!("{folder}/{name}"), std::fs::read(entry.path())?));
            }
        }
        Ok(files)
    }

    /// Path in the initrd and content of the firmware for GH100.
    pub fn firmware(&self) -> Result<(String, Vec<u8>)> {
        let name = format!("firmware/nvidia/{}/gsp_ga10x.bin", self.version);
        let file = self.folder.join(&name);
        Ok((
            format!("lib/{name}"),
            std::fs::read(&file).with_context(|| format!("read {}", file.display()))?,
        ))
    }
}

/// Kernel parameters that leave out features which no test looks at and Kata's kernels lack. Kata's
/// own command line has the first one: without it Debian's kernel tests its ciphers as it starts,
/// which has hung a guest.
pub const LEAN_KERNEL: &str =
    "cryptomgr.notests nokaslr audit=0 apparmor=0 ipv6.disable=1 mitigations=off";

/// A guest to boot. The default: 8 GPUs that take little time, a listener on the host.
pub struct Guest {
    append: Vec<String>,
    /// None: that of initrd/pack.
    initrd: Option<PathBuf>,
    disk: Option<PathBuf>,
    disk_rate: Option<u64>,
    serial_disks: Vec<(String, PathBuf)>,
    files: Vec<(String, Vec<u8>)>,
    archives: Vec<String>,
    without: Vec<&'static str>,
    vsock: bool,
    console: bool,
    registers: bool,
    cpus: u32,
    listener: Listener,
}

impl Default for Guest {
    fn default() -> Self {
        Self::new()
    }
}

impl Guest {
    pub fn new() -> Self {
        let times = "fakepci.enable_ms=3 nvidia.probe_ms=3 nvidia.s1_ms=30 nvidia.s2_ms=130 \
            nvidia.s3_ms=50";
        // no_timer_check, as in Kata's own command line: the kernel's early look whether the timer
        // ticks is lost on a host that is busy, and it panics. loglevel=4: the kernel's own lines,
        // errors apart, would fall into the middle of the agent's on the one serial line.
        let kernel = "loglevel=4 panic=-1 no_timer_check cgroup_no_v1=all rdinit=/hardware";
        Self {
            append: vec![kernel.into(), LEAN_KERNEL.into(), times.into()],
            initrd: None,
            disk: None,
            disk_rate: None,
            serial_disks: vec![],
            files: vec![],
            archives: vec![],
            without: vec![],
            vsock: true,
            console: true,
            registers: false,
            cpus: 2,
            listener: Listener::Reads,
        }
    }

    /// With words on the kernel command line.
    pub fn with(words: &str) -> Self {
        Self::new().append(words)
    }

    /// With the guest half that acts on records (tests/guest/halves/script.rs).
    pub fn script(self, steps: &str) -> Self {
        self.append(&format!("testagent.guest=script testagent.script={steps}"))
    }

    /// Adds words to the kernel command line; later ones count.
    pub fn append(mut self, words: &str) -> Self {
        self.append.push(words.into());
        self
    }

    /// Without a console: the kernel has no port of this name, and starts its init without
    /// descriptors.
    pub fn without_console(mut self) -> Self {
        self.console = false;
        self
    }

    /// Boots this image instead of the one that initrd/pack has made.
    pub fn initrd(mut self, path: &Path) -> Self {
        self.initrd = Some(path.into());
        self
    }

    /// Boots with this image as its root, on a disk that it only reads. `device` and `fs`: as in
    /// `root=` and `rootfstype=`. The initrd has what a Kata kernel has built in, and no init of
    /// its own.
    pub fn root_disk(
        mut self,
        context: &TestContext,
        image: &Path,
        device: &str,
        fs: &str,
    ) -> Result<Self> {
        let (with_modules, paths) = self.image_modules(context)?;
        self = with_modules;
        self.disk = Some(image.into());
        Ok(self
            .file("etc/hardware.root-modules", paths.as_bytes())
            .without("init")
            .append(&format!("hardware.root={device}:{fs}")))
    }

    /// The root's disk gives at most so many bytes a second.
    pub fn disk_rate(mut self, bytes: u64) -> Self {
        self.disk_rate = Some(bytes);
        self
    }

    /// With the modules that a Kata kernel has built in for disks and images; returns their paths,
    /// one a line.
    fn image_modules(self, context: &TestContext) -> Result<(Self, String)> {
        self.modules(context, "image-load-order")
    }

    /// With the modules of one of initrd/setup's lists; returns their paths, one a line.
    fn modules(mut self, context: &TestContext, list: &str) -> Result<(Self, String)> {
        let read = |path: PathBuf| {
            std::fs::read(&path)
                .with_context(|| format!("read {} (initrd/setup makes it)", path.display()))
        };
        let kernel = context.target.join("kernel");
        let list = String::from_utf8(read(kernel.join("modules").join(list))?)?;
        let folder = context.modules()?;
        let mut paths = String::new();
        for name in list.lines() {
            let path = format!("{folder}/{name}");
            self = self.file(&path, &read(kernel.join("modules").join(name))?);
            paths.push_str(&format!("/{path}\n"));
        }
        Ok((self, paths))
    }

    /// Can mount images beside its root: the modules for that are loaded before the init starts.
    pub fn mounts_images(self, context: &TestContext) -> Result<Self> {
        self.loads_first(context, &["image-load-order"])
    }

    /// Has KVM's clock, and its console where no character costs an exit to the VMM.
    pub fn under_kvm(self, context: &TestContext) -> Result<Self> {
        Ok(self
            .loads_first(context, &["kvm-load-order", "image-load-order"])?
            .append("console=hvc0 quiet mitigations=off"))
    }

    /// With some of initrd/setup's lists of modules, loaded before the init starts.
    fn loads_first(self, context: &TestContext, lists: &[&str]) -> Result<Self> {
        let kernel = context.target.join("kernel");
        let read = |file: &str| {
            std::fs::read_to_string(kernel.join(file))
                .with_context(|| format!("read {file} (initrd/setup makes it)"))
        };
        let (folder, first) = (context.modules()?, read("modules/load-order")?);
        let mut paths: String = first
            .lines()
            .chain(["fakepci.ko"])
            .map(|m| format!("/{folder}/{m}\n"))
            .collect();
        let mut guest = self;
        for list in lists {
            let (with_modules, more) = guest.modules(context, list)?;
            guest = with_modules;
            paths.push_str(&more);
        }
        Ok(guest.file("etc/hardware.modules", paths.as_bytes()))
    }

    /// With one more disk, which shows this serial.
    pub fn serial_disk(mut self, serial: &str, image: &Path) -> Self {
        self.serial_disks.push((serial.into(), image.into()));
        self
    }

    /// Replaces a file of the initrd, or adds one.
    pub fn file(mut self, path: &str, text: &[u8]) -> Self {
        self = self.without_added(path);
        self.files.push((path.into(), text.to_vec()));
        self
    }

    /// Takes back a file that was added.
    pub fn without_added(mut self, path: &str) -> Self {
        self.files.retain(|(other, _)| other != path);
        self
    }

    /// Adds an archive that tests/containers/build has made: what it has replaces what the initrd
    /// has.
    pub fn archive(mut self, name: &str) -> Self {
        self.archives.push(format!("containers/{name}.cpio"));
        self
    }

    /// With NVML's helper and the stand-in for its library (tests/nvml/build).
    pub fn nvml(mut self) -> Self {
        self.archives.push("nvml.cpio".into());
        self
    }

    /// With NVML's helper and NVIDIA's own library.
    pub fn real_nvml(self) -> Self {
        let mut guest = self.nvml();
        guest.archives.push("nvml-real.cpio".into());
        guest
    }

    /// Leaves a file out of the initrd.
    pub fn without(mut self, path: &'static str) -> Self {
        self.without.push(path);
        self
    }

    /// With NVIDIA's own module instead of the simulated one, on functions whose registers lie in
    /// RAM that the kernel leaves alone.
    pub fn real_driver(self, driver: &RealDriver) -> Self {
        self.registers_in_ram()
            .file(&driver.module_path, &driver.module)
    }

    /// The functions' registers lie in RAM that the kernel leaves alone, as NVIDIA's module wants
    /// to write to them.
    pub fn registers_in_ram(mut self) -> Self {
        self.registers = true;
        self
    }

    /// The kernel's command line.
    fn command_line(&self, arch: Arch) -> String {
        // Without a console: a port that the machine does not have.
        let console = if self.console {
            kata_gpu_host::qemu_machine::of(arch).console
        } else {
            "ttyS1"
        };
        let mut words = format!("console={console} {}", self.append.join(" "));
        if self.registers {
            let (_, kernels) = WITH_REGISTERS;
            words.push_str(&format!(
                " mem={kernels}M fakepci.bar0={:#x}",
                (ram_begins(arch) + kernels) << 20
            ));
        }
        words
    }

    /// Number of vCPUs instead of 2.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// With the controllers of version 1, as Kata's configurations without GPUs have them.
    pub fn cgroup_v1(mut self) -> Self {
        self.append
            .iter_mut()
            .for_each(|words| *words = words.replace(" cgroup_no_v1=all", ""));
        self
    }

    /// Replaces the test agent. The guest's other test programs stay.
    pub fn agent(self, program: &[u8]) -> Self {
        self.file("usr/bin/kata-agent", program)
    }

    pub fn without_vsock(mut self) -> Self {
        self.vsock = false;
        self
    }

    pub fn listener(mut self, listener: Listener) -> Self {
        self.listener = listener;
        self
    }

    /// The initrd with what this guest changes in it, made in `work_dir` where it changes anything.
    fn pack(&self, context: &TestContext, work_dir: &Path) -> Result<PathBuf> {
        let base = self
            .initrd
            .clone()
            .unwrap_or_else(|| context.target.join("initrd.cpio"));
        if self.files.is_empty() && self.archives.is_empty() && self.without.is_empty() {
            return Ok(base);
        }
        let read =
            |path: &Path| std::fs::read(path).with_context(|| format!("read {}", path.display()));
        let mut archive = cpio::change(&read(&base)?, &self.files, &self.without)?;
        // The kernel unpacks one archive after another.
        for name in &self.archives {
            archive.extend(read(&context.target.join(name))?);
        }
        let initrd = work_dir.join("initrd.cpio");
        std::fs::write(&initrd, archive)?;
        Ok(initrd)
    }

    /// Starts it. `name` is unique among the guests of a test.
    pub fn boot(self, context: &TestContext, name: &str) -> Result<Booted> {
        let work_dir = context.work_dir.join(name);
        // Files of an earlier run would be taken for this one's.
        let _unused = std::fs::remove_dir_all(&work_dir);
        std::fs::create_dir_all(&work_dir)
            .with_context(|| format!("make {}", work_dir.display()))?;
        let initrd = self.pack(context, &work_dir)?;
        let receiver = Receiver::start(&uds_path(&work_dir), self.listener)?;
        let append = self.command_line(context.arch);
        let vm = Vm::start(&VmConfig {
            kernel: context.kernel(),
            initrd,
            disk: self.disk,
            disk_rate: self.disk_rate,
            serial_disks: self.serial_disks,
            append,
            memory_mib: if self.registers {
                WITH_REGISTERS.0
            } else {
                1024
            },
            cpus: self.cpus,
            work_dir: work_dir.clone(),
            vhost_device_vsock: self
                .vsock
                .then(|| context.cargo.join("tools/bin/vhost-device-vsock")),
        })?;
        let console = Console::new(vm.console());
        Ok(Booted {
            arch: context.arch,
            vm,
            receiver,
            console,
            work_dir,
        })
    }
}

/// A guest that runs; dies when dropped.
pub struct Booted {
    pub arch: Arch,
    pub vm: Vm,
    pub receiver: Receiver,
    pub console: Console,
    work_dir: PathBuf,
}

impl Booted {
    /// For an error: what may explain that nothing comes any more.
    fn state(&self) -> &'static str {
        if self.console.text().contains("Kernel panic") {
            ": the guest's kernel has panicked, see its console"
        } else {
            ""
        }
    }

    /// Waits for a record.
    pub fn record(&self, what: &str, wanted: impl Fn(&Record) -> bool) -> Result<Record> {
        self.receiver
            .wait(DEADLINE, wanted)
            .ok_or_else(|| self.missing(&format!("no record \"{what}\"")))
    }

    /// The error of records that have not come. The guest writes the same ones to its console:
    /// where one of those does not come either, the connection has stopped, not the guest.
    fn missing(&self, what: &str) -> anyhow::Error {
        let missing = format!("{what} within {DEADLINE:?}{}", self.state());
        if stuck_before_its_programs(&self.console.text()) {
            return Silent(format!(
                "{missing}: the guest's kernel is stuck before its first program"
            ))
            .into();
        }
        let Some(written) = self.console.newest_record_ns() else {
            return anyhow!(missing);
        };
        if self
            .receiver
            .wait(UNDERWAY, |record| record.boottime_ns >= written)
            .is_some()
        {
            return anyhow!(missing);
        }
        let came = self.receiver.records();
        let newest = came
            .iter()
            .map(|record| record.boottime_ns)
            .max()
            .unwrap_or(0);
        let connections = self.receiver.headers().len();
        self.receiver.hang_up();
        let again = match self.receiver.wait_headers(RECONNECTED, connections + 1) {
            Some(_) => "the guest connected again when the connection was closed",
            None => "nor did the guest connect again when the connection was closed",
        };
        let seconds = |ns: u64| ns as f64 / 1e9;
        let (newest, written, count) = (seconds(newest), seconds(written), came.len());
        Silent(format!(
            "{missing}: the stream has stopped at {newest:.3} s ({count} records), the \
            console at {written:.3} s; {again}"
        ))
        .into()
    }

    /// Waits for the event of this name.
    pub fn event(&self, name: &str) -> Result<Record> {
        self.record(name, |r| r.kind == Kind::Event && r.name == name)
    }

    /// Waits for this many events of this name; gives all there are then.
    pub fn events(&self, name: &str, count: usize) -> Result<Vec<Record>> {
        self.receiver
            .wait_several(DEADLINE, count, |r| r.kind == Kind::Event && r.name == name)
            .ok_or_else(|| self.missing(&format!("no {count} events \"{name}\"")))
    }

    /// Waits until all GPUs are usable or failed; gives how many are which.
    pub fn settled(&self) -> Result<(u64, u64)> {
        let record = self.event(names::SETTLED)?;
        let count = |key| {
            record
                .fields
                .get(key)
                .and_then(serde_json::Value::as_u64)
                .with_context(|| format!("settled has no {key}"))
        };
        Ok((count("usable")?, count("failed")?))
    }

    /// All records so far, in order of seq.
    pub fn records(&self) -> Vec<Record> {
        self.receiver.records()
    }

    /// All lines of the agent so far.
    pub fn lines(&self) -> Vec<AgentLine> {
        self.console.agent_lines()
    }

    /// Checks that a guest of eight GPUs brings all up by the list of the driver's files in its
    /// image, and gives them to the container `all`.
    pub fn comes_up_by_its_list(&mut self) -> Result<()> {
        let all = self.created("all")?;
        self.settles(8, 0)?;
        ensure!(gpus_of(&all) == 8, "{all:?}");
        let files = self.record("the driver's files", |r| {
            r.kind == Kind::End && r.name == names::DRIVER_FILES
        })?;
        ensure!(
            files.error.is_none() && files.fields.get("manifest") == Some(&true.into()),
            "the list was not used: {files:?}"
        );
        self.still_runs()
    }

    /// Checks that no event and no span of this name has come.
    pub fn has_no(&self, name: &str) -> Result<()> {
        let records = self.receiver.records();
        let came = records.iter().find(|r| r.name == name);
        ensure!(came.is_none(), "{came:?}");
        Ok(())
    }

    /// Waits until all GPUs are usable or failed; these must be so many.
    pub fn settles(&self, usable: u64, failed: u64) -> Result<()> {
        let is = self.settled()?;
        ensure!(
            is == (usable, failed),
            "usable and failed are {is:?}, not {:?}: {:?}",
            (usable, failed),
            named(&self.receiver.records(), Kind::Event, names::GPU_FAILED)
        );
        Ok(())
    }

    /// Waits for the end of a span.
    pub fn end_of(&self, begin: &Record) -> Result<Record> {
        self.record(&format!("end of {}", begin.name), |r| {
            r.kind == Kind::End && r.span == begin.span
        })
    }

    /// Waits for the `number`-th begin of a span of this name whose field has this value, and for
    /// its end.
    pub fn span_of(
        &self,
        name: &str,
        (key, value): (&str, &str),
        number: usize,
    ) -> Result<(Record, Record)> {
        let is = |r: &Record| {
            r.kind == Kind::Begin
                && r.name == name
                && r.fields.get(key).is_some_and(|is| is == value)
        };
        let begin = self
            .receiver
            .wait_several(DEADLINE, number, is)
            .and_then(|all| all.get(number - 1).cloned())
            .ok_or_else(|| self.missing(&format!("no {number} \"{name}\" of {value}")))?;
        let end = self.end_of(&begin)?;
        Ok((begin, end))
    }

    /// Waits until the guest's script has done this.
    pub fn did(&self, action: &str) -> Result<AgentLine> {
        let line = self.agent("script", |l| l.get("did") == action)?;
        ensure!(line.get("error").is_empty(), "{line:?}");
        Ok(line)
    }

    /// Waits for a line of the agent.
    pub fn agent(&self, message: &str, wanted: impl Fn(&AgentLine) -> bool) -> Result<AgentLine> {
        self.console
            .wait_agent(DEADLINE, message, wanted)
            .ok_or_else(|| {
                anyhow!(
                    "no line \"{message}\" of the agent within {DEADLINE:?}{}",
                    self.state()
                )
            })
    }

    /// Waits until a container is created, and fails when it fails.
    pub fn created(&self, container: &str) -> Result<AgentLine> {
        let line = self
            .console
            .wait_agent_any(DEADLINE, |l| {
                l.get("container") == container && ENDS.contains(&l.get("msg"))
            })
            .ok_or_else(|| {
                anyhow!(
                    "container {container} is neither created nor failed within {DEADLINE:?}{}",
                    self.state()
                )
            })?;
        ensure!(
            line.get("msg") == "container created",
            "container {container}: {}: {}",
            line.get("msg"),
            line.get("error")
        );
        Ok(line)
    }

    /// Waits until a container has failed.
    pub fn refused(&self, container: &str) -> Result<AgentLine> {
        self.agent("container failed", |l| l.get("container") == container)
    }

    /// The same of a container that asked for a failed GPU: the agent finds it not listed while
    /// another GPU is pending, and prints its verdict after that.
    pub fn refused_gpu(&self, container: &str, reason: &str) -> Result<()> {
        let line = self.refused(container)?;
        let (error, verdict) = (line.get("error"), format!("has failed ({reason}): "));
        ensure!(
            error.contains("do not exist") || error.contains(&verdict),
            "{line:?}"
        );
        Ok(())
    }

    /// CLOCK_BOOTTIME in ns of a line that carries wall time, by the stream's clock record.
    pub fn boottime_ns(&self, line: &AgentLine) -> Result<u64> {
        let clock = self.event(names::CLOCK)?;
        let realtime = clock
            .fields
            .get("realtime_ns")
            .and_then(serde_json::Value::as_u64)
            .context("clock has no realtime_ns")?;
        (line.realtime_ns()? + clock.boottime_ns)
            .checked_sub(realtime)
            .context("line from before the boot")
    }

    /// Waits until the guest has powered off.
    pub fn exit(&mut self) -> Result<ExitStatus> {
        self.vm
            .wait(DEADLINE)?
            .ok_or_else(|| anyhow!("the guest still runs after {DEADLINE:?}"))
    }

    /// Fails if the guest is gone.
    pub fn still_runs(&mut self) -> Result<()> {
        match self.vm.exited()? {
            None => Ok(()),
            Some(status) => bail!("the guest has ended ({status})"),
        }
    }

    pub fn work_dir(&self) -> &Path {
        &self.work_dir
    }
}

/// Whether a console shows that the kernel hangs while PID 1 is still its own thread: nothing that
/// is tested has run, and the emulated processor has stopped (seen with QEMU 7.2 on a busy
/// machine). Nor has anything run where a console is empty: `/hardware`, which starts before the
/// init, writes the first line.
fn stuck_before_its_programs(console: &str) -> bool {
    console.is_empty()
        || console
            .lines()
            .any(|line| line.contains("soft lockup") && line.contains("[swapper/0:1]"))
}

/// All records of one name and kind, in order of seq.
pub fn named<'a>(records: &'a [Record], kind: Kind, name: &str) -> Vec<&'a Record> {
    records
        .iter()
        .filter(|r| r.kind == kind && r.name == name)
        .collect()
}

/// All events of this name, in order of seq.
pub fn events<'a>(records: &'a [Record], name: &str) -> Vec<&'a Record> {
    named(records, Kind::Event, name)
}

/// Whether a record is of the simulated GPU in this slot.
pub fn is_of_slot(record: &Record, slot: u32) -> bool {
    record
        .gpu
        .is_some_and(|gpu| gpu.to_string() == format!("0001:00:{slot:02x}.0"))
}

/// Checks that a record's error has all these words.
pub fn error_has(record: &Record, words: &[&str]) -> Result<()> {
    let error = record.error.as_deref().unwrap_or_default();
    let missing = words.iter().find(|words| !error.contains(**words));
    ensure!(
        missing.is_none(),
        "{missing:?} is not in the error of {record:?}"
    );
    Ok(())
}

/// Begin and end of each span of this name, in the order of their begins.
pub fn spans<'a>(records: &'a [Record], name: &str) -> Result<Vec<(&'a Record, &'a Record)>> {
    let ends = named(records, Kind::End, name);
    named(records, Kind::Begin, name)
        .into_iter()
        .map(|begin| {
            let end = ends.iter().find(|end| end.span == begin.span);
            Ok((begin, *end.with_context(|| format!("no end of {begin:?}"))?))
        })
        .collect()
}

/// How many GPUs' nodes a container has, without those that all GPUs share.
pub fn gpus_of(container: &AgentLine) -> usize {
    let shared = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];
    container
        .get("nodes")
        .split(',')
        .filter_map(|node| node.split(' ').next())
        .filter(|path| path.starts_with("/dev/nvidia") && !shared.contains(path))
        .count()
}

/// Checks that a stream has every seq from 0 on, once.
pub fn complete(records: &[Record]) -> Result<()> {
    for (expected, record) in records.iter().enumerate() {
        ensure!(
            record.seq == expected as u64,
            "seq {expected} is missing: {} comes instead",
            record.seq
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hang_is_the_machines_fault_only_before_the_first_program() {
        let line = |who: &str| {
            format!("[   48.500819] watchdog: BUG: soft lockup - CPU#1 stuck for 45s! [{who}]\n")
        };
        assert!(stuck_before_its_programs(&line("swapper/0:1")));
        assert!(!stuck_before_its_programs(&line("kata-agent:1")));
        assert!(!stuck_before_its_programs("[    1.0] swapper/0:1"));
    }

    #[test]
    fn a_gap_in_a_stream_is_found() {
        let record = |seq| -> Record {
            serde_json::from_value(
                serde_json::json!({"schema":1,"seq":seq,"boottime_ns":1,"kind":"event","name":"x"}),
            )
            .unwrap()
        };
        assert!(complete(&[record(0), record(1)]).is_ok());
        assert!(complete(&[record(0), record(2)]).is_err());
        assert!(complete(&[record(1)]).is_err());
    }
}
