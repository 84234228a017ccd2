//! An ExportTraceServiceRequest: its parts as types, and its two forms, OTLP/JSON and protobuf.
//! Nothing here knows what a boot is.

use crate::host::views::protobuf::Message;
use serde_json::{Value, json};
use std::io::{self, Write};

/// SpanKind.INTERNAL and StatusCode.ERROR are enumerations, which OTLP/JSON writes as numbers.
const KIND_INTERNAL: u32 = 1;
const STATUS_ERROR: u32 = 2;

/// What an attribute can be here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnyValue {
    Text(String),
    Flag(bool),
    Integer(i64),
}

/// A KeyValue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute {
    pub key: String,
    pub value: AnyValue,
}

pub fn text(key: &str, value: &str) -> Attribute {
    Attribute { key: key.into(), value: AnyValue::Text(value.into()) }
}

pub fn flag(key: &str, value: bool) -> Attribute {
    Attribute { key: key.into(), value: AnyValue::Flag(value) }
}

/// OTLP has no unsigned integers.
pub fn integer(key: &str, value: u64) -> Attribute {
    Attribute { key: key.into(), value: AnyValue::Integer(i64::try_from(value).unwrap_or(i64::MAX)) }
}

/// Times are Unix time in ns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub time_ns: u64,
    pub name: String,
    pub attributes: Vec<Attribute>,
}

/// To a span of the same trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub span: u64,
    pub attributes: Vec<Attribute>,
}

/// All of one trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Span {
    pub id: u64,
    /// None: the root.
    pub parent: Option<u64>,
    pub name: String,
    pub start_ns: u64,
    pub end_ns: u64,
    pub attributes: Vec<Attribute>,
    pub events: Vec<Event>,
    /// Events that are left out.
    pub dropped_events: u32,
    pub links: Vec<Link>,
    /// It failed, and why.
    pub error: Option<String>,
}

/// One resource, one scope, one trace.
pub struct Request<'a> {
    pub trace: [u8; 16],
    pub resource: Vec<Attribute>,
    pub scope: (&'static str, &'static str),
    /// Each in memory while it is written: all of them are many times the boot's file.
    pub spans: Box<dyn Iterator<Item = Span> + Send + 'a>,
}

impl Request<'_> {
    /// OTLP/JSON: ids in hexadecimal, 64-bit integers as texts.
    /// One line, span by span.
    pub fn write_json(self, out: &mut dyn Write) -> io::Result<()> {
        let trace = hex(&self.trace);
        let resource = json!({ "attributes": attributes_json(&self.resource) });
        let scope = json!({ "name": self.scope.0, "version": self.scope.1 });
        write!(out, "{{\"resourceSpans\":[{{\"resource\":{resource},\"scopeSpans\":[{{\"scope\":{scope},\"spans\":[")?;
        for (nth, span) in self.spans.enumerate() {
            write!(out, "{}{}", if nth > 0 { "," } else { "" }, span_json(&span, &trace))?;
        }
        out.write_all(b"]}]}]}\n")
    }

    /// Protobuf, in as many requests as it takes for none to be much longer than `bytes`: receivers
    /// have limits.
    pub fn protobufs(self, bytes: usize) -> impl Iterator<Item = Part> {
        let Self { trace, resource, scope, spans } = self;
        let resource = move || resource.iter().fold(Message::default(), |m, a| m.message(1, attribute(a)));
        let mut rest = spans.map(move |span| span_message(&span, &trace)).peekable();
        std::iter::from_fn(move || {
            let scope = Message::default().text(1, scope.0).text(2, scope.1);
            let mut scope_spans = Message::default().message(1, scope);
            let (mut spans, mut length) = (0, 0);
            while let Some(span) = rest.next_if(|span| spans == 0 || length + span.size() <= bytes) {
                length += span.size();
                scope_spans = scope_spans.message(2, span);
                spans += 1;
            }
            let resource_spans = Message::default().message(1, resource()).message(2, scope_spans);
            (spans > 0).then(|| Part { spans, bytes: Message::default().message(1, resource_spans).into_bytes() })
        })
    }
}

