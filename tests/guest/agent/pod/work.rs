//! Computing of the real agent between its system calls: loading its 25 MB, printing each spec into
//! its log, serialising it for its children. Here it is rounds of parsing and printing JSON, which
//! slow down with the machine as the real ones do.
//!
//! Numbers of rounds bring this agent's times to within a third of those of kata-agent 4.1.0 on an
//! idle guest with 1 and 2 vCPUs, most to within a sixth: `bench agent` measures both, and
//! `tests/bench/runs/agent-2026-11-22T042415Z.json` has the runs.

use serde_json::Value;
use std::hint::black_box;

/// From exec to the first answer.
pub const START_UP: u32 = 215;
pub const SANDBOX: u32 = 24;
/// A request for a container, until its bundle is made.
pub const REQUEST: u32 = 28;
/// Printing a spec to which devices were added.
pub const DEVICES: u32 = 90;
pub const CGROUP: u32 = 14;
/// The same for the pod's first container.
pub const FIRST_CGROUP: u32 = 206;
/// Handing the spec to the container's process.
pub const HAND_OVER: u32 = 6;
/// A container's first process, until it has read its spec.
pub const CHILD: u32 = 65;
/// The second one, from its root to its program.
pub const BECOME: u32 = 61;
pub const START: u32 = 2;

/// Text that each round parses; its content is about that of a spec.
const TEXT: &str = include_str!("work.json");

pub fn spend(rounds: u32) {
    for _ in 0..rounds {
        let value: Option<Value> = serde_json::from_str(black_box(TEXT)).ok();
        black_box(value.map(|v| v.to_string()));
    }
}
