//! Records and agent lines into the rows that people read: whose time it is, what, how
//! long, and whether it is a detail.
//!
//! [`Tracker`] takes records one by one, as they arrive or sorted, and remembers only what later
//! rows need: open spans and the GPUs' numbers. Texts in a [`Row`] are printable ASCII, whatever
//! the guest sent.

use crate::boot::gpu_name::GpuName;
use crate::boot::gpus::{Gpus, Passed};
use crate::boot::host_trace::HostStep;
use crate::data::agent_log::AgentEvent;
use crate::data::budget::MAX_GPUS;
use crate::data::clock_points::Placed;
use crate::data::compact_record::Record;
use crate::data::imported_record;
use crate::data::text;
use kata_gpu_wire::catalogue::{Form, Owner, Rank, row_of};
use kata_gpu_wire::driver_log;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::{Kind, Level};
use std::collections::{BTreeMap, HashSet};

/// Open spans that are remembered. A boot has some dozen; a guest that opens them without end gets
/// no duration for the rest.
const MAX_OPEN: usize = 4096;
/// Longest value of one field in a row, in characters.
const MAX_VALUE: usize = 160;
/// Longest text about a step's beginning that is kept until its end, in bytes.
const MAX_BEGIN_TEXT: usize = 400;
/// A step that is not worth a row is worth one when it took this long.
const SLOW_NS: u64 = 100_000_000;

/// How a row is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    Plain,
    Good,
    Warning,
    Error,
}

/// A row of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub time_ns: u64,
    /// The time is not exact (an agent line without a `clock` event to place it by).
    pub approximate: bool,
    pub owner: Owner,
    pub gpu: Option<GpuName>,
    pub what: String,
    pub took_ns: Option<u64>,
    pub tone: Tone,
    /// Shown only with -v.
    pub detail: bool,
}

impl Row {
    /// A plain row about no GPU.
    pub fn plain(time_ns: u64, owner: Owner, what: String) -> Self {
        Self {
            time_ns,
            approximate: false,
            owner,
            gpu: None,
            what,
            took_ns: None,
            tone: Tone::Plain,
            detail: false,
        }
    }

    /// The first row of every boot.
    pub fn kernel_start() -> Self {
        Self::plain(0, Owner::Kernel, "kernel start".to_string())
    }
}

/// A span that has begun and not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    pub name: String,
    pub gpu: Option<GpuName>,
    pub begin_ns: u64,
    parent: Option<u64>,
    /// Fields of the span's beginning (` key=value`): the row of its end repeats them.
    pub fields: String,
}

/// State of a boot by the records seen so far.
#[derive(Debug, Default)]
pub struct Tracker {
    open: BTreeMap<u64, Open>,
    pub gpus: Gpus,
    /// Containers whose first failed try was shown.
    waiting: HashSet<String>,
}

impl Tracker {
    /// Takes the next record and gives its row.
    pub fn row(&mut self, record: &Record) -> Row {
        self.take(record).0
    }

    /// Takes the next record: its row, and the state of its GPU that it ended.
    pub fn take(&mut self, record: &Record) -> (Row, Option<Passed>) {
        if let Some(event) = imported_record::of_record(record) {
            return (
                self.agent_row(&event, imported_record::placed(record)),
                None,
            );
        }
        let passed = self.learn(record);
        let begun = record.span.and_then(|id| match record.kind {
            Kind::End => self.open.remove(&id),
            Kind::Begin | Kind::Event | Kind::Kmsg => None,
        });
        let took_ns = match record.kind {
            Kind::End => begun
                .as_ref()
                .and_then(|b| record.boottime_ns.checked_sub(b.begin_ns)),
            Kind::Event => self.event_took(record),
            Kind::Begin | Kind::Kmsg => None,
        };
        let gpu = record
            .gpu
            .or(begun.as_ref().and_then(|b| b.gpu.map(|g| g.address)))
            .map(|address| self.gpu_name(address));
        let row = Row {
            time_ns: record.boottime_ns,
            approximate: imported_record::is_approximate(record),
            owner: owner(record),
            gpu,
            what: what(record, begun.as_ref().map_or("", |b| &b.fields)),
            took_ns,
            tone: tone(record),
            detail: is_detail(record, took_ns),
        };
        (row, passed)
    }

