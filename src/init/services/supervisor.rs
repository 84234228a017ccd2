//! Starts, watches and restarts services: one task each, in the worker. A service waits for the
//! state of the GPUs and the services that it needs, and for nothing else.
//!
//! A service outlives the worker: its output is a FIFO, its process goes to PID 1, and the next
//! worker finds it by its mark.

use super::configuration;
use super::launch::{Launch, account};
use super::restart_backoff::Backoff;
use super::service_output::{Log, Output};
use super::service_plan::{Decision, Entry, Facts, Uvm, plan, uvm_persistence};
use super::service_processes::{Ending, MARK, Process, find};
use super::service_table::{
    Argument, Gpus, HOST_ENGINE_PORT, Name, Ready, Restart, SERVICES, SETTLED_LIMIT, Service,
};
use super::state::{ENDING, Fabric, Milestones, RUN};
use super::syslog::{self, Syslog};
use crate::config::Services;
use crate::driver_files::driver_root;
use crate::gpu::bind::DRIVER;
use crate::gpu::device_nodes::make_for_switches;
use crate::gpu::pci;
use crate::gpu::topology::{Functions, Topology};
use crate::kernel_modules::Modules;
use crate::machine::{confidential, threads};
use crate::step;
use crate::stream::RunningStep;
use kata_gpu_wire::names;
use nix::fcntl::OFlag;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::unistd::{Pid, pipe2};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

const PROC: &str = "/proc";
/// Mount of cgroup2; the agent makes it.
const CGROUPS: &str = "/sys/fs/cgroup";
/// Parent of the services' cgroups.
const CGROUP: &str = "gpu-services";
/// Limit of a launch's error text.
const MAX_ERROR: u64 = 1024;
/// Longest wait for a service's socket.
const SOCKET_LIMIT: Duration = Duration::from_secs(15);
/// Longest wait for a connection within this guest.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Inputs of the services' tasks.
pub struct Inputs {
    pub asked: Services,
    pub command_line: Vec<u8>,
    pub milestones: watch::Receiver<Milestones>,
    pub fabric: watch::Receiver<Fabric>,
    /// Set to true when no service needs a module any more.
    pub modules_loaded: watch::Sender<bool>,
    /// Services that an earlier worker has started; None in the first worker.
    pub earlier: Option<BTreeSet<String>>,
}

/// State of a service, for tasks that wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Starting,
    Ready,
    /// A start has failed, or the service has ended: no task waits for the next start.
    Failed,
}

/// State shared by all services' tasks.
struct Shared {
    topology: Topology,
    functions: Functions,
    confidential: bool,
    root: &'static Path,
    inputs: Inputs,
    states: BTreeMap<Name, watch::Sender<State>>,
    syslog: Option<Arc<Syslog>>,
}

