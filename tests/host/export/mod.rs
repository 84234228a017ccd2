//! `show --html`, `--perfetto` and `--otlp` before the programs that read what it writes:
//! Perfetto's own protos, OpenTelemetry's, and a browser.

mod page;
mod perfetto;

use crate::{TempDir, project};
use kata_gpu_boot::show::export::{Format, write};
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::data::agent_log;
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::otlp::Resource;
use kata_gpu_report::views::waterfall::{Bar, Waterfall};
use serde_json::Value;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

pub const RECORDED: &str = "recorded-8-gpus-fast-host";

pub fn fixture(name: &str) -> String {
    fs::read_to_string(project().join("tests/fixtures/boots").join(name)).unwrap()
}

/// The boot of this stream in that format, with the agent's lines of a fixture's console where one
/// is named.
pub fn export(stream: &str, console: Option<&str>, format: Format) -> Vec<u8> {
    let mut out = Vec::new();
    write(format, &read(stream, console), &Resource::new(), &mut out).unwrap();
    out
}

/// The same boot's steps, which every format has.
pub fn bars(stream: &str, console: Option<&str>) -> Vec<Bar> {
    read(stream, console).steps
}

fn read(stream: &str, console: Option<&str>) -> Waterfall {
    let file = BootFile::read(stream.as_bytes()).unwrap();
    assert_eq!(file.damaged, 0, "{:?}", file.damage);
    let console = console.map(|name| {
        File::open(
            project()
                .join("tests/fixtures/boots")
                .join(format!("{name}.console")),
        )
        .unwrap()
    });
    let agent = console
        .map(|console| agent_log::read(console).unwrap())
        .unwrap_or_default();
    let boot = Boot::new(&file, &agent);
    Waterfall::new(&file, boot)
}

