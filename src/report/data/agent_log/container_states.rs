//! The agent's lines, in order, folded into the states of each container.
//!
//! A line that tries, injects or creates does not always name its container. The agent's order of
//! work identifies it: a spec is resolved before the next try of the same container is due, and
//! everything from the bundle to the running process is done under one lock, so that `created
//! container!` is about the container whose id is in the lines before it.
//!
//! The agent does not log why it refuses a container (a device that is not listed, a spec that does
//! not parse, a mount that fails): only the runtime gets that error. Such a container was
//! requested and has no end.

use super::event::{AgentEvent, NONE, UNKNOWN};
use super::line::{Line, LineKind, Spec, devices_of, short};
use std::collections::BTreeSet;

/// Limit of containers under way; beyond it, the container with the oldest last try counts as
/// refused and is dropped.
const MAX_OPEN: usize = 64;
/// Names of containers, and ids of created ones, that are kept.
const MAX_NAMES: usize = 1024;
/// Devices of an error that are compared with a container's: as many distinguish containers as well
/// as all do.
const MAX_COMPARED: usize = 4;
/// Shortest time between two tries of one container: nominally a second.
const SOONEST_NEXT_TRY_NS: i64 = 900_000_000;
/// Time between the last try and its failure: the agent sleeps once more before it gives up.
const LAST_PAUSE_NS: i64 = 1_000_000_000;
/// Age of the last try after which a container counts as refused: the agent tries once a second,
/// and does not log refusals.
const FORGOTTEN_NS: i64 = 10_000_000_000;

/// Progress of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The container's devices are not resolved.
    Asked,
    Injected,
    /// Being made, under the agent's lock.
    Making,
}

#[derive(Clone, Debug)]
struct Container {
    id: Option<String>,
    name: String,
    /// None: no line shows the devices.
    devices: Option<String>,
    pause: bool,
    state: State,
    failed_tries: u64,
    /// Time of the request, and then of each try to resolve the devices.
    last_ns: i64,
}

impl Container {
    fn devices(&self) -> String {
        match self.devices.as_deref() {
            None => UNKNOWN.into(),
            Some("") => NONE.into(),
            Some(devices) => devices.into(),
        }
    }

    /// Whether an error with these devices may be about this container.
    fn wants(&self, named: &[&str]) -> bool {
        match self.devices.as_deref() {
            None => true,
            Some("") => false,
            Some(devices) => named
                .iter()
                .take(MAX_COMPARED)
                .all(|device| devices.split(',').any(|d| d == *device)),
        }
    }

    /// Number of tries until the devices were there; None if the container requests none.
    fn tries(&self) -> Option<u64> {
        let resolved = self.state != State::Asked || self.failed_tries > 0;
        (self.devices.as_deref() != Some("") && resolved && self.devices.is_some())
            .then(|| self.failed_tries.saturating_add(1))
    }
}

/// The containers of one guest.
#[derive(Clone, Debug, Default)]
pub struct Containers {
    open: Vec<Container>,
    /// `create_container` calls whose spec was not seen yet.
    without_spec: u64,
    /// All `create_container` calls.
    calls: u64,
    names: BTreeSet<String>,
    /// Ids and names of created containers: lines about a start have only the id.
    created: Vec<(String, String)>,
    /// The container for which the agent's lock is held.
    making: Option<usize>,
}

impl Containers {
    /// Takes the next line and passes its events on, with their times.
    pub fn take(&mut self, line: Line, mut each: impl FnMut(i64, AgentEvent)) {
        let at = line.realtime_ns;
        match line.kind {
            LineKind::Event(event) => {
                if let AgentEvent::Rpc { call } = &event {
                    if call == "create_container" {
                        self.without_spec = self.without_spec.saturating_add(1);
                        self.calls = self.calls.saturating_add(1);
                    }
                    // Other calls are frequent, or unrelated to the start.
                    const CALLS: &[&str] = &[
                        "create_sandbox",
                        "create_container",
                        "start_container",
                        "online_cpu_mem",
                    ];
                    if !CALLS.contains(&call.as_str()) {
                        return;
                    }
                }
                each(at, event);
            }
            LineKind::Asked(spec) => each(at, self.asked(at, &spec)),
            LineKind::Waiting { attempt, of, error } => {
                self.waiting(at, attempt, of, &error, &mut each)
            }
            LineKind::Injected(spec) => {
                let Some(index) = self.injected(&spec) else {
                    return;
                };
                self.not_its_own(index, at);
                if let Some(container) = self.open.get_mut(index) {
                    container.state = State::Injected;
                    let container = container.name.clone();
                    each(at, AgentEvent::Injected { container });
                }
            }
            LineKind::Making { id } => self.make(&id),
            LineKind::Created => {
                let Some(container) = self.done() else { return };
                let created = AgentEvent::ContainerCreated {
                    devices: container.devices(),
                    tries: container.tries(),
                    container: container.name,
                    pause: container.pause,
                };
                each(at, created);
            }
            LineKind::StartFailed { error } => {
                let Some(container) = self.done() else { return };
                each(at, failed(&container, &error));
            }
            LineKind::Started { id } => {
                let known = self.created.iter().find(|(created, _)| *created == id);
                let container = known.map_or(short(&id), |(_, name)| name).to_string();
                each(at, AgentEvent::ContainerStarted { container });
            }
        }
    }

