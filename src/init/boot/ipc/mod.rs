//! Connections between the processes of the init: sockets, the descriptors that travel over them,
//! and the hand-over to the agent. Each file holds both ends of one connection. Order and timing
//! are decided elsewhere.

pub mod descriptors; // the worker's view of all opened GPUs
pub mod handover; // PID 1 becomes the agent
pub mod keeper_socket; // the worker and the keeper: descriptors that outlive the worker
pub mod lane_process; // enabling, on a vCPU of its own
pub mod opener; // opening, in processes that survive the worker
pub mod reply; // requests, each with a socket for its answers

/// Sets the name of this process that `ps` shows.
pub fn name_process(name: &str) {
    // The name is only for `ps`.
    let _unused = std::fs::write("/proc/self/comm", name);
}
