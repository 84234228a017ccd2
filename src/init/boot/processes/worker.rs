//! The worker: all work of the init while the agent runs. Subscribes first (uevents, kernel log,
//! the agent's traces), then brings GPUs up, and serves every reader of the events (sinks). One
//! runtime thread; each call that blocks in the kernel has a thread of its own.

use super::images::{self, Images};
use super::stamps::Boot;
use crate::boot::AGENT;
use crate::boot::bring_up;
use crate::boot::bring_up::lane_cpu::Spare;
use crate::boot::bring_up::needed::needed;
use crate::boot::bring_up::previous;
use crate::boot::bring_up::previous::Previous;
use crate::boot::bring_up::{Machine, Sources};
use crate::boot::ipc::descriptors::Descriptors;
use crate::boot::ipc::handover::{Death, Handed, Observer, Start};
use crate::boot::ipc::keeper_socket::{Held, KeeperSocket};
use crate::boot::ipc::name_process;
use crate::boot::ipc::opener::Opener;
use crate::boot::{agent_watch, failure};
use crate::config::{Bind, Config, Switch};
use crate::gpu::pci::SYS;
use crate::machine::clock::boottime_ns;
use crate::machine::files::failed;
use crate::machine::uevents::Uevents;
use crate::machine::{confidential, ptp_kvm, tsc};
use crate::services::{self, Milestones};
use crate::stream;
use crate::stream::clock_reports;
use crate::stream::journal::{Journal, UNKNOWN};
use crate::stream::memory::Memory;
use crate::stream::ring::{CAPACITY_BYTES, File, Ring};
use crate::stream::sinks::stream::Identity;
use crate::stream::sinks::{console, listener, vsock};
use crate::stream::stamps::{self, Stamp};
use crate::stream::{After, RunningStep, StepId, kmsg};
use crate::{cdi, step};
use kata_gpu_wire::{build_id, names};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Directory of the init's runtime files, readable by every process of the guest.
const RUN: &str = "/run/kata-gpu-init";
/// OOM score between agent (-997) and keeper (-1000).
const OOM_SCORE: &str = "-998";
/// Stack of a thread that waits in a system call.
const STACK: usize = 256 * 1024;
/// The kernel's clock source.
const CLOCKSOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
/// Longest wait for the delivery of a power-off's reason to the host.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Time for data that virtio still carries when send() has returned: no acknowledgement comes.
const IN_FLIGHT: Duration = Duration::from_millis(100);

/// The worker's life; ends with the guest. `held` are the descriptors that earlier workers opened.
pub fn run(boot: &Boot, start: Start, keeper: KeeperSocket, held: Vec<Held>) -> ! {
    let began_ns = boottime_ns();
    crate::machine::sys::set_oom_score(OOM_SCORE);
    // Before the runtime: a process with threads must not fork.
    let opener = Opener::start(&keeper, &held);
    let lane = boot.config.bind != Bind::Insmod;
    let spare = lane
        .then(|| Spare::start(Path::new(SYS), &held, opener.as_ref().map(Opener::pid)))
        .flatten();
    name_process("gpuinit-worker");
    match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_stack_size(STACK)
        .build()
    {
        Ok(runtime) => {
            // Never drop the runtime: a drop would wait for every thread that is in the driver.
            let runtime = std::mem::ManuallyDrop::new(runtime);
            let keeper_ends = keeper.0.try_clone();
            let descriptors = Descriptors::new(Some(keeper), opener, held);
            let life =
                || runtime.block_on(live(boot, began_ns, start, descriptors, keeper_ends, spare));
            // The panic has been reported; the keeper waits for the end of this process.
            let _unused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(life));
        }
        Err(error) => failure::report(&format!(
            "worker: start the runtime: {error}: another worker tries it again"
        )),
    }
    crate::machine::sys::leave(1)
}

