//! Summary of a boot: one line per GPU, the containers, the milestones, and everything that is
//! wrong with the record of it.

use super::grid::aligned;
use super::health_table::HealthTable;
use crate::boot::model::{Boot, ClockSummary, Container, Failure, Gpu, GpuStep, OpenStep};
use crate::data::agent_log::NONE;
use crate::data::boot_file::newer_sentence;
use crate::data::clock_offset::RATE_ERROR_PPM;
use crate::data::text::{Ink, Screen, error_bound, printable, seconds, wall_clock};

/// The summary as lines.
pub fn summary(boot: &Boot, screen: &Screen) -> Vec<String> {
    let mut out = Vec::new();
    let bold = |text: &str| screen.paint(Ink::Bold, text);
    if boot.gpus.is_empty() {
        out.push("no GPU in this boot".to_string());
    } else {
        out.extend(gpu_table(&boot.gpus, screen));
        out.push(screen.paint(
            Ink::Dim,
            "seconds since kernel start (and how long the step took; published: since bound)",
        ));
    }
    if let Some(table) = HealthTable::of(boot) {
        out.push(String::new());
        out.extend(health_lines(&table, screen));
    }
    if !boot.containers.is_empty() {
        out.push(String::new());
        out.push(bold("CONTAINER             TIME  TRIES  DEVICES"));
        for container in &boot.containers {
            let time = container
                .at_ns
                .map_or("?".to_string(), |t| approximately(t, container.approximate));
            let untold = if container.devices == NONE { "-" } else { "?" };
            let tries = container
                .tries
                .map_or(untold.to_string(), |t| t.to_string());
            out.push(format!(
                "{:<16} {time:>9}  {tries:>5}  {}",
                container.name, container.devices
            ));
            if let Some(error) = &container.error {
                out.push(screen.paint(Ink::Error, &format!("    failed: {error}")));
            }
            if container.pending {
                out.push(screen.paint(Ink::Warning, &format!("    {}", pending(container))));
            }
        }
        if boot.containers.iter().any(|c| c.seen_by_init) {
            let seen = "no line of the agent: a container's time is when the init saw its \
                        directory, made once its devices are injected";
            out.push(screen.paint(Ink::Dim, seen));
        }
    }
    // A log of errors alone has no times of the boot.
    if boot.milestones.iter().any(|m| m.boottime_ns.is_some()) {
        out.extend(milestones(boot, screen));
    }
    let complaints = complaints(boot);
    if !complaints.is_empty() {
        out.push(String::new());
        out.extend(complaints.iter().map(|c| screen.paint(Ink::Warning, c)));
    }
    out
}

/// The milestones, an empty line before them, and what is known of the clocks after them.
fn milestones(boot: &Boot, screen: &Screen) -> Vec<String> {
    let head = "MILESTONE             TIME  WALL CLOCK (UTC)";
    let mut out = vec![String::new(), screen.paint(Ink::Bold, head)];
    for milestone in &boot.milestones {
        let time = milestone
            .boottime_ns
            .map_or("-".to_string(), |t| approximately(t, milestone.approximate));
        let wall = milestone
            .wall
            .map(|w| format!("{} {}", wall_clock(w.realtime_ns), error_bound(w.error_ns)))
            .unwrap_or_default();
        out.push(
            format!("{:<16} {time:>9}  {wall}", milestone.name)
                .trim_end()
                .to_string(),
        );
    }
    if boot.milestones.iter().any(|m| m.approximate) {
        let why = match &boot.imported {
            None if boot.containers.iter().any(|c| c.seen_by_init) => {
                "containers as the init saw them, before they were created"
            }
            None => "the stream has no clock event to place the agent's lines by",
            Some(_) => "known to a millisecond or worse, by the clocks of the logs",
        };
        out.push(screen.paint(Ink::Dim, &format!("~ approximate: {why}")));
    }
    out.extend(
        clock_lines(&boot.clock)
            .iter()
            .map(|line| screen.paint(Ink::Dim, line)),
    );
    out
}

