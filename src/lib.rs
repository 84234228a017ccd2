//! kata-gpu-init: starts a Kata Containers guest with NVIDIA GPUs. This page is the map, in boot order.

pub mod events;
pub mod pci; // which GPUs are there: sysfs scan, PCI addresses // what everybody sees: records, their ring, the sinks

#[cfg(feature = "host")]
pub mod host;