/// A request of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub spans: u64,
    pub bytes: Vec<u8>,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn id_json(id: u64) -> String {
    hex(&id.to_be_bytes())
}

fn attributes_json(attributes: &[Attribute]) -> Vec<Value> {
    let value = |value: &AnyValue| match value {
        AnyValue::Text(text) => json!({ "stringValue": text }),
        AnyValue::Flag(flag) => json!({ "boolValue": flag }),
        AnyValue::Integer(n) => json!({ "intValue": n.to_string() }),
    };
    attributes.iter().map(|a| json!({ "key": a.key, "value": value(&a.value) })).collect()
}

fn span_json(span: &Span, trace: &str) -> Value {
    let event = |e: &Event| json!({ "timeUnixNano": e.time_ns.to_string(), "name": e.name, "attributes": attributes_json(&e.attributes) });
    let link = |l: &Link| json!({ "traceId": trace, "spanId": id_json(l.span), "attributes": attributes_json(&l.attributes) });
    let mut json = json!({
        "traceId": trace, "spanId": id_json(span.id), "name": span.name, "kind": KIND_INTERNAL,
        "startTimeUnixNano": span.start_ns.to_string(), "endTimeUnixNano": span.end_ns.to_string(),
        "attributes": attributes_json(&span.attributes), "events": span.events.iter().map(event).collect::<Vec<_>>(),
    });
    if let Some(parent) = span.parent {
        json["parentSpanId"] = id_json(parent).into();
        json["links"] = span.links.iter().map(link).collect();
    }
    if span.dropped_events > 0 {
        json["droppedEventsCount"] = span.dropped_events.into();
    }
    if let Some(error) = &span.error {
        json["status"] = json!({ "code": STATUS_ERROR, "message": error });
    }
    json
}

fn attribute(attribute: &Attribute) -> Message {
    let value = match &attribute.value {
        AnyValue::Text(text) => Message::default().text(1, text),
        AnyValue::Flag(flag) => Message::default().uint(2, (*flag).into()),
        // Two's complement, as int64 is on the wire.
        AnyValue::Integer(n) => Message::default().uint(3, *n as u64),
    };
    Message::default().text(1, &attribute.key).message(2, value)
}

fn span_message(span: &Span, trace: &[u8; 16]) -> Message {
    let mut message = Message::default().bytes(1, trace).bytes(2, &span.id.to_be_bytes());
    if let Some(parent) = span.parent {
        message = message.bytes(4, &parent.to_be_bytes());
    }
    message = message.text(5, &span.name).uint(6, KIND_INTERNAL.into()).fixed64(7, span.start_ns).fixed64(8, span.end_ns);
    message = span.attributes.iter().fold(message, |m, a| m.message(9, attribute(a)));
    for event in &span.events {
        let part = Message::default().fixed64(1, event.time_ns).text(2, &event.name);
        message = message.message(11, event.attributes.iter().fold(part, |m, a| m.message(3, attribute(a))));
    }
    if span.dropped_events > 0 {
        message = message.uint(12, span.dropped_events.into());
    }
    for link in &span.links {
        let part = Message::default().bytes(1, trace).bytes(2, &link.span.to_be_bytes());
        message = message.message(13, link.attributes.iter().fold(part, |m, a| m.message(4, attribute(a))));
    }
    match &span.error {
        Some(error) => message.message(15, Message::default().text(2, error).uint(3, STATUS_ERROR.into())),
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(spans: u64) -> Request<'static> {
        let span = |id| Span { id, name: "x".repeat(100), ..Span::default() };
        Request { trace: [7; 16], resource: vec![text("a", "b")], scope: ("s", "1"), spans: Box::new((1..=spans).map(span)) }
    }

    #[test]
    fn no_part_is_longer_than_asked_by_more_than_a_span_and_none_is_lost() {
        let parts: Vec<Part> = request(1000).protobufs(10_000).collect();
        assert_eq!(parts.iter().map(|p| p.spans).sum::<u64>(), 1000);
        assert!(parts.len() > 10 && parts.iter().all(|p| p.bytes.len() < 11_000), "{}", parts.len());
        assert_eq!(request(3).protobufs(1).count(), 3);
        assert_eq!(request(0).protobufs(1).count(), 0);
    }
}
