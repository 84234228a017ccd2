//! Boots of this host as numbers that rules compare: medians of steps, enablings of each GPU, facts
//! about the guests.

use super::checked::{Gap, unknown};
use super::measured::SettledBoot;
use kata_gpu_report::analysis::loaded::Loaded;
use kata_gpu_report::analysis::metrics::{failure_label, metrics};
use kata_gpu_report::analysis::rules::Shortens;
use kata_gpu_report::analysis::statistics::Summary;
use kata_gpu_report::boot::model::SETTLED;
use kata_gpu_report::data::compact_record::{Field, Record};
use kata_gpu_report::data::text::printable_start;
use kata_gpu_wire::failure::Reason;
use kata_gpu_wire::names;
use std::collections::{BTreeMap, BTreeSet};

/// Limits of different names kept, of a name in bytes, and of boots.
const MAX_NAMES: usize = 256;
const MAX_NAME: usize = 64;
/// Boots that are read, the newest first: more tell about a host that is no more.
pub const MAX_BOOTS: usize = 200;

/// Numbers of the collector's files.
#[derive(Clone, Debug, Default)]
pub struct OwnBoots {
    pub count: usize,
    /// Boots with impossible numbers: they are in nothing else.
    pub implausible: usize,
    /// Sum of a step's durations in each boot that has it, in ns.
    pub sums: BTreeMap<String, Vec<i64>>,
    /// Enablings of each GPU, by its UUID or else by its address in the guest, in ns.
    pub enablings: BTreeMap<String, Vec<i64>>,
    /// How many boots have a value of a fact about the guest: kernel, clocksource, ...
    pub facts: BTreeMap<(&'static str, String), usize>,
    /// From the first milestone of each boot to the agent's first answer, and until all GPUs were
    /// settled or, where that is unknown, the first container ran, in ns.
    pub agent_ready: Vec<i64>,
    pub up: Vec<i64>,
    /// From the agent's first answer until then, in ns.
    pub after_agent: Vec<i64>,
    /// Time of each boot without any step, in ns.
    pub unexplained: Vec<i64>,
    /// Boots whose GPUs settled.
    pub settled: Vec<SettledBoot>,
    /// From the first milestone of each boot to its first container, in ns.
    pub first_container: Vec<i64>,
    /// Time of each phase in each boot that has it, in ns.
    pub phases: BTreeMap<String, Vec<i64>>,
    /// Labels of the failures of each boot that has some, each once.
    pub failed: Vec<Vec<&'static str>>,
    /// Size of each console log beside a boot's file.
    pub console_bytes: Vec<i64>,
}

/// Names of facts about guests.
pub const KERNEL: &str = "kernel";
pub const CLOCKSOURCE: &str = "clocksource";
pub const UNPACKED: &str = "modules unpacked by the init";
pub const CONFIDENTIAL: &str = "confidential";

impl OwnBoots {
    /// Adds a boot's numbers; `id` is the name of its file.
    pub fn add(&mut self, loaded: &Loaded, id: &str) {
        let numbers = metrics(&loaded.boot, &loaded.file);
        if numbers.is_implausible() {
            self.implausible += 1;
            return;
        }
        self.count += 1;
        for (phase, took) in numbers.phases {
            push(&mut self.phases, phase, took);
        }
        let labels = numbers
            .failures
            .iter()
            .map(|failure| failure_label(failure));
        let labels: BTreeSet<&str> = labels.collect();
        if !labels.is_empty() {
            self.failed.push(labels.into_iter().collect());
        }
        let boot = &loaded.boot;
        let mut sums: BTreeMap<&str, i64> = BTreeMap::new();
        // Steps of the host's trace lie in others, which count already.
        for step in boot
            .timeline
            .steps
            .iter()
            .filter(|step| !step.open && !step.row.waiting && step.traced.is_none())
        {
            let sum = sums.entry(&step.name).or_default();
            *sum = sum.saturating_add(i64::try_from(step.took_ns()).unwrap_or(i64::MAX));
        }
        for (name, sum) in sums {
            push(&mut self.sums, name.to_string(), sum);
        }
        for gpu in &boot.gpus {
            let uuid = loaded
                .file
                .records
                .iter()
                .filter(|r| r.name == names::GPU_HEALTH && r.gpu == Some(gpu.address));
            let uuid = uuid
                .filter_map(|r| field(r, "uuid"))
                .next_back()
                .map(|uuid| printable_start(&uuid, MAX_NAME));
            if let Some(took) = gpu.enabled.and_then(|step| step.took_ns) {
                let name = uuid.unwrap_or_else(|| gpu.address.to_string());
                push(
                    &mut self.enablings,
                    name,
                    i64::try_from(took).unwrap_or(i64::MAX),
                );
            }
        }
        let of = |record: &str, key: &str| {
            loaded
                .file
                .records
                .iter()
                .filter(|r| r.name == record)
                .find_map(|r| field(r, key))
        };
        self.fact(KERNEL, boot.kernel.as_deref());
        self.fact(CLOCKSOURCE, of(names::CLOCK_TSC, "clocksource"));
        self.fact(UNPACKED, of(names::MODULE_LOAD, "unpacked"));
        self.fact(CONFIDENTIAL, of(names::CONFIDENTIAL, "enabled"));
        let milestones = &boot.timeline.milestones;
        if let Some(first) = milestones.first() {
            let since_first = |name: &str| {
                let found = milestones.iter().find(|m| m.name == name);
                found.map(|m| m.at_ns.saturating_sub(first.at_ns))
            };
            let agent_ready = since_first("agent ready");
            self.agent_ready.extend(agent_ready);
            // Later containers are no part of the boot, however late they come.
            let up = since_first(SETTLED).or(since_first("first container"));
            self.up.extend(up);
            let after_agent = up
                .zip(agent_ready)
                .map(|(up, ready)| up.saturating_sub(ready));
            self.after_agent.extend(after_agent);
            self.first_container.extend(since_first("first container"));
        }
        self.settled.extend(SettledBoot::of(id, &boot.timeline));
        self.unexplained.extend(
            boot.coverage
                .as_ref()
                .map(|c| i64::try_from(c.unexplained_ns).unwrap_or(i64::MAX)),
        );
    }

