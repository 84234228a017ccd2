//! A failure means that a pushed boot arrives in a real OpenTelemetry Collector with a span lost,
//! repeated, under another parent or under another guest's name.

use super::{ONE_FAILS, RECORDED, Running, boot, exported, free_port, recorded, tool};
use crate::TempDir;
use crate::collect::{Collector, Raw, boot_id, folder, read, until, until_settled};
use kata_gpu_report::data::boot_file::HostEvent;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A collector of OpenTelemetry with an OTLP receiver, whose debug exporter writes all that it got
/// into a file.
struct OpenTelemetry {
    _dir: TempDir,
    _running: Running,
    seen: PathBuf,
    http: u16,
}

impl OpenTelemetry {
    fn start() -> Option<Self> {
        let program = tool("otelcol/otelcol")?;
        let (dir, http) = (folder(), free_port());
        let config = format!(
            "receivers: {{otlp: {{protocols: {{http: {{endpoint: '127.0.0.1:{http}'}}}}}}}}\n\
             exporters: {{debug: {{verbosity: detailed, use_internal_logger: false}}}}\n\
             service:\n  telemetry: {{metrics: {{level: none}}}}\n  \
             pipelines: {{traces: {{receivers: [otlp], exporters: [debug]}}}}\n"
        );
        let (path, seen) = (dir.0.join("config.yaml"), dir.0.join("seen"));
        crate::write(&path, config);
        let (out, err) = (
            File::create(&seen).unwrap(),
            File::create(dir.0.join("log")).unwrap(),
        );
        let mut command = Command::new(program);
        let child = command
            .arg("--config")
            .arg(path)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .unwrap();
        let started = Self {
            _running: Running(child),
            seen,
            http,
            _dir: dir,
        };
        until("the OpenTelemetry Collector listens", || {
            TcpStream::connect(("127.0.0.1", http)).is_ok()
        });
        Some(started)
    }

    fn requests(&self) -> Vec<Request> {
        parse(&crate::text(&self.seen))
    }
}

#[derive(Debug, Default)]
struct Request {
    resource: BTreeMap<String, String>,
    spans: Vec<Span>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    trace: String,
    parent: String,
    id: String,
    name: String,
    failed: bool,
    attributes: BTreeMap<String, String>,
    events: usize,
    links: BTreeSet<String>,
}

/// `     -> gpu.index: Int(3)` as key and `3`.
fn attribute(line: &str) -> Option<(String, String)> {
    let (key, value) = line.trim_start().strip_prefix("-> ")?.split_once(": ")?;
    let inner = value
        .split_once('(')
        .and_then(|(_, rest)| rest.strip_suffix(')'))
        .unwrap_or(value);
    Some((key.to_string(), inner.to_string()))
}

/// The debug exporter's text.
fn parse(text: &str) -> Vec<Request> {
    let mut requests: Vec<Request> = Vec::new();
    let mut part = "";
    for line in text.lines() {
        let field = |name: &str| {
            line.trim_start()
                .strip_prefix(name)
                .and_then(|rest| rest.trim_start().strip_prefix(':'))
                .map(|v| v.trim().to_string())
        };
        if line.starts_with("ResourceSpans #") {
            requests.push(Request::default());
            part = "";
            continue;
        }
        let Some(request) = requests.last_mut() else {
            continue;
        };
        match line.trim_end() {
            "Resource attributes:" => part = "resource",
            "Attributes:" => part = "span",
            "Events:" => part = "events",
            "Links:" => part = "links",
            line if line.starts_with("ScopeSpans #") => part = "",
            line if line.starts_with("Span #") => {
                request.spans.push(Span::default());
                part = "head";
            }
            line => match (part, request.spans.last_mut()) {
                ("resource", _) => request.resource.extend(attribute(line)),
                ("head", Some(span)) => {
                    span.trace = field("Trace ID").unwrap_or(std::mem::take(&mut span.trace));
                    span.parent = field("Parent ID").unwrap_or(std::mem::take(&mut span.parent));
                    span.id = field("ID").unwrap_or(std::mem::take(&mut span.id));
                    span.name = field("Name").unwrap_or(std::mem::take(&mut span.name));
                    span.failed |= field("Status code").is_some_and(|code| code == "Error");
                }
                ("span", Some(span)) => span.attributes.extend(attribute(line)),
                ("events", Some(span)) => {
                    span.events += usize::from(line.starts_with("SpanEvent #"))
                }
                ("links", Some(span)) => span.links.extend(
                    line.trim_start()
                        .strip_prefix("-> ID: ")
                        .map(str::to_string),
                ),
                _ => {}
            },
        }
    }
    requests
}

