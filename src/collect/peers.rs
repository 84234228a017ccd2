//! Connected peers and their used-up limits. One [`Peer`] is one VM.
//!
//! A peer without connections and used-up limits is forgotten: VMs come and go for months.

use super::bucket::{Bucket, Lines};
use super::limits::Limits;
use super::listen::Peer;
use super::lock::lock;
use super::sandbox_pod::Sandbox;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;
use tokio::sync::watch;

/// Lines about one peer that are printed at once, and seconds until the next: a guest must not fill
/// the host's log.
const LOGGED_AT_ONCE: u64 = 10;
const TOLD_EVERY_S: f64 = 60.0;
/// Number of peers from which on blank peers are removed.
const SWEEP_FROM: usize = 1024;

/// All peers.
#[derive(Debug)]
pub struct Peers {
    limits: Limits,
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    peers: HashMap<Peer, State>,
    connections: u64,
    sweep_at: usize,
}

#[derive(Debug)]
struct State {
    connections: u64,
    connects: Bucket,
    boots: Bucket,
    bytes: Bucket,
    lines: Lines,
    sandbox: watch::Sender<Option<Arc<Sandbox>>>,
}

impl State {
    fn new(limits: &Limits, now: Instant) -> Self {
        Self {
            connections: 0,
            connects: Bucket::new(limits.connects, limits.connects as f64 / 60.0, now),
            boots: Bucket::new(limits.boots, limits.boots as f64 / 3600.0, now),
            bytes: Bucket::new(limits.burst, limits.rate as f64, now),
            lines: Lines::new(LOGGED_AT_ONCE, 1.0 / TOLD_EVERY_S, now),
            sandbox: watch::Sender::new(None),
        }
    }

    /// True if forgetting the peer changes nothing.
    fn is_blank(&mut self, now: Instant) -> bool {
        self.connections == 0
            && self.sandbox.borrow().is_none()
            && self.lines.is_blank(now)
            && [&mut self.connects, &mut self.boots, &mut self.bytes]
                .into_iter()
                .all(|b| b.is_full(now))
    }
}

impl Peers {
    pub fn new(limits: Limits) -> Arc<Self> {
        let table = Table {
            peers: HashMap::new(),
            connections: 0,
            sweep_at: SWEEP_FROM,
        };
        Arc::new(Self {
            limits,
            table: Mutex::new(table),
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    fn with<T>(&self, peer: &Peer, now: Instant, what: impl FnOnce(&mut State) -> T) -> T {
        let mut table = self.table();
        if table.peers.len() >= table.sweep_at {
            table.peers.retain(|_, state| !state.is_blank(now));
            table.sweep_at = (table.peers.len() * 2).max(SWEEP_FROM);
        }
        what(
            table
                .peers
                .entry(peer.clone())
                .or_insert_with(|| State::new(&self.limits, now)),
        )
    }

    /// Connections that are open.
    pub fn open(&self) -> u64 {
        self.table().connections
    }

    /// Grants one more connection of this peer, or says why not.
    pub fn connect(self: &Arc<Self>, peer: &Peer, now: Instant) -> Result<Slot, &'static str> {
        let full = self.table().connections >= self.limits.connections;
        let sandbox = self.with(peer, now, |state| {
            if !state.connects.take_one(now) {
                return Err("connects too often (limit connects)");
            }
            if state.connections >= self.limits.connections_per_vm {
                return Err("too many connections at once (limit connections-per-vm)");
            }
            if full {
                return Err("too many connections of all VMs (limit connections)");
            }
            state.connections += 1;
            Ok(state.sandbox.subscribe())
        })?;
        self.table().connections += 1;
        Ok(Slot {
            peers: self.clone(),
            peer: peer.clone(),
            sandbox,
        })
    }

    /// The line about this peer to print now; None if there were too many.
    pub fn admit(&self, peer: &Peer, text: &str, now: Instant) -> Option<String> {
        self.with(peer, now, |state| state.lines.admit(text, now))
    }

    /// Sets Kata's names of this VM; None when the VM is gone.
    pub fn name(&self, peer: &Peer, sandbox: Option<Sandbox>, now: Instant) {
        self.with(peer, now, |state| {
            state.sandbox.send_if_modified(|known| {
                let changed = known.as_deref() != sandbox.as_ref();
                if changed {
                    *known = sandbox.map(Arc::new);
                }
                changed
            })
        });
    }
}

/// The right to one connection; given back when dropped.
pub struct Slot {
    peers: Arc<Peers>,
    pub peer: Peer,
    /// Kata's names of the VM, as far as known.
    pub sandbox: watch::Receiver<Option<Arc<Sandbox>>>,
}

impl Slot {
    /// Counts `bytes` as read. Returns the time before which no more should be read.
    pub fn spend(&self, bytes: usize, now: Instant) -> Option<Instant> {
        self.peers.with(&self.peer, now, |state| {
            state.bytes.spend(bytes, now);
            state.bytes.wait(now).map(|wait| now + wait)
        })
    }

    /// Whether the peer may begin one more boot.
    pub fn new_boot(&self, now: Instant) -> bool {
        self.peers
            .with(&self.peer, now, |state| state.boots.take_one(now))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut table = self.peers.table();
        table.connections -= 1;
        if let Some(state) = table.peers.get_mut(&self.peer) {
            state.connections -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn limits() -> Limits {
        Limits {
            connections_per_vm: 2,
            connections: 3,
            connects: 6,
            boots: 2,
            ..Limits::default()
        }
    }

    #[test]
    fn connections_are_limited_for_each_and_for_all_and_come_back() {
        let peers = Peers::new(limits());
        let now = Instant::now();
        let connect = |cid| peers.connect(&Peer::Cid(cid), now);
        let held = [connect(5).unwrap(), connect(5).unwrap()];
        assert!(
            connect(5)
                .err()
                .unwrap()
                .contains("limit connections-per-vm")
        );
        let other = connect(6).unwrap();
        assert!(connect(7).err().unwrap().contains("limit connections)"));
        drop(held);
        assert!(connect(7).is_ok() && connect(5).is_ok());
        drop(other);
        assert_eq!(peers.table().connections, 0);
    }

    #[test]
    fn peers_that_left_are_forgotten_and_named_ones_are_not() {
        let peers = Peers::new(limits());
        let now = Instant::now();
        peers.name(
            &Peer::Cid(1),
            Some(Sandbox {
                id: "s".into(),
                ..Sandbox::default()
            }),
            now,
        );
        for cid in 2..SWEEP_FROM as u32 * 2 {
            // Two hours apart: the limits of the peer before are full again.
            let then = now + Duration::from_secs(7200) * cid;
            drop(peers.connect(&Peer::Cid(cid), then).unwrap());
        }
        assert!(
            peers.table().peers.len() <= SWEEP_FROM + 1,
            "{}",
            peers.table().peers.len()
        );
        assert!(peers.table().peers.contains_key(&Peer::Cid(1)));
    }

    #[test]
    fn a_name_reaches_a_present_connection_and_a_later_one() {
        let peers = Peers::new(limits());
        let now = Instant::now();
        let early = peers.connect(&Peer::Cid(5), now).unwrap();
        assert!(early.sandbox.borrow().is_none());
        peers.name(
            &Peer::Cid(5),
            Some(Sandbox {
                id: "s".into(),
                ..Sandbox::default()
            }),
            now,
        );
        assert!(early.sandbox.has_changed().unwrap());
        let late = peers.connect(&Peer::Cid(5), now).unwrap();
        assert_eq!(late.sandbox.borrow().as_ref().unwrap().id, "s");
    }
}
