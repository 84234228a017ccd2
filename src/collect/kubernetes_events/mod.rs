//! Reports a failed boot to Kubernetes: an Event of its pod, which `kubectl describe pod` shows.
//!
//! The API server takes TLS and a token alone, and this program has neither: `kubectl proxy` beside
//! it does, on a socket or port of the same pod or machine. An Event's name is made of pod and
//! boot, so that a boot has one Event however often it is sent.

mod event; // the Event of a boot

pub use event::{Event, event};

use crate::http_client::{AGENT, Address, Connection, Failure, connect};
use anyhow::{Context, Result, ensure};
use http_body_util::Full;
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use hyper::{Request, StatusCode, Uri};
use kata_gpu_report::data::text::printable;
use serde_json::Value;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Port of `kubectl proxy` where none is named.
const PORT: u16 = 8001;
/// `kubectl proxy` answers requests for these hosts alone (--accept-hosts).
const LOCALHOST: &str = "localhost";
const JSON: HeaderValue = HeaderValue::from_static("application/json");
/// Answers after which the same may be sent again: Too Many Requests, Internal Server Error (which
/// an API server without its database says), Bad Gateway, Service Unavailable, Gateway Timeout.
const RETRYABLE: [u16; 5] = [429, 500, 502, 503, 504];
const HINT: &str = "is it that of kubectl proxy?";

/// A way to the API: `http://HOST:PORT` or `unix:/PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Api {
    Http { host: String, port: u16 },
    Unix(PathBuf),
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http { host, port } => write!(f, "http://{}:{port}", printable(host)),
            Self::Unix(path) => write!(f, "unix:{}", printable(&path.to_string_lossy())),
        }
    }
}

impl FromStr for Api {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let shown = printable(text);
        let want = || format!("{shown}: want http://127.0.0.1:{PORT} or unix:/PATH");
        if let Some(path) = text.strip_prefix("unix:") {
            ensure!(path.starts_with('/'), "{}", want());
            return Ok(Self::Unix(path.into()));
        }
        ensure!(
            !text.starts_with("https:"),
            "{shown}: there is no TLS here: run `kubectl proxy` on this machine, and name its \
             address"
        );
        let uri: Uri = text.parse().with_context(want)?;
        let authority = uri.authority().with_context(want)?;
        let host = authority.host().trim_matches(['[', ']']).to_string();
        let port = match authority.port_u16() {
            None if authority.as_str() == authority.host() => PORT,
            port => port.filter(|port| *port > 0).with_context(want)?,
        };
        let plain = uri.scheme_str() == Some("http") && ["", "/"].contains(&uri.path());
        ensure!(
            plain && uri.query().is_none() && !host.is_empty(),
            "{}",
            want()
        );
        Ok(Self::Http { host, port })
    }
}

impl Api {
    fn address(&self) -> Address<'_> {
        match self {
            Self::Http { host, port } => Address::Tcp(host, *port),
            Self::Unix(path) => Address::Unix(path),
        }
    }

    pub async fn connect(&self) -> Result<Connection, Failure> {
        connect(self.address()).await
    }

    /// Creates an Event; one that is there already is as good.
    pub async fn create(&self, mut connection: Connection, event: &Event) -> Result<(), Failure> {
        let host = match self {
            Self::Http { host, port } if host.contains(':') => format!("[{host}]:{port}"),
            Self::Http { host, port } => format!("{host}:{port}"),
            Self::Unix(_) => LOCALHOST.to_string(),
        };
        let request = Request::post(event.path())
            .header(HOST, host)
            .header(USER_AGENT, AGENT)
            .header(CONTENT_TYPE, JSON)
            .header(ACCEPT, JSON)
            .body(Full::new(event.body.to_string().into()));
        let request = request.map_err(|e| Failure::unreachable(&e.to_string()))?;
        let (head, body) = connection.send(request, HINT).await?;
        if head.status.is_success() || head.status == StatusCode::CONFLICT {
            return Ok(());
        }
        // A Status of the API; kubectl proxy itself sends a line.
        let status: Option<Value> = serde_json::from_slice(&body).ok();
        let message = status
            .as_ref()
            .and_then(|status| status["message"].as_str());
        Err(Failure::of(&head, message, &RETRYABLE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_or_refused_with_the_cure() {
        for (text, shown) in [
            ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
            ("http://localhost/", "http://localhost:8001"),
            ("http://[::1]:80", "http://::1:80"),
            ("unix:/run/x/socket", "unix:/run/x/socket"),
        ] {
            assert_eq!(text.parse::<Api>().unwrap().to_string(), shown);
        }
        for (text, cure) in [
            ("https://10.0.0.1", "run `kubectl proxy`"),
            ("127.0.0.1:8001", "want http://127.0.0.1:8001 or unix:/PATH"),
            ("http://x:0", "want http"),
            ("http://x:70000", "want http"),
            ("http://x/api", "want http"),
            ("http://x?y", "want http"),
            ("unix:x", "want http"),
            ("", "want http"),
        ] {
            let error = format!("{:#}", text.parse::<Api>().unwrap_err());
            assert!(error.contains(cure), "{text}: {error}");
        }
    }
}
