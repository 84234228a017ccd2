//! The host's wall clock from the hypervisor: KVM's virtual PTP clock, if the kernel has one.
//!
//! A read costs one hypercall, and runs on a separate thread: nothing waits for it. Never used to
//! set a clock.

use crate::machine::clock::{boottime_ns, nanoseconds};
use crate::machine::confidential;
use crate::machine::files::entries;
use kata_gpu_wire::names;
use nix::time::ClockId;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// Name of the clock in the kernel's driver (drivers/ptp/ptp_kvm_common.c).
const NAME: &str = "KVM virtual PTP";
/// Reads in a row: the shortest one counts.
const LOOKS: usize = 8;

/// The host's CLOCK_REALTIME beside the guest's CLOCK_BOOTTIME.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    pub boottime_ns: u64,
    pub realtime_ns: u64,
    /// Half the duration of the read.
    pub error_ns: u64,
}

/// Stack of the reading thread, in bytes.
const STACK: usize = 256 * 1024;

/// Reports a sample if the clock exists, on a separate thread. A confidential guest does not query
/// its host.
pub fn report() {
    if confidential::is_confidential() {
        return;
    }
    let look = || {
        let Some(device) = device_at(Path::new("/")) else {
            return;
        };
        match sample(&device) {
            Ok(s) => tracing::info!(
                name: names::CLOCK_HOST, at_ns = s.boottime_ns, source = "ptp_kvm",
                    realtime_ns = s.realtime_ns, error_ns = s.error_ns,
            ),
            Err(error) => {
                tracing::warn!(name: names::SINK, sink = "ptp_kvm", state = "unavailable", error)
            }
        }
    };
    // Without a thread there is no sample: the host's pings give the same.
    let _unused = std::thread::Builder::new()
        .name("gpuinit-ptp".into())
        .stack_size(STACK)
        .spawn(look);
}

/// Device of the clock, by its name; None if the kernel has none. `root` is / except in tests.
pub fn device_at(root: &Path) -> Option<PathBuf> {
    let named = |entry: &std::fs::DirEntry| {
        std::fs::read_to_string(entry.path().join("clock_name"))
            .is_ok_and(|name| name.trim_end() == NAME)
    };
    let entry = entries(&root.join("sys/class/ptp")).find(named)?;
    Some(root.join("dev").join(entry.file_name()))
}

/// Reads the clock; an error names the device.
pub fn sample(device: &Path) -> Result<Sample, String> {
    let file = File::open(device).map_err(|e| format!("open {}: {e}", device.display()))?;
    let clock = clock_of(&file);
    // 0: the clock cannot be read.
    best(LOOKS, boottime_ns, || nanoseconds(clock)).ok_or_else(|| {
        format!(
            "read the time of {}: the kernel gives none",
            device.display()
        )
    })
}

/// A descriptor as a clock, as clock_gettime(2) takes it: FD_TO_CLOCKID of the kernel's testptp.c.
fn clock_of(file: &File) -> ClockId {
    const CLOCKFD: i32 = 3;
    ClockId::from_raw((!file.as_raw_fd() << 3) | CLOCKFD)
}

/// The read between the two closest reads of the guest's clock.
fn best(
    looks: usize,
    mut guest: impl FnMut() -> u64,
    mut host: impl FnMut() -> u64,
) -> Option<Sample> {
    let mut best: Option<Sample> = None;
    for _ in 0..looks {
        let before = guest();
        let realtime_ns = host();
        let took = guest().saturating_sub(before);
        let sample = Sample {
            boottime_ns: before + took / 2,
            realtime_ns,
            error_ns: took.div_ceil(2),
        };
        if realtime_ns > 0 && best.is_none_or(|b| sample.error_ns < b.error_ns) {
            best = Some(sample);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn the_clock_is_found_by_its_name_and_no_other_is_taken_for_it() {
        let folder = temp_dir();
        let root = folder.path();
        assert_eq!(device_at(root), None);
        for (clock, name) in [("ptp0", "e1000e\n"), ("ptp1", "KVM virtual PTP\n")] {
            std::fs::create_dir_all(root.join("sys/class/ptp").join(clock)).unwrap();
            std::fs::write(
                root.join("sys/class/ptp").join(clock).join("clock_name"),
                name,
            )
            .unwrap();
        }
        assert_eq!(device_at(root), Some(root.join("dev/ptp1")));
        std::fs::remove_dir_all(root.join("sys/class/ptp/ptp1")).unwrap();
        assert_eq!(
            device_at(root),
            None,
            "another network card's clock is not the host's"
        );
    }

    #[test]
    fn the_true_time_is_within_the_bound_of_the_quickest_reading() {
        const OFFSET: u64 = 1_700_000_000_000_000_000;
        // Each read of a clock takes a time of this list; the host's clock is read at its end.
        let times = [9_000, 800, 100, 700, 3, 4, 5, 200, 300, 80_000];
        let now = std::cell::Cell::new(0u64);
        let at = std::cell::Cell::new(0usize);
        let pass = || {
            now.set(now.get() + times[at.get() % times.len()]);
            at.set(at.get() + 1);
            now.get()
        };
        let sample = best(6, pass, || pass() + OFFSET).unwrap();
        assert!(
            (sample.realtime_ns - OFFSET).abs_diff(sample.boottime_ns) <= sample.error_ns,
            "{sample:?}"
        );
        assert!(sample.error_ns < 100, "{sample:?}");
        assert_eq!(
            best(3, pass, || 0),
            None,
            "a clock that cannot be read is no clock"
        );
    }

    #[test]
    fn a_device_that_is_no_clock_is_an_error_with_its_name() {
        assert!(
            sample(Path::new("/dev/null"))
                .unwrap_err()
                .contains("/dev/null")
        );
        assert!(
            sample(Path::new("/nonexistent/ptp0"))
                .unwrap_err()
                .contains("open /nonexistent/ptp0")
        );
    }
}
