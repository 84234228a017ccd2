//! The descriptors of opened GPUs: the worker's own copies, and the keeper's. Never closed while a GPU is there; given up when it is being removed,
//! because the driver's removal waits for that.

use super::keeper::{Held, KeeperSocket};
use crate::events::names;
use crate::pci::PciAddress;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

/// All descriptors. Shared by the tasks of all GPUs.
pub struct Descriptors {
    own: Mutex<HashMap<PciAddress, Arc<OwnedFd>>>,
    keeper: Option<KeeperSocket>,
}

impl Descriptors {
    /// With what an earlier worker had opened: this process has inherited it.
    pub fn new(keeper: Option<KeeperSocket>, held: Vec<Held>) -> Self {
        let own = held.into_iter().filter_map(|h| Some((h.gpu.parse().ok()?, Arc::new(crate::sys::inherited(h.descriptor)?)))).collect();
        Self { own: Mutex::new(own), keeper }
    }

    /// Keeps a descriptor that was just opened, here and in the keeper.
    pub fn keep(&self, gpu: PciAddress, descriptor: OwnedFd) -> Arc<OwnedFd> {
        let descriptor = Arc::new(descriptor);
        if let Some(Err(errno)) = self.keeper.as_ref().map(|keeper| keeper.keep(&gpu.to_string(), &descriptor)) {
            tracing::warn!(name: names::GPU_INIT, gpu = %gpu, error = %format!("hand GPU {gpu} to the keeper: {errno}: the worker holds it alone"));
        }
        self.lock().insert(gpu, Arc::clone(&descriptor));
        descriptor
    }

    /// The descriptor of a GPU, if it has been opened.
    pub fn of(&self, gpu: PciAddress) -> Option<Arc<OwnedFd>> {
        self.lock().get(&gpu).cloned()
    }

    /// Gives a removed GPU up; must be called inside the runtime. A call that is still waiting in the driver keeps its reference until it returns.
    pub fn release(&self, gpu: PciAddress) {
        // The last close takes as long as the driver likes: here it is a thread's, in the keeper a child's, and nobody waits for either.
        if let Some(descriptor) = self.lock().remove(&gpu) {
            tokio::task::spawn_blocking(move || drop(descriptor));
        }
        if let Some(Err(errno)) = self.keeper.as_ref().map(|keeper| keeper.release(&gpu.to_string())) {
            tracing::warn!(name: names::GPU_REMOVED, gpu = %gpu, error = %format!("ask the keeper to release GPU {gpu}: {errno}: its removal waits"));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<PciAddress, Arc<OwnedFd>>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
