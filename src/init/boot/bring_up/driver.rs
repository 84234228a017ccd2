//! Load of the driver: nvidia, then the control node, then nvidia-uvm, whose nodes every container
//! needs.
//!
//! With a strategy other than insmod, all GPUs but one are held back while the module is loaded:
//! the module's init probes every free GPU in turn, and fails as a whole when no probe succeeds. If
//! the GPU of the load is broken, the next one takes its place.

use super::dispatch::Dispatch;
use super::extras;
use super::find_driver_files;
use super::publication::{Common, Update};
use super::schedule_messages::{Fact, GpuId};
use super::shared::{Driver, Loaded, Offered, Shared};
use crate::config::{Config, parameter_value, with_registry_key};
use crate::formats::modinfo;
use crate::gpu::bind::{DRIVER, PciSysfs};
use crate::gpu::coherent_memory;
use crate::gpu::coherent_memory::Prepared;
use crate::gpu::device_nodes::{DeviceNodes, Node};
use crate::gpu::driver_proc::{Majors, majors};
use crate::gpu::pci::SYS;
use crate::kernel_modules::{Cause, LoadError, Modules};
use crate::machine::threads;
use crate::machine::threads::{Panicked, Running};
use crate::step;
use crate::stream::{After, RunningStep};
use kata_gpu_wire::arch::Arch;
use kata_gpu_wire::failure::Reason;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;
use tokio::sync::{oneshot, watch};

const PROC: &str = "/proc";
const UVM: &str = "nvidia-uvm";
/// Interval of the checks for the driver's registration at the bus, from which on other GPUs can be
/// probed during the load. The kernel reports no event for it. Used where probes sleep, until the
/// driver is registered.
const REGISTRATION_LOOK: Duration = Duration::from_millis(5);
/// Keeps the driver from using NVLink.
const NVLINK_DISABLE: &str = "NVreg_NvLinkDisable";
/// Makes the driver keep its global lock while a GPU's own processor boots.
const UNRELAXED: &str = "RmRelaxedGspInitLocking=0";

/// Mode of the driver's load.
#[derive(Clone, Copy)]
pub struct Way {
    /// Whether the load gets one GPU after another until one probe succeeds; else all at once.
    pub one_by_one: bool,
    /// Whether the load's probes also enable the GPUs.
    pub enables: bool,
}

/// Starts the load, which comes after `chosen`, on a thread of its own; must be called inside the
/// runtime. The load may probe `gpus`. With `one_by_one`, it first holds back all but the first of
/// them.
pub fn start(
    image: Image,
    chosen: After,
    state: watch::Sender<Driver>,
    shared: &Arc<Shared>,
    gpus: &[GpuId],
    way: Way,
) {
    let Image {
        mut modules,
        version,
        ..
    } = image;
    modules.follow(chosen);
    // A driver that was loaded before probes nothing now. Its GPUs may be locked for long: the load
    // of a worker that follows another one waits for none of them.
    let probes = !modules.is_live(DRIVER);
    let way = Way {
        one_by_one: way.one_by_one && probes,
        ..way
    };
    let load = Load {
        modules,
        version,
        shared: Arc::clone(shared),
        gpus: gpus.to_vec(),
        way,
    };
    // A load after a failed one starts afresh.
    state.send_replace(Driver::Loading);
    let outcome = state.clone();
    let (begun, begins) = oneshot::channel();
    let loading = threads::run(move || {
        if probes {
            load.begin();
        }
        // Only a load of one GPU after another is listened to.
        let _unused = begun.send(());
        load.run(&state);
        if way.one_by_one {
            // The kernel frees the modules' start-up code after a grace period, and interrupts all
            // CPUs for it. The CPU that sends these interrupts spins until the enabling CPU
            // responds. The first call waits for that grace period, the second one for the free.
            let _unused = crate::machine::sys::grace_period()
                .and_then(|()| crate::machine::sys::grace_period());
        }
    });
    tokio::spawn(follow(Arc::clone(shared), (begins, loading), way, outcome));
}

