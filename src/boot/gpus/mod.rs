//! All GPUs of a guest, from the PCI scan to the spec.
//!
//! ```text
//! PCI scan -> roster -> schedule <- facts -- gpu (one task each), driver's load, agent, kernel
//!                          |
//!                        orders -> enable (lane) -> load, probe -> publish -> initialise
//! ```
//!
//! [`schedule`] alone knows the order, [`slots`] which GPU is where, [`strategy`] and [`waves`] what it depends on, [`deadlines`]
//! every time limit. All of these are pure.

pub mod deadlines; // every time limit, with its reason
pub mod strategy; // how this boot binds and initialises
pub mod waves; // which initialisations go together
pub mod messages; // facts and orders
pub mod agent; // when the lane waits for the agent
pub mod schedule; // facts in, permissions and orders out
mod dispatch; // carries both
mod slots; // which GPU is where, under which name
mod roster; // the same, shared and reported
pub mod previous; // what an earlier worker has done
mod late; // what the kernel does for a GPU that takes long
pub mod lane_cpu; // a vCPU for the lane
mod lane; // enabling
mod libraries; // the driver's files for containers
mod publication; // the writer of the spec
mod shared; // what the tasks of all GPUs work with
mod extras; // what containers get besides GPUs' nodes
mod driver; // the driver's load
mod stock; // what is on the bus, and what was
mod failed; // a GPU that fails
mod gpu; // one GPU's way
mod fleet; // all GPUs, those that come and go among them

pub use fleet::{Machine, Sources, run};
