//! Steps of one GPU, from the scan to the spec:
//!
//! ```text
//! enable -> probe -> minor -> node -+-> publish
//!                                   +-> initialise -> usable
//! ```
//!
//! The [`schedule`](super::schedule) orders the begin of each step; this file carries the steps out
//! and reports their results. A GPU that hangs in a step is left as it is, for ever if need be, and
//! stops no other GPU.

use super::dispatch::Orders;
use super::extras;
use super::failed::{Failed, failed, failed_by};
use super::late::Progress;
use super::off_the_bus;
use super::publication::Update;
use super::reset;
use super::roster::Roster;
use super::schedule_messages::{Arrival, Fact, GpuId, Held, Order, Probe};
use super::shared::{Driver, Loaded, Shared};
use crate::boot::ipc::opener::Attach;
use crate::config::Naming;
use crate::config::Ready;
use crate::gpu::adapter;
use crate::gpu::adapter::InitError;
use crate::gpu::bind::{Bound, PciSysfs, SysfsError};
use crate::gpu::device_nodes::Node;
use crate::gpu::driver_proc;
use crate::machine::clock::boottime_ns;
use crate::machine::threads;
use crate::machine::threads::Panicked;
use crate::step;
use crate::stream::driver_lines::Unnamed;
use crate::stream::{After, StepId};
use kata_gpu_wire::failure::{FailedStep, Reason};
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use nix::errno::Errno;
use std::fmt::{self, Display};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

const PROC: &str = "/proc";
/// Longest wait before the next try of a bind that came too early, and limit of tries since the
/// last bind of any GPU. The kernel reports a plugged-in GPU before it permits a bind, and probes
/// GPUs that came together one after another; no event but the bind itself shows the moment after,
/// so the next try waits for it.
const TOO_EARLY: (Duration, u32) = (Duration::from_secs(1), 10);

/// Stack of a thread that waits for an answer and takes it into the schedule, in bytes.
const STACK: usize = 256 * 1024;
/// Time after which a probe behind a firewall sleeps, for 4 s; its process is moved to the lane's
/// vCPU then.
const ASLEEP: Duration = Duration::from_millis(500);

/// Brings one GPU up; ends when it is usable, has failed or is gone. A panic fails the GPU.
pub async fn bring_up(shared: Arc<Shared>, gpu: GpuId, arrival: Arrival, orders: Orders) {
    // A GPU of the boot scan may have been probed before this task began.
    let since_ns = if arrival == Arrival::Enabled {
        boottime_ns()
    } else {
        0
    };
    fail_on_panic(
        &shared,
        gpu,
        since_ns,
        settle(&shared, gpu, since_ns, orders),
    )
    .await;
}

async fn fail_on_panic(shared: &Shared, gpu: GpuId, since_ns: u64, work: impl Future<Output = ()>) {
    if let Err(panicked) = threads::caught(work).await {
        shared
            .give_up(
                gpu,
                since_ns,
                failed_by(FailedStep::Task, Reason::Internal)(&panicked),
            )
            .await;
    }
}

/// Runs the steps and reports their end.
async fn settle(shared: &Arc<Shared>, gpu: GpuId, since_ns: u64, orders: Orders) {
    match go(shared, gpu, orders).await {
        Ok(()) => {
            let uuid = uuid(shared, gpu).await;
            tracing::info!(
                name: names::GPU_USABLE, gpu = %gpu.address,
                index = shared.roster.index(gpu.address) as u64, uuid, generation = gpu.again(),
            );
            // The panic hook reports a panic there; the GPU is usable without extras.
            let _unused = extras::start(shared, gpu).await;
            shared.dispatch.report(Fact::Usable(gpu));
            shared.occasions.send_modify(|seen| seen.usable += 1);
            // The driver may have reported that before anyone took the GPU for usable.
            if shared.seen.is_off_the_bus(gpu) {
                shared.give_up(gpu, 0, off_the_bus::failure()).await;
            }
        }
        // A GPU that is gone has not failed.
        Err(_) if !shared.roster.contains(gpu) => {}
        Err(failure) => {
            if let Some(failure) = reset::instead_of(failure, shared, gpu, since_ns).await {
                shared.give_up(gpu, since_ns, failure).await;
            }
        }
    }
}

