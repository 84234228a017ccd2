//! The host's half: collects the streams of guests and shows their boots. Behind the feature `host`; the guest links none of it.

pub mod account; // whose time a boot was: blame, critical path, coverage, comparisons
pub mod agent_log; // the agent's lines in the console
pub mod boot_file; // the file of one boot: its lines, reading it
pub mod budget; // how much of a boot a reader keeps
#[cfg(feature = "host")]
pub mod cdi_check; // the subcommand cdi check: specs before the agents' own parsers
pub mod clock; // the guest's clock beside the host's
pub mod collect; // the subcommand collect
pub mod collector; // accepts guests, one connection each, and keeps what they send
pub mod containerd_log; // lines of containerd's log, and the guest's console in them
pub mod demo; // the subcommand demo
pub mod disk; // a guest's image as a disk: where its root is
pub mod export; // the subcommand export: traces, tables, a page, a picture
pub mod follow; // the subcommand follow: a boot while it happens
pub mod framing; // bytes into lines
pub mod guest_clocks; // what a guest measured of its own clocks
pub mod health; // what NVML says of the GPUs: model and columns
pub mod import; // the subcommand import: boots from other programs' logs
pub mod initrd; // the subcommand initrd: guest images
pub mod install; // the subcommands install and uninstall
pub mod live; // rows as they happen
pub mod logfmt; // key=value lines
pub mod model; // what is known of a boot: records in, Boot out
pub mod processes; // by their command lines
pub mod push; // OTLP to a receiver
pub mod record; // a record as readers keep it: bounded, compact
pub mod rows; // records into rows: side, what, how long
pub mod severity; // how bad a finding is
pub mod show; // the subcommand show
pub mod summary; // what a boot came to
pub mod table; // rows into lines
pub mod tail; // following the console log
pub mod text; // what a guest wrote, made harmless; times; colour
pub mod vm; // QEMU and vhost-device-vsock, for the demo and the tests
pub mod watch; // waiting for a descriptor

#[cfg(test)]
pub(crate) mod testing;
