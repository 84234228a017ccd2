//! Helpers of the host half's tests: temporary directories, and golden files.

use std::path::{Path, PathBuf};

/// A directory that is removed when the test is over.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new() -> Self {
        let template = std::env::temp_dir().join("kata-gpu-boot-test-XXXXXX");
        Self(nix::unistd::mkdtemp(&template).expect("make a temporary directory"))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("remove the temporary directory");
    }
}

/// A file under tests/.
pub fn tests_dir(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path)
}

/// Compares with `tests/golden/host/<name>`, or writes it if UPDATE_GOLDEN=1 is set.
pub fn golden(name: &str, text: &str) {
    let path = tests_dir("golden/host").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|v| v == "1") {
        std::fs::create_dir_all(path.parent().expect("golden files have a folder")).expect("make the folder");
        std::fs::write(&path, text).expect("write the golden file");
        return;
    }
    let want = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {}: {e}: UPDATE_GOLDEN=1 writes it", path.display()));
    assert!(want == text, "{} differs: UPDATE_GOLDEN=1 refreshes it\n--- golden\n{want}\n--- now\n{text}", path.display());
}
