//! Target of a push: `http://host:4318`, and the headers that are sent with each request.

use anyhow::{Context, Result, bail, ensure};
use hyper::Uri;
use hyper::header::{HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use kata_gpu_report::data::text::printable;
use kata_gpu_report::otlp::{encoded_pairs, environment, pair};
use std::fmt;

/// Environment variable with headers, as every OpenTelemetry SDK reads it. An option would show
/// them in the process list.
pub const HEADERS_VARIABLE: &str = "OTEL_EXPORTER_OTLP_HEADERS";
/// OTLP/HTTP's port and path, where the URL has none.
const PORT: u16 = 4318;
const PATH: &str = "/v1/traces";
/// Headers that are this program's or the protocol's.
const OURS: [&str; 11] = [
    "host",
    "content-type",
    "content-length",
    "content-encoding",
    "transfer-encoding",
    "connection",
    "te",
    "accept",
    "upgrade",
    "user-agent",
    "expect",
];

/// A receiver.
#[derive(Clone, PartialEq, Eq)]
pub struct Target {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) authority: HeaderValue,
    /// The path alone.
    pub(super) uri: Uri,
    pub(super) headers: HeaderMap,
    shown: String,
}

/// Without the headers, which may be secrets.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({})", self.shown)
    }
}

impl Target {
    /// A URL, and headers as `KEY=VALUE`; those of [`HEADERS_VARIABLE`] go along where they are not
    /// asked for.
    pub fn new(url: &str, asked: &[String]) -> Result<Self> {
        let mut target = Self::parse(url)?;
        let from_environment = environment(HEADERS_VARIABLE)?.unwrap_or_default();
        let pairs =
            encoded_pairs(&from_environment).with_context(|| format!("read {HEADERS_VARIABLE}"))?;
        for (key, value) in pairs {
            target
                .header(&key, &value)
                .with_context(|| format!("read {HEADERS_VARIABLE}"))?;
        }
        for text in asked {
            let (key, value) =
                pair(text).context("read --otlp-header, for example x-tenant=gpu")?;
            target.header(&key, &value).context("read --otlp-header")?;
        }
        Ok(target)
    }

    fn parse(url: &str) -> Result<Self> {
        ensure!(
            !url.contains('@'),
            "the URL has a user or password: pass it as a header (--otlp-header or {HEADERS_VARIABLE})"
        );
        let shown = printable(url);
        let rest = match url.split_once("://") {
            Some(("http", rest)) => rest,
            Some(("https", _)) => bail!(
                "{shown}: there is no TLS here: send to the OpenTelemetry Collector of this node (http://127.0.0.1:{PORT}) and let it do that"
            ),
            Some(("grpc" | "grpcs", _)) => {
                bail!("{shown}: OTLP goes over HTTP alone: use the receiver's http://HOST:{PORT}")
            }
            _ => bail!("{shown}: want http://HOST:{PORT}"),
        };
        let uri: Uri = format!("http://{rest}")
            .parse()
            .with_context(|| format!("read {shown}: want http://HOST:{PORT}"))?;
        let host = uri
            .host()
            .filter(|host| !host.is_empty())
            .with_context(|| format!("{shown}: no host in it: want http://HOST:{PORT}"))?
            .to_string();
        let has_port = uri
            .authority()
            .is_some_and(|authority| authority.as_str() != host);
        let port = if has_port {
            uri.port_u16().unwrap_or(0)
        } else {
            PORT
        };
        ensure!(
            port > 0,
            "{shown}: its port is not one of 1 to 65535: want http://HOST:{PORT}"
        );
        let path = uri
            .path_and_query()
            .map(|path| path.as_str())
            .filter(|path| !["", "/"].contains(path))
            .unwrap_or(PATH);
        let authority = format!("{host}:{port}");
        let shown = format!("http://{authority}{path}");
        let mut headers = HeaderMap::new();
        headers.insert(
            USER_AGENT,
            HeaderValue::from_static(concat!("kata-gpu-boot/", env!("CARGO_PKG_VERSION"))),
        );
        Ok(Self {
            // Brackets are the URL's, not the address's.
            host: host.trim_matches(['[', ']']).to_string(),
            port,
            authority: HeaderValue::try_from(authority).with_context(|| format!("read {shown}"))?,
            uri: path.parse().with_context(|| format!("read {shown}"))?,
            headers,
            shown: printable(&shown),
        })
    }

    /// Values are never shown.
    fn header(&mut self, key: &str, value: &str) -> Result<()> {
        let name = HeaderName::from_bytes(key.to_ascii_lowercase().as_bytes())
            .with_context(|| format!("header {:?}", printable(key)))?;
        ensure!(
            !OURS.contains(&name.as_str()),
            "header {name}: the protocol sets it: omit it"
        );
        let mut value = HeaderValue::from_str(value)
            .ok()
            .with_context(|| format!("header {name}: its value is not printable ASCII"))?;
        value.set_sensitive(true);
        self.headers.insert(name, value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_become_targets() {
        for (url, shown, uri) in [
            (
                "http://otel:4318",
                "http://otel:4318/v1/traces",
                "/v1/traces",
            ),
            ("http://otel", "http://otel:4318/v1/traces", "/v1/traces"),
            (
                "http://otel:80/api/v1/otlp?x=1",
                "http://otel:80/api/v1/otlp?x=1",
                "/api/v1/otlp?x=1",
            ),
            ("http://[::1]/", "http://[::1]:4318/v1/traces", "/v1/traces"),
        ] {
            let target = Target::parse(url).unwrap();
            assert_eq!(
                (target.to_string().as_str(), target.uri.to_string().as_str()),
                (shown, uri)
            );
        }
        assert_eq!(Target::parse("http://[::1]").unwrap().host, "::1");
    }

    #[test]
    fn wrong_urls_and_headers_are_refused_with_the_cure() {
        for (url, cure) in [
            ("otel:4318", "want http://HOST:4318"),
            ("https://otel", "let it do that"),
            ("http://", "want http://HOST"),
            ("http://u:secret@otel", "--otlp-header"),
            ("grpc://u:secret@otel", "--otlp-header"),
            ("http://otel:0", "1 to 65535"),
            ("http://otel:70000", "1 to 65535"),
            ("http://otel:", "1 to 65535"),
            ("grpc://otel:4317", "use the receiver's http://HOST:4318"),
            ("ftp://otel", "want http"),
        ] {
            let error = format!("{:#}", Target::parse(url).unwrap_err());
            assert!(
                error.contains(cure) && !error.contains("secret"),
                "{url}: {error}"
            );
        }
        let mut target = Target::parse("http://otel").unwrap();
        target.header("Authorization", "Bearer 1").unwrap();
        assert!(!format!("{target:?} {:?}", target.headers).contains("Bearer"));
        for (key, value) in [
            ("host", "x"),
            ("te", "trailers"),
            ("a b", "x"),
            ("a", "\r\nb: c"),
        ] {
            assert!(target.header(key, value).is_err(), "{key}");
        }
    }
}
