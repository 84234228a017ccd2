//! `kata-gpu-boot collect` as a process, and guests at real sockets: what the tests of the
//! collector share.
//!
//! [`Guest`] runs the guest's own code (ring, stream, replay, reconnects) where the vsock would be;
//! [`Raw`] says whatever a test wants.

mod disk_full;
mod kata;
mod limits;
mod restarts;
mod service;

use crate::TempDir;
use kata_gpu_init::stream::ring::Ring;
use kata_gpu_init::stream::sinks::stream::{Identity, serve};
use kata_gpu_report::data::boot_file::{BootFile, HostEvent};
use kata_gpu_wire::record::{DEFAULT_PORT, Header, Kind, Record, header_line};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Ends a wait for what never comes; what is waited for takes milliseconds, on a slow machine
/// seconds.
pub const DEADLINE: Duration = Duration::from_secs(300);
/// Pause between two looks where nothing announces a change.
const LOOK: Duration = Duration::from_millis(5);

/// The program: the one that KATA_GPU_BOOT names, or the one of this build.
pub fn program() -> PathBuf {
    std::env::var_os("KATA_GPU_BOOT").map_or_else(
        || crate::built("kata-gpu-boot", "kata-gpu-boot"),
        PathBuf::from,
    )
}

/// A folder with a short path: names of sockets have a limit.
pub fn folder() -> TempDir {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    TempDir::new(&format!("collect-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// Waits until it is so.
pub fn until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !is() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        std::thread::sleep(LOOK);
    }
}

#[derive(Default)]
struct Said {
    lines: Mutex<Vec<String>>,
    more: Condvar,
}

/// A collector that runs. Killed when dropped.
pub struct Collector {
    child: Child,
    said: Arc<Said>,
}

impl Collector {
    /// Starts it and waits until it listens.
    pub fn start(dir: &Path, words: &[&str]) -> Self {
        Self::of(&mut Self::command(dir, words))
    }

    /// At the socket `v`, unless the words name others or VMs.
    pub fn command(dir: &Path, words: &[&str]) -> Command {
        Self::add_words(Command::new(program()), dir, words)
    }

    /// The same after words of another program.
    pub fn add_words(mut command: Command, dir: &Path, words: &[&str]) -> Command {
        command
            .args(["collect", "--no-vsock", "--dir"])
            .arg(dir.join("boots"));
        if !words.contains(&"--vm") {
            command.arg("--no-vms");
        }
        if !words.iter().any(|word| ["--vm", "--uds"].contains(word)) {
            command.arg("--uds").arg(dir.join("v"));
        }
        command.args(words);
        command
    }

    pub fn of(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said: Arc<Said> = Arc::default();
        let (lines, stderr) = (said.clone(), child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                lines.lines.lock().unwrap().push(line);
                lines.more.notify_all();
            }
        });
        let collector = Self { child, said };
        collector.wait_for("listening on |watching ");
        collector
    }

    /// Waits for a line with one of the texts.
    pub fn wait_for(&self, texts: &str) -> String {
        let found = |lines: &Vec<String>| {
            lines
                .iter()
                .rev()
                .find(|l| texts.split('|').any(|t| l.contains(t)))
                .cloned()
        };
        let lines = self.said.lines.lock().unwrap();
        let (lines, _) = self
            .said
            .more
            .wait_timeout_while(lines, DEADLINE, |lines| found(lines).is_none())
            .unwrap();
        found(&lines).unwrap_or_else(|| panic!("no {texts:?} within {DEADLINE:?}: {lines:#?}"))
    }

    pub fn said(&self) -> Vec<String> {
        self.said.lines.lock().unwrap().clone()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGTERM, and its end.
    pub fn stop(mut self) -> Vec<String> {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        let status = self.wait();
        assert!(status.success(), "{status}: {:#?}", self.said());
        self.wait_for(" over a limit; ");
        self.said()
    }

    fn wait(&mut self) -> ExitStatus {
        let mut ended = None;
        until("the end of the collector", || {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        });
        ended.unwrap()
    }

    /// SIGKILL, which nothing can be done about.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _ended_already = self.child.wait();
    }
}

pub fn boot_id(n: u64) -> String {
    format!("0f7a1f8e-0000-4000-8000-{n:012x}")
}

pub fn boot_path(dir: &Path, n: u64) -> PathBuf {
    dir.join(format!("boots/{}.ndjson", boot_id(n)))
}

/// Reads a boot's file. Empty where there is none.
pub fn read(dir: &Path, n: u64) -> BootFile {
    std::fs::File::open(boot_path(dir, n)).map_or_else(
        |_| BootFile::default(),
        |file| BootFile::read(file).unwrap(),
    )
}

