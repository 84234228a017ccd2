//! `bench trace [RUNS] [HOST..] [--overhead]`: one guest with a passed-through function on the
//! emulated host, recorded by `kata-gpu-boot doctor --record`: pages of its memory, kernels of the
//! host, VFIO against IOMMUFD. With `--overhead` the same boot without and with a recorder, in
//! turn.

use super::{keep, machine, median};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_report::data::units::histogram;
use kata_gpu_tests::vm::emulated_host::traced_boot::{Figures, Kernel, Pages, TracedHost, Vfio};
use kata_gpu_tests::vm::harness::{EmulatedHost, Outcome, TestContext};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// A row: a host's kernel by its suite, and how a guest on it is backed and mapped.
struct Variant {
    kernel: Kernel,
    pages: Pages,
    vfio: Vfio,
}

const fn legacy(kernel: Kernel, pages: Pages) -> Variant {
    Variant {
        kernel,
        pages,
        vfio: Vfio::Legacy,
    }
}

/// Those of one host stand together: it is started once.
const VARIANTS: &[Variant] = &[
    legacy(Kernel::Own, Pages::Small),
    legacy(Kernel::Own, Pages::Transparent),
    legacy(Kernel::Own, Pages::Huge),
    legacy(Kernel::Of("bookworm"), Pages::Transparent),
    legacy(Kernel::Of("trixie-backports"), Pages::Transparent),
    Variant {
        kernel: Kernel::WithIommufd,
        pages: Pages::Small,
        vfio: Vfio::Iommufd,
    },
    Variant {
        kernel: Kernel::WithIommufd,
        pages: Pages::Transparent,
        vfio: Vfio::Iommufd,
    },
];

pub fn run(root: &Path, context: &TestContext, words: &[String]) -> Result<()> {
    if let Some(Outcome::Skipped(reason)) = EmulatedHost::skipped(context)? {
        bail!("{reason}");
    }
    let (options, words): (Vec<&str>, Vec<&str>) = words
        .iter()
        .map(String::as_str)
        .partition(|word| word.starts_with("--"));
    ensure!(
        options.iter().all(|word| *word == "--overhead"),
        "{}",
        super::USAGE
    );
    let (runs, hosts) = match words.first().map(|word| word.parse()) {
        Some(Ok(runs)) => (runs, &words[1..]),
        _ => (1, &words[..]),
    };
    ensure!(runs > 0, "bench trace: at least one run");
    let known: BTreeSet<&str> = VARIANTS
        .iter()
        .map(|variant| variant.kernel.name())
        .collect();
    if let Some(other) = hosts.iter().find(|host| !known.contains(*host)) {
        bail!("bench trace: no host {other:?}: want one of {known:?}");
    }
    let mut context = context.clone();
    context.work_dir = context.work_dir.join("trace");
    if options.is_empty() {
        compare(root, &context, runs, hosts)
    } else {
        overhead(root, &context, runs)
    }
}

/// Load of this machine, with how much else runs.
fn load() -> Result<String> {
    Ok(std::fs::read_to_string("/proc/loadavg")?.trim().to_string())
}

/// Rows of these hosts, or of all.
fn compare(root: &Path, context: &TestContext, runs: usize, hosts: &[&str]) -> Result<()> {
    let (mut raw, mut failed) = (Vec::new(), None);
    for run in 1..=runs {
        let wanted = |of_host: &&[Variant]| {
            hosts.is_empty()
                || of_host
                    .iter()
                    .all(|variant| hosts.contains(&variant.kernel.name()))
        };
        for of_host in VARIANTS
            .chunk_by(|a, b| a.kernel == b.kernel)
            .filter(wanted)
        {
            // One host that cannot be started, or stops, costs its own rows.
            if let Err(error) = on_a_host(context, of_host, run, &mut raw) {
                eprintln!("bench: {error:#}");
                failed = Some(error);
            }
        }
    }
    keep(
        root,
        "trace",
        &json!({ "command": format!("tests/bench/run trace {runs} \
            {}", hosts.join(" ")).trim_end(), "machine": machine(), "runs": raw }),
    )?;
    println!(
        "one guest of 512 MiB with a BAR of 512 MiB, recorded; median of {runs}; s, of the host"
    );
    println!(
        "{:<27} {:>7} {:>8} {:>7} {:>7} {:>12} {:>5} {:>9} {:>8} {:>8}",
        "kernel",
        "memory",
        "vfio",
        "calls",
        "pin",
        "pages a call",
        "BARs",
        "BAR first",
        "BARs all",
        "settled"
    );
    for first in raw.iter().filter(|row| row["run"] == 1) {
        let of = |key: &str| {
            median(
                raw.iter()
                    .filter(|row| is_same(row, first))
                    .filter_map(|row| row[key].as_f64())
                    .collect(),
            )
        };
        println!(
            "{:<27} {:>7} {:>8} {:>7.0} {:>7.2} {:>12.0} {:>5.0} {:>9} {:>8.2} {:>8.1}  {}",
            text(first, "kernel"),
            text(first, "memory"),
            text(first, "vfio"),
            of("pin_calls"),
            of("pin_s"),
            of("pages_a_call"),
            of("bar_maps"),
            first["bar_first_s"]
                .as_f64()
                .map_or("-".into(), |_| format!("{:.3}", of("bar_first_s"))),
            of("bar_all_s"),
            of("settled_s"),
            first["iommu_kib"]
                .as_i64()
                .map_or("IOMMU -".into(), |kib| format!("IOMMU {kib} KiB")),
        );
    }
    failed.map_or(Ok(()), |error| Err(error.context("rows are missing")))
}

