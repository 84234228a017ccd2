//! `kata-gpu-cdi-check`: every rule has a spec that breaks it alone and a twin that does not;
//! both agents' parsers agree with what the rules claim of them; the reference spec and our own
//! ones pass.

use crate::{TempDir, project};
use kata_gpu_cdi_check::check_report::{Asked, Outcome, Question, Report, check};
use kata_gpu_cdi_check::container::Container;
use kata_gpu_cdi_check::look::Look;
use kata_gpu_cdi_check::shape;
use kata_gpu_cdi_check::spec_files;
use kata_gpu_cdi_check::spec_rules::{Agent, Agents, RULES};
use kata_gpu_init::cdi::publish::Publisher;
use kata_gpu_init::cdi::spec::{Device, Entry, Options, Ready, generate};
use kata_gpu_init::gpu::device_nodes::Node;
use kata_gpu_report::severity::Severity;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

fn question() -> Question {
    Question {
        look: Look::Nowhere,
        agents: Agents::BOTH,
        devices: Vec::new(),
        require_resolvable: false,
    }
}

fn asking(devices: &[&str]) -> Question {
    Question {
        devices: devices.iter().map(|d| d.to_string()).collect(),
        ..question()
    }
}

fn report(path: &Path, question: &Question) -> Report {
    check(spec_files::read(path).unwrap(), question).unwrap()
}

fn rules(report: &Report) -> BTreeSet<&'static str> {
    report.findings.iter().map(|f| f.rule.name).collect()
}

fn container(asked: &Asked) -> &Container {
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
    json!({
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0", "major": 195, "minor": 0, "fileMode": 438}]}},
            {"name": "1", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1", "major": 195, "minor": 1, "fileMode": 438}]}},
        ],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [
                {"path": "/dev/nvidiactl", "major": 195, "minor": 255, "fileMode": 438},
                {"path": "/dev/nvidia-uvm", "major": 240, "minor": 0, "fileMode": 438},
            ],
            "mounts": [{"hostPath": "/usr/lib/libcuda.so.1", "containerPath": "/usr/lib/libcuda.so.1", "options": ["ro", "rbind"]}],
            "hooks": [{"hookName": "createContainer", "path": "/usr/bin/hook", "args": ["hook", "run"], "env": ["A=1"]}],
        },
    })
}

/// Makes the files of a case in a directory.
type Make = Box<dyn Fn(&Path)>;

fn file(name: &'static str, text: impl Into<Vec<u8>>) -> Make {
    let text = text.into();
    Box::new(move |dir| {
        std::fs::create_dir_all(dir.join(name).parent().unwrap()).unwrap();
        std::fs::write(dir.join(name), &text).unwrap();
    })
}

fn all(makes: Vec<Make>) -> Make {
    Box::new(move |dir| makes.iter().for_each(|make| make(dir)))
}

/// The good spec, changed.
fn edited(change: impl FnOnce(&mut Value)) -> Make {
    let mut spec = good();
    change(&mut spec);
    file("x.json", spec.to_string())
}

fn unchanged() -> Make {
    edited(|_| ())
}

/// The good spec with something else at a pointer.
fn at(pointer: &str, value: Value) -> Make {
    edited(|spec| set(spec, pointer, value))
}

fn set(spec: &mut Value, pointer: &str, value: Value) {
    let (parent, last) = pointer.rsplit_once('/').unwrap();
    match spec.pointer_mut(parent).unwrap() {
        Value::Object(map) => drop(map.insert(last.to_string(), value)),
        Value::Array(list) => list[last.parse::<usize>().unwrap()] = value,
        other => panic!("{pointer}: {other}"),
    }
}

fn unset(spec: &mut Value, pointer: &str) {
    let (parent, last) = pointer.rsplit_once('/').unwrap();
    spec.pointer_mut(parent)
        .unwrap()
        .as_object_mut()
        .unwrap()
        .remove(last)
        .unwrap();
}

