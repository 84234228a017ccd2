//! Listens, accepts, and runs one connection per guest until the stop.
//!
//! Three kinds of work, each on threads of its own, so that none holds up another: accepting and
//! watching Kata's directories (the caller's runtime), reading and decoding guests' data
//! (`serve`), writing and keeping it (`disk`).

mod accept; // the guests of a listener
mod boot_log; // state of a boot while it is received
mod bucket; // a burst, then a rate a second
pub mod check; // whether the collector receives, for probes
pub mod collector_counters; // counters
mod config; // sockets, directory, limits
mod connection; // one connection, without its socket
mod disk; // the threads that write boots and keep them
mod ends; // boots that are over
pub mod fleet; // boots that are over, for receivers and Prometheus
pub mod follow; // the files of boots as they grow
mod host_clock; // trust in the host's clock
mod http_client; // requests to receivers
mod inotify; // an inotify instance for tokio
pub mod keep; // amount of boots that is kept
pub mod kubernetes_events; // failed boots to Kubernetes
pub mod limits; // limits on a guest's use of this machine
mod listen; // AF_VSOCK and hybrid vsock sockets
mod lock; // locking
pub mod otlp_push; // boots to an OTLP receiver
mod peers; // connected VMs and their used-up limits
mod place; // the directory, and its lock
pub mod privileges; // dropping of privileges
pub mod retention; // removal of old files
pub mod sandbox_pod; // Kata's names of a VM
mod serve; // the sockets of guests that are connected
pub mod service; // readiness for systemd
mod shared; // state that all threads share
mod stop; // waiting for the end
mod store; // the files of all boots
mod syscalls; // forbidden system calls
mod tenant; // tenant of a boot
mod threads; // threads without privileges
pub mod vm_dirs; // Kata's directories
mod vmm; // a VMM's socket and its owner
mod vms; // the VMs of Kata's directories
mod writer; // the threads that write and keep the files

pub use config::Config;

use accept::accept_all;
use anyhow::{Context, Result, bail, ensure};
use collector_counters::Counts;
use disk::Disk;
use ends::Ends;
use fleet::Fleet;
use listen::Listener;
use peers::Peers;
use place::Place;
use serve::Streams;
use shared::Shared;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;
use stop::stopped;
use store::Store;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use vm_dirs::Watcher;
use vms::Vms;

/// Most lines that wait for the operator.
pub const LINES_QUEUE: usize = 4096;

/// Sockets of hybrid vsock of Kata's VMMs; `*` is the sandbox's id.
pub const VM_SOCKETS: &[&str] = &[
    // Go runtime: Cloud Hypervisor, Firecracker.
    "/run/vc/vm/*/clh.sock",
    "/run/vc/firecracker/*/root/kata.hvsock",
    // Rust runtime: Dragonball and Firecracker, jailed Firecracker, Cloud Hypervisor, OpenVMM.
    "/run/kata/*/root/kata.hvsock",
    "/run/kata/firecracker/*/root/kata.hvsock",
    "/run/kata/*/ch-vm.sock",
    "/run/kata/*/vsock.sock",
];
/// Files of Kata's runtimes about a sandbox: the Go runtime's, which has the CID, and the Rust
/// runtime's.
pub const SANDBOXES: &[&str] = &["/run/vc/sbs/*/persist.json", "/run/kata/*/state.json"];
/// A collector that listens and does not accept yet.
pub struct Collector {
    config: Config,
    listeners: Vec<Listener>,
    watcher: Option<Watcher>,
    check: Option<check::Socket>,
    disk: Disk,
    streams: Streams,
    shared: Arc<Shared>,
    fleet: Option<Fleet>,
    /// Lines about the start, for people.
    pub notes: Vec<String>,
}