/// Boots the guests of one host.
fn on_a_host(
    context: &TestContext,
    variants: &[Variant],
    run: usize,
    raw: &mut Vec<Value>,
) -> Result<()> {
    let kernel = variants.first().context("a host without guests")?.kernel;
    let mut host = TracedHost::start(context, kernel).with_context(|| format!("{kernel:?}"))?;
    for Variant { pages, vfio, .. } in variants {
        eprintln!(
            "bench: run {run}, {kernel:?}, pages {}, {vfio:?} ...",
            pages.name()
        );
        host.record_next()?;
        let figures = host.boot(*pages, *vfio)?;
        raw.push(row(&figures, *pages, *vfio, run, &load()?)?);
    }
    Ok(())
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or("-")
}

fn is_same(a: &Value, b: &Value) -> bool {
    ["kernel", "memory", "vfio"]
        .iter()
        .all(|key| a[*key] == b[*key])
}

/// Figures of a recorded boot.
fn row(figures: &Figures, pages: Pages, vfio: Vfio, run: usize, load: &str) -> Result<Value> {
    let pin = figures.pin()?;
    let bars = figures.bars();
    let seconds = |ns: u64| ns as f64 / 1e9;
    let calls = pin.calls.unwrap_or(0);
    Ok(json!({
        "kernel": figures.kernel, "memory": pages.name(),
        "vfio": format!("{vfio:?}").to_lowercase(), "run": run,
        "pin_calls": calls, "pin_s": seconds(pin.took_ns),
        "pages_a_call": pin.bytes.unwrap_or(0) as f64 / 4096.0 / calls as f64,
        "histogram": histogram(&pin.pages_a_call.iter().copied().collect()),
        "bar_maps": bars.len(), "bar_first_s": bars.first().map(|bar| seconds(bar.took_ns)),
        "bar_all_s": seconds(bars.iter().map(|bar| bar.took_ns).sum()),
        "bar_calls": bars.first().and_then(|bar| bar.calls),
        "iommu_kib": figures.iommu_pages.map(|pages| pages * 4), "settled_s": figures.settled_s,
        "load": load,
    }))
}

/// The same boot without and with a recorder, in turn, so that a host that slows down or a machine
/// that gets busy meets both alike.
fn overhead(root: &Path, context: &TestContext, runs: usize) -> Result<()> {
    let mut host = TracedHost::start(context, Kernel::Own)?;
    // The first guest reads what later ones have in memory.
    host.boot(Pages::Transparent, Vfio::Legacy)?;
    let mut raw = Vec::new();
    for run in 1..=runs {
        eprintln!("bench: pair {run} of {runs} ...");
        let without = host.boot(Pages::Transparent, Vfio::Legacy)?.settled_s;
        host.record_next()?;
        let with = host.boot(Pages::Transparent, Vfio::Legacy)?;
        with.pin()?;
        raw.push(
            json!({ "run": run, "without_s": without, "with_s": with.settled_s,
            "ratio": with.settled_s / without, "load": load()? }),
        );
    }
    let command = format!("tests/bench/run trace {runs} --overhead");
    keep(
        root,
        "trace-overhead",
        &json!({ "command": command, "machine": machine(), "runs": raw }),
    )?;
    let values =
        |key: &str| -> Vec<f64> { raw.iter().filter_map(|row| row[key].as_f64()).collect() };
    println!("s from QEMU's start until the GPU is settled, {runs} pair(s) in turn");
    println!("{:<24} {:>8} {:>8} {:>8}", "", "least", "median", "most");
    for (name, key) in [
        ("without a recorder", "without_s"),
        ("with one", "with_s"),
        ("ratio of a pair", "ratio"),
    ] {
        let values = values(key);
        let (least, most) = (
            values.iter().copied().fold(f64::INFINITY, f64::min),
            values.iter().copied().fold(0.0, f64::max),
        );
        println!(
            "{name:<24} {least:>8.2} {:>8.2} {most:>8.2}",
            median(values)
        );
    }
    Ok(())
}
