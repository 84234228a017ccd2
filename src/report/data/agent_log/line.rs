//! Log lines of a real kata-agent: slog JSON, one object per line, all values strings.
//!
//! The vocabulary is that of kata-agent 3.13.0 to 4.1.0, which all log the same texts, at level
//! info, but for failed tries before 3.15 (`error injecting devices`); tests/fixtures/agent has
//! lines of real agents. A line names its container in one of two
//! ways, if at all: an OCI spec in Rust's `Debug` form, or the key `cid`. A console is as untrusted
//! as the rest of the guest: every text is cut and made printable here.

use super::event::AgentEvent;
use crate::data::{logfmt, text};
use kata_gpu_wire::pci_address::PciAddress;
use serde_json::{Map, Value};
use std::time::UNIX_EPOCH;

/// Limit of text kept of one value.
pub const MAX_VALUE: usize = 600;
/// Limit of a container's name.
const MAX_NAME: usize = 64;
/// Characters kept of an id that is a hash, as in other tools.
const SHORT_ID: usize = 12;

/// A container according to its OCI spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spec {
    pub id: Option<String>,
    /// Name in the pod.
    pub name: Option<String>,
    /// Values of the CDI annotations and of the variable VISIBLE_CDI_DEVICES, joined by commas;
    /// empty if there are none.
    pub devices: String,
    /// Whether the container is the pod's pause container.
    pub pause: bool,
}

/// Meaning of one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineKind {
    /// An event that no other line is needed for.
    Event(AgentEvent),
    /// OCI spec of a requested container.
    Asked(Spec),
    /// The try with this number, from 0 to `of`, did not resolve a container's devices. Agents
    /// before 3.15 number no tries.
    Waiting {
        attempt: Option<u64>,
        of: Option<u64>,
        error: String,
    },
    /// A container's spec with its devices.
    Injected(Spec),
    /// The container with this id is being made.
    Making {
        id: String,
    },
    /// The container that was being made last is complete.
    Created,
    StartFailed {
        error: String,
    },
    /// The program of the container with this id runs.
    Started {
        id: String,
    },
}

/// A line of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// CLOCK_REALTIME of the guest.
    pub realtime_ns: i64,
    pub kind: LineKind,
}

/// The JSON object in a line of console text. Kernel messages may stand before it on the same line.
pub fn object(line: &[u8]) -> Option<Map<String, Value>> {
    let start = line.iter().position(|b| *b == b'{')?;
    let end = line.iter().rposition(|b| *b == b'}')?;
    serde_json::from_slice(line.get(start..=end)?).ok()
}

/// The agent's line in an object; None for one of another program, about something else, or
/// without a time.
pub fn parse(object: &Map<String, Value>) -> Option<Line> {
    let get = |key: &str| object.get(key).and_then(Value::as_str);
    if get("name") != Some("kata-agent") {
        return None;
    }
    Some(Line {
        kind: kind(get("msg")?, &get)?,
        realtime_ns: get("ts").and_then(realtime_ns)?,
    })
}

fn kind<'a>(msg: &str, get: &impl Fn(&str) -> Option<&'a str>) -> Option<LineKind> {
    if let Some(call) = msg.strip_prefix("rpc call from shim to agent: ") {
        let call = name(call.trim_matches('"'));
        return Some(LineKind::Event(AgentEvent::Rpc { call }));
    }
    if let Some(spec) = msg.strip_prefix("receive createcontainer, spec: ") {
        return Some(LineKind::Asked(spec_of(spec)));
    }
    if let Some(rest) = msg.strip_prefix("waiting for CDI spec(s) to be generated (") {
        let (attempt, rest) = rest.split_once(" of ")?;
        let (of, text) = rest.split_once(" max tries)").unwrap_or((rest, ""));
        return Some(LineKind::Waiting {
            attempt: Some(attempt.parse().ok()?),
            of: Some(of.parse().ok()?),
            error: error(text.trim_start()),
        });
    }
    if let Some(text) = msg.strip_prefix("error injecting devices: ") {
        return Some(LineKind::Waiting {
            attempt: None,
            of: None,
            error: error(text),
        });
    }
    if let Some(rest) = msg.strip_prefix("all devices injected successfully") {
        let spec = rest.split_once("spec: ").map_or("", |(_, spec)| spec);
        return Some(LineKind::Injected(spec_of(spec)));
    }
    if let Some(text) = msg.strip_prefix("failed to start container: ") {
        return Some(LineKind::StartFailed { error: error(text) });
    }
    if msg.starts_with("hook ") && msg.contains(" failed: ") {
        let error = error(msg);
        return Some(LineKind::Event(AgentEvent::HookFailed { error }));
    }
    let event = match msg {
        "announce" => AgentEvent::Start {
            version: cut(get("agent-version").or(get("version")).unwrap_or("?")),
        },
        "ttRPC server started" => AgentEvent::Ready,
        "got uevent message" => AgentEvent::Bound(bound(get("event")?)?),
        "created container!" => return Some(LineKind::Created),
        _ => {
            let id = get("cid").filter(|_| get("module") == Some("rustjail"))?;
            let id = name(id);
            return Some(match msg {
                "container started" => LineKind::Started { id },
                _ => LineKind::Making { id },
            });
        }
    };
    Some(LineKind::Event(event))
}

