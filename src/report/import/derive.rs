//! Turns facts into records on the base clock, in order of time. Pure.
//!
//! Lines of our init, where the logs have any, are the steps; kernel lines are then only kept as
//! they are. Otherwise lines of the kernel, the driver, NVRC and the agent give the steps.
//!
//! `enabling device` is printed just before the write that makes the host map a GPU's BARs; nothing
//! is printed when the write returns. The end is the first sign of the return, and is stored with
//! it: the next kernel line of that GPU, the agent's uevent of its binding, the next GPU's enabling
//! (the driver probes one after another), or the driver's line at the end of its load.
//!
//! The meaning of a failure is the catalogue's ([`failure`]): it gets the driver's messages and all
//! facts that the log states.

use super::clocks::Placed;
use super::driver_said::DriverSaid;
use super::facts::{Fact, InitLine, Item, Stamp, cut};
use super::guest_facts::GuestFacts;
use super::kernel_lines::Meaning;
use crate::data::agent_log::AgentEvent;
use crate::data::imported_record::{MARK, parts};
use kata_gpu_wire::catalogue::logged as own;
use kata_gpu_wire::driver_log;
use kata_gpu_wire::failure;
use kata_gpu_wire::failure::{Diagnosis, FailedStep, Reason};
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::{Kind, Level, Record};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Longest text of a kernel line in a record.
const MAX_TEXT: usize = 1000;

/// Makes records of facts in order of time. `steps_of_init`: lines of our init are the steps.
pub fn derive(items: &[(Placed, &Item)], steps_of_init: bool) -> Vec<Record> {
    let mut maker = Maker {
        guest: GuestFacts::of(items),
        steps_of_init,
        ..Maker::default()
    };
    for (placed, item) in items {
        maker.now = Source::of(*placed, item);
        maker.take(item);
    }
    maker.report_without_room();
    // Sort by time; records of one time keep the order in which they were written.
    maker.drafts.sort_by_key(|draft| draft.source.placed.at_ns);
    maker.drafts.into_iter().map(Draft::finish).collect()
}

/// Time, file and line of a record.
#[derive(Clone, Copy, Default)]
struct Source {
    placed: Placed,
    file: usize,
    line: u64,
}

impl Source {
    fn of(placed: Placed, item: &Item) -> Self {
        let (file, line) = (item.file, item.line);
        Self { placed, file, line }
    }
}

/// A record in the making.
struct Draft {
    source: Source,
    record: Record,
}

impl Draft {
    fn finish(self) -> Record {
        let Self { source, mut record } = self;
        let Placed { at_ns, error_ns } = source.placed;
        record.boottime_ns = u64::try_from(at_ns).unwrap_or(0);
        // Insert the mark last, so that no field of a line can replace it.
        let mark = json!({ "file": source.file, "line": source.line, "error_ns": error_ns });
        record.fields.insert(MARK.into(), mark);
        if at_ns < 0 && record.kind != Kind::End {
            let before_ms = at_ns.unsigned_abs() / 1_000_000;
            record.fields.insert("before_ms".into(), before_ms.into());
        }
        record
    }
}

#[derive(Default)]
struct Maker {
    guest: GuestFacts,
    steps_of_init: bool,
    drafts: Vec<Draft>,
    /// Source of the next record.
    now: Source,
    spans: u64,
    /// Spans that have begun and not ended, by what begins and ends them.
    open: HashMap<String, Vec<u64>>,
    /// GPUs whose enabling has begun and not ended.
    enabling: BTreeSet<PciAddress>,
    said: DriverSaid,
    /// GPUs whose enumeration or enabling has come: others are plugged later.
    present: BTreeSet<PciAddress>,
    /// BARs without room, with their bytes.
    without_room: BTreeMap<PciAddress, BTreeMap<u8, u64>>,
    /// The kernel's last line about each of these GPUs.
    no_room: BTreeMap<PciAddress, (Source, String)>,
    /// Whether a line of the driver's load has come.
    has_driver: bool,
    failed: BTreeSet<PciAddress>,
    /// Reasons of the guest's end that are reported.
    ended: BTreeSet<&'static str>,
    /// Whether all GPUs are usable or failed.
    is_settled: bool,
    /// Whether a container was created: a guest that powers off then has done its work.
    has_container: bool,
    /// NVSwitch that is probed.
    switch: Option<String>,
    /// Waiting containers, with the tries that failed.
    waits: HashMap<String, u64>,
    marks: u64,
    /// Last mark of an initialisation, whose end no line has shown yet.
    mark: Option<Source>,
}

