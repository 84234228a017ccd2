//! A connection of one guest, without its socket. Input: bytes and times. Output: lines for the
//! boot's file, bytes for the guest.
//!
//! The guest is not trusted: every line is decoded, a line that does not decode is counted and
//! dropped, and the connection goes on with the next line. Nothing is stored before a valid header
//! names the boot.

use super::boot_log::Stored;
use super::collector_counters::{Stats, add};
use super::limits::Limits;
use super::store::Attached;
use anyhow::{Result, bail, ensure};
use kata_gpu_report::data::boot_file::HostEvent;
use kata_gpu_report::data::clock_offset::{
    PING_INTERVAL, PING_INTERVAL_QUIET, Pinger, QUIET_AFTER,
};
use kata_gpu_report::data::framing::{Lines, Piece};
use kata_gpu_report::data::text;
use kata_gpu_wire::decode::decode_with_schema;
use kata_gpu_wire::record;
use kata_gpu_wire::record::{DecodeError, Header, Line, MAX_LINE, Pong, Record};
use std::sync::Arc;
use std::time::Instant;

/// Longest text that is kept of a garbage line's reason.
const MAX_REASON: usize = 200;

/// Both clocks of this machine, read together.
#[derive(Clone, Copy, Debug)]
pub struct HostNow {
    pub instant: Instant,
    pub realtime_ns: i64,
}

impl HostNow {
    pub fn read() -> Self {
        Self {
            instant: Instant::now(),
            realtime_ns: text::realtime_ns(),
        }
    }
}

/// The boot of a guest whose header was accepted.
struct Boot {
    attached: Attached,
    pinger: Pinger,
    next_ping: Instant,
    last_record: Instant,
    records: u64,
    duplicates: u64,
}

impl Boot {
    fn take_pong(&mut self, pong: Pong, now: HostNow) {
        let Some(ponged) = self.pinger.receive(pong, now.instant) else {
            return;
        };
        if let Some(sample) = ponged.keep {
            self.attached
                .with(|log| log.append_host(HostEvent::Clock(sample)));
        }
        if ponged.again {
            self.next_ping = now.instant;
        }
    }
}

/// A header that came: the guest's claim of its boot.
#[derive(Debug)]
pub struct Introduction {
    /// Schema of the stream.
    pub schema: u32,
    pub header: Header,
    /// The line as it came.
    pub raw: Vec<u8>,
}

/// The state of one connection.
pub struct Connection {
    peer: String,
    limits: Limits,
    stats: Arc<Stats>,
    lines: Lines,
    introduction: Option<Introduction>,
    /// Lines that came behind the header before `begin`; no more than one reading of the socket.
    behind: Vec<u8>,
    boot: Option<Boot>,
    opened: Instant,
    garbage_lines: u64,
    garbage_bytes: u64,
    first_garbage: Option<String>,
    /// Bytes for the guest.
    out: Vec<u8>,
}

impl Connection {
    pub fn new(peer: String, limits: Limits, stats: Arc<Stats>, now: HostNow) -> Self {
        Self {
            peer,
            limits,
            stats,
            lines: Lines::new(MAX_LINE),
            introduction: None,
            behind: Vec::new(),
            boot: None,
            opened: now.instant,
            garbage_lines: 0,
            garbage_bytes: 0,
            first_garbage: None,
            out: Vec::new(),
        }
    }

    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Takes received bytes. An error ends the connection; everything before it is stored. While
    /// there is an [`Introduction`] nothing more may come before [`Connection::begin`].
    pub fn take(&mut self, bytes: &[u8], now: HostNow) -> Result<()> {
        add(&self.stats.bytes, bytes.len() as u64);
        let mut lines = std::mem::replace(&mut self.lines, Lines::new(MAX_LINE));
        let mut result = Ok(());
        lines.push(bytes, |piece| {
            if result.is_ok() {
                result = self.take_piece(piece, now);
            }
        });
        self.lines = lines;
        self.flush();
        result
    }

    fn flush(&self) {
        if let Some(boot) = &self.boot {
            boot.attached.flush();
        }
    }

    fn take_piece(&mut self, piece: Piece, now: HostNow) -> Result<()> {
        match piece {
            Piece::Line(raw) if self.introduction.is_some() => {
                self.behind.extend_from_slice(raw);
                self.behind.push(b'\n');
            }
            Piece::Line(raw) => return self.take_line(raw, now),
            Piece::TooLong(n) => self.garbage(n, DecodeError::TooLong(n)),
        }
        Ok(())
    }

