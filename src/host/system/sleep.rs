//! Sleeping until a deadline that may not be.

use std::time::Instant;

/// Sleeps until then; without a deadline, for ever.
pub async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
