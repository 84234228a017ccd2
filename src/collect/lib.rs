//! Listens, accepts, and runs one [`connection::Connection`] per guest until the stop.
//!
//! Three kinds of work, each on threads of its own, so that none holds up another: accepting and
//! watching Kata's directories (the caller's runtime), reading and decoding guests' data
//! ([`serve`]), writing and keeping it ([`disk`]). Watching never delays collecting: news go into a
//! bounded queue; news that do not fit are counted and not shown, but still in the file.

pub mod boot_log; // state of a boot while it is received
pub mod bucket; // a burst, then a rate a second
pub mod check; // whether the collector receives, for probes
pub mod collector_counters; // counters
pub mod connection; // one connection, without its socket
pub mod disk; // the threads that write boots and keep them
pub mod ends; // boots that are over
pub mod fleet; // boots that are over, for receivers and Prometheus
pub mod follow; // the files of boots as they grow
pub mod keep; // amount of boots that is kept
pub mod limits; // limits on a guest's use of this machine
pub mod listen; // AF_VSOCK and hybrid vsock sockets
pub mod otlp_push; // boots to an OTLP receiver
pub mod peers; // connected VMs and their used-up limits
pub mod privileges; // dropping of privileges
pub mod push_once; // one boot, tried again for a short while
pub mod retention; // removal of old files
pub mod sandbox_pod; // Kata's names of a VM
pub mod serve; // the sockets of guests that are connected
pub mod service; // systemd unit, DaemonSet, readiness
pub mod stop; // waiting for the end
pub mod store; // the files of all boots
pub mod syscalls; // forbidden system calls
pub mod vm_dirs; // Kata's directories
pub mod vmm; // a VMM's socket and its owner
mod writer; // the threads that write and keep the files

use anyhow::{Context, Result, bail};
use bucket::Lines;
use collector_counters::{Counts, Stats, add};
use connection::News;
use disk::Disk;
use ends::Ends;
use fleet::Fleet;
use fleet::pushing::Otlp;
use fleet::sources::Sources;
use kata_gpu_host::qemu;
use kata_gpu_report::data::text::printable;
use keep::Keep;
use limits::Limits;
use listen::{Arrival, BACKLOG, Listener, NoVsock, Peer, SocketFile};
use peers::Peers;
use privileges::RunAs;
use serve::{Shared, Streams};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use stop::stopped;
use store::{Log, Place};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use vm_dirs::{Change, Pattern, Watcher};
use vmm::Vmm;

/// Pause after accept() failed for lack of memory or descriptors: no event shows when they are free
/// again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Lines about this machine's own problems (a file that cannot be removed, a socket that fails): at
/// once, and a second.
const LOGGED_AT_ONCE: u64 = 100;
const TOLD_PER_S: f64 = 0.1;
/// Most news that wait for the watcher.
pub const NEWS_QUEUE: usize = 4096;

/// Sockets of hybrid vsock of Kata's VMMs; `*` is the sandbox's id.
pub const VM_SOCKETS: &[(&str, &str)] = &[
    ("/run/vc/vm/*/clh.sock", "Go runtime, Cloud Hypervisor"),
    (
        "/run/vc/firecracker/*/root/kata.hvsock",
        "Go runtime, Firecracker",
    ),
    (
        "/run/kata/*/root/kata.hvsock",
        "Rust runtime, Dragonball and Firecracker",
    ),
    (
        "/run/kata/firecracker/*/root/kata.hvsock",
        "Rust runtime, jailed Firecracker",
    ),
    ("/run/kata/*/ch-vm.sock", "Rust runtime, Cloud Hypervisor"),
    ("/run/kata/*/vsock.sock", "Rust runtime, OpenVMM"),
];
/// Files of Kata's runtimes about a sandbox; only the Go runtime's has the CID.
pub const SANDBOXES: &[(&str, &str)] = &[
    ("/run/vc/sbs/*/persist.json", "Go runtime"),
    ("/run/kata/*/state.json", "Rust runtime"),
];
/// Name of the file without a CID.
const WITHOUT_CID: &str = "state.json";

/// Sockets to listen on, and directory to write to.
#[derive(Clone, Debug)]
pub struct Config {
    pub dir: PathBuf,
    pub port: u32,
    pub vsock: bool,
    /// Base paths of hybrid vsock devices.
    pub uds: Vec<PathBuf>,
    /// Base paths of hybrid vsock devices that come and go.
    pub vms: Vec<Pattern>,
    /// Kata's files about sandboxes.
    pub sandboxes: Vec<Pattern>,
    /// OCI configurations of sandbox containers; `*` is the id.
    pub bundles: Vec<Pattern>,
    pub limits: Limits,
    pub keep: Keep,
    pub run_as: Option<RunAs>,
    /// Whether to emit records and clock samples as news.
    pub watched: bool,
    /// Receiver of boots that are over.
    pub otlp: Option<Otlp>,
    /// Address of the metrics for Prometheus.
    pub metrics: Option<SocketAddr>,
    /// Drop privileges that this process does not need. Requires a single thread.
    pub drop_privileges: bool,
}

