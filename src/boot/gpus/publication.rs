//! The only writer of the CDI specs. Tasks of GPUs send reports; each report, or each group of
//! reports that came meanwhile, is one publication. The writer waits neither for other GPUs nor for
//! the lane.

use super::messages::GpuId;
use super::roster::Roster;
use crate::cdi::publish::{DIRECTORY, Publisher};
use crate::cdi::schema::Spec;
use crate::cdi::spec::{Device, Entry, Extras, Options, Ready, generate};
use crate::device_nodes::Node;
use crate::driver_files::DriverFiles;
use crate::events::{After, StepId, names};
use crate::step;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::mpsc;

/// A change of the spec.
pub enum Update {
    /// GPUs came or went; the roster lists the present ones.
    Roster,
    /// Nodes and files that every container with a GPU gets.
    Common(Common),
    /// A GPU can be given to containers; `after` is the step that made it ready.
    Ready { gpu: GpuId, nodes: Vec<Node>, after: Option<StepId> },
    /// Devices of a usable GPU besides its own node.
    Extras { gpu: GpuId, extras: Extras },
    /// Devices of another kind, with a file of its own named after `mode`.
    Other { mode: &'static str, spec: Spec },
    /// A usable GPU is also known by this name.
    Known { gpu: GpuId, uuid: String },
    /// A GPU has failed.
    Failed { gpu: GpuId },
    /// All GPUs are usable or failed.
    Settled,
}

/// Channel to the writer. Sending fails only when the writer is gone, with the runtime.
pub type Updates = mpsc::UnboundedSender<Update>;

/// Nodes and files that every container with a GPU gets, as far as they exist.
#[derive(Default)]
pub struct Common {
    pub nodes: Vec<Node>,
    pub files: Option<DriverFiles>,
}

/// Entries published by an earlier worker.
#[derive(Default)]
pub struct Published {
    pub entries: HashMap<GpuId, Entry>,
    pub common: Common,
}

/// Starts the writer; must be called inside the runtime. Before this returns, the spec with every
/// GPU of the roster is written, unless `withheld` until [`Update::Settled`]. Each GPU that becomes
/// resolvable is passed to `resolvable`.
pub fn start(
    roster: Arc<Roster>,
    published: Published,
    options: Options,
    withheld: bool,
    resolvable: impl Fn(GpuId) + Send + 'static,
) -> Updates {
    let (sender, mut updates) = mpsc::unbounded_channel();
    let mut publication =
        Publication { roster, entries: published.entries, common: published.common, others: Vec::new(), options, withheld };
    publication.publish(&[], &After::default());
    tokio::spawn(async move {
        let mut updates_now = Vec::new();
        while updates.recv_many(&mut updates_now, 64).await > 0 {
            publication.apply(std::mem::take(&mut updates_now)).into_iter().for_each(&resolvable);
        }
    });
    sender
}

struct Publication {
    roster: Arc<Roster>,
    /// Entries that are not pending.
    entries: HashMap<GpuId, Entry>,
    common: Common,
    /// Specs of other kinds that are not written yet.
    others: Vec<(&'static str, Spec)>,
    options: Options,
    withheld: bool,
}

impl Publication {
    /// Takes reports in; returns the GPUs whose report needs no further publication.
    fn apply(&mut self, updates: Vec<Update>) -> Vec<GpuId> {
        let (mut ready, mut reported, mut with_extras) = (Vec::new(), Vec::new(), Vec::new());
        let mut after = After::default();
        let mut changed = false;
        for update in updates {
            match update {
                Update::Roster => {
                    let roster = Arc::clone(&self.roster);
                    self.entries.retain(|gpu, _| roster.contains(*gpu));
                    changed = true;
                }
                // Common nodes are of no use before a GPU is ready: no publication of their own.
                Update::Common(common) => self.common = common,
                Update::Ready { gpu, nodes, after: step } => {
                    reported.push(gpu);
                    if self.set(gpu, Entry::Ready(Ready { nodes, ..Ready::default() })) {
                        changed = true;
                        ready.push(gpu);
                        after.0.extend(step);
                    }
                }
                Update::Extras { gpu, extras: found } => {
                    // A GPU that was given up meanwhile has no extras.
                    if let Some(Entry::Ready(ready)) = self.entries.get_mut(&gpu)
                        && ready.extras != found
                    {
                        with_extras.push((gpu, found.displays.len(), found.instances.len()));
                        ready.extras = found;
                        changed = true;
                    }
                }
                Update::Other { mode, spec } => self.others.push((mode, spec)),
                Update::Known { gpu, uuid } => {
                    if let Some(Entry::Ready(ready)) = self.entries.get_mut(&gpu) {
                        ready.uuid = Some(uuid);
                        changed = true;
                    }
                }
                Update::Failed { gpu } => {
                    changed |= self.set(gpu, Entry::Failed);
                    ready.retain(|r| *r != gpu);
                }
                Update::Settled if self.withheld => {
                    self.withheld = false;
                    changed = true;
                    ready = self.entries.iter().filter(|(_, e)| matches!(e, Entry::Ready(_))).map(|(gpu, _)| *gpu).collect();
                    ready.sort_unstable();
                }
                Update::Settled => {}
            }
        }
        if changed {
            self.publish(&ready, &after);
        }
        for (gpu, displays, instances) in with_extras {
            let index = self.roster.index(gpu.address) as u64;
            tracing::info!(name: names::CDI_BESIDE, gpu = %gpu.address, index, displays = displays as u64, instances = instances as u64);
        }
        if !self.withheld {
            std::mem::take(&mut self.others).iter().for_each(|(mode, spec)| publish_other(mode, spec));
        }
        reported
    }

