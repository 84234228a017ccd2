//! A failure means that an account of a boot does not add up for some story, however absurd: a
//! critical path with a hole, a gain larger than the window, or time that is counted twice.

use kata_gpu_report::analysis::blame::{By, blame};
use kata_gpu_report::analysis::critical_path::{critical_path, gain};
use kata_gpu_report::analysis::graph::Graph;
use kata_gpu_report::boot::coverage::coverage;
use kata_gpu_report::boot::story::{Milestone, RawStep, Story};
use kata_gpu_report::boot::timeline::Timeline;
use kata_gpu_test_support::property;
use kata_gpu_wire::catalogue::steps as known_steps;
use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::select;
use std::cell::Cell;

/// Mostly a time within a boot of 1,000 ns, so that many coincide; now and then an absurd one.
fn time() -> impl Strategy<Value = i64> {
    prop_oneof![
        1 => Just(i64::MAX),
        1 => Just(i64::MIN),
        1 => -500..=0_i64,
        37 => (0..20_i64).prop_map(|n| 50 * n),
    ]
}

fn step() -> impl Strategy<Value = RawStep> {
    let known: Vec<&str> = known_steps().map(|row| row.name).collect();
    let name = prop_oneof![9 => select(known), 1 => Just("imported")];
    let indices = |most| vec(0..26_usize, 0..most);
    let links = (weighted(0.3, 0..26_usize), indices(4), indices(2));
    (name, time(), weighted(0.9, time()), links).prop_map(
        |(name, begin_ns, end_ns, (parent, after, follows))| RawStep {
            name: name.into(),
            begin_ns,
            end_ns,
            parent,
            after,
            follows,
            ..RawStep::default()
        },
    )
}

/// Links lead to any step, to the step itself, and to steps that are not there.
fn story() -> impl Strategy<Value = Story> {
    let milestones = vec((time(), vec(0..26_usize, 0..3)), 3);
    (vec(step(), 1..25), milestones, time()).prop_map(|(steps, milestones, last_ns)| Story {
        milestones: ["a", "b", "c"]
            .into_iter()
            .zip(milestones)
            .map(|(name, (at_ns, after))| Milestone {
                name: name.into(),
                at_ns,
                after,
                ..Milestone::default()
            })
            .collect(),
        steps,
        last_ns,
        missing: Vec::new(),
    })
}

#[test]
fn every_story_gives_an_account_that_adds_up() {
    let seen = [(); 5].map(|()| Cell::new(0));
    let [accounts, gains, off_path, gaps, cut] = &seen;
    let count = |what: &Cell<usize>, more| what.set(what.get() + more);
    proptest!(property(3000), |(story in story())| {
        let timeline = Timeline::new(story);
        let Ok(window) = timeline.window(None, None) else {
            return Ok(());
        };
        let wall = window.wall_ns();
        count(accounts, 1);

        let covered = coverage(&timeline, &window);
        let sum = covered.explained_ns + covered.unexplained_ns;
        prop_assert_eq!(sum, wall, "coverage and gaps are the wall time");
        count(gaps, covered.gaps.len());

        for by in [By::Owner, By::Phase] {
            let account = blame(&timeline, &window, by);
            let groups = account.groups.iter();
            let times = groups.flat_map(|g| g.steps.iter().map(|s| s.time).chain([g.time]));
            for time in times.chain(account.waiting.iter().map(|s| s.time)) {
                prop_assert!(time.wall_ns <= wall, "{time:?}");
                prop_assert!(time.wall_ns <= time.sum_ns, "{time:?}");
                prop_assert!(time.longest_ns <= time.wall_ns, "{time:?}");
            }
        }

        let graph = Graph::new(&timeline, &window);
        let path = critical_path(&timeline, &window, 3);
        count(cut, path.cut);
        let mut at = window.from.at_ns;
        for piece in &path.path {
            prop_assert_eq!(piece.begin_ns, at, "the path has no hole");
            at = at.wrapping_add_unsigned(piece.took_ns);
        }
        prop_assert_eq!(at, window.to.at_ns, "the path ends where the window does");
        for (i, step) in timeline.steps.iter().enumerate() {
            let (sure, at_most) = gain(&window, &graph, &[i]);
            prop_assert!(sure <= at_most && at_most <= wall, "what is sure is possible");
            // The path may have another step of the same name; such a step is not checked here.
            let title = step.title();
            let is_named = path.path.iter().any(|p| p.step.as_deref() == Some(title.as_str()));
            if !is_named && step.begin_ns >= window.from.at_ns {
                prop_assert_eq!(at_most, 0, "{} is not on the path and brings time", step.name);
                count(off_path, 1);
            }
            count(gains, usize::from(at_most > 0));
        }
        for found in path.without_step.iter().chain(&path.without_kind) {
            prop_assert!(found.at_most_ns <= found.on_path_ns, "{found:?}");
        }
    });
    // Each case occurred: an account in which nothing ever happens would pass all of the above.
    let seen = seen.map(Cell::into_inner);
    let least = [1500, 3000, 3000, 1500, 1];
    assert!(
        seen.iter().zip(least).all(|(seen, least)| *seen >= least),
        "{seen:?}"
    );
}