impl Maker {
    fn record(&mut self, kind: Kind, name: &str) -> &mut Record {
        let at = self.drafts.len();
        self.drafts.push(Draft {
            source: self.now,
            record: Record::new(kind, name),
        });
        &mut self.drafts[at].record
    }

    fn event(&mut self, name: &str) -> &mut Record {
        self.record(Kind::Event, name)
    }

    /// An event of a GPU, with its CDI name.
    fn gpu_event(&mut self, name: &str, gpu: PciAddress) -> &mut Record {
        let index = self.guest.gpus.iter().position(|known| *known == gpu);
        let record = self.event(name);
        record.gpu = Some(gpu);
        record.fields = fields([("index", json!(index))]);
        record
    }

    /// Begins a span; `key` identifies its end.
    fn begin(&mut self, name: &str, key: &str) -> &mut Record {
        self.spans += 1;
        let span = self.spans;
        self.open
            .entry(format!("{name} {key}"))
            .or_default()
            .push(span);
        let record = self.record(Kind::Begin, name);
        record.span = Some(span);
        record
    }

    /// Ends a span; without a beginning it is one whose beginning was lost.
    fn end(&mut self, name: &str, key: &str) -> &mut Record {
        let begun = self
            .open
            .get_mut(&format!("{name} {key}"))
            .and_then(Vec::pop);
        self.spans += u64::from(begun.is_none());
        let span = begun.unwrap_or(self.spans);
        let record = self.record(Kind::End, name);
        record.span = Some(span);
        record
    }

    /// Ends the span that this field identifies; its beginning, if there is one, has the field.
    fn end_named(&mut self, name: &str, (key, value): (&str, &str)) {
        let begun = self.open.get(&format!("{name} {value}"));
        let begun = begun.is_some_and(|spans| !spans.is_empty());
        let record = self.end(name, value);
        if !begun {
            record.fields = fields([(key, value.into())]);
        }
    }

    fn take(&mut self, item: &Item) {
        match &item.fact {
            Fact::Kernel { text, meaning } => self.kernel(item.stamp, text, meaning),
            Fact::Init(line) => self.init(line),
            Fact::Agent(event) => self.agent(event),
            Fact::Runtime(event) => {
                let record = self.event(event.name);
                if event.error.is_some() {
                    record.level = Level::Error;
                } else if event.name == own::SANDBOX_LOG {
                    record.level = Level::Warn;
                }
                (record.error, record.fields) = (event.error.clone(), event.fields.clone());
            }
        }
    }

    fn init(&mut self, line: &InitLine) {
        let key = format!("{:?}", line.gpu);
        self.begin_before(line, &key);
        let record = match line.kind {
            Kind::Begin => self.begin(&line.name, &key),
            Kind::End => self.end(&line.name, &key),
            Kind::Event | Kind::Kmsg => self.event(&line.name),
        };
        (record.level, record.gpu, record.error) = (line.level, line.gpu, line.error.clone());
        record.fields = line.fields.clone();
    }

    /// Begins a span whose end says how long it took, and whose beginning no line has.
    fn begin_before(&mut self, line: &InitLine, key: &str) {
        let open = self.open.get(&format!("{} {key}", line.name));
        let is_open = open.is_some_and(|spans| !spans.is_empty());
        let took_ns = line.took_ns.and_then(|took| i64::try_from(took).ok());
        let Some(took_ns) = took_ns.filter(|_| line.kind == Kind::End && !is_open) else {
            return;
        };
        let end = self.now;
        self.now.placed.at_ns = end.placed.at_ns.saturating_sub(took_ns);
        let record = self.begin(&line.name, key);
        (record.gpu, record.fields) = (line.gpu, line.fields.clone());
        self.now = end;
    }