/// The same boot by the JSON form of the same request.
fn wanted(request: &Value) -> BTreeSet<(String, String, String, bool, usize, usize)> {
    let spans = request["resourceSpans"][0]["scopeSpans"][0]["spans"]
        .as_array()
        .unwrap();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let length = |value: &Value| value.as_array().map_or(0, Vec::len);
    let span = |s: &Value| {
        (
            text(&s["spanId"]),
            text(&s["parentSpanId"]),
            text(&s["name"]),
            s["status"]["code"] == 2,
            length(&s["events"]),
            length(&s["links"]),
        )
    };
    spans.iter().map(span).collect()
}

fn seen(spans: &[Span]) -> BTreeSet<(String, String, String, bool, usize, usize)> {
    spans
        .iter()
        .map(|s| {
            (
                s.id.clone(),
                s.parent.clone(),
                s.name.clone(),
                s.failed,
                s.events,
                s.links.len(),
            )
        })
        .collect()
}

#[test]
fn a_real_collector_takes_every_span() {
    let Some(otel) = OpenTelemetry::start() else {
        return;
    };
    let dir = folder();
    let url = format!("http://127.0.0.1:{}", otel.http);
    let mut command = Collector::command(&dir.0, &["--otlp", &url]);
    command.env("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=trainer-0");
    let _collector = Collector::of(&mut command);
    boot(&dir.0, ONE_FAILS, 1);
    until("the spans", || !otel.requests().is_empty());
    let request = &otel.requests()[0];
    assert_eq!(seen(&request.spans), wanted(&exported(&dir.0, 1)));
    // The failed GPU's step, and the boot.
    let failed: BTreeSet<&str> = request
        .spans
        .iter()
        .filter(|s| s.failed)
        .map(|s| s.name.as_str())
        .collect();
    assert_eq!(failed, BTreeSet::from(["gpu guest boot", "gpu.init"]));
    assert_eq!(request.resource["k8s.pod.name"], "trainer-0");
    assert!(
        request.resource.contains_key("host.name") && request.resource["os.type"] == "linux",
        "{:?}",
        request.resource
    );
    let of_gpu = request.spans.iter().filter(|s| {
        s.attributes.contains_key("gpu.address") && s.attributes.contains_key("gpu.index")
    });
    assert!(of_gpu.count() >= 3);
}

#[test]
fn without_an_otlp_receiver_nothing_counts_as_pushed() {
    let Some(otel) = OpenTelemetry::start() else {
        return;
    };
    let dir = folder();
    let url = format!("http://127.0.0.1:{}/nothing/here", otel.http);
    let collector = Collector::start(&dir.0, &["--otlp", &url]);
    boot(&dir.0, ONE_FAILS, 1);
    let line = collector.wait_for("not pushed");
    assert!(line.contains("HTTP 404 Not Found"), "{line}");
    let said = collector.stop();
    assert!(
        said.last().unwrap().ends_with("; 0 boots pushed, 1 not"),
        "{said:#?}"
    );
    assert!(otel.requests().is_empty());
}

