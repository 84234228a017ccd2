//! Tests that need no VM: the spec before the crate that the agent reads it with, and the budgets
//! and promises of the product.

#[cfg(feature = "host")]
mod accounting;
mod budgets;
mod catalogue;
mod cdi;
#[cfg(feature = "host")]
mod collect;
mod documents;
#[cfg(feature = "host")]
mod doctor;
#[cfg(feature = "host")]
mod export;
#[cfg(feature = "host")]
mod fleet;
#[cfg(feature = "host")]
mod follow;
mod fork;
#[cfg(feature = "host")]
mod goldens;
#[cfg(feature = "host")]
mod hostile_soak;
mod hooks;
#[cfg(feature = "host")]
mod import;
#[cfg(feature = "host")]
mod install;
mod initrd;
mod layers;
mod modules;
mod nvml;
mod plain_words;
#[cfg(feature = "host")]
mod real_gpu;
mod schedule;
#[cfg(feature = "host")]
mod schemas;
mod shell;
#[cfg(feature = "host")]
mod specification;
#[cfg(feature = "host")]
mod supply_chain;
mod test_names;
#[cfg(feature = "host")]
mod tree;
#[cfg(feature = "host")]
mod worst_boots;

use std::path::{Path, PathBuf};

/// The project's folder.
fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every file below a folder of the project, in order of their paths; not those that are built.
fn files(folder: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![project().join(folder)];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
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
        let path = std::env::temp_dir().join(format!("kata-gpu-tests-{test}-{}", std::process::id()));
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
#[cfg(feature = "host")]
fn golden(name: &str, text: &str) {
    let path = project().join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|v| v == "1") {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        return;
    }
    let want = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {}: {e}: UPDATE_GOLDEN=1 writes it", path.display()));
    assert!(want == text, "{} differs: UPDATE_GOLDEN=1 refreshes it\n--- golden\n{want}\n--- now\n{text}", path.display());
}