/// Facts known about a container that was asked for and has no end.
fn pending(container: &Container) -> String {
    let asked = container
        .asked_ns
        .map(|at| {
            format!(
                "asked for at {}, ",
                approximately(at, container.approximate)
            )
        })
        .unwrap_or_default();
    match container.tries {
        Some(tries) => format!("{asked}{tries} tries failed, and no line reports its creation"),
        None => format!(
            "{asked}neither created nor failed here: why the agent refuses a container is only in \
             the runtime's log"
        ),
    }
}

/// How the clocks stand beside each other.
fn clock_lines(clock: &ClockSummary) -> Vec<String> {
    let mut out = Vec::new();
    if let Some(best) = clock.best {
        let drift = match clock.drift {
            // A bound beyond what is assumed anyway says nothing.
            Some(d) if d.error_ppm <= RATE_ERROR_PPM as f64 => {
                format!(
                    "it ran {:+.0} ppm (+-{:.0}) against it over {} s",
                    d.ppm,
                    d.error_ppm.ceil(),
                    seconds(d.to_ns - d.from_ns)
                )
            }
            Some(_) | None => "too short or too noisy to measure drift".to_string(),
        };
        let pings = format!(
            "clock: the guest's next to the host's by {} sample(s), {} at best",
            clock.samples,
            error_bound(best.error_ns)
        );
        out.push(format!("{pings}; {drift}"));
    }
    if clock.hypervisor_samples > 0 {
        out.push(format!(
            "clock: the hypervisor's (ptp_kvm) agrees in {} of {} sample(s)",
            clock.hypervisor_samples_used, clock.hypervisor_samples
        ));
    }
    if let Some(printk) = clock.printk {
        let bound = printk
            .error_ns
            .map(|e| format!(" ({})", error_bound(e)))
            .unwrap_or_default();
        out.push(format!(
            "clock: the kernel log's is {:+.3} ms off the boot clock{bound}; corrected above",
            printk.offset_ns as f64 / 1e6
        ));
    }
    out
}

fn approximately(time_ns: u64, approximate: bool) -> String {
    format!("{}{}", if approximate { "~" } else { "" }, seconds(time_ns))
}

const GPU_HEAD: [&str; 7] = [
    "GPU",
    "ADDRESS",
    "FOUND",
    "ENABLED",
    "BOUND",
    "PUBLISHED",
    "USABLE",
];
/// Index of a column in [`GPU_HEAD`].
const FOUND: usize = 2;

/// Table with a line per GPU, columns as wide as they must be and the terminal lets them. A failure
/// or open step stands below its GPU.
fn gpu_table(gpus: &[Gpu], screen: &Screen) -> Vec<String> {
    let mut rows = vec![GPU_HEAD.map(str::to_string).to_vec()];
    rows.extend(gpus.iter().map(gpu_cells));
    let right: Vec<usize> = (0..GPU_HEAD.len()).collect();
    let mut lines = aligned(&rows, &right, "  ");
    // A narrow terminal gets less between columns, and no FOUND column: most GPUs share that time.
    let whole = lines.first().map_or(0, String::len);
    if screen.width.is_some_and(|width| width < whole) {
        for row in &mut rows {
            row.remove(FOUND);
        }
        lines = aligned(&rows, &right, " ");
    }
    let mut lines = lines.into_iter();
    let head = lines.next().map(|head| screen.paint(Ink::Bold, &head));
    let mut out: Vec<String> = head.into_iter().collect();
    for (gpu, line) in gpus.iter().zip(lines) {
        let ink = match state(gpu) {
            State::Usable | State::Unknown => Ink::Plain,
            State::Failed(_) => Ink::Error,
            State::Still(_) => Ink::Warning,
        };
        out.push(screen.paint(ink, &line));
        let more = match state(gpu) {
            State::Usable | State::Unknown => continue,
            State::Failed(f) => failed(f),
            State::Still(s) => format!(
                "still in {} since {}",
                printable(&s.step),
                seconds(s.since_ns)
            ),
        };
        out.push(screen.paint(ink, &format!("     {more}")));
    }
    out
}

