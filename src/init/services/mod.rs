//! NVIDIA's services in the guest: their choice, start, supervision and end.
//!
//! ```text
//! table, topology, configuration, programs -> plan -> supervisor: one task each -> launch
//!                                                         ^   ^
//!                                     milestones of the GPUs   output, syslog -> events
//! ```
//!
//! Invariants: nothing here delays a GPU or the agent; no deadline ends a service; a service
//! outlives the worker that started it, and no worker starts what still runs.

pub mod configuration; // configuration files of the daemons, made in /run
pub mod end; // orderly end
pub mod launch; // the last steps before a service's program
pub mod lines; // bounds of foreign log lines
pub mod restart_backoff; // pauses before restarts
mod service_output; // stdout and stderr of services
pub mod service_plan; // choice of services and their order
pub mod service_processes; // services among the guest's processes
pub mod service_table; // one row per service
mod state; // progress of the GPUs
mod supervisor; // starts, watches and restarts services
mod syslog; // /dev/log

pub use state::{Fabric, Milestones};
pub use supervisor::{Inputs, run};
