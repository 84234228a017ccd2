//! Log lines of containerd and Kata's shims about a sandbox on the host: requests of the CRI and
//! their answers, the setup of its network, and the calls that its shim got.
//!
//! Few lines name the sandbox. The pod's metadata identify a request until its answer has the id;
//! the answer that made a container assigns it to its sandbox.

use super::item::{MAX_ITEMS, cut};
use crate::data::containerd_log::Entry;
use kata_gpu_wire::catalogue::logged as names;
use kata_gpu_wire::record::Level;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Longest text of one field.
const MAX_VALUE: usize = 300;

/// Messages of the shim about a VM, and their record names. The Rust shim's are `Starting QEMU VM`
/// and `start vm`, the others the Go shim's.
const SHIM: &[(&str, &str)] = &[
    ("Starting VM", names::SANDBOX_VM_STARTING),
    ("Starting QEMU VM", names::SANDBOX_VM_STARTING),
    ("VM started", names::SANDBOX_VM_STARTED),
    ("start vm", names::SANDBOX_VM_STARTED),
    ("Agent started in the sandbox", names::SANDBOX_AGENT_STARTED),
    ("Sandbox is started", names::SANDBOX_STARTED),
];

/// Calls of containerd that the Rust shim logs, and the Go shim's names of them.
const TASK_CALLS: &[(&str, &str)] = &[("CreateContainer", "Create"), ("StartProcess", "Start")];

/// A record about a sandbox.
#[derive(Debug)]
pub struct Said {
    pub sandbox: String,
    pub line: u64,
    /// CLOCK_REALTIME of the host.
    pub at: i64,
    pub name: &'static str,
    pub level: Level,
    pub error: Option<String>,
    pub fields: Map<String, Value>,
}

/// The lines so far, in their order.
#[derive(Debug, Default)]
pub struct Runtime {
    /// Requests for sandboxes that are not answered: line and time, by the pod's metadata.
    asked: BTreeMap<String, (u64, i64)>,
    /// Sandbox and name of a container, by its id.
    containers: BTreeMap<String, (String, String)>,
    /// Containers of the Rust shims' calls that have not returned, by sandbox and call: answers
    /// name none.
    open: BTreeMap<(String, &'static str), String>,
}

/// A record in the making.
struct Maker<'a> {
    line: u64,
    at: i64,
    each: &'a mut dyn FnMut(Said),
}

impl Maker<'_> {
    fn say(
        &mut self,
        sandbox: &str,
        name: &'static str,
        fields: &[(&str, &str)],
        error: Option<&str>,
    ) {
        let fields = fields.iter().filter(|(_, value)| !value.is_empty());
        let fields =
            fields.map(|(key, value)| ((*key).to_string(), Value::from(cut(value, MAX_VALUE))));
        let level = if error.is_some() {
            Level::Error
        } else {
            Level::Info
        };
        let (line, at, error) = (self.line, self.at, error.map(|error| cut(error, MAX_VALUE)));
        (self.each)(Said {
            sandbox: sandbox.into(),
            line,
            at,
            name,
            level,
            error,
            fields: fields.collect(),
        });
    }
}

impl Runtime {
    /// Takes the next line and hands over its records; true if they come with a later line.
    pub fn line(&mut self, line: u64, at: i64, entry: &Entry, mut each: impl FnMut(Said)) -> bool {
        let mut maker = Maker {
            line,
            at,
            each: &mut each,
        };
        let Some(msg) = entry.get("msg") else {
            return false;
        };
        if let Some(sandbox) = entry.get("podsandboxid") {
            match msg {
                "begin cni setup" => {
                    maker.say(sandbox, names::SANDBOX_CNI, &[("call", "setup")], None)
                }
                _ if msg.starts_with("cni result: ") => maker.say(
                    sandbox,
                    names::SANDBOX_CNI,
                    &[("call", "setup returned")],
                    None,
                ),
                _ => {}
            }
            return false;
        }
        if let Some(sandbox) = entry.get("sandbox") {
            self.shims(sandbox, msg, entry, &mut maker);
            return false;
        }
        self.containerds(msg, entry, &mut maker)
    }

    /// Number of requests without an answer.
    pub fn unanswered(&self) -> u64 {
        self.asked.len() as u64
    }