async fn live(
    boot: &Boot,
    began_ns: u64,
    start: Start,
    descriptors: Descriptors,
    keeper: std::io::Result<OwnedFd>,
    spare: Option<Spare>,
) {
    let identity = Identity::read();
    let (ring, previous, trouble) = stream(&start, &identity);
    if let Some(error) = trouble {
        tracing::warn!(name: names::SINK, sink = "file", state = "unavailable", error);
    }
    let (handed, deaths) = match start {
        Start::First(handed) => (handed, Vec::new()),
        Start::Again { handed, deaths, .. } => (handed, deaths),
    };
    let known = previous.as_ref();
    if !known.is_some_and(|previous| previous.started) {
        report_stage0(boot);
        // Markers show the difference between the kernel log's clock and this one. Without
        // /dev/kmsg there are no lines to correct either.
        let _unused = kmsg::write_markers();
        report_before_kernel(boot);
    }
    let (exec, no_agent) = match known.is_some_and(|previous| previous.handed_over) {
        false => report_handover(boot, handed),
        true => (None, None),
    };
    if let Some(previous) = &previous {
        report_deaths(&ring, previous, &deaths);
        descriptors.reported_deaths();
    }
    // The clock may have been stepped since an earlier worker's report.
    clock_reports::report_from_now_on();
    // First: the driver's files may be on a disk. A guest that is about to end mounts nothing.
    let images = no_agent
        .is_none()
        .then(|| images::start(boot, previous.as_ref().is_some_and(Previous::is_settled)));
    let starting = step!(names::WORKER_START, at_ns = began_ns, after = ?After::from(&[exec][..]));
    tokio::spawn(report_end_of_keeper(keeper));
    // Subscribed before the scan: a GPU that appears in between is seen twice, not never.
    let uevents = Uevents::subscribe();
    let (driver_log, signals) = match kmsg::follow(
        Arc::clone(&ring),
        previous.as_ref().and_then(|p| p.last_kmsg),
    ) {
        Ok((driver_log, signals)) => (Some(driver_log), Some(signals)),
        Err(error) => {
            tracing::warn!(
                name: names::SINK, sink = "kmsg", state = "unavailable",
                error = %format!("read /dev/kmsg: {error}: failures are reported without the \
                    driver's log lines"),
            );
            (None, None)
        }
    };
    let (seen, agent) = mpsc::unbounded_channel();
    let places = agent_watch::Places::of_guest(
        Path::new(OsStr::from_bytes(AGENT.to_bytes())),
        std::env::current_exe().ok(),
    );
    if let Err(error) = agent_watch::start(places, seen) {
        let error = format!(
            "watch {}: {error}: what the agent waits for is not seen",
            cdi::publish::DIRECTORY
        );
        tracing::warn!(name: names::SINK, sink = "agent watch", state = "unavailable", error);
    }
    ptp_kvm::report();
    let gate = console::Gate::default();
    let sources = Sources {
        uevents,
        signals,
        agent,
    };
    let delivered = start_sinks(boot, &ring, &identity, previous.is_some(), gate.clone());
    let started = starting.id();
    drop(starting);
    if let Some(observer) = no_agent {
        // Leave the GPUs alone in a guest that is about to end.
        last_words(&ring, delivered).await;
        observer.done();
    } else if let Some(Images {
        ready: image,
        settled,
        refusals,
    }) = images
    {
        tokio::spawn(images::end_guest(
            refusals,
            boot.power_off_right,
            async move { last_words(&ring, delivered).await },
        ));
        let (milestones, reached) = watch::channel(Milestones::default());
        let (modules, modules_loaded) = watch::channel(false);
        let (fabric, fabric_seen) = watch::channel(services::Fabric::default());
        tokio::spawn(services::run(services_of(
            boot,
            previous.as_ref(),
            (reached, fabric_seen),
            modules,
        )));
        let machine = Machine {
            spare,
            gate,
            driver_log,
            descriptors,
            image,
            settled,
            milestones,
            fabric,
            modules_loaded,
        };
        bring_up::run(
            &boot.config,
            &boot.command_line,
            previous.as_ref(),
            started,
            sources,
            machine,
        )
        .await;
    }
    // Sinks, kernel log and uevents go on for as long as the guest lives.
    std::future::pending::<()>().await;
}

/// Inputs of NVIDIA's services.
fn services_of(
    boot: &Boot,
    previous: Option<&Previous>,
    (milestones, fabric): (
        watch::Receiver<Milestones>,
        watch::Receiver<services::Fabric>,
    ),
    modules_loaded: watch::Sender<bool>,
) -> services::Inputs {
    services::Inputs {
        asked: boot.config.services.clone(),
        command_line: boot.command_line.clone(),
        milestones,
        fabric,
        modules_loaded,
        earlier: previous.map(|previous| previous.services.clone()),
    }
}

/// Starts the stream, or continues that of an earlier worker. Returns the ring, the state read from
/// the stream, and the error of an earlier worker's file.
fn stream(start: &Start, identity: &Identity) -> (Arc<Ring>, Option<Previous>, Option<String>) {
    let path = Path::new(RUN).join("boot.ndjson");
    let install = |memory, file| stream::install(Ring::resumed(memory, file));
    let anew = |next_seq| {
        let (header, path) = (identity.header(next_seq), path.clone());
        let create = move || {
            std::fs::create_dir_all(RUN).map_err(failed("make", Path::new(RUN)))?;
            Journal::create(&path, &header, next_seq, needed)
        };
        let memory = Memory::new(CAPACITY_BYTES, next_seq);
        install(memory, File::Missing(Box::new(create)))
    };
    let Start::Again { number, .. } = start else {
        return (anew(0), None, None);
    };
    match Journal::resume(&path, needed) {
        Ok((journal, found)) => {
            let previous = Previous::from_records(&found.records);
            // Each missing record may be the begin of a step.
            StepId::continue_after(previous.last_step.saturating_add(found.missing));
            let ring = install(found.memory, File::Open(journal));
            (ring, Some(previous), None)
        }
        // Without the file the numbers already given are unknown: the stream goes on far behind
        // them. A first worker that died at once may have made none.
        Err(error) => {
            let next_seq = UNKNOWN.saturating_mul(*number);
            StepId::continue_after(next_seq);
            let is_lost = error.kind() != std::io::ErrorKind::NotFound;
            let previous = Previous {
                started: is_lost,
                handed_over: is_lost,
                ..Previous::default()
            };
            let trouble = is_lost.then(|| error.to_string());
            (anew(next_seq), Some(previous), trouble)
        }
    }
}

