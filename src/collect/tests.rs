//! A failure means that the collector misplaces a guest's clock, serves another user's process as a
//! VM, keeps the old name of a VM whose directory was renamed, or starts with nothing to listen on.

use super::limits::Limits;
use super::*;
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_test_support::{BOOT, HANG, TempDir, event_line, temp_dir, until};
use kata_gpu_wire::record;
use kata_gpu_wire::record::{DEFAULT_PORT, Pong};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

struct Run {
    dir: TempDir,
    lines: mpsc::Receiver<String>,
    stop: watch::Sender<bool>,
    running: tokio::task::JoinHandle<Result<Counts>>,
}

impl Run {
    fn start(dir: TempDir) -> Self {
        let config = Config {
            uds: vec![dir.path().join("v")],
            ..Config::new(dir.path().join("boots"), DEFAULT_PORT)
        };
        Self::of(dir, config)
    }

    /// Starts a collector for the VMs in `vm/`.
    fn of_vms(limits: Limits) -> Self {
        let dir = temp_dir();
        // Mode that Kata's Rust runtime leaves.
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let vms = vec![
            format!("{}/vm/*/clh.sock", dir.path().display())
                .parse()
                .unwrap(),
        ];
        let config = Config {
            vms,
            limits,
            ..Config::new(dir.path().join("boots"), DEFAULT_PORT)
        };
        Self::of(dir, config)
    }

    fn of(dir: TempDir, config: Config) -> Self {
        let (sender, lines) = mpsc::channel(LINES_QUEUE);
        let collector = Collector::bind(&config, sender).unwrap();
        let (stop, stopped) = watch::channel(false);
        Self {
            dir,
            lines,
            stop,
            running: tokio::spawn(collector.run(stopped)),
        }
    }

    async fn connect(&self) -> UnixStream {
        UnixStream::connect(self.dir.path().join(format!("v_{DEFAULT_PORT}")))
            .await
            .unwrap()
    }

    /// Waits for a line of the log with this text.
    async fn until_logged(&mut self, wanted: &str) {
        let found = async {
            while let Some(line) = self.lines.recv().await {
                if line.contains(wanted) {
                    return;
                }
            }
            panic!("the collector ended before {wanted:?}");
        };
        tokio::time::timeout(HANG, found)
            .await
            .unwrap_or_else(|_| panic!("no {wanted:?} within {HANG:?}"));
    }

    /// Waits until the boot's file is so.
    async fn until_stored(&self, is: impl Fn(&BootFile) -> bool) {
        let path = self.dir.path().join(format!("boots/{BOOT}.ndjson"));
        until(|| path.exists() && is(&read(self.dir.path()))).await;
    }

    async fn stop(self) -> (TempDir, Counts) {
        self.stop.send_replace(true);
        let counts = tokio::time::timeout(HANG, self.running)
            .await
            .expect("the collector stops")
            .unwrap()
            .unwrap();
        (self.dir, counts)
    }

    /// A VMM's socket, and ours once it is there.
    async fn vmm(&self, id: &str) -> (UnixListener, PathBuf) {
        let at = self.dir.path().join("vm").join(id);
        std::fs::create_dir_all(&at).unwrap();
        let vmm = UnixListener::bind(at.join("clh.sock")).unwrap();
        (vmm, self.socket(id).await)
    }

    /// Our socket of a VM, once somebody listens there.
    async fn socket(&self, id: &str) -> PathBuf {
        let socket = self
            .dir
            .path()
            .join(format!("vm/{id}/clh.sock_{DEFAULT_PORT}"));
        until(|| socket.exists()).await;
        // The umask took it away from others; `collect` has none.
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666)).unwrap();
        socket
    }
}

fn read(dir: &Path) -> BootFile {
    BootFile::read(std::fs::File::open(dir.join(format!("boots/{BOOT}.ndjson"))).unwrap()).unwrap()
}

fn header() -> String {
    record::header_line(&kata_gpu_test_support::header(BOOT))
}

