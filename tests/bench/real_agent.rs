//! A pod as Kata's runtime makes it, asked of a kata-agent in a guest from the host: health check,
//! sandbox, pause container, then the workload's containers, all at once.
//!
//! Times are the guest's CLOCK_BOOTTIME in ns. Stamps of a program in a container are exact; times
//! seen by the host are converted by pings through the pause container, with the error that
//! [`PodTimes::clock_error_ns`] gives.

use anyhow::{Context, Result, bail, ensure};
use kata_gpu_test_guest::protobuf::{Message, bytes_of};
use kata_gpu_tests::agent_client::requests::{self, Container};
use kata_gpu_tests::agent_client::{AGENT, Client};
use kata_gpu_tests::vm::harness::{Booted, DEADLINE, Guest, TestContext};
use std::path::Path;
use std::time::{Duration, Instant};

/// The pod's name, and its pause container's.
const SANDBOX: &str = "bench-sandbox";
const PINGS: usize = 16;
/// For the answer to a health check on one connection; the slowest host keeps the agent from
/// answering for 4 s.
const PATIENCE: Duration = Duration::from_secs(10);
/// From a program's last open until CUDA would work: a fabric completes in less, a ready state that
/// nobody sets never turns on.
const USABLE: Duration = Duration::from_secs(60);
/// Bytes that a container's program writes at most.
const OUTPUT: u64 = 4096;

/// Whether containers are asked for at once, or each when the one before runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    AtOnce,
    InTurn,
}

/// Output of a container's program.
#[derive(Clone, Debug, Default)]
pub struct Output(String);

