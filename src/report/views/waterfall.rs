//! A boot as lanes, steps and marks: what `show --html`, `--perfetto` and `--otlp` write.
//!
//! Times are ns on the guest's boot clock, and negative for VMM and firmware. Every text is
//! printable ASCII and bounded, whatever the guest sent. Steps are the spans of the stream and
//! those that the account of the boot works out from other records, which have no span id; the
//! critical path is the account's, too. Wall-clock times are by one clock sample, the best of the
//! boot, so that differences of them are those of the boot clock; their bounds are by all samples,
//! and hold where the host's clock was stepped, too.

pub use super::drawn::{Bar, Mark};
use super::drawn::{MAX_VALUE, field_text};
use super::lanes;
use super::lanes::Lane;
use super::rows::{Row, Tone, Tracker, owner_of};
use crate::analysis::critical_path;
use crate::analysis::verdict::user_end;
use crate::boot::gpu_name::GpuName;
use crate::boot::intervals::ns;
use crate::boot::model::Boot;
use crate::boot::timeline;
use crate::data::agent_log::AgentEvent;
use crate::data::boot_file::{BootFile, TraceId};
use crate::data::clock_offset::{Clock, Sample, Wall};
use crate::data::compact_record::{Record, SpanFields, in_time};
use crate::data::text::{printable, printable_start};
use kata_gpu_wire::catalogue::{Owner, derived};
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::Kind;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Longest text of an error, in bytes.
const MAX_ERROR: usize = 2000;
/// Lines of the driver that are kept per GPU that is not usable.
const MAX_WORDS: usize = 8;
/// Time behind the boot's end that still belongs to the picture, as a share of the boot.
const MARGIN_PERCENT: i64 = 2;

/// Events whose fields every format has, one by one: they are values to compare, and many.
const REPORTS: [&str; 3] = [names::GPU_HEALTH, names::GPU_SETTING, names::CONFIDENTIAL];

/// A piece of the critical path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index in `steps`; `None` for time between two steps.
    pub step: Option<usize>,
    pub begin_ns: i64,
    pub took_ns: u64,
}

/// Everything that is drawn or written of one boot.
#[derive(Clone, Debug)]
pub struct Waterfall {
    pub boot: Boot,
    /// The id that the collector drew for the boot's OTLP trace.
    pub trace: Option<TraceId>,
    pub lanes: Vec<Lane>,
    /// In order of their beginning.
    pub steps: Vec<Bar>,
    /// Critical path: pieces of time that the end of the boot waited for, in order; no piece
    /// overlaps another.
    pub path: Vec<Piece>,
    /// In order of time.
    pub marks: Vec<Mark>,
    /// All clock samples, in order of the guest's time.
    pub samples: Vec<Sample>,
    /// The guest's own wall clock minus its boot clock, by its first `clock` event.
    pub guest_offset_ns: Option<i64>,
    /// Lines of the driver about GPUs that are not usable.
    pub words: BTreeMap<PciAddress, Vec<String>>,
    /// First time of the boot: 0, or when the VM started.
    pub begin_ns: i64,
    /// The last time in the stream.
    pub end_ns: i64,
    /// End of the boot: a VM goes on for weeks after that.
    pub boot_end_ns: i64,
}

