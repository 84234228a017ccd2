//! A failure means that initrd/Dockerfile.fleet makes no image, or one in which the DaemonSet's
//! command is not there. Judge: buildah, with nothing but the files of the test.

use super::deployed;
use crate::collect::folder;
use crate::{make_dir, project, write};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

/// buildah with a storage of its own.
fn buildah(dir: &Path, words: &[&str]) -> Option<Output> {
    let mut command = Command::new("buildah");
    command.args(["--storage-driver", "vfs", "--root"]);
    command
        .arg(dir.join("storage"))
        .arg("--runroot")
        .arg(dir.join("run"));
    command.args(words).output().ok()
}

/// Builds a target of the folder `release`.
fn build(dir: &Path, target: &str) -> Output {
    let file = project().join("initrd/Dockerfile.fleet");
    let (file, release) = (file.to_str().unwrap(), dir.join("release"));
    let tag = &format!("localhost/{target}:x");
    let words = [
        "bud",
        "--isolation",
        "chroot",
        "--timestamp",
        "0",
        "-f",
        file,
        "-t",
        tag,
    ];
    let words = [&words[..], &["--target", target, release.to_str().unwrap()]].concat();
    buildah(dir, &words).unwrap()
}

/// An image's configuration, and its layers: digest, and lines as tar lists them.
fn image(dir: &Path, name: &str) -> (Value, Vec<(String, String)>) {
    let layout = dir.join(format!("oci-{name}"));
    let to = format!("oci:{}:x", layout.display());
    let pushed = buildah(dir, &["push", &format!("localhost/{name}:x"), &to]).unwrap();
    assert!(pushed.status.success(), "{}", crate::stderr(&pushed));
    let blob = |digest: &Value| {
        layout
            .join("blobs")
            .join(digest.as_str().unwrap().replace(':', "/"))
    };
    let read = |path: &Path| -> Value { serde_json::from_str(&crate::text(path)).unwrap() };
    let index = read(&layout.join("index.json"));
    let manifest = read(&blob(&index["manifests"][0]["digest"]));
    let config = read(&blob(&manifest["config"]["digest"]));
    let layers = manifest["layers"].as_array().unwrap().iter().map(|layer| {
        let listed = Command::new("tar")
            .arg("-tvzf")
            .arg(blob(&layer["digest"]))
            .output();
        (layer["digest"].to_string(), crate::stdout(&listed.unwrap()))
    });
    (config, layers.collect())
}

#[test]
fn the_images_of_both_daemonsets_hold_their_command_and_nothing_else() {
    let dir = folder();
    match buildah(&dir.0, &["info"]) {
        Some(output) if output.status.success() => {}
        Some(output) => return eprintln!("skipped: buildah: {}", crate::stderr(&output)),
        None => return eprintln!("skipped: buildah is missing: apt-get install buildah"),
    }
    let release = dir.0.join("release");
    make_dir(&release);
    let program = release.join("kata-gpu-boot");
    write(&program, "program");
    write(release.join("kata-gpu-init"), "is not in the images");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let built = build(&dir.0, "collector");
    assert!(built.status.success(), "{}", crate::stderr(&built));
    // Without a guest there is nothing to install.
    let without = build(&dir.0, "installer");
    assert!(!without.status.success(), "{}", crate::stdout(&without));
    write(release.join("gpu.image"), "guest");
    let built = build(&dir.0, "installer");
    assert!(built.status.success(), "{}", crate::stderr(&built));

    let of_installer = crate::text(project().join("src/image/deploy/daemonset.yaml"));
    for (target, manifest, files) in [
        (
            "collector",
            deployed("daemonset.yaml"),
            &["usr/bin/kata-gpu-boot"][..],
        ),
        (
            "installer",
            of_installer,
            &["usr/bin/kata-gpu-boot", "gpu.image"],
        ),
    ] {
        assert!(manifest.contains("/usr/bin/kata-gpu-boot"), "{target}");
        let (config, layers) = image(&dir.0, target);
        let lines = layers.iter().flat_map(|(_, lines)| lines.lines());
        let lines: Vec<&str> = lines.filter(|line| !line.ends_with('/')).collect();
        assert_eq!(lines.len(), files.len(), "{lines:?}");
        for file in files {
            let line = lines.iter().find(|line| line.ends_with(file)).unwrap();
            let mode = if file.starts_with("usr/bin") {
                "-rwxr-xr-x"
            } else {
                "-rw-r--r--"
            };
            assert!(line.contains(" 0/0 ") && line.starts_with(mode), "{line}");
        }
        assert_eq!(config["config"]["Entrypoint"][0], "/usr/bin/kata-gpu-boot");
        assert_eq!(config["config"]["Env"][0], "PATH=/usr/bin");
    }
    // Again, of files of another time.
    let first = image(&dir.0, "installer").1;
    std::fs::File::open(&program)
        .unwrap()
        .set_modified(std::time::UNIX_EPOCH)
        .unwrap();
    crate::remove(dir.0.join("oci-installer/index.json"));
    assert!(build(&dir.0, "installer").status.success());
    assert_eq!(image(&dir.0, "installer").1, first);
}
