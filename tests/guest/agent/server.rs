//! The agent's ttRPC server, as far as a pod needs it: health check, sandbox, containers, their
//! standard input and output. A thread a connection, and one a request: a container that waits for
//! devices holds no other request up.

use super::pod::{Asked, Pod};
use super::{log, words};
use crate::protobuf::{Message, Value, bytes_of, fields, number_of};
use crate::ttrpc::{Frame, PORT, REQUEST, RESPONSE};
use anyhow::{Context, Result, bail};
use kata_gpu_init::machine::sys::accept;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, VsockAddr, bind, listen, socket,
};
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

/// Codes of gRPC.
const UNIMPLEMENTED: u64 = 12;
const INTERNAL: u64 = 13;

/// Listens where the real agent listens. The real one fails without vsock; this one goes on,
/// because tests take vsock away on purpose.
pub fn listen_on_vsock() -> Option<OwnedFd> {
    let listening = || -> nix::Result<OwnedFd> {
        let fd = socket(
            AddressFamily::Vsock,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        bind(
            fd.as_raw_fd(),
            &VsockAddr::new(nix::libc::VMADDR_CID_ANY, PORT),
        )?;
        listen(&fd, Backlog::new(16)?)?;
        Ok(fd)
    };
    listening()
        .inspect_err(|errno| {
            log::error(
                "no server",
                &[("error", &format!("listen on vsock port {PORT}: {errno}"))],
            )
        })
        .ok()
}

/// Answers for ever.
pub fn serve(listener: &OwnedFd, pod: &Arc<Pod>) {
    loop {
        // A thread for each connection reads it, and waits.
        let blocking = |fd: OwnedFd| fcntl(&fd, FcntlArg::F_SETFL(OFlag::empty())).map(|_| fd);
        match accept(listener).and_then(blocking) {
            Ok(connection) => {
                let connection = File::from(connection);
                let pod = Arc::clone(pod);
                std::thread::spawn(move || converse(connection, &pod));
            }
            Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => {
                return log::error("no server", &[("error", &format!("accept: {errno}"))]);
            }
        }
    }
}

/// Reads requests until the connection ends.
fn converse(mut connection: File, pod: &Arc<Pod>) {
    let Ok(writer) = connection.try_clone() else {
        return;
    };
    let writer = Arc::new(Mutex::new(writer));
    while let Ok(frame) = Frame::read(&mut connection) {
        if frame.kind != REQUEST {
            continue;
        }
        let (writer, pod) = (Arc::clone(&writer), Arc::clone(pod));
        std::thread::spawn(move || {
            let message = respond(&frame.message, &pod).into_bytes();
            let Ok(bytes) = (Frame {
                stream: frame.stream,
                kind: RESPONSE,
                message,
            })
            .to_bytes() else {
                return;
            };
            let _unused = writer
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .write_all(&bytes); // the host may be gone
        });
    }
}

fn respond(request: &[u8], pod: &Pod) -> Message {
    let status = |code: u64, text: &str| {
        Message::new().message(1, Message::new().number(1, code).text(2, text))
    };
    let called = || -> Result<(String, &[u8])> {
        Ok((
            String::from_utf8_lossy(bytes_of(request, 2)?).into_owned(),
            bytes_of(request, 3)?,
        ))
    };
    match called().and_then(|(method, payload)| answer(&method, payload, pod)) {
        Ok(Some(answer)) => status(0, "").bytes(2, &answer.into_bytes()),
        Ok(None) => status(UNIMPLEMENTED, "the test agent knows no such method"),
        Err(error) => status(INTERNAL, &format!("{error:#}")),
    }
}

/// None: no such method.
fn answer(method: &str, payload: &[u8], pod: &Pod) -> Result<Option<Message>> {
    let id = || bytes_of(payload, 1).map(|id| String::from_utf8_lossy(id).into_owned());
    let mut message = Message::new();
    let calls = [
        ("CreateSandbox", "create_sandbox"),
        ("CreateContainer", "create_container"),
        ("StartContainer", "start_container"),
    ];
    if let Some((_, call)) = calls.iter().find(|(name, _)| *name == method) {
        words::rpc(call).write();
    }
    match method {
        // SERVING
        "Check" => message = message.number(1, 1),
        "CreateSandbox" => pod.create_sandbox()?,
        "CreateContainer" => drop(pod.create(&asked(payload)?)?),
        "StartContainer" => pod.start(&id()?)?,
        "ReadStdout" => {
            message = message.bytes(
                1,
                &pod.read(&id()?, usize::try_from(number_of(payload, 3)?)?)?,
            )
        }
        "WriteStdin" => {
            let bytes = bytes_of(payload, 3)?;
            pod.write(&id()?, bytes)?;
            message = message.number(1, bytes.len() as u64);
        }
        _ => return Ok(None),
    }
    Ok(Some(message))
}

/// Parts of a CreateContainer request that count here: id, root, program, CDI devices, cgroup.
fn asked(request: &[u8]) -> Result<Asked> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let texts = |message: &[u8], field: u32| -> Result<Vec<String>> {
        let all = fields(message)?
            .into_iter()
            .filter(|(number, _)| *number == field);
        Ok(all
            .filter_map(|(_, value)| {
                if let Value::Bytes(bytes) = value {
                    Some(text(bytes))
                } else {
                    None
                }
            })
            .collect())
    };
    let spec = bytes_of(request, 6)?;
    if spec.is_empty() {
        bail!("a container without a spec");
    }
    let (mut devices, mut annotations) = (Vec::new(), HashMap::new());
    for (_, value) in fields(spec)?.into_iter().filter(|(number, _)| *number == 7) {
        let Value::Bytes(entry) = value else { continue };
        let (key, value) = (text(bytes_of(entry, 1)?), text(bytes_of(entry, 2)?));
        if key.starts_with("cdi.k8s.io/") {
            devices.extend(value.split(',').map(str::to_string));
        }
        annotations.insert(key, value);
    }
    let root = text(bytes_of(bytes_of(spec, 3)?, 1)?);
    Ok(Asked {
        id: text(bytes_of(request, 1)?),
        root: Some(root).filter(|r| !r.is_empty()).map(Into::into),
        arguments: texts(bytes_of(spec, 2).context("process")?, 4)?,
        devices,
        annotations,
        hooks: true,
        cgroup: Some(text(bytes_of(bytes_of(spec, 8)?, 5)?)).filter(|p| !p.is_empty()),
    })
}
