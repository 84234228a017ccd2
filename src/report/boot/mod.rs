//! A boot: records in, [`model::Boot`] and its [`timeline::Timeline`] out. No I/O, no text for
//! people.
//!
//! [`steps`] writes a [`story::Story`] from the records of a boot. [`timeline::Timeline`] makes any
//! story sound, and all later code reads only the timeline. The owner of each step is in one table,
//! [`kata_gpu_wire::catalogue`].
//!
//! Invariants: every claim comes from the story. A step that was computed from other records is
//! marked so; an order that is only assumed never supports a promised gain. Texts in a timeline are
//! printable ASCII.

mod agent_steps; // the agent's share: start, waiting, pauses, containers
pub mod cause; // why something failed, and ends of guests
mod containers; // containers by the agent's lines
pub mod coverage;
pub mod draft; // the story while steps are added
pub mod fold; // records into the model
pub mod gpu_health; // NVML's reports on the GPUs
pub mod gpu_name; // a GPU's number and address
pub mod gpus; // spans, and states of GPUs
mod host_steps; // the host's share by its own trace
pub mod host_trace; // the host's trace on the guest's clock
pub mod intervals; // sets of time
mod kernel_steps; // the kernel's share: before the init, and probes inside a module load
pub mod model; // GPUs, containers, milestones, spans, losses
pub mod runtime_steps; // the host's share: containerd, CNI, the shim, and time without a request
pub mod steps; // the records of a boot as a story
pub mod story; // steps and milestones of a boot, as they were found
pub mod timeline; // a story made sound: in order, in phases, without contradiction // time that no step explains
