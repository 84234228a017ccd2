//! `bench cdi [RUNS]`: what a spec and a container's hook cost, on the reference root of 8 GPUs and
//! on container roots made of this machine's own libraries.
//!
//! Each row has all its runs one after the other; judged is the median. The shortest, and the
//! processor's time that a program has taken (the median, too), say what it is when nothing else
//! runs on the machine.

#[path = "cdi_container.rs"]
mod container;
#[path = "../host/tree.rs"]
mod tree;

use super::{keep, machine};
use crate::project;
use anyhow::{Context, Result, ensure};
pub use container::below;
use container::{Container, files_below};
use kata_gpu_cdi_check::agents::{Agent, Copies};
use kata_gpu_cdi_check::spec_files;
use kata_gpu_init::cdi::devices::Places;
use kata_gpu_init::cdi::hooks::NAME;
use kata_gpu_init::cdi::schema::Hook;
use kata_gpu_init::cdi::spec::{Options, generate};
use kata_gpu_init::config::Naming;
use kata_gpu_init::driver_files::{Roots, manifest, scan};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

const REFERENCE: &str = "kata-8gpu-550";
/// Targets, in ms.
const GENERATE: f64 = 3.0;
const WITH_MANIFEST: f64 = 1.0;
const HOOK: f64 = 5.0;
/// In kB, and of the incumbent's spec.
const MEMORY: u64 = 6000;
const HALF: f64 = 0.5;

/// A directory that is gone afterwards.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _unused = std::fs::remove_dir_all(&self.0);
    }
}

/// The table, row by row.
struct Bench {
    runs: usize,
    raw: Map<String, Value>,
    missed: usize,
}

impl Bench {
    /// Measures a row of the table; `before` is not measured.
    fn row(
        &mut self,
        name: &str,
        target: Option<f64>,
        mut before: impl FnMut() -> Result<()>,
        mut work: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let (mut ms, mut cpu_ms) = (Vec::with_capacity(self.runs), Vec::with_capacity(self.runs));
        // The first one warms up what is warm in the others.
        for run in 0..=self.runs {
            before()?;
            let (start, used) = (Instant::now(), of_children()?);
            work().with_context(|| name.to_string())?;
            if run > 0 {
                ms.push(start.elapsed().as_secs_f64() * 1e3);
                cpu_ms.push(of_children()? - used);
            }
        }
        let sorted = |values: &[f64]| {
            let mut sorted = values.to_vec();
            sorted.sort_by(f64::total_cmp);
            (
                sorted.first().copied().unwrap_or(f64::NAN),
                sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN),
            )
        };
        let ((least, median), (_, cpu)) = (sorted(&ms), sorted(&cpu_ms));
        let cpu = if cpu > 0.0 {
            format!("{cpu:.2}")
        } else {
            String::new()
        };
        let verdict = target
            .map(|target| format!("{target:>6}  {}", self.verdict(median <= target)))
            .unwrap_or_default();
        println!("{name:<64} {least:>8.2} {median:>8.2} {cpu:>8} {verdict}");
        self.raw.insert(
            name.into(),
            json!({ "ms": ms, "cpu_ms": cpu_ms, "target_ms": target }),
        );
        Ok(())
    }

    /// The same with nothing before.
    fn warm(
        &mut self,
        name: &str,
        target: Option<f64>,
        work: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        self.row(name, target, || Ok(()), work)
    }

    fn verdict(&mut self, met: bool) -> &'static str {
        self.missed += usize::from(!met);
        if met { "met" } else { "MISSED" }
    }
}

