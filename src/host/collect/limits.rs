//! Limits on the work that a guest causes: every limit by name, in one table that `--help` prints
//! and `--limit NAME=N` changes.
//!
//! Reaching a limit costs a counted loss or slower reading of that guest, never another guest's
//! stream. One more limit is the format's: a line has at most [`MAX_LINE`] bytes.

use crate::events::record::MAX_LINE;
use anyhow::{Result, bail};
use std::time::Duration;

/// The limits in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub records: u64,
    pub bytes: u64,
    pub gaps: u64,
    pub boots: u64,
    pub connections_per_vm: u64,
    pub connects: u64,
    pub connections: u64,
    pub burst: u64,
    pub rate: u64,
    pub header: u64,
    pub waiting_per_boot: u64,
    pub waiting: u64,
    pub vms: u64,
    pub goodbye: u64,
    pub push_queue: u64,
}

struct Row {
    name: &'static str,
    default: u64,
    what: &'static str,
    field: fn(&mut Limits) -> &mut u64,
}

/// A boot with 8 GPUs has some hundred records of about 300 bytes, with a chatty kernel some
/// thousand.
const TABLE: &[Row] = &[
    Row {
        name: "records",
        default: 200_000,
        what: "of a boot that are kept; more are dropped, and counted in its file",
        field: |l| &mut l.records,
    },
    Row { name: "bytes", default: 64 << 20, what: "of a boot's file; as above", field: |l| &mut l.bytes },
    Row { name: "gaps", default: 1024, what: "in a boot's numbering; what would make one more is garbage", field: |l| &mut l.gaps },
    Row { name: "boots", default: 64, what: "new ones of a VM in an hour; more are refused", field: |l| &mut l.boots },
    Row { name: "connections-per-vm", default: 4, what: "of a VM at once; more are refused", field: |l| &mut l.connections_per_vm },
    Row { name: "connects", default: 60, what: "connections of a VM in a minute; more are refused", field: |l| &mut l.connects },
    Row {
        name: "connections",
        default: 4096,
        what: "at once; more are refused (a third of RLIMIT_NOFILE, if less)",
        field: |l| &mut l.connections,
    },
    Row { name: "burst", default: 16 << 20, what: "bytes of a VM that are read as fast as they come", field: |l| &mut l.burst },
    Row { name: "rate", default: 64 << 10, what: "bytes/s of a VM after that; it waits, nothing is dropped", field: |l| &mut l.rate },
    Row { name: "header", default: 30, what: "seconds until a connection has sent its header", field: |l| &mut l.header },
    Row {
        name: "waiting-per-boot",
        default: 64 << 10,
        what: "bytes of it for the disk; then it is read later, or counted",
        field: |l| &mut l.waiting_per_boot,
    },
    Row { name: "waiting", default: 16 << 20, what: "bytes of all boots for the disk; as above", field: |l| &mut l.waiting },
    Row { name: "vms", default: 4096, what: "sockets below --vm at once; further VMs are ignored", field: |l| &mut l.vms },
    Row {
        name: "goodbye",
        default: 60,
        what: "seconds after which a boot that lost its connection before it was settled counts as over (--otlp, --metrics)",
        field: |l| &mut l.goodbye,
    },
    Row {
        name: "push-queue",
        default: 1024,
        what: "boots that wait for the receiver of --otlp; of more the oldest are not pushed, but counted and logged",
        field: |l| &mut l.push_queue,
    },
];

impl Default for Limits {
    fn default() -> Self {
        let mut limits = Self {
            records: 0,
            bytes: 0,
            gaps: 0,
            boots: 0,
            connections_per_vm: 0,
            connects: 0,
            connections: 0,
            burst: 0,
            rate: 0,
            header: 0,
            waiting_per_boot: 0,
            waiting: 0,
            vms: 0,
            goodbye: 0,
            push_queue: 0,
        };
        for row in TABLE {
            *(row.field)(&mut limits) = row.default;
        }
        limits
    }
}

impl Limits {
    /// Sets one limit from `NAME=N`.
    pub fn set(&mut self, text: &str) -> Result<()> {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        let Some(row) = TABLE.iter().find(|row| row.name == name) else {
            let names: Vec<&str> = TABLE.iter().map(|row| row.name).collect();
            bail!("--limit {text}: no such limit: there are {}", names.join(", "));
        };
        match value.parse() {
            Ok(value) if value > 0 => *(row.field)(self) = value,
            _ => bail!("--limit {text}: want {name}=N with N from 1 on, for example {name}={}", row.default),
        }
        Ok(())
    }

    pub fn header_deadline(&self) -> Duration {
        Duration::from_secs(self.header)
    }

    /// The table for people.
    pub fn help() -> String {
        let mut text =
            String::from("Limits (--limit NAME=N). Behind each: a loss that is counted or a guest that waits, no other's loss.\n");
        for row in TABLE {
            text.push_str(&format!("  {:18} {:>9}  {}\n", row.name, row.default, row.what));
        }
        text.push_str(&format!("  {:18} {MAX_LINE:>9}  bytes of a line, fixed by the format; a longer one is garbage\n", "(line)"));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_has_its_own_field_and_is_in_the_help() {
        let mut limits = Limits::default();
        for (n, row) in TABLE.iter().enumerate() {
            limits.set(&format!("{}={}", row.name, n + 1)).unwrap();
        }
        for (n, row) in TABLE.iter().enumerate() {
            assert_eq!(*(row.field)(&mut limits), n as u64 + 1, "{}", row.name);
            assert!(Limits::help().contains(row.name) && row.default > 0);
        }
    }

    #[test]
    fn a_wrong_limit_is_refused_with_the_cure() {
        for (text, cure) in
            [("speed=3", "there are records, "), ("records=0", "from 1 on"), ("records=-1", "from 1 on"), ("records", "from 1 on")]
        {
            let error = Limits::default().set(text).unwrap_err().to_string();
            assert!(error.contains(cure), "{text}: {error}");
        }
    }
}