/// Starts the services of this guest and follows them for as long as the worker lives.
pub async fn run(mut inputs: Inputs) {
    // The sender lives as long as the worker.
    let Ok(reached) = inputs
        .milestones
        .wait_for(|reached| reached.topology.is_some())
        .await
        .map(|reached| reached.clone())
    else {
        return;
    };
    let Some(topology) = reached.topology else {
        return;
    };
    let is_early = match topology {
        Topology::HopperFabric
        | Topology::ProtectedPcie
        | Topology::BlackwellFabric
        | Topology::ServiceVm => true,
        Topology::None | Topology::Gpus | Topology::SharedFabric => false,
    };
    if !is_early {
        // No module is needed, and nothing starts before the GPUs are settled.
        inputs.modules_loaded.send_replace(true);
        if inputs
            .milestones
            .wait_for(|reached| reached.settled)
            .await
            .is_err()
        {
            return;
        }
    }
    let root = driver_root();
    let confidential = confidential::is_confidential();
    let mut programs = programs(root);
    let facts = Facts {
        topology,
        confidential,
        managed: !reached.functions.management.is_empty(),
        asked: &inputs.asked,
        programs: &programs,
    };
    let entries = plan(&facts);
    entries.iter().for_each(report_plan);
    let mut starts = Vec::new();
    for service in &SERVICES {
        let of = |entry: &&Entry| entry.name == service.name;
        if let Some(Decision::Starts { after }) = entries.iter().find(of).map(|e| &e.decision)
            && let Some(program) = programs.remove(&service.name)
        {
            let log = Log::new(service.name.name());
            starts.push((service, program, after.clone(), log));
        }
    }
    if starts.is_empty() {
        inputs.modules_loaded.send_replace(true);
        return;
    }
    let logs = starts
        .iter()
        .map(|(service, .., log)| (service.name, log.clone()));
    let syslog = syslog::start(logs.collect(), inputs.earlier.is_some());
    let states = starts
        .iter()
        .map(|(service, ..)| (service.name, watch::channel(State::Starting).0))
        .collect();
    let command_line = std::mem::take(&mut inputs.command_line);
    let shared = Arc::new(Shared {
        topology,
        functions: reached.functions,
        confidential,
        root,
        inputs,
        states,
        syslog,
    });
    // An earlier worker has loaded the modules of the services it started; module loading may be
    // forbidden by now.
    let modules: Vec<&'static str> = starts
        .iter()
        .filter(|(service, ..)| !shared.was_started(service.name))
        .flat_map(|(service, ..)| shared.modules_of(service))
        .collect();
    for (service, program, after, log) in starts {
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let one = One {
                service,
                program,
                after,
                output: output(service.name, &log),
                log,
                shared,
            };
            one.live().await
        });
    }
    // A panic has been reported by the panic hook.
    let _unused = threads::run(move || load(&modules, &command_line)).await;
    shared.inputs.modules_loaded.send_replace(true);
}

impl Shared {
    /// Whether an earlier worker has started a service.
    fn was_started(&self, name: Name) -> bool {
        let earlier = self.inputs.earlier.as_ref();
        earlier.is_some_and(|earlier| earlier.contains(name.name()))
    }

    /// Modules that a service needs. Without GPUs nothing else loads the driver, which fabric
    /// manager needs for switches that are PCI functions.
    fn modules_of(&self, service: &Service) -> Vec<&'static str> {
        let drives = service.name == Name::FabricManager
            && self.topology == Topology::ServiceVm
            && self.functions.switches > 0;
        service
            .modules
            .iter()
            .copied()
            .chain(drives.then_some(DRIVER))
            .collect()
    }

    /// GUID of the first management port that is open to a subnet manager, which reaches the
    /// switches through it. The port exists once its modules are loaded.
    fn port_guid(&self) -> Result<String, String> {
        let mut reasons = Vec::new();
        for function in &self.functions.management {
            match pci::port_guid(Path::new(pci::SYS), *function) {
                Ok(guid) => return Ok(guid),
                Err(why) => reasons.push(format!("{function}: {why}")),
            }
        }
        Err(format!(
            "no port leads to the switches: {}",
            reasons.join("; ")
        ))
    }
}

/// Programs that the image has.
fn programs(root: &Path) -> BTreeMap<Name, PathBuf> {
    let found = |service: &Service| {
        let path = service
            .programs
            .iter()
            .map(|program| root.join(program))
            .find(|path| path.is_file())?;
        Some((service.name, path))
    };
    SERVICES.iter().filter_map(found).collect()
}

fn report_plan(entry: &Entry) {
    let (service, reason) = (entry.name.name(), entry.reason.as_str());
    match &entry.decision {
        Decision::Starts { after } => {
            let after: Vec<&str> = after.iter().map(|name| name.name()).collect();
            tracing::info!(
                name: names::SERVICE_PLAN, service, starts = true, reason,
                waits_for = after.join(","),
            );
        }
        Decision::Off => tracing::info!(name: names::SERVICE_PLAN, service, starts = false, reason),
        Decision::Missing { needed } => {
            let error = format!(
                "{service} is wanted ({reason}), but the image has no such program: add its \
                    package to the image"
            );
            match needed {
                true => {
                    tracing::error!(
                        name: names::SERVICE_PLAN, service, starts = false, reason, error,
                    )
                }
                false => {
                    tracing::warn!(
                        name: names::SERVICE_PLAN, service, starts = false, reason, error,
                    )
                }
            }
        }
    }
}

