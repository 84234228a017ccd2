//! A failure means that `kata-gpu-init cdi generate` gives a container other edits than the
//! incumbent's spec, writes a file in part, or hides a missing node or library.

use super::check::container;
use crate::{TempDir, make_dir, project, remove, stderr, tree, write};
use kata_gpu_cdi_check::check::check;
use kata_gpu_cdi_check::spec_files;
use kata_gpu_init::cdi::devices::Places;
use kata_gpu_init::cdi::schema::Spec;
use kata_gpu_init::cdi::spec::{Options, generate};
use kata_gpu_init::config::{Hooks, Naming};
use kata_gpu_init::driver_files::{Roots, scan};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const REFERENCE: &str = "kata-8gpu-550";

/// The reference root.
pub fn root(test: &str) -> (TempDir, PathBuf) {
    let folder = TempDir::new(&format!("cdi-generate-{test}"));
    let root = folder.0.join("root");
    make_dir(&root);
    tree::build(&root, &tree::description(REFERENCE));
    (folder, root)
}

fn reference() -> (Value, usize) {
    let path = project()
        .join("tests/fixtures/cdi")
        .join(REFERENCE)
        .with_extension("json");
    let bytes = crate::bytes(path);
    (serde_json::from_slice(&bytes).unwrap(), bytes.len())
}

pub fn ours(root: &Path, options: &Options) -> (Spec, Vec<String>) {
    let found = Places {
        root: root.into(),
        dev_root: root.into(),
    }
    .gpus()
    .unwrap();
    let files = scan(
        &Roots {
            root: root.into(),
            ..Roots::default()
        },
        None,
    )
    .unwrap();
    (
        generate(&found.gpus, &found.common, Some(&files), options),
        found.problems,
    )
}

pub fn value(spec: &Spec) -> Value {
    crate::cdi::schema::fits(&spec.to_json());
    serde_json::from_slice(&spec.to_json()).unwrap()
}

pub fn list<'a>(value: &'a Value, key: &str) -> Vec<&'a Value> {
    value[key]
        .as_array()
        .map(|all| all.iter().collect())
        .unwrap_or_default()
}

/// A spec's edits, one line each; links are lines of their own, whether a hook makes them or a
/// mount is them.
fn lines(spec: &Value) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    let text = |value: &Value| value.as_str().unwrap().to_string();
    let mut edits = |of: &str, edits: &Value| {
        for env in list(edits, "env") {
            lines.insert(format!("{of}: env {}", text(env)));
        }
        for node in list(edits, "deviceNodes") {
            let number = |key: &str| node[key].as_u64().unwrap_or(0);
            let (major, minor, mode) = (number("major"), number("minor"), number("fileMode"));
            lines.insert(format!(
                "{of}: node {} {major}:{minor} {mode:o} {}",
                text(&node["path"]),
                node["permissions"]
            ));
        }
        for mount in list(edits, "mounts") {
            let (host, container) = (text(&mount["hostPath"]), text(&mount["containerPath"]));
            let options: Vec<_> = list(mount, "options").into_iter().map(text).collect();
            // Files are mounted where they are; what has another name is a link.
            let name = |path: &str| path.rsplit('/').next().unwrap().to_string();
            if name(&host) == name(&container) {
                lines.insert(format!("{of}: mount {container} {}", options.join(",")));
            } else {
                lines.insert(format!("{of}: link {container}"));
            }
        }
        for hook in list(edits, "hooks") {
            let args: Vec<_> = list(hook, "args").into_iter().map(text).collect();
            for pair in args.windows(2).filter(|pair| pair[0] == "--link") {
                let (_, link) = pair[1].split_once("::").unwrap();
                lines.insert(format!("{of}: link {link}"));
            }
            let version = args.iter().find(|a| a.contains("version"));
            let others: Vec<_> = args[1..2]
                .iter()
                .chain(version)
                .map(String::as_str)
                .collect();
            let (name, others) = (text(&hook["hookName"]), others.join(" "));
            lines.insert(format!("{of}: hook {name} {others}"));
        }
    };
    edits("every", &spec["containerEdits"]);
    for device in list(spec, "devices") {
        edits(device["name"].as_str().unwrap(), &device["containerEdits"]);
    }
    lines
}

/// Differences from the incumbent's spec for the reference root, with reasons.
const DIFFERENCES: &[(&str, &str)] = &[
    (
        "theirs: every: hook createContainer create-symlinks",
        "links are mounts of their file",
    ),
    (
        "theirs: every: hook createContainer enable-cuda-compat --host-driver-version=550.163.01",
        "in our one hook",
    ),
    (
        "theirs: every: hook createContainer update-ldcache",
        "in our one hook",
    ),
    (
        "theirs: every: hook createContainer disable-device-node-modification",
        "in our one hook",
    ),
    (
        "theirs: every: hook createContainer update-application-profile",
        "in our one hook",
    ),
    (
        "ours: every: hook createContainer prepare --host-driver-version=550.163.01",
        "our one hook",
    ),
];

