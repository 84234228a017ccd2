//! All GPUs of a guest, from the PCI scan to the spec.
//!
//! ```text
//! PCI scan -> roster -> schedule <- facts -- gpu (one task each), driver's load, agent, kernel
//!                          |
//!                        orders -> enable (lane) -> load, probe -> publish -> initialise
//! ```
//!
//! Only [`schedule`] decides the order. [`slots`] knows the GPU at each address, [`strategy`] and
//! [`waves`] compute the schedule's inputs, [`deadlines`] lists every time limit. All of these are
//! pure.

pub mod agent; // waits of the lane for the agent
pub mod deadlines; // every time limit, with its reason
mod dispatch; // transport of facts and orders
mod driver; // the driver's load
mod extras; // devices for containers besides GPUs' nodes
mod failed; // failure of a GPU
mod find_driver_files; // the driver's files for containers
mod fleet; // all GPUs, including hot-plugged ones
mod gpu; // steps of one GPU
mod health; // NVML's reports on usable GPUs, and settings
mod lane; // enabling
pub mod lane_cpu; // a vCPU for the lane
mod late; // kernel stacks for a GPU that takes long
mod lockdown; // end of module loading
pub mod needed; // records that these facts come from
mod off_the_bus; // a GPU that the driver says has fallen off the bus
mod overlaps; // initialisations at the same time
pub mod previous; // facts from an earlier worker
mod publication; // the writer of the spec
mod readahead; // module and firmware, from the disk before they are asked for
mod readiness; // conditions for a container besides the bind
mod reset; // one reset of a GPU that was left half initialised
mod roster; // the slots, shared by all tasks, and the reports of names
mod scan; // functions of the bus, and the topology that follows
pub mod schedule; // facts in, permissions and orders out
pub mod schedule_messages; // facts and orders
mod shared; // state shared by the tasks of all GPUs
mod slots; // GPUs by PCI address, and their names
mod stock; // comparison of the bus with the slots
pub mod strategy; // choice of bind and initialisation for this boot
pub mod waves; // costs of initialisations that run together

pub use fleet::{Machine, Sources, run};
