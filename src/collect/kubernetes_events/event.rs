//! The core/v1 Event of a failed boot.
//!
//! Pod, namespace and uid are what the container runtime wrote; a name that Kubernetes would not
//! take makes no Event, so that none of them is ever a part of another path. The message has texts
//! of guests: printable ASCII, and bounded.

use anyhow::{Context, Result, ensure};
use kata_gpu_report::analysis::verdict::Verdict;
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::data::boot_file::Sandbox;
use kata_gpu_report::data::text::{printable, realtime_ns, start, wall_clock};
use kata_gpu_report::views::verdict_lines::cure_text;
use serde_json::{Value, json};

/// Longest message that the API takes of an Event, in bytes.
const MAX_MESSAGE: usize = 1024;
/// Longest names of a namespace and of any other resource.
const MAX_LABEL: usize = 63;
const MAX_NAME: usize = 253;
/// This program, in the Event's fields.
const COMPONENT: &str = "kata-gpu-boot";

/// An Event to create.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    namespace: String,
    pub body: Value,
}

impl Event {
    /// Path of the namespace's Events.
    pub fn path(&self) -> String {
        format!("/api/v1/namespaces/{}/events", self.namespace)
    }
}

/// The Event of a boot, as reported by the node. Fails if no pod is known, or if its names are not
/// Kubernetes'.
pub fn event(boot: &Boot, boot_id: &str, node: &str) -> Result<Event> {
    let sandbox = boot.sandbox.as_ref();
    let names = sandbox.and_then(|of| Some((of.namespace.as_deref()?, of.pod.as_deref()?)));
    let (namespace, pod) = names.context("its pod is not known, so that it has no Event")?;
    for (name, is_name) in [
        (
            namespace,
            namespace.len() <= MAX_LABEL && is_label(namespace),
        ),
        (pod, pod.len() <= MAX_NAME && pod.split('.').all(is_label)),
    ] {
        ensure!(
            is_name,
            "{}: no name of Kubernetes, so that it has no Event",
            printable(name)
        );
    }
    let uid = sandbox.and_then(|Sandbox { uid, .. }| uid.as_deref());
    let uid = uid.filter(|uid| uid.split('.').all(is_label));
    let verdict = Verdict::of(boot);
    let now = wall_clock(realtime_ns());
    // Whole seconds, as the API writes them.
    let now = now
        .split_once('.')
        .map_or(now.clone(), |(seconds, _)| format!("{seconds}Z"));
    let mut body = json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name(pod, boot_id), "namespace": namespace},
        "involvedObject": {
            "apiVersion": "v1", "kind": "Pod", "name": pod, "namespace": namespace, "uid": uid,
        },
        "type": "Warning",
        "reason": reason(boot, &verdict),
        "message": message(&verdict),
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    });
    if uid.is_none()
        && let Some(object) = body["involvedObject"].as_object_mut()
    {
        object.remove("uid");
    }
    Ok(Event {
        namespace: namespace.to_string(),
        body,
    })
}

/// Whether a text is a DNS label but for its length, which Kubernetes limits only in namespaces.
fn is_label(text: &str) -> bool {
    let inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(inside) && !text.starts_with('-') && !text.ends_with('-')
}

/// One name for one boot of a pod.
fn name(pod: &str, boot_id: &str) -> String {
    let room = MAX_NAME - boot_id.len() - 1;
    format!(
        "{}.{boot_id}",
        start(pod, room).trim_end_matches(['-', '.'])
    )
}

fn reason(boot: &Boot, verdict: &Verdict) -> &'static str {
    let ends = |of_sandbox| boot.ends.iter().any(|end| end.of_sandbox == of_sandbox);
    if verdict.failures().any(|finding| !finding.gpus.is_empty()) {
        "GPUFailed"
    } else if ends(true) && !ends(false) {
        "SandboxFailed"
    } else {
        "GuestFailed"
    }
}

/// The verdict's first lines, in one.
fn message(verdict: &Verdict) -> String {
    let failures = verdict.failures();
    let lines = failures.flat_map(|finding| [Some(finding.text.clone()), cure_text(finding)]);
    let lines: Vec<String> = [Some(verdict.headline.clone())]
        .into_iter()
        .chain(lines)
        .flatten()
        .collect();
    bounded(&lines.join("; "))
}

/// A text as printable ASCII, cut to what a message may have.
fn bounded(text: &str) -> String {
    let text = printable(text);
    if text.len() <= MAX_MESSAGE {
        return text;
    }
    format!("{}...", start(&text, MAX_MESSAGE - 3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot(namespace: &str, pod: &str, uid: &str) -> Boot {
        let of = |text: &str| (!text.is_empty()).then(|| text.to_string());
        Boot {
            sandbox: Some(Sandbox {
                id: "0a1b".into(),
                pod: of(pod),
                namespace: of(namespace),
                uid: of(uid),
                vmm_user: None,
            }),
            ..Boot::default()
        }
    }

    const BOOT: &str = "0f7a1f8e-0000-4000-8000-00000000beef";

    #[test]
    fn an_event_is_its_pods() {
        let event = event(&boot("ml", "train-0", "8b5e"), BOOT, "node-1").unwrap();
        assert_eq!(event.path(), "/api/v1/namespaces/ml/events");
        let object = json!({
            "apiVersion": "v1", "kind": "Pod", "name": "train-0", "namespace": "ml", "uid": "8b5e",
        });
        assert_eq!(event.body["involvedObject"], object);
        assert_eq!(event.body["metadata"]["name"], format!("train-0.{BOOT}"));
        assert_eq!(event.body["source"]["host"], "node-1");
    }

    #[test]
    fn no_name_but_kubernetes_own_makes_an_event() {
        let long = "x".repeat(MAX_NAME);
        let (label, longer) = ("n".repeat(MAX_LABEL), "x".repeat(MAX_NAME + 1));
        for (namespace, pod) in [
            ("", "train-0"),
            ("ml", ""),
            ("../kube-system", "train-0"),
            ("ml/pods", "train-0"),
            ("ml?x", "train-0"),
            ("ML", "train-0"),
            ("a.b", "train-0"),
            ("ml", "-x"),
            ("ml", "x-"),
            ("ml", "a..b"),
            ("ml", "\\x1b[2J"),
            ("ml", &longer),
            (&format!("{label}n"), "train-0"),
        ] {
            assert!(
                event(&boot(namespace, pod, ""), BOOT, "n").is_err(),
                "{namespace} {pod}"
            );
        }
        let event = event(&boot(&label, &long, "\"}"), BOOT, "n").unwrap();
        let name = event.body["metadata"]["name"].as_str().unwrap();
        assert!(name.len() == MAX_NAME && name.ends_with(BOOT), "{name}");
        assert!(event.body["involvedObject"].get("uid").is_none());
    }

    #[test]
    fn a_message_is_ascii_and_bounded_after_its_escapes() {
        let whole = "x".repeat(MAX_MESSAGE);
        assert_eq!(bounded(&whole), whole);
        let cut = bounded(&"\u{1b}[2J\u{202e}\n".repeat(MAX_MESSAGE / 8));
        assert!(cut.len() == MAX_MESSAGE && cut.ends_with("..."), "{cut}");
        assert!(
            cut.starts_with("\\x1b[2J\\u{202e}\\n\\x1b") && cut.is_ascii(),
            "{cut}"
        );
    }

    #[test]
    fn a_long_pods_name_is_cut_at_no_hyphen() {
        let pod = format!("{}-{}", "x".repeat(215), "y".repeat(30));
        assert_eq!(name(&pod, BOOT), format!("{}.{BOOT}", "x".repeat(215)));
    }
}
