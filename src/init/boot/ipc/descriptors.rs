//! Descriptors of opened GPUs: the worker's own copies, and the keeper's. Kept open while a GPU is
//! present; released when a GPU is being removed, because the driver's removal waits for that.
//!
//! A descriptor belongs to one bind of one device. The bind is its name in the keeper, too: the
//! next worker compares it with the current bind.

use super::HelperPid;
use super::keeper_socket::{Held, KeeperSocket};
use super::opener::{Attach, Opener};
use crate::gpu::adapter;
use crate::gpu::adapter::InitError;
use crate::gpu::bind::Bound;
use crate::gpu::device_nodes::Node;
use crate::machine::threads;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use nix::errno::Errno;
use nix::unistd::{Pid, gettid};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// Stack of a thread that closes a descriptor, in bytes.
const STACK: usize = 64 * 1024;

/// All descriptors. Shared by the tasks of all GPUs.
pub struct Descriptors {
    own: Mutex<HashMap<Bound, Arc<OwnedFd>>>,
    keeper: Option<KeeperSocket>,
    opener: Option<Opener>,
}

impl Descriptors {
    /// Takes over `held`, descriptors that an earlier worker opened and this process inherited.
    pub fn new(keeper: Option<KeeperSocket>, opener: Option<Opener>, held: Vec<Held>) -> Self {
        let own = held
            .into_iter()
            .filter_map(|h| {
                Some((
                    h.gpu.parse().ok()?,
                    Arc::new(crate::machine::sys::inherited(h.descriptor)?),
                ))
            })
            .collect();
        Self {
            own: Mutex::new(own),
            keeper,
            opener,
        }
    }

    /// Opens a GPU, which starts its initialisation, and keeps its descriptor, here and in the
    /// keeper. Blocks; `opening` gets the thread or process that is about to open it. Without the
    /// wait that comes with the descriptor, nobody sees the end of the initialisation's first part.
    pub fn open(
        &self,
        gpu: Bound,
        node: &Node,
        mut opening: impl FnMut(Pid),
    ) -> Result<(Arc<OwnedFd>, Option<Attach>), InitError> {
        let name = gpu.to_string();
        let (descriptor, attach) = match self
            .opener
            .as_ref()
            .and_then(|opener| opener.open(&name, &node.path, &mut opening))
        {
            Some(Ok((descriptor, attach))) => (descriptor, Some(attach)),
            Some(Err(errno)) => {
                return Err(InitError::Open {
                    path: node.path.clone(),
                    errno,
                });
            }
            None => {
                opening(gettid());
                let descriptor = adapter::start(node)?;
                if let Some(Err(errno)) = self
                    .keeper
                    .as_ref()
                    .map(|keeper| keeper.keep(&name, &descriptor))
                {
                    tracing::warn!(
                        name: names::GPU_INIT, gpu = %gpu.address,
                        error = %format!("hand GPU {gpu} to the keeper: {errno}: the worker holds \
                            it alone"),
                    );
                }
                (descriptor, None)
            }
        };
        let descriptor = Arc::new(descriptor);
        self.lock().insert(gpu, Arc::clone(&descriptor));
        Ok((descriptor, attach))
    }

    /// Binds a GPU to the driver in a process of its own; `binding` gets that process. None when
    /// the bind could not be tried there.
    pub fn bind(&self, gpu: PciAddress, binding: impl FnOnce(Pid)) -> Option<Result<(), Errno>> {
        self.opener.as_ref()?.bind(gpu, binding)
    }

    /// Process that opens GPUs.
    pub fn opener(&self) -> Option<HelperPid> {
        self.opener.as_ref().map(Opener::pid)
    }

    /// All binds whose descriptor is held.
    pub fn held(&self) -> Vec<Bound> {
        self.lock().keys().copied().collect()
    }

    /// Descriptor of a GPU, if the GPU has been opened in this bind.
    pub fn of(&self, gpu: &Bound) -> Option<Arc<OwnedFd>> {
        self.lock().get(gpu).cloned()
    }

    /// Releases a removed GPU. A call that still waits in the driver keeps its reference until it
    /// returns.
    pub fn release(&self, gpu: &Bound) {
        // The last close may take long in the driver. A thread does it here, a child in the keeper;
        // nothing waits for either.
        if let Some(descriptor) = self.lock().remove(gpu) {
            // If no thread can be started, the descriptor is closed here; with a keeper, that is
            // not the last close.
            let _unused = std::thread::Builder::new()
                .stack_size(STACK)
                .spawn(move || drop(descriptor));
        }
        if let Some(Err(errno)) = self
            .keeper
            .as_ref()
            .map(|keeper| keeper.release(&gpu.to_string()))
        {
            tracing::warn!(
                name: names::GPU_REMOVED, gpu = %gpu.address,
                error = %format!("ask the keeper to release GPU {gpu}: {errno}: its removal waits"),
            );
        }
    }

    /// Notifies the keeper that the deaths of earlier workers are in the stream.
    pub fn reported_deaths(&self) {
        // An end of the keeper is reported by whoever watches its socket.
        let _unused = self.keeper.as_ref().map(KeeperSocket::reported_deaths);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Bound, Arc<OwnedFd>>> {
        threads::lock(&self.own)
    }
}
