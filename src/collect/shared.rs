//! State that all threads of the collector share, and its two logs.

use super::bucket::Lines;
use super::listen::Peer;
use super::lock::lock;
use super::peers::Peers;
use super::store::{Log, Store};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::sync::mpsc;

/// Lines about this machine's own problems (a file that cannot be removed, a socket that fails): at
/// once, and a second.
const AT_ONCE: u64 = 100;
const PER_S: f64 = 0.1;

pub struct Shared {
    pub store: Arc<Store>,
    pub peers: Arc<Peers>,
    /// Logs problems that no peer causes.
    pub log: Log,
    /// Lines for the operator; those that do not fit are left out, so that nothing waits.
    pub lines: mpsc::Sender<String>,
}

impl Shared {
    /// Logs what a peer does, at a rate that does not fill the host's log.
    pub fn log_of(&self, peer: &Peer, text: &str) {
        if let Some(text) = self.peers.admit(peer, text, Instant::now()) {
            let _full = self.lines.try_send(text);
        }
    }
}

/// Logs problems that no peer causes, at a limited rate.
pub fn own_log(lines: mpsc::Sender<String>) -> Log {
    let limit = Mutex::new(Lines::new(AT_ONCE, PER_S, Instant::now()));
    Arc::new(move |text| {
        lock(&limit).pass(&text, |text| drop(lines.try_send(text)));
    })
}