/// A rule, what breaks it alone, and what is nearly the same and right.
struct Case {
    rule: &'static str,
    bad: Make,
    good: Make,
    question: fn(&Path) -> Question,
}

fn case(rule: &'static str, bad: Make, good: Make) -> Case {
    Case {
        rule,
        bad,
        good,
        question: |_| question(),
    }
}

impl Case {
    fn asked(self, question: fn(&Path) -> Question) -> Case {
        Case { question, ..self }
    }
}

const NODE: &str = "/devices/0/containerEdits/deviceNodes/0";

fn below_root(dir: &Path) -> Question {
    Question {
        look: Look::below(&dir.join("root.d")).unwrap(),
        ..question()
    }
}

/// Files that the good spec names, below the directory `root.d`; a fifo stands for each device
/// node, which not everybody may make.
fn root(without: &'static str) -> Make {
    Box::new(move |dir| {
        let root = dir.join("root.d");
        for path in ["usr/lib/libcuda.so.1", "usr/bin/hook"]
            .iter()
            .filter(|p| **p != without)
        {
            std::fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
            std::fs::write(root.join(path), "").unwrap();
            std::fs::set_permissions(
                root.join(path),
                std::os::unix::fs::PermissionsExt::from_mode(0o755),
            )
            .unwrap();
        }
        std::fs::create_dir_all(root.join("dev")).unwrap();
        for name in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"]
            .iter()
            .filter(|n| format!("dev/{n}") != without)
        {
            nix::unistd::mkfifo(&root.join("dev").join(name), nix::sys::stat::Mode::S_IRWXU)
                .unwrap();
        }
    })
}

