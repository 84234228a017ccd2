//! `kata-gpu-boot import`: turns logs that other programs wrote about one boot into the file that
//! `collect` would have written.
//!
//! Each format has a file of its own that turns lines into [`item::Item`]s: facts with the clock of
//! their stamp. [`clocks`] relates the clocks and bounds the error, [`mod@derive`] makes records,
//! [`draft_writer`] makes the file. Invariants: recognised and skipped lines are counted; a record
//! from a log is marked (`fields.import`: format, line, error), and so is the file, in a line that
//! no guest can send ([`crate::data::boot_file::HostEvent::Imported`]). Logs are hostile
//! input: bounded reads, no line can do harm.

pub mod agent_lines; // lines of the agent and of our init
pub mod assemble; // files of one boot into one
pub mod choose; // choice of one boot
pub mod clocks; // all clocks on one base
pub mod console_lines; // format: guest console logs
pub mod derive; // items into records
pub mod detect; // the format of a file
pub mod draft_writer;
pub mod gpu_enablings; // steps that kernel lines show
pub mod import_report; // report of an import, for people and programs
pub mod item; // output of the formats
pub mod journal_lines; // format: containerd's journal or log
pub mod kernel_lines; // lines of the guest's kernel
pub mod log_files; // files into lines
pub mod pod; // format: kubectl get pod -o json
pub mod runtime_lines; // lines of containerd and of Kata's shims // records into the file of a boot
