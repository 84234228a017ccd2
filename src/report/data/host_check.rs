//! Result of `doctor --daemonset-check` in the collector's directory, which the collector gives as
//! a metric: seconds by rule.
//!
//! The directory is the collector's user's, the writer is root: a new file takes the place of the
//! old one by its name, so that no link is followed. The reader trusts nothing of the content.

use super::text::realtime_ns;
use anyhow::{Context, Result};
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

const NAME: &str = "doctor.json";
/// Limit of the file: 100 rules have 4 kB.
const MAX_FILE: u64 = 64 << 10;
/// Pause between two checks.
pub const EVERY: Duration = Duration::from_secs(600);
/// Age from which a result counts as none: several checks are missing.
const MAX_AGE_S: i64 = 3600;

/// Longest time that a boot is believed to take.
const MAX_BOOT: Duration = Duration::from_secs(24 * 3600);

/// Whether a finding may cost so many seconds of a boot: more, or no number, is no figure.
pub fn is_time_of_a_boot(seconds: f64) -> bool {
    (0.0..=MAX_BOOT.as_secs_f64()).contains(&seconds)
}

/// Seconds of each rule that found something, 0 where no figure is known.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostCheck {
    /// Seconds since 1970.
    pub at: i64,
    pub findings: BTreeMap<String, f64>,
}

impl HostCheck {
    pub fn now(findings: BTreeMap<String, f64>) -> Self {
        Self {
            at: realtime_ns() / 1_000_000_000,
            findings,
        }
    }

    pub fn write(&self, dir: &Path) -> Result<()> {
        let (path, temporary) = (dir.join(NAME), dir.join(format!(".{NAME}")));
        // Left by a check that was killed. The creation below refuses anything that is there.
        let _absent = fs::remove_file(&temporary);
        let write = || -> io::Result<()> {
            let mut file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o644)
                .open(&temporary)?;
            file.write_all(&serde_json::to_vec(self)?)
        };
        write().with_context(|| format!("write {}", temporary.display()))?;
        fs::rename(&temporary, &path).with_context(|| format!("rename to {}", path.display()))
    }

    /// The result in a directory, if it is not too old.
    pub fn read(dir: &Path) -> Option<Self> {
        let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(dir.join(NAME))
            .ok()?;
        let is_file = file.metadata().ok()?.is_file();
        let mut text = Vec::new();
        is_file
            .then_some(file)?
            .take(MAX_FILE)
            .read_to_end(&mut text)
            .ok()?;
        let mut check: Self = serde_json::from_slice(&text).ok()?;
        for seconds in check.findings.values_mut() {
            if !is_time_of_a_boot(*seconds) {
                *seconds = 0.0;
            }
        }
        let age = (realtime_ns() / 1_000_000_000).checked_sub(check.at)?;
        (-MAX_AGE_S..=MAX_AGE_S).contains(&age).then_some(check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn a_result_is_read_back_unless_it_is_old_or_no_file() {
        let dir = temp_dir();
        assert_eq!(HostCheck::read(dir.path()), None);
        let mut check = HostCheck::now(BTreeMap::from([("thp".to_string(), 3.25)]));
        // A link in its place is replaced, never followed.
        let target = dir.path().join("target");
        fs::write(&target, "as it was").unwrap();
        for name in [NAME, ".doctor.json"] {
            std::os::unix::fs::symlink(&target, dir.path().join(name)).unwrap();
        }
        assert_eq!(HostCheck::read(dir.path()), None);
        check.write(dir.path()).unwrap();
        assert_eq!(HostCheck::read(dir.path()), Some(check.clone()));
        assert_eq!(fs::read_to_string(&target).unwrap(), "as it was");
        for impossible in [1e300, -1.0, 86_401.0] {
            check.findings.insert("thp".into(), impossible);
            check.write(dir.path()).unwrap();
            let read = HostCheck::read(dir.path()).unwrap();
            assert_eq!(
                read.findings["thp"], 0.0,
                "no figure is known: {impossible}"
            );
        }
        check.at -= 2 * MAX_AGE_S;
        check.write(dir.path()).unwrap();
        assert_eq!(HostCheck::read(dir.path()), None);
        for text in [
            "",
            "{",
            "[1e999]",
            r#"{"at":9223372036854775807,"findings":{}}"#,
            r#"{"at":-9223372036854775808,"findings":{}}"#,
        ] {
            fs::write(dir.path().join(NAME), text).unwrap();
            assert_eq!(HostCheck::read(dir.path()), None, "{text}");
        }
    }
}
