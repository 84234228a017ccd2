//! One guest with a passed-through function, booted with or without
//! `kata-gpu-boot doctor --record`: what [`super::trace`] judges and `bench trace` compares.

use super::guests::{Boot, SERVICE, event, sent};
use super::passthrough::{PORTS, function};
use super::service::{self, PROGRAM};
use crate::vm::harness::{BOOTS, EmulatedHost, Guest, KvmGuest, KvmImage, Size, TestContext};
use anyhow::{Context, Result, ensure};
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::data::trace_file::Traced;
use kata_gpu_wire::catalogue::traced as traces;
use kata_gpu_wire::names;
use std::path::Path;

pub const TRACEFS: &str = "/sys/kernel/tracing";
/// Memory of a guest.
pub const MEMORY: u64 = 512 << 20;

/// Pages of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    Small,
    Transparent,
    /// Pages of 2 MiB, reserved before.
    Huge,
}

impl Pages {
    pub fn name(self) -> &'static str {
        match self {
            Self::Small => "4 KiB",
            Self::Transparent => "THP",
            Self::Huge => "2 MiB",
        }
    }

    /// Sets the host up for such pages; gives QEMU's words.
    fn prepare(self, host: &mut EmulatedHost) -> Result<&'static str> {
        let thp = if self == Self::Transparent {
            "always"
        } else {
            "never"
        };
        let reserved = if self == Self::Huge { MEMORY >> 21 } else { 0 };
        // Free memory in one piece, as far as there is some: each guest finds the same host.
        host.run(&format!(
            "echo {thp} > /sys/kernel/mm/transparent_hugepage/enabled
            echo 3 > /proc/sys/vm/drop_caches && echo 1 > /proc/sys/vm/compact_memory
            echo {reserved} > /proc/sys/vm/nr_hugepages && test $(cat /proc/sys/vm/nr_hugepages) \
                = {reserved}"
        ))
        .with_context(|| format!("pages of {}", self.name()))?;
        Ok(if self == Self::Huge { HUGE } else { "" })
    }
}

const HUGE: &str = "-object \
    memory-backend-memfd,id=ram,size=512M,hugetlb=on,hugetlbsize=2M,share=on -machine \
    memory-backend=ram";

/// Interface of the kernel by which the VMM maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vfio {
    Legacy,
    Iommufd,
}

/// Modules of tests/emulated-host/iommufd, each after those that it needs.
const IOMMUFD: [&str; 5] = [
    "iommufd",
    "vfio",
    "vfio_iommu_type1",
    "vfio-pci-core",
    "vfio-pci",
];

/// A host that is ready for such guests.
pub struct TracedHost {
    pub host: EmulatedHost,
    pub function: String,
    image: KvmImage,
    /// Guests so far; each has an own CID.
    guests: u32,
}

/// CID of the first guest.
const FIRST_CID: u32 = 33;

/// Figures of one boot.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// From QEMU's start until the guest's GPUs were settled.
    pub settled_s: f64,
    /// Pages of the host's IOMMU page tables that came with this guest; None: this kernel does not
    /// count them.
    pub iommu_pages: Option<i64>,
    /// Kernel of the host.
    pub kernel: String,
    pub traced: Vec<Traced>,
}

/// Kernel of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// That of the disk's own suite.
    Own,
    /// Another suite's.
    Of(&'static str),
    /// That of the disk's own suite, with VFIO's modules of tests/emulated-host/iommufd.
    WithIommufd,
}

impl Kernel {
    /// Name of a host with this kernel.
    pub fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Of(suite) => suite,
            Self::WithIommufd => "iommufd",
        }
    }
}

impl TracedHost {
    /// Starts a host with a collector, and gives its function to VFIO.
    pub fn start(context: &TestContext, kernel: Kernel) -> Result<Self> {
        let image = KvmImage::make(context, Guest::new().append("fakepci.gpus=0"))?;
        let modules = context.target.join("emulated-host/iommufd");
        let (suite, modules) = match kernel {
            Kernel::Own => (None, vec![]),
            Kernel::Of(suite) => (Some(suite), vec![]),
            Kernel::WithIommufd => (
                None,
                IOMMUFD
                    .map(|name| {
                        (
                            format!("/run/{name}.ko"),
                            modules.join(format!("{name}.ko")),
                        )
                    })
                    .to_vec(),
            ),
        };
        let modules: Vec<(&str, &Path)> = modules
            .iter()
            .map(|(name, file)| (name.as_str(), file.as_path()))
            .collect();
        let files: Vec<_> = image
            .files()
            .into_iter()
            .chain(modules.iter().copied())
            .collect();
        let mut host = service::start(
            context,
            Size::WITH_GUESTS.with_gpus(1).with_kernel_of(suite),
            &files,
        )?;
        KvmGuest::prepare(&mut host)?;
        for (name, _) in modules {
            host.run(&format!("insmod {name}"))?;
        }
        let function = host.vfio()?.pop().context("no function at VFIO")?;
        host.run(&format!(
            "systemctl start {SERVICE} && mount -t tracefs none {TRACEFS}"
        ))?;
        Ok(Self {
            host,
            function,
            image,
            guests: 0,
        })
    }

