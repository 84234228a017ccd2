//! Reasons why GPU guests start slowly on a host.

pub mod facts; // this host's files, VMs, Kata's configuration
pub mod recorder;
pub mod rules; // rules over facts; findings out
