//! Bars (a step each) and marks, as a waterfall draws them.

use super::rows::Tone;
use crate::boot::gpu_name::GpuName;
use crate::boot::intervals::length;
use crate::data::compact_record::Fields;
use crate::data::text::printable_start;
use kata_gpu_wire::catalogue::Owner;

/// Longest text of one field, in bytes.
pub const MAX_VALUE: usize = 400;

/// A step as a bar: from when to when, whose, of which GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// The stream's id; None for what is read from marks.
    pub id: Option<u64>,
    pub name: String,
    pub owner: Owner,
    pub gpu: Option<GpuName>,
    /// Times on the guest's boot clock; negative before the kernel began it.
    pub begin_ns: i64,
    /// The record of its beginning was lost: `begin_ns` is its end.
    pub begin_lost: bool,
    /// None: still open when the stream ended.
    pub end_ns: Option<i64>,
    /// Its times are those of agent lines that could only be placed approximately.
    pub approximate: bool,
    pub parent: Option<u64>,
    pub after: Vec<u64>,
    pub error: Option<String>,
    pub fields: Vec<(String, String)>,
    pub critical: bool,
    /// The account's step that this is; None: the account has left it out.
    pub account: Option<usize>,
    pub lane: usize,
    /// Row in the lane: steps in one row do not overlap.
    pub row: usize,
}

impl Bar {
    pub fn took_ns(&self) -> Option<u64> {
        if self.begin_lost {
            None
        } else {
            Some(length(self.begin_ns, self.end_ns?))
        }
    }

    /// Name of the step, and the field that distinguishes it from others of the name.
    pub fn label(&self) -> String {
        let which = self
            .fields
            .iter()
            .find(|(key, _)| key == "module" || key == "container");
        match which {
            Some((_, value)) => format!("{} {value}", self.name),
            None => self.name.clone(),
        }
    }
}

/// Something that happened at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    pub at_ns: i64,
    pub approximate: bool,
    pub name: String,
    pub text: String,
    pub owner: Owner,
    pub gpu: Option<GpuName>,
    pub tone: Tone,
    /// `show` prints it only with -v.
    pub detail: bool,
    /// The step it happened in.
    pub parent: Option<u64>,
    pub lane: usize,
    /// Fields of a report of a GPU's health; texts of other marks say all.
    pub reported: Option<Fields>,
}

impl Mark {
    /// Facts of a report of a GPU's health.
    pub fn facts(&self) -> impl Iterator<Item = (String, String)> {
        self.reported
            .iter()
            .flatten()
            .map(|(key, field)| (field_text(key), field_text(field.shown())))
    }

    /// Whether it is a report of a GPU's health.
    pub fn is_report(&self) -> bool {
        self.reported.is_some()
    }
}

pub fn field_text(text: &str) -> String {
    printable_start(&text, MAX_VALUE)
}
