//! Console level of the kernel, lowered during an enabling.
//!
//! On a real host an enabling vCPU holds QEMU's global lock for seconds, and a character that the
//! kernel prints spins another vCPU until that lock is free. So the kernel's console level is
//! lowered to [`LEVEL`] during an enabling. Emergencies and alerts (0, 1) still pass, and a panic
//! or an oops raises the level by itself (`console_verbose`).
//!
//! Invariants:
//! - Every line stays in the kernel's log, from which /dev/kmsg and the init's stream read it.
//!   Lines of this time do not appear on the console afterwards.
//! - The former level is restored only where the level is still the one written here.
//!
//! Not here: the init's own lines on the console (the console sink's gate). A worker that dies in
//! between leaves the level low; its successor takes [`LEVEL`] for the guest's own.

use crate::machine::files::failed;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Console level during an enabling. The kernel prints messages *below* this level: emergencies (0)
/// and alerts (1).
pub const LEVEL: u32 = 2;

/// Lowered console level, restored on drop.
#[derive(Debug)]
pub struct Quiet {
    file: PathBuf,
    former: u32,
}

/// Lowers the level; None where it is not above [`LEVEL`]. `proc`: mount point of procfs.
pub fn quiet(proc: &Path) -> io::Result<Option<Quiet>> {
    let file = proc.join("sys/kernel/printk");
    let former = level(&file)?;
    if former <= LEVEL {
        return Ok(None);
    }
    set(&file, LEVEL)?;
    Ok(Some(Quiet { file, former }))
}

impl Drop for Quiet {
    fn drop(&mut self) {
        if level(&self.file).is_ok_and(|now| now == LEVEL) {
            // If the level cannot be written again, the console stays quiet and no line is lost.
            let _unused = set(&self.file, self.former);
        }
    }
}

/// Reads console_loglevel, the first of four numbers.
fn level(file: &Path) -> io::Result<u32> {
    let text = std::fs::read_to_string(file).map_err(failed("read", file))?;
    let first = text
        .split_ascii_whitespace()
        .next()
        .and_then(|word| word.parse().ok());
    first.ok_or_else(|| {
        io::Error::other(format!(
            "read {}: {text:?} does not begin with a level",
            file.display()
        ))
    })
}

/// Writes console_loglevel; the kernel accepts fewer than four numbers and keeps the others.
fn set(file: &Path, level: u32) -> io::Result<()> {
    let written = OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(file)
        .and_then(|mut f| f.write_all(format!("{level}\n").as_bytes()));
    written.map_err(failed(&format!("write {level} to"), file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::{TempDir, temp_dir};
    use std::fs;

    fn proc(text: &str) -> TempDir {
        let root = temp_dir();
        fs::create_dir_all(root.path().join("sys/kernel")).unwrap();
        fs::write(root.path().join("sys/kernel/printk"), text).unwrap();
        root
    }

    fn now(root: &TempDir) -> u32 {
        level(&root.path().join("sys/kernel/printk")).unwrap()
    }

    #[test]
    fn the_console_is_quiet_for_the_time_and_as_before_afterwards() {
        let root = proc("7\t4\t1\t7\n");
        let quiet = quiet(root.path()).unwrap().unwrap();
        assert_eq!((now(&root), quiet.former), (LEVEL, 7));
        drop(quiet);
        assert_eq!(now(&root), 7);
    }

    #[test]
    fn a_level_that_another_program_set_meanwhile_stays() {
        let root = proc("4\t4\t1\t7\n");
        let quiet = quiet(root.path()).unwrap().unwrap();
        fs::write(root.path().join("sys/kernel/printk"), "8\t4\t1\t7\n").unwrap();
        drop(quiet);
        assert_eq!(now(&root), 8);
    }

    #[test]
    fn a_console_that_is_quiet_already_is_not_touched() {
        let root = proc("1\t4\t1\t7\n");
        assert!(quiet(root.path()).unwrap().is_none());
        assert_eq!(
            fs::read_to_string(root.path().join("sys/kernel/printk")).unwrap(),
            "1\t4\t1\t7\n"
        );
        fs::write(root.path().join("sys/kernel/printk"), "loud\n").unwrap();
        assert!(
            quiet(root.path())
                .unwrap_err()
                .to_string()
                .contains("does not begin with a level")
        );
        assert!(
            quiet(&root.path().join("missing"))
                .unwrap_err()
                .to_string()
                .starts_with("read ")
        );
    }
}
