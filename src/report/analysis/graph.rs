//! Graph of waits: two nodes a step (its beginning and its end), and one for the target milestone.
//!
//! A node comes `lag` after the last of the nodes that it waits for; lags are observed values and
//! do not change when a step is made shorter. A lag belongs to a step (its own duration, or its
//! part of a step around others), or to no step. Contradictions (a cycle of steps without length)
//! are cut at the earliest of the nodes, and counted.

use crate::boot::timeline::{Known, Timeline, Window};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A node: the beginning or the end of a step.
#[derive(Clone, Debug)]
pub struct Node {
    pub at_ns: i64,
    /// Nodes that this one waits for.
    pub after: Vec<(usize, Known)>,
    /// Time since the last of these nodes.
    lag_ns: i128,
    /// Step whose time the lag is.
    of: Lag,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lag {
    None,
    /// The step that ends at this node.
    Step(usize),
    /// The step around this node: the last node it waited for lies in that step, too, because the
    /// step's beginning is one of them.
    Parent(usize),
}

/// All nodes, and an order in which each comes after the nodes that it waits for.
#[derive(Debug)]
pub struct Graph {
    pub nodes: Vec<Node>,
    order: Vec<usize>,
    pub target: usize,
    /// Number of orders that were part of a cycle.
    pub cut: usize,
}

fn begin_of(step: usize) -> usize {
    2 * step
}

fn end_of(step: usize) -> usize {
    2 * step + 1
}

/// Step of a node, and whether the node is its end; None for the target.
pub fn step_of(node: usize, steps: usize) -> Option<(usize, bool)> {
    (node < 2 * steps).then_some((node / 2, node % 2 == 1))
}

impl Graph {
    /// Builds the graph of waits until the window's end.
    pub fn new(timeline: &Timeline, window: &Window) -> Self {
        let (steps, at_ns) = (&timeline.steps, window.to.at_ns);
        let mut nodes: Vec<Node> = Vec::with_capacity(2 * steps.len() + 1);
        for (i, step) in steps.iter().enumerate() {
            let mut begin: Vec<(usize, Known)> = step
                .after
                .iter()
                .map(|(s, known)| (end_of(*s), *known))
                .collect();
            begin.extend(step.parent.map(|p| (begin_of(p), Known::Within)));
            let of = step.parent.map_or(Lag::None, Lag::Parent);
            nodes.push(Node {
                at_ns: step.begin_ns,
                after: begin,
                lag_ns: 0,
                of,
            });
            nodes.push(Node {
                at_ns: step.end_ns,
                after: vec![(begin_of(i), Known::Within)],
                lag_ns: 0,
                of: Lag::Step(i),
            });
        }
        for (i, step) in steps.iter().enumerate() {
            let around = step.parent.filter(|p| {
                steps
                    .get(*p)
                    .is_some_and(|p| p.end_ns >= step.end_ns && !step.row.waiting)
            });
            if let Some(end) = around.and_then(|p| nodes.get_mut(end_of(p))) {
                end.after.push((end_of(i), Known::Within));
            }
        }
        let target = nodes.len();
        let made_by = window.to.after.iter().map(|s| (end_of(*s), Known::Order));
        let mut made_by: Vec<(usize, Known)> = made_by.collect();
        if made_by.is_empty() {
            let ended = steps
                .iter()
                .enumerate()
                .filter(|(_, s)| s.end_ns <= at_ns && !s.row.waiting);
            made_by.extend(
                ended
                    .max_by_key(|(_, s)| (s.end_ns, s.took_ns()))
                    .map(|(i, _)| (end_of(i), Known::Assumed)),
            );
        }
        nodes.push(Node {
            at_ns,
            after: made_by,
            lag_ns: 0,
            of: Lag::None,
        });
        let (order, cut) = sort(&mut nodes);
        let times: Vec<i64> = nodes.iter().map(|n| n.at_ns).collect();
        for node in &mut nodes {
            let last = node.after.iter().filter_map(|(d, _)| times.get(*d)).max();
            node.lag_ns = last.map_or(0, |last| i128::from(node.at_ns) - i128::from(*last));
        }
        Self {
            nodes,
            order,
            target,
            cut,
        }
    }

