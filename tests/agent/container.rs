//! Creating a container: devices are injected into its OCI spec, and its device nodes are made. No GPU is ever opened.

use super::cdi;
use super::config::{Config, Wanted};
use super::log;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use oci_spec::runtime::{LinuxDevice, LinuxDeviceType, Spec};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

const CONTAINERS: &str = "/run/test-agent";

/// Creates one container, and reports what it got.
pub fn create(wanted: &Wanted, config: &Config) {
    let asked: Vec<String> = wanted.devices.iter().map(|d| format!("nvidia.com/gpu={d}")).collect();
    let devices = asked.join(",");
    let mut spec = Spec::default();
    let mut failed_try = |number: u64, error: &str| {
        log::info("cdi try failed", &[("container", &wanted.name), ("try", &number.to_string()), ("error", error)]);
    };
    let injected =
        cdi::inject(&mut spec, cdi::DIRECTORY, &asked, config.cdi_timeout_s, config.fail_fast, &std::thread::sleep, &mut failed_try);
    let made = injected.and_then(|tries| nodes(&wanted.name, &spec).map(|nodes| (tries, nodes)).map_err(|e| (tries, e)));
    match made {
        Ok((tries, nodes)) => {
            log::info(
                "container created",
                &[("container", &wanted.name), ("devices", &devices), ("tries", &tries.to_string()), ("nodes", &nodes)],
            );
        }
        Err((tries, error)) => {
            log::error(
                "container failed",
                &[("container", &wanted.name), ("devices", &devices), ("tries", &tries.to_string()), ("error", &error)],
            );
        }
    }
}

/// Makes the nodes of a container under its own directory and describes them: `path major:minor mode,..`.
fn nodes(container: &str, spec: &Spec) -> Result<String, String> {
    let devices = spec.linux().as_ref().and_then(|l| l.devices().clone()).unwrap_or_default();
    let mut made = Vec::new();
    for device in devices {
        let mode = node(container, &device)?;
        made.push(format!("{} {}:{} {mode:o}", device.path().display(), device.major(), device.minor()));
    }
    made.sort();
    Ok(made.join(","))
}

/// Makes one node; gives its permission bits. Without a mode in the spec it is the guest node's, and none without a guest node.
fn node(container: &str, device: &LinuxDevice) -> Result<u32, String> {
    let kind = match device.typ() {
        LinuxDeviceType::C | LinuxDeviceType::U => SFlag::S_IFCHR,
        LinuxDeviceType::B => SFlag::S_IFBLK,
        LinuxDeviceType::P => SFlag::S_IFIFO,
        LinuxDeviceType::A => return Err(format!("{}: no type", device.path().display())),
    };
    let mode = device.file_mode().or_else(|| std::fs::metadata(device.path()).ok().map(|m| m.mode())).unwrap_or(0) & 0o7777;
    let path = Path::new(CONTAINERS).join(container).join(device.path().strip_prefix("/").unwrap_or(device.path()));
    let failed = |what: &str, error: &dyn std::fmt::Display| format!("{what} {}: {error}", path.display());
    let number = |n: i64| u64::try_from(n).map_err(|e| failed("number of", &e));
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(|e| failed("directory of", &e))?;
    }
    mknod(&path, kind, Mode::from_bits_truncate(mode), makedev(number(device.major())?, number(device.minor())?))
        .map_err(|e| failed("mknod", &e))?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).map_err(|e| failed("chmod", &e))?;
    Ok(mode)
}
