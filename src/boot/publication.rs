//! The one writer of the CDI spec. GPUs report what became of them; each report, or each group of reports that came meanwhile, is one publication.

use crate::cdi::publish::{DIRECTORY, Publisher};
use crate::cdi::spec::{Device, Entry, generate};
use crate::device_nodes::Node;
use crate::events::{After, StepId, names};
use crate::pci::Gpu;
use crate::step;
use std::path::Path;
use tokio::sync::{mpsc, oneshot};

/// What can change the spec.
pub enum Update {
    /// The nodes that every container with a GPU gets.
    Common(Vec<Node>),
    /// A GPU can be used by containers; `after` is the step that made it so, and `turn` is dropped once it is published.
    Ready { index: usize, nodes: Vec<Node>, after: StepId, turn: Option<oneshot::Sender<()>> },
    /// A GPU will not come.
    Failed { index: usize },
    /// Nothing more will change.
    Settled,
}

/// Starts the writer; must be called inside the runtime. Unless `withheld` (until [`Update::Settled`]), the spec is there before this returns,
/// with every GPU pending.
pub fn start(gpus: &[Gpu], withheld: bool) -> mpsc::UnboundedSender<Update> {
    let (sender, mut updates) = mpsc::unbounded_channel();
    let devices = gpus.iter().map(|g| Device { index: g.index, address: g.address, entry: Entry::Pending }).collect();
    let mut publication = Publication { devices, common: Vec::new(), withheld };
    publication.publish(&[], &After::default());
    tokio::spawn(async move {
        let mut batch = Vec::new();
        while updates.recv_many(&mut batch, 64).await > 0 {
            publication.apply(std::mem::take(&mut batch));
        }
    });
    sender
}

struct Publication {
    devices: Vec<Device>,
    common: Vec<Node>,
    withheld: bool,
}

impl Publication {
    fn apply(&mut self, updates: Vec<Update>) {
        let (mut ready, mut turns) = (Vec::new(), Vec::new());
        let mut after = After::default();
        let (mut settled, mut changed) = (false, false);
        for update in updates {
            match update {
                // Of use to nobody until a GPU is ready: no publication of its own.
                Update::Common(nodes) => self.common = nodes,
                Update::Ready { index, nodes, after: step, turn } => {
                    turns.extend(turn);
                    self.set(index, Entry::Ready(nodes));
                    changed = true;
                    ready.push(index);
                    after.0.push(step);
                }
                Update::Failed { index } => {
                    self.set(index, Entry::Failed);
                    changed = true;
                    ready.retain(|r| *r != index);
                }
                Update::Settled => settled = true,
            }
        }
        if settled && self.withheld {
            self.withheld = false;
            changed = true;
            ready = self.devices.iter().filter(|d| matches!(d.entry, Entry::Ready(_))).map(|d| d.index).collect();
        }
        if changed {
            self.publish(&ready, &after);
        }
        drop(turns);
    }

    fn set(&mut self, index: usize, entry: Entry) {
        if let Some(device) = self.devices.iter_mut().find(|d| d.index == index) {
            device.entry = entry;
        }
    }

    /// Writes the spec and tells which GPUs became resolvable by that.
    fn publish(&self, newly_ready: &[usize], after: &After) {
        if self.withheld || self.devices.is_empty() {
            return;
        }
        let count = |wanted: fn(&Entry) -> bool| self.devices.iter().filter(|d| wanted(&d.entry)).count() as u64;
        let empty = tracing::field::Empty;
        let step = step!(names::CDI_PUBLISH, after = ?after, ready = empty, pending = empty, failed = empty, bytes = empty);
        step.note("ready", count(|e| matches!(e, Entry::Ready(_))));
        step.note("pending", count(|e| *e == Entry::Pending));
        step.note("failed", count(|e| *e == Entry::Failed));
        let spec = generate(&self.devices, &self.common);
        match Publisher::new(Path::new(DIRECTORY)).and_then(|p| p.publish(&spec)) {
            Ok(bytes) => step.note("bytes", bytes as u64),
            Err(error) => {
                step.fail(&format!("{error}: containers wait for the GPUs until the agent's cdi_timeout"));
                return;
            }
        }
        drop(step);
        for device in self.devices.iter().filter(|d| newly_ready.contains(&d.index)) {
            tracing::info!(name: names::GPU_PUBLISHED, gpu = %device.address, index = device.index as u64);
        }
    }
}