fn cut(text: &str) -> String {
    text::printable_start(&text, MAX_VALUE)
}

/// Text of an error, without the addresses of its stack.
fn error(text: &str) -> String {
    cut(text
        .split_once("\n\nStack backtrace:")
        .map_or(text, |(error, _)| error))
}

fn name(text: &str) -> String {
    text::printable_start(&text, MAX_NAME)
}

/// Name of an id without a name: hashes are shortened.
pub fn short(id: &str) -> &str {
    let hash = id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit());
    if hash {
        id.get(..SHORT_ID).unwrap_or(id)
    } else {
        id
    }
}

/// PCI function of a `bind` uevent: `Uevent { action: "bind", devpath: "/devices/../0000:02:00.0",
/// .. subsystem: "pci", .. }`.
fn bound(event: &str) -> Option<PciAddress> {
    let value = |key: &str| event.split_once(&format!("{key}: \""))?.1.split('"').next();
    if value("action") != Some("bind") || value("subsystem") != Some("pci") {
        return None;
    }
    value("devpath")?.rsplit('/').next()?.parse().ok()
}

/// Parses RFC 3339 with any offset to ns since the epoch; None if invalid or out of range.
pub fn realtime_ns(text: &str) -> Option<i64> {
    let text = text.trim();
    // humantime reads UTC only: remove the offset first.
    let (clock, offset_s) = match text.strip_suffix(['Z', 'z']) {
        Some(clock) => (clock, 0i64),
        None => {
            let at = text.len().checked_sub(6)?;
            let (clock, offset) = (text.get(..at)?, text.get(at..)?);
            let sign = match offset.as_bytes().first()? {
                b'+' => 1,
                b'-' => -1,
                _ => return None,
            };
            let (hours, minutes) = offset.get(1..)?.split_once(':')?;
            let number =
                |text: &str, max: i64| text.parse::<i64>().ok().filter(|n| (0..=max).contains(n));
            (
                clock,
                sign * (number(hours, 23)? * 3600 + number(minutes, 59)? * 60),
            )
        }
    };
    let time = humantime::parse_rfc3339(&format!("{clock}Z")).ok()?;
    let ns = i64::try_from(time.duration_since(UNIX_EPOCH).ok()?.as_nanos()).ok()?;
    ns.checked_sub(offset_s * 1_000_000_000)
}

/// Devices that an error names: `"unresolvable CDI devices nvidia.com/gpu=2, nvidia.com/gpu=0"`;
/// empty if there are none.
pub fn devices_of(error: &str) -> Vec<&str> {
    let words = error
        .split([' ', '"', '\\', ',', '[', ']'])
        .filter(|word| word.contains('=') && word.contains('/'));
    let mut devices: Vec<&str> = words.take(32).collect();
    devices.sort_unstable();
    devices.dedup();
    devices
}

/// A container by its OCI spec in `Debug` form.
fn spec_of(debug: &str) -> Spec {
    let fields = Fields::of(debug);
    let annotation = |key: &str| {
        fields
            .annotations
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, v)| v.as_str())
    };
    let last = |path: &str| {
        path.rsplit(['/', ':'])
            .next()
            .filter(|part| !part.is_empty())
            .map(name)
    };
    let root = fields
        .root
        .as_deref()
        .map(|root| root.strip_suffix("/rootfs").unwrap_or(root));
    let id = annotation("io.katacontainers.pkg.oci.bundle_path")
        .or(fields.cgroup.as_deref())
        .or(root)
        .and_then(last);
    let called = annotation("io.kubernetes.cri.container-name")
        .or(annotation("io.kubernetes.container.name"));
    let pause = annotation("io.katacontainers.pkg.oci.container_type") == Some("pod_sandbox")
        || annotation("io.kubernetes.cri.container-type") == Some("sandbox");
    let mut devices: Vec<(&str, &str)> = Vec::new();
    for (key, value) in &fields.annotations {
        if key.starts_with("cdi.k8s.io/") {
            devices.push((key, value));
        }
    }
    // The agent prints a map, whose order varies.
    devices.sort_unstable();
    // From 4.1 on a container may also request devices by its environment, if the agent's
    // configuration permits.
    let visible = fields
        .visible
        .as_deref()
        .filter(|value| !["", "none", "void"].contains(value));
    let devices = devices
        .iter()
        .map(|(_, value)| *value)
        .chain(visible)
        .collect::<Vec<_>>()
        .join(",");
    // The agent injects nothing into a pause container, whatever its annotations are.
    let devices = if pause { String::new() } else { cut(&devices) };
    Spec {
        id,
        name: called.filter(|n| !n.is_empty()).map(name),
        devices,
        pause,
    }
}

