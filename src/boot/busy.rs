//! How many are at something, and a wait until nobody is.

use tokio::sync::watch;

/// A count of [`Busy`] guards.
#[derive(Default)]
pub struct Activity(watch::Sender<usize>);

/// Counts until it is dropped.
pub struct Busy(watch::Sender<usize>);

impl Activity {
    pub fn begin(&self) -> Busy {
        self.0.send_modify(|n| *n += 1);
        Busy(self.0.clone())
    }

    /// Returns when nobody is at it.
    pub async fn none(&self) {
        // Never an error: the sender is here.
        drop(self.0.subscribe().wait_for(|n| *n == 0).await);
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}
