//! `bench readahead BEFORE [RUNS] [DISK..]`: a boot from a disk of limited speed, and one from an
//! initrd, with the init that `BEFORE` is (built without the readahead) and with this one.
//!
//! The disk has what a boot reads: a module and firmware as large as NVIDIA's, which the simulated
//! driver reads at the begin of its first part, and pages of an agent, read before it answers.

use super::{keep, machine};
use anyhow::{Context, Result, ensure};
use kata_gpu_tests::vm::disk_root::{self, FIRMWARE};
use kata_gpu_tests::vm::harness::{Booted, Guest, TestContext, named, spans};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Two GPUs whose first part does nothing but read the firmware, and which take as long as an
/// H100's in all.
const GUEST: &str = "fakepci.gpus=2 nvidia.firmware=1 nvidia.probe_ms=3 nvidia.s1_ms=1 \
    nvidia.s2_ms=1600 nvidia.s3_ms=500 testagent.reads=/agent-pages";
/// Bytes of NVIDIA's open module, stripped, and of the firmware, both 550.163.01; pages of an agent
/// that are read until it answers, at most.
const MODULE: usize = 12 << 20;
const FIRMWARE_BYTES: usize = 37 << 20;
const AGENT: usize = 10 << 20;
/// Disks, by bytes a second; None: an initrd.
const DISKS: [(&str, Option<u64>); 3] = [
    ("100MB/s", Some(100_000_000)),
    ("400MB/s", Some(400_000_000)),
    ("initrd", None),
];
/// Kinds of host, by the ms that one takes to map a GPU's BARs.
const HOSTS: [(&str, u32); 2] = [("fast", 3), ("slow", 3300)];
const INITS: [&str; 2] = ["before", "now"];
/// Milestones, in ms since the init's first instruction, and the duration of one part.
const COLUMNS: [&str; 5] = [
    "agent listens",
    "driver is loaded",
    "first GPU is usable",
    "first part of its initialisation takes",
    "all GPUs are usable",
];

pub fn run(root: &Path, context: &TestContext, arguments: &[String]) -> Result<()> {
    let before = arguments
        .first()
        .map(PathBuf::from)
        .context("bench readahead wants another init, to compare with this one")?;
    let runs = arguments
        .get(1)
        .map_or(Ok(1), |n| n.parse::<usize>())
        .context("RUNS")?;
    ensure!(runs > 0, "bench readahead: at least one run");
    let wanted = arguments.get(2..).unwrap_or_default();
    let disks = || {
        let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|word| word == name);
        DISKS.into_iter().filter(move |(name, _)| is_wanted(name))
    };
    ensure!(
        disks().next().is_some(),
        "bench readahead: none of {wanted:?} is a disk: there are {}",
        DISKS.map(|(name, _)| name).join(", ")
    );
    let inits = [before, context.guest_program("kata-gpu-init")];
    let tree = tree(context)?;
    let image = disk_root::erofs_image(context, &tree)?;
    let images = INITS.map(|name| context.work_dir.join(format!("{name}.image")));
    for (init, out) in inits.iter().zip(&images) {
        disk_root::replaced_with(context, &image, init, out, &[])?;
    }
    let mut raw = Vec::new();
    for run in 1..=runs {
        for (disk, rate) in disks() {
            for (host, enable_ms) in HOSTS {
                for (at, init) in INITS.into_iter().enumerate() {
                    eprintln!("bench: run {run} of {runs}, {disk}, {host}, {init} ...");
                    let guest = match rate {
                        Some(rate) => Guest::new()
                            .root_disk(context, &images[at], "/dev/vda1", "erofs")?
                            .disk_rate(rate),
                        None => in_initrd(context, &tree, &inits[at])?,
                    };
                    let words = format!("{GUEST} fakepci.enable_ms={enable_ms}");
                    let booted = guest.append(&words).boot(context, "guest")?;
                    let (ms, read) =
                        milestones(&booted).with_context(|| format!("{disk}, {host}, {init}"))?;
                    raw.push(
                        json!({ "run": run, "disk": disk, "host": host, "init": init,
                        "ms": ms, "readahead": read }),
                    );
                }
            }
        }
    }
    let command = format!("tests/bench/run readahead {}", arguments.join(" "));
    keep(
        root,
        "readahead",
        &json!({ "command": command, "guest": GUEST, "module_bytes": MODULE,
            "firmware_bytes": FIRMWARE_BYTES, "agent_bytes": AGENT, "machine": machine(),
            "runs": raw }),
    )?;
    println!("ms since the init's first instruction, median of {runs} (least to most)");
    for (disk, _) in disks() {
        for (host, enable_ms) in HOSTS {
            println!();
            let title = format!("{disk}, {host} host ({enable_ms} ms)");
            println!("{title:<40} {:>24} {:>24}", INITS[0], INITS[1]);
            for column in COLUMNS {
                let [before, now] = INITS.map(|init| figures(&raw, [disk, host, init], column));
                println!("{column:<40} {before:>24} {now:>24}");
            }
        }
    }
    Ok(())
}

