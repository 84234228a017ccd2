//! What is known of one boot: records in, [`Boot`] out. No I/O, no text for people.
//!
//! [`Boot`] is what `show --json` prints; its field names are part of the interface (version [`MODEL`]). All times are ns on the guest's boot
//! clock (0 = kernel start) and end in `_ns`; durations end in `took_ns`. A key without a value is left out.

use super::coverage::coverage;
use super::health::{GuestHealth, Health};
use super::steps as from_boot;
use super::timeline::Timeline;
use crate::events::record::{Kind, names};
use crate::host::data::agent_log;
use crate::host::data::agent_log::{AgentEvent, AgentLine, ClockPoints, Placed};
use crate::host::data::boot_file::{BootFile, Damage, HostEvent, Imported, Sandbox};
use crate::host::data::budget::{MAX_CONTAINERS, MAX_GPUS, MAX_SPANS, TooLarge};
use crate::host::data::clock::{Clock, Drift, Sample, Wall};
use crate::host::data::guest_clocks::{BeforeKernel, GuestClocks, Printk};
use crate::host::data::imported_record;
use crate::host::data::record::{Field, Record, SpanFields, Text};
use crate::host::data::text::{printable, start};
use crate::pci::PciAddress;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// Version of the JSON form of [`Boot`].
pub const MODEL: u32 = 1;
/// What 0 is in every stream of a guest.
pub const KERNEL_START: &str = "kernel start";
/// The milestone at which all GPUs were usable or failed.
pub const SETTLED: &str = "settled";
/// Gaps that are named one by one.
const MAX_NAMED_GAPS: usize = 32;
/// How long a guest whose connection broke may take to come back before its boot counts as over.
pub const RECONNECT_GRACE: Duration = Duration::from_secs(5);
/// Longest text about a failure, in bytes.
const MAX_REASON: usize = 2000;

/// One boot.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Boot {
    pub model: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
    /// Version of kata-gpu-init.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// `uname -r` of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// The VM in Kata's words, and its pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Sandbox>,
    /// All GPUs were usable or failed by then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settled_ns: Option<u64>,
    /// Why the machine powered itself off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_off: Option<String>,
    pub milestones: Vec<Milestone>,
    /// In PCI order.
    pub gpus: Vec<Gpu>,
    /// NVML's own state, and that of the confidential guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<Box<GuestHealth>>,
    /// In the order in which the agent was done with them.
    pub containers: Vec<Container>,
    /// Guest clock beside host clock.
    pub clock: ClockSummary,
    pub lost: Lost,
    /// Lines of the file that could not be read; the first few by name.
    pub damaged_lines: u64,
    pub damage: Vec<Damage>,
    /// Lines that the collector dropped because they were not of the format.
    pub garbage_lines: u64,
    /// Why the collector stopped storing, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capped: Option<String>,
    /// How much of the boot the steps explain; None when fewer than two milestones are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coverage: Option<CoverageSummary>,
    /// Counts of what was left out, over the limits of [`crate::host::data::budget`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub too_large: Option<TooLarge>,
    /// What it was made of, if not of a guest's stream alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub imported: Option<Imported>,
    /// In order of their beginning.
    pub spans: Vec<Span>,
}

/// How much time no step explains, between the first and the last milestone (see [`super::coverage`]).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CoverageSummary {
    pub from: String,
    pub to: String,
    pub wall_ns: u64,
    pub unexplained_ns: u64,
    /// In percent.
    pub unexplained_share: f64,
}

/// A point that people compare boots by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Milestone {
    pub name: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boottime_ns: Option<u64>,
    /// Its place on the boot clock is approximate (see [`ClockPoints::place`]).
    pub approximate: bool,
    /// The host's wall clock then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wall: Option<Wall>,
}

/// One step of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    pub at_ns: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub took_ns: Option<u64>,
}

/// A step that has begun and not ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OpenStep {
    pub step: String,
    pub since_ns: u64,
}

/// Why a GPU is not usable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    pub at_ns: u64,
    pub step: String,
    pub reason: String,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    pub address: PciAddress,
    /// The CDI name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<Step>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<Step>,
    /// `took_ns`: since it was bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub published: Option<Step>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usable: Option<Step>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<Failure>,
    /// What it is still in, if nothing else is known about its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub still: Option<OpenStep>,
    /// What NVML says of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<Box<Health>>,
}

