//! A socket next to that of every VMM in Kata's directories, and Kata's names of the VMs.

use super::accept::accept_all;
use super::config::Config;
use super::listen::{Listener, Peer, SocketFile};
use super::sandbox_pod;
use super::serve::Streams;
use super::shared::Shared;
use super::stop::stopped;
use super::vm_dirs::{Change, Watcher};
use super::vmm::Vmm;
use anyhow::{Context, Result, ensure};
use kata_gpu_host::qemu;
use kata_gpu_report::data::boot_file::Sandbox;
use kata_gpu_report::data::text::printable;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Name of the file about a sandbox that has no CID: the Rust runtime's.
const WITHOUT_CID: &str = "state.json";

/// A VM with a listener.
struct Vm {
    vmm: Arc<Vmm>,
    peer: Peer,
    /// File of our socket, next to the VMM's.
    file: Option<Arc<SocketFile>>,
    /// Ends the listener when dropped; connections end by themselves, with their VM.
    _stop: watch::Sender<bool>,
}

/// The VMs of Kata's directories.
pub struct Vms {
    config: Config,
    shared: Arc<Shared>,
    streams: Streams,
    /// VMs by the VMM's socket.
    open: HashMap<PathBuf, Vm>,
    /// Named peers by Kata's file.
    cids: HashMap<PathBuf, Peer>,
    listening: JoinSet<()>,
}

impl Vms {
    pub fn new(config: Config, shared: Arc<Shared>, streams: Streams) -> Self {
        Self {
            config,
            shared,
            streams,
            open: HashMap::new(),
            cids: HashMap::new(),
            listening: JoinSet::new(),
        }
    }

    /// Follows the directories until the stop; then closes the VMs' sockets.
    pub async fn watch(mut self, mut watcher: Watcher, mut stop: watch::Receiver<bool>) {
        loop {
            let (changes, troubles) = watcher.take();
            for text in troubles {
                (self.shared.log)(text);
            }
            let mut claims = qemu::Claims::default();
            for change in changes {
                self.change(change, &mut claims);
            }
            tokio::select! {
                () = stopped(&mut stop) => break,
                Some(_) = self.listening.join_next() => {}
                changed = watcher.changed() => if let Err(e) = changed {
                    (self.shared.log)(format!("{e:#}: new VMs are not seen any more"));
                    stopped(&mut stop).await;
                    break;
                },
            }
        }
        self.open.clear();
        while self.listening.join_next().await.is_some() {}
    }

    fn change(&mut self, change: Change, claims: &mut qemu::Claims) {
        let Change {
            there,
            pattern,
            id,
            path,
        } = change;
        match pattern.checked_sub(self.config.vms.len()) {
            None if there => self.vm(pattern, &id, path),
            None => self.close(&path),
            Some(pattern) if there => self.sandbox(pattern, &id, path, claims),
            Some(_) => {
                if let Some(peer) = self.cids.remove(&path) {
                    self.name(&peer, None);
                }
            }
        }
    }

    fn name(&self, peer: &Peer, sandbox: Option<Sandbox>) {
        self.shared.peers.name(peer, sandbox, Instant::now());
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
        self.name(&vm.peer, None);
    }

    fn vm(&mut self, pattern: usize, id: &str, path: PathBuf) {
        let vmm = Vmm::find(&self.config.vms[pattern], &path).context("look at its socket");
        let opened = vmm.and_then(|vmm| match vmm {
            Some(vmm) => self.open(id, path.clone(), Arc::new(vmm)),
            None => Ok(()),
        });
        if let Err(e) = opened {
            // Lines count against the VM: its directory's owner causes one with each new socket.
            let peer = Peer::of_vm(&path, self.config.port);
            let text = format!("VM {}: {e:#}: this VM is ignored", printable(id));
            self.shared.log_of(&peer, &text);
        }
    }

    /// Listens next to a VMM's socket.
    fn open(&mut self, id: &str, path: PathBuf, vmm: Arc<Vmm>) -> Result<()> {
        match self.open.get(&path) {
            Some(known) if known.vmm.is(&vmm) => return Ok(()),
            // Another socket has the path.
            Some(_) => self.close(&path),
            None => {}
        }
        let there = self.open.len();
        ensure!(
            (there as u64) < self.config.limits.vms,
            "there are {there} already (limit vms)"
        );
        let listener = Listener::of_vmm(&vmm, self.config.port)?;
        let peer = Peer::of_vm(&path, self.config.port);
        let sandbox = Sandbox {
            vmm_user: Some(vmm.uid()),
            ..sandbox_pod::look_up(id, &self.config.bundles)
        };
        self.name(&peer, Some(sandbox));
        let (stop, stopped) = watch::channel(false);
        let vm = Vm {
            vmm,
            peer,
            file: listener.file().cloned(),
            _stop: stop,
        };
        self.open.insert(path, vm);
        self.listening.spawn(accept_all(
            listener,
            self.shared.clone(),
            self.streams.clone(),
            stopped,
        ));
        Ok(())
    }

    /// Handles a write of a sandbox's file. A half-written file causes another event.
    fn sandbox(&mut self, pattern: usize, id: &str, path: PathBuf, claims: &mut qemu::Claims) {
        let (mut sandbox, cid) = if path.ends_with(WITHOUT_CID) {
            // The file is written again with each container, and the VM stays the same.
            if self.cids.contains_key(&path) {
                return;
            }
            let Ok(meta) = path.symlink_metadata() else {
                return;
            };
            let cid = claims.cid_of(Path::new("/proc"), id, meta.uid());
            let mut sandbox = sandbox_pod::unnamed(id);
            sandbox.vmm_user = Some(meta.uid());
            (sandbox, cid)
        } else {
            let text = sandbox_pod::read(&self.config.sandboxes[pattern], &path);
            match text.and_then(|text| sandbox_pod::from_persist(id, &text)) {
                Some(found) => found,
                None => return,
            }
        };
        let Some(cid) = cid else { return };
        if sandbox.pod.is_none() {
            sandbox = Sandbox {
                vmm_user: sandbox.vmm_user,
                ..sandbox_pod::look_up(id, &self.config.bundles)
            };
        }
        let peer = Peer::Cid(cid);
        self.name(&peer, Some(sandbox));
        self.cids.insert(path, peer);
    }
}