/// How many records stand in a boot's file, whatever they say.
pub fn stored(dir: &Path, n: u64) -> usize {
    let text = std::fs::read(boot_path(dir, n)).unwrap_or_default();
    text.split(|b| *b == b'\n')
        .filter(|line| line.windows(EVENT.len()).any(|w| w == EVENT))
        .count()
}

const EVENT: &[u8] = b"\"kind\":\"event\"";

/// Output of `show` for a boot.
pub fn shown(dir: &Path, n: u64, words: &[&str]) -> String {
    let mut command = Command::new(program());
    let output = command
        .arg("show")
        .arg(boot_path(dir, n))
        .args(words)
        .output()
        .unwrap();
    crate::stdout(&output)
}

/// Waits until a boot's end is in its file.
pub fn until_settled(dir: &Path, n: u64) {
    until("the boot is stored", || {
        read(dir, n)
            .records
            .iter()
            .any(|record| record.name == "settled")
    });
}

/// Waits until so many of a boot's records are in its file, and no more.
pub fn until_stored(dir: &Path, n: u64, records: usize) {
    until(&format!("{records} records of boot {n}"), || {
        stored(dir, n) >= records
    });
    assert_eq!(read(dir, n).records.len(), records);
}

/// Every record once, none missing, none damaged.
pub fn assert_whole(file: &BootFile, records: u64) {
    let mut seqs: Vec<u64> = file.records.iter().map(|r| r.seq).collect();
    seqs.sort_unstable();
    assert_eq!(seqs, (0..records).collect::<Vec<_>>());
    assert_eq!((file.damaged, file.unfinished), (0, 0), "{:?}", file.damage);
}

pub fn garbage(file: &BootFile) -> u64 {
    let lines = |event: &HostEvent| match event {
        HostEvent::Garbage { lines, .. } => *lines,
        _ => 0,
    };
    file.host.iter().map(|line| lines(&line.event)).sum()
}

/// Path at which a collector with `--uds DIR/name` listens.
pub fn socket(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}_{DEFAULT_PORT}"))
}

/// A guest of our own: a ring of records, sent over and over to whoever listens, as the init does
/// it.
pub struct Guest {
    pub ring: Arc<Ring>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Guest {
    pub fn start(boot: u64, socket: PathBuf) -> Self {
        Self::with_ring(boot, socket, Ring::with_capacity(16 << 20))
    }

    pub fn with_ring(boot: u64, socket: PathBuf, ring: Ring) -> Self {
        let ring = Arc::new(ring);
        let identity = Identity {
            boot_id: boot_id(boot),
            kernel: "6.1".into(),
        };
        let (stop, mut stopped) = tokio::sync::oneshot::channel();
        let of_thread = ring.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                loop {
                    if let Ok(stream) = UnixStream::connect(&socket) {
                        stream.set_nonblocking(true).unwrap();
                        let (ring, stream) = (of_thread.clone(), OwnedFd::from(stream));
                        tokio::select! {
                            _ = serve(stream, ring, &identity, "vsock", None) => {}
                            _ = &mut stopped => return,
                        }
                    }
                    // As the init does: a guest gets no notice of a listener.
                    tokio::select! {
                        () = tokio::time::sleep(Duration::from_millis(20)) => {}
                        _ = &mut stopped => return,
                    }
                }
            });
        });
        Self {
            ring,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// `records` more.
    pub fn push(&self, records: u64) {
        for _ in 0..records {
            let mut record = Record::new(Kind::Event, "test");
            record.boottime_ns = 1;
            self.ring.push(record);
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// A connection that says what the test wants.
pub struct Raw(pub UnixStream);

impl Raw {
    /// Between bind() and listen() the socket is there and refuses.
    pub fn connect(socket: &Path) -> Self {
        let mut connected = None;
        until("somebody who listens", || {
            connected = UnixStream::connect(socket).ok();
            connected.is_some()
        });
        let stream = connected.unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        Self(stream)
    }

    pub fn say(&mut self, text: impl AsRef<[u8]>) {
        self.0.write_all(text.as_ref()).unwrap();
    }

    pub fn header(&mut self, boot: u64) {
        self.say(header(boot));
    }

    /// Waits until the collector hangs up.
    pub fn until_closed(&mut self) {
        let mut bytes = [0; 4096];
        loop {
            match self.0.read(&mut bytes) {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return,
                Err(e) => panic!("not hung up within {DEADLINE:?}: {e}"),
            }
        }
    }
}

pub fn header(boot: u64) -> String {
    header_line(&Header {
        boot_id: boot_id(boot),
        version: "0.1.0".into(),
        kernel: "6.1".into(),
        first_seq: 0,
    })
}

pub fn event(seq: u64) -> String {
    format!("{{\"schema\":1,\"seq\":{seq},\"boottime_ns\":1,\"kind\":\"event\",\"name\":\"x\"}}\n")
}
