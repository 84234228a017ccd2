//! Moment at which containers get a GPU. An initialisation that runs makes an open wait, so a bound
//! GPU can be given at once. CUDA fails at once on a GPU whose NVLink fabric is not complete (error
//! 802), and on a confidential GPU whose ready state is off: such a GPU is held back in the spec,
//! declared, until NVML reports otherwise.
//!
//! NVML alone knows, and has no event for either: it is asked again and again, by a helper process,
//! once all GPUs are settled. No bring-up waits for it.

use super::deadlines::Limit;
use super::health::{self, NoAnswer, Settings};
use super::publication::Update;
use super::scan;
use super::schedule_messages::GpuId;
use super::shared::{Occasions, Shared};
use crate::config::{Config, Ready, ReadyState, Switch};
use crate::gpu::topology::{Decision, Source};
use crate::machine::confidential::is_confidential;
use crate::services;
use crate::step;
use crate::stream::RunningStep;
use kata_gpu_wire::fabric::FabricState;
use kata_gpu_wire::names;
use kata_gpu_wire::nvml_messages::{Confidential, Device, Facts};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Shortest pause between two questions; later ones are an eighth of the time since the first.
const PAUSE: Duration = Duration::from_millis(250);
/// Longest pause while a GPU is held back, until the fabric is late and from then on, and while
/// none is.
const LONGEST: [Duration; 3] = [
    Duration::from_secs(1),
    Duration::from_secs(10),
    Duration::from_secs(30),
];

/// State that an earlier worker has left.
pub struct Earlier {
    /// GPUs that containers can get.
    pub given: Vec<GpuId>,
    /// Some of them although they do not work as they should.
    pub degraded: bool,
}

/// Conditions for a container besides the bind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    initialisation: bool,
    fabric: bool,
    ready_state: bool,
}

impl Needs {
    /// Whether GPUs are held back until NVML has answered.
    pub fn holds_back(self) -> bool {
        self.fabric || self.ready_state
    }

    /// Conditions of a guest, and the reason for them.
    fn of(config: &Config, decision: &Decision, confidential: bool) -> (Self, String) {
        let topology = decision.topology;
        let fabric = config.ready == Ready::Auto && decision.has_fabric();
        let ready_state = confidential && config.ready_state != ReadyState::Leave;
        let mut reasons = vec![match config.ready {
            Ready::Auto if topology.has_fabric() && !decision.has_fabric() => {
                format!("topology {topology}, with NVLink disabled")
            }
            Ready::Auto => format!("topology {topology}"),
            Ready::Bound => "gpuinit.ready=bound".into(),
            Ready::Usable => "gpuinit.ready=usable".into(),
        }];
        match config.ready_state {
            ReadyState::Leave if confidential => {
                reasons.push("confidential, and the ready state is left to whoever attests".into())
            }
            ReadyState::Leave => {}
            _ if !confidential => {
                reasons.push("gpuinit.cc.ready has no effect: the guest is not confidential".into())
            }
            ReadyState::Wait => reasons.push("gpuinit.cc.ready=wait".into()),
            ReadyState::Boot => reasons.push("gpuinit.cc.ready=boot".into()),
        }
        (
            Self {
                initialisation: config.ready == Ready::Usable,
                fabric,
                ready_state,
            },
            reasons.join("; "),
        )
    }

    fn names(self) -> String {
        let all = [
            (self.initialisation, "initialisation"),
            (self.fabric, "fabric"),
            (self.ready_state, "ready state"),
        ];
        let names: Vec<&str> = all
            .iter()
            .filter(|(needed, _)| *needed)
            .map(|(_, name)| *name)
            .collect();
        if names.is_empty() {
            "bind".into()
        } else {
            names.join(", ")
        }
    }
}

/// Chooses what containers wait for, and reports it.
pub fn choose(config: &Config, decision: &Decision) -> Needs {
    let (needs, reason) = Needs::of(config, decision, is_confidential());
    tracing::info!(name: names::READINESS, waits_for = needs.names(), reason);
    needs
}

/// Conditions that hold now.
pub fn needs(shared: &Shared) -> Needs {
    Needs::of(&shared.config, &shared.topology.borrow(), is_confidential()).0
}

