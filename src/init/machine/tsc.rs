//! The time before the kernel's clock: from TSC 0 of the guest until CLOCK_BOOTTIME 0, where the
//! kernel sets up its timekeeping. Both clocks are read at the first instruction of PID 1. On arm64
//! the virtual counter takes the TSC's part; its frequency is a register, not measured.
//!
//! TSC 0 under KVM is one of two moments:
//! - The making of the VM's first vCPU: KVM_CREATE_VCPU sets the TSC offset. The time then has the
//!   devices that QEMU makes after its CPUs (VFIO pins guest memory there), QEMU's reset of the VM,
//!   firmware, and the kernel's own first steps (decompression, early memory).
//! - The end of that reset, just before the first instruction of the firmware. QEMU of 7.0 or newer
//!   (its commit 5286c3662294) writes 1 to a TSC that has run. KVM keeps the offset where that
//!   write is less than 1 s after that of the initial state (kvm_synchronize_tsc), else sets
//!   a new one. A reset of passed-through devices, or a busy host, can take that long.
//!
//! Nothing in the guest distinguishes the two: the time is exact since TSC 0, and at most the time
//! since the first vCPU. Neither includes the VMM's work before that vCPU: loading of its program,
//! and allocation of guest memory in advance.
//!
//! arm64's counter under KVM is 0 when the VM is made. On either architecture the result includes
//! what the kernel's clock lost before its final source took over (under emulation up to 0.5 s on
//! arm64).
//!
//! Only measured values are reported; the reader judges whether they can be true (a VM that was
//! migrated or restored has a TSC that began elsewhere). Invariant: the bound covers the error of
//! the TSC's frequency from two readings, not a TSC that differs from CPU to CPU.

use crate::machine::clock::{boottime_ns, monotonic_raw_ns};
use crate::machine::sys;

/// TSC, CLOCK_MONOTONIC_RAW and CLOCK_BOOTTIME of one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    pub tsc: u64,
    /// Frequency, where the CPU has that number.
    pub hz: Option<u64>,
    pub raw_ns: u64,
    pub boottime_ns: u64,
    /// Time between the first and the last read of the clocks.
    pub within_ns: u64,
}

/// Reads all three; None without a counter.
pub fn read() -> Option<Reading> {
    let raw_ns = monotonic_raw_ns();
    let tsc = sys::counter()?;
    let boottime_ns = boottime_ns();
    Some(Reading {
        tsc,
        hz: sys::counter_hz(),
        raw_ns,
        boottime_ns,
        within_ns: monotonic_raw_ns().saturating_sub(raw_ns),
    })
}

const NANOSECONDS: u128 = 1_000_000_000;

/// Result of two readings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Before {
    /// Frequency of the TSC.
    pub hz: u64,
    /// Time from TSC 0 (the first vCPU's making, or the end of QEMU's reset: see above) until
    /// CLOCK_BOOTTIME 0, in ns. Negative for a TSC that began later, which that of a new VM cannot.
    pub before_kernel_ns: i64,
    /// Bound of the error of `before_kernel_ns`, in ns. The rate of the guest's clock against the
    /// host's is not included: see `host::clock::RATE_ERROR_PPM`.
    pub error_ns: u64,
}