/// A container that the agent was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Container {
    pub name: String,
    pub devices: String,
    /// When the runtime asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked_ns: Option<u64>,
    /// When it was created, or failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_ns: Option<u64>,
    pub approximate: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tries: Option<u64>,
    /// It was not created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// It is the pod's pause container, which is in no milestone.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub pause: bool,
    /// No line says how it ended.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub pending: bool,
    /// No line of the agent is about it: `at_ns` is when the init saw its directory made, which is after its devices were injected.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub seen_by_init: bool,
}

/// How well the guest's times are known on the host's clock.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClockSummary {
    /// The collector's pings.
    pub samples: usize,
    /// The sample with the smallest bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<Sample>,
    /// How much faster the guest's clock ran than the host's, between two samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drift: Option<Drift>,
    /// How often samples contradicted earlier ones: a clock was stepped, or ran faster than is assumed.
    #[serde(skip_serializing_if = "is_zero")]
    pub steps: usize,
    /// Samples that the guest had of its hypervisor, and how many of them fit the pings.
    #[serde(skip_serializing_if = "is_zero")]
    pub hypervisor_samples: usize,
    #[serde(skip_serializing_if = "is_zero")]
    pub hypervisor_samples_used: usize,
    /// The clock of the kernel's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub printk: Option<Printk>,
    /// From the VM's first CPU until the kernel's clock began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before_kernel: Option<BeforeKernel>,
    /// What was left out, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// Records that are missing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Lost {
    /// In gaps between the records that are there.
    pub records: u64,
    /// First and last seq of the first few gaps.
    pub gaps: Vec<(u64, u64)>,
    /// What the guest itself says it dropped (`stream.lost`).
    pub reported_by_guest: u64,
}

/// A step with its beginning and end.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Span {
    pub id: u64,
    pub name: Text,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<PciAddress>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<u64>,
    /// None when the record was lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub begin_ns: Option<u64>,
    /// None while it lasts, or when the record was lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<Text>,
    #[serde(skip_serializing_if = "SpanFields::is_empty")]
    pub fields: SpanFields,
}

impl Span {
    pub fn took_ns(&self) -> Option<u64> {
        self.end_ns?.checked_sub(self.begin_ns?)
    }
}

