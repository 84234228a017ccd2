//! The subcommands of kata-gpu-boot, a file each: its arguments, and running it. Only the
//! program imports these.

pub mod blame;
pub mod boot_args; // a boot and a part of it: arguments that subcommands share
pub mod collect;
pub mod compare;
pub mod coverage;
pub mod critical_path;
pub mod demo;
pub mod doctor;
pub mod explain;
pub mod export;
pub mod follow;
pub mod import;
pub mod initrd;
pub mod install;
pub mod list;
pub mod show;
pub mod stats;
#[cfg(test)]
mod tests;
pub mod trace;
pub mod uninstall; // golden pages of recorded, hand-made and hostile boots