/// The guest's root as a folder, without the init.
fn tree(context: &TestContext) -> Result<PathBuf> {
    let tree = disk_root::root(context)?;
    std::fs::write(
        tree.join(FIRMWARE).join("gsp_ga10x.bin"),
        vec![7; FIRMWARE_BYTES],
    )?;
    std::fs::write(tree.join("agent-pages"), vec![7; AGENT])?;
    // The kernel reads a module whole, and ignores bytes after its sections.
    let module = module(context, &tree)?;
    let mut bytes = std::fs::read(&module)?;
    bytes.resize(MODULE, 0);
    std::fs::write(&module, bytes)?;
    Ok(tree)
}

/// Path of the driver's module in a guest's root.
fn module(context: &TestContext, root: &Path) -> Result<PathBuf> {
    Ok(root.join(context.modules()?).join("nvidia.ko"))
}

/// The same files in an initrd.
fn in_initrd(context: &TestContext, tree: &Path, init: &Path) -> Result<Guest> {
    let mut guest = Guest::new().file("init", &std::fs::read(init)?);
    let module = module(context, tree)?;
    let firmware = tree.join(FIRMWARE).join("gsp_ga10x.bin");
    for path in [module, firmware, tree.join("agent-pages")] {
        let name = path
            .strip_prefix(tree)?
            .to_str()
            .context("a path in UTF-8")?;
        guest = guest.file(name, &std::fs::read(&path)?);
    }
    Ok(guest)
}

/// The milestones, and the step of the readahead, if any: its begin, duration and bytes.
fn milestones(booted: &Booted) -> Result<(Value, Value)> {
    let agent = booted.agent("ttRPC server started", |_| true)?;
    booted.settles(2, 0)?;
    let records = booted.records();
    super::trace(&records);
    let first = |kind, name: &str| -> Result<&Record> {
        named(&records, kind, name)
            .first()
            .copied()
            .with_context(|| format!("no {name}"))
    };
    let start_ns = first(Kind::Event, names::INIT_START)?.boottime_ns;
    let since = |ns: u64| ns.saturating_sub(start_ns) as f64 / 1e6;
    let lasts =
        |(begin, end): &(&Record, &Record)| since(end.boottime_ns) - since(begin.boottime_ns);
    let loads = spans(&records, names::MODULE_LOAD)?;
    let load = loads
        .iter()
        .find(|(begin, _)| begin.fields.get("module").is_some_and(|m| m == "nvidia"))
        .context("nvidia was not loaded")?;
    let usable = first(Kind::Event, names::GPU_USABLE)?;
    let initialised = named(&records, Kind::End, names::GPU_INIT);
    let attach = initialised
        .iter()
        .filter_map(|end| end.fields.get("attach_ms")?.as_f64())
        .next()
        .context("no attach_ms")?;
    let settled = first(Kind::Event, names::SETTLED)?;
    let values = [
        since(booted.boottime_ns(&agent)?),
        since(load.1.boottime_ns),
        since(usable.boottime_ns),
        attach,
        since(settled.boottime_ns),
    ];
    let ms: Map<String, Value> = COLUMNS
        .iter()
        .zip(values)
        .map(|(c, ms)| ((*c).to_string(), ms.into()))
        .collect();
    let read = spans(&records, names::READAHEAD)?.first().map(|step| {
        json!({ "begin_ms": since(step.0.boottime_ns), "took_ms": lasts(step),
            "bytes": step.0.fields.get("bytes") })
    });
    Ok((ms.into(), read.into()))
}

/// Median, least and most of a column.
fn figures(raw: &[Value], [disk, host, init]: [&str; 3], column: &str) -> String {
    let mut ms: Vec<f64> = raw
        .iter()
        .filter(|r| r["disk"] == disk && r["host"] == host && r["init"] == init)
        .filter_map(|r| r["ms"][column].as_f64())
        .collect();
    ms.sort_by(f64::total_cmp);
    let (least, most) = (ms.first(), ms.last());
    let [least, most] = [least, most].map(|ms| ms.copied().unwrap_or(f64::NAN));
    format!("{:.0} ({least:.0} to {most:.0})", super::median(ms))
}
