//! A failure means that the soak's judge would let a broken boot pass: each boot here is a sound
//! one with one thing changed.

use super::*;
use serde_json::{Value, json};

const GPUS: [&str; 2] = ["0001:00:00.0", "0001:00:01.0"];

/// A spec that gives these GPUs, whose minors are their indices.
fn spec(given: &[usize]) -> String {
    let device = |index: &usize| {
        let node = json!({ "path": format!("/dev/nvidia{index}"), "fileMode": 438 });
        json!({ "name": index.to_string(), "containerEdits": { "deviceNodes": [node] } })
    };
    json!({ "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
        "devices": given.iter().map(device).collect::<Vec<_>>() })
    .to_string()
}

fn counters(changed: &str, by: &str) -> String {
    let of = |gpu: &str| {
        format!(
            "{gpu} adapter: up use_count: 1 opens: 1 closes: 0 inits: 1 init_failures: 0 \
            teardowns: 0"
        )
    };
    GPUS.map(of).join("; ").replacen(changed, by, 1)
}

/// Lines of the agent and the script.
fn lines(fields: &[Value]) -> Vec<AgentLine> {
    let with_source = |line: &Value| {
        let mut line = line.clone();
        line["source"] = "agent".into();
        AgentLine::parse(&line.to_string()).unwrap()
    };
    fields.iter().map(with_source).collect()
}

fn notes() -> Vec<Value> {
    let nodes = "/dev/nvidia0 /dev/nvidia1";
    vec![
        json!({ "msg": "script", "when": "now", "did": "sleep:0", "error": "", "pid": "1" }),
        json!({ "msg": "container created", "container": "all", "nodes": "/dev/nvidia0 195:0 \
            666,/dev/nvidia1 195:1 666,/dev/nvidiactl 195:255 666" }),
        json!({ "msg": "process", "process": "keeper", "state": "S", "files": "5",
            "nodes": nodes }),
        json!({ "msg": "process", "process": "worker", "state": "S", "files": "30",
            "nodes": nodes }),
        json!({ "msg": "process", "process": "opener", "state": "S", "files": "5", "nodes": "" }),
        json!({ "msg": "files", "names": "/run/kata-gpu-init/boot.ndjson \
            /var/run/cdi/nvidia.yaml" }),
        json!({ "msg": "file", "text": spec(&[0, 1]) }),
        json!({ "msg": "counters", "all": counters("", "") }),
        json!({ "msg": "script", "when": "rest", "did": "counters", "error": "" }),
    ]
}

fn event(name: &str, gpu: Option<usize>, fields: Value) -> Record {
    let mut record = Record::new(Kind::Event, name);
    record.fields = fields.as_object().unwrap().clone();
    if let Some(index) = gpu {
        record.gpu = GPUS[index].parse().ok();
        record.fields.insert("index".into(), index.into());
    }
    record
}

fn records() -> Vec<Record> {
    let mut all: Vec<Record> = (0..2)
        .map(|gpu| event(names::GPU_BOUND, Some(gpu), json!({ "minor": gpu })))
        .collect();
    all.extend((0..2).map(|gpu| event(names::GPU_USABLE, Some(gpu), json!({}))));
    all.push(event(
        names::SETTLED,
        None,
        json!({ "usable": 2, "failed": 0 }),
    ));
    numbered(all)
}

fn numbered(mut records: Vec<Record>) -> Vec<Record> {
    (0..)
        .zip(&mut records)
        .for_each(|(seq, record)| record.seq = seq);
    records
}

fn sound() -> (Description, Observed) {
    let mut boot = Description::plain(7, 2, "");
    boot.containers = vec![Container {
        name: "all",
        gpu: None,
        answer: Answer::Created,
    }];
    (
        boot,
        Observed {
            records: records(),
            lines: lines(&notes()),
            ..Observed::default()
        },
    )
}

/// Kinds of what is found.
fn kinds(boot: &Description, seen: &Observed) -> BTreeSet<&'static str> {
    judge(boot, seen)
        .into_iter()
        .map(|finding| finding.kind)
        .collect()
}

