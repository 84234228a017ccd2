//! Memory of GPUs that are coherent with the CPU (Grace): the driver adds it to the guest's own
//! memory at the first open of each GPU.
//!
//! The driver refuses memory that does not go into the movable zone, where the kernel's own
//! allocations cannot keep it from being removed again; the GPU then fails. The kernel chooses the
//! zone by a policy for all memory that is added, whose default in Kata's kernels is another. So
//! the policy is set before the driver is loaded, in guests with such GPUs only.
//!
//! Such a GPU is known as the driver knows it (`nv_init_coherent_link_info` of 550.163.01): on
//! arm64 alone, by a generic initiator in ACPI's SRAT with the GPU's PCI address, or by the
//! property `nvidia,gpu-mem-pxm-start` of a device in ACPI's tables.
//!
//! Not here: the driver's file `numa_status`, which blocks during an initialisation and is never
//! read; memory hot-plug of anything else.

use crate::machine::files::{entries, read};
use crate::machine::memory;
use kata_gpu_wire::arch::Arch;
use kata_gpu_wire::pci_address::PciAddress;
use std::fs;
use std::io;
use std::path::Path;

const TABLES: &str = "sys/firmware/acpi/tables";
const POLICY: &str = "sys/devices/system/memory/auto_online_blocks";
pub const MOVABLE: &str = "online_movable";
/// Property of a device whose memory nodes ACPI describes.
const PROPERTY: &[u8] = b"nvidia,gpu-mem-pxm-start";
/// Limit of a table: a virtual machine's DSDT has tens of kB.
const MAX_TABLE: u64 = 4 << 20;
/// Limit of a small file of the kernel.
const MAX_TEXT: u64 = 64 * 1024;
/// SRAT: header with revision and reserved bytes, then entries of a type and a length.
const SRAT_ENTRIES: usize = 48;
const GENERIC_INITIATOR: u8 = 5;
/// Bytes of `struct page` for each page, on 64-bit kernels.
const PAGE_STRUCT: u64 = 64;
/// PCI BAR with the coherent memory, as the hypervisor shows it: a line of `resource`.
const MEMORY_BAR: usize = 4;

/// Result for a guest with coherent GPUs.
#[derive(Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Policy that was found.
    pub policy: String,
    /// The GPUs' memory, in bytes.
    pub gpu_memory: u64,
    /// Guest RAM that the kernel needs to manage it.
    pub page_structs: u64,
    pub available: u64,
    /// Fault of the guest's policy, with its cure.
    pub error: Option<String>,
}

/// Sets the policy where one of the GPUs is coherent; None elsewhere, with nothing changed. `root`
/// is / except in tests.
pub fn prepare(root: &Path, arch: Arch, gpus: &[PciAddress]) -> Option<Prepared> {
    if arch != Arch::Aarch64 || gpus.is_empty() || !is_described(root, gpus) {
        return None;
    }
    let (policy, set) = set_movable(root);
    let gpu_memory = gpus.iter().map(|gpu| bar_size(root, *gpu)).sum();
    let page_structs = gpu_memory / page_size() * PAGE_STRUCT;
    let available = memory::available(root);
    let no_room = || {
        let text = format!(
            "memory of the GPUs: {} MiB of it take {} MiB of the guest's RAM to manage, and {} \
                MiB are available: give the VM more memory",
            gpu_memory >> 20,
            page_structs >> 20,
            available >> 20
        );
        (page_structs >= available).then_some(text)
    };
    Some(Prepared {
        policy,
        gpu_memory,
        page_structs,
        available,
        error: set.err().or_else(no_room),
    })
}

fn is_described(root: &Path, gpus: &[PciAddress]) -> bool {
    let tables = root.join(TABLES);
    if read(&tables.join("SRAT"), MAX_TABLE).is_ok_and(|srat| has_initiator(&srat, gpus)) {
        return true;
    }
    // Guests booted by a device tree have no such folder.
    entries(&tables)
        .filter(|entry| {
            entry
                .file_name()
                .to_str()
                .is_some_and(|name| name == "DSDT" || name.starts_with("SSDT"))
        })
        .any(|entry| {
            read(&entry.path(), MAX_TABLE)
                .is_ok_and(|table| table.windows(PROPERTY.len()).any(|w| w == PROPERTY))
        })
}