/// Limit of annotations kept of one spec.
const MAX_ANNOTATIONS: usize = 256;

/// Fields of a spec that matter here.
#[derive(Default)]
struct Fields {
    annotations: Vec<(String, String)>,
    root: Option<String>,
    cgroup: Option<String>,
    /// Value of the first variable VISIBLE_CDI_DEVICES.
    visible: Option<String>,
}

impl Fields {
    /// Parses a spec. Text from the container's owner is in string literals only: the text between
    /// two literals has the spec's own keys.
    fn of(debug: &str) -> Self {
        let mut fields = Self::default();
        let (mut key, mut rest) = ("", debug);
        let mut annotation: Option<String> = None;
        while let Some((between, quoted)) = rest.split_once('"')
            && let Some((text, after)) = logfmt::quoted(quoted)
        {
            rest = after;
            key = last_key(between).unwrap_or(key);
            match key {
                "annotations" => match annotation.take() {
                    None => annotation = Some(text),
                    Some(name) if fields.annotations.len() < MAX_ANNOTATIONS => {
                        fields.annotations.push((name, text))
                    }
                    Some(_) => {}
                },
                "env" => {
                    let value = text.strip_prefix("VISIBLE_CDI_DEVICES=");
                    fields.visible = fields.visible.or(value.map(str::to_string));
                }
                "path" if between.ends_with("Root { path: ") => {
                    fields.root = fields.root.or(Some(text));
                }
                "cgroups_path" => fields.cgroup = fields.cgroup.or(Some(text)),
                _ => {}
            }
        }
        fields
    }
}

