//! Sends OTLP requests to a receiver over HTTP, as protobuf. The report decides on the
//! content of a request, the caller on when to send again. The receiver is meant to be the
//! OpenTelemetry Collector of the same node or cluster.

mod answer_fields; // protobuf fields of an answer
mod target; // address and headers

pub use target::Target;

use crate::http_client::{Connection, Failure, connect, shown};
use answer_fields::{partial_success, status_message};
use hyper::http::response::Parts;
use kata_gpu_report::otlp::Request;

/// Bytes of spans from which on a request is sent in parts; the OpenTelemetry Collector takes 20
/// MiB, some receivers 4 MiB.
const MAX_REQUEST: usize = 1 << 20;
/// Answers after which the same may be sent again: Too Many Requests, Bad Gateway, Service
/// Unavailable, Gateway Timeout.
const RETRYABLE: [u16; 4] = [429, 502, 503, 504];
/// The most frequent mistake.
const HINT: &str = "is it the port of OTLP/HTTP, which is 4318?";

/// Spans that a receiver was sent, without `rejected` of them taken, which it did for the reason
/// `why`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spans {
    pub sent: u64,
    pub rejected: u64,
    pub why: Option<String>,
}

/// A connection to a receiver.
pub struct Receiver<'a> {
    target: &'a Target,
    connection: Connection,
}

impl<'a> Receiver<'a> {
    /// Connects. An error says why nobody answers: that can change.
    pub async fn connect(target: &'a Target) -> Result<Self, Failure> {
        let connection = connect(target.address()).await?;
        Ok(Self { target, connection })
    }

    /// Sends all spans of a boot.
    pub async fn push(&mut self, request: Request<'static>) -> Result<Spans, Failure> {
        let mut all = Spans::default();
        // A later try sends accepted parts again: their spans have the same ids.
        for part in request.protobufs(MAX_REQUEST) {
            let (rejected, why) = self.send(part.bytes).await?;
            all.sent += part.spans;
            // The receiver's count is not trusted.
            all.rejected += rejected.min(part.spans);
            all.why = all.why.or(why);
        }
        Ok(all)
    }

    async fn send(&mut self, body: Vec<u8>) -> Result<(u64, Option<String>), Failure> {
        let request = self.target.request(body);
        let request = request.map_err(|e| Failure::unreachable(&e.to_string()))?;
        let (head, body) = self.connection.send(request, HINT).await?;
        outcome(&head, &body)
    }
}

/// Meaning of an answer by OTLP's specification: spans that it rejected, and why.
fn outcome(head: &Parts, body: &[u8]) -> Result<(u64, Option<String>), Failure> {
    if head.status.is_success() {
        let (rejected, why) = partial_success(body);
        return Ok((rejected, why.map(|why| shown(&why))));
    }
    // The specification wants a google.rpc.Status; proxies send pages.
    let message = status_message(body);
    Err(Failure::of(head, message.as_deref(), &RETRYABLE))
}
