//! A failure means that a boot's file is misread: a guest's line passes for the collector's, damage
//! is not counted or costs its neighbours, missing records go unseen, or a reader keeps more than
//! its limits.

use super::*;
use kata_gpu_test_support::event;

const HEADER: &str = "{\"schema\":1,\"stream\":{\"boot_id\":\"0f7a1f8e-0000-4000-8000-00000000beef\
    \",\"version\":\"0.1.0\",\"kernel\":\"6.1\",\"first_seq\":0}}";

fn read(lines: &[&str]) -> BootFile {
    BootFile::read((lines.join("\n") + "\n").as_bytes()).unwrap()
}

#[test]
fn host_lines_survive_the_file() {
    let events = [
        HostEvent::Connected {
            peer: "cid 5".into(),
            first_seq: 0,
        },
        HostEvent::Disconnected {
            peer: "cid 5".into(),
            records: 1,
            duplicates: 2,
        },
        HostEvent::Clock(Sample {
            boottime_ns: 1,
            offset_ns: -2,
            error_ns: 3,
        }),
        HostEvent::Lost {
            count: 2,
            gaps: vec![(3, 4)],
        },
        HostEvent::Garbage {
            lines: 1,
            bytes: 9,
            first: "not a record".into(),
        },
        HostEvent::Capped {
            why: "64 MiB".into(),
        },
        HostEvent::Dropped {
            records: 1,
            first_seq: 5,
            last_seq: 5,
            why: "no space".into(),
        },
        HostEvent::Sandbox(Sandbox {
            id: "s".into(),
            pod: Some("p".into()),
            namespace: None,
            uid: None,
            vmm_user: None,
        }),
        HostEvent::Imported(Box::new(Imported {
            zero: "kernel start".into(),
            ..Imported::default()
        })),
    ];
    let lines: Vec<HostLine> = events.into_iter().map(HostLine::now).collect();
    let text: String = lines.iter().map(HostLine::to_line).collect();
    let file = BootFile::read(text.as_bytes()).unwrap();
    assert_eq!((file.damaged, file.host), (0, lines));
}

#[test]
fn the_collectors_lines_have_a_fixed_form() {
    let mut line = HostLine::now(HostEvent::Clock(Sample {
        boottime_ns: 1,
        offset_ns: 2,
        error_ns: 3,
    }));
    line.realtime_ns = 4;
    let want = "{\"schema\":1,\"kind\":\"host\",\"realtime_ns\":4,\"event\":\"clock\",\
        \"boottime_ns\":1,\"offset_ns\":2,\"error_ns\":3}";
    assert_eq!(line.to_line(), format!("{want}\n"));
}