    fn learn(&mut self, record: &Record) -> Option<Passed> {
        let passed = self.gpus.take(record);
        if let (Kind::Begin, Some(id)) = (record.kind, record.span)
            && self.open.len() < MAX_OPEN
        {
            let gpu = record.gpu.map(|address| self.gpu_name(address));
            let mut fields = fields_text(record);
            fields.truncate(MAX_BEGIN_TEXT);
            let open = Open {
                name: record.name.to_string(),
                gpu,
                begin_ns: record.boottime_ns,
                parent: record.parent,
                fields,
            };
            self.open.insert(id, open);
        }
        passed
    }

    fn event_took(&self, record: &Record) -> Option<u64> {
        let gpu = self.gpus.all.get(&record.gpu?)?;
        match record.name.as_str() {
            names::GPU_BOUND => gpu.bound?.took_ns,
            names::GPU_PUBLISHED => gpu.since_bound_ns(record.boottime_ns),
            names::GPU_USABLE => gpu.usable?.took_ns,
            _ => None,
        }
    }

    fn gpu_name(&self, address: PciAddress) -> GpuName {
        GpuName {
            index: self.gpus.all.get(&address).and_then(|gpu| gpu.index),
            address,
        }
    }

    /// The innermost spans that have not ended, by their names.
    pub fn open(&self) -> Vec<&Open> {
        let parents: HashSet<u64> = self.open.values().filter_map(|o| o.parent).collect();
        self.open
            .iter()
            .filter(|(id, _)| !parents.contains(id))
            .map(|(_, open)| open)
            .collect()
    }

    /// The row of a step or count of the host's trace; of one that ended before the kernel's start,
    /// in the row of that start.
    pub fn traced_row(&self, step: &HostStep) -> Row {
        let traced = &step.traced;
        let row = row_of(&traced.name);
        let text = |text: &str| text::printable_start(&text, MAX_VALUE);
        let detail = if traced.detail.is_empty() {
            String::new()
        } else {
            format!(" {}", text(&traced.detail))
        };
        let before = step.end_ns().min(0).unsigned_abs();
        let before = if before > 0 {
            format!(" ({} s before kernel start)", text::seconds(before))
        } else {
            String::new()
        };
        let took_ns = (row.form == Form::Span).then_some(traced.took_ns);
        Row {
            time_ns: u64::try_from(step.end_ns()).unwrap_or(0),
            approximate: step.is_approximate(),
            owner: row.owner,
            gpu: step.gpu.map(|address| self.gpu_name(address)),
            what: format!(
                "{}{detail}{}{before}",
                text(&traced.name),
                step.fields_text()
            ),
            took_ns,
            tone: Tone::Plain,
            detail: row.rank == Rank::Detail
                || row.rank == Rank::Quick && took_ns.is_none_or(|took| took < SLOW_NS),
        }
    }

    /// The row of an agent's event.
    pub fn agent_row(&mut self, event: &AgentEvent, placed: Placed) -> Row {
        let tries = |n: &Option<u64>| n.map(|n| format!(" tries={n}")).unwrap_or_default();
        let (what, tone, detail) = match event {
            AgentEvent::Start { version } => {
                (format!("kata-agent {version} starts"), Tone::Plain, true)
            }
            AgentEvent::Ready => ("agent ready".to_string(), Tone::Good, false),
            AgentEvent::Rpc { call } => (format!("asked to {call}"), Tone::Plain, true),
            AgentEvent::ContainerAsked {
                container,
                devices,
                pause,
            } => (
                format!("container asked for: {container} devices={devices}"),
                Tone::Plain,
                *pause,
            ),
            AgentEvent::CdiTryFailed {
                container,
                attempt,
                error,
            } => {
                // The agent tries once a second: the first says that it waits, and for what.
                let first = self.waiting.len() < MAX_GPUS && self.waiting.insert(container.clone());
                (
                    format!("cdi try failed container={container} try={attempt}: {error}"),
                    Tone::Plain,
                    !first,
                )
            }
            AgentEvent::Injected { container } => {
                (format!("devices injected: {container}"), Tone::Plain, true)
            }
            AgentEvent::ContainerCreated {
                container,
                devices,
                tries: n,
                pause,
            } => {
                let what = format!(
                    "container created: {container} devices={devices}{}",
                    tries(n)
                );
                (what, if *pause { Tone::Plain } else { Tone::Good }, false)
            }
            AgentEvent::ContainerStarted { container } => {
                (format!("container started: {container}"), Tone::Plain, true)
            }
            AgentEvent::ContainerFailed {
                container,
                devices,
                tries: n,
                error,
            } => (
                format!(
                    "container failed: {container} devices={devices}{}: {error}",
                    tries(n)
                ),
                Tone::Error,
                false,
            ),
            AgentEvent::HookFailed { error } => {
                (format!("hook failed: {error}"), Tone::Error, false)
            }
            AgentEvent::Bound(gpu) => (format!("uevent: a driver has {gpu}"), Tone::Plain, true),
        };
        Row {
            approximate: placed.approximate,
            tone,
            detail,
            ..Row::plain(placed.boottime_ns, Owner::Agent, what)
        }
    }
}

