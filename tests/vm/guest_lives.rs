//! A failure means that a guest stands still while the host maps a GPU's BARs: interrupts wait on
//! the lane's vCPU, the console holds processes up or loses lines, a container that could start
//! waits, or on one vCPU the agent comes last.

use super::harness::{
    AgentLine, Booted, DEADLINE, Guest, Outcome, TestContext, VmTest, events, named, spans,
};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_init::boot::bring_up::deadlines::Limit;
use kata_gpu_init::machine::interrupts::CpuMask;
use kata_gpu_init::machine::kernel_console;
use kata_gpu_init::stream::sinks::console::log_line;
use kata_gpu_test_guest::halves::console_lines;
use kata_gpu_wire::arch::Arch;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Level, Pong, Record, ping_line};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "the_lanes_vcpu_takes_no_interrupts_while_gpus_are_enabled",
        run: interrupts,
    },
    VmTest {
        name: "the_console_is_quiet_during_an_enabling_and_loses_nothing",
        run: console,
    },
    VmTest {
        name: "the_console_is_quiet_during_a_load_that_enables_by_itself",
        run: console_of_a_load,
    },
    VmTest {
        name: "a_line_of_the_agent_waits_for_no_enabling",
        run: agents_line,
    },
    VmTest {
        name: "a_container_that_can_start_holds_the_lane_as_reported",
        run: container,
    },
    VmTest {
        name: "one_vcpu_brings_all_gpus_up_and_runs_the_agent_first",
        run: one_vcpu,
    },
];

/// Three GPUs whose BARs take the host 2 s each; the rest takes little time.
const SLOW: &str = "fakepci.gpus=3 fakepci.enable_ms=2000 gpuinit.bind=pipelined \
                    nvidia.s1_ms=30 nvidia.s2_ms=100 nvidia.s3_ms=30";

/// The guest half that looks at masks and level every 50 ms. Its lines are written amid enablings,
/// and must not wait for them.
const SAMPLES: &str = "testagent.guest=samples fakepci.serial=0";

/// An enabling, in ns of the guest's boot clock.
#[derive(Clone, Copy, Debug)]
struct Span {
    begin: u64,
    end: u64,
}

impl Span {
    fn has(self, from: u64, to: u64) -> bool {
        self.begin < from && from <= to && to < self.end
    }
}

fn enablings(records: &[Record]) -> Result<Vec<Span>> {
    times(records, names::GPU_ENABLE)
}

/// Times of the steps of this name, in order.
fn times(records: &[Record], name: &str) -> Result<Vec<Span>> {
    let span = |(begin, end): (&Record, &Record)| Span {
        begin: begin.boottime_ns,
        end: end.boottime_ns,
    };
    Ok(spans(records, name)?.into_iter().map(span).collect())
}

/// One look of the guest half.
struct Sample {
    from: u64,
    to: u64,
    /// All four numbers of /proc/sys/kernel/printk.
    printk: String,
    /// By number and names of the interrupt, and `default`.
    masks: BTreeMap<String, CpuMask>,
}

impl Sample {
    /// `before`: the one before this, which has the masks where these are the same.
    fn read(line: &AgentLine, before: Option<&Self>) -> Result<Self> {
        let masks = match (line.get("masks"), before) {
            ("same", Some(before)) => before.masks.clone(),
            (text, _) => text.split(';').map(mask).collect::<Result<_>>()?,
        };
        let (from, to) = (line.get("from_ns").parse()?, line.get("to_ns").parse()?);
        Ok(Self {
            from,
            to,
            printk: line.get("printk").into(),
            masks,
        })
    }

    fn level(&self) -> Result<u32> {
        let first = self
            .printk
            .split_ascii_whitespace()
            .next()
            .context("no level")?;
        Ok(first.parse()?)
    }
}

fn mask(text: &str) -> Result<(String, CpuMask)> {
    let (name, mask) = text
        .rsplit_once('=')
        .with_context(|| format!("no mask in {text:?}"))?;
    Ok((
        name.into(),
        CpuMask::parse(mask).with_context(|| format!("no mask: {text:?}"))?,
    ))
}

