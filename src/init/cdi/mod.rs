//! The CDI spec: its content ([`spec`], pure), and its publication for the agent ([`publish`]).
//!
//! The contract with the agent: one file for the GPUs, and one for each other kind, as CDI
//! requires. Every GPU of the scan is listed from the first publication on. A GPU that is not ready
//! has a device node whose path does not exist: the agent's injection fails without a change to the
//! container and is tried again. A file is replaced by rename and never missing, empty or torn; the
//! temporary name has no suffix that the agent reads.

pub mod command; // `cdi` on the command line
pub mod devices; // devices and nodes of a driver
pub mod hooks; // in containers
pub mod publish;
pub mod schema; // CDI's data
pub mod spec; // and ours in it
mod yaml; // for people
