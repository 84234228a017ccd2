//! Guest half of tests/vm/emulated_host/service.rs: a VMM with hybrid vsock and the guest behind
//! it, on the emulated host.

use kata_gpu_init::stream::ring::Ring;
use kata_gpu_init::stream::sinks::stream::{Identity, serve};
use kata_gpu_wire::record::{DEFAULT_PORT, Kind, Record};
use std::fs::DirBuilder;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Name that the program is started under.
pub const NAME: &str = "vmm";
/// Mode of a VM's directories, as Kata's runtimes make them (DirMode of virtcontainers).
const DIR_MODE: u32 = 0o750;
/// Pause between two records, and between two connections.
const PAUSE: Duration = Duration::from_millis(20);

/// `vmm SOCKET BOOT RECORDS`: makes SOCKET with its directories, sends RECORDS records of BOOT one
/// by one to whoever listens beside it, and sends all of them again after each loss of the
/// connection, until it is killed.
pub fn run() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, boot, records] = arguments.as_slice() else {
        panic!("usage: {NAME} SOCKET BOOT RECORDS")
    };
    let socket = PathBuf::from(socket);
    let dir = socket.parent().expect("a socket in a directory");
    DirBuilder::new()
        .recursive(true)
        .mode(DIR_MODE)
        .create(dir)
        .expect("make the VM's directory");
    let _vmm = UnixListener::bind(&socket).expect("bind the VMM's socket");
    let records: u64 = records.parse().expect("a number of records");
    let ring = Arc::new(Ring::with_capacity(1 << 20));
    let pushed = ring.clone();
    std::thread::spawn(move || {
        for _ in 0..records {
            pushed.push(Record::new(Kind::Event, "test"));
            std::thread::sleep(PAUSE);
        }
    });
    let mut port = socket.into_os_string();
    port.push(format!("_{DEFAULT_PORT}"));
    let identity = Identity {
        boot_id: boot.clone(),
        kernel: "6.12".into(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("start a runtime");
    runtime.block_on(async {
        loop {
            if let Ok(stream) = UnixStream::connect(&port) {
                stream
                    .set_nonblocking(true)
                    .expect("make a socket non-blocking");
                let _ended = serve(
                    OwnedFd::from(stream),
                    ring.clone(),
                    &identity,
                    "vsock",
                    None,
                )
                .await;
            }
            tokio::time::sleep(PAUSE).await;
        }
    });
}