impl Waterfall {
    /// Works everything out from a file and its boot.
    pub fn new(file: &BootFile, boot: Boot) -> Self {
        let mut samples: Vec<Sample> = file.clock_samples().collect();
        samples.sort_by_key(|sample| sample.boottime_ns);
        let mut reader = Reader::new(&boot);
        for record in in_time(&file.records) {
            reader.record(record);
        }
        reader.agent(&boot);
        reader.collector(file, &boot.host_clock);
        let mut marks = reader.marks;

        let account = &boot.timeline;
        // Without two milestones there is nothing that a path could lead to.
        let pieces = account.window(None, user_end(account)).map_or_else(
            |_| Vec::new(),
            |window| critical_path::critical_path(account, &window, 0).path,
        );
        let on_path: HashSet<usize> = pieces.iter().filter_map(|piece| piece.index).collect();
        let spans = account.steps.iter().enumerate();
        let spans: HashMap<u64, usize> = spans.filter_map(|(i, s)| Some((s.span?, i))).collect();
        let name = gpu_names(&boot);
        let mut steps: Vec<Bar> = boot
            .spans
            .iter()
            .filter_map(|span| {
                let known_ns = ns(span.begin_ns.or(span.end_ns)?);
                let account = spans.get(&span.id).copied();
                Some(Bar {
                    id: Some(span.id),
                    name: printable(&span.name),
                    owner: owner_of(&span.name),
                    gpu: span.gpu.map(&name),
                    begin_ns: known_ns,
                    begin_lost: span.begin_ns.is_none(),
                    // An end before the beginning is no clock's.
                    end_ns: span.end_ns.map(|end| ns(end).max(known_ns)),
                    approximate: false,
                    parent: span.parent,
                    after: span.after.clone(),
                    error: span.error.as_deref().map(error_text),
                    fields: fields(&span.fields, span.gpu.is_some()),
                    critical: account.is_some_and(|i| on_path.contains(&i)),
                    account,
                    lane: 0,
                    row: 0,
                })
            })
            .collect();
        let worked_out = account
            .steps
            .iter()
            .enumerate()
            .filter(|(_, step)| step.span.is_none());
        steps.extend(
            worked_out
                .map(|(i, step)| derived(i, step, &account.steps, &boot, on_path.contains(&i))),
        );
        steps.sort_by_key(|step| {
            (
                step.begin_ns,
                std::cmp::Reverse(step.end_ns.unwrap_or(i64::MAX)),
                step.id,
            )
        });
        marks.sort_by_key(|mark| mark.at_ns);

        let last_mark = marks.last().map_or(0, |m| m.at_ns);
        let end_ns = steps
            .iter()
            .map(|s| s.end_ns.unwrap_or(s.begin_ns))
            .fold(last_mark, i64::max);
        let begin_ns = steps.first().map_or(0, |step| step.begin_ns.min(0));
        let lanes = lanes::arrange(&boot, &mut steps, &mut marks);
        let words = words(&boot, &marks);
        let boot_end_ns = boot_end(&boot, &steps, end_ns);
        let path = path(&pieces, &steps);
        Self {
            boot,
            trace: file.trace(),
            lanes,
            steps,
            path,
            marks,
            samples,
            guest_offset_ns: guest_offset(&file.records),
            words,
            begin_ns,
            end_ns,
            boot_end_ns,
        }
    }

    /// The sample that all wall-clock times are by: the one with the smallest bound.
    pub fn sample(&self) -> Option<Sample> {
        self.boot.clock.best
    }

    /// The host's wall clock at a time of the guest, with its bound: as far as it may be from what
    /// all samples say together.
    pub fn wall_at(&self, at_ns: i64) -> Option<Wall> {
        let realtime_ns = self.sample()?.offset_ns.checked_add(at_ns)?;
        let before = self.boot.clock.before_kernel;
        let before_error_ns = before.map_or(0, |before| before.error_ns);
        let known = self.boot.host_clock.wall_around(at_ns, before_error_ns)?;
        Some(Wall {
            realtime_ns,
            error_ns: known
                .error_ns
                .saturating_add(known.realtime_ns.abs_diff(realtime_ns)),
        })
    }

    /// The bound of the sample at its own time; where clocks were stepped, what it is at the worst.
    pub fn clock_error_ns(&self) -> Option<u64> {
        let sample = self.sample()?;
        let everywhere = self
            .samples
            .iter()
            .filter(|_| self.boot.clock.steps > 0)
            .filter_map(|s| Some(self.wall_at(ns(s.boottime_ns))?.error_ns));
        Some(everywhere.fold(sample.error_ns, u64::max))
    }

    /// The boot id, or what stands for one that is not known.
    pub fn boot_id(&self) -> &str {
        self.boot
            .boot_id
            .as_deref()
            .unwrap_or("00000000-0000-0000-0000-000000000000")
    }
}