/// All samples of a guest whose GPUs are settled; the last one is from after that.
fn samples(booted: &Booted) -> Result<Vec<Sample>> {
    booted.agent("sample", |line| line.get("when") == "settled")?;
    let mut all: Vec<Sample> = Vec::new();
    for line in booted
        .lines()
        .iter()
        .filter(|line| line.get("msg") == "sample")
    {
        all.push(Sample::read(line, all.last())?);
    }
    Ok(all)
}

/// Pings the guest until all its GPUs are settled, each ping when the one before it is answered.
fn ping_until_settled(booted: &Booted) -> Result<Vec<Pong>> {
    booted.event(names::INIT_START)?;
    for id in 0.. {
        booted.receiver.say(ping_line(id).as_bytes(), DEADLINE)?;
        let pongs = booted
            .receiver
            .wait_pongs(DEADLINE, usize::try_from(id)? + 1);
        let pongs = pongs.with_context(|| format!("ping {id} is not answered"))?;
        if booted.records().iter().any(|r| r.name == names::SETTLED) {
            return Ok(pongs);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    bail!("no more pings")
}

fn interrupts(context: &TestContext) -> Result<Outcome> {
    // The yardstick: the same guest where the driver's load enables, and there is no lane.
    let parameters = format!("{SLOW} fakepci.enable_ms=3 gpuinit.bind=insmod {SAMPLES}");
    let plain = Guest::with(&parameters).boot(context, "plain")?;
    let untouched = samples(&plain)?.pop().context("no sample")?;
    drop(plain);
    let booted = Guest::with(&format!("{SLOW} {SAMPLES}")).boot(context, "lane")?;
    let pongs = ping_until_settled(&booted)?;
    booted.settles(3, 0)?;
    let samples = samples(&booted)?;
    let records = booted.records();
    let lane = booted.event(names::LANE_CPU)?;
    let cpu = usize::try_from(lane.fields["cpu"].as_u64().context("no cpu")?)?;
    ensure!(cpu == 1, "the lane's vCPU is {cpu}, not the last one");
    let masks = &untouched.masks;
    let used = masks.values().any(|mask| mask.has(cpu));
    ensure!(
        used,
        "no interrupt may come to vCPU {cpu} anyway: {masks:?}"
    );
    // Interrupts that the kernel or their driver keeps where they are.
    let stay: Vec<&str> = lane.fields["stay"]
        .as_str()
        .unwrap_or_default()
        .split(", ")
        .collect();
    let enablings = enablings(&records)?;
    ensure!(enablings.len() == 3, "{enablings:?}");
    let mut meanwhile = 0;
    for sample in &samples {
        if !enablings
            .iter()
            .any(|span| span.has(sample.from, sample.to))
        {
            continue;
        }
        meanwhile += 1;
        let on_cpu = sample
            .masks
            .iter()
            .filter(|(_, mask)| mask.has(cpu))
            .map(|(name, _)| name);
        let there: Vec<&String> = on_cpu
            .filter(|name| !stay.contains(&name.as_str()))
            .collect();
        let at = sample.from;
        ensure!(
            there.is_empty(),
            "on vCPU {cpu} in an enabling at {at} ns: {there:?}; stay: {stay:?}"
        );
    }
    ensure!(meanwhile > 0, "no sample lies in {enablings:?}");
    let last = samples.last().context("no sample")?;
    ensure!(
        last.masks == *masks,
        "afterwards {:?}, without a lane {masks:?}",
        last.masks
    );
    // Two answers in one enabling: the second one's ping was sent after the first answer, and so in
    // it, too.
    let answered_in = |span: &Span| {
        let inside = pongs
            .iter()
            .filter(|p| span.has(p.boottime_ns, p.boottime_ns));
        inside.count()
    };
    ensure!(
        enablings.iter().any(|span| answered_in(span) >= 2),
        "no two pings were answered in any of {enablings:?}: {pongs:?}"
    );
    let in_enabling = |at: u64| enablings.iter().any(|span| span.has(at, at));
    let answered = pongs
        .iter()
        .filter(|pong| in_enabling(pong.boottime_ns))
        .count();
    let stay = stay.join(", ");
    let measured =
        format!("in 3 enablings: {meanwhile} samples, {answered} pings answered; stay: {stay}");
    Ok(Outcome::Measured(measured))
}

/// A line on the console, in order.
enum Item {
    Sample(Sample),
    /// Time in ns and text of a record of the init.
    Init(u64, String),
}

/// Lines of the init and of the guest half.
fn console_items(text: &str) -> Result<Vec<Item>> {
    let mut items = Vec::new();
    for line in text.lines() {
        // A kernel message may stand before the JSON.
        let Some(json) = line.find("{\"").map(|at| &line[at..]) else {
            continue;
        };
        if json.contains("\"msg\":\"sample\"") {
            let before = items.iter().rev().find_map(|item| match item {
                Item::Sample(sample) => Some(sample),
                Item::Init(..) => None,
            });
            let line = AgentLine::parse(json).with_context(|| format!("sample {json:?}"))?;
            items.push(Item::Sample(Sample::read(&line, before)?));
        } else if json.contains("\"source\":\"kata-gpu-init\"") {
            items.push(of_init(json)?);
        }
    }
    Ok(items)
}

fn of_init(json: &str) -> Result<Item> {
    // A kernel message may stand behind the JSON, too.
    let line = serde_json::Deserializer::from_str(json)
        .into_iter::<Value>()
        .next()
        .context("no JSON")?;
    let line = line.with_context(|| format!("line {json:?}"))?;
    let text = |key: &str| {
        line[key]
            .as_str()
            .with_context(|| format!("no {key} in {json}"))
    };
    Ok(Item::Init(
        text("boottime_ns")?.parse()?,
        text("msg")?.into(),
    ))
}

/// Samples of an enabling that may come before the level is lowered, on a busy machine.
const LATE_SAMPLES: usize = 2;

/// The kernel's level in this test: the driver's errors would fall into the middle of a line.
const LOUD: &str = "loglevel=3";

fn console(context: &TestContext) -> Result<Outcome> {
    let parameters = format!("{SLOW} {LOUD} gpuinit.log=debug {SAMPLES}");
    let booted = Guest::with(&parameters).boot(context, "console")?;
    booted.settles(3, 0)?;
    booted.agent("sample", |line| line.get("when") == "settled")?;
    let settled = booted.console.wait_text(DEADLINE, "\"msg\":\"settled\"");
    ensure!(settled, "the init's lines end before `settled`");
    let (items, records) = (console_items(&booted.console.text())?, booted.records());
    let enablings = enablings(&records)?;

    // Every record, in order.
    let settled = records
        .iter()
        .find(|r| r.name == names::SETTLED)
        .context("no settled")?
        .seq;
    let expected: Vec<(u64, String)> = records
        .iter()
        .filter(|r| r.seq <= settled)
        .filter_map(|r| log_line(r, Level::Debug, 0))
        .map(|line| match of_init(&line) {
            Ok(Item::Init(at, msg)) => Ok((at, msg)),
            Ok(Item::Sample(_)) => bail!("not a line of the init"),
            Err(error) => Err(error),
        })
        .collect::<Result<_>>()?;
    let written: Vec<(u64, String)> = items
        .iter()
        .filter_map(|item| match item {
            Item::Init(at, msg) => Some((*at, msg.clone())),
            Item::Sample(_) => None,
        })
        .collect();
    for (number, (is, wanted)) in written.iter().zip(&expected).enumerate() {
        ensure!(
            is == wanted,
            "line {number} on the console is {is:?}, the record {wanted:?}"
        );
    }
    let (lines, wanted) = (written.len(), expected.len());
    ensure!(
        lines >= wanted,
        "{lines} lines on the console, {wanted} records"
    );

    let samples = samples_of(&items);
    let mut quiet = Vec::new();
    for span in &enablings {
        let (count, lowered) = lowered(&samples, *span)?;
        // A machine that is busy gives the sampler's vCPU no time for whole enablings.
        if count > LATE_SAMPLES {
            quiet.push(lowered);
        }
    }
    ensure!(
        !quiet.is_empty() && quiet.iter().all(|count| *count > 0),
        "samples with a lower level in the enablings that have more than {LATE_SAMPLES}: {quiet:?}"
    );

    // A line between two samples was written after the first one and before the third: once the
    // level is low, the gate is closed, and only a line on its way may still come.
    let (mut judged, mut late) = (0, BTreeMap::new());
    let places: Vec<usize> = (0..items.len())
        .filter(|i| matches!(items[*i], Item::Sample(_)))
        .collect();
    for ((first, second), third) in places
        .windows(2)
        .map(|w| (w[0], w[1]))
        .zip(samples.iter().skip(2))
    {
        let Item::Sample(sample) = &items[first] else {
            continue;
        };
        let Some(span) = enablings
            .iter()
            .find(|span| span.has(sample.from, third.from))
        else {
            continue;
        };
        if sample.level()? == kernel_console::LEVEL {
            judged += 1;
            *late.entry(span.begin).or_insert(0) += second - first - 1;
        }
    }
    ensure!(
        judged >= 3,
        "{judged} pairs of samples lie in enablings, too few to judge by"
    );
    let on_time = late.values().all(|lines| *lines <= 1);
    ensure!(
        on_time,
        "lines that the init wrote in the enablings that began at these times: {late:?}"
    );
    // Else nothing would have had to be held back.
    let held = expected
        .iter()
        .filter(|(at, _)| enablings.iter().any(|span| span.has(*at, *at)))
        .count();
    ensure!(held >= 5, "{held} records fall into enablings");
    Ok(Outcome::Measured(format!(
        "{held} of {lines} lines held back, judged by {judged} pairs of samples"
    )))
}

fn console_of_a_load(context: &TestContext) -> Result<Outcome> {
    let words =
        format!("fakepci.gpus=6 fakepci.enable_ms=700 gpuinit.bind=insmod {LOUD} {SAMPLES}");
    let booted = Guest::with(&words).boot(context, "load")?;
    booted.settles(6, 0)?;
    booted.agent("sample", |line| line.get("when") == "settled")?;
    let (items, records) = (console_items(&booted.console.text())?, booted.records());
    ensure!(
        enablings(&records)?.is_empty(),
        "the lane has enabled: this shows nothing of the load"
    );
    let load = *times(&records, names::MODULE_LOAD)?
        .first()
        .context("no load")?;
    let (count, lowered) = lowered(&samples_of(&items), load)?;
    ensure!(lowered > 0, "none of {count} samples in {load:?}");
    Ok(Outcome::Measured(format!(
        "{lowered} of {count} samples in the load have the lower level"
    )))
}

/// Lines to the device itself, in the same enablings, are the control: some of them wait.
fn agents_line(context: &TestContext) -> Result<Outcome> {
    let words = format!("{SLOW} testagent.guest=console-lines");
    let booted = Guest::with(&words).boot(context, "line")?;
    booted.settles(3, 0)?;
    booted.agent(console_lines::OVER, |_| true)?;
    let enablings = enablings(&booted.records())?;
    // Per line: whether it waited for the end of the enabling that it was written in. The kernel is
    // back some time before the step's end.
    let waited = |to: &str| -> Result<Vec<bool>> {
        let mut all = Vec::new();
        for line in booted.lines() {
            if line.get("msg") != console_lines::MESSAGE || line.get("to") != to {
                continue;
            }
            ensure!(line.get("error").is_empty(), "{to}: {}", line.get("error"));
            let (begin, end): (u64, u64) =
                (line.get("from_ns").parse()?, line.get("to_ns").parse()?);
            let during = enablings.iter().find(|span| span.has(begin, begin));
            all.extend(during.map(|span| 2 * (end - begin) > span.end - begin));
        }
        Ok(all)
    };
    let (agents, devices) = (
        waited(console_lines::AGENTS)?,
        waited(console_lines::DEVICES)?,
    );
    let found = format!("in {enablings:?} waited: agent's {agents:?}, device's {devices:?}");
    ensure!(!agents.is_empty() && !agents.contains(&true), "{found}");
    // Simulated hosts of arm64 keep no serial port waiting.
    let is_shown = context.arch == Arch::Aarch64 || devices.contains(&true);
    ensure!(is_shown, "{found}");
    let text = booted.console.text();
    let lines = |to| text.matches(&format!("a line written {to}")).count();
    ensure!(lines(console_lines::AGENTS) == 3, "lines are lost: {text}");
    Ok(Outcome::Passed)
}

fn samples_of(items: &[Item]) -> Vec<&Sample> {
    let samples = items.iter().filter_map(|item| match item {
        Item::Sample(sample) => Some(sample),
        Item::Init(..) => None,
    });
    samples.collect()
}

/// How many samples lie in a span, and in how many of them the kernel's level is low: all to its
/// end, once it is. Afterwards it is as before.
fn lowered(samples: &[&Sample], span: Span) -> Result<(usize, usize)> {
    let inside = samples.iter().filter(|s| span.has(s.from, s.to));
    let levels: Vec<u32> = inside.map(|s| s.level()).collect::<Result<_>>()?;
    let loud = levels.iter().take_while(|level| **level == 3).count();
    ensure!(
        levels[loud..]
            .iter()
            .all(|level| *level == kernel_console::LEVEL),
        "levels in {span:?}: {levels:?}"
    );
    let last = samples.last().context("no sample")?;
    ensure!(
        last.printk.starts_with("3\t"),
        "afterwards {:?}, on the command line {LOUD}",
        last.printk
    );
    Ok((levels.len(), levels.len() - loud))
}

/// The agent's traces of this kind; `what` as in the event.
fn traces<'a>(records: &'a [Record], what: &str) -> Vec<&'a Record> {
    let all = events(records, names::AGENT_CONTAINER).into_iter();
    all.filter(|record| record.fields.get("what") == Some(&what.into()))
        .collect()
}

