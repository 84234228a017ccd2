//! `/run/kata-gpu-init/boot.ndjson`: header and records, as they would go over vsock, for containers and for people in the guest.

use super::stream::Identity;
use crate::events::names;
use crate::events::ring::Ring;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

/// Bytes after which the file is left as it is (it lies in memory): about forty boots' worth.
const MAX_BYTES: usize = 8 * 1024 * 1024;

/// Follows the ring into `path`, on tmpfs, where writing does not wait. Ends when the file cannot grow; says so in the stream.
pub async fn run(path: &Path, ring: Arc<Ring>, identity: &Identity) {
    if let Err(error) = follow(path, &ring, identity).await {
        tracing::warn!(name: names::SINK, sink = "file", state = "stopped", error = %format!("write {}: {error}", path.display()));
    }
}

async fn follow(path: &Path, ring: &Ring, identity: &Identity) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut grown = ring.subscribe();
    let mut next = ring.first_seq();
    let mut written = 0;
    let mut text = identity.header(next);
    loop {
        let batch = ring.read(&mut next, usize::MAX);
        batch.lines.iter().for_each(|line| text.push_str(line));
        written += text.len();
        if written > MAX_BYTES {
            return Err(io::Error::other(format!(
                "the file has reached its limit of {MAX_BYTES} bytes; later records are on the other sinks"
            )));
        }
        file.write_all(text.as_bytes())?;
        text.clear();
        // The ring owns the sender and outlives this task.
        let _unused = grown.changed().await;
    }
}
