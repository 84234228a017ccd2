//! Log lines of containerd and Kata's shims about a sandbox on the host: requests of the CRI and
//! their answers, the setup of its network, and the calls that its shim got.
//!
//! Few lines name the sandbox. The pod's metadata identify a request until its answer has the id;
//! the answer that made a container assigns it to its sandbox.

use super::facts::{Fact, Item, MAX_FACTS, RuntimeEvent, Stamp, cut};
use crate::data::containerd_log::Entry;
use kata_gpu_wire::catalogue::logged as names;
use serde_json::Value;
use std::collections::BTreeMap;

/// Longest text of one field.
const MAX_VALUE: usize = 300;

/// Messages of the shim about a VM, and their record names. The Rust shim's are `Starting QEMU VM`
/// and `start vm`, the others the Go shim's.
const VM_MESSAGES: &[(&str, &str)] = &[
    ("Starting VM", names::SANDBOX_VM_STARTING),
    ("Starting QEMU VM", names::SANDBOX_VM_STARTING),
    ("VM started", names::SANDBOX_VM_STARTED),
    ("start vm", names::SANDBOX_VM_STARTED),
    ("Agent started in the sandbox", names::SANDBOX_AGENT_STARTED),
    ("Sandbox is started", names::SANDBOX_STARTED),
];

/// Messages of the Go shim about a call for a container.
const GO_CALLS: &[(&str, &str)] = &[
    ("Create() start", "Create"),
    ("Create() end", "Create returned"),
    ("Start() start", "Start"),
    ("Start() end", "Start returned"),
];

/// Calls that the Rust shim logs, with the Go shim's names of call and answer.
const RUST_CALLS: &[(&str, &str, &str)] = &[
    ("CreateContainer(", "Create", "Create returned"),
    ("StartProcess(", "Start", "Start returned"),
];

/// The lines so far, in their order.
#[derive(Debug, Default)]
pub struct Runtime {
    /// Requests for sandboxes that are not answered: line and time, by the pod's metadata.
    asked: BTreeMap<String, (u64, i64)>,
    /// Sandbox and name of a container, by its id.
    containers: BTreeMap<String, (String, String)>,
    /// Containers of the Rust shim's calls that have not returned, by sandbox and call: answers
    /// name none.
    open: BTreeMap<(String, &'static str), String>,
}

/// Writes the events of one line.
struct Writer<'a> {
    line: u64,
    at: i64,
    each: &'a mut dyn FnMut(&str, Item),
}

impl Writer<'_> {
    fn event(
        &mut self,
        sandbox: &str,
        name: &'static str,
        fields: &[(&str, &str)],
        error: Option<&str>,
    ) {
        let fields = fields.iter().filter(|(_, value)| !value.is_empty());
        let fields =
            fields.map(|(key, value)| (key.to_string(), Value::from(cut(value, MAX_VALUE))));
        let event = RuntimeEvent {
            name,
            error: error.map(|error| cut(error, MAX_VALUE)),
            fields: fields.collect(),
        };
        let item = Item {
            stamp: Stamp::Host(self.at),
            read_ns: None,
            file: 0,
            line: self.line,
            fact: Fact::Runtime(event),
        };
        (self.each)(sandbox, item);
    }
}

impl Runtime {
    /// Takes the next line and passes its events on, each with its sandbox.
    pub fn line(&mut self, line: u64, at: i64, entry: &Entry, mut each: impl FnMut(&str, Item)) {
        let each = &mut each;
        let mut out = Writer { line, at, each };
        let Some(msg) = entry.get("msg") else {
            return;
        };
        if let Some(sandbox) = entry.get("podsandboxid") {
            if msg == "begin cni setup" {
                out.event(sandbox, names::SANDBOX_CNI, &[("call", "setup")], None);
            } else if msg.starts_with("cni result: ") {
                out.event(
                    sandbox,
                    names::SANDBOX_CNI,
                    &[("call", "setup returned")],
                    None,
                );
            }
        } else if let Some(sandbox) = entry.get("sandbox") {
            self.shims(sandbox, msg, entry, &mut out);
        } else {
            self.containerds(msg, entry, &mut out);
        }
    }

