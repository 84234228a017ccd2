//! The host's trace of a boot on the guest's clock: steps, counts, and the guest's GPU of each.
//!
//! The host knows a function by its own address. A memory range of the guest's kernel log names the
//! guest's: the host mapped the BAR at that address of the guest.

use super::intervals::ns;
use crate::data::boot_file::BootFile;
use crate::data::clock_offset::{Clock, RATE_ERROR_PPM};
use crate::data::compact_record::Record;
use crate::data::text::printable_start;
use crate::data::trace_file::{Recording, Traced};
use crate::data::units::{histogram, is_zero, size};
use kata_gpu_wire::catalogue::{Form, row_of};
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::Kind;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// Limit of the texts of a step.
const MAX_TEXT: usize = 64;
/// A step placed less exactly than this is marked as approximate.
const EXACT_NS: u64 = 1_000_000;
/// Limit of kinds of one count.
const MAX_KINDS: usize = 64;

/// The host's trace.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostTrace {
    #[serde(flatten)]
    pub recording: Recording,
    /// Things that took time, by their beginning.
    pub steps: Vec<HostStep>,
    /// Counts over the whole recording.
    pub counts: Vec<HostStep>,
    /// Number of steps that nothing places on the guest's clock.
    #[serde(skip_serializing_if = "is_zero")]
    pub not_placed: usize,
}

/// A step or a count.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostStep {
    /// On the guest's clock; negative before its kernel's start.
    pub begin_ns: i64,
    /// Bound of the error of `begin_ns`.
    pub error_ns: u64,
    /// The guest's address of the function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<PciAddress>,
    #[serde(flatten)]
    pub traced: Traced,
}

impl HostStep {
    pub fn end_ns(&self) -> i64 {
        self.begin_ns.saturating_add_unsigned(self.traced.took_ns)
    }

    pub fn is_approximate(&self) -> bool {
        self.error_ns > EXACT_NS
    }

    /// Facts for people, as keys and texts.
    pub fn fields(&self) -> Vec<(String, String)> {
        let traced = &self.traced;
        let mut fields = Vec::new();
        let mut add = |key: &str, value: Option<String>| {
            fields.extend(value.map(|value| (key.to_string(), value)))
        };
        add("function", traced.function.map(|f| f.to_string()));
        add("bar", traced.bar.map(|bar| bar.to_string()));
        add("bytes", traced.bytes.map(size));
        add("calls", traced.calls.map(|calls| calls.to_string()));
        add(
            "pages_a_call",
            (!traced.pages_a_call.is_empty())
                .then(|| histogram(&traced.pages_a_call.iter().copied().collect())),
        );
        for (kind, count) in traced.kinds.iter().take(MAX_KINDS) {
            add(&printable_start(&kind, MAX_TEXT), Some(count.to_string()));
        }
        let thread = printable_start(&traced.thread, MAX_TEXT);
        add(
            "by",
            traced
                .tid
                .map(|tid| format!("{thread} ({tid})").trim_start().to_string()),
        );
        fields
    }

    /// ` key=value key="two words"`.
    pub fn fields_text(&self) -> String {
        let text = |(key, value): (String, String)| {
            let quote = if value.contains(' ') { "\"" } else { "" };
            format!(" {key}={quote}{value}{quote}")
        };
        self.fields().into_iter().map(text).collect()
    }
}

impl HostTrace {
    /// The trace of a boot; None where nobody recorded it.
    pub fn of(file: &BootFile, records: &[&Record], clock: &Clock) -> Option<Self> {
        let mut trace = Self {
            recording: file.recording()?.clone(),
            ..Self::default()
        };
        let ranges = Ranges::of(records);
        // A function that one of its BARs has named is that GPU in all its steps.
        let mut gpus: HashMap<PciAddress, PciAddress> = HashMap::new();
        for traced in file.traced() {
            if let Some((function, gpu)) = traced
                .function
                .zip(traced.guest_address.and_then(|at| ranges.owner(at)))
            {
                gpus.entry(function).or_insert(gpu);
            }
        }
        for traced in file.traced() {
            let Some((begin_ns, error_ns)) = place(traced, clock) else {
                trace.not_placed += 1;
                continue;
            };
            let gpu = traced
                .function
                .and_then(|function| gpus.get(&function).copied());
            let step = HostStep {
                begin_ns,
                error_ns,
                gpu,
                traced: traced.clone(),
            };
            match row_of(&traced.name).form {
                Form::Span => trace.steps.push(step),
                Form::Event => trace.counts.push(step),
            }
        }
        trace
            .steps
            .sort_by_key(|step| (step.begin_ns, std::cmp::Reverse(step.end_ns())));
        trace.counts.sort_by_key(|count| count.begin_ns);
        Some(trace)
    }

