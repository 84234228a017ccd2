//! Turns items into records: drafts on the base clock, in order of time. Pure.
//!
//! Lines of our init, where the logs have any, are the steps; kernel lines are then only kept as
//! they are. Otherwise the steps are taken from lines of the kernel, the driver, NVRC and the agent
//! ([`Said::OfKernel`]).

use super::clocks::Placed;
use super::gpu_enablings::Steps;
use super::item::{Fact, InitLine, Item, Stamp, cut};
use super::kernel_lines;
use super::kernel_lines::Meaning;
use crate::data::agent_log::AgentEvent;
use crate::data::imported_record::Format;
use crate::data::imported_record::MARK;
use crate::data::units::size;
use kata_gpu_wire::catalogue::logged as own;
use kata_gpu_wire::driver_log;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::reason;
use kata_gpu_wire::reason::Step;
use kata_gpu_wire::record::{Kind, Level};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Lines of the driver that are kept per GPU, to find the reason of a failure.
const WORDS_PER_GPU: usize = 24;
/// Longest text of a kernel line in a record.
const MAX_TEXT: usize = 1000;

/// A record in the making.
#[derive(Clone, Debug, PartialEq)]
pub struct Draft {
    pub at_ns: i64,
    pub error_ns: u64,
    pub kind: Kind,
    pub name: String,
    pub level: Level,
    pub gpu: Option<PciAddress>,
    /// Number of the span, from 0 in this import.
    pub span: Option<u64>,
    pub error: Option<String>,
    pub fields: Map<String, Value>,
    pub format: Format,
    pub line: u64,
}

impl Draft {
    pub fn new(placed: Placed, kind: Kind, name: &str, format: Format, line: u64) -> Self {
        let Placed { at_ns, error_ns } = placed;
        let (name, fields) = (name.to_string(), Map::new());
        Self {
            at_ns,
            error_ns,
            kind,
            name,
            level: Level::Info,
            gpu: None,
            span: None,
            error: None,
            fields,
            format,
            line,
        }
    }
}

/// Source of the steps: lines of our init, or kernel lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    OfInit,
    OfKernel,
}

/// Records and facts from the items.
#[derive(Debug, Default)]
pub struct Derived {
    pub drafts: Vec<Draft>,
    /// Release of the guest's kernel.
    pub release: Option<String>,
    pub spans: u64,
}

/// Turns items in order of time into drafts.
pub fn derive<'a>(items: &[(Placed, &'a Item)], steps: &'a Steps, said: Said) -> Derived {
    let mut maker = Maker {
        steps,
        said,
        out: Derived::default(),
        open: HashMap::new(),
        words: HashMap::new(),
        failed: BTreeSet::new(),
        waits: HashMap::new(),
        marks: 0,
        mark: None,
        bars: BTreeMap::new(),
    };
    if said == Said::OfKernel {
        maker.enablings(items);
    }
    for (placed, item) in items {
        maker.take(*placed, item);
    }
    // Sort by time; drafts of one time keep the order in which they were written.
    maker.out.drafts.sort_by_key(|draft| draft.at_ns);
    maker.out
}

#[derive(Debug)]
struct Wait {
    span: u64,
    tries: u64,
}

struct Maker<'a> {
    steps: &'a Steps,
    said: Said,
    out: Derived,
    /// Spans that have begun and not ended.
    open: HashMap<(String, Option<PciAddress>), Vec<u64>>,
    words: HashMap<PciAddress, Vec<String>>,
    failed: BTreeSet<PciAddress>,
    /// Spans of waiting containers, with the tries that failed.
    waits: HashMap<String, Wait>,
    marks: u64,
    /// Last mark of an initialisation, whose end no line has shown yet.
    mark: Option<(Placed, &'a Item)>,
    bars: BTreeMap<PciAddress, usize>,
}

impl<'a> Maker<'a> {
    fn span(&mut self) -> u64 {
        self.out.spans += 1;
        self.out.spans - 1
    }

    fn draft(&mut self, placed: Placed, item: &Item, kind: Kind, name: &str) -> &mut Draft {
        let at = self.out.drafts.len();
        let placed = Placed {
            error_ns: placed.error_ns.saturating_add(item.error_ns),
            ..placed
        };
        self.out
            .drafts
            .push(Draft::new(placed, kind, name, item.format, item.line));
        &mut self.out.drafts[at]
    }

    fn take(&mut self, placed: Placed, item: &'a Item) {
        match &item.fact {
            Fact::Kernel(text) => self.kernel(placed, item, text),
            Fact::Init(line) => self.init(placed, item, line),
            Fact::Agent(fact) => self.agent(placed, item, fact),
            Fact::Plain {
                name,
                level,
                error,
                fields,
            } => {
                let draft = self.draft(placed, item, Kind::Event, name);
                (draft.level, draft.error, draft.fields) = (*level, error.clone(), fields.clone());
            }
        }
    }