/// Loads the modules that services need. Failures are ignored: the kernel may have the modules
/// built in, and a service reports its own failure.
fn load(modules: &[&str], command_line: &[u8]) {
    if modules.is_empty() {
        return;
    }
    let mut index = Modules::of_guest(command_line);
    for module in modules {
        if let Err(error) = index.load(module) {
            tracing::warn!(
                name: names::MODULE_LOAD, module,
                error = %format!("{error}: a service needs it, unless the kernel has it built in"),
            );
        } else if *module == DRIVER
            && let Err(error) = make_for_switches(Path::new(PROC), Path::new("/dev"))
        {
            tracing::error!(name: names::MODULE_LOAD, module, error);
        }
    }
}

/// A service.
struct One {
    service: &'static Service,
    program: PathBuf,
    after: Vec<Name>,
    output: Option<Arc<Output>>,
    log: Log,
    shared: Arc<Shared>,
}

/// Opens the output of a service, and reads it from now on.
fn output(name: Name, log: &Log) -> Option<Arc<Output>> {
    match Output::open(name) {
        Ok(output) => {
            let output = Arc::new(output);
            let (reading, log) = (Arc::clone(&output), log.clone());
            tokio::spawn(async move { reading.follow(&log).await });
            Some(output)
        }
        Err(error) => {
            tracing::warn!(
                name: names::SINK, sink = "service output", service = name.name(),
                state = "unavailable", error,
            );
            None
        }
    }
}

/// Waits for a state. The sender lives as long as the worker.
async fn reached<T>(mut seen: watch::Receiver<T>, wanted: impl FnMut(&T) -> bool) {
    drop(seen.wait_for(wanted).await);
}

/// The files that a program needs and the image lacks, for the error of its start.
fn without(service: &Service) -> String {
    let missing: Vec<String> = service
        .files
        .iter()
        .map(|file| format!("/{file}"))
        .filter(|path| !Path::new(path).is_file())
        .collect();
    if missing.is_empty() {
        String::new()
    } else {
        format!(
            "; the image has no {}, without which it fails",
            missing.join(", ")
        )
    }
}

/// Returns when a path exists. Its directory must exist.
async fn appears(path: &Path) -> std::io::Result<()> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    inotify.add_watch(
        path.parent().unwrap_or(Path::new("/")),
        AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO,
    )?;
    let readiness: OwnedFd = inotify.as_fd().try_clone_to_owned()?;
    let readiness = crate::machine::sys::async_fd(readiness)?;
    while !path.exists() {
        let mut ready = readiness.readable().await?;
        // The names in the events make no difference.
        let _unused = inotify.read_events();
        ready.clear_ready();
    }
    Ok(())
}

/// Connects to a TCP port of this guest; blocks for a short time.
fn connect(port: u16) -> Result<(), String> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    TcpStream::connect_timeout(&address, CONNECT_LIMIT)
        .map(drop)
        .map_err(|e| format!("nothing listens at {address}: {e}"))
}

impl One {
    /// Life of a service, over its restarts.
    async fn live(&self) {
        let name = self.service.name;
        let mut backoff = Backoff::default();
        let is_again = self.shared.inputs.earlier.is_some();
        let mut found = is_again.then(|| find(Path::new(PROC), name)).flatten();
        let was_started = self.shared.was_started(name);
        if let (None, true, Some(reason)) = (found, was_started, self.stays_off()) {
            let error =
                format!("{name} has ended while no worker watched it, and stays off: {reason}");
            tracing::error!(name: names::SERVICE_ENDED, service = name.name(), error);
            return self.set(State::Failed);
        }
        loop {
            if found.is_none() {
                self.wait_for_needs().await;
            }
            let began = Instant::now();
            let (error, ending, life) = match self.start(found.take()).await {
                Ok(process) => {
                    self.set(State::Ready);
                    let (ending, life) = (self.end_of(process).await, began.elapsed());
                    let error = format!("{name} has ended ({ending}) after {} s", life.as_secs());
                    (error, Some(ending), life)
                }
                Err(error) => (error, None, began.elapsed()),
            };
            let lines = ending.map(|_| self.last_lines()).unwrap_or_default();
            let next = match self.stays_off() {
                Some(reason) => Err(reason),
                None => Ok(backoff.after(life)),
            };
            self.report(&error, ending, next, &lines);
            self.set(State::Failed);
            let Ok(pause) = next else { return };
            tokio::time::sleep(pause).await; // see Backoff
            if self.stays_off().is_some() {
                return;
            }
        }
    }