#[test]
fn boots_arrive_by_themselves_with_the_names_of_their_pods() {
    let Some(otel) = OpenTelemetry::start() else {
        return;
    };
    let dir = folder();
    let vm = dir.0.join("vm/abc");
    crate::make_dir(&vm);
    crate::make_dir(dir.0.join("bundles/abc"));
    let bundle = r#"{"annotations": {
        "io.kubernetes.cri.sandbox-name": "trainer-0",
        "io.kubernetes.cri.sandbox-namespace": "ml",
        "io.kubernetes.cri.sandbox-uid": "7d1c0c5e-1111-4222-8333-444455556666"}}"#;
    crate::write(dir.0.join("bundles/abc/config.json"), bundle);
    let _vmm = UnixListener::bind(vm.join("clh.sock")).unwrap();
    let url = format!("http://127.0.0.1:{}", otel.http);
    let places = [
        dir.0.join("vm/*/clh.sock"),
        dir.0.join("bundles/*/config.json"),
    ]
    .map(|p| p.to_str().unwrap().to_string());
    let [vms, bundles] = places.each_ref();
    let words = [
        "--vm",
        vms,
        "--bundle",
        bundles,
        "--otlp",
        &url,
        "--limit",
        "goodbye=1",
    ];
    let collector = Collector::start(&dir.0, &words);
    let socket = vm.join("clh.sock_10241");
    until("the socket beside the VM's", || socket.exists());
    // One says that it is settled and stays; one goes without a word.
    let mut settled = Raw::connect(&socket);
    settled.say(recorded(RECORDED, 1));
    let text = recorded(ONE_FAILS, 2);
    let without_end: Vec<&str> = text
        .lines()
        .filter(|line| !line.contains(r#""settled""#))
        .collect();
    Raw::connect(&socket).say(without_end.join("\n") + "\n");
    until("both boots", || otel.requests().len() == 2);
    for request in otel.requests() {
        let names = [
            "k8s.pod.name",
            "k8s.namespace.name",
            "k8s.pod.uid",
            "kata.sandbox.id",
        ]
        .map(|key| request.resource[key].as_str());
        assert_eq!(
            names,
            [
                "trainer-0",
                "ml",
                "7d1c0c5e-1111-4222-8333-444455556666",
                "abc"
            ]
        );
        let root = request.spans.iter().find(|s| s.parent.is_empty()).unwrap();
        let over = root.trace == trace(&dir.0, 1);
        assert!(over || root.trace == trace(&dir.0, 2), "{}", root.trace);
        assert_eq!(
            (root.name.as_str(), root.attributes["boot.open"].as_str()),
            ("gpu guest boot", if over { "false" } else { "true" })
        );
        assert!(request.spans.iter().all(|s| s.trace == root.trace));
    }
    let said_so = |n| {
        read(&dir.0, n)
            .host
            .into_iter()
            .any(|l| matches!(l.event, HostEvent::Exported { spans, .. } if spans > 10))
    };
    until("both files say so", || said_so(1) && said_so(2));
    let said = collector.stop();
    assert!(
        said.last().unwrap().ends_with("; 2 boots pushed, 0 not"),
        "{said:#?}"
    );

    // Started again, it does not push again what the guest sends again.
    let collector = Collector::start(&dir.0, &words);
    until("the socket beside the VM's", || socket.exists());
    let mut again = Raw::connect(&socket);
    again.say(recorded(RECORDED, 1));
    Raw::connect(&socket).say(recorded(RECORDED, 3));
    until("the third boot", || otel.requests().len() >= 3);
    let ids: BTreeSet<String> = otel
        .requests()
        .iter()
        .map(|r| r.spans[0].trace.clone())
        .collect();
    assert_eq!((ids.len(), otel.requests().len()), (3, 3));
    collector.stop();
    // Exported by hand, it is the same trace: a receiver that has it takes nothing twice.
    let span = &exported(&dir.0, 1)["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
    assert_eq!(span["traceId"].as_str(), Some(&*trace(&dir.0, 1)));
    assert!(
        !ids.contains(&boot_id(1).replace('-', "")),
        "a boot id, which a guest knows, is no trace id: {ids:?}"
    );
}

/// The id that the collector wrote into a boot's file.
fn trace(dir: &std::path::Path, n: u64) -> String {
    read(dir, n)
        .trace()
        .expect("the file has a trace id")
        .into()
}

#[test]
fn a_boot_that_was_over_just_before_the_stop_is_pushed() {
    let Some(otel) = OpenTelemetry::start() else {
        return;
    };
    let dir = folder();
    let url = format!("http://127.0.0.1:{}", otel.http);
    let collector = Collector::start(&dir.0, &["--otlp", &url]);
    boot(&dir.0, RECORDED, 1);
    until_settled(&dir.0, 1);
    let said = collector.stop();
    assert!(
        said.last().unwrap().ends_with("; 1 boots pushed, 0 not"),
        "{said:#?}"
    );
    until("the boot", || otel.requests().len() == 1);
}