/// Runs the steps in order.
async fn go(shared: &Arc<Shared>, gpu: GpuId, mut orders: Orders) -> Result<(), Failed> {
    let mut order = next(&mut orders).await;
    let mut enabled = None;
    if let Order::Enable(_, holds) = &order {
        enabled = Some(enable(shared, gpu, holds).await?);
        order = next(&mut orders).await;
    }
    let Order::Probe(_, how) = order else {
        return Err(failed_by(FailedStep::Probe, Reason::Internal)(&format!(
            "ordered {order:?}: want a probe"
        )));
    };
    let probed = probe(shared, gpu, how, enabled).await?;
    let (bound, minor, looked) = read_minor(shared, gpu, probed, how == Probe::Load).await?;
    let loaded = loaded(shared).await?;
    let (node, made) = make_node(gpu, minor, &loaded, looked)?;
    shared.dispatch.report(Fact::Bound(gpu));
    match shared.config.ready {
        // A failed initialisation removes the GPU from the spec again. `readiness` decides whether
        // the GPU is held back there.
        Ready::Auto | Ready::Bound => {
            let published = publish(shared, gpu, node.clone(), made);
            let (initialised, published) = tokio::join!(
                initialise(shared, bound, gpu, &node, made, &mut orders),
                published
            );
            initialised.and(published)
        }
        Ready::Usable => {
            let usable = initialise(shared, bound, gpu, &node, made, &mut orders).await?;
            publish(shared, gpu, node, usable).await
        }
    }
}

/// Next order of this GPU. Pending for ever for a GPU that is gone: its task is aborted.
async fn next(orders: &mut Orders) -> Order {
    match orders.recv().await {
        Some(order) => order,
        None => std::future::pending().await,
    }
}

/// Enables the GPU, which makes the host map its BARs.
async fn enable(shared: &Arc<Shared>, gpu: GpuId, holds: &[Held]) -> Result<StepId, Failed> {
    let failure = match shared
        .lane
        .enable(gpu.address, holds, &shared.seen.progress(gpu))
        .await
    {
        Ok(Ok((step, took))) => {
            shared.dispatch.report(Fact::Enabled(gpu, took));
            return Ok(step);
        }
        Ok(Err(error)) => failed(FailedStep::Enable)(&error),
        Err(panicked) => failed_by(FailedStep::Enable, Reason::Internal)(&panicked),
    };
    // Release the GPU, which was held back for the load, so that it can be bound by hand. On a
    // thread: the device is locked during a probe.
    let (sysfs, address) = (shared.sysfs.clone(), gpu.address);
    let _unused = threads::run(move || sysfs.release(address)).await;
    Err(failure)
}

/// The driver, once its load is over.
async fn loaded(shared: &Shared) -> Result<Loaded, Failed> {
    let over = shared
        .driver
        .clone()
        .wait_for(|driver| !matches!(driver, Driver::Loading))
        .await
        .map(|driver| driver.clone());
    match over {
        Ok(Driver::Loaded(loaded)) => Ok(loaded),
        Ok(Driver::Failed { reason, error }) => Err(Failed::new(FailedStep::Module, reason, error)),
        Ok(Driver::Loading) | Err(_) => Err(failed_by(FailedStep::Module, Reason::Internal)(
            &"the load's task has ended",
        )),
    }
}