    fn shims(&mut self, sandbox: &str, msg: &str, entry: &Entry, maker: &mut Maker) {
        if let Some((_, name)) = SHIM.iter().find(|(text, _)| *text == msg) {
            return maker.say(sandbox, name, &[], None);
        }
        if let Some(error) = entry
            .get("error")
            .filter(|e| e.contains("failed to inject devices after CDI timeout"))
        {
            return maker.say(sandbox, names::SANDBOX_FAILED, &[], Some(error));
        }
        let said = match entry.get("container") {
            Some(id) => match msg {
                "Container is started" => {
                    return maker.say(
                        sandbox,
                        names::SANDBOX_CONTAINER_STARTED,
                        &[("container", &self.container(sandbox, id))],
                        None,
                    );
                }
                "Create() start" => Some(("Create", id.to_string())),
                "Create() end" => Some(("Create returned", id.to_string())),
                "Start() start" => Some(("Start", id.to_string())),
                "Start() end" => Some(("Start returned", id.to_string())),
                _ => None,
            },
            None => self.task_call(sandbox, msg),
        };
        if let Some((call, id)) = said {
            maker.say(
                sandbox,
                names::SANDBOX_SHIM,
                &[("call", call), ("container", &self.container(sandbox, &id))],
                None,
            );
        }
    }

    /// `====> task service StartProcess(ContainerProcess { container_id: ContainerID {
    /// container_id: "..`.
    fn task_call(&mut self, sandbox: &str, msg: &str) -> Option<(&'static str, String)> {
        let (begun, rest) = match msg.strip_prefix("====> task service ") {
            Some(rest) => (true, rest),
            None => (false, msg.strip_prefix("<==== task service ")?),
        };
        let (_, call) = TASK_CALLS
            .iter()
            .find(|(call, _)| rest.strip_prefix(call).is_some_and(|r| r.starts_with('(')))?;
        let key = (sandbox.to_string(), *call);
        if !begun {
            let returned = if *call == "Create" {
                "Create returned"
            } else {
                "Start returned"
            };
            return Some((returned, self.open.remove(&key)?));
        }
        let id = rest
            .split_once("container_id: \"")?
            .1
            .split('"')
            .next()?
            .to_string();
        if self.open.len() < MAX_ITEMS {
            self.open.insert(key, id.clone());
        }
        Some((call, id))
    }

    fn containerds(&mut self, msg: &str, entry: &Entry, maker: &mut Maker) -> bool {
        if let Some(rest) = msg.strip_prefix("RunPodSandbox for ") {
            return self.run_pod_sandbox(rest, maker);
        }
        if let Some(within) = msg.strip_prefix("CreateContainer within sandbox \"") {
            self.create_container(within, entry, maker);
        } else if let Some((id, rest)) = msg
            .strip_prefix("StartContainer for \"")
            .and_then(|rest| rest.split_once('"'))
            && let Some((sandbox, name)) = self.containers.get(id)
        {
            let call = if rest.is_empty() {
                "StartContainer"
            } else {
                "StartContainer returned"
            };
            maker.say(
                sandbox,
                names::SANDBOX_RUN,
                &[("call", call), ("container", name)],
                entry.get("error"),
            );
        }
        false
    }

    /// Handles `&PodSandboxMetadata{Name:nginx,Uid:..}` and its answer.
    fn run_pod_sandbox(&mut self, rest: &str, maker: &mut Maker) -> bool {
        let Some((metadata, answer)) = rest.split_once('}') else {
            return false;
        };
        let pod = metadata
            .split_once("Name:")
            .and_then(|(_, name)| name.split(',').next())
            .unwrap_or("?");
        if answer.is_empty() {
            // A request that failed is repeated with the same words.
            return self.asked.len() < MAX_ITEMS
                && self
                    .asked
                    .insert(metadata.into(), (maker.line, maker.at))
                    .is_none();
        }
        if let Some((_, id)) = answer.split_once("returns sandbox id ") {
            let id = id.trim_matches('"');
            if let Some((line, at)) = self.asked.remove(metadata) {
                let mut asked = Maker {
                    line,
                    at,
                    each: &mut *maker.each,
                };
                asked.say(
                    id,
                    names::SANDBOX_RUN,
                    &[("call", "RunPodSandbox"), ("pod", pod)],
                    None,
                );
            }
            maker.say(id, names::SANDBOX_READY, &[("pod", pod)], None);
        }
        false
    }