    fn init(&mut self, placed: Placed, item: &Item, line: &InitLine) {
        let key = (line.name.clone(), line.gpu);
        let span = match line.kind {
            Kind::Begin => {
                let span = self.span();
                self.open.entry(key).or_default().push(span);
                Some(span)
            }
            // Without a begin (which only a verbose console shows) the line ends a span whose begin
            // was lost.
            Kind::End => Some(
                self.open
                    .get_mut(&key)
                    .and_then(Vec::pop)
                    .unwrap_or_else(|| self.span()),
            ),
            Kind::Event | Kind::Kmsg => None,
        };
        let draft = self.draft(placed, item, line.kind, &line.name);
        (draft.level, draft.gpu, draft.span, draft.error) =
            (line.level, line.gpu, span, line.error.clone());
        draft.fields = line.fields.clone();
    }

    fn kernel(&mut self, placed: Placed, item: &'a Item, text: &str) {
        let Some(meaning) = kernel_lines::meaning(text) else {
            return;
        };
        let gpu = driver_log::address(text).filter(|address| self.steps.gpus.contains_key(address));
        if let Some(gpu) = gpu.filter(|_| driver_log::explains(text)) {
            let words = self.words.entry(gpu).or_default();
            if words.len() < WORDS_PER_GPU {
                words.push(text.to_string());
            }
        }
        if let Meaning::Nvrc { text } = meaning {
            let draft = self.draft(placed, item, Kind::Event, own::NVRC);
            draft.level = Level::Debug;
            draft
                .fields
                .insert("text".into(), cut(&text, MAX_TEXT).into());
            return;
        }
        let draft = self.draft(placed, item, Kind::Kmsg, "kmsg");
        draft.gpu = gpu;
        draft
            .fields
            .insert("text".into(), cut(text, MAX_TEXT).into());
        if let Stamp::Kernel(ns) = item.stamp {
            draft.fields.insert("printk_us".into(), (ns / 1000).into());
        }
        if let Meaning::Banner { release } = &meaning {
            self.out.release.get_or_insert_with(|| release.clone());
        }
        if let Meaning::Bar { function, .. } = meaning {
            self.bar(placed, item, function);
        }
        if self.said == Said::OfKernel {
            self.meaning(placed, item, meaning, text);
        }
    }

    /// Adds one row per GPU, when the last of its BARs has its place.
    fn bar(&mut self, placed: Placed, item: &Item, gpu: PciAddress) {
        let Some(bars) = self.steps.bars.get(&gpu) else {
            return;
        };
        let seen = self.bars.entry(gpu).or_default();
        *seen += 1;
        if *seen == bars.len() {
            let text = bars
                .iter()
                .map(|(bar, bytes)| format!("{bar}: {}", size(*bytes)))
                .collect::<Vec<_>>()
                .join(", ");
            let draft = self.draft(placed, item, Kind::Event, own::GPU_BARS);
            draft.gpu = Some(gpu);
            draft.fields.insert("bars".into(), text.into());
        }
    }

    fn meaning(&mut self, placed: Placed, item: &'a Item, meaning: Meaning, text: &str) {
        match meaning {
            Meaning::RunInit { program } => {
                self.draft(placed, item, Kind::Event, names::INIT_START)
                    .fields
                    .insert("program".into(), cut(&program, MAX_TEXT).into());
            }
            Meaning::GpuFound { gpu, device } => {
                let index = self.steps.index(gpu);
                let draft = self.draft(placed, item, Kind::Event, names::GPU_FOUND);
                draft.gpu = Some(gpu);
                draft.fields.insert("device".into(), device.into());
                draft
                    .fields
                    .extend(index.map(|i| ("index".to_string(), Value::from(i))));
            }
            Meaning::ModuleBegins => {
                self.begin(placed, item, names::MODULE_LOAD, "module", "nvidia")
            }
            Meaning::ModuleLoaded => self.end(placed, item, names::MODULE_LOAD, "module", "nvidia"),
            Meaning::UvmLoaded => {
                self.end(placed, item, names::MODULE_LOAD, "module", "nvidia_uvm")
            }
            Meaning::CtkBegins => {
                self.end_initialisation(placed, item, "start of nvidia-ctk");
                self.begin(placed, item, names::CDI_PUBLISH, "by", "nvidia-ctk");
            }
            Meaning::CtkDone => {
                self.end(placed, item, names::CDI_PUBLISH, "by", "nvidia-ctk");
                // nvidia-ctk writes all GPUs or none.
                let ready: Vec<PciAddress> = self
                    .steps
                    .gpus
                    .keys()
                    .filter(|gpu| !self.failed.contains(gpu))
                    .copied()
                    .collect();
                for gpu in ready {
                    let index = self.steps.index(gpu);
                    let draft = self.draft(placed, item, Kind::Event, names::GPU_PUBLISHED);
                    draft.gpu = Some(gpu);
                    draft
                        .fields
                        .extend(index.map(|i| ("index".to_string(), Value::from(i))));
                    draft.fields.insert("by".into(), "nvidia-ctk".into());
                }
            }
            Meaning::Xid { gpu, xid } => {
                let draft = self.draft(placed, item, Kind::Event, names::GPU_XID);
                (draft.gpu, draft.level) = (Some(gpu), Level::Error);
                draft.fields.insert("xid".into(), xid.into());
            }
            Meaning::InitMark => {
                self.end_initialisation(placed, item, "next mark");
                self.mark = Some((placed, item));
                self.marks += 1;
                let nth = self.marks;
                self.draft(placed, item, Kind::Event, own::GPU_INIT_MARK)
                    .fields
                    .insert("nth".into(), nth.into());
            }
            Meaning::InitFailed { gpu } => {
                self.end_initialisation(placed, item, "failure of an initialisation");
                self.gpu_failed(placed, item, gpu, Step::Init, text);
            }
            Meaning::ProbeFailed { gpu } => self.gpu_failed(placed, item, gpu, Step::Probe, text),
            Meaning::Banner { .. } | Meaning::Bar { .. } | Meaning::Enabling { .. } => {}
            Meaning::Nvrc { .. } | Meaning::Panic | Meaning::Other => {}
        }
    }

