//! Files put into an image: the init, the link to it, NVML's helper, and the list of the driver's
//! files. All paths are from closed lists; no path comes from an image.

use crate::images::driver_list;
use crate::images::entry_text::escaped;
use crate::images::helper;
use crate::images::newc::Kind;
use crate::images::unpacked_root::Tree;
use crate::images::verify::INIT;
use anyhow::{Context, Result, ensure};
use kata_gpu_init::driver_files::manifest;

/// Directories that `/sbin` may resolve to.
const SBIN: [&str; 4] = ["/sbin", "/usr/sbin", "/usr/bin", "/bin"];
/// Parent directories of the list, which are added where they are missing.
pub const LIST_DIRECTORIES: [&str; 3] = ["/usr", "/usr/share", manifest::DIRECTORY];

#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    pub init: &'a [u8],
    /// The directory that `/sbin` resolves to, one of [`SBIN`].
    pub sbin: &'static str,
    /// NVML's helper.
    pub helper: Option<&'a [u8]>,
    /// The list's text.
    pub list: Option<&'a [u8]>,
}

/// A file or link put into an image, owned by root.
#[derive(Debug)]
pub struct Put<'a> {
    pub path: String,
    /// With the bits of the type.
    pub mode: u32,
    /// Content, or target.
    pub data: &'a [u8],
}

impl Put<'_> {
    /// Path of the directory, empty for the root, and name in it.
    pub fn place(&self) -> (&str, &str) {
        self.path.rsplit_once('/').unwrap_or(("", &self.path))
    }
}

impl<'a> Wanted<'a> {
    pub fn puts(&self) -> Vec<Put<'a>> {
        let put = |path, kind: Kind, mode, data| Put {
            path,
            mode: kind.bits() | mode,
            data,
        };
        let link = format!("{}/init", self.sbin);
        let mut all = vec![
            put(INIT.into(), Kind::File, 0o755, self.init),
            put(link, Kind::Link, 0o777, INIT.as_bytes()),
        ];
        let helper = self.helper;
        all.extend(helper.map(|data| put(helper::path(), Kind::File, 0o755, data)));
        let list = self.list;
        all.extend(list.map(|data| put(driver_list::path(), Kind::File, 0o644, data)));
        all
    }

    /// Whether a path may differ afterwards.
    pub fn may_change(&self, path: &[u8]) -> bool {
        self.puts().iter().any(|put| put.path.as_bytes() == path)
            || self.list.is_some() && LIST_DIRECTORIES.iter().any(|list| list.as_bytes() == path)
    }
}

/// Directory of the link. Errors: the image is no guest's root, or a path of the init is unusable.
pub fn sbin(tree: &Tree) -> Result<&'static str> {
    for directory in ["/dev", "/proc", "/sys", "/run"] {
        let found = tree
            .find_no_follow(directory)
            .is_some_and(|id| tree.kind(id) == Kind::Directory);
        ensure!(
            found,
            "no guest root: it has no {directory}, and is read-only"
        );
    }
    ensure!(
        tree.find_no_follow("/usr/bin/kata-agent").is_some(),
        "no guest root: it has no /usr/bin/kata-agent"
    );
    let path = tree
        .find("/sbin")
        .filter(|id| tree.kind(*id) == Kind::Directory)
        .map(|id| tree.path(id));
    let path = path.context("/sbin is missing, or a link out of the root")?;
    let known = SBIN.into_iter().find(|known| known.as_bytes() == path);
    let found = known.with_context(|| {
        format!(
            "/sbin leads to {}: this takes {}",
            escaped(&path),
            SBIN.join(", ")
        )
    })?;
    for path in [INIT.to_string(), format!("{found}/init")] {
        let replaceable = tree
            .find_no_follow(&path)
            .is_none_or(|id| matches!(tree.kind(id), Kind::File | Kind::Link));
        ensure!(
            replaceable,
            "{path} is neither a file nor a link: remove it from the image"
        );
    }
    Ok(found)
}

/// Errors: the list's path contains a link, or something that is no directory.
pub fn check_list_place(tree: &Tree) -> Result<()> {
    let refused =
        "the list of the driver's files is not written through links: remove it from the image";
    for path in LIST_DIRECTORIES {
        let Some(id) = tree.find_no_follow(path) else {
            return Ok(());
        };
        ensure!(
            tree.kind(id) == Kind::Directory,
            "{path} is a {}, not a directory: {refused}",
            tree.kind(id).name()
        );
    }
    let path = driver_list::path();
    if let Some(id) = tree.find_no_follow(&path) {
        ensure!(
            tree.kind(id) == Kind::File,
            "{path} is a {}, not a file: {refused}",
            tree.kind(id).name()
        );
    }
    Ok(())
}
