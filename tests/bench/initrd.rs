//! `bench initrd [RUNS]`: the same guest from a plain and from a gzip initrd, alone and four at
//! once: until the agent is ready, and what the host's memory holds for it.
//!
//! Memory is PSS: a page that several processes map counts once, by equal parts, so that the sum
//! over all VMs is what they really cost. The figures are split by what QEMU has mapped: the
//! initrd's file, the guest's memory, and the rest, which is the emulator's own.

use super::{keep, machine};
use anyhow::{Context, Result, ensure};
use kata_gpu_image::images::image::Form;
use kata_gpu_image::images::output_file::Output;
use kata_gpu_image::images::pack::{Packing, pack};
use kata_gpu_tests::vm::harness::{Booted, DEADLINE, Guest, TestContext};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

const VMS: [usize; 2] = [1, 4];
/// Libraries that only the large image has: as much of this machine's own, which compress as the
/// driver's do. A quarter of a whole driver's user space, so that four guests fit into a small
/// machine.
const LIBRARIES_MIB: u64 = 128;
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";
const KIB_PER_MIB: f64 = 1024.0;
/// A guest with one GPU: the compared times are before the GPU's.
const GUEST: &str = "fakepci.gpus=1 loglevel=7 ignore_loglevel gpuinit.log=off";

pub fn run(root: &Path, context: &TestContext, runs: usize) -> Result<()> {
    let images = images(context)?;
    let mut raw = Vec::new();
    for run in 1..=runs {
        for (content, form, path) in &images {
            for vms in VMS {
                eprintln!("bench: run {run} of {runs}, {content}, {form}, {vms} at once ...");
                let mut one = measure(context, path, vms)?;
                one["initrd"] = json!(content);
                one["form"] = json!(form);
                raw.push(one);
            }
        }
    }
    let sizes: Vec<Value> = images
        .iter()
        .map(|(c, f, path)| Ok(json!({"initrd": c, "form": f, "bytes": path.metadata()?.len()})))
        .collect::<Result<_>>()?;
    let kept = keep(
        root,
        "initrd",
        &json!({ "command": format!("tests/bench/run initrd {runs}"), "guest": GUEST, "machine": machine(), "images": sizes, "runs": raw }),
    )?;

    println!(
        "median of {runs} runs; memory in MiB of PSS, all VMs together        unpacked: the guest's time when the kernel was done with the initrd"
    );
    println!(
        "| initrd | form | MiB | VMs | agent ready, s | unpacked, s | PSS | initrd's file | guests' memory | QEMU's own |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for (content, form, path) in &images {
        let mib = path.metadata()?.len() as f64 / f64::from(1 << 20);
        for vms in VMS {
            let of = |key: &str| median(&raw, content, form, vms, key);
            println!(
                "| {content} | {form} | {mib:.1} | {vms} | {:.1} | {:.2} | {:.0} | {:.0} | {:.0} | {:.0} |",
                of("ready_s"),
                of("unpacked_s"),
                of("pss_mib"),
                of("initrd_pss_mib"),
                of("guest_pss_mib"),
                of("own_pss_mib")
            );
        }
    }
    println!(
        "raw runs: {}",
        kept.strip_prefix(root).unwrap_or(&kept).display()
    );
    Ok(())
}

/// Content, form and file of each.
fn images(context: &TestContext) -> Result<Vec<(&'static str, &'static str, PathBuf)>> {
    let folder = context.work_dir.join("initrd");
    let _unused = std::fs::remove_dir_all(&folder); // an earlier run's
    std::fs::create_dir_all(folder.join("more/usr/lib"))
        .with_context(|| format!("make {}", folder.display()))?;
    let sim = std::fs::read(context.target.join("initrd.cpio"))
        .context("read target/initrd.cpio (initrd/pack makes it)")?;
    // The largest first: as few files as a driver has.
    let mut libraries: Vec<(u64, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(LIBRARIES).with_context(|| format!("read {LIBRARIES}"))? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            libraries.push((entry.metadata()?.len(), entry.path()));
        }
    }
    libraries.sort_by(|a, b| b.cmp(a));
    let mut left = LIBRARIES_MIB << 20;
    for (bytes, from) in libraries.into_iter().filter(|(bytes, _)| *bytes > 0) {
        if bytes <= left {
            std::fs::copy(
                &from,
                folder
                    .join("more/usr/lib")
                    .join(from.file_name().context("no name")?),
            )?;
            left -= bytes;
        }
    }
    let more = folder.join("more.cpio");
    let mut output = Output::create(&more, Form::Plain)?;
    pack(
        &[folder.join("more")],
        Packing {
            mtime: 0,
            manifest: false,
        },
        &mut output,
    )?;
    output.end()?.keep()?;
    let large = [sim.as_slice(), &std::fs::read(&more)?].concat();
    let mut images = Vec::new();
    for (content, bytes) in [("sim", &sim), ("large", &large)] {
        for form in [Form::Plain, Form::Gzip] {
            let path = folder.join(format!("{content}-{}", form.name()));
            let mut output = Output::create(&path, form)?;
            output.write_all(bytes)?;
            output.end()?.keep()?;
            images.push((content, form.name(), path));
        }
    }
    Ok(images)
}

