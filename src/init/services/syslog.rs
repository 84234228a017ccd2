//! /dev/log, for services that log with syslog(3): a datagram socket that is drained at once, so
//! that no client blocks. The kernel names the sender's process; its mark names the service.

use super::service_output::Log;
use super::service_processes::mark_of;
use super::service_table::{Name, SERVICES};
use crate::machine::threads;
use kata_gpu_wire::names;
use nix::cmsg_space;
use nix::sys::socket::sockopt::PassCred;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, UnixCredentials,
    bind, recvmsg, setsockopt, socket,
};
use std::collections::BTreeMap;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tokio::io::unix::AsyncFd;

const PATH: &str = "/dev/log";
/// Longest datagram that is read; the rest of a longer one is dropped.
const MAX_DATAGRAM: usize = 4096;
/// Name of senders without a service.
const OTHERS: &str = "others";

/// The socket, and the services that write to it.
pub struct Syslog {
    socket: AsyncFd<OwnedFd>,
    logs: BTreeMap<Name, Log>,
    others: Log,
    /// The last sender: most lines in a row are of one.
    sender: Mutex<(i32, Option<Name>)>,
}

/// Makes the socket and drains it from now on. A socket of another program stays.
pub fn start(logs: BTreeMap<Name, Log>, again: bool) -> Option<Arc<Syslog>> {
    match listen(again) {
        Ok(socket) => {
            let syslog = Arc::new(Syslog {
                socket,
                logs,
                others: Log::new(OTHERS),
                sender: Mutex::default(),
            });
            let draining = Arc::clone(&syslog);
            tokio::spawn(async move { draining.follow().await });
            Some(syslog)
        }
        Err(error) => {
            tracing::warn!(
                name: names::SINK, sink = "syslog", state = "unavailable",
                error = %format!("listen on {PATH}: {error}: lines of syslog are lost"),
            );
            None
        }
    }
}

impl Syslog {
    async fn follow(&self) {
        // Fails only when the runtime ends.
        while let Ok(mut ready) = self.socket.readable().await {
            if !self.take_one() {
                ready.clear_ready();
            }
            tokio::task::yield_now().await;
        }
    }

    /// Reads what is there, after the end of a service.
    pub fn drain(&self) {
        // A process that still writes must not keep this loop going; the kernel queues fewer.
        for _ in 0..1024 {
            if !self.take_one() {
                return;
            }
        }
    }

    /// Takes a datagram; false when there is none.
    fn take_one(&self) -> bool {
        let Ok((datagram, pid)) = receive(self.socket.get_ref()) else {
            return false;
        };
        let service = {
            let mut sender = threads::lock(&self.sender);
            if sender.0 != pid {
                *sender = (pid, service_of(pid));
            }
            sender.1
        };
        for line in datagram.split(|byte| *byte == b'\n' || *byte == 0) {
            let (severity, line) = split_priority(line);
            // A process that has ended has no mark any more, but a line of its own name.
            let log = service
                .or_else(|| service_named(line))
                .and_then(|name| self.logs.get(&name));
            log.unwrap_or(&self.others).take("syslog", severity, line);
        }
        true
    }
}

/// Service whose program's name is the tag of a line: `Jan  1 00:00:00 TAG: ..` or `.. TAG[1]: ..`.
fn service_named(line: &[u8]) -> Option<Name> {
    let text = line
        .get(..line.len().min(64))
        .map(String::from_utf8_lossy)?;
    let word = text
        .split_ascii_whitespace()
        .find(|word| word.ends_with(':') && !word.starts_with(|c: char| c.is_ascii_digit()))?;
    let tag = word.trim_end_matches(':').split('[').next()?;
    let is_its = |program: &str| program.rsplit('/').next() == Some(tag);
    SERVICES
        .iter()
        .find(|service| service.programs.iter().any(|program| is_its(program)))
        .map(|service| service.name)
}

fn listen(again: bool) -> std::io::Result<AsyncFd<OwnedFd>> {
    if again {
        // No process reads the socket of an earlier worker.
        let _unused = std::fs::remove_file(PATH);
    }
    let socket = socket(
        AddressFamily::Unix,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )?;
    setsockopt(&socket, PassCred, &true)?;
    bind(socket.as_raw_fd(), &UnixAddr::new(PATH)?)?;
    std::fs::set_permissions(PATH, std::fs::Permissions::from_mode(0o666))?;
    crate::machine::sys::async_fd(socket)
}

fn receive(socket: &OwnedFd) -> nix::Result<(Vec<u8>, i32)> {
    let mut bytes = vec![0; MAX_DATAGRAM];
    let mut space = cmsg_space!(UnixCredentials);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let message = recvmsg::<()>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    let mut pid = 0;
    for part in message.cmsgs().into_iter().flatten() {
        if let ControlMessageOwned::ScmCredentials(credentials) = part {
            pid = credentials.pid();
        }
    }
    let length = message.bytes;
    bytes.truncate(length);
    Ok((bytes, pid))
}

fn service_of(pid: i32) -> Option<Name> {
    let mark = mark_of(Path::new("/proc"), pid)?;
    SERVICES
        .iter()
        .map(|service| service.name)
        .find(|name| name.name() == mark)
}

/// Severity of a line by the `<PRIORITY>` at its beginning, and the rest of the line.
fn split_priority(line: &[u8]) -> (Option<u8>, &[u8]) {
    let Some(rest) = line.strip_prefix(b"<") else {
        return (None, line);
    };
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let priority = rest
        .get(..digits)
        .and_then(|digits| std::str::from_utf8(digits).ok()?.parse::<u16>().ok());
    match (priority, rest.get(digits)) {
        // The facility stands above the three bits of the severity.
        (Some(priority), Some(b'>')) if digits <= 3 => (
            Some((priority & 7) as u8),
            rest.get(digits + 1..).unwrap_or_default(),
        ),
        _ => (None, line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_an_ended_process_is_its_services_by_the_tag() {
        assert_eq!(
            service_named(b"Jan  1 00:00:00 nvidia-persistenced: failed"),
            Some(Name::Persistenced)
        );
        assert_eq!(
            service_named(b"Jan  1 00:00:00 nv-hostengine[12]: failed"),
            Some(Name::HostEngine)
        );
        for line in [
            &b"Jan  1 00:00:00 sshd[1]: nvlsm: x"[..],
            b"nvlsm",
            b"",
            b"\xff: nvlsm:",
        ] {
            assert_eq!(service_named(line), None);
        }
    }

    #[test]
    fn a_lines_priority_is_its_severity_and_no_part_of_the_text() {
        assert_eq!(
            split_priority(b"<30>Jan  1 a[1]: b"),
            (Some(6), &b"Jan  1 a[1]: b"[..])
        );
        assert_eq!(split_priority(b"<27>x"), (Some(3), &b"x"[..]));
        for line in [&b"<>x"[..], b"<1234>x", b"<3", b"x<3>", b""] {
            assert_eq!(split_priority(line), (None, line));
        }
    }
}