/// Reports each worker's death that is not in the stream, and ends the steps that were open.
fn report_deaths(ring: &Ring, previous: &Previous, deaths: &[Death]) {
    for Death { number, status } in deaths.iter().filter(|d| d.number > previous.deaths) {
        let error = format!(
            "the worker has ended ({status}); another one goes on, and all GPUs have stayed open"
        );
        tracing::error!(name: names::PROCESS_DIED, process = "worker", number, status, error);
    }
    for begin in &previous.open {
        ring.push(previous::end_of(begin));
    }
}

/// Reports the keeper's end at once: the socket to it is closed then. Nobody else can: its parent
/// is the agent.
async fn report_end_of_keeper(socket: std::io::Result<OwnedFd>) {
    let ended = async {
        let socket = crate::machine::sys::async_fd(socket?)?;
        loop {
            let mut ready = socket.readable().await?;
            match recv(socket.as_raw_fd(), &mut [0_u8; 1], MsgFlags::MSG_DONTWAIT) {
                Err(Errno::EAGAIN) => ready.clear_ready(),
                // The keeper sends nothing.
                Ok(_) | Err(_) => return Ok::<(), std::io::Error>(()),
            }
        }
    };
    match ended.await {
        Ok(()) => {
            let error = "the keeper has ended: this worker alone holds the GPUs from here on, and \
                its end would close them; restart the guest when its containers can be moved";
            tracing::error!(name: names::PROCESS_DIED, process = "keeper", error);
        }
        Err(error) => {
            tracing::warn!(
                name: names::SINK, sink = "keeper", state = "unavailable",
                error = %format!("watch the keeper's socket: {error}: its end will not be seen"),
            );
        }
    }
}

/// Emits stage 0: the times of its steps, and the outcome of the parameters.
fn report_stage0(boot: &Boot) {
    // Read here, while the agent starts, not by PID 1.
    let build = build_id::of(std::fs::File::open("/proc/self/exe"));
    let (started_ns, version) = (boot.started_ns, env!("CARGO_PKG_VERSION"));
    tracing::info!(name: names::INIT_START, at_ns = started_ns, pid = 1_u64, version, build);
    let end_ns = boot.steps.last().map_or(started_ns, Stamp::end_ns);
    let stage0 = step!(names::STAGE0, at_ns = started_ns);
    stage0.note("at_ns", end_ns);
    let Ok(()) = stage0.run(|| {
        stamps::replay(&boot.steps);
        Ok::<(), std::convert::Infallible>(())
    });
    for note in &boot.notes {
        let (parameter, value) = (note.parameter.as_str(), note.value.as_str());
        match &note.problem {
            None => tracing::info!(name: names::CONFIG, at_ns = end_ns, parameter, value),
            Some(problem) => {
                tracing::warn!(
                    name: names::CONFIG, at_ns = end_ns, parameter, value,
                    error = %format!("{parameter}={value}: {problem}"),
                )
            }
        }
    }
}

/// Reports the time between TSC 0 and the kernel's clock, by the TSC at the first instruction of
/// PID 1 and now.
fn report_before_kernel(boot: &Boot) {
    let Some((first, later)) = boot.tsc.zip(tsc::read()) else {
        return;
    };
    let Some(before) = tsc::before_kernel(&first, &later) else {
        return;
    };
    let (hz, before_kernel_ns, error_ns) = (before.hz, before.before_kernel_ns, before.error_ns);
    let clocksource = std::fs::read_to_string(CLOCKSOURCE).unwrap_or_else(|e| format!("? ({e})"));
    tracing::info!(
        name: names::CLOCK_TSC, at_ns = first.boottime_ns, before_kernel_ns, error_ns, hz,
        clocksource = clocksource.trim_end(),
    );
}

