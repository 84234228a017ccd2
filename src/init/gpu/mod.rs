//! GPUs and their neighbours in sysfs, /proc and /dev, and the steps that make a GPU usable:
//! enable, bind, open. One GPU at a time, no order: that is the boot's.

pub mod adapter; // open: adapter initialisation
pub mod bind; // enable, driver_override, bind
pub mod coherent_memory; // memory of GPUs that is the guest's too (Grace)
pub mod device_nodes; // /dev/nvidia*
pub mod driver_caps; // the driver's /proc files: MIG instances, their capabilities, switches
pub mod driver_proc; // the driver's /proc files: minors, majors
pub mod pci; // scan for GPUs, switches and network functions
pub mod topology; // kind of guest, by its GPUs, switches and management functions
pub mod vpd; // which network functions manage switches
