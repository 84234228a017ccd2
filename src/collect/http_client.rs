//! Requests over plain HTTP to a receiver of boots, bounded in size and time.
//!
//! Each boot has one connection: a node's boots are minutes apart, and load balancers cut idle
//! connections. No TLS: a receiver is meant to be a program of the same node or pod, which has
//! certificates and everything else that a way out needs. A receiver's text is made printable
//! before anybody sees it.

use anyhow::{Context, anyhow};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::Request;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{HeaderValue, RETRY_AFTER};
use hyper::http::response::Parts;
use hyper::rt::{Read, Write};
use hyper_util::rt::TokioIo;
use kata_gpu_report::data::text::printable_start;
use std::path::Path;
use std::time::Duration;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

/// Name of this program in requests.
pub const AGENT: HeaderValue =
    HeaderValue::from_static(concat!("kata-gpu-boot/", env!("CARGO_PKG_VERSION")));
/// Default time that OpenTelemetry's exporters wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer that is read; it has a sentence or two.
const MAX_ANSWER: usize = 64 << 10;
/// Longest text of a receiver that is shown.
const MAX_TEXT: usize = 300;

/// Failure of a push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The push failed for now: it may be repeated, and not before `after` where the receiver names
    /// a pause.
    Later {
        why: String,
        answered: bool,
        after: Option<Duration>,
    },
    /// The push failed for good: it would be refused again.
    Refused { why: String },
}

impl Failure {
    /// Nobody answered.
    pub fn unreachable(why: &str) -> Self {
        Self::Later {
            why: shown(why),
            answered: false,
            after: None,
        }
    }

    /// An answer that is no success, with the message of its body. The same may be sent again after
    /// the codes of `retryable`.
    pub fn of(head: &Parts, message: Option<&str>, retryable: &[u16]) -> Self {
        let message = message.map(|message| format!(": {}", shown(message)));
        let why = format!("HTTP {}{}", head.status, message.unwrap_or_default());
        if !retryable.contains(&head.status.as_u16()) {
            return Self::Refused { why };
        }
        // Its other form, a date, is by the receiver's clock, and rare: our own pause is used then.
        let after = head.headers.get(RETRY_AFTER);
        let after = after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
        Self::Later {
            why,
            answered: true,
            after: after.map(Duration::from_secs),
        }
    }
}

/// A text of a receiver, safe to print and bounded.
pub fn shown(text: &str) -> String {
    printable_start(&text.trim(), MAX_TEXT)
}

/// Address of a receiver.
#[derive(Clone, Copy, Debug)]
pub enum Address<'a> {
    Tcp(&'a str, u16),
    Unix(&'a Path),
}

/// A connection to a receiver.
pub struct Connection(SendRequest<Full<Bytes>>);

/// Connects. An error says why nobody answers: that can change.
pub async fn connect(address: Address<'_>) -> Result<Connection, Failure> {
    let connecting = async {
        match address {
            Address::Tcp(host, port) => {
                let stream = TcpStream::connect((host, port)).await?;
                stream.set_nodelay(true)?;
                start(TokioIo::new(stream)).await
            }
            Address::Unix(path) => start(TokioIo::new(UnixStream::connect(path).await?)).await,
        }
    };
    let connected = timeout(TIMEOUT, connecting).await;
    connected
        .unwrap_or_else(|_| Err(no_answer()))
        .map_err(|e| Failure::unreachable(&format!("connect: {e:#}")))
}

async fn start(stream: impl Read + Write + Send + Unpin + 'static) -> anyhow::Result<Connection> {
    let (sender, connection) = handshake(stream).await?;
    // The connection ends with its sender; its errors reach the request.
    tokio::spawn(connection);
    Ok(Connection(sender))
}

fn no_answer() -> anyhow::Error {
    anyhow!("no answer within {} s", TIMEOUT.as_secs())
}

impl Connection {
    /// Sends a request, and reads the whole answer. `hint` ends the error of a receiver that speaks
    /// another protocol.
    pub async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
        hint: &str,
    ) -> Result<(Parts, Bytes), Failure> {
        let exchange = async {
            let (head, body) = self.0.send_request(request).await?.into_parts();
            let body = Limited::new(body, MAX_ANSWER).collect().await;
            let body = body.map_err(|e| anyhow!(e)).context("read the answer")?;
            anyhow::Ok((head, body.to_bytes()))
        };
        match timeout(TIMEOUT, exchange).await {
            Ok(answer) => answer.map_err(|e| Failure::unreachable(&format!("{e:#} ({hint})"))),
            Err(_) => Err(Failure::unreachable(&no_answer().to_string())),
        }
    }
}
