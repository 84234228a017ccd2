//! Shared knowledge of guest and host, in one place. serde only: no system call, no clock, no file.
//!
//! The records of a boot are lines of JSON ([`mod@record`], README.md has the rules for a change);
//! each name that they may have stands in the [`catalogue`], with owner, form and phase.

#[macro_use]
mod named; // enums with names

pub mod arch; // what differs between architectures
pub mod build_id; // a program's note with the id of its build
pub mod catalogue; // all names of records
pub mod decode; // bytes into lines
pub mod driver_log; // lines of driver and PCI in the kernel's log
pub mod fabric; // a GPU's part of an NVLink fabric
pub mod failure; // the catalogue of failures: words and facts, what happened, whose, cure
mod newer; // lines of the next schema
pub mod nvml_messages; // requests to the helper for NVML, and its answers
pub mod pci_address; // addresses, and the ids of NVIDIA's GPUs
pub mod record; // a line of the stream, and what a writer makes

pub use catalogue::names;
