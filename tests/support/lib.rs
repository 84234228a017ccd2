//! Helpers of the host half's tests: temporary directories, lines of a stream, a log that is kept,
//! a wait with a deadline, and golden files.

pub mod elf_stand_in; // minimal ELF files

use kata_gpu_wire::record::Header;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Settings of a property test: so many cases, the same in every run, and no file of failures.
pub fn property(cases: u32) -> proptest::test_runner::Config {
    proptest::test_runner::Config {
        cases,
        rng_seed: proptest::test_runner::RngSeed::Fixed(0x5eed),
        failure_persistence: None,
        ..Default::default()
    }
}

/// A boot id.
pub const BOOT: &str = "0f7a1f8e-0000-4000-8000-00000000beef";

/// A directory that is removed when the test is over.
pub use tempfile::TempDir;

/// A new [`TempDir`].
pub fn temp_dir() -> TempDir {
    TempDir::with_prefix("kata-gpu-boot-test-").expect("make a temporary directory")
}

pub fn header(boot_id: &str) -> Header {
    Header {
        boot_id: boot_id.into(),
        version: "0.1.0".into(),
        kernel: "6.1".into(),
        first_seq: 0,
    }
}

/// A record without its newline.
pub fn event(seq: u64) -> String {
    format!(r#"{{"schema":1,"seq":{seq},"boottime_ns":1,"kind":"event","name":"x"}}"#)
}

pub fn event_line(seq: u64) -> String {
    event(seq) + "\n"
}

/// Texts that were logged.
pub type Logged = Arc<Mutex<Vec<String>>>;

/// A log that keeps its texts.
pub fn kept_log() -> (Arc<dyn Fn(String) + Send + Sync>, Logged) {
    let logged = Logged::default();
    let sink = logged.clone();
    (
        Arc::new(move |text| sink.lock().unwrap().push(text)),
        logged,
    )
}

/// Ends a wait for what never comes; a slow machine takes seconds.
pub const HANG: Duration = Duration::from_secs(300);

/// Waits until something is done.
pub async fn until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + HANG;
    while !done() {
        assert!(Instant::now() < deadline, "not so within {HANG:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// A file under tests/.
pub fn tests_dir(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Compares with `tests/golden/host/<name>`, or writes it if UPDATE_GOLDEN=1 is set.
pub fn golden(name: &str, text: &str) {
    golden_file(&Path::new("host").join(name), text);
}

/// The same with a file anywhere in `tests/golden`.
pub fn golden_file(name: &Path, text: &str) {
    let path = tests_dir("golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|v| v == "1") {
        std::fs::create_dir_all(path.parent().expect("golden files have a folder"))
            .expect("make the folder");
        std::fs::write(&path, text).expect("write the golden file");
        return;
    }
    let want = std::fs::read_to_string(&path)
        .unwrap_or_else(|e| panic!("read {}: {e}: UPDATE_GOLDEN=1 writes it", path.display()));
    assert!(
        want == text,
        "{} differs: UPDATE_GOLDEN=1 refreshes it\n--- golden\n{want}\n--- now\n{text}",
        path.display()
    );
}
