//! `export --otlp --push URL`: one boot to a receiver, tried again for a short while.

use crate::otlp_push::{Backoff, MAX_REQUEST, Outcome, Target, connect};
use anyhow::{Context, Result, bail};
use kata_gpu_report::data::agent_log::AgentLine;
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::otlp::Resource;
use kata_gpu_report::views::waterfall::Waterfall;
use std::time::{Duration, Instant};

/// How long it is tried: somebody waits for it.
const DEADLINE: Duration = Duration::from_secs(30);

/// Sends all spans, and says how many. An error when some were not taken.
pub fn run(
    target: &Target,
    file: &BootFile,
    agent: &[AgentLine],
    resource: &Resource,
) -> Result<()> {
    let request = kata_gpu_report::otlp::request(Waterfall::new(file, agent), resource)?;
    let boot = file
        .header
        .as_ref()
        .map_or("?", |header| header.boot_id.as_str());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    let deadline = Instant::now() + DEADLINE;
    let (mut spans, mut backoff) = (0, Backoff::default());
    for part in request.protobufs(MAX_REQUEST) {
        loop {
            let outcome = runtime.block_on(async {
                match connect(target).await {
                    Ok(mut connection) => connection.send(part.bytes.clone()).await,
                    Err(why) => Outcome::Later {
                        why,
                        answered: false,
                        after: None,
                    },
                }
            });
            match outcome {
                Outcome::Taken { rejected: 0, why } => {
                    if let Some(why) = why {
                        eprintln!("kata-gpu-boot: {target}: {why}");
                    }
                    break;
                }
                Outcome::Taken { rejected, why } => bail!(
                    "{target}: {rejected} span(s) rejected: {}",
                    why.unwrap_or_default()
                ),
                Outcome::Refused { why } => bail!("{target}: {why}"),
                Outcome::Later { why, after, .. } => {
                    let pause = backoff.next(after);
                    if Instant::now() + pause > deadline {
                        bail!("{target}: {why}: given up after {} s", DEADLINE.as_secs());
                    }
                    eprintln!(
                        "kata-gpu-boot: {target}: {why}: trying again in {:.1} s",
                        pause.as_secs_f64()
                    );
                    runtime.block_on(async { tokio::time::sleep(pause).await });
                }
            }
        }
        spans += part.spans;
    }
    eprintln!("kata-gpu-boot: pushed boot {boot}: {spans} span(s) to {target}");
    Ok(())
}
