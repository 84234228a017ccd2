//! A boot as lanes, steps and marks: what every format of `export` writes.
//!
//! Times are ns on the guest's boot clock. Every text is printable ASCII and bounded, whatever the guest sent. Steps are the spans of the stream
//! and, told apart by having no span id, three that are read from pairs of its marks: the kernel until PID 1 starts, the agent from its exec
//! until it is ready, and a container from the first look for its devices until it is there. Wall-clock times are by one clock sample, the
//! best of the boot, so that differences of them are those of the boot clock.

use super::critical_path::critical_path;
use super::lanes::{self, Lane};
use crate::events::record::{Kind, Level, Record, names};
use crate::host::agent_log::{AgentEvent, AgentLine, ClockPoints};
use crate::host::boot_file::{BootFile, HostEvent};
use crate::host::clock::{Clock, Sample, Wall};
use crate::host::model::{Boot, in_time};
use crate::host::rows::{GpuName, Row, Side, Tone, Tracker};
use crate::host::text::{printable, printable_start};
use crate::pci::PciAddress;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Longest text of one field, in bytes.
const MAX_VALUE: usize = 400;
/// Longest text of an error, in bytes.
const MAX_ERROR: usize = 2000;
/// Containers whose waiting is followed.
const MAX_CONTAINERS: usize = 256;
/// Lines of the driver that are kept per GPU that is not usable.
const MAX_WORDS: usize = 8;
/// What comes after the boot's end by less than this share of it still belongs to the picture.
const MARGIN_PERCENT: u64 = 2;

/// A step: from when to when, whose, of which GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The stream's id; None for what is read from marks.
    pub id: Option<u64>,
    pub name: String,
    pub side: Side,
    pub gpu: Option<GpuName>,
    pub begin_ns: u64,
    /// The record of its beginning was lost: `begin_ns` is its end.
    pub begin_lost: bool,
    /// None: still open when the stream ended.
    pub end_ns: Option<u64>,
    /// Its times are those of agent lines that could only be placed approximately.
    pub approximate: bool,
    pub parent: Option<u64>,
    pub after: Vec<u64>,
    pub error: Option<String>,
    pub fields: Vec<(String, String)>,
    pub critical: bool,
    pub lane: usize,
    /// Where in the lane: steps in one row do not overlap.
    pub row: usize,
}

impl Step {
    pub fn took_ns(&self) -> Option<u64> {
        if self.begin_lost { None } else { Some(self.end_ns?.saturating_sub(self.begin_ns)) }
    }

    /// What a reader calls it: the name and the one field that tells it from its like.
    pub fn label(&self) -> String {
        let which = self.fields.iter().find(|(key, _)| key == "module" || key == "container");
        match which {
            Some((_, value)) => format!("{} {value}", self.name),
            None => self.name.clone(),
        }
    }
}

/// Something that happened at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    pub at_ns: u64,
    pub approximate: bool,
    pub name: String,
    pub text: String,
    pub side: Side,
    pub gpu: Option<GpuName>,
    pub tone: Tone,
    /// `show` prints it only with -v.
    pub detail: bool,
    /// The step it happened in.
    pub parent: Option<u64>,
    pub lane: usize,
}

/// Why a GPU failed, in a word, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Why {
    pub reason: String,
    pub cure: Option<String>,
}

/// Everything that is drawn or written of one boot.
#[derive(Clone, Debug)]
pub struct Timeline {
    pub boot: Boot,
    pub lanes: Vec<Lane>,
    /// In order of their beginning.
    pub steps: Vec<Step>,
    /// In order of time.
    pub marks: Vec<Mark>,
    /// All clock samples, in order of the guest's time.
    pub samples: Vec<Sample>,
    /// Why GPUs failed, by the reason's token.
    pub failures: BTreeMap<PciAddress, Why>,
    /// The guest's own wall clock minus its boot clock, by its first `clock` event.
    pub guest_offset_ns: Option<i64>,
    /// What the driver wrote about GPUs that are not usable.
    pub words: BTreeMap<PciAddress, Vec<String>>,
    /// The last time in the stream.
    pub end_ns: u64,
    /// Where the boot was over: a VM goes on for weeks after that.
    pub boot_end_ns: u64,
}

