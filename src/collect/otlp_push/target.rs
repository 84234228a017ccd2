//! Target of a push: `http://host:4318`, and the headers that are sent with each request.

use crate::http_client::{AGENT, Address};
use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use hyper::{Request, Uri};
use kata_gpu_report::data::text::printable;
use kata_gpu_report::otlp::{encoded_pairs, environment};
use std::fmt;

/// Environment variable with headers, as every OpenTelemetry SDK reads it. An option would show
/// their values, which may be secrets, in the process list.
const HEADERS_VARIABLE: &str = "OTEL_EXPORTER_OTLP_HEADERS";
const PROTOBUF: HeaderValue = HeaderValue::from_static("application/x-protobuf");
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
    /// With a port and a path.
    uri: Uri,
    headers: HeaderMap,
}

/// Without the headers, which may be secrets.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable(&self.uri.to_string()))
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({self})")
    }
}

impl Target {
    /// A URL, with the headers of [`HEADERS_VARIABLE`].
    pub fn new(url: &str) -> Result<Self> {
        let mut target = Self::parse(url)?;
        let read = || format!("read {HEADERS_VARIABLE}");
        let headers = environment(HEADERS_VARIABLE)?.unwrap_or_default();
        for (key, value) in encoded_pairs(&headers).with_context(read)? {
            target.header(&key, &value).with_context(read)?;
        }
        Ok(target)
    }

    fn parse(url: &str) -> Result<Self> {
        ensure!(
            !url.contains('@'),
            "the URL has a user or password: pass it as a header ({HEADERS_VARIABLE})"
        );
        let shown = printable(url);
        let want = || format!("{shown}: want http://HOST:{PORT}");
        let uri: Uri = url.parse().with_context(want)?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => bail!(
                "{shown}: there is no TLS here: send to the OpenTelemetry Collector of this node \
                 (http://127.0.0.1:{PORT}) and let it do that"
            ),
            Some("grpc" | "grpcs") => {
                bail!("{shown}: only OTLP over HTTP: use the receiver's http://HOST:{PORT}")
            }
            _ => bail!(want()),
        }
        let host = uri.host().filter(|host| !host.is_empty());
        let host = host.with_context(want)?;
        let port = match uri.port_u16() {
            // The URL has no port.
            None if uri.authority().is_some_and(|all| all.as_str() == host) => PORT,
            port => port.filter(|port| *port > 0).with_context(|| {
                format!("{shown}: its port is not one of 1 to 65535: want http://HOST:{PORT}")
            })?,
        };
        let path = uri.path_and_query().map(|path| path.as_str());
        let path = path.filter(|path| !["", "/"].contains(path));
        let complete = Uri::builder()
            .scheme("http")
            .authority(format!("{host}:{port}"))
            .path_and_query(path.unwrap_or(PATH))
            .build();
        Ok(Self {
            uri: complete.with_context(want)?,
            headers: HeaderMap::from_iter([(USER_AGENT, AGENT)]),
        })
    }

    /// Host and port to connect to.
    pub(super) fn address(&self) -> Address<'_> {
        // Brackets are the URL's, not the address's.
        let host = self.uri.host().unwrap_or_default().trim_matches(['[', ']']);
        Address::Tcp(host, self.uri.port_u16().unwrap_or(PORT))
    }

    /// A POST to the receiver.
    pub(super) fn request(&self, body: Vec<u8>) -> hyper::http::Result<Request<Full<Bytes>>> {
        let authority = self.uri.authority().map_or("", |all| all.as_str());
        let mut request =
            Request::post(self.uri.path_and_query().map_or(PATH, |path| path.as_str()))
                .header(HOST, authority)
                .header(CONTENT_TYPE, PROTOBUF)
                .header(ACCEPT, PROTOBUF)
                .body(Full::new(body.into()))?;
        request.headers_mut().extend(self.headers.clone());
        Ok(request)
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
                (
                    target.to_string().as_str(),
                    target.uri.path_and_query().unwrap().as_str()
                ),
                (shown, uri)
            );
        }
        let target = Target::parse("http://[::1]").unwrap();
        assert!(matches!(target.address(), Address::Tcp("::1", PORT)));
    }

    #[test]
    fn wrong_urls_and_headers_are_refused_with_the_cure() {
        for (url, cure) in [
            ("otel:4318", "want http://HOST:4318"),
            ("https://otel", "let it do that"),
            ("http://", "want http://HOST"),
            ("http://u:secret@otel", HEADERS_VARIABLE),
            ("grpc://u:secret@otel", HEADERS_VARIABLE),
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