impl Config {
    /// Configuration without any socket to listen on.
    pub fn new(dir: PathBuf, port: u32) -> Self {
        Self {
            dir,
            port,
            vsock: false,
            uds: Vec::new(),
            vms: Vec::new(),
            sandboxes: Vec::new(),
            bundles: Vec::new(),
            limits: Limits::default(),
            keep: Keep::default(),
            run_as: None,
            watched: true,
            otlp: None,
            metrics: None,
            drop_privileges: false,
        }
    }
}

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
    /// Makes the sockets: VMs may be started after the return. Needs a runtime around it.
    pub fn bind(config: &Config, news: mpsc::Sender<News>) -> Result<Self> {
        let mut config = config.clone();
        let mut notes = Vec::new();
        let guests = privileges::raise_file_limit()?;
        if guests < config.limits.connections {
            notes.push(format!("so many files may be open that {guests} guests can be served (RLIMIT_NOFILE): raise it for more"));
            config.limits.connections = guests;
        }
        let place = Place::take(&config.dir)?;
        if let Some(run_as) = config.run_as {
            privileges::hand_over(place.dir(), run_as)?;
        }
        let listeners = listeners(&config, &mut notes)?;
        let metrics = config.metrics.map(fleet::http_server::bind).transpose()?;
        let watches = !(config.vms.is_empty() && config.sandboxes.is_empty());
        if config.drop_privileges {
            privileges::drop_all_but(config.run_as, watches || !config.uds.is_empty())?;
            syscalls::forbid()?;
        }
        // A file system without sockets disables the probe only.
        let check = check::bind(&config.dir)
            .map_err(|e| notes.push(format!("--check will not work: {e:#}")))
            .ok();
        let watcher = if watches {
            Some(Watcher::new(
                [&config.vms[..], &config.sandboxes[..]].concat(),
            )?)
        } else {
            None
        };
        notes.extend(
            listeners
                .iter()
                .map(|l| format!("listening on {}", l.place())),
        );
        notes.extend(metrics.as_ref().map(|(_, address)| {
            format!("metrics at http://{address}{}", fleet::http_server::PATH)
        }));
        notes.extend(
            config
                .otlp
                .as_ref()
                .map(|otlp| format!("pushing boots that are over to {}", otlp.target)),
        );
        if !config.vms.is_empty() {
            notes.push(format!(
                "watching {} place(s) for the sockets of VMs",
                config.vms.len()
            ));
        }

        // From here on there is more than one thread.
        let on_thread = if config.drop_privileges {
            privileges::drop_in_thread
        } else {
            || ()
        };
        let stats: Arc<Stats> = Arc::default();
        let log = own_lines(news.clone(), stats.clone());
        let reports = config.otlp.is_some() || metrics.is_some();
        let ends = reports.then(|| Ends::new(Duration::from_secs(config.limits.goodbye)));
        let disk = Disk::start_with(
            place,
            config.limits,
            config.keep,
            stats.clone(),
            log.clone(),
            on_thread,
            ends,
        )?;
        let peers = Peers::new(config.limits);
        let fleet = reports
            .then(|| {
                let from = Sources {
                    store: disk.store.clone(),
                    peers: peers.clone(),
                    stats: stats.clone(),
                    limits: config.limits,
                    log: log.clone(),
                };
                Fleet::start(
                    from,
                    config.otlp.clone(),
                    metrics.map(|(listener, _)| listener),
                    on_thread,
                )
            })
            .transpose()?;
        let (store, limits, watched) = (disk.store.clone(), config.limits, config.watched);
        let shared = Arc::new(Shared {
            store,
            peers,
            news,
            stats,
            limits,
            watched,
            log_own: log,
        });
        let streams = Streams::start(shared.clone(), on_thread)?;
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

    pub fn stats(&self) -> Arc<Stats> {
        self.shared.stats.clone()
    }

    /// Serves guests until `stop` becomes true (or its sender is gone); then all connections are
    /// closed and all files complete.
    pub async fn run(self, stop: watch::Receiver<bool>) -> Result<Counts> {
        let Self {
            config,
            listeners,
            watcher,
            check,
            disk,
            streams,
            shared,
            fleet,
            ..
        } = self;
        let mut accepting = JoinSet::new();
        for listener in listeners {
            accepting.spawn(accept_all(
                listener,
                shared.clone(),
                streams.clone(),
                stop.clone(),
            ));
        }
        if let Some(check) = check {
            accepting.spawn(check::answer(check, streams.clone(), stop.clone()));
        }
        if let Some(watcher) = watcher {
            accepting.spawn(watch_vms(
                watcher,
                config,
                shared.clone(),
                streams.clone(),
                stop.clone(),
            ));
        }
        while accepting.join_next().await.is_some() {}
        streams.stop().await?;
        // Stop pushing before the files are closed: each push is noted in its boot's file.
        if let Some(fleet) = fleet {
            fleet.stop().await?;
        }
        tokio::task::spawn_blocking(move || disk.close())
            .await
            .context("close the files")??;
        Ok(shared.stats.counts())
    }
}

