//! `bench soak [BOOTS] [SEED] [--at-once N] [--file FILE]`: boots by their seeds, each judged and
//! kept as a line of a file; what the file has of this init is not done again, so a soak can be
//! stopped at any time. `--only SEED`: one boot, with all that came out of its guest where it
//! fails. `--describe SEED`: prints what a seed stands for. `--summary`: counts what the file has.
//! `bench hot-plug [ACTIONS] [SEED]`: GPUs that come and go in one guest.

use anyhow::{Context, Result, bail, ensure};
use kata_gpu_tests::vm::harness::TestContext;
use kata_gpu_tests::vm::soak::runs::{self, Ids};
use kata_gpu_tests::vm::soak::{self, Description, Run};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// File of runs unless `--file` names another one.
const FILE: &str = "tests/bench/runs/soak.ndjson";
/// Files that guests boot, below the folder of their architecture's builds; and beside them.
const BOOTED: [&str; 5] = [
    "kernel",
    "simulator",
    "containers",
    "initrd.cpio",
    "nvml.cpio",
];
const VSOCK: &str = "tools/bin/vhost-device-vsock";

struct Asked {
    boots: u64,
    first: u64,
    at_once: usize,
    file: PathBuf,
    only: Option<u64>,
    describe: Option<u64>,
    summary: bool,
}

fn parse(root: &Path, arguments: &[String]) -> Result<Asked> {
    let file = root.join(FILE);
    let mut asked = Asked {
        boots: 200,
        first: 1,
        at_once: 2,
        file,
        only: None,
        describe: None,
        summary: false,
    };
    let mut words = arguments.iter();
    let mut numbers = 0;
    while let Some(word) = words.next() {
        let mut value = || {
            words
                .next()
                .with_context(|| format!("bench soak: {word} wants a value"))
        };
        match word.as_str() {
            "--at-once" => asked.at_once = value()?.parse().context("--at-once")?,
            "--file" => asked.file = value()?.into(),
            "--only" => asked.only = Some(value()?.parse().context("--only")?),
            "--describe" => asked.describe = Some(value()?.parse().context("--describe")?),
            "--summary" => asked.summary = true,
            word => {
                let number = word.parse().with_context(|| {
                    format!("bench soak: {word:?} is no number of boots and no seed")
                })?;
                match numbers {
                    0 => asked.boots = number,
                    1 => asked.first = number,
                    _ => bail!("bench soak: {word}: want BOOTS and SEED alone"),
                }
                numbers += 1;
            }
        }
    }
    ensure!(asked.at_once > 0, "bench soak: at least one boot at once");
    Ok(asked)
}

pub fn run(root: &Path, context: &TestContext, arguments: &[String]) -> Result<()> {
    let asked = parse(root, arguments)?;
    if let Some(seed) = asked.describe {
        println!("{}", described(&Description::of(seed)));
        return Ok(());
    }
    if asked.summary {
        print!("{}", runs::summary(&runs::read(&asked.file)));
        return Ok(());
    }
    let ids = ids(root, context)?;
    let frozen = freeze(root, context, &ids)?;
    match asked.only {
        Some(seed) => only(&frozen, context, seed),
        None => several(&frozen, context, &asked, &ids),
    }
}

/// Copies what guests boot: a build beside a soak changes nothing of it.
fn freeze(root: &Path, context: &TestContext, ids: &Ids) -> Result<PathBuf> {
    let folder = root.join("target/soak").join(&ids.init);
    let guests = context_of(&folder, context, "").target;
    let copies = BOOTED
        .iter()
        .map(|name| (context.target.join(name), guests.join(name)));
    for (from, to) in copies.chain([(root.join("target").join(VSOCK), folder.join(VSOCK))]) {
        let above = to.parent().context("no folder")?;
        std::fs::create_dir_all(above).with_context(|| format!("make {}", above.display()))?;
        // Left by an earlier soak.
        let _unused = std::fs::remove_dir_all(&to).or_else(|_| std::fs::remove_file(&to));
        let status = Command::new("cp")
            .arg("-a")
            .arg(&from)
            .arg(&to)
            .status()
            .context("run cp")?;
        ensure!(
            status.success(),
            "cp -a {} {}: {status}",
            from.display(),
            to.display()
        );
    }
    Ok(folder)
}

