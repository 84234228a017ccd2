//! `collect --check`: whether the collector of a directory receives, for probes of Kubernetes.
//!
//! A client of the socket in the directory gets one line. The thread that accepts guests answers
//! when both threads that read guests have come to a new task, so that a hanging thread is found. A
//! disk that hangs or is full does not fail the check: a restart would not cure it, and receiving
//! goes on.

use super::serve::Streams;
use super::stop::stopped;
use anyhow::{Context, Result, ensure};
use std::fs::{File, Permissions};
use std::io::{ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixListener;
use tokio::sync::watch;

/// Name of the socket in the directory of the boots.
const SOCKET: &str = ".check";
/// Answer of a collector that receives.
const WELL: &str = "receiving\n";
/// Time for the threads to come to a new task; guests take turns of microseconds.
const TURN: Duration = Duration::from_secs(5);
/// Time for the whole answer.
const ANSWER: Duration = Duration::from_secs(8);

/// The socket's path through an open directory: socket names have a limit of 107 bytes, directory
/// names have not.
fn short(dir: &Path) -> Result<(File, PathBuf)> {
    let open = File::open(dir).with_context(|| format!("open {}", dir.display()))?;
    let path = Path::new("/proc/self/fd")
        .join(open.as_raw_fd().to_string())
        .join(SOCKET);
    Ok((open, path))
}

/// The socket; dropping it removes its file.
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
    _dir: File,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Removed with its directory, at worst.
        let _gone_already = std::fs::remove_file(&self.path);
    }
}

/// Makes the socket, in a directory that is this collector's alone.
pub fn bind(dir: &Path) -> Result<Socket> {
    let (open, path) = short(dir)?;
    let at = || format!("make {SOCKET} in {}", dir.display());
    if let Err(e) = std::fs::remove_file(&path)
        && e.kind() != ErrorKind::NotFound
    {
        return Err(e).with_context(at);
    }
    let listener = UnixListener::bind(&path).with_context(at)?;
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).with_context(at)?;
    Ok(Socket {
        listener,
        path,
        _dir: open,
    })
}

/// Answers clients until the stop, one after another.
pub async fn answer(socket: Socket, streams: Streams, mut stop: watch::Receiver<bool>) {
    loop {
        let accepted = tokio::select! {
            () = stopped(&mut stop) => return,
            accepted = socket.listener.accept() => accepted,
        };
        // A shortage of descriptors ends by itself; the client has a deadline of its own.
        let Ok((mut asker, _)) = accepted else {
            tokio::time::sleep(Duration::from_secs(1)).await;
            continue;
        };
        let text = match tokio::time::timeout(TURN, streams.turn()).await {
            Ok(true) => WELL,
            Ok(false) => "a thread that reads of guests has ended\n",
            Err(_) => "the threads that read of guests come to no new task\n",
        };
        // The text is shorter than the socket's buffer: the write does not wait.
        let _gone = asker.write_all(text.as_bytes()).await;
    }
}

/// Asks the collector of this directory; an error where it does not receive.
pub fn ask(dir: &Path) -> Result<()> {
    let at = dir.display();
    let nobody = || format!("{at}: no collector listens: does one run with this --dir?");
    let (_open, path) = short(dir).with_context(nobody)?;
    let socket = net::UnixStream::connect(&path).with_context(nobody)?;
    socket
        .set_read_timeout(Some(ANSWER))
        .context("set a deadline")?;
    let mut answer = String::new();
    socket
        .take(1024)
        .read_to_string(&mut answer)
        .with_context(|| format!("{at}: no answer within {ANSWER:?}"))?;
    ensure!(!answer.is_empty(), "{at}: the collector is stopping");
    ensure!(answer == WELL, "{at}: {}", answer.trim());
    Ok(())
}
