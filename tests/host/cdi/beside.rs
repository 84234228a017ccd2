//! Specs of what is besides plain GPUs, and of every odd root: each before both agents' crates and
//! the schema.

use crate::cdi::generate::{character_device, judged, list, ours, root, run, value};
use crate::{TempDir, project, tree};
use kata_gpu_init::cdi::devices::{OTHERS, Places};
use kata_gpu_init::cdi::schema::Edits;
use kata_gpu_init::cdi::spec::{Device, Entry, Options, Ready, generate};
use kata_gpu_init::config::Hooks;
use kata_gpu_init::driver_files::{Roots, scan};
use kata_gpu_init::gpu::device_nodes::Node;
use serde_json::Value;

#[test]
fn mig_instances_and_displays_are_found_with_their_nodes() {
    let (folder, root) = root("mig");
    for path in ["gi1/ci0", "gi2/ci0", "gi2/ci1"] {
        std::fs::create_dir_all(
            root.join("proc/driver/nvidia/capabilities/gpu0/mig")
                .join(path),
        )
        .unwrap();
    }
    std::fs::create_dir_all(root.join("proc/driver/nvidia-caps")).unwrap();
    let minors = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access \
        13\ngpu0/gi2/access 21\ngpu0/gi2/ci0/access 22\ngpu0/gi2/ci1/access 23\n";
    std::fs::write(root.join("proc/driver/nvidia-caps/mig-minors"), minors).unwrap();
    for minor in [12, 13, 21, 22, 23] {
        character_device(
            &root,
            &format!("dev/nvidia-caps/nvidia-cap{minor}"),
            235,
            minor,
        );
    }
    for name in ["card1", "renderD128", "by-path"] {
        std::fs::create_dir_all(root.join("sys/bus/pci/devices/0000:1b:00.0/drm").join(name))
            .unwrap();
    }
    character_device(&root, "dev/dri/card1", 226, 1);
    character_device(&root, "dev/dri/renderD128", 226, 128);
    let spec = value(&ours(&root, &Options::default()).0);
    let nodes = |name: &str| -> Vec<String> {
        let device = list(&spec, "devices")
            .into_iter()
            .find(|d| d["name"] == name)
            .unwrap_or_else(|| panic!("no device {name}"));
        list(&device["containerEdits"], "deviceNodes")
            .iter()
            .map(|n| n["path"].as_str().unwrap().to_string())
            .collect()
    };
    assert_eq!(
        nodes("0:1"),
        [
            "/dev/nvidia0",
            "/dev/nvidia-caps/nvidia-cap21",
            "/dev/nvidia-caps/nvidia-cap22"
        ]
    );
    assert_eq!(
        nodes("0:2"),
        [
            "/dev/nvidia0",
            "/dev/nvidia-caps/nvidia-cap21",
            "/dev/nvidia-caps/nvidia-cap23"
        ]
    );
    assert_eq!(
        nodes("0"),
        ["/dev/nvidia0"]
            .into_iter()
            .map(str::to_string)
            .chain([12, 13, 21, 22, 23].map(|n| format!("/dev/nvidia-caps/nvidia-cap{n}")))
            .collect::<Vec<_>>()
    );
    assert_eq!(
        nodes("1"),
        ["/dev/nvidia1", "/dev/dri/card1", "/dev/dri/renderD128"]
    );
    // The links of a display, as udev would have made them: by a hook of that GPU's alone, in what
    // both agents give a container.
    let hooks = |name: &str| {
        list(&spec, "devices")
            .into_iter()
            .find(|d| d["name"] == name)
            .map(|d| d["containerEdits"]["hooks"].clone())
            .unwrap()
    };
    assert!(hooks("0").is_null() && hooks("0:0").is_null());
    let hook = hooks("1");
    let args: Vec<&str> = hook[0]["args"]
        .as_array()
        .unwrap()
        .iter()
        .map(|a| a.as_str().unwrap())
        .collect();
    let links = [
        "../card1::/dev/dri/by-path/pci-0000:1b:00.0-card",
        "../renderD128::/dev/dri/by-path/pci-0000:1b:00.0-render",
    ];
    assert_eq!(
        args,
        [
            "nvidia-cdi-hook",
            "create-symlinks",
            "--link",
            links[0],
            "--link",
            links[1]
        ]
    );
    let file = folder.0.join("mig.json");
    std::fs::write(&file, serde_json::to_vec(&spec).unwrap()).unwrap();
    let all = judged(&file);
    assert_eq!(all.len(), 8 + 3 + 1);
    let of = |name: &str| {
        all.iter()
            .find(|(device, _)| device == &format!("nvidia.com/gpu={name}"))
            .unwrap()
            .1
    };
    // Nodes with three for everybody, rules, hooks.
    assert_eq!(
        ["0:1", "0", "1", "2"].map(|n| (of(n)[0], of(n)[1], of(n)[4])),
        [(6, 6, 1), (9, 9, 1), (6, 6, 2), (4, 4, 1)]
    );
    // A display without its node is said, and its GPU stays.
    std::fs::remove_file(root.join("dev/dri/renderD128")).unwrap();
    let (part, problems) = ours(&root, &Options::default());
    assert!(
        problems.len() == 1
            && problems[0].contains("/dev/dri/renderD128 of GPU 0000:1b:00.0 is missing"),
        "{problems:?}"
    );
    assert!(
        value(&part).to_string().contains("/dev/dri/card1")
            && !value(&part).to_string().contains("renderD128")
    );
    // One that cannot be made whole takes its GPU with it, and says why.
    std::fs::remove_file(root.join("dev/nvidia-caps/nvidia-cap23")).unwrap();
    let (spec, problems) = ours(&root, &Options::default());
    assert!(
        problems.len() == 2
            && problems[0].contains(
                "nvidia-cap23 is missing: make it (nvidia-modprobe -f gpu0/gi2/ci1/access)"
            ),
        "{problems:?}"
    );
    assert!(
        !list(&value(&spec), "devices")
            .iter()
            .any(|d| d["name"] == "0")
    );
    // A folder that cannot be listed is an error, and not the same as an empty one.
    let drm = root.join("sys/bus/pci/devices/0000:ca:00.0/drm");
    std::fs::write(&drm, "").unwrap();
    let (_, problems) = ours(&root, &Options::default());
    assert!(
        problems.len() == 3
            && problems[2].contains("GPU 6")
            && problems[2].contains(drm.to_str().unwrap()),
        "{problems:?}"
    );
}

