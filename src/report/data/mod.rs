//! Sources of a boot: the boot's file, the agent's lines, and the clocks that place both. Nothing
//! here knows what a GPU or a step is.

pub mod agent_log; // the agent's lines in the console
pub mod boot_dir; // choosing and reading a boot of a directory
pub mod boot_file; // the file of one boot: its lines, reading it
pub mod budget; // limits on how much of a boot a reader keeps
pub mod clock_offset; // the guest's clock against the host's
pub mod clock_points; // the guest's wall clock
pub mod compact_record; // a record as readers keep it: bounded, compact
pub mod containerd_log; // lines of containerd's log, and the guest's console in them
pub mod framing; // bytes into lines
pub mod guest_clocks; // a guest's measurements of its own clocks
pub mod host_check; // the result of `doctor` for the collector's metrics
pub mod imported_record; // records made from log lines
pub mod journal_blocks; // entries of a journal that are blocks of lines
pub mod line_prefix; // stamps and names before a line
pub mod logfmt; // key=value lines
pub mod pod_errors; // errors of pods, by the kubelet and in events
pub mod text;
pub mod trace_file; // the file of the host's own trace of a boot
pub mod units; // sizes, powers of ten and zeros in reports // sanitised guest text; times; colour