/// Key of the value that begins behind this text; None if it belongs to the key before.
fn last_key(text: &str) -> Option<&str> {
    let (before, _) = text.rsplit_once(": ")?;
    let is_other = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
    before.rsplit(is_other).next().filter(|key| !key.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(msg: &str, more: &str) -> String {
        format!(
            "{{\"msg\":\"{msg}\",\"level\":\"INFO\",\"ts\":\"2026-01-02T03:04:05.5Z\",\
             \"name\":\"kata-agent\",\"version\":\"0.1.0\",\"source\":\"agent\",\
             \"pid\":\"1\"{more}}}"
        )
    }

    fn read(text: &str) -> Option<LineKind> {
        parse(&object(text.as_bytes()).unwrap()).map(|line| line.kind)
    }

    #[test]
    fn a_uevent_counts_if_a_driver_has_a_pci_function() {
        let uevent = ",\"event\":\"Uevent { action: \\\"bind\\\", devpath: \
            \\\"/devices/pci0000:00/0000:00:05.0/0000:02:00.0\\\", devname: \\\"\\\", subsystem: \
            \\\"pci\\\", seqnum: \\\"1381\\\", interface: \\\"\\\" }\"";
        let read = |uevent: &str| read(&line("got uevent message", uevent));
        let function = "0000:02:00.0".parse().unwrap();
        let bound = LineKind::Event(AgentEvent::Bound(function));
        assert_eq!(read(uevent), Some(bound));
        assert_eq!(read(&uevent.replace("bind", "add")), None);
        assert_eq!(read(&uevent.replace("pci\\\"", "memory\\\"")), None);
    }

    #[test]
    fn errors_have_no_stack_and_name_their_devices() {
        let failed = line(
            r"failed to start container: no such file\n\nStack backtrace:\n   0: <unknown>",
            "",
        );
        let error = "no such file".to_string();
        assert_eq!(read(&failed), Some(LineKind::StartFailed { error }));
        let error = "\"unresolvable CDI devices nvidia.com/gpu=2\"";
        assert_eq!(devices_of(error), ["nvidia.com/gpu=2"]);
    }

    #[test]
    fn a_containers_name_is_from_its_spec_not_its_owner() {
        let annotations = |more: &str| {
            format!(
                "annotations: Some({{\"cdi.k8s.io/b\": \"nvidia.com/gpu=1\", \"cdi.k8s.io/a\": \
                 \"nvidia.com/gpu=0\"{more}}})"
            )
        };
        let spec = |more: &str| {
            format!(
                "Spec {{ version: \"1.2.0\", root: Some(Root {{ path: \
                 \"/run/kata-containers/a1/rootfs\", readonly: Some(false) }}), process: \
                 Some(Process {{ args: Some([\"annotations: Some({{\\\"cdi.k8s.io/x\\\": \
                 \\\"nvidia.com/gpu=9\\\"}})\"]) }}), {}, linux: None }}",
                annotations(more)
            )
        };
        let devices = "nvidia.com/gpu=0,nvidia.com/gpu=1".to_string();
        let plain = Spec {
            id: Some("a1".into()),
            name: None,
            devices,
            pause: false,
        };
        assert_eq!(spec_of(&spec("")), plain);
        let called = spec(
            ", \"io.kubernetes.cri.container-name\": \"one\", \
             \"io.katacontainers.pkg.oci.bundle_path\": \"/run/x/b2\"",
        );
        assert_eq!(
            spec_of(&called),
            Spec {
                id: Some("b2".into()),
                name: Some("one".into()),
                ..plain.clone()
            }
        );
        let pause = spec(r#", "io.kubernetes.cri.container-type": "sandbox""#);
        assert_eq!(
            spec_of(&pause),
            Spec {
                devices: String::new(),
                pause: true,
                ..plain.clone()
            }
        );
        let env = |value: &str| {
            format!(
                "Spec {{ process: Some(Process {{ args: Some([\"VISIBLE_CDI_DEVICES=no\"]), env: \
                 Some([\"A=VISIBLE_CDI_DEVICES=no\", \"VISIBLE_CDI_DEVICES={value}\"]) }}) }}"
            )
        };
        assert_eq!(
            spec_of(&env("nvidia.com/gpu=3")).devices,
            "nvidia.com/gpu=3"
        );
        assert_eq!(spec_of(&env("none")).devices, "");
        // Spec as printed by agents before 3.9, with a cgroup of systemd.
        let hook = "Spec { root: None, hooks: Some(Hooks { prestart: Some([Hook { path: \"/x/h\" \
            }]) }) }";
        assert_eq!(spec_of(hook), Spec::default(), "a path of something else");
        let old = "Spec { version: \"1.0\", root: None, annotations: {\"cdi.k8s.io/a\": \
            \"nvidia.com/gpu=all\"}, linux: Some(Linux { cgroups_path: \
            \"kubepods.slice:cri-containerd:c3\" }) }";
        assert_eq!(
            spec_of(old),
            Spec {
                id: Some("c3".into()),
                devices: "nvidia.com/gpu=all".into(),
                ..Spec::default()
            }
        );
    }

    #[test]
    fn every_cut_of_a_spec_is_read() {
        let spec = "Spec { root: Some(Root { path: \"/a/b\\u{202e}\\\"/rootfs\" }), annotations: \
            Some({\"cdi.k8s.io/a\": \"nvidia.com/gpu=0\"}) }";
        for end in 0..=spec.len() {
            let _any = spec_of(&spec[..end]);
        }
        assert_eq!(
            spec_of(&spec.replace("/rootfs", "")).id.as_deref(),
            Some("b\\u{202e}\"")
        );
        assert_eq!(spec_of(&"{[(".repeat(100_000)), Spec::default());
    }

    #[test]
    fn texts_cannot_drive_a_terminal_and_are_cut() {
        let hostile = line("failed to start container: a\\u001b[2J\\u202eERR", "")
            .replace("ERR", &"x".repeat(10_000));
        let Some(LineKind::StartFailed { error }) = read(&hostile) else {
            panic!("not found")
        };
        assert!(
            error.starts_with("a\\x1b[2J\\u{202e}x") && error.len() < 2 * MAX_VALUE,
            "{error}"
        );
    }

    #[test]
    fn times_are_read_with_any_offset() {
        let utc = realtime_ns("2026-01-02T03:04:05.678901234Z");
        assert_eq!(utc, Some(1_767_323_045_678_901_234));
        assert_eq!(realtime_ns("2026-01-02T04:34:05.678901234+01:30"), utc);
        assert_eq!(realtime_ns("2026-01-01T19:04:05.678901234-08:00"), utc);
        for text in [
            "",
            "Z",
            "+01:00",
            "2026-01-02",
            "9999-12-31T23:59:59Z",
            "1960-01-01T00:00:00Z",
            "2026-01-02T03:04:05+99:99",
            "\u{e9}\u{e9}\u{e9}",
        ] {
            assert_eq!(realtime_ns(text), None, "{text}");
        }
    }
}