/// When, where and why a GPU failed; cure and words are the verdict's.
fn failed(failure: &Failure) -> String {
    let code = failure.cause.code.as_ref().unwrap_or(&failure.reason);
    format!(
        "failed at {} in {}: {}",
        seconds(failure.at_ns),
        printable(&failure.step),
        printable(code)
    )
}

/// Health of the GPUs, in as many tables below each other as the terminal needs, then what is
/// wrong.
pub fn health_lines(table: &HealthTable, screen: &Screen) -> Vec<String> {
    let mut out = Vec::new();
    for group in table.groups(screen.width, HEALTH_GAP.len()) {
        let heads = table.heads.iter().map(|(head, _)| head.to_uppercase());
        let heads = (Ink::Bold, heads.collect());
        let rows = table.rows.iter().map(|(wrong, cells)| {
            let ink = if *wrong { Ink::Error } else { Ink::Plain };
            (ink, cells.clone())
        });
        let of_group = |cells: Vec<String>| {
            let cell = |column: &usize| cells.get(*column).cloned();
            group.iter().filter_map(cell).collect()
        };
        let (inks, rows): (Vec<Ink>, Vec<Vec<String>>) = [heads]
            .into_iter()
            .chain(rows)
            .map(|(ink, cells)| (ink, of_group(cells)))
            .unzip();
        let is_right = |column: usize| table.heads.get(column).is_some_and(|(_, right)| *right);
        let right: Vec<usize> = (0..)
            .zip(&group)
            .filter(|(_, column)| is_right(**column))
            .map(|(at, _)| at)
            .collect();
        let lines = aligned(&rows, &right, HEALTH_GAP);
        out.extend(
            inks.into_iter()
                .zip(lines)
                .map(|(ink, line)| screen.paint(ink, line.trim_end())),
        );
    }
    out.extend(
        table
            .source
            .iter()
            .map(|source| screen.paint(Ink::Dim, source)),
    );
    out.extend(
        table
            .sentences
            .iter()
            .map(|sentence| screen.paint(Ink::Error, sentence)),
    );
    out
}

const HEALTH_GAP: &str = "  ";

enum State<'a> {
    Usable,
    Failed(&'a Failure),
    Still(&'a OpenStep),
    Unknown,
}

fn state(gpu: &Gpu) -> State<'_> {
    match (&gpu.failed, &gpu.usable, &gpu.still) {
        (Some(failure), _, _) => State::Failed(failure),
        (None, Some(_), _) => State::Usable,
        (None, None, Some(still)) => State::Still(still),
        (None, None, None) => State::Unknown,
    }
}

/// Times at which a GPU was found, enabled, bound, published and usable, and how long it took;
/// empty where that is not known.
pub fn gpu_times(gpu: &Gpu) -> [(String, Option<String>); 5] {
    let step = |step: Option<GpuStep>| {
        step.map(|step| (seconds(step.at_ns), step.took_ns.map(seconds)))
            .unwrap_or_default()
    };
    let usable = match state(gpu) {
        State::Usable | State::Unknown => step(gpu.usable),
        State::Failed(_) => ("failed".to_string(), None),
        State::Still(_) => ("not yet".to_string(), None),
    };
    [
        (gpu.found_ns.map(seconds).unwrap_or_default(), None),
        step(gpu.enabled),
        step(gpu.bound),
        step(gpu.published),
        usable,
    ]
}

fn gpu_cells(gpu: &Gpu) -> Vec<String> {
    let cell = |(at, took): (String, Option<String>)| match took {
        Some(took) => format!("{at} ({took})"),
        None if at.is_empty() => "-".to_string(),
        None => at,
    };
    let mut cells = vec![gpu.name().number(), gpu.address.to_string()];
    cells.extend(gpu_times(gpu).map(cell));
    cells
}

