//! Mounts of extensions: EROFS, read-only, and the driver's firmware at the kernel's search path.

use super::parameters::Name;
use crate::machine::mounts::parsed;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use std::fs;
use std::path::{Path, PathBuf};

/// Directory of all mounts, as kata-agent expects it.
pub const DIRECTORY: &str = "/run/kata-extensions";
/// Mount of the driver's extension.
pub const GPU: &str = "/run/kata-extensions/gpu";
/// Firmware paths: the kernel's search path, the extension's as well, and that of Google's COS.
const FIRMWARE: [&str; 2] = ["lib/firmware/nvidia", "firmware/nvidia"];

/// Mount of an extension.
pub fn target(name: &Name) -> PathBuf {
    Path::new(DIRECTORY).join(name.as_str())
}

/// Whether an extension is mounted, by the text of /proc/self/mounts.
pub fn is_mounted(mounts: &str, name: &Name) -> bool {
    let target = target(name);
    parsed(mounts).any(|[device, path, fs]| {
        device.starts_with("/dev/dm-") && Path::new(path) == target && fs == "erofs"
    })
}

/// Whether something is mounted on a path, by the text of /proc/self/mounts.
pub fn is_mount_point(mounts: &str, path: &Path) -> bool {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.into());
    parsed(mounts).any(|[_, target, _]| Path::new(target) == path)
}

/// Mounts a device. Programs may run from it: extensions ship the attestation agent and services.
pub fn erofs(name: &Name, node: &Path) -> Result<(), String> {
    let target = target(name);
    fs::create_dir_all(&target)
        .map_err(|e| format!("extension {name}: make {}: {e}", target.display()))?;
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some(node), &target, Some("erofs"), flags, None::<&str>).map_err(|errno| {
        let cure = match errno {
            Errno::ENODEV => "; the kernel has no EROFS: build it with CONFIG_EROFS_FS",
            Errno::EINVAL => {
                "; the data is no EROFS that this kernel knows, or a check has \
                failed: see the kernel's log"
            }
            _ => "",
        };
        // A directory without its mount would pass for the extension.
        let _unused = fs::remove_dir(&target);
        format!(
            "extension {name}: mount {} on {}: {errno}{cure}",
            node.display(),
            target.display()
        )
    })
}

/// Binds the firmware of the driver's root over the kernel's own directory. Without firmware in
/// that root nothing happens: the driver may not need any. Nor where `mounts`, the text of
/// /proc/self/mounts, has the bind.
pub fn bind_firmware(driver_root: &Path, mounts: &str) -> Result<(), String> {
    let to = Path::new("/").join(FIRMWARE[0]);
    let mut from = FIRMWARE.into_iter().map(|path| driver_root.join(path));
    let from = match from.find(|path| path.is_dir()) {
        Some(from) if !is_mount_point(mounts, &to) => from,
        _ => return Ok(()),
    };
    // An image that is only read has the directory; an initrd can make it.
    let _unused = fs::create_dir_all(&to);
    bind(&from, &to).map_err(|errno| {
        format!(
            "bind {} over {}: {errno}: put the empty directory into the image, the kernel loads \
                firmware from there",
            from.display(),
            to.display()
        )
    })
}

/// Binds a file or directory over another one.
pub fn bind(from: &Path, to: &Path) -> nix::Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_erofs_of_the_device_mapper_counts_as_the_extension() {
        let gpu = Name::parse("gpu").unwrap();
        assert!(is_mounted(
            "tmpfs /run tmpfs rw 0 0\n/dev/dm-0 /run/kata-extensions/gpu erofs ro,nosuid 0 0\n",
            &gpu
        ));
        for other in [
            "/dev/vdb1 /run/kata-extensions/gpu erofs ro 0 0",
            "/dev/dm-0 /run/kata-extensions/gpu2 erofs ro 0 0",
            "/dev/dm-0 /run/kata-extensions/gpu tmpfs rw 0 0",
            "",
        ] {
            assert!(!is_mounted(other, &gpu), "{other}");
        }
        let binds = "tmpfs / tmpfs rw 0 0\n/dev/dm-0 /missing/firmware erofs ro 0 0\n";
        assert!(
            is_mount_point(binds, Path::new("/missing/firmware"))
                && is_mount_point(binds, Path::new("/usr/.."))
        );
        assert!(
            !is_mount_point(binds, Path::new("/missing"))
                && !is_mount_point(binds, Path::new("/dev/dm-0"))
        );
    }
}