/// Boots so many at once.
fn measure(context: &TestContext, initrd: &Path, vms: usize) -> Result<Value> {
    let mut booted = Vec::new();
    // Without vsock: its device would map the guest's memory as well.
    for vm in 0..vms {
        let start = Instant::now();
        booted.push((
            start,
            Guest::new()
                .initrd(initrd)
                .append(GUEST)
                .without_vsock()
                .boot(context, &format!("initrd-{vm}"))?,
        ));
    }
    // All wait for the same processors: each has its own time.
    let ready: Vec<f64> = std::thread::scope(|scope| {
        let waiting: Vec<_> = booted
            .iter()
            .map(|(start, vm)| scope.spawn(move || ready(*start, vm)))
            .collect();
        waiting
            .into_iter()
            .map(|w| {
                w.join()
                    .unwrap_or_else(|_| anyhow::bail!("a thread panicked"))
            })
            .collect::<Result<_>>()
    })?;
    let unpacked = booted
        .iter()
        .map(|(_, vm)| stamp(&vm.console.text(), "Freeing initrd memory"))
        .collect::<Result<Vec<f64>>>()?;
    let mut sum = Memory::default();
    for (_, vm) in &booted {
        let pid = vm.vm.pid().context("QEMU has ended")?;
        sum.add(
            &std::fs::read_to_string(format!("/proc/{pid}/smaps"))
                .with_context(|| format!("read the maps of {pid}"))?,
            initrd,
        );
    }
    ensure!(sum.guest.pss > 0.0, "no guest's memory in the maps of QEMU");
    let part =
        |part: &Part| json!({"size_mib": part.size, "rss_mib": part.rss, "pss_mib": part.pss});
    Ok(json!({
        "vms": vms, "ready_s": mean(&ready), "unpacked_s": mean(&unpacked), "pss_mib": sum.initrd.pss + sum.guest.pss + sum.own.pss,
        "initrd_pss_mib": sum.initrd.pss, "guest_pss_mib": sum.guest.pss, "own_pss_mib": sum.own.pss,
        "initrd_map": part(&sum.initrd), "guest_map": part(&sum.guest), "own_map": part(&sum.own),
    }))
}

fn ready(start: Instant, vm: &Booted) -> Result<f64> {
    let seen = vm.console.wait_text(DEADLINE, "ttRPC server started");
    ensure!(seen, "the agent is not ready within {DEADLINE:?}");
    Ok(start.elapsed().as_secs_f64())
}

/// Seconds of the kernel's clock before a text: `[    1.234567] text`.
fn stamp(console: &str, text: &str) -> Result<f64> {
    let line = console
        .lines()
        .find(|line| line.contains(text))
        .with_context(|| format!("the kernel has not said {text:?}"))?;
    let stamp = line
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .with_context(|| format!("no time in {line:?}"))?
        .0;
    Ok(stamp.trim().parse()?)
}

#[derive(Default)]
struct Part {
    size: f64,
    rss: f64,
    pss: f64,
}

/// In MiB.
#[derive(Default)]
struct Memory {
    initrd: Part,
    guest: Part,
    own: Part,
}

impl Memory {
    /// Adds what is in the text of /proc/PID/smaps.
    fn add(&mut self, smaps: &str, initrd: &Path) {
        let initrd = initrd.display().to_string();
        let mut part = &mut self.own;
        for line in smaps.lines() {
            let mut words = line.split_ascii_whitespace();
            let (first, second) = (
                words.next().unwrap_or_default(),
                words.next().unwrap_or_default(),
            );
            if !first.ends_with(':') {
                // `from-to perms offset dev inode path`
                let path = words.nth(3).unwrap_or_default();
                part = match path {
                    path if path == initrd => &mut self.initrd,
                    path if path.starts_with("/memfd:") => &mut self.guest,
                    _ => &mut self.own,
                };
                continue;
            }
            let mib = second.parse::<f64>().unwrap_or(0.0) / KIB_PER_MIB;
            match first {
                "Size:" => part.size += mib,
                "Rss:" => part.rss += mib,
                "Pss:" => part.pss += mib,
                _ => {}
            }
        }
    }
}

fn mean(all: &[f64]) -> f64 {
    all.iter().sum::<f64>() / all.len() as f64
}

fn median(raw: &[Value], content: &str, form: &str, vms: usize, key: &str) -> f64 {
    let is = |run: &&Value| run["initrd"] == content && run["form"] == form && run["vms"] == vms;
    let mut values: Vec<f64> = raw
        .iter()
        .filter(is)
        .filter_map(|run| run[key].as_f64())
        .collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_told_apart_by_what_is_mapped() {
        let smaps = "7f00-7f10 rw-s 00000000 00:01 12 /memfd:memory-backend-memfd (deleted)\nSize: 1048576 kB\nRss: 2048 kB\nPss: 1024 kB\nVmFlags: rd\n\
                     7f20-7f30 r--p 00000000 08:01 13 /w/sim-plain\nSize: 10240 kB\nRss: 10240 kB\nPss: 2560 kB\n\
                     7f40-7f50 rw-p 00000000 00:00 0 \nSize: 1024 kB\nRss: 1024 kB\nPss: 1024 kB\n";
        let mut memory = Memory::default();
        memory.add(smaps, Path::new("/w/sim-plain"));
        memory.add(smaps, Path::new("/w/sim-plain"));
        assert_eq!((memory.guest.size, memory.guest.pss), (2048.0, 2.0));
        assert_eq!(
            (memory.initrd.rss, memory.initrd.pss, memory.own.pss),
            (20.0, 5.0, 2.0)
        );
        assert_eq!(
            stamp("x\n[    1.25] Freeing initrd memory: 1K", "Freeing initrd").unwrap(),
            1.25
        );
        assert!(stamp("[ 1 ] x", "Freeing").is_err());
    }
}
