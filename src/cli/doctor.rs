//! `kata-gpu-boot doctor`: what makes GPU guests start slowly on this host, and its cure; and a
//! recording of the host's share of one boot.

use super::boots::{OF_THE_UNIT, block_on, json as plain_json, not_read};
use anyhow::{Context, Result};
use kata_gpu_doctor::facts::{Depth, boots, facts_at};
use kata_gpu_doctor::recorder::recording::{self, Target, Wanted};
use kata_gpu_doctor::recorder::{boot_of_vm, report};
use kata_gpu_doctor::rules::diagnose;
use kata_gpu_doctor::rules::finding::{Basis, Finding, Sure, Verdict};
use kata_gpu_doctor::rules::host_facts::HostFacts;
use kata_gpu_doctor::rules::kernel_rules::RELEASE;
use kata_gpu_doctor::rules::measured::Measured;
use kata_gpu_report::analysis::statistics::Summary;
use kata_gpu_report::data::host_check::{EVERY, HostCheck};
use kata_gpu_report::data::text::{Ink, Screen, ascii_json, clipped, printable, wrap};
use kata_gpu_report::terminal::stdout::print;
use kata_gpu_report::views::grid::{Grid, Set};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

const HELP: &str = "\
Reads and changes nothing, and starts no program. SECONDS is what the cure saves
of one boot: `measured` by this host's boots in --dir, else by a `model`, whose
source -v names. Do not add them up: several findings can be about the same
seconds. `unsure`: a version that distributions patch, or a figure that its
author doubts. What cannot be seen is unknown, never fine; root sees more.

--record needs root and probes of the kernel (CONFIG_KPROBE_EVENTS). It records
who pins and maps which memory and BARs, resets, exits that the VMM answers,
faults and memory, until the guest's GPUs are settled, the VM ends, --for is
over, or Ctrl-C. The file goes to --dir, next to the boot's, for `show`.

Exit status: 0 nothing found, 1 something found, 2 cannot examine or record.

Examples:
  sudo kata-gpu-boot doctor --dir /var/lib/kata-gpu-boot
  # a gate: nothing that costs more than 2 s
  kata-gpu-boot doctor --dir /var/lib/kata-gpu-boot --at-most 2
  # in a container that has the node's / under /host, read-only
  kata-gpu-boot doctor --root /host
  # the next pod that starts on this node; a running VM
  kata-gpu-boot doctor --record --dir /var/lib/kata-gpu-boot
  kata-gpu-boot doctor --record --vm 0a1b2c3d --for 60";

/// Show what makes GPU guests start slowly on this host, and its cure.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    /// Directory that the collector writes to [default: that of the systemd unit, if it is there].
    #[arg(long, env = "KATA_GPU_BOOT_DIR", hide_env_values = true)]
    dir: Option<PathBuf>,
    /// Root of the host's files.
    #[arg(long, default_value = "/")]
    root: PathBuf,
    /// Kata's configuration, below --root [default: the first of Kata's usual ones for GPUs].
    #[arg(long, value_name = "FILE")]
    kata_config: Option<PathBuf>,
    /// Exit with status 1 only if something found costs more seconds.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    at_most: Option<f64>,
    /// Show every rule, with evidence and source.
    #[arg(short, long)]
    verbose: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Check every 10 minutes, and leave the seconds in --dir for the collector's metrics; omits
    /// files whose reading holds up guests.
    #[arg(long, requires = "dir", conflicts_with_all = ["json", "at_most", "verbose"])]
    daemonset_check: bool,
    /// Record what the host does for one VM: the next one of Kata, or with functions of VFIO.
    #[arg(
        long,
        conflicts_with_all = ["root", "kata_config", "at_most", "verbose", "daemonset_check"]
    )]
    record: bool,
    /// Record the running VM of this sandbox: Kata's id, its beginning is enough.
    #[arg(long, value_name = "SANDBOX", requires = "record")]
    vm: Option<String>,
    /// Record the VM of this process.
    #[arg(long, value_name = "PID", requires = "record", conflicts_with = "vm")]
    pid: Option<u32>,
    /// End the recording after so many seconds [default: 900].
    #[arg(
        long = "for", value_name = "SECONDS", requires = "record",
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    limit: Option<u64>,
}

/// Characters of a boot's id that are shown.
const SHORT_ID: usize = 8;

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds >= 0.0 => Ok(seconds),
        _ => Err("give seconds, like 2 or 0.5".into()),
    }
}

/// The collector's directory, if there is one.
fn dir(args: &Args) -> Option<PathBuf> {
    let of_the_unit = || Some(PathBuf::from(OF_THE_UNIT)).filter(|dir| dir.is_dir());
    args.dir.clone().or_else(of_the_unit)
}

