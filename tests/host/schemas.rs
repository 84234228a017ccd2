//! A failure means that a stream of a released schema can no longer be read whole, or that a guest
//! newer than its host is misread in place of shown as far as it is known.

use crate::collect::{Collector, Raw, boot_path, folder, program, read, socket, until};
use crate::{TempDir, golden, project, write};
use kata_gpu_report::data::boot_file::{BootFile, HostEvent};
use kata_gpu_wire::decode::decode_with_schema;
use kata_gpu_wire::record::{READS, SCHEMA};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A stream of each schema. A new schema gets a line here, with a stream that its first release
/// recorded; no line is ever removed while its schema is read.
const STREAMS: [(u32, &str); 2] = [
    (1, "boots/recorded-8-gpus-slow-host"),
    (NEXT, "schemas/2-made"),
];
const NEXT: u32 = SCHEMA + 1;
/// Number of the made boot, and what its collector and its reader report once.
const BOOT: u64 = 2;
const NEWER: &str = "the guest is newer (schema 2 of the stream, this program's is 1)";
const CURE: &str = "upgrade kata-gpu-boot to the guest's version";

fn fixture(name: &str) -> PathBuf {
    project().join(format!("tests/fixtures/{name}.ndjson"))
}

/// Lines of a stream that are the guest's.
fn guest_lines(name: &str) -> Vec<String> {
    let text = crate::text(fixture(name));
    text.lines()
        .filter(|line| !line.contains("\"kind\":\"host\""))
        .map(str::to_string)
        .collect()
}

fn printed(words: &[&str], file: &Path) -> String {
    let output = Command::new(program())
        .args(words)
        .arg(file)
        .output()
        .unwrap();
    // 1: something failed in the boot.
    assert!(
        matches!(output.status.code(), Some(0 | 1)),
        "{words:?}: {output:?}"
    );
    crate::stdout(&output)
}

fn json(file: &Path) -> serde_json::Value {
    serde_json::from_str(&printed(&["show", "--json"], file)).unwrap()
}

#[test]
fn every_schema_that_is_read_has_a_stream_that_is_read_whole() {
    let mut seen: Vec<u32> = STREAMS.iter().map(|(schema, _)| *schema).collect();
    seen.dedup();
    assert_eq!(seen, READS.collect::<Vec<_>>());
    for (schema, name) in STREAMS {
        for line in guest_lines(name) {
            let decoded = decode_with_schema(line.as_bytes())
                .unwrap_or_else(|e| panic!("{name}: {e}: {line}"));
            assert_eq!(decoded.0, schema, "{name}: {line}");
        }
        let file = BootFile::read(std::fs::File::open(fixture(name)).unwrap()).unwrap();
        assert_eq!(
            (file.damaged, file.newer_schema),
            (0, (schema > SCHEMA).then_some(schema)),
            "{name}: {:?}",
            file.damage
        );
    }
}

#[test]
fn a_newer_stream_is_shown_as_far_as_it_is_known() {
    let file = fixture("schemas/2-made");
    for (form, words) in [
        ("show.txt", &["show"][..]),
        ("show.json", &["show", "--json"]),
        ("path.json", &["show", "--by", "path", "--json"]),
    ] {
        golden(&format!("schemas/2-made/{form}"), &printed(words, &file));
    }
    let shown = printed(&["show", "-vv"], &file);
    // A record of an unknown kind and a span of an unknown name have their own names; unknown keys
    // and keys of another type are fields.
    for text in [
        "memory.free",
        "value=8321499136",
        "kind=counter",
        "gpu.attest",
        "verifier=remote",
        "cpu=0",
        "level=6",
        NEWER,
        CURE,
    ] {
        assert!(shown.contains(text), "no {text}: {shown}");
    }
    assert_eq!(shown.matches(NEWER).count(), 1, "{shown}");
    for stream in [
        "boots/recorded-8-gpus-slow-host",
        "boots/hand-made-3-gpus-one-fails",
    ] {
        assert!(
            !printed(&["show"], &fixture(stream)).contains("newer"),
            "{stream}"
        );
    }
}

/// Known keys are read by the same rules in both schemas.
#[test]
fn a_stream_without_news_is_the_same_boot_in_the_next_schema() {
    let old = fixture("boots/recorded-8-gpus-slow-host");
    let dir = TempDir::new("schemas-same");
    let new = dir.0.join("new.ndjson");
    let lines = crate::text(&old);
    let next = |line: &str| match line.contains("\"kind\":\"host\"") {
        true => format!("{line}\n"),
        false => format!("{}\n", line.replacen("\"schema\":1", "\"schema\":2", 1)),
    };
    write(&new, lines.lines().map(next).collect::<String>());
    let boot = |file: &Path| {
        let mut boot = json(file);
        let schema = boot.as_object_mut().unwrap().remove("newer_schema");
        (schema.and_then(|schema| schema.as_u64()), boot)
    };
    // The agent's lines are beside the recorded stream alone.
    let alone = dir.0.join("old.ndjson");
    write(&alone, lines);
    let ((none, old), (two, new)) = (boot(&alone), boot(&new));
    assert_eq!((none, two), (None, Some(2)));
    assert!(
        old == new && old["gpus"].as_array().unwrap().len() == 8,
        "{old}\n{new}"
    );
}