fn difference(ours: &BTreeSet<String>, theirs: &BTreeSet<String>) -> BTreeSet<String> {
    let only = |name: &str, a: &BTreeSet<String>, b: &BTreeSet<String>| {
        a.difference(b)
            .map(|l| format!("{name}: {l}"))
            .collect::<Vec<_>>()
    };
    only("ours", ours, theirs)
        .into_iter()
        .chain(only("theirs", theirs, ours))
        .collect()
}

#[test]
fn the_reference_root_gives_the_incumbents_edits() {
    let (_folder, root) = root("reference");
    let options = Options {
        namings: vec![Naming::Index, Naming::Uuid],
        ..Options::default()
    };
    let (spec, problems) = ours(&root, &options);
    assert!(problems.is_empty(), "{problems:?}");
    let expected: BTreeSet<String> = DIFFERENCES
        .iter()
        .map(|(line, _)| (*line).to_string())
        .collect();
    let ((theirs, bytes), whole) = (reference(), lines(&value(&spec)));
    assert_eq!(difference(&whole, &lines(&theirs)), expected);
    // At most half as large.
    assert!(
        2 * spec.to_json().len() <= bytes,
        "theirs has {bytes} bytes"
    );
    // Negative control: what is missing in an array of these edits is seen.
    for pointer in [
        "/devices/0/containerEdits/deviceNodes",
        "/containerEdits/mounts",
        "/containerEdits/env",
    ] {
        let mut part = value(&spec);
        let edits = part.pointer_mut(pointer).unwrap();
        edits.as_array_mut().unwrap().pop().unwrap();
        assert_eq!(whole.difference(&lines(&part)).count(), 1, "{pointer}");
    }
}

/// Whether the guest's init is there to be run.
pub fn is_built() -> bool {
    crate::are_built(&[crate::guests_init()], "cdi")
}

/// Runs the guest's init.
pub fn run(root: &Path, words: &[&str]) -> Output {
    Command::new(crate::guests_init())
        .arg("cdi")
        .args(words)
        .arg("--root")
        .arg(root)
        .output()
        .unwrap()
}

#[test]
fn a_missing_node_drops_its_gpu_and_a_missing_uvm_is_said() {
    if !is_built() {
        return;
    }
    let (_folder, root) = root("missing");
    let whole = run(&root, &["generate"]);
    assert!(
        whole.status.success() && whole.stderr.is_empty(),
        "{whole:?}"
    );
    remove(root.join("dev/nvidia3"));
    remove(root.join("dev/nvidia-uvm"));
    let part = run(&root, &["generate"]);
    let said = stderr(&part);
    assert_eq!(part.status.code(), Some(3), "{said}");
    assert!(
        said.contains("GPU 3 (0000:4b:00.0) is left out: ")
            && said.contains("/dev/nvidia3 is missing: make it (nvidia-modprobe -c 3)"),
        "{said}"
    );
    assert!(
        said.contains("/dev/nvidia-uvm is missing: no CUDA program will start"),
        "{said}"
    );
    let spec: Value = serde_json::from_slice(&part.stdout).unwrap();
    let names: Vec<_> = list(&spec, "devices")
        .iter()
        .map(|d| d["name"].clone())
        .collect();
    // The others keep their names.
    assert_eq!(names, ["0", "1", "2", "4", "5", "6", "7", "all"]);
}

#[test]
fn an_expected_program_that_is_missing_is_a_note_and_no_omission() {
    if !is_built() {
        return;
    }
    let (_folder, root) = root("note");
    remove(root.join("usr/bin/nvidia-smi"));
    for command in ["generate", "manifest"] {
        let part = run(&root, &[command]);
        assert_eq!(
            (part.status.code(), stderr(&part).as_str()),
            (
                Some(0),
                "kata-gpu-init: note: nvidia-smi is nowhere below the driver root /: containers \
                get none\n"
            ),
            "{command}"
        );
    }
}

#[test]
fn without_the_drivers_libraries_there_is_a_cure_and_no_spec() {
    if !is_built() {
        return;
    }
    let (_folder, root) = root("none");
    let fails = |words: &[&str], with: &str| {
        let output = run(&root, words);
        let said = stderr(&output);
        assert!(
            output.status.code() == Some(1)
                && output.stdout.is_empty()
                && said.contains(with)
                && said.lines().count() == 1,
            "{with}: {said}"
        );
    };
    fails(
        &["generate", "--driver-version", "560.35.03"],
        "put the libraries of 560.35.03 into the image",
    );
    fails(&["generate", "--mode", "gdrcopy"], "load the module gdrdrv");
    let below_a_file = "/proc/self/comm/spec.json";
    fails(&["generate", "--output", below_a_file], below_a_file);
    fails(
        &["generate", "--driver-root", "/etc"],
        "give the root that it lies in (gpuinit.driver-root=DIR, or --driver-root DIR)",
    );
    std::fs::remove_dir_all(root.join("proc/driver/nvidia")).unwrap();
    fails(&["generate"], "load the driver's module nvidia first");
    assert_eq!(
        run(&root, &["generate", "--mode", "all"]).status.code(),
        Some(2)
    );
}

