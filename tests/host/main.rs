//! Tests that need no VM: the spec before the crate that the agent reads it with, and the budgets
//! and promises of the product.

mod accounting;
mod boot_faults;
mod budgets;
mod catalogue;
mod cdi;
mod collect;
mod doctor;
mod documents;
mod export;
mod failures;
mod fleet;
mod follow;
mod fork;
mod goldens;
mod hooks;
mod hostile_soak;
mod import;
mod initrd;
mod install;
mod layers;
mod modules;
mod nvml;
mod plain_words;
mod real_gpu;
mod release;
mod schedule;
mod schemas;
mod shell;
mod specification;
mod supply_chain;

mod tree;
mod worst_boots;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

/// The project's folder.
fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A program of this build, built now if it is not there or not up to date.
fn built(package: &str, name: &str) -> PathBuf {
    static BUILT: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let program = std::env::current_exe()
        .unwrap()
        .ancestors()
        .nth(2)
        .unwrap()
        .join(name);
    // Held while it is built: others wait for it.
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if built.insert(name.into()) {
        let words = ["build", "--locked", "-q", "-p", package, "--bin", name];
        let status = Command::new(env!("CARGO"))
            .args(words)
            .current_dir(project())
            .status()
            .unwrap();
        assert!(
            status.success() && program.exists(),
            "build {}",
            program.display()
        );
    }
    program
}

/// Standard output of a program.
fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Standard error of a program.
fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Writes a file, and makes the folders above it.
#[track_caller]
fn write(path: impl AsRef<Path>, bytes: impl AsRef<[u8]>) {
    let path = path.as_ref();
    make_dir(path.parent().unwrap());
    fs::write(path, bytes).unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
}

#[track_caller]
fn bytes(path: impl AsRef<Path>) -> Vec<u8> {
    let path = path.as_ref();
    fs::read(path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()))
}

#[track_caller]
fn text(path: impl AsRef<Path>) -> String {
    String::from_utf8(bytes(path)).unwrap()
}

#[track_caller]
fn make_dir(path: impl AsRef<Path>) {
    fs::create_dir_all(path.as_ref()).unwrap();
}

#[track_caller]
fn remove(path: impl AsRef<Path>) {
    fs::remove_file(path.as_ref()).unwrap();
}

#[track_caller]
fn link(target: impl AsRef<Path>, path: impl AsRef<Path>) {
    symlink(target, path).unwrap();
}

#[track_caller]
fn chmod(path: impl AsRef<Path>, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Names in a folder, sorted.
fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Nothing in a text can drive a terminal.
#[track_caller]
fn assert_printable(text: &str) {
    let printable = |c: char| c == '\n' || (' '..='~').contains(&c);
    assert!(text.chars().all(printable), "{text:?}");
}

/// Prints why a test is skipped; a failure where this variable demands its parts.
#[track_caller]
fn skip(demanded_by: &str, why: &str) {
    let demanded = std::env::var_os(demanded_by).is_some();
    assert!(!demanded, "{why}, and {demanded_by} is set");
    eprintln!("skipped: {why}");
}

/// The init that guests have.
fn guests_init() -> PathBuf {
    project().join("target/x86_64-unknown-linux-musl/release/kata-gpu-init")
}

/// Whether these files are built; prints what `./tests/run` builds them with if not.
#[track_caller]
fn are_built(files: &[PathBuf], with: &str) -> bool {
    let missing = files.iter().find(|file| !file.exists());
    if let Some(file) = missing {
        let why = format!(
            "{} is not built: ./tests/run {with} builds it",
            file.display()
        );
        skip("KATA_GPU_BUILT", &why);
    }
    missing.is_none()
}

/// Every file below a folder of the project, in order of their paths; not those that are built.
fn files(folder: &str) -> Vec<PathBuf> {
    files_below(project().join(folder))
}

fn files_below(folder: PathBuf) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        for path in entries.map(|entry| entry.unwrap().path()) {
            let is_built = ["target", ".git"].iter().any(|name| path.ends_with(name));
            if path.is_dir() && !path.is_symlink() && !is_built {
                folders.push(path);
            } else if path.is_file() {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// A folder of this test's own, gone when dropped.
struct TempDir(PathBuf);

impl TempDir {
    fn new(test: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("kata-gpu-tests-{test}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _unused = fs::remove_dir_all(&self.0);
    }
}

/// Compares with `tests/golden/<name>`, or writes it if UPDATE_GOLDEN=1 is set.
fn golden(name: &str, text: &str) {
    kata_gpu_test_support::golden_file(Path::new(name), text);
}
