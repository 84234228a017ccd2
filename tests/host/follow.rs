//! A failure means that `show --follow` ends with the wrong status or reason, follows another boot
//! than asked for, shows a wrong bar on a terminal, or lets a guest's text drive it.

use crate::collect::{DEADLINE, folder, program};
use crate::{TempDir, project};
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::record::Line;
use nix::pty::{OpenptyResult, Winsize, openpty};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const ID: &str = "5fc5e893-0a7f-4713-801b-744ac3d76b1b";
const OTHER: &str = "0f7a1f8e-0000-4000-8000-00000000beef";
/// For a boot that goes on: ends a hang, on a busy machine, too.
const PATIENT: [&str; 2] = ["--timeout", "300"];
/// How much faster than life.
const SPEED: u32 = 8;

fn fixture(name: &str) -> Vec<String> {
    let text = crate::text(project().join(format!("tests/fixtures/boots/{name}.ndjson")));
    text.lines().map(|line| format!("{line}\n")).collect()
}

fn file(dir: &TempDir, id: &str) -> PathBuf {
    dir.0.join(format!("{id}.ndjson"))
}

/// Appends the lines to a file when their time has come; until a record that `until` names, or to
/// the end.
fn replay(lines: &[String], path: &Path, until: impl Fn(&str) -> bool) {
    let mut out = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .unwrap();
    let start = Instant::now();
    let mut first_ns = None;
    for line in lines {
        if let Ok(Line::Record(record)) = decode(line.trim_end().as_bytes()) {
            let since = record
                .boottime_ns
                .saturating_sub(*first_ns.get_or_insert(record.boottime_ns));
            // Not waiting for anything: this is when it happens.
            std::thread::sleep(
                (Duration::from_nanos(since) / SPEED).saturating_sub(start.elapsed()),
            );
            if until(&record.name) {
                return;
            }
        }
        out.write_all(line.as_bytes()).unwrap();
    }
}

fn follow(dir: &TempDir, words: &[&str]) -> Command {
    let mut command = Command::new(program());
    command
        .args(["show", "--follow"])
        .arg("--dir")
        .arg(&dir.0)
        .args(words)
        .env_remove("NO_COLOR")
        .stdin(Stdio::null());
    command
}

/// Follows in a pipe while `write` writes.
fn piped(dir: &TempDir, words: &[&str], write: impl FnOnce()) -> (Option<i32>, String, String) {
    let child = follow(dir, words)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    write();
    let output = child.wait_with_output().unwrap();
    (
        output.status.code(),
        crate::stdout(&output),
        crate::stderr(&output),
    )
}

#[test]
fn in_a_pipe_a_boot_is_lines_that_end_with_its_result() {
    let dir = folder();
    let (code, out, err) = piped(&dir, &PATIENT, || {
        replay(
            &fixture("recorded-8-gpus-fast-host"),
            &file(&dir, ID),
            |_| false,
        )
    });
    assert_eq!(
        (code, out.matches('\x1b').count()),
        (Some(0), 0),
        "{out}{err}"
    );
    assert!(err.contains("no boot in flight") || err.is_empty(), "{err}");
    let lines: Vec<&str> = out.lines().collect();
    assert!(
        lines[0].trim_start().starts_with("TIME") && lines[1].ends_with("kernel start"),
        "{out}"
    );
    assert_eq!(out.matches("gpu.usable").count(), 8, "{out}");
    assert!(
        lines
            .last()
            .unwrap()
            .starts_with("boot 5fc5e893: all 8 GPUs ready 8.264 s after kernel start"),
        "{out}"
    );
}

#[test]
fn a_failed_gpu_is_status_1_and_its_reason() {
    let dir = folder();
    let path = file(&dir, ID);
    crate::write(&path, fixture("made-8-gpus-one-failed").concat());
    let (code, _, err) = piped(&dir, &[&ID[..4]], || {});
    assert_eq!(code, Some(1), "{err}");
    assert!(
        err.contains(
            "boot 5fc5e893 failed: GPU 5 (0001:00:05.0) failed in initialisation: the GPU's own \
             processor (GSP) did not start (firmware-boot)"
        ),
        "{err}"
    );
    // Negative control: the same boot without the failure is a good one.
    let good: String = fixture("made-8-gpus-one-failed")
        .iter()
        .filter(|l| !l.contains("\"gpu.failed\""))
        .map(|l| l.replace("\"failed\":1", "\"failed\":0"))
        .collect();
    crate::write(&path, good);
    assert_eq!(piped(&dir, &[&ID[..4]], || {}).0, Some(0));
}