impl Boot {
    /// Works everything out from a file and, if there is one, the console's agent lines.
    pub fn new(file: &BootFile, agent: &[AgentLine]) -> Self {
        let clock = file.clock();
        let mut points = ClockPoints::default();
        file.records.iter().for_each(|record| points.add(record));
        let records = in_time(&file.records);
        let mut too_large = file.too_large;
        too_large.agent_lines = agent_log::is_full(agent);
        let spans = spans(&records, &mut too_large);

        let mut boot = Boot {
            model: MODEL,
            boot_id: file.header.as_ref().map(|h| h.boot_id.clone()),
            version: file.header.as_ref().map(|h| h.version.clone()),
            kernel: file.header.as_ref().map(|h| h.kernel.clone()),
            sandbox: file.sandbox().cloned(),
            gpus: gpus(&records, &spans, &mut too_large),
            health: GuestHealth::of(records.iter().copied()),
            clock: clock_summary(file, &clock),
            lost: Lost { records: file.seqs.missing(), gaps: file.seqs.gaps().take(MAX_NAMED_GAPS).collect(), reported_by_guest: 0 },
            damaged_lines: file.damaged,
            damage: file.damage.clone(),
            imported: file.imported().cloned(),
            ..Boot::default()
        };
        for line in &file.host {
            match &line.event {
                HostEvent::Garbage { lines, .. } => boot.garbage_lines = boot.garbage_lines.saturating_add(*lines),
                HostEvent::Capped { why } => boot.capped = Some(why.clone()),
                // What was dropped and did not come again is in `lost`.
                HostEvent::Connected { .. }
                | HostEvent::Disconnected { .. }
                | HostEvent::Clock(_)
                | HostEvent::Lost { .. }
                | HostEvent::Dropped { .. }
                | HostEvent::Sandbox(_)
                | HostEvent::Trace { .. }
                | HostEvent::Exported { .. }
                | HostEvent::Imported(_) => {}
            }
        }
        for record in records.iter().filter(|r| r.kind == Kind::Event) {
            match record.name.as_str() {
                names::SETTLED => boot.settled_ns = Some(record.boottime_ns),
                names::POWER_OFF => boot.power_off = Some(record.error.as_deref().unwrap_or_default().to_string()),
                names::STREAM_LOST => {
                    let lost = record.fields.get("lost").and_then(Field::as_u64).unwrap_or(0);
                    boot.lost.reported_by_guest = boot.lost.reported_by_guest.saturating_add(lost);
                }
                _ => {}
            }
        }
        let mut ready = None;
        let placed_lines = agent.iter().map(|line| (line.event.clone(), points.place(line.realtime_ns, &clock)));
        let imported = records.iter().filter_map(|record| {
            let placed = Placed { boottime_ns: record.boottime_ns, approximate: imported_record::is_approximate(record) };
            Some((imported_record::of_record(record)?, Some(placed)))
        });
        let mut containers = Containers::default();
        let mut heard = false;
        for (event, placed) in imported.chain(placed_lines) {
            // An agent that logs warnings alone says these, and nothing of containers.
            heard |= !matches!(event, AgentEvent::HookFailed { .. } | AgentEvent::Bound(_) | AgentEvent::Start { .. });
            if event == AgentEvent::Ready {
                ready = ready.or(placed);
            }
            containers.take(event, placed, &mut too_large);
        }
        if !heard {
            records.iter().for_each(|record| containers.see(record, boot.sandbox.as_ref(), &mut too_large));
        }
        boot.containers = containers.all;
        boot.too_large = too_large.some();
        boot.containers.sort_by_key(|c| c.at_ns.unwrap_or(u64::MAX));
        let event = |name: &str| {
            let first = records.iter().find(|r| r.kind == Kind::Event && r.name == *name);
            first.map(|r| (r.boottime_ns, imported_record::is_approximate(r)))
        };
        let created: Vec<(u64, bool)> =
            boot.containers.iter().filter(|c| c.error.is_none() && !c.pause).filter_map(|c| Some((c.at_ns?, c.approximate))).collect();
        // Its beginning: the end is when somebody saw that it was done, which on a busy guest can be after the agent is ready.
        let exec = spans.iter().find(|s| s.name == names::AGENT_EXEC && s.error.is_none()).and_then(|s| s.begin_ns);
        let milestone = |name, at: Option<(u64, bool)>| Milestone {
            name,
            boottime_ns: at.map(|a| a.0),
            approximate: at.is_some_and(|a| a.1),
            wall: at.and_then(|a| clock.wall_at(a.0)),
        };
        let from_kernel = boot.imported.as_ref().is_none_or(|i| i.zero == KERNEL_START);
        boot.milestones = vec![
            milestone(KERNEL_START, (!records.is_empty() && from_kernel).then_some((0, false))),
            milestone("init start", event(names::INIT_START)),
            milestone("agent exec", exec.map(|t| (t, false))),
            milestone("agent ready", ready.map(|p| (p.boottime_ns, p.approximate))),
            milestone("first container", created.first().copied()),
            milestone("last container", created.last().copied()),
            milestone(SETTLED, boot.settled_ns.map(|t| (t, false))),
        ];
        boot.spans = spans;
        let timeline = Timeline::new(from_boot::story(&boot, file, agent));
        boot.coverage = timeline.window(None, None).ok().map(|window| coverage(&timeline, &window).summary());
        boot
    }

    pub fn failed_gpus(&self) -> impl Iterator<Item = &Gpu> {
        self.gpus.iter().filter(|g| g.failed.is_some())
    }
}

/// Containers as lines and records name them, one after another.
#[derive(Default)]
struct Containers {
    all: Vec<Container>,
    /// Those that were asked for, by name.
    pending: HashMap<String, usize>,
}

