//! Calls of `vfio_pin_pages_remote`, from any trace: their regions, sizes and durations.
//!
//! The kernel pins a region (a BAR, a piece of guest memory) in a loop: each call asks for the rest
//! of the region and pins its contiguous beginning, so that the end address is the same in all
//! calls. The end address, with the process, names the region. A call's pinned pages are its return
//! value or, where the trace has none, the distance to the next call of its region.

use crate::host::data::units::class;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Page size that `npage` counts in: x86-64 and what NVIDIA's arm64 hosts run VFIO with by default.
pub const PAGE: u64 = 4096;
/// Most calls that are kept of one trace.
pub const MAX_CALLS: usize = 2_000_000;
/// Most regions with a row of their own.
pub const MAX_REGIONS: usize = 64;
/// A region that is smaller, and was pinned faster, only counts in the sum.
const REGION_BYTES: u64 = 1 << 30;
const REGION_NS: u64 = 100_000_000;

/// A call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// Begin of the call, on the trace's clock.
    pub at_ns: Option<i64>,
    pub pid: Option<u32>,
    /// Calling thread, where the trace does not name the process.
    pub thread: Option<u32>,
    pub vaddr: Option<u64>,
    /// Pages asked for.
    pub asked: Option<u64>,
    /// Pages pinned: the return value.
    pub pinned: Option<u64>,
    pub took_ns: Option<u64>,
    pub line: u64,
}

/// Facts about one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    pub pid: Option<u32>,
    pub bytes: u64,
    pub calls: u64,
    pub at_ns: Option<i64>,
    /// Time in all its calls.
    pub took_ns: u64,
    /// End of its last call.
    pub end_ns: Option<i64>,
    pub line: u64,
}

/// Sums of a trace.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sum {
    pub calls: u64,
    pub regions: u64,
    /// Bytes of all calls; `None` where the trace has no sizes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    pub took_ns: u64,
    /// Pages a call, by powers of ten: first of each class, and how many calls.
    pub sizes: BTreeMap<u64, u64>,
    /// Duration of a call in us, by powers of ten.
    pub durations_us: BTreeMap<u64, u64>,
    pub processes: u64,
    /// Threads of unknown processes.
    #[serde(skip_serializing_if = "is_zero")]
    pub threads: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Sorts calls into regions.
pub fn regions(calls: &[Call]) -> (Vec<Region>, Sum) {
    let mut regions: Vec<Region> = Vec::new();
    let mut open: HashMap<(Option<u32>, u64), usize> = HashMap::new();
    let mut last_of: HashMap<usize, Call> = HashMap::new();
    let mut sum = Sum { calls: calls.len() as u64, ..Sum::default() };
    let (mut processes, mut threads) = (BTreeSet::new(), BTreeSet::new());
    let mut size_of = |sizes: &mut BTreeMap<u64, u64>, pages: u64| *sizes.entry(class(pages)).or_default() += 1;
    for call in calls {
        processes.extend(call.pid);
        threads.extend(call.thread);
        let took = call.took_ns.unwrap_or(0);
        sum.took_ns = sum.took_ns.saturating_add(took);
        if let Some(took) = call.took_ns {
            *sum.durations_us.entry(class(took / 1000)).or_default() += 1;
        }
        let end = call.at_ns.map(|at| at.saturating_add_unsigned(took));
        let asked = call.asked.map(|pages| pages.saturating_mul(PAGE));
        let key = call.vaddr.zip(asked).map(|(vaddr, bytes)| (call.pid.or(call.thread), vaddr.saturating_add(bytes)));
        // A call that asks for more than is left, or for as much again, begins a region anew.
        let known = key.and_then(|key| open.get(&key).copied()).filter(|at| {
            last_of.get(at).is_some_and(|last| match (last.vaddr, call.vaddr) {
                (Some(before), Some(now)) => now > before,
                _ => false,
            })
        });
        match known.and_then(|at| Some((at, regions.get_mut(at)?))) {
            Some((at, region)) => {
                if let Some(last) = last_of.get(&at)
                    && last.pinned.is_none()
                    && let (Some(before), Some(now)) = (last.vaddr, call.vaddr)
                {
                    size_of(&mut sum.sizes, (now - before) / PAGE);
                }
                region.calls += 1;
                region.took_ns = region.took_ns.saturating_add(took);
                region.end_ns = end.max(region.end_ns);
                last_of.insert(at, *call);
            }
            None => {
                let at = regions.len();
                let bytes = asked.unwrap_or(0);
                regions.push(Region { pid: call.pid, bytes, calls: 1, at_ns: call.at_ns, took_ns: took, end_ns: end, line: call.line });
                if let Some(key) = key
                    && let Some(finished) = open.insert(key, at)
                    && let Some(last) = last_of.remove(&finished)
                {
                    rest_of(&last, &mut sum.sizes, &mut size_of);
                }
                last_of.insert(at, *call);
            }
        }
        if let Some(pages) = call.pinned {
            size_of(&mut sum.sizes, pages);
        }
    }
    for last in last_of.values() {
        rest_of(last, &mut sum.sizes, &mut size_of);
    }
    sum.regions = regions.len() as u64;
    sum.bytes = calls.iter().any(|c| c.asked.is_some()).then(|| regions.iter().map(|r| r.bytes).fold(0, u64::saturating_add));
    (sum.processes, sum.threads) = (processes.len() as u64, threads.len() as u64);
    (regions, sum)
}