    /// The boots, or that there are none.
    pub fn some(&self) -> Result<&Self, Gap> {
        if self.count == 0 {
            unknown("no boot of this host: name the collector's directory with --dir")
        } else {
            Ok(self)
        }
    }

    fn fact(&mut self, name: &'static str, value: Option<&str>) {
        if let Some(value) = value.filter(|_| self.facts.len() < MAX_NAMES) {
            *self
                .facts
                .entry((name, printable_start(&value, MAX_NAME)))
                .or_default() += 1;
        }
    }

    /// Boots that failed for one of these reasons.
    pub fn failed_for(&self, reasons: &[Reason]) -> usize {
        let is = |label: &&str| reasons.iter().any(|reason| reason.name() == *label);
        self.failed
            .iter()
            .filter(|boot| boot.iter().any(is))
            .count()
    }

    /// Values of a fact, the most frequent first.
    pub fn values(&self, fact: &str) -> Vec<(&str, usize)> {
        let mut found: Vec<_> = self
            .facts
            .iter()
            .filter(|((name, _), _)| *name == fact)
            .map(|((_, v), n)| (v.as_str(), *n))
            .collect();
        found.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        found
    }

    /// Median of a step's time in a boot, in seconds.
    pub fn median(&self, step: &str) -> Option<f64> {
        self.sums
            .get(step)
            .and_then(|values| Summary::of(values))
            .map(|s| s.median_ns as f64 / 1e9)
    }

    /// Seconds that a cure would have saved in the median boot; None where no boot has the steps.
    pub fn saved(&self, shortens: &[Shortens]) -> Option<f64> {
        let saved = shortens
            .iter()
            .filter_map(|s| Some(self.median(s.step)? * (1.0 - s.to)));
        saved.reduce(|a, b| a + b)
    }
}

fn field<'a>(record: &'a Record, key: &str) -> Option<&'a str> {
    match record.fields.get(key)? {
        Field::Text(text) | Field::Json(text) => Some(text),
    }
}

fn push(values: &mut BTreeMap<String, Vec<i64>>, name: String, value: i64) {
    if values.len() < MAX_NAMES || values.contains_key(&name) {
        values.entry(name).or_default().push(value);
    }
}
