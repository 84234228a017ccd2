//! A client of kata-agent, the real one or the test agent: ttRPC over hybrid vsock or a unix
//! socket, calls from any thread, answers in any order.

pub mod requests;

use anyhow::{Context, Result, anyhow, ensure};
use kata_gpu_test_guest::protobuf::{Message, bytes_of, number_of};
use kata_gpu_test_guest::ttrpc::{Frame, PORT, REQUEST, RESPONSE};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Name of the agent's service.
pub const AGENT: &str = "grpc.AgentService";
/// Between two attempts to connect to a guest where nobody listens yet.
const ATTEMPT_EVERY: Duration = Duration::from_millis(10);
/// How long one attempt waits for the guest, as Kata's runtime.
const HANDSHAKE: Duration = Duration::from_secs(10);

type Waiting = HashMap<u32, Sender<Vec<u8>>>;

/// A connection to an agent.
pub struct Client {
    shared: Arc<Mutex<Shared>>,
    writer: Mutex<(UnixStream, u32)>,
}

#[derive(Default)]
struct Shared {
    waiting: Waiting,
    closed: bool,
}

impl Client {
    /// Connects as soon as somebody listens in the guest. `uds` is the unix socket that stands for
    /// the guest's vsock.
    pub fn connect(uds: &Path, deadline: Duration) -> Result<Self> {
        let end = Instant::now() + deadline;
        let stream = loop {
            match handshake(uds, end) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() >= end => {
                    return Err(error).context("connect to the agent");
                }
                Err(_) => std::thread::sleep(ATTEMPT_EVERY),
            }
        };
        Self::over(stream)
    }

    /// Speaks over a connection to the agent.
    pub fn over(stream: UnixStream) -> Result<Self> {
        let shared: Arc<Mutex<Shared>> = Arc::default();
        let (reader, readers) = (stream.try_clone()?, Arc::clone(&shared));
        std::thread::spawn(move || {
            let _ended = read_answers(reader, &readers); // every call that waits learns of it
            let mut shared = lock(&readers);
            shared.closed = true;
            shared.waiting.clear();
        });
        Ok(Self {
            shared,
            writer: Mutex::new((stream, 1)),
        })
    }

    /// Calls a method and returns its answer's message.
    pub fn call(
        &self,
        service: &str,
        method: &str,
        payload: Message,
        timeout: Duration,
    ) -> Result<Vec<u8>> {
        let request = Message::new()
            .text(1, service)
            .text(2, method)
            .bytes(3, &payload.into_bytes())
            .number(4, u64::try_from(timeout.as_nanos())?)
            .into_bytes();
        let (sender, answer) = channel();
        {
            let mut writer = lock(&self.writer);
            let stream = writer.1;
            writer.1 += 2;
            let mut shared = lock(&self.shared);
            ensure!(
                !shared.closed,
                "{method}: the agent has closed the connection"
            );
            shared.waiting.insert(stream, sender);
            drop(shared);
            writer
                .0
                .write_all(
                    &Frame {
                        stream,
                        kind: REQUEST,
                        message: request,
                    }
                    .to_bytes()?,
                )
                .with_context(|| format!("{method}: send"))?;
        }
        let response = answer.recv_timeout(timeout);
        let response =
            response.map_err(|e| anyhow!("{method}: no answer within {timeout:?}: {e}"))?;
        let status = bytes_of(&response, 1)?;
        let code = number_of(status, 1)?;
        ensure!(
            code == 0,
            "{method}: code {code}: {}",
            String::from_utf8_lossy(bytes_of(status, 2)?)
        );
        Ok(bytes_of(&response, 2)?.to_vec())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _unused = lock(&self.writer).0.shutdown(std::net::Shutdown::Both); // the guest may be gone
    }
}

/// Makes one attempt. The answer to CONNECT is a line of its own.
fn handshake(uds: &Path, end: Instant) -> Result<UnixStream> {
    let mut stream =
        UnixStream::connect(uds).with_context(|| format!("connect to {}", uds.display()))?;
    let left = end
        .saturating_duration_since(Instant::now())
        .clamp(Duration::from_millis(1), HANDSHAKE);
    stream.set_read_timeout(Some(left))?;
    stream.write_all(format!("CONNECT {PORT}\n").as_bytes())?;
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\n") {
        stream.read_exact(&mut byte).context("CONNECT: no answer")?;
        line.push(byte[0]);
        ensure!(line.len() < 64, "CONNECT: the answer is no line");
    }
    ensure!(
        line.starts_with(b"OK "),
        "CONNECT: {}",
        String::from_utf8_lossy(&line).trim()
    );
    stream.set_read_timeout(None)?;
    Ok(stream)
}

/// Hands out answers until the connection ends.
fn read_answers(mut stream: UnixStream, shared: &Mutex<Shared>) -> Result<()> {
    loop {
        let Frame {
            stream: number,
            kind,
            message,
        } = Frame::read(&mut stream)?;
        ensure!(kind == RESPONSE, "an answer of type {kind}");
        if let Some(sender) = lock(shared).waiting.remove(&number) {
            let _unused = sender.send(message); // its caller may have given up
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
