//! `schedules CASES`: so many bring-ups of each kind of trouble, in virtual time, seeds from 0 on.
//! `schedules KIND SEED`: one of them, event by event.
//!
//! Prints complaints as they come to standard error, and their numbers by kind and property to
//! standard output. Exit status 1 if there is one.

use kata_gpu_schedule::properties::{Case, Trouble};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

const USAGE: &str = "want: schedules CASES | schedules KIND SEED, with KIND one of None, \
    Failures, Hang, Traffic, Any";
/// Complaints printed of a kind of trouble.
const PRINTED: usize = 10;

/// Number of complaints by property.
type Counts = BTreeMap<&'static str, u64>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (kind, seed) = match &arguments[..] {
        [cases] => return cases.parse().map_or_else(|_| usage(), all),
        [kind, seed] => (
            Trouble::ALL
                .into_iter()
                .find(|trouble| format!("{trouble:?}") == *kind),
            seed.parse().ok(),
        ),
        _ => (None, None),
    };
    let (Some(trouble), Some(seed)) = (kind, seed) else {
        return usage();
    };
    one(&Case::random(seed, trouble))
}

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::from(2)
}

fn all(cases: u64) -> ExitCode {
    let mut found = 0;
    for trouble in Trouble::ALL {
        let counts = complaints(trouble, cases);
        found += counts.values().sum::<u64>();
        let counts: Vec<String> = counts
            .iter()
            .map(|(property, count)| format!("{count} {property:?}"))
            .collect();
        println!(
            "{trouble:?}: {cases} bring-ups, complaints: {}",
            if counts.is_empty() {
                "none".into()
            } else {
                counts.join(", ")
            }
        );
    }
    if found == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// On all CPUs; the order of what is printed is any.
fn complaints(trouble: Trouble, cases: u64) -> Counts {
    let next = AtomicU64::new(0);
    let work = || {
        let mut counts = Counts::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= cases {
                return counts;
            }
            let case = Case::random(seed, trouble);
            for complaint in case.complaints(&case.run()) {
                let count = counts.entry(complaint.property).or_default();
                *count += 1;
                if *count <= PRINTED as u64 {
                    eprintln!("{complaint}");
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut all = Counts::new();
        for thread in threads {
            match thread.join() {
                Ok(counts) => counts
                    .into_iter()
                    .for_each(|(property, count)| *all.entry(property).or_default() += count),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    })
}

/// Prints events of the model (`world`), reports, orders, and steps as they begin, in ms.
fn one(case: &Case) -> ExitCode {
    let run = case.run();
    println!(
        "{:#?}\n{:?}\n{:?}\n{:?}",
        case.host, case.policy, case.containers, case.overhead
    );
    let mut events: Vec<(u64, u8, String)> = Vec::new();
    events.extend(
        run.outcome
            .facts
            .iter()
            .map(|(at, fact)| (*at, 0, format!("        world  {fact:?}"))),
    );
    events.extend(
        run.reports
            .iter()
            .map(|(at, fact)| (*at, 1, format!("    report {fact:?}"))),
    );
    events.extend(
        run.orders
            .iter()
            .map(|(at, order)| (*at, 2, format!("ORDER {order:?}"))),
    );
    events.extend(
        run.outcome
            .orders
            .iter()
            .map(|(at, order)| (*at, 3, format!("        begins {order:?}"))),
    );
    events.sort_by_key(|(at, rank, _)| (*at, *rank));
    for (at, _, text) in events {
        println!("{:10}.{:03} {text}", at / 1000, at % 1000);
    }
    println!("at the end: {:?}", run.at);
    let complaints = case.complaints(&run);
    complaints
        .iter()
        .for_each(|complaint| println!("{complaint}"));
    if complaints.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
