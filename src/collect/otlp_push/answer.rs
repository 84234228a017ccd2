//! Answers of receivers: read within bounds, and what becomes of the request by them.

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::{HeaderMap, Response};
use kata_gpu_report::data::text::printable_start;
use std::error::Error;
use std::fmt;
use std::time::Duration;

/// Default time that OpenTelemetry's exporters wait for an answer.
pub const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer that is read; it has a sentence or two.
pub const MAX_ANSWER: usize = 64 << 10;
/// Longest text of a receiver that is shown.
pub const MAX_TEXT: usize = 300;

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request was taken, without `rejected` spans, for the reason `why`.
    Taken { rejected: u64, why: Option<String> },
    /// The request failed for now: it may be sent again, and not before `after` where the receiver
    /// names a pause.
    Later {
        why: String,
        answered: bool,
        after: Option<Duration>,
    },
    /// The request failed for good: it would be refused again.
    Refused { why: String },
}

impl Outcome {
    pub fn unreachable(why: impl fmt::Display) -> Self {
        let why = printable_start(why.to_string().as_bytes(), MAX_TEXT);
        Self::Later {
            why,
            answered: false,
            after: None,
        }
    }
}

/// A response that was read.
pub struct Answer {
    pub status: hyper::StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub async fn read(response: Response<Incoming>) -> Result<Self, String> {
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_ANSWER)
            .collect()
            .await
            .map_err(|e| format!("read the answer: {}", chain(&*e)))?;
        Ok(Self {
            status: head.status,
            headers: head.headers,
            body: body.to_bytes(),
        })
    }
}

/// An error with all its causes.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(&format!(": {cause_text}"));
        }
        source = cause.source();
    }
    text
}

/// A text of a receiver, safe to print and bounded.
pub fn shown(text: &str) -> String {
    printable_start(text.trim().as_bytes(), MAX_TEXT)
}
