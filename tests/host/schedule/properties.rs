//! A failure means that the schedule, in one of thousands of random bring-ups, leaves a GPU,
//! enables beside a step that this stalls, waits longer than a limit, or gives names out of PCI
//! order. The complaint names the seed; a broken schedule is the control.

use kata_gpu_tests::schedule::drive::Broken;
use kata_gpu_tests::schedule::properties::{Case, Trouble};

/// Cases of each kind; SCHEDULE_CASES overrides.
const CASES: u64 = 1000;

fn holds(trouble: Trouble) {
    let mut complaints = Vec::new();
    let number = |cases: String| cases.parse().expect("SCHEDULE_CASES: want a number");
    let cases = std::env::var("SCHEDULE_CASES").map_or(CASES, number);
    for seed in 0..cases {
        let case = Case::random(seed, trouble);
        complaints.extend(case.complaints(&case.run()));
    }
    let first: Vec<String> = complaints
        .iter()
        .take(10)
        .map(|complaint| format!("{complaint}\n"))
        .collect();
    assert!(
        complaints.is_empty(),
        "{} complaints in {cases} cases:\n{}",
        complaints.len(),
        first.concat()
    );
}

#[test]
fn every_bring_up_ends_in_order_and_trespasses_on_nobody() {
    holds(Trouble::None);
}

#[test]
fn gpus_that_fail_stop_nobody() {
    holds(Trouble::Failures);
}

#[test]
fn a_gpu_that_hangs_in_its_probe_costs_the_others_one_limit() {
    holds(Trouble::Hang);
}

#[test]
fn gpus_come_and_go_at_any_time() {
    holds(Trouble::Traffic);
}

#[test]
fn whatever_goes_wrong_is_reported_and_in_order() {
    holds(Trouble::Any);
}

#[test]
fn a_broken_schedule_is_caught() {
    for broken in [
        Broken::ThinksFast,
        Broken::Forgets,
        Broken::ProbesTwo,
        Broken::LastFirst,
        Broken::SeesTooSoon,
    ] {
        let caught = (0..300).filter(|seed| {
            let case = Case::random(*seed, Trouble::None);
            !case.complaints(&case.run_broken(broken)).is_empty()
        });
        assert!(caught.count() > 0, "{broken:?} is caught in no case");
    }
}