/// A reason's part of `held_by`, in ms.
fn held_ms(wait: &Record, reason: &str) -> Option<u64> {
    let parts = wait.fields.get("held_by")?.as_str()?.split(", ");
    parts
        .filter_map(|part| {
            part.strip_prefix(reason)?
                .trim()
                .strip_suffix(" ms")?
                .parse()
                .ok()
        })
        .next()
}

/// Beginning of the lane's latest wait for a container, as [`Limit::ContainerMade`] counts it: the
/// creation that began while no other was under way, or the last program's begin.
fn making_since(records: &[Record]) -> Option<u64> {
    let (mut making, mut since) = (0_u32, None);
    for record in events(records, names::AGENT_CONTAINER) {
        match record.fields.get("what").and_then(Value::as_str) {
            Some("made") => {
                if making == 0 {
                    since = Some(record.boottime_ns);
                }
                making += 1;
            }
            Some("program began") => {
                making = making.saturating_sub(1);
                since = Some(record.boottime_ns);
            }
            _ => {}
        }
    }
    since
}

/// A container for each publication that an enabling follows. One that is made too late to hold the
/// next enabling, on a busy machine, shows nothing: where all are, the test is skipped.
fn container(context: &TestContext) -> Result<Outcome> {
    let gpus = "fakepci.gpus=4 fakepci.enable_ms=1500 testagent.cost=real \
                testagent.containers=first:0;second:1;third:2";
    let booted = Guest::with(&format!("{SLOW} {gpus}")).boot(context, "container")?;
    booted.settles(4, 0)?;
    for container in ["first", "second", "third"] {
        booted.created(container)?;
    }
    let records = booted.records();
    let begins = named(&records, Kind::Begin, names::GPU_ENABLE);
    let waits = named(&records, Kind::End, names::LANE_WAIT);
    let published = events(&records, names::GPU_PUBLISHED)
        .first()
        .context("no publication")?
        .seq;
    let mut measured = Vec::new();
    // Before the first publication the lane waits for no container.
    for made in traces(&records, "made")
        .into_iter()
        .filter(|made| made.seq > published)
    {
        let container = made.fields["container"].as_str().unwrap_or_default();
        let Some(next) = begins.iter().find(|begin| begin.seq > made.seq) else {
            continue;
        };
        // A wait that was there when the container came, and the last record before the enabling.
        let Some(wait) = waits
            .iter()
            .rfind(|end| end.seq > made.seq && end.seq < next.seq)
        else {
            continue;
        };
        let mut begins = named(&records, Kind::Begin, names::LANE_WAIT).into_iter();
        let begin = begins.find(|r| r.span == wait.span).context("no begin")?;
        if begin.seq > made.seq || begin.gpu != next.gpu {
            continue;
        }
        // All that held this enabling began after the one before it.
        let before = named(&records, Kind::End, names::GPU_ENABLE);
        let before = before.iter().rfind(|end| end.seq < begin.seq);
        let from_ns = before.map_or(0, |end| end.boottime_ns);
        let waited_ms = (wait.boottime_ns - from_ns) / 1_000_000;
        let between = |r: &Record| r.seq > made.seq && r.seq < next.seq;
        let runs = traces(&records, "program began").into_iter().any(between);
        let Some(held) = held_ms(wait, "container start") else {
            // The next enabling was ordered before the container was seen, or the lane waited for
            // something else until its program ran: this one shows nothing.
            continue;
        };
        ensure!(
            held <= waited_ms,
            "{container}: held for {held} ms in a wait of {waited_ms} ms"
        );
        // By the records, the limit begins no later than in the schedule, which hears of them.
        let longest_ns = u64::try_from(Limit::ContainerMade.after().as_nanos())?;
        let until_next: Vec<Record> = records
            .iter()
            .filter(|r| r.seq < next.seq)
            .cloned()
            .collect();
        let since = making_since(&until_next).context("nothing was made")?;
        let waited = runs || next.boottime_ns >= since + longest_ns;
        ensure!(
            waited,
            "{container}: next GPU enabled before its program began, after {held} ms"
        );
        measured.push(format!("{container} {held} ms"));
    }
    Ok(if measured.is_empty() {
        Outcome::Skipped(format!(
            "no container was made within the lane's limits, this machine is too busy: {waits:?}"
        ))
    } else {
        Outcome::Measured(format!("held by the starts of: {}", measured.join(", ")))
    })
}