impl Timeline {
    /// Works everything out from a file and, if there is one, the console's agent lines.
    pub fn new(file: &BootFile, agent: &[AgentLine]) -> Self {
        let boot = Boot::new(file, agent);
        let mut samples: Vec<Sample> = file.clock_samples().collect();
        samples.sort_by_key(|sample| sample.boottime_ns);
        let mut reader = Reader::new(&boot);
        for record in in_time(&file.records) {
            reader.record(record);
        }
        reader.agent(agent, &samples);
        reader.collector(file, &samples);
        let Reader { sides, marks, derived, failures, .. } = reader;

        let path: HashSet<u64> = critical_path(&boot).into_iter().collect();
        let name = gpu_names(&boot);
        let mut steps: Vec<Step> = boot
            .spans
            .iter()
            .filter_map(|span| {
                let known_ns = span.begin_ns.or(span.end_ns)?;
                Some(Step {
                    id: Some(span.id),
                    name: printable(&span.name),
                    side: sides.get(&span.id).copied().unwrap_or(Side::Init),
                    gpu: span.gpu.map(&name),
                    begin_ns: known_ns,
                    begin_lost: span.begin_ns.is_none(),
                    // An end before the beginning is no clock's.
                    end_ns: span.end_ns.map(|end| end.max(known_ns)),
                    approximate: false,
                    parent: span.parent,
                    after: span.after.clone(),
                    error: span.error.as_deref().map(error_text),
                    fields: fields(&span.fields, span.gpu.is_some()),
                    critical: path.contains(&span.id),
                    lane: 0,
                    row: 0,
                })
            })
            .collect();
        steps.extend(derived);
        steps.sort_by_key(|step| (step.begin_ns, std::cmp::Reverse(step.end_ns.unwrap_or(u64::MAX)), step.id));
        let mut marks = marks;
        marks.sort_by_key(|mark| mark.at_ns);

        let last_mark = marks.last().map_or(0, |m| m.at_ns);
        let end_ns = steps.iter().map(|s| s.end_ns.unwrap_or(s.begin_ns)).fold(last_mark, u64::max);
        let lanes = lanes::arrange(&boot, &mut steps, &mut marks);
        let words = words(&boot, &marks);
        let boot_end_ns = boot_end(&boot, &steps, end_ns);
        Self { boot, lanes, steps, marks, samples, failures, guest_offset_ns: guest_offset(&file.records), words, end_ns, boot_end_ns }
    }

    /// The sample that all wall-clock times are by: the one with the smallest bound.
    pub fn sample(&self) -> Option<Sample> {
        self.boot.clock.best
    }

    /// The host's wall clock at a time of the guest, with its bound.
    pub fn wall_at(&self, boottime_ns: u64) -> Option<Wall> {
        let sample = self.sample()?;
        let realtime_ns = sample.offset_ns.checked_add(i64::try_from(boottime_ns).ok()?)?;
        Some(Wall { realtime_ns, error_ns: sample.error_at(boottime_ns) })
    }

    /// The boot id, or what stands for one that is not known.
    pub fn boot_id(&self) -> &str {
        self.boot.boot_id.as_deref().unwrap_or("00000000-0000-0000-0000-000000000000")
    }

    /// The steps of the critical path, in order.
    pub fn path(&self) -> impl Iterator<Item = &Step> {
        self.steps.iter().filter(|step| step.critical)
    }
}

/// Names of GPUs by what the whole boot says of them.
fn gpu_names(boot: &Boot) -> impl Fn(PciAddress) -> GpuName + use<> {
    let index: HashMap<PciAddress, Option<u64>> = boot.gpus.iter().map(|gpu| (gpu.address, gpu.index)).collect();
    move |address| GpuName { index: index.get(&address).copied().flatten(), address }
}

/// Takes the stream apart.
struct Reader {
    tracker: Tracker,
    points: ClockPoints,
    sides: HashMap<u64, Side>,
    marks: Vec<Mark>,
    derived: Vec<Step>,
    failures: BTreeMap<PciAddress, Why>,
    gpus: HashSet<PciAddress>,
    init_start_ns: Option<u64>,
    exec_ns: Option<u64>,
}

