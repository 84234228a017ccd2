//! Detection of confidential guests, whose memory is hidden from the host.
//!
//! Attestation devices may be missing: plain SEV-ES has none, a driver may be a module that is not
//! loaded yet, and a paravisor keeps the device to itself. The CPU's flags, sysfs and the kernel's
//! log count as well. In doubt a guest is confidential: that costs events, the opposite error would
//! disclose them.

use crate::machine::{files, kernel_log};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use std::path::Path;
use std::sync::OnceLock;

/// Files that a kernel has in confidential guests only.
const SIGNS: [&str; 7] = [
    "/dev/tdx_guest",
    "/dev/tdx-guest",
    "/dev/sev-guest",
    "/sys/devices/system/cpu/sev",
    "/sys/devices/virtual/misc/tdx_guest",
    "/sys/firmware/arm_cca",
    "/sys/devices/platform/arm-cca-dev",
];
/// The first processor's part of /proc/cpuinfo: its flags have some 2 kB.
const CPUINFO: u64 = 8 * 1024;
/// Line of the kernel's log in a guest with encrypted memory: "Memory Encryption Features active:
/// AMD SEV SEV-ES"; without the vendor before 5.19.
const ACTIVE: &str = "Memory Encryption Features active:";
/// Longest record of the log (kernel: PRINTKRB_RECORD_MAX).
const MAX_RECORD: usize = 8192;

/// Whether this guest is confidential; detected once.
pub fn is_confidential() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let cpu = first_cpu(Path::new("/proc/cpuinfo"));
        is_confidential_at(Path::new("/"), &cpu)
            || (is_amd(&cpu) && log_has(kernel_log::PATH, encrypts))
    })
}

/// Detection without the log. `root` is / except in tests.
fn is_confidential_at(root: &Path, cpu: &str) -> bool {
    SIGNS
        .iter()
        .any(|sign| root.join(sign.trim_start_matches('/')).exists())
        || flags_show(cpu)
}

/// The beginning of /proc/cpuinfo. Unreadable: empty, the other signs count.
fn first_cpu(path: &Path) -> String {
    let text = files::read(path, CPUINFO).unwrap_or_default();
    String::from_utf8_lossy(&text).into_owned()
}

/// Whether the flags are those of a confidential guest. A host that can run such guests has SEV's
/// flags, but not the hypervisor's.
fn flags_show(cpu: &str) -> bool {
    let flags = cpu
        .lines()
        .find(|line| line.starts_with("flags"))
        .unwrap_or_default();
    let has = |flag: &str| flags.split_ascii_whitespace().any(|word| word == flag);
    has("tdx_guest") || (has("hypervisor") && ["sev", "sev_es", "sev_snp"].into_iter().any(has))
}

/// Whether the log may matter: only on these processors the kernel hides flags in some guests.
fn is_amd(cpu: &str) -> bool {
    ["AuthenticAMD", "HygonGenuine"]
        .iter()
        .any(|vendor| cpu.contains(vendor))
}

/// Whether a line of the kernel's log reports memory encrypted against the host. SME alone is a
/// host's feature.
fn encrypts(line: &str) -> bool {
    line.split_once(ACTIVE)
        .is_some_and(|(_, features)| features.contains("SEV") || features.contains("TDX"))
}

/// Whether the kernel has written such a line. Lines of programs do not count. Unreadable: no.
fn log_has(path: &str, wanted: impl Fn(&str) -> bool) -> bool {
    let Ok(log) = open(
        path,
        OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC,
        Mode::empty(),
    ) else {
        return false;
    };
    let mut record = [0; MAX_RECORD];
    loop {
        match nix::unistd::read(&log, &mut record) {
            Ok(0) => return false,
            Ok(length) => {
                let line = kernel_log::parse(record.get(..length).unwrap_or_default());
                if line.is_some_and(|line| line.facility == 0 && wanted(&line.text)) {
                    return true;
                }
            }
            // Record overwritten during the read; continue with the next one.
            Err(nix::errno::Errno::EPIPE | nix::errno::Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    fn cpu(vendor: &str, flags: &str) -> String {
        format!(
            "processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu vme {flags} aes\nbugs\t\t: \
                sysret_ss_attrs sev\n"
        )
    }

    #[test]
    fn flags_of_confidential_guests_are_recognised_not_of_hosts() {
        for flags in [
            "hypervisor tdx_guest",
            "sev sev_es hypervisor",
            "hypervisor sev_snp",
            "hypervisor sev",
        ] {
            assert!(flags_show(&cpu("AuthenticAMD", flags)), "{flags}");
        }
        for flags in [
            "hypervisor",
            "",
            "sev sev_es sev_snp sme",
            "hypervisor tdx_host_platform",
            "hypervisor sevx",
        ] {
            assert!(!flags_show(&cpu("GenuineIntel", flags)), "{flags}");
        }
        assert!(!flags_show(""));
    }

    #[test]
    fn the_kernels_line_separates_guests_from_hosts() {
        for line in [
            "Memory Encryption Features active: AMD SEV SEV-ES",
            "AMD Memory Encryption Features active: SEV",
            "Memory Encryption Features active: Intel TDX",
        ] {
            assert!(encrypts(line), "{line}");
        }
        assert!(
            !encrypts("Memory Encryption Features active: AMD SME")
                && !encrypts("SEV supported: 509 ASIDs")
        );
        assert!(is_amd(&cpu("AuthenticAMD", "")) && !is_amd(&cpu("GenuineIntel", "")));
    }

    #[test]
    fn sysfs_alone_is_enough() {
        let folder = temp_dir();
        let root = folder.path();
        std::fs::create_dir_all(root.join("sys/devices/system/cpu")).unwrap();
        assert!(!is_confidential_at(
            root,
            &cpu("AuthenticAMD", "hypervisor")
        ));
        std::fs::create_dir_all(root.join("sys/devices/system/cpu/sev/vmpl")).unwrap();
        assert!(is_confidential_at(root, &cpu("AuthenticAMD", "hypervisor")));
    }
}
