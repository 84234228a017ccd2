//! Log lines of containerd, CRI-O and Kata's shims about a sandbox on the host: requests of the CRI
//! and their answers, the setup of its network, the calls that its shim got, and errors.
//!
//! Few lines name the sandbox. The pod's metadata identify a request until its answer has the id;
//! the answer that made a container assigns it to its sandbox. A request that failed never gets an
//! id: its sandbox is the one that the shim began to make since, or has the pod's name.
//!
//! An error passes from the guest through shim and containerd, and each logs it: a sandbox has one
//! failure for each of its reasons.

use super::facts::{Fact, Item, MAX_FACTS, RuntimeEvent, Stamp, cut};
use super::runtime_errors::{ENDS, gives_up, innermost, is_error};
use crate::data::containerd_log::{Entry, POD, POD_ERROR};
use kata_gpu_wire::catalogue::logged as names;
use kata_gpu_wire::failure::{Diagnosis, Reason, of_sandbox};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Longest text of one field.
const MAX_VALUE: usize = 300;

/// Sandbox of a pod whose error names neither.
const NAMELESS: &str = "pod";

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

/// State of one sandbox.
#[derive(Debug, Default)]
struct Sandbox {
    /// Time of its first line.
    first: i64,
    /// Time at which the runtime began to wait: the VM's start, or the last request.
    begun: Option<i64>,
    is_ending: bool,
    /// Whether a request for a sandbox was found to be this one's.
    is_answered: bool,
    /// Whether only errors of its pod are known of it.
    is_only_a_pods: bool,
    failures: Vec<(Reason, String)>,
}

/// Whether the guest of this sandbox still logged at this time.
pub type IsAlive<'a> = &'a dyn Fn(&str, i64) -> bool;

