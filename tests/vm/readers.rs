//! A failure means that a reader of the stream that hangs up, stalls, floods or talks nonsense
//! loses records without a report, or costs the guest more than its own connection.

use super::harness::{DEADLINE, Guest, Listener, Outcome, TestContext, VmTest, complete, events};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Record, ping_line};
use std::time::Duration;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "a_listener_that_hangs_up_gets_everything_when_it_reconnects",
        run: hangs_up,
    },
    VmTest {
        name: "a_listener_that_always_hangs_up_is_reported_three_times",
        run: always_hangs_up,
    },
    VmTest {
        name: "a_host_that_sends_nonsense_gets_answers_to_its_pings_only",
        run: nonsense,
    },
    VmTest {
        name: "a_host_that_pings_and_never_reads_is_not_read_for_ever",
        run: pings_unread,
    },
    VmTest {
        name: "a_reader_that_stalls_delays_nothing_and_gets_its_losses",
        run: stalls,
    },
];

/// How long the guest may take nothing before it counts as not reading: it answers within
/// milliseconds, and polls nothing.
const STALL: Duration = Duration::from_secs(3);

/// Whether a record reports a connection.
fn is_connected(record: &Record) -> bool {
    record.name == names::SINK && record.fields.get("state") == Some(&"connected".into())
}

fn hangs_up(context: &TestContext) -> Result<Outcome> {
    let booted =
        Guest::with("gpuinit.bind=pipelined fakepci.enable_ms=200").boot(context, "hangs-up")?;
    // In the middle of the bring-up, twice.
    for connections in [1, 2] {
        booted.record("gpu.bound", |r| {
            r.name == names::GPU_BOUND
                && r.fields.get("index").and_then(|i| i.as_u64()) >= Some(connections as u64)
        })?;
        booted.receiver.hang_up();
        booted
            .receiver
            .wait_headers(DEADLINE, connections + 1)
            .context("the guest did not connect again")?;
    }
    booted.settles(8, 0)?;
    booted
        .receiver
        .wait_several(DEADLINE, 3, is_connected)
        .context("no three connections were reported")?;
    let headers = booted.receiver.headers();
    ensure!(
        headers.iter().all(|h| *h == headers[0] && h.first_seq == 0),
        "another boot, or not from the start: {headers:?}"
    );
    let records = booted.records();
    complete(&records)?;
    // A record that comes again comes the same: the receiver compares.
    ensure!(
        booted.receiver.garbage().is_empty(),
        "{:?}",
        booted.receiver.garbage()
    );
    let sink = |state: &str| {
        records
            .iter()
            .filter(|r| r.name == names::SINK && r.fields.get("state") == Some(&state.into()))
            .count()
    };
    ensure!(
        sink("lost") == 2 && sink("connected") == 3,
        "lost {}, connected {}",
        sink("lost"),
        sink("connected")
    );
    Ok(Outcome::Passed)
}

/// As a collector does that refuses us, or somebody else's service on this port.
fn always_hangs_up(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::new()
        .listener(Listener::HangsUp)
        .boot(context, "always")?;
    booted
        .receiver
        .wait_hung_up(DEADLINE, 6)
        .context("the guest did not come again")?;
    booted.receiver.relent();
    let lost = booted.record("the last report", |r| {
        r.error
            .as_deref()
            .is_some_and(|e| e.contains("later losses are not reported"))
    })?;
    ensure!(lost.name == names::SINK, "{lost:?}");
    booted.settles(8, 0)?;
    let records = booted.records();
    complete(&records)?;
    // A connection that lasts is reported after that, however soon.
    let sink = |state: &str| {
        records
            .iter()
            .filter(|r| r.seq <= lost.seq && r.name == names::SINK)
            .filter(|r| r.fields.get("state") == Some(&state.into()))
            .count()
    };
    ensure!(
        sink("lost") == 3 && sink("connected") == 3,
        "lost {}, connected {}",
        sink("lost"),
        sink("connected")
    );
    // A connection that lasts is reported, and what comes after it again.
    booted
        .receiver
        .wait_several(DEADLINE, 4, is_connected)
        .context("a connection that lasts was not reported")?;
    Ok(Outcome::Passed)
}

