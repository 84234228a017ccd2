//! The spans of one trace as ExportTraceServiceRequest: one line of OTLP/JSON, or protobuf in
//! parts. Nothing here knows what a boot is.

use super::messages::{
    ExportTraceServiceRequest, InstrumentationScope, Resource, ResourceSpans, ScopeSpans, Span,
};
use prost::Message;
use serde_json::to_value;
use std::io::{self, Write};

/// Request with one resource, one scope, one trace.
pub struct Request<'a> {
    pub resource: Resource,
    pub scope: InstrumentationScope,
    /// Spans, each in memory while it is written: all of them are many times the boot's file.
    pub spans: Box<dyn Iterator<Item = Span> + Send + 'a>,
}

impl Request<'_> {
    /// Writes the request as one line, span by span. Values have their keys in alphabetical order.
    pub fn write_json(self, out: &mut dyn Write) -> io::Result<()> {
        let (resource, scope) = (to_value(&self.resource)?, to_value(&self.scope)?);
        write!(
            out,
            "{{\"resourceSpans\":[{{\"resource\":{resource},\"scopeSpans\":[{{\"scope\":{scope},\"spans\":["
        )?;
        for (nth, span) in self.spans.enumerate() {
            write!(
                out,
                "{}{}",
                if nth > 0 { "," } else { "" },
                to_value(&span)?
            )?;
        }
        out.write_all(b"]}]}]}\n")
    }

    /// Protobuf, in as many requests as it takes for none to be much longer than `bytes`: receivers
    /// have limits.
    pub fn protobufs(self, bytes: usize) -> impl Iterator<Item = Part> {
        let Self {
            resource,
            scope,
            spans,
        } = self;
        let mut rest = spans.map(|span| (span.encoded_len(), span)).peekable();
        std::iter::from_fn(move || {
            let (mut spans, mut length) = (Vec::new(), 0);
            while let Some((long, span)) =
                rest.next_if(|(long, _)| spans.is_empty() || length + long <= bytes)
            {
                length += long;
                spans.push(span);
            }
            let count = spans.len() as u64;
            let scope_spans = vec![ScopeSpans {
                scope: Some(scope.clone()),
                spans,
            }];
            let resource_spans = vec![ResourceSpans {
                resource: Some(resource.clone()),
                scope_spans,
            }];
            (count > 0).then(|| Part {
                spans: count,
                bytes: ExportTraceServiceRequest { resource_spans }.encode_to_vec(),
            })
        })
    }
}

/// A request of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub spans: u64,
    pub bytes: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::super::messages::text;
    use super::*;

    fn request(spans: u64) -> Request<'static> {
        let span = |id: u64| Span {
            span_id: id.to_be_bytes().to_vec(),
            name: "x".repeat(100),
            ..Span::default()
        };
        let scope = InstrumentationScope {
            name: "s".into(),
            version: "1".into(),
        };
        Request {
            resource: Resource {
                attributes: vec![text("a", "b")],
            },
            scope,
            spans: Box::new((1..=spans).map(span)),
        }
    }

    #[test]
    fn a_part_exceeds_its_limit_by_one_span_and_none_is_lost() {
        let parts: Vec<Part> = request(1000).protobufs(10_000).collect();
        assert_eq!(parts.iter().map(|p| p.spans).sum::<u64>(), 1000);
        assert!(
            parts.len() > 10 && parts.iter().all(|p| p.bytes.len() < 11_000),
            "{}",
            parts.len()
        );
        assert_eq!(request(3).protobufs(1).count(), 3);
        assert_eq!(request(0).protobufs(1).count(), 0);
        let read = |part: &Part| {
            ExportTraceServiceRequest::decode(part.bytes.as_slice())
                .unwrap()
                .resource_spans
                .remove(0)
        };
        let ids = parts
            .iter()
            .map(read)
            .flat_map(|mut spans| spans.scope_spans.remove(0).spans)
            .map(|span| span.span_id);
        assert!(
            ids.eq((1..=1000u64).map(|id| id.to_be_bytes().to_vec())),
            "each once, in their order"
        );
    }
}
