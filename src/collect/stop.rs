//! Waiting for the end.

use tokio::sync::watch;

/// Returns once the collector stops.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone: also a stop.
    let _gone = stop.wait_for(|stop| *stop).await;
}
