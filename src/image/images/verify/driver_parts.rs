//! The driver's parts outside the kernel: firmware, libraries, and the list of them that a boot
//! uses. All must have the module's version.

use super::driver_root::DriverRoot;
use super::image_rules::*;
use super::modules::Driver;
use crate::images::driver_list;
use crate::images::newc::Kind;
use crate::images::unpacked_root::{Id, ROOT, Tree};
use kata_gpu_init::driver_files::is_version;
use kata_gpu_init::driver_files::manifest::Unusable;

/// Directories in which the kernel looks for firmware (drivers/base/firmware_loader); the
/// subdirectory of its own release comes first.
const FIRMWARE: [&str; 2] = ["/lib/firmware/updates", "/lib/firmware"];
/// Directories of firmware in a driver's own root, which cover the image's.
const OWN_FIRMWARE: [&str; 2] = ["lib/firmware", "firmware"];
/// Suffixes of firmware that only some kernels decompress.
const COMPRESSED_FIRMWARE: [&str; 2] = [".xz", ".zst"];
/// Name of the driver's directory in these directories.
const VENDOR: &str = "nvidia";

/// Versions of a library in the image, with their nodes. CUDA's libraries for older drivers are not
/// the driver's.
fn libraries(tree: &Tree, name: &str) -> Vec<(String, Id)> {
    let version = |id: &Id| {
        let version = std::str::from_utf8(tree.name(*id))
            .ok()?
            .strip_prefix(name)?
            .strip_prefix(".so.")?;
        (is_version(version) && !String::from_utf8_lossy(&tree.path(*id)).contains("/compat/"))
            .then(|| version.to_string())
    };
    tree.below(ROOT)
        .into_iter()
        .filter_map(|id| Some((version(&id)?, id)))
        .collect()
}

/// Directories in which the driver's firmware is looked for, in order.
fn firmware_directories(root: &DriverRoot) -> Vec<String> {
    let guests = FIRMWARE.iter().map(ToString::to_string);
    root.own(&OWN_FIRMWARE).chain(guests).collect()
}

/// Whether any part of the driver is in the image: a module, a library, firmware.
pub fn is_there(tree: &Tree, root: &DriverRoot) -> bool {
    let firmware = firmware_directories(root).iter().any(|directory| {
        tree.find(format!("{directory}/{VENDOR}"))
            .is_some_and(|id| tree.list(id).next().is_some())
    });
    let part = |id: Id| {
        let name = tree.name(id);
        let is_module = name.starts_with(b"nvidia") && name.windows(3).any(|w| w == b".ko");
        is_module
            || [&b"libcuda.so."[..], b"libnvidia-ml.so."]
                .iter()
                .any(|library| name.starts_with(library))
    };
    firmware || tree.below(ROOT).into_iter().any(part)
}

/// Checks the libraries of the user space.
pub fn user_space(
    tree: &Tree,
    driver: Option<&Driver>,
    findings: &mut Vec<Finding>,
) -> Option<String> {
    let (cuda, nvml) = (libraries(tree, "libcuda"), libraries(tree, "libnvidia-ml"));
    let module = driver.and_then(|driver| driver.version.as_deref());
    if cuda.is_empty() {
        findings.push(Finding::new(
            &NO_LIBCUDA,
            format!("libcuda.so.{}", module.unwrap_or("<version>")),
        ));
    }
    if nvml.is_empty() {
        findings.push(Finding::new(
            &NO_NVML,
            format!("libnvidia-ml.so.{}", module.unwrap_or("<version>")),
        ));
    }
    // Without a module, the first library gives the expected version.
    let wanted = module
        .map(str::to_string)
        .or_else(|| cuda.first().map(|(version, _)| version.clone()));
    for all in [&cuda, &nvml] {
        if let (Some(wanted), Some((version, id))) = (&wanted, all.first())
            && all.iter().all(|(version, _)| version != wanted)
        {
            let by = if module.is_some() {
                "the module is"
            } else {
                "libcuda is"
            };
            findings.push(
                Finding::new(&VERSION_DIFFERS, tree.path(*id))
                    .value(format!("{version}; {by} {wanted}")),
            );
        }
    }
    cuda.first()
        .or(nvml.first())
        .map(|(version, _)| version.clone())
}

/// Checks the firmware of the module's version.
pub fn firmware(
    tree: &Tree,
    root: &DriverRoot,
    driver: &Driver,
    releases: &[String],
    findings: &mut Vec<Finding>,
) {
    let all = firmware_directories(root);
    let find = |name: &str| {
        let own = all.iter().flat_map(|d| {
            releases
                .iter()
                .map(move |release| format!("{d}/{release}/{name}"))
        });
        let mut paths = own.chain(all.iter().map(|d| format!("{d}/{name}")));
        paths.find(|path| {
            tree.find(path).is_some_and(|id| {
                tree.kind(id) == Kind::File && tree.content(id).is_some_and(|c| c.length > 0)
            })
        })
    };
    if driver.firmware.is_empty() {
        // The module lists no firmware: accept GSP firmware of any name.
        let Some(version) = &driver.version else {
            return;
        };
        let is_gsp = |name: &[u8]| name.starts_with(b"gsp") && name.ends_with(b".bin");
        let directories = all
            .iter()
            .filter_map(|d| tree.find(format!("{d}/{VENDOR}/{version}")));
        if !directories
            .into_iter()
            .any(|directory| tree.list(directory).any(|(name, _)| is_gsp(name)))
        {
            findings.push(Finding::new(
                &NO_FIRMWARE,
                format!("{}/{VENDOR}/{version}/gsp_*.bin", FIRMWARE[1]),
            ));
        }
        return;
    }
    let missing: Vec<&String> = driver
        .firmware
        .iter()
        .filter(|name| find(name).is_none())
        .collect();
    let rule = if missing.len() == driver.firmware.len() {
        &NO_FIRMWARE
    } else {
        &FIRMWARE_PARTIAL
    };
    for name in missing {
        let packed = COMPRESSED_FIRMWARE
            .iter()
            .find(|ending| find(&format!("{name}{ending}")).is_some());
        let finding = Finding::new(rule, format!("{}/{name}", FIRMWARE[1]));
        findings.push(match packed {
            Some(ending) => finding.value(format!(
                "only with {ending}, which a Kata guest's kernel does not decompress"
            )),
            None => finding,
        });
    }
}

/// Checks that a boot would use the list of the driver's files.
pub fn listed(tree: &Tree, root: &DriverRoot, version: Option<&str>, findings: &mut Vec<Finding>) {
    let path = root.join(&driver_list::path());
    if tree.find(&path).is_none() {
        findings.push(Finding::new(&NO_MANIFEST, path));
        return;
    }
    match driver_list::load(tree, root.path(), version) {
        Ok(Ok(_)) => {}
        Ok(Err(Unusable::Absent { .. })) => findings.push(Finding::new(&NO_MANIFEST, path)),
        Ok(Err(why)) => findings.push(Finding::new(&MANIFEST, path).value(why.reason())),
        Err(error) => {
            findings.push(Finding::new(&MANIFEST, path).value(format!("not known: {error:#}")))
        }
    }
}
