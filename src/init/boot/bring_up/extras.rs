//! Devices for containers besides GPUs' own nodes: displays, MIG instances with their capabilities,
//! IMEX channels, switches.
//!
//! A GPU's extras are read when the GPU is usable, and again whenever the kernel reports that one
//! of its displays came or went. Channels and switches are read when the driver is loaded. All is
//! read from /proc and /sys; no device is opened, and no publication of a GPU waits for extras.
//! Instances made after a GPU became usable are not seen: no event reports them.

use super::publication::{Update, Updates};
use super::schedule_messages::GpuId;
use super::shared::Shared;
use crate::cdi::devices::{OTHERS, Places};
use crate::cdi::schema::Edits;
use crate::cdi::spec::Extras;
use crate::gpu::device_nodes::{DeviceNodes, make_for_switches};
use crate::gpu::driver_caps::{access, instances};
use crate::gpu::driver_proc::majors;
use crate::machine::threads;
use crate::machine::threads::Running;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use std::path::Path;
use std::sync::Arc;

const PROC: &str = "/proc";
const DEV: &str = "/dev";
/// Kinds of devices that a guest publishes besides GPUs.
const PUBLISHED: [&str; 2] = ["imex", "nvswitch"];

/// Reads the extras of a usable GPU and reports them to the writer of the spec. Runs on a thread of
/// its own: sysfs may wait for a change of the bus.
pub fn start(shared: &Arc<Shared>, gpu: GpuId) -> Running<()> {
    let shared = Arc::clone(shared);
    threads::run(move || {
        if let Some(minor) = shared.seen.minor(gpu) {
            // Sending fails only when the writer is gone, with the runtime.
            let _unused = shared.spec.send(Update::Extras {
                gpu,
                extras: read(gpu.address, minor),
            });
        }
    })
}

/// Reads a GPU's devices besides its own node; makes the nodes of its capabilities.
pub fn read(gpu: PciAddress, minor: u32) -> Extras {
    let unmade = make_capabilities(minor);
    let (extras, problems) = Places::default()
        .extras(gpu, minor)
        .unwrap_or_else(|error| {
            let error = format!(
                "read the further nodes of GPU {gpu}: {error}: containers get the GPU without them"
            );
            (Extras::default(), vec![error])
        });
    for error in unmade.into_iter().chain(problems) {
        tracing::warn!(name: names::CDI_EXTRA_DEVICES, gpu = %gpu, error);
    }
    extras
}

/// Makes the nodes of a GPU's capabilities; the driver only makes files with their numbers. Returns
/// why some are not made: their instances are left out.
fn make_capabilities(gpu: u32) -> Vec<String> {
    let proc = Path::new(PROC);
    // An error of the list is reported by its next reader.
    let instances = instances(proc, gpu).unwrap_or_default();
    if instances.is_empty() {
        return Vec::new();
    }
    let major = match majors(proc).map(|majors| majors.caps) {
        Ok(Some(major)) => major,
        Ok(None) => {
            let error = "/proc/devices has no \"nvidia-caps\", but the GPU has MIG instances";
            return vec![error.into()];
        }
        Err(error) => return vec![error.to_string()],
    };
    let nodes = DeviceNodes::of_guest();
    let made = instances
        .into_iter()
        .flat_map(|instance| instance.capabilities())
        .map(|capability| nodes.capability(major, access(proc, capability)?).map(drop));
    made.filter_map(Result::err).collect()
}

/// Makes IMEX channels and the switches' nodes once the driver is loaded; reports the kinds found
/// to the writer.
pub fn others(imex_channels: u32, spec: &Updates) {
    for made in [
        make_channels(imex_channels),
        make_for_switches(Path::new(PROC), Path::new(DEV)),
    ] {
        if let Err(error) = made {
            tracing::error!(name: names::CDI_EXTRA_DEVICES, error);
        }
    }
    let places = Places::default();
    for other in OTHERS.iter().filter(|o| PUBLISHED.contains(&o.mode)) {
        match other.find(&places) {
            Ok(nodes) if nodes.is_empty() => {}
            Ok(nodes) => {
                let update = Update::Other {
                    mode: other.mode,
                    spec: other.spec_of(&nodes, &places, Edits::default()),
                };
                // Sending fails only when the writer is gone, with the runtime.
                let _unused = spec.send(update);
            }
            Err(error) => tracing::error!(name: names::CDI_EXTRA_DEVICES, error),
        }
    }
}

fn make_channels(count: u32) -> Result<(), String> {
    if count == 0 {
        return Ok(());
    }
    let at = |why: String| {
        format!(
            "make {count} IMEX channels: {why}: containers that ask for one will wait for it in \
                vain"
        )
    };
    let proc = Path::new(PROC);
    let major = majors(proc).map_err(|e| at(e.to_string()))?.imex_channels;
    let major = major.ok_or_else(|| {
        at("/proc/devices has no \"nvidia-caps-imex-channels\": this driver has none".into())
    })?;
    let nodes = DeviceNodes::of_guest();
    (0..count)
        .try_for_each(|n| nodes.imex_channel(major, n).map(drop))
        .map_err(at)
}
