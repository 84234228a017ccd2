//! Turns facts into records on the base clock, in order of time. Pure.
//!
//! Lines of our init, where the logs have any, are the steps; kernel lines are then only kept as
//! they are. Otherwise lines of the kernel, the driver, NVRC and the agent give the steps.
//!
//! `enabling device` is printed just before the write that makes the host map a GPU's BARs; nothing
//! is printed when the write returns. The end is the first sign of the return, and is stored with
//! it: the next kernel line of that GPU, the agent's uevent of its binding, the next GPU's enabling
//! (the driver probes one after another), or the driver's line at the end of its load.

use super::clocks::Placed;
use super::facts::{Fact, InitLine, Item, Stamp, cut};
use super::kernel_lines::Meaning;
use crate::data::agent_log::AgentEvent;
use crate::data::imported_record::{MARK, parts};
use kata_gpu_wire::catalogue::logged as own;
use kata_gpu_wire::driver_log;
use kata_gpu_wire::failure;
use kata_gpu_wire::failure::{Facts, FailedStep};
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::{Kind, Level, Record};
use serde_json::{Map, Value, json};
use std::collections::{BTreeSet, HashMap};

/// Lines of the driver that are kept per GPU, to find the reason of a failure.
const LINES_PER_GPU: usize = 24;
/// Longest text of a kernel line in a record.
const MAX_TEXT: usize = 1000;

/// Makes records of facts in order of time. `steps_of_init`: lines of our init are the steps.
pub fn derive(items: &[(Placed, &Item)], steps_of_init: bool) -> Vec<Record> {
    let mut maker = Maker {
        gpus: gpus(items),
        steps_of_init,
        ..Maker::default()
    };
    for (placed, item) in items {
        maker.now = Source::of(*placed, item);
        maker.take(item);
    }
    // Sort by time; records of one time keep the order in which they were written.
    maker.drafts.sort_by_key(|draft| draft.source.placed.at_ns);
    maker.drafts.into_iter().map(Draft::finish).collect()
}