/// Lets the driver probe the GPU; returns the step that bound it.
async fn probe(
    shared: &Arc<Shared>,
    gpu: GpuId,
    how: Probe,
    enabled: Option<StepId>,
) -> Result<StepId, Failed> {
    let during = match how {
        Probe::DuringLoad => probe_during_load(shared, gpu, enabled).await,
        Probe::Load | Probe::Bind | Probe::BeforeEnable => None,
    };
    let loaded = loaded(shared).await?;
    // A load whose own GPU fails may unbind what was bound meanwhile. A bind counts, and the GPU's
    // files are read, only when the load is over, which the node has to wait for anyway.
    if let Some(step) = during.filter(|_| shared.sysfs.is_bound(gpu.address)) {
        return Ok(step);
    }
    match how {
        // A GPU that the load did not try gets a regular bind.
        Probe::Load if loaded.tried.contains(&gpu) => {
            let bound = shared.sysfs.is_bound(gpu.address).then_some(loaded.step);
            bound.ok_or_else(|| {
                let failure = failed(FailedStep::Probe)(
                    &"the driver's probe failed when the module was loaded",
                );
                Failed {
                    unnamed: Unnamed::OfSerialProbes,
                    ..failure
                }
            })
        }
        Probe::Load | Probe::DuringLoad | Probe::Bind | Probe::BeforeEnable => {
            bind(
                shared,
                gpu,
                After::from(&[enabled, Some(loaded.step)][..]),
                how,
            )
            .await
        }
    }
}

/// Probes this GPU while the module load still probes another one, whose probe sleeps. Returns the
/// step if that bound the GPU; a GPU that is not bound by the load's end gets a regular bind.
async fn probe_during_load(
    shared: &Arc<Shared>,
    gpu: GpuId,
    enabled: Option<StepId>,
) -> Option<StepId> {
    let step = step!(names::GPU_BIND, gpu = %gpu.address, after = ?After::from(&[enabled][..]));
    let (id, sysfs, progress, offered) = (
        step.id(),
        shared.sysfs.clone(),
        shared.seen.progress(gpu),
        Arc::clone(&shared.offered),
    );
    let probing = threads::run(move || {
        progress.on_this_thread();
        step.run(|| {
            // A GPU that could not be held back is probed by the load, and this call would wait for
            // that probe; hence the thread.
            let address = gpu.address;
            if !sysfs.is_held_back(address) {
                return Ok(false);
            }
            let lock = || threads::lock(&offered);
            lock().released.insert(gpu);
            sysfs.release(address)?;
            sysfs.probe(address)?;
            let bound = sysfs.is_bound_at_last(address);
            let offered = lock();
            if !bound && offered.gpu != Some(gpu) {
                // The load must not probe the GPU a third time.
                sysfs.hold_back(address)?;
            }
            Ok::<bool, SysfsError>(bound)
        })
    });
    // Errors are ignored: the regular bind that follows reports its own.
    matches!(probing.await, Ok(Ok(true))).then_some(id)
}

/// Binds through sysfs.
async fn bind(
    shared: &Arc<Shared>,
    gpu: GpuId,
    after: After,
    how: Probe,
) -> Result<StepId, Failed> {
    let step = step!(names::GPU_BIND, gpu = %gpu.address, after = ?after);
    let id = step.id();
    let binding = async {
        let (pause, most) = TOO_EARLY;
        let mut tries = 0;
        loop {
            let bound = shared.seen.next_bound();
            tries += 1;
            match try_bind(shared, gpu, how).await {
                Err(BindError::Refused(error))
                    if error.errno() == Some(Errno::ENODEV)
                        && tries < most
                        && shared.sysfs.is_present(gpu.address) =>
                {
                    if tokio::time::timeout(pause, bound).await.is_ok() {
                        tries = 0;
                    }
                }
                result => return result,
            }
        }
    };
    let since_ns = Some(boottime_ns());
    let result = match how {
        Probe::BeforeEnable => shared.lane.quiet_while(step.run_async(binding)).await,
        Probe::Load | Probe::DuringLoad | Probe::Bind => step.run_async(binding).await,
    };
    result.map(|()| id).map_err(|error| match error {
        BindError::Refused(error) => Failed {
            since_ns,
            ..failed(FailedStep::Probe)(&error)
        },
        BindError::Panicked(panicked) => failed_by(FailedStep::Probe, Reason::Internal)(&panicked),
    })
}