    /// A name that no earlier container has.
    fn unused_name(&mut self, spec: &Spec) -> String {
        let id = spec.id.as_deref().map(short);
        let wanted = spec
            .name
            .as_deref()
            .or(if spec.pause { Some("pause") } else { None })
            .or(id);
        let name = match wanted {
            None => format!(
                "#{}",
                self.calls
                    .saturating_sub(self.without_spec)
                    .saturating_add(1)
            ),
            Some(name) if !self.names.contains(name) => name.to_string(),
            // A later container of the same name, or one of another pod.
            Some(name) => format!("{name} ({})", id.unwrap_or("again")),
        };
        if self.names.len() < MAX_NAMES {
            self.names.insert(name.clone());
        }
        name
    }

    fn add(&mut self, spec: &Spec, devices: Option<String>) -> Option<usize> {
        let name = self.unused_name(spec);
        self.without_spec = self.without_spec.saturating_sub(1);
        if self.open.len() >= MAX_OPEN {
            let asked = self
                .open
                .iter()
                .enumerate()
                .filter(|(_, c)| c.state == State::Asked);
            let oldest = asked.min_by_key(|(_, c)| c.last_ns).map(|(i, _)| i)?;
            self.remove(oldest);
        }
        let (id, pause) = (spec.id.clone(), spec.pause);
        self.open.push(Container {
            id,
            name,
            devices,
            pause,
            state: State::Asked,
            failed_tries: 0,
            last_ns: i64::MIN,
        });
        Some(self.open.len() - 1)
    }

    /// Removes a container; later ones move up.
    fn remove(&mut self, index: usize) -> Container {
        self.making = self
            .making
            .filter(|making| *making != index)
            .map(|making| if making > index { making - 1 } else { making });
        self.open.remove(index)
    }

    fn asked(&mut self, at: i64, spec: &Spec) -> AgentEvent {
        let devices = if spec.devices.is_empty() {
            NONE.to_string()
        } else {
            spec.devices.clone()
        };
        let index = self.add(spec, Some(spec.devices.clone()));
        let container = index.and_then(|index| self.open.get_mut(index));
        let name = container.map_or("?", |container| {
            container.last_ns = at;
            container.name.as_str()
        });
        AgentEvent::ContainerAsked {
            container: name.to_string(),
            devices,
            pause: spec.pause,
        }
    }

    fn by_id(&self, id: &str) -> Option<usize> {
        self.open.iter().position(|c| c.id.as_deref() == Some(id))
    }

    /// A requested container without a line about its spec.
    fn unseen(&mut self) -> Option<usize> {
        if self.without_spec == 0 {
            None
        } else {
            self.add(&Spec::default(), None)
        }
    }

