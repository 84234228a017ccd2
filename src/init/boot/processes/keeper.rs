//! The keeper: a process small enough not to fail. The keeper starts the worker, holds a copy of
//! every GPU descriptor that the worker hands over, and starts the worker again after its death:
//! adapters stay initialised meanwhile. The OOM killer never chooses the keeper.
//!
//! The keeper never becomes the worker: a fork that fails is tried again for as long as it takes.
//!
//! The keeper never blocks on a GPU: a descriptor is given up only for a GPU that is being removed,
//! and the close that tears the adapter down happens in a process of its own.

use super::stamps::Boot;
use super::worker;
use crate::boot::failure;
use crate::boot::ipc::handover::{Death, Handed, Observer, Start};
use crate::boot::ipc::keeper_socket::{Held, KeeperSocket, MAX_MESSAGE, RELEASE, REPORTED};
use crate::boot::ipc::{name_process, reply};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, close, pause, pipe, setsid};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// OOM score that the OOM killer never chooses: the keeper outlives every other process.
const OOM_SCORE: &str = "-1000";
/// Lifetime below which a worker has died young, and the pause before the next one doubles.
const YOUNG: Duration = Duration::from_secs(10);
/// Longest pause before the next worker.
const LONGEST_PAUSE: Duration = Duration::from_secs(64);
/// Pause after a fork that failed: no event reports that processes can be made again.
const FORK_PAUSE: Duration = Duration::from_millis(200);
/// Most deaths kept for the stream: the first ones have the cause.
const MOST_UNREPORTED: usize = 8;

/// Descriptors of one GPU that is being removed.
type GivenUp = Vec<Held>;

/// Descriptors held by the keeper, and deaths that the stream does not have yet.
#[derive(Default)]
struct Holdings {
    held: Vec<Held>,
    /// Descriptors to be closed by a child that could not be forked yet.
    waiting: Vec<GivenUp>,
    /// Children that close descriptors, each with the pidfd that shows its end. A child without one
    /// is reaped after the worker's next message.
    closing: Vec<(Pid, Option<OwnedFd>)>,
    /// Deaths of workers that no later worker has reported yet.
    unreported: Vec<Death>,
}

/// Runs the keeper, in the child that PID 1 forked. Never returns.
pub fn run(boot: Boot, observer: Observer) -> ! {
    // The agent starts first: on a small guest, two processes started at once take longer than one
    // after the other, and GPUs take seconds.
    let handed = observer.wait();
    // A session of its own keeps the signals of the agent's console from the keeper. Fails only for
    // a group leader, which a fresh child is not.
    let _unused = setsid();
    crate::machine::sys::set_oom_score(OOM_SCORE);
    name_process("gpuinit-keeper");
    // Without an agent the guest is about to power off: no worker follows the first one.
    let ending = handed.error.is_some();
    let (begin_ns, end_ns) = (handed.begin_ns, handed.end_ns);
    let (mut start, mut holdings, mut young) = (Start::First(handed), Holdings::default(), 0_u32);
    let mut number = 0;
    loop {
        number += 1;
        let (child, socket) = start_worker(&boot, start, &mut holdings);
        let born = Instant::now();
        holdings.serve(&socket);
        drop(socket);
        let status = status_of(child);
        failure::report(&format!(
            "the worker has ended ({status}); {} GPU descriptors stay open",
            holdings.held.len()
        ));
        if ending {
            rest()
        }
        if holdings.unreported.len() < MOST_UNREPORTED {
            holdings.unreported.push(Death { number, status });
        }
        let handed = Handed {
            begin_ns,
            end_ns,
            error: None,
        };
        start = Start::Again {
            handed,
            number,
            deaths: holdings.unreported.clone(),
        };
        young = if born.elapsed() < YOUNG { young + 1 } else { 0 };
        if young > 1 {
            // Not on the boot path. A worker that dies repeatedly must not use up the guest's CPUs.
            std::thread::sleep(Duration::from_secs(1 << (young - 2).min(16)).min(LONGEST_PAUSE));
        }
    }
}

