//! Lines of kata-agent 4.1.0, word by word and in its shape: slog JSON, every value a string,
//! message, level and time first.
//!
//! Additional lines for tests have another program's name ([`super::log`]).

use super::config::{AGENT_VERSION, Level};
use oci_spec::runtime::Spec;
use serde_json::Value;
use std::io::Write;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::SystemTime;

/// Version of the crate, which every line has and no release changes.
const CRATE_VERSION: &str = "0.1.0";
/// `agent.log=`.
static LEVEL: AtomicU8 = AtomicU8::new(Level::Info as u8);

/// Lines of this level and above are written.
pub fn set_level(level: Level) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// A line, without its time and process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub level: Level,
    pub subsystem: &'static str,
    pub msg: String,
    pub more: Vec<(&'static str, String)>,
}

impl Line {
    fn info(subsystem: &'static str, msg: impl Into<String>) -> Self {
        Self {
            level: Level::Info,
            subsystem,
            msg: msg.into(),
            more: vec![],
        }
    }

    fn with(mut self, key: &'static str, value: impl Into<String>) -> Self {
        self.more.push((key, value.into()));
        self
    }

    /// The line as the real one writes it; the keys behind the first three come in any order there.
    pub fn text(&self, time: SystemTime, pid: u32) -> String {
        let time = humantime::format_rfc3339_nanos(time).to_string();
        let time = format!(
            "{}Z",
            time.trim_end_matches('Z')
                .trim_end_matches('0')
                .trim_end_matches('.')
        );
        let pid = pid.to_string();
        let first = [
            ("msg", self.msg.as_str()),
            ("level", self.level.word()),
            ("ts", &time),
        ];
        let frame = [
            ("version", CRATE_VERSION),
            ("name", "kata-agent"),
            ("pid", &pid),
            ("subsystem", self.subsystem),
            ("source", "agent"),
        ];
        let more = self.more.iter().map(|(key, value)| (*key, value.as_str()));
        let pairs = first.into_iter().chain(frame).chain(more);
        let pairs: Vec<String> = pairs
            .map(|(key, value)| format!("\"{key}\":{}", Value::from(value)))
            .collect();
        format!("{{{}}}\n", pairs.join(","))
    }

    /// Writes it, in one piece: a console that is gone is no reason to end.
    pub fn write(&self) {
        if self.level as u8 <= LEVEL.load(Ordering::Relaxed) {
            let text = self.text(SystemTime::now(), std::process::id());
            let _unused = std::io::stdout().lock().write_all(text.as_bytes());
        }
    }
}

pub fn announce(config: &str) -> Line {
    Line::info("root", "announce")
        .with("agent-commit", format!("{AGENT_VERSION}-for-tests"))
        .with("agent-version", AGENT_VERSION)
        .with("api-version", "0.0.1")
        .with("config", config)
        .with("extra-features", "[]")
}

pub fn server_started() -> Line {
    Line::info("rpc", "ttRPC server started").with("address", "vsock://-1:1024")
}

/// The runtime calls a method, in snake case.
pub fn rpc(call: &str) -> Line {
    Line::info("rpc", format!("rpc call from shim to agent: {call:?}"))
}

pub fn asked(spec: &Spec) -> Line {
    Line::info("rpc", format!("receive createcontainer, spec: {spec:?}"))
}

pub fn no_storages() -> Line {
    Line::info("rpc", "receive createcontainer, storages: []")
}

pub fn no_devices() -> Line {
    Line::info("rpc", "no CDI annotations, no devices to inject")
}

/// `attempt`: from 0.
pub fn waiting(attempt: u64, of: u64, error: &str) -> Line {
    Line::info(
        "rpc",
        format!("waiting for CDI spec(s) to be generated ({attempt} of {of} max tries) {error}"),
    )
}

pub fn injected(spec: &Spec) -> Line {
    Line::info(
        "rpc",
        format!("all devices injected successfully, modified CDI container spec: {spec:?}"),
    )
}

fn of_container(id: &str, msg: impl Into<String>) -> Line {
    Line::info("container", msg)
        .with("module", "rustjail")
        .with("cid", id)
}

/// A line about a container's first process, whose exec id is the container's.
fn of_process(id: &str, msg: impl Into<String>) -> Line {
    of_container(id, msg).with("eid", id)
}

pub fn making(id: &str) -> Line {
    of_process(id, "enter container.start!")
}

pub fn child_pid(id: &str, pid: i32) -> Line {
    of_process(id, format!("child pid: {pid}"))
}

pub fn process_command(id: &str, arguments: &[String]) -> Line {
    of_process(id, format!("process command: {arguments:?}")).with("action", "child process log")
}

pub fn made(id: &str) -> Line {
    of_process(id, "create process completed")
}

pub fn created() -> Line {
    Line::info("rpc", "created container!")
}

pub fn started(id: &str) -> Line {
    of_container(id, "container started")
}

pub fn start_failed(error: &str) -> Line {
    Line {
        level: Level::Error,
        ..Line::info("rpc", format!("failed to start container: {error}"))
    }
}

