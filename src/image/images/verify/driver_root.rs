//! Root of the driver in an image, by the init's own search.

use super::Question;
use crate::images::newc::Kind;
use crate::images::unpacked_root::Tree;
use kata_gpu_init::driver_files::known_root;
use std::path::{Path, PathBuf};

/// Directory that the driver was installed into, as the guest sees it.
#[derive(Clone, Debug)]
pub struct DriverRoot(PathBuf);

impl Default for DriverRoot {
    fn default() -> Self {
        Self("/".into())
    }
}

impl DriverRoot {
    pub fn of(tree: &Tree, question: &Question) -> Self {
        let is_file = |path: &Path| {
            let found = tree.find(&*path.to_string_lossy());
            found.is_some_and(|id| tree.kind(id) == Kind::File)
        };
        let found = || known_root(is_file).to_path_buf();
        Self(question.driver_root.clone().unwrap_or_else(found))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// An absolute path below this root.
    pub fn join(&self, path: &str) -> String {
        let joined = self.0.join(path.trim_start_matches('/'));
        joined.to_string_lossy().into_owned()
    }

    /// Paths below this root, unless it is the guest's.
    pub fn own<'a>(&'a self, paths: &'a [&str]) -> impl Iterator<Item = String> + 'a {
        let is_own = self.0 != Path::new("/");
        paths
            .iter()
            .filter(move |_| is_own)
            .map(|path| self.join(path))
    }
}
