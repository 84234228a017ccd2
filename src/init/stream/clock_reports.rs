//! Reports of the wall clock: its reading beside that of the boot's clock, now and after each step.

use crate::machine::clock::{boottime_ns, realtime_ns};
use crate::machine::sys::async_fd;
use kata_gpu_wire::names;
use nix::errno::Errno;
use nix::sys::time::TimeSpec;
use nix::sys::timer::{Expiration, TimerSetTimeFlags};
use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Limit of reported steps: a clock that is stepped all the time must not fill the stream.
const MAX_STEPS: usize = 100;
/// Seconds since 1970 at which a timer that only waits for steps would fire: beyond every clock.
const NEVER_S: i64 = 9_000_000_000;

/// Reports CLOCK_REALTIME beside CLOCK_BOOTTIME, for log lines stamped with CLOCK_REALTIME.
fn report() {
    let before = boottime_ns();
    let realtime_ns = realtime_ns();
    let at_ns = before + (boottime_ns() - before) / 2;
    tracing::info!(name: names::CLOCK, at_ns, realtime_ns);
}

/// Reports the clocks now and, in a separate task, after each step of CLOCK_REALTIME: Kata's
/// runtime sets it through the agent when the sandbox is created, and log lines jump with it.
pub fn report_from_now_on() {
    // Keep this order: a step in between is then reported twice instead of never.
    let steps = steps();
    report();
    tokio::spawn(async move {
        if let Err(error) = report_steps(steps).await {
            let error = format!(
                "watch the wall clock: {error}: log lines after a step of it are misplaced"
            );
            tracing::warn!(name: names::SINK, sink = "wall clock", state = "unavailable", error);
        }
    });
}

async fn report_steps(steps: io::Result<OwnedFd>) -> io::Result<()> {
    let steps = async_fd(steps?)?;
    for _ in 0..MAX_STEPS {
        steps.readable().await?.clear_ready();
        if matches!(
            nix::unistd::read(steps.as_fd(), &mut [0; 8]),
            Err(Errno::ECANCELED)
        ) {
            report();
        }
    }
    Ok(())
}

/// Timer whose reads fail with ECANCELED after CLOCK_REALTIME was set (timerfd_create(2)).
fn steps() -> io::Result<OwnedFd> {
    let timer = TimerFd::new(
        ClockId::CLOCK_REALTIME,
        TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC,
    )?;
    let on_set = TimerSetTimeFlags::TFD_TIMER_ABSTIME | TimerSetTimeFlags::TFD_TIMER_CANCEL_ON_SET;
    timer.set(Expiration::OneShot(TimeSpec::new(NEVER_S, 0)), on_set)?;
    Ok(timer.into())
}