/// Cases about what a value is.
fn values() -> Vec<Case> {
    let mount = |target: &str| json!({"hostPath": "/a", "containerPath": target});
    let mounts = |targets: &[&str]| {
        at(
            "/containerEdits/mounts",
            targets.iter().map(|t| mount(t)).collect(),
        )
    };
    let hook = |name: &str| at("/containerEdits/hooks/0/hookName", json!(name));
    let gids = |version: &'static str| {
        edited(move |spec| {
            set(spec, "/cdiVersion", json!(version));
            set(spec, "/devices/0/containerEdits/additionalGids", json!([1]));
        })
    };
    let annotated = |key: &'static str| {
        edited(move |spec| {
            set(spec, "/cdiVersion", json!("0.6.0"));
            set(spec, "/devices/0/annotations", json!({key: "x"}));
        })
    };
    vec![
        case(
            "missing-field",
            edited(|s| unset(s, "/cdiVersion")),
            unchanged(),
        ),
        case(
            "missing-field",
            edited(|s| unset(s, "/devices/0/containerEdits")),
            unchanged(),
        ),
        case(
            "wrong-type",
            at(&format!("{NODE}/major"), json!("195")),
            at(&format!("{NODE}/major"), json!(195)),
        ),
        case(
            "wrong-type",
            at("/devices/0/containerEdits/env", json!("A=1")),
            at("/devices/0/containerEdits/env", json!(["A=1"])),
        ),
        // A YAML parser takes a number for the text that it is written as.
        case(
            "wrong-type",
            at("/devices/0/name", json!(["0"])),
            at("/devices/0/name", json!(0)),
        ),
        case(
            "unknown-field",
            at("/containerEdits/mount", json!([])),
            at("/containerEdits/mounts", json!([])),
        ),
        case(
            "unknown-field",
            at(&format!("{NODE}/filemode"), json!(438)),
            at(&format!("{NODE}/uid"), json!(0)),
        ),
        case(
            "version-unknown",
            at("/cdiVersion", json!("0.5.1")),
            at("/cdiVersion", json!("v0.5.0")),
        ),
        case(
            "version-too-new",
            at("/cdiVersion", json!("0.8.0")),
            at("/cdiVersion", json!("0.7.0")),
        ),
        case(
            "version-too-low",
            at("/cdiVersion", json!("0.4.0")),
            at("/cdiVersion", json!("0.5.0")),
        ),
        case("version-too-low", gids("0.6.0"), gids("0.7.0")),
        case(
            "kind-invalid",
            at("/kind", json!("nvidia.com")),
            unchanged(),
        ),
        case(
            "kind-invalid",
            at("/kind", json!("nvidia.com/1gpu")),
            at("/kind", json!("nvidia.com/gpu1")),
        ),
        case(
            "kind-invalid",
            at("/kind", json!("nvidia.com/gpu-")),
            at("/kind", json!("nvidia.com/gpu-x")),
        ),
        case(
            "device-twice",
            at("/devices/1/name", json!("0")),
            at("/devices/1/name", json!("2")),
        ),
        case(
            "device-name-invalid",
            at("/devices/1/name", json!("a b")),
            at("/devices/1/name", json!("a:b")),
        ),
        case(
            "device-name-invalid",
            at("/devices/1/name", json!("1-")),
            at("/devices/1/name", json!("1-1")),
        ),
        case("no-devices", at("/devices", json!([])), unchanged()),
        case(
            "device-without-edits",
            at("/devices/1/containerEdits", json!({"env": []})),
            at("/devices/1/containerEdits", json!({"env": ["A=1"]})),
        ),
        case(
            "empty-path",
            at("/containerEdits/mounts/0/hostPath", json!("")),
            at("/containerEdits/mounts/0/hostPath", json!("/a")),
        ),
        case(
            "empty-path",
            at("/containerEdits/hooks/0/path", json!("")),
            at("/containerEdits/hooks/0/path", json!("/a")),
        ),
        case(
            "empty-path",
            at(&format!("{NODE}/path"), json!("")),
            unchanged(),
        ),
        case(
            "env-invalid",
            at("/containerEdits/env/0", json!("A")),
            at("/containerEdits/env/0", json!("A=")),
        ),
        case(
            "env-invalid",
            at("/containerEdits/env/0", json!("=A")),
            at("/containerEdits/env/0", json!("A=A")),
        ),
        case(
            "env-invalid",
            at("/containerEdits/hooks/0/env/0", json!("A")),
            at("/containerEdits/hooks/0/env/0", json!("A=")),
        ),
        case(
            "node-type",
            at(&format!("{NODE}/type"), json!("c")),
            at(&format!("{NODE}/type"), json!(null)),
        ),
        case(
            "node-type-invalid",
            at(&format!("{NODE}/type"), json!("x")),
            unchanged(),
        ),
        case(
            "permissions-invalid",
            at(&format!("{NODE}/permissions"), json!("rx")),
            at(&format!("{NODE}/permissions"), json!("rw")),
        ),
        case(
            "permissions-invalid",
            at(&format!("{NODE}/permissions"), json!("none")),
            at(&format!("{NODE}/permissions"), json!("")),
        ),
        case(
            "hook-name-invalid",
            hook("createcontainer"),
            hook("createContainer"),
        ),
        // No rule of ours is about the keys of annotations.
        case("refused", annotated("a b"), annotated("a.b")),
        case(
            "file-mode-unset",
            edited(|s| unset(s, &format!("{NODE}/fileMode"))),
            unchanged(),
        ),
        case(
            "file-mode-odd",
            at(&format!("{NODE}/fileMode"), json!(666)),
            at(&format!("{NODE}/fileMode"), json!(0o666)),
        ),
        case(
            "mount-order",
            mounts(&["/a/b/c", "/a/b/"]),
            mounts(&["/a/b/", "/a/b/c"]),
        ),
        case(
            "mount-order",
            mounts(&["/a/b", "/"]),
            mounts(&["/", "/a/b", "/a/bc"]),
        ),
        case(
            "mount-order",
            at(
                "/devices/0/containerEdits/mounts",
                json!([mount("/usr/lib")]),
            ),
            at(
                "/devices/0/containerEdits/mounts",
                json!([mount("/usr/lib64")]),
            ),
        ),
        case(
            "mount-twice",
            mounts(&["/a/b", "/a//b/."]),
            mounts(&["/a/b", "/a/c"]),
        ),
        case("hook-not-run", hook("createRuntime"), hook("prestart")),
        case(
            "hook-env-empty",
            at("/containerEdits/hooks/0/env", json!([])),
            at("/containerEdits/hooks/0/env", json!(["A=1"])),
        ),
        case(
            "env-twice",
            at("/containerEdits/env", json!(["A=1", "A=2"])),
            at("/containerEdits/env", json!(["A=1", "B=2", "A=1"])),
        ),
        case(
            "env-shadowed",
            at("/containerEdits/env/0", json!("LD_LIBRARY_PATH=/x")),
            at("/containerEdits/env/0", json!("MY_LIBRARY_PATH=/x")),
        ),
        case(
            "no-nvidiactl",
            at("/containerEdits/deviceNodes/0/path", json!("/dev/other")),
            unchanged(),
        ),
        case(
            "no-nvidia-uvm",
            at(
                "/containerEdits/deviceNodes/1/path",
                json!("/dev/nvidia-uvm-tools"),
            ),
            unchanged(),
        ),
        case(
            "not-by-index",
            edited(|s| {
                set(s, "/devices/0/name", json!("gpu0"));
                set(s, "/devices/1/name", json!("gpu1"));
            }),
            at("/devices/1/name", json!("gpu1")),
        ),
        case(
            "waiting",
            at(
                NODE,
                json!({"path": "/run/kata-gpu-init/pending/0001:00:00.0"}),
            ),
            unchanged(),
        ),
        case(
            "slow-to-parse",
            at(
                "/containerEdits/env/0",
                json!("A=".to_string() + &"x".repeat(65_000)),
            ),
            at(
                "/containerEdits/env/0",
                json!("A=".to_string() + &"x".repeat(60_000)),
            ),
        ),
    ]
}

