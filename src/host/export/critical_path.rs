//! Which chain of steps the end of a boot waited for, from the `after` edges alone.
//!
//! A step without edges begins a chain: what it waited for before that is not known, and nothing is guessed from times that are close.

use crate::host::model::{Boot, Span};
use std::collections::{HashMap, HashSet};

/// The ids of the spans on the path, in the order in which they were waited for. The path ends in the step that is open for the longest time
/// or, where none is open, in the step of a GPU that ended last before the boot was settled: that is what settled it.
pub fn critical_path(boot: &Boot) -> Vec<u64> {
    let by_id: HashMap<u64, &Span> = boot.spans.iter().map(|span| (span.id, span)).collect();
    let limit_ns = boot.settled_ns.unwrap_or(u64::MAX);
    let open = || boot.spans.iter().filter(|s| s.end_ns.is_none() && boot.settled_ns.is_none()).min_by_key(|s| s.begin_ns);
    let ended = || {
        let ended = boot.spans.iter().filter(|s| s.end_ns.is_some_and(|end| end <= limit_ns));
        ended.max_by_key(|s| (s.gpu.is_some(), s.end_ns))
    };
    let mut seen = HashSet::new();
    let mut path = Vec::new();
    let mut next = open().or_else(ended);
    while let Some(span) = next {
        // A guest can send edges in a circle.
        if !seen.insert(span.id) {
            break;
        }
        path.push(span.id);
        next = span.after.iter().filter_map(|id| by_id.get(id).copied()).max_by_key(|s| s.end_ns);
    }
    path.reverse();
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(id: u64, begin_ns: u64, end_ns: Option<u64>, after: &[u64]) -> Span {
        Span {
            id,
            name: "x".into(),
            gpu: None,
            parent: None,
            after: after.to_vec(),
            begin_ns: Some(begin_ns),
            end_ns,
            error: None,
            fields: Default::default(),
        }
    }

    fn path(spans: Vec<Span>, settled_ns: Option<u64>) -> Vec<u64> {
        critical_path(&Boot { spans, settled_ns, ..Boot::default() })
    }

    #[test]
    fn the_path_follows_what_ended_last() {
        let spans = vec![span(1, 0, Some(5), &[]), span(2, 0, Some(9), &[]), span(3, 9, Some(12), &[1, 2]), span(4, 6, Some(8), &[1])];
        assert_eq!(path(spans.clone(), Some(20)), [2, 3]);
        assert_eq!(path(spans, Some(9)), [2], "what went on after it was settled held nothing up");
    }

    #[test]
    fn an_open_step_is_what_a_boot_that_is_not_settled_waits_for() {
        let spans = vec![span(1, 0, Some(5), &[]), span(2, 5, None, &[1]), span(3, 7, None, &[]), span(4, 7, Some(99), &[])];
        assert_eq!(path(spans, None), [1, 2]);
    }

    #[test]
    fn circles_unknown_edges_and_nothing_at_all_end_it() {
        assert_eq!(path(vec![span(1, 0, Some(5), &[2]), span(2, 0, Some(4), &[1])], None), [2, 1]);
        assert_eq!(path(vec![span(1, 0, Some(5), &[77, 1])], None), [1]);
        assert!(path(vec![], None).is_empty());
    }
}