#[test]
fn what_a_guest_may_send_is_never_a_line_of_the_collectors() {
    let tail = r#""kind":"host","realtime_ns":4,"event":"clock","offset_ns":2,"error_ns":3}"#;
    let forged = [
        // refused by the decoder, so never written:
        (
            format!(r#"{{"schema":1,"seq":1,"name":"x","boottime_ns":1,{tail}"#),
            false,
        ),
        (
            format!(r#"{{"schema":1,"kind":"event","seq":1,"name":"x","boottime_ns":1,{tail}"#),
            false,
        ),
        // accepted, with the decoder's meaning, whatever else is in the line:
        (
            format!(
                r#"{},"boottime_ns":1,{tail}"#,
                HEADER.trim_end_matches('}').to_string() + "}"
            ),
            true,
        ),
        (
            format!(r#"{{"schema":1,"pong":3,"boottime_ns":1,{tail}"#),
            true,
        ),
    ];
    for (line, accepted) in forged {
        assert_eq!(
            kata_gpu_wire::decode::decode(line.as_bytes()).is_ok(),
            accepted,
            "{line}"
        );
        if accepted {
            assert_eq!(read(&[&line]).host, [], "{line}");
        }
    }
}

#[test]
fn damaged_lines_are_counted_and_named_and_the_rest_is_read() {
    let long = "x".repeat(record::MAX_LINE);
    let file = read(&[
        HEADER,
        &event(0),
        "\u{1b}[2Jgarbage",
        &event(1)[..30],
        &long,
        &event(2),
        &event(2),
    ]);
    assert_eq!(
        file.records.iter().map(|r| r.seq).collect::<Vec<_>>(),
        [0, 2],
        "each seq once"
    );
    assert_eq!(file.damaged, 3);
    assert_eq!(
        file.damage.iter().map(|d| d.line).collect::<Vec<_>>(),
        [3, 4, 5]
    );
    assert!(
        file.damage[2].why.contains("line of 16385 bytes"),
        "{:?}",
        file.damage[2]
    );
    assert_eq!(file.seqs.gaps().collect::<Vec<_>>(), [(1, 1)]);
    let many = vec!["junk"; 1000];
    let file = read(&many);
    assert_eq!((file.damaged, file.damage.len()), (1000, MAX_NAMED_DAMAGE));
}

#[test]
fn a_line_that_is_still_being_written_is_not_damage() {
    let file =
        BootFile::read(format!("{HEADER}\n{}\n{}", event(0), &event(1)[..20]).as_bytes()).unwrap();
    assert_eq!(
        (file.records.len(), file.damaged, file.unfinished),
        (1, 0, 20)
    );
}

#[test]
fn a_header_of_another_boot_is_damage() {
    let other = HEADER.replace("beef", "dead");
    let file = read(&[HEADER, HEADER, &other]);
    assert_eq!(file.damaged, 1);
    assert_eq!(
        file.header.unwrap().boot_id,
        "0f7a1f8e-0000-4000-8000-00000000beef"
    );
}

#[test]
fn seqs_in_any_order_make_the_same_set() {
    let mut set = SeqSet::default();
    for (seq, new) in [
        (5, true),
        (7, true),
        (6, true),
        (5, false),
        (6, false),
        (0, true),
        (u64::MAX, true),
        (u64::MAX, false),
    ] {
        assert_eq!(set.insert(seq), new, "{seq}");
    }
    assert_eq!(set.ranges.len(), 3);
    assert_eq!(set.gaps().collect::<Vec<_>>(), [(1, 4), (8, u64::MAX - 1)]);
    assert_eq!(set.missing(), 4 + (u64::MAX - 8));
    assert_eq!(SeqSet::default().missing(), 0);
}

#[test]
fn what_is_known_to_exist_is_missing_until_it_is_seen() {
    let mut set = SeqSet::default();
    set.expect(1);
    assert_eq!(set.gaps().collect::<Vec<_>>(), [(0, 1)]);
    set.insert(0);
    set.expect(4);
    set.expect(2);
    assert_eq!(set.gaps().collect::<Vec<_>>(), [(1, 4)]);
    for seq in 1..5 {
        set.insert(seq);
    }
    assert_eq!((set.missing(), set.ranges()), (0, 1));
    set.insert(u64::MAX);
    set.expect(u64::MAX);
    assert_eq!(set.gaps().collect::<Vec<_>>(), [(5, u64::MAX - 1)]);
}

#[test]
fn a_separate_record_differs_from_one_that_joins() {
    let mut set = SeqSet::default();
    assert!(set.is_apart(3));
    set.insert(3);
    assert_eq!(
        [0, 1, 2, 3, 4, 5].map(|seq| set.is_apart(seq)),
        [true, true, false, false, false, true]
    );
    assert_eq!([2, 3, 4].map(|seq| set.contains(seq)), [false, true, false]);
    assert!(set.is_apart(u64::MAX));
}

#[test]
fn what_is_kept_of_a_file_has_a_limit_in_every_direction() {
    let record = |seq: usize, rest: &str| {
        format!(r#"{{"schema":1,"seq":{seq},"boottime_ns":1,"kind":"event","name":"x",{rest}}}"#)
    };
    let all = |n: usize, rest: &str| {
        let text: String = (0..n).map(|seq| record(seq, rest) + "\n").collect();
        BootFile::read(text.as_bytes()).unwrap()
    };
    let long = format!(r#""error":"{}""#, "e".repeat(16_000));
    let fields = (0..40)
        .map(|n| format!("\"{n}\":0"))
        .collect::<Vec<_>>()
        .join(",");
    let orders = vec!["1"; super::super::compact_record::MAX_AFTER].join(",");
    for (n, rest, kept) in [
        (300, long, MAX_TEXT / 16_000),
        (
            2000,
            format!(r#""fields":{{{fields}}}"#),
            MAX_ALL_FIELDS / 40,
        ),
        (
            200,
            format!(r#""after":[{orders}]"#),
            MAX_ORDERS / super::super::compact_record::MAX_AFTER,
        ),
    ] {
        let file = all(n, &rest);
        assert_eq!(
            (file.records.len(), file.too_large.records as usize),
            (kept, n - kept),
            "{}",
            &rest[..20]
        );
        assert_eq!(
            (file.seqs.missing(), file.damaged),
            (0, 0),
            "what is left out is neither lost nor damage"
        );
    }
    let file = all(
        1,
        &format!(
            r#""fields":{{{}}}"#,
            (0..100)
                .map(|n| format!("\"{n}\":0"))
                .collect::<Vec<_>>()
                .join(",")
        ),
    );
    assert_eq!(
        (
            file.records[0].fields.iter().count(),
            file.too_large.cut_records
        ),
        (super::super::compact_record::MAX_FIELDS, 1)
    );
    let apart: String = (0..MAX_GAPS as usize + 50)
        .map(|n| record(2 * n, r#""level":"info""#) + "\n")
        .collect();
    let file = BootFile::read(apart.as_bytes()).unwrap();
    assert!(
        file.seqs.ranges() <= MAX_GAPS + 1 && file.too_large.records > 0,
        "{}",
        file.seqs.ranges()
    );
}

#[test]
fn the_last_sandbox_is_known_behind_any_number_of_lines() {
    let line = |event| HostLine::now(event).to_line();
    let sandbox = |id: &str| {
        line(HostEvent::Sandbox(Sandbox {
            id: id.into(),
            ..Sandbox::default()
        }))
    };
    let connected = line(HostEvent::Connected {
        peer: "p".into(),
        first_seq: 0,
    });
    let text = sandbox("first") + &connected.repeat(MAX_HOST_LINES + 10) + &sandbox("last");
    let file = BootFile::read(text.as_bytes()).unwrap();
    assert_eq!(file.sandbox().map(|s| s.id.as_str()), Some("last"));
    assert_eq!(
        (
            file.host.len() as u64 + file.too_large.host_lines,
            file.host.len()
        ),
        (MAX_HOST_LINES as u64 + 12, MAX_HOST_LINES)
    );
}
