//! `update-application-profile`: the driver's EGL and Vulkan show a container only the GPUs whose
//! nodes it has. Writes a profile for the driver, with a bit for each minor.

use super::container_root::{ContainerRoot, cannot, kind};
use super::edits::Edit;
use nix::fcntl::AtFlags;
use nix::sys::stat::{SFlag, fstatat, minor};
use std::io;
use std::path::Path;

/// Path where the driver reads profiles; the name is the incumbent's.
const PROFILE: &str = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf";
/// Highest minor: the mask has 64 bits.
const MAX_MINOR: u64 = 63;

/// Plans the profile; nothing for a container without GPUs.
pub fn plan(root: &ContainerRoot) -> io::Result<Vec<Edit>> {
    let dev = Path::new("/dev");
    let Some(directory) = root.directory(dev)? else {
        return Ok(Vec::new());
    };
    let mut mask = 0_u64;
    for name in directory.names().map_err(|e| cannot("list", dev, e))? {
        let digits = name.name.strip_prefix("nvidia").unwrap_or_default();
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            continue;
        }
        // Stat the node, never open it: an open initialises the GPU.
        let status = fstatat(&directory, name.name.as_str(), AtFlags::AT_SYMLINK_NOFOLLOW)?;
        let minor = minor(status.st_rdev);
        if kind(&status) == SFlag::S_IFCHR && minor <= MAX_MINOR {
            mask |= 1 << minor;
        }
    }
    if mask == 0 {
        return Ok(Vec::new());
    }
    Ok(vec![Edit::File {
        path: PROFILE.into(),
        content: profile(mask).into_bytes(),
        mode: 0o444,
    }])
}

/// Text of the profile: one setting, for all programs.
fn profile(mask: u64) -> String {
    let settings = serde_json::json!(["EGLVisibleDGPUDevices", "MASK"]).to_string();
    // The driver's own format: JSON, but numbers may be hexadecimal.
    let settings = settings.replace("\"MASK\"", &format!("{mask:#x}"));
    format!(
        "{{\"profiles\":[{{\"name\":\"_container_\",\"settings\":{settings}}}],\
         \"rules\":[{{\"pattern\":[],\"profile\":\"_container_\"}}]}}"
    )
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_mask_is_a_hexadecimal_number() {
        let text = super::profile(0b1010_0001);
        assert!(
            text.contains(r#""settings":["EGLVisibleDGPUDevices",0xa1]"#),
            "{text}"
        );
        serde_json::from_str::<serde_json::Value>(&text.replace("0xa1", "161")).unwrap();
    }
}