    fn kernel(&mut self, stamp: Stamp, text: &str, meaning: &Meaning) {
        if let Meaning::Nvrc { text } = meaning {
            let record = self.event(own::NVRC);
            record.level = Level::Debug;
            record.fields = fields([("text", cut(text, MAX_TEXT).into())]);
            return;
        }
        if *meaning == Meaning::Function {
            return;
        }
        let gpu = driver_log::address(text).filter(|gpu| self.guest.gpus.contains(gpu));
        self.said.add(gpu, text);
        self.enablings_end(gpu, meaning);
        let printk_us = match stamp {
            Stamp::Kernel(ns) => Some(ns / 1000),
            _ => None,
        };
        let record = self.record(Kind::Kmsg, "kmsg");
        record.gpu = gpu;
        let text_cut = cut(text, MAX_TEXT).into();
        record.fields = fields([("text", text_cut), ("printk_us", json!(printk_us))]);
        if !self.steps_of_init {
            self.switch_ends(meaning);
            self.step(meaning, text);
        }
        if *meaning == Meaning::Ended {
            self.guest_ends(text);
        }
    }

    /// Ends the enablings whose return this line of `gpu` shows.
    fn enablings_end(&mut self, gpu: Option<PciAddress>, of: &Meaning) {
        if let Some(gpu) = gpu {
            self.enabling_ends(gpu, "next line of this GPU");
        }
        let by = match of {
            Meaning::Enabling { driver: true, .. } => "next GPU's enabling",
            Meaning::ModuleLoaded => "end of the module's load",
            _ => return,
        };
        for gpu in self.enabling.clone() {
            self.enabling_ends(gpu, by);
        }
    }

    fn enabling_ends(&mut self, gpu: PciAddress, by: &str) {
        if self.enabling.remove(&gpu) {
            let record = self.end(names::GPU_ENABLE, &gpu.to_string());
            record.gpu = Some(gpu);
            record.fields = fields([("until", by.into())]);
        }
    }