/// Tries to bind once, on a thread of its own; a bind that also enables runs in the lane's process.
async fn try_bind(shared: &Arc<Shared>, gpu: GpuId, how: Probe) -> Result<(), BindError> {
    let (shared, progress, gpu) = (Arc::clone(shared), shared.seen.progress(gpu), gpu.address);
    let trying = threads::run(move || {
        progress.on_this_thread();
        let sysfs = &shared.sysfs;
        sysfs.release(gpu)?;
        let bound = match how {
            Probe::BeforeEnable => bind_in_lane(&shared, gpu, &progress),
            Probe::Load | Probe::DuringLoad | Probe::Bind => sysfs.bind(gpu),
        };
        match bound {
            // Another bind came first.
            Err(_) if sysfs.is_bound_at_last(gpu) => Ok(()),
            result => result,
        }
    });
    trying
        .await
        .map_err(BindError::Panicked)?
        .map_err(BindError::Refused)
}

/// Reason why a bind had no result.
enum BindError {
    Refused(SysfsError),
    Panicked(Panicked),
}

impl Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(error) => error.fmt(f),
            Self::Panicked(panicked) => panicked.fmt(f),
        }
    }
}

/// Binds a GPU that the driver enables when its firewall is down, in a process that is on the
/// lane's vCPU by then. Blocks; call on a thread of its own.
fn bind_in_lane(
    shared: &Arc<Shared>,
    gpu: PciAddress,
    progress: &Progress,
) -> Result<(), SysfsError> {
    let binding = |process| {
        progress.on_thread(process);
        let lane = Arc::clone(&shared.lane);
        shared.runtime.spawn(async move {
            // The sleep begins on another vCPU: the lane's may be gone for an enabling until then.
            tokio::time::sleep(ASLEEP).await;
            lane.move_here(process);
        });
    };
    match shared.descriptors.bind(gpu, binding) {
        Some(result) => result.map_err(|errno| shared.sysfs.not_bound(gpu, errno)),
        None => shared.sysfs.bind(gpu),
    }
}

/// Reads the minor that the driver gave the GPU, and reports the bind with the time at which the
/// kernel reported it. Only place that reads the information file before the GPU is usable. Each
/// read makes the driver read config space (nine times, 550.163.01), waits for the driver's global
/// lock (before 590.44.01), and never returns for some GPUs that are lost; hence a thread of its
/// own.
async fn read_minor(
    shared: &Shared,
    gpu: GpuId,
    probed: StepId,
    by_load: bool,
) -> Result<(Bound, u32, StepId), Failed> {
    let bound_at = shared.seen.bound_at(gpu).filter(|_| by_load);
    let at_ns = bound_at.unwrap_or_else(boottime_ns);
    let (step, progress) = (
        step!(names::GPU_INFORMATION, gpu = %gpu.address, after = ?After(vec![probed])),
        shared.seen.progress(gpu),
    );
    let (id, sysfs, roster) = (step.id(), shared.sysfs.clone(), Arc::clone(&shared.roster));
    let reading = threads::run(move || {
        progress.on_this_thread();
        step.run(|| information(&sysfs, &roster, gpu))
    });
    let read = reading
        .await
        .map_err(|panicked| failed_by(FailedStep::Probe, Reason::Internal)(&panicked))?;
    let (bound, minor) = read.map_err(|e| failed_by(FailedStep::Probe, Reason::NoMinor)(&e))?;
    shared.seen.set_minor(gpu, minor);
    let index = shared.roster.index(gpu.address) as u64;
    tracing::info!(
        name: names::GPU_BOUND, gpu = %gpu.address, index, minor, bind_inode = bound.bind,
        generation = gpu.again(), at_ns,
    );
    Ok((bound, minor, id))
}