fn ids(root: &Path, context: &TestContext) -> Result<Ids> {
    let output = |command: &mut Command| {
        let output = command
            .output()
            .ok()
            .filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let program = context.guest_program("kata-gpu-init");
    let sum = output(Command::new("sha256sum").arg(&program))
        .with_context(|| format!("sha256sum {}", program.display()))?;
    let init = sum.chars().take(16).collect();
    let git = |words: &[&str]| output(Command::new("git").arg("-C").arg(root).args(words));
    let tree = git(&["rev-parse", "--short=16", "HEAD^{tree}"]).unwrap_or_else(|| "?".into());
    let changed = git(&[
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        "src",
        "tests/simulator",
        "initrd",
    ]);
    let changed = changed.is_some_and(|changes| !changes.is_empty());
    Ok(Ids {
        init,
        tree: if changed { format!("{tree}+") } else { tree },
    })
}

fn context_of(frozen: &Path, context: &TestContext, name: &str) -> TestContext {
    TestContext::new(frozen.into(), context.arch, name)
}

fn described(description: &Description) -> String {
    let mut text = format!("seed {}: {}\n", description.seed, description.short());
    let _infallible = write!(
        text,
        "GPUs: {:?}\ncommand line: {}",
        description.gpus,
        description.command_line()
    );
    text
}

/// One boot; fails with everything that is known of it.
fn only(frozen: &Path, context: &TestContext, seed: u64) -> Result<()> {
    let run = soak::one(&context_of(frozen, context, "only"), seed);
    println!("{}", described(&run.description));
    if run.holds() {
        println!("ok, {:.1} s, kill: {:?}", run.seconds, run.kill);
        return Ok(());
    }
    println!("{}", evidence(&run)?);
    bail!("seed {seed}: {} findings", run.findings.len())
}

/// Stream and console of a guest, and everything that was wrong with it.
fn evidence(run: &Run) -> Result<String> {
    let mut text = String::new();
    for record in &run.seen.records {
        let _infallible = writeln!(text, "{}", serde_json::to_string(record)?);
    }
    let _infallible = writeln!(text, "{}", run.seen.console);
    for finding in &run.findings {
        let _infallible = writeln!(text, "{}: {}", finding.kind, finding.text);
    }
    Ok(text)
}

/// Boots that are still to do, and their progress.
struct Progress {
    seeds: Vec<u64>,
    done: u64,
    failed: BTreeSet<u64>,
}

fn several(frozen: &Path, context: &TestContext, asked: &Asked, ids: &Ids) -> Result<()> {
    let done = runs::done(&runs::read(&asked.file), ids);
    let seeds = (asked.first..asked.first + asked.boots).filter(|seed| !done.contains(seed));
    let seeds: Vec<u64> = seeds.rev().collect();
    let (all, start) = (seeds.len(), Instant::now());
    eprintln!(
        "soak: init {}, tree {}: {all} boots to do, {} done, {} at once",
        ids.init,
        ids.tree,
        done.len(),
        asked.at_once
    );
    let progress = Mutex::new(Progress {
        seeds,
        done: 0,
        failed: BTreeSet::new(),
    });
    let locked = || progress.lock().unwrap_or_else(PoisonError::into_inner);
    let boots = |worker: usize| -> Result<()> {
        let context = context_of(frozen, context, &worker.to_string());
        loop {
            let Some(seed) = locked().seeds.pop() else {
                return Ok(());
            };
            let run = soak::one(&context, seed);
            let mut progress = locked();
            runs::append(&asked.file, &run.line(ids))?;
            progress.done += 1;
            if !run.holds() {
                progress.failed.insert(seed);
                // The same seed may go well the next time: processes race.
                std::fs::write(frozen.join(format!("failed-{seed}.log")), evidence(&run)?)?;
            }
            let (done, elapsed) = (progress.done, start.elapsed().as_secs());
            eprintln!(
                "soak: {done} of {all}, {} failed, {elapsed} s: {}",
                progress.failed.len(),
                outcome(&run)
            );
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..asked.at_once)
            .map(|worker| scope.spawn(move || boots(worker)))
            .collect();
        workers.into_iter().try_for_each(|worker| {
            worker
                .join()
                .unwrap_or_else(|_| bail!("a thread of the soak panicked"))
        })
    })?;
    print!("{}", runs::summary(&runs::read(&asked.file)));
    let failed = &locked().failed;
    ensure!(
        failed.is_empty(),
        "seeds {failed:?} failed: tests/bench/run soak --only SEED repeats one"
    );
    Ok(())
}

/// A boot in a line.
fn outcome(run: &Run) -> String {
    let boot = run.description.point.map_or_else(
        || run.description.traits.join(", "),
        |point| point.to_string(),
    );
    let findings: Vec<String> = run
        .findings
        .iter()
        .map(|finding| format!("{}: {}", finding.kind, finding.text))
        .collect();
    let verdict = if run.holds() {
        "ok".into()
    } else {
        findings.join(" | ")
    };
    format!(
        "seed {}, {:.1} s, {boot}: {verdict}",
        run.description.seed, run.seconds
    )
}

pub fn hot_plug(context: &TestContext, actions: u64, seed: u64) -> Result<()> {
    let start = Instant::now();
    let said = soak::hot_plugs(context, actions, seed, "")?;
    ensure!(
        said.fault.is_empty(),
        "seed {seed}: {said:?}; logs: {}",
        context.work_dir.display()
    );
    let seconds = start.elapsed().as_secs();
    println!(
        "{actions} actions, seed {seed}, {seconds} s: no GPU lost, no name led to another one"
    );
    println!(
        "{} containers waited for a GPU and got it, {} comparisons of all names; {}",
        said.containers, said.checks, said.kinds
    );
    Ok(())
}
