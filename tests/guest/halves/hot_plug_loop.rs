//! A guest half in which GPUs come and go again and again, and nothing else happens: with
//! `testagent.loop=ROUNDS:GPUS`, GPUs 1 to GPUS (by slot) are taken away and plugged in, ROUNDS
//! times, by surprise, and each tenth time through sysfs, where a removal takes half a second.
//! GPU 0 stays. Reports what each process of the init has after half of the rounds and at the end:
//! what grows in between would grow for ever.

use super::census::processes;
use super::script::act;
use crate::agent::log;

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
    for round in 1..=rounds {
        // A GPU removed through sysfs is still in its slot: `plug` finds it there.
        let take = if round % 10 == 0 { "remove" } else { "unplug" };
        for action in [take, "gone", "plug"] {
            (1..=gpus).try_for_each(|gpu| act(&format!("{action}:{gpu}")))?;
        }
        act(&format!("spec-gives:{all}"))?;
        act(&format!("up:{all}"))?;
        if round == rounds / 2 || round == rounds {
            report(round);
        }
    }
    Ok(())
}

fn report(round: u32) {
    for process in processes() {
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
