//! Health of GPUs by NVML: events in, one [`Health`] a GPU out.
//!
//! Guests are not trusted: facts are the known ones only, a text has at most [`MAX_TEXT`] bytes, a
//! GPU at most [`MAX_PROBLEMS`] problems.

use crate::data::compact_record::{Field, Fields, Record};
use crate::data::text::start;
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use serde::Serialize;
use std::collections::BTreeMap;

/// Limit of one fact or problem, in bytes: NVML's longest are lists of clock reasons.
pub const MAX_TEXT: usize = 400;
/// Limit of sentences kept of one GPU, and of the guest.
pub const MAX_PROBLEMS: usize = 8;

/// Facts of a GPU, and the kinds of their values.
const OF_GPU: [(&str, Value); 21] = [
    ("uuid", Value::Text),
    ("model", Value::Text),
    ("mig", Value::Text),
    ("persistence", Value::Flag),
    ("graphics_mhz", Value::Number),
    ("memory_mhz", Value::Number),
    ("power_mw", Value::Number),
    ("power_limit_mw", Value::Number),
    ("ecc", Value::Flag),
    ("ecc_uncorrected", Value::Number),
    ("rows_remapped", Value::Number),
    ("remap_pending", Value::Flag),
    ("remap_failed", Value::Flag),
    ("throttle", Value::Text),
    ("fabric", Value::Text),
    ("fabric_status", Value::Number),
    ("fabric_health", Value::Number),
    ("clique", Value::Number),
    ("cluster", Value::Text),
    ("nvlinks", Value::Number),
    ("nvlinks_active", Value::Number),
];
/// Facts in every full report of a GPU: an event with one of them replaces earlier reports.
const IDENTITY: [&str; 2] = ["uuid", "model"];
/// Facts of the confidential guest.
const OF_CONFIDENTIAL: [(&str, Value); 5] = [
    ("enabled", Value::Flag),
    ("environment", Value::Text),
    ("devtools", Value::Flag),
    ("protected_pcie", Value::Flag),
    ("ready", Value::Flag),
];
/// Facts of NVML itself.
const OF_NVML: [(&str, Value); 3] = [
    ("devices", Value::Number),
    ("driver", Value::Text),
    ("nvml", Value::Text),
];

/// Kind of a fact's value; a value of another kind is no fact.
#[derive(Clone, Copy, Debug)]
enum Value {
    Text,
    Number,
    Flag,
}

/// Value of a fact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Fact {
    Text(String),
    Number(u64),
    Flag(bool),
}

/// Facts by their names in the events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Facts(BTreeMap<&'static str, Fact>);

