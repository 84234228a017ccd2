//! A list of archive entries, one a line, for entries that a directory cannot hold, or not without
//! root.
//!
//! `pack --help` documents the words. Blanks separate words; a name with a blank must come from a
//! directory. All entries belong to root. Parent directories without a line or tree are made with
//! mode 0755.

use super::newc::Kind;
use crate::doing::Doing;
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};

/// Largest list, in bytes.
const MAX_LIST: u64 = 4 << 20;

/// A line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Path in the archive, without a leading slash; empty for the root.
    pub path: Vec<u8>,
    pub what: Wanted,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// A directory, link, device or pipe. Modes here have the bits of the type.
    Entry {
        mode: u32,
        /// Target of a link.
        target: Vec<u8>,
        /// Major and minor number of a device.
        rdev: (u32, u32),
    },
    File {
        mode: u32,
        source: PathBuf,
    },
    Tree {
        source: PathBuf,
    },
}

/// Reads a list.
pub fn read(path: &Path) -> Result<Vec<Line>> {
    let meta = std::fs::metadata(path).doing("read list", path)?;
    ensure!(
        meta.is_file(),
        "read list {}: neither a directory nor a file",
        path.display()
    );
    ensure!(
        meta.len() <= MAX_LIST,
        "read list {}: {} bytes: not a list (is it an archive?)",
        path.display(),
        meta.len()
    );
    let text = std::fs::read_to_string(path).doing("read list", path)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let line = |(number, line): (usize, &str)| {
        parse(line, folder)
            .with_context(|| format!("list {} line {}", path.display(), number + 1))
            .transpose()
    };
    text.lines().enumerate().filter_map(line).collect()
}

/// Parses one line; None for a line without words.
fn parse(line: &str, folder: &Path) -> Result<Option<Line>> {
    let line = line.split_once('#').map_or(line, |(before, _)| before);
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let Some((kind, rest)) = words.split_first() else {
        return Ok(None);
    };
    let (path, what) = match (*kind, rest) {
        ("dir", [path, mode]) => (path, entry(Kind::Directory, mode, b"", "0:0")?),
        ("file", [path, mode, source]) => (
            path,
            Wanted::File {
                mode: Kind::File.bits() | permissions(mode)?,
                source: folder.join(source),
            },
        ),
        ("link", [path, target]) => (path, entry(Kind::Link, "777", target.as_bytes(), "0:0")?),
        ("char", [path, mode, number]) => (path, entry(Kind::Char, mode, b"", number)?),
        ("block", [path, mode, number]) => (path, entry(Kind::Block, mode, b"", number)?),
        ("fifo", [path, mode]) => (path, entry(Kind::Fifo, mode, b"", "0:0")?),
        ("tree", [path, source]) => (
            path,
            Wanted::Tree {
                source: folder.join(source),
            },
        ),
        ("dir" | "file" | "link" | "char" | "block" | "fifo" | "tree", _) => {
            bail!(
                "{kind} with {} words after it: `kata-gpu-boot image pack --help` shows how many \
                 it takes",
                rest.len()
            )
        }
        _ => bail!("{kind:?} is none of dir, file, link, char, block, fifo, tree"),
    };
    let names: Vec<&str> = path
        .split('/')
        .filter(|name| !name.is_empty() && *name != ".")
        .collect();
    ensure!(
        path.starts_with('/'),
        "path {path:?} must begin with a slash: it is one in the guest"
    );
    ensure!(
        !names.contains(&".."),
        "path {path:?} has `..`: name the directory that is meant"
    );
    let path = names.join("/").into_bytes();
    ensure!(
        !path.is_empty() || matches!(*kind, "dir" | "tree"),
        "{kind} / : the root is a directory"
    );
    Ok(Some(Line { path, what }))
}

fn permissions(word: &str) -> Result<u32> {
    let mode = u32::from_str_radix(word, 8)
        .ok()
        .filter(|mode| *mode <= 0o7777 && !word.starts_with('+'));
    mode.with_context(|| format!("mode {word:?}: give permissions in octal, like 0755"))
}

fn entry(kind: Kind, mode: &str, target: &[u8], number: &str) -> Result<Wanted> {
    let parsed = number
        .split_once(':')
        .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    // Range of a dev_t (linux/kdev_t.h): 12 bits and 20.
    let fits = parsed.filter(|(major, minor)| *major < 1 << 12 && *minor < 1 << 20);
    let rdev =
        fits.with_context(|| format!("device {number:?}: give MAJOR:MINOR in decimal, like 1:3"))?;
    Ok(Wanted::Entry {
        mode: kind.bits() | permissions(mode)?,
        target: target.to_vec(),
        rdev,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(line: &str) -> Result<Option<Line>> {
        parse(line, Path::new("/lists"))
    }

    #[test]
    fn every_kind_of_line_is_read() {
        let what = |line: &str| one(line).unwrap().unwrap();
        let entry = |mode, target: &str, rdev| Wanted::Entry {
            mode,
            target: target.into(),
            rdev,
        };
        assert_eq!(what("dir /dev 0755").path, b"dev");
        assert_eq!(what("file //usr/./bin/a 4755 b").path, b"usr/bin/a");
        for (line, wanted) in [
            ("dir /dev 0755", entry(0o040_755, "", (0, 0))),
            (
                "link /var/run ../run # where the spec lies",
                entry(0o120_777, "../run", (0, 0)),
            ),
            ("char /dev/null 0666 1:3", entry(0o020_666, "", (1, 3))),
            ("fifo /p 0600", entry(0o010_600, "", (0, 0))),
        ] {
            assert_eq!(what(line).what, wanted, "{line}");
        }
        assert_eq!(
            what("file /a 644 b").what,
            Wanted::File {
                mode: 0o100_644,
                source: "/lists/b".into()
            }
        );
        assert_eq!(
            what("tree / root").what,
            Wanted::Tree {
                source: "/lists/root".into()
            }
        );
        assert_eq!(
            (one("").unwrap(), one("  # nothing").unwrap()),
            (None, None)
        );
    }

    #[test]
    fn the_fault_of_a_line_is_named() {
        for (line, part) in [
            ("node /a 0644", "\"node\" is none of dir, file"),
            ("dir /a", "dir with 1 words"),
            ("dir /a 0999", "give permissions in octal"),
            ("dir /a 10000", "give permissions in octal"),
            ("dir a 0755", "must begin with a slash"),
            ("dir /a/../b 0755", "has `..`"),
            ("char /a 0600 1", "give MAJOR:MINOR"),
            ("char /a 0600 4096:1", "give MAJOR:MINOR"),
            ("file / 0600 x", "the root is a directory"),
        ] {
            let error = one(line).unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