    fn shims(&mut self, sandbox: &str, msg: &str, entry: &Entry, out: &mut Writer) {
        if let Some((_, name)) = VM_MESSAGES.iter().find(|(text, _)| *text == msg) {
            return out.event(sandbox, name, &[], None);
        }
        let cdi_timeout = "failed to inject devices after CDI timeout";
        if let Some(error) = entry.get("error").filter(|e| e.contains(cdi_timeout)) {
            return out.event(sandbox, names::SANDBOX_FAILED, &[], Some(error));
        }
        let call = match entry.get("container") {
            Some(id) if msg == "Container is started" => {
                let container = self.container(sandbox, id);
                let fields = [("container", container.as_str())];
                return out.event(sandbox, names::SANDBOX_CONTAINER_STARTED, &fields, None);
            }
            Some(id) => GO_CALLS
                .iter()
                .find(|(text, _)| *text == msg)
                .map(|(_, call)| (*call, id.to_string())),
            None => self.rust_call(sandbox, msg),
        };
        if let Some((call, id)) = call {
            let container = self.container(sandbox, &id);
            let fields = [("call", call), ("container", &container)];
            out.event(sandbox, names::SANDBOX_SHIM, &fields, None);
        }
    }

    /// `====> task service StartProcess(ContainerProcess { container_id: ContainerID {
    /// container_id: "..`.
    fn rust_call(&mut self, sandbox: &str, msg: &str) -> Option<(&'static str, String)> {
        let (arrow, rest) = msg.split_once(" task service ")?;
        let (_, call, returned) = RUST_CALLS
            .iter()
            .find(|(text, ..)| rest.starts_with(text))?;
        let key = (sandbox.to_string(), *call);
        match arrow {
            "<====" => Some((*returned, self.open.remove(&key)?)),
            "====>" => {
                let id = rest.split_once("container_id: \"")?.1.split('"').next()?;
                if self.open.len() < MAX_FACTS {
                    self.open.insert(key, id.to_string());
                }
                Some((*call, id.to_string()))
            }
            _ => None,
        }
    }

    fn containerds(&mut self, msg: &str, entry: &Entry, out: &mut Writer) {
        if let Some(rest) = msg.strip_prefix("RunPodSandbox for ") {
            self.run_pod_sandbox(rest, out);
        } else if let Some(within) = msg.strip_prefix("CreateContainer within sandbox \"") {
            self.create_container(within, entry, out);
        } else if let Some(rest) = msg.strip_prefix("StartContainer for \"")
            && let Some((id, answer)) = rest.split_once('"')
            && let Some((sandbox, name)) = self.containers.get(id)
        {
            let call = match answer {
                "" => "StartContainer",
                _ => "StartContainer returned",
            };
            let fields = [("call", call), ("container", name)];
            out.event(sandbox, names::SANDBOX_RUN, &fields, entry.get("error"));
        }
    }

    /// Handles `&PodSandboxMetadata{Name:nginx,Uid:..}` and its answer.
    fn run_pod_sandbox(&mut self, rest: &str, out: &mut Writer) {
        let Some((metadata, answer)) = rest.split_once('}') else {
            return;
        };
        if answer.is_empty() {
            // A request that failed is repeated with the same words.
            if self.asked.len() < MAX_FACTS {
                self.asked.insert(metadata.into(), (out.line, out.at));
            }
        } else if let Some((_, id)) = answer.split_once("returns sandbox id ") {
            let (id, pod) = (id.trim_matches('"'), name_in(metadata));
            if let Some((line, at)) = self.asked.remove(metadata) {
                let each = &mut *out.each;
                let fields = [("call", "RunPodSandbox"), ("pod", pod)];
                Writer { line, at, each }.event(id, names::SANDBOX_RUN, &fields, None);
            }
            out.event(id, names::SANDBOX_READY, &[("pod", pod)], None);
        }
    }

    fn create_container(&mut self, within: &str, entry: &Entry, out: &mut Writer) {
        let Some((sandbox, rest)) = within.split_once('"') else {
            return;
        };
        let Some((metadata, answer)) = rest.split_once('}') else {
            return;
        };
        let name = name_in(metadata);
        let id = answer.split_once("returns container id ");
        let id = id.map(|(_, id)| id.trim_matches('"'));
        if let Some(id) = id.filter(|_| self.containers.len() < MAX_FACTS) {
            let container = (sandbox.into(), name.into());
            self.containers.insert(id.into(), container);
        }
        let call = match answer {
            "" => "CreateContainer",
            _ => "CreateContainer returned",
        };
        let id = id.map_or("", short);
        let fields = [("container", name), ("id", id), ("call", call)];
        out.event(sandbox, names::SANDBOX_RUN, &fields, entry.get("error"));
    }