/// Reports the progress of a load that `begins`. After the load, makes the devices that no GPU
/// waits for.
async fn follow(
    shared: Arc<Shared>,
    (begins, mut loading): (oneshot::Receiver<()>, Running<()>),
    way: Way,
    outcome: watch::Sender<Driver>,
) {
    let ended = async {
        if way.one_by_one {
            let registered = async {
                // Fails only with the load, whose panic is seen below. An earlier worker's load may
                // have registered the driver: no GPU is probed before the others are held back.
                let _unused = begins.await;
                is_registered(&shared.sysfs).await;
            };
            tokio::select! {
                () = registered => shared.dispatch.report(Fact::Registered),
                ended = &mut loading => return ended,
            }
        }
        loading.await
    };
    let ended = match way.enables {
        true => shared.lane.quiet_while(ended).await,
        false => ended.await,
    };
    if let Err(error) = ended {
        panicked(&outcome, &shared.dispatch, &error);
    }
    over(&shared);
}

/// Fails a load that has panicked, unless the common nodes are made: GPUs wait for nothing else.
fn panicked(outcome: &watch::Sender<Driver>, dispatch: &Dispatch, panicked: &Panicked) {
    let error = format!("load module nvidia: the load has panicked: {panicked}");
    tracing::error!(name: names::MODULE_LOAD, error);
    if !matches!(&*outcome.borrow(), Driver::Loaded(loaded) if loaded.control_ready) {
        outcome.send_replace(Driver::Failed {
            reason: Some(Reason::Internal),
            error,
        });
        dispatch.report(Fact::Loaded(false));
    }
}

fn is_loaded(driver: &Driver) -> bool {
    matches!(driver, Driver::Loaded(_))
}

fn over(shared: &Arc<Shared>) {
    shared.dispatch.report(Fact::LoadOver);
    if is_loaded(&shared.driver.borrow()) {
        let (spec, channels) = (shared.spec.clone(), shared.config.imex_channels);
        let others = threads::run(move || extras::others(channels, &spec));
        let shared = Arc::clone(shared);
        tokio::spawn(async move {
            // A panic has been reported by the panic hook. Services open the nodes made there.
            let _unused = others.await;
            shared
                .milestones
                .send_modify(|reached| reached.loaded = true);
        });
    }
}

/// Returns when the driver is registered at the bus.
async fn is_registered(sysfs: &PciSysfs) {
    while !sysfs.is_registered() {
        tokio::time::sleep(REGISTRATION_LOOK).await; // see the constant
    }
}

/// The image's driver files, looked up once.
pub struct Image {
    /// Modules of the running kernel, with the driver's options from the configuration.
    pub modules: Modules,
    /// The driver's module, and its version, where the file has one.
    pub file: Option<PathBuf>,
    pub version: Option<String>,
}

impl Image {
    pub fn of(config: &Config, command_line: &[u8]) -> Self {
        let mut modules = Modules::of_guest(command_line);
        if !config.relaxed {
            let key = with_registry_key(&modules.options(DRIVER), UNRELAXED);
            modules.add_options(DRIVER, &key);
        }
        let file = file(&modules);
        let version = file.as_deref().and_then(version_on_disk);
        Self {
            modules,
            file,
            version,
        }
    }

    /// Value of the option that disables NVLink, from modprobe.d or the command line.
    pub fn nvlink_option(&self) -> Option<String> {
        parameter_value(&self.modules.options(DRIVER), NVLINK_DISABLE)
    }

    /// Loads the driver with NVLink disabled.
    pub fn disable_nvlink(&mut self) {
        self.modules
            .add_options(DRIVER, &format!("{NVLINK_DISABLE}=1"));
    }
}

/// Whether the kernel has the driver, or is loading it.
pub fn is_in_kernel() -> bool {
    Path::new(SYS).join("module").join(DRIVER).exists()
}