    /// Parts that the trace lacks, as sentences for people.
    pub fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = self
            .recording
            .missing
            .iter()
            .map(|missing| format!("trace: {missing}"))
            .collect();
        if self.recording.lost > 0 {
            notes.push(format!(
                "trace: the kernel dropped {} event(s): counts of calls are too low by as many",
                self.recording.lost
            ));
        }
        if self.not_placed > 0 {
            notes.push(format!(
                "trace: {} step(s) have no place: nothing relates the guest's clock to the host's",
                self.not_placed
            ));
        }
        notes
    }
}

/// Place of a step on the guest's clock, with the bound of its error.
fn place(traced: &Traced, clock: &Clock) -> Option<(i64, u64)> {
    let start = clock.wall_at(0)?;
    let before = start.realtime_ns.checked_sub(traced.began_realtime_ns)?;
    let (at_ns, error_ns) = if before > 0 {
        let drift = u128::from(before.unsigned_abs()) * u128::from(RATE_ERROR_PPM) / 1_000_000;
        (
            -before,
            start
                .error_ns
                .saturating_add(u64::try_from(drift).unwrap_or(u64::MAX)),
        )
    } else {
        let boottime_ns = clock.boottime_at(traced.began_realtime_ns)?;
        (ns(boottime_ns), clock.wall_at(boottime_ns)?.error_ns)
    };
    Some((at_ns, error_ns.saturating_add(traced.clock_error_ns)))
}

/// Memory ranges of PCI functions by the guest kernel's log.
#[derive(Default)]
struct Ranges {
    /// First address -> last address and function.
    by_first: BTreeMap<u64, (u64, PciAddress)>,
}

impl Ranges {
    fn of(records: &[&Record]) -> Self {
        let mut ranges = Self::default();
        for record in records.iter().filter(|r| r.kind == Kind::Kmsg) {
            ranges.by_first.extend(range(record.kmsg_text()));
        }
        ranges
    }

    fn owner(&self, at: u64) -> Option<PciAddress> {
        let (_, (last, function)) = self.by_first.range(..=at).next_back()?;
        (*last >= at).then_some(*function)
    }
}

/// `pci 0000:02:00.0: BAR 2 [mem 0x38000000000-0x3801fffffff 64bit pref]: assigned`; a bridge's
/// window is no function's BAR.
fn range(text: &str) -> Option<(u64, (u64, PciAddress))> {
    let (address, rest) = text.split_once(' ')?.1.split_once(": ")?;
    let is_bar = rest.starts_with("BAR ") || rest.starts_with("reg 0x");
    let (first, rest) = rest
        .split_once("[mem 0x")
        .filter(|_| is_bar)?
        .1
        .split_once("-0x")?;
    let end = rest
        .find(|c: char| !c.is_ascii_hexdigit())
        .unwrap_or(rest.len());
    let parse = |text: &str| u64::from_str_radix(text, 16).ok();
    Some((
        parse(first)?,
        (parse(rest.get(..end)?)?, address.parse().ok()?),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_of_the_guests_log_names_its_function() {
        let address = |text: &str| text.parse::<PciAddress>().unwrap();
        let of = |text: &str| range(text).map(|(first, (last, function))| (first, last, function));
        let gpu = address("0000:02:00.0");
        let want = Some((0x3800_0000_0000, 0x3800_1fff_ffff, gpu));
        assert_eq!(
            of("pci 0000:02:00.0: BAR 2 [mem 0x380000000000-0x38001fffffff 64bit pref]: assigned"),
            want
        );
        assert_eq!(
            of("pci 0000:02:00.0: reg 0x18: [mem 0x380000000000-0x38001fffffff 64bit pref]"),
            want
        );
        assert_eq!(
            of("pci 0000:02:00.0: BAR 2: assigned [mem 0x380000000000-0x38001fffffff 64bit pref]"),
            want
        );
        for other in [
            "pci 0000:00:01.0:   bridge window [mem 0x380000000000-0x38001fffffff 64bit pref]",
            "pci 0000:02:00.0: BAR 2 [mem size 0x20000000 64bit pref]: can't assign",
            "pci 0000:02:00.0: BAR 2 [mem 0xzz-0x1]",
            "BAR 2 [mem 0x1-0x2]",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
        let ranges = Ranges {
            by_first: [(0x1000, (0x1fff, gpu))].into(),
        };
        assert_eq!(
            [0xfff, 0x1000, 0x1fff, 0x2000].map(|at| ranges.owner(at)),
            [None, Some(gpu), Some(gpu), None]
        );
    }
}
