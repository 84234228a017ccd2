//! Output of other programs to /dev/console, kept from the device while a GPU is enabled.
//!
//! The agent writes its log there. While the host maps a BAR, a line on a serial port or a virtio
//! console spins its vCPU, with interrupts off, until the host is done: both were seen under KVM
//! (tests/guest/halves/stalls.rs). With two vCPUs nothing runs then, and the agent's first answer
//! comes one enabling late. The kernel can redirect this output to a terminal (TIOCCONS): to a
//! pseudo-terminal here, from which a thread writes it on the console once the gate is open.
//!
//! Invariants:
//! - No line is lost while this process lives. A writer waits only where the pseudo-terminal is
//!   full, at tens of KiB.
//! - The death of this process ends the redirection: its end of the pseudo-terminal closes, upon
//!   which the kernel hangs the other end up and drops the redirection (`tty_release_redirect`).
//!   Lost is what nobody had written on the console by then.
//! - Lines stay in order, but for one that is written directly in the moment in which an enabling
//!   ends: it may come before earlier ones.
//!
//! Not redirected: messages of the kernel, and what is written to the device under its own name.

use super::console::Gate;
use crate::machine::sys::{redirect_console, terminal_of};
use crate::machine::threads;
use nix::errno::Errno;
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Maker of pseudo-terminals, where the agent has mounted it.
const NEW_TERMINAL: &str = "dev/pts/ptmx";
const CONSOLE: &str = "dev/console";
/// Names of the devices that are consoles; the last one is behind /dev/console.
const ACTIVE: &str = "sys/class/tty/console/active";
/// Most bytes that are taken from a pseudo-terminal at once: what the kernel gives at most.
const CHUNK: usize = 4096;

/// A pseudo-terminal for redirected output; its thread ends when this is dropped.
pub struct Redirect {
    terminal: OwnedFd,
    console: File,
    /// Whether the redirection is to this terminal, and no other program's.
    is_ours: bool,
}

impl Redirect {
    /// Makes a pseudo-terminal, to which nothing is redirected yet. `root`: parent of `dev` and
    /// `sys`. Must be called inside the runtime.
    ///
    /// Errors: there is no console, or no pseudo-terminal can be made.
    pub fn start(root: &Path, gate: Gate) -> io::Result<Self> {
        let console = open(&root.join(CONSOLE))?;
        // Under its own name: what the thread writes must not be redirected to itself.
        let device = console_device(root)?;
        let reader = open(&root.join(NEW_TERMINAL))?;
        let terminal = terminal_of(&reader)?;
        // The console itself makes line ends.
        let mut as_it_is = tcgetattr(&terminal)?;
        cfmakeraw(&mut as_it_is);
        tcsetattr(&terminal, SetArg::TCSANOW, &as_it_is)?;
        threads::detach(move || relay(reader, &gate, device));
        Ok(Self {
            terminal,
            console,
            is_ours: false,
        })
    }

    /// Redirects output to the console from now on, unless another program has redirected it.
    pub fn begin(&mut self) {
        self.is_ours |= redirect_console(&self.terminal).is_ok();
    }

    /// Ends the redirection.
    pub fn end(&mut self) {
        self.is_ours = self.is_ours && redirect_console(&self.console).is_err();
    }
}

impl Drop for Redirect {
    fn drop(&mut self) {
        self.end();
    }
}

/// Opens the device behind /dev/console under its own name. `root`: parent of `dev` and `sys`.
pub fn console_device(root: &Path) -> io::Result<File> {
    let active = std::fs::read_to_string(root.join(ACTIVE))?;
    let name = active.split_ascii_whitespace().last();
    let name = name.ok_or_else(|| io::Error::other("no console is active"))?;
    open(&root.join("dev").join(name))
}

/// Opens a terminal for reading and writing, as nobody's controlling terminal.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(nix::libc::O_NOCTTY)
        .open(path)
}

/// Writes on the console what comes, whenever the gate is open, until nobody can write any more
/// (EIO). Without this thread, the pseudo-terminal is gone, and with it the redirection.
fn relay(mut from: impl Read, gate: &Gate, mut console: impl Write) {
    let mut text = [0; CHUNK];
    loop {
        let read = match from.read(&mut text) {
            Ok(0) => return,
            Ok(read) => read,
            Err(error) if error.raw_os_error() == Some(Errno::EINTR as i32) => continue,
            Err(_) => return,
        };
        gate.pass(&mut None);
        let Some(Ok(())) = text.get(..read).map(|text| console.write_all(text)) else {
            return;
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    /// Passes on what is written.
    struct Sent(mpsc::Sender<Vec<u8>>);

    impl Write for Sent {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.send(text.to_vec()).map_err(io::Error::other)?;
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_wait_for_the_gate_and_the_last_one_comes_after_the_terminals_end() {
        let reader = open(Path::new("/dev/pts/ptmx")).unwrap();
        let mut terminal = File::from(terminal_of(&reader).unwrap());
        let (gate, (send, written)) = (Gate::default(), mpsc::channel());
        gate.hold();
        let closed = gate.clone();
        let relaying = std::thread::spawn(move || relay(reader, &closed, Sent(send)));
        terminal.write_all(b"one\n").unwrap();
        drop(terminal);
        let none = written.recv_timeout(Duration::from_millis(200));
        assert_eq!(none, Err(mpsc::RecvTimeoutError::Timeout));
        gate.release();
        relaying.join().unwrap();
        let text: Vec<u8> = written.iter().flatten().collect();
        assert_eq!(String::from_utf8_lossy(&text), "one\r\n", "not raw here");
    }
}