    /// CID of the last guest.
    pub fn cid(&self) -> u32 {
        FIRST_CID + self.guests - 1
    }

    /// Starts a recorder of the next VM.
    pub fn record_next(&mut self) -> Result<()> {
        let recorder = format!(
            "{PROGRAM} doctor --record --dir {BOOTS} --json >/run/trace.json 2>/run/trace.log & \
             echo $! > /run/trace.pid"
        );
        self.host.run(&format!("({recorder})"))?;
        let waits = "grep -q 'waiting for the next VM' /run/trace.log";
        self.host.until(
            "a recorder",
            &format!("{waits} || ! kill -0 $(cat /run/trace.pid)"),
        )?;
        self.host
            .run(&format!("{waits} || (cat /run/trace.log; false)"))
            .context("the recorder has ended")
            .map(drop)
    }

    /// Boots a guest with the function, and kills it once its GPU is settled and the recorder, if
    /// there is one, has ended.
    pub fn boot(&mut self, pages: Pages, vfio: Vfio) -> Result<Figures> {
        let host = &mut self.host;
        let memory = pages.prepare(host)?;
        let iommu_pages = "awk '$1 == \"nr_iommu_pages\" { print $2 }' /proc/vmstat";
        let before = host.run(iommu_pages)?;
        let (object, by) = match vfio {
            Vfio::Legacy => ("", ""),
            Vfio::Iommufd => ("-object iommufd,id=iommufd", ",iommufd=iommufd"),
        };
        let devices = format!(
            "{memory} {object} {PORTS} -device {}{by}",
            function(&self.function, 0)
        );
        self.guests += 1;
        let cid = FIRST_CID + self.guests - 1;
        let name = format!("{cid:04x}");
        let guest = KvmGuest::start_with(host, &self.image, &name, &name, cid, "", &devices)?;
        sent(host, &guest, &event(names::SETTLED))?;
        let after = host.run(iommu_pages)?;
        let boot = Boot::only(host, &guest)?;
        let settled = boot.wall("settled", |r| r.name == names::SETTLED)?;
        let started: f64 = host
            .run(&format!("stat -c %.9W {}", guest.vmm_log_path()))?
            .parse()
            .context("birth of QEMU's log")?;
        // The recorder sees the boot's end before the VM's.
        host.until(
            "the recorder's end",
            "! test -e /run/trace.pid || ! kill -0 $(cat /run/trace.pid) 2>/dev/null",
        )?;
        let text = host.run(&format!(
            "rm -f /run/trace.pid; cat {BOOTS}/{}.trace 2>/dev/null || true",
            boot.id
        ))?;
        guest.kill(host)?;
        // The next one gets the function when this one has let go of it.
        host.until(
            "the guest's end",
            &format!("! test -e /proc/$(cat /run/guests/{name}/pid)"),
        )?;
        let mut file = boot.file;
        if !text.is_empty() {
            file.read_trace(text.as_bytes())?;
            is_whole(&file)?;
        }
        Ok(Figures {
            settled_s: settled.realtime_ns as f64 / 1e9 - started,
            iommu_pages: before
                .parse::<i64>()
                .ok()
                .zip(after.parse::<i64>().ok())
                .map(|(before, after)| after - before),
            kernel: host.run("uname -r")?,
            traced: file.traced().cloned().collect(),
        })
    }
}

fn is_whole(file: &BootFile) -> Result<()> {
    let recording = file.recording().context("a trace without its recording")?;
    ensure!(
        (recording.lost, recording.unreadable, file.damaged) == (0, 0, 0),
        "{recording:?}"
    );
    Ok(())
}

impl Figures {
    fn of<'a>(&'a self, name: &'a str, bytes: u64) -> impl Iterator<Item = &'a Traced> {
        self.traced.iter().filter(move |t| {
            t.name == name && t.bytes == Some(bytes) && !t.detail.starts_with("failed")
        })
    }

    /// The first pin of all memory, by QEMU's main thread before the guest runs.
    pub fn pin(&self) -> Result<&Traced> {
        self.of(traces::VMM_PIN, MEMORY)
            .find(|t| t.tid == t.pid)
            .context("no pin of all memory")
    }

    /// Mappings of the whole BAR.
    pub fn bars(&self) -> Vec<&Traced> {
        self.of(traces::VMM_MAP_BAR, Size::BAR_BYTES).collect()
    }
}
