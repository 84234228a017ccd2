//! `bench cdi [RUNS]`: what a spec and a container's hook cost, on the reference root of 8 GPUs and on a container root made of this machine's own libraries.

#[path = "../host/tree.rs"]
mod tree;

use super::{keep, machine};
use crate::project;
use anyhow::{Context, Result, ensure};
use container_device_interface::spec::read_spec;
use kata_gpu_init::cdi::devices::Places;
use kata_gpu_init::cdi::spec::{Options, generate};
use kata_gpu_init::driver_files::{Roots, manifest, scan};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

const REFERENCE: &str = "kata-8gpu-550";
/// Libraries in the container: about what an image with CUDA has.
const LIBRARIES: usize = 200;

/// A directory that is gone afterwards.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _unused = std::fs::remove_dir_all(&self.0);
    }
}

pub fn run(root: &Path, runs: usize) -> Result<()> {
    let scratch = Scratch(root.join("target/tmp/bench-cdi"));
    drop(Scratch(scratch.0.clone()));
    let tree_root = scratch.0.join("root");
    std::fs::create_dir_all(&tree_root)?;
    tree::build(&tree_root, &tree::description(REFERENCE));
    let roots = Roots { root: tree_root.clone(), ..Roots::default() };
    let found = Places { root: tree_root.clone(), dev_root: tree_root.clone() }.gpus().map_err(anyhow::Error::msg)?;
    let options = Options::default();

    println!("median ms of {runs} runs");
    let mut raw = serde_json::Map::new();
    let mut told = |name: &str, target: &str, ms: Vec<f64>| {
        println!("{name:<58} {:>8.2}  {target}", median(&ms));
        raw.insert(name.into(), json!(ms));
    };
    let files = scan(&roots, None)?;
    told("scan of the driver's files", "", timed(runs, || scan(&roots, None).map(drop).context("scan"))?);
    manifest::write(&roots, &files)?;
    told(
        "the same from the manifest, verified",
        "target 1",
        timed(runs, || manifest::load(&roots, None).map(drop).map_err(|e| anyhow::anyhow!("{e}")))?,
    );
    let spec = generate(&found.gpus, &found.common, Some(&files), &options).to_json();
    told(
        "spec of 8 GPUs from what was found",
        "",
        timed(runs, || Ok(drop(generate(&found.gpus, &found.common, Some(&files), &options).to_json())))?,
    );

    let binary = root.join("target/x86_64-unknown-linux-musl/release/kata-gpu-init");
    let mut resident = 0;
    let command = || -> Result<u64> {
        let mut child = Command::new(&binary).args(["cdi", "generate", "--root"]).arg(&tree_root).stdout(Stdio::null()).spawn()?;
        let peak = peak_of(&mut child)?;
        Ok(peak)
    };
    told("kata-gpu-init cdi generate, the whole process", "target 3", timed(runs, || command().map(|peak| resident = resident.max(peak)))?);

    let bundle = container(&scratch.0)?;
    let state = json!({ "ociVersion": "1.0.2", "id": "bench", "status": "creating", "pid": 1, "bundle": bundle }).to_string();
    let arguments = ["hook", "prepare", "--folder", "/usr/lib/x86_64-linux-gnu", "--host-driver-version=550.163.01"];
    let hook = || -> Result<()> {
        let mut child = Command::new(&binary).args(arguments).stdin(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        child.stdin.take().context("no stdin")?.write_all(state.as_bytes())?;
        ensure!(child.wait()?.success(), "the hook has failed");
        Ok(())
    };
    told(&format!("hook of a container with {LIBRARIES} libraries, the whole process"), "target 5", timed(runs, hook)?);

    let (ours, theirs) = (scratch.0.join("ours.json"), project().join("tests/fixtures/cdi").join(REFERENCE).with_extension("json"));
    std::fs::write(&ours, &spec)?;
    let parse = |path: &PathBuf| read_spec(path, 0).map(drop).map_err(|e| anyhow::anyhow!("{e}"));
    told("agent's crate reads our spec", "", timed(runs, || parse(&ours))?);
    told("agent's crate reads the incumbent's", "", timed(runs, || parse(&theirs))?);
    let theirs = std::fs::metadata(&theirs)?.len();
    println!("bytes: ours {}, the incumbent's {theirs}: {:.2} (target 0.5)", spec.len(), spec.len() as f64 / theirs as f64);
    println!("peak memory of cdi generate: {:.1} MB (target 6)", resident as f64 / 1e3);
    let file = keep(
        root,
        "cdi",
        &json!({ "command": format!("tests/bench/run cdi {runs}"), "machine": machine(), "ms": raw, "spec_bytes": spec.len(), "reference_bytes": theirs, "peak_kb": resident }),
    )?;
    println!("raw runs: {}", file.strip_prefix(root).unwrap_or(&file).display());
    Ok(())
}

fn timed(runs: usize, mut work: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    // The first one finds nothing in the page cache's hot end, and is not what is asked about.
    work()?;
    (0..runs)
        .map(|_| {
            let start = Instant::now();
            work().map(|()| start.elapsed().as_secs_f64() * 1e3)
        })
        .collect()
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Waits for a process; its peak resident memory in kB.
fn peak_of(child: &mut std::process::Child) -> Result<u64> {
    // The kernel keeps it until the process is waited for; a process this short is a zombie by the time anybody looks, so it is asked while it runs.
    let path = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    loop {
        let status = std::fs::read_to_string(&path).unwrap_or_default();
        let now = status.lines().find_map(|l| l.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.trim().parse().ok());
        peak = peak.max(now.unwrap_or(0));
        if let Some(status) = child.try_wait()? {
            ensure!(status.success(), "kata-gpu-init cdi generate: {status}");
            return Ok(peak);
        }
    }
}

/// A bundle with a root of this machine's own libraries and a conventional configuration; the driver's are among them.
fn container(scratch: &Path) -> Result<PathBuf> {
    let bundle = scratch.join("bundle");
    let folder = bundle.join("rootfs/usr/lib/x86_64-linux-gnu");
    std::fs::create_dir_all(&folder)?;
    std::fs::create_dir_all(bundle.join("rootfs/etc/ld.so.conf.d"))?;
    for link in ["lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{link}"), bundle.join("rootfs").join(link))?;
    }
    std::fs::create_dir_all(bundle.join("rootfs/usr/lib64"))?;
    std::fs::write(bundle.join("rootfs/etc/ld.so.conf"), "include /etc/ld.so.conf.d/*.conf\n")?;
    std::fs::write(
        bundle.join("rootfs/etc/ld.so.conf.d/x86_64-linux-gnu.conf"),
        "/usr/local/lib/x86_64-linux-gnu\n/usr/lib/x86_64-linux-gnu\n",
    )?;
    let mut copied = 0;
    for entry in std::fs::read_dir("/usr/lib/x86_64-linux-gnu")?.flatten() {
        let name = entry.file_name();
        if copied < LIBRARIES && name.to_string_lossy().contains(".so") && entry.file_type()?.is_file() {
            std::fs::copy(entry.path(), folder.join(&name))?;
            copied += 1;
        }
    }
    let config = json!({ "ociVersion": "1.0.2", "root": { "path": bundle.join("rootfs") } });
    std::fs::write(bundle.join("config.json"), config.to_string())?;
    for name in ["libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"] {
        let library = kata_gpu_init::elf::stand_in::library(Some(&format!("{name}.so.1")), &["libc.so.6"]);
        std::fs::write(folder.join(format!("{name}.so.550.163.01")), library)?;
    }
    Ok(bundle)
}
