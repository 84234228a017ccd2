//! Cures for one boot: how much sooner it would have ended, had a rule of the doctor been followed.
//!
//! A rule names the steps that its cure shortens, and the part of their time that is left. The end
//! of the window is computed anew with these steps so much shorter, and with all that was seen
//! inside them: another chain of steps may set the end then, so that a cure gains less than the
//! steps lose.

use super::critical_path::sooner;
use super::graph::Graph;
use super::rules::{RULES, Rule};
use crate::boot::timeline::{Timeline, Window};
use serde::Serialize;
use std::cmp::Reverse;

/// Cures that gain less are not worth a line.
const LEAST_NS: u64 = 50_000_000;

/// A cure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cure {
    /// Rule of the doctor.
    pub rule: &'static str,
    pub title: &'static str,
    /// Origin of the rule's figures.
    pub source: &'static str,
    pub cure: &'static str,
    /// How much sooner the window would have ended; by known orders.
    pub sooner_ns: u64,
}

/// Cures that would have shortened the window, the best first.
pub fn cures(timeline: &Timeline, window: &Window) -> Vec<Cure> {
    let graph = Graph::new(timeline, window);
    let cure = |rule: &'static Rule| {
        let sooner_ns = sooner(window, &graph, &parts_left(timeline, rule), false);
        Cure {
            rule: rule.id,
            title: rule.title,
            source: rule.source,
            cure: rule.cure,
            sooner_ns,
        }
    };
    let mut cures: Vec<Cure> = RULES
        .iter()
        .map(cure)
        .filter(|cure| cure.sooner_ns >= LEAST_NS)
        .collect();
    cures.sort_by_key(|cure| (Reverse(cure.sooner_ns), cure.rule));
    cures
}

/// Part of each step's time that a rule's cure leaves.
fn parts_left(timeline: &Timeline, rule: &Rule) -> Vec<f64> {
    let mut left: Vec<f64> = Vec::with_capacity(timeline.steps.len());
    for step in &timeline.steps {
        let own = rule
            .shortens
            .iter()
            .find(|shortens| shortens.step == step.name)
            .map(|shortens| shortens.to);
        // A parent stands before its children.
        let around = || step.parent.and_then(|parent| left.get(parent).copied());
        left.push(own.or_else(around).unwrap_or(1.0));
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::story::RawStep;
    use crate::for_tests;
    use kata_gpu_wire::names;

    fn step(name: &str, begin_ms: i64, end_ms: i64) -> RawStep {
        for_tests::step(name, begin_ms * 1_000_000, end_ms * 1_000_000)
    }

    /// Gain of the rule about huge pfnmaps, in ms.
    fn gained(steps: Vec<RawStep>, end: usize) -> Option<u64> {
        let at_ns = steps[end].end_ns.unwrap();
        let timeline = for_tests::timeline(steps, 0, at_ns, &[end]);
        let found = cures(&timeline, &timeline.window(None, None).unwrap());
        found
            .iter()
            .find(|cure| cure.rule == "huge-pfnmaps")
            .map(|cure| cure.sooner_ns / 1_000_000)
    }

    #[test]
    fn a_cure_gains_what_the_longest_chain_loses() {
        let enable = step(names::GPU_ENABLE, 0, 2000);
        let inside = RawStep {
            parent: Some(0),
            ..step("vmm.map-bar", 100, 1900)
        };
        let init = RawStep {
            after: vec![0],
            ..step(names::GPU_INIT, 2000, 4000)
        };
        assert_eq!(
            gained(vec![enable.clone(), inside, init.clone()], 2),
            Some(1998)
        );
        // A chain beside it ends half a second before.
        let beside = step("kernel", 0, 3500);
        let publish = RawStep {
            after: vec![1, 2],
            ..step(names::CDI_PUBLISH, 4000, 4000)
        };
        let init = RawStep {
            after: vec![0],
            ..init
        };
        assert_eq!(gained(vec![enable, beside, init, publish], 3), Some(500));
    }

    #[test]
    fn a_boot_without_the_steps_gains_nothing() {
        assert_eq!(gained(vec![step("kernel", 0, 3500)], 0), None);
    }
}
