//! Failure of a GPU: its reason, and its consequences.

use super::publication::Update;
use super::schedule_messages::{Fact, GpuId};
use super::shared::Shared;
use crate::stream::kmsg::Unnamed;
use kata_gpu_wire::names;
use kata_gpu_wire::reason;
use kata_gpu_wire::reason::{FailedStep, Reason};
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

/// The failure of a GPU that was usable.
pub fn fell_off_the_bus() -> Failed {
    Failed::new(
        FailedStep::Running,
        Some(Reason::OffTheBus),
        "Xid 79: it was usable, and has fallen off the bus".into(),
    )
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
        let _unused = self.spec.send(Update::Failed { gpu });
        self.report_failed(gpu, since_ns, &failure, bind_inode)
            .await;
        self.dispatch.report(Fact::Failed(gpu));
    }

    /// Reports the reason of a failure, with the driver's log line where there is one.
    pub async fn report_failed(
        &self,
        gpu: GpuId,
        since_ns: u64,
        failure: &Failed,
        bind_inode: Option<u64>,
    ) {
        let (reason, line) = self.recognise(gpu, since_ns, failure).await;
        let index = self.roster.index(gpu.address);
        let mut error = format!("GPU {index} ({}): {}", gpu.address, failure.error);
        if let Some(line) = line {
            error = format!("{error}; the driver logged: {line}");
        }
        let (step, cure) = (
            failure.step.name(),
            reason.cure().unwrap_or("see the driver's log line"),
        );
        tracing::error!(
            name: names::GPU_FAILED, gpu = %gpu.address, index = index as u64, step,
            reason = %reason, cure, error, bind_inode, generation = gpu.again(),
        );
    }

    /// Reason of a failure, and the driver's line that shows it.
    pub async fn recognise(
        &self,
        gpu: GpuId,
        since_ns: u64,
        failure: &Failed,
    ) -> (Reason, Option<String>) {
        let lines = match &self.driver_log {
            Some(driver_log) => {
                let since_ns = failure.since_ns.unwrap_or(since_ns);
                driver_log
                    .since(gpu.address, since_ns, failure.unnamed)
                    .await
            }
            None => Vec::new(),
        };
        let (recognised, line) = reason::classify(failure.step, &lines);
        (
            failure.reason.unwrap_or(recognised),
            line.map(str::to_string),
        )
    }
}