/// Condition that a GPU that is held back lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    Fabric(FabricState),
    /// Complete, and not good enough.
    GoodFabric,
    ReadyState,
    /// NVML does not report the fabric, or the ready state.
    FabricAnswer,
    ReadyStateAnswer,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fabric(state) => write!(f, "fabric {state}"),
            Self::GoodFabric => f.write_str("fabric completed, not in good health"),
            Self::ReadyState => f.write_str("ready state off"),
            Self::FabricAnswer => f.write_str("fabric unknown"),
            Self::ReadyStateAnswer => f.write_str("ready state unknown"),
        }
    }
}

impl Wait {
    fn cure(self) -> &'static str {
        match self {
            Self::Fabric(_) | Self::GoodFabric => {
                "see fabric manager's log here or where the switches are; \
                    gpuinit.fabric.required=off gives it to containers all the same"
            }
            Self::ReadyState => {
                "attest the guest, or let the init set it: gpuinit.cc.ready=boot; \
                    gpuinit.cc.ready=leave gives it to containers all the same"
            }
            Self::FabricAnswer => {
                "put kata-gpu-nvml into the image, or see the error in its event nvml; \
                    gpuinit.fabric.required=off gives it to containers all the same"
            }
            Self::ReadyStateAnswer => {
                "put kata-gpu-nvml into the image, or see the error in its event nvml; \
                    gpuinit.cc.ready=leave gives it to containers all the same"
            }
        }
    }
}

/// Decision about a GPU, by an answer of NVML.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Given,
    /// Given in this state, with what that costs.
    Degraded(String, String),
    Held(Wait),
}

impl Verdict {
    fn degraded(state: impl fmt::Display, costs: &str) -> Self {
        Self::Degraded(state.to_string(), costs.into())
    }
}

/// Circumstances that verdicts depend on, besides NVML.
#[derive(Clone, Copy, Debug)]
struct Rules {
    needs: Needs,
    required: Switch,
    ready_state: ReadyState,
    /// The only sign of a fabric is NVML's report.
    inferred: bool,
    /// The fabric had its time, or no source can report it.
    overdue: bool,
}

impl Rules {
    fn of(shared: &Shared, overdue: bool) -> Self {
        let inferred = shared.topology.borrow().source == Source::Nvml;
        let config = &shared.config;
        Self {
            needs: needs(shared),
            required: config.fabric_required,
            ready_state: config.ready_state,
            inferred,
            overdue,
        }
    }

    /// Judges a GPU by NVML's facts, if there are any.
    fn judge(self, facts: Option<&Facts>, device: Option<&Device>) -> Verdict {
        let fabric = self.judge_fabric(device.filter(|_| facts.is_some()));
        if !self.needs.ready_state || matches!(fabric, Verdict::Held(_)) {
            return fabric;
        }
        match facts
            .filter(|facts| facts.confidential_error.is_none())
            .map(|facts| &facts.confidential)
        {
            Some(Some(Confidential {
                enabled: true,
                ready: false,
                ..
            })) => Verdict::Held(Wait::ReadyState),
            Some(_) => fabric,
            // A container may set the ready state where the init failed to.
            None if self.overdue && self.ready_state == ReadyState::Boot => Verdict::degraded(
                Wait::ReadyStateAnswer,
                "the init could not set it: CUDA fails with error 802 until it is set",
            ),
            None => Verdict::Held(Wait::ReadyStateAnswer),
        }
    }

    fn judge_fabric(self, device: Option<&Device>) -> Verdict {
        if !self.needs.fabric {
            return Verdict::Given;
        }
        let Some(device) = device else {
            return match self.overdue && self.required != Switch::On {
                true => Verdict::degraded(Wait::FabricAnswer, "CUDA may fail with error 802"),
                false => Verdict::Held(Wait::FabricAnswer),
            };
        };
        // Before Hopper no GPU reports it: neither would it later.
        let Some(fabric) = device
            .fabric
            .as_ref()
            .filter(|fabric| fabric.state != FabricState::NotSupported)
        else {
            return Verdict::degraded(
                "fabric not reported",
                "CUDA may fail with error 802 until fabric manager has finished",
            );
        };
        if fabric.state != FabricState::Completed {
            let gives =
                self.required == Switch::Off || self.required == Switch::Auto && self.inferred;
            let wait = Wait::Fabric(fabric.state);
            return match self.overdue && gives {
                true => Verdict::degraded(
                    wait,
                    "CUDA fails with error 802 until the fabric is complete",
                ),
                false => Verdict::Held(wait),
            };
        }
        match fabric.effect() {
            None => Verdict::Given,
            Some(_) if self.required == Switch::On => Verdict::Held(Wait::GoodFabric),
            Some(effect) => Verdict::degraded(Wait::GoodFabric, &effect),
        }
    }
}

