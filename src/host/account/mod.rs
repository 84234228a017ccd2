//! Accounting for a boot: whose time it was, what it waited for, and what nobody can explain. Pure, but for the commands.
//!
//! Whoever knows steps and milestones of a boot writes a [`story::Story`] ([`from_boot`] does, from the records of a boot; a reader of other logs can
//! do the same). [`timeline::Timeline`] makes it sound, whatever was in it, and everything else only reads that. Which step belongs to whom stands in
//! one table, [`phase::TABLE`].
//!
//! Invariants: nothing here claims what the story does not say: a step that was worked out from other records says so, an order that is only assumed
//! is never the ground of a promise. Texts in a timeline are printable ASCII.

pub mod phase; // which step belongs to which phase, and to whom
pub mod story; // the input: steps and milestones of any boot
pub mod from_boot; // the records of a boot as a story
mod agent_steps; // the agent's share: start, waiting, pauses, containers
mod kernel_steps; // the kernel's share: before the init, and probes inside a module load
mod runtime_steps; // the host's share: containerd, CNI, the shim, and who asked for nothing
pub mod intervals; // sets of time
pub mod timeline; // a story made sound: in order, in phases, without contradiction
pub mod blame; // whose time it was
pub mod coverage; // time that no step explains
pub mod graph; // what had to wait for what
pub mod critical_path; // the chain that set the end, and what would have made it shorter
pub mod held_up; // steps that waited for a vCPU that enables a GPU
pub mod statistics; // medians, percentiles, bootstrap
pub mod metrics; // a boot as numbers that can be compared
pub mod compare; // which of them got worse
pub mod stats; // many boots
pub mod commands; // the subcommands
mod grid; // tables
#[cfg(test)]
mod tests; // golden pages of recorded, hand-made and hostile boots