/// Names of GPUs by what the whole boot says of them.
fn gpu_names(boot: &Boot) -> impl Fn(PciAddress) -> GpuName + use<> {
    let index: HashMap<PciAddress, Option<u64>> = boot
        .gpus
        .iter()
        .map(|gpu| (gpu.address, gpu.index))
        .collect();
    move |address| GpuName {
        index: index.get(&address).copied().flatten(),
        address,
    }
}

/// Takes the stream apart.
struct Reader {
    tracker: Tracker,
    marks: Vec<Mark>,
    gpus: HashSet<PciAddress>,
}

impl Reader {
    fn new(boot: &Boot) -> Self {
        Self {
            tracker: Tracker::default(),
            marks: Vec::new(),
            gpus: boot.gpus.iter().map(|gpu| gpu.address).collect(),
        }
    }

    fn record(&mut self, record: &Record) {
        let row = self.tracker.row(record);
        match (record.kind, record.span) {
            (Kind::Begin | Kind::End, Some(_)) => {}
            (Kind::Event | Kind::Kmsg, _) | (_, None) => {
                // The kernel's lines name every PCI function there is.
                let gpu = row.gpu.filter(|gpu| self.gpus.contains(&gpu.address));
                let is_report =
                    record.kind == Kind::Event && REPORTS.contains(&record.name.as_str());
                let reported = is_report.then(|| record.fields.clone());
                self.marks.push(Mark {
                    reported,
                    ..mark(&printable(&record.name), Row { gpu, ..row }, record.parent)
                });
            }
        }
    }

    fn agent(&mut self, boot: &Boot) {
        for (event, placed) in boot.agent_moments() {
            let name = match event {
                AgentEvent::Start { .. } => "agent.start",
                AgentEvent::Ready => "agent.ready",
                AgentEvent::Rpc { .. } => "agent.rpc",
                AgentEvent::ContainerAsked { .. } => "container.asked",
                AgentEvent::CdiTryFailed { .. } => "agent.cdi-try-failed",
                AgentEvent::Injected { .. } => "container.injected",
                AgentEvent::ContainerCreated { .. } => "container.created",
                AgentEvent::ContainerStarted { .. } => "container.started",
                AgentEvent::ContainerFailed { .. } => "container.failed",
                AgentEvent::HookFailed { .. } => "agent.hook-failed",
                AgentEvent::Bound(_) => "agent.uevent",
            };
            let row = self.tracker.agent_row(event, placed);
            self.marks.push(mark(name, row, None));
        }
    }

    /// When the collector met the guest: what came before that was replayed.
    fn collector(&mut self, file: &BootFile, clock: &Clock) {
        for (at_ns, peer) in file.connections(clock) {
            let text = format!(
                "collector connected to {}",
                printable_start(peer, MAX_VALUE)
            );
            let row = Row::plain(at_ns, Owner::Host, text);
            self.marks.push(mark("collector.connected", row, None));
        }
    }
}

fn mark(name: &str, row: Row, parent: Option<u64>) -> Mark {
    let Row {
        time_ns,
        approximate,
        owner,
        gpu,
        what,
        tone,
        detail,
        ..
    } = row;
    let text = printable_start(&what, MAX_ERROR);
    Mark {
        at_ns: ns(time_ns),
        approximate,
        name: name.to_string(),
        text,
        owner,
        gpu,
        tone,
        detail,
        parent,
        lane: 0,
        reported: None,
    }
}

/// A step that the account has worked out. Facts about a container stand beside its steps.
fn derived(
    at: usize,
    step: &timeline::Step,
    all: &[timeline::Step],
    boot: &Boot,
    critical: bool,
) -> Bar {
    let mut fields = Vec::new();
    let mut error = None;
    if let Some(host) = step.traced.and_then(|at| boot.host.as_ref()?.steps.get(at)) {
        fields = host.fields();
    } else if !step.detail.is_empty() {
        fields.push(("container".to_string(), step.detail.clone()));
        if let Some(container) = boot.containers.iter().find(|c| c.name == step.detail) {
            fields.push((
                "devices".to_string(),
                printable_start(&container.devices, MAX_VALUE),
            ));
            // Looking into the request is over when a container fails.
            let over = step.name == derived::CONTAINER_RESOLVE;
            error = container.error.as_deref().filter(|_| !over).map(error_text);
        }
    }
    Bar {
        id: None,
        name: step.name.clone(),
        owner: step.row.owner,
        gpu: step.gpu,
        begin_ns: step.begin_ns,
        begin_lost: false,
        end_ns: (!step.open).then_some(step.end_ns),
        approximate: step.approximate,
        parent: step.parent.and_then(|parent| all.get(parent)?.span),
        after: Vec::new(),
        error,
        fields,
        critical,
        account: Some(at),
        lane: 0,
        row: 0,
    }
}

