//! Sleep until an optional deadline.

use std::time::Instant;

/// Sleeps until the deadline; without one, for ever.
pub async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
