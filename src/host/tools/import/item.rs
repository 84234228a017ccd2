//! What the formats give: [`Item`]s, each with the clock that its stamp is of, and counts of what
//! was read.

use crate::events::record::{Kind, Level};
use crate::host::data::agent_log::AgentEvent;
use crate::host::data::imported_record::Format;
use crate::pci::PciAddress;
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
    /// A clock of the host that started at an unknown moment (a trace's).
    Trace(i64),
}

/// Something that a log said.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    pub stamp: Stamp,
    /// When the host's runtime read the line (CLOCK_REALTIME of the host): not before it was
    /// written.
    pub read_ns: Option<i64>,
    pub format: Format,
    /// Line in the file, from 1.
    pub line: u64,
    /// How wrong the stamp may be on its own clock.
    pub error_ns: u64,
    /// The kernel's stamps before and after it in the file (also of lines that are not kept): its
    /// time is between them, more or less.
    pub between: (Option<i64>, Option<i64>),
    pub fact: Fact,
}

impl Item {
    pub fn new(stamp: Stamp, format: Format, line: u64, fact: Fact) -> Self {
        Self { stamp, read_ns: None, format, line, error_ns: 0, between: (None, None), fact }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// A line of the guest's kernel log.
    Kernel(String),
    /// A line of kata-gpu-init.
    Init(InitLine),
    /// What a line of the agent means.
    Agent(AgentEvent),
    /// Something that needs no further thought: a record by its name. For what happened on the
    /// host.
    Plain { name: &'static str, level: Level, error: Option<String>, fields: Map<String, Value> },
}

/// What kata-gpu-init writes to the console: events and ends of spans (begins when asked for
/// details), without span ids.
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

/// Why a line gave nothing.
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
            Self::AlreadyThere => "said twice",
            Self::OtherBoot => "of other boots or sandboxes",
            Self::LimitReached => "beyond the limit of what one import keeps",
            Self::Unplaceable => "on a clock that nothing here relates to the guest's",
        }
    }
}

/// What came of a file's lines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    pub lines: u64,
    pub recognised: u64,
    pub skipped: BTreeMap<Skip, u64>,
    /// Stamps that are earlier than the one before: normal for a few lines, told because they make
    /// order doubtful.
    pub backwards: u64,
    /// What ended the reading before the end of the file.
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

/// Items that one import keeps of one file: a boot has some thousand. More is a log of something
/// else, or an attack.
pub const MAX_ITEMS: usize = 200_000;
/// The latest time on the guest's clock that is believed: about 115 days after kernel start. A boot
/// is long over by then.
pub const MAX_STAMP_NS: i64 = 10_000_000 * 1_000_000_000;

/// One boot as a console-like file tells it.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// The sandbox that the file names it by.
    pub sandbox: Option<String>,
    pub items: Vec<Item>,
}
