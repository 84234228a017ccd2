//! Limits on the parts of one boot that a reader keeps: many times the size of the largest boots,
//! and a bound on the cost of a hostile one.
//!
//! Records and lines over a limit are left out and counted in [`TooLarge`]; the rest is shown
//! unchanged. Every limit is on data that a reader holds, so no file can exceed the bound on
//! memory; tests/host reads the worst files with exactly that much memory.

use super::units::is_zero;
use serde::Serialize;

/// Records. A boot with 16 GPUs has some hundred, with a chatty kernel some thousand.
pub const MAX_RECORDS: usize = 32_768;
/// Bytes of errors, fields and orders of all records: some hundred thousand in a chatty boot.
pub const MAX_TEXT: usize = 4 << 20;
/// Fields of all records: a view may make two texts of each.
pub const MAX_ALL_FIELDS: usize = 65_536;
/// Records of the end of a boot (settled, powered off) that are kept beyond the other limits.
pub const MAX_LAST_WORDS: usize = 16;
/// Orders between spans (`after`); a boot with 16 GPUs has some hundred.
pub const MAX_ORDERS: usize = 32_768;
/// Lines of the collector; it writes a few per connection and one a second at most for the clock.
pub const MAX_HOST_LINES: usize = 16_384;
/// Bytes of the collector's lines.
pub const MAX_HOST_TEXT: usize = 2 << 20;
/// Gaps in the numbers of records that are listed; the collector takes 1024.
pub const MAX_GAPS: u64 = 16_384;
/// Spans: a boot with 16 GPUs has some two hundred, each later hot plug some ten.
pub const MAX_SPANS: usize = 8192;
/// GPUs, by address; the largest machines have 16 in a guest.
pub const MAX_GPUS: usize = 256;
/// Requested containers.
pub const MAX_CONTAINERS: usize = 1024;
/// Lines of the agent in a console log.
pub const MAX_AGENT_LINES: usize = 8192;
/// Bytes of the texts in these lines.
pub const MAX_AGENT_TEXT: usize = 2 << 20;

/// Counts of parts left out of a boot, over the limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TooLarge {
    /// Ignored records.
    #[serde(skip_serializing_if = "is_zero")]
    pub records: u64,
    /// Records that lost fields or orders.
    #[serde(skip_serializing_if = "is_zero")]
    pub cut_records: u64,
    /// Lines of the collector.
    #[serde(skip_serializing_if = "is_zero")]
    pub host_lines: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub spans: u64,
    /// Records of GPUs beyond the limit.
    #[serde(skip_serializing_if = "is_zero")]
    pub gpu_records: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub containers: u64,
    /// Whether the console log has more lines of the agent.
    #[serde(skip_serializing_if = "is_zero")]
    pub agent_lines: bool,
}

impl TooLarge {
    /// Returns `None` if nothing is left out.
    pub fn some(self) -> Option<Self> {
        (self != Self::default()).then_some(self)
    }

    /// `too large: 12 record(s), 3 span(s) left out`.
    pub fn sentence(&self) -> String {
        let counted = [
            (self.records, "record(s)"),
            (self.cut_records, "part(s) of records"),
            (self.host_lines, "line(s) of the collector"),
            (self.spans, "span(s)"),
            (self.gpu_records, "record(s) of further GPUs"),
            (self.containers, "container(s)"),
        ];
        let counted = counted
            .into_iter()
            .filter(|(n, _)| *n > 0)
            .map(|(n, what)| format!("{n} {what}"));
        let lines = self
            .agent_lines
            .then(|| "further lines of the agent".to_string());
        let all: Vec<String> = counted.chain(lines).collect();
        format!(
            "too large: {} left out; no boot of a guest that works has as many",
            all.join(", ")
        )
    }
}
