//! A failure means that Kubernetes hears of a failure not at all, twice, under another pod's name,
//! or in a form that its API does not take; or that an API which hangs holds a guest up. The API is
//! a stand-in; kubectl, which speaks to it, is the real one where it is there.

use super::kustomize::{lost_in_the_api, of_kind, overlay};
use super::receivers::Fake;
use super::{RECORDED, Running, get, metrics_address, recorded, value};
use crate::collect::{Collector, Raw, folder, shown, until, until_settled};
use crate::{make_dir, write};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A boot whose failure has a cure.
const FAILS: &str = "made-8-gpus-one-failed";
const CREATED: &str = "201 Created\r\nContent-Length: 0";
const UID: &str = "7d1c0c5e-1111-4222-8333-444455556666";

/// A node with one VM, whose pod containerd has named.
struct Node {
    dir: crate::TempDir,
    _vmm: UnixListener,
}

impl Node {
    fn new(namespace: &str, pod: &str) -> Self {
        let dir = folder();
        make_dir(dir.0.join("vm/abc"));
        make_dir(dir.0.join("bundles/abc"));
        let bundle = json!({"annotations": {
            "io.kubernetes.cri.sandbox-name": pod,
            "io.kubernetes.cri.sandbox-namespace": namespace,
            "io.kubernetes.cri.sandbox-uid": UID,
        }});
        write(dir.0.join("bundles/abc/config.json"), bundle.to_string());
        let vmm = UnixListener::bind(dir.0.join("vm/abc/clh.sock")).unwrap();
        Self { dir, _vmm: vmm }
    }

    fn collector(&self, api: &str, more: &[&str]) -> Collector {
        let places = ["vm/*/clh.sock", "bundles/*/config.json"];
        let places = places.map(|place| self.dir.0.join(place).display().to_string());
        let words = [
            &["--vm", &*places[0], "--bundle", &*places[1]][..],
            &[
                "--kubernetes",
                api,
                "--metrics",
                "0",
                "--limit",
                "goodbye=1",
            ],
            more,
        ];
        let mut command = Collector::command(&self.dir.0, &words.concat());
        let collector = Collector::of(command.env("NODE_NAME", "node-1"));
        until("the socket beside the VM's", || self.socket().exists());
        collector
    }

    fn socket(&self) -> PathBuf {
        self.dir.0.join("vm/abc/clh.sock_10241")
    }

    /// A guest sends that boot and hangs up.
    fn boots(&self, fixture: &str, n: u64) {
        Raw::connect(&self.socket()).say(recorded(fixture, n));
        until_settled(&self.dir.0, n);
    }
}

/// A metric of the collector.
fn metric(collector: &Collector, name: &str) -> f64 {
    let text = get(metrics_address(collector), "/metrics");
    value(&text, &format!("kata_gpu_boot_{name}"))
}

/// Events that were posted, with the first line of each one's head.
fn posted(api: &Fake) -> Vec<(String, Value)> {
    let read = |body: &[u8]| serde_json::from_slice(body).unwrap();
    let first = |head: &str| head.lines().next().unwrap().to_string();
    let asked = api.asked();
    asked
        .iter()
        .map(|one| (first(&one.head), read(&one.body)))
        .collect()
}

#[test]
fn a_failed_boot_is_one_event_of_its_pod_and_a_good_one_is_none() {
    let api = Fake::start(&["500 Internal Server Error\r\nContent-Length: 0", CREATED]);
    let node = Node::new("ml", "trainer-0");
    let collector = node.collector(&api.url(), &[]);
    node.boots(RECORDED, 1);
    node.boots(FAILS, 2);
    collector.wait_for("HTTP 500");
    until("the Event", || {
        metric(&collector, "kubernetes_events_total") == 1.0
    });
    assert_eq!(metric(&collector, "kubernetes_events_failures_total"), 1.0);
    let both = posted(&api);
    assert_eq!(both.len(), 2);
    for (line, event) in &both {
        assert_eq!(line, "post /api/v1/namespaces/ml/events http/1.1");
        assert_eq!(lost_in_the_api(event), Some(Ok(())));
        let object = json!({
            "apiVersion": "v1", "kind": "Pod", "name": "trainer-0", "namespace": "ml", "uid": UID,
        });
        assert_eq!(event["involvedObject"], object);
        assert_eq!(event["metadata"]["namespace"], "ml");
        assert_eq!(
            event["metadata"]["name"], both[0].1["metadata"]["name"],
            "it would be two"
        );
        assert_eq!(
            (&event["type"], &event["reason"]),
            (&json!("Warning"), &json!("GPUFailed"))
        );
        assert_eq!(
            event["source"],
            json!({"component": "kata-gpu-boot", "host": "node-1"})
        );
        let message = event["message"].as_str().unwrap();
        let headline = shown(&node.dir.0, 2, &[]);
        let headline = headline.lines().next().unwrap();
        assert!(
            message.starts_with(&format!("{headline}; GPU ")),
            "{message}"
        );
        assert!(
            message.contains("; cure: ") && message.len() <= 1024,
            "{message}"
        );
    }
    // Negative control: the API's type refuses another form.
    let mut bad = both[0].1.clone();
    bad["count"] = "1".into();
    assert!(matches!(lost_in_the_api(&bad), Some(Err(_))));
    let said = collector.stop();
    assert!(
        said.last().unwrap().ends_with("; 1 Events created, 0 not"),
        "{said:#?}"
    );
    // Started again, it reports only what fails from now on.
    let collector = node.collector(&api.url(), &[]);
    node.boots(FAILS, 2);
    node.boots(FAILS, 3);
    until("the next Event", || {
        metric(&collector, "kubernetes_events_total") == 1.0
    });
    collector.stop();
    assert_eq!(posted(&api).len(), 3);
}

