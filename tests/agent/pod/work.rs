//! What the real agent computes beside its steps of the kernel: loading its 25 MB, printing each spec into its log, serialising it for its children.
//! Here it is rounds of parsing and printing JSON, which slow down with the machine as the real ones do.
//!
//! Numbers of rounds make this agent's times those of kata-agent 4.1.0 on an idle guest: `bench agent` measures both.

use serde_json::Value;
use std::hint::black_box;

/// From exec to the first answer.
pub const START_UP: u32 = 150;
pub const SANDBOX: u32 = 8;
/// A request for a container, until its bundle is made.
pub const REQUEST: u32 = 18;
/// Printing a spec to which devices were added.
pub const DEVICES: u32 = 60;
pub const CGROUP: u32 = 14;
/// The same for the pod's first container.
pub const FIRST_CGROUP: u32 = 96;
/// Handing the spec to the container's process.
pub const HAND_OVER: u32 = 6;
/// A container's first process, until it has read its spec.
pub const CHILD: u32 = 40;
/// The second one, from its root to its program.
pub const BECOME: u32 = 36;
pub const START: u32 = 2;

/// One round's text: about what a spec has.
const TEXT: &str = include_str!("work.json");

pub fn spend(rounds: u32) {
    for _ in 0..rounds {
        let value: Option<Value> = serde_json::from_str(black_box(TEXT)).ok();
        black_box(value.map(|v| v.to_string()));
    }
}
