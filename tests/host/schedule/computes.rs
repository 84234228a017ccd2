//! A failure means that a program of a container computes later than the end of the initialisations
//! that were under way, because the next ones have begun: a GPU that came early is then worth
//! nothing before the last one.

use super::{MEDIUM, MS};
use kata_gpu_init::boot::bring_up::strategy::Policy;
use kata_gpu_tests::schedule::drive::{self, Broken, Container, Overhead, Run, drive_broken};
use kata_gpu_tests::schedule::locks::{Fact, Host, Micros, Order, Times};

/// Time until a program that has the driver for itself computes.
const ALONE: Micros = 400 * MS;

/// A bring-up with a container for each GPU, all asked for at its begin.
fn run(enable: Micros, gpus: usize, first: usize, broken: Broken) -> Run {
    let times = Times {
        enable: enable * MS,
        ..MEDIUM
    };
    let host = Host {
        vcpus: 2,
        load: Some(drive::USUAL_LOAD),
        ..Host::of(gpus, times)
    };
    let policy = Policy {
        first,
        ..drive::policy(gpus, host.vcpus)
    };
    let containers = Container::one_each(gpus);
    let overhead = Overhead::USUAL;
    match broken {
        Broken::No => drive::drive(&host, policy, &containers, overhead, 1),
        _ => drive_broken(&host, policy, &containers, overhead, 1, broken),
    }
}

/// Begin and end of each initialisation, by GPU.
fn initialisations(run: &Run, gpus: usize) -> Vec<(Micros, Micros)> {
    let begin = |gpu| {
        let mut orders = run.outcome.orders.iter();
        orders.find(|(_, order)| *order == Order::Open(gpu))
    };
    let end = |gpu| {
        let mut facts = run.outcome.facts.iter();
        facts.find(|(_, fact)| *fact == Fact::Initialised(gpu, true))
    };
    (0..gpus)
        .map(|gpu| (begin(gpu).unwrap().0, end(gpu).unwrap().0))
        .collect()
}

/// Programs that compute later than they could: their GPU is usable, none of its wave initialises
/// any more, one is still to be enabled, and yet others begin. How late, by GPU.
fn late(run: &Run, gpus: usize) -> Vec<(usize, Micros)> {
    let spans = initialisations(run, gpus);
    let enabled = |(at, fact): &(Micros, Fact)| matches!(fact, Fact::Enabled(..)).then_some(*at);
    let lane_over = run.outcome.facts.iter().filter_map(enabled).max();
    let of_gpu = |gpu: usize| {
        let usable = spans[gpu].1;
        let begun = |span: &&(Micros, Micros)| span.0 < usable;
        let wave_over = spans
            .iter()
            .filter(begun)
            .map(|(_, end)| *end)
            .max()
            .unwrap();
        let could = wave_over.max(run.containers[gpu].unwrap()) + ALONE;
        let computes = run.computes[gpu].unwrap();
        let is_late = computes > could && Some(could) < lane_over;
        is_late.then(|| (gpu, computes - could))
    };
    (0..gpus).filter_map(of_gpu).collect()
}

const ENABLE: [Micros; 6] = [300, 700, 1000, 1500, 2000, 3300];

#[test]
fn a_program_computes_when_its_wave_is_over() {
    for enable in ENABLE {
        for gpus in [4, 8, 16] {
            let run = run(enable, gpus, 0, Broken::No);
            let late = late(&run, gpus);
            assert_eq!(late, [], "E = {enable} ms, {gpus} GPUs: {:?}", run.computes);
        }
    }
    // The control: a schedule that hears of no container.
    let mut caught = ENABLE.into_iter().filter(|enable| {
        let run = run(*enable, 8, 0, Broken::HearsNoContainer);
        !late(&run, 8).is_empty()
    });
    assert!(caught.next().is_some());
}

/// On a fast host all initialise at once, but for those that are to be first.
#[test]
fn gpus_that_are_to_be_first_compute_before_the_others_begin() {
    for first in [1, 2] {
        let run = run(3, 8, first, Broken::No);
        let spans = initialisations(&run, 8);
        let others = spans.iter().skip(first).map(|(begin, _)| *begin).min();
        let computes = run.computes.iter().take(first).copied().max().flatten();
        assert!(computes < others, "{first} first: {computes:?}, {others:?}");
        assert!(run.computes.iter().all(Option::is_some));
    }
    let all = run(3, 8, 0, Broken::No);
    let last = *all.computes.iter().max().unwrap();
    assert!(all.computes[0].unwrap() + 100 * MS > last.unwrap());
}