    fn step(&mut self, meaning: &Meaning, text: &str) {
        match meaning {
            Meaning::RunInit { program } => {
                let record = self.event(names::INIT_START);
                record.fields = fields([("program", cut(program, MAX_TEXT).into())]);
            }
            Meaning::GpuFound { gpu, device } => {
                self.present.insert(*gpu);
                let record = self.gpu_event(names::GPU_FOUND, *gpu);
                record
                    .fields
                    .insert("device".into(), device.as_str().into());
            }
            Meaning::Enabling {
                function: gpu,
                driver,
            } if self.guest.gpus.contains(gpu) => {
                if *driver {
                    self.said.boundary();
                }
                self.present.insert(*gpu);
                self.enabling.insert(*gpu);
                self.begin(names::GPU_ENABLE, &gpu.to_string()).gpu = Some(*gpu);
            }
            Meaning::ModuleBegins => {
                self.has_driver = true;
                self.said.boundary();
                let record = self.begin(names::MODULE_LOAD, "nvidia");
                record.fields = fields([("module", "nvidia".into())]);
            }
            Meaning::ModuleLoaded => {
                self.has_driver = true;
                self.end_named(names::MODULE_LOAD, ("module", "nvidia"));
            }
            Meaning::NoGpuTaken => {
                self.no_gpu_taken(text);
                let is_gone = text.starts_with("nvidia-nvlink: Unregistered");
                let load = self.open.get("module.load nvidia");
                if is_gone && load.is_some_and(|spans| !spans.is_empty()) {
                    self.end(names::MODULE_LOAD, "nvidia").error = Some("unloaded again".into());
                }
            }
            Meaning::SwitchProbe { function } => {
                let function = function.to_string();
                let record = self.begin(own::SWITCH_PROBE, &function);
                record.fields = fields([("function", function.as_str().into())]);
                self.switch = Some(function);
            }
            Meaning::NoRoom {
                function,
                bar,
                bytes,
            } => {
                if self.guest.gpus.contains(function) {
                    let bars = self.without_room.entry(*function).or_default();
                    bars.insert(*bar, *bytes);
                    let line = (self.now, text.to_string());
                    self.no_room.insert(*function, line);
                }
            }
            Meaning::BarAssigned { function, bar } => {
                if let Some(bars) = self.without_room.get_mut(function) {
                    bars.remove(bar);
                }
            }
            Meaning::UvmLoaded => {
                self.end_named(names::MODULE_LOAD, ("module", "nvidia_uvm"));
            }
            Meaning::CtkBegins => {
                self.initialisation_ends("start of nvidia-ctk");
                let record = self.begin(names::CDI_PUBLISH, "nvidia-ctk");
                record.fields = fields([("by", "nvidia-ctk".into())]);
            }
            Meaning::CtkDone => {
                self.end_named(names::CDI_PUBLISH, ("by", "nvidia-ctk"));
                self.settled("nvidia-ctk");
            }
            Meaning::Xid { gpu, xid } => {
                let record = self.event(names::GPU_XID);
                (record.gpu, record.level) = (Some(*gpu), Level::Error);
                record.fields = fields([("xid", json!(xid))]);
            }
            Meaning::InitMark => {
                self.said.boundary();
                self.initialisation_ends("next mark");
                self.mark = Some(self.now);
                self.marks += 1;
                let nth = json!(self.marks);
                self.event(own::GPU_INIT_MARK).fields = fields([("nth", nth)]);
            }
            Meaning::InitFailed { gpu } => {
                self.initialisation_ends("failure of an initialisation");
                self.gpu_failed(*gpu, FailedStep::Init, text);
                self.said.boundary();
            }
            Meaning::ProbeFailed { gpu } => {
                self.gpu_failed(*gpu, FailedStep::Probe, text);
                self.said.boundary();
            }
            Meaning::Banner { .. }
            | Meaning::Enabling { .. }
            | Meaning::Function
            | Meaning::Confidential
            | Meaning::Nvrc { .. }
            | Meaning::Ended
            | Meaning::Other => {}
        }
    }

    /// Adds a span from the last mark to here: the driver initialises one GPU after another, and no
    /// line names the GPU. A mark without an end is only an event.
    fn initialisation_ends(&mut self, until: &str) {
        if let Some(mark) = self.mark.take() {
            let now = std::mem::replace(&mut self.now, mark);
            self.begin(names::GPU_INIT, "");
            self.now = now;
            self.end(names::GPU_INIT, "").fields = fields([("until", until.into())]);
        }
    }

    fn gpu_failed(&mut self, gpu: PciAddress, step: FailedStep, text: &str) {
        // Report the first failure only: later tries fail again.
        if !self.failed.insert(gpu) {
            return;
        }
        let facts = self.guest.of_gpu(Some(gpu));
        // The driver probes one GPU after another, and so does NVRC initialise them.
        let is_serial = step == FailedStep::Probe || self.guest.is_nvrcs;
        let is_alone = self.guest.gpus.len() < 2;
        let general = failure::of_gpu::<&str>(step, &[], &facts).reason;
        let decides = |text: &str| failure::of_gpu(step, &[text], &facts).reason != general;
        let mut offer = self.said.offer(gpu, is_alone, is_serial, decides);
        if offer.messages.is_empty() {
            offer.messages.push(text.to_string());
        }
        let found = failure::of_gpu(step, &offer.messages, &facts);
        let words = cut(found.words.unwrap_or(text), MAX_TEXT);
        let nearby = Some(offer.nearby.join(" | ")).filter(|text| !text.is_empty());
        let nearby = nearby.map(|text| cut(&text, MAX_TEXT));
        let bars = self.without_room.get(&gpu).map(bars_text);
        let bars = bars.filter(|text| !text.is_empty());
        let record = self.event(names::GPU_FAILED);
        (record.gpu, record.level) = (Some(gpu), Level::Error);
        record.error = Some(format!("{}: {words}", found.reason));
        record.fields = diagnosis(&found);
        record.fields.extend(fields([
            ("step", step.name().into()),
            ("words", words.into()),
            ("nearby", json!(nearby)),
            ("bars", json!(bars)),
        ]));
    }