    fn take_line(&mut self, raw: &[u8], now: HostNow) -> Result<()> {
        let decoded = decode_with_schema(raw);
        let Some(boot) = &mut self.boot else {
            return self.take_before_boot(decoded, raw);
        };
        match decoded {
            Ok((_, Line::Header(header))) => ensure!(
                header.boot_id == **boot.attached.id(),
                "{}: claimed boot {} and now claims {}",
                self.peer,
                boot.attached.id(),
                header.boot_id
            ),
            Ok((_, Line::Record(record))) => self.take_record(&record, raw, now),
            Ok((_, Line::Pong(pong))) => boot.take_pong(pong, now),
            Err(error) => self.garbage(raw.len(), error),
        }
        Ok(())
    }

    fn take_before_boot(
        &mut self,
        decoded: Result<(u32, Line), DecodeError>,
        raw: &[u8],
    ) -> Result<()> {
        match decoded {
            Ok((schema, Line::Header(header))) => {
                self.introduction = Some(Introduction {
                    schema,
                    header,
                    raw: raw.to_vec(),
                });
            }
            Ok((_, Line::Record(_) | Line::Pong(_))) => self.garbage(
                raw.len(),
                DecodeError::Invalid("a record before the header"),
            ),
            // Every line will be of that version: report it once and hang up.
            Err(error @ DecodeError::Schema(_)) => bail!("{}: {error}", self.peer),
            Err(error) => self.garbage(raw.len(), error),
        }
        Ok(())
    }

    fn take_record(&mut self, record: &Record, raw: &[u8], now: HostNow) {
        let Some(boot) = &mut self.boot else { return };
        match boot.attached.with(|log| log.append(record, raw)) {
            Stored::New => {
                add(&self.stats.records, 1);
                boot.records += 1;
                boot.last_record = now.instant;
                // The guest sends again: end the slow rhythm of a quiet boot.
                boot.next_ping = boot.next_ping.min(now.instant + PING_INTERVAL);
            }
            Stored::Duplicate => {
                add(&self.stats.duplicates, 1);
                boot.duplicates += 1;
            }
            Stored::Capped => add(&self.stats.capped, 1),
            Stored::Dropped => add(&self.stats.dropped, 1),
            Stored::Gap => self.garbage(
                raw.len(),
                DecodeError::Invalid("too many gaps between the numbers (limit gaps)"),
            ),
        }
    }

    /// The header to deal with, if one came. Lines behind it wait until [`Connection::begin`].
    pub fn introduction(&mut self) -> Option<Introduction> {
        self.introduction.take()
    }

    /// Accepts the guest of the [`Introduction`] and takes the lines received meanwhile.
    pub fn begin(&mut self, attached: Attached, now: HostNow) -> Result<()> {
        let pinger = Pinger::new(attached.with(|log| log.best_sample()));
        self.boot = Some(Boot {
            attached,
            pinger,
            next_ping: now.instant,
            last_record: now.instant,
            records: 0,
            duplicates: 0,
        });
        let behind = std::mem::take(&mut self.behind);
        for line in behind.split_inclusive(|b| *b == b'\n') {
            self.take_line(line.strip_suffix(b"\n").unwrap_or(line), now)?;
        }
        self.flush();
        Ok(())
    }

    /// True once the header was accepted, and the first ping is with the kernel.
    pub fn was_pinged(&self) -> bool {
        self.boot
            .as_ref()
            .is_some_and(|boot| boot.pinger.sent_any())
            && self.out.is_empty()
    }

    /// Boot of this connection.
    pub fn attached(&self) -> Option<&Attached> {
        self.boot.as_ref().map(|boot| &boot.attached)
    }

    fn garbage(&mut self, bytes: usize, why: DecodeError) {
        add(&self.stats.garbage, 1);
        self.garbage_lines += 1;
        self.garbage_bytes += bytes as u64;
        self.first_garbage
            .get_or_insert_with(|| text::printable_start(&why.to_string(), MAX_REASON));
    }

    /// Time at which [`Connection::tick`] is due.
    pub fn deadline(&self) -> Instant {
        self.boot
            .as_ref()
            .map_or(self.opened + self.limits.header_deadline(), |boot| {
                boot.next_ping
            })
    }

    /// Sends the next ping if it is due, or fails for a peer that sent no header in time.
    pub fn tick(&mut self, now: HostNow) -> Result<()> {
        if now.instant < self.deadline() {
            return Ok(());
        }
        let Some(boot) = &mut self.boot else {
            bail!(
                "{}: no header within {} s (limit header)",
                self.peer,
                self.limits.header
            );
        };
        let quiet = now.instant.saturating_duration_since(boot.last_record) >= QUIET_AFTER;
        boot.next_ping = now.instant
            + if quiet {
                PING_INTERVAL_QUIET
            } else {
                PING_INTERVAL
            };
        // A guest that does not read gets no second ping behind a stuck ping.
        if self.out.is_empty() {
            let id = boot.pinger.send(now.instant, now.realtime_ns);
            self.out.extend_from_slice(record::ping_line(id).as_bytes());
        }
        Ok(())
    }