#[test]
fn an_api_that_hangs_delays_no_guest_and_has_the_event_later() {
    let api = Fake::start(&["", CREATED]);
    let node = Node::new("ml", "trainer-0");
    let collector = node.collector(&api.url(), &[]);
    node.boots(FAILS, 1);
    until("the request that hangs", || api.asked().len() == 1);
    for n in 2..5 {
        node.boots(RECORDED, n);
    }
    until("the other boots are counted", || {
        metric(&collector, "boots_total{outcome=\"settled\"}") == 4.0
    });
    assert_eq!(
        metric(&collector, "kubernetes_events_total"),
        0.0,
        "it hangs still"
    );
    collector.wait_for("no answer within 10 s");
    until("the Event", || {
        metric(&collector, "kubernetes_events_total") == 1.0
    });
    collector.stop();
}

#[test]
fn a_hostile_name_is_no_path_and_a_refusal_is_final() {
    let forbidden = "{\"kind\":\"Status\",\"message\":\"may not\\u001b[2J\"}";
    let answer = format!(
        "403 Forbidden\r\nContent-Length: {}\r\n\r\n{forbidden}",
        forbidden.len()
    );
    let api = Fake::start(&[&answer]);
    let node = Node::new("../../kube-system/pods?x=", "trainer-0");
    let collector = node.collector(&api.url(), &[]);
    node.boots(FAILS, 1);
    let line = collector.wait_for("no name of Kubernetes");
    assert!(line.contains("not pushed; its file stays"), "{line}");
    assert_eq!(metric(&collector, "kubernetes_events_dropped_total"), 1.0);
    collector.stop();
    assert_eq!(posted(&api).len(), 0);

    let node = Node::new("ml", "trainer-0");
    let collector = node.collector(&api.url(), &[]);
    node.boots(FAILS, 1);
    let line = collector.wait_for("not pushed");
    assert!(
        line.contains("HTTP 403 Forbidden: may not\\x1b[2J"),
        "{line}"
    );
    let said = collector.stop();
    assert!(
        said.last().unwrap().ends_with("; 0 Events created, 1 not"),
        "{said:#?}"
    );
    assert_eq!(posted(&api).len(), 1, "it was tried again");
}

/// Answer of a unix socket.
fn ask(socket: &Path, method: &str, path: &str) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    let head = "Host: localhost\r\nConnection: close\r\nContent-Length: 2";
    write!(stream, "{method} {path} HTTP/1.1\r\n{head}\r\n\r\n{{}}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn kubectl_passes_the_events_of_the_component_on_and_nothing_else() {
    let Some(all) = overlay("src/collect/deploy", &["events"], "") else {
        return;
    };
    let api = Fake::start(&[CREATED]);
    let node = Node::new("ml", "trainer-0");
    let folder = node.dir.0.join("api");
    make_dir(&folder);
    let socket = folder.join("socket");
    let pod = &of_kind(&all, "DaemonSet")["spec"]["template"]["spec"];
    let words = pod["containers"][1]["args"].as_array().unwrap().iter();
    let words = words.map(|word| {
        let word = word.as_str().unwrap();
        word.replace("/run/kubernetes-api/socket", socket.to_str().unwrap())
    });
    let user = &pod["containers"][1]["securityContext"]["runAsUser"];
    let user = user.as_u64().unwrap().to_string();
    let mut command = Command::new("kubectl");
    let mut more = Vec::new();
    if nix::unistd::geteuid().is_root() {
        // Each of the two drops to the same user, whose alone the socket is.
        let id = user.parse().unwrap();
        std::os::unix::fs::chown(&folder, Some(id), Some(id)).unwrap();
        command.uid(id).gid(id);
        more = vec!["--user", &*user];
    } else {
        eprintln!("not tried here, where the tests do not run as root: both users");
    }
    let child = command
        .args(words)
        .args(["--kubeconfig=/dev/null", "--server", &api.url()])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let _running = Running(child);
    until("kubectl listens", || UnixStream::connect(&socket).is_ok());
    let collector = node.collector(&format!("unix:{}", socket.display()), &more);
    node.boots(FAILS, 1);
    until("the Event", || {
        metric(&collector, "kubernetes_events_total") == 1.0
    });
    collector.stop();
    let (line, event) = posted(&api).remove(0);
    assert_eq!(line, "post /api/v1/namespaces/ml/events http/1.1");
    assert_eq!(event["involvedObject"]["uid"], UID);
    let events = "/api/v1/namespaces/ml/events";
    for (method, path) in [
        ("GET", events),
        ("DELETE", events),
        ("PATCH", events),
        ("POST", "/api/v1/namespaces/ml/pods"),
        ("POST", "/api/v1/namespaces/ml/events/x"),
        ("POST", "/api/v1/namespaces/ml/pods/x/exec"),
    ] {
        let answer = ask(&socket, method, path);
        assert!(
            answer.starts_with("HTTP/1.1 403 "),
            "{method} {path}: {answer}"
        );
    }
    assert!(
        ask(&socket, "POST", events).starts_with("HTTP/1.1 201 "),
        "the control"
    );
    assert_eq!(posted(&api).len(), 2);
}
