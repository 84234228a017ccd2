//! A failure means that a stop, a kill or a restart of the collector amid boots loses, repeats or
//! miscounts records, or that a boot cannot be shown while it comes.

use super::*;
use crate::stderr;
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::record::Line;

#[test]
fn kill_9_amid_boots_loses_nothing_that_the_guests_have() {
    const GUESTS: u64 = 5;
    const RECORDS: u64 = 3000;
    let dir = folder();
    let uds: Vec<String> = (0..GUESTS)
        .flat_map(|n| ["--uds".to_string(), format!("{}/v{n}", dir.0.display())])
        .collect();
    let words: Vec<&str> = uds.iter().map(String::as_str).collect();
    let guests: Vec<Guest> = (0..GUESTS)
        .map(|n| Guest::start(n, socket(&dir.0, &format!("v{n}"))))
        .collect();
    let mut torn = 0;
    for round in 1..=3 {
        let collector = Collector::start(&dir.0, &words);
        guests.iter().for_each(|guest| guest.push(RECORDS / 3));
        // In the middle: some are in the files, most are on their way.
        until("some records are stored", || {
            (0..GUESTS).any(|n| stored(&dir.0, n) as u64 > (round - 1) * RECORDS / 3 + 50)
        });
        collector.kill();
        torn += (0..GUESTS)
            .filter(|n| read(&dir.0, *n).unfinished > 0)
            .count() as u64;
    }
    let collector = Collector::start(&dir.0, &words);
    for n in 0..GUESTS {
        until_stored(&dir.0, n, RECORDS as usize);
    }
    collector.stop();
    for n in 0..GUESTS {
        let file = read(&dir.0, n);
        // A torn line may lack any of its end: only whole lines are records.
        let text = crate::text(boot_path(&dir.0, n));
        let records = text
            .lines()
            .filter_map(|line| match decode(line.as_bytes()) {
                Ok(Line::Record(record)) => Some(record.seq),
                _ => None,
            });
        let mut lines: Vec<u64> = records.collect();
        lines.sort_unstable();
        assert_eq!(lines, (0..RECORDS).collect::<Vec<_>>(), "each once");
        assert_eq!(text.matches("\"stream\"").count(), 1, "one header");
        assert!(
            !file
                .host
                .iter()
                .any(|l| matches!(l.event, HostEvent::Lost { .. }))
        );
    }
    // A kill inside a write leaves a torn line, which is named as damage and came again.
    assert!((0..GUESTS).map(|n| read(&dir.0, n).damaged).sum::<u64>() <= torn);
}

#[test]
fn what_a_guest_no_longer_has_after_a_kill_is_counted_as_lost() {
    let dir = folder();
    // So small that it forgets while no collector listens.
    let guest = Guest::with_ring(1, socket(&dir.0, "v"), Ring::with_capacity(8 << 10));
    let collector = Collector::start(&dir.0, &[]);
    guest.push(10);
    until_stored(&dir.0, 1, 10);
    collector.kill();
    guest.push(1000);
    let collector = Collector::start(&dir.0, &[]);
    // All that the ring still has: a reader that was overtaken before it saw the end of its
    // connection has put a report behind the 1010 records.
    let kept = || guest.ring.next_seq() - guest.ring.first_seq();
    until("the ring's records", || {
        read(&dir.0, 1).records.len() as u64 == 10 + kept()
    });
    collector.stop();
    let first = guest.ring.first_seq();
    assert!(first > 10, "the ring forgot");
    let file = read(&dir.0, 1);
    assert_eq!(file.records.len() as u64, 10 + kept());
    let lost = file.host.iter().rev().find_map(|l| match &l.event {
        HostEvent::Lost { count, gaps } => Some((*count, gaps.clone())),
        _ => None,
    });
    assert_eq!(lost, Some((first - 10, vec![(10, first - 1)])));
    assert_eq!(file.seqs.missing(), first - 10);
}

#[test]
fn sigterm_takes_what_has_arrived_and_removes_the_socket() {
    let dir = folder();
    let collector = Collector::start(&dir.0, &[]);
    let mut guest = Raw::connect(&socket(&dir.0, "v"));
    let text: String = (0..1500).map(event).collect();
    // All of it is in the kernel when this returns.
    guest.say(header(1) + &text);
    let said = collector.stop();
    assert_whole(&read(&dir.0, 1), 1500);
    assert!(matches!(
        read(&dir.0, 1).host.last().unwrap().event,
        HostEvent::Disconnected { records: 1500, .. }
    ));
    assert!(
        said.last()
            .unwrap()
            .contains("1 boots, 1500 records (0 came again), 0 dropped"),
        "{said:?}"
    );
    assert!(!socket(&dir.0, "v").exists());
}

#[test]
fn boots_can_be_shown_while_they_come() {
    let dir = folder();
    let _collector = Collector::start(&dir.0, &[]);
    let guest = Guest::start(1, socket(&dir.0, "v"));
    let mut shown = Vec::new();
    for round in 1..=20 {
        guest.push(50);
        let output = Command::new(program())
            .args(["show", "--json", "--dir"])
            .arg(dir.0.join("boots"))
            .output()
            .unwrap();
        if output.status.success() {
            let boot: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(
                (&boot["damaged_lines"], &boot["lost"]["records"]),
                (&0.into(), &0.into()),
                "{boot}"
            );
            shown.push(round);
        } else {
            // Only before the first line is there.
            let why = stderr(&output);
            assert!(
                shown.is_empty() && (why.contains("no boot in") || why.contains("no event stream")),
                "{why}"
            );
        }
    }
    assert!(shown.len() >= 10, "{shown:?}");
    until_stored(&dir.0, 1, 1000);
}

#[test]
fn a_second_collector_is_refused_and_a_stale_socket_replaced() {
    let dir = folder();
    let first = Collector::start(&dir.0, &[]);
    let second = Collector::command(&dir.0, &["--uds", "/tmp/x"])
        .output()
        .unwrap();
    let why = stderr(&second);
    assert!(
        !second.status.success() && why.contains("another collector"),
        "{why}"
    );
    first.kill();
    assert!(socket(&dir.0, "v").exists(), "it could not remove it");
    let _again = Collector::start(&dir.0, &[]);
    let guest = Guest::start(1, socket(&dir.0, "v"));
    guest.push(3);
    until_stored(&dir.0, 1, 3);
}

#[test]
fn a_directory_made_again_gets_every_record_again() {
    let dir = folder();
    let collector = Collector::start(&dir.0, &[]);
    let guest = Guest::start(1, socket(&dir.0, "v"));
    guest.push(100);
    until_stored(&dir.0, 1, 100);
    std::fs::remove_dir_all(dir.0.join("boots")).unwrap();
    crate::make_dir(dir.0.join("boots"));
    guest.push(50);
    until_stored(&dir.0, 1, 150);
    drop(guest);
    let said = collector.stop();
    assert_whole(&read(&dir.0, 1), 150);
    assert!(
        said.iter()
            .any(|l| l.contains("was removed while its boot was received")),
        "{said:?}"
    );
}
