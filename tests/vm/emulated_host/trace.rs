//! A failure means that `kata-gpu-boot doctor --record` misses or misplaces the pins of a guest's
//! memory or of a BAR, or that a recorder, also a killed one, leaves or changes tracing of the
//! host.

use super::diagnosis;
use super::guests::Boot;
use super::service::PROGRAM;
use super::traced_boot::{Kernel, Pages, TRACEFS, TracedHost, Vfio};
use crate::vm::harness::{BOOTS, EmulatedHost, Outcome, Size, TestContext, VmTest};
use anyhow::{Context, Result, ensure};
use kata_gpu_report::boot::host_trace::HostStep;
use kata_gpu_report::boot::model::Boot as Model;
use kata_gpu_wire::catalogue::traced as traces;

pub const TESTS: &[VmTest] = &[VmTest {
    name: "emulated_host_traces_pins_and_keeps_no_tracing",
    run: traced,
}];

/// Everything of tracing that outlives a process: instances, probes, synthetic events.
const STATE: &str = "cd /sys/kernel/tracing && ls instances && cat kprobe_events synthetic_events";

fn traced(context: &TestContext) -> Result<Outcome> {
    if let Some(skipped) = EmulatedHost::skipped(context)? {
        return Ok(skipped);
    }
    let mut traced = TracedHost::start(context, Kernel::Own)?;
    let others = others_tracing(&mut traced.host)?;
    killed_and_cleaned_up(&mut traced, &others)?;
    traced.boot(Pages::Small, Vfio::Legacy)?;
    let cid = traced.cid();
    let host = &mut traced.host;
    let state = host.run(STATE)?;
    ensure!(
        state == others,
        "left behind: {state:?}, before: {others:?}"
    );
    let enabled = host.run(&format!(
        "cat {TRACEFS}/instances/others/events/sched/sched_process_exec/enable"
    ))?;
    ensure!(enabled == "1", "another's event is {enabled:?}");
    let figures = judge(host, &traced.function, cid)?;
    diagnosis::with_boots(host)?;
    Ok(Outcome::Measured(figures))
}

/// Tracing of somebody else's; gives the state of it.
fn others_tracing(host: &mut EmulatedHost) -> Result<String> {
    host.run(&format!(
        "cd {TRACEFS} && mkdir instances/others && echo 1 > \
        instances/others/events/sched/sched_process_exec/enable
        echo 'p:others/read vfs_read' >> kprobe_events && {STATE}"
    ))
}

/// Starts a recorder and kills it, then another one, which goes on.
fn killed_and_cleaned_up(traced: &mut TracedHost, others: &str) -> Result<()> {
    traced.record_next()?;
    let left = traced
        .host
        .run("kill -KILL $(cat /run/trace.pid) && cat /run/trace.pid")?;
    let state = traced.host.run(STATE)?;
    // Negative control: a killed recorder does leave something.
    ensure!(
        state != others && state.contains(&format!("kata_gpu_boot_{left}/pin")),
        "after SIGKILL: {state}"
    );
    traced.record_next()?;
    let log = traced.host.run("cat /run/trace.log")?;
    ensure!(
        log.contains(&format!("removed what recorder {left} left")),
        "{log}"
    );
    // The kernel of this host has no IOMMUFD.
    ensure!(log.contains("iommufd_fops_ioctl cannot be probed"), "{log}");
    let state = traced.host.run(STATE)?;
    ensure!(
        !state.contains(&format!("kata_gpu_boot_{left}/"))
            && !state.contains(&format!("kata-gpu-boot-{left}\n")),
        "{state}"
    );
    Ok(())
}

