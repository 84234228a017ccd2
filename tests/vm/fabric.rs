//! Stand-ins of a fabric: what fabric manager, persistenced and NVML make of the simulated driver's
//! state, and what the incumbent's order makes of their times.

use super::harness::{CONFIDENTIAL, Guest, Outcome, TestContext, VmTest, named};
use super::services::with_services;
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::fabric::FabricState;
use kata_gpu_wire::names;
use kata_gpu_wire::nvml_messages::{Answer, Facts};
use kata_gpu_wire::record::Kind;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "nvml_reports_the_drivers_fabric_and_ready_state",
        run: nvml,
    },
    VmTest {
        name: "fabric_manager_completes_the_fabric_after_the_last_gpu",
        run: completes,
    },
];

const STATE: &str = "/sys/module/nvidia/parameters/fabric_state";

fn nvml(context: &TestContext) -> Result<Outcome> {
    let words = "fakepci.gpus=2 nvidia.fabric_state=1 nvidia.fabric_status=0,999 \
        nvidia.fabric_health=1,0 nvidia.cc=1";
    let script = "gpu.usable/1>nvml:facts+fabric:2,3+nvml:ready_on+nvml:facts";
    let guest = Guest::new().nvml().append(words).append(CONFIDENTIAL);
    let booted = guest
        .append(&format!("testagent.guest=script testagent.script={script}"))
        .boot(context, "states")?;
    booted.agent("script", |l| {
        l.get("did") == "nvml:ready_on" && l.get("error").is_empty()
    })?;
    booted
        .console
        .wait_agent_any(super::harness::DEADLINE, |l| {
            l.get("did") == "nvml:facts" && booted_facts(&booted).len() == 2
        });
    let facts = booted_facts(&booted);
    let [before, after] = facts.as_slice() else {
        anyhow::bail!("{} answers with facts", facts.len())
    };
    let states = |facts: &Facts| -> Vec<(FabricState, u32, Option<u32>)> {
        let fabrics = facts
            .devices
            .iter()
            .filter_map(|device| device.fabric.as_ref());
        fabrics
            .map(|fabric| (fabric.state, fabric.status, fabric.health))
            .collect()
    };
    let (first, second) = ((0, Some(1)), (999, Some(0)));
    let wanted = |one, other| vec![(one, first.0, first.1), (other, second.0, second.1)];
    ensure!(
        states(before) == wanted(FabricState::NotStarted, FabricState::NotStarted),
        "{:?}",
        states(before)
    );
    ensure!(
        states(after) == wanted(FabricState::InProgress, FabricState::Completed),
        "{:?}",
        states(after)
    );
    let ready = |facts: &Facts| {
        facts
            .confidential
            .as_ref()
            .map(|c| (c.enabled, c.protected_pcie, c.ready))
    };
    ensure!(
        ready(before) == Some((true, false, false)),
        "{:?}",
        ready(before)
    );
    ensure!(
        ready(after) == Some((true, false, true)),
        "{:?}",
        ready(after)
    );
    Ok(Outcome::Passed)
}

/// Answers with facts that the script has reported.
fn booted_facts(booted: &super::harness::Booted) -> Vec<Facts> {
    let lines = booted.console.agent_lines();
    let answers = lines
        .iter()
        .filter(|l| l.get("msg") == "nvml")
        .filter_map(|l| serde_json::from_str(l.get("answer")).ok());
    answers
        .filter_map(|answer| {
            if let Answer::Facts(facts) = answer {
                Some(*facts)
            } else {
                None
            }
        })
        .collect()
}

fn completes(context: &TestContext) -> Result<Outcome> {
    // GPU 0 is up long before GPU 1.
    let words = "fakepci.gpus=2 fakepci.switches=2 nvidia.switches=2 nvidia.fabric_state=1 \
        nvidia.s2_ms=30,1500 gpuinit.init=serial";
    for (case, fault, state) in [("all", "", "3,3"), ("one", "+never-completes:1", "3,2")] {
        let script =
            format!("gpu.usable/0>file:{STATE};gpu.usable/1>file-has:{STATE}=,+file:{STATE}");
        let words = format!(
            "{words} standin.nv-fabricmanager=fabric:50{fault} testagent.guest=script \
            testagent.script={script}"
        );
        let booted = with_services(Guest::new())
            .append(&words)
            .boot(context, case)?;
        let last = booted.agent("file", |l| {
            l.get("path") == STATE && l.get("text").contains(',')
        })?;
        ensure!(
            last.get("text").trim() == state,
            "{case}: {}",
            last.get("text")
        );
        let states: Vec<_> = booted
            .console
            .agent_lines()
            .iter()
            .filter(|l| l.get("msg") == "file")
            .map(|l| l.get("text").to_string())
            .collect();
        ensure!(
            states.first().is_some_and(|first| !first.contains('3')),
            "{case}: complete before the last GPU was up: {states:?}"
        );
        let done = booted.record("fabric manager's line", |r| {
            r.name == names::SERVICE_LOG
                && r.fields
                    .get("text")
                    .is_some_and(|t| t.to_string().contains("configured all"))
        })?;
        let records = booted.receiver.records();
        let usable = named(&records, Kind::Event, names::GPU_USABLE)
            .iter()
            .map(|r| r.boottime_ns)
            .max()
            .context("no GPU is usable")?;
        ensure!(
            done.boottime_ns > usable,
            "{case}: complete {} ns before the last GPU",
            usable - done.boottime_ns
        );
    }
    Ok(Outcome::Passed)
}
