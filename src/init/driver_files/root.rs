//! The root with this guest's driver: its user space, modules and firmware.

use super::manifest;
use super::tree::OPTIONS;
use crate::extensions::mount::GPU;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Root of the command line; unset: found.
static ASKED: OnceLock<PathBuf> = OnceLock::new();

/// Roots of which the first with a manifest counts: the image's own, then those of driver
/// containers, NixOS, Talos, Flatcar and Google's COS.
const KNOWN: [&str; 6] = [
    "/",
    "/run/nvidia/driver",
    "/run/opengl-driver",
    "/usr/local",
    "/opt/nvidia",
    "/home/kubernetes/bin/nvidia",
];

/// Whether others than the image write below a path: what the host shares, and processes' roots.
pub fn is_foreign(path: &Path) -> bool {
    ["/run/kata-containers", "/proc"]
        .iter()
        .any(|foreign| path.starts_with(foreign))
}

/// Sets the root that the command line has; before the first use of [`driver_root`]. Refuses one
/// whose links lead to what others write: kernel modules come from there.
pub fn ask_for(root: &Path) -> Result<(), String> {
    let leads = std::fs::canonicalize(root).unwrap_or_else(|_| root.into());
    if is_foreign(&leads) {
        return Err(format!(
            "the driver root {} is {}, which others than the image can write: give a directory of \
                the image ({OPTIONS})",
            root.display(),
            leads.display()
        ));
    }
    // Set already by an earlier bring-up of this process: there is none.
    let _unused = ASKED.set(root.into());
    Ok(())
}

/// Root of the driver: as asked, else the mount of the extension `gpu`, else a known root with a
/// manifest, else `/`.
pub fn driver_root() -> &'static Path {
    ASKED
        .get()
        .map_or_else(|| found(Path::new("/")), PathBuf::as_path)
}

fn found(root: &Path) -> &'static Path {
    let below = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
    if below(Path::new(GPU)).is_dir() {
        return Path::new(GPU);
    }
    known_root(|manifest| below(manifest).is_file())
}

/// The first known root with a manifest, else `/`. `is_file`: whether the guest's root has a file
/// at this absolute path.
pub fn known_root(is_file: impl Fn(&Path) -> bool) -> &'static Path {
    let list = Path::new(manifest::DIRECTORY).join(manifest::FILE);
    let list = list.strip_prefix("/").unwrap_or(&list);
    let with_manifest = |known: &&str| is_file(&Path::new(known).join(list));
    Path::new(KNOWN.into_iter().find(with_manifest).unwrap_or("/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn a_root_that_leads_to_what_others_write_is_refused() {
        let folder = temp_dir();
        let link = folder.path().join("driver");
        std::os::unix::fs::symlink("/proc/self", &link).unwrap();
        for root in [
            &*link,
            Path::new("/run/kata-containers/shared"),
            Path::new("/proc/1/root"),
        ] {
            let error = ask_for(root).unwrap_err();
            assert!(error.contains("others than the image"), "{error}");
        }
        assert_eq!(ASKED.get(), None);
    }

    #[test]
    fn the_extension_comes_first_then_a_known_root_with_a_manifest() {
        let folder = temp_dir();
        let root = folder.path();
        let make = |path: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        };
        let manifest = "usr/share/kata-gpu-init/driver-files.json";
        // A driver without a manifest is looked for where it is said to be.
        make("usr/local/lib/libcuda.so.580.95.05");
        assert_eq!(found(root), Path::new("/"));
        make(&format!("home/kubernetes/bin/nvidia/{manifest}"));
        assert_eq!(found(root), Path::new("/home/kubernetes/bin/nvidia"));
        make(manifest);
        assert_eq!(found(root), Path::new("/"));
        make("run/kata-extensions/gpu/bin/nvidia-smi");
        assert_eq!(found(root), Path::new("/run/kata-extensions/gpu"));
    }
}