/// Starts every configured sink; returns the progress of the sink to the host. With `again`, the
/// console continues after the last line of the earlier worker.
fn start_sinks(
    boot: &Boot,
    ring: &Arc<Ring>,
    identity: &Identity,
    again: bool,
    gate: console::Gate,
) -> watch::Receiver<u64> {
    let (delivered, progress) = watch::channel(0);
    let ring = || Arc::clone(ring);
    let unavailable = |sink: &str, error: &dyn std::fmt::Display| {
        tracing::warn!(name: names::SINK, sink, state = "unavailable", error = %error);
    };
    if to_host(&boot.config) {
        tokio::spawn(vsock::run(
            ring(),
            identity.clone(),
            boot.config.events_port,
            delivered,
        ));
        if let Err(error) = listener::vsock(boot.config.events_port, ring(), identity.clone()) {
            unavailable("vsock listener", &error);
        }
    }
    if let Some(level) = boot.config.console.level(confidential::is_confidential)
        && let Err(error) = console::start(ring(), level, again, gate)
    {
        unavailable("console", &format!("open /dev/console: {error}"));
    }
    if let Err(error) = listener::unix(
        &Path::new(RUN).join("events.sock"),
        ring(),
        identity.clone(),
    ) {
        unavailable("unix listener", &error);
    }
    progress
}

/// Whether events go over vsock.
fn to_host(config: &Config) -> bool {
    let sends = config.sends_events(confidential::is_confidential);
    if !sends && config.events_to_host == Switch::Auto {
        let reason = "confidential guest: its host is not trusted; gpuinit.events.vsock=on sends \
            events all the same";
        tracing::info!(name: names::SINK, sink = "vsock", state = "off", reason);
    }
    sends
}

/// Reports the hand-over. When that failed, returns the observer to notify after the delivery to
/// the host.
fn report_handover(boot: &Boot, handed: Handed) -> (Option<StepId>, Option<Observer>) {
    let Handed {
        begin_ns,
        end_ns,
        error,
    } = handed;
    // A refused guest has had no hand-over.
    let step = boot
        .refused
        .is_none()
        .then(|| step!(names::AGENT_EXEC, at_ns = begin_ns));
    let id = step.as_ref().map(RunningStep::id);
    if let Some(step) = &step {
        step.note("at_ns", end_ns);
    }
    let Some((error, observer)) = error else {
        return (id, None);
    };
    if let Some(step) = step {
        step.fail(&error);
    }
    tracing::error!(name: names::POWER_OFF, error);
    (id, Some(observer))
}

/// Delivers the reason of the power-off to the host, for a bounded time.
async fn last_words(ring: &Ring, mut delivered: watch::Receiver<u64>) {
    let all = ring.next_seq();
    // Without a listener, or with a slow one, the guest powers off all the same.
    if let Ok(Ok(_)) = tokio::time::timeout(LAST_WORDS, delivered.wait_for(|seq| *seq >= all))
        .await
        .map(|r| r.map(drop))
    {
        tokio::time::sleep(IN_FLIGHT).await; // not on the boot path: this guest is about to end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::layer::RecordLayer;
    use crate::stream::ring::Reader;
    use kata_gpu_wire::decode::decode;
    use kata_gpu_wire::record::{Kind, Line, Record};
    use tracing_subscriber::layer::SubscriberExt;

    #[test]
    fn a_death_and_a_step_that_it_broke_off_are_reported_once() {
        let ring = Arc::new(Ring::default());
        let subscriber = tracing_subscriber::registry().with(RecordLayer::new(Arc::clone(&ring)));
        let deaths: Vec<Death> = (1..=2)
            .map(|number| Death {
                number,
                status: "killed by SIGKILL".into(),
            })
            .collect();
        let begin = Record {
            span: Some(7),
            ..Record::new(Kind::Begin, names::GPU_ENABLE)
        };
        let stream = || -> Vec<Record> {
            let lines = Reader::new(Arc::clone(&ring), "test", 0).read(100);
            let records = lines
                .iter()
                .filter_map(|line| match decode(line.as_bytes()) {
                    Ok(Line::Record(record)) => Some(*record),
                    _ => None,
                });
            records.collect()
        };
        tracing::subscriber::with_default(subscriber, || {
            ring.push(begin);
            // Three successors; the third knows of one more death. None has told the keeper.
            for known in [1, 2, 2] {
                let previous = Previous::from_records(&stream());
                report_deaths(&ring, &previous, &deaths[..known]);
            }
        });
        let of = |name: &str| -> Vec<Record> {
            let all = stream().into_iter();
            all.filter(|record| record.name == name).collect()
        };
        let numbers: Vec<_> = of(names::PROCESS_DIED)
            .iter()
            .map(|death| death.fields["number"].as_u64())
            .collect();
        assert_eq!(numbers, [Some(1), Some(2)]);
        let steps: Vec<_> = of(names::GPU_ENABLE)
            .iter()
            .map(|r| (r.kind, r.span))
            .collect();
        assert_eq!(steps, [(Kind::Begin, Some(7)), (Kind::End, Some(7))]);
    }
}