#[tokio::test]
async fn the_guests_clock_is_measured_through_the_stream() {
    let run = Run::start(temp_dir());
    let guest = run.connect().await;
    let (reader, mut writer) = guest.into_split();
    writer.write_all(header().as_bytes()).await.unwrap();
    let mut pings = BufReader::new(reader).lines();
    for _ in 0..8 {
        let line = tokio::time::timeout(HANG, pings.next_line())
            .await
            .expect("a ping comes")
            .unwrap()
            .unwrap();
        let pong = record::ping(line.as_bytes()).expect("it is a ping");
        let boottime_ns = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).unwrap();
        let boottime_ns = Duration::from(boottime_ns).as_nanos() as u64;
        writer
            .write_all(record::pong_line(Pong { pong, boottime_ns }).as_bytes())
            .await
            .unwrap();
    }
    run.until_stored(|file| file.clock_samples().count() > 0)
        .await;
    // The guest of this test is this machine, so the true offset is known, up to the time
    // between two readings.
    let before = kata_gpu_report::data::text::realtime_ns();
    let boottime =
        Duration::from(nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).unwrap())
            .as_nanos() as i64;
    let slack = kata_gpu_report::data::text::realtime_ns().abs_diff(before) + 1000;
    let (dir, _) = run.stop().await;
    let file = read(dir.path());
    let best = file.clock_samples().min_by_key(|s| s.error_ns).unwrap();
    let wrong_by = best.offset_ns.abs_diff(before - boottime);
    assert!(
        wrong_by <= best.error_ns + slack,
        "{best:?} is wrong by {wrong_by} ns"
    );
}

/// Connects `times` times as user `uid` and returns the number of connections that were served: a
/// served one is asked for its clock once it has sent its header. Needs root.
async fn connect_as(uid: u32, socket: &Path, times: usize) -> usize {
    use rustix::process::Uid;
    let socket = socket.to_path_buf();
    // Use a new thread: it cannot become root again.
    let connect = move || {
        let uid = Uid::from_raw(uid);
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        let held: Vec<_> = (0..times)
            .map(|_| std::os::unix::net::UnixStream::connect(&socket).unwrap())
            .collect();
        let is_served = |mut stream: &std::os::unix::net::UnixStream| {
            let own = record::header_line(&kata_gpu_test_support::header(
                "0f7a1f8e-0000-4000-8000-000000004242",
            ));
            let _hung_up = stream.write_all(own.as_bytes());
            stream.set_read_timeout(Some(HANG)).unwrap();
            match stream.read(&mut [0]) {
                Ok(read) => read > 0,
                Err(error) => {
                    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
                    false
                }
            }
        };
        held.iter().filter(|stream| is_served(stream)).count()
    };
    tokio::task::spawn_blocking(|| std::thread::spawn(connect).join().unwrap())
        .await
        .unwrap()
}

#[tokio::test]
async fn another_user_can_neither_imitate_a_vm_nor_take_its_streams() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root can connect as somebody else");
        return;
    }
    let (vmms, strangers) = (4242, 65_534);
    let mut run = Run::of_vms(Limits {
        connections_per_vm: 1,
        connects: 2,
        ..Limits::default()
    });
    let (_vmm, socket) = run.vmm("one").await;
    assert_eq!(connect_as(strangers, &socket, 20).await, 0);
    let why = format!("refused a process of user {strangers}: its VMM is user 0's");
    run.until_logged(&why).await;
    // Strangers used up no connection, try or line of the guest.
    let mut guest = UnixStream::connect(&socket).await.unwrap();
    guest
        .write_all((header() + &event_line(0)).as_bytes())
        .await
        .unwrap();
    run.until_stored(|file| file.records.len() == 1).await;
    let second = UnixStream::connect(&socket).await.unwrap();
    run.until_logged("limit connections-per-vm").await;
    drop((guest, second));
    // A VMM that runs as somebody else.
    let (_vmm, socket) = run.vmm("two").await;
    std::os::unix::fs::chown(run.dir.path().join("vm/two/clh.sock"), Some(vmms), None).unwrap();
    assert_eq!(
        [
            connect_as(strangers, &socket, 1).await,
            connect_as(vmms, &socket, 1).await
        ],
        [0, 1]
    );
    let (_dir, counts) = run.stop().await;
    assert_eq!(
        (counts.strangers, counts.connections, counts.refused),
        (21, 2, 1)
    );
}

