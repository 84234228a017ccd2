//! Facts that log lines state, each with the clock of its stamp.

use super::kernel_lines::Meaning;
use crate::data::agent_log::AgentEvent;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::{Kind, Level};
use serde_json::{Map, Value};

/// Most facts that are kept of one console or of one journal's host lines: a boot has some
/// thousand. More is a log of something else, or an attack.
pub const MAX_FACTS: usize = 200_000;
pub use crate::data::line_prefix::MAX_STAMP_NS;

/// A time on one of the clocks that logs carry, in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stamp {
    /// printk's clock of the guest.
    Kernel(i64),
    /// A wall clock beside the kernel's lines, where they have no other: `journalctl -k`, `dmesg
    /// -T`. It is of unknown date, zone and resolution.
    Wall(i64),
    /// CLOCK_BOOTTIME of the guest, from our init's lines.
    Boot(i64),
    /// CLOCK_REALTIME of the guest.
    Guest(i64),
    /// CLOCK_REALTIME of the host.
    Host(i64),
}

impl Stamp {
    /// Whether a line of the kernel has this stamp.
    pub fn is_kernels(self) -> bool {
        matches!(self, Self::Kernel(_) | Self::Wall(_))
    }
}

/// A fact from a log.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    pub stamp: Stamp,
    /// Time at which the host's runtime read the line (CLOCK_REALTIME of the host): not before it
    /// was written.
    pub read_ns: Option<i64>,
    /// Number of the file, from 0, and of the line in it, from 1.
    pub file: usize,
    pub line: u64,
    pub fact: Fact,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// A line of the guest's kernel log.
    Kernel { text: String, meaning: Meaning },
    /// A line of kata-gpu-init.
    Init(InitLine),
    /// Meaning of a line of the agent.
    Agent(AgentEvent),
    /// A line of the host's runtime.
    Runtime(RuntimeEvent),
}

/// An event on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct RuntimeEvent {
    pub name: &'static str,
    pub error: Option<String>,
    pub fields: Map<String, Value>,
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
    /// Duration of a span that ends, with which the line has its beginning, too.
    pub took_ns: Option<u64>,
    pub version: String,
    /// CLOCK_REALTIME of the guest at the same moment.
    pub realtime_ns: Option<i64>,
}

/// The facts about one boot in one file.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// The boot's sandbox in the file.
    pub sandbox: Option<String>,
    pub items: Vec<Item>,
}

/// The first characters of a text of a log.
pub fn cut(text: &str, max: usize) -> String {
    text.chars().take(max).collect()
}
