//! The guest's clocks. All stamps use CLOCK_BOOTTIME: it starts with the kernel and is never
//! stepped, whereas the agent sets CLOCK_REALTIME when the sandbox is created.

use nix::time::{ClockId, clock_gettime};

/// CLOCK_BOOTTIME in ns: time since the kernel started.
pub fn boottime_ns() -> u64 {
    nanoseconds(ClockId::CLOCK_BOOTTIME)
}

/// CLOCK_REALTIME in ns since 1970.
pub fn realtime_ns() -> u64 {
    nanoseconds(ClockId::CLOCK_REALTIME)
}

/// CLOCK_MONOTONIC_RAW in ns: no daemon makes it run faster or slower.
pub fn monotonic_raw_ns() -> u64 {
    nanoseconds(ClockId::CLOCK_MONOTONIC_RAW)
}

/// Any clock in ns; 0 if it cannot be read.
pub fn nanoseconds(clock: ClockId) -> u64 {
    // clock_gettime fails only for a clock the kernel does not know; those above exist since
    // 2.6.39. 0 is visibly wrong in a timeline and better than an init that stops over it.
    clock_gettime(clock).map_or(0, |t| {
        u64::try_from(t.tv_sec()).unwrap_or(0) * 1_000_000_000
            + u64::try_from(t.tv_nsec()).unwrap_or(0)
    })
}