    fn create_container(&mut self, within: &str, entry: &Entry, maker: &mut Maker) {
        let Some((sandbox, rest)) = within.split_once('"') else {
            return;
        };
        let name = rest
            .split_once("Name:")
            .and_then(|(_, name)| name.split([',', '}']).next())
            .unwrap_or("?");
        let Some((_, answer)) = rest.split_once('}') else {
            return;
        };
        let id = answer
            .split_once("returns container id ")
            .map(|(_, id)| id.trim_matches('"'));
        if let Some(id) = id.filter(|_| self.containers.len() < MAX_ITEMS) {
            self.containers
                .insert(id.into(), (sandbox.into(), name.into()));
        }
        let call = if answer.is_empty() {
            "CreateContainer"
        } else {
            "CreateContainer returned"
        };
        let fields = [
            ("container", name),
            ("id", id.map_or("", short)),
            ("call", call),
        ];
        maker.say(sandbox, names::SANDBOX_RUN, &fields, entry.get("error"));
    }

    /// A container's name, or else the start of its id; none for the sandbox itself.
    fn container(&self, sandbox: &str, id: &str) -> String {
        if sandbox == id {
            return String::new();
        }
        self.containers
            .get(id)
            .map_or_else(|| short(id).to_string(), |(_, name)| name.clone())
    }
}

fn short(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::containerd_log::entry;

    /// Records of lines, as `sandbox time name call container`, and the count of lines that wait
    /// for another.
    fn said(lines: &[String]) -> (Vec<String>, u64) {
        let mut runtime = Runtime::default();
        let mut all = Vec::new();
        for (at, line) in (0..).zip(lines) {
            let field = |said: &Said, key: &str| {
                said.fields
                    .get(key)
                    .and_then(Value::as_str)
                    .unwrap_or("-")
                    .to_string()
            };
            let mut each = |said: Said| {
                all.push(format!(
                    "{} {} {} {} {}",
                    said.sandbox,
                    said.at,
                    said.name,
                    field(&said, "call"),
                    field(&said, "container")
                ))
            };
            runtime.line(0, at, &entry(line).unwrap(), &mut each);
        }
        (all, runtime.unanswered())
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
            "CreateContainer within sandbox \"abc\" for container &ContainerMetadata{Name:cuda,Attempt:0,}".into(),
            "CreateContainer within sandbox \"abc\" for &ContainerMetadata{Name:cuda,Attempt:0,} returns container id \"77\"".into(),
            "StartContainer for \"77\"".into(),
            "StartContainer for \"78\"".into(),
            "StartContainer for \"77\" returns successfully".into(),
        ];
        let (all, unanswered) = said(&lines.map(|line| containerd(&line)));
        let wanted = [
            "abc 0 sandbox.run RunPodSandbox -",
            "abc 2 sandbox.ready - -",
            "abc 3 sandbox.run CreateContainer cuda",
            "abc 4 sandbox.run CreateContainer returned cuda",
            "abc 5 sandbox.run StartContainer cuda",
            "abc 7 sandbox.run StartContainer returned cuda",
        ];
        assert_eq!((all, unanswered), (wanted.map(String::from).to_vec(), 1));
    }

    #[test]
    fn answers_of_the_rust_shim_are_those_of_the_call_before() {
        let line = |message: &str| {
            let fields = serde_json::json!({"__REALTIME_TIMESTAMP": "1", "SYSLOG_IDENTIFIER": "kata", "SOURCE": "abc",
                "SUBSYSTEM": "service", "MESSAGE": message});
            fields.to_string()
        };
        let lines = [
            "====> task service CreateContainer(ContainerConfig { container_id: \"abc\", bundle: \"/run\" })",
            "====> task service StateProcess(ContainerProcess { container_id: ContainerID { container_id: \"abc\" } })",
            "<==== task service CreateContainer(PID { pid: 350 })",
            "<==== task service StartProcess(PID { pid: 350 })",
            "====> task service StartProcess(ContainerProcess { container_id: ContainerID { container_id: \"0123456789abcdef\" } })",
            "<==== task service StartProcess(PID { pid: 350 })",
        ];
        let wanted = [
            "abc 0 sandbox.shim Create -",
            "abc 2 sandbox.shim Create returned -",
            "abc 4 sandbox.shim Start 0123456789ab",
            "abc 5 sandbox.shim Start returned 0123456789ab",
        ];
        assert_eq!(
            said(&lines.map(line)),
            (wanted.map(String::from).to_vec(), 0)
        );
    }
}
