//! Changes in the collector's directory: one inotify instance for all boots in it, and no file kept
//! open.

use crate::inotify::Inotify;
use anyhow::{Context, Result};
use kata_gpu_report::data::boot_dir;
use kata_gpu_report::data::boot_file::{EXTENSION, FileLine, decode};
use kata_gpu_report::data::compact_record::Names;
use kata_gpu_report::data::framing::{Lines, Piece};
use kata_gpu_wire::record;
use kata_gpu_wire::record::is_boot_id;
use nix::sys::inotify::AddWatchFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Limit of bytes taken from one file at a time.
const CHUNK: usize = 64 * 1024;
/// Files to follow.
#[derive(Clone, Debug)]
pub enum Which {
    /// All files named by a collector.
    Boots,
    /// The file with this name.
    One(OsString),
    /// Boots of this sandbox or pod.
    Sandbox(String),
}

impl Which {
    fn takes(&self, name: &OsStr) -> bool {
        match self {
            Which::One(one) => one == name,
            Which::Boots | Which::Sandbox(_) => {
                let path = Path::new(name);
                path.extension().is_some_and(|e| e == EXTENSION)
                    && path
                        .file_stem()
                        .and_then(OsStr::to_str)
                        .is_some_and(is_boot_id)
            }
        }
    }
}

/// Position of reading in a file.
struct Place {
    offset: u64,
    lines: Lines,
}

/// Followed files of a directory.
pub struct Files {
    dir: PathBuf,
    which: Which,
    inotify: Inotify,
    places: BTreeMap<OsString, Place>,
    /// Files already checked for the wanted sandbox, with the result.
    sandboxes: BTreeMap<OsString, bool>,
}

impl Files {
    /// Watches from now on; for existing files see [`Files::present`].
    pub fn watch(dir: &Path, which: Which) -> Result<Self> {
        let inotify = Inotify::new()?;
        let events = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_MODIFY
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_ONLYDIR;
        inotify.add(dir, events).with_context(|| {
            format!(
                "watch directory {}: give that of the collector with --dir",
                dir.display()
            )
        })?;
        Ok(Self {
            dir: dir.to_path_buf(),
            which,
            inotify,
            places: BTreeMap::new(),
            sandboxes: BTreeMap::new(),
        })
    }