pub fn child_exited(pid: i32) -> Line {
    Line::info("signals", "child exited unexpectedly").with("child-pid", pid.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::pod;
    use serde_json::Map;
    use std::path::Path;
    use std::time::{Duration, UNIX_EPOCH};

    /// Lines of the real one, in their order; those that others have torn are left out.
    fn recorded() -> Vec<(String, Map<String, Value>)> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../fixtures/agent/kata-agent-4.1.0-info.console");
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .filter_map(|line| Some((line.to_string(), serde_json::from_str(line).ok()?)))
            .collect()
    }

    fn get<'a>(object: &'a Map<String, Value>, key: &str) -> &'a str {
        object.get(key).and_then(Value::as_str).unwrap_or("")
    }

    /// Line that this agent would have written in the place of that one.
    fn ours(object: &Map<String, Value>) -> Option<Line> {
        let (msg, id) = (get(object, "msg"), get(object, "cid"));
        let after = |text: &str| msg.strip_prefix(text);
        Some(match msg {
            "announce" => {
                let mut line = announce(get(object, "config"));
                line.more
                    .iter_mut()
                    .filter(|(key, _)| *key == "agent-commit")
                    .for_each(|(_, v)| *v = get(object, "agent-commit").into());
                line
            }
            "ttRPC server started" => server_started(),
            "receive createcontainer, storages: []" => no_storages(),
            "no CDI annotations, no devices to inject" => no_devices(),
            "enter container.start!" => making(id),
            "create process completed" => made(id),
            "created container!" => created(),
            "container started" => started(id),
            "child exited unexpectedly" => child_exited(get(object, "child-pid").parse().unwrap()),
            _ => {
                if let Some(call) = after("rpc call from shim to agent: ") {
                    rpc(call.trim_matches('"'))
                } else if let Some(rest) = after("waiting for CDI spec(s) to be generated (") {
                    let (attempt, rest) = rest.split_once(" of ").unwrap();
                    let (of, error) = rest.split_once(" max tries) ").unwrap();
                    waiting(attempt.parse().unwrap(), of.parse().unwrap(), error)
                } else if let Some(pid) = after("child pid: ") {
                    child_pid(id, pid.parse().unwrap())
                } else if let Some(words) = after("process command: ") {
                    process_command(id, &serde_json::from_str::<Vec<String>>(words).unwrap())
                } else {
                    start_failed(after("failed to start container: ")?)
                }
            }
        })
    }

    #[test]
    fn this_agent_says_what_a_real_one_said_word_by_word() {
        let mut compared = std::collections::BTreeSet::new();
        for (text, object) in recorded() {
            let Some(line) = ours(&object) else { continue };
            let time = humantime::parse_rfc3339(get(&object, "ts")).unwrap();
            let said = line.text(time, get(&object, "pid").parse().unwrap());
            assert_eq!(
                serde_json::from_str::<Map<String, Value>>(&said).unwrap(),
                object
            );
            // Behind the first three keys the real one's come in the order of a hash map.
            let first = |line: &str| line[..line.find("\"ts\":\"").unwrap() + 10].to_string();
            assert_eq!(first(&said), first(&text));
            compared.insert(line.msg.split([':', '(', '"']).next().unwrap().to_string());
        }
        assert_eq!(compared.len(), 14, "{compared:?}");
    }

    /// Names of the fields of a value in Rust's `Debug` form, in their order.
    fn fields(debug: &str) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for part in debug.split(": ") {
            let name = part
                .rsplit(|c: char| !(c.is_ascii_lowercase() || c == '_'))
                .next()
                .unwrap_or("");
            if !name.is_empty() && !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    #[test]
    fn specs_have_the_real_ones_fields_in_their_order() {
        let container = pod::Asked {
            id: "b2".into(),
            arguments: vec!["/application".into()],
            ..pod::Asked::default()
        };
        let spec = pod::spec(&container, Path::new("/run/kata-containers/b2/rootfs")).unwrap();
        let ours = asked(&spec).msg;
        let top = |text: &str| -> Vec<String> {
            let wanted = [
                "version",
                "root",
                "path",
                "readonly",
                "mounts",
                "process",
                "hostname",
                "hooks",
                "annotations",
                "linux",
                "vm",
            ];
            fields(text)
                .into_iter()
                .filter(|name| wanted.contains(name))
                .map(str::to_string)
                .collect()
        };
        let (_, real) = recorded()
            .into_iter()
            .find(|(_, o)| get(o, "msg").starts_with("receive createcontainer, spec"))
            .unwrap();
        assert_eq!(top(&ours), top(get(&real, "msg")));
        assert_eq!(top(&ours).len(), 11, "{ours}");
    }

    #[test]
    fn a_word_that_the_real_one_does_not_say_is_found_out() {
        let (_, real) = recorded()
            .into_iter()
            .find(|(_, o)| get(o, "msg") == "created container!")
            .unwrap();
        let time = humantime::parse_rfc3339(get(&real, "ts")).unwrap();
        let read =
            |line: &Line| serde_json::from_str::<Map<String, Value>>(&line.text(time, 1)).unwrap();
        assert_eq!(read(&created()), real);
        assert_ne!(
            read(&Line {
                msg: "container created".into(),
                ..created()
            }),
            real
        );
        assert_ne!(read(&created().with("container", "one")), real);
    }

    #[test]
    fn a_time_has_the_digits_that_count() {
        let at = |ns| created().text(UNIX_EPOCH + Duration::from_nanos(ns), 1);
        assert!(
            at(1_500_000_000).contains(r#""ts":"1970-01-01T00:00:01.5Z""#),
            "{}",
            at(1_500_000_000)
        );
        assert!(at(1_000_000_001).contains(r#""ts":"1970-01-01T00:00:01.000000001Z""#));
        assert!(at(10_000_000_000).contains(r#""ts":"1970-01-01T00:00:10Z""#));
    }
}
