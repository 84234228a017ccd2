//! Facts about a host: texts of its files, Kata's merged configuration, running VMs, and its own
//! boots. `tools::doctor` reads them; tests write them down.
//!
//! A fact that could not be had is a [`Gap`], which `?` passes on: no rule can take it for a value.

use super::checked::{Evidence, Gap, Verdict, evidence, unknown};
use super::own_boots::OwnBoots;
use kata_gpu_image::kata::gpu_needs::Plugging;
use kata_gpu_image::kata::merge::Runtime;
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::BTreeMap;

/// Outcome of a look at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Content of a file without the last line's end, target of a link, or names in a directory,
    /// one a line.
    Text(String),
    /// The reader lacks the permission.
    Denied,
    /// Anything else that is wrong with it.
    Odd(String),
}

/// Paths of the host that were looked at, whatever root they were read below. Absent: not there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files(BTreeMap<String, Seen>);

impl Files {
    pub fn insert(&mut self, path: impl Into<String>, seen: Seen) {
        self.0.insert(path.into(), seen);
    }

    pub fn remove(&mut self, path: &str) {
        self.0.remove(path);
    }

    pub fn text(&self, path: &str) -> Result<&str, Gap> {
        match self.0.get(path) {
            Some(Seen::Text(text)) => Ok(text),
            Some(Seen::Denied) => Err(Gap {
                verdict: Verdict::NeedsRoot,
                why: path.to_string(),
            }),
            Some(Seen::Odd(why)) => unknown(format!("{path}: {why}")),
            None => unknown(format!("{path}: not there")),
        }
    }

    /// A file that need not exist.
    pub fn optional(&self, path: &str) -> Result<Option<&str>, Gap> {
        if self.0.contains_key(path) {
            self.text(path).map(Some)
        } else {
            Ok(None)
        }
    }

    pub fn number(&self, path: &str) -> Result<u64, Gap> {
        let text = self.text(path)?;
        text.trim().parse().map_err(|_| Gap::unreadable(path, text))
    }

    /// Whether a function has less than full power: reading its configuration space gives nothing
    /// or wakes it. The state of one that no driver has is `unknown`.
    pub fn is_asleep(&self, function: &str) -> bool {
        let state = self
            .text(&format!("{DEVICES}/{function}/power_state"))
            .unwrap_or_default();
        state.starts_with('D') && state != "D0"
    }

    /// Names of direct entries of a directory of which something was looked at.
    pub fn entries<'a>(&'a self, dir: &'a str) -> impl Iterator<Item = &'a str> {
        let inside = self
            .0
            .range(dir.to_string()..)
            .map_while(move |(path, _)| path.strip_prefix(dir));
        let mut last = "";
        inside.filter_map(move |rest| {
            let name = rest.strip_prefix('/')?.split('/').next()?;
            let is_new = name != last;
            last = name;
            is_new.then_some(name)
        })
    }
}

/// Version of a kernel or of QEMU: the first two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MajorMinor(pub u32, pub u32);

impl MajorMinor {
    /// `6.12.38+deb13-amd64` is 6.12.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit());
        Some(Self(
            numbers.next()?.parse().ok()?,
            numbers.next()?.parse().ok()?,
        ))
    }
}

/// Kata's configuration as its runtime merges it.
#[derive(Clone, Debug, Default)]
pub struct Kata {
    pub path: String,
    /// Section of the hypervisor, such as `qemu`.
    pub section: String,
    /// Whether runtime-rs reads it.
    pub is_rust: bool,
    /// Values by dotted path, with the file that wrote them.
    pub values: BTreeMap<String, (String, String)>,
    /// Guest image or initrd: path, bytes, and its compression.
    pub guest: Option<GuestFile>,
}

/// A file that a guest starts from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestFile {
    pub path: String,
    pub is_initrd: bool,
    pub bytes: u64,
    /// `gzip`, `zstd`, ...; None: not compressed.
    pub compression: Option<&'static str>,
}

impl Kata {
    /// Value of a key of the hypervisor's section, and the file that wrote it.
    pub fn hypervisor(&self, key: &str) -> Option<&(String, String)> {
        self.values
            .get(&format!("hypervisor.{}.{key}", self.section))
    }

    /// Value of a key of the hypervisor's section; empty where it is not set.
    pub fn value(&self, key: &str) -> &str {
        self.hypervisor(key).map_or("", |(value, _)| value)
    }

