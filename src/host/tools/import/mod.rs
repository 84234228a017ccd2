//! `kata-gpu-boot import`: logs that other programs wrote about one boot into the file of a boot
//! that `collect` would have written.
//!
//! Each format has a file of its own that turns lines into [`item::Item`]s: what was said, and on
//! whose clock. [`clocks`] puts the clocks beside each other and says how wrong that may be,
//! [`derive`] makes records of what was said, [`write`] makes the file. Invariants: what is
//! recognised and what is skipped is counted; a record that comes from a log says so
//! (`fields.import`: format, line, error), and the file says so in a line that no guest can send
//! ([`crate::host::data::boot_file::HostEvent::Imported`]). Logs are hostile input: bounded reads,
//! no line can do harm.

pub mod agent; // lines of the agent and of our init
pub mod agreement; // an import beside the stream of the same boot
pub mod assemble; // files of one boot into one
pub mod bpftrace; // format: bpftrace output
pub mod choose; // which boot of several
pub mod clocks; // all clocks beside one
pub mod console; // format: guest console logs
pub mod detect; // the format of a file
pub mod derive; // what was said into records
pub mod ftrace; // format: function_graph output
pub mod input; // files into lines
pub mod item; // what formats give
pub mod journal; // format: containerd's journal or log
pub mod kernel; // lines of the guest's kernel
pub mod pins; // calls of vfio_pin_pages_remote
pub mod pod; // format: kubectl get pod -o json
pub mod report; // what was read, for people and programs
pub mod runtime; // lines of containerd and of Kata's shims
pub mod split_clock; // stamps of bpftrace whose two halves are of two clocks
pub mod steps; // steps that kernel lines show
pub mod write; // records into the file of a boot

#[cfg(test)]
mod tests;
