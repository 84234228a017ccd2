//! All GPUs of a guest, from the PCI scan to the spec.
//!
//! ```text
//! PCI scan -> roster -> schedule <- facts -- gpu (one task each), driver's load, agent, kernel
//!                          |
//!                        orders -> enable (lane) -> load, probe -> publish -> initialise
//! ```
//!
//! [`schedule`] alone knows the order, [`strategy`] and [`waves`] what it depends on, [`deadlines`] every time limit. All of these are pure.

pub mod deadlines; // every time limit, with its reason
pub mod strategy; // how this boot binds and initialises
pub mod waves; // which initialisations go together
pub mod schedule; // facts in, permissions and orders out
mod dispatch; // carries both
mod roster; // which GPUs there are, and their names
pub mod previous; // what an earlier worker has done
mod late; // what the kernel does for a GPU that takes long
pub mod lane_cpu; // a vCPU for the lane
mod lane; // enabling
mod libraries; // the driver's files for containers
mod publication; // the writer of the spec
mod extras; // what containers get besides GPUs' nodes
mod driver; // the driver's load
mod gpu; // one GPU's way
mod fleet; // all GPUs, those that come and go among them

use crate::agent_watch::Seen;
use crate::boot::wire::descriptors::Descriptors;
use crate::config::Config;
use crate::driver_log::Signal;
use crate::events::kmsg::DriverWords;
use crate::events::sinks::console::Gate;
use crate::events::{After, StepId, names};
use crate::pci::{self, Gpu, SYS};
use crate::step;
use crate::uevents::Uevents;
use fleet::Fleet;
use lane_cpu::Spare;
use previous::Previous;
use std::io;
use std::path::Path;
use tokio::sync::mpsc;

/// What the worker hears while it brings GPUs up.
pub struct Sources {
    pub uevents: io::Result<Uevents>,
    pub words: Option<DriverWords>,
    pub signals: Option<mpsc::UnboundedReceiver<Signal>>,
    /// What the agent does.
    pub agent: mpsc::UnboundedReceiver<Seen>,
}

/// What of the machine is set apart for a while.
pub struct Machine {
    /// A vCPU for the lane, where there is one.
    pub spare: Option<Spare>,
    /// The console's lines.
    pub gate: Gate,
}

/// Brings all GPUs up and follows what becomes of them, after the worker's start. Returns only when the kernel can no longer be heard.
pub async fn run(
    config: &Config,
    command_line: &[u8],
    previous: Option<&Previous>,
    started: StepId,
    sources: Sources,
    descriptors: Descriptors,
    machine: Machine,
) {
    let Sources { uevents, words, signals, agent } = sources;
    let uevents = uevents.map_err(|error| {
        let error = format!("subscribe to uevents: {error}: GPUs that come or go later will not be seen");
        tracing::warn!(name: names::UEVENT, error);
    });
    // Uevents were subscribed to before this: a GPU that appears meanwhile is seen twice, not never.
    let (gpus, scanned) = scan(config, started);
    let mut fleet = Fleet::start(config, command_line, previous, (&gpus, scanned), words, descriptors, machine);
    fleet.follow(uevents.ok(), signals, agent).await;
}

/// Reads the GPUs, and reports what is found and what is missing.
fn scan(config: &Config, started: StepId) -> (Vec<Gpu>, StepId) {
    let step = step!(names::PCI_SCAN, after = ?After(vec![started]), gpus = tracing::field::Empty);
    let id = step.id();
    let gpus = match pci::scan(Path::new(SYS)) {
        Ok((gpus, unreadable)) => {
            for error in unreadable {
                tracing::warn!(name: names::PCI_SCAN, error);
            }
            gpus
        }
        Err(error) => {
            step.fail(&error);
            Vec::new()
        }
    };
    step.note("gpus", gpus.len() as u64);
    drop(step);
    if let Some(expected) = config.expected_gpus.filter(|e| *e > gpus.len()) {
        let error = format!("gpuinit.gpus={expected}, but the guest's PCI bus has {}: look at the VM's devices on the host", gpus.len());
        tracing::error!(name: names::PCI_SCAN, error);
    }
    (gpus, id)
}