fn version_on_disk(file: &Path) -> Option<String> {
    modinfo::value(file, "version").ok()?
}

/// The driver's module, if there is one. The load reports files that cannot be found or read.
fn file(modules: &Modules) -> Option<PathBuf> {
    let plan = modules.show_depends(DRIVER).ok()?.into_iter();
    plan.map(|(path, _)| path).find(|path| is_driver(path))
}

fn is_driver(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name.to_string_lossy().split('.').next() == Some(DRIVER))
}

/// Nodes of a driver that is loaded already, made by an earlier worker.
pub struct Nodes {
    nodes: DeviceNodes,
    majors: Majors,
}

/// Device nodes of the loaded driver; `None` without a driver.
pub fn nodes_now() -> Option<Nodes> {
    let majors = majors(Path::new(PROC)).ok()?;
    majors.nvidia?;
    Some(Nodes {
        nodes: DeviceNodes::of_guest(),
        majors,
    })
}

impl Nodes {
    /// Nodes that every container gets, as far as they exist.
    pub fn common_now(&self) -> Vec<Node> {
        let control = self
            .majors
            .nvidia
            .and_then(|major| self.nodes.control(major).ok());
        let uvm = self.majors.uvm.and_then(|major| self.nodes.uvm(major).ok());
        control
            .into_iter()
            .chain(uvm.into_iter().flatten())
            .collect()
    }

    /// Node of a bound GPU. The driver is not queried: for a GPU that has fallen off the bus, the
    /// query may never return.
    pub fn gpu_now(&self, minor: u32) -> Option<Node> {
        self.nodes.gpu(self.majors.nvidia?, minor).ok()
    }
}

/// Reason why no driver is loaded, as far as it is known without the driver's log lines, and the
/// error. ENODEV has three meanings, which only those lines distinguish.
type Failure = (Option<Reason>, String);

fn failure_of(error: &LoadError) -> Failure {
    let reason = match error.cause {
        Cause::Missing => Some(Reason::DriverMissing),
        Cause::NoDevice => None,
        Cause::Other => Some(Reason::DriverLoadFailed),
    };
    (reason, error.to_string())
}

/// Major number of a driver that is loaded.
fn major() -> Result<u32, String> {
    let majors = majors(Path::new(PROC)).map_err(|e| e.to_string())?;
    majors
        .nvidia
        .ok_or("load module nvidia: it is loaded, but /proc/devices has no \"nvidia\"".into())
}

struct Load {
    modules: Modules,
    version: Option<String>,
    shared: Arc<Shared>,
    gpus: Vec<GpuId>,
    way: Way,
}

impl Load {
    /// Holds all GPUs but the first back, or releases those that an earlier worker's load has held
    /// back. A GPU that the kernel probes by itself is left alone: sysfs would wait for its probe.
    /// Never on the runtime's thread: sysfs waits for a GPU's removal, too, which waits for that
    /// thread.
    fn begin(&self) {
        let first = self.gpus.first().filter(|_| self.way.one_by_one);
        *self.lock() = Offered {
            gpu: first.copied(),
            ..Offered::default()
        };
        for gpu in self
            .gpus
            .iter()
            .filter(|gpu| !self.shared.sysfs.is_bound(gpu.address))
        {
            if first.is_some_and(|first| first != gpu) {
                self.hold_back(gpu.address);
            } else if self.shared.sysfs.is_held_back(gpu.address) {
                self.release(gpu.address);
            }
        }
    }

    /// Offers the driver the next GPU in the place of the last one. Those that were released for a
    /// probe during the last load are held back again: this one would probe them in turn.
    fn offer(&self, last: Option<&GpuId>, next: &GpuId) {
        let mut offered = self.lock();
        let mut free = std::mem::take(&mut offered.released);
        free.extend(last);
        for gpu in free
            .into_iter()
            .filter(|gpu| gpu != next && !self.shared.sysfs.is_bound(gpu.address))
        {
            self.hold_back(gpu.address);
        }
        offered.gpu = Some(*next);
        self.release(next.address);
    }

