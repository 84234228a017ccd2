//! Locking.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex even after a panic of another thread: files are checked line by line on reading
/// anyway.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