/// Kinds found where one line of the notes has another value.
fn with_note(message: &str, key: &str, value: &str) -> BTreeSet<&'static str> {
    let (boot, mut seen) = sound();
    let mut all = notes();
    let line = all.iter_mut().find(|line| line["msg"] == message).unwrap();
    line[key] = value.into();
    seen.lines = lines(&all);
    kinds(&boot, &seen)
}

/// Kinds found where the records are others.
fn with_records(change: impl FnOnce(&mut Vec<Record>)) -> BTreeSet<&'static str> {
    let (boot, mut seen) = sound();
    change(&mut seen.records);
    kinds(&boot, &seen)
}

#[test]
fn a_sound_boot_has_no_findings() {
    let (boot, seen) = sound();
    assert_eq!(judge(&boot, &seen), []);
}

#[test]
fn a_gpu_closed_or_initialised_twice_is_found() {
    for (changed, by) in [
        ("closes: 0", "closes: 1"),
        ("teardowns: 0", "teardowns: 1"),
        ("inits: 1", "inits: 2"),
        ("adapter: up", "adapter: down"),
    ] {
        assert_eq!(
            with_note("counters", "all", &counters(changed, by)),
            ["closed"].into(),
            "{by}"
        );
    }
}

#[test]
fn only_as_many_gpus_are_opened_again_as_opens_were_killed() {
    let (mut boot, mut seen) = sound();
    boot.kill = Some((Process::Opener, "gpu.bound/1".into()));
    let of = |killed: &str, counters: &str| {
        let mut all = notes();
        all.retain(|line| line["process"] != "opener");
        all.push(json!({ "msg": "end", "process": "opener", "killed": killed }));
        all.push(json!({ "msg": "counters", "all": counters }));
        lines(&all)
    };
    let once = |text: &str| {
        text.replacen(
            "closes: 0 inits: 1 init_failures: 0 teardowns: 0",
            "closes: 1 inits: 2 init_failures: 0 teardowns: 1",
            1,
        )
    };
    let one = once(&counters("", ""));
    let two = once(&one);
    for (killed, counters, found) in [
        ("2", &one, 0),
        ("1", &one, 2),
        ("2", &two, 2),
        ("3", &two, 0),
    ] {
        seen.lines = of(killed, counters);
        assert_eq!(
            judge(&boot, &seen).len(),
            found,
            "{killed} killed: {:?}",
            judge(&boot, &seen)
        );
    }
}

#[test]
fn a_missing_or_surplus_cdi_device_is_found() {
    assert_eq!(with_note("file", "text", &spec(&[0])), ["cdi"].into());
    assert_eq!(
        with_note("file", "text", "error: no such file"),
        ["cdi"].into()
    );
    assert_eq!(
        with_note(
            "file",
            "text",
            &spec(&[0, 1]).replace("/dev/nvidia1", "/dev/nvidia0")
        ),
        ["cdi"].into()
    );
    // Torn amid its text.
    assert_eq!(
        with_note("file", "text", &spec(&[0, 1])[..60]),
        ["cdi"].into()
    );
    // Failed, and still in the spec.
    let (mut boot, mut seen) = sound();
    boot.gpus[1] = Fate::Fails("firmware-boot");
    boot.containers.clear();
    seen.records.truncate(3);
    let failed = json!({ "reason": "firmware-boot", "cure": "c" });
    seen.records.push(Record {
        error: Some(format!("init: GPU {}", GPUS[1])),
        ..event(names::GPU_FAILED, Some(1), failed)
    });
    seen.records.push(event(
        names::SETTLED,
        None,
        json!({ "usable": 1, "failed": 1 }),
    ));
    seen.records = numbered(seen.records);
    assert_eq!(
        kinds(&boot, &seen),
        ["cdi"].into(),
        "{:?}",
        judge(&boot, &seen)
    );
}

#[test]
fn a_dead_guest_is_found() {
    for (console, kind) in [
        ("Kernel panic - not syncing", "guest"),
        ("kata-gpu-init: a bug: panicked at x", "bug"),
    ] {
        let (boot, mut seen) = sound();
        seen.console = console.into();
        assert_eq!(kinds(&boot, &seen), [kind].into());
    }
    let (mut boot, mut seen) = sound();
    seen.ended = Some("exit status: 0".into());
    assert_eq!(kinds(&boot, &seen), ["guest"].into());
    // Ended as planned, with its reason; and without one.
    boot.kill = Some((Process::Agent, "settled".into()));
    seen.lines = lines(&[
        json!({ "msg": "ttRPC server started", "pid": "77" }),
        json!({ "msg": "end", "process": "agent", "killed": "1" }),
    ]);
    assert_eq!(kinds(&boot, &seen), ["guest"].into());
    seen.console = "kata-gpu-init: kata-agent has ended (killed by SIGKILL): powering off".into();
    assert_eq!(judge(&boot, &seen), []);
}