/// Logs lines about problems that no peer causes, at a limited rate.
fn own_lines(news: mpsc::Sender<News>, stats: Arc<Stats>) -> Log {
    let lines = Mutex::new(Lines::new(LOGGED_AT_ONCE, TOLD_PER_S, Instant::now()));
    Arc::new(move |text| {
        let logged = lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .to_log(&text, Instant::now());
        if let Some(text) = logged
            && news.try_send(News::Problem { text }).is_err()
        {
            add(&stats.unseen, 1);
        }
    })
}

fn listeners(config: &Config, notes: &mut Vec<String>) -> Result<Vec<Listener>> {
    let mut listeners = Vec::new();
    for base in &config.uds {
        listeners.push(Listener::hybrid(base, config.port)?);
    }
    if config.vsock {
        match Listener::vsock(config.port) {
            Ok(listener) => listeners.push(listener),
            Err(NoVsock::NotSupported) if !(listeners.is_empty() && config.vms.is_empty()) => {
                notes.push(
                    "this kernel has no AF_VSOCK: guests of QEMU cannot connect (modprobe vhost_vsock; --no-vsock silences this)"
                        .to_string(),
                );
            }
            Err(NoVsock::NotSupported) => {
                bail!(
                    "this kernel has no AF_VSOCK: load it (modprobe vhost_vsock), or name the socket of a hybrid vsock device with --uds"
                )
            }
            Err(NoVsock::Other(e)) => return Err(e),
        }
    }
    if listeners.is_empty() && config.vms.is_empty() {
        bail!(
            "nothing to listen on: omit --no-vsock or --no-vms, or name the socket of a hybrid vsock device with --uds"
        );
    }
    Ok(listeners)
}