/// A machine with 16 GPUs, made of a recorded boot with 8: the same again in another PCI domain, a
/// little later. GPU 11 hangs, GPU 13 fails.
pub fn sixteen() -> String {
    const LATER_NS: u64 = 700_000_000;
    let lines: Vec<Value> = fixture(&format!("{RECORDED}.ndjson"))
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (mut records, others): (Vec<Value>, Vec<Value>) =
        lines.into_iter().partition(|line| line["seq"].is_u64());
    records.retain(|record| record["name"] != "settled" && record["name"] != "lockdown");
    let mut more = Vec::new();
    for mut record in records
        .iter()
        .filter(|record| record["gpu"].is_string())
        .cloned()
    {
        let address = record["gpu"]
            .as_str()
            .unwrap()
            .replacen("0001:", "0002:", 1);
        let (name, kind) = (
            record["name"].as_str().unwrap().to_string(),
            record["kind"].as_str().unwrap().to_string(),
        );
        let ends = kind == "end" || kind == "event";
        if (address == "0002:00:03.0" || address == "0002:00:05.0")
            && ends
            && (name == "gpu.init" || name == "gpu.usable")
        {
            if address == "0002:00:03.0" || name == "gpu.usable" {
                continue;
            }
            record["error"] =
                format!("gpu.init: NVRM: GPU {address}: RmInitAdapter failed! (0x62:0x40:2142)")
                    .into();
            let mut failed = record.clone();
            failed["kind"] = "event".into();
            failed["name"] = "gpu.failed".into();
            failed["level"] = "error".into();
            failed.as_object_mut().unwrap().remove("span");
            failed["fields"] = serde_json::json!({ "step": "init", "reason": "needs-reset", "cure": "reset it on the host before the next guest" });
            let mut words = failed.clone();
            words["kind"] = "kmsg".into();
            words["name"] = "kmsg".into();
            words["fields"] = serde_json::json!({ "text": format!("NVRM: GPU {address}: \
                RmInitAdapter failed! (0x62:0x40:2142)") });
            for record in [&mut words, &mut failed] {
                record["gpu"] = address.clone().into();
                record["boottime_ns"] = (record["boottime_ns"].as_u64().unwrap() + LATER_NS).into();
            }
            more.extend([words, failed]);
        }
        record["gpu"] = address.into();
        record["boottime_ns"] = (record["boottime_ns"].as_u64().unwrap()
            + if name == "gpu.found" {
                1_000_000
            } else {
                LATER_NS
            })
        .into();
        for key in ["span", "parent"] {
            if let Some(id) = record.get(key).and_then(Value::as_u64) {
                record[key] = (id + 1000).into();
            }
        }
        if let Some(after) = record.get_mut("after").and_then(Value::as_array_mut) {
            after.retain(|id| {
                records
                    .iter()
                    .any(|r| r["span"] == *id && r["gpu"].is_string())
            });
            after
                .iter_mut()
                .for_each(|id| *id = (id.as_u64().unwrap() + 1000).into());
        }
        if let Some(index) = record.pointer("/fields/index").and_then(Value::as_u64) {
            record["fields"]["index"] = (index + 8).into();
        }
        more.push(record);
    }
    let tsc = serde_json::json!({ "before_kernel_ns": 1_250_000_000_u64, "error_ns": 40_000 });
    more.push(serde_json::json!({ "schema": 1, "seq": 0, "boottime_ns": 1_000_000, "kind": "event", "name": "clock.tsc", "fields": tsc }));
    records.extend(more);
    records.sort_by_key(|record| record["boottime_ns"].as_u64());
    for (seq, record) in records.iter_mut().enumerate() {
        record["seq"] = seq.into();
    }
    others
        .iter()
        .take(2)
        .chain(&records)
        .chain(others.iter().skip(2))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Whether a test that needs something of this machine must not be skipped.
pub fn skip(why: &str) {
    assert!(
        std::env::var_os("REQUIRE_READERS").is_none(),
        "{why}, and REQUIRE_READERS is set"
    );
    eprintln!("skipped: {why}");
}

/// A program of this PATH.
pub fn program(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
}

/// Runs it for at most that long; 124 is `timeout`'s status for what took longer.
pub fn within(seconds: u32, program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", &seconds.to_string()]).arg(program);
    command
}

/// A package of PyPI, in a virtual environment of its own below target/.
pub struct Package {
    pub name: &'static str,
    /// Module that the package has.
    pub module: &'static str,
}

impl Package {
    /// The environment's Python; None, with the reason printed, where it cannot be had.
    pub fn python(&self) -> Option<PathBuf> {
        // Tests of one package run at once.
        static LOCK: Mutex<()> = Mutex::new(());
        let _held = LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let venv = project()
            .join("target")
            .join(format!("python-{}", self.name.replace("==", "-")));
        let python = venv.join("bin/python");
        let works = || {
            Command::new(&python)
                .args(["-c", &format!("import {}", self.module)])
                .output()
                .is_ok_and(|o| o.status.success())
        };
        if works() {
            return Some(python);
        }
        let Some(system) = program("python3") else {
            skip("no python3");
            return None;
        };
        let steps: [(&Path, Vec<&str>); 2] = [
            (&system, vec!["-m", "venv", "--clear", venv.to_str()?]),
            (
                &python,
                vec![
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--disable-pip-version-check",
                    "--retries",
                    "1",
                    self.name,
                ],
            ),
        ];
        for (program, args) in steps {
            let output = within(120, program).args(&args).output().unwrap();
            if !output.status.success() {
                let why = String::from_utf8_lossy(&output.stderr)
                    .lines()
                    .last()
                    .unwrap_or("no word")
                    .to_string();
                skip(&format!(
                    "{} cannot be had: {} {}: {}: {why}",
                    self.name,
                    program.display(),
                    args.join(" "),
                    output.status
                ));
                return None;
            }
        }
        assert!(works(), "{} is installed and cannot be imported", self.name);
        Some(python)
    }
}

/// Reads a request with the official messages; ids are hexadecimal in OTLP/JSON and base64 in what
/// protobuf calls JSON.
const OTLP_READER: &str = "
import base64, json, sys
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
def ids(node):
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key in ('traceId', 'spanId', 'parentSpanId'):
            node[key] = base64.b64encode(bytes.fromhex(value)).decode()
        elif isinstance(value, (dict, list)):
            ids(value)
request = json.load(sys.stdin)
ids(request)
message = json_format.ParseDict(request, ExportTraceServiceRequest())
spans = message.resource_spans[0].scope_spans[0].spans
print(len(spans), sum(len(s.links) for s in spans), sum(s.status.code == 2 for s in spans), \
{len(s.trace_id) for s in spans}, {len(s.span_id) for s in spans})
";

#[test]
fn opentelemetrys_protos_read_every_span() {
    let package = Package {
        name: "opentelemetry-proto==1.45.2",
        module: "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    };
    let Some(python) = package.python() else {
        return;
    };
    let read = |request: &[u8]| {
        let mut child = within(60, &python)
            .args(["-c", OTLP_READER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(request).unwrap();
        child.wait_with_output().unwrap()
    };
    let stream = sixteen();
    let request = export(&stream, None, Format::Otlp);
    let steps = bars(&stream, None);
    let edges: usize = steps.iter().map(|step| step.after.len()).sum();
    let output = read(&request);
    // The steps and the boot; of those, the failed GPU's initialisation and the boot have failed.
    let want = format!("{} {edges} 2 {{16}} {{8}}\n", steps.len() + 1);
    assert_eq!(String::from_utf8_lossy(&output.stdout), want, "{output:?}");
    let wrong = String::from_utf8(request)
        .unwrap()
        .replacen("startTimeUnixNano", "startTime", 1);
    assert!(String::from_utf8_lossy(&read(wrong.as_bytes()).stderr).contains("ParseError"));
}

#[test]
fn sixteen_gpus_are_sixteen() {
    let file = BootFile::read(sixteen().as_bytes()).unwrap();
    let boot = kata_gpu_report::boot::model::Boot::new(&file, &[]);
    let of = |state: fn(&kata_gpu_report::boot::model::Gpu) -> bool| {
        boot.gpus.iter().filter(|gpu| state(gpu)).count()
    };
    assert_eq!(
        (
            boot.gpus.len(),
            of(|g| g.usable.is_some()),
            of(|g| g.failed.is_some()),
            of(|g| g.still.is_some())
        ),
        (16, 14, 1, 1)
    );
    assert_eq!(boot.lost.records, 0);
}

#[test]
fn the_program_writes_whole_files_and_refuses_what_it_must() {
    let Some(program) = std::env::var_os("KATA_GPU_BOOT") else {
        return skip("KATA_GPU_BOOT does not name the program (tests/run builds it)");
    };
    let dir = TempDir::new("export");
    let boot = project().join(format!("tests/fixtures/boots/{RECORDED}.ndjson"));
    let run = |args: &[&str]| {
        Command::new(&program)
            .arg("show")
            .arg(&boot)
            .args(args)
            .current_dir(&dir.0)
            .output()
            .unwrap()
    };
    for format in ["--html", "--perfetto", "--otlp", "--json"] {
        let (piped, saved) = (run(&[format, "-o", "-"]), run(&[format, "-o", "out"]));
        assert!(
            piped.status.success() && saved.status.success(),
            "{format}: {piped:?} {saved:?}"
        );
        assert!(
            piped.stdout == fs::read(dir.0.join("out")).unwrap() && !piped.stdout.is_empty(),
            "{format} differs in a pipe"
        );
    }
    assert_eq!(
        fs::read_dir(&dir.0).unwrap().count(),
        1,
        "something was left beside the file"
    );
    let (kept, again) = (run(&["-o", "kept"]), run(&["-o", "kept"]));
    assert!(kept.status.success(), "{kept:?}");
    let error = String::from_utf8_lossy(&again.stderr);
    assert!(
        again.status.code() == Some(2) && error.contains("kept is there already: remove it"),
        "a kept boot was written over: {again:?}"
    );
    assert_eq!(
        fs::read(dir.0.join("kept")).unwrap(),
        fs::read(&boot).unwrap(),
        "the kept boot differs"
    );
    for wrong in [
        &["--otlp", "--html"][..],
        &["--html", "--follow"],
        &["--html", "-o", "no/such/dir"],
    ] {
        let output = run(wrong);
        assert!(
            output.status.code() == Some(2) && !output.stderr.is_empty(),
            "{wrong:?}: {output:?}"
        );
    }
}
