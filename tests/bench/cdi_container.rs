//! A container for the hooks: this machine's own libraries with their links, a conventional
//! configuration, a cache of its own, and the driver's files as the agent mounts them.

use anyhow::{Context, Result};
use kata_gpu_init::driver_files::DriverFiles;
use kata_gpu_test_support::elf_stand_in as stand_in;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde_json::json;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Folder of libraries on this machine, and in the container, too.
const FOLDER: &str = "usr/lib/x86_64-linux-gnu";
/// Libraries of the image: about what one with CUDA has.
const LIBRARIES: usize = 200;
const CACHE: &str = "etc/ld.so.cache";
/// The driver's major.
const MAJOR: u64 = 195;

/// A container's bundle before its hooks.
pub struct Container {
    pub root: PathBuf,
    /// OCI state that the runtime passes to a hook.
    pub state: String,
    /// Number of libraries that the hook finds, the driver's among them.
    pub libraries: usize,
    /// Everything that is there before the hooks.
    there: BTreeSet<PathBuf>,
    /// The image's own, which knows nothing of the driver.
    cache: Vec<u8>,
}

impl Container {
    /// The SONAME links of the driver's libraries are mounts of the same files.
    pub fn new(bundle: &Path, files: &DriverFiles, gpus: u32) -> Result<Self> {
        let root = bundle.join("rootfs");
        let folder = root.join(FOLDER);
        for directory in [
            &folder,
            &root.join("usr/lib64"),
            &root.join("etc/ld.so.conf.d"),
            &root.join("dev"),
        ] {
            fs::create_dir_all(directory)?;
        }
        for link in ["lib", "lib64"] {
            symlink(format!("usr/{link}"), root.join(link))?;
        }
        fs::write(root.join("etc/debian_version"), "12.8\n")?;
        fs::write(
            root.join("etc/ld.so.conf"),
            "include /etc/ld.so.conf.d/*.conf\n",
        )?;
        let conf =
            "/usr/local/lib/x86_64-linux-gnu\n/lib/x86_64-linux-gnu\n/usr/lib/x86_64-linux-gnu\n";
        fs::write(root.join("etc/ld.so.conf.d/x86_64-linux-gnu.conf"), conf)?;
        let mut libraries = copy_libraries(&folder)?;
        let state = json!({ "ociVersion": "1.0.2", "id": "bench", "status": "creating", "pid": 1, "bundle": bundle }).to_string();
        fs::write(
            bundle.join("config.json"),
            json!({ "ociVersion": "1.0.2", "root": { "path": root } }).to_string(),
        )?;
        let input = nix::unistd::pipe()?;
        nix::unistd::write(&input.1, state.as_bytes())?;
        drop(input.1);
        kata_gpu_init::cdi::hooks::run(&["update-ldcache".to_string()], fs::File::from(input.0))
            .map_err(anyhow::Error::msg)?;
        let cache = fs::read(root.join(CACHE)).context("the image's own cache")?;
        for mount in files
            .mounts
            .iter()
            .filter(|m| m.container_path.starts_with(Path::new("/").join(FOLDER)))
        {
            let name = mount
                .container_path
                .file_name()
                .context("a library has a name")?;
            // SONAME as on the driver's side: set where a link of that name leads to the library.
            let soname = files
                .links
                .iter()
                .find(|l| l.file == mount.host_path)
                .and_then(|l| l.link.file_name()?.to_str());
            fs::write(folder.join(name), stand_in::library(soname, &["libc.so.6"]))?;
            libraries += 1;
        }
        for link in files
            .links
            .iter()
            .filter(|l| l.link.starts_with(Path::new("/").join(FOLDER)))
        {
            let (path, file) = (
                root.join(link.link.strip_prefix("/")?),
                root.join(link.file.strip_prefix("/")?),
            );
            fs::create_dir_all(path.parent().context("a link is in a directory")?)?;
            fs::hard_link(file, path)?;
        }
        for gpu in 0..gpus {
            let path = root.join(format!("dev/nvidia{gpu}"));
            let made = mknod(
                &path,
                SFlag::S_IFCHR,
                Mode::from_bits_truncate(0o666),
                makedev(MAJOR, gpu.into()),
            );
            made.with_context(|| format!("make {}: device nodes take privileges", path.display()))?;
        }
        let there = below(&root)?.into_iter().collect();
        Ok(Self {
            root,
            state,
            libraries,
            there,
            cache,
        })
    }

    /// Undoes what hooks have done.
    pub fn reset(&self) -> Result<()> {
        for path in below(&self.root)?
            .into_iter()
            .rev()
            .filter(|p| !self.there.contains(p))
        {
            let removed = if path.is_dir() && !path.is_symlink() {
                fs::remove_dir(&path)
            } else {
                fs::remove_file(&path)
            };
            removed.with_context(|| format!("remove {}", path.display()))?;
        }
        Ok(fs::write(self.root.join(CACHE), &self.cache)?)
    }
}

/// Copies libraries of this machine, and the links to them.
fn copy_libraries(folder: &Path) -> Result<usize> {
    let own = Path::new("/").join(FOLDER);
    let mut names: Vec<OsString> = fs::read_dir(&own)?
        .flatten()
        .map(|e| e.file_name())
        .collect();
    names.retain(|name| name.to_string_lossy().contains(".so"));
    names.sort();
    let is_file = |name: &OsString| fs::symlink_metadata(own.join(name)).is_ok_and(|m| m.is_file());
    let (files, links): (Vec<OsString>, Vec<OsString>) = names.into_iter().partition(is_file);
    let files: BTreeSet<OsString> = files.into_iter().take(LIBRARIES).collect();
    for name in &files {
        fs::copy(own.join(name), folder.join(name))?;
    }
    for name in links {
        if let Ok(target) = fs::read_link(own.join(&name))
            && files.contains(target.as_os_str())
        {
            symlink(target, folder.join(name))?;
        }
    }
    Ok(files.len())
}

/// Everything below a directory, parents first.
pub fn below(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let entry = entry?;
        all.push(entry.path());
        if entry.file_type()?.is_dir() {
            all.extend(below(&entry.path())?);
        }
    }
    Ok(all)
}

/// All regular files below a directory.
pub fn files_below(directory: &Path) -> Result<Vec<PathBuf>> {
    Ok(below(directory)?
        .into_iter()
        .filter(|path| fs::symlink_metadata(path).is_ok_and(|m| m.is_file()))
        .collect())
}