/// Checks the trace of the boot of the guest with this CID, and what every view makes of it.
fn judge(host: &mut EmulatedHost, function: &str, cid: u32) -> Result<String> {
    let id = host.run(&format!(
        "cd {BOOTS} && basename $(grep -lF '\"peer\":\"cid {cid}\"' *.ndjson) .ndjson"
    ))?;
    let text = host.run(&format!("cat {BOOTS}/{id}.trace"))?;
    let mut file = Boot::read(host, &id)?.file;
    file.read_trace(text.as_bytes())?;
    ensure!(file.damaged == 0, "{:?}", file.damage);
    let boot = Model::new(&file, &[]);
    let trace = boot.host.as_deref().context("no trace in the model")?;
    ensure!(
        (
            trace.recording.lost,
            trace.recording.unreadable,
            trace.not_placed
        ) == (0, 0, 0),
        "{:?}",
        trace.recording
    );
    let of = |name: &str| {
        trace
            .steps
            .iter()
            .filter(|step| step.traced.name == name)
            .collect::<Vec<_>>()
    };

    // QEMU's main thread pins the guest's memory before the guest runs.
    let memory = of(traces::VMM_PIN);
    let whole = |step: &&&HostStep| {
        step.traced.bytes == Some(512 << 20) && step.traced.tid == step.traced.pid
    };
    let first = memory
        .iter()
        .find(whole)
        .with_context(|| format!("no pin of all memory: {text}"))?;
    ensure!(
        first.begin_ns < 0 && first.traced.calls >= Some(1),
        "{first:?}"
    );
    // A vCPU's thread maps the BAR, page by page of the BAR's size.
    let bars = of(traces::VMM_MAP_BAR);
    let large = bars
        .iter()
        .find(|step| step.traced.bytes == Some(Size::BAR_BYTES))
        .with_context(|| format!("no large BAR: {text}"))?;
    ensure!(
        large
            .traced
            .function
            .is_some_and(|f| f.to_string() == function)
            && large.traced.bar == Some(2),
        "{large:?}"
    );
    ensure!(
        large.traced.thread.contains("/KVM") && large.traced.calls >= Some(1),
        "{large:?}"
    );
    let gpu = large.gpu.context("the guest's address is not known")?;
    ensure!(
        boot.gpus.iter().any(|g| g.address == gpu),
        "{gpu} is none of {:?}",
        boot.gpus
    );
    let opened = of(traces::VFIO_OPEN);
    ensure!(
        opened.iter().any(|step| step
            .traced
            .function
            .is_some_and(|f| f.to_string() == function)),
        "{opened:?}"
    );
    ensure!(
        of(traces::VMM_START).len() == 1 && !of(traces::VFIO_RESET).is_empty(),
        "{text}"
    );
    // The shim's start, and its share until the VMM's.
    let (shims, vmm) = (of(traces::SHIM), &of(traces::VMM_START)[0]);
    ensure!(
        shims.len() == 1
            && shims[0].begin_ns < vmm.begin_ns
            && shims[0].end_ns().abs_diff(vmm.begin_ns) < 1_000_000,
        "{shims:?} {vmm:?}"
    );
    let exits = trace
        .counts
        .iter()
        .find(|count| count.traced.name == traces::KVM_EXITS)
        .context("no exits")?;
    ensure!(
        exits.traced.kinds.contains_key("pio") && exits.traced.kinds.contains_key("pio-us"),
        "{exits:?}"
    );

    let show = host.run(&format!("{PROGRAM} show {id} --dir {BOOTS} -v"))?;
    ensure!(
        show.contains("vmm.pin") && show.contains("vmm.map-bar BAR 2"),
        "{show}"
    );
    let gaps = host.run(&format!(
        "{PROGRAM} show {id} --dir {BOOTS} --by gap --json"
    ))?;
    ensure!(gaps.contains("\"processes start\""), "{gaps}");
    let share = boot
        .coverage
        .as_ref()
        .context("no coverage")?
        .unexplained_share;
    let otlp = host.run(&format!("{PROGRAM} show {id} --dir {BOOTS} --otlp"))?;
    ensure!(otlp.contains("\"vmm.map-bar\""), "no such span");
    Ok(format!(
        "memory {:.2} s in {} call(s), BAR {:.2} s in {} call(s), {} times mapped; {} event(s); \
        {} exits; {share:.1} % unexplained",
        first.traced.took_ns as f64 / 1e9,
        first.traced.calls.unwrap_or(0),
        large.traced.took_ns as f64 / 1e9,
        large.traced.calls.unwrap_or(0),
        bars.iter()
            .filter(|step| step.traced.bytes == Some(Size::BAR_BYTES))
            .count(),
        trace.recording.events,
        exits.traced.calls.unwrap_or(0),
    ))
}
