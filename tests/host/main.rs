//! Tests that need no VM: the spec before the crate that the agent reads it with, and the budgets
//! and promises of the product.

mod accounting;
mod budgets;
mod catalogue;
mod cdi;
mod collect;
mod doctor;
mod documents;
mod export;
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
mod schedule;
mod schemas;
mod shell;
mod specification;
mod supply_chain;
mod test_names;
mod tree;
mod worst_boots;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
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

/// Every file below a folder of the project, in order of their paths; not those that are built.
fn files(folder: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![project().join(folder)];
    while let Some(folder) = folders.pop() {
        let entries =
            std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
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
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _unused = std::fs::remove_dir_all(&self.0);
    }
}

/// Compares with `tests/golden/<name>`, or writes it if UPDATE_GOLDEN=1 is set.
fn golden(name: &str, text: &str) {
    kata_gpu_test_support::golden_file(Path::new(name), text);
}