/// Forks the worker; returns that process and the keeper's end of the socket to it. Tries until
/// there is a process for it.
fn start_worker(boot: &Boot, mut start: Start, holdings: &mut Holdings) -> (Pid, OwnedFd) {
    let mut refused = None;
    loop {
        let waiting = holdings
            .waiting
            .iter()
            .flatten()
            .map(|given_up| given_up.descriptor);
        let closing = holdings
            .closing
            .iter()
            .filter_map(|(_, ended)| ended.as_ref())
            .map(AsRawFd::as_raw_fd);
        let unneeded: Vec<RawFd> = waiting.chain(closing).collect();
        let held = std::mem::take(&mut holdings.held);
        let failed = match reply::pair() {
            Ok(sockets) => {
                let forked = crate::machine::sys::fork_single_threaded(
                    (sockets, start, held),
                    |((ours, theirs), start, held)| {
                        drop(ours);
                        for descriptor in unneeded {
                            let _unused = close(descriptor);
                        }
                        worker::run(boot, start, KeeperSocket(theirs), held)
                    },
                );
                match forked {
                    Ok((child, ((ours, theirs), begun, held))) => {
                        // Close the worker's ends: of the socket, whose closing is seen only
                        // without this copy, and of what the worker reports to PID 1.
                        drop((theirs, begun));
                        holdings.held = held;
                        return (child, ours);
                    }
                    Err((errno, (_, unused, held))) => {
                        (start, holdings.held) = (unused, held);
                        ("fork the worker", errno)
                    }
                }
            }
            Err(errno) => {
                holdings.held = held;
                ("make a socket pair for the worker", errno)
            }
        };
        // Each error once: the kernel's log has better uses for its room.
        if refused.replace(failed) != Some(failed) {
            let (what, errno) = failed;
            failure::report(&format!(
                "keeper: {what}: {errno}: trying again every {FORK_PAUSE:?}; the GPUs stay open \
                    meanwhile"
            ));
        }
        std::thread::sleep(FORK_PAUSE); // see the constant
        holdings.retry(None);
    }
}

/// Holds the descriptors for ever.
fn rest() -> ! {
    loop {
        pause();
    }
}

/// Waits for the end of a child; returns its status as text.
fn status_of(child: Pid) -> String {
    loop {
        match waitpid(child, None) {
            Ok(WaitStatus::Exited(_, code)) => return format!("exit status {code}"),
            Ok(WaitStatus::Signaled(_, signal, _)) => return format!("killed by {signal}"),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return format!("wait: {errno}"),
        }
    }
}

impl Holdings {
    /// Receives and releases descriptors until the worker's end of the socket is closed.
    fn serve(&mut self, socket: &OwnedFd) {
        let mut text = [0_u8; MAX_MESSAGE];
        loop {
            if !self.has_message(socket) {
                continue;
            }
            let Some((bytes, descriptors)) = reply::receive(socket, &mut text) else {
                return;
            };
            let Some((what, gpu)) = text.get(..bytes).and_then(<[u8]>::split_first) else {
                return;
            };
            let gpu = String::from_utf8_lossy(gpu).into_owned();
            if *what == REPORTED {
                self.unreported.clear();
            }
            if *what == RELEASE {
                let (gone, stay) = std::mem::take(&mut self.held)
                    .into_iter()
                    .partition(|held| held.gpu == gpu);
                self.held = stay;
                if let Err(errno) = self.give_up(gone, Some(socket)) {
                    failure::report(&format!(
                        "keeper: give GPU {gpu} up: {errno}: trying again every {FORK_PAUSE:?}; \
                            its removal waits"
                    ));
                }
            }
            self.held
                .extend(descriptors.into_iter().map(|descriptor| Held {
                    gpu: gpu.clone(),
                    descriptor,
                }));
        }
    }

