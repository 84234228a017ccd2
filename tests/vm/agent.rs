//! A failure means that the test agent lets a fault of an init pass that would stop kata-agent, or
//! logs what kata-agent does not: then the other tests of this folder would show nothing.

use super::harness::{AgentLine, Booted, DEADLINE, Guest, Outcome, TestContext, VmTest};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "the_test_agent_takes_an_init_without_faults",
        run: no_trap,
    },
    VmTest {
        name: "the_test_agent_says_on_the_console_what_the_real_one_says",
        run: says_what_the_real_one_says,
    },
    VmTest {
        name: "the_test_agent_powers_off_silently_on_the_agents_traps",
        run: silent,
    },
    VmTest {
        name: "a_spec_on_a_run_of_another_type_is_covered",
        run: covered,
    },
    VmTest {
        name: "a_blocked_sigchld_leaves_the_dead_unreaped",
        run: blocked,
    },
];

fn boot(context: &TestContext, trap: &str, words: &str) -> Result<Booted> {
    // No GPU: the init of these guests starts none.
    let own = format!("hardware.init=/trap-init trap_init.trap={trap} fakepci.gpus=0 {words}");
    let booted = Guest::with(&own).boot(context, trap)?;
    let done = format!("trap-init: {trap}: done");
    ensure!(
        booted.console.wait_text(DEADLINE, &done),
        "the console does not say \"{done}\""
    );
    Ok(booted)
}

/// The negative control of all below.
fn no_trap(context: &TestContext) -> Result<Outcome> {
    let mut booted = boot(
        context,
        "none",
        "testagent.containers=zero:0 testagent.guest=child",
    )?;
    let ready = booted.agent("ttRPC server started", |_| true)?;
    ensure!(
        ready.get("pid") == "1" && ready.get("address") == "vsock://-1:1024",
        "agent ready: pid {}, address {}",
        ready.get("pid"),
        ready.get("address")
    );
    let zero = booted.created("zero")?;
    ensure!(
        zero.get("tries") == "1" && zero.get("nodes") == "/dev/zero 1:5 666",
        "tries {}, nodes {}",
        zero.get("tries"),
        zero.get("nodes")
    );
    let child = booted.agent("child has ended", |_| true)?;
    booted.agent("child exited unexpectedly", |l| {
        l.get("child-pid") == child.get("child-pid")
    })?;
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

/// The shape of a line: its keys, and the words before what differs from boot to boot.
fn shape(line: &AgentLine) -> (Vec<&str>, String) {
    let words = line
        .get("msg")
        .split(|c: char| c.is_ascii_digit() || "{[\"/".contains(c))
        .next()
        .unwrap_or_default();
    (line.keys().collect(), words.trim_end().to_string())
}

/// The lines that tests read are those of another program.
fn says_what_the_real_one_says(context: &TestContext) -> Result<Outcome> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/fixtures/agent/kata-agent-4.1.0-info.console"
    );
    let recorded = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    let real: Vec<AgentLine> = recorded.lines().filter_map(AgentLine::parse).collect();
    let known: BTreeSet<_> = real.iter().map(shape).collect();
    let booted = Guest::with("testagent.cost=real testagent.containers=first:0;all:all")
        .boot(context, "words")?;
    booted.created("first")?;
    booted.created("all")?;
    let lines = booted.lines();
    let own: Vec<&AgentLine> = lines
        .iter()
        .filter(|line| line.get("name") == "kata-agent")
        .collect();
    let odd: Vec<&&AgentLine> = own
        .iter()
        .filter(|line| !known.contains(&shape(line)))
        .collect();
    ensure!(odd.is_empty(), "the real one says no such lines: {odd:?}");
    let kinds: BTreeSet<_> = own.iter().map(|line| shape(line).1).collect();
    ensure!(kinds.len() > 10, "only {kinds:?}");
    ensure!(
        lines
            .iter()
            .filter(|line| line.get("name") != "kata-agent")
            .all(|line| !known.contains(&shape(line))),
        "a note is taken for a line"
    );
    Ok(Outcome::Measured(format!(
        "{} lines of {} kinds",
        own.len(),
        kinds.len()
    )))
}

fn silent(context: &TestContext) -> Result<Outcome> {
    for trap in ["session", "ptmx", "root"] {
        let mut booted = boot(context, trap, "")?;
        booted.exit()?;
        let console = booted.console.text();
        ensure!(
            console.contains("reboot: Power down"),
            "{trap}: the guest ended otherwise than by power-off"
        );
        let lines = booted.lines();
        ensure!(lines.is_empty(), "{trap}: the agent said {lines:?}");
    }
    Ok(Outcome::Passed)
}

fn covered(context: &TestContext) -> Result<Outcome> {
    let booted = boot(
        context,
        "run",
        "testagent.containers=zero:0 agent.cdi_timeout=1",
    )?;
    let line = booted.refused("zero")?;
    ensure!(
        line.get("tries") == "2" && line.get("error").contains("after CDI timeout of 1 seconds"),
        "error: {}",
        line.get("error")
    );
    Ok(Outcome::Passed)
}

fn blocked(context: &TestContext) -> Result<Outcome> {
    let mut booted = boot(
        context,
        "sigchld",
        "testagent.guest=child testagent.poweroff=on",
    )?;
    booted.agent("child has ended", |_| true)?;
    booted.exit()?;
    let reaped = booted
        .lines()
        .iter()
        .any(|l| l.get("msg") == "child exited unexpectedly");
    ensure!(
        !reaped,
        "the agent has reaped a child although SIGCHLD was blocked"
    );
    Ok(Outcome::Passed)
}
