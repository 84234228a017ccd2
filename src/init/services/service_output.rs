//! Standard output and error of a service: a FIFO in /run. The service opens it for reading as
//! well, so that the worker's death is no broken pipe for it; the next worker reads on.

use super::lines::{Lines, Splitter};
use super::service_table::Name;
use super::state::RUN;
use crate::machine::clock::boottime_ns;
use crate::machine::threads;
use kata_gpu_wire::names;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::unix::AsyncFd;

/// Severity in syslog of a warning; lower ones are worse.
const WARNING: u8 = 4;
/// Bytes read at once; after each read, other tasks run.
const READ: usize = 16 * 1024;

/// Lines of all services, by output and by syslog.
#[derive(Clone)]
pub struct Log {
    service: &'static str,
    lines: Arc<Mutex<Lines>>,
}

impl Log {
    pub fn new(service: &'static str) -> Self {
        Self {
            service,
            lines: Arc::new(Mutex::new(Lines::new(now()))),
        }
    }

    /// Takes a line, with its severity in syslog where it has one; a record is made of it within
    /// bounds.
    pub fn take(&self, from: &str, severity: Option<u8>, line: &[u8]) {
        let taken = threads::lock(&self.lines).take(line, now());
        if let Some(taken) = taken {
            let dropped = (taken.dropped > 0).then_some(taken.dropped);
            let (service, text) = (self.service, taken.text);
            match severity {
                Some(..=WARNING) => {
                    tracing::warn!(name: names::SERVICE_LOG, service, from, text, dropped)
                }
                Some(_) | None => {
                    tracing::debug!(name: names::SERVICE_LOG, service, from, text, dropped)
                }
            }
        }
    }

    /// Begins another life of the service.
    pub fn begin(&self) {
        threads::lock(&self.lines).begin();
    }

    /// The last lines, for the report of an end; lines that became no record are reported first.
    pub fn last(&self) -> Vec<String> {
        let mut lines = threads::lock(&self.lines);
        let dropped = lines.dropped();
        if dropped > 0 {
            tracing::debug!(name: names::SERVICE_LOG, service = self.service, dropped);
        }
        lines.last()
    }
}

fn now() -> Duration {
    Duration::from_nanos(boottime_ns())
}

/// Worker's end of a service's output.
pub struct Output {
    fifo: AsyncFd<OwnedFd>,
    path: PathBuf,
}

impl Output {
    /// Makes the FIFO, or opens that of an earlier worker.
    pub fn open(service: Name) -> Result<Self, String> {
        let folder = Path::new(RUN).join("services");
        let path = folder.join(format!("{service}.out"));
        let at =
            |e: &dyn std::fmt::Display| format!("open {}: {e}: its lines are lost", path.display());
        std::fs::create_dir_all(&folder).map_err(|e| at(&e))?;
        match mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(()) | Err(nix::errno::Errno::EEXIST) => {}
            Err(errno) => return Err(at(&errno)),
        }
        // Read and write: without another end there is no end of file, which would be readable for
        // ever.
        let fifo = open(
            &path,
            OFlag::O_RDWR | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC,
            Mode::empty(),
        )
        .map_err(|e| at(&e))?;
        let fifo = crate::machine::sys::async_fd(fifo).map_err(|e| at(&e))?;
        Ok(Self { fifo, path })
    }

    /// The service's end: blocking, as programs expect their output.
    pub fn end(&self) -> std::io::Result<std::fs::File> {
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&self.path)
    }

    /// Reads for ever.
    pub async fn follow(&self, log: &Log) {
        let mut splitter = Splitter::default();
        // Fails only when the runtime ends.
        while let Ok(mut ready) = self.fifo.readable().await {
            if !self.read(&mut splitter, log) {
                ready.clear_ready();
            }
            tokio::task::yield_now().await;
        }
    }

    /// Reads what is there, after the end of the service.
    pub fn drain(&self, log: &Log) {
        let mut splitter = Splitter::default();
        // A pipe holds 64 KiB; a process that still writes must not keep this loop going.
        for _ in 0..8 {
            if !self.read(&mut splitter, log) {
                break;
            }
        }
        splitter.finish(|line| log.take("output", None, line));
    }

    fn read(&self, splitter: &mut Splitter, log: &Log) -> bool {
        let mut bytes = [0; READ];
        match nix::unistd::read(self.fifo.get_ref(), &mut bytes) {
            Ok(length) => {
                splitter.take(bytes.get(..length).unwrap_or_default(), |line| {
                    log.take("output", None, line)
                });
                length > 0
            }
            Err(_) => false,
        }
    }
}