    /// Sets the entry of a GPU; returns whether that changes the spec.
    fn set(&mut self, gpu: GpuId, entry: Entry) -> bool {
        // A GPU that was removed meanwhile stays removed.
        self.roster.contains(gpu) && self.entries.insert(gpu, entry.clone()) != Some(entry)
    }

    /// Writes the spec and reports the GPUs that became resolvable by that.
    fn publish(&self, newly_ready: &[GpuId], after: &After) {
        let gpus = self.roster.all();
        let entry = |gpu: &GpuId| self.entries.get(gpu).cloned().unwrap_or(Entry::Pending);
        let devices: Vec<Device> =
            gpus.iter().enumerate().map(|(index, gpu)| Device { index, address: gpu.address, entry: entry(gpu) }).collect();
        let publisher = Publisher::new(Path::new(DIRECTORY));
        if self.withheld || devices.is_empty() && !publisher.as_ref().is_ok_and(Publisher::is_published) {
            // A guest that never had a GPU does not publish the kind.
            return;
        }
        let count = |wanted: fn(&Entry) -> bool| devices.iter().filter(|d| wanted(&d.entry)).count() as u64;
        let empty = tracing::field::Empty;
        let step = step!(names::CDI_PUBLISH, after = ?after, ready = empty, pending = empty, failed = empty, bytes = empty);
        step.note("ready", count(|e| matches!(e, Entry::Ready(_))));
        step.note("pending", count(|e| *e == Entry::Pending));
        step.note("failed", count(|e| *e == Entry::Failed));
        let spec = generate(&devices, &self.common.nodes, self.common.files.as_ref(), &self.options);
        match publisher.and_then(|p| p.publish(&spec)) {
            Ok(bytes) => step.note("bytes", bytes as u64),
            Err(error) => {
                step.fail(&format!("{error}: containers wait for the GPUs until the agent's cdi_timeout"));
                return;
            }
        }
        drop(step);
        for (device, _) in devices.iter().zip(&gpus).filter(|(_, gpu)| newly_ready.contains(gpu)) {
            tracing::info!(name: names::GPU_PUBLISHED, gpu = %device.address, index = device.index as u64);
        }
    }
}

/// Writes the spec of another kind.
fn publish_other(mode: &str, spec: &Spec) {
    let file = format!("nvidia-{mode}.yaml");
    let written = Publisher::new(Path::new(DIRECTORY)).and_then(|p| p.publish_as(&file, spec));
    let (kind, devices) = (spec.kind.as_str(), spec.devices.len() as u64);
    match written {
        Ok(bytes) => tracing::info!(name: names::CDI_BESIDE, kind, devices, bytes = bytes as u64),
        Err(error) => {
            let error = format!("{error}: containers that ask for {kind} wait for it until the agent's cdi_timeout");
            tracing::error!(name: names::CDI_BESIDE, kind, error);
        }
    }
}