    fn waiting(
        &mut self,
        at: i64,
        attempt: Option<u64>,
        of: Option<u64>,
        error: &str,
        each: &mut impl FnMut(i64, AgentEvent),
    ) {
        let named = devices_of(error);
        let is_this = |failed_tries: u64| attempt.is_none_or(|attempt| failed_tries == attempt);
        let forgotten =
            |c: &Container| c.last_ns != i64::MIN && at.saturating_sub(c.last_ns) > FORGOTTEN_NS;
        let asked = || {
            self.open
                .iter()
                .enumerate()
                .filter(|(_, c)| c.state == State::Asked)
        };
        // Choose the oldest last try among containers at the same try.
        let same = asked().filter(|(_, c)| is_this(c.failed_tries) && c.wants(&named));
        let next = same
            .min_by_key(|(_, c)| (forgotten(c), c.last_ns))
            .map(|(i, _)| i);
        let tried =
            asked().filter(|(_, c)| next.is_none() && c.failed_tries > 0 && c.wants(&named));
        let other = tried
            .min_by_key(|(_, c)| c.failed_tries.abs_diff(attempt.unwrap_or(0)))
            .map(|(i, _)| i);
        let known = next.or_else(|| self.unseen()).or(other);
        // A log that begins late does not have the request: it came before this line.
        let is_new = known.is_none();
        let Some(index) = known.or_else(|| self.add(&Spec::default(), None)) else {
            return;
        };
        let Some(container) = self.open.get_mut(index) else {
            return;
        };
        container.failed_tries = attempt.unwrap_or(container.failed_tries).saturating_add(1);
        container.last_ns = at;
        if container.devices.is_none() && !named.is_empty() {
            container.devices = Some(named.join(","));
        }
        if is_new {
            let asked = AgentEvent::ContainerAsked {
                container: container.name.clone(),
                devices: container.devices(),
                pause: false,
            };
            each(at, asked);
        }
        // The agent counts from 0, people from 1.
        each(
            at,
            AgentEvent::CdiTryFailed {
                container: container.name.clone(),
                attempt: container.failed_tries,
                error: error.to_string(),
            },
        );
        if let Some(of) = of.filter(|of| attempt >= Some(*of)) {
            let container = self.remove(index);
            let error = format!("failed to inject devices after CDI timeout of {of} seconds");
            let failed = failed(&container, &error);
            each(at.saturating_add(LAST_PAUSE_NS), failed);
        }
    }

    /// The container whose devices were injected.
    fn injected(&mut self, spec: &Spec) -> Option<usize> {
        if let Some(index) = spec.id.as_deref().and_then(|id| self.by_id(id)) {
            return Some(index);
        }
        let waited = |c: &&Container| c.state == State::Asked && c.devices.as_deref() != Some("");
        let first = self
            .open
            .iter()
            .filter(waited)
            .min_by_key(|c| c.last_ns)
            .map(|c| c.name.clone());
        match first.and_then(|name| self.open.iter().position(|c| c.name == name)) {
            Some(index) => Some(index),
            None => self.unseen(),
        }
    }

    /// Moves a container's last failed try to another container if it is too close before the
    /// successful try to be its own.
    fn not_its_own(&mut self, index: usize, at: i64) {
        let Some(container) = self.open.get_mut(index) else {
            return;
        };
        let tries = container.failed_tries;
        let last_ns = container.last_ns;
        if tries == 0 || at.saturating_sub(last_ns) >= SOONEST_NEXT_TRY_NS {
            return;
        }
        container.failed_tries = tries - 1;
        let waits = |c: &&mut Container| {
            c.state == State::Asked
                && c.failed_tries == tries - 1
                && c.devices.as_deref() != Some("")
        };
        if let Some((_, other)) = self
            .open
            .iter_mut()
            .enumerate()
            .find(|(i, c)| *i != index && waits(c))
        {
            (other.failed_tries, other.last_ns) = (tries, last_ns);
        }
    }

    /// Notes that the agent's lock is held for the container with this id.
    fn make(&mut self, id: &str) {
        let index = self.by_id(id).or_else(|| {
            // Lines of an existing container: its process has ended, or a signal came.
            let known = self.created.iter().any(|(created, _)| created == id);
            if known || self.without_spec == 0 {
                None
            } else {
                self.add(
                    &Spec {
                        id: Some(id.to_string()),
                        ..Spec::default()
                    },
                    None,
                )
            }
        });
        if let Some(container) = index.and_then(|index| self.open.get_mut(index)) {
            container.state = State::Making;
            self.making = index;
        }
    }

    /// The container that the agent has finished making.
    fn done(&mut self) -> Option<Container> {
        let making = self.making.take().filter(|index| *index < self.open.len());
        let injected = || self.open.iter().position(|c| c.state == State::Injected);
        let without = || {
            self.open
                .iter()
                .position(|c| c.devices.as_deref() == Some(""))
        };
        let index = making
            .or_else(injected)
            .or_else(without)
            .or_else(|| self.unseen())
            .or_else(|| self.open.len().checked_sub(1))?;
        let container = self.remove(index);
        if let Some(id) = &container.id
            && self.created.len() < MAX_NAMES
        {
            self.created.push((id.clone(), container.name.clone()));
        }
        Some(container)
    }
}

fn failed(container: &Container, error: &str) -> AgentEvent {
    let tries = container.tries().map(|tries| {
        if container.state == State::Asked {
            container.failed_tries
        } else {
            tries
        }
    });
    AgentEvent::ContainerFailed {
        container: container.name.clone(),
        devices: container.devices(),
        tries,
        error: error.to_string(),
    }
}
