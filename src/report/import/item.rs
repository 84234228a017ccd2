//! Output of the formats: [`Item`]s, each with the clock of its stamp, and counts of the lines that
//! were read.

use crate::data::agent_log::AgentEvent;
use crate::data::imported_record::Format;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::{Kind, Level};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// A time on one of the clocks that logs carry, in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stamp {
    /// printk's clock of the guest.
    Kernel(i64),
    /// CLOCK_BOOTTIME of the guest, from our init's lines.
    Boot(i64),
    /// CLOCK_REALTIME of the guest.
    Guest(i64),
    /// CLOCK_REALTIME of the host.
    Host(i64),
}

/// A fact from a log.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    pub stamp: Stamp,
    /// Time at which the host's runtime read the line (CLOCK_REALTIME of the host): not before it
    /// was written.
    pub read_ns: Option<i64>,
    pub format: Format,
    /// Line in the file, from 1.
    pub line: u64,
    /// Bound on the stamp's error, on its own clock.
    pub error_ns: u64,
    /// The kernel's stamps before and after the item in the file (also of lines that are not kept):
    /// its time is between them, more or less.
    pub between: (Option<i64>, Option<i64>),
    pub fact: Fact,
}

impl Item {
    pub fn new(stamp: Stamp, format: Format, line: u64, fact: Fact) -> Self {
        Self {
            stamp,
            read_ns: None,
            format,
            line,
            error_ns: 0,
            between: (None, None),
            fact,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// A line of the guest's kernel log.
    Kernel(String),
    /// A line of kata-gpu-init.
    Init(InitLine),
    /// Meaning of a line of the agent.
    Agent(AgentEvent),
    /// A complete record, for events on the host.
    Plain {
        name: &'static str,
        level: Level,
        error: Option<String>,
        fields: Map<String, Value>,
    },
}

/// A line of kata-gpu-init on the console: an event or the end of a span (a begin when asked for
/// details), without span id.
#[derive(Clone, Debug, PartialEq)]
pub struct InitLine {
    pub name: String,
    pub kind: Kind,
    pub level: Level,
    pub gpu: Option<PciAddress>,
    pub error: Option<String>,
    pub fields: Map<String, Value>,
    pub version: String,
    /// CLOCK_REALTIME of the guest at the same moment.
    pub realtime_ns: Option<i64>,
}

/// Reason for skipping a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Skip {
    TooLong,
    Empty,
    NotOfTheFormat,
    KernelDetail,
    AgentDetail,
    OtherProgram,
    NoStamp,
    AbsurdStamp,
    AlreadyThere,
    OtherBoot,
    LimitReached,
    Unplaceable,
}

impl Skip {
    pub fn text(self) -> &'static str {
        match self {
            Self::TooLong => "longer than a line may be",
            Self::Empty => "empty",
            Self::NotOfTheFormat => "not of the format",
            Self::KernelDetail => "kernel lines about nothing that matters here",
            Self::AgentDetail => "agent or init lines about nothing that matters here",
            Self::OtherProgram => "of other programs",
            Self::NoStamp => "without a time",
            Self::AbsurdStamp => "with an impossible time",
            Self::AlreadyThere => "repeated",
            Self::OtherBoot => "of other boots or sandboxes",
            Self::LimitReached => "beyond the limit of what one import keeps",
            Self::Unplaceable => "on a clock that nothing here relates to the guest's",
        }
    }
}

/// Counts of a file's lines, by outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    pub lines: u64,
    pub recognised: u64,
    pub skipped: BTreeMap<Skip, u64>,
    /// Stamps that are earlier than the one before: normal for a few lines, counted because they
    /// make order doubtful.
    pub backwards: u64,
    /// Reason for which reading stopped before the end of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<String>,
}

impl Count {
    pub fn skip(&mut self, why: Skip) {
        self.skip_many(why, 1);
    }

    pub fn skip_many(&mut self, why: Skip, n: u64) {
        if n > 0 {
            let count = self.skipped.entry(why).or_default();
            *count = count.saturating_add(n);
        }
    }
}

/// Most items that one import keeps of one file: a boot has some thousand. More is a log of
/// something else, or an attack.
pub const MAX_ITEMS: usize = 200_000;
/// Latest plausible time on the guest's clock: about 115 days after kernel start. A boot is long
/// over by then.
pub const MAX_STAMP_NS: i64 = 10_000_000 * 1_000_000_000;

/// The first characters of a text of a log.
pub fn cut(text: &str, max: usize) -> String {
    text.chars().take(max).collect()
}

/// A boot from a console-like file.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// The boot's sandbox in the file.
    pub sandbox: Option<String>,
    pub items: Vec<Item>,
}
