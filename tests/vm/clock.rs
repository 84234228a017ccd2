//! A failure means that a time of the guest, placed on the host's wall clock, is wrong by more than
//! the error stated with it: because pings take longer one way than the other, or because somebody
//! sets the guest's wall clock. Judge: pings over a second, direct connection.

use super::harness::{Booted, DEADLINE, Guest, Outcome, TestContext, VmTest};
use anyhow::{Context, Result, ensure};
use kata_gpu_report::data::clock_offset::{Clock, Pinger, RATE_ERROR_PPM};
use kata_gpu_report::data::guest_clocks::GuestClocks;
use kata_gpu_report::data::text::realtime_ns;
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{DEFAULT_PORT, Line, Pong, Record, ping_line};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

pub const TESTS: &[VmTest] = &[VmTest {
    name: "the_bound_of_the_guests_clock_holds_in_every_boot",
    run: bound_holds,
}];

/// Faults of a boot's clocks: delay of a ping on its way there and back, long beside the pauses of
/// a busy machine; and step of the guest's wall clock during the boot, in seconds. The step must
/// not affect the boot clock.
const BOOTS: &[(&str, Duration, Duration, i64)] = &[
    (
        "slow-back",
        Duration::ZERO,
        Duration::from_millis(300),
        86_400,
    ),
    (
        "slow-there",
        Duration::from_millis(300),
        Duration::from_millis(40),
        -31_536_000,
    ),
];

/// A bound that is so many times smaller is too small where the way is asymmetric: the middle of
/// the round trip is wrong by half the delay.
const TOO_SMALL: u64 = 10;

/// Error of a step: a minute, where the least step is a day.
const STEP_ERROR_NS: i64 = 60_000_000_000;

/// A connection to the guest's own listener.
struct Link {
    stream: UnixStream,
    lines: std::io::Split<BufReader<UnixStream>>,
    there: Duration,
    back: Duration,
    next: u64,
}

/// A ping that came back.
struct Answer {
    sent_realtime_ns: i64,
    rtt: Duration,
    boottime_ns: u64,
}

impl Link {
    fn connect(booted: &Booted, there: Duration, back: Duration) -> Result<Self> {
        let mut stream = UnixStream::connect(booted.vm.uds())?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.write_all(format!("CONNECT {DEFAULT_PORT}\n").as_bytes())?;
        let mut lines = BufReader::new(stream.try_clone()?).split(b'\n');
        let answer = lines.next().context("no answer to CONNECT")??;
        ensure!(
            answer.starts_with(b"OK "),
            "answer to CONNECT: {:?}",
            String::from_utf8_lossy(&answer)
        );
        Ok(Self {
            stream,
            lines,
            there,
            back,
            next: 0,
        })
    }

    fn ping(&mut self) -> Result<Answer> {
        let id = self.next;
        self.next += 1;
        // In this order: the round trip begins before the time that stands for its beginning.
        let sent = Instant::now();
        let sent_realtime_ns = realtime_ns();
        std::thread::sleep(self.there); // the way there
        self.stream.write_all(ping_line(id).as_bytes())?;
        let pong: Pong = loop {
            let line = self.lines.next().context("the guest hung up")??;
            match decode(&line) {
                Ok(Line::Pong(pong)) if pong.pong == id => break pong,
                _ => {} // the stream itself comes over the same connection
            }
        };
        std::thread::sleep(self.back); // the way back
        Ok(Answer {
            sent_realtime_ns,
            rtt: sent.elapsed(),
            boottime_ns: pong.boottime_ns,
        })
    }
}

/// Whether the clock's word about a moment is compatible with a ping that saw it, with the bound
/// divided by `divisor`.
fn agrees(clock: &Clock, seen: &Answer, divisor: u64) -> Result<bool> {
    let wall = clock.wall_at(seen.boottime_ns).context("no sample")?;
    let error = i64::try_from(wall.error_ns / divisor)?;
    let came_back = seen.sent_realtime_ns + i64::try_from(seen.rtt.as_nanos())?;
    Ok(wall.realtime_ns - error <= came_back && wall.realtime_ns + error >= seen.sent_realtime_ns)
}

