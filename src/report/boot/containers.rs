//! Containers of a boot, by the agent's lines and by the init's observations.

use super::model::Container;
use crate::data::agent_log;
use crate::data::agent_log::AgentEvent;
use crate::data::boot_file::Sandbox;
use crate::data::budget::{MAX_CONTAINERS, TooLarge};
use crate::data::clock_points::Placed;
use crate::data::compact_record::Record;
use crate::data::text::printable;
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use std::collections::HashMap;

/// Containers, collected from lines and records.
#[derive(Default)]
pub struct Containers {
    pub all: Vec<Container>,
    /// Requested containers by name.
    pending: HashMap<String, usize>,
}

impl Containers {
    pub fn take(&mut self, event: AgentEvent, placed: Option<Placed>, too_large: &mut TooLarge) {
        let new = |name: String, devices: String| Container {
            name,
            devices,
            approximate: placed.is_some_and(|p| p.approximate),
            ..Container::default()
        };
        let at_ns = placed.map(|p| p.boottime_ns);
        let ended = match event {
            AgentEvent::ContainerAsked {
                container,
                devices,
                pause,
            } => {
                let asked = Container {
                    asked_ns: at_ns,
                    pause,
                    pending: true,
                    ..new(container, devices)
                };
                let (name, index) = (asked.name.clone(), self.all.len());
                if self.add(asked, too_large) {
                    self.pending.insert(name, index);
                }
                return;
            }
            AgentEvent::CdiTryFailed {
                container, attempt, ..
            } => {
                if let Some(container) = self
                    .pending
                    .get(&container)
                    .and_then(|index| self.all.get_mut(*index))
                {
                    container.tries = Some(attempt);
                }
                return;
            }
            AgentEvent::ContainerCreated {
                container,
                devices,
                tries,
                pause,
            } => Container {
                at_ns,
                tries,
                pause,
                ..new(container, devices)
            },
            AgentEvent::ContainerFailed {
                container,
                devices,
                tries,
                error,
            } => Container {
                at_ns,
                tries,
                error: Some(error),
                ..new(container, devices)
            },
            AgentEvent::Start { .. }
            | AgentEvent::Ready
            | AgentEvent::Rpc { .. }
            | AgentEvent::Injected { .. }
            | AgentEvent::ContainerStarted { .. }
            | AgentEvent::HookFailed { .. }
            | AgentEvent::Bound(_) => return,
        };
        match self
            .pending
            .remove(&ended.name)
            .and_then(|index| self.all.get_mut(index))
        {
            Some(asked) => {
                *asked = Container {
                    asked_ns: asked.asked_ns,
                    ..ended
                }
            }
            None => drop(self.add(ended, too_large)),
        }
    }

    fn add(&mut self, container: Container, too_large: &mut TooLarge) -> bool {
        let room = self.all.len() < MAX_CONTAINERS;
        if room {
            self.all.push(container);
        } else {
            too_large.containers += 1;
        }
        room
    }

    /// Adds the init's observation of a container, for a boot without the agent's lines.
    pub fn see(&mut self, record: &Record, sandbox: Option<&Sandbox>, too_large: &mut TooLarge) {
        let field = |key: &str| record.fields.text(key);
        if record.kind == Kind::Event
            && record.name == names::AGENT_CONTAINER
            && field("what") == Some("made")
            && let Some(id) = field("container")
        {
            let seen = Container {
                name: printable(agent_log::line::short(id)),
                devices: agent_log::UNKNOWN.to_string(),
                at_ns: Some(record.boottime_ns),
                approximate: true,
                // The pause container's id is the sandbox's.
                pause: sandbox.is_some_and(|sandbox| sandbox.id == id),
                seen_by_init: true,
                ..Container::default()
            };
            self.add(seen, too_large);
        }
    }
}
