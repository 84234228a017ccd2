//! A failure means that ptp_kvm and the collector's pings contradict each other within their stated
//! errors, or that a drift or a step of the host's clock goes unseen.

use super::guests::{Boot, SERVICE, event, sent};
use super::service;
use crate::vm::harness::{
    DEADLINE, EmulatedHost, Guest, KvmGuest, KvmImage, Outcome, Size, TestContext, VmTest,
};
use anyhow::{Context, Result, ensure};
use kata_gpu_report::data::clock_offset::{Clock, RATE_ERROR_PPM, Sample};
use kata_gpu_report::data::guest_clocks::GuestClocks;
use kata_gpu_wire::names;
use std::time::{Duration, Instant};

pub const TESTS: &[VmTest] = &[VmTest {
    name: "emulated_host_clock_by_ptp_kvm_equals_that_by_ping",
    run: both_clocks,
}];

/// How much faster the host's wall clock is made to run: less than what is assumed of clocks.
const DRIFT_PPM: f64 = 80.0;
/// Rate by which KVM's clock differs from the host's own, both made of the same counter: the kernel
/// knows its frequency in kHz.
const ROUNDING_PPM: f64 = 5.0;
/// By so much the host's wall clock is set ahead.
const STEP_S: u32 = 7;
/// Pause between two looks at a boot's file.
const LOOK: Duration = Duration::from_secs(1);

/// A boot with both of its looks at ptp_kvm's clock: as the init starts, and once all is settled.
struct Aligned {
    boot: Boot,
    pings: Clock,
    ptp: [Sample; 2],
}

impl Aligned {
    /// Waits until the file has all of that, and until the pings have seen so many steps.
    fn of(host: &mut EmulatedHost, guest: &KvmGuest, steps: usize) -> Result<Self> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let boot = Boot::only(host, guest)?;
            let pings = Clock::of(boot.file.clock_samples());
            let ptp = GuestClocks::of(&boot.file.records).host;
            if let ([first, last], true) = (ptp.as_slice(), pings.steps() == steps) {
                return Ok(Self {
                    ptp: [*first, *last],
                    boot,
                    pings,
                });
            }
            ensure!(
                Instant::now() < deadline,
                "boot {} has {} samples of ptp_kvm, not 2, and {} steps, not {steps}: {ptp:?}, \
                {:?}",
                boot.id,
                ptp.len(),
                pings.steps(),
                boot.file.clock_samples().collect::<Vec<_>>()
            );
            std::thread::sleep(LOOK);
        }
    }

    /// Both ways' intervals for the host's time at each look have something in common.
    fn agrees(&self) -> Result<()> {
        for look in &self.ptp {
            ensure!(
                fits(&self.pings, look)?,
                "ptp_kvm {look:?} contradicts the pings {:?}",
                self.pings.wall_at(look.boottime_ns)
            );
        }
        let mut clock = self.pings.clone();
        let taken = GuestClocks::of(&self.boot.file.records).add_to(&mut clock);
        ensure!(taken == 2, "{taken} of 2 samples of ptp_kvm were used");
        Ok(())
    }
}

fn fits(clock: &Clock, look: &Sample) -> Result<bool> {
    let wall = clock.wall_at(look.boottime_ns).context("no ping")?;
    let by_ptp = i64::try_from(look.boottime_ns)? + look.offset_ns;
    Ok(wall.realtime_ns.abs_diff(by_ptp) <= wall.error_ns + look.error_ns)
}

