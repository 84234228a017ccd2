//! `GET /metrics` over HTTP/1.1, for Prometheus: one request per connection.
//!
//! Any client of the port may be hostile: connections, header bytes, headers and time have
//! limits, bodies are not read, and nothing of a request is repeated in an answer. A scrape costs
//! one reading of the counters. At the limit of connections, a new one replaces the connection that
//! has been without a request the longest: slow clients lock nobody out.

use super::exposition;
use super::state::State;
use crate::accept::PAUSE;
use crate::collector_counters::add;
use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::{AbortHandle, JoinSet};

/// Path of the metrics.
pub const PATH: &str = "/metrics";
/// Most connections at once: a few Prometheus servers and a person with curl need less; the rest
/// keeps a crowd from replacing a connection whose request is on its way.
const MAX_CONNECTIONS: usize = 64;
/// Longest request line with all headers, in bytes; Prometheus sends some 200. No smaller buffer is
/// possible with this parser.
const MAX_HEAD: usize = 8192;
const MAX_HEADERS: usize = 32;
/// Time limit for the arrival of a request.
const HEAD_DEADLINE: Duration = Duration::from_secs(5);
/// Time limit of a connection: Prometheus' default timeout of a scrape.
const DEADLINE: Duration = Duration::from_secs(10);
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");

/// `PORT` on this machine alone, or `IP:PORT`. Brackets may be around an IP of either version, so
/// that a manifest need not know which its pods have: `[$(POD_IP)]:9464`.
pub fn parse_address(text: &str) -> Result<SocketAddr> {
    if let Ok(port) = text.parse() {
        return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    }
    let in_brackets = || {
        let (ip, port) = text.strip_prefix('[')?.split_once("]:")?;
        Some(SocketAddr::new(ip.parse().ok()?, port.parse().ok()?))
    };
    text.parse().ok().or_else(in_brackets).with_context(
        || "want PORT, which is one of 127.0.0.1, or IP:PORT: 9464, 0.0.0.0:9464, [::]:9464",
    )
}

/// Binds the port, before privileges are dropped.
pub fn bind(address: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    listener.with_context(|| format!("listen on {address} (--metrics)"))
}

/// Answers requests until dropped.
pub async fn serve(listener: TcpListener, state: Arc<State>) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(e) => return (state.collector.log)(format!("listen for --metrics: {e}")),
    };
    let stats = state.collector.store.stats.clone();
    // Dropping the set ends its tasks.
    let mut answering = JoinSet::new();
    let mut open: Vec<Open> = Vec::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                while answering.try_join_next().is_some() {}
                open.retain(|one| !one.task.is_finished());
                if open.len() >= MAX_CONNECTIONS {
                    let first_idle = open
                        .iter()
                        .position(|one| !one.asked.load(Ordering::Relaxed));
                    open.remove(first_idle.unwrap_or(0)).task.abort();
                    add(&stats.scrapes_refused, 1);
                }
                let (state, asked) = (state.clone(), Arc::new(AtomicBool::new(false)));
                let noted = asked.clone();
                open.push(Open {
                    asked,
                    task: answering.spawn(async move { answer(stream, &state, &noted).await }),
                });
                // Most requests have arrived by now: read this one before a crowd can replace the
                // connection.
                tokio::task::yield_now().await;
            }
            Err(_) => {
                add(&stats.scrapes_failed, 1);
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// An open connection; the list is in order of arrival.
struct Open {
    /// The request has arrived.
    asked: Arc<AtomicBool>,
    task: AbortHandle,
}

async fn answer(stream: TcpStream, state: &Arc<State>, asked: &AtomicBool) {
    let service = service_fn(|request: Request<Incoming>| async move {
        asked.store(true, Ordering::Relaxed);
        Ok::<_, Infallible>(respond(&request, state))
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    if !matches!(tokio::time::timeout(DEADLINE, serving).await, Ok(Ok(()))) {
        add(&state.collector.store.stats.scrapes_failed, 1);
    }
}

fn respond(request: &Request<Incoming>, state: &State) -> Response<Full<Bytes>> {
    let text =
        |status, text: &'static str| response(status, TEXT, Bytes::from_static(text.as_bytes()));
    match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, PATH) => {
            add(&state.collector.store.stats.scrapes, 1);
            response(
                StatusCode::OK,
                exposition::CONTENT_TYPE,
                exposition::write(state).into(),
            )
        }
        (&Method::GET | &Method::HEAD, _) => text(
            StatusCode::NOT_FOUND,
            "not found: the metrics are at /metrics\n",
        ),
        _ => {
            let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n");
            response
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            response
        }
    }
}

fn response(status: StatusCode, kind: HeaderValue, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_of_this_machine_alone_and_brackets_hold_any_ip() {
        assert_eq!(parse_address("9464").unwrap().to_string(), "127.0.0.1:9464");
        for (text, address) in [
            ("[::]:1", "[::]:1"),
            ("[fd00::7]:9464", "[fd00::7]:9464"),
            ("[10.0.0.7]:9464", "10.0.0.7:9464"),
        ] {
            assert_eq!(parse_address(text).unwrap().to_string(), address);
        }
        // A pod without an address, or two addresses, is no pod on every address.
        for wrong in [
            "",
            "70000",
            ":9464",
            "localhost",
            "-1",
            "0.0.0.0",
            "[]:1",
            "[::1,::2]:1",
        ] {
            assert!(
                parse_address(wrong)
                    .unwrap_err()
                    .to_string()
                    .contains("want PORT"),
                "{wrong}"
            );
        }
    }
}