    /// Adds a span from the last mark to here: the driver initialises one GPU after another, and no
    /// line names the GPU. A mark without an end is an event alone.
    fn end_initialisation(&mut self, placed: Placed, item: &Item, until: &str) {
        let Some((begin, of_mark)) = self.mark.take() else {
            return;
        };
        let span = Some(self.span());
        self.draft(begin, of_mark, Kind::Begin, names::GPU_INIT)
            .span = span;
        let draft = self.draft(placed, item, Kind::End, names::GPU_INIT);
        draft.span = span;
        draft.fields.insert("until".into(), until.into());
    }

    fn gpu_failed(&mut self, placed: Placed, item: &Item, gpu: PciAddress, step: Step, text: &str) {
        // Report the first failure alone: later tries fail again.
        if !self.failed.insert(gpu) {
            return;
        }
        let words = self.words.get(&gpu).cloned().unwrap_or_default();
        let (reason, line) = reason::classify(step, &words);
        let words = line.unwrap_or(text).to_string();
        let draft = self.draft(placed, item, Kind::Event, names::GPU_FAILED);
        (draft.gpu, draft.level) = (Some(gpu), Level::Error);
        draft.error = Some(format!("{reason}: {}", cut(&words, MAX_TEXT)));
        draft.fields.insert("step".into(), step.as_str().into());
        draft.fields.insert("reason".into(), reason.as_str().into());
        draft.fields.extend(
            reason
                .cure()
                .map(|cure| ("cure".to_string(), Value::from(cure))),
        );
    }

    /// Begins a span that lines begin and end; one of its fields identifies it.
    fn begin(&mut self, placed: Placed, item: &Item, name: &str, key: &str, value: &str) {
        let span = self.span();
        self.open
            .entry((format!("{name} {value}"), None))
            .or_default()
            .push(span);
        let draft = self.draft(placed, item, Kind::Begin, name);
        draft.span = Some(span);
        draft.fields.insert(key.into(), value.into());
    }

    fn end(&mut self, placed: Placed, item: &Item, name: &str, key: &str, value: &str) {
        let begun = self
            .open
            .get_mut(&(format!("{name} {value}"), None))
            .and_then(Vec::pop);
        let span = begun.unwrap_or_else(|| self.span());
        let draft = self.draft(placed, item, Kind::End, name);
        draft.span = Some(span);
        if begun.is_none() {
            draft.fields.insert(key.into(), value.into());
        }
    }

    fn enablings(&mut self, items: &[(Placed, &Item)]) {
        for enabling in &self.steps.enablings {
            let Some((_, item)) = items.iter().find(|(placed, item)| {
                *placed == enabling.begin && item.line == enabling.begin_line
            }) else {
                continue;
            };
            let span = self.span();
            let draft = self.draft(enabling.begin, item, Kind::Begin, names::GPU_ENABLE);
            (draft.gpu, draft.span) = (Some(enabling.gpu), Some(span));
            if let Some((end, by)) = enabling.end {
                let draft = self.draft(end, item, Kind::End, names::GPU_ENABLE);
                (draft.gpu, draft.span) = (Some(enabling.gpu), Some(span));
                draft.fields.insert("until".into(), by.into());
            }
        }
    }