impl Reader {
    fn new(boot: &Boot) -> Self {
        let exec = boot.spans.iter().find(|s| s.name == names::AGENT_EXEC && s.error.is_none());
        Self {
            tracker: Tracker::default(),
            points: ClockPoints::default(),
            sides: HashMap::new(),
            marks: Vec::new(),
            derived: Vec::new(),
            failures: BTreeMap::new(),
            gpus: boot.gpus.iter().map(|gpu| gpu.address).collect(),
            init_start_ns: None,
            // Not its end: that is when somebody saw it, which on a busy guest can be after the agent is ready.
            exec_ns: exec.and_then(|s| s.begin_ns),
        }
    }

    fn record(&mut self, record: &Record) {
        self.points.add(record);
        let row = self.tracker.row(record);
        match (record.kind, record.span) {
            (Kind::Begin | Kind::End, Some(id)) => {
                self.sides.entry(id).or_insert(row.side);
            }
            (Kind::Event | Kind::Kmsg, _) | (_, None) => {
                if record.name == names::INIT_START && self.init_start_ns.is_none() {
                    self.init_start_ns = Some(record.boottime_ns);
                    self.derived.push(derived("kernel", Side::Kernel, 0, Some(record.boottime_ns)));
                }
                if let (names::GPU_FAILED, Some(gpu)) = (record.name.as_str(), record.gpu) {
                    let field = |key| record.fields.get(key).and_then(Value::as_str).filter(|text| !text.is_empty()).map(error_text);
                    self.failures.insert(gpu, Why { reason: field("reason").unwrap_or_default(), cure: field("cure") });
                }
                // The kernel's lines name every PCI function there is.
                let gpu = row.gpu.filter(|gpu| self.gpus.contains(&gpu.address));
                self.marks.push(mark(&printable(&record.name), Row { gpu, ..row }, record.parent));
            }
        }
    }

    fn agent(&mut self, agent: &[AgentLine], samples: &[Sample]) {
        let mut clock = Clock::default();
        samples.iter().for_each(|sample| clock.add(*sample));
        let mut waiting: BTreeMap<String, Step> = BTreeMap::new();
        for line in agent {
            let Some(placed) = self.points.place(line.realtime_ns, &clock) else { continue };
            let at_ns = placed.boottime_ns;
            let name = match &line.event {
                AgentEvent::Ready => "agent.ready",
                AgentEvent::CdiTryFailed { .. } => "agent.cdi-try-failed",
                AgentEvent::ContainerCreated { .. } => "container.created",
                AgentEvent::ContainerFailed { .. } => "container.failed",
            };
            let row = self.tracker.agent_row(&line.event, at_ns, placed.approximate);
            self.marks.push(mark(name, row, None));
            let field = |key: &str, value: &str| (key.to_string(), printable_start(value.as_bytes(), MAX_VALUE));
            let mut end = |container: &String, more: Vec<(String, String)>, error: Option<String>| {
                let step = waiting.remove(container).map(|mut step| {
                    step.end_ns = Some(at_ns.max(step.begin_ns));
                    step.fields.extend(more);
                    step.error = error;
                    step
                });
                self.derived.extend(step);
            };
            match &line.event {
                AgentEvent::Ready => {
                    if let Some(exec_ns) = self.exec_ns.take().filter(|exec_ns| *exec_ns <= at_ns) {
                        let step = derived("agent.start", Side::Agent, exec_ns, Some(at_ns));
                        self.derived.push(Step { approximate: placed.approximate, ..step });
                    }
                }
                AgentEvent::CdiTryFailed { container, .. } => {
                    if waiting.len() < MAX_CONTAINERS && !waiting.contains_key(container) {
                        let mut step = derived("container", Side::Agent, at_ns, None);
                        step.fields.push(field("container", container));
                        step.approximate = placed.approximate;
                        waiting.insert(container.clone(), step);
                    }
                }
                AgentEvent::ContainerCreated { container, devices, .. } => end(container, vec![field("devices", devices)], None),
                AgentEvent::ContainerFailed { container, devices, error, .. } => {
                    end(container, vec![field("devices", devices)], Some(error_text(error)));
                }
            }
        }
        self.derived.extend(waiting.into_values());
    }

