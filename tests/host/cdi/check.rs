//! A failure means that `kata-gpu-cdi-check` passes a spec that a kata-agent refuses, refuses a
//! good one, predicts other edits than a container gets, or can be driven out of bounds by a
//! hostile spec.

use crate::{TempDir, assert_printable, project, write};
use kata_gpu_cdi_check::agents::Agent;
use kata_gpu_cdi_check::check::{Asked, Outcome, Report, check};
use kata_gpu_cdi_check::container::Container;
use kata_gpu_cdi_check::{page, spec_files};
use kata_gpu_init::cdi::publish::Publisher;
use kata_gpu_init::cdi::spec::{Device, Entry, Options, Ready, generate};
use kata_gpu_init::gpu::device_nodes::Node;
use kata_gpu_wire::failure::Reason;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

fn report(path: &Path, devices: &[&str]) -> Report {
    let devices: Vec<String> = devices.iter().map(|d| d.to_string()).collect();
    check(&spec_files::read(path).unwrap(), &devices).unwrap()
}

/// The report on one file with this text.
fn of_text(text: &str) -> Report {
    let dir = case_dir();
    write(dir.0.join("x.yaml"), text);
    report(&dir.0, &[])
}

/// The edits that both agents give.
pub fn container(asked: &Asked) -> &Container {
    match asked.outcomes.as_slice() {
        [(_, Outcome::Gets(first)), (_, Outcome::Gets(second))] => {
            assert_eq!(first, second, "the agents differ on {:?}", asked.devices);
            first
        }
        other => panic!("{:?}: {other:?}", asked.devices),
    }
}

/// A spec with nothing wrong with it.
fn good() -> Value {
    let node = |path: &str, major: u32, minor: u32| {
        let mode = 438;
        json!({"path": path, "major": major, "minor": minor, "fileMode": mode})
    };
    let gpu = |name: &str, minor: u32| {
        let node = node(&format!("/dev/nvidia{name}"), 195, minor);
        json!({"name": name, "containerEdits": {"deviceNodes": [node]}})
    };
    json!({
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [gpu("0", 0), gpu("1", 1)],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [node("/dev/nvidiactl", 195, 255), node("/dev/nvidia-uvm", 240, 0)],
            "mounts": [{"hostPath": "/a", "containerPath": "/a", "options": ["ro", "rbind"]}],
            "hooks": [{"hookName": "createContainer", "path": "/hook", "args": ["hook", "run"]}],
        },
    })
}

/// The good spec with another value at a pointer; Null removes it.
fn changed(pointer: &str, value: Value) -> Value {
    let mut spec = good();
    let (parent, last) = pointer.rsplit_once('/').unwrap();
    match (spec.pointer_mut(parent).unwrap(), value) {
        (Value::Object(map), Value::Null) => drop(map.remove(last).unwrap()),
        (Value::Object(map), value) => drop(map.insert(last.to_string(), value)),
        (Value::Array(list), value) => list[last.parse::<usize>().unwrap()] = value,
        (other, _) => panic!("{pointer}: {other}"),
    }
    spec
}

const NODE: &str = "/devices/0/containerEdits/deviceNodes/0";

/// A directory for one case, whichever test it is of.
fn case_dir() -> TempDir {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    TempDir::new(&format!("cdi-case-{next}"))
}

fn refusing(report: &Report) -> Vec<Agent> {
    let refused = report.verdicts.iter().filter(|v| v.refused.is_some());
    refused.map(|v| v.agent).collect()
}