    /// How GPUs come into guests.
    pub fn plugging(&self) -> Plugging<'_> {
        let text = |key| self.hypervisor(key).map(|(value, _)| value.as_str());
        Plugging {
            runtime: if self.is_rust {
                Runtime::Rust
            } else {
                Runtime::Go
            },
            section: &self.section,
            cold: text("cold_plug_vfio"),
            hot: text("hot_plug_vfio"),
            root_ports: self.value("pcie_root_port").parse().unwrap_or(0),
        }
    }

    pub fn is_on(&self, key: &str) -> bool {
        self.value(key) == "true"
    }

    /// Value of a key of the hypervisor's section as evidence.
    pub fn evidence(&self, key: &str) -> Evidence {
        match self.hypervisor(key) {
            Some((value, file)) => evidence(file, format!("{key} = {value}")),
            None => evidence(&self.path, format!("{key} is not set")),
        }
    }
}

/// A QEMU program: path, and version by its newest machine type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qemu {
    pub path: String,
    pub version: Option<MajorMinor>,
}

/// A running VM; its files are /proc/PID/.. in [`Files`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    pub pid: u32,
    /// Words of its command line.
    pub words: Vec<String>,
}

impl Vm {
    pub fn proc(&self, name: &str) -> String {
        format!("/proc/{}/{name}", self.pid)
    }

    /// Values of all options of that name: `-device`, ... Of those that QEMU takes once, the last
    /// counts.
    pub fn options<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let pairs = self
            .words
            .windows(2)
            .filter(move |pair| matches!(pair, [option, _] if option == name));
        pairs.filter_map(|pair| pair.get(1).map(String::as_str))
    }

    /// Devices that are passed through.
    pub fn passed_through(&self) -> impl Iterator<Item = &str> {
        self.options("-device")
            .filter(|device| device.starts_with("vfio-pci"))
    }

    /// Guest memory in bytes, by `-m 8192M` or `-m size=8G,slots=..`.
    pub fn memory(&self) -> Option<u64> {
        let word = self.options("-m").last()?.split(',').next()?;
        let word = word.strip_prefix("size=").unwrap_or(word);
        let digits = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit: u64 = match word.get(digits.len()..)?.to_ascii_uppercase().as_str() {
            "" | "M" | "MB" => 1 << 20,
            "K" | "KB" => 1 << 10,
            "G" | "GB" => 1 << 30,
            "T" | "TB" => 1 << 40,
            _ => return None,
        };
        digits.parse::<u64>().ok()?.checked_mul(unit)
    }
}

/// A GPU of the host; its files are in [`Files`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    pub address: PciAddress,
    /// BARs of 64 KiB and more: number, start, bytes.
    pub bars: Vec<(u8, u64, u64)>,
}

impl Gpu {
    pub fn path(&self, file: &str) -> String {
        format!("{DEVICES}/{}/{file}", self.address)
    }

    /// Whether any BAR but that of its registers has an address or a size.
    pub fn has_addresses(&self) -> bool {
        self.bars.iter().any(|(bar, _, _)| *bar > 0)
    }

    /// Why nothing is known about its BARs.
    pub fn without_addresses(&self) -> Gap {
        Gap::unknown(format!(
            "{}: its BARs have no addresses",
            self.path("resource")
        ))
    }

    /// Bytes of all its BARs; 0: they have no addresses.
    pub fn bytes(&self) -> u64 {
        if !self.has_addresses() {
            return 0;
        }
        self.bars
            .iter()
            .fold(0, |sum, (_, _, bytes)| sum.saturating_add(*bytes))
    }
}

pub const DEVICES: &str = "/sys/bus/pci/devices";
/// Smaller BARs do not count for the time of a boot.
const SMALLEST_BAR: u64 = 64 << 10;

/// All facts.
#[derive(Clone, Debug, Default)]
pub struct HostFacts {
    pub files: Files,
    /// Why there is no configuration of Kata, or the configuration.
    pub kata: Option<Result<Kata, String>>,
    pub qemu: Option<Qemu>,
    pub vms: Vec<Vm>,
    pub boots: OwnBoots,
}

impl HostFacts {
    pub fn kata(&self) -> Result<&Kata, Gap> {
        match &self.kata {
            Some(Ok(kata)) => Ok(kata),
            Some(Err(why)) => unknown(why.clone()),
            None => unknown("no configuration of Kata was found: name it with --kata-config"),
        }
    }