    /// The node that this one waited for last; of several, the one that the record names.
    pub fn last_of(&self, node: usize) -> Option<(usize, Known)> {
        let after = self.nodes.get(node)?.after.iter();
        after
            .max_by_key(|(d, known)| (self.nodes.get(*d).map(|n| n.at_ns), Reverse(*known), *d))
            .copied()
    }

    /// The step that owns the time between the last node waited for and this node.
    pub fn step_of_lag(&self, node: usize) -> Option<usize> {
        match self.nodes.get(node)?.of {
            Lag::None => None,
            Lag::Step(step) | Lag::Parent(step) => Some(step),
        }
    }

    /// Time of the target if of each step's time only this part were left: 0.0 of a step that takes
    /// none, 1.0 of one that stays. `trust_assumed`: assumed orders count, too; otherwise a node
    /// with only an assumed wait keeps its time.
    pub fn with_parts(&self, left: &[f64], trust_assumed: bool) -> i128 {
        let mut at: Vec<i128> = self.nodes.iter().map(|n| i128::from(n.at_ns)).collect();
        for i in &self.order {
            let Some(node) = self.nodes.get(*i) else {
                continue;
            };
            let time_of = |(d, known): &(usize, Known)| match self.nodes.get(*d) {
                Some(dependency) if *known == Known::Assumed && !trust_assumed => {
                    Some(i128::from(dependency.at_ns))
                }
                _ => at.get(*d).copied(),
            };
            let Some(last) = node.after.iter().filter_map(time_of).max() else {
                continue;
            };
            let left = self
                .step_of_lag(*i)
                .and_then(|step| left.get(step).copied())
                .unwrap_or(1.0);
            if let Some(time) = at.get_mut(*i) {
                // A lag that stays is exact; f64 rounds above 2^53 ns, which is 104 days.
                *time = last
                    + if left < 1.0 {
                        (node.lag_ns as f64 * left) as i128
                    } else {
                        node.lag_ns
                    };
            }
        }
        at.get(self.target).copied().unwrap_or(0)
    }
}

/// Kahn's algorithm, earliest first. If no node is free, the earliest remaining one stops waiting.
fn sort(nodes: &mut [Node]) -> (Vec<usize>, usize) {
    let mut waits: Vec<usize> = nodes.iter().map(|n| n.after.len()).collect();
    let mut next: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    for (i, node) in nodes.iter().enumerate() {
        for (d, _) in &node.after {
            if let Some(next) = next.get_mut(*d) {
                next.push(i);
            }
        }
    }
    let mut done = vec![false; nodes.len()];
    let mut free: BinaryHeap<Reverse<(i64, usize)>> = BinaryHeap::new();
    let mut rest: Vec<(i64, usize)> = nodes
        .iter()
        .enumerate()
        .map(|(i, n)| (n.at_ns, i))
        .collect();
    rest.sort_unstable_by(|a, b| b.cmp(a));
    free.extend(
        waits
            .iter()
            .zip(nodes.iter())
            .enumerate()
            .filter(|(_, (w, _))| **w == 0)
            .map(|(i, (_, n))| Reverse((n.at_ns, i))),
    );
    let mut order = Vec::with_capacity(nodes.len());
    let mut cut = 0;
    loop {
        let taken = match free.pop() {
            Some(Reverse((_, i))) => i,
            None => {
                while rest
                    .last()
                    .is_some_and(|(_, i)| done.get(*i).copied().unwrap_or(true))
                {
                    rest.pop();
                }
                let Some((_, i)) = rest.pop() else {
                    return (order, cut);
                };
                // Cut only waits for nodes not yet placed; keep the others.
                if let Some(node) = nodes.get_mut(i) {
                    let before = node.after.len();
                    node.after
                        .retain(|(d, _)| done.get(*d).copied().unwrap_or(false));
                    cut += before - node.after.len();
                }
                i
            }
        };
        match done.get_mut(taken) {
            Some(done) if !*done => *done = true,
            _ => continue,
        }
        order.push(taken);
        for i in next.get(taken).into_iter().flatten() {
            if let Some(waits) = waits.get_mut(*i) {
                *waits = waits.saturating_sub(1);
                if *waits == 0 && !done.get(*i).copied().unwrap_or(true) {
                    free.extend(nodes.get(*i).map(|n| Reverse((n.at_ns, *i))));
                }
            }
        }
    }
}