/// Accepts until the stop and does nothing else, so that no guest delays the next.
async fn accept_all(
    listener: Listener,
    shared: Arc<Shared>,
    streams: Streams,
    mut stop: watch::Receiver<bool>,
) {
    let take = |arrival: Arrival| {
        let (socket, peer) = match arrival {
            Ok(guest) => guest,
            // Hang up before the stranger takes a guest's slot or line quota.
            Err(stranger) => {
                add(&shared.stats.strangers, 1);
                return shared.log(&stranger.peer(), &stranger.to_string());
            }
        };
        match shared.peers.connect(&peer, Instant::now()) {
            Ok(slot) => {
                add(&shared.stats.connections, 1);
                streams.take(socket, slot);
            }
            Err(refused) => {
                add(&shared.stats.refused, 1);
                shared.log(&peer, &format!("{peer}: {refused}"));
            }
        }
    };
    loop {
        tokio::select! {
            () = stopped(&mut stop) => break,
            accepted = listener.accept() => match accepted {
                Ok(arrival) => take(arrival),
                Err(e) => {
                    (shared.log_own)(format!("accept on {}: {e}", listener.place()));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        // A guest that connects without end takes turns with all others.
        tokio::task::yield_now().await;
    }
    // Connections from before the stop may carry data; no more than the backlog wait.
    for _ in 0..BACKLOG {
        match listener.accept_now() {
            Ok(Some(arrival)) => take(arrival),
            Ok(None) | Err(_) => break,
        }
    }
}

/// Opens a socket next to that of every new VMM, closes it when the VM goes, and learns Kata's
/// names of the VMs.
async fn watch_vms(
    mut watcher: Watcher,
    config: Config,
    shared: Arc<Shared>,
    streams: Streams,
    mut stop: watch::Receiver<bool>,
) {
    let mut listening = JoinSet::new();
    let mut vms = Vms {
        config,
        shared,
        streams,
        open: HashMap::new(),
        cids: HashMap::new(),
    };
    loop {
        let (changes, troubles) = watcher.take();
        for text in troubles {
            (vms.shared.log_own)(text);
        }
        let mut claims = qemu::Claims::default();
        for change in changes {
            vms.change(change, &mut claims, &mut listening);
        }
        tokio::select! {
            () = stopped(&mut stop) => break,
            Some(_) = listening.join_next() => {}
            changed = watcher.changed() => if let Err(e) = changed {
                (vms.shared.log_own)(format!("{e:#}: new VMs are not seen any more"));
                stopped(&mut stop).await;
                break;
            },
        }
    }
    // The VMs' sockets go with the listeners.
    drop(vms);
    while listening.join_next().await.is_some() {}
}

struct Vms {
    config: Config,
    shared: Arc<Shared>,
    streams: Streams,
    /// VMs by the VMM's socket.
    open: HashMap<PathBuf, Vm>,
    /// Named peers by Kata's file.
    cids: HashMap<PathBuf, Peer>,
}

/// A VM with a listener.
struct Vm {
    vmm: Arc<Vmm>,
    peer: Peer,
    /// File of our socket, next to the VMM's.
    file: Option<Arc<SocketFile>>,
    /// Ends the listener when dropped; connections end by themselves, with their VM.
    _stop: watch::Sender<bool>,
}

impl Vms {
    fn change(&mut self, change: Change, claims: &mut qemu::Claims, listening: &mut JoinSet<()>) {
        match change {
            Change::There { pattern, id, path } => match pattern.checked_sub(self.config.vms.len())
            {
                None => self.vm(pattern, &id, path, listening),
                Some(pattern) => self.sandbox(pattern, &id, path, claims),
            },
            Change::Gone { path, .. } => {
                self.close(&path);
                if let Some(peer) = self.cids.remove(&path) {
                    self.shared.peers.name(&peer, None, Instant::now());
                }
            }
        }
    }

    /// Stops listening for a VM and forgets its name.
    fn close(&mut self, path: &PathBuf) {
        let Some(vm) = self.open.remove(path) else {
            return;
        };
        // Remove now: if the VMM makes its socket anew, ours has to be made anew, too.
        if let Some(file) = vm.file {
            file.remove();
        }
        self.shared.peers.name(&vm.peer, None, Instant::now());
    }

    fn vm(&mut self, pattern: usize, id: &str, path: PathBuf, listening: &mut JoinSet<()>) {
        // Lines count against the VM: its directory's owner causes one with each new socket.
        let peer = Peer::of_vm(&path, self.config.port);
        let problem = |text: String| format!("VM {}: {text}", printable(id));
        let vmm = match Vmm::find(&self.config.vms[pattern], &path) {
            Ok(Some(vmm)) => Arc::new(vmm),
            Ok(None) => return,
            Err(e) => {
                return self
                    .shared
                    .log(&peer, &problem(format!("{e:#}: this VM is ignored")));
            }
        };
        match self.open.get(&path) {
            Some(known) if known.vmm.is(&vmm) => return,
            // Another socket has the path.
            Some(_) => self.close(&path),
            None => {}
        }
        if self.open.len() as u64 >= self.config.limits.vms {
            let text = format!(
                "there are {} already (limit vms): this VM is ignored",
                self.open.len()
            );
            return self.shared.log(&peer, &problem(text));
        }
        let listener = match Listener::of_vmm(&vmm, self.config.port) {
            Ok(listener) => listener,
            Err(e) => return self.shared.log(&peer, &problem(format!("{e:#}"))),
        };
        let sandbox = sandbox_pod::look_up(id, &self.config.bundles);
        self.shared.peers.name(&peer, Some(sandbox), Instant::now());
        let (stop, stopped) = watch::channel(false);
        self.open.insert(
            path,
            Vm {
                vmm,
                peer,
                file: listener.file().cloned(),
                _stop: stop,
            },
        );
        listening.spawn(accept_all(
            listener,
            self.shared.clone(),
            self.streams.clone(),
            stopped,
        ));
    }

    /// Handles a write of a sandbox's file. A half-written file causes another event.
    fn sandbox(&mut self, pattern: usize, id: &str, path: PathBuf, claims: &mut qemu::Claims) {
        let pattern = &self.config.sandboxes[pattern];
        let found = if path.ends_with(WITHOUT_CID) {
            // The file is written again with each container; the VM stays the same.
            let unknown = !self.cids.contains_key(&path);
            let owner = unknown
                .then(|| path.symlink_metadata().ok())
                .flatten()
                .map(|metadata| metadata.uid());
            owner.map(|owner| {
                (
                    sandbox_pod::unnamed(id),
                    claims.cid_of(Path::new("/proc"), id, owner),
                )
            })
        } else {
            sandbox_pod::read(pattern, &path).and_then(|text| sandbox_pod::from_persist(id, &text))
        };
        let Some((mut sandbox, Some(cid))) = found else {
            return;
        };
        let peer = Peer::Cid(cid);
        if sandbox.pod.is_none() {
            sandbox = sandbox_pod::look_up(id, &self.config.bundles);
        }
        self.shared.peers.name(&peer, Some(sandbox), Instant::now());
        self.cids.insert(path, peer);
    }
}

#[cfg(test)]
mod tests;