#[test]
fn the_other_modes_find_their_devices() {
    let (folder, root) = root("modes");
    let devices = [
        ("nvidia-fs0", "gds", "nvidia.com/gds"),
        ("infiniband/uverbs0", "mofed", "nvidia.com/mofed"),
        ("nvidia-nvswitchctl", "nvswitch", "nvidia.com/nvswitch"),
        ("gdrdrv", "gdrcopy", "nvidia.com/gdrcopy"),
        (
            "nvidia-caps-imex-channels/channel7",
            "imex",
            "nvidia.com/imex-channel",
        ),
    ];
    let places = Places {
        root: root.clone(),
        dev_root: root.clone(),
    };
    for (number, (path, mode, kind)) in devices.into_iter().enumerate() {
        let other = OTHERS.iter().find(|o| o.mode == mode).unwrap();
        assert!(
            other.spec(&places, Edits::default()).is_err(),
            "{mode}: found before it was there"
        );
        character_device(&root, &format!("dev/{path}"), 240 + number as u64, 7);
        let spec = value(&other.spec(&places, Edits::default()).unwrap());
        let names: Vec<&str> = list(&spec, "devices")
            .iter()
            .map(|d| d["name"].as_str().unwrap())
            .collect();
        assert_eq!(
            (spec["kind"].as_str().unwrap(), names),
            (
                kind,
                if mode == "imex" {
                    vec!["7", "all"]
                } else {
                    vec!["all"]
                }
            )
        );
        assert_eq!(
            spec["devices"][0]["containerEdits"]["deviceNodes"][0]["path"],
            format!("/dev/{path}")
        );
        let file = folder.0.join(format!("{mode}.json"));
        std::fs::write(&file, serde_json::to_vec(&spec).unwrap()).unwrap();
        assert!(
            judged(&file)
                .iter()
                .all(|(_, counts)| *counts == [1, 1, 0, 0, 0]),
            "{mode}: {:?}",
            judged(&file)
        );
    }
    let management = run(&root, &["generate", "--mode", "management"]);
    let spec: Value = serde_json::from_slice(&management.stdout).unwrap();
    assert_eq!(spec["kind"], "management.nvidia.com/gpu");
    let nodes = list(&spec["devices"][0]["containerEdits"], "deviceNodes").len();
    // 8 GPUs, control, two of uvm, two capabilities, a switch's, a channel.
    assert_eq!(
        (nodes, list(&spec["containerEdits"], "mounts").len() > 16),
        (8 + 1 + 2 + 2 + 1 + 1, true)
    );
}