/// Reasons why this picture of the boot is incomplete or bad.
pub fn complaints(boot: &Boot) -> Vec<String> {
    let mut out = Vec::new();
    if boot.settled_ns.is_none() && !boot.gpus.is_empty() && boot.imported.is_some() {
        out.push(
            "no log has the time at which all GPUs were usable or failed: the driver logs no \
             initialisation that succeeds"
                .to_string(),
        );
    } else if boot.settled_ns.is_none() && !boot.gpus.is_empty() {
        out.push(
            "not settled: some GPU was neither usable nor failed when the stream ended".to_string(),
        );
    }
    if boot.lost.records > 0 {
        let gaps: Vec<String> = boot
            .lost
            .gaps
            .iter()
            .map(|(a, b)| {
                if a == b {
                    a.to_string()
                } else {
                    format!("{a}-{b}")
                }
            })
            .collect();
        out.push(format!(
            "{} record(s) missing: seq {}",
            boot.lost.records,
            gaps.join(", ")
        ));
    }
    if boot.lost.reported_by_guest > 0 {
        out.push(format!(
            "the guest reports {} record(s) that it dropped",
            boot.lost.reported_by_guest
        ));
    }
    if boot.garbage_lines > 0 {
        out.push(format!(
            "{} line(s) from the guest were not of the format and were dropped",
            boot.garbage_lines
        ));
    }
    if let Some(why) = &boot.capped {
        out.push(format!(
            "the collector stopped storing this boot at {}",
            printable(why)
        ));
    }
    out.extend(boot.newer_schema.and_then(newer_sentence));
    if boot.unknown_host_lines > 0 {
        out.push(format!(
            "{} line(s) of a newer collector are unknown here: upgrade this kata-gpu-boot",
            boot.unknown_host_lines
        ));
    }
    out.extend(boot.too_large.map(|too_large| too_large.sentence()));
    if boot.damaged_lines > 0 {
        out.push(format!(
            "{} damaged line(s) in the file:",
            boot.damaged_lines
        ));
        out.extend(
            boot.damage
                .iter()
                .map(|d| format!("    line {}: {}", d.line, d.why)),
        );
        let unnamed = boot.damaged_lines - boot.damage.len() as u64;
        if unnamed > 0 {
            out.push(format!("    and {unnamed} more"));
        }
    }
    if boot.clock.steps > 0 {
        out.push(format!(
            "the clocks of guest and host were stepped against each other {} time(s), or ran more \
             than {RATE_ERROR_PPM} ppm apart: bounds there are wider",
            boot.clock.steps
        ));
    }
    out.extend(boot.clock.notes.iter().map(|note| printable(note)));
    if boot.clock.samples + boot.clock.hypervisor_samples_used > 0 {
        return out;
    }
    if boot.imported.is_some() {
        out.push(
            "wall-clock times are not known: no log relates the guest's clock to the host's"
                .to_string(),
        );
    } else {
        out.push(
            "no clock sample: wall-clock times are not known (the collector takes them while \
                  the guest runs)"
                .to_string(),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::model::Now;

    #[test]
    fn a_line_of_a_gpu_fits_into_80_columns() {
        let step = Some(GpuStep {
            at_ns: 20_353_000_000,
            took_ns: Some(2_008_000_000),
        });
        let gpu = Gpu {
            address: "0001:00:07.0".parse().unwrap(),
            index: Some(7),
            minor: Some(7),
            found_ns: Some(1_726_000_000),
            enabled: step,
            bound: step,
            published: step,
            usable: step,
            failed: None,
            still: None,
            health: None,
            now: Now::default(),
        };
        let lines = |width| {
            gpu_table(
                std::slice::from_ref(&gpu),
                &Screen {
                    width,
                    colour: false,
                },
            )
        };
        let (narrow, wide) = (lines(Some(80)), lines(Some(120)));
        assert!(narrow.iter().all(|line| line.len() <= 80), "{narrow:#?}");
        assert!(
            narrow[0].contains("ENABLED")
                && !narrow[0].contains("FOUND")
                && narrow[1].contains("20.353 (2.008)"),
            "{narrow:#?}"
        );
        assert!(
            wide == lines(None) && wide[0].contains("FOUND"),
            "{wide:#?}"
        );
    }
}
