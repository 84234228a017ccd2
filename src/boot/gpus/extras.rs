//! Devices for containers besides GPUs' own nodes: displays, MIG instances with their capabilities,
//! IMEX channels, switches.
//!
//! A GPU is looked at when it is usable, and again whenever the kernel reports that a display of it
//! came or went; the rest when the driver is loaded. All is read from /proc and /sys, no device is
//! opened, and no GPU is published later for it. Instances that are made after a GPU became usable
//! are not seen: no event reports them.

use super::messages::GpuId;
use super::publication::{Update, Updates};
use super::shared::Shared;
use crate::cdi::devices::{OTHERS, Places};
use crate::cdi::schema::Edits;
use crate::cdi::spec::Extras;
use crate::device_nodes::DeviceNodes;
use crate::driver_caps::{access, instances, switches};
use crate::driver_proc::{majors, node_rules};
use crate::events::names;
use crate::pci::PciAddress;
use crate::threads::{self, Running};
use std::path::Path;
use std::sync::Arc;

const PROC: &str = "/proc";
const DEV: &str = "/dev";
/// Kinds that a guest publishes by itself.
const PUBLISHED: [&str; 2] = ["imex", "nvswitch"];

/// Reads what a usable GPU has besides its node, and reports it to the writer of the spec. On a
/// thread of its own: sysfs may wait for a change of the bus.
pub fn start(shared: &Arc<Shared>, gpu: GpuId) -> Running<()> {
    let shared = Arc::clone(shared);
    threads::run(move || {
        if let Some(minor) = shared.seen.minor(gpu.address) {
            // Fails only when the writer is gone, with the runtime.
            let _unused = shared.spec.send(Update::Extras { gpu, extras: read(gpu.address, minor) });
        }
    })
}

/// Reads what a GPU has besides its own node; makes the nodes of its capabilities.
pub fn read(gpu: PciAddress, minor: u32) -> Extras {
    let found = make_capabilities(minor).and_then(|()| Places::default().extras(gpu, minor));
    let (extras, problems) = found.unwrap_or_else(|error| {
        let error = format!("look at what GPU {gpu} has besides its node: {error}: containers get the GPU, and nothing of that");
        (Extras::default(), vec![error])
    });
    for error in problems {
        tracing::warn!(name: names::CDI_BESIDE, gpu = %gpu, error);
    }
    extras
}

/// Makes a capability's node: the driver only makes a file with that node's number.
fn make_capabilities(gpu: u32) -> Result<(), String> {
    let proc = Path::new(PROC);
    let instances = instances(proc, gpu)?;
    if instances.is_empty() {
        return Ok(());
    }
    let major =
        majors(proc).map_err(|e| e.to_string())?.caps.ok_or("/proc/devices has no \"nvidia-caps\", but the GPU has MIG instances")?;
    let nodes = DeviceNodes::at(Path::new(DEV), node_rules(proc));
    for capability in instances.into_iter().flat_map(|instance| instance.capabilities()) {
        nodes.capability(major, access(proc, capability)?).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Makes IMEX channels and the switches' nodes, once the driver is loaded, and reports the kinds
/// there are then to the writer.
pub fn others(imex_channels: u32, spec: &Updates) {
    for made in [make_channels(imex_channels), make_switches()] {
        if let Err(error) = made {
            tracing::error!(name: names::CDI_BESIDE, error);
        }
    }
    let places = Places::default();
    for other in OTHERS.iter().filter(|o| PUBLISHED.contains(&o.mode)) {
        match other.find(&places) {
            Ok(nodes) if nodes.is_empty() => {}
            Ok(nodes) => {
                let update = Update::Other { mode: other.mode, spec: other.spec_of(&nodes, &places, Edits::default()) };
                // Fails only when the writer is gone, with the runtime.
                let _unused = spec.send(update);
            }
            Err(error) => tracing::error!(name: names::CDI_BESIDE, error),
        }
    }
}

fn make_channels(count: u32) -> Result<(), String> {
    if count == 0 {
        return Ok(());
    }
    let at = |why: String| format!("make {count} IMEX channels: {why}: containers that ask for one will wait for it in vain");
    let proc = Path::new(PROC);
    let major = majors(proc).map_err(|e| at(e.to_string()))?.imex_channels;
    let major = major.ok_or_else(|| at("/proc/devices has no \"nvidia-caps-imex-channels\": this driver has none".into()))?;
    let nodes = DeviceNodes::at(Path::new(DEV), node_rules(proc));
    (0..count).try_for_each(|n| nodes.imex_channel(major, n).map(drop)).map_err(|e| at(e.to_string()))
}

fn make_switches() -> Result<(), String> {
    let proc = Path::new(PROC);
    let count = switches(proc)?;
    if count == 0 {
        return Ok(());
    }
    let at = |why: String| format!("make the nodes of {count} switches: {why}");
    let major =
        majors(proc).map_err(|e| at(e.to_string()))?.nvswitch.ok_or_else(|| at("/proc/devices has no \"nvidia-nvswitch\"".into()))?;
    let nodes = DeviceNodes::at(Path::new(DEV), node_rules(proc));
    nodes.switches(major, count).map(drop).map_err(|e| at(e.to_string()))
}