pub fn run(root: &Path, runs: usize) -> Result<()> {
    ensure!(runs > 0, "no runs: give a number above 0");
    let scratch = Scratch(root.join("target/tmp/bench-cdi"));
    drop(Scratch(scratch.0.clone()));
    let tree_root = scratch.0.join("root");
    std::fs::create_dir_all(&tree_root)?;
    tree::build(&tree_root, &tree::description(REFERENCE));
    let binary = root.join("target/x86_64-unknown-linux-musl/release/kata-gpu-init");
    let mut bench = Bench {
        runs,
        raw: Map::new(),
        missed: 0,
    };
    println!(
        "ms of {runs} runs; cold: the contents of the files that are read, and of the program, are \
         not in the page cache (names and inodes are)"
    );
    println!(
        "{:<64} {:>8} {:>8} {:>8} {:>6}",
        "", "least", "median", "CPU", "target"
    );

    let of_17 = generator(&mut bench, &tree_root, &binary)?;
    hooks(&mut bench, &scratch.0, &tree_root, &binary)?;
    let (ours, theirs) = specs(&mut bench, &scratch.0, &of_17)?;
    let peak = peak(&binary, &tree_root)?;
    let (half, small) = (
        bench.verdict(ours as f64 <= HALF * theirs as f64),
        bench.verdict(peak <= MEMORY),
    );
    println!(
        "the spec of 17 devices has {ours} bytes, the incumbent's {theirs}: {:.2} of it, target \
         {HALF}  {half}",
        ours as f64 / theirs as f64
    );
    println!(
        "peak memory of cdi generate: {:.1} MB, target {}  {small}",
        peak as f64 / 1e3,
        MEMORY as f64 / 1e3
    );
    keep(
        root,
        "cdi",
        &json!({
            "command": format!("tests/bench/run cdi \
                                {runs}"), "machine": machine(), "rows": bench.raw,
            "spec_bytes": ours, "reference_bytes": theirs, "peak_kb": peak,
        }),
    )?;
    println!(
        "targets met: {}",
        if bench.missed == 0 {
            "all".into()
        } else {
            format!("all but {}", bench.missed)
        }
    );
    Ok(())
}

/// The generator, in process and as a program; gives the spec with the devices that the incumbent's
/// has.
fn generator(bench: &mut Bench, tree_root: &Path, binary: &Path) -> Result<Vec<u8>> {
    let roots = Roots {
        root: tree_root.into(),
        ..Roots::default()
    };
    let places = Places {
        root: tree_root.into(),
        dev_root: tree_root.into(),
    };
    let options = Options {
        namings: vec![Naming::Index, Naming::Uuid],
        ..Options::default()
    };
    let files = scan(&roots, None).map_err(anyhow::Error::msg)?;
    bench.warm("driver's files: scan", None, || {
        scan(&roots, None).map(drop).map_err(anyhow::Error::msg)
    })?;
    manifest::write(&roots, &files)?;
    bench.warm(
        "driver's files: from the manifest, verified",
        Some(WITH_MANIFEST),
        || Ok(manifest::load(&roots, None).map(drop)?),
    )?;
    let whole = |files: &_| -> Result<Vec<u8>> {
        let found = places.gpus().map_err(anyhow::Error::msg)?;
        Ok(generate(&found.gpus, &found.common, Some(files), &options).to_json())
    };
    bench.warm(
        "spec of 17 devices, with the manifest",
        Some(WITH_MANIFEST),
        || whole(&manifest::load(&roots, None)?).map(drop),
    )?;
    let command = |names: &str| {
        let child = Command::new(binary)
            .args(["cdi", "generate", "--names", names, "--root"])
            .arg(tree_root)
            .stdout(Stdio::null())
            .spawn();
        done(child?)
    };
    bench.warm(
        "cdi generate, the program: 9 devices (8 GPUs, all)",
        Some(GENERATE),
        || command("index"),
    )?;
    bench.warm(
        "cdi generate, the program: 17 devices (with UUIDs)",
        Some(GENERATE),
        || command("index,uuid"),
    )?;
    let mut read = files_below(tree_root)?;
    read.push(binary.into());
    bench.row(
        "cdi generate, the program: 17 devices, cold",
        None,
        || drop_from_cache(&read),
        || command("index,uuid"),
    )?;
    whole(&files)
}