    /// Bytes to send to the guest.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// Ends the connection and stores what is missing and what was dropped.
    pub fn end(mut self) -> Result<()> {
        if self.lines.unfinished() > 0 {
            self.garbage(
                self.lines.unfinished(),
                DecodeError::Malformed("the connection ended inside a line".into()),
            );
        }
        let Some(boot) = self.boot.take() else {
            if let Some(first) = self.first_garbage {
                bail!(
                    "{}: {} line(s) and no header; the first: {first}",
                    self.peer,
                    self.garbage_lines
                );
            }
            return Ok(());
        };
        boot.attached.with(|log| {
            if let Some(first) = self.first_garbage {
                log.append_host(HostEvent::Garbage {
                    lines: self.garbage_lines,
                    bytes: self.garbage_bytes,
                    first,
                });
            }
            log.append_loss();
            log.append_host(HostEvent::Disconnected {
                peer: self.peer.clone(),
                records: boot.records,
                duplicates: boot.duplicates,
            });
        });
        boot.attached.flush();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::disk::Disk;
    use super::super::keep::Keep;
    use super::super::place::Place;
    use super::super::store::Store;
    use super::*;
    use kata_gpu_report::data::boot_file::BootFile;
    use kata_gpu_test_support::{BOOT, TempDir, event_line, header, temp_dir};
    use std::time::Duration;

    fn header_line(boot_id: &str) -> String {
        record::header_line(&header(boot_id))
    }

    struct Guest {
        dir: TempDir,
        disk: Disk,
        runtime: tokio::runtime::Runtime,
        connection: Connection,
        now: HostNow,
    }

    impl Guest {
        fn new() -> Self {
            let dir = temp_dir();
            let place = Place::take(dir.path()).unwrap();
            let (store, jobs) = Store::new(place, Limits::default(), Keep::default());
            let disk = Disk::start(store, jobs, Arc::new(|_| ())).unwrap();
            let stats = disk.store.stats.clone();
            let now = HostNow {
                instant: Instant::now(),
                realtime_ns: 1_767_323_045_000_000_000,
            };
            let connection = Connection::new("cid 5".into(), Limits::default(), stats, now);
            let runtime = tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap();
            Self {
                dir,
                disk,
                runtime,
                connection,
                now,
            }
        }

        fn say(&mut self, text: impl AsRef<[u8]>) -> Result<()> {
            self.connection.take(text.as_ref(), self.now)?;
            if let Some(Introduction { header, raw, .. }) = self.connection.introduction() {
                let attached = self.runtime.block_on(self.disk.store.attach(
                    &header,
                    &raw,
                    "cid 5",
                    || true,
                ))?;
                self.connection.begin(attached, self.now)?;
            }
            Ok(())
        }

        fn pass(&mut self, time: Duration) {
            self.now.instant += time;
            self.now.realtime_ns += time.as_nanos() as i64;
        }

        fn end(self) -> (Result<()>, BootFile) {
            let result = self.connection.end();
            self.disk.close().unwrap();
            let file = std::fs::File::open(self.dir.path().join(format!("{BOOT}.ndjson")));
            (
                result,
                file.map_or_else(|_| BootFile::default(), |f| BootFile::read(f).unwrap()),
            )
        }
    }

    #[test]
    fn records_are_stored_once() {
        let mut guest = Guest::new();
        guest.say(header_line(BOOT)).unwrap();
        guest
            .say(event_line(0) + &event_line(1) + &event_line(0))
            .unwrap();
        let (result, file) = guest.end();
        result.unwrap();
        assert_eq!(file.records.len(), 2);
        let last = file.host.last().unwrap();
        assert_eq!(
            last.event,
            HostEvent::Disconnected {
                peer: "cid 5".into(),
                records: 2,
                duplicates: 1
            }
        );
    }

    #[test]
    fn what_comes_with_the_header_is_taken_behind_it() {
        let mut guest = Guest::new();
        guest
            .say(
                header_line(BOOT)
                    + &event_line(0)
                    + "rubbish\n"
                    + &event_line(1)
                    + &event_line(2)[..30],
            )
            .unwrap();
        guest.say(&event_line(2)[30..]).unwrap();
        let (result, file) = guest.end();
        result.unwrap();
        assert_eq!(
            file.records.iter().map(|r| r.seq).collect::<Vec<_>>(),
            [0, 1, 2]
        );
        assert!(
            file.host
                .iter()
                .any(|l| matches!(l.event, HostEvent::Garbage { lines: 1, .. }))
        );
    }

    #[test]
    fn garbage_is_counted_and_dropped_and_the_connection_goes_on() {
        let mut guest = Guest::new();
        guest.say(header_line(BOOT)).unwrap();
        guest.say(event_line(0)).unwrap();
        guest.say(b"\xff\x00\x1b[2J\n").unwrap();
        guest.say("x".repeat(3 * MAX_LINE)).unwrap();
        guest.say("\n").unwrap();
        guest.say(event_line(1)).unwrap();
        guest.say(&event_line(2)[..20]).unwrap();
        let (result, file) = guest.end();
        result.unwrap();
        assert_eq!(
            (file.records.len(), file.damaged),
            (2, 0),
            "garbage is not in the file"
        );
        let garbage = file.host.iter().find_map(|l| match &l.event {
            HostEvent::Garbage { lines, first, .. } => Some((*lines, first.clone())),
            _ => None,
        });
        let (lines, first) = garbage.unwrap();
        assert_eq!(lines, 3);
        assert!(
            first.starts_with("not a record") && first.is_ascii(),
            "{first}"
        );
    }

    #[test]
    fn a_guest_cannot_write_the_collectors_lines() {
        let mut guest = Guest::new();
        guest.say(header_line(BOOT)).unwrap();
        let lost =
            r#"{"schema":1,"kind":"host","realtime_ns":4,"event":"lost","count":7,"gaps":[]}"#;
        guest.say(format!("{lost}\n")).unwrap();
        let (_, file) = guest.end();
        let has = |wanted: fn(&HostEvent) -> bool| file.host.iter().any(|l| wanted(&l.event));
        assert!(!has(|event| matches!(event, HostEvent::Lost { .. })));
        assert!(has(|event| matches!(
            event,
            HostEvent::Garbage { lines: 1, .. }
        )));
    }

    #[test]
    fn nothing_is_stored_before_a_header() {
        let mut guest = Guest::new();
        guest.say(event_line(0)).unwrap();
        guest
            .say(header_line("../../../../etc/passwd-aaaaaaaaaaaaa"))
            .unwrap();
        assert_eq!(std::fs::read_dir(guest.dir.path()).unwrap().count(), 0);
        let (result, ..) = guest.end();
        assert!(
            result
                .unwrap_err()
                .to_string()
                .contains("2 line(s) and no header")
        );
    }

    #[test]
    fn a_connection_belongs_to_one_boot() {
        let mut guest = Guest::new();
        guest.say(header_line(BOOT) + &event_line(0)).unwrap();
        guest.say(header_line(BOOT)).unwrap();
        let other = BOOT.replace("beef", "dead");
        assert!(guest.say(header_line(&other)).is_err());
        let Guest {
            dir,
            disk,
            connection,
            ..
        } = guest;
        drop(connection);
        disk.close().unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn another_schema_is_refused_with_the_cure() {
        let line = header_line(BOOT).replace("\"schema\":1", "\"schema\":3");
        let error = Guest::new().say(line).unwrap_err().to_string();
        assert!(
            error.contains("upgrade kata-gpu-boot to the guest's version"),
            "{error}"
        );
    }

    #[test]
    fn eight_pings_follow_each_other_then_one_a_second() {
        let mut guest = Guest::new();
        guest.say(header_line(BOOT)).unwrap();
        let start = guest.now.instant;
        let mut times = Vec::new();
        for _ in 0..11 {
            let due = guest
                .connection
                .deadline()
                .saturating_duration_since(guest.now.instant);
            guest.pass(due);
            guest.connection.tick(guest.now).unwrap();
            let id =
                record::ping(&std::mem::take(guest.connection.output())).expect("a ping is due");
            times.push(guest.now.instant.duration_since(start).as_secs());
            guest
                .say(record::pong_line(record::Pong {
                    pong: id,
                    boottime_ns: 5_000_000_000,
                }))
                .unwrap();
        }
        assert_eq!(times, [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3]);
        let (_, file) = guest.end();
        assert!(file.clock_samples().count() >= 1);
    }

    #[test]
    fn a_guest_that_does_not_read_gets_one_ping() {
        let mut guest = Guest::new();
        guest.say(header_line(BOOT)).unwrap();
        for _ in 0..100 {
            guest.pass(PING_INTERVAL_QUIET);
            guest.connection.tick(guest.now).unwrap();
        }
        assert_eq!(record::ping(guest.connection.output()), Some(0));
        // The header is on its way to the disk; its directory goes when it has arrived.
        let (_, file) = guest.end();
        assert!(file.header.is_some());
    }
}
