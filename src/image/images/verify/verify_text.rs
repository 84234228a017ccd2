//! The report as text: the image, its bytes by component, its findings, and the verdict.

use super::image_rules::{Finding, Rule};
use super::services::Services;
use super::{Needed, Report};
use crate::images::components::sizes_text;
use crate::images::disk_image::hash_tree::State;
use crate::images::entry_text::{megabytes, table};
use kata_gpu_report::data::text::{Ink, Screen, printable, wrap};
use kata_gpu_report::severity::Severity;

/// Shown findings of one rule; further ones are counted.
const SHOWN_OF_A_RULE: usize = 5;
const HEAD: usize = 8;

pub fn page(report: &Report, screen: &Screen) -> String {
    let mut out = String::new();
    let mut line = |head: &str, text: String| {
        out.push_str(&format!(
            "{}{text}\n",
            screen.paint(Ink::Dim, &format!("{head:<HEAD$}"))
        ))
    };
    let entries = if report.entries == 1 {
        "1 entry".to_string()
    } else {
        format!("{} entries", report.entries)
    };
    line(
        "image",
        format!(
            "{}, {}, {entries}",
            megabytes(report.bytes),
            report.form.name()
        ),
    );
    line("init", needed(&report.init));
    line("agent", needed(&report.agent));
    let kernels = if report.releases.is_empty() {
        "no modules".to_string()
    } else {
        format!(
            "{}, {} modules",
            printable(&report.releases.join(", ")),
            report.modules
        )
    };
    line("kernel", kernels);
    let module = report.driver.as_ref().map_or("no module".to_string(), |d| {
        format!(
            "module {}",
            d.version
                .as_deref()
                .map_or("of no version".into(), printable)
        )
    });
    let user_space = report
        .user_space
        .as_deref()
        .map_or("user space not checked, or none".into(), |v| {
            format!("user space {v}")
        });
    line(
        "driver",
        if report.driver_elsewhere {
            "none: it comes on the extension disk `gpu`".into()
        } else {
            format!("{module}, {user_space}")
        },
    );
    if let Some(state) = &report.hash_tree {
        line(
            "verity",
            match state {
                State::Fits => "the hash tree in the second partition fits the root".into(),
                State::Wrong(_) => "the hash tree does not fit".into(),
                State::Unknown => "not checked: no FILE.verity beside the image".into(),
            },
        );
    }
    out.push('\n');
    out.push_str(&sizes_text(&report.sizes, screen));
    if let Some(found) = &report.services {
        out.push('\n');
        services(&mut out, found, screen);
    }
    if !report.findings.is_empty() {
        out.push('\n');
        findings(&mut out, &report.findings, screen);
    }
    let (ink, verdict) = if report.boots() {
        (Ink::Good, "nothing keeps it from booting")
    } else {
        (Ink::Error, "it cannot boot as a guest with GPUs")
    };
    out.push_str(&format!(
        "\n{}: {}\n",
        screen.paint(ink, verdict),
        report.counts()
    ));
    out
}

fn needed(needed: &Needed) -> String {
    let linked = if needed.linked.is_empty() {
        "no program"
    } else {
        needed.linked
    };
    match &needed.file {
        None => format!("{}: missing", needed.path),
        Some(file) if *file == needed.path => format!("{file}, {} bytes, {linked}", needed.bytes),
        Some(file) => format!(
            "{} -> {file}, {} bytes, {linked}",
            needed.path, needed.bytes
        ),
    }
}

/// Services that each topology starts, and the reasons why others cannot start.
fn services(out: &mut String, services: &Services, screen: &Screen) {
    let mut rows = vec![["TOPOLOGY", "SERVICES"].map(str::to_string).to_vec()];
    rows.extend(services.cases.iter().map(|case| {
        let (has, lacks) = services.split(case);
        let parts = [("starts", has), ("lacks", lacks)]
            .into_iter()
            .filter(|(_, names)| !names.is_empty());
        let parts: Vec<String> = parts
            .map(|(word, names)| {
                format!(
                    "{word} {}",
                    names
                        .iter()
                        .map(|name| name.name())
                        .collect::<Vec<_>>()
                        .join(", ")
                )
            })
            .collect();
        vec![
            case.title(),
            if parts.is_empty() {
                "none are started".into()
            } else {
                parts.join("; ")
            },
        ]
    }));
    out.push_str(&table(&rows, &[], screen));
    for (name, lacks) in services.lacking() {
        out.push_str(&format!("lacking {name}\n"));
        wrapped(out, &printable(&lacks), Ink::Dim, screen);
    }
}

/// Findings by rule: the paths, and once the effect and the cure.
fn findings(out: &mut String, all: &[Finding], screen: &Screen) {
    for of_rule in all.chunk_by(|a, b| a.rule == b.rule) {
        for finding in of_rule.iter().take(SHOWN_OF_A_RULE) {
            let rule = finding.rule;
            out.push_str(&format!(
                "{} {}  {}\n",
                screen.paint(ink(rule), &format!("{:<7}", rule.severity.name())),
                rule.name,
                finding.place()
            ));
        }
        if of_rule.len() > SHOWN_OF_A_RULE {
            out.push_str(&format!(
                "        {} more of these (--json has all)\n",
                of_rule.len() - SHOWN_OF_A_RULE
            ));
        }
        if let Some(Finding { rule, .. }) = of_rule.first() {
            wrapped(out, rule.breaks, Ink::Plain, screen);
            wrapped(out, rule.cure, Ink::Dim, screen);
        }
    }
}

fn ink(rule: &Rule) -> Ink {
    match rule.severity {
        Severity::Error => Ink::Error,
        Severity::Warning => Ink::Warning,
        Severity::Note => Ink::Dim,
    }
}

/// Indents, and wraps at spaces if the screen has a width.
fn wrapped(out: &mut String, text: &str, ink: Ink, screen: &Screen) {
    let width = screen
        .width
        .map_or(usize::MAX, |w| w.saturating_sub(HEAD).max(20));
    for line in wrap("", "", text, width) {
        out.push_str(&format!("        {}\n", screen.paint(ink, &line)));
    }
}

/// A line for each rule.
pub fn rules(rules: &[&Rule], screen: &Screen) -> String {
    let mut rows = vec![["RULE", "SEVERITY", "EFFECT"].map(str::to_string).to_vec()];
    rows.extend(rules.iter().map(|r| {
        [r.name, r.severity.name(), r.breaks]
            .map(str::to_string)
            .to_vec()
    }));
    table(&rows, &[], screen)
}