/// A host as its rules see it.
struct Diagnosis {
    facts: HostFacts,
    findings: Vec<Finding>,
    /// Measurements of the boots, if there is a directory of them.
    measured: Option<Measured>,
    /// Files of boots that could not be read.
    unread: Vec<String>,
}

/// Runs all rules on a host.
fn diagnosis(args: &Args) -> Result<Diagnosis> {
    let mut facts = facts_at(&args.root, args.kata_config.as_deref(), Depth::Full)?;
    let mut unread = Vec::new();
    let dir = dir(args);
    if let Some(dir) = &dir {
        (facts.boots, unread) = boots(dir)?;
    }
    let findings = diagnose(&facts);
    Ok(Diagnosis {
        measured: dir.map(|_| Measured::of(&facts.boots, &findings)),
        findings,
        facts,
        unread,
    })
}

/// Checks again and again until a signal to stop.
async fn check_again_and_again(args: &Args, dir: &Path) -> Result<bool> {
    let (mut terminate, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    loop {
        // A collector without a boot yet is no error.
        let (boots, _) = boots(dir).unwrap_or_default();
        let facts = HostFacts {
            boots,
            ..facts_at(&args.root, args.kata_config.as_deref(), Depth::Light)?
        };
        let found = diagnose(&facts)
            .into_iter()
            .filter(|f| f.verdict == Verdict::Found);
        let check = HostCheck::now(
            found
                .map(|f| (f.rule.id.to_string(), f.seconds()))
                .collect(),
        );
        match check.write(dir) {
            Ok(()) => println!(
                "{} rule(s) found something: {:?}",
                check.findings.len(),
                check.findings
            ),
            // A full disk has room again.
            Err(error) => eprintln!("kata-gpu-boot: {error:#}"),
        }
        tokio::select! {
            _ = terminate.recv() => return Ok(false),
            _ = interrupt.recv() => return Ok(false),
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

/// Runs `doctor`.
pub fn run(args: &Args) -> ExitCode {
    let once = || {
        let diagnosis = diagnosis(args)?;
        print(&match args.json {
            true => json_form(&diagnosis)?,
            false => page(args, &diagnosis, &Screen::of_stdout()),
        })?;
        // Something that was found, or that costs more than --at-most.
        let costs = |f: &Finding| args.at_most.is_none_or(|most| f.seconds() > most);
        let mut findings = diagnosis.findings.iter();
        Ok(findings.any(|f| f.verdict == Verdict::Found && costs(f)))
    };
    let done = match &args.dir {
        _ if args.record => record(args).map(|()| false),
        Some(dir) if args.daemonset_check => block_on(check_again_and_again(args, dir)),
        _ => once(),
    };
    match done {
        Ok(found) => ExitCode::from(u8::from(found)),
        Err(error) => {
            let what = if args.record {
                "cannot record"
            } else {
                "cannot examine this host"
            };
            eprintln!(
                "kata-gpu-boot: {what}: {}",
                printable(&format!("{error:#}"))
            );
            ExitCode::from(2)
        }
    }
}

/// Records one VM and prints the recording.
fn record(args: &Args) -> Result<()> {
    let target = match (&args.vm, args.pid) {
        (Some(sandbox), _) => Target::Vm(sandbox.clone()),
        (None, Some(pid)) => Target::Pid(pid),
        (None, None) => Target::Next,
    };
    let wanted = Wanted {
        target,
        dir: args.dir.clone().unwrap_or_else(|| OF_THE_UNIT.into()),
        limit: Duration::from_secs(args.limit.unwrap_or(900)),
    };
    let recorded = recording::record(&wanted)?;
    let boot = recorded.boot.as_ref();
    let written = boot
        .map(|boot| boot_of_vm::write(boot, &recorded))
        .transpose();
    let file = written.as_ref().ok().and_then(Option::as_ref);
    let text = match args.json {
        true => ascii_json(&json!({
            "trace": 1, "file": file, "recording": recorded.recording, "traced": recorded.traced,
        }))?,
        false => report::lines(&recorded, &Screen::of_stdout()).join("\n") + "\n",
    };
    print(&text)?;
    match written.context("the recording is printed, but not kept")? {
        Some(file) => eprintln!("kata-gpu-boot: wrote {}", file.display()),
        None => eprintln!(
            "kata-gpu-boot: no boot of this VM in {}: name the collector's directory with --dir",
            wanted.dir.display()
        ),
    }
    Ok(())
}

fn basis(finding: &Finding) -> (&'static str, &str) {
    match finding.cost.as_ref().map(|cost| &cost.basis) {
        Some(Basis::Measured(of)) => ("measured", of),
        Some(Basis::Model(of)) => ("model", of),
        None => ("", ""),
    }
}

fn page(args: &Args, diagnosis: &Diagnosis, screen: &Screen) -> String {
    let Diagnosis {
        facts,
        findings,
        measured,
        unread,
    } = diagnosis;
    let mut out = vec![head(args, facts), String::new()];
    if let Some(measured) = measured {
        out.extend(measured_lines(measured, unread.len(), screen));
        out.push(String::new());
    }
    let of = |verdict: Verdict| findings.iter().filter(move |f| f.verdict == verdict);
    let mut grid = Grid::new(&[
        ("SECONDS", Set::Right),
        ("BASIS", Set::Left),
        ("RULE", Set::Left),
        ("WHAT", Set::Left),
    ]);
    for finding in of(Verdict::Found) {
        let seconds = finding
            .cost
            .as_ref()
            .map_or("?".to_string(), |cost| format!("{:.3}", cost.seconds));
        let unsure = if finding.sure == Sure::Unsure {
            " (unsure)"
        } else {
            ""
        };
        let ink = if finding.seconds() >= 1.0 {
            Ink::Error
        } else {
            Ink::Warning
        };
        grid.row(
            ink,
            vec![
                seconds,
                basis(finding).0.into(),
                finding.rule.id.into(),
                format!("{}{unsure}", finding.rule.title),
            ],
        );
    }
    let mut lines = grid.lines(screen).into_iter();
    if of(Verdict::Found).next().is_none() {
        out.push(screen.paint(Ink::Good, "Nothing found."));
    } else {
        out.extend(lines.next());
    }
    // Each row of the table is followed by what belongs to it.
    for (line, finding) in lines.zip(of(Verdict::Found)) {
        out.push(line);
        if finding.failed_boots > 0 {
            let boots = format!("{} of {}", finding.failed_boots, facts.boots.count);
            let reasons = finding.rule.explains.iter();
            let reasons = reasons.filter(|reason| facts.boots.failed_for(&[**reason]) > 0);
            let reasons: Vec<&str> = reasons.map(|reason| reason.name()).collect();
            let text = format!("{boots} boots failed so: {}", reasons.join(", "));
            out.extend(wrapped("", &text, screen));
        }
        out.extend(wrapped("cure: ", &finding.text, screen));
        if args.verbose {
            out.extend(details(finding, screen));
        }
    }
    out.push(String::new());
    for (title, verdict) in [
        ("unknown", Verdict::Unknown),
        ("needs root", Verdict::NeedsRoot),
        ("fine", Verdict::Fine),
    ] {
        if args.verbose {
            for finding in of(verdict) {
                out.push(format!("{title}: {}", finding.rule.id));
                if !finding.text.is_empty() {
                    out.extend(wrapped("", &finding.text, screen));
                }
                out.extend(details(finding, screen));
            }
        } else {
            let ids: Vec<&str> = of(verdict).map(|f| f.rule.id).collect();
            if !ids.is_empty() {
                out.extend(wrapped_from(
                    0,
                    &format!("{title}: "),
                    &ids.join(", "),
                    screen,
                ));
            }
        }
    }
    let counts = [
        (Verdict::Found, "found something"),
        (Verdict::Unknown, "unknown"),
        (Verdict::NeedsRoot, "need root"),
        (Verdict::Fine, "fine"),
    ];
    let counts: Vec<String> = counts
        .into_iter()
        .map(|(verdict, what)| (of(verdict).count(), what))
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
    let more = if args.verbose {
        ""
    } else {
        "; -v has evidence and reasons"
    };
    out.push(format!(
        "{} rules: {}{more}",
        findings.len(),
        counts.join(", ")
    ));
    not_read(unread, screen, &mut out);
    out.join("\n") + "\n"
}

fn head(args: &Args, facts: &HostFacts) -> String {
    let release = facts.files.text(RELEASE).unwrap_or("of unknown version");
    let boots = match dir(args) {
        Some(dir) => format!("{} boot(s) in {}", facts.boots.count, dir.display()),
        None => "no boots (--dir)".to_string(),
    };
    clipped(&format!(
        "host: Linux {release}, {} GPU(s), {} VM(s) with devices, {boots}",
        facts.gpus().len(),
        facts.vms.len()
    ))
}

/// Measurements of the boots, in at most six lines.
fn measured_lines(measured: &Measured, unread: usize, screen: &Screen) -> Vec<String> {
    let seconds = |ns: i64| format!("{:.1}", ns as f64 / 1e9);
    let mut first = format!("{} boot(s) here", measured.boots);
    if measured.implausible > 0 {
        let more = measured.implausible;
        first += &format!("; {more} more with impossible numbers, in no number below");
    }
    if unread > 0 {
        first += &format!("; {unread} not read");
    }
    let mut lines = vec![first];
    let mut times = |what: &str, summary: Option<Summary>| {
        lines.extend(summary.map(|s| {
            let (median, p95) = (seconds(s.median_ns), seconds(s.p95_ns));
            format!("{what}: median {median} s, P95 {p95} s, of {} boot(s)", s.n)
        }));
    };
    times("GPUs settled", measured.settled);
    times("first container", measured.first_container);
    if !measured.longest.is_empty() {
        let phases = measured.longest.iter().map(|phase| {
            let share = phase
                .share
                .map_or(String::new(), |s| format!(" ({s:.0} %)"));
            format!("{} {} s{share}", phase.phase, seconds(phase.median_ns))
        });
        lines.push(format!(
            "longest: {}",
            phases.collect::<Vec<_>>().join(", ")
        ));
    }
    if measured.failed > 0 {
        let reasons = measured.failures.iter();
        let reasons: Vec<String> = reasons
            .map(|f| format!("{} {}", f.reason, f.boots))
            .collect();
        let failed = measured.failed;
        lines.push(format!("failed: {failed} boot(s): {}", reasons.join(", ")));
    }
    lines.extend(measured.unexplained.as_ref().map(|part| {
        let boot: String = part.boot.chars().take(SHORT_ID).collect();
        format!(
            "{} of {} s has no cure among the findings: show --by gap {boot}",
            seconds(part.by_no_finding_ns),
            seconds(part.of_ns)
        )
    }));
    let lines = lines.iter();
    lines
        .flat_map(|line| wrapped_from(0, "", line, screen))
        .collect()
}

fn details(finding: &Finding, screen: &Screen) -> Vec<String> {
    let seen = finding
        .evidence
        .iter()
        .map(|e| format!("{}: {}", e.from, e.value));
    let (name, of) = basis(finding);
    let mut out: Vec<String> = seen
        .flat_map(|text| wrapped("seen: ", &clipped(&text), screen))
        .collect();
    if !of.is_empty() {
        out.extend(wrapped(&format!("{name}: "), of, screen));
    }
    out.extend(wrapped("source: ", finding.rule.source, screen));
    out
}

/// Indented lines that end at a space before the terminal does.
fn wrapped(label: &str, text: &str, screen: &Screen) -> Vec<String> {
    wrapped_from(9, label, text, screen)
}

fn wrapped_from(indent: usize, label: &str, text: &str, screen: &Screen) -> Vec<String> {
    let width = screen.width.unwrap_or(usize::MAX).saturating_sub(1);
    let (first, further) = (format!("{:indent$}{label}", ""), " ".repeat(indent + 2));
    wrap(&first, &further, &printable(text), width)
        .iter()
        .map(|line| screen.paint(Ink::Dim, line))
        .collect()
}

fn json_form(diagnosis: &Diagnosis) -> Result<String> {
    let row = |f: &Finding| {
        let mut row = json!({
            "rule": f.rule.id,
            "area": f.rule.area,
            "title": f.rule.title,
            "verdict": f.verdict,
            "explains": f.rule.explains.iter().map(|reason| reason.name()).collect::<Vec<_>>(),
            "evidence": f.evidence,
            "source": f.rule.source,
        });
        if f.verdict == Verdict::Found {
            row["sure"] = json!(f.sure);
            row["cure"] = json!(f.text);
            row["failed_boots"] = json!(f.failed_boots);
        } else if !f.text.is_empty() {
            // Why it is unknown, or the path that needs root.
            row["why"] = json!(f.text);
        }
        if let (Some(cost), (basis, of)) = (&f.cost, basis(f)) {
            row["seconds"] = json!(cost.seconds);
            row["basis"] = json!(basis);
            row["of"] = json!(of);
        }
        row
    };
    let findings: Vec<_> = diagnosis.findings.iter().map(row).collect();
    let gpus: Vec<String> = diagnosis
        .facts
        .gpus()
        .iter()
        .map(|gpu| gpu.address.to_string())
        .collect();
    let mut form = json!({
        "gpus": gpus,
        "boots": diagnosis.facts.boots.count,
        "findings": findings,
        "unread": diagnosis.unread,
    });
    if let Some(measured) = &diagnosis.measured {
        form["measured"] = json!(measured);
    }
    plain_json(&form)
}
