//! Messages of OpenTelemetry's protos, with the fields that are written, in their two forms:
//! protobuf, and OTLP/JSON, which has ids in hexadecimal and 64-bit integers as texts.
//!
//! The crate `opentelemetry-proto` has them all, and needs OpenTelemetry's SDK.

use crate::data::units::is_zero;
use prost::{Message, Oneof};
use serde::{Serialize, Serializer};
use std::fmt::Display;

/// Span.SpanKind.INTERNAL.
pub const KIND_INTERNAL: i32 = 1;
/// Status.StatusCode.ERROR.
pub const STATUS_ERROR: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub struct ExportTraceServiceRequest {
    #[prost(message, repeated, tag = "1")]
    pub resource_spans: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    pub scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, Serialize, Message)]
pub struct Resource {
    #[prost(message, repeated, tag = "1")]
    pub attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    pub scope: Option<InstrumentationScope>,
    #[prost(message, repeated, tag = "2")]
    pub spans: Vec<Span>,
}

#[derive(Clone, PartialEq, Serialize, Message)]
pub struct InstrumentationScope {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub version: String,
}

#[derive(Clone, PartialEq, Serialize, Message)]
#[serde(rename_all = "camelCase")]
pub struct Span {
    #[prost(bytes = "vec", tag = "1")]
    #[serde(serialize_with = "hex")]
    pub trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    #[serde(serialize_with = "hex")]
    pub span_id: Vec<u8>,
    /// Empty: the root.
    #[prost(bytes = "vec", tag = "4")]
    #[serde(serialize_with = "hex", skip_serializing_if = "Vec::is_empty")]
    pub parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    pub name: String,
    #[prost(int32, tag = "6")]
    pub kind: i32,
    #[prost(fixed64, tag = "7")]
    #[serde(serialize_with = "decimal")]
    pub start_time_unix_nano: u64,
    #[prost(fixed64, tag = "8")]
    #[serde(serialize_with = "decimal")]
    pub end_time_unix_nano: u64,
    #[prost(message, repeated, tag = "9")]
    pub attributes: Vec<KeyValue>,
    #[prost(message, repeated, tag = "11")]
    pub events: Vec<Event>,
    #[prost(uint32, tag = "12")]
    #[serde(skip_serializing_if = "is_zero")]
    pub dropped_events_count: u32,
    #[prost(message, repeated, tag = "13")]
    pub links: Vec<Link>,
    #[prost(message, optional, tag = "15")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
}

#[derive(Clone, PartialEq, Serialize, Message)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    #[prost(fixed64, tag = "1")]
    #[serde(serialize_with = "decimal")]
    pub time_unix_nano: u64,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(message, repeated, tag = "3")]
    pub attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Serialize, Message)]
#[serde(rename_all = "camelCase")]
pub struct Link {
    #[prost(bytes = "vec", tag = "1")]
    #[serde(serialize_with = "hex")]
    pub trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    #[serde(serialize_with = "hex")]
    pub span_id: Vec<u8>,
    #[prost(message, repeated, tag = "4")]
    pub attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Serialize, Message)]
pub struct Status {
    #[prost(string, tag = "2")]
    pub message: String,
    #[prost(int32, tag = "3")]
    pub code: i32,
}

#[derive(Clone, PartialEq, Serialize, Message)]
pub struct KeyValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(message, optional, tag = "2")]
    pub value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Serialize, Message)]
#[serde(transparent)]
pub struct AnyValue {
    #[prost(oneof = "Value", tags = "1, 2, 3")]
    pub value: Option<Value>,
}

#[derive(Clone, PartialEq, Serialize, Oneof)]
pub enum Value {
    #[prost(string, tag = "1")]
    #[serde(rename = "stringValue")]
    Text(String),
    #[prost(bool, tag = "2")]
    #[serde(rename = "boolValue")]
    Flag(bool),
    #[prost(int64, tag = "3")]
    #[serde(rename = "intValue", serialize_with = "decimal")]
    Integer(i64),
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue {
        key: key.into(),
        value: Some(AnyValue { value: Some(value) }),
    }
}

pub fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, Value::Text(value.into()))
}

pub fn flag(key: &str, value: bool) -> KeyValue {
    attribute(key, Value::Flag(value))
}

/// OTLP has no unsigned integers.
pub fn integer(key: &str, value: u64) -> KeyValue {
    attribute(
        key,
        Value::Integer(i64::try_from(value).unwrap_or(i64::MAX)),
    )
}

fn hex<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&crate::data::text::hex(bytes))
}

fn decimal<T: Display, S: Serializer>(number: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}
