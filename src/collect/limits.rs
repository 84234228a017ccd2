//! Limits on the work that a guest causes: every limit by name, in one table that `--help` prints
//! and `--limit NAME=N` changes.
//!
//! Reaching a limit costs a counted loss or slower reading of that guest, never another guest's
//! stream. One more limit is the format's: a line has at most [`MAX_LINE`] bytes.

use anyhow::{Result, bail};
use kata_gpu_wire::record::MAX_LINE;
use std::time::Duration;

struct Row {
    /// The field's name; people write it with hyphens.
    name: &'static str,
    default: u64,
    what: &'static str,
    field: fn(&mut Limits) -> &mut u64,
}

macro_rules! limits {
    ($($field:ident $default:expr, $what:literal;)*) => {
        /// The limits in force.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Limits { $(pub $field: u64),* }

        const TABLE: &[Row] = &[$(Row {
            name: stringify!($field),
            default: $default,
            what: $what,
            field: |limits| &mut limits.$field,
        }),*];

        impl Default for Limits {
            fn default() -> Self {
                Self { $($field: $default),* }
            }
        }
    };
}

// A boot with 8 GPUs has some hundred records of about 300 bytes, with a chatty kernel some
// thousand.
limits! {
    records 200_000, "of a boot that are kept; more are dropped, and counted in its file";
    bytes 64 << 20, "of a boot's file; as above";
    gaps 1024, "in a boot's numbering; what would make one more is garbage";
    boots 64, "new ones of a VM in an hour; more are refused";
    connections_per_vm 4, "of a VM at once; more are refused";
    connects 60, "connections of a VM in a minute; more are refused";
    connections 4096, "at once; more are refused (a third of RLIMIT_NOFILE, if less)";
    burst 16 << 20, "bytes of a VM that are read as fast as they come";
    rate 64 << 10, "bytes/s of a VM after that; it waits, nothing is dropped";
    header 30, "seconds until a connection has sent its header";
    waiting_per_boot 64 << 10, "bytes of it for the disk; then it is read later, or counted";
    waiting 16 << 20, "bytes of all boots for the disk; as above";
    vms 4096, "sockets below --vm at once; further VMs are ignored";
    goodbye 60, "seconds without a connection after which an unsettled boot is over";
    push_queue 1024, "boots that wait for each receiver; of more the oldest are counted, not pushed";
}

impl Limits {
    /// Sets one limit from `NAME=N`.
    pub fn set(&mut self, text: &str) -> Result<()> {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        let field = name.replace('-', "_");
        let Some(row) = TABLE.iter().find(|row| row.name == field) else {
            bail!("--limit {text}: no such limit\n{}", Self::help());
        };
        match value.parse() {
            Ok(value) if value > 0 => *(row.field)(self) = value,
            _ => bail!(
                "--limit {text}: want {name}=N with N from 1 on, for example {name}={}",
                row.default
            ),
        }
        Ok(())
    }

    pub fn header_deadline(&self) -> Duration {
        Duration::from_secs(self.header)
    }

    /// The table for people.
    pub fn help() -> String {
        let line = "fixed by the format; a longer one is garbage";
        let head = "Reaching one costs a guest records, which are counted, or time.";
        let mut text = format!("Limits (--limit NAME=N). {head}\n");
        for row in TABLE {
            let name = row.name.replace('_', "-");
            text += &format!("  {name:18} {:>9}  {}\n", row.default, row.what);
        }
        text + &format!("  (line)             {MAX_LINE:>9}  bytes of a line, {line}\n")
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
            assert!(Limits::help().contains(&row.name.replace('_', "-")) && row.default > 0);
        }
    }

    #[test]
    fn a_wrong_limit_is_refused_with_the_cure() {
        for (text, cure) in [
            ("speed=3", "push-queue "),
            ("records=0", "from 1 on"),
            ("records=-1", "from 1 on"),
            ("records", "from 1 on"),
        ] {
            let error = Limits::default().set(text).unwrap_err().to_string();
            assert!(error.contains(cure), "{text}: {error}");
        }
    }
}
