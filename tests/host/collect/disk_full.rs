//! A failure means that a full disk costs the collector records for good, or hides that records are
//! missing.

use super::*;
use crate::remove;

/// Whether this machine lets us mount a tmpfs in a namespace; where not, says why.
fn can_mount() -> bool {
    let output = Command::new("unshare")
        .args(["-Urm", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"])
        .output();
    let why = match output {
        Ok(output) if output.status.success() => return true,
        Ok(output) => crate::stderr(&output),
        Err(e) => e.to_string(),
    };
    crate::skip(
        "REQUIRE_NAMESPACES",
        &format!("no tmpfs in a namespace: {why}"),
    );
    false
}

/// A collector whose boots are on a small tmpfs of its own, and its view of that folder.
fn on_a_small_disk(dir: &Path) -> (Collector, PathBuf) {
    let boots = dir.join("boots");
    crate::make_dir(&boots);
    // `unshare` becomes the shell, and that the collector.
    let script = "mount -t tmpfs -o size=512k none \"$1\" \
&& head -c 300000 /dev/zero > \"$1/filler\" \
&& exec \"$0\" collect --no-vsock --no-vms \
--dir \"$1\" --uds \"$2/v\" --uds \"$2/w\" --limit waiting-per-boot=4096";
    let mut command = Command::new("unshare");
    command.args(["-Urm", "sh", "-c", script]).arg(program());
    let collector = Collector::of(command.arg(&boots).arg(dir));
    let root = PathBuf::from(format!("/proc/{}/root", collector.pid()));
    (collector, root.join(boots.strip_prefix("/").unwrap()))
}

fn stored_in(inside: &Path, boot: u64) -> BootFile {
    let file = std::fs::File::open(inside.join(format!("{}.ndjson", boot_id(boot))));
    file.map_or_else(
        |_| BootFile::default(),
        |file| BootFile::read(file).unwrap(),
    )
}

#[test]
fn after_a_full_disk_the_guest_sends_its_records_again() {
    const RECORDS: u64 = 6000;
    if !can_mount() {
        return;
    }
    let dir = folder();
    let (collector, inside) = on_a_small_disk(&dir.0);
    let stored = |boot| stored_in(&inside, boot);
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
    remove(inside.join("filler"));
    let line = collector.wait_for("boots are written again");
    let (_, dropped) = line.split_once("; ").unwrap();
    assert!(dropped.starts_with(|c| ('1'..='9').contains(&c)), "{line}");
    until("everything came again", || {
        stored(1).records.len() as u64 == RECORDS && stored(2).records.len() == 200
    });
    let file = stored(1);
    assert_whole(&file, RECORDS);
    let says = |event: &HostEvent| matches!(event, HostEvent::Dropped { records: 1.., .. });
    assert!(
        file.host.iter().any(|line| says(&line.event)),
        "{:?}",
        file.host
    );
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
    let (collector, inside) = on_a_small_disk(&dir.0);
    crate::write(inside.join("filler"), vec![0; 480_000]);
    let mut guest = Raw::connect(&socket(&dir.0, "v"));
    guest.say(header(1) + &(0..2000).map(event).collect::<String>());
    collector.wait_for("No space left on device");
    remove(inside.join("filler"));
    collector.wait_for("boots are written again");
    // The collector asks the guest to come again, and this one does not.
    guest.until_closed();
    until("the end of the connection", || {
        let file = stored_in(&inside, 1);
        file.host
            .iter()
            .any(|l| matches!(l.event, HostEvent::Lost { .. }))
    });
    let file = stored_in(&inside, 1);
    assert_eq!(
        file.records.len() as u64 + file.seqs.missing(),
        2000,
        "what is there and what is missing are all of them"
    );
    assert!(file.seqs.missing() > 0 && file.damaged == 0);
}
