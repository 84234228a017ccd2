//! The host's own record of a boot, `<boot id>.trace` next to the boot's file: what
//! `kata-gpu-boot doctor --record` saw of the VM's processes.
//!
//! A file of its own, because the boot's file belongs to the collector: the collector counts the
//! bytes of that file, limits them, and takes its owner for the guest's. The recorder writes this
//! file whole and renames it, so that a reader sees all of it or nothing.
//! [`super::boot_dir::read_boot`] joins both; the collector removes both.
//!
//! Each line is a [`super::boot_file::HostLine`] with one of the two events below. No byte of it
//! comes from a guest.

use kata_gpu_wire::pci_address::PciAddress;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Extension of the file, after the boot's id.
pub const EXTENSION: &str = "trace";
/// Limit of steps and counts in one file; a boot with 16 GPUs has some hundred.
pub const MAX_TRACED: usize = 4096;
/// Limit of the file, in bytes.
pub const MAX_BYTES: u64 = 2 << 20;

/// File of the trace of the boot with this file.
pub fn beside(boot: &Path) -> PathBuf {
    boot.with_extension(EXTENSION)
}

/// A step of the host, or a count over the whole recording; the form of its row in
/// [`kata_gpu_wire::catalogue`] distinguishes them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traced {
    /// Name of a row of the catalogue.
    pub name: String,
    /// CLOCK_REALTIME of the host at the beginning.
    pub began_realtime_ns: i64,
    /// Bound of the error of that time.
    pub clock_error_ns: u64,
    pub took_ns: u64,
    /// Object of the step where the name is ambiguous: `BAR 2`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// The host's address of the passed-through function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function: Option<PciAddress>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bar: Option<u8>,
    /// Address in the guest, where memory of it was mapped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_address: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Pages a call by powers of ten: the first number of each class, and how many calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pages_a_call: Vec<(u64, u64)>,
    /// Counts by kind: exits by reason, memory by page size in bytes.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub kinds: BTreeMap<String, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Thread that did it, by its name and number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tid: Option<u32>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub thread: String,
}

/// Facts about the recording itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Recording {
    /// `uname -r` of the host.
    pub kernel: String,
    pub began_realtime_ns: i64,
    pub took_ns: u64,
    /// Reason for the end.
    pub ended: String,
    /// Probes that this kernel does not have, with what is not known for that.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
    /// Events read, and events that the kernel dropped because its buffer was full.
    pub events: u64,
    pub lost: u64,
    /// Lines of the kernel's trace that were not understood.
    pub unreadable: u64,
}