    /// A container's name, or else the start of its id; none for the sandbox itself.
    fn container(&self, sandbox: &str, id: &str) -> String {
        let known = self.containers.get(id).map(|(_, name)| name.as_str());
        match sandbox == id {
            true => String::new(),
            false => known.unwrap_or(short(id)).to_string(),
        }
    }
}

/// Name in metadata of the CRI.
fn name_in(metadata: &str) -> &str {
    let name = metadata.split_once("Name:");
    name.and_then(|(_, name)| name.split(',').next())
        .unwrap_or("?")
}

fn short(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::containerd_log::entry;

    /// Events of lines, as `sandbox time name call container`.
    fn events(lines: &[String]) -> Vec<String> {
        let mut runtime = Runtime::default();
        let mut all = Vec::new();
        for (at, line) in (0..).zip(lines) {
            runtime.line(0, at, &entry(line).unwrap(), |sandbox, item| {
                let (Stamp::Host(at), Fact::Runtime(event)) = (item.stamp, item.fact) else {
                    panic!("not of the host")
                };
                let field = |key: &str| event.fields.get(key).and_then(Value::as_str);
                all.push(format!(
                    "{sandbox} {at} {} {} {}",
                    event.name,
                    field("call").unwrap_or("-"),
                    field("container").unwrap_or("-")
                ));
            });
        }
        all
    }

    fn containerd(msg: &str) -> String {
        format!("time=\"2026-01-02T03:04:05Z\" level=info msg={msg:?}")
    }

    const POD: &str = "&PodSandboxMetadata{Name:train,Uid:1,Namespace:ml,Attempt:0,}";

    #[test]
    fn a_request_is_its_sandboxs_as_soon_as_that_has_an_id() {
        let lines = [
            format!("RunPodSandbox for {POD}"),
            format!("RunPodSandbox for {}", POD.replace("train", "other")),
            format!("RunPodSandbox for {POD} returns sandbox id \"abc\""),
            "CreateContainer within sandbox \"abc\" for container &ContainerMetadata{Name:cuda,\
             Attempt:0,}"
                .into(),
            "CreateContainer within sandbox \"abc\" for &ContainerMetadata{Name:cuda,Attempt:0,} \
             returns container id \"77\""
                .into(),
            "StartContainer for \"77\"".into(),
            "StartContainer for \"78\"".into(),
            "StartContainer for \"77\" returns successfully".into(),
        ];
        let all = events(&lines.map(|line| containerd(&line)));
        let wanted = [
            "abc 0 sandbox.run RunPodSandbox -",
            "abc 2 sandbox.ready - -",
            "abc 3 sandbox.run CreateContainer cuda",
            "abc 4 sandbox.run CreateContainer returned cuda",
            "abc 5 sandbox.run StartContainer cuda",
            "abc 7 sandbox.run StartContainer returned cuda",
        ];
        assert_eq!(all, wanted);
    }

    #[test]
    fn answers_of_the_rust_shim_are_those_of_the_call_before() {
        let line = |message: &str| {
            let fields = serde_json::json!({
                "__REALTIME_TIMESTAMP": "1",
                "SYSLOG_IDENTIFIER": "kata",
                "SOURCE": "abc",
                "SUBSYSTEM": "service",
                "MESSAGE": message,
            });
            fields.to_string()
        };
        let lines = [
            "====> task service CreateContainer(ContainerConfig { container_id: \"abc\", bundle: \
             \"/run\" })",
            "====> task service StateProcess(ContainerProcess { container_id: ContainerID { \
             container_id: \"abc\" } })",
            "<==== task service CreateContainer(PID { pid: 350 })",
            "<==== task service StartProcess(PID { pid: 350 })",
            "====> task service StartProcess(ContainerProcess { container_id: ContainerID { \
             container_id: \"0123456789abcdef\" } })",
            "<==== task service StartProcess(PID { pid: 350 })",
        ];
        let wanted = [
            "abc 0 sandbox.shim Create -",
            "abc 2 sandbox.shim Create returned -",
            "abc 4 sandbox.shim Start 0123456789ab",
            "abc 5 sandbox.shim Start returned 0123456789ab",
        ];
        assert_eq!(events(&lines.map(line)), wanted);
    }
}
