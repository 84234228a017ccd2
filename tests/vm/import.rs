//! A failure means that `import` makes of a boot's console other times than the stream of the same
//! boot has, by more than the error that it states.

use super::harness::{DEADLINE, Guest, Outcome, TestContext, VmTest, complete};
use crate::import_agreement::{Agreement, agreement};
use anyhow::{Context, Result, ensure};
use kata_gpu_report::data::agent_log;
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::import::Logs;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{header_line, record_line};
use std::fmt::Write;
use std::io::Cursor;
use std::time::{Duration, UNIX_EPOCH};

pub const TESTS: &[VmTest] = &[VmTest {
    name: "an_import_of_a_console_agrees_with_the_stream",
    run: agrees,
}];

/// Boot as imported from the console.
fn of_console(text: &str) -> Result<BootFile> {
    let mut logs = Logs::default();
    logs.add("console", Cursor::new(text.as_bytes().to_vec()))?;
    Ok(logs.boot(None)?.boot)
}

fn compare(stream: &BootFile, console: &str, import: &BootFile) -> Result<Agreement> {
    Ok(agreement(
        stream,
        &agent_log::read(console.as_bytes())?,
        import,
    ))
}

/// The value of a key in the first line that has `sign`, as it stands there.
fn value<'a>(console: &'a str, sign: &str, key: &str) -> Result<&'a str> {
    let line = console
        .lines()
        .find(|line| line.contains(sign))
        .with_context(|| format!("no line with {sign}"))?;
    let value = line
        .split(&format!("\"{key}\":\""))
        .nth(1)
        .and_then(|rest| rest.split('"').next());
    value.with_context(|| format!("no {key} in {line}"))
}

fn agrees(context: &TestContext) -> Result<Outcome> {
    // The kernel's lines on the console as well, as in containerd's log.
    let booted =
        Guest::with("loglevel=7 testagent.containers=first:0;all:all").boot(context, "import")?;
    booted.created("first")?;
    booted.created("all")?;
    booted.settles(8, 0)?;
    booted.event(names::LOCKDOWN)?;
    ensure!(
        booted.console.wait_text(DEADLINE, "\"msg\":\"lockdown\""),
        "the console lacks the last line"
    );
    let records = booted.records();
    complete(&records)?;
    let mut text = header_line(booted.receiver.headers().first().context("no header")?);
    records
        .iter()
        .for_each(|record| text.push_str(&record_line(record)));
    let stream = BootFile::read(text.as_bytes())?;
    let console = booted.console.text();
    let import = of_console(&console)?;
    let reported = compare(&stream, &console, &import)?;
    // A console has no beginnings. A line of the kernel may have torn one of the init's or the
    // agent's: then the import does not know that time.
    let (unknown, wrong): (Vec<_>, Vec<_>) = reported
        .disagreements
        .iter()
        .partition(|d| d.import_ns.is_none());
    ensure!(
        wrong.is_empty(),
        "more than the stated error: {}",
        wrong
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("\n")
    );
    let torn: Vec<&str> = unknown
        .iter()
        .map(|d| d.what.as_str())
        .filter(|what| *what != "agent exec")
        .collect();
    // 8 GPUs with five times each, of which the load enables all but one or two; milestones,
    // containers, lines of the kernel.
    ensure!(
        reported.agreed > 60 && torn.len() * 10 <= reported.agreed,
        "{} agree, not known to the import: {torn:?}",
        reported.agreed
    );

    // Moved by more than the stated error, each kind of line is found out: the init's by a
    // nanosecond, the agent's by its error and a millisecond.
    let bound_ns = value(&console, "\"msg\":\"gpu.bound\"", "boottime_ns")?;
    let ready = value(&console, "\"msg\":\"ttRPC server started\"", "ts")?;
    let error_ns = import
        .records
        .iter()
        .filter(|r| r.name == "agent.ready")
        .find_map(kata_gpu_report::data::imported_record::mark);
    let error_ns = error_ns
        .context("the agent's readiness has no stated error")?
        .error_ns;
    let later = humantime::parse_rfc3339(ready)?.duration_since(UNIX_EPOCH)?
        + Duration::from_nanos(error_ns)
        + Duration::from_millis(1);
    let later = humantime::format_rfc3339_nanos(UNIX_EPOCH + later).to_string();
    let moved = [
        (
            bound_ns.to_string(),
            (bound_ns.parse::<u64>()? + 1).to_string(),
            "bound",
        ),
        (ready.to_string(), later, "agent ready"),
    ];
    let mut measured = format!(
        "{} times agree, {} are not on the console, the agent's within {:.1} us",
        reported.agreed,
        unknown.len(),
        error_ns as f64 / 1e3
    );
    for (from, to, what) in moved {
        let import = of_console(&console.replace(&from, &to))?;
        let reported = compare(&stream, &console, &import)?;
        let found = reported
            .disagreements
            .iter()
            .find(|d| d.what.contains(what) && d.import_ns.is_some());
        let found = found.with_context(|| {
            format!(
                "{what} moved from {from} to {to} is not found out: {:?}",
                reported.disagreements
            )
        })?;
        write!(measured, "; moved, found out: {found}")?;
    }
    Ok(Outcome::Measured(measured))
}
