//! A failure means that OpenTelemetry's own protos read another boot in `show --otlp` than there
//! was, or that the program writes over a kept boot or leaves a file in part.

mod page;
mod perfetto;

use crate::{TempDir, project};
use kata_gpu_boot::show::export::{Format, write};
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::data::agent_log;
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::otlp::Resource;
use kata_gpu_report::views::waterfall::{Bar, Waterfall};

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

pub const RECORDED: &str = "recorded-8-gpus-fast-host";
/// That boot and the same again in another PCI domain, a little later; GPU 11 hangs, GPU 13 fails.
pub const SIXTEEN: &str = "made-16-gpus.ndjson";

pub fn fixture(name: &str) -> String {
    crate::text(project().join("tests/fixtures/boots").join(name))
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

/// For a test that needs something of this machine.
pub fn skip(why: &str) {
    crate::skip("REQUIRE_READERS", why);
}

/// A program of this PATH.
pub fn program(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
}

/// Longest run of a program that reads one file, in seconds: ends a hang.
pub const DEADLINE_S: u32 = 300;

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
                let why = crate::stderr(&output)
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
        let mut child = within(DEADLINE_S, &python)
            .args(["-c", OTLP_READER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(request).unwrap();
        child.wait_with_output().unwrap()
    };
    let stream = fixture(SIXTEEN);
    let request = export(&stream, None, Format::Otlp);
    let steps = bars(&stream, None);
    let edges: usize = steps.iter().map(|step| step.after.len()).sum();
    let output = read(&request);
    // The steps and the boot; of those, the failed GPU's initialisation and the boot have failed.
    let want = format!("{} {edges} 2 {{16}} {{8}}\n", steps.len() + 1);
    assert_eq!(crate::stdout(&output), want, "{output:?}");
    let wrong = String::from_utf8(request)
        .unwrap()
        .replacen("startTimeUnixNano", "startTime", 1);
    assert!(String::from_utf8_lossy(&read(wrong.as_bytes()).stderr).contains("ParseError"));
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
            piped.stdout == crate::bytes(dir.0.join("out")) && !piped.stdout.is_empty(),
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
    let error = crate::stderr(&again);
    assert!(
        again.status.code() == Some(2) && error.contains("kept is there already: remove it"),
        "a kept boot was written over: {again:?}"
    );
    assert_eq!(
        crate::bytes(dir.0.join("kept")),
        crate::bytes(&boot),
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