impl Output {
    /// The last stamp of this name.
    pub fn stamp(&self, key: &str) -> Option<u64> {
        self.0
            .lines()
            .rev()
            .find_map(|l| l.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
    }

    /// Cause of CUDA's error 802 at the program's first call.
    fn error_802(&self) -> Option<String> {
        self.0
            .lines()
            .find_map(|l| l.strip_prefix("error802="))
            .map(str::to_string)
    }

    /// Nodes that could not be opened.
    fn failures(&self) -> Vec<&str> {
        self.0
            .lines()
            .filter_map(|l| l.strip_prefix("failed="))
            .collect()
    }
}

/// A moment on the host.
#[derive(Clone, Copy, Debug)]
struct Span {
    begin: Instant,
    end: Instant,
}

/// When a container was asked for, created, started, and what its program stamped.
#[derive(Clone, Debug)]
pub struct ContainerTimes {
    pub id: String,
    pub create_begin_ns: u64,
    pub created_ns: u64,
    pub started_ns: u64,
    /// First instruction of its program.
    pub program_ns: u64,
    /// Everything open, where the program opens something.
    pub answer_ns: Option<u64>,
    /// CUDA would work from then on.
    pub works_ns: Option<u64>,
    /// The last call to the driver before it computes.
    pub computes_ns: Option<u64>,
    /// Cause of CUDA's error 802 where its first call would fail.
    pub error_802: Option<String>,
}

#[derive(Clone, Debug)]
pub struct PodTimes {
    /// The agent's first answer is at the host.
    pub answer_ns: u64,
    pub sandbox_begin_ns: u64,
    pub sandbox_ns: u64,
    pub pause: ContainerTimes,
    pub containers: Vec<ContainerTimes>,
    pub clock_error_ns: u64,
}

/// Offset between the host's clock and the guest's.
struct Clock {
    at: Instant,
    boottime_ns: u64,
    error_ns: u64,
}

impl Clock {
    fn boottime_ns(&self, moment: Instant) -> u64 {
        match moment.checked_duration_since(self.at) {
            Some(later) => self.boottime_ns + later.as_nanos() as u64,
            None => self
                .boottime_ns
                .saturating_sub(self.at.duration_since(moment).as_nanos() as u64),
        }
    }
}

/// A container that runs.
struct Made {
    create: Span,
    start: Span,
    output: Output,
}

/// Makes a pod, and returns when every container's program has everything open and could use it.
/// The first attempt to connect is made when the console has `from`: the transport must be there,
/// and the emulated one does not bear thousands of refused connections.
pub fn run(booted: &Booted, from: &str, wanted: &[Container], order: Order) -> Result<PodTimes> {
    let (uds, deadline) = (booted.vm.uds(), DEADLINE);
    ensure!(
        booted.console.wait_text(deadline, from),
        "no {from:?} on the console"
    );
    let client = first_answer(uds, deadline)?;
    let answer = Instant::now();
    let call = |method: &str, message: Message| -> Result<Span> {
        let begin = Instant::now();
        client.call(AGENT, method, message, deadline)?;
        Ok(Span {
            begin,
            end: Instant::now(),
        })
    };
    let sandbox = call("CreateSandbox", requests::create_sandbox(SANDBOX))?;
    let make = |container: &Container| -> Result<Made> {
        let create = call(
            "CreateContainer",
            requests::create_container(container, SANDBOX),
        )?;
        let start = call("StartContainer", requests::start_container(&container.id))?;
        let last = if container.gpus.is_empty() {
            "start"
        } else {
            "answer"
        };
        let mut output = read_until(&client, &container.id, Output::default(), last, deadline)?;
        if !container.gpus.is_empty() && output.failures().is_empty() {
            output = read_until_it_computes(&client, &container.id, output)?;
        }
        ensure!(
            output.failures().is_empty(),
            "container {}: {}",
            container.id,
            output.failures().join(", ")
        );
        Ok(Made {
            create,
            start,
            output,
        })
    };
    let pause = Container {
        id: SANDBOX.into(),
        sandbox: true,
        ..Container::new("pause", "pause", &[])
    };
    let made_pause = make(&pause)?;
    let made: Vec<Result<Made>> = match order {
        Order::InTurn => wanted.iter().map(make).collect(),
        Order::AtOnce => at_once(wanted, make),
    };
    let clock = clock(&client, deadline)?;
    let times = |container: &Container, made: Made| -> Result<ContainerTimes> {
        let program_ns = made.output.stamp("start");
        Ok(ContainerTimes {
            id: container.id.clone(),
            create_begin_ns: clock.boottime_ns(made.create.begin),
            created_ns: clock.boottime_ns(made.create.end),
            started_ns: clock.boottime_ns(made.start.end),
            program_ns: program_ns
                .with_context(|| format!("container {} has no stamp", container.id))?,
            answer_ns: made.output.stamp("answer"),
            works_ns: made.output.stamp("works"),
            computes_ns: made.output.stamp("computes"),
            error_802: made.output.error_802(),
        })
    };
    Ok(PodTimes {
        answer_ns: clock.boottime_ns(answer),
        sandbox_begin_ns: clock.boottime_ns(sandbox.begin),
        sandbox_ns: clock.boottime_ns(sandbox.end),
        pause: times(&pause, made_pause)?,
        containers: wanted
            .iter()
            .zip(made)
            .map(|(c, m)| times(c, m.with_context(|| format!("container {}", c.id))?))
            .collect::<Result<_>>()?,
        clock_error_ns: clock.error_ns,
    })
}

/// A connection over which a health check was answered. A connection that was made while the
/// guest's transport came up may stay silent: after [`PATIENCE`] another one is tried.
fn first_answer(uds: &Path, deadline: Duration) -> Result<Client> {
    let end = Instant::now() + deadline;
    loop {
        let client = Client::connect(uds, end.saturating_duration_since(Instant::now()))?;
        match client.call("grpc.Health", "Check", Message::new(), PATIENCE) {
            Ok(_) => return Ok(client),
            Err(error) if Instant::now() >= end => return Err(error),
            Err(error) => eprintln!("bench: {error:#}: once more"),
        }
    }
}

fn at_once(
    wanted: &[Container],
    make: impl Fn(&Container) -> Result<Made> + Sync,
) -> Vec<Result<Made>> {
    let make = &make;
    std::thread::scope(|scope| {
        let threads: Vec<_> = wanted
            .iter()
            .map(|container| scope.spawn(move || make(container)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|made| made.unwrap_or_else(|_| bail!("a container's thread has panicked")))
            .collect()
    })
}

/// A guest's files for containers of these names, and for the pause container: a root each, with
/// the application; and the driver's user space, without which the incumbent's order has no spec.
pub fn with_roots(mut guest: Guest, context: &TestContext, names: &[&str]) -> Result<Guest> {
    let path = context.target.join("containers/application");
    let application = std::fs::read(&path);
    let cure = "run tests/containers/build first";
    let application = application.with_context(|| format!("read {}: {cure}", path.display()))?;
    for name in ["pause"].iter().chain(names) {
        guest = guest.file(&format!("containers/{name}/application"), &application);
    }
    Ok(guest.archive("driver"))
}

/// The file of a real agent that takes the test agent's place: `KATA_AGENT=FILE`.
pub fn file() -> Result<Option<Vec<u8>>> {
    let Some(path) = std::env::var_os("KATA_AGENT") else {
        return Ok(None);
    };
    let file = std::fs::read(&path);
    file.map(Some)
        .with_context(|| format!("KATA_AGENT: read {}", Path::new(&path).display()))
}

/// Reads what a container writes until it has a stamp of this name, or has failed to open
/// something.
fn read_until(
    client: &Client,
    id: &str,
    output: Output,
    key: &str,
    deadline: Duration,
) -> Result<Output> {
    let mut output = output;
    while output.stamp(key).is_none() && (key == "now" || output.failures().is_empty()) {
        let answer = client.call(
            AGENT,
            "ReadStdout",
            requests::read_stdout(id, OUTPUT),
            deadline,
        )?;
        output
            .0
            .push_str(&String::from_utf8_lossy(bytes_of(&answer, 1)?));
    }
    Ok(output)
}

/// Reads until the container's program computes, for [`USABLE`]: a program that waits stamps each
/// second.
fn read_until_it_computes(client: &Client, id: &str, output: Output) -> Result<Output> {
    let end = Instant::now() + USABLE;
    let mut output = output;
    let ended =
        |output: &Output| output.stamp("computes").is_some() || !output.failures().is_empty();
    while !ended(&output) && Instant::now() < end {
        let answer = client.call(
            AGENT,
            "ReadStdout",
            requests::read_stdout(id, OUTPUT),
            DEADLINE,
        )?;
        output
            .0
            .push_str(&String::from_utf8_lossy(bytes_of(&answer, 1)?));
    }
    Ok(output)
}

/// The best of some pings through the pause container's program.
fn clock(client: &Client, deadline: Duration) -> Result<Clock> {
    let mut best: Option<Clock> = None;
    for _ in 0..PINGS {
        let sent = Instant::now();
        client.call(
            AGENT,
            "WriteStdin",
            requests::write_stdin(SANDBOX, b"\n"),
            deadline,
        )?;
        let output = read_until(client, SANDBOX, Output::default(), "now", deadline)?;
        let took = sent.elapsed();
        let sample = Clock {
            at: sent + took / 2,
            boottime_ns: output.stamp("now").context("a ping without a stamp")?,
            error_ns: took.as_nanos() as u64 / 2,
        };
        if best.as_ref().is_none_or(|b| sample.error_ns < b.error_ns) {
            best = Some(sample);
        }
    }
    best.context("no ping")
}

/// Version that the real agent prints.
pub fn version() -> Result<String> {
    let path = std::env::var_os("KATA_AGENT").context("KATA_AGENT is not set")?;
    let output = std::process::Command::new(&path).arg("--version").output();
    let output = output.context("KATA_AGENT: execute it")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}