fn one_vcpu(context: &TestContext) -> Result<Outcome> {
    let agent = "testagent.cost=real testagent.containers=first:0;all:all";
    let parameters = format!("{SLOW} fakepci.enable_ms=700 {agent}");
    let booted = Guest::new()
        .cpus(1)
        .append(&parameters)
        .boot(context, "one")?;
    booted.settles(3, 0)?;
    booted.created("first")?;
    booted.created("all")?;
    let records = booted.records();
    booted.has_no(names::LANE_CPU)?;
    ensure!(
        booted.event(names::STRATEGY)?.fields["vcpus"] == 1,
        "not one vCPU"
    );
    let begins = named(&records, Kind::Begin, names::GPU_ENABLE);
    let first = begins.first().context("no enabling")?;
    let ready = booted.boottime_ns(&booted.agent("ttRPC server started", |_| true)?)?;
    let is_pause = |r: &&Record| r.fields.get("container") == Some(&"pause".into());
    let pause = traces(&records, "made")
        .into_iter()
        .find(is_pause)
        .context("no pause")?;
    let waits = named(&records, Kind::End, names::LANE_WAIT);
    let first_wait = waits.first().context("no wait")?;
    let wait = first_wait.fields["held_by"]
        .as_str()
        .context("no reasons")?;
    // The lane waits for the agent's first container as long as its limit allows, which a busy
    // machine exceeds. The schedule counts the limit from its start, just after this event.
    let started_ns = booted.event(names::TOPOLOGY)?.boottime_ns;
    let limit_ns = u64::try_from(Limit::AgentFirst.after().as_nanos())?;
    let limit_over = first.boottime_ns >= started_ns + limit_ns;
    ensure!(
        limit_over || pause.seq < first.seq,
        "first enabling {first:?}, held by {wait}; first container {pause:?}; start at \
         {started_ns} ns"
    );
    let begins = named(&records, Kind::Begin, names::LANE_WAIT);
    let waits_since = begins.iter().find(|begin| begin.span == first_wait.span);
    ensure!(
        wait.contains("agent start") || waits_since.is_some_and(|begin| pause.seq < begin.seq),
        "held by {wait}"
    );
    let sooner = (i128::from(first.boottime_ns) - i128::from(ready)) / 1_000_000;
    let limit = if limit_over {
        ", its limit is over"
    } else {
        ""
    };
    Ok(Outcome::Measured(format!(
        "agent ready {sooner} ms before the first enabling{limit}; held by {wait}"
    )))
}