/// Cases about files, about paths, and about what was asked for.
fn places() -> Vec<Case> {
    // Another kind, without edits beside `devices`.
    let nic = |names: [&str; 2]| {
        let mut spec = good();
        spec["kind"] = json!("example.com/nic");
        unset(&mut spec, "/containerEdits");
        names
            .iter()
            .enumerate()
            .for_each(|(n, name)| set(&mut spec, &format!("/devices/{n}/name"), json!(name)));
        spec
    };
    let nic_with_hook = |names| {
        let mut spec = nic(names);
        spec["containerEdits"] = json!({"hooks": good()["containerEdits"]["hooks"]});
        spec
    };
    let named = |name: &'static str, spec: Value| file(name, spec.to_string());
    let beside = |name: &'static str, text: &str| all(vec![unchanged(), file(name, text)]);
    let devices = |count: usize| {
        let device =
            |n: usize| json!({"name": format!("d{n}"), "containerEdits": {"env": ["A=1"]}});
        named(
            "x.json",
            json!({"cdiVersion": "0.5.0", "kind": "example.com/nic", "devices": (0..count).map(device).collect::<Value>()}),
        )
    };
    let link = |target: &'static str, name: &'static str| -> Make {
        Box::new(move |dir| {
            unchanged()(dir);
            std::os::unix::fs::symlink(target, dir.join(name)).unwrap();
        })
    };
    let many = |count: usize| -> Make {
        Box::new(move |dir| {
            for n in 0..count {
                let spec = json!({
                    "cdiVersion": "0.5.0", "kind": "example.com/nic", "devices": [{"name": format!("d{n}"), "containerEdits": {"env": ["A=1"]}}],
                });
                std::fs::write(dir.join(format!("{n}.json")), spec.to_string()).unwrap();
            }
        })
    };
    let typed = |kind: &'static str| {
        at(
            NODE,
            json!({"path": "/dev/nvidia0", "type": kind, "fileMode": 438}),
        )
    };
    let rooted = |make: Make, without| all(vec![make, root(without)]);
    vec![
        case("no-spec", file("README", "x"), unchanged()),
        case("not-read", beside("b.yml", "x"), beside("b.yaml.tmp", "x")),
        case(
            "not-a-file",
            link("nowhere", "a.json"),
            link("nowhere", "a.json.tmp"),
        ),
        // A file whose reading fails for root, too.
        case(
            "unreadable",
            link("/proc/self/mem", "a.json"),
            link("/proc/self/mem", "a"),
        ),
        case("directory-loop", link(".", "a"), beside("a/README", "")),
        case("too-many-files", many(65), many(64)),
        case(
            "too-large",
            file("x.json", good().to_string() + &" ".repeat(1 << 20)),
            unchanged(),
        ),
        case(
            "yaml-aliases",
            file(
                "x.yaml",
                format!("{{\"a\": &x 1, \"b\": *x, {}", &good().to_string()[1..]),
            ),
            unchanged(),
        ),
        case("too-much", devices(2000), devices(200)),
        case("too-much", file("x.yaml", "[".repeat(100_000)), unchanged()),
        case(
            "not-parsed",
            file("x.json", &good().to_string()[..200]),
            unchanged(),
        ),
        case(
            "not-a-spec",
            beside("config.json", r#"{"version": 1}"#),
            beside("config.cfg", r#"{"version": 1}"#),
        ),
        case(
            "not-a-spec",
            beside("empty.yaml", ""),
            beside("empty.tmp", ""),
        ),
        case(
            "device-in-two-files",
            all(vec![
                unchanged(),
                named("a/b.YAML", nic(["0", "1"])),
                named("c.json", nic(["1", "2"])),
            ]),
            all(vec![
                unchanged(),
                named("a/b.YAML", nic(["0", "1"])),
                named("c.json", nic(["2", "3"])),
            ]),
        ),
        case(
            "edits-repeated",
            all(vec![
                named("a.json", nic_with_hook(["0", "1"])),
                named("b.json", nic_with_hook(["2", "3"])),
            ]),
            all(vec![
                named("a.json", nic_with_hook(["0", "1"])),
                named("b.json", nic(["2", "3"])),
            ]),
        ),
        case(
            "unresolvable",
            unchanged(),
            at("/devices/1/name", json!("7")),
        )
        .asked(|_| asking(&["7"])),
        case(
            "not-resolvable",
            at(
                NODE,
                json!({"path": "/run/kata-gpu-init/pending/0001:00:00.0"}),
            ),
            unchanged(),
        )
        .asked(|_| Question {
            require_resolvable: true,
            ..asking(&["0"])
        }),
        case(
            "node-missing",
            rooted(unchanged(), "dev/nvidia1"),
            rooted(unchanged(), ""),
        )
        .asked(below_root),
        case(
            "not-a-device-node",
            rooted(at(&format!("{NODE}/hostPath"), json!("/dev")), ""),
            rooted(at(&format!("{NODE}/hostPath"), json!("/dev/nvidia1")), ""),
        )
        .asked(below_root),
        case(
            "node-type-differs",
            rooted(typed("b"), ""),
            rooted(typed("p"), ""),
        )
        .asked(|dir| Question {
            agents: Agents::KATA4,
            ..below_root(dir)
        }),
        case(
            "mount-source-missing",
            rooted(unchanged(), "usr/lib/libcuda.so.1"),
            rooted(unchanged(), ""),
        )
        .asked(below_root),
        case(
            "hook-missing",
            rooted(unchanged(), "usr/bin/hook"),
            rooted(unchanged(), ""),
        )
        .asked(below_root),
    ]
}

/// Rules that no case breaks: what they say comes about only where a parser and its own copy of a
/// spec disagree.
const NOT_PROVOKED: &[&str] = &["not-injected"];

/// A directory for one case, whichever test it is of.
fn case_dir() -> TempDir {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    TempDir::new(&format!(
        "cdi-case-{}",
        NEXT.fetch_add(1, Ordering::Relaxed)
    ))
}

fn run(make: &Make, question: fn(&Path) -> Question) -> Report {
    let dir = case_dir();
    make(&dir.0);
    report(&dir.0, &question(&dir.0))
}

#[test]
fn each_rule_has_specs_that_break_it_alone_and_keep_it() {
    let mut broken = BTreeSet::new();
    for case in values().into_iter().chain(places()) {
        let bad = run(&case.bad, case.question);
        let mut expected = BTreeSet::from([case.rule]);
        // Which device is meant is said by what it waits for.
        if case.rule == "not-resolvable" {
            expected.insert("waiting");
        }
        assert_eq!(rules(&bad), expected, "{:#?}", bad.findings);
        let good = run(&case.good, case.question);
        assert_eq!(
            rules(&good),
            BTreeSet::new(),
            "the twin of {}: {:#?}",
            case.rule,
            good.findings
        );
        broken.insert(case.rule);
    }
    let all: BTreeSet<&str> = RULES.iter().map(|r| r.name).collect();
    broken.extend(NOT_PROVOKED);
    assert_eq!(
        broken, all,
        "a rule without a case, or a case without a rule"
    );
}

#[test]
fn the_agents_refuse_exactly_what_the_rules_refuse() {
    let (mut refused, mut loaded) = (0, 0);
    for case in values().into_iter().chain(
        places()
            .into_iter()
            .filter(|c| ["not-parsed", "not-a-spec", "device-in-two-files"].contains(&c.rule)),
    ) {
        for (make, is_bad) in [(&case.bad, true), (&case.good, false)] {
            let report = run(make, case.question);
            for verdict in &report.verdicts {
                let claimed = (report.findings.iter()).any(|f| {
                    (f.rule.refuses || f.rule.name == "device-in-two-files")
                        && f.agents.has(verdict.agent)
                });
                assert_eq!(
                    verdict.refused.is_some(),
                    claimed,
                    "{} (bad: {is_bad}), {:?}: {:#?}",
                    case.rule,
                    verdict,
                    report.findings
                );
                *if claimed { &mut refused } else { &mut loaded } += 1;
            }
        }
    }
    assert!(
        refused > 30 && loaded > 90,
        "{refused} refused, {loaded} loaded"
    );
}

#[test]
fn an_exit_status_follows_from_errors_alone() {
    for case in values() {
        let report = run(&case.bad, case.question);
        let severity = RULES.iter().find(|r| r.name == case.rule).unwrap().severity;
        assert_eq!(
            report.has_errors(),
            severity == Severity::Error,
            "{}",
            case.rule
        );
    }
}

#[test]
fn rules_of_one_kata_are_left_out_for_the_other() {
    let dir = case_dir();
    at(&format!("{NODE}/type"), json!("c"))(&dir.0);
    let only = |agents| {
        report(
            &dir.0,
            &Question {
                agents,
                ..question()
            },
        )
    };
    assert!(only(Agents::BOTH).has_errors() && only(Agents::KATA3).has_errors());
    let kata4 = only(Agents::KATA4);
    assert!(
        kata4.findings.is_empty() && kata4.verdicts.len() == 1,
        "{:#?}",
        kata4.findings
    );
}

#[test]
fn the_reference_spec_passes_and_gives_what_it_gave() {
    let report = report(
        &project().join("tests/fixtures/cdi/kata-8gpu-550.json"),
        &question(),
    );
    assert!(report.findings.is_empty(), "{:#?}", report.findings);
    assert!(
        report.verdicts.iter().all(|v| v.refused.is_none()),
        "{:?}",
        report.verdicts
    );
    assert_eq!(report.asked.len(), 17);
    for asked in &report.asked {
        let container = container(asked);
        let nodes = if asked.devices == ["nvidia.com/gpu=all"] {
            11
        } else {
            4
        };
        let counts = (
            container.device_nodes.len(),
            container.cgroup_rules.len(),
            container.mounts.len(),
            container.env.len(),
            container.hooks.len(),
        );
        assert_eq!(counts, (nodes, nodes, 16, 2, 6), "{:?}", asked.devices);
        assert!(
            container
                .hooks
                .iter()
                .all(|h| h.name == "createContainer" && h.env == ["NVIDIA_CTK_DEBUG=false"])
        );
        assert!(
            container
                .device_nodes
                .iter()
                .all(|n| n.kind == "c" && n.file_mode == Some(0o660))
        );
    }
    let second = container(&report.asked[1]).device_nodes.last().unwrap();
    assert_eq!(
        (second.path.as_str(), second.major, second.minor),
        ("/dev/nvidia1", Some(195), Some(1))
    );
}

#[test]
fn a_container_with_two_devices_gets_common_edits_once() {
    let path = project().join("tests/fixtures/cdi/kata-8gpu-550.json");
    let report = report(&path, &asking(&["3", "nvidia.com/gpu=5"]));
    assert_eq!(report.asked.len(), 1);
    let container = container(&report.asked[0]);
    assert_eq!(
        (
            container.device_nodes.len(),
            container.mounts.len(),
            container.hooks.len()
        ),
        (5, 16, 6)
    );
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
                        _ => Entry::Failed,
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
            let report = report(&dir.0, &question());
            assert!(!report.has_errors(), "{devices:?}: {:#?}", report.findings);
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
                        Outcome::Fails(error) => {
                            panic!("{devices:?}: {name} fails with {agent:?}: {error}")
                        }
                    }
                }
            }
            let waiting = rules(&report).contains("waiting");
            assert_eq!(
                waiting,
                devices.iter().any(|d| d.entry == Entry::Pending),
                "{devices:?}"
            );
        }
    }
}