    /// When the collector met the guest: what came before that was replayed.
    fn collector(&mut self, file: &BootFile, samples: &[Sample]) {
        let Some(best) = samples.iter().min_by_key(|sample| sample.error_ns) else { return };
        for line in &file.host {
            if let HostEvent::Connected { peer, .. } = &line.event
                && let Ok(at_ns) = u64::try_from(line.realtime_ns.saturating_sub(best.offset_ns))
            {
                let text = format!("collector connected to {}", printable_start(peer.as_bytes(), MAX_VALUE));
                self.marks.push(mark("collector.connected", Row::plain(at_ns, Side::Host, text), None));
            }
        }
    }
}

fn mark(name: &str, row: Row, parent: Option<u64>) -> Mark {
    let Row { time_ns, approximate, side, gpu, what, tone, detail, .. } = row;
    let text = printable_start(what.as_bytes(), MAX_ERROR);
    Mark { at_ns: time_ns, approximate, name: name.to_string(), text, side, gpu, tone, detail, parent, lane: 0 }
}

fn derived(name: &str, side: Side, begin_ns: u64, end_ns: Option<u64>) -> Step {
    Step {
        id: None,
        name: name.to_string(),
        side,
        gpu: None,
        begin_ns,
        begin_lost: false,
        end_ns,
        approximate: false,
        parent: None,
        after: Vec::new(),
        error: None,
        fields: Vec::new(),
        critical: false,
        lane: 0,
        row: 0,
    }
}

fn error_text(error: &str) -> String {
    printable_start(error.as_bytes(), MAX_ERROR)
}

/// Fields as texts, but for what the step's GPU says already.
fn fields(map: &Map<String, Value>, has_gpu: bool) -> Vec<(String, String)> {
    let text = |value: &Value| match value {
        Value::String(text) => printable_start(text.as_bytes(), MAX_VALUE),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            printable_start(value.to_string().as_bytes(), MAX_VALUE)
        }
    };
    let said = |key: &str| key == "index" && has_gpu;
    map.iter().filter(|(key, _)| !said(key)).map(|(key, value)| (printable_start(key.as_bytes(), MAX_VALUE), text(value))).collect()
}

fn guest_offset(records: &[Record]) -> Option<i64> {
    let clock = records.iter().find(|r| r.kind == Kind::Event && r.name == names::CLOCK)?;
    clock.fields.get("realtime_ns")?.as_i64()?.checked_sub(i64::try_from(clock.boottime_ns).ok()?)
}

/// The driver's own lines about GPUs that failed or hang: those that name their address.
fn words(boot: &Boot, marks: &[Mark]) -> BTreeMap<PciAddress, Vec<String>> {
    let mut words = BTreeMap::new();
    for gpu in boot.gpus.iter().filter(|gpu| gpu.failed.is_some() || gpu.still.is_some()) {
        let address = gpu.address.to_string();
        let of_driver = marks.iter().filter(|m| m.side == Side::Driver && m.name == "kmsg" && !m.detail);
        let lines: Vec<String> = of_driver.filter(|m| m.text.contains(&address)).map(|m| m.text.clone()).take(MAX_WORDS).collect();
        if !lines.is_empty() {
            words.insert(gpu.address, lines);
        }
    }
    words
}

/// The end of the boot: it is settled, and the last container it waited for is there. Of a boot that is not settled, the end of the stream.
fn boot_end(boot: &Boot, steps: &[Step], end_ns: u64) -> u64 {
    let Some(settled_ns) = boot.settled_ns else { return end_ns };
    let begun = steps.iter().filter(|step| step.begin_ns <= settled_ns);
    let done = begun.filter_map(|step| step.end_ns).fold(settled_ns, u64::max);
    let margin = (done / 100).saturating_mul(MARGIN_PERCENT);
    end_ns.min(done.saturating_add(margin))
}

/// The level of a mark as the record's own scale says it.
pub fn level(mark: &Mark) -> Level {
    match mark.tone {
        Tone::Error => Level::Error,
        Tone::Warning => Level::Warn,
        Tone::Plain | Tone::Good if mark.detail => Level::Debug,
        Tone::Plain | Tone::Good => Level::Info,
    }
}