/// Whether an entry of the SRAT is a generic initiator with the address of one of these GPUs.
fn has_initiator(srat: &[u8], gpus: &[PciAddress]) -> bool {
    let mut rest = srat.get(SRAT_ENTRIES..).unwrap_or_default();
    while let [kind, length, ..] = rest {
        let Some((entry, after)) = rest
            .split_at_checked(usize::from(*length))
            .filter(|(entry, _)| entry.len() >= 2)
        else {
            break;
        };
        if *kind == GENERIC_INITIATOR
            && let Some([domain_low, domain_high, id_low, id_high]) = entry.get(8..12)
        {
            let domain = u32::from(u16::from_le_bytes([*domain_low, *domain_high]));
            let id = u16::from_le_bytes([*id_low, *id_high]);
            if gpus.iter().any(|gpu| gpu.routing_id() == (domain, id)) {
                return true;
            }
        }
        rest = after;
    }
    false
}

/// The policy as found, and whether it is the movable zone now.
fn set_movable(root: &Path) -> (String, Result<(), String>) {
    let file = root.join(POLICY);
    let wrong = |did: &str, error: io::Error| {
        let cure = "boot a kernel with CONFIG_MEMORY_HOTPLUG, with \
            memhp_default_state=online_movable on its command line";
        Err(format!(
            "memory of the GPUs: {did} /{POLICY}: {error}: the driver will refuse these GPUs: \
                {cure}"
        ))
    };
    let policy = match read(&file, MAX_TEXT) {
        Ok(text) => String::from_utf8_lossy(&text).trim_end().to_string(),
        Err(error) => return (String::new(), wrong("read", error)),
    };
    if policy == MOVABLE {
        return (policy, Ok(()));
    }
    match fs::write(&file, MOVABLE) {
        Ok(()) => (policy, Ok(())),
        Err(error) => (policy, wrong("set", error)),
    }
}

/// Size of a GPU's memory BAR; 0 where sysfs has none, as without a coherent one.
fn bar_size(root: &Path, gpu: PciAddress) -> u64 {
    let text = read(
        &root.join(format!("sys/bus/pci/devices/{gpu}/resource")),
        MAX_TEXT,
    )
    .unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    let mut numbers = text
        .lines()
        .nth(MEMORY_BAR)
        .unwrap_or_default()
        .split(' ')
        .map(|n| u64::from_str_radix(n.trim_start_matches("0x"), 16));
    match (numbers.next(), numbers.next()) {
        (Some(Ok(start)), Some(Ok(end))) if end > start => end - start + 1,
        _ => 0,
    }
}

