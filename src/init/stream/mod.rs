//! Structured timing events: steps of the boot, their times, and reasons for waits.
//!
//! Code reports with `tracing` (spans through [`step!`](crate::step), events through the macros)
//! and knows nothing else; [`layer`] turns that into [records](kata_gpu_wire::record), [`ring`]
//! keeps them, [`sinks`] carry them out. Nothing on the boot path waits for a sink.

pub mod clock_reports; // the wall clock beside the boot's
pub mod driver_lines; // the driver's lines, kept to explain a failure
pub mod journal; // the boot's file: what an earlier worker has written
pub mod kmsg; // the kernel's log as part of the stream
pub mod layer; // tracing's spans and events into records
pub mod memory; // its lines, and which of them stay
pub mod ring; // the records of this boot
pub mod sinks; // vsock, unix socket, console
pub mod stamps; // steps of PID 1

pub use layer::{After, RunningStep, StepId};

use ring::Ring;
use std::sync::Arc;
use tracing_subscriber::layer::SubscriberExt;

/// Starts recording into `ring` for this process and every process it forks. Call once, before the
/// first event.
pub fn install(ring: Ring) -> Arc<Ring> {
    let ring = Arc::new(ring);
    let subscriber =
        tracing_subscriber::registry().with(layer::RecordLayer::new(Arc::clone(&ring)));
    // Fails only on a second call; the first recorder stays then.
    let _unused = tracing::subscriber::set_global_default(subscriber);
    ring
}
