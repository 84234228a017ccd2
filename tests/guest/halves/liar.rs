//! Guest half of tests/vm/emulated_host/guests.rs: a guest that lies about itself to the collector,
//! from a socket of its own beside the init's.

use super::guest::wait_for;
use crate::agent::log;
use kata_gpu_init::stream::sinks::vsock::HOST_CID;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{DEFAULT_PORT, Header, Kind, Record, header_line, ping, record_line};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, connect, socket};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;

/// A boot that nobody else has, for the negative control.
pub const FREE: &str = "0f7a1f8e-0000-4000-8000-00000000f4ee";
/// Name of every record that is made up.
pub const FORGED: &str = "forged";
/// A pod that a made-up line of the collector's names.
pub const CLAIMED_POD: &str = "claimed-pod";
/// Message of the line that says what came of it: per lie `accepted` or `refused`.
pub const MESSAGE: &str = "lies";
const PARAMETER: &str = "testagent.victim=";

/// The collector asks a guest that it accepts for its clock, and hangs up on one that it refuses.
pub fn run() {
    let Some(victim) = super::parameter(PARAMETER) else {
        log::error(
            MESSAGE,
            &[("error", &format!("no {PARAMETER}.. on the command line"))],
        );
        return;
    };
    // The init's own stream is there: this guest is known by then.
    wait_for(names::SETTLED);
    let host_line = format!(
        "{{\"schema\":1,\"kind\":\"host\",\"realtime_ns\":1,\"event\":\"sandbox\",\"id\":\"x\",\"pod\":\"{CLAIMED_POD}\"}}\n"
    );
    let forged = record_line(&Record::new(Kind::Event, FORGED));
    let stolen = send(&[&header(&victim), &forged]);
    // Negative control: the same words for a boot that is nobody's.
    let free = send(&[&header(FREE), &forged, &host_line]);
    let turned = send(&[&header(FREE), &header(&victim), &forged]);
    log::info(
        MESSAGE,
        &[("stolen", &stolen), ("free", &free), ("turned", &turned)],
    );
}

fn header(boot_id: &str) -> String {
    header_line(&Header {
        boot_id: boot_id.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        kernel: "6.1".into(),
        first_seq: 0,
    })
}

/// Sends lines to the collector on a connection of its own.
fn send(lines: &[&str]) -> String {
    let answer = || -> std::io::Result<String> {
        let socket = socket(
            AddressFamily::Vsock,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        connect(socket.as_raw_fd(), &VsockAddr::new(HOST_CID, DEFAULT_PORT))?;
        let mut stream = File::from(socket);
        stream.write_all(lines.concat().as_bytes())?;
        let mut answer = Vec::new();
        BufReader::new(stream).read_until(b'\n', &mut answer)?;
        Ok(if ping(&answer).is_some() {
            "accepted".into()
        } else {
            "refused".into()
        })
    };
    answer().unwrap_or_else(
        |error| match error.raw_os_error().map(nix::errno::Errno::from_raw) {
            Some(nix::errno::Errno::ECONNRESET | nix::errno::Errno::EPIPE) => "refused".into(),
            _ => format!("error: {error}"),
        },
    )
}