#[test]
fn a_stream_with_gaps_or_unknown_records_is_found() {
    assert_eq!(
        with_records(|all| drop(all.remove(0))),
        ["cdi", "container", "stream"].into()
    );
    assert_eq!(with_records(|all| all[4].seq = 9), ["stream"].into());
    assert_eq!(
        with_records(|all| all.push(Record {
            seq: 5,
            ..Record::new(Kind::Event, "gpu.new")
        })),
        ["unknown-event"].into()
    );
    let span = |kind, seq| Record {
        seq,
        span: Some(1),
        ..Record::new(kind, names::GPU_INIT)
    };
    assert_eq!(
        with_records(|all| all.extend([
            span(Kind::Begin, 5),
            span(Kind::End, 6),
            span(Kind::End, 7)
        ])),
        ["stream"].into()
    );
    let (boot, mut seen) = sound();
    seen.garbage = vec!["malformed".into()];
    assert_eq!(kinds(&boot, &seen), ["stream"].into());
}

#[test]
fn a_gpu_without_one_end_or_with_another_reason_is_found() {
    assert_eq!(
        with_records(|all| all[3].name = names::GPU_FOUND.into()),
        ["fate"].into()
    );
    // Usable, and failed afterwards, without a sentence.
    let failed = |all: &mut Vec<Record>| {
        all.push(Record {
            seq: 5,
            ..event(names::GPU_FAILED, Some(1), json!({ "reason": "internal" }))
        })
    };
    assert_eq!(with_records(failed), ["fate", "reason"].into());
    assert_eq!(
        with_records(|all| all[4].fields = json!({ "usable": 1, "failed": 1 })
            .as_object()
            .unwrap()
            .clone()),
        ["fate"].into()
    );
}

#[test]
fn deaths_leaks_and_containers_that_were_not_planned_are_found() {
    let died = |all: &mut Vec<Record>| {
        let fields = json!({ "process": "worker", "status": "exit status 1" });
        all.push(Record {
            seq: 5,
            ..event(names::PROCESS_DIED, None, fields)
        });
    };
    assert_eq!(with_records(died), ["death"].into());
    for (message, key, value, kind) in [
        ("process", "nodes", "/dev/nvidia0", "leak"),
        (
            "process",
            "nodes",
            "/dev/nvidia0 /dev/nvidia1 /dev/nvidia1",
            "leak",
        ),
        ("process", "state", "Z", "leak"),
        ("process", "files", "4000", "leak"),
        ("process", "process", "worker", "leak"),
        ("files", "names", "/var/run/cdi/nvidia.yaml.tmp", "leak"),
        (
            "container created",
            "nodes",
            "/dev/nvidia0 195:0 666",
            "container",
        ),
        ("container created", "msg", "container failed", "container"),
        ("container created", "container", "other", "container"),
        ("script", "pid", "77", "hand-over"),
        ("script", "error", "no process", "script"),
    ] {
        assert_eq!(
            with_note(message, key, value),
            [kind].into(),
            "{message}: {key}={value}"
        );
    }
}

#[test]
fn a_kill_that_never_came_is_found_and_one_of_nobody_is_not() {
    let (mut boot, mut seen) = sound();
    boot.kill = Some((Process::Lane, "settled".into()));
    assert_eq!(
        (kill_of(&boot, &seen), kinds(&boot, &seen)),
        (Some(Kill::NotReached), ["kill"].into())
    );
    for (killed, kill) in [("0", Kill::NoProcess), ("1", Kill::Done)] {
        let mut all = notes();
        all.push(json!({ "msg": "end", "process": "lane", "killed": killed }));
        seen.lines = lines(&all);
        assert_eq!(
            (kill_of(&boot, &seen), judge(&boot, &seen)),
            (Some(kill), vec![])
        );
    }
}