impl Collector {
    /// Makes the sockets: VMs may be started after the return. Needs a runtime around it. `lines`
    /// gets what the operator should know.
    pub fn bind(config: &Config, lines: mpsc::Sender<String>) -> Result<Self> {
        let mut config = config.clone();
        let mut notes = Vec::new();
        let guests = privileges::raise_file_limit()?;
        if guests < config.limits.connections {
            notes.push(format!(
                "open files suffice for {guests} guests (RLIMIT_NOFILE): raise the limit for more"
            ));
            config.limits.connections = guests;
        }
        let place = Place::take(&config.dir)?;
        if let Some(run_as) = config.run_as {
            notes.extend(place.with_dir(|dir| privileges::hand_over(dir, &config.dir, run_as))?);
        }
        let listeners = listeners(&config, &mut notes)?;
        let metrics = config.metrics.map(fleet::http_server::bind).transpose()?;
        let watched = [&config.vms[..], &config.sandboxes[..]].concat();
        if config.drop_privileges {
            let make_sockets = !(watched.is_empty() && config.uds.is_empty());
            privileges::drop_all_but(config.run_as, make_sockets)?;
            syscalls::forbid()?;
        }
        place.reach()?;
        // A file system without sockets disables the probe only.
        let check = check::bind(&config.dir)
            .map_err(|e| notes.push(format!("--check will not work: {e:#}")))
            .ok();
        let watcher = (!watched.is_empty()).then(|| Watcher::new(watched));
        notes.extend(places(&config, &listeners, metrics.as_ref()));

        // From here on there is more than one thread.
        let log = shared::own_log(lines.clone());
        let (mut store, jobs) = Store::new(place, config.limits, config.keep);
        let reports = config.otlp.is_some() || config.events.is_some() || metrics.is_some();
        store.ends = reports.then(|| Ends::new(Duration::from_secs(config.limits.goodbye)));
        let disk = Disk::start(store, jobs, log.clone())?;
        let shared = Arc::new(Shared {
            store: disk.store.clone(),
            peers: Peers::new(config.limits),
            log,
            lines,
        });
        let fleet = reports.then(|| Fleet::start(shared.clone(), &config, metrics));
        let fleet = fleet.transpose()?;
        let streams = Streams::start(&shared)?;
        Ok(Self {
            config,
            listeners,
            watcher,
            check,
            disk,
            streams,
            shared,
            fleet,
            notes,
        })
    }

    /// Serves guests until `stop` becomes true (or its sender is gone); then all connections are
    /// closed and all files complete. Ends with an error once another collector has the directory.
    pub async fn run(self, asked: watch::Receiver<bool>) -> Result<Counts> {
        let (shared, streams) = (self.shared, self.streams);
        let lost = shared.store.place.lost();
        let (ends, stop) = watch::channel(false);
        let ending = tokio::spawn(async move {
            let (mut asked, mut lost) = (asked, lost);
            tokio::select! {
                () = stopped(&mut asked) => {}
                () = stopped(&mut lost) => {}
            }
            ends.send_replace(true);
        });
        let mut accepting = JoinSet::new();
        for listener in self.listeners {
            accepting.spawn(accept_all(
                listener,
                shared.clone(),
                streams.clone(),
                stop.clone(),
            ));
        }
        if let Some(check) = self.check {
            accepting.spawn(check::answer(check, streams.clone(), stop.clone()));
        }
        if let Some(watcher) = self.watcher {
            let vms = Vms::new(self.config, shared.clone(), streams.clone());
            accepting.spawn(vms.watch(watcher, stop));
        }
        while accepting.join_next().await.is_some() {}
        streams.stop().await?;
        // Stop pushing before the files are closed: each push is noted in its boot's file.
        if let Some(fleet) = self.fleet {
            fleet.stop().await?;
        }
        tokio::task::spawn_blocking(move || self.disk.close())
            .await
            .context("close the files")??;
        ending.abort();
        ensure!(
            !*shared.store.place.lost().borrow(),
            "{}",
            place::taken(shared.store.dir())
        );
        Ok(shared.store.stats.counts())
    }
}

/// Lines about the places where the collector listens, watches and pushes to.
fn places(config: &Config, listeners: &[Listener], metrics: Option<&TcpListener>) -> Vec<String> {
    let listening = |listener: &Listener| format!("listening on {}", listener.place());
    let mut lines: Vec<String> = listeners.iter().map(listening).collect();
    if let Some(Ok(address)) = metrics.map(TcpListener::local_addr) {
        let path = fleet::http_server::PATH;
        lines.push(format!("metrics at http://{address}{path}"));
    }
    if let Some(otlp) = &config.otlp {
        lines.push(format!("pushing boots that are over to {}", otlp.target));
    }
    if let Some(events) = &config.events {
        lines.push(format!(
            "reporting failed boots as Events to {}",
            events.api
        ));
    }
    if !config.vms.is_empty() {
        let places = config.vms.len();
        lines.push(format!("watching {places} place(s) for the sockets of VMs"));
    }
    lines
}

fn listeners(config: &Config, notes: &mut Vec<String>) -> Result<Vec<Listener>> {
    let mut listeners = Vec::new();
    for base in &config.uds {
        listeners.push(Listener::hybrid(base, config.port)?);
    }
    let others = !(listeners.is_empty() && config.vms.is_empty());
    if config.vsock {
        match Listener::vsock(config.port)? {
            Some(listener) => listeners.push(listener),
            None if others => notes.push(
                "this kernel has no AF_VSOCK: guests of QEMU cannot connect \
                 (modprobe vhost_vsock; --no-vsock silences this)"
                    .to_string(),
            ),
            None => bail!(
                "this kernel has no AF_VSOCK: load it (modprobe vhost_vsock), or name the socket \
                 of a hybrid vsock device with --uds"
            ),
        }
    } else if !others {
        bail!(
            "nothing to listen on: omit --no-vsock or --no-vms, or name the socket of a hybrid \
             vsock device with --uds"
        );
    }
    Ok(listeners)
}

#[cfg(test)]
mod tests;