    fn set(&self, state: State) {
        if let Some(sender) = self.shared.states.get(&self.service.name) {
            sender.send_replace(state);
        }
    }

    /// Reason that keeps the service from starting again.
    fn stays_off(&self) -> Option<&'static str> {
        if Path::new(RUN).join(ENDING).exists() {
            return Some("the guest ends");
        }
        match self.service.restart {
            Restart::Always => None,
            Restart::UnlessConfidential => self
                .shared
                .confidential
                .then_some("not started again in a confidential guest"),
        }
    }

    /// Waits for the GPUs and the services that this one needs; reports a wait that takes long.
    async fn wait_for_needs(&self) {
        if !self.shared.modules_of(self.service).is_empty() {
            let loaded = reached(self.shared.inputs.modules_loaded.subscribe(), |loaded| {
                *loaded
            });
            self.reported_late("its kernel modules", loaded).await;
        }
        let milestones = || self.shared.inputs.milestones.clone();
        let settled = || reached(milestones(), |reached| reached.settled);
        match self.service.gpus {
            Gpus::Unneeded => {}
            Gpus::Settled => settled().await,
            Gpus::SettledInTime => {
                // Without GPUs no driver is loaded: only settled ends the wait.
                reached(milestones(), |reached| reached.loaded || reached.settled).await;
                if tokio::time::timeout(SETTLED_LIMIT, settled())
                    .await
                    .is_err()
                {
                    let (service, waited_ms) =
                        (self.service.name.name(), SETTLED_LIMIT.as_millis() as u64);
                    tracing::warn!(
                        name: names::SERVICE_LATE, service, waited_ms,
                        waits_for = "all GPUs; starting without",
                    );
                }
            }
        }
        for before in &self.after {
            if let Some(state) = self.shared.states.get(before) {
                let ready = reached(state.subscribe(), |state| *state != State::Starting);
                self.reported_late(before.name(), ready).await;
            }
        }
        if self.service.arguments.contains(&Argument::UvmPersistence) {
            let is_decided = |fabric: &Fabric| self.uvm(*fabric) != Uvm::WaitForFabric;
            let decided = reached(self.shared.inputs.fabric.clone(), is_decided);
            self.reported_late("the fabric", decided).await;
        }
    }

    fn uvm(&self, fabric: Fabric) -> Uvm {
        let Shared {
            topology,
            confidential,
            inputs,
            ..
        } = &*self.shared;
        uvm_persistence(
            inputs.asked.uvm_persistence,
            *topology,
            *confidential,
            fabric,
        )
    }

    /// Waits; reports once that this takes long.
    async fn reported_late<T>(&self, waits_for: &str, wait: impl Future<Output = T>) -> T {
        let mut wait = std::pin::pin!(wait);
        let late = self.service.late;
        if let Ok(result) = tokio::time::timeout(late, &mut wait).await {
            return result;
        }
        let (service, waited_ms) = (self.service.name.name(), late.as_millis() as u64);
        tracing::warn!(name: names::SERVICE_LATE, service, waited_ms, waits_for);
        wait.await
    }

    /// Starts the service, or takes one that runs, and waits until it is ready.
    async fn start(&self, found: Option<Pid>) -> Result<Process, String> {
        let (name, program) = (self.service.name, self.program.display().to_string());
        let empty = tracing::field::Empty;
        let is_found = found.is_some().then_some(true);
        let step = step!(
            names::SERVICE_START,
            service = name.name(),
            program,
            found = is_found,
            main_pid = empty,
            uvm = empty,
            port_guid = empty
        );
        let started = async {
            let process = match found {
                Some(pid) => {
                    Process::watch(pid).map_err(|e| format!("watch process {pid}: {e}"))?
                }
                None => {
                    self.log.begin();
                    self.launch(&step).await?
                }
            };
            let process = self
                .reported_late("itself", self.ready(process, found.is_some()))
                .await?;
            step.note("main_pid", process.pid.as_raw() as u64);
            Ok(process)
        };
        let result: Result<Process, String> = started.await;
        result.map_err(|error| {
            let lines = self.last_lines();
            let last = if lines.is_empty() {
                "it wrote nothing".into()
            } else {
                format!("its last lines: {}", lines.join(" | "))
            };
            let error = format!("start {name}: {error}{}", without(self.service));
            step.fail(&format!("{error}; {last}"));
            error
        })
    }

    /// Returns when the service is ready; an error states how it ended instead.
    async fn ready(&self, process: Process, found: bool) -> Result<Process, String> {
        let name = self.service.name;
        match self.service.ready {
            Ready::Started => Ok(process),
            Ready::Socket(path) => {
                let there = tokio::time::timeout(SOCKET_LIMIT, appears(Path::new(path)));
                tokio::select! {
                    ending = process.ended() => return Err(format!("it has ended ({ending}) \
                        before {path} was there")),
                    there = there => match there {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => self.report_no_socket(path, &format!("watch {path}: \
                            {error}")),
                        Err(late) => self.report_no_socket(path, &format!("{path} is not there \
                            after {SOCKET_LIMIT:?} ({late})")),
                    },
                }
                Ok(process)
            }
            Ready::ParentExits | Ready::ParentExitsWithPort(_) => {
                // A found process may be the daemon, or the parent that still waits for it: its end
                // then leads to the daemon.
                if found {
                    return Ok(process);
                }
                match process.ended().await {
                    Ending::Exited(0) => {
                        let pid = find(Path::new(PROC), name)
                            .ok_or("it reported success, but no process of it is left")?;
                        if let Ready::ParentExitsWithPort(port) = self.service.ready {
                            let error = threads::run(move || connect(port))
                                .await
                                .unwrap_or_else(|panicked| Err(panicked.to_string()));
                            error.map_err(|error| format!("it reported success, but {error}"))?;
                        }
                        Process::watch(pid).map_err(|e| format!("watch process {pid}: {e}"))
                    }
                    ending => Err(format!("it has failed ({ending})")),
                }
            }
        }
    }

    fn report_no_socket(&self, path: &str, error: &str) {
        let (service, waited_ms) = (self.service.name.name(), SOCKET_LIMIT.as_millis() as u64);
        tracing::warn!(name: names::SERVICE_LATE, service, waited_ms, waits_for = path, error);
    }

    /// Returns when no process of the service is left.
    async fn end_of(&self, mut process: Process) -> Ending {
        loop {
            let ending = process.ended().await;
            let next = find(Path::new(PROC), self.service.name).filter(|pid| *pid != process.pid);
            match next.map(Process::watch) {
                Some(Ok(other)) => process = other,
                Some(Err(_)) | None => return ending,
            }
        }
    }

    /// The last lines of a service that has ended.
    fn last_lines(&self) -> Vec<String> {
        if let Some(output) = &self.output {
            output.drain(&self.log);
        }
        if let Some(syslog) = &self.shared.syslog {
            syslog.drain();
        }
        self.log.last()
    }

    fn report(
        &self,
        error: &str,
        ending: Option<Ending>,
        next: Result<Duration, &str>,
        lines: &[String],
    ) {
        let service = self.service.name.name();
        let restart_ms = next.ok().map(|pause| pause.as_millis() as u64);
        let next = next.map_or_else(str::to_string, |pause| {
            format!("starting again in {pause:?}")
        });
        let status = ending.map(|ending| ending.to_string());
        let lines = (!lines.is_empty()).then(|| lines.join("\n"));
        tracing::error!(
            name: names::SERVICE_ENDED, service, status, restart_ms, lines,
            error = %format!("{error}; {next}"),
        );
    }

    /// Starts the program; returns when it runs.
    async fn launch(&self, step: &RunningStep) -> Result<Process, String> {
        let launch = self.prepare(step)?;
        if let Ready::Socket(path) = self.service.ready {
            // The socket of an earlier life does not show that this one is ready.
            let _unused = std::fs::remove_file(path);
            let directory = Path::new(path).parent().unwrap_or(Path::new("/"));
            std::fs::create_dir_all(directory)
                .map_err(|e| format!("make {}: {e}", directory.display()))?;
        }
        let stdout = || match self.output.as_deref().map(Output::end) {
            Some(Ok(end)) => Stdio::from(end),
            Some(Err(_)) | None => Stdio::null(),
        };
        let (report, theirs) = pipe2(OFlag::O_CLOEXEC).map_err(|e| format!("make a pipe: {e}"))?;
        let mut command = Command::new("/proc/self/exe");
        command
            .args(launch.words())
            .env_clear()
            .env(MARK, &launch.service);
        command.stdin(theirs).stdout(stdout()).stderr(stdout());
        let child = command
            .spawn()
            .map_err(|e| format!("start a process: {e}"))?;
        drop(command);
        let pid = i32::try_from(child.id()).map_err(|e| e.to_string())?;
        let process =
            Process::watch(Pid::from_raw(pid)).map_err(|e| format!("watch process {pid}: {e}"))?;
        let error = threads::run(move || {
            let mut text = Vec::new();
            let _unused = std::fs::File::from(report)
                .take(MAX_ERROR)
                .read_to_end(&mut text);
            super::lines::printable(&text)
        });
        match error.await {
            Ok(error) if error.is_empty() => Ok(process),
            Ok(error) => Err(error),
            Err(panicked) => Err(panicked.to_string()),
        }
    }

    /// Collects the command line and the preparations of a start.
    fn prepare(&self, step: &RunningStep) -> Result<Launch, String> {
        let (service, shared) = (self.service, &self.shared);
        let name = service.name;
        let mut arguments: Vec<OsString> = Vec::new();
        for argument in service.arguments {
            match *argument {
                Argument::Word(word) => arguments.push(word.into()),
                Argument::OwnAccount(option, own) => {
                    if account(Path::new("/"), own).is_some() {
                        arguments.extend([option.into(), own.into()]);
                    }
                }
                Argument::UvmPersistence => {
                    let Uvm::Decided(on, reason) = self.uvm(*shared.inputs.fabric.borrow()) else {
                        continue;
                    };
                    step.note(
                        "uvm",
                        format!("{}: {reason}", if on { "on" } else { "off" }).as_str(),
                    );
                    arguments.extend(on.then(|| "--uvm-persistence-mode".into()));
                }
                Argument::Configuration(option) => {
                    let policy = shared.inputs.asked.rail_policy;
                    let made = configuration::make(
                        name,
                        shared.root,
                        shared.topology,
                        shared.confidential,
                        policy,
                    )?;
                    arguments.extend([option.into(), made.into()]);
                }
                Argument::File(option, file) => {
                    let file = shared.root.join(file);
                    if file.is_file() {
                        let file = configuration::led(file, shared.root)?;
                        arguments.extend([option.into(), file.into()]);
                    }
                }
                Argument::PortGuid(option) => {
                    if !shared.functions.management.is_empty() {
                        let guid = shared.port_guid()?;
                        step.note("port_guid", guid.as_str());
                        arguments.extend([option.into(), guid.into()]);
                    }
                }
                Argument::HostEngine => {
                    if self.after.contains(&Name::HostEngine) {
                        arguments
                            .extend(["-r".into(), format!("localhost:{HOST_ENGINE_PORT}").into()]);
                    }
                }
            }
        }
        let cgroups = Path::new(CGROUPS);
        let has_cgroups = cgroups.join("cgroup.controllers").is_file();
        Ok(Launch {
            service: name.name().into(),
            oom_score: service.oom_score,
            capabilities: service
                .capabilities
                .iter()
                .map(|capability| *capability as u32)
                .collect(),
            account: service.account.and_then(|own| account(Path::new("/"), own)),
            cgroup: has_cgroups.then(|| cgroups.join(CGROUP).join(name.name())),
            program: self.program.clone(),
            arguments,
        })
    }
}