    fn lock(&self) -> MutexGuard<'_, Offered> {
        threads::lock(&self.shared.offered)
    }

    /// The load probes a GPU that cannot be held back; the GPU is bound afterwards.
    fn hold_back(&self, gpu: PciAddress) {
        if let Err(error) = self.shared.sysfs.hold_back(gpu) {
            tracing::warn!(name: names::GPU_BIND, gpu = %gpu, error = %error);
        }
    }

    fn prepare_memory(&self) {
        let gpus: Vec<_> = self.gpus.iter().map(|gpu| gpu.address).collect();
        let Some(Prepared {
            policy,
            gpu_memory,
            page_structs,
            available,
            error,
        }) = coherent_memory::prepare(Path::new("/"), Arch::OURS, &gpus)
        else {
            return;
        };
        let (gpu_memory_mib, page_structs_mib, available_mib) =
            (gpu_memory >> 20, page_structs >> 20, available >> 20);
        match error {
            None => {
                tracing::info!(
                    name: names::MEMORY_COHERENT, policy, gpu_memory_mib, page_structs_mib,
                    available_mib,
                )
            }
            Some(error) => {
                tracing::warn!(
                    name: names::MEMORY_COHERENT, policy, gpu_memory_mib, page_structs_mib,
                    available_mib, error,
                )
            }
        }
    }

    fn run(mut self, state: &watch::Sender<Driver>) {
        let shared = Arc::clone(&self.shared);
        // Before the load, and so before any open: the driver adds the memory at the first one.
        self.prepare_memory();
        // The search runs during the load, which takes longer; after the load where no thread can
        // be started.
        let version = self.version.clone();
        let looking =
            std::thread::Builder::new().spawn(move || find_driver_files::find(version.as_deref()));
        let (mut loaded, making) = match self.load() {
            Ok(loaded) => loaded,
            Err((reason, error)) => {
                // Leave no trace in sysfs.
                self.gpus
                    .iter()
                    .filter(|_| self.way.one_by_one)
                    .for_each(|gpu| self.release(gpu.address));
                state.send_replace(Driver::Failed { reason, error });
                shared.dispatch.report(Fact::Loaded(false));
                return;
            }
        };
        state.send_replace(Driver::Loaded(loaded.clone()));
        shared.dispatch.report(Fact::Loaded(true));
        let Ok(nodes) = making.run(|| Ok::<_, Infallible>(self.common_nodes(&loaded)));
        shared.dispatch.report(Fact::UvmLoaded);
        let files = match looking.map(std::thread::JoinHandle::join) {
            Ok(Ok(files)) => files,
            Ok(Err(_)) => {
                let error = "looking for the driver's files has panicked, a bug of this init: \
                    containers get their GPUs without the driver's libraries";
                tracing::error!(name: names::DRIVER_FILES, error);
                None
            }
            Err(_) => find_driver_files::find(self.version.as_deref()),
        };
        let common = Common { nodes, files };
        // Common nodes go first: no GPU may be published without them. Sending fails only when the
        // writer is gone, with the runtime.
        let _unused = shared.spec.send(Update::Common(common));
        loaded.control_ready = true;
        state.send_replace(Driver::Loaded(loaded));
    }

    /// Loads the driver. Returns it and the step, begun here, that makes the nodes every container
    /// needs.
    fn load(&mut self) -> Result<(Loaded, RunningStep), Failure> {
        let mut tried = Vec::new();
        let gpus = self.gpus.clone();
        let mut candidates = gpus.iter();
        loop {
            let candidate = candidates.next();
            match (self.way.one_by_one, candidate) {
                (true, Some(gpu)) => tried.push(*gpu),
                _ => tried.clone_from(&self.gpus),
            }
            let loaded = match self.way.enables {
                true => self.shared.lane.run_there(|| self.modules.load(DRIVER)),
                false => self.modules.load(DRIVER),
            };
            match loaded {
                Ok(step) => {
                    let making = step!(names::DRIVER_NODES, after = ?After(vec![step]));
                    let major = major().map_err(|error| {
                        making.fail(&error);
                        (Some(Reason::DriverLoadFailed), error)
                    })?;
                    let nodes = DeviceNodes::of_guest();
                    return Ok((
                        Loaded {
                            step,
                            major,
                            nodes,
                            tried,
                            control_ready: false,
                        },
                        making,
                    ));
                }
                // No probe of the tried GPUs succeeded: offer the next one to the driver.
                Err(LoadError {
                    cause: Cause::NoDevice,
                    ..
                }) if self.way.one_by_one && tried.len() < self.gpus.len() => {
                    if let Some(next) = self.gpus.get(tried.len()) {
                        self.offer(candidate, next);
                    }
                }
                Err(error) => return Err(failure_of(&error)),
            }
        }
    }

    fn release(&self, gpu: PciAddress) {
        if let Err(error) = self.shared.sysfs.release(gpu) {
            tracing::warn!(name: names::GPU_BIND, gpu = %gpu, error = %error);
        }
    }

    /// Makes the control node, loads nvidia-uvm and makes its nodes. A load of nvidia-uvm waits for
    /// a load of nvidia that is still under way.
    fn common_nodes(&mut self, loaded: &Loaded) -> Vec<Node> {
        let mut common = Vec::new();
        match loaded.nodes.control(loaded.major) {
            Ok(node) => common.push(node),
            Err(error) => {
                tracing::error!(
                    name: names::GPU_NODES, error = %format!("{error}: no container can use a GPU"),
                )
            }
        }
        let uvm = self
            .modules
            .load(UVM)
            .map_err(|e| e.to_string())
            .and_then(|_| {
                let major = majors(Path::new(PROC)).map_err(|e| e.to_string())?.uvm;
                let major = major.ok_or(
                    "load module nvidia-uvm: it is loaded, but /proc/devices has no \"nvidia-uvm\"",
                )?;
                loaded.nodes.uvm(major)
            });
        match uvm {
            Ok(nodes) => common.extend(nodes),
            Err(error) => {
                tracing::error!(
                    name: names::MODULE_LOAD, module = UVM,
                    error = %format!("{error}: containers get their GPUs without /dev/nvidia-uvm, \
                        and CUDA will not start in them"),
                )
            }
        }
        // GPUs that failed the load stay released, so that they can be bound by hand.
        for gpu in loaded
            .tried
            .iter()
            .filter(|g| self.way.one_by_one && !self.shared.sysfs.is_bound(g.address))
        {
            self.release(gpu.address);
        }
        common
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::bring_up::dispatch;
    use crate::boot::bring_up::schedule::Schedule;
    use crate::boot::bring_up::shared::tests::facts;
    use crate::boot::bring_up::strategy::Policy;

    #[test]
    fn a_load_that_panics_leaves_nobody_waiting() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let policy = Policy::unconfigured(facts());
            let (dispatch, _orders) = Dispatch::start(Schedule::new(policy, dispatch::now()));
            let (outcome, mut state) = watch::channel(Driver::Loading);
            let error = threads::run(|| -> () { panic!("on purpose") }).await.unwrap_err();
            panicked(&outcome, &dispatch, &error);
            let failed = state
            .wait_for(|driver| !matches!(driver, Driver::Loading))
            .await
            .unwrap()
            .clone();
            assert!(matches!(
            failed,
            Driver::Failed { reason: Some(Reason::Internal), error } if error.contains("on purpose")
        ));
            // A load that had made all that GPUs wait for stays loaded.
            let nodes = DeviceNodes::of_guest();
            let loaded = Loaded {
            step: crate::stream::StepId::next(), major: 195, nodes, tried: Vec::new(),
            control_ready: true,
        };
            outcome.send_replace(Driver::Loaded(loaded));
            panicked(&outcome, &dispatch, &error);
            assert!(is_loaded(&state.borrow()));
        });
    }
}
