//! Sends OTLP requests to a receiver over HTTP, as protobuf. The report decides on the
//! content of a request, the caller on when to send again.
//!
//! Each boot has one connection: a node's boots are minutes apart, and load balancers cut idle
//! connections. No TLS: the receiver is meant to be the OpenTelemetry Collector of the same node or
//! cluster, which has certificates and everything else that a way out needs. An answer is bounded
//! in size and time, and a receiver's text passes [`kata_gpu_report::data::text::printable`] before
//! anybody sees it.

mod answer; // answers of receivers
mod answer_fields; // protobuf fields of an answer
mod backoff; // how long until the next try
mod http;
mod target; // address and headers

pub use answer::Outcome;
use answer::{Answer, TIMEOUT, chain, shown};
pub use backoff::Backoff;
pub use target::Target;

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::SendRequest;
use tokio::net::TcpStream;

/// Bytes of spans from which on a request is sent in parts; the OpenTelemetry Collector takes 20
/// MiB, some receivers 4 MiB.
pub const MAX_REQUEST: usize = 1 << 20;

/// A connection to a receiver.
pub struct Connection<'a> {
    target: &'a Target,
    sender: SendRequest<Full<Bytes>>,
}

/// Connects. An error says why there is nobody to talk to: that can change.
pub async fn connect(target: &Target) -> Result<Connection<'_>, String> {
    let connecting = async {
        let stream = TcpStream::connect((target.host.as_str(), target.port)).await?;
        stream.set_nodelay(true)?;
        Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
    };
    let stream = match tokio::time::timeout(TIMEOUT, connecting).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(e)) => return Err(format!("connect: {}", shown(&e.to_string()))),
        Err(_) => return Err(format!("connect: no answer within {} s", TIMEOUT.as_secs())),
    };
    match http::handshake(stream).await {
        Ok(sender) => Ok(Connection { target, sender }),
        Err(e) => Err(format!("connect: {}", shown(&chain(&e)))),
    }
}

impl Connection<'_> {
    /// Sends one ExportTraceServiceRequest.
    pub async fn send(&mut self, request: Vec<u8>) -> Outcome {
        let request = http::request(self.target, request);
        let exchange = async {
            match self.sender.send_request(request).await {
                Ok(response) => Answer::read(response).await,
                Err(e) => Err(chain(&e)),
            }
        };
        match tokio::time::timeout(TIMEOUT, exchange).await {
            Ok(Ok(answer)) => http::outcome(&answer),
            // The most frequent mistake.
            Ok(Err(why)) => Outcome::unreachable(format_args!(
                "{why} (is it the port of OTLP/HTTP, which is 4318?)"
            )),
            Err(_) => {
                Outcome::unreachable(format_args!("no answer within {} s", TIMEOUT.as_secs()))
            }
        }
    }
}
