//! Following a file that another process appends to, woken by inotify.

use super::async_fd::watch;
use anyhow::{Context, Result};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use tokio::io::unix::AsyncFd;

/// A file and the position of reading.
pub struct Tail {
    path: PathBuf,
    file: File,
    changes: AsyncFd<OwnedFd>,
}

impl Tail {
    /// Opens an existing file at its start.
    pub fn open(path: &Path) -> Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
            .context("inotify_init")?;
        // Add the watch first: data written between the two steps is then read, and only causes one
        // superfluous wake-up.
        inotify
            .add_watch(path, AddWatchFlags::IN_MODIFY)
            .with_context(|| format!("watch {}", path.display()))?;
        let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
        let changes = watch(inotify).context("watch inotify")?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            changes,
        })
    }

    /// Unread bytes of the file; empty at the end.
    pub fn read_now(&mut self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.file
            .read_to_end(&mut bytes)
            .with_context(|| format!("read {}", self.path.display()))?;
        Ok(bytes)
    }

    /// Waits for more bytes and returns them. Safe to cancel.
    pub async fn read_more(&mut self) -> Result<Vec<u8>> {
        loop {
            // Read first: nothing that was written before the wait is missed.
            let bytes = self.read_now()?;
            if !bytes.is_empty() {
                return Ok(bytes);
            }
            let mut ready = self.changes.readable().await.context("wait for inotify")?;
            // Discard the events: their content does not matter.
            let mut events = [0; 4096];
            if let Ok(Err(e)) = ready.try_io(|fd| Ok(nix::unistd::read(fd.get_ref(), &mut events)?))
                && e.kind() != io::ErrorKind::Interrupted
            {
                return Err(e).context("read inotify events");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::{HANG, temp_dir};
    use std::io::Write;
    use std::time::Duration;

    #[tokio::test]
    async fn what_is_appended_is_seen() {
        let dir = temp_dir();
        let path = dir.path().join("console.log");
        let mut writer = File::create(&path).unwrap();
        writer.write_all(b"one\n").unwrap();
        let mut tail = Tail::open(&path).unwrap();
        assert_eq!(tail.read_more().await.unwrap(), b"one\n");
        let waiting = tokio::time::timeout(Duration::from_millis(20), tail.read_more()).await;
        assert!(waiting.is_err(), "nothing was written");
        let reading = tokio::spawn(async move { tail.read_more().await.unwrap() });
        tokio::task::yield_now().await;
        writer.write_all(b"two\n").unwrap();
        let read = tokio::time::timeout(HANG, reading)
            .await
            .expect("inotify does not wake")
            .unwrap();
        assert_eq!(read, b"two\n");
    }
}