/// The hooks of one container, which is in memory where there is a place for it, as it is in most
/// guests.
fn hooks(bench: &mut Bench, scratch: &Path, tree_root: &Path, binary: &Path) -> Result<()> {
    let files = scan(
        &Roots {
            root: tree_root.into(),
            ..Roots::default()
        },
        None,
    )
    .map_err(anyhow::Error::msg)?;
    let shared = Path::new("/dev/shm");
    let memory = if shared.is_dir() { shared } else { scratch }
        .join(format!("kata-gpu-bench-{}", std::process::id()));
    let scratch_in_memory = Scratch(memory.clone());
    let one = generate(&[], &[], Some(&files), &Options::default())
        .container_edits
        .hooks;
    for (gpus, name) in [(1, "one GPU"), (8, "all 8 GPUs")] {
        let memory = Scratch(memory.join("one"));
        let container = Container::new(&memory.0, &files, gpus)?;
        let (name, run) = (
            format!(
                "hook of a container with {name}, {} libraries",
                container.libraries
            ),
            || all(&one, binary, &container),
        );
        bench.row(
            &format!("{name}, new"),
            Some(HOOK),
            || container.reset(),
            run,
        )?;
        bench.warm(&format!("{name}, started again"), Some(HOOK), run)?;
    }
    let disk = Container::new(&scratch.join("cold"), &files, 1)?;
    let mut read = files_below(&disk.root)?;
    read.push(binary.into());
    let cold = || disk.reset().and_then(|()| drop_from_cache(&read));
    bench.row(
        "the same with one GPU on this machine's disk, new, cold",
        None,
        cold,
        || all(&one, binary, &disk),
    )?;
    drop(scratch_in_memory);
    Ok(())
}

/// Runs the hooks of a spec one after the other.
fn all(hooks: &[Hook], binary: &Path, container: &Container) -> Result<()> {
    for hook in hooks {
        let words = hook.args.iter().skip(1);
        let mut child = Command::new(binary)
            .arg0(NAME)
            .args(words)
            .env_clear()
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        child
            .stdin
            .take()
            .context("no stdin")?
            .write_all(container.state.as_bytes())?;
        done(child)?;
    }
    Ok(())
}

/// Feeds both specs to the crates of both agents. Returns the length of ours and of the incumbent's
/// in bytes.
fn specs(bench: &mut Bench, scratch: &Path, of_17: &[u8]) -> Result<(usize, usize)> {
    let ours = scratch.join("ours.json");
    std::fs::write(&ours, of_17)?;
    let theirs = project()
        .join("tests/fixtures/cdi")
        .join(REFERENCE)
        .with_extension("json");
    let length = std::fs::metadata(&theirs)?.len() as usize;
    for (agent, kata) in [
        (Agent::Kata3, "Kata 3's crate"),
        (Agent::Kata4, "Kata 4's crate"),
    ] {
        for (path, whose) in [(&ours, "ours"), (&theirs, "the incumbent's")] {
            let copies = Copies::new(&spec_files::read(path)?)?;
            bench.warm(&format!("{kata} reads {whose}, 17 devices"), None, || {
                copies.load(agent).map_err(anyhow::Error::msg)
            })?;
        }
    }
    Ok((of_17.len(), length))
}

fn done(mut child: Child) -> Result<()> {
    let status = child.wait()?;
    ensure!(status.success(), "kata-gpu-init: {status}");
    Ok(())
}

/// Writes files to the disk and takes their contents out of the page cache: contents that are not
/// written yet would stay.
fn drop_from_cache(files: &[PathBuf]) -> Result<()> {
    for path in files {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        file.sync_all()?;
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    }
    Ok(())
}

/// The processor's time that all processes have taken that were started and waited for, in ms.
fn of_children() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    Ok([usage.user_time(), usage.system_time()]
        .iter()
        .map(|t| t.num_microseconds() as f64 / 1e3)
        .sum())
}

/// The generator's peak memory in kB, over some runs.
///
/// `wait4` counts the memory of whoever started the process, too, and a zombie has no memory: /proc
/// is read while the process runs.
fn peak(binary: &Path, tree_root: &Path) -> Result<u64> {
    const RUNS: usize = 20;
    let mut peak = 0;
    for _ in 0..RUNS {
        let mut child = Command::new(binary)
            .args(["cdi", "generate", "--root"])
            .arg(tree_root)
            .stdout(Stdio::null())
            .spawn()?;
        let path = format!("/proc/{}/status", child.id());
        while child.try_wait()?.is_none() {
            let status = std::fs::read_to_string(&path).unwrap_or_default();
            let now = status.lines().find_map(|l| {
                l.strip_prefix("VmHWM:")?
                    .trim()
                    .strip_suffix(" kB")?
                    .trim()
                    .parse()
                    .ok()
            });
            peak = peak.max(now.unwrap_or(0));
        }
        done(child)?;
    }
    Ok(peak)
}
