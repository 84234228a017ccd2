//! The lines of the kernel's symbols and configuration that rules ask for.

use super::bounded::{HostRoot, seen};
use crate::rules::host_facts::Files;
use crate::rules::kernel_rules::{CONFIG, FAULT, HUGE_FAULT, RELEASE, SYMBOLS};
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// Limit of the symbols read: a distribution's kernel with its modules has 15 MB.
const MAX_SYMBOLS: u64 = 64 << 20;
/// Limit of a configuration, unpacked: they have 300 kB.
const MAX_CONFIG: u64 = 4 << 20;

pub fn read(root: &HostRoot, files: &mut Files) {
    if let Some(seen) = seen(symbols(root)) {
        files.insert(SYMBOLS, seen);
    }
    // A release is one name, never a path.
    let release = files
        .text(RELEASE)
        .ok()
        .filter(|release| !release.contains('/'))
        .map(|release| format!("/boot/config-{release}"));
    let of_boot =
        release.and_then(|path| seen(root.bytes(Path::new(&path), MAX_CONFIG).map(lines)));
    let packed = || {
        seen(
            root.bytes(Path::new("/proc/config.gz"), MAX_CONFIG)
                .and_then(unpack)
                .map(lines),
        )
    };
    if let Some(seen) = of_boot.or_else(packed) {
        files.insert(CONFIG, seen);
    }
}

/// Lines of the fault handlers of VFIO.
fn symbols(root: &HostRoot) -> io::Result<String> {
    let mut lines = BufReader::new(root.regular(Path::new(SYMBOLS))?.take(MAX_SYMBOLS));
    let (mut line, mut found) = (Vec::new(), String::new());
    // A line without an end is as long as the limit at most.
    while lines.read_until(b'\n', &mut line)? > 0 {
        let text = String::from_utf8_lossy(&line);
        if text
            .split_whitespace()
            .nth(2)
            .is_some_and(|name| [FAULT, HUGE_FAULT].contains(&name))
        {
            found += &text;
        }
        line.clear();
    }
    Ok(found)
}

fn unpack(packed: Vec<u8>) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    flate2::read::GzDecoder::new(&packed[..])
        .take(MAX_CONFIG)
        .read_to_end(&mut text)?;
    Ok(text)
}

/// Lines of options that are set.
fn lines(text: Vec<u8>) -> String {
    let text = String::from_utf8_lossy(&text).into_owned();
    let set: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("CONFIG_"))
        .collect();
    set.join("\n")
}