#[test]
fn each_agent_refuses_what_its_release_refuses() {
    let typed = format!("{NODE}/type");
    let unknown = format!("{NODE}/filemode");
    let cases: [(&str, Value, &[Agent]); 9] = [
        ("/cdiVersion", json!("v0.5.0"), &[]),
        ("/cdiVersion", Value::Null, &Agent::ALL),
        ("/cdiVersion", json!("0.4.0"), &Agent::ALL),
        ("/cdiVersion", json!("0.8.0"), &[Agent::Kata3]),
        (&typed, json!("c"), &[Agent::Kata3]),
        (&unknown, json!(438), &[Agent::Kata4]),
        ("/devices", json!([]), &[Agent::Kata4]),
        ("/devices/1/name", json!("0"), &Agent::ALL),
        ("/containerEdits/env/0", json!("A"), &Agent::ALL),
    ];
    for (pointer, value, expected) in cases {
        let report = of_text(&changed(pointer, value.clone()).to_string());
        assert_eq!(refusing(&report), expected, "{pointer} {value}: {report:?}");
        assert_eq!(report.has_errors(), !expected.is_empty());
        // Containers are tried with the agents that load the spec, and with no other.
        for asked in &report.asked {
            assert_eq!(
                asked.outcomes.len(),
                2 - expected.len(),
                "{pointer} {value}"
            );
        }
    }
}

#[test]
fn a_device_in_two_files_is_refused_by_both_agents() {
    let dir = case_dir();
    write(dir.0.join("a.json"), good().to_string());
    assert_eq!(refusing(&report(&dir.0, &[])), []);
    write(dir.0.join("b.yaml"), good().to_string());
    assert_eq!(refusing(&report(&dir.0, &[])), Agent::ALL);
}

#[test]
fn a_hosts_vfio_spec_is_not_taken_for_a_guests() {
    for path in ["/dev/vfio/12", "/dev/vfio/devices/vfio0", "/dev/iommu"] {
        let report = of_text(&changed(&format!("{NODE}/path"), json!(path)).to_string());
        assert_eq!(refusing(&report), [], "the agents take it");
        assert!(report.has_errors());
        assert!(report.problems[0].contains(path), "{:?}", report.problems);
        assert!(page::page(&report, false).contains("a host's spec"));
    }
    assert_eq!(of_text(&good().to_string()).problems, [""; 0]);
}

#[test]
fn a_mig_instance_without_both_capability_nodes_is_not_usable() {
    let spec = |name: &str, capabilities: u32| {
        let mut spec = changed("/devices/1/name", json!(name));
        let nodes = spec.pointer_mut("/devices/1/containerEdits/deviceNodes");
        nodes
            .unwrap()
            .as_array_mut()
            .unwrap()
            .extend((0..capabilities).map(|minor| {
                let path = format!("/dev/nvidia-caps/nvidia-cap{minor}");
                json!({"path": path, "major": 235, "minor": minor})
            }));
        of_text(&spec.to_string())
    };
    for name in ["0:1", "mig0:1", "MIG-7c3b0ea2"] {
        for capabilities in [0, 1] {
            let report = spec(name, capabilities);
            let says = format!("={name} is a MIG instance without");
            let outcomes = report.asked.iter().flat_map(|asked| &asked.outcomes);
            let fails = outcomes
                .filter(|(_, o)| matches!(o, Outcome::Fails(why) if why.contains(&says)))
                .count();
            assert!(report.has_errors() && fails == 2, "{report:?}");
        }
        assert!(!spec(name, 2).has_errors(), "{name}");
    }
    // A whole GPU needs none, whatever its name is like.
    for name in ["gpu1", "1", "mig0", "MIG"] {
        assert!(!spec(name, 0).has_errors(), "{name}");
    }
}

#[test]
fn a_device_that_no_spec_lists_fails_its_container() {
    let dir = case_dir();
    write(dir.0.join("x.json"), good().to_string());
    let report = report(&dir.0, &["0", "7"]);
    let outcomes = &report.asked[0].outcomes;
    let fails = |(_, outcome): &(Agent, Outcome)| matches!(outcome, Outcome::Fails(_));
    assert!(
        outcomes.len() == 2 && outcomes.iter().all(fails),
        "{outcomes:?}"
    );
    assert!(report.has_errors() && page::page(&report, true).contains("gpu=7"));
}

