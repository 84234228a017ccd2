//! OTLP/gRPC: one unary call over HTTP/2, and which status codes mean what by OTLP's specification. That is all of gRPC that is needed.

use super::answer::{Answer, Head, Outcome, TIMEOUT, told};
use super::answer_fields::{partial_success, retry_delay};
use super::target::Target;
use crate::host::otlp::percent_decoded;
use base64::Engine;
use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::Full;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper::header::{CONTENT_TYPE, HeaderValue, TE};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
/// Before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// gRPC's status codes by their numbers.
const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];
const RETRYABLE: [&str; 6] = ["CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"];
/// Only where the receiver says that it recovers.
const RETRYABLE_IF_TOLD: &str = "RESOURCE_EXHAUSTED";
/// What proxies answer that gRPC takes for UNAVAILABLE.
const UNAVAILABLE_HTTP: [u16; 4] = [429, 502, 503, 504];

pub async fn handshake(stream: TokioIo<TcpStream>) -> hyper::Result<SendRequest<Full<Bytes>>> {
    let (sender, connection) = Builder::new(TokioExecutor::new()).handshake(stream).await?;
    // It ends with its sender; what goes wrong in it the request is told.
    tokio::spawn(async move {
        let _told_to_the_request = connection.await;
    });
    Ok(sender)
}

pub fn request(target: &Target, message: Vec<u8>) -> (Head, Bytes) {
    let mut headers = target.headers.clone();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(TE, HeaderValue::from_static("trailers"));
    if let Ok(timeout) = HeaderValue::try_from(format!("{}S", TIMEOUT.as_secs())) {
        headers.insert("grpc-timeout", timeout);
    }
    let mut body = BytesMut::with_capacity(PREFIX + message.len());
    body.put_u8(0);
    body.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    body.extend_from_slice(&message);
    (Head { uri: target.uri.clone(), headers }, body.freeze())
}

pub fn outcome(answer: &Answer) -> Outcome {
    let http = answer.status.as_u16();
    let Some(code) = answer.field("grpc-status") else {
        let why = format!("HTTP {http} and no gRPC status: not a gRPC receiver");
        return if UNAVAILABLE_HTTP.contains(&http) {
            Outcome::Later { why, answered: true, after: None }
        } else {
            Outcome::Refused { why }
        };
    };
    let name = code.trim().parse().ok().and_then(|n: usize| CODES.get(n).copied()).unwrap_or("UNKNOWN");
    if name == "OK" {
        let (rejected, why) = partial_success(answer.body.get(PREFIX..).unwrap_or_default());
        return Outcome::Taken { rejected, why: why.map(|why| told(&why)) };
    }
    let message = answer.field("grpc-message").map(|m| percent_decoded(m).unwrap_or_else(|_| m.to_string())).unwrap_or_default();
    let why = format!("gRPC {name}: {}", told(&message));
    // Some send it with, some without padding.
    let engine = base64::engine::general_purpose::STANDARD_NO_PAD;
    let details = answer.field("grpc-status-details-bin").and_then(|text| engine.decode(text.trim_end_matches('=')).ok());
    let after = details.as_deref().and_then(retry_delay);
    if RETRYABLE.contains(&name) || (name == RETRYABLE_IF_TOLD && after.is_some()) {
        Outcome::Later { why, answered: true, after }
    } else {
        Outcome::Refused { why }
    }
}