    /// Existing files with the time since their last write; the newest first.
    pub fn present(&self) -> Result<Vec<(OsString, Duration)>> {
        let at = || format!("read directory {}", self.dir.display());
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.dir).with_context(at)? {
            let entry = entry.with_context(at)?;
            let name = entry.file_name();
            // The retention may have removed the file in between.
            if self.which.takes(&name)
                && let Ok(written) = entry.metadata().and_then(|meta| meta.modified())
            {
                found.push((name, written.elapsed().unwrap_or_default()));
            }
        }
        found.sort_by_key(|(_, age)| *age);
        Ok(found)
    }

    /// Waits until files have changed, and returns their names. Safe to cancel.
    pub async fn changed(&mut self) -> Result<BTreeSet<OsString>> {
        loop {
            let mut names = BTreeSet::new();
            for event in self.inotify.events().await? {
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    // Overrun of the queue: each file may have changed.
                    names.extend(self.present()?.into_iter().map(|(name, _)| name));
                }
                names.extend(event.name.filter(|name| self.which.takes(name)));
            }
            if !names.is_empty() {
                return Ok(names);
            }
        }
    }

    /// Passes on every complete line not read yet. A missing file has none, nor has a file of
    /// another sandbox than the wanted one.
    pub fn read(&mut self, name: &OsStr, mut each: impl FnMut(FileLine)) -> Result<()> {
        if !self.is_of_sandbox(name)? {
            return Ok(());
        }
        let path = self.dir.join(name);
        let at = || format!("read {}", path.display());
        let mut file = match File::open(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => {
                self.forget(name);
                return Ok(());
            }
            opened => opened.with_context(at)?,
        };
        let place = self
            .places
            .entry(name.to_os_string())
            .or_insert_with(|| Place {
                offset: 0,
                lines: Lines::new(record::MAX_LINE),
            });
        file.seek(SeekFrom::Start(place.offset)).with_context(at)?;
        let mut names = Names::default();
        let mut chunk = vec![0; CHUNK];
        loop {
            let n = match file.read(&mut chunk) {
                Ok(0) => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                read => read.with_context(at)?,
            };
            place.offset += n as u64;
            place
                .lines
                .push(chunk.get(..n).unwrap_or_default(), |piece| {
                    // Damage is reported by `show`.
                    if let Piece::Line(line) = piece
                        && let Ok(line) = decode(line, &mut names)
                    {
                        each(line);
                    }
                });
        }
    }

    fn is_of_sandbox(&mut self, name: &OsStr) -> Result<bool> {
        let Which::Sandbox(wanted) = &self.which else {
            return Ok(true);
        };
        if let Some(known) = self.sandboxes.get(name) {
            return Ok(*known);
        }
        let head = boot_dir::head(&self.dir.join(name))?.unwrap_or_default();
        let is_wanted = match boot_dir::sandbox_in(&head) {
            Some(sandbox) => sandbox.is(wanted),
            // Too late for the sandbox's line: do not read the file again with each new line.
            None if head.len() as u64 == boot_dir::HEAD => false,
            None => return Ok(false),
        };
        self.sandboxes.insert(name.to_os_string(), is_wanted);
        Ok(is_wanted)
    }

    /// Forgets a file: its whole content is read again when it changes.
    pub fn forget(&mut self, name: &OsStr) {
        self.places.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::{HANG, event_line, temp_dir};
    use std::io::Write;

    const BOOT: &str = "0f7a1f8e-0000-4000-8000-00000000beef.ndjson";

    #[tokio::test]
    async fn appended_lines_are_seen_once_and_only_when_whole() {
        let dir = temp_dir();
        let mut files = Files::watch(dir.path(), Which::Boots).unwrap();
        let mut writer = File::create(dir.path().join(BOOT)).unwrap();
        std::fs::write(dir.path().join("notes.txt"), "x").unwrap();
        let mut seen = Vec::new();
        let line = event_line(2);
        for (bytes, count) in [
            (event_line(1), 1),
            (line[..20].to_string(), 1),
            (line[20..].to_string(), 2),
            ("garbage\n".into(), 2),
        ] {
            writer.write_all(bytes.as_bytes()).unwrap();
            let names = tokio::time::timeout(HANG, files.changed())
                .await
                .expect("inotify does not wake")
                .unwrap();
            assert_eq!(
                names.into_iter().collect::<Vec<_>>(),
                [BOOT],
                "and no other file"
            );
            files
                .read(OsStr::new(BOOT), |line| seen.push(line))
                .unwrap();
            assert_eq!(seen.len(), count);
        }
        let silent = tokio::time::timeout(Duration::from_millis(20), files.changed()).await;
        assert!(silent.is_err(), "nothing was written");
        assert_eq!(files.present().unwrap().len(), 1);
        std::fs::remove_file(dir.path().join(BOOT)).unwrap();
        files
            .read(OsStr::new(BOOT), |_| panic!("it is gone"))
            .unwrap();
    }

    #[tokio::test]
    async fn a_directory_that_is_not_there_is_an_error_that_names_it() {
        let error = Files::watch(Path::new("/nonexistent/boots"), Which::Boots)
            .err()
            .unwrap();
        assert!(
            format!("{error:#}").contains("/nonexistent/boots")
                && format!("{error:#}").contains("--dir"),
            "{error:#}"
        );
    }

    /// Number of bytes that this thread has read.
    fn bytes_read() -> u64 {
        let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
        io.lines()
            .find_map(|line| line.strip_prefix("rchar: ")?.parse().ok())
            .unwrap()
    }

    #[tokio::test]
    async fn a_long_boot_of_no_sandbox_is_not_read_again_with_each_line() {
        let dir = temp_dir();
        let mut files = Files::watch(dir.path(), Which::Sandbox("a".into())).unwrap();
        let lines: String = (0..)
            .map(event_line)
            .take(2 * boot_dir::HEAD as usize / event_line(0).len())
            .collect();
        std::fs::write(dir.path().join(BOOT), lines).unwrap();
        let before = bytes_read();
        for _ in 0..100 {
            files
                .read(OsStr::new(BOOT), |_| panic!("it has no sandbox"))
                .unwrap();
        }
        assert!(
            (boot_dir::HEAD..2 * boot_dir::HEAD).contains(&(bytes_read() - before)),
            "{} bytes",
            bytes_read() - before
        );
    }
}