impl Containers {
    fn take(&mut self, event: AgentEvent, placed: Option<Placed>, too_large: &mut TooLarge) {
        let new = |name: String, devices: String| Container {
            name,
            devices,
            approximate: placed.is_some_and(|p| p.approximate),
            ..Container::default()
        };
        let at_ns = placed.map(|p| p.boottime_ns);
        let ended = match event {
            AgentEvent::ContainerAsked { container, devices, pause } => {
                let asked = Container { asked_ns: at_ns, pause, pending: true, ..new(container, devices) };
                let (name, index) = (asked.name.clone(), self.all.len());
                if self.add(asked, too_large) {
                    self.pending.insert(name, index);
                }
                return;
            }
            AgentEvent::CdiTryFailed { container, attempt, .. } => {
                if let Some(container) = self.pending.get(&container).and_then(|index| self.all.get_mut(*index)) {
                    container.tries = Some(attempt);
                }
                return;
            }
            AgentEvent::ContainerCreated { container, devices, tries, pause } => {
                Container { at_ns, tries, pause, ..new(container, devices) }
            }
            AgentEvent::ContainerFailed { container, devices, tries, error } => {
                Container { at_ns, tries, error: Some(error), ..new(container, devices) }
            }
            AgentEvent::Start { .. }
            | AgentEvent::Ready
            | AgentEvent::Rpc { .. }
            | AgentEvent::Injected { .. }
            | AgentEvent::ContainerStarted { .. }
            | AgentEvent::HookFailed { .. }
            | AgentEvent::Bound(_) => return,
        };
        match self.pending.remove(&ended.name).and_then(|index| self.all.get_mut(index)) {
            Some(asked) => *asked = Container { asked_ns: asked.asked_ns, ..ended },
            None => drop(self.add(ended, too_large)),
        }
    }

    fn add(&mut self, container: Container, too_large: &mut TooLarge) -> bool {
        let room = self.all.len() < MAX_CONTAINERS;
        if room {
            self.all.push(container);
        } else {
            too_large.containers += 1;
        }
        room
    }

    /// What the init saw of a container, for a boot without the agent's lines.
    fn see(&mut self, record: &Record, sandbox: Option<&Sandbox>, too_large: &mut TooLarge) {
        let field = |key: &str| record.fields.get(key).and_then(Field::as_str);
        if record.kind == Kind::Event
            && record.name == names::AGENT_CONTAINER
            && field("what") == Some("made")
            && let Some(id) = field("container")
        {
            let seen = Container {
                name: printable(agent_log::line::short(id)),
                devices: agent_log::UNKNOWN.to_string(),
                at_ns: Some(record.boottime_ns),
                approximate: true,
                // Its id is the sandbox's.
                pause: sandbox.is_some_and(|sandbox| sandbox.id == id),
                seen_by_init: true,
                ..Container::default()
            };
            self.add(seen, too_large);
        }
    }
}

fn clock_summary(file: &BootFile, clock: &Clock) -> ClockSummary {
    let guest = GuestClocks::of(&file.records);
    let samples = file.clock_samples().count();
    ClockSummary {
        samples,
        best: file.clock_samples().min_by_key(|s| s.error_ns),
        drift: clock.drift(),
        steps: clock.steps(),
        hypervisor_samples: guest.host.len(),
        hypervisor_samples_used: clock.samples().saturating_sub(samples),
        printk: guest.printk,
        before_kernel: guest.before_kernel,
        notes: guest.notes,
    }
}

/// Records in order of time; those of one instant in the order of the stream.
pub fn in_time(records: &[Record]) -> Vec<&Record> {
    let mut sorted: Vec<&Record> = records.iter().collect();
    sorted.sort_by_key(|r| (r.boottime_ns, r.seq));
    sorted
}

fn spans(records: &[&Record], too_large: &mut TooLarge) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    let mut by_id: HashMap<u64, usize> = HashMap::new();
    for record in records {
        let Some(id) = record.span else { continue };
        let at = match by_id.get(&id) {
            Some(at) => *at,
            None if spans.len() >= MAX_SPANS => {
                // Both its records: which one is the second would take memory to know.
                too_large.spans += 1;
                continue;
            }
            None => {
                by_id.insert(id, spans.len());
                spans.push(Span {
                    id,
                    name: record.name.clone(),
                    gpu: record.gpu,
                    parent: record.parent,
                    after: record.after().to_vec(),
                    begin_ns: None,
                    end_ns: None,
                    error: None,
                    fields: SpanFields::default(),
                });
                spans.len() - 1
            }
        };
        let Some(span) = spans.get_mut(at) else { continue };
        match record.kind {
            Kind::Begin => {
                span.begin_ns = Some(record.boottime_ns);
                span.fields.begin = record.fields.clone();
            }
            Kind::End => {
                span.end_ns = Some(record.boottime_ns);
                span.error.clone_from(&record.error);
                span.fields.end = record.fields.clone();
            }
            Kind::Event | Kind::Kmsg => {}
        }
        span.gpu = span.gpu.or(record.gpu);
    }
    spans
}

