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
        self.at_most(0).await;
    }

    /// Returns when no more than `n` are at it.
    pub async fn at_most(&self, n: usize) {
        // Never an error: the sender is here.
        drop(self.0.subscribe().wait_for(|busy| *busy <= n).await);
    }

    pub fn count(&self) -> usize {
        *self.0.borrow()
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}