    /// Reports GPUs whose BARs found no room, where the log ends before a driver could say so.
    fn report_without_room(&mut self) {
        if self.is_settled || self.steps_of_init || self.has_driver {
            return;
        }
        for (gpu, (at, text)) in std::mem::take(&mut self.no_room) {
            let bars = self.without_room.get(&gpu);
            if bars.is_some_and(|bars| !bars.is_empty()) {
                self.now = at;
                self.gpu_failed(gpu, FailedStep::Probe, &text);
            }
        }
    }

    /// Takes the driver's word that it has none of the GPUs: all that have not failed are refused.
    fn no_gpu_taken(&mut self, text: &str) {
        let refused: Vec<PciAddress> = (&self.guest.gpus - &self.failed).into_iter().collect();
        let messages = self.said.without_gpu();
        if self.is_settled || self.ended.contains(Reason::NoGpu.name()) {
            return;
        }
        if self.guest.gpus.is_empty() {
            let facts = self.guest.of_gpu(None);
            let found = failure::of_gpu(FailedStep::Module, &messages, &facts);
            let is_unnamed =
                [Reason::DriverFindsNoGpu, Reason::DriverLoadFailed].contains(&found.reason);
            // The driver counts the GPUs on the bus before it probes any; the enumeration shows
            // the same.
            let is_absent = text.contains("No NVIDIA GPU found") || self.guest.has_enumeration;
            let found = match is_unnamed && is_absent {
                true => Diagnosis::known(Reason::NoGpu, Some(text)),
                false => found,
            };
            return self.guest_ended(&found, text);
        }
        let are_alike = self.guest.are_alike();
        let is_here = |gpu: &PciAddress| !self.guest.has_enumeration || self.present.contains(gpu);
        let refused: Vec<PciAddress> = refused.into_iter().filter(is_here).collect();
        for gpu in refused {
            if !are_alike {
                self.said.boundary();
            }
            self.gpu_failed(gpu, FailedStep::Probe, text);
        }
    }

    /// Takes a line that shows the guest's end.
    fn guest_ends(&mut self, text: &str) {
        let Some(found) = failure::of_guest(text) else {
            return;
        };
        // A guest whose pod is deleted powers off, too, and our init reports why it does.
        let is_plain = found.reason == Reason::PoweredOff;
        if !(is_plain && (self.has_container || self.steps_of_init)) {
            self.guest_ended(&found, text);
        }
        // NVRC's panic has the error of the program that failed.
        if text.contains("panicked at") {
            let panic = Diagnosis::known(Reason::NvrcPanic, Some(text));
            self.guest_ended(&panic, text);
        }
    }

    /// Reports the guest's end, once for each reason.
    fn guest_ended(&mut self, found: &Diagnosis, text: &str) {
        if !self.ended.insert(found.reason.name()) {
            return;
        }
        let words = cut(found.words.unwrap_or(text), MAX_TEXT);
        let record = self.event(own::GUEST_ENDED);
        record.level = Level::Error;
        record.error = Some(words);
        record.fields = diagnosis(found);
    }