fn both_clocks(context: &TestContext) -> Result<Outcome> {
    if let Some(skipped) = EmulatedHost::skipped(context)? {
        return Ok(skipped);
    }
    let image = KvmImage::make(context, Guest::new().cpus(1).append("fakepci.gpus=2"))?;
    let mut host = service::start(context, Size::WITH_GUESTS, &image.files())?;
    KvmGuest::prepare(&mut host)?;
    host.run(&format!("systemctl start {SERVICE}"))?;

    // A drift: seconds between the two looks, in which nothing runs.
    host.run(&format!(
        "adjtimex --frequency {}",
        (DRIFT_PPM * 65536.0) as i64
    ))?;
    let guest = KvmGuest::start(
        &mut host,
        &image,
        "0a1b",
        "train-0",
        33,
        "nvidia.s2_ms=15000",
    )?;
    sent(&mut host, &guest, &event(names::SETTLED))?;
    let drifted = Aligned::of(&mut host, &guest, 0)?;
    drifted.agrees()?;
    let drift = drifted
        .boot
        .file
        .clock()
        .drift()
        .context("no drift from both clocks")?;
    let off = (drift.ppm + DRIFT_PPM).abs();
    ensure!(
        off <= drift.error_ppm + ROUNDING_PPM,
        "the host's clock ran {DRIFT_PPM} ppm fast, and the guest's is said to: {drift:?}"
    );
    // Negative control: no drift is refuted by the same bound.
    ensure!(
        drift.ppm.abs() > drift.error_ppm + ROUNDING_PPM,
        "a clock that does not drift would pass: {drift:?}"
    );
    guest.kill(&mut host)?;

    // A step, between the two looks.
    host.run("adjtimex --frequency 0")?;
    let guest = KvmGuest::start(
        &mut host,
        &image,
        "2c3d",
        "train-1",
        34,
        "nvidia.s2_ms=20000",
    )?;
    sent(&mut host, &guest, &event(names::GPU_PUBLISHED))?;
    let step = set_ahead(&mut host)?;
    sent(&mut host, &guest, &event(names::SETTLED))?;
    let stepped = Aligned::of(&mut host, &guest, 1)?;
    stepped.agrees()?;
    let [before, after] = stepped.ptp;
    let seen = after.offset_ns - before.offset_ns;
    let error = before.error_at(after.boottime_ns) + after.error_ns;
    ensure!(
        (step.least_ns - error as i64..=step.most_ns + error as i64).contains(&seen),
        "the host's clock was set {step:?} ahead, by ptp_kvm {seen} +- {error} ns"
    );
    // Negative control: what the pings said before the step contradicts what ptp_kvm says behind
    // it.
    let old = stepped
        .boot
        .file
        .clock_samples()
        .filter(|s| s.offset_ns - before.offset_ns < seen / 2);
    ensure!(
        !fits(&Clock::of(old), &after)?,
        "a step of {STEP_S} s is within the bounds"
    );

    Ok(Outcome::Measured(format!(
        "ptp_kvm +-{} us, pings +-{} us; drift {:+.1} ppm (+-{:.1}) of {:+.1}, assumed at most \
        {RATE_ERROR_PPM}; step {:.3} s",
        drifted
            .ptp
            .iter()
            .map(|s| s.error_ns)
            .max()
            .unwrap_or_default()
            / 1000,
        drifted
            .boot
            .file
            .clock_samples()
            .map(|s| s.error_ns)
            .min()
            .unwrap_or_default()
            / 1000,
        drift.ppm,
        drift.error_ppm,
        -DRIFT_PPM,
        seen as f64 / 1e9
    )))
}

/// By how much a clock was set ahead, as far as that is known.
#[derive(Debug)]
struct SetAhead {
    least_ns: i64,
    most_ns: i64,
}

/// Sets the host's wall clock ahead; what passes meanwhile is measured by its uptime.
fn set_ahead(host: &mut EmulatedHost) -> Result<SetAhead> {
    let printed = host.run(&format!(
        "read from rest </proc/uptime; date +%s%N; date --set '{STEP_S} seconds' >/dev/null; date \
        +%s%N; read to rest </proc/uptime
        echo ${{from/./}}0000000; echo ${{to/./}}0000000"
    ))?;
    let times: Vec<i64> = printed
        .lines()
        .map(str::parse)
        .collect::<Result<_, _>>()
        .with_context(|| format!("times {printed:?}"))?;
    let [before, after, from, to] = times[..] else {
        anyhow::bail!("times {printed:?}")
    };
    // Uptime comes in hundredths of a second.
    Ok(SetAhead {
        least_ns: after - before - (to - from) - 10_000_000,
        most_ns: after - before,
    })
}