fn bound_holds(context: &TestContext) -> Result<Outcome> {
    let mut measured = String::new();
    for (name, there, back, skew) in BOOTS {
        let started_ns = realtime_ns();
        let booted = Guest::with("fakepci.gpus=4 fakepci.enable_ms=200 nvidia.s2_ms=1500")
            .script(&format!("gpu.init!begin/0>skew:{skew}"))
            .boot(context, name)?;
        booted.event(names::STRATEGY)?;
        // The product's own pinger over the way that is bad, and the direct one beside it.
        let (mut tested, mut direct) = (
            Link::connect(&booted, *there, *back)?,
            Link::connect(&booted, Duration::ZERO, Duration::ZERO)?,
        );
        let (mut pinger, mut clock, mut truth) = (Pinger::new(None), Clock::default(), Vec::new());
        let mut round = |clock: &mut Clock| -> Result<()> {
            let answer = tested.ping()?;
            let now = Instant::now();
            let sent = now
                .checked_sub(answer.rtt)
                .context("the machine has just started")?;
            let id = pinger.send(sent, answer.sent_realtime_ns);
            let ponged = pinger
                .receive(
                    Pong {
                        pong: id,
                        boottime_ns: answer.boottime_ns,
                    },
                    now,
                )
                .context("not its ping")?;
            ponged.keep.into_iter().for_each(|sample| clock.add(sample));
            truth.push(direct.ping()?);
            Ok(())
        };
        (0..10).try_for_each(|_| round(&mut clock))?;
        booted.settles(4, 0)?;
        let stepped = booted.agent("script", |l| l.get("did").starts_with("skew"))?;
        ensure!(stepped.get("error").is_empty(), "{stepped:?}");
        step_is_reported(&booted, *skew)?;
        (0..10).try_for_each(|_| round(&mut clock))?;

        ensure!(
            clock.steps() == 0,
            "{name}: samples contradict each other: a clock ran more than {RATE_ERROR_PPM} ppm \
            apart"
        );
        let (mut worst, mut small) = (0, 0);
        for seen in &truth {
            let wall = clock.wall_at(seen.boottime_ns).context("no sample")?;
            ensure!(
                agrees(&clock, seen, 1)?,
                "{name}: at boot time {} ns the host's clock was between {} and {} ns later, and \
                is said to have been {} +- {} ns",
                seen.boottime_ns,
                seen.sent_realtime_ns,
                seen.rtt.as_nanos(),
                wall.realtime_ns,
                wall.error_ns
            );
            worst = worst.max(wall.error_ns);
            small += usize::from(!agrees(&clock, seen, TOO_SMALL)?);
        }
        ensure!(
            small > 0,
            "{name}: a bound that is {TOO_SMALL} times too small passes: this test would not see it"
        );
        let drift = clock.drift().context("no drift from twenty pings")?;
        ensure!(
            drift.ppm.abs() <= RATE_ERROR_PPM as f64 + drift.error_ppm,
            "{name}: {drift:?}"
        );
        let before = guests_own_clocks(&booted.records(), &clock, started_ns)?;
        write!(
            measured,
            "{name}: +-{:.1} ms, {:+.0} ppm (+-{:.0}), {before}; ",
            worst as f64 / 1e6,
            drift.ppm,
            drift.error_ppm.ceil()
        )?;
    }
    Ok(Outcome::Measured(measured))
}

/// Waits for the `clock` event after a step of the guest's wall clock, with the wall clock set
/// ahead by `step_s` since the first one.
fn step_is_reported(booted: &Booted, step_s: i64) -> Result<()> {
    let wall = |r: &Record| {
        r.fields
            .get("realtime_ns")
            .and_then(serde_json::Value::as_i64)
    };
    let ahead_ns =
        |r: &Record| Some(wall(r)? - r.boottime_ns as i64).filter(|_| r.name == names::CLOCK);
    let first = booted
        .records()
        .into_iter()
        .find(|r| r.name == names::CLOCK);
    let first = first.context("no clock event")?;
    let before_ns = ahead_ns(&first).context("no realtime_ns")?;
    // The step is set by what the clock showed before, on a busy machine seconds before.
    let is_after = |ns: i64| (ns - before_ns - step_s * 1_000_000_000).abs() < STEP_ERROR_NS;
    let reported = |r: &Record| r.seq > first.seq && ahead_ns(r).is_some_and(is_after);
    booted.record("the clock event after the step", reported)?;
    Ok(())
}

/// Compares what the guest reports of its log's clock and of the time before its kernel with what
/// the host knows: the VM's TSC cannot be older than the VM.
fn guests_own_clocks(records: &[Record], clock: &Clock, started_ns: i64) -> Result<String> {
    let newest_ns = records
        .iter()
        .map(|record| record.boottime_ns)
        .max()
        .unwrap_or(0);
    let records: Vec<_> = records.iter().cloned().map(Into::into).collect();
    let guest = GuestClocks::of(&records);
    let printk = guest.printk.context("no clock.printk")?;
    let error_ns = printk
        .error_ns
        .context("the difference of the kernel's log has no bound")?;
    let before = guest
        .before_kernel
        .with_context(|| format!("no time before the kernel: {:?}", guest.notes))?;
    let kernel = clock.wall_at(0).context("no sample")?;
    let room = u64::try_from(kernel.realtime_ns - started_ns)? + kernel.error_ns + before.error_ns;
    // Both clocks start with the VM: on a busy machine seconds apart, never by more than its age.
    let age_ns = newest_ns + room;
    ensure!(
        printk.offset_ns.unsigned_abs() < age_ns && error_ns < age_ns,
        "{printk:?}, the VM is {age_ns} ns old"
    );
    ensure!(
        before.took_ns <= room,
        "VMM and firmware are said to have taken {before:?}, but the VM was started {room} ns \
        before its kernel"
    );
    // The firmware alone takes that.
    ensure!(before.took_ns > 1_000_000, "{before:?}");
    Ok(format!(
        "before the kernel {:.3} s of {:.3}, printk {:+.3} ms",
        before.took_ns as f64 / 1e9,
        room as f64 / 1e9,
        printk.offset_ns as f64 / 1e6
    ))
}