#[test]
fn a_silent_boot_is_given_up_with_what_was_seen_last() {
    let dir = folder();
    let lines: Vec<String> = fixture("made-8-gpus-one-hangs")
        .into_iter()
        .filter(|l| !l.contains("\"disconnected\""))
        .collect();
    // All of it is there before the program starts: a busy machine makes no pause in it.
    crate::write(file(&dir, ID), lines.concat());
    let (code, _, err) = piped(&dir, &[&ID[..4], "--timeout", "1"], || {});
    assert_eq!(code, Some(2), "{err}");
    assert!(
        err.contains("nothing new for 1 s (--timeout)") && err.contains("initialising since"),
        "{err}"
    );
    let empty = folder();
    let (code, _, err) = piped(&empty, &["--timeout", "1"], || {});
    assert!(
        code == Some(2) && err.contains("no boot has begun"),
        "{err}"
    );
}

/// The same boot with the collector's line about its sandbox.
fn of_sandbox(lines: &[String], id: &str, pod: &str) -> Vec<String> {
    let host = format!(
        "{{\"schema\":1,\"kind\":\"host\",\"realtime_ns\":1,\"event\":\"sandbox\",\"id\":\"{id}\",\"pod\":\"{pod}\",\"namespace\":\"ml\"}}\n"
    );
    [&lines[..1], &[host], &lines[1..]].concat()
}

#[test]
fn only_the_named_sandbox_or_pod_is_followed() {
    let dir = folder();
    let good = of_sandbox(&fixture("recorded-8-gpus-fast-host"), "0a1b", "train-0");
    let bad = of_sandbox(&fixture("made-8-gpus-one-failed"), "0c2d", "train-1");
    // Over already, beside one that is newer.
    crate::write(file(&dir, ID), good.concat());
    crate::write(file(&dir, OTHER), bad.concat());
    for sandbox in ["0a1b", "ml/train-0"] {
        let (code, out, err) = piped(&dir, &[sandbox], || {});
        assert_eq!(
            (code, out.contains("boot 5fc5e893: all 8 GPUs ready")),
            (Some(0), true),
            "{sandbox}: {out}{err}"
        );
    }
    let (code, _, err) = piped(&dir, &["ml/train-1"], || {});
    assert!(
        code == Some(1) && err.contains("boot 0f7a1f8e failed: GPU 5"),
        "{err}"
    );
    // Yet to come; by its pod's name alone it is nobody's.
    for (sandbox, wanted) in [
        ("0e3f", Some(0)),
        ("train-2", Some(2)),
        ("default/train-2", Some(2)),
    ] {
        let path = file(&dir, "70dbd104-1672-403e-a607-0f86be4a0ade");
        let late = of_sandbox(&fixture("recorded-8-gpus-fast-host"), "0e3f", "train-2");
        let timeout = if wanted == Some(0) { PATIENT[1] } else { "2" };
        let (code, out, err) = piped(&dir, &[sandbox, "--timeout", timeout], || {
            replay(&late, &path, |_| false)
        });
        assert_eq!(code, wanted, "{sandbox}: {out}{err}");
        assert!(
            wanted == Some(0) || err.contains(&format!("no boot of {sandbox} in flight")),
            "{err}"
        );
        crate::remove(path);
    }
}

/// A terminal with a program in it.
struct Terminal {
    bytes: mpsc::Receiver<Vec<u8>>,
    parser: vt100::Parser,
    raw: Vec<u8>,
    child: std::process::Child,
}

