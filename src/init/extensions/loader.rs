//! Cache of the guest's own dynamic loader, with libraries of the driver's root: services and NVML
//! find them without an environment. Written here, without running `ldconfig`, from the base
//! image's cache and these libraries; bound over the base's, which is read-only.

use super::mount;
use crate::formats::elf;
use crate::formats::ld_so_cache;
use crate::formats::ld_so_cache::{Cache, Entry, Hwcap};
use crate::machine::files;
use kata_gpu_wire::arch::Arch;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Cache that the loader reads.
const CACHE: &str = "etc/ld.so.cache";
/// The new one, which the incumbent calls the same.
const NEW: &str = "run/ld.so.cache";
/// Most libraries of an extension; a driver has about a hundred.
const MAX_LIBRARIES: usize = 4096;
const GENERATOR: &str = concat!("kata-gpu-init ", env!("CARGO_PKG_VERSION"));

/// Whether the cache of this guest has the libraries, by the text of /proc/self/mounts.
pub fn is_added(mounts: &str) -> bool {
    mount::is_mount_point(mounts, &Path::new("/").join(CACHE))
}

/// Adds libraries to the cache of the guest below `root`.
pub fn add(root: &Path, libraries: Vec<PathBuf>) -> Result<(), String> {
    let (cache, new) = (root.join(CACHE), root.join(NEW));
    let base = match fs::read(&cache) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            // An initrd can make it; an image that is only read needs the file.
            File::create(&cache).map_err(|e| {
                format!(
                    "make {}: {e}: run ldconfig when the image is built",
                    cache.display()
                )
            })?;
            Vec::new()
        }
        Err(e) => return Err(format!("read {}: {e}", cache.display())),
    };
    let bytes =
        with_libraries(&base, libraries).map_err(|e| format!("{}: {e}", cache.display()))?;
    fs::write(&new, bytes).map_err(|e| format!("write {}: {e}", new.display()))?;
    mount::bind(&new, &cache)
        .map_err(|errno| format!("bind {} over {}: {errno}", new.display(), cache.display()))
}

/// The base image's cache, empty where it has none, with these libraries.
fn with_libraries(base: &[u8], libraries: Vec<PathBuf>) -> Result<Vec<u8>, String> {
    let base = if base.is_empty() {
        Cache::default()
    } else {
        ld_so_cache::read(base)?
    };
    // Entries of old processor platforms can only be read: the loaders of Kata's images know none.
    let mut entries: Vec<Entry> = base
        .entries
        .into_iter()
        .filter(|entry| !matches!(entry.hwcap, Hwcap::Platform(_)))
        .collect();
    entries.extend(named(libraries));
    ld_so_cache::write(&entries, GENERATOR, Arch::OURS)
}

/// The directory of libraries, which mirrors that of the image without extensions.
fn directory(extension: &Path) -> PathBuf {
    extension.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH))
}

/// Files of an extension that may be libraries.
pub fn libraries(extension: &Path) -> Result<Vec<PathBuf>, String> {
    let directory = directory(extension);
    let paths = fs::read_dir(&directory).and_then(|entries| {
        let entries = entries.take(MAX_LIBRARIES);
        entries.map(|entry| entry.map(|e| e.path())).collect()
    });
    paths.map_err(|e| format!("read {}: {e}", directory.display()))
}

/// An entry for each SONAME of these files.
fn named(libraries: Vec<PathBuf>) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for path in libraries {
        if !path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().contains(".so"))
        {
            continue;
        }
        // A directory, a linker script or a damaged file is no library for the loader either.
        let Some(library) = files::open(&path)
            .ok()
            .and_then(|file| elf::identity(&file).ok())
        else {
            continue;
        };
        // A library without a SONAME counts by its file's name, as in ldconfig.
        let file = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        let name = library.soname.clone().or(file).filter(|_| library.loadable);
        let (Some(name), Some(flags)) = (name, ld_so_cache::flags(Arch::OURS, &library)) else {
            continue;
        };
        if entries
            .iter()
            .any(|known| known.name == name && known.flags == flags)
        {
            continue;
        }
        // Use the link with that name if the image has it.
        let link = path.with_file_name(&name);
        let path = if link.exists() { link } else { path };
        entries.push(Entry {
            name,
            path: path.to_string_lossy().into_owned(),
            flags,
            hwcap: Hwcap::Any,
        });
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::elf_stand_in as stand_in;
    use kata_gpu_test_support::temp_dir;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_cache_has_the_libraries_of_base_and_extension_by_soname() {
        let folder = temp_dir();
        let extension = folder.path();
        let folder = directory(extension);
        fs::create_dir_all(folder.join("sub.so")).unwrap();
        fs::write(
            folder.join("libcuda.so.550.1"),
            stand_in::library(Some("libcuda.so.1"), &[]),
        )
        .unwrap();
        symlink("libcuda.so.550.1", folder.join("libcuda.so.1")).unwrap();
        fs::write(
            folder.join("libnvidia-ml.so.550.1"),
            stand_in::library(Some("libnvidia-ml.so.1"), &[]),
        )
        .unwrap();
        fs::write(folder.join("libplain.so"), stand_in::library(None, &[])).unwrap();
        fs::write(folder.join("libbroken.so"), "no ELF").unwrap();
        fs::write(folder.join("README"), "").unwrap();
        let libc = Entry {
            name: "libc.so.6".into(),
            path: "/lib/libc.so.6".into(),
            flags: 0x303,
            hwcap: Hwcap::Any,
        };
        let base = ld_so_cache::write(std::slice::from_ref(&libc), "x", Arch::OURS).unwrap();

        let names = |bytes: &[u8]| -> Vec<(String, String)> {
            let entries = ld_so_cache::read(bytes).unwrap().entries;
            entries
                .into_iter()
                .map(|e| (e.name, e.path.replace(folder.to_str().unwrap(), "")))
                .collect()
        };
        let pair = |name: &str, path: &str| (name.to_string(), path.to_string());
        // In the loader's order; by the link where there is one.
        let plain = pair("libplain.so", "/libplain.so");
        let own = [
            plain,
            pair("libnvidia-ml.so.1", "/libnvidia-ml.so.550.1"),
            pair("libcuda.so.1", "/libcuda.so.1"),
        ];
        assert_eq!(
            names(&with_libraries(&base, libraries(extension).unwrap()).unwrap()),
            [&own[..], &[pair("libc.so.6", "/lib/libc.so.6")]].concat()
        );
        let all = libraries(extension).unwrap();
        assert_eq!(names(&with_libraries(&[], all).unwrap()), own);
        assert!(with_libraries(b"damaged", Vec::new()).is_err());
        fs::remove_dir_all(extension).unwrap();
        assert!(libraries(extension).unwrap_err().contains("No such file"));
    }
}