/// The account's path in terms of `steps`.
fn path(pieces: &[critical_path::Piece], steps: &[Bar]) -> Vec<Piece> {
    let bars = steps.iter().enumerate();
    let bars: HashMap<usize, usize> = bars.filter_map(|(i, s)| Some((s.account?, i))).collect();
    let piece = |piece: &critical_path::Piece| Piece {
        step: piece.index.and_then(|index| bars.get(&index).copied()),
        begin_ns: piece.begin_ns,
        took_ns: piece.took_ns,
    };
    pieces.iter().map(piece).collect()
}

fn error_text(error: &str) -> String {
    printable_start(&error, MAX_ERROR)
}

/// Fields as texts, but for what the step's GPU says already.
fn fields(fields: &SpanFields, has_gpu: bool) -> Vec<(String, String)> {
    let said = |key: &str| key == "index" && has_gpu;
    fields
        .iter()
        .filter(|(key, _)| !said(key))
        .map(|(key, field)| (field_text(key), field_text(field.shown())))
        .collect()
}

fn guest_offset(records: &[Record]) -> Option<i64> {
    let clock = records
        .iter()
        .find(|r| r.kind == Kind::Event && r.name == names::CLOCK)?;
    clock
        .fields
        .get("realtime_ns")?
        .as_i64()?
        .checked_sub(i64::try_from(clock.boottime_ns).ok()?)
}

/// The driver's own lines about GPUs that failed or hang: those that name their address.
fn words(boot: &Boot, marks: &[Mark]) -> BTreeMap<PciAddress, Vec<String>> {
    let mut words = BTreeMap::new();
    let of_driver: Vec<&Mark> = marks
        .iter()
        .filter(|m| m.owner == Owner::Driver && m.name == "kmsg" && !m.detail)
        .collect();
    // Take as many GPUs as have a lane: a stream may name any number of GPUs, and each is searched
    // for in every line.
    let unusable = boot
        .gpus
        .iter()
        .filter(|gpu| gpu.failed.is_some() || gpu.still.is_some())
        .take(lanes::MAX_GPU_LANES);
    for gpu in unusable {
        let address = gpu.address.to_string();
        let about = of_driver.iter().filter(|m| m.text.contains(&address));
        let lines: Vec<String> = about
            .map(|m| printable_start(&m.text, MAX_VALUE))
            .take(MAX_WORDS)
            .collect();
        if !lines.is_empty() {
            words.insert(gpu.address, lines);
        }
    }
    words
}

/// End of the boot: it is settled, and the last container it waited for is there. The end of the
/// stream where the boot is not settled.
fn boot_end(boot: &Boot, steps: &[Bar], end_ns: i64) -> i64 {
    let Some(settled_ns) = boot.settled_ns.map(ns) else {
        return end_ns;
    };
    let begun = steps.iter().filter(|step| step.begin_ns <= settled_ns);
    let done = begun
        .filter_map(|step| step.end_ns)
        .fold(settled_ns, i64::max);
    let margin = (done / 100).saturating_mul(MARGIN_PERCENT);
    end_ns.min(done.saturating_add(margin))
}

/// The level of a mark, as records write it.
pub fn level(mark: &Mark) -> &'static str {
    match mark.tone {
        Tone::Error => "error",
        Tone::Warning => "warn",
        Tone::Plain | Tone::Good if mark.detail => "debug",
        Tone::Plain | Tone::Good => "info",
    }
}
