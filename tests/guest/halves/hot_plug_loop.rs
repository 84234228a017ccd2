//! A guest half in which GPUs come and go again and again, and nothing else happens: with
//! `testagent.loop=ROUNDS:GPUS`, GPUs 1 to GPUS (by slot) are taken away and plugged in, ROUNDS
//! times, by surprise, and each tenth time through sysfs, where a removal takes half a second.
//! GPU 0 stays. Reports what each process of the init has after half of the rounds and after each
//! later one: what grows in between would grow for ever. A thread that closes a descriptor, or a
//! process that has opened a GPU, may still run after the last arrival, so a report waits until it
//! has ended.

use super::census::{Process, processes};
use super::script::act;
use crate::agent::log;
use std::time::{Duration, Instant};

/// Longest wait for the end of what ends by itself; only ends the wait for what never does.
const REST: Duration = Duration::from_secs(120);

pub fn run() {
    let words = super::parameter("testagent.loop=").unwrap_or_default();
    let words = words.split_once(':');
    let numbers = words.and_then(|(rounds, gpus)| Some((rounds.parse().ok()?, gpus.parse().ok()?)));
    let ended = numbers
        .ok_or_else(|| "no testagent.loop=ROUNDS:GPUS on the command line".to_string())
        .and_then(|(rounds, gpus)| repeat(rounds, gpus));
    log::info("loop ended", &[("fault", &ended.err().unwrap_or_default())]);
}

fn repeat(rounds: u32, gpus: u32) -> Result<(), String> {
    let all: Vec<String> = (0..=gpus).map(|gpu| gpu.to_string()).collect();
    let all = all.join(",");
    act(&format!("spec-gives:{all}"))?;
    let mut middle = Vec::new();
    for round in 1..=rounds {
        // A GPU removed through sysfs is still in its slot: `plug` finds it there.
        let take = if round % 10 == 0 { "remove" } else { "unplug" };
        for action in [take, "gone", "plug"] {
            (1..=gpus).try_for_each(|gpu| act(&format!("{action}:{gpu}")))?;
        }
        act(&format!("spec-gives:{all}"))?;
        act(&format!("up:{all}"))?;
        if (rounds / 2..rounds).contains(&round) {
            let now = at_rest(|now| {
                let mut names: Vec<&str> = now.iter().map(|process| &*process.name).collect();
                names.sort_unstable();
                names.windows(2).all(|two| two[0] != two[1])
            });
            report(round, &now);
            if round == rounds / 2 {
                middle = now;
            }
        }
    }
    let end = at_rest(|now| {
        now.iter().all(|process| {
            middle.iter().any(|earlier| {
                earlier.name == process.name
                    && earlier.files.len() >= process.files.len()
                    && earlier.threads >= process.threads
            })
        })
    });
    report(rounds, &end);
    Ok(())
}

/// The init's processes as soon as they are as wanted, or after [`REST`]: what closes a descriptor
/// or has just opened a GPU ends by itself.
fn at_rest(is_wanted: impl Fn(&[Process]) -> bool) -> Vec<Process> {
    let since = Instant::now();
    loop {
        let now = processes();
        if is_wanted(&now) || since.elapsed() > REST {
            return now;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn report(round: u32, all: &[Process]) {
    for process in all {
        log::info(
            "has",
            &[
                ("round", &round.to_string()),
                ("process", &process.name),
                ("state", &process.state.to_string()),
                ("files", &process.files.len().to_string()),
                ("threads", &process.threads.to_string()),
                ("kib", &process.kib.to_string()),
            ],
        );
    }
}