#[test]
fn what_is_no_file_is_written_to_and_not_replaced() {
    if !is_built() {
        return;
    }
    use std::io::Read;
    use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
    let (folder, root) = root("pipe");
    let pipe = folder.0.join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    // Open before there is a writer, so that nobody waits for nobody.
    let mut reader = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(&pipe)
        .unwrap();
    let output = run(&root, &["generate", "--output", pipe.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    assert!(
        pipe.symlink_metadata().unwrap().file_type().is_fifo(),
        "the pipe was replaced"
    );
    let mut text = Vec::new();
    reader.read_to_end(&mut text).unwrap();
    assert_eq!(text, run(&root, &["generate"]).stdout);
    let (target, link) = (folder.0.join("target"), folder.0.join("link"));
    write(&target, "before");
    crate::link(&target, &link);
    assert!(
        run(&root, &["generate", "--output", link.to_str().unwrap()])
            .status
            .success()
    );
    assert!(
        link.is_symlink() && crate::bytes(&target) == text,
        "/dev/stdout would be gone"
    );
}

#[test]
fn yaml_and_json_say_the_same_and_a_file_is_replaced_whole() {
    if !is_built() {
        return;
    }
    let (folder, root) = root("yaml");
    let file = folder.0.join("nvidia.yaml");
    write(&file, "old");
    let output = run(
        &root,
        &[
            "generate",
            "--format=yaml",
            "--output",
            file.to_str().unwrap(),
        ],
    );
    assert!(
        output.status.success() && output.stdout.is_empty(),
        "{output:?}"
    );
    let left = crate::names(&folder.0);
    assert_eq!(
        left,
        ["nvidia.yaml", "root"],
        "something was left next to the file"
    );
    let text = crate::text(&file);
    assert!(
        text.starts_with("cdiVersion: \"0.5.0\"\n") && text.contains("\n  - containerEdits:\n"),
        "{text}"
    );
    let json: Value = serde_json::from_slice(&run(&root, &["generate"]).stdout).unwrap();
    // The crate that agents read it with is the judge of both, and so is the schema.
    crate::cdi::schema::fits(text.as_bytes());
    let read = |path: &Path| {
        container_device_interface_1::spec::read_spec(&path.to_path_buf(), 0).unwrap()
    };
    let other = folder.0.join("nvidia.json");
    write(&other, serde_json::to_vec(&json).unwrap());
    let (yaml, json) = (read(&file), read(&other));
    assert_eq!(
        serde_json::to_value(&yaml.cdi_spec).unwrap(),
        serde_json::to_value(&json.cdi_spec).unwrap()
    );
}

pub fn character_device(root: &Path, path: &str, major: u64, minor: u64) {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    let path = root.join(path);
    make_dir(path.parent().unwrap());
    mknod(
        &path,
        SFlag::S_IFCHR,
        Mode::from_bits_truncate(0o666),
        makedev(major, minor),
    )
    .unwrap();
}

/// Numbers of nodes, cgroup rules, mounts, variables and hooks that a container gets of each
/// device, equal for both agents.
pub fn judged(path: &Path) -> Vec<(String, [usize; 5])> {
    crate::cdi::schema::fits(&crate::bytes(path));
    let report = check(&spec_files::read(path).unwrap(), &[]).unwrap();
    assert!(!report.has_errors(), "{report:#?}");
    let counts = report
        .asked
        .iter()
        .map(|asked| (asked.devices.concat(), container(asked).counts()));
    counts.collect()
}

#[test]
fn both_agents_give_containers_what_the_spec_says() {
    if !is_built() {
        return;
    }
    let (folder, root) = root("agents");
    let file = folder.0.join("spec.json");
    // Files and sockets, and each of the 11 links as a mount.
    for (hooks, mounts, count) in [(Hooks::One, 16 + 11, 1), (Hooks::None, 16 + 11, 0)] {
        let options = Options {
            namings: vec![Naming::Index, Naming::Uuid, Naming::TypeIndex],
            hooks,
            ..Options::default()
        };
        write(&file, ours(&root, &options).0.to_json());
        let judged = judged(&file);
        assert_eq!(judged.len(), 3 * 8 + 1);
        for (device, counts) in judged {
            let nodes = 3 + if device.ends_with("=all") { 8 } else { 1 };
            assert_eq!(
                counts,
                [nodes, nodes, mounts, 2, count],
                "{device} with {hooks:?}"
            );
        }
    }
    write(
        &file,
        run(&root, &["generate", "--mode", "management"]).stdout,
    );
    assert_eq!(judged(&file).len(), 1);
}
