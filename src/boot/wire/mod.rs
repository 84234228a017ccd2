//! Connections between the processes of the init: sockets, the descriptors that travel over them,
//! and the hand-over to the agent. Each file holds both ends of one connection. Nothing here knows
//! when anything is to be done.

pub mod handover; // PID 1 becomes the agent
pub mod keeper; // the worker and the keeper: descriptors that outlive the worker
pub mod reply; // requests whose answer comes over a socket of its own
pub mod opener; // opening, where a killed worker takes nothing with it
pub mod lane_process; // enabling, on a vCPU of its own
pub mod descriptors; // the worker's view of all opened GPUs

/// Sets the name of this process that `ps` shows.
pub fn name_process(name: &str) {
    // A process without its name works as well.
    let _unused = std::fs::write("/proc/self/comm", name);
}