/// The lines so far, in their order.
#[derive(Debug, Default)]
pub struct Runtime {
    sandboxes: BTreeMap<String, Sandbox>,
    /// Sandboxes of CRI-O's pods, by namespace and name.
    pods: BTreeMap<String, String>,
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
    is_alive: IsAlive<'a>,
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
        self.event_with(sandbox, name, fields.collect(), error);
    }

    fn event_with(
        &mut self,
        sandbox: &str,
        name: &'static str,
        fields: Map<String, Value>,
        error: Option<&str>,
    ) {
        let event = RuntimeEvent {
            name,
            error: error.map(|error| cut(error, MAX_VALUE)),
            fields,
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
    /// Whether an entry may be one of these programs' about a sandbox.
    pub fn knows(entry: &Entry) -> bool {
        const MESSAGES: &[&str] = &[
            "RunPodSandbox for ",
            "CreateContainer within sandbox ",
            "StartContainer for ",
        ];
        let Some(msg) = entry.get("msg") else {
            return entry.console().is_some() || entry.get(POD_ERROR).is_some();
        };
        let of_sandbox = ["sandbox", "podsandboxid", "sandboxID"];
        of_sandbox.iter().any(|key| entry.get(key).is_some())
            || MESSAGES.iter().any(|text| msg.starts_with(text))
            || crio_call(entry).is_some()
    }

    /// Takes the next line and passes its events on, each with its sandbox.
    pub fn line(
        &mut self,
        line: u64,
        at: i64,
        entry: &Entry,
        is_alive: IsAlive,
        mut each: impl FnMut(&str, Item),
    ) {
        let each = &mut each;
        let mut out = Writer {
            line,
            at,
            is_alive,
            each,
        };
        if let Some(error) = entry.get(POD_ERROR) {
            return self.pods_error(error, entry, &mut out);
        }
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
        } else if let Some((call, id)) = crio_call(entry) {
            self.crios(call, id, msg, entry, &mut out);
        } else {
            self.containerds(msg, entry, &mut out);
        }
    }

    /// State of a sandbox, if there is room for it.
    fn sandbox(&mut self, id: &str, at: i64) -> Option<&mut Sandbox> {
        if self.sandboxes.len() >= MAX_FACTS && !self.sandboxes.contains_key(id) {
            return None;
        }
        let first = || Sandbox {
            first: at,
            ..Sandbox::default()
        };
        Some(self.sandboxes.entry(id.to_string()).or_insert_with(first))
    }

    fn shims(&mut self, sandbox: &str, msg: &str, entry: &Entry, out: &mut Writer) {
        let vm = VM_MESSAGES.iter().find(|(text, _)| *text == msg);
        let known = self.sandbox(sandbox, out.at);
        if let Some(known) = known {
            if let Some((_, names::SANDBOX_VM_STARTING)) = vm {
                (known.begun, known.is_ending) = (Some(out.at), false);
            }
            known.is_ending |= ENDS.contains(&msg);
        }
        if let Some((_, name)) = vm {
            return out.event(sandbox, name, &[], None);
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
        } else if is_error(entry) {
            self.error(sandbox, msg, entry.get("error"), out);
        }
    }

    /// Takes the shim's line at the level of errors: a failure of the sandbox, or another.
    fn error(&mut self, sandbox: &str, msg: &str, error: Option<&str>, out: &mut Writer) {
        let known = self.sandbox(sandbox, out.at);
        let (is_ending, is_answered) =
            known.map_or((false, false), |s| (s.is_ending, s.is_answered));
        let text = error.unwrap_or(msg);
        let found = of_sandbox(text).or(of_sandbox(msg));
        // A time-out of another call, as that for metrics, fails no sandbox that runs.
        let is_of_others = |reason| is_answered && reason == Reason::CreateTimeout;
        let is_known = found.is_some_and(|found| !is_of_others(found.reason));
        if !is_ending && (gives_up(msg) || is_known) {
            return self.failed(sandbox, text, out);
        }
        let text = match error {
            Some(error) => format!("{msg}: {error}"),
            None => msg.to_string(),
        };
        out.event(sandbox, names::SANDBOX_LOG, &[("text", &text)], None);
    }

    /// Takes the error of a pod, which repeats what a runtime said: news only where no runtime's
    /// lines are in the log.
    fn pods_error(&mut self, error: &str, entry: &Entry, out: &mut Writer) {
        let words = innermost(error);
        let pod = entry.get(POD);
        let said = |known: &&Sandbox| {
            let mut failures = known.failures.iter();
            failures.any(|(_, before)| before.contains(words) || words.contains(before))
        };
        let mut said = self.sandboxes.values().filter(said);
        if said.any(|known| pod.is_none() || !known.is_only_a_pods) {
            return;
        }
        let sandbox = entry.get("pod_sandbox").or(pod).unwrap_or(NAMELESS);
        if let Some(known) = self.sandbox(sandbox, out.at) {
            known.is_only_a_pods = known.begun.is_none();
        }
        self.failed(sandbox, error, out);
    }

    /// Reports a failure of a sandbox, once for each reason.
    fn failed(&mut self, sandbox: &str, error: &str, out: &mut Writer) {
        let words = innermost(error);
        let general = || Diagnosis::known(Reason::SandboxFailed, None);
        let found = of_sandbox(words).or_else(|| of_sandbox(error));
        let mut found = found.unwrap_or_else(general);
        if found.reason == Reason::AgentNoAnswer && (out.is_alive)(sandbox, out.at) {
            found = Diagnosis::known(Reason::AgentLate, None);
        }
        let at = out.at;
        let Some(known) = self.sandbox(sandbox, at) else {
            return;
        };
        let is_general = found.reason == Reason::SandboxFailed;
        let is_known = |(reason, before): &(Reason, String)| {
            *reason == found.reason || is_general || before.contains(words)
        };
        if known.failures.iter().any(is_known) {
            return;
        }
        known.failures.push((found.reason, words.to_string()));
        let waited_ms = known
            .begun
            .and_then(|begun| at.checked_sub(begun))
            .map(|ns| ns / 1_000_000);
        let texts = [
            ("reason", found.reason.name()),
            ("whose", found.reason.whose().name()),
            ("sure", found.sure.name()),
            ("cure", found.cure.as_ref()),
        ];
        let texts = texts.map(|(key, text)| (key.to_string(), Value::from(text)));
        let mut fields: Map<String, Value> = texts.into_iter().collect();
        fields.extend(waited_ms.map(|ms| ("waited_ms".to_string(), ms.into())));
        out.event_with(sandbox, names::SANDBOX_FAILED, fields, Some(words));
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
            self.run_pod_sandbox(rest, entry, out);
        } else if let Some(within) = msg.strip_prefix("CreateContainer within sandbox \"") {
            self.create_container(within, entry, out);
        } else if let Some(rest) = msg.strip_prefix("StartContainer for \"")
            && let Some((id, answer)) = rest.split_once('"')
            && let Some((sandbox, name)) = self.containers.get(id).cloned()
        {
            let call = match answer {
                "" => "StartContainer",
                _ => "StartContainer returned",
            };
            let fields = [("call", call), ("container", &name)];
            let error = entry.get("error");
            out.event(&sandbox, names::SANDBOX_RUN, &fields, error);
            self.answered(&sandbox, answer.is_empty(), error, out);
        }
    }

    /// Takes a call for a container, or its answer: the runtime waits from the call on, and an
    /// error fails the container.
    fn answered(&mut self, sandbox: &str, is_call: bool, error: Option<&str>, out: &mut Writer) {
        if let Some(known) = self.sandbox(sandbox, out.at).filter(|_| is_call) {
            known.begun = Some(out.at);
        }
        if let Some(error) = error {
            self.failed(sandbox, error, out);
        }
    }

    /// Handles `&PodSandboxMetadata{Name:nginx,Uid:..}` and its answer.
    fn run_pod_sandbox(&mut self, rest: &str, entry: &Entry, out: &mut Writer) {
        let Some((metadata, answer)) = rest.split_once('}') else {
            return;
        };
        let pod = name_in(metadata);
        if answer.is_empty() {
            // A request that failed is repeated with the same words.
            if self.asked.len() < MAX_FACTS {
                self.asked.insert(metadata.into(), (out.line, out.at));
            }
        } else if let Some((_, id)) = answer.split_once("returns sandbox id ") {
            let id = id.trim_matches('"');
            self.asked_for(metadata, id, pod, out);
            out.event(id, names::SANDBOX_READY, &[("pod", pod)], None);
        } else if let Some(error) = entry.get("error").filter(|_| is_error(entry)) {
            let asked = self.asked.get(metadata).map(|(_, at)| *at);
            let id = self.unanswered(asked, error).unwrap_or(pod.to_string());
            self.asked_for(metadata, &id, pod, out);
            self.run_failed(&id, asked, error, out);
        }
    }

    /// Reports a request for a sandbox, now that its id is known.
    fn asked_for(&mut self, request: &str, id: &str, pod: &str, out: &mut Writer) {
        let asked = self.asked.remove(request);
        if let Some(known) = self.sandbox(id, asked.map_or(out.at, |(_, at)| at)) {
            known.is_answered = true;
        }
        if let Some((line, at)) = asked {
            let (is_alive, each) = (out.is_alive, &mut *out.each);
            let fields = [("call", "RunPodSandbox"), ("pod", pod)];
            let mut then = Writer {
                line,
                at,
                is_alive,
                each,
            };
            then.event(id, names::SANDBOX_RUN, &fields, None);
        }
    }

    fn run_failed(&mut self, id: &str, asked: Option<i64>, error: &str, out: &mut Writer) {
        let fields = [("call", "RunPodSandbox returned")];
        out.event(id, names::SANDBOX_RUN, &fields, Some(innermost(error)));
        if let Some(known) = self.sandbox(id, out.at) {
            known.begun = known.begun.or(asked);
        }
        self.failed(id, error, out);
    }

    /// The sandbox of a request that failed: of those that began since the request and have no
    /// answer, the one with this error, or else the only one.
    fn unanswered(&self, asked: Option<i64>, error: &str) -> Option<String> {
        // containerd names it: `failed to start sandbox "269c0f..": ..`.
        let named = error.split_once("failed to start sandbox \"");
        let named =
            named.and_then(|(_, rest)| Some(rest.split_once('"')?.0.trim_end_matches('\\')));
        if let Some(id) = named.filter(|id| self.sandboxes.contains_key(*id)) {
            return Some(id.to_string());
        }
        let since = asked.unwrap_or(i64::MIN);
        let open = self
            .sandboxes
            .iter()
            .filter(|(_, sandbox)| sandbox.first >= since && !sandbox.is_answered);
        let has_error = |sandbox: &Sandbox| {
            sandbox
                .failures
                .iter()
                .any(|(_, words)| error.contains(words))
        };
        let same = open.clone().find(|(_, sandbox)| has_error(sandbox));
        let mut all = open.map(|(id, _)| id);
        let only = all.next().filter(|_| all.next().is_none());
        same.map(|(id, _)| id)
            .or(only.filter(|_| asked.is_some()))
            .cloned()
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
        self.knows_container(sandbox, id, name);
        let call = match answer {
            "" => "CreateContainer",
            _ => "CreateContainer returned",
        };
        let id = id.map_or("", short);
        let fields = [("container", name), ("id", id), ("call", call)];
        let error = entry.get("error");
        out.event(sandbox, names::SANDBOX_RUN, &fields, error);
        self.answered(sandbox, answer.is_empty(), error, out);
    }

    fn knows_container(&mut self, sandbox: &str, id: Option<&str>, name: &str) {
        if let Some(id) = id.filter(|_| self.containers.len() < MAX_FACTS) {
            let container = (sandbox.into(), name.into());
            self.containers.insert(id.into(), container);
        }
    }

    /// Takes a line of CRI-O in the call with this id: server/sandbox_run_linux.go,
    /// server/container_create.go, server/container_start.go.
    fn crios(&mut self, call: &str, id: &str, msg: &str, entry: &Entry, out: &mut Writer) {
        if let Some(pod) = msg.strip_prefix("Running pod sandbox: ") {
            if self.asked.len() < MAX_FACTS {
                self.asked.insert(id.into(), (out.line, out.at));
                self.pods.insert(id.into(), pod_of(pod));
            }
        } else if let Some(rest) = msg.strip_prefix("Ran pod sandbox ")
            && let Some((sandbox, pod)) = rest.split_once(" with infra container: ")
        {
            let pod = pod_of(pod);
            self.asked_for(id, sandbox, name_of(&pod), out);
            out.event(
                sandbox,
                names::SANDBOX_READY,
                &[("pod", name_of(&pod))],
                None,
            );
            self.pods.insert(pod, sandbox.into());
        } else if let Some(container) = msg.strip_prefix("Creating container: ")
            && let Some(sandbox) = self.pods.get(&pod_of(container)).cloned()
        {
            let fields = [("call", "CreateContainer"), ("container", last(container))];
            out.event(&sandbox, names::SANDBOX_RUN, &fields, None);
            self.answered(&sandbox, true, None, out);
        } else if let Some(rest) = msg.strip_prefix("Created container ")
            && let Some((id, container)) = rest.split_once(": ")
            && let Some(sandbox) = self.pods.get(&pod_of(container)).cloned()
        {
            self.knows_container(&sandbox, Some(id), last(container));
            let call = ("call", "CreateContainer returned");
            let fields = [("container", last(container)), ("id", short(id)), call];
            out.event(&sandbox, names::SANDBOX_RUN, &fields, None);
        } else if let Some(sandbox) = entry.get("sandboxID")
            && msg.starts_with("Started container")
        {
            let id = entry.get("containerID").unwrap_or("?");
            let container = self.container(sandbox, id);
            let fields = [
                ("call", "StartContainer returned"),
                ("container", &container),
            ];
            out.event(sandbox, names::SANDBOX_RUN, &fields, None);
        } else if is_error(entry) && call == "RunPodSandbox" {
            let error = entry.get("error").unwrap_or(msg);
            let asked = self.asked.get(id).map(|(_, at)| *at);
            let pod = self.pods.remove(id).unwrap_or_default();
            let own = name_of(&pod).to_string();
            let sandbox = self.unanswered(asked, error).unwrap_or(own);
            self.asked_for(id, &sandbox, name_of(&pod), out);
            self.run_failed(&sandbox, asked, error, out);
        }
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

/// Call and its id in a line of CRI-O: `id=.. name=/runtime.v1.RuntimeService/RunPodSandbox`.
fn crio_call(entry: &Entry) -> Option<(&str, &str)> {
    let (service, call) = entry.get("name")?.rsplit_once('/')?;
    let is_crio = service.starts_with("/runtime.");
    Some((call, entry.get("id")?)).filter(|_| is_crio)
}

/// `namespace/pod` of CRI-O's `namespace/pod/container`.
fn pod_of(text: &str) -> String {
    text.rsplit_once('/')
        .map_or(text, |(pod, _)| pod)
        .to_string()
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn name_of(pod: &str) -> &str {
    match last(pod) {
        "" => "?",
        name => name,
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
            runtime.line(
                0,
                at,
                &entry(line).unwrap(),
                &|_, _| false,
                |sandbox, item| {
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
                },
            );
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
