//! The agent's own log lines in the guest's console.
//!
//! Lines carry the guest's wall-clock time and have no part in the event stream;
//! [`super::clock_points`] places them on the guest's boot clock. [`mod@line`] parses the texts of
//! a real kata-agent, `container_states` finds the container of each line; every view and
//! `show LOG...` read the agent through [`AgentLog`] only.

mod container_states; // lines into what happens to each container
pub mod event; // meaning of a line
pub mod line; // texts of a line
pub mod torn; // lines torn by other writers

pub use event::{AgentEvent, NONE, UNKNOWN};

use super::budget::{MAX_AGENT_LINES, MAX_AGENT_TEXT};
use super::containerd_log;
use super::containerd_log::Entry;
use super::framing::{Lines, Piece};
use anyhow::{Context, Result};
use container_states::Containers;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use torn::Torn;

/// Limit of a console line, in bytes: the agent prints the whole OCI spec of each container.
pub const MAX_CONSOLE_LINE: usize = 64 * 1024;

/// A line of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentLine {
    /// CLOCK_REALTIME of the guest.
    pub realtime_ns: i64,
    pub event: AgentEvent,
}

/// Lines of one guest, read in order.
#[derive(Clone, Debug, Default)]
pub struct AgentLog {
    torn: Torn,
    containers: Containers,
}

impl AgentLog {
    /// Parses the next line of console text. Lines of other programs, without a time, or unrelated
    /// to the boot give nothing.
    pub fn line(&mut self, line: &[u8], mut each: impl FnMut(AgentLine)) {
        let mut torn = std::mem::take(&mut self.torn);
        torn.line(line, MAX_CONSOLE_LINE, |line| {
            if let Some(object) = line::object(line) {
                self.object(&object, &mut each);
            }
        });
        self.torn = torn;
    }

    /// Parses the object of the next whole line.
    pub fn object(&mut self, object: &Map<String, Value>, mut each: impl FnMut(AgentLine)) {
        let Some(line) = line::parse(object) else {
            return;
        };
        self.containers.take(line, |realtime_ns, event| {
            each(AgentLine { realtime_ns, event });
        });
    }
}

/// Extension of a console log in a boot's directory.
const EXTENSION: &str = "console";
const WHOSE: &str = "it is containerd's log, and the boot's file does not name its sandbox; \
    kata-gpu-boot show LOG reads the log by itself";

/// The agent's lines of the boot with this file: from the log that was named (a console's, or
/// containerd's with this sandbox in it), or else from the console log in the file's directory, if
/// there is one.
pub fn of_boot(boot: &Path, sandbox: Option<&str>, named: Option<&Path>) -> Result<Vec<AgentLine>> {
    let own = boot.with_extension(EXTENSION);
    let Some(log) = named.or_else(|| own.is_file().then_some(own.as_path())) else {
        return Ok(Vec::new());
    };
    let file = File::open(log).with_context(|| format!("open console log {}", log.display()))?;
    // The boot's own file is the guest's console, with any content.
    let lines = if named.is_some() {
        read_either(file, sandbox)
    } else {
        read(file)
    };
    lines.with_context(|| format!("read {}", log.display()))
}

/// Whether lines may have been left out at the limits.
pub fn is_full(lines: &[AgentLine]) -> bool {
    lines.len() >= MAX_AGENT_LINES
        || lines
            .iter()
            .map(|line| line.event.text_bytes())
            .sum::<usize>()
            >= MAX_AGENT_TEXT
}

/// The agent's lines in a console log, up to the limits.
pub fn read(from: impl Read) -> io::Result<Vec<AgentLine>> {
    read_lines(from, |line, take| take(line))
}

