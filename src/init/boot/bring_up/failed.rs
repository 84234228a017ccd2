//! Failure of a GPU: its reason, and its consequences.

use super::publication::Update;
use super::schedule_messages::{Fact, GpuId};
use super::shared::Shared;
use crate::machine::confidential;
use crate::stream::driver_lines::{Unnamed, Words};
use crate::stream::kmsg::DriverLog;
use kata_gpu_wire::failure;
use kata_gpu_wire::failure::{Diagnosis, Facts, FailedStep, Reason, Sure};
use kata_gpu_wire::names;
use std::fmt::Display;

/// Failure that ended a GPU's task: the step, and the operation with its result.
pub struct Failed {
    pub step: FailedStep,
    /// Begin of that step, where later than the GPU's own begin: earlier lines of the driver belong
    /// to other steps.
    pub since_ns: Option<u64>,
    /// Lines of the driver that name no GPU and can be about this failure.
    pub unnamed: Unnamed,
    /// Reason, where it is known without the driver's lines.
    pub reason: Option<Reason>,
    pub error: String,
}

impl Failed {
    pub fn new(step: FailedStep, reason: Option<Reason>, error: String) -> Self {
        let unnamed = match step {
            FailedStep::Module => Unnamed::OfTheLoad,
            FailedStep::Probe => Unnamed::OfConcurrentProbes,
            _ => Unnamed::Never,
        };
        Self {
            step,
            since_ns: None,
            unnamed,
            reason,
            error,
        }
    }
}

pub fn failed(step: FailedStep) -> impl FnOnce(&dyn Display) -> Failed {
    move |error| Failed::new(step, None, error.to_string())
}

pub fn failed_by(step: FailedStep, reason: Reason) -> impl FnOnce(&dyn Display) -> Failed {
    move |error| Failed::new(step, Some(reason), error.to_string())
}

impl Shared {
    /// Removes a GPU from the spec for good and reports the reason, with the driver's log line
    /// where there is one.
    pub async fn give_up(&self, gpu: GpuId, since_ns: u64, failure: Failed) {
        let bind_inode = self.roster.bind_of(gpu).map(|bound| bound.bind);
        // A GPU that has left meanwhile has not failed, and the one at its address even less. A GPU
        // fails once.
        if !self.roster.failed(gpu) {
            return;
        }
        let fail = |reason| {
            let _unused = self.spec.send(Update::Failed { gpu, reason });
        };
        // No container waits until the driver's lines are read.
        fail(failure.reason);
        let reason = self
            .report_failed(gpu, since_ns, &failure, bind_inode)
            .await;
        fail(Some(reason));
        self.dispatch.report(Fact::Failed(gpu));
    }

    /// Reports the reason of a failure, with the driver's log line where there is one, and returns
    /// it.
    pub async fn report_failed(
        &self,
        gpu: GpuId,
        since_ns: u64,
        failure: &Failed,
        bind_inode: Option<u64>,
    ) -> Reason {
        let words = self.words(gpu, since_ns, failure).await;
        let facts = self.facts(gpu);
        let found = diagnose(failure, &words, &facts);
        let is_decided = failure::of_words(&words.own, &facts).is_some();
        let nearby = words.nearby().filter(|_| !is_decided);
        let index = self.roster.index(gpu.address);
        let mut error = format!("GPU {index} ({}): {}", gpu.address, failure.error);
        if let Some(words) = found.words {
            error = format!("{error}; the driver logged: {words}");
        }
        tracing::error!(
            name: names::GPU_FAILED, gpu = %gpu.address, index = index as u64,
            step = failure.step.name(), reason = %found.reason, whose = %found.reason.whose(),
            sure = %found.sure, words = found.words, nearby, cure = %found.cure, error, bind_inode,
            generation = gpu.again(),
        );
        found.reason
    }

    /// The driver's messages about a GPU, or that can be about no other, since its step began.
    pub async fn words(&self, gpu: GpuId, since_ns: u64, failure: &Failed) -> Words {
        let Some(driver_log) = &self.driver_log else {
            return Words::default();
        };
        let since_ns = failure.since_ns.unwrap_or(since_ns);
        let initialisation = match failure.step {
            FailedStep::Open | FailedStep::Init => {
                // The driver then keeps its lock while a GPU's own processor boots.
                let one_by_one = !self.config.relaxed || confidential::is_confidential();
                self.seen.initialisation(gpu, one_by_one)
            }
            FailedStep::Module
            | FailedStep::Enable
            | FailedStep::Probe
            | FailedStep::Nodes
            | FailedStep::Running
            | FailedStep::Task => None,
        };
        let (since_ns, unnamed) = match initialisation {
            Some(window) => (
                window.from_ns.unwrap_or(since_ns),
                Unnamed::OfInitialisation {
                    until_ns: window.until_ns.unwrap_or(u64::MAX),
                    whose: window.whose,
                },
            ),
            None => (since_ns, failure.unnamed),
        };
        driver_log.words(gpu.address, since_ns, unnamed).await
    }

    pub fn facts(&self, gpu: GpuId) -> Facts {
        Facts {
            device: self.roster.device_id(gpu.address),
            is_confidential: Some(confidential::is_confidential()),
            gpus: self.roster.present().len(),
            ..self
                .driver_log
                .as_ref()
                .map(DriverLog::facts)
                .unwrap_or_default()
        }
    }
}

/// Diagnosis by the driver's messages: words of lines with the GPU's address come first,
/// then those of other lines that are its own, then codes.
pub fn diagnose<'a>(failure: &Failed, words: &'a Words, facts: &Facts) -> Diagnosis<'a> {
    let found = failure::of_words(&words.named, facts).unwrap_or_else(|| {
        let found = failure::of_gpu(failure.step, &words.own, facts);
        let is_named = |text: &str| words.named.iter().any(|line| line == text);
        match found.sure {
            // Whose the line is follows from an order.
            Sure::Certain if words.by_order && !found.words.is_some_and(is_named) => Diagnosis {
                sure: Sure::Likely,
                ..found
            },
            Sure::Certain | Sure::Likely | Sure::Unsure => found,
        }
    });
    match failure.reason {
        Some(known) if known != found.reason => Diagnosis::known_of_gpu(known, found.words),
        _ => found,
    }
}
