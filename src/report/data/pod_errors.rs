//! Errors of pods as people have them who see no runtime's log: lines of the kubelet (klog), and
//! the events that `kubectl describe pod` and `kubectl get events` print. Pure.
//!
//! Both carry the runtime's error, several times over, and name the pod and not the sandbox.

use super::logfmt;

/// Messages of the kubelet about a call of the runtime that failed: remote_runtime.go,
/// kuberuntime_sandbox.go, pod_workers.go.
const OF_KUBELET: &[&str] = &[
    "RunPodSandbox from runtime service failed",
    "Failed to create sandbox for pod",
    "CreatePodSandbox for pod failed",
    "CreateContainer in sandbox from runtime service failed",
    "StartContainer from runtime service failed",
    "Error syncing pod, skipping",
];

/// Words of an event, or of a command (ctr, crictl, nerdctl), before the error of a sandbox or a
/// container.
const EVENTS: &[&str] = &[
    "Failed to create pod sandbox: ",
    "run pod sandbox: ",
    "Error: failed to create containerd ",
    "Error: failed to start containerd task ",
    "Error: container create failed: ",
    "Error: CreateContainer failed: ",
    "Error: rpc error: ",
    "failed to create containerd task: ",
    "failed to create shim task: ",
];

/// Beginnings of a runtime's error inside other words.
const ERRORS: &[&str] = &[
    "rpc error: code = ",
    "failed to create containerd task: ",
    "failed to create containerd container: ",
    "failed to create shim task: ",
    "container create failed: ",
    "CreateContainer failed: ",
];

/// Errors of a pod that are not of its sandbox or start.
const OF_OTHERS: &[&str] = &[
    "ImagePull",
    "ErrImage",
    "failed to pull",
    "CrashLoopBackOff",
];

#[derive(Debug, PartialEq, Eq)]
pub struct PodError {
    /// Name without its namespace; none where the text does not have it.
    pub pod: Option<String>,
    pub sandbox: Option<String>,
    /// The runtime's words, outermost first.
    pub error: String,
}

/// The error in a line without its prefixes.
pub fn of(text: &str) -> Option<PodError> {
    kubelets(text)
        .or_else(|| event(text))
        .filter(|found| !OF_OTHERS.iter().any(|other| found.error.contains(other)))
}

/// `E0219 15:00:20.123456    1877 log.go:32] "message" err="..." pod="ml/train-0"`.
fn kubelets(text: &str) -> Option<PodError> {
    let (header, rest) = text.split_once("] \"")?;
    let is_klog = header.starts_with('E') && header.split_ascii_whitespace().count() == 4;
    let (message, rest) = logfmt::quoted(rest).filter(|_| is_klog)?;
    OF_KUBELET.contains(&message.as_str()).then_some(())?;
    let pairs = logfmt::pairs(rest);
    let get = |key: &str| {
        let pair = pairs.iter().find(|(k, _)| *k == key);
        pair.map(|(_, value)| value.clone())
    };
    let error = get("err")?;
    Some(PodError {
        pod: get("pod").map(|pod| without_namespace(&pod).to_string()),
        sandbox: get("podSandboxID"),
        error: runtimes(&error)?.to_string(),
    })
}

/// A row of events: columns, and the message last. `get events` names the pod as `pod/train-0`.
fn event(text: &str) -> Option<PodError> {
    let at = EVENTS.iter().filter_map(|say| text.find(say)).min()?;
    let (columns, message) = text.split_at(at);
    // The words of another program's log line are no event; but as JSON and YAML have them.
    let columns = columns.trim_start();
    let is_value = ["\"message\": \"", "message: "].contains(&columns.trim_end_matches('\''));
    let is_command = columns.starts_with("FATA[") || columns.starts_with("ERRO[");
    if !is_value && !is_command && columns.contains(['=', '"', '{', ']']) {
        return None;
    }
    let pod = columns
        .split_ascii_whitespace()
        .find_map(|word| word.strip_prefix("pod/"));
    Some(PodError {
        pod: pod.map(String::from),
        sandbox: None,
        error: runtimes(message)?.to_string(),
    })
}

/// The runtime's error, without the words of the kubelet around it.
fn runtimes(text: &str) -> Option<&str> {
    let at = ERRORS.iter().filter_map(|error| text.find(error)).min()?;
    Some(text.get(at..)?.trim_end_matches(['"', '\\', ',', '\'']))
}

fn without_namespace(pod: &str) -> &str {
    pod.rsplit('/').next().unwrap_or(pod)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ERROR: &str = "rpc error: code = DeadlineExceeded desc = failed to create shim task: \
        timed out connecting to vsock 7:1024: unknown";

    #[test]
    fn an_error_of_the_kubelet_names_its_pod() {
        let klog = |rest: &str| format!("E0219 15:00:20.123456    1877 log.go:32] {rest}");
        let nested = format!(
            "failed to \"CreatePodSandbox\" for \"train-0_ml(5bb8)\" with CreatePodSandboxError: \
             \"Failed to create sandbox: {ERROR}\""
        );
        for (rest, pod, sandbox) in [
            (
                format!("\"RunPodSandbox from runtime service failed\" err={ERROR:?}"),
                None,
                None,
            ),
            (
                format!("\"Failed to create sandbox for pod\" err={ERROR:?} pod=\"ml/train-0\""),
                Some("train-0"),
                None,
            ),
            (
                format!("\"Error syncing pod, skipping\" err={nested:?} pod=\"ml/train-0\""),
                Some("train-0"),
                None,
            ),
            (
                format!(
                    "\"CreateContainer in sandbox from runtime service failed\" err={ERROR:?} \
                     podSandboxID=\"abc\""
                ),
                None,
                Some("abc"),
            ),
        ] {
            let wanted = PodError {
                pod: pod.map(String::from),
                sandbox: sandbox.map(String::from),
                error: ERROR.into(),
            };
            assert_eq!(of(&klog(&rest)), Some(wanted), "{rest}");
        }
    }

    #[test]
    fn an_event_ends_with_its_error() {
        for (before, pod) in [
            (
                "  Warning  FailedCreatePodSandBox  25s (x3 over 97s)  kubelet  ",
                None,
            ),
            (
                "25s  Warning  FailedCreatePodSandBox  pod/train-0  ",
                Some("train-0"),
            ),
            ("", None),
        ] {
            let found = of(&format!("{before}Failed to create pod sandbox: {ERROR}")).unwrap();
            assert_eq!((found.pod.as_deref(), found.error.as_str()), (pod, ERROR));
        }
    }

    #[test]
    fn other_troubles_of_a_pod_are_not_its_sandboxs() {
        for line in [
            "E0219 15:00:20.1  1 a.go:1] \"Error syncing pod, skipping\" err=\"failed to \
             \\\"StartContainer\\\" for \\\"a\\\" with CrashLoopBackOff: \\\"back-off 5m0s\\\"\"",
            "E0219 15:00:20.1  1 a.go:1] \"PullImage from image service failed\" err=\"rpc error: \
             code = NotFound desc = failed to pull\"",
            "I0219 15:00:20.1  1 a.go:1] \"RunPodSandbox from runtime service failed\" err=\"rpc \
             error: code = x\"",
            "  Warning  Failed  1s  kubelet  Error: ErrImagePull",
            "  Warning  Failed  1s  kubelet  Failed to pull image \"a\": rpc error: code = x",
            "time=\"x\" level=error msg=\"Failed to create pod sandbox: rpc error: code = x\"",
            "] \"",
            "",
        ] {
            assert_eq!(of(line), None, "{line}");
        }
    }
}