/// Like [`read`], but also accepts containerd's log and takes the lines of this sandbox.
fn read_either(from: impl Read, sandbox: Option<&str>) -> io::Result<Vec<AgentLine>> {
    let mut is_anybodys = false;
    let found = read_lines(from, |line, take| {
        let text = containerd_log::may_have_console(line).then(|| String::from_utf8_lossy(line));
        let entry = text.as_deref().and_then(containerd_log::entry);
        match entry.as_ref().and_then(Entry::console) {
            None => take(line),
            Some((of, line)) if Some(of) == sandbox => take(line.as_bytes()),
            Some(_) => is_anybodys |= sandbox.is_none(),
        }
    })?;
    if found.is_empty() && is_anybodys {
        Err(io::Error::other(WHOSE))
    } else {
        Ok(found)
    }
}

/// `each` passes on the part of a log line that is a line of the guest's console.
fn read_lines(
    from: impl Read,
    mut each: impl FnMut(&[u8], &mut dyn FnMut(&[u8])),
) -> io::Result<Vec<AgentLine>> {
    let mut found: Vec<AgentLine> = Vec::new();
    let mut text = 0;
    let mut log = AgentLog::default();
    let mut keep = |line: AgentLine| {
        if found.len() < MAX_AGENT_LINES && text < MAX_AGENT_TEXT {
            text += line.event.text_bytes();
            found.push(line);
        }
    };
    Lines::new(MAX_CONSOLE_LINE).read(from, |piece| {
        if let Piece::Line(line) = piece {
            each(line, &mut |line| log.line(line, &mut keep));
        }
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::clock_points::Placed;
    use crate::views::rows::Tracker;
    use kata_gpu_test_support::{golden, tests_dir};

    /// Events of a real agent's console, with seconds since its first line. The lines are
    /// unchanged, but not complete.
    fn recorded(name: &str) -> String {
        let file = File::open(tests_dir(&format!(
            "fixtures/agent/kata-agent-{name}.console"
        )))
        .unwrap();
        let lines = read(file).unwrap();
        let first = lines.first().map_or(0, |line| line.realtime_ns);
        let mut tracker = Tracker::default();
        let start = Placed {
            boottime_ns: 0,
            approximate: false,
        };
        let mut out = String::new();
        for line in &lines {
            let row = tracker.agent_row(&line.event, start);
            out.push_str(&format!(
                "{:7.3}  {}\n",
                (line.realtime_ns - first) as f64 / 1e9,
                row.what
            ));
        }
        out
    }

    #[test]
    fn all_lines_of_a_real_agent_are_recognised() {
        for name in ["4.1.0-info", "4.1.0-timeout", "4.1.0-warn"] {
            golden(&format!("agent/kata-agent-{name}.events"), &recorded(name));
        }
    }

    fn events_of(lines: &[&str]) -> Vec<AgentEvent> {
        let mut log = AgentLog::default();
        let mut events = Vec::new();
        for (nth, msg) in lines.iter().enumerate() {
            let (msg, more) = msg.split_once(" | ").unwrap_or((msg, ""));
            let cid = if more.is_empty() {
                String::new()
            } else {
                format!(r#","module":"rustjail","cid":"{more}""#)
            };
            let ts = format!("2026-01-02T03:04:{nth:02}.000000000Z");
            let text = format!(
                r#"{{"msg":{},"level":"INFO","ts":"{ts}","name":"kata-agent"{cid}}}"#,
                Value::from(msg)
            );
            log.line(text.as_bytes(), |line| events.push(line.event));
        }
        events
    }

    const CREATE: &str = "rpc call from shim to agent: \"create_container\"";
    const CREATED: &str = "created container!";

    fn created(container: &str, devices: &str, tries: Option<u64>) -> AgentEvent {
        AgentEvent::ContainerCreated {
            container: container.into(),
            devices: devices.into(),
            tries,
            pause: false,
        }
    }

    #[test]
    fn containers_that_are_made_at_once_stay_separate() {
        let spec = |id: &str, device: &str| {
            format!(
                "receive createcontainer, spec: Spec {{ root: Some(Root {{ path: \
                 \"/x/{id}/rootfs\" }}), annotations: Some({{\"cdi.k8s.io/v\": \"{device}\"}}) }}"
            )
        };
        let injected = |id: &str| {
            format!(
                "all devices injected successfully, modified CDI container spec: Spec {{ root: \
                 Some(Root {{ path: \"/x/{id}/rootfs\" }}) }}"
            )
        };
        let wait = |nth: u32, error: &str| {
            format!("waiting for CDI spec(s) to be generated ({nth} of 9 max tries) {error}")
        };
        let lines = [
            CREATE.to_string(),
            CREATE.to_string(),
            spec("a", "k/d=0"),
            spec("b", "k/d=1"),
            wait(0, "\"not yet\""),
            wait(0, "\"not yet\""),
            wait(1, "\"unresolvable CDI devices k/d=1\""),
            injected("a"),
            wait(2, "\"not yet\""),
            "enter container.start! | a".to_string(),
            injected("b"),
            CREATED.to_string(),
            "enter container.start! | b".to_string(),
            "failed to start container: no".to_string(),
        ];
        let events = events_of(&lines.each_ref().map(String::as_str));
        let tries: Vec<(&str, u64)> = events
            .iter()
            .filter_map(|event| match event {
                AgentEvent::CdiTryFailed {
                    container, attempt, ..
                } => Some((container.as_str(), *attempt)),
                _ => None,
            })
            .collect();
        assert_eq!(tries, [("a", 1), ("b", 1), ("b", 2), ("b", 3)]);
        assert!(
            events.contains(&created("a", "k/d=0", Some(2))),
            "{events:?}"
        );
        let failed = AgentEvent::ContainerFailed {
            container: "b".into(),
            devices: "k/d=1".into(),
            tries: Some(4),
            error: "no".into(),
        };
        assert_eq!(events.last(), Some(&failed));
    }

    #[test]
    fn without_a_spec_a_container_has_a_number_and_unknown_devices() {
        let events = events_of(&[
            CREATE,
            CREATED,
            CREATE,
            "enter container.start! | c",
            CREATED,
            "enter container.start! | c",
            "container started | c",
        ]);
        assert_eq!(events[1], created("#1", UNKNOWN, None));
        assert_eq!(events[3], created("c", UNKNOWN, None));
        assert_eq!(
            events[4..],
            [AgentEvent::ContainerStarted {
                container: "c".into()
            }]
        );
    }

    #[test]
    fn an_agent_out_of_tries_has_given_up_even_if_it_logs_nothing() {
        let wait = "waiting for CDI spec(s) to be generated (2 of 2 max tries) \"unresolvable CDI \
            devices k/d=1\"";
        let events = events_of(&[CREATE, wait]);
        let Some(AgentEvent::ContainerFailed {
            container,
            devices,
            tries,
            error,
        }) = events.last()
        else {
            panic!("{events:?}")
        };
        assert_eq!(
            (container.as_str(), devices.as_str(), *tries),
            ("#1", "k/d=1", Some(3))
        );
        assert_eq!(
            error,
            "failed to inject devices after CDI timeout of 2 seconds"
        );
    }

    #[test]
    fn other_lines_and_other_programs_give_no_event() {
        let ready =
            r#"{"msg":"ttRPC server started","ts":"2026-01-02T03:04:05.5Z","name":"kata-agent"}"#;
        let lines = |text: &str| read(text.as_bytes()).unwrap().len();
        assert_eq!(
            (
                lines(&format!("{ready}\n")),
                lines(&format!("[    1.234567] nvidia: hello {ready}\r\n"))
            ),
            (1, 1)
        );
        for text in [
            "",
            "{",
            "}{",
            "[ 0.1] Linux version",
            "{\"msg\":1}",
            &ready[..60],
        ] {
            assert_eq!(lines(&format!("{text}\n")), 0, "{text}");
        }
        assert_eq!(
            lines(&format!("{}\n", ready.replace("kata-agent", "other"))),
            0
        );
        assert_eq!(
            lines(&format!("{}\n", ready.replace("2026-01", "2026-99"))),
            0
        );
    }
}