    /// NVIDIA's display and 3D controllers, in order of their addresses.
    pub fn gpus(&self) -> Vec<Gpu> {
        let files = &self.files;
        let is = |name: &str, file: &str, begins: &[&str]| {
            files
                .text(&format!("{DEVICES}/{name}/{file}"))
                .is_ok_and(|text| begins.iter().any(|b| text.starts_with(b)))
        };
        let gpu = |name: &str| {
            let gpu = is(name, "vendor", &["0x10de"]) && is(name, "class", &["0x0300", "0x0302"]);
            let resource = files
                .text(&format!("{DEVICES}/{name}/resource"))
                .unwrap_or_default();
            gpu.then_some(Gpu {
                address: name.parse().ok()?,
                bars: bars(resource)
                    .into_iter()
                    .filter(|(_, _, bytes)| *bytes >= SMALLEST_BAR)
                    .collect(),
            })
        };
        files.entries(DEVICES).filter_map(gpu).collect()
    }

    /// The GPUs, or why a rule about them has nothing to look at.
    pub fn some_gpus(&self) -> Result<Vec<Gpu>, Gap> {
        let gpus = self.gpus();
        if gpus.is_empty() {
            unknown(format!("{DEVICES}: no GPU of NVIDIA's"))
        } else {
            Ok(gpus)
        }
    }

    /// Bytes of all BARs of all GPUs.
    pub fn bar_bytes(&self) -> u64 {
        let gpus = self.gpus();
        let bytes = gpus.iter().map(Gpu::bytes);
        bytes.fold(0, u64::saturating_add)
    }

    pub fn some_vms(&self) -> Result<&[Vm], Gap> {
        if self.vms.is_empty() {
            unknown("no VM with GPUs was seen: run it while one runs, as root")
        } else {
            Ok(&self.vms)
        }
    }

    /// Memory of a guest in bytes and where that is from: of the largest running one, else Kata's
    /// default.
    pub fn guest_memory(&self) -> Result<(u64, String), Gap> {
        let running = self
            .vms
            .iter()
            .filter_map(|vm| Some((vm.memory()?, format!("-m of process {}", vm.pid))))
            .max();
        let configured = || {
            let (value, file) = self.kata().ok()?.hypervisor("default_memory")?;
            let mib = value.parse::<u64>().ok()?;
            Some((
                mib.checked_mul(1 << 20)?,
                format!("default_memory in {file}"),
            ))
        };
        running
            .or_else(configured)
            .ok_or_else(|| Gap::unknown("size of guests: no default_memory, no running VM"))
    }

    /// Pages of hugetlbfs for guests: other page sizes do not matter then.
    pub fn hugetlb(&self) -> Option<Evidence> {
        const KEY: &str = "enable_hugepages";
        let kata = self.kata().ok().filter(|kata| kata.is_on(KEY));
        let running = || {
            let vm = self.vms.iter().find(|vm| {
                vm.options("-object")
                    .any(|o| o.contains("hugetlb=on") || o.contains("mem-path=/dev/hugepages"))
            })?;
            Some(evidence(vm.proc("cmdline"), "memory-backend of hugetlbfs"))
        };
        kata.map(|kata| kata.evidence(KEY)).or_else(running)
    }

    /// Value of a word of the kernel's command line; the last one counts. Empty for a bare word.
    pub fn kernel_word(&self, name: &str) -> Result<Option<&str>, Gap> {
        let mut words = self.files.text("/proc/cmdline")?.split_whitespace();
        let names_it = |word: &&str| {
            word.strip_prefix(name)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        };
        Ok(words
            .rfind(names_it)
            .map(|word| word.get(name.len() + 1..).unwrap_or_default()))
    }
}

/// `Name:   123 kB` of a file of /proc/PID, in bytes.
pub fn bytes_of(text: &str, name: &str) -> Option<u64> {
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = value.trim().trim_end_matches("kB").trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// BARs in a function's `resource`, lines of start, end and flags: number, start and bytes.
pub fn bars(resource: &str) -> Vec<(u8, u64, u64)> {
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let bar = |(nth, line): (u8, &str)| {
        let words: Vec<u64> = line.split_whitespace().filter_map(number).collect();
        let [start, end, _] = words[..] else {
            return None;
        };
        let bytes = end.checked_sub(start)?.checked_add(1)?;
        (end > start).then_some((nth, start, bytes))
    };
    // The seventh line is the ROM.
    (0u8..6).zip(resource.lines()).filter_map(bar).collect()
}
