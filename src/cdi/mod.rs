//! The CDI spec: what it says ([`spec`], pure), and how it gets in front of the agent
//! ([`publish`]).
//!
//! The contract with the agent: one file for the GPUs, and one for each other kind, as CDI wants
//! it; every GPU of the scan listed from the first publication on; a GPU that is not ready has a
//! device node whose path does not exist, on which the agent's injection fails and is tried again
//! without having changed the container; a file is replaced by rename and never missing, empty or
//! torn; the temporary name ends in nothing the agent reads.

pub mod command; // `cdi` on the command line
pub mod devices; // what is there
pub mod hooks; // in containers
pub mod ld_so_cache; // what their loaders read
pub mod publish;
pub mod schema; // CDI's data
pub mod spec; // and ours in it
mod yaml; // for people