/// Notes the current bind, and reads its minor.
fn information(sysfs: &PciSysfs, roster: &Roster, gpu: GpuId) -> Result<(Bound, u32), String> {
    let look = || {
        sysfs
            .sight(gpu.address)
            .map(|seen| seen.bound(gpu.address))
            .map_err(|e| e.to_string())
    };
    let before = look()?;
    let own = before.filter(|bound| roster.bound(gpu, *bound));
    let minor = driver_proc::information(Path::new(PROC), gpu.address)
        .map_err(|e| e.to_string())?
        .minor;
    match own {
        Some(bound) if look()? == before => Ok((bound, minor)),
        _ => Err(format!(
            "read the minor of GPU {}: it was bound, unbound or replaced meanwhile",
            gpu.address
        )),
    }
}

/// Makes the GPU's device node.
fn make_node(
    gpu: GpuId,
    minor: u32,
    loaded: &Loaded,
    looked: StepId,
) -> Result<(Node, StepId), Failed> {
    let step = step!(names::GPU_NODES, gpu = %gpu.address, after = ?After(vec![looked]));
    let id = step.id();
    let node = step
        .run(|| loaded.nodes.gpu(loaded.major, minor))
        .map_err(|e| failed(FailedStep::Nodes)(&e))?;
    Ok((node, id))
}

/// Makes the GPU resolvable as soon as the nodes that every container needs exist.
async fn publish(
    shared: &Arc<Shared>,
    gpu: GpuId,
    node: Node,
    after: StepId,
) -> Result<(), Failed> {
    shared.dispatch.report(Fact::Publishing(gpu));
    let mut driver = shared.driver.clone();
    let over = |driver: &Driver| {
        matches!(driver, Driver::Loaded(loaded) if loaded.control_ready)
            || matches!(driver, Driver::Failed { .. })
    };
    // The wait fails only when the load's task has ended without a result.
    let error = match driver.wait_for(over).await.as_deref() {
        Ok(Driver::Failed { error, .. }) => Some(error.clone()),
        Ok(_) => None,
        Err(ended) => Some(ended.to_string()),
    };
    if let Some(error) = error {
        return Err(failed_by(FailedStep::Nodes, Reason::Internal)(&error));
    }
    let _unused = shared.spec.send(Update::Ready {
        gpu,
        nodes: vec![node],
        after: Some(after),
    });
    Ok(())
}

/// Initialises the adapter on order; waits for as long as the driver takes.
async fn initialise(
    shared: &Arc<Shared>,
    bound: Bound,
    gpu: GpuId,
    node: &Node,
    after: StepId,
    orders: &mut Orders,
) -> Result<StepId, Failed> {
    next(orders).await; // the last order of a GPU
    let before = shared.seen.initialised();
    let step = step!(
        names::GPU_INIT, gpu = %gpu.address, after = ?After::from(&[Some(after), before][..]),
        attach_ms = tracing::field::Empty, rc = tracing::field::Empty,
        status = tracing::field::Empty,
    );
    let (id, began_ns, node, shared, progress) = (
        step.id(),
        boottime_ns(),
        node.clone(),
        Arc::clone(shared),
        shared.seen.progress(gpu),
    );
    let initialising = threads::run(move || {
        progress.on_this_thread();
        let opened = shared.descriptors.of(&bound);
        shared.seen.begins_initialisation(gpu, opened.is_some());
        let opened = match opened {
            // An earlier worker opened the GPU; the result is queried below.
            Some(descriptor) => Ok((descriptor, None)),
            None => {
                shared.lane.keep_driver_off();
                // The initialisation begins here, not when the open returns: with drivers before
                // 550.40.07 the open is the whole initialisation.
                let opening = |thread| {
                    progress.on_thread(thread);
                    shared.dispatch.report(Fact::Opening(gpu));
                };
                let opened = shared.descriptors.open(bound, &node, opening);
                progress.on_this_thread();
                if shared.sysfs.is_over(bound) {
                    // The GPU was removed or unbound meanwhile: the driver waits until all its
                    // descriptors are closed, and has already logged that. Or another GPU has the
                    // minor now.
                    shared.descriptors.release(&bound);
                }
                opened
            }
        };
        let result = opened.and_then(|(descriptor, attach)| {
            shared.dispatch.report(Fact::Opened(gpu));
            let attach = attach.map(Arc::new);
            let watch = watch_attach(&shared, gpu, attach.clone());
            let result = adapter::wait(&descriptor, &node);
            if let Some(attach) = attach {
                attach.end();
            }
            if let Some(attached_ns) = watch.and_then(|watch| watch.join().ok()?) {
                step.note(
                    "attach_ms",
                    attached_ns.saturating_sub(began_ns) / 1_000_000,
                );
            }
            result
        });
        shared.seen.ends_initialisation(gpu, result.is_err());
        if let Err(InitError::Failed { rc, status, .. }) = &result {
            step.note("rc", i64::from(*rc));
            step.note("status", u64::from(*status));
        }
        let result = step.run(|| result);
        shared.seen.set_initialised(id);
        shared
            .dispatch
            .report(Fact::Initialised(gpu, result.is_ok()));
        result
    });
    match initialising.await {
        Ok(Ok(())) => Ok(id),
        Ok(Err(error @ InitError::Open { .. })) => Err(failed(FailedStep::Open)(&error)),
        Ok(Err(error)) => Err(failed(FailedStep::Init)(&error)),
        Err(panicked) => Err(failed_by(FailedStep::Init, Reason::Internal)(&panicked)),
    }
}

