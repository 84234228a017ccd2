//! Sends OTLP requests to a receiver over HTTP, as protobuf. The report decides on the
//! content of a request, the caller on when to send again.
//!
//! Each boot has one connection: a node's boots are minutes apart, and load balancers cut idle
//! connections. No TLS: the receiver is meant to be the OpenTelemetry Collector of the same node or
//! cluster, which has certificates and everything else that a way out needs. An answer is bounded
//! in size and time, and a receiver's text is made printable before anybody sees it.

mod answer_fields; // protobuf fields of an answer
mod backoff; // how long until the next try
mod target; // address and headers

pub use backoff::Backoff;
pub use target::Target;

use answer_fields::{partial_success, status_message};
use anyhow::{Context, anyhow};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::RETRY_AFTER;
use hyper_util::rt::TokioIo;
use kata_gpu_report::data::text::printable_start;
use kata_gpu_report::otlp::Request;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Bytes of spans from which on a request is sent in parts; the OpenTelemetry Collector takes 20
/// MiB, some receivers 4 MiB.
const MAX_REQUEST: usize = 1 << 20;
/// Default time that OpenTelemetry's exporters wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer that is read; it has a sentence or two.
const MAX_ANSWER: usize = 64 << 10;
/// Longest text of a receiver that is shown.
const MAX_TEXT: usize = 300;
/// Answers after which the same may be sent again: Too Many Requests, Bad Gateway, Service
/// Unavailable, Gateway Timeout.
const RETRYABLE: [u16; 4] = [429, 502, 503, 504];

/// Result of a push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The spans were taken, without `rejected` of them, for the reason `why`.
    Taken {
        spans: u64,
        rejected: u64,
        why: Option<String>,
    },
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

impl Outcome {
    /// Nobody answered.
    pub fn unreachable(why: &str) -> Self {
        Self::Later {
            why: shown(why),
            answered: false,
            after: None,
        }
    }
}

/// A text of a receiver, safe to print and bounded.
fn shown(text: &str) -> String {
    printable_start(&text.trim(), MAX_TEXT)
}

/// A connection to a receiver.
pub struct Connection<'a> {
    target: &'a Target,
    sender: SendRequest<Full<Bytes>>,
}

/// Connects. An error says why nobody answers: that can change.
pub async fn connect(target: &Target) -> Result<Connection<'_>, Outcome> {
    let connecting = async {
        let stream = TcpStream::connect(target.address()).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // The connection ends with its sender; its errors reach the request.
        tokio::spawn(connection);
        anyhow::Ok(sender)
    };
    let connected = timeout(TIMEOUT, connecting).await;
    match connected.unwrap_or_else(|_| Err(no_answer())) {
        Ok(sender) => Ok(Connection { target, sender }),
        Err(e) => Err(Outcome::unreachable(&format!("connect: {e:#}"))),
    }
}

fn no_answer() -> anyhow::Error {
    anyhow!("no answer within {} s", TIMEOUT.as_secs())
}

impl Connection<'_> {
    /// Sends all spans of a boot.
    pub async fn push(&mut self, request: Request<'static>) -> Outcome {
        let (mut spans, mut rejected, mut why) = (0, 0, None);
        // A later try sends accepted parts again: their spans have the same ids.
        for part in request.protobufs(MAX_REQUEST) {
            match self.send(part.bytes).await {
                Outcome::Taken {
                    rejected: n,
                    why: message,
                    ..
                } => {
                    spans += part.spans;
                    // The receiver's count is not trusted.
                    rejected += n.min(part.spans);
                    why = why.or(message);
                }
                failed => return failed,
            }
        }
        Outcome::Taken {
            spans,
            rejected,
            why,
        }
    }

    async fn send(&mut self, body: Vec<u8>) -> Outcome {
        let exchange = async {
            let request = self.target.request(body)?;
            let (head, body) = self.sender.send_request(request).await?.into_parts();
            let body = Limited::new(body, MAX_ANSWER).collect().await;
            let body = body.map_err(|e| anyhow!(e)).context("read the answer")?;
            anyhow::Ok(outcome(&head, &body.to_bytes()))
        };
        match timeout(TIMEOUT, exchange).await {
            Ok(Ok(outcome)) => outcome,
            // The most frequent mistake.
            Ok(Err(e)) => Outcome::unreachable(&format!(
                "{e:#} (is it the port of OTLP/HTTP, which is 4318?)"
            )),
            Err(_) => Outcome::unreachable(&no_answer().to_string()),
        }
    }
}

/// Meaning of an answer by OTLP's specification.
fn outcome(head: &hyper::http::response::Parts, body: &[u8]) -> Outcome {
    if head.status.is_success() {
        let (rejected, why) = partial_success(body);
        return Outcome::Taken {
            spans: 0,
            rejected,
            why: why.map(|why| shown(&why)),
        };
    }
    // The specification wants a google.rpc.Status; proxies send pages.
    let message = status_message(body)
        .map(|message| format!(": {}", shown(&message)))
        .unwrap_or_default();
    let why = format!("HTTP {}{message}", head.status);
    if !RETRYABLE.contains(&head.status.as_u16()) {
        return Outcome::Refused { why };
    }
    // Its other form, a date, is by the receiver's clock, and rare: our own pause is used then.
    let after = head.headers.get(RETRY_AFTER);
    let after = after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
    Outcome::Later {
        why,
        answered: true,
        after: after.map(Duration::from_secs),
    }
}
