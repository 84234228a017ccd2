//! Guest halves of the tests of extension disks.

use crate::agent::log;
use kata_gpu_init::extensions::{Name, verity};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

/// A program for this half to run after its report, with commas between its words.
pub const PROGRAM: &str = "testagent.extension-judge=";

/// Guest half: loads the driver of the disks when the init has been waiting for them for some time.
pub fn late_disks() {
    super::guest::wait_for_begin("extension.disks");
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let path = format!("/lib/modules/{}/virtio_blk.ko", kernel.trim());
    let loaded = std::fs::File::open(&path)
        .map_err(|e| e.to_string())
        .and_then(|file| {
            nix::kmod::finit_module(&file, c"", nix::kmod::ModuleInitFlags::empty())
                .map_err(|e| e.to_string())
        });
    log::info(
        "late disks",
        &[("error", &loaded.err().unwrap_or_default())],
    );
}

/// Guest half: reports at the agent's start what is mounted, and once all GPUs are settled again,
/// with the tables that the kernel uses. Then runs the judge, where the command line names one.
pub fn report() {
    say("extensions at agent start");
    super::guest::wait_for("settled");
    say("extensions when settled");
    let line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    for words in line
        .split_ascii_whitespace()
        .filter_map(|word| word.strip_prefix(PROGRAM))
    {
        log::info(
            "judge",
            &[
                ("words", words),
                ("output", &run(&words.split(',').collect::<Vec<_>>())),
            ],
        );
    }
}

fn say(message: &str) {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let is_ours = |line: &&str| {
        [
            "/run/kata-extensions/",
            "/lib/firmware/nvidia",
            "/etc/ld.so.cache",
        ]
        .iter()
        .any(|path| line.contains(path))
    };
    let mounts: Vec<&str> = mounts.lines().filter(is_ours).collect();
    let tables = ["gpu", "coco"].map(|name| {
        let table = Name::parse(name)
            .map(|name| verity::table_in_use(&name).unwrap_or_else(|e| e.to_string()));
        format!("{name}: {}", table.unwrap_or_else(|e| e))
    });
    let coco = std::fs::read_to_string("/run/kata-extensions/coco/marker")
        .unwrap_or_else(|e| e.to_string());
    let variant = std::env::var("KATA_ATTESTER_VARIANT").unwrap_or_default();
    log::info(
        message,
        &[
            ("mounts", &mounts.join("; ")),
            ("tables", &tables.join("; ")),
            ("coco", &coco),
            ("variant", &variant),
        ],
    );
}

/// Output of a program. The agent reaps it: its end is the end of its output.
fn run(words: &[&str]) -> String {
    let [program, arguments @ ..] = words else {
        return "no program".into();
    };
    let child = Command::new(Path::new(program))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut text = String::new();
    match child {
        Ok(child) => {
            for stream in [
                child.stdout.map(|s| Box::new(s) as Box<dyn Read>),
                child.stderr.map(|s| Box::new(s) as Box<dyn Read>),
            ]
            .into_iter()
            .flatten()
            {
                let mut stream = stream;
                let _unused = stream.read_to_string(&mut text);
            }
            text
        }
        Err(error) => format!("{program}: {error}"),
    }
}
