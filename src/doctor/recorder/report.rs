//! A recording as a table.

use super::recorded::Recorded;
use kata_gpu_report::data::text::{Ink, Screen, printable, seconds};
use kata_gpu_report::data::trace_file::Traced;
use kata_gpu_report::data::units::{histogram, size};
use kata_gpu_report::views::grid::{Grid, Set, signed};
use kata_gpu_wire::catalogue::{Form, row_of};

/// A step that is shorter has no row.
const SHORT_NS: u64 = 1_000_000;

/// Table of the steps, then counts and notes. Times are seconds since the recording began.
pub fn lines(recorded: &Recorded, screen: &Screen) -> Vec<String> {
    let (left, right) = (Set::Left, Set::Right);
    let mut grid = Grid::new(&[
        ("BEGIN", right),
        ("TOOK", right),
        ("WHAT", left),
        ("FUNCTION", left),
        ("SIZE", right),
        ("CALLS", right),
        ("BY", left),
        ("PAGES A CALL", left),
    ]);
    let is_step = |traced: &&Traced| row_of(&traced.name).form == Form::Span;
    let is_long = |traced: &&Traced| traced.took_ns >= SHORT_NS;
    for traced in recorded.traced.iter().filter(is_step).filter(is_long) {
        let text = |text: Option<String>| text.unwrap_or_default();
        let begin = traced
            .began_realtime_ns
            .saturating_sub(recorded.recording.began_realtime_ns);
        grid.row(
            Ink::Plain,
            vec![
                signed(begin).trim_start_matches('+').to_string(),
                seconds(traced.took_ns),
                printable(format!("{} {}", traced.name, traced.detail).trim_end()),
                text(traced.function.map(|function| function.to_string())),
                text(traced.bytes.map(size)),
                text(traced.calls.map(|calls| calls.to_string())),
                printable(&traced.thread),
                histogram(&traced.pages_a_call.iter().copied().collect()),
            ],
        );
    }
    let mut out = grid.lines(screen);
    let short = recorded
        .traced
        .iter()
        .filter(is_step)
        .filter(|traced| !is_long(traced));
    let (count, took_ns) = short.fold((0, 0u64), |(count, sum), step| {
        (count + 1, sum.saturating_add(step.took_ns))
    });
    if count > 0 {
        out.push(format!(
            "{count} step(s) below 1 ms are not shown, together {} s: --json has them",
            seconds(took_ns)
        ));
    }
    out.push(String::new());
    for traced in recorded.traced.iter().filter(|traced| !is_step(traced)) {
        let kinds: Vec<String> = traced
            .kinds
            .iter()
            .map(|(kind, n)| format!("{}={n}", printable(kind)))
            .collect();
        let calls = traced
            .calls
            .map(|calls| format!(" {calls}"))
            .unwrap_or_default();
        let bytes = traced
            .bytes
            .map(|bytes| format!(" {}", size(bytes)))
            .unwrap_or_default();
        out.push(
            format!("{}{calls}{bytes} {}", traced.name, kinds.join(" "))
                .trim_end()
                .to_string(),
        );
    }
    let recording = &recorded.recording;
    let summary = format!(
        "recorded {} s, {} event(s), {} lost, on kernel {}; ended because {}",
        seconds(recording.took_ns),
        recording.events,
        recording.lost,
        recording.kernel,
        recording.ended
    );
    out.push(summary);
    out.extend(
        recording
            .missing
            .iter()
            .map(|missing| screen.paint(Ink::Dim, &format!("note: {missing}"))),
    );
    out
}