#[test]
fn a_newer_guests_lines_are_kept_and_reported_once() {
    let dir = folder();
    let collector = Collector::start(&dir.0, &[]);
    let lines = guest_lines("schemas/2-made");
    let mut guest = Raw::connect(&socket(&dir.0, "v"));
    guest.say(format!("{}\n", lines.join("\n")));
    let said = collector.wait_for(NEWER);
    assert!(said.contains(CURE), "{said}");
    // The guest answers in its own schema, and its clock is placed by the answer.
    let mut asked = String::new();
    BufReader::new(guest.0.try_clone().unwrap())
        .read_line(&mut asked)
        .unwrap();
    let id = serde_json::from_str::<serde_json::Value>(&asked).unwrap()["ping"]
        .as_u64()
        .unwrap();
    guest.say(format!(
        "{{\"schema\":2,\"pong\":{id},\"boottime_ns\":2500000000,\"monotonic_ns\":1}}\n"
    ));
    let sampled = || {
        read(&dir.0, BOOT)
            .host
            .iter()
            .any(|line| matches!(line.event, HostEvent::Clock(_)))
    };
    until("a clock sample", sampled);
    drop(guest);
    let said = collector.stop();
    assert_eq!(
        said.iter().filter(|line| line.contains(NEWER)).count(),
        1,
        "{said:#?}"
    );
    // Byte for byte, in the order of the stream.
    let text = crate::text(boot_path(&dir.0, BOOT));
    let kept: Vec<&str> = text
        .lines()
        .filter(|line| !line.contains("\"kind\":\"host\""))
        .collect();
    assert_eq!(kept, lines);
    let listed = printed(&["list", "--dir"], &dir.0.join("boots"));
    assert!(listed.contains("1/2"), "{listed}");
}

/// Negative control: two schemas ahead, nothing is guessed.
#[test]
fn a_guest_two_schemas_ahead_is_refused_with_the_cure() {
    let dir = folder();
    let collector = Collector::start(&dir.0, &[]);
    let mut guest = Raw::connect(&socket(&dir.0, "v"));
    guest.say(
        guest_lines("schemas/2-made")
            .join("\n")
            .replace("\"schema\":2", "\"schema\":3")
            + "\n",
    );
    guest.until_closed();
    let said = collector.wait_for("schema 3, this program reads schemas 1 to 2");
    assert!(said.contains(CURE), "{said}");
    assert!(!boot_path(&dir.0, BOOT).exists());
}

#[test]
fn lines_of_a_newer_collector_are_counted_and_cost_nothing() {
    let dir = TempDir::new("schemas-collector");
    let file = dir.0.join("boot.ndjson");
    let old = crate::text(fixture("boots/hand-made-3-gpus-one-fails"));
    let host = |schema: u32, rest: &str| {
        format!(
            "{{\"schema\":{schema},\"kind\":\"host\",\"realtime_ns\":1767323041350000000,{rest}}}\n"
        )
    };
    let added = [
        host(1, r#""event":"migrated","to":"node-2""#),
        host(2, r#""event":"migrated","to":{"node":2}"#),
        host(
            2,
            r#""event":"sandbox","id":"5a5b","pod":"train","namespace":"ml","node":"n""#,
        ),
    ];
    write(&file, old + &added.concat());
    let boot = json(&file);
    assert_eq!(boot["sandbox"]["pod"], "train");
    assert_eq!(
        [&boot["unknown_host_lines"], &boot["damaged_lines"]],
        [2, 0]
    );
    assert!(
        printed(&["show"], &file).contains(
            "2 line(s) of a newer collector are unknown here: upgrade this kata-gpu-boot"
        )
    );
    // Negative control: a known event that is wrong, and a schema that nobody reads.
    let damaged = [
        host(1, r#""event":"clock","boottime_ns":"1""#),
        host(3, r#""event":"migrated""#),
    ]
    .concat();
    write(&file, crate::text(&file) + &damaged);
    let boot = json(&file);
    assert_eq!(
        [&boot["unknown_host_lines"], &boot["damaged_lines"]],
        [2, 2]
    );
}