fn owner(record: &Record) -> Owner {
    match record.kind {
        Kind::Kmsg
            if record.kmsg_text().starts_with("nvidia") || record.kmsg_text().contains("NVRM:") =>
        {
            Owner::Driver
        }
        Kind::Kmsg => Owner::Kernel,
        Kind::Begin | Kind::End | Kind::Event => owner_of(&record.name),
    }
}

/// Owner of a record of the init's. A name of no table comes from the init, too: it writes the
/// stream.
pub fn owner_of(name: &str) -> Owner {
    match row_of(name).owner {
        Owner::Unknown => Owner::Init,
        owner => owner,
    }
}

fn tone(record: &Record) -> Tone {
    match (record.level, record.name.as_str()) {
        (Level::Error | Level::Warn, _)
            if record.kind == Kind::Kmsg && driver_log::is_expected(record.kmsg_text()) =>
        {
            Tone::Plain
        }
        (Level::Error, _) => Tone::Error,
        (_, names::GPU_FAILED | names::POWER_OFF) => Tone::Error,
        _ if record.kind == Kind::End && record.error.is_some() => Tone::Error,
        (Level::Warn, _) | (_, names::GPU_LATE | names::STREAM_LOST) => Tone::Warning,
        (_, names::SETTLED) if record.fields.number("failed").unwrap_or(0) > 0 => Tone::Warning,
        (_, names::GPU_USABLE | names::SETTLED) => Tone::Good,
        (Level::Info | Level::Debug | Level::Trace, _) => Tone::Plain,
    }
}

/// Whether a record is of no interest to somebody who waits for a boot.
fn is_detail(record: &Record, took_ns: Option<u64>) -> bool {
    let slow = took_ns.is_some_and(|t| t >= SLOW_NS);
    match record.kind {
        // A step is shown when it ends, or as an open step when it does not.
        Kind::Begin => true,
        Kind::Kmsg => {
            let text = record.kmsg_text();
            driver_log::is_expected(text) || record.level > Level::Error && !kmsg_matters(text)
        }
        _ if record.level <= Level::Warn || record.error.is_some() => false,
        _ if record.level >= Level::Debug => true,
        // A foreign log has no event that the GPU is usable.
        Kind::End if record.name == names::GPU_INIT && record.gpu.is_none() => false,
        Kind::End | Kind::Event => match row_of(&record.name).rank {
            Rank::Shown => false,
            Rank::Quick => !slow,
            Rank::Detail => true,
        },
    }
}

/// Kernel lines that say what is wrong with a GPU, whatever their level.
fn kmsg_matters(text: &str) -> bool {
    [
        "NVRM: Xid",
        "RmInitAdapter failed",
        "fallen off the bus",
        "Kernel panic",
    ]
    .iter()
    .any(|sign| text.contains(sign))
}

/// `begun`: the fields of the span's beginning, for the row of its end.
fn what(record: &Record, begun: &str) -> String {
    if record.kind == Kind::Kmsg {
        return text::printable(record.kmsg_text());
    }
    if record.name == names::GPU_HEALTH && record.error.is_none() {
        return format!("{}{}", names::GPU_HEALTH, health_text(record));
    }
    let begin = if record.kind == Kind::Begin {
        "begin "
    } else {
        ""
    };
    let mut what = format!(
        "{begin}{}{begun}{}",
        text::printable(&record.name),
        fields_text(record)
    );
    if let Some(error) = &record.error {
        what.push_str(": ");
        what.push_str(&text::printable(error));
    }
    what
}