/// The last call of a region pinned what was left.
fn rest_of(last: &Call, sizes: &mut BTreeMap<u64, u64>, size_of: &mut impl FnMut(&mut BTreeMap<u64, u64>, u64)) {
    if let (None, Some(pages)) = (last.pinned, last.asked) {
        size_of(sizes, pages);
    }
}

/// Regions that are worth a row, the longest first where there are too many; and the number of
/// regions left out.
pub fn worth_a_row(regions: Vec<Region>) -> (Vec<Region>, u64) {
    let all = regions.len();
    let mut large: Vec<Region> = regions.into_iter().filter(|r| r.bytes >= REGION_BYTES || r.took_ns >= REGION_NS).collect();
    large.sort_by_key(|r| std::cmp::Reverse((r.took_ns, r.bytes)));
    large.truncate(MAX_REGIONS);
    large.sort_by_key(|r| (r.at_ns, r.line));
    let left_out = (all - large.len()) as u64;
    (large, left_out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::data::units::histogram;

    fn call(vaddr: u64, asked: u64, took_ms: u64) -> Call {
        Call { vaddr: Some(vaddr), asked: Some(asked), took_ns: Some(took_ms * 1_000_000), pid: Some(7), ..Call::default() }
    }

    #[test]
    fn calls_that_end_at_one_address_are_one_region() {
        // 1000 pages in pieces of 1, 9 and 990, then a region of one call that happens to end
        // elsewhere, then the first one again.
        let calls = [call(0, 1000, 1), call(PAGE, 999, 1), call(10 * PAGE, 990, 200), call(PAGE * 5000, 512, 3), call(0, 1000, 2)];
        let (regions, sum) = regions(&calls);
        assert_eq!(
            regions.iter().map(|r| (r.bytes / PAGE, r.calls, r.took_ns / 1_000_000)).collect::<Vec<_>>(),
            [(1000, 3, 202), (512, 1, 3), (1000, 1, 2)]
        );
        assert_eq!(sum.sizes, [(1, 2), (100, 2), (1000, 1)].into());
        assert_eq!((sum.calls, sum.bytes, sum.processes), (5, Some(2512 * PAGE), 1));
        let (rows, left_out) = worth_a_row(regions);
        assert_eq!((rows.len(), left_out), (1, 2));
    }

    #[test]
    fn threads_are_counted_apart_from_processes() {
        let by = |thread| Call { pid: None, thread: Some(thread), ..call(0, 1, 1) };
        let sum = regions(&[by(7), by(8), by(7)]).1;
        assert_eq!((sum.processes, sum.threads), (0, 2));
        assert_eq!(regions(&[call(0, 1, 1)]).1.threads, 0);
    }

    #[test]
    fn the_return_value_is_believed_before_the_distance() {
        let mut first = call(0, 1000, 1);
        first.pinned = Some(3);
        assert_eq!(regions(&[first, call(3 * PAGE, 997, 1)]).1.sizes, [(1, 1), (100, 1)].into());
    }

    #[test]
    fn calls_without_sizes_are_counted_by_duration() {
        let calls = [Call { took_ns: Some(3_266_000_000), ..Call::default() }, Call { took_ns: Some(900), ..Call::default() }];
        let (regions, sum) = regions(&calls);
        assert_eq!((regions.len(), sum.bytes, &sum.sizes), (2, None, &BTreeMap::new()));
        assert_eq!(histogram(&sum.durations_us), "0: 1, 1000000-9999999: 1");
        assert_eq!(histogram(&[(u64::MAX, 1)].into()), format!("{}-{}: 1", u64::MAX, u64::MAX - 1));
    }
}
