//! The guest's RAM.

use super::files::read;
use std::path::Path;

/// Longest text that is read: a kernel's has some 1,500 bytes.
const MAX_TEXT: u64 = 64 << 10;

/// RAM that is available, in bytes; 0 where the kernel does not report it.
pub fn available(root: &Path) -> u64 {
    let text = read(&root.join("proc/meminfo"), MAX_TEXT).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .unwrap_or_default();
    line.trim()
        .trim_end_matches(" kB")
        .parse::<u64>()
        .map_or(0, |kib| kib << 10)
}