/// The state of a GPU in few words, the same ones in the same order for each GPU; exports have
/// every field.
fn health_text(record: &Record) -> String {
    let number = |name: &str| record.fields.number(name);
    let shown = |name: &str| {
        record
            .fields
            .get(name)
            .map(|value| text::printable_start(&value.shown(), MAX_VALUE))
    };
    let is = |name: &str| shown(name).is_some_and(|value| value == "true");
    let watts = |milliwatts: u64| milliwatts / 1000;
    let mut parts = Vec::new();
    parts.extend(number("graphics_mhz").map(|mhz| format!("{mhz} MHz")));
    parts.extend(number("memory_mhz").map(|mhz| format!("memory {mhz} MHz")));
    parts.extend(
        number("power_mw").map(|power| match number("power_limit_mw") {
            Some(limit) => format!("{} of {} W", watts(power), watts(limit)),
            None => format!("{} W", watts(power)),
        }),
    );
    parts.extend(
        shown("ecc").map(|ecc| format!("ECC {}", if ecc == "true" { "on" } else { "off" })),
    );
    parts.extend(
        number("ecc_uncorrected")
            .filter(|errors| *errors > 0)
            .map(|errors| format!("{errors} uncorrected errors")),
    );
    parts.extend(
        number("rows_remapped")
            .filter(|rows| *rows > 0)
            .map(|rows| format!("{rows} rows remapped")),
    );
    parts.extend(is("remap_pending").then(|| "a remap waits for a reset".to_string()));
    parts.extend(number("nvlinks").map(|links| {
        format!(
            "NVLinks {} of {links}",
            number("nvlinks_active").unwrap_or(0)
        )
    }));
    parts.extend(
        shown("fabric")
            .filter(|state| state != "not supported")
            .map(|state| format!("fabric {state}")),
    );
    parts.extend(
        shown("throttle")
            .filter(|reasons| reasons != "gpu_idle")
            .map(|reasons| format!("clocks held by {reasons}")),
    );
    parts.extend(shown("mig").map(|instances| format!("MIG {instances}")));
    if parts.is_empty() {
        String::new()
    } else {
        format!(" {}", parts.join(", "))
    }
}

/// Fields of a GPU's records that its columns show, or that mean something only to the init.
const OF_GPUS: [&str; 3] = ["index", "inode", "bind_inode"];

