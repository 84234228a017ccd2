//! A disk that is full: a small tmpfs in a mount namespace of the collector's own.

use super::*;

/// Whether this machine lets us mount a tmpfs in a namespace; where not, says why.
fn can_mount() -> bool {
    let output = Command::new("unshare")
        .args(["-Urm", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"])
        .output();
    let why = match output {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(e) => e.to_string(),
    };
    assert!(
        std::env::var_os("REQUIRE_NAMESPACES").is_none(),
        "no tmpfs in a namespace: {why}"
    );
    eprintln!("skipped: no tmpfs in a namespace: {why}");
    false
}

#[test]
fn after_a_full_disk_the_guest_sends_its_records_again() {
    const RECORDS: u64 = 6000;
    if !can_mount() {
        return;
    }
    let dir = folder();
    let boots = dir.0.join("boots");
    std::fs::create_dir(&boots).unwrap();
    let script = "mount -t tmpfs -o size=512k none \"$1\" \
                  && head -c 300000 /dev/zero > \"$1/filler\" \
                  && exec \"$0\" collect --no-vsock --no-vms \
                  --dir \"$1\" --uds \"$2/v\" --uds \"$2/w\" --limit waiting-per-boot=4096";
    let mut command = Command::new("unshare");
    command
        .args(["-Urm", "sh", "-c", script])
        .arg(program())
        .arg(&boots)
        .arg(&dir.0);
    let collector = Collector::of(&mut command);
    // The collector's view of that folder; `unshare` becomes the shell, and that the collector.
    let inside = PathBuf::from(format!("/proc/{}/root", collector.pid()))
        .join(boots.strip_prefix("/").unwrap());
    let stored = |boot: u64| {
        let file = std::fs::File::open(inside.join(format!("{}.ndjson", boot_id(boot))));
        file.map_or_else(
            |_| BootFile::default(),
            |file| BootFile::read(file).unwrap(),
        )
    };
    let guest = Guest::start(1, socket(&dir.0, "v"));
    guest.push(RECORDS);
    let line = collector.wait_for("No space left on device");
    assert!(line.contains("receiving goes on"), "{line}");
    // One that comes while it is full is received as well.
    let late = Guest::start(2, socket(&dir.0, "w"));
    late.push(200);
    until("it is full of records", || !stored(1).records.is_empty());
    let full = stored(1);
    assert!(
        (full.records.len() as u64) < RECORDS && full.damaged == 0,
        "{} records",
        full.records.len()
    );
    std::fs::remove_file(inside.join("filler")).unwrap();
    let line = collector.wait_for("boots are written again");
    let dropped: u64 = line
        .split("; ")
        .nth(1)
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert!(dropped > 0, "{line}");
    until("everything came again", || {
        stored(1).records.len() as u64 == RECORDS && stored(2).records.len() == 200
    });
    let file = stored(1);
    let mut seqs: Vec<u64> = file.records.iter().map(|r| r.seq).collect();
    seqs.sort_unstable();
    assert_eq!(seqs, (0..RECORDS).collect::<Vec<_>>());
    assert_eq!(
        (file.damaged, file.seqs.missing()),
        (0, 0),
        "{:?}",
        file.damage
    );
    let counted: u64 = file
        .host
        .iter()
        .map(|l| {
            if let HostEvent::Dropped { records, .. } = &l.event {
                *records
            } else {
                0
            }
        })
        .sum();
    assert!(counted > 0, "the file says what was dropped");
    drop(guest);
    let said = collector.stop();
    assert!(!said.last().unwrap().contains(" 0 dropped"), "{said:?}");
}

#[test]
fn dropped_records_that_do_not_return_are_counted_missing() {
    if !can_mount() {
        return;
    }
    let dir = folder();
    let boots = dir.0.join("boots");
    std::fs::create_dir(&boots).unwrap();
    let script = "mount -t tmpfs -o size=512k none \"$1\" \
                  && exec \"$0\" collect --no-vsock --no-vms --dir \"$1\" --uds \"$2/v\" \
                  --limit waiting-per-boot=4096";
    let collector = Collector::of(
        Command::new("unshare")
            .args(["-Urm", "sh", "-c", script])
            .arg(program())
            .arg(&boots)
            .arg(&dir.0),
    );
    let inside = PathBuf::from(format!("/proc/{}/root", collector.pid()))
        .join(boots.strip_prefix("/").unwrap());
    std::fs::write(inside.join("filler"), vec![0; 480_000]).unwrap();
    let mut guest = Raw::connect(&socket(&dir.0, "v"));
    guest.say(header(1) + &(0..2000).map(event).collect::<String>());
    collector.wait_for("No space left on device");
    std::fs::remove_file(inside.join("filler")).unwrap();
    collector.wait_for("boots are written again");
    // The collector asks the guest to come again, and this one does not.
    guest.until_closed();
    let path = inside.join(format!("{}.ndjson", boot_id(1)));
    let read = || BootFile::read(std::fs::File::open(&path).unwrap()).unwrap();
    until("the end of the connection", || {
        read()
            .host
            .iter()
            .any(|l| matches!(l.event, HostEvent::Lost { .. }))
    });
    let file = read();
    assert_eq!(
        file.records.len() as u64 + file.seqs.missing(),
        2000,
        "what is there and what is missing are all of them"
    );
    assert!(file.seqs.missing() > 0 && file.damaged == 0);
}