/// Reports the end of an initialisation's first part as soon as it is seen. The thread ends with
/// the wait, and returns the time in ns at which it was seen. None: nobody can see it.
fn watch_attach(
    shared: &Arc<Shared>,
    gpu: GpuId,
    attach: Option<Arc<Attach>>,
) -> Option<JoinHandle<Option<u64>>> {
    let watch = attach.and_then(|attach| {
        let shared = Arc::clone(shared);
        let watch = move || {
            let seen_ns = attach.wait().then(boottime_ns);
            shared.dispatch.report(match seen_ns {
                Some(_) => Fact::Attached(gpu),
                None => Fact::AttachUnseen(gpu),
            });
            seen_ns
        };
        let thread = std::thread::Builder::new().stack_size(STACK);
        thread.spawn(watch).ok()
    });
    if watch.is_none() {
        shared.dispatch.report(Fact::AttachUnseen(gpu));
    }
    watch
}

/// Adds a usable GPU's name by UUID, where configured; the driver knows the UUID from the first
/// initialisation on.
async fn uuid(shared: &Shared, gpu: GpuId) -> Option<String> {
    if !shared.config.cdi_names.contains(&Naming::Uuid) {
        return None;
    }
    let reading = threads::run(move || driver_proc::information(Path::new(PROC), gpu.address));
    let uuid = reading.await.ok()?.ok()?.uuid?;
    let _unused = shared.spec.send(Update::Known {
        gpu,
        uuid: uuid.clone(),
    });
    Some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::bring_up::shared::tests::{arrive, shared};
    use crate::config::Config;

    #[tokio::test]
    async fn a_panic_of_a_gpus_task_fails_that_gpu() {
        let (shared, mut orders, mut updates) =
            shared(Config::default(), Path::new("/nonexistent"));
        let gpu = arrive(&shared);
        shared.dispatch.report(Fact::Found(gpu, Arrival::Boot));
        shared.dispatch.report(Fact::Scanned);
        fail_on_panic(&shared, gpu, 0, async { panic!("no such thing") }).await;
        assert!(
            matches!(updates.try_recv(), Ok(Update::Failed { gpu: failed, .. }) if failed == gpu)
        );
        let settled = std::iter::from_fn(|| orders.try_recv().ok())
            .find(|order| matches!(order, Order::Settled { .. }));
        assert!(
            matches!(
                settled,
                Some(Order::Settled {
                    usable: 0,
                    failed: 1
                })
            ),
            "{settled:?}"
        );
    }
}