    /// Reports that all GPUs are usable or failed: whoever published them, or gave one to a
    /// container, had initialised them, and wrote all GPUs or none.
    fn settled(&mut self, by: &str) {
        if std::mem::replace(&mut self.is_settled, true) || self.guest.gpus.is_empty() {
            return;
        }
        let usable: Vec<PciAddress> = (&self.guest.gpus - &self.failed).into_iter().collect();
        for gpu in &usable {
            for name in [names::GPU_PUBLISHED, names::GPU_USABLE] {
                let record = self.gpu_event(name, *gpu);
                record.fields.insert("by".into(), by.into());
            }
        }
        let counts = [usable.len(), self.failed.len()].map(|count| json!(count));
        let [usable, failed] = counts;
        self.event(names::SETTLED).fields =
            fields([("usable", usable), ("failed", failed), ("by", by.into())]);
    }

    /// Ends the probe of an NVSwitch at the next step of the load.
    fn switch_ends(&mut self, meaning: &Meaning) {
        let is_next = matches!(
            meaning,
            Meaning::SwitchProbe { .. }
                | Meaning::Enabling { driver: true, .. }
                | Meaning::ModuleLoaded
                | Meaning::NoGpuTaken
                | Meaning::ProbeFailed { .. }
        );
        if let Some(function) = self.switch.take_if(|_| is_next) {
            self.end(own::SWITCH_PROBE, &function);
        }
    }

    fn agent(&mut self, event: &AgentEvent) {
        match event {
            AgentEvent::CdiTryFailed {
                container, attempt, ..
            } => {
                let before = self.waits.insert(container.clone(), *attempt);
                if before.is_none() {
                    let record = self.begin(own::AGENT_CDI_WAIT, container);
                    record.fields = fields([("container", json!(container))]);
                }
            }
            AgentEvent::Injected { container } => self.wait_ends(container, None),
            AgentEvent::ContainerCreated {
                container,
                devices,
                pause,
                ..
            } => {
                self.wait_ends(container, None);
                self.has_container |= !pause;
                if !self.steps_of_init && devices.contains("nvidia.com/") {
                    self.settled("kata-agent");
                }
            }
            AgentEvent::ContainerFailed {
                container, error, ..
            } => self.wait_ends(container, Some(error)),
            AgentEvent::Bound(gpu) => {
                self.enabling_ends(*gpu, "bind uevent");
                if !self.steps_of_init && self.guest.gpus.contains(gpu) {
                    self.gpu_event(names::GPU_BOUND, *gpu);
                }
            }
            _ => {}
        }
        let Some((name, error, fields)) = parts(event) else {
            return;
        };
        let record = self.event(&name);
        (record.error, record.fields) = (error, fields);
        if let AgentEvent::ContainerFailed { .. } | AgentEvent::HookFailed { .. } = event {
            record.level = Level::Error;
        }
    }

    /// Ends the wait of a container, once.
    fn wait_ends(&mut self, container: &str, error: Option<&String>) {
        if let Some(tries) = self.waits.remove(container) {
            let record = self.end(own::AGENT_CDI_WAIT, container);
            record.error = error.cloned();
            record.fields = fields([("failed_tries", json!(tries))]);
        }
    }
}

/// Fields that a diagnosis gives to every record of a failure.
fn diagnosis(found: &Diagnosis) -> Map<String, Value> {
    fields([
        ("reason", found.reason.name().into()),
        ("whose", found.reason.whose().name().into()),
        ("sure", found.sure.name().into()),
        ("cure", found.cure.as_ref().into()),
    ])
}

/// `BAR 1 of 16 GiB found no room`.
fn bars_text(bars: &BTreeMap<u8, u64>) -> String {
    let one = |(bar, bytes): (&u8, &u64)| {
        let (count, unit) = match *bytes {
            bytes if bytes >= 1 << 30 => (bytes >> 30, "GiB"),
            bytes => (bytes >> 20, "MiB"),
        };
        format!("BAR {bar} of {count} {unit} found no room")
    };
    bars.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// Fields of a record; those that are null are left out.
fn fields<const N: usize>(pairs: [(&str, Value); N]) -> Map<String, Value> {
    let known = pairs.into_iter().filter(|(_, value)| !value.is_null());
    known.map(|(key, value)| (key.to_string(), value)).collect()
}