/// ` key=value key="two words"`, as far as the columns and the error do not say it. A field that
/// has the record's name comes first, as ` value`.
fn fields_text(record: &Record) -> String {
    let mut out = String::new();
    if let Some(value) = record.fields.get(&record.name) {
        out.push(' ');
        out.push_str(&text::printable_start(&value.shown(), MAX_VALUE));
    }
    for (key, value) in &record.fields {
        if record.name == *key
            || key == imported_record::MARK
            || (OF_GPUS.contains(&key) && record.gpu.is_some())
            || (key == "reason" && record.error.is_some())
            // In the head of the page.
            || (key == "build" && record.name == *names::INIT_START)
        {
            continue;
        }
        let key = text::printable_start(&key, MAX_VALUE);
        let value = text::printable_start(&value.shown(), MAX_VALUE);
        let quote = if value.contains(' ') { "\"" } else { "" };
        out.push_str(&format!(" {key}={quote}{value}{quote}"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::for_tests::record;

    fn rows(lines: &[&str]) -> Vec<Row> {
        let mut tracker = Tracker::default();
        let lines = (0..).zip(lines);
        lines
            .map(|(seq, line)| tracker.row(&record(seq, line)))
            .collect()
    }

    #[test]
    fn a_steps_end_repeats_its_beginning_and_adds_the_duration() {
        let rows = rows(&[
            r#""boottime_ns":1000,"kind":"begin","name":"module.load","span":1,"fields":{"module":"nvidia"}"#,
            r#""boottime_ns":5000,"kind":"end","name":"module.load","span":1,"fields":{"x":1}"#,
            r#""boottime_ns":5000,"kind":"end","name":"module.load","span":7"#,
        ]);
        assert!(rows[0].detail && !rows[1].detail);
        assert_eq!(
            (rows[1].what.as_str(), rows[1].took_ns, rows[1].owner),
            ("module.load module=nvidia x=1", Some(4000), Owner::Driver)
        );
        assert_eq!(rows[2].took_ns, None, "its beginning was lost");
    }

    #[test]
    fn a_gpus_health_is_one_short_row_and_its_problems_another() {
        let gpu = r#""gpu":"0000:01:00.0""#;
        let fields = r#"{"graphics_mhz":1200,"power_mw":71000,"power_limit_mw":500000,"ecc":true,"ecc_uncorrected":0,"rows_remapped":2,"remap_pending":false,
            "nvlinks":18,"nvlinks_active":17,"fabric":"completed","throttle":"gpu_idle","uuid":"GPU-x","cluster":"0"}"#
            .replace('\n', "");
        let rows = rows(&[
            &format!(
                r#""boottime_ns":10,"kind":"event","name":"gpu.health",{gpu},"fields":{fields}"#
            ),
            &format!(
                r#""boottime_ns":11,"kind":"event","name":"gpu.health","level":"error",{gpu},"error":"GPU 0000:01:00.0 is gone""#
            ),
            &format!(
                r#""boottime_ns":12,"kind":"event","name":"gpu.health",{gpu},"fields":{{"ecc":"\u001b[31m","mig":7}}"#
            ),
        ]);
        assert_eq!(
            rows[0].what,
            "gpu.health 1200 MHz, 71 of 500 W, ECC on, 2 rows remapped, NVLinks 17 of 18, fabric \
             completed"
        );
        assert_eq!(
            (rows[1].what.as_str(), rows[1].tone),
            ("gpu.health: GPU 0000:01:00.0 is gone", Tone::Error)
        );
        assert_eq!(
            rows[2].what, "gpu.health ECC off, MIG 7",
            "a guest's values drive no terminal"
        );
    }

    #[test]
    fn what_failed_or_was_slow_is_never_a_detail() {
        let rows = rows(&[
            r#""boottime_ns":0,"kind":"begin","name":"gpu.nodes","span":1"#,
            r#""boottime_ns":1,"kind":"end","name":"gpu.nodes","span":1"#,
            r#""boottime_ns":1,"kind":"begin","name":"gpu.nodes","span":2"#,
            r#""boottime_ns":100000001,"kind":"end","name":"gpu.nodes","span":2"#,
            r#""boottime_ns":1,"kind":"begin","name":"gpu.nodes","span":3"#,
            r#""boottime_ns":2,"kind":"end","name":"gpu.nodes","span":3,"error":"mknod: EPERM""#,
            r#""boottime_ns":2,"kind":"kmsg","name":"kmsg","fields":{"text":"NVRM: Xid (PCI:0000:01:00): 79, gone"}"#,
            r#""boottime_ns":2,"kind":"kmsg","name":"kmsg","fields":{"text":"pci: hello"}"#,
            r#""boottime_ns":2,"kind":"event","name":"agent.look","level":"warn""#,
            r#""boottime_ns":2,"kind":"event","name":"x","level":"debug""#,
        ]);
        let shown: Vec<bool> = rows.iter().map(|r| !r.detail).collect();
        assert_eq!(
            shown,
            [
                false, false, false, true, false, true, true, false, true, false
            ]
        );
        assert_eq!((rows[5].tone, rows[6].owner), (Tone::Error, Owner::Driver));
    }

    #[test]
    fn a_guest_that_opens_spans_without_end_costs_no_more_memory() {
        let mut tracker = Tracker::default();
        for id in 0..3 * MAX_OPEN as u64 {
            let rest = format!(
                r#""boottime_ns":1,"kind":"begin","name":"gpu.bind","span":{id},"gpu":"{:04x}:00:00.0","fields":{{"a":"{}"}}"#,
                id % 0xffff,
                "x".repeat(9000)
            );
            tracker.row(&record(1, &rest));
        }
        assert_eq!(tracker.open.len(), MAX_OPEN);
        assert!(
            tracker
                .open
                .values()
                .all(|o| o.fields.len() <= MAX_BEGIN_TEXT)
        );
        assert!(tracker.gpus.all.len() <= MAX_GPUS);
    }
}