#[test]
fn the_reference_spec_passes_and_gives_what_it_gave() {
    let report = report(
        &project().join("tests/fixtures/cdi/kata-8gpu-550.json"),
        &[],
    );
    assert!(!report.has_errors(), "{report:#?}");
    assert_eq!(report.asked.len(), 17);
    for asked in &report.asked {
        let container = container(asked);
        let nodes = match asked.devices == ["nvidia.com/gpu=all"] {
            true => 11,
            false => 4,
        };
        assert_eq!(container.counts(), [nodes, nodes, 16, 2, 6], "{asked:?}");
        for hook in container.list("hooks") {
            assert_eq!(hook["name"], "createContainer");
            assert_eq!(hook["env"], json!(["NVIDIA_CTK_DEBUG=false"]));
        }
        for node in container.list("deviceNodes") {
            assert_eq!(
                (&node["type"], &node["fileMode"]),
                (&json!("c"), &json!(0o660))
            );
        }
    }
    let second = container(&report.asked[1])
        .list("deviceNodes")
        .last()
        .unwrap();
    assert_eq!(second["path"], "/dev/nvidia1");
    assert_eq!(
        (&second["major"], &second["minor"]),
        (&json!(195), &json!(1))
    );
    let page = page::page(&report, false);
    crate::golden("host/cdi-check-reference.txt", &page);
}

#[test]
fn a_container_with_two_devices_gets_common_edits_once() {
    let path = project().join("tests/fixtures/cdi/kata-8gpu-550.json");
    let report = report(&path, &["3", "nvidia.com/gpu=5"]);
    assert_eq!(report.asked.len(), 1);
    assert_eq!(container(&report.asked[0]).counts(), [5, 5, 16, 2, 6]);
}

fn node(name: &str, major: u32, minor: u32) -> Node {
    Node {
        path: format!("/dev/{name}").into(),
        major,
        minor,
        mode: 0o666,
        gid: 0,
    }
}