fn nonsense(context: &TestContext) -> Result<Outcome> {
    let mut booted = Guest::with("fakepci.enable_ms=200 testagent.containers=all:all")
        .boot(context, "nonsense")?;
    let start = booted.event(names::INIT_START)?;
    let mut speech = Vec::new();
    speech.extend((0..100_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)); // every byte, newlines too
    speech.extend(
        b"\n{\"schema\":1,\"ping\":-1}\n{\"schema\":3,\"ping\":9}\n{\"ping\":9}\n\
        [{\"schema\":1,\"ping\":9}]\n",
    );
    speech.extend([b'{'; 70_000]); // deeper than any parser should go, longer than any line may be
    speech.extend(b"\n");
    for id in [7, u64::MAX] {
        speech.extend(ping_line(id).into_bytes());
        speech.extend(b"\0\0\0\n");
    }
    let sent = booted.receiver.say(&speech, DEADLINE)?;
    ensure!(
        sent == speech.len(),
        "the guest took {sent} of {} bytes",
        speech.len()
    );
    let pongs = booted
        .receiver
        .wait_pongs(DEADLINE, 2)
        .context("no answers to two pings")?;
    booted.settles(8, 0)?;
    booted.created("all")?;
    let settled = booted.event(names::SETTLED)?;
    ensure!(
        pongs.iter().map(|p| p.pong).eq([7, u64::MAX]),
        "answers: {pongs:?}"
    );
    ensure!(
        start.boottime_ns < pongs[0].boottime_ns && pongs[0].boottime_ns <= pongs[1].boottime_ns,
        "answers at {} and {} ns, the init started at {}",
        pongs[0].boottime_ns,
        pongs[1].boottime_ns,
        start.boottime_ns
    );
    // Nothing else came out of it: the stream is whole, and there is no third answer.
    complete(&booted.records())?;
    ensure!(
        booted.receiver.garbage().is_empty(),
        "{:?}",
        booted.receiver.garbage()
    );
    ensure!(
        booted.receiver.wait_pongs(Duration::ZERO, 3).is_none(),
        "an answer to nonsense: {pongs:?}"
    );
    ensure!(
        booted.receiver.headers().len() == 1,
        "the connection was lost at {} ns",
        settled.boottime_ns
    );
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

fn pings_unread(context: &TestContext) -> Result<Outcome> {
    // Far more than all buffers between here and the guest hold (vsock's credit is 256 kB), and
    // less than what would hurt the guest.
    const PINGS: usize = 4 << 20;
    let mut booted = Guest::new()
        .listener(Listener::Deaf)
        .append("fakepci.enable_ms=200 testagent.containers=all:all")
        .boot(context, "pings")?;
    ensure!(
        booted.receiver.wait_deaf(DEADLINE),
        "the guest never connected"
    );
    let ping = ping_line(1);
    let sent = booted
        .receiver
        .say(ping.repeat(PINGS / ping.len()).as_bytes(), STALL)?;
    ensure!(sent > 0, "the guest took nothing");
    ensure!(
        sent < PINGS / 2,
        "the guest took {sent} bytes of pings and keeps the answers to them in memory"
    );
    // The guest is none the worse for it. Of the stream nothing is asked: with both directions full
    // vhost-device-vsock 0.3.0 loses the connection ("Failed to re-enable EPOLLOUT").
    booted.created("all")?;
    ensure!(
        booted.console.wait_text(DEADLINE, "\"msg\":\"settled\""),
        "the console has no settled line"
    );
    booted.still_runs()?;
    Ok(Outcome::Measured(format!(
        "{} kB of pings taken",
        sent / 1024
    )))
}

fn stalls(context: &TestContext) -> Result<Outcome> {
    // Warnings only: 20,000 lines over a serial port would take longer than the test. The first
    // record of a sink is that of the connection.
    let mut booted = Guest::with("gpuinit.log=warn testagent.containers=all:all")
        .listener(Listener::Deaf)
        .script("sink>looks:20000")
        .boot(context, "stalls")?;
    booted.did("looks:20000")?;
    booted.created("all")?;
    booted.receiver.wake();
    // A busy guest loses records before the stall, too, and a later report can cover earlier
    // records. Each lost record is in some report, and none that came.
    let numbers = |records: &[&Record]| {
        let is_report = |r: &&&Record| {
            r.name == names::STREAM_LOST && r.fields.get("at") == Some(&"vsock".into())
        };
        let reported: u64 = records
            .iter()
            .filter(is_report)
            .filter_map(|r| r.fields["lost"].as_u64())
            .sum();
        (
            reported,
            records.last().map_or(0, |last| last.seq + 1) - records.len() as u64,
        )
    };
    let (reported, missing) = booted
        .receiver
        .wait_until(DEADLINE, |records| {
            Some(numbers(records))
                .filter(|(reported, missing)| *reported > 0 && reported >= missing)
        })
        .with_context(|| {
            format!(
                "reported and missing: {:?}",
                numbers(&booted.records().iter().collect::<Vec<_>>())
            )
        })?;
    ensure!(
        reported == missing,
        "reports say {reported}, missing are {missing}"
    );
    let records = booted.records();
    ensure!(
        events(&records, names::INIT_START).len() == 1,
        "what was sent before the stall has not come"
    );
    ensure!(
        booted.receiver.garbage().is_empty(),
        "{:?}",
        booted.receiver.garbage()
    );
    booted.still_runs()?;
    Ok(Outcome::Measured(format!(
        "{reported} records lost, and reported"
    )))
}