    /// Whether the socket has a message, or its end, once something has happened: reaps children
    /// that have ended, and tries again what no process could be forked for.
    fn has_message(&mut self, socket: &OwnedFd) -> bool {
        if self.waiting.is_empty() && self.closing.is_empty() {
            return true; // the caller waits
        }
        let pause = match self.waiting.is_empty() {
            true => PollTimeout::NONE,
            false => PollTimeout::try_from(FORK_PAUSE).unwrap_or(PollTimeout::ZERO),
        };
        let ended = self.closing.iter().filter_map(|(_, ended)| ended.as_ref());
        let descriptors = [socket].into_iter().chain(ended).map(AsFd::as_fd);
        let mut watched: Vec<PollFd<'_>> = descriptors
            .map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN))
            .collect();
        let events = poll(&mut watched, pause);
        let has_message = match events {
            Ok(_) => watched
                .first()
                .is_none_or(|socket| socket.any() != Some(false)),
            Err(Errno::EINTR) => false,
            Err(_) => true, // the message is waited for alone
        };
        self.closing.retain(|(child, _)| {
            waitpid(*child, Some(WaitPidFlag::WNOHANG)) == Ok(WaitStatus::StillAlive)
        });
        if events == Ok(0) {
            self.retry(Some(socket));
        }
        has_message
    }

    /// Gives up what no process could be forked for, as far as that is possible now.
    fn retry(&mut self, socket: Option<&OwnedFd>) {
        for gone in std::mem::take(&mut self.waiting) {
            // Reported at the first try.
            let _unused = self.give_up(gone, socket);
        }
    }

    /// Closes the descriptors of one GPU. The last close tears the adapter down, for as long as
    /// that takes: a child does it, and this is the child. Without a child they wait for the next
    /// try.
    fn give_up(&mut self, gone: GivenUp, socket: Option<&OwnedFd>) -> nix::Result<()> {
        if gone.is_empty() {
            return Ok(());
        }
        let forked = pipe().and_then(|ends| {
            let child = crate::machine::sys::fork_single_threaded(ends, |(read_end, write_end)| {
                drop(write_end);
                // The worker takes the end of its socket for the end of the keeper.
                if let Some(socket) = socket {
                    let _unused = close(socket.as_raw_fd());
                }
                // Wait until the keeper has closed its copies, then these are the last: the end of
                // the pipe, or an error, shows it.
                let _unused = nix::unistd::read(&read_end, &mut [0_u8; 1]);
                // Close copies of other GPUs first: a hang below must not keep them open.
                for other in self
                    .held
                    .iter()
                    .chain(self.waiting.iter().flatten())
                    .chain(&gone)
                {
                    let _unused = close(other.descriptor);
                }
                0
            });
            child.map_err(|(errno, _)| errno)
        });
        match forked {
            Ok((child, _ends)) => {
                for own in &gone {
                    let _unused = close(own.descriptor);
                }
                self.closing
                    .push((child, crate::machine::sys::pidfd_open(child).ok()));
                Ok(())
            }
            Err(errno) => {
                self.waiting.push(gone);
                Err(errno)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn what_no_process_could_be_forked_for_waits_for_the_next_try() {
        // A process with a second thread is not forked.
        let (over, goes_on) = mpsc::channel::<()>();
        let second = std::thread::spawn(move || goes_on.recv());
        let file = std::fs::File::open("/dev/null").unwrap();
        let gone = Held {
            gpu: "0001:00:03.0".into(),
            descriptor: file.as_raw_fd(),
        };
        let mut holdings = Holdings::default();
        let waiting = |holdings: &Holdings| -> Vec<RawFd> {
            let all = holdings.waiting.iter().flatten();
            all.map(|held| held.descriptor).collect()
        };
        assert_eq!(holdings.give_up(vec![gone], None), Err(Errno::EDEADLK));
        assert_eq!(waiting(&holdings), [file.as_raw_fd()]);
        holdings.retry(None);
        assert_eq!(waiting(&holdings), [file.as_raw_fd()]);
        drop(over);
        assert!(second.join().unwrap().is_err());
    }
}