/// Uses of what came with each version.
const FEATURES: &[(&str, &str, &str)] = &[
    ("/devices/0/name", r#""0""#, "0.5.0"),
    ("/devices/0/annotations", r#"{"a": "b"}"#, "0.6.0"),
    ("/annotations", r#"{"a": "b"}"#, "0.6.0"),
    ("/kind", r#""example.com/a.b""#, "0.6.0"),
    (
        "/devices/0/containerEdits/mounts",
        r#"[{"hostPath": "/a", "containerPath": "/a", "type": "bind"}]"#,
        "0.4.0",
    ),
    (
        "/containerEdits/mounts",
        r#"[{"hostPath": "/a", "containerPath": "/a", "type": ""}]"#,
        "0.3.0",
    ),
    (
        "/containerEdits/deviceNodes",
        r#"[{"path": "/a", "hostPath": "/b"}]"#,
        "0.5.0",
    ),
    ("/containerEdits/additionalGids", "[5]", "0.7.0"),
    (
        "/devices/0/containerEdits/intelRdt",
        r#"{"closID": "a"}"#,
        "0.7.0",
    ),
    (
        "/devices/0/containerEdits/netDevices",
        r#"[{"hostInterfaceName": "a", "name": "b"}]"#,
        "1.1.0",
    ),
];

#[test]
fn both_agents_want_the_version_that_we_compute() {
    for subset in 0..1usize << FEATURES.len() {
        let mut spec = json!({
            "cdiVersion": "0.3.0", "kind": "example.com/nic", "containerEdits": {"env": ["A=1"]},
            "devices": [{"name": "a", "containerEdits": {"env": ["A=1"]}}],
        });
        let used: Vec<_> = FEATURES
            .iter()
            .enumerate()
            .filter(|(n, _)| subset >> n & 1 == 1)
            .map(|(_, feature)| feature)
            .collect();
        used.iter().for_each(|(pointer, value, _)| {
            set(&mut spec, pointer, serde_json::from_str(value).unwrap())
        });
        let wanted = used
            .iter()
            .map(|(_, _, version)| *version)
            .max()
            .unwrap_or("0.3.0");
        assert_eq!(
            shape::check("x", &spec).minimum().to_string(),
            wanted,
            "{spec}"
        );
        let kata4 = serde_json::from_value(spec.clone()).unwrap();
        assert_eq!(
            container_device_interface_1::version::minimum_required_version(&kata4)
                .unwrap()
                .to_string(),
            wanted,
            "{spec}"
        );
        if wanted < "1" {
            let kata3 = serde_json::from_value(spec.clone()).unwrap();
            assert_eq!(
                container_device_interface_0::version::minimum_required_version(&kata3)
                    .unwrap()
                    .to_string(),
                wanted,
                "{spec}"
            );
        }
    }
}

#[test]
fn nothing_that_a_file_says_drives_a_terminal() {
    let evil = "\u{1b}[2J\u{9b}31m\u{202e}\r\n";
    let mut spec = good();
    for pointer in [
        "/cdiVersion",
        "/kind",
        "/devices/0/name",
        "/containerEdits/env/0",
        "/containerEdits/hooks/0/path",
        &format!("{NODE}/path"),
    ] {
        set(&mut spec, pointer, json!(evil));
    }
    set(&mut spec, "/containerEdits/hooks/0/hookName", json!(evil));
    spec[evil] = json!(1);
    let mut good = good();
    for pointer in [
        "/containerEdits/mounts/0/containerPath",
        "/containerEdits/hooks/0/args/0",
        "/containerEdits/hooks/0/path",
        &format!("{NODE}/path"),
    ] {
        set(&mut good, pointer, json!(format!("/{evil}")));
    }
    set(
        &mut good,
        "/containerEdits/env/0",
        json!(format!("A={evil}")),
    );
    for text in [spec.to_string(), good.to_string(), format!("{{{evil}")] {
        let dir = case_dir();
        std::fs::write(dir.0.join("\u{1b}[2J\u{9b}31m.json"), text).unwrap();
        let report = report(&dir.0, &question());
        let json = kata_gpu_report::data::text::ascii_json(&report.json()).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), report.json());
        for width in [None, Some(80)] {
            let screen = kata_gpu_report::data::text::Screen {
                width,
                colour: false,
            };
            let page = kata_gpu_cdi_check::check_text::page(&report, &question(), &screen);
            assert!(page.contains("\\x1b[2J"), "{page}");
            for text in [&page, &json] {
                assert!(
                    text.bytes()
                        .all(|b| b == b'\n' || (b' '..=b'~').contains(&b)),
                    "{text:?}"
                );
            }
        }
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

#[test]
fn the_largest_specs_that_are_read_are_checked_in_bounded_time() {
    const MEBIBYTE: usize = 1 << 20;
    let start = std::time::Instant::now();
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
        std::fs::write(dir.0.join("x.yaml"), &text).unwrap();
        assert!(report(&dir.0, &question()).has_errors(), "{text:.20}");
    }
    // Without its bounds, the first alone takes minutes.
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

#[test]
fn a_file_that_only_one_agent_parses_is_reported() {
    let dir = case_dir();
    std::fs::write(dir.0.join("x.yaml"), many_devices(2, ", x: 1, x: 2")).unwrap();
    let report = report(&dir.0, &question());
    let found: Vec<_> = report
        .findings
        .iter()
        .map(|f| (f.rule.name, f.agents))
        .collect();
    assert_eq!(found, [("not-parsed", Agents::KATA4)]);
    assert!(
        report
            .verdicts
            .iter()
            .all(|v| v.refused.is_some() == (v.agent == Agent::Kata4)),
        "{:?}",
        report.verdicts
    );
}