#[test]
fn our_own_specs_are_no_error_in_any_state() {
    let dir = case_dir();
    let publisher = Publisher::new(&dir.0).unwrap();
    let common = [
        node("nvidiactl", 195, 255),
        node("nvidia-uvm", 240, 0),
        node("nvidia-uvm-tools", 240, 1),
    ];
    // Each of three GPUs in each of three states, with and without the common nodes.
    for state in 0..27usize {
        for common in [&common[..], &[]] {
            let devices: Vec<Device> = (0..3)
                .map(|index| {
                    let entry = match state / 3usize.pow(index as u32) % 3 {
                        0 => Entry::Pending,
                        1 => Entry::Ready(Ready {
                            nodes: vec![node(
                                &format!("nvidia{}", 2 - index),
                                195,
                                2 - index as u32,
                            )],
                            ..Ready::default()
                        }),
                        _ => Entry::Failed(Some(Reason::FirmwareBoot)),
                    };
                    Device {
                        index,
                        address: format!("0001:00:{index:02x}.0").parse().unwrap(),
                        entry,
                    }
                })
                .collect();
            let spec = generate(&devices, common, None, &Options::default());
            crate::cdi::schema::fits(&spec.to_json());
            publisher.publish(&spec).unwrap();
            let report = report(&dir.0, &[]);
            assert!(!report.has_errors(), "{devices:?}: {report:#?}");
            for asked in &report.asked {
                let pending = |index: &str| {
                    devices.iter().any(|d| {
                        d.entry == Entry::Pending
                            && (index == "all" || d.index.to_string() == index)
                    })
                };
                let name = asked.devices[0].strip_prefix("nvidia.com/gpu=").unwrap();
                for (agent, outcome) in &asked.outcomes {
                    match outcome {
                        Outcome::Waits(paths) => assert!(
                            pending(name) && !paths.is_empty(),
                            "{devices:?}: {name} waits with {agent:?}"
                        ),
                        Outcome::Gets(_) => assert!(
                            !pending(name),
                            "{devices:?}: {name} does not wait with {agent:?}"
                        ),
                        // A failed GPU's verdict fails its container as soon as no GPU is pending.
                        Outcome::HasFailedGpu(verdict) => assert!(
                            !devices.iter().any(|d| d.entry == Entry::Pending)
                                && verdict.contains("has failed (firmware-boot): reset the GPU"),
                            "{devices:?}: {name} fails with {agent:?}: {verdict}"
                        ),
                        Outcome::Fails(error) => {
                            panic!("{devices:?}: {name} fails with {agent:?}: {error}")
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn hostile_text_reaches_the_terminal_as_printable_ascii() {
    let evil = "\u{1b}[2J\u{9b}31m\u{202e}\r\n";
    let mut spec = changed(&format!("{NODE}/path"), json!(format!("/{evil}")));
    spec["containerEdits"]["hooks"][0]["args"][0] = json!(evil);
    spec["containerEdits"]["mounts"][0]["containerPath"] = json!(format!("/{evil}"));
    spec["containerEdits"]["env"][0] = json!(format!("A={evil}"));
    let refused = changed("/kind", json!(evil));
    for text in [spec.to_string(), refused.to_string(), format!("{{{evil}")] {
        let dir = case_dir();
        write(dir.0.join("\u{1b}[2J\u{9b}31m.json"), text);
        let report = report(&dir.0, &[]);
        let json = kata_gpu_report::data::text::ascii_json(&report.json()).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), report.json());
        let page = page::page(&report, false);
        assert!(page.contains("\\x1b[2J"), "{page}");
        assert_printable(&page);
        assert_printable(&json);
    }
}

/// A spec with so many devices, with something after them.
fn many_devices(count: usize, after: &str) -> String {
    let devices: Vec<String> = (0..count)
        .map(|n| format!("{{name: d{n}, containerEdits: {{}}}}"))
        .collect();
    format!(
        "{{cdiVersion: 0.5.0, kind: example.com/nic, devices: [{}]{after}}}",
        devices.join(",")
    )
}

/// Each of these takes minutes or all memory without the bounds: a refusal, or a report, is enough.
#[test]
fn the_largest_specs_that_are_read_are_checked_within_bounds() {
    const MEBIBYTE: usize = 1 << 20;
    for text in [
        "[".repeat(MEBIBYTE),
        "{a: ".repeat(4000),
        "- ".repeat(MEBIBYTE / 2),
        "\0".repeat(MEBIBYTE),
        "a:".repeat(MEBIBYTE / 2),
        "? ".repeat(MEBIBYTE / 4),
        // One agent passes over fields that it does not know, even where they are no JSON; it must
        // not get to copy this for each device.
        many_devices(20_000, ", .nan: 1"),
        many_devices(1_900, ", x: 1, x: 2"),
        format!(
            "{{\"kind\": \"a\", \"devices\": [{}]}}",
            "{},".repeat(300_000) + "{}"
        ),
    ] {
        let dir = case_dir();
        write(dir.0.join("x.yaml"), &text);
        let checked = spec_files::read(&dir.0).and_then(|files| check(&files, &[]));
        assert!(
            checked.is_err() || checked.is_ok_and(|r| r.has_errors()),
            "{text:.20}"
        );
    }
}

#[test]
fn a_file_that_only_one_agent_parses_is_reported() {
    let report = of_text(&many_devices(2, ", x: 1, x: 2"));
    assert_eq!(refusing(&report), [Agent::Kata4], "{report:?}");
}

#[test]
fn exit_statuses_tell_good_wrong_and_unreadable_apart() {
    let dir = case_dir();
    let path = dir.0.join("x.json");
    let status = |devices: &[&str]| {
        let program = crate::built("kata-gpu-cdi-check", "kata-gpu-cdi-check");
        let run = std::process::Command::new(program)
            .arg(&path)
            .args(devices)
            .output();
        run.unwrap().status.code()
    };
    assert_eq!(status(&[]), Some(2));
    write(&path, good().to_string());
    assert_eq!(status(&[]), Some(0));
    assert_eq!(status(&["7", "--json"]), Some(1));
    assert_eq!(status(&["--no-such-option"]), Some(2));
}
