//! Accepts guests on one listener and does nothing else, so that no guest delays the next.

use super::collector_counters::add;
use super::listen::{Arrival, BACKLOG, Listener};
use super::serve::Streams;
use super::shared::Shared;
use super::stop::stopped;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Pause after accept() failed for lack of memory or descriptors: no event shows when they are free
/// again.
pub const PAUSE: Duration = Duration::from_millis(100);

/// Accepts until the stop.
pub async fn accept_all(
    listener: Listener,
    shared: Arc<Shared>,
    streams: Streams,
    mut stop: watch::Receiver<bool>,
) {
    loop {
        tokio::select! {
            () = stopped(&mut stop) => break,
            accepted = listener.accept() => match accepted {
                Ok(arrival) => take(arrival, &shared, &streams),
                Err(e) => {
                    (shared.log)(format!("accept on {}: {e}", listener.place()));
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        // A guest that connects without end takes turns with all others.
        tokio::task::yield_now().await;
    }
    // Connections from before the stop may carry data; no more than the backlog wait.
    for _ in 0..BACKLOG {
        match listener.accept_now() {
            Ok(Some(arrival)) => take(arrival, &shared, &streams),
            Ok(None) | Err(_) => break,
        }
    }
}

fn take(arrival: Arrival, shared: &Shared, streams: &Streams) {
    let stats = &shared.store.stats;
    let (socket, peer) = match arrival {
        Ok(guest) => guest,
        // Hang up before the stranger takes a guest's slot or line quota.
        Err(stranger) => {
            add(&stats.strangers, 1);
            return shared.log_of(&stranger.peer, &stranger.why);
        }
    };
    match shared.peers.connect(&peer, Instant::now()) {
        Ok(slot) => {
            add(&stats.connections, 1);
            streams.take(socket, slot);
        }
        Err(refused) => {
            add(&stats.refused, 1);
            shared.log_of(&peer, &format!("{peer}: {refused}"));
        }
    }
}