impl Terminal {
    fn start(mut command: Command, rows: u16, cols: u16) -> Self {
        let size = Winsize {
            ws_row: rows,
            ws_col: cols,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let OpenptyResult { master, slave } = openpty(&size, None).unwrap();
        let side = || Stdio::from(slave.try_clone().unwrap());
        let child = command
            .env("TERM", "xterm-256color")
            .env("LC_ALL", "C.UTF-8")
            .stdout(side())
            .stderr(side())
            .spawn()
            .unwrap();
        // The program has the only copies now: its end is the end of the bytes.
        drop((slave, command));
        let (sender, bytes) = mpsc::channel();
        std::thread::spawn(move || {
            let mut master = File::from(master);
            let mut chunk = [0; 4096];
            // EIO is how the end of the other side shows.
            while let Ok(n @ 1..) = master.read(&mut chunk) {
                if sender.send(chunk[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            bytes,
            parser: vt100::Parser::new(rows, cols, 0),
            raw: Vec::new(),
            child,
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        self.raw.extend_from_slice(bytes);
        self.parser.process(bytes);
    }

    fn shown(&self) -> String {
        // Row by row: a line that fills its row is not one with the next.
        let screen = self.parser.screen();
        let rows: Vec<String> = screen
            .rows(0, screen.size().1)
            .map(|row| row.trim_end().to_string())
            .collect();
        rows.join("\n")
    }

    /// Waits until the screen shows it.
    fn until(&mut self, what: &str, is: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + DEADLINE;
        while !is(&self.shown()) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.bytes.recv_timeout(left) {
                Ok(bytes) => self.take(&bytes),
                Err(e) => panic!("{what}: {e}; the screen:\n{}", self.shown()),
            }
        }
        self.shown()
    }

    /// Waits for the end; gives the last screen and the exit status.
    fn end(mut self) -> (String, Option<i32>, Vec<u8>) {
        while let Ok(bytes) = self.bytes.recv_timeout(DEADLINE) {
            self.take(&bytes);
        }
        let code = self.child.wait().unwrap().code();
        (self.shown(), code, std::mem::take(&mut self.raw))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _unused = self.child.kill(); // it may have ended
        let _unused = self.child.wait();
    }
}

/// Lines of GPUs on a screen.
fn gpu_lines(screen: &str) -> Vec<&str> {
    screen
        .lines()
        .filter(|line| line.starts_with("GPU "))
        .collect()
}

#[test]
fn on_a_terminal_each_gpu_has_a_bar_that_says_what_it_is_in() {
    let dir = folder();
    let mut terminal = Terminal::start(follow(&dir, &PATIENT), 30, 100);
    let path = file(&dir, ID);
    std::thread::scope(|scope| {
        scope.spawn(|| replay(&fixture("recorded-8-gpus-fast-host"), &path, |_| false));
        let screen = terminal.until("GPUs that initialise", |s| {
            gpu_lines(s)
                .iter()
                .filter(|l| l.contains("initialising"))
                .count()
                == 8
        });
        assert!(
            screen.contains("boot 5fc5e893") && screen.contains("0 of 8 GPUs ready"),
            "{screen}"
        );
        assert!(
            gpu_lines(&screen)
                .iter()
                .all(|l| l.contains('━') && l.contains(" s")),
            "{screen}"
        );
    });
    let (screen, code, _) = terminal.end();
    assert_eq!(code, Some(0), "{screen}");
    let gpus = gpu_lines(&screen);
    assert_eq!(gpus.len(), 8, "{screen}");
    for (k, line) in gpus.iter().enumerate() {
        assert!(
            line.starts_with(&format!("GPU {k} (0001:00:0{k}.0) "))
                && line.contains("  published")
                && line.contains("ready at"),
            "{screen}"
        );
        assert_eq!(line.matches('━').count(), 12, "a full bar: {screen}");
    }
    assert!(
        screen.contains("boot 5fc5e893  8.2 s  8 of 8 GPUs ready"),
        "{screen}"
    );
    assert!(
        screen
            .trim_end()
            .lines()
            .any(|l| l.starts_with("boot 5fc5e893: all 8 GPUs ready 8.264 s after kernel start")),
        "{screen}"
    );
}

#[test]
fn nothing_a_guest_writes_drives_the_terminal() {
    let dir = folder();
    let evil = r"\u001b[2J\u001b]0;title\u0007\u202e\r";
    let lines = [
        format!(r#"{{"schema":1,"stream":{{"boot_id":"{ID}","version":"{evil}","kernel":"{evil}","first_seq":0}}}}"#),
        r#"{"schema":1,"seq":0,"boottime_ns":18446744073709551615,"kind":"event","name":"gpu.found","gpu":"0001:00:00.0","fields":{"index":18446744073709551615}}"#.into(),
        format!(r#"{{"schema":1,"seq":1,"boottime_ns":1,"kind":"begin","name":"module.load","span":1,"fields":{{"module":"{evil}"}}}}"#),
        format!(r#"{{"schema":1,"seq":2,"boottime_ns":1,"kind":"event","name":"gpu.failed","gpu":"0001:00:00.0","error":"{evil}","fields":{{"step":"{evil}"}}}}"#),
        format!(r#"{{"schema":1,"kind":"host","realtime_ns":1,"event":"sandbox","id":"{evil}","pod":"{evil}"}}"#),
        r#"{"schema":1,"seq":3,"boottime_ns":2,"kind":"event","name":"settled"}"#.into(),
    ];
    crate::write(file(&dir, ID), lines.join("\n") + "\n");
    let (screen, code, raw) = Terminal::start(follow(&dir, &[ID]), 24, 100).end();
    assert_eq!(code, Some(1), "{screen}");
    assert!(
        screen.contains(r"\x1b[2J"),
        "it is shown, as text: {screen}"
    );
    let raw = String::from_utf8(raw).unwrap();
    for sequence in ["\x1b[2J", "\x1b]", "\x07", "\u{202e}"] {
        assert!(!raw.contains(sequence), "{raw:?}");
    }
}
