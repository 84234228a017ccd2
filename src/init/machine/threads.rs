//! Threads for calls that block in the kernel, made where a failure can be handled.
//!
//! A temporary lack of threads in the kernel (EAGAIN: `threads-max`, a cgroup's `pids.max`, memory)
//! costs time, never the work: the thread is tried again until there is one. tokio's
//! `spawn_blocking` panics there instead, or leaves the work waiting for a thread that is never
//! made.

use std::any::Any;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::oneshot;

/// Stack of a thread that waits in a system call, in bytes.
const STACK: usize = 256 * 1024;
/// Pause before the next try to make a thread.
const RETRY: Duration = Duration::from_millis(50);

/// Locks a mutex. After a panic of another holder its value counts all the same: no holder of the
/// init's locks leaves it half changed.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Work to run; the new thread takes it.
type Work = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// The panic of some work, by its message.
#[derive(Debug)]
pub struct Panicked(String);

impl Panicked {
    fn of(payload: &(dyn Any + Send)) -> Self {
        let text = payload
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| payload.downcast_ref::<String>().cloned());
        Self(text.unwrap_or_else(|| "no message".into()))
    }
}

impl fmt::Display for Panicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a bug: {}", self.0)
    }
}

/// Work on a thread of its own. Dropping this does not end the work.
#[must_use = "a panic of the work is seen only here"]
pub struct Running<T>(oneshot::Receiver<Result<T, Panicked>>);

impl<T> Future for Running<T> {
    type Output = Result<T, Panicked>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // The sender is dropped unused only with the work, which is dropped only with the runtime.
        Pin::new(&mut self.0)
            .poll(context)
            .map(|sent| sent.unwrap_or_else(|_| Err(Panicked("the work was dropped".into()))))
    }
}

/// Runs work that blocks on a thread of its own, which is tried at once. Must be called inside the
/// runtime.
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Running<T> {
    run_with(make, work)
}

/// Runs work whose result is not needed; a panic is reported by the panic hook.
pub fn detach(work: impl FnOnce() + Send + 'static) {
    // A box is one type: the program has the code around the work once, not for each caller.
    let work: Box<dyn FnOnce() + Send> = Box::new(work);
    drop(run(work));
}

fn run_with<T: Send + 'static>(
    make: impl Fn(&Work) -> io::Result<()> + Send + 'static,
    work: impl FnOnce() -> T + Send + 'static,
) -> Running<T> {
    let (send, result) = oneshot::channel();
    let work: Work = Arc::new(Mutex::new(Some(Box::new(move || {
        // Fails only if the receiver was dropped.
        let _unused = send
            .send(catch_unwind(AssertUnwindSafe(work)).map_err(|payload| Panicked::of(&*payload)));
    }))));
    if let Err(error) = make(&work) {
        tracing::warn!(
            name: kata_gpu_wire::names::THREAD_LATE,
            error = %format!("make a thread: {error}: trying again every {RETRY:?}"),
        );
        tokio::spawn(async move {
            while make(&work).is_err() {
                tokio::time::sleep(RETRY).await; // no event reports that threads can be made again
            }
        });
    }
    Running(result)
}

/// Makes a thread that takes the work. After an error the work is still there.
fn make(work: &Work) -> io::Result<()> {
    let taken = Arc::clone(work);
    let body = move || {
        let work = lock(&taken).take();
        if let Some(work) = work {
            work();
        }
    };
    std::thread::Builder::new()
        .stack_size(STACK)
        .spawn(body)
        .map(drop)
}

/// A task's own work, with a panic as an error instead of the silent end of the task.
pub async fn caught<T>(work: impl Future<Output = T>) -> Result<T, Panicked> {
    let mut work = pin!(work);
    poll_fn(
        |context| match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(payload) => Poll::Ready(Err(Panicked::of(&*payload))),
        },
    )
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn in_runtime<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(work)
    }

    #[test]
    fn work_without_a_thread_is_done_once_when_there_is_one() {
        let (tries, runs) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let (tried, ran) = (Arc::clone(&tries), Arc::clone(&runs));
        let short = move |work: &Work| match tried.fetch_add(1, Ordering::Relaxed) {
            0..=2 => Err(io::Error::from_raw_os_error(nix::libc::EAGAIN)),
            _ => make(work),
        };
        let result = in_runtime(async {
            run_with(short, move || ran.fetch_add(1, Ordering::Relaxed) + 7).await
        });
        assert_eq!(result.ok(), Some(7));
        assert_eq!(
            (tries.load(Ordering::Relaxed), runs.load(Ordering::Relaxed)),
            (4, 1)
        );
    }

    #[test]
    fn a_panic_is_an_error_with_its_message() {
        let result = in_runtime(async { run(|| -> u8 { panic!("GPU {} is odd", 3) }).await });
        assert_eq!(
            result.map_err(|e| e.to_string()),
            Err("a bug: GPU 3 is odd".into())
        );
        let result = in_runtime(caught(async {
            tokio::task::yield_now().await;
            panic!("fixed text")
        }));
        assert_eq!(
            result.map_err(|e: Panicked| e.to_string()),
            Err::<(), _>("a bug: fixed text".into())
        );
    }

    #[test]
    fn work_goes_on_without_a_waiter() {
        let (done, seen) = std::sync::mpsc::channel();
        in_runtime(async { detach(move || done.send(5).unwrap()) });
        assert_eq!(seen.recv(), Ok(5));
    }
}