#[test]
fn nodes_below_another_dev_root_have_the_runtimes_paths() {
    let (folder, root) = root("dev-root");
    std::fs::create_dir(root.join("devices")).unwrap();
    std::fs::rename(root.join("dev"), root.join("devices/dev")).unwrap();
    std::fs::create_dir(root.join("dev")).unwrap();
    let none = run(&root, &["generate"]);
    // Every GPU is listed by the driver, and no node is where it should be.
    let said = String::from_utf8(none.stderr).unwrap();
    assert!(
        none.status.code() == Some(3) && said.matches("is left out").count() == 8,
        "{said}"
    );
    let output = run(
        &root,
        &[
            "generate",
            "--dev-root",
            root.join("devices").to_str().unwrap(),
        ],
    );
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let spec: Value = serde_json::from_slice(&output.stdout).unwrap();
    let node = &spec["devices"][3]["containerEdits"]["deviceNodes"][0];
    assert_eq!(
        (node["path"].as_str(), node["hostPath"].as_str()),
        (Some("/dev/nvidia3"), Some("/devices/dev/nvidia3"))
    );
    let file = folder.0.join("spec.json");
    std::fs::write(&file, &output.stdout).unwrap();
    assert_eq!(judged(&file).len(), 9);
}

#[test]
fn every_odd_root_gives_a_spec_that_both_agents_take_or_none() {
    let gpu = Node {
        path: "/dev/nvidia0".into(),
        major: 195,
        minor: 0,
        mode: 0o666,
        gid: 0,
    };
    let devices = [Device {
        index: 0,
        address: "0000:1b:00.0".parse().unwrap(),
        entry: Entry::Ready(Ready {
            nodes: vec![gpu],
            ..Ready::default()
        }),
    }];
    let (mut taken, mut refused) = (Vec::new(), Vec::new());
    for file in std::fs::read_dir(project().join("tests/fixtures/cdi/roots")).unwrap() {
        let name = file
            .unwrap()
            .path()
            .file_stem()
            .unwrap()
            .to_str()
            .unwrap()
            .to_string();
        let folder = TempDir::new(&format!("cdi-odd-{name}"));
        let root = folder.0.join("root");
        std::fs::create_dir(&root).unwrap();
        tree::build(&root, &tree::description(&format!("roots/{name}")));
        let (driver_root, dev_root) = match name.as_str() {
            "flat-lib" => ("/home/driver", "/"),
            "split-driver-root" => ("/run/nvidia/driver", "/devices"),
            "extension-disk" => ("/run/kata-extensions/gpu", "/"),
            _ => ("/", "/"),
        };
        let Ok(files) = scan(
            &Roots {
                root,
                driver_root: driver_root.into(),
                dev_root: dev_root.into(),
            },
            None,
        ) else {
            refused.push(name);
            continue;
        };
        for hooks in [Hooks::One, Hooks::None] {
            let spec = folder.0.join("spec.json");
            std::fs::write(
                &spec,
                generate(
                    &devices,
                    &[],
                    Some(&files),
                    &Options {
                        hooks,
                        ..Options::default()
                    },
                )
                .to_json(),
            )
            .unwrap();
            // Device 0, and all of them.
            let judged = judged(&spec);
            assert!(
                judged.len() == 2
                    && judged
                        .iter()
                        .all(|(_, counts)| counts[0] == 1 && counts[2] > 0),
                "{name}: {judged:?}"
            );
        }
        taken.push(name);
    }
    refused.sort();
    // Each of these has its own reason in tests/golden/driver-files.
    assert_eq!(
        refused,
        [
            "no-libcuda",
            "odd-module-version",
            "too-many-libraries",
            "two-versions",
            "version-mismatch"
        ]
    );
    assert!(taken.len() >= 11, "{taken:?}");
}