fn page_size() -> u64 {
    // The smallest page of these machines where the kernel does not answer: the highest estimate.
    let known = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
        .ok()
        .flatten();
    known
        .and_then(|size| u64::try_from(size).ok())
        .filter(|size| *size > 0)
        .unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::{TempDir, temp_dir};

    struct Root(TempDir);

    impl Root {
        /// A guest with one GPU of 96 GiB and 8 GiB of RAM.
        fn new() -> Self {
            let root = Self(temp_dir());
            let mut bars = "0x0 0x0 0x0\n".repeat(6);
            bars.replace_range(
                4 * 12..5 * 12,
                "0x0000100000000000 0x00001017ffffffff 0x000000000014220c\n",
            );
            root.file("sys/bus/pci/devices/0009:01:00.0/resource", bars.as_bytes());
            root.file(
                "proc/meminfo",
                b"MemTotal: 8388608 kB\nMemAvailable:    8000000 kB\n",
            );
            root.file(POLICY, b"online\n");
            root
        }

        fn file(&self, path: &str, bytes: &[u8]) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }

        fn prepare(&self) -> Option<Prepared> {
            prepare(
                self.0.path(),
                Arch::Aarch64,
                &["0009:01:00.0".parse().unwrap()],
            )
        }

        fn policy(&self) -> String {
            fs::read_to_string(self.0.path().join(POLICY)).unwrap()
        }
    }

    /// A SRAT with one entry before the initiator.
    fn srat(domain: u16, id: u16) -> Vec<u8> {
        let mut table = vec![0; SRAT_ENTRIES];
        table.extend([3, 18].into_iter().chain([0; 16]));
        let mut entry = [0; 32];
        entry[..4].copy_from_slice(&[GENERIC_INITIATOR, 32, 0, 1]);
        entry[8..10].copy_from_slice(&domain.to_le_bytes());
        entry[10..12].copy_from_slice(&id.to_le_bytes());
        table.extend(entry);
        table
    }

    #[test]
    fn a_described_gpu_has_its_memory_in_the_movable_zone() {
        let root = Root::new();
        root.file("sys/firmware/acpi/tables/SRAT", &srat(9, 0x100));
        let prepared = root.prepare().unwrap();
        assert_eq!(
            (
                prepared.policy.as_str(),
                prepared.gpu_memory,
                &prepared.error
            ),
            ("online", 96 << 30, &None)
        );
        assert_eq!(root.policy(), MOVABLE);
        assert_eq!(prepared.page_structs, (96 << 30) / page_size() * 64);
        assert_eq!(
            root.prepare().unwrap().policy,
            MOVABLE,
            "a second load finds it set"
        );
    }

    #[test]
    fn a_property_in_a_table_describes_gpus_too() {
        let root = Root::new();
        root.file(
            "sys/firmware/acpi/tables/SSDT3",
            b"SSDT..\x0dnvidia,gpu-mem-pxm-start\0\x0a\x02",
        );
        assert_eq!(root.prepare().unwrap().error, None);
        assert_eq!(root.policy(), MOVABLE);
    }

    #[test]
    fn another_guest_is_left_as_it_is() {
        let root = Root::new();
        let cases: [(&str, Vec<u8>); 6] = [
            ("FACP", b"nvidia,gpu-mem-pxm-start".into()),
            ("SRAT", srat(9, 0x200)),
            ("SRAT", srat(8, 0x100)),
            // Cut, and with entries of no length.
            ("SRAT", srat(9, 0x100)[..SRAT_ENTRIES + 18 + 10].into()),
            ("SRAT", vec![0; 4096]),
            ("DSDT", b"nvidia,gpu-mem-pxm".into()),
        ];
        for (table, bytes) in cases {
            root.file(&format!("sys/firmware/acpi/tables/{table}"), &bytes);
            assert_eq!(
                (root.prepare(), root.policy().as_str()),
                (None, "online\n"),
                "{table}"
            );
        }
        root.file("sys/firmware/acpi/tables/SRAT", &srat(9, 0x100));
        assert_eq!(
            prepare(
                root.0.path(),
                Arch::X86_64,
                &["0009:01:00.0".parse().unwrap()]
            ),
            None,
            "the driver looks on arm64 alone"
        );
        assert_eq!(prepare(root.0.path(), Arch::Aarch64, &[]), None);
    }

    #[test]
    fn too_little_ram_and_no_hot_plug_are_errors_with_cures() {
        let root = Root::new();
        root.file("sys/firmware/acpi/tables/SRAT", &srat(9, 0x100));
        root.file("proc/meminfo", b"MemAvailable: 65536 kB\n");
        let error = root.prepare().unwrap().error.unwrap();
        assert!(
            error.contains("98304 MiB")
                && error.contains("64 MiB are available: give the VM more memory"),
            "{error}"
        );
        fs::remove_file(root.0.path().join(POLICY)).unwrap();
        fs::create_dir(root.0.path().join(POLICY)).unwrap();
        let error = root.prepare().unwrap().error.unwrap();
        assert!(
            error.contains("read /sys/devices/system/memory/auto_online_blocks")
                && error.contains("CONFIG_MEMORY_HOTPLUG"),
            "{error}"
        );
    }
}
