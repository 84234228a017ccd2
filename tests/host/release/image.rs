//! The container image before skopeo, and before the manifests that start it.

use super::{Checkout, printed, released, run};
use crate::{TempDir, bytes, project, text};
use serde_json::Value;
use std::path::Path;

fn json(path: &Path) -> Value {
    serde_json::from_slice(&bytes(path)).unwrap()
}

/// The layers of an archive, unpacked over each other into `root` of a folder; the image's
/// configuration. skopeo compares each sum and size.
fn unpack(archive: &Path, folder: &Path) -> Result<Value, String> {
    let from = format!("oci-archive:{}", archive.display());
    let output = run(
        "skopeo",
        &["--insecure-policy", "copy", "--quiet", &from, "dir:image"],
        folder,
    );
    if !output.status.success() {
        return Err(crate::stderr(&output));
    }
    let image = folder.join("image");
    let manifest = json(&image.join("manifest.json"));
    let path = |blob: &Value| image.join(blob["digest"].as_str().unwrap().replace("sha256:", ""));
    crate::make_dir(folder.join("root"));
    for layer in manifest["layers"].as_array().unwrap() {
        let layer = path(layer);
        printed(
            "tar",
            &["-xzpf", layer.to_str().unwrap(), "-C", "root"],
            folder,
        );
    }
    Ok(json(&path(&manifest["config"])))
}

/// The first word of each container's command in a manifest.
fn commands(manifest: &str) -> Vec<String> {
    let manifest: serde_yaml::Value =
        serde_yaml::from_str(&text(project().join(manifest))).unwrap();
    let pod = &manifest["spec"]["template"]["spec"];
    let lists = ["initContainers", "containers"].map(|key| pod[key].as_sequence());
    let containers = lists.into_iter().flatten().flatten();
    containers
        .map(|c| c["command"][0].as_str().unwrap().to_string())
        .collect()
}

fn are_tools_there() -> bool {
    let there = crate::export::program("skopeo").is_some();
    if !there {
        crate::skip("KATA_GPU_BUILT", "no skopeo: tests/setup installs it");
    }
    there
}

#[test]
fn the_image_holds_the_program_that_the_manifests_start() {
    let Some((checkout, release)) = released() else {
        return;
    };
    if !are_tools_there() {
        return;
    }
    let dir = TempDir::new("release-image");
    let archive = release.join("kata-gpu-boot.oci.tar");
    let config = unpack(&archive, &dir.0).unwrap();
    let program = bytes(release.join("kata-gpu-boot"));
    let entry = config["config"]["Entrypoint"][0].as_str().unwrap();
    assert_eq!(entry, "/usr/bin/kata-gpu-boot");
    let (collect, install) = (
        "src/collect/deploy/daemonset.yaml",
        "src/image/deploy/daemonset.yaml",
    );
    for command in [commands(collect), commands(install)].concat() {
        assert!(
            bytes(dir.0.join("root").join(&command[1..])) == program,
            "{command}"
        );
    }
    assert_eq!(crate::names(dir.0.join("root")), ["kata-gpu-boot", "usr"]);
    let label = &config["config"]["Labels"]["org.opencontainers.image.revision"];
    assert_eq!(*label, checkout.git("rev-parse HEAD"));
    // Each layer as it is before gzip: `diff_ids` are what an engine keeps it by.
    let layer = "tar -xOf \"$0\" \"$(tar -tf \"$0\" | grep \"$1\")\" | gzip -cd | sha256sum";
    let index = printed(
        "skopeo",
        &["inspect", &format!("oci-archive:{}", archive.display())],
        release,
    );
    let index: Value = serde_json::from_str(&index).unwrap();
    let digest = index["Layers"][0].as_str().unwrap().replace("sha256:", "");
    let sum = printed(
        "sh",
        &["-c", layer, archive.to_str().unwrap(), &digest],
        release,
    );
    let id = format!("sha256:{}", sum.split(' ').next().unwrap());
    assert_eq!(config["rootfs"]["diff_ids"], serde_json::json!([id]));
}

#[test]
fn the_installers_image_has_the_guest_at_its_root() {
    let Some((checkout, release)) = released() else {
        return;
    };
    if !are_tools_there() {
        return;
    }
    let dir = TempDir::new("release-installer");
    crate::write(dir.0.join("gpu.initrd"), "a guest");
    let archive = made(checkout, release, &dir.0, &["gpu.initrd"]);
    let config = unpack(&archive, &dir.0).unwrap();
    assert_eq!(
        crate::names(dir.0.join("root")),
        ["gpu.initrd", "kata-gpu-boot", "usr"]
    );
    assert_eq!(text(dir.0.join("root/gpu.initrd")), "a guest");
    assert_eq!(config["rootfs"]["diff_ids"].as_array().unwrap().len(), 2);
    let guest = text(project().join("src/image/deploy/kustomization.yaml"));
    assert!(guest.contains("GUEST=--initrd=/gpu.initrd"), "{guest}");
}

/// An image with a guest, made in that folder.
fn made(checkout: &Checkout, release: &Path, folder: &Path, guest: &[&str]) -> std::path::PathBuf {
    let archive = folder.join("image.oci.tar");
    let mut command = checkout.command("initrd/parts/oci");
    command
        .arg(release.join("kata-gpu-boot"))
        .arg(std::env::consts::ARCH)
        .arg(&archive);
    let output = command.args(guest).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    archive
}

#[test]
fn a_changed_byte_of_the_image_is_refused() {
    let Some((_, release)) = released() else {
        return;
    };
    if !are_tools_there() {
        return;
    }
    let dir = TempDir::new("release-bad-image");
    let mut archive = bytes(release.join("kata-gpu-boot.oci.tar"));
    // The entry point, in a blob that is not packed.
    let at = archive
        .windows(10)
        .position(|window| window == b"Entrypoint")
        .unwrap();
    archive[at + 14] ^= 1;
    crate::write(dir.0.join("bad.oci.tar"), archive);
    let error = unpack(&dir.0.join("bad.oci.tar"), &dir.0).unwrap_err();
    assert!(
        error.contains("digest") || error.contains("match"),
        "{error}"
    );
}