/// All GPUs, in PCI order, which is the order of the CDI names. A console that begins late has no
/// enumeration: every function that nvidia.ko enables is a GPU.
fn gpus(items: &[(Placed, &Item)]) -> BTreeSet<PciAddress> {
    let gpu = |(_, item): &(Placed, &Item)| match &item.fact {
        Fact::Init(line) => line.gpu,
        Fact::Kernel { meaning, .. } => match meaning {
            Meaning::GpuFound { gpu, .. } => Some(*gpu),
            Meaning::Enabling {
                function,
                driver: true,
            } => Some(*function),
            _ => None,
        },
        Fact::Agent(_) | Fact::Runtime(_) => None,
    };
    items.iter().filter_map(gpu).collect()
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
    gpus: BTreeSet<PciAddress>,
    steps_of_init: bool,
    drafts: Vec<Draft>,
    /// Source of the next record.
    now: Source,
    spans: u64,
    /// Spans that have begun and not ended, by what begins and ends them.
    open: HashMap<String, Vec<u64>>,
    /// GPUs whose enabling has begun and not ended.
    enabling: BTreeSet<PciAddress>,
    /// The driver's lines about each GPU that can explain a failure.
    driver_lines: HashMap<PciAddress, Vec<String>>,
    failed: BTreeSet<PciAddress>,
    /// Facts that the log states of driver and guest.
    facts: Facts,
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
        let index = self.gpus.iter().position(|known| *known == gpu);
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
                }
                (record.error, record.fields) = (event.error.clone(), event.fields.clone());
            }
        }
    }

    fn init(&mut self, line: &InitLine) {
        let key = format!("{:?}", line.gpu);
        let record = match line.kind {
            Kind::Begin => self.begin(&line.name, &key),
            Kind::End => self.end(&line.name, &key),
            Kind::Event | Kind::Kmsg => self.event(&line.name),
        };
        (record.level, record.gpu, record.error) = (line.level, line.gpu, line.error.clone());
        record.fields = line.fields.clone();
    }

    fn kernel(&mut self, stamp: Stamp, text: &str, meaning: &Meaning) {
        if let Meaning::Nvrc { text } = meaning {
            let record = self.event(own::NVRC);
            record.level = Level::Debug;
            record.fields = fields([("text", cut(text, MAX_TEXT).into())]);
            return;
        }
        self.facts.take_line(text);
        let gpu = driver_log::address(text).filter(|gpu| self.gpus.contains(gpu));
        if let Some(gpu) = gpu.filter(|_| driver_log::explains(text)) {
            let lines = self.driver_lines.entry(gpu).or_default();
            if lines.len() < LINES_PER_GPU {
                lines.push(text.to_string());
            }
        }
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
            self.step(meaning, text);
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
                let record = self.gpu_event(names::GPU_FOUND, *gpu);
                record
                    .fields
                    .insert("device".into(), device.as_str().into());
            }
            Meaning::Enabling { function: gpu, .. } if self.gpus.contains(gpu) => {
                self.enabling.insert(*gpu);
                self.begin(names::GPU_ENABLE, &gpu.to_string()).gpu = Some(*gpu);
            }
            Meaning::ModuleBegins => {
                let record = self.begin(names::MODULE_LOAD, "nvidia");
                record.fields = fields([("module", "nvidia".into())]);
            }
            Meaning::ModuleLoaded => {
                self.end_named(names::MODULE_LOAD, ("module", "nvidia"));
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
                // nvidia-ctk writes all GPUs or none.
                for gpu in &self.gpus.clone() - &self.failed {
                    let record = self.gpu_event(names::GPU_PUBLISHED, gpu);
                    record.fields.insert("by".into(), "nvidia-ctk".into());
                }
            }
            Meaning::Xid { gpu, xid } => {
                let record = self.event(names::GPU_XID);
                (record.gpu, record.level) = (Some(*gpu), Level::Error);
                record.fields = fields([("xid", json!(xid))]);
            }
            Meaning::InitMark => {
                self.initialisation_ends("next mark");
                self.mark = Some(self.now);
                self.marks += 1;
                let nth = json!(self.marks);
                self.event(own::GPU_INIT_MARK).fields = fields([("nth", nth)]);
            }
            Meaning::InitFailed { gpu } => {
                self.initialisation_ends("failure of an initialisation");
                self.gpu_failed(*gpu, FailedStep::Init, text);
            }
            Meaning::ProbeFailed { gpu } => self.gpu_failed(*gpu, FailedStep::Probe, text),
            Meaning::Banner { .. } | Meaning::Enabling { .. } => {}
            Meaning::Nvrc { .. } | Meaning::Other => {}
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
        let lines = self.driver_lines.remove(&gpu).unwrap_or_default();
        let found = failure::of_gpu(step, &lines, &self.facts);
        let words = cut(found.words.unwrap_or(text), MAX_TEXT);
        let record = self.event(names::GPU_FAILED);
        (record.gpu, record.level) = (Some(gpu), Level::Error);
        record.error = Some(format!("{}: {words}", found.reason));
        record.fields = fields([
            ("step", step.name().into()),
            ("reason", found.reason.name().into()),
            ("whose", found.reason.whose().name().into()),
            ("sure", found.sure.name().into()),
            ("words", words.into()),
            ("cure", found.cure.as_ref().into()),
        ]);
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
            AgentEvent::Injected { container } | AgentEvent::ContainerCreated { container, .. } => {
                self.wait_ends(container, None);
            }
            AgentEvent::ContainerFailed {
                container, error, ..
            } => self.wait_ends(container, Some(error)),
            AgentEvent::Bound(gpu) => {
                self.enabling_ends(*gpu, "bind uevent");
                if !self.steps_of_init && self.gpus.contains(gpu) {
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

/// Fields of a record; those that are null are left out.
fn fields<const N: usize>(pairs: [(&str, Value); N]) -> Map<String, Value> {
    let known = pairs.into_iter().filter(|(_, value)| !value.is_null());
    known.map(|(key, value)| (key.to_string(), value)).collect()
}
