//! Mounts that are those of one thread alone.

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// Does something in a thread with mounts of its own, and returns its result, or its panic.
pub fn in_own_mounts<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    const NONE: Option<&str> = None;
    let thread = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNS)
                .unwrap_or_else(|e| panic!("make a mount namespace: {e}"));
            mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)
                .unwrap_or_else(|e| panic!("make / private: {e}"));
            work()
        });
        thread.join()
    });
    thread.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
