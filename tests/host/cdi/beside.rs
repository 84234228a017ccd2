//! A failure means that the spec misses or misnumbers a MIG instance, a display, a channel or a
//! switch, or that one of the agents' crates refuses the spec of an odd root.

use crate::cdi::generate::{character_device, is_built, judged, list, ours, root, run, value};
use crate::{TempDir, make_dir, tree};
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
        make_dir(
            root.join("proc/driver/nvidia/capabilities/gpu0/mig")
                .join(path),
        );
    }
    make_dir(root.join("proc/driver/nvidia-caps"));
    let minors = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access \
        13\ngpu0/gi2/access 21\ngpu0/gi2/ci0/access 22\ngpu0/gi2/ci1/access 23\n";
    crate::write(root.join("proc/driver/nvidia-caps/mig-minors"), minors);
    for minor in [12, 13, 21, 22, 23] {
        character_device(
            &root,
            &format!("dev/nvidia-caps/nvidia-cap{minor}"),
            235,
            minor,
        );
    }
    for name in ["card1", "renderD128", "by-path"] {
        make_dir(root.join("sys/bus/pci/devices/0000:1b:00.0/drm").join(name));
    }
    character_device(&root, "dev/dri/card1", 226, 1);
    character_device(&root, "dev/dri/renderD128", 226, 128);
    let spec = value(&ours(&root, &Options::default()).0);
    let edits = |name: &str| {
        let mut devices = list(&spec, "devices").into_iter();
        let device = devices.find(|d| d["name"] == name);
        device.unwrap_or_else(|| panic!("no device {name}"))["containerEdits"].clone()
    };
    // Minors of capabilities, and other nodes.
    for (name, gpu, capabilities, others) in [
        ("0:1", 0, &[21, 22][..], &[][..]),
        ("0:2", 0, &[21, 23], &[]),
        ("0", 0, &[12, 13, 21, 22, 23], &[]),
        ("1", 1, &[], &["/dev/dri/card1", "/dev/dri/renderD128"]),
    ] {
        let edits = edits(name);
        let nodes: Vec<_> = list(&edits, "deviceNodes")
            .iter()
            .map(|n| n["path"].clone())
            .collect();
        let mut wanted = vec![format!("/dev/nvidia{gpu}")];
        wanted.extend(
            capabilities
                .iter()
                .map(|n| format!("/dev/nvidia-caps/nvidia-cap{n}")),
        );
        wanted.extend(others.iter().map(|node| node.to_string()));
        assert_eq!(nodes, wanted, "{name}");
    }
    // The links of a display, as udev would have made them: by a hook of only that GPU's, in what
    // both agents give a container.
    assert!(
        ["0", "0:0"]
            .iter()
            .all(|name| edits(name)["hooks"].is_null())
    );
    let links = [
        "../card1::/dev/dri/by-path/pci-0000:1b:00.0-card",
        "../renderD128::/dev/dri/by-path/pci-0000:1b:00.0-render",
    ];
    let args = [
        "nvidia-cdi-hook",
        "create-symlinks",
        "--link",
        links[0],
        "--link",
        links[1],
    ];
    assert_eq!(edits("1")["hooks"][0]["args"], serde_json::json!(args));
    let file = folder.0.join("mig.json");
    crate::write(&file, serde_json::to_vec(&spec).unwrap());
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
    crate::remove(root.join("dev/dri/renderD128"));
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
    // An instance that lacks one of its two nodes is not listed; GPU and other instances stay.
    let names = |spec: &Value| -> Vec<String> {
        let names = list(spec, "devices").into_iter().map(|d| d["name"].clone());
        let names = names.filter_map(|name| name.as_str().map(str::to_string));
        names.filter(|name| name.starts_with('0')).collect()
    };
    crate::remove(root.join("dev/nvidia-caps/nvidia-cap22"));
    let (spec, problems) = ours(&root, &Options::default());
    assert!(
        problems.len() == 2
            && problems[0].contains("MIG instance 2/0 of GPU minor 0 is left out: ")
            && problems[0].contains(
                "nvidia-cap22 is missing: make it (nvidia-modprobe -f gpu0/gi2/ci0/access)"
            ),
        "{problems:?}"
    );
    assert_eq!(names(&value(&spec)), ["0", "0:0", "0:2"]);
    // Nor is one whose node is another device: the driver's major is another after each load.
    let again = |major, minor| {
        let name = "dev/nvidia-caps/nvidia-cap21";
        crate::remove(root.join(name));
        character_device(&root, name, major, minor);
        let (spec, problems) = ours(&root, &Options::default());
        assert!(
            problems.len() == 3
                && problems[1].contains(&format!("another device ({major}:{minor})")),
            "{problems:?}"
        );
        names(&value(&spec))
    };
    assert_eq!(again(235, 20), ["0", "0:0"]);
    crate::write(
        root.join("proc/devices"),
        "Character devices:\n235 nvidia-caps\n",
    );
    assert_eq!(again(236, 21), ["0", "0:0"]);
    // A folder that cannot be listed is an error, and not the same as an empty one.
    let drm = root.join("sys/bus/pci/devices/0000:ca:00.0/drm");
    crate::write(&drm, "");
    let (_, problems) = ours(&root, &Options::default());
    assert!(
        problems.len() == 4
            && problems[3].contains("GPU 6")
            && problems[3].contains(drm.to_str().unwrap()),
        "{problems:?}"
    );
}

#[test]
fn the_other_modes_find_their_devices() {
    if !is_built() {
        return;
    }
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
        crate::write(&file, serde_json::to_vec(&spec).unwrap());
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
    if !is_built() {
        return;
    }
    let (folder, root) = root("dev-root");
    make_dir(root.join("devices"));
    std::fs::rename(root.join("dev"), root.join("devices/dev")).unwrap();
    make_dir(root.join("dev"));
    let none = run(&root, &["generate"]);
    // Every GPU is listed by the driver, and no node is where it should be.
    let said = crate::stderr(&none);
    assert!(
        none.status.code() == Some(3) && said.matches("is left out").count() == 8,
        "{said}"
    );
    let devices = root.join("devices");
    let output = run(
        &root,
        &["generate", "--dev-root", devices.to_str().unwrap()],
    );
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let spec: Value = serde_json::from_slice(&output.stdout).unwrap();
    let node = &spec["devices"][3]["containerEdits"]["deviceNodes"][0];
    assert_eq!(
        (node["path"].as_str(), node["hostPath"].as_str()),
        (Some("/dev/nvidia3"), Some("/devices/dev/nvidia3"))
    );
    let file = folder.0.join("spec.json");
    crate::write(&file, &output.stdout);
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
    for name in super::odd_roots() {
        let folder = TempDir::new(&format!("cdi-odd-{name}"));
        let root = folder.0.join("root");
        make_dir(&root);
        tree::build(&root, &tree::description(&format!("roots/{name}")));
        let (driver_root, dev_root) = super::odd_place(&name);
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
            let options = Options {
                hooks,
                ..Options::default()
            };
            let made = generate(&devices, &[], Some(&files), &options);
            crate::write(&spec, made.to_json());
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
