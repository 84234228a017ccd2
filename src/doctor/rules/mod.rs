//! Why GPU guests start slowly on a host: rules over [`host_facts::HostFacts`], findings out. No
//! file is read here, and no text is for one terminal.
//!
//! All rules are in one table, [`RULES`](kata_gpu_report::analysis::rules::RULES), each with its
//! check in [`rule_table`]. `doctor` runs them; `show` reads which steps of a boot a cure shortens
//! ([`Rule::shortens`]).

pub mod checked; // what a rule answers
pub mod device_rules;
pub mod finding; // verdict, evidence, cost, cure
pub mod guest_rules;
pub mod host_facts; // files, Kata's configuration, VMs
pub mod kata_rules;
pub mod kernel_rules;
pub mod measured; // what own boots measured, and what no finding explains
pub mod memory_rules;
pub mod own_boots; // boots of this host as numbers
pub mod rule_table;
pub mod vm_rules; // what finds each rule

use checked::{Basis, Cost, Evidence, Gap, Look, Verdict};
use finding::Finding;
use host_facts::HostFacts;
use kata_gpu_report::analysis::rules::Rule;
use kata_gpu_report::data::text::clipped;
use own_boots::OwnBoots;
use rule_table::{Check, checks};
use std::cmp::Reverse;

/// Share of a model's seconds that own boots must at least show for the measurement to count: the
/// firmware can have done the same work before the steps.
const MEASURED_AT_LEAST: f64 = 0.1;

/// Findings of all rules: what was found first, by the boots here that failed for such a reason and
/// by seconds, then what is unknown, then what is fine.
pub fn diagnose(facts: &HostFacts) -> Vec<Finding> {
    let mut findings: Vec<Finding> = checks()
        .map(|(rule, check)| finding(rule, check, facts))
        .collect();
    let micros = |finding: &Finding| Reverse((finding.seconds() * 1e6) as u64);
    let failed = |finding: &Finding| Reverse(finding.failed_boots);
    findings.sort_by_key(|f| (f.verdict, failed(f), micros(f), f.cost.is_none(), f.sure));
    findings
}

fn finding(rule: &'static Rule, check: Check, facts: &HostFacts) -> Finding {
    let (verdict, look) = match check(facts) {
        Ok(look) if look.is_bad => (Verdict::Found, look),
        Ok(look) => (Verdict::Fine, look.evidence.into()),
        Err(Gap { verdict, why }) => (verdict, Look::default().cure(clipped(&why))),
    };
    // Evidence and gaps quote files: bounded and printable from here on.
    let clip = |e: Evidence| Evidence {
        from: clipped(&e.from),
        value: clipped(&e.value),
    };
    Finding {
        rule,
        verdict,
        evidence: look.evidence.into_iter().map(clip).collect(),
        cost: match verdict {
            Verdict::Found => best(rule, look.cost, &facts.boots),
            _ => None,
        },
        failed_boots: match verdict {
            Verdict::Found => facts.boots.failed_for(rule.explains),
            _ => 0,
        },
        text: look.cure,
        sure: look.sure,
    }
}

/// Cost that own boots measured, or else the rule's model.
fn best(rule: &Rule, model: Option<Cost>, boots: &OwnBoots) -> Option<Cost> {
    let at_least = match &model {
        Some(cost) if matches!(cost.basis, Basis::Measured(_)) => return model,
        Some(cost) => cost.seconds * MEASURED_AT_LEAST,
        None => 0.0,
    };
    let saved = boots.saved(rule.shortens);
    let Some(seconds) = saved.filter(|saved| *saved > 0.0 && *saved >= at_least) else {
        return model;
    };
    let steps: Vec<&str> = rule
        .shortens
        .iter()
        .map(|s| s.step)
        .filter(|step| boots.median(step).is_some())
        .collect();
    let of = format!(
        "{}, median of {} boot(s) here",
        steps.join(", "),
        boots.count
    );
    Cost::new(seconds, Basis::Measured(of))
}