impl Facts {
    /// Copies the facts of an event, and keeps the others.
    fn update(&mut self, fields: &Fields, known: &[(&'static str, Value)]) {
        for (name, kind) in known {
            let fact = fields.get(name).and_then(|field| match (kind, field) {
                (Value::Text, Field::Text(text)) => {
                    (!text.is_empty()).then(|| Fact::Text(kept(text)))
                }
                (Value::Number, field) => field.as_u64().map(Fact::Number),
                (Value::Flag, Field::Json("true")) => Some(Fact::Flag(true)),
                (Value::Flag, Field::Json("false")) => Some(Fact::Flag(false)),
                (Value::Text | Value::Flag, Field::Text(_) | Field::Json(_)) => None,
            });
            fact.map(|fact| self.0.insert(name, fact));
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        if let Some(Fact::Text(text)) = self.0.get(name) {
            Some(text)
        } else {
            None
        }
    }

    pub fn number(&self, name: &str) -> Option<u64> {
        if let Some(Fact::Number(number)) = self.0.get(name) {
            Some(*number)
        } else {
            None
        }
    }

    pub fn flag(&self, name: &str) -> Option<bool> {
        if let Some(Fact::Flag(flag)) = self.0.get(name) {
            Some(*flag)
        } else {
            None
        }
    }
}

/// A clock range or power limit that the command line requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Setting {
    pub what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
    /// Error of the refused setting: the driver's value stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// State of one GPU by NVML's newest report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Health {
    /// Time of the newest event.
    pub at_ns: u64,
    #[serde(skip_serializing_if = "Facts::is_empty")]
    pub facts: Facts,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub settings: Vec<Setting>,
    /// Sentences about problems.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

impl Health {
    /// Updates the health by an event of this GPU; other events change nothing.
    pub fn take(health: &mut Option<Box<Self>>, record: &Record) {
        match record.name.as_str() {
            names::GPU_HEALTH => health.get_or_insert_default().report(record),
            names::GPU_SETTING => health.get_or_insert_default().setting(record),
            // The next GPU at this address is another device.
            names::GPU_REMOVED => *health = None,
            _ => {}
        }
    }

    fn report(&mut self, record: &Record) {
        self.at_ns = record.boottime_ns;
        if IDENTITY
            .iter()
            .any(|name| record.fields.get(name).is_some())
        {
            self.facts = Facts::default();
            self.problems.clear();
        }
        self.facts.update(&record.fields, &OF_GPU);
        add(&mut self.problems, record.error.as_deref());
    }

    fn setting(&mut self, record: &Record) {
        self.at_ns = record.boottime_ns;
        let number = |name: &str| record.fields.number(name);
        let Some(what) = record.fields.text("what").map(kept) else {
            return;
        };
        let setting = Setting {
            what,
            min: number("min"),
            max: number("max"),
            error: record.error.as_deref().map(kept),
        };
        match self
            .settings
            .iter_mut()
            .find(|known| known.what == setting.what)
        {
            Some(known) => *known = setting,
            None => self.settings.push(setting),
        }
        self.settings.truncate(MAX_PROBLEMS);
    }

    pub fn sentences(&self) -> impl Iterator<Item = &str> {
        let refused = self
            .settings
            .iter()
            .filter_map(|setting| setting.error.as_deref());
        refused.chain(self.problems.iter().map(String::as_str))
    }
}

/// NVML's reports about the whole guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GuestHealth {
    /// Time of the newest event.
    pub at_ns: u64,
    /// driver, nvml (versions), devices (count by NVML).
    #[serde(skip_serializing_if = "Facts::is_empty")]
    pub nvml: Facts,
    #[serde(skip_serializing_if = "Facts::is_empty")]
    pub confidential: Facts,
    /// Sentences without a GPU: NVML could not be queried, or lists unknown devices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

impl GuestHealth {
    /// Health of the guest by its records; None if NVML reports nothing.
    pub fn of<'a>(records: impl IntoIterator<Item = &'a Record>) -> Option<Box<Self>> {
        let mut health: Option<Box<Self>> = None;
        for record in records {
            let of_nvml = record.name == names::NVML
                && (record.kind == Kind::End
                    || record.kind == Kind::Event && record.error.is_some());
            let of_guest = record.kind == Kind::Event && record.name == names::CONFIDENTIAL;
            let nameless = record.kind == Kind::Event
                && record.name == names::GPU_HEALTH
                && record.gpu.is_none();
            if !(of_nvml || of_guest || nameless) {
                continue;
            }
            let health = health.get_or_insert_default();
            health.at_ns = record.boottime_ns;
            if of_guest {
                health.confidential.update(&record.fields, &OF_CONFIDENTIAL);
            }
            if of_nvml {
                // Each report replaces the one before.
                health.nvml = Facts::default();
                health.nvml.update(&record.fields, &OF_NVML);
                health.problems.clear();
            }
            let error = record.error.as_deref().map(|error| {
                if of_nvml {
                    format!("NVML: {error}")
                } else {
                    error.to_string()
                }
            });
            add(&mut health.problems, error.as_deref());
        }
        health
    }
}

/// Adds a new sentence.
fn add(problems: &mut Vec<String>, error: Option<&str>) {
    if let Some(sentence) = error.map(kept)
        && problems.len() < MAX_PROBLEMS
        && !problems.contains(&sentence)
    {
        problems.push(sentence);
    }
}

/// Text cut to the limit.
fn kept(text: &str) -> String {
    start(text, MAX_TEXT).to_string()
}