#[tokio::test]
async fn a_vm_has_the_name_of_its_renamed_directory() {
    let run = Run::of_vms(Limits::default());
    let (_vmm, old) = run.vmm("one").await;
    let inode = |path: &Path| {
        let file = std::fs::metadata(path).ok()?;
        Some((file.ino(), file.ctime(), file.ctime_nsec()))
    };
    let before = inode(&old);
    std::fs::rename(run.dir.path().join("vm/one"), run.dir.path().join("vm/two")).unwrap();
    // The old socket moves with the directory until the rename is seen; then a new one is made, and
    // refuses until it listens.
    let socket = run
        .dir
        .path()
        .join(format!("vm/two/clh.sock_{DEFAULT_PORT}"));
    until(|| inode(&socket).is_some_and(|now| Some(now) != before)).await;
    let connect = async {
        loop {
            match UnixStream::connect(&socket).await {
                Ok(guest) => return guest,
                Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    };
    let mut guest = tokio::time::timeout(HANG, connect)
        .await
        .expect("nobody listens under the new name");
    guest
        .write_all((header() + &event_line(0)).as_bytes())
        .await
        .unwrap();
    run.until_stored(|file| file.records.len() == 1).await;
    drop(guest);
    let (dir, _) = run.stop().await;
    assert_eq!(
        read(dir.path()).sandbox().map(|s| s.id.clone()),
        Some("two".into())
    );
    assert_eq!(
        read(dir.path()).owner(),
        Some(format!("socket {}", socket.display()).as_str())
    );
    assert!(!socket.exists());
}

#[tokio::test]
async fn a_directory_made_again_is_written_by_one_collector_alone() {
    let run = Run::start(temp_dir());
    let boots = run.dir.path().join("boots");
    let id = |n: u8| format!("0f7a1f8e-0000-4000-8000-00000000000{n}");
    let file = |n: u8| boots.join(format!("{}.ndjson", id(n)));
    let send = async |n: u8| {
        let mut guest = run.connect().await;
        let header = record::header_line(&kata_gpu_test_support::header(&id(n)));
        guest.write_all(header.as_bytes()).await.unwrap();
        guest
    };
    let _first = send(1).await;
    until(|| file(1).exists()).await;
    // The collector makes the directory again, and takes it.
    std::fs::remove_dir_all(&boots).unwrap();
    let _second = send(2).await;
    until(|| file(2).exists()).await;
    assert!(
        place::Place::take(&boots).is_err(),
        "it is this collector's"
    );
    // Another collector is first.
    std::fs::remove_dir_all(&boots).unwrap();
    let _other = place::Place::take(&boots).unwrap();
    let _third = send(3).await;
    let ended = tokio::time::timeout(HANG, run.running).await;
    let why = ended.expect("the collector ends").unwrap().unwrap_err();
    assert!(
        why.to_string().contains("another collector writes to"),
        "{why:#}"
    );
    assert_eq!(std::fs::read_dir(&boots).unwrap().count(), 0);
}

#[tokio::test]
async fn nothing_to_listen_on_is_an_error_with_the_cure() {
    let dir = temp_dir();
    let (sender, _news) = mpsc::channel(1);
    let config = Config::new(dir.path().to_path_buf(), DEFAULT_PORT);
    let error = Collector::bind(&config, sender)
        .err()
        .expect("nothing to listen on")
        .to_string();
    assert!(error.contains("--uds"), "{error}");
}

#[tokio::test]
async fn connections_that_wait_at_the_stop_are_taken() {
    const GUESTS: usize = 16;
    let dir = temp_dir();
    let config = Config {
        uds: vec![dir.path().join("v")],
        limits: Limits {
            connections_per_vm: GUESTS as u64,
            ..Limits::default()
        },
        ..Config::new(dir.path().join("boots"), DEFAULT_PORT)
    };
    let run = Run::of(dir, config);
    // The collector shares this thread: it sees the guests and the stop together.
    let guests: Vec<_> = (0..GUESTS)
        .map(|_| {
            let socket = run.dir.path().join(format!("v_{DEFAULT_PORT}"));
            std::os::unix::net::UnixStream::connect(socket).unwrap()
        })
        .collect();
    let (_dir, counts) = run.stop().await;
    assert_eq!(counts.connections, guests.len() as u64);
}