/// State of all GPUs' fabric, for the services.
fn fabric(facts: Option<&Facts>, overdue: bool) -> services::Fabric {
    let Some(facts) = facts else {
        return if overdue {
            services::Fabric::Unknown
        } else {
            services::Fabric::Unasked
        };
    };
    let all = || facts.devices.iter().filter_map(|d| d.fabric.as_ref());
    let is_open = |state| !matches!(state, FabricState::Completed | FabricState::NotSupported);
    let mut complete = all().filter(|fabric| fabric.state == FabricState::Completed);
    if all().any(|fabric| is_open(fabric.state)) {
        if overdue {
            services::Fabric::Late
        } else {
            services::Fabric::Incomplete
        }
    } else if complete.clone().any(|fabric| fabric.status != 0) {
        services::Fabric::Failed
    } else if complete.next().is_some() {
        services::Fabric::Complete
    } else {
        services::Fabric::Absent
    }
}

/// Asks NVML on each occasion, and again while an answer is awaited; passes GPUs to containers as
/// the answers permit. Never returns.
pub async fn follow(shared: Arc<Shared>, earlier: Earlier) {
    let mut occasions = shared.occasions.subscribe();
    // The sender lives as long as the worker.
    let settled = occasions.wait_for(|seen| seen.settled > 0);
    if tokio::time::timeout(Limit::NvmlFirst.after(), settled)
        .await
        .is_err()
        && !needs(&shared).holds_back()
    {
        drop(occasions.wait_for(|seen| seen.settled > 0).await);
    }
    let mut watch = Watch::new(shared, earlier);
    loop {
        let seen = *occasions.borrow_and_update();
        let pause = watch.look(seen).await;
        let holds_back = needs(&watch.shared).holds_back();
        let another = occasions
            .wait_for(|now| now.settled != seen.settled || holds_back && now.usable != seen.usable);
        let pause = async {
            match pause {
                // Off the boot path: NVML has no event.
                Some(pause) => tokio::time::sleep(pause).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = another => {}
            () = pause => {}
        }
    }
}

/// State of the watch.
struct Watch {
    shared: Arc<Shared>,
    /// First question.
    began: Option<Instant>,
    /// Count of the last occasion of all GPUs settled for which the facts were asked.
    facts_for: Option<u64>,
    /// GPUs were held back since the facts were reported.
    waited: bool,
    /// Waits of GPUs that are held back.
    held: BTreeMap<GpuId, (RunningStep, Wait)>,
    /// GPUs passed to containers, with the verdicts.
    given: BTreeMap<GpuId, Verdict>,
    overdue: bool,
    /// No answer will come until all GPUs are settled once more than so many times: there is no
    /// helper, or it hangs, as another one would while a GPU keeps the driver's lock.
    silent_at: Option<u64>,
    /// Confidential state that was reported last.
    confidential: Option<Confidential>,
    /// The ready state was set.
    set: bool,
    /// A failure to set it was reported.
    set_failed: bool,
}

impl Watch {
    fn new(shared: Arc<Shared>, earlier: Earlier) -> Self {
        let given = earlier
            .given
            .into_iter()
            .map(|gpu| (gpu, Verdict::Given))
            .collect();
        Self {
            shared,
            began: None,
            facts_for: None,
            waited: false,
            held: BTreeMap::new(),
            given,
            overdue: earlier.degraded,
            silent_at: None,
            confidential: None,
            set: false,
            set_failed: false,
        }
    }

    /// Asks and applies the answer; returns the pause before the next question, if one is due.
    async fn look(&mut self, seen: Occasions) -> Option<Duration> {
        self.silent_at = self.silent_at.filter(|settled| *settled >= seen.settled);
        let answer = if self.silent_at.is_some() {
            Err(NoAnswer::Hangs)
        } else if self.facts_for != Some(seen.settled) {
            self.facts_for = Some(seen.settled);
            health::ask(
                &self.shared,
                Settings::Apply,
                needs(&self.shared).holds_back(),
            )
            .await
        } else if self.waited && self.held.is_empty() {
            // The last facts were those of GPUs that were held back.
            self.waited = false;
            health::ask(&self.shared, Settings::Leave, false).await
        } else {
            let sets =
                self.is_off() && self.shared.config.ready_state == ReadyState::Boot && !self.set;
            let (answer, set) = health::ask_state(&self.shared, sets).await;
            self.report_set(set);
            answer
        };
        match answer {
            Err(NoAnswer::NoHelper) => self.silent_at = Some(u64::MAX),
            Err(NoAnswer::Hangs) => self.silent_at = self.silent_at.max(Some(seen.settled)),
            Err(NoAnswer::NoGpus | NoAnswer::Failed) | Ok(_) => {}
        }
        self.take(answer)
    }

    fn is_off(&self) -> bool {
        self.confidential
            .as_ref()
            .is_some_and(|state| state.enabled && !state.ready)
    }

    fn report_set(&mut self, set: Result<bool, String>) {
        match set {
            Ok(done) => self.set |= done,
            Err(error) if !self.set_failed => {
                self.set_failed = true;
                let error = format!(
                    "set the ready state: {error}: trying again; CUDA fails on all GPUs until it \
                        is set"
                );
                tracing::error!(name: names::CONFIDENTIAL, error);
            }
            Err(_) => {}
        }
    }

    /// Applies an answer to every GPU; returns the pause before the next question, if one is due.
    fn take(&mut self, answer: Result<Box<Facts>, NoAnswer>) -> Option<Duration> {
        let began = *self.began.get_or_insert_with(Instant::now);
        let elapsed = began.elapsed();
        let facts = match answer {
            Err(NoAnswer::NoGpus) => {
                if self.shared.dispatch.is_settled() {
                    self.shared.fabric.send_replace(services::Fabric::Absent);
                    let _unused = self.shared.spec.send(Update::Settled);
                }
                return None;
            }
            Err(NoAnswer::NoHelper | NoAnswer::Hangs | NoAnswer::Failed) => None,
            Ok(facts) => Some(facts),
        };
        let facts = facts.as_deref();
        let was_overdue = self.overdue;
        self.overdue |= self.silent_at.is_some() || elapsed >= Limit::FabricLate.after();
        self.learn_topology(facts);
        let fabric = self.fabric(facts);
        self.shared.fabric.send_replace(fabric);
        self.learn_confidential(facts);
        self.judge_all(facts);
        self.waited |= !self.held.is_empty();
        if self.overdue && !was_overdue {
            self.report_overdue(elapsed);
        }
        let needs = needs(&self.shared);
        if needs.holds_back()
            && self.shared.dispatch.is_settled()
            && (self.held.is_empty() || self.overdue && !needs.ready_state)
        {
            let _unused = self.shared.spec.send(Update::Settled);
        }
        self.pause(elapsed, facts, fabric)
    }

    fn pause(
        &self,
        elapsed: Duration,
        facts: Option<&Facts>,
        fabric: services::Fabric,
    ) -> Option<Duration> {
        if self.silent_at.is_some() {
            return None;
        }
        if self.waited && self.held.is_empty() {
            return Some(Duration::ZERO);
        }
        // The ready state is set as soon as it is known to be off.
        if self.is_off()
            && self.shared.config.ready_state == ReadyState::Boot
            && !self.set
            && !self.set_failed
        {
            return Some(Duration::ZERO);
        }
        let is_watched = is_confidential() && (facts.is_none() || self.is_off()) || self.is_off();
        let is_incomplete = matches!(
            fabric,
            services::Fabric::Incomplete | services::Fabric::Late
        );
        let longest = match (self.held.is_empty() && !is_incomplete, self.overdue) {
            (false, false) => LONGEST[0],
            (false, true) => LONGEST[1],
            // Services wait for the first answer.
            (true, false) if facts.is_none() => LONGEST[1],
            (true, _) if is_watched => LONGEST[2],
            (true, _) => return None,
        };
        Some((elapsed / 8).clamp(PAUSE, longest))
    }

    /// Fabric of the GPUs as the services see it. GPUs that do not use NVLink have none.
    fn fabric(&self, facts: Option<&Facts>) -> services::Fabric {
        match facts {
            Some(_) if self.shared.topology.borrow().nvlink_disable => services::Fabric::Absent,
            facts => fabric(facts, self.overdue),
        }
    }

    /// A fabric of GPUs without switches in this guest is a topology of its own.
    fn learn_topology(&self, facts: Option<&Facts>) {
        let incomplete = |facts: &Facts| {
            facts
                .devices
                .iter()
                .filter_map(|device| device.fabric.clone())
                .find(|fabric| fabric.is_incomplete())
        };
        let Some(fabric) = facts.and_then(incomplete) else {
            return;
        };
        let decided = self.shared.topology.borrow().clone();
        if let Some(elsewhere) = decided.with_fabric_elsewhere(&fabric.state.to_string()) {
            scan::report(&elsewhere);
            let needs = choose(&self.shared.config, &elsewhere);
            self.shared.topology.send_replace(elsewhere);
            let _unused = self
                .shared
                .spec
                .send(Update::HeldByDefault(needs.holds_back()));
        }
    }

    fn learn_confidential(&mut self, facts: Option<&Facts>) {
        let Some(state) = facts.and_then(|facts| facts.confidential.as_ref()) else {
            return;
        };
        if self.confidential.as_ref() != Some(state) {
            let Confidential {
                enabled,
                environment,
                devtools,
                protected_pcie,
                ready,
            } = state;
            tracing::info!(
                name: names::CONFIDENTIAL, enabled, environment = %environment, devtools,
                protected_pcie, ready,
            );
            self.confidential = Some(state.clone());
        }
    }

    fn judge_all(&mut self, facts: Option<&Facts>) {
        let rules = Rules::of(&self.shared, self.overdue);
        let usable = self.shared.usable();
        // The wait of a GPU that has left is over.
        self.held.retain(|gpu, _| usable.contains(gpu));
        self.given
            .retain(|gpu, _| self.shared.roster.contains(*gpu));
        for gpu in usable {
            let device = facts.and_then(|facts| {
                facts
                    .devices
                    .iter()
                    .find(|device| device.address == Some(gpu.address))
            });
            match rules.judge(facts, device) {
                // Silence takes nothing back.
                Verdict::Held(Wait::FabricAnswer | Wait::ReadyStateAnswer)
                    if self.given.contains_key(&gpu) => {}
                Verdict::Degraded(..) if facts.is_none() && self.given.contains_key(&gpu) => {}
                Verdict::Held(Wait::Fabric(FabricState::Unknown))
                    if self.given.contains_key(&gpu) => {}
                Verdict::Held(wait) => self.hold(gpu, wait),
                verdict => self.give(gpu, verdict),
            }
        }
    }

    fn hold(&mut self, gpu: GpuId, wait: Wait) {
        if let Some((_, before)) = self.held.get_mut(&gpu) {
            *before = wait;
            return;
        }
        let deadline_ms = Limit::FabricLate.after().as_millis() as u64;
        let step = step!(
            names::GPU_HELD, gpu = %gpu.address, waits_for = %wait, deadline_ms,
            state = tracing::field::Empty,
        );
        let _unused = self.shared.spec.send(Update::HeldBack {
            gpu,
            held: true,
            after: None,
        });
        self.given.remove(&gpu);
        self.held.insert(gpu, (step, wait));
    }

    fn give(&mut self, gpu: GpuId, verdict: Verdict) {
        if self.given.get(&gpu) == Some(&verdict) {
            return;
        }
        let after = self.held.remove(&gpu).map(|(step, wait)| {
            step.note("state", wait.to_string().as_str());
            step.id()
        });
        if let Verdict::Degraded(state, reason) = &verdict {
            let generation = gpu.again();
            tracing::warn!(
                name: names::GPU_DEGRADED, gpu = %gpu.address, generation, state, reason
            );
        }
        self.given.insert(gpu, verdict);
        let _unused = self.shared.spec.send(Update::HeldBack {
            gpu,
            held: false,
            after,
        });
    }

    /// Reports GPUs that are held back for too long.
    fn report_overdue(&self, elapsed: Duration) {
        let waited_ms = elapsed.as_millis() as u64;
        for (gpu, (_, wait)) in &self.held {
            let (generation, gpu, cure) = (gpu.again(), gpu.address, wait.cure());
            let error = format!(
                "GPU {gpu} is kept from containers: {wait}, and CUDA would fail on it; {cure}"
            );
            tracing::error!(
                name: names::GPU_WITHHELD, gpu = %gpu, generation, waits_for = %wait, waited_ms,
                error,
            );
        }
    }
}

#[cfg(test)]
mod tests;
