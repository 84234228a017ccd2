//! `image ls` and `image cat`: entries of an image, and files as the guest finds them.
//!
//! `ls` lists entries as stored, in their order, including entries that a later one replaces; `cat`
//! follows the tree that the kernel makes of the entries.

use super::entry_text::{escaped, permissions, table};
use super::image::{Entry, Image, copy};
use super::newc::Kind;
use super::unpacked_root::Tree;
use anyhow::{Context, Result, bail};
use kata_gpu_report::data::text::{Screen, printable_start};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, IsTerminal, Read, Write};
use std::time::{Duration, UNIX_EPOCH};

/// Longest line written to a terminal.
const MAX_LINE: u64 = 4096;

/// Whether an entry was requested: `paths` has its path or that of a directory above.
fn is_wanted(entry: &Entry, paths: &[String]) -> bool {
    let path = trimmed(&entry.name);
    let within = |wanted: &[u8]| {
        wanted.is_empty()
            || path == wanted
            || path
                .strip_prefix(wanted)
                .is_some_and(|rest| rest.starts_with(b"/"))
    };
    paths.is_empty()
        || paths
            .iter()
            .any(|wanted| within(trimmed(wanted.as_bytes())))
}

/// Requested paths without an entry.
pub fn missing<'a>(image: &Image, paths: &'a [String]) -> Vec<&'a String> {
    paths
        .iter()
        .filter(|path| {
            !image
                .entries
                .iter()
                .any(|entry| is_wanted(entry, std::slice::from_ref(*path)))
        })
        .collect()
}

/// A path without slashes at its ends and without `./` in front: `.` is empty.
fn trimmed(path: &[u8]) -> &[u8] {
    let start = path.iter().position(|b| *b != b'/').unwrap_or(path.len());
    let path = path.get(start..).unwrap_or_default();
    let end = path.iter().rposition(|b| *b != b'/').map_or(0, |at| at + 1);
    let path = path.get(..end).unwrap_or_default();
    if path == b"." {
        b""
    } else {
        path.strip_prefix(b"./").unwrap_or(path)
    }
}

fn size(entry: &Entry) -> String {
    let (major, minor) = entry.header.rdev;
    if entry.header.kind().is_device() {
        format!("{major},{minor}")
    } else {
        entry.header.size.to_string()
    }
}

fn time(mtime: u32) -> String {
    let text = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(mtime.into()))
        .to_string();
    // 2026-01-02T03:04:05Z
    text.get(..16).unwrap_or_default().replace('T', " ")
}

/// The listed entries in the form of `tar tv`, and their number.
pub fn text(image: &Image, paths: &[String], screen: &Screen) -> (String, usize) {
    let mut rows = vec![
        ["MODE", "OWNER", "SIZE", "TIME", "PATH"]
            .map(str::to_string)
            .to_vec(),
    ];
    for entry in image.entries.iter().filter(|e| is_wanted(e, paths)) {
        let header = &entry.header;
        let target = if header.kind() == Kind::Link {
            format!(" -> {}", escaped(&entry.target))
        } else {
            String::new()
        };
        rows.push(vec![
            format!("{}{}", header.kind().letter(), permissions(header.mode)),
            format!("{}/{}", header.uid, header.gid),
            size(entry),
            time(header.mtime),
            escaped(&entry.name) + &target,
        ]);
    }
    (table(&rows, &[2], screen), rows.len() - 1)
}

/// The entries as JSON, with more fields.
pub fn json(image: &Image, paths: &[String]) -> Value {
    let entry = |e: &Entry| {
        let h = &e.header;
        let device = h.kind().is_device().then_some([h.rdev.0, h.rdev.1]);
        let target = (h.kind() == Kind::Link).then(|| escaped(&e.target));
        json!({
            "path": escaped(&e.name), "kind": h.kind().name(), "mode": format!("{:04o}", h.mode & 0o7777), "uid": h.uid, "gid": h.gid,
            "size": h.size, "mtime": h.mtime, "target": target, "device": device, "ino": h.ino, "links": h.nlink,
            "part": e.part, "archive": e.archive,
        })
    };
    json!({
        "bytes": image.bytes,
        "parts": image.parts.iter().map(|p| json!({"form": p.form.name(), "bytes": p.raw.length, "unpacked": p.content.length})).collect::<Vec<_>>(),
        "entries": image.entries.iter().filter(|e| is_wanted(e, paths)).map(entry).collect::<Vec<_>>(),
    })
}

/// Writes a file of the guest to standard output; to a terminal as printable ASCII. False: no such
/// file.
pub fn cat(tree: &Tree, path: &str) -> Result<bool> {
    let Some(id) = tree.find(path) else {
        return Ok(false);
    };
    let Some(content) = tree.content(id) else {
        bail!(
            "{}: a {}, and no file",
            escaped(path.as_bytes()),
            tree.kind(id).name()
        )
    };
    let stdout = std::io::stdout();
    let done = if stdout.is_terminal() {
        lines(content.reader(), &mut stdout.lock())
    } else {
        copy(content, &mut stdout.lock())
    };
    match done.and_then(|()| std::io::stdout().flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(true),
        done => done.map(|()| true).context("write to standard output"),
    }
}

/// Lines as printable ASCII.
fn lines(reader: impl Read, out: &mut dyn Write) -> std::io::Result<()> {
    let mut reader = BufReader::new(reader);
    loop {
        let mut line = Vec::new();
        if reader
            .by_ref()
            .take(MAX_LINE)
            .read_until(b'\n', &mut line)?
            == 0
        {
            return Ok(());
        }
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        writeln!(out, "{}", printable_start(text, text.len()))?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_mean_the_same_however_they_are_written() {
        for path in ["usr/bin", "/usr/bin", "./usr/bin", "/usr/bin/", "//usr/bin"] {
            assert_eq!(trimmed(path.as_bytes()), b"usr/bin", "{path}");
        }
        assert!(
            [".", "/", ""]
                .iter()
                .all(|path| trimmed(path.as_bytes()).is_empty())
        );
    }

    #[test]
    fn a_terminal_gets_lines_that_cannot_drive_it() {
        let mut out = Vec::new();
        lines(&b"a\x1b[2J\nb\xff\n\nlast"[..], &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "a\\x1b[2J\nb\\u{fffd}\n\nlast\n"
        );
    }

    #[test]
    fn times_are_dates() {
        assert_eq!(
            (time(0).as_str(), time(u32::MAX).as_str()),
            ("1970-01-01 00:00", "2106-02-07 06:28")
        );
    }
}