/// A reason as it is kept.
fn reason_text(text: &str) -> String {
    start(text, MAX_REASON).to_string()
}

/// When the steps of GPUs began, by step and GPU.
struct Beginnings(HashMap<(&'static str, PciAddress), Vec<u64>>);

impl Beginnings {
    /// `spans`: in order of their beginning.
    fn of(spans: &[Span], wanted: &[&'static str]) -> Self {
        let mut all: HashMap<_, Vec<u64>> = HashMap::new();
        for span in spans {
            if let (Some(name), Some(gpu), Some(begin_ns)) = (wanted.iter().find(|w| span.name == **w), span.gpu, span.begin_ns) {
                all.entry((*name, gpu)).or_default().push(begin_ns);
            }
        }
        // A span whose records are not in order of time stands where its first one is.
        all.values_mut().for_each(|times| times.sort_unstable());
        Self(all)
    }

    /// How long the last one that had begun by then had lasted.
    fn took_ns(&self, name: &'static str, gpu: PciAddress, at_ns: u64) -> Option<u64> {
        let times = self.0.get(&(name, gpu))?;
        let begun = |begin: &u64| {
            #[cfg(test)]
            tests::LOOKED_AT.with(|n| n.set(n.get() + 1));
            *begin <= at_ns
        };
        let last = times.get(times.partition_point(begun).checked_sub(1)?)?;
        at_ns.checked_sub(*last)
    }
}

fn gpus(records: &[&Record], spans: &[Span], too_large: &mut TooLarge) -> Vec<Gpu> {
    let mut gpus: BTreeMap<PciAddress, Gpu> = BTreeMap::new();
    let beginnings = Beginnings::of(spans, &[names::GPU_BIND, names::GPU_INIT]);
    for record in records {
        // The kernel's lines name every PCI function there is.
        let Some(address) = record.gpu.filter(|_| record.kind != Kind::Kmsg) else { continue };
        if gpus.len() >= MAX_GPUS && !gpus.contains_key(&address) {
            too_large.gpu_records += 1;
            continue;
        }
        let gpu = gpus.entry(address).or_insert_with(|| Gpu {
            address,
            index: None,
            minor: None,
            found_ns: None,
            enabled: None,
            bound: None,
            published: None,
            usable: None,
            failed: None,
            still: None,
            health: None,
        });
        if record.kind != Kind::Event {
            continue;
        }
        Health::take(&mut gpu.health, record);
        let at_ns = record.boottime_ns;
        let number = |key: &str| record.fields.get(key).and_then(Field::as_u64);
        let took = |name| beginnings.took_ns(name, address, at_ns);
        match record.name.as_str() {
            names::GPU_FOUND => {
                gpu.found_ns = gpu.found_ns.or(Some(at_ns));
                gpu.index = number("index").or(gpu.index);
            }
            names::GPU_BOUND => {
                gpu.bound = Some(Step { at_ns, took_ns: took(names::GPU_BIND) });
                gpu.minor = number("minor").or(gpu.minor);
            }
            names::GPU_PUBLISHED => {
                let took_ns = gpu.bound.and_then(|b| at_ns.checked_sub(b.at_ns));
                gpu.published = gpu.published.or(Some(Step { at_ns, took_ns }));
            }
            names::GPU_USABLE => gpu.usable = Some(Step { at_ns, took_ns: took(names::GPU_INIT) }),
            names::GPU_FAILED => {
                let field = |key: &str| record.fields.get(key).and_then(Field::as_str).unwrap_or("?");
                let reason = reason_text(record.error.as_deref().unwrap_or_else(|| field("reason")));
                gpu.failed = Some(Failure { at_ns, step: reason_text(field("step")), reason });
            }
            _ => {}
        }
    }
    for span in spans {
        let Some(gpu) = span.gpu.and_then(|address| gpus.get_mut(&address)) else { continue };
        match (span.begin_ns, span.end_ns) {
            (_, Some(at_ns)) if span.name == names::GPU_ENABLE && span.error.is_none() => {
                gpu.enabled = Some(Step { at_ns, took_ns: span.took_ns() });
            }
            // What began last is what it is in.
            // The lane waits for the GPU, not the GPU for the lane.
            (Some(since_ns), None) if gpu.usable.is_none() && gpu.failed.is_none() && span.name != names::LANE_WAIT => {
                gpu.still = Some(OpenStep { step: span.name.to_string(), since_ns });
            }
            _ => {}
        }
    }
    gpus.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        /// Beginnings of steps that were looked at to say how long they took.
        pub static LOOKED_AT: Cell<u64> = const { Cell::new(0) };
    }

    fn read(lines: impl IntoIterator<Item = String>) -> BootFile {
        let line = |(seq, line): (usize, String)| format!("{{\"schema\":1,\"seq\":{seq},\"boottime_ns\":{seq},{line}}}\n");
        let text: String = lines.into_iter().enumerate().map(line).collect();
        let file = BootFile::read(text.as_bytes()).unwrap();
        assert_eq!(file.damaged, 0, "{:?}", file.damage);
        file
    }

    #[test]
    fn twice_as_many_spans_and_events_cost_about_twice_as_much() {
        let looked_at = |n: usize| {
            let span = |id: usize| format!(r#""kind":"begin","name":"gpu.init","span":{id},"gpu":"0000:01:00.0""#);
            let event = |gpu: usize| format!(r#""kind":"event","name":"gpu.usable","gpu":"0000:{gpu:02x}:00.0""#);
            let file = read((0..n).map(span).chain((0..n).map(|i| event(i % 2 + 1))));
            LOOKED_AT.with(|n| n.set(0));
            let boot = Boot::new(&file, &[]);
            assert_eq!((boot.gpus.len(), boot.spans.len(), boot.too_large), (2, n, None));
            LOOKED_AT.with(Cell::get)
        };
        let (some, twice) = (looked_at(2000), looked_at(4000));
        assert!(some > 0 && twice < some * 5 / 2, "{some} and {twice}");
    }

    #[test]
    fn a_boot_over_the_limits_is_known_as_far_as_they_go_and_says_what_is_left_out() {
        let gpu = |n: usize| format!(r#""kind":"event","name":"gpu.found","gpu":"{:04x}:{:02x}:00.0""#, n / 256, n % 256);
        let boot = Boot::new(&read((0..MAX_GPUS + 7).map(gpu)), &[]);
        assert_eq!((boot.gpus.len(), boot.too_large.map(|t| t.gpu_records)), (MAX_GPUS, Some(7)));
        let span = |n: usize| format!(r#""kind":"begin","name":"x","span":{n}"#);
        let boot = Boot::new(&read((0..MAX_SPANS + 5).map(span)), &[]);
        assert_eq!((boot.spans.len(), boot.too_large.map(|t| t.spans)), (MAX_SPANS, Some(5)));
        assert!(crate::host::views::summary::complaints(&boot).iter().any(|c| c.starts_with("too large: 5 span(s) left out")));
        let created = |n: usize| {
            format!(
                r#""kind":"event","name":"container.created","fields":{{"container":"c{n}","import":{{"format":"console","line":1,"error_ns":1}}}}"#
            )
        };
        let boot = Boot::new(&read((0..MAX_CONTAINERS + 3).map(created)), &[]);
        assert_eq!((boot.containers.len(), boot.too_large.map(|t| t.containers)), (MAX_CONTAINERS, Some(3)));
    }

    #[test]
    fn how_a_large_boot_ended_is_known() {
        let event = |name: &str| format!(r#""kind":"event","name":"{name}""#);
        let many = std::iter::repeat_n(event("x"), crate::host::data::budget::MAX_RECORDS + 10);
        let boot = Boot::new(&read(many.chain([event("settled"), event("gpu.xid")])), &[]);
        assert_eq!((boot.settled_ns.is_some(), boot.too_large.map(|t| t.records)), (true, Some(11)));
        assert_eq!(boot.lost.records, 0, "what is left out was not lost");
    }
}
