//! The processes of the init, in the order in which they start: PID 1 forks the keeper and becomes
//! the agent (or its parent), the keeper forks the worker, again if need be. The worker's own
//! helpers are in [`ipc`](super::ipc), with the sockets that lead to them.

mod agent_child; // PID 1 with the agent as its child
mod images; // extension disks in the worker
mod keeper; // holds descriptors, starts workers
pub mod pid1; // PID 1 until it is the agent
mod stamps; // data that PID 1 leaves to the others
mod worker; // brings GPUs up
