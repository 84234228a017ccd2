//! OTLP/HTTP with protobuf: one POST, and which answers mean what by OTLP's specification.

use super::answer::{Answer, Outcome, shown};
use super::answer_fields::{partial_success, status_message};
use super::target::Target;
use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::{SendRequest, handshake as start};
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use std::time::Duration;
use tokio::net::TcpStream;

const PROTOBUF: HeaderValue = HeaderValue::from_static("application/x-protobuf");
/// Answers after which the same may be sent again: Too Many Requests, Bad Gateway, Service
/// Unavailable, Gateway Timeout.
const RETRYABLE: [u16; 4] = [429, 502, 503, 504];

pub async fn handshake(stream: TokioIo<TcpStream>) -> hyper::Result<SendRequest<Full<Bytes>>> {
    let (sender, connection) = start(stream).await?;
    // The connection ends with its sender; its errors reach the request.
    tokio::spawn(async move {
        let _told_to_the_request = connection.await;
    });
    Ok(sender)
}

pub fn request(target: &Target, body: Vec<u8>) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(body.into()));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = target.uri.clone();
    let headers = request.headers_mut();
    headers.clone_from(&target.headers);
    headers.insert(HOST, target.authority.clone());
    headers.insert(CONTENT_TYPE, PROTOBUF);
    headers.insert(ACCEPT, PROTOBUF);
    request
}

pub fn outcome(answer: &Answer) -> Outcome {
    let status = answer.status.as_u16();
    if answer.status.is_success() {
        let (rejected, why) = partial_success(&answer.body);
        return Outcome::Taken {
            rejected,
            why: why.map(|why| shown(&why)),
        };
    }
    // The specification wants a google.rpc.Status; proxies send pages.
    let message = status_message(&answer.body)
        .map(|message| format!(": {}", shown(&message)))
        .unwrap_or_default();
    let why = format!(
        "HTTP {status} {}{message}",
        answer.status.canonical_reason().unwrap_or("(unknown)")
    );
    if RETRYABLE.contains(&status) {
        // Its other form, a date, is by the receiver's clock, and rare: our own pause is used then.
        let after = answer
            .headers
            .get(RETRY_AFTER)
            .and_then(|value| value.to_str().ok()?.trim().parse().ok())
            .map(Duration::from_secs);
        Outcome::Later {
            why,
            answered: true,
            after,
        }
    } else {
        Outcome::Refused { why }
    }
}