    fn agent(&mut self, placed: Placed, item: &Item, event: &AgentEvent) {
        match event {
            AgentEvent::Start { version } => {
                self.draft(placed, item, Kind::Event, own::AGENT_START)
                    .fields
                    .insert("version".into(), version.clone().into());
            }
            AgentEvent::Ready => drop(self.draft(placed, item, Kind::Event, own::AGENT_READY)),
            AgentEvent::Rpc { call } => {
                self.draft(placed, item, Kind::Event, own::AGENT_RPC)
                    .fields
                    .insert("call".into(), call.clone().into());
            }
            AgentEvent::ContainerAsked {
                container,
                devices,
                pause,
            } => {
                self.draft(placed, item, Kind::Event, own::CONTAINER_ASKED)
                    .fields = container_fields(container, devices, None, *pause);
            }
            AgentEvent::CdiTryFailed {
                container,
                attempt,
                error,
            } => {
                self.waiting(placed, item, container, *attempt);
                let draft = self.draft(placed, item, Kind::Event, own::AGENT_CDI_TRY);
                draft.error = Some(error.clone());
                draft.fields = Map::from_iter([
                    ("container".to_string(), json!(container)),
                    ("try".to_string(), json!(attempt)),
                ]);
            }
            AgentEvent::Injected { container } => self.waited(placed, item, container, None),
            AgentEvent::ContainerCreated {
                container,
                devices,
                tries,
                pause,
            } => {
                self.waited(placed, item, container, None);
                self.draft(placed, item, Kind::Event, own::CONTAINER_CREATED)
                    .fields = container_fields(container, devices, *tries, *pause);
            }
            AgentEvent::ContainerStarted { container } => {
                let draft = self.draft(placed, item, Kind::Event, own::CONTAINER_STARTED);
                draft
                    .fields
                    .insert("container".into(), container.clone().into());
            }
            AgentEvent::ContainerFailed {
                container,
                devices,
                tries,
                error,
            } => {
                self.waited(placed, item, container, Some(error));
                let draft = self.draft(placed, item, Kind::Event, own::CONTAINER_FAILED);
                (draft.error, draft.level) = (Some(error.clone()), Level::Error);
                draft.fields = container_fields(container, devices, *tries, false);
            }
            AgentEvent::HookFailed { error } => {
                let draft = self.draft(placed, item, Kind::Event, own::AGENT_HOOK_FAILED);
                (draft.error, draft.level) = (Some(error.clone()), Level::Error);
            }
            AgentEvent::Bound(gpu) => {
                if self.said == Said::OfKernel && self.steps.gpus.contains_key(gpu) {
                    let index = self.steps.index(*gpu);
                    let draft = self.draft(placed, item, Kind::Event, names::GPU_BOUND);
                    draft.gpu = Some(*gpu);
                    draft
                        .fields
                        .extend(index.map(|i| ("index".to_string(), Value::from(i))));
                }
            }
        }
    }

    fn waiting(&mut self, placed: Placed, item: &Item, container: &str, attempt: u64) {
        if let Some(wait) = self.waits.get_mut(container) {
            wait.tries = attempt;
            return;
        }
        let span = self.span();
        self.waits.insert(
            container.to_string(),
            Wait {
                span,
                tries: attempt,
            },
        );
        let draft = self.draft(placed, item, Kind::Begin, own::AGENT_CDI_WAIT);
        draft.span = Some(span);
        draft.fields.insert("container".into(), container.into());
    }

    /// Ends the wait of a container, once.
    fn waited(&mut self, placed: Placed, item: &Item, container: &str, error: Option<&str>) {
        let Some(Wait { span, tries }) = self.waits.remove(container) else {
            return;
        };
        let draft = self.draft(placed, item, Kind::End, own::AGENT_CDI_WAIT);
        (draft.span, draft.error) = (Some(span), error.map(str::to_string));
        draft.fields.insert("failed_tries".into(), tries.into());
    }
}

fn container_fields(
    container: &str,
    devices: &str,
    tries: Option<u64>,
    pause: bool,
) -> Map<String, Value> {
    let mut fields = Map::from_iter([
        ("container".to_string(), Value::from(container)),
        ("devices".to_string(), devices.into()),
    ]);
    fields.extend(tries.map(|n| ("tries".to_string(), Value::from(n))));
    fields.extend(pause.then(|| ("pause".to_string(), Value::from(true))));
    fields
}

/// Fields of a record from a log, with its source and the bound on its time's error.
pub fn marked(draft: &Draft) -> Map<String, Value> {
    let mut fields = draft.fields.clone();
    // Insert the mark last, so that no field of a line can replace it.
    fields.insert(
        MARK.into(),
        json!({ "format": draft.format, "line": draft.line, "error_ns": draft.error_ns }),
    );
    if draft.at_ns < 0 && draft.kind != Kind::End {
        fields.insert(
            "before_ms".into(),
            (draft.at_ns.unsigned_abs() / 1_000_000).into(),
        );
    }
    fields
}