/// Computes the result; None if the TSC or the clock stood still between the two, or went back.
pub fn before_kernel(first: &Reading, later: &Reading) -> Option<Before> {
    let ticks = u128::from(later.tsc.checked_sub(first.tsc).filter(|t| *t > 0)?);
    let passed = u128::from(later.raw_ns.checked_sub(first.raw_ns).filter(|t| *t > 0)?);
    let within = u128::from(first.within_ns) + u128::from(later.within_ns);
    // 2^64 ticks times 2^63 ns fit.
    let (tsc_ns, hz, unsure) = match first.hz.map(u128::from) {
        Some(hz) => (
            (u128::from(first.tsc) * NANOSECONDS).checked_div(hz)?,
            hz,
            0,
        ),
        None => (
            u128::from(first.tsc) * passed / ticks,
            ticks * NANOSECONDS / passed,
            within,
        ),
    };
    let error = tsc_ns.checked_mul(unsure)?.div_ceil(passed) + u128::from(first.within_ns);
    Some(Before {
        hz: u64::try_from(hz).ok()?,
        before_kernel_ns: i64::try_from(tsc_ns)
            .ok()?
            .checked_sub(i64::try_from(first.boottime_ns).ok()?)?,
        error_ns: u64::try_from(error).unwrap_or(u64::MAX),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM whose TSC of 2.5 GHz began `before_ns` before BOOTTIME, read `late_ns` after the TSC.
    fn reading(at_ns: u64, before_ns: u64, late_ns: u64) -> Reading {
        Reading {
            tsc: (at_ns + before_ns) / 2 * 5,
            hz: None,
            raw_ns: at_ns - late_ns,
            boottime_ns: at_ns + late_ns,
            within_ns: 2 * late_ns,
        }
    }

    #[test]
    fn time_before_the_kernel_is_within_the_bound_at_any_reading() {
        const BEFORE: u64 = 960_000_000;
        for (late_first, late_later) in [(0, 0), (40_000, 0), (0, 40_000), (300_000, 100_000)] {
            let first = reading(2_600_000_000, BEFORE, late_first);
            let later = reading(2_900_000_000, BEFORE, late_later);
            let before = before_kernel(&first, &later).unwrap();
            let wrong = before.before_kernel_ns.abs_diff(BEFORE as i64);
            assert!(
                wrong <= before.error_ns,
                "{late_first} {late_later}: wrong by {wrong}: {before:?}"
            );
            assert!(before.hz.abs_diff(2_500_000_000) < 5_000_000, "{before:?}");
            assert_eq!(before.error_ns == 0, late_first + late_later == 0);
        }
    }

    #[test]
    fn a_clock_that_stands_still_or_goes_back_is_not_used() {
        let first = reading(2_600_000_000, 0, 0);
        assert_eq!(before_kernel(&first, &first), None);
        assert_eq!(
            before_kernel(
                &first,
                &Reading {
                    tsc: 1,
                    ..reading(2_700_000_000, 0, 0)
                }
            ),
            None
        );
        assert_eq!(
            before_kernel(
                &first,
                &Reading {
                    raw_ns: 1,
                    ..reading(2_700_000_000, 0, 0)
                }
            ),
            None
        );
        let huge = Reading {
            tsc: u64::MAX - 1,
            hz: None,
            raw_ns: 0,
            boottime_ns: u64::MAX,
            within_ns: u64::MAX,
        };
        assert_eq!(
            before_kernel(
                &huge,
                &Reading {
                    tsc: u64::MAX,
                    raw_ns: u64::MAX,
                    ..huge
                }
            ),
            None
        );
    }

    #[test]
    fn a_known_frequency_is_not_measured() {
        let with = |reading: Reading, hz| Reading {
            hz: Some(hz),
            ..reading
        };
        let (first, later) = (
            reading(2_600_000_000, 960_000_000, 300_000),
            reading(2_600_700_000, 960_000_000, 300_000),
        );
        let before = before_kernel(&with(first, 2_500_000_000), &later).unwrap();
        assert_eq!(
            (before.hz, before.error_ns),
            (2_500_000_000, 600_000),
            "the bound is that of one reading"
        );
        assert!(
            before.before_kernel_ns.abs_diff(960_000_000) <= before.error_ns,
            "{before:?}"
        );
        // As short an interval costs a measured frequency much of its worth.
        assert!(before_kernel(&first, &later).unwrap().error_ns > 1_000_000_000);
        assert_eq!(before_kernel(&with(first, 0), &later), None);
    }

    #[test]
    fn this_machines_tsc_runs_and_its_frequency_is_one_of_a_cpu() {
        let first = read().unwrap();
        let mut later = read().unwrap();
        // 20 ms of work: long compared with one read of the clocks.
        while later.raw_ns - first.raw_ns < 20_000_000 {
            later = read().unwrap();
        }
        let hz = before_kernel(&first, &later).map(|b| b.hz).unwrap();
        assert!((100_000_000..10_000_000_000).contains(&hz), "{hz}");
    }
}
