//! Whether the host's clock is trusted for the age of a file.
//!
//! A clock that was set makes old what is not. A running collector sees that: the wall clock moves
//! against the machine's own one. A file beside the boots has what the next collector needs to see
//! it, too. Where neither helps, because the machine was started again or the file is gone, a clock
//! much later than everything known here is distrusted. Distrust costs disk, and nothing else.

use super::boot_log::open;
use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// A clock that moved further than this was set.
const MAX_DRIFT: Duration = Duration::from_secs(60);
/// Time after a set clock, and after the machine's start, in which no boot counts as old: until
/// somebody, or NTP, has set the clock right. Where the machine was started again, a clock that is
/// this much later than the last known time is distrusted, too.
const DISTRUST: Duration = Duration::from_secs(24 * 3600);
pub const AFTER_START: Duration = Duration::from_secs(3600);
/// Longest time that the file lags behind.
const STORED_EVERY: Duration = Duration::from_secs(3600);
/// File in the directory of the boots, and its name while it is written.
pub const FILE: &str = ".clock";
const NEW_FILE: &str = ".clock.new";
const FILE_MODE: u32 = 0o640;
const MAX_FILE: u64 = 4096;
/// Drawn by the kernel at the machine's start.
const MACHINE: &str = "/proc/sys/kernel/random/boot_id";

/// Both clocks of this machine.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    pub real: SystemTime,
    /// Time since the machine's start; nobody can set it.
    pub boot: Duration,
    /// Number of the machine's start; 0 is unknown.
    pub machine: u128,
}

impl Now {
    pub fn read() -> Result<Self> {
        let boot = clock_gettime(ClockId::CLOCK_BOOTTIME).context("read CLOCK_BOOTTIME")?;
        let machine = std::fs::read_to_string(MACHINE).unwrap_or_default();
        let digits = machine.trim().replace('-', "");
        Ok(Self {
            real: SystemTime::now(),
            boot: boot.into(),
            machine: u128::from_str_radix(&digits, 16).unwrap_or_default(),
        })
    }
}

/// Knowledge that outlives the collector; times in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    machine: u128,
    /// Wall-clock time of the machine's start, and of the last look.
    start: SystemTime,
    seen: SystemTime,
    /// End of the distrust, on the machine's own clock.
    distrusted_until: Duration,
}

impl Known {
    /// Knowledge of the last collector here; None where there is none that can be read.
    fn read(dir: &Path) -> Option<Self> {
        let file = open(&dir.join(FILE), OpenOptions::new().read(true)).ok()?;
        let mut text = Vec::new();
        file.take(MAX_FILE).read_to_end(&mut text).ok()?;
        let stored: Value = serde_json::from_slice(&text).ok()?;
        let seconds = |name: &str| stored[name].as_u64().map(Duration::from_secs);
        let time = |name: &str| SystemTime::UNIX_EPOCH.checked_add(seconds(name)?);
        Some(Self {
            machine: u128::from_str_radix(stored["machine"].as_str()?, 16).ok()?,
            start: time("start_s")?,
            seen: time("seen_s")?,
            distrusted_until: seconds("distrusted_until_s")?,
        })
    }

    fn write(&self, dir: &Path) -> Result<()> {
        let seconds = |time: SystemTime| {
            let since = time.duration_since(SystemTime::UNIX_EPOCH);
            since.unwrap_or_default().as_secs()
        };
        let stored = json!({
            "machine": format!("{:032x}", self.machine),
            "start_s": seconds(self.start),
            "seen_s": seconds(self.seen),
            "distrusted_until_s": self.distrusted_until.as_secs(),
        });
        let path = dir.join(NEW_FILE);
        let at = || format!("write {}", path.display());
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        let mut file = open(&path, options.mode(FILE_MODE)).with_context(at)?;
        file.write_all(format!("{stored}\n").as_bytes())
            .with_context(at)?;
        std::fs::rename(&path, dir.join(FILE)).with_context(at)
    }
}

/// The host's clock as this collector knows it.
#[derive(Debug, Default)]
pub struct HostClock {
    known: Option<Known>,
    /// Time of the last look that was written down.
    stored: Option<SystemTime>,
}

impl HostClock {
    /// Returns lines for people: the clock was set since the last look, or nothing could be written
    /// to `dir`. `newest` is the time of the newest record of any boot.
    pub fn look(&mut self, now: Now, dir: &Path, newest: Option<SystemTime>) -> Vec<String> {
        let Some(start) = now.real.checked_sub(now.boot) else {
            return Vec::new();
        };
        let before = self.known.or_else(|| Known::read(dir));
        let same = before.filter(|known| known.machine == now.machine && now.machine != 0);
        let same = same.or(self.known);
        // A start of the machine sets no clock right: what was distrusted then still is.
        let was_distrusted = before.is_some_and(|before| {
            let boot = before.seen.duration_since(before.start);
            before.distrusted_until > boot.unwrap_or_default()
        });
        let distrusted_until = match same {
            Some(same) => same.distrusted_until,
            None if was_distrusted => now.boot + DISTRUST,
            None => Duration::ZERO,
        };
        let mut known = Known {
            machine: now.machine,
            start,
            seen: now.real,
            distrusted_until,
        };
        let why = if let Some(same) = same {
            let moved = start.duration_since(same.start);
            let moved = moved.unwrap_or_else(|back| back.duration());
            (moved > MAX_DRIFT)
                .then(|| format!("this machine's clock was set by {} s", moved.as_secs()))
        } else {
            let last = newest.max(before.map(|known| known.seen));
            let since = last.and_then(|last| now.real.duration_since(last).ok());
            since.filter(|since| *since > DISTRUST).map(|since| {
                let hours = since.as_secs() / 3600;
                format!("this machine's clock is {hours} h later than all that is known here")
            })
        };
        if why.is_some() {
            known.distrusted_until = now.boot + DISTRUST;
        }
        self.known = Some(known);
        let is_stored = |stored: SystemTime| {
            let since = now.real.duration_since(stored);
            since.is_ok_and(|since| since < STORED_EVERY)
        };
        let mut lines: Vec<String> = Vec::new();
        if why.is_some() || !self.stored.is_some_and(is_stored) {
            self.stored = Some(now.real);
            let written = known.write(dir);
            lines.extend(written.err().map(|e| {
                format!("{e:#}: the next collector will not know whether the clock was set")
            }));
        }
        lines.extend(why.map(|why| format!("{why}: for a day no boot is removed for its age")));
        lines
    }

    pub fn is_trusted(&self, now: Now) -> bool {
        let distrusted_until = self.known.map_or(Duration::ZERO, |k| k.distrusted_until);
        now.boot >= distrusted_until.max(AFTER_START)
    }
}
