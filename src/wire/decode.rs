//! Lines of the wire format are decoded here: own ones, and those of the next schema ([`newer`]).

use super::newer;
use super::record::{DecodeError, Header, Line, MAX_LINE, Pong, READS, Record, SCHEMA, malformed};
use serde::Deserialize;

#[derive(Deserialize)]
struct Version {
    schema: u64,
}

#[derive(Deserialize)]
struct Shape {
    stream: Option<Header>,
    pong: Option<u64>,
    boottime_ns: Option<u64>,
}

/// Decodes one line, with or without its newline. Checks form and limits, not truth.
pub fn decode(line: &[u8]) -> Result<Line, DecodeError> {
    decode_with_schema(line).map(|(_, line)| line)
}

/// The same, with the line's schema.
pub fn decode_with_schema(line: &[u8]) -> Result<(u32, Line), DecodeError> {
    if line.len() > MAX_LINE {
        return Err(DecodeError::TooLong(line.len()));
    }
    // Read the version first: the rest of another version's line may have any shape.
    let version: Version = serde_json::from_slice(line).map_err(malformed)?;
    let schema = u32::try_from(version.schema)
        .ok()
        .filter(|schema| READS.contains(schema));
    let schema = schema.ok_or(DecodeError::Schema(version.schema))?;
    let line = if schema > SCHEMA {
        newer::decode(line, schema)
    } else {
        decode_own(line)
    };
    Ok((schema, line?))
}

fn decode_own(line: &[u8]) -> Result<Line, DecodeError> {
    let shape: Shape = serde_json::from_slice(line).map_err(malformed)?;
    if let Some(header) = shape.stream {
        return header.checked().map(Line::Header);
    }
    if let (Some(pong), Some(boottime_ns)) = (shape.pong, shape.boottime_ns) {
        return Ok(Line::Pong(Pong { pong, boottime_ns }));
    }
    let record: Record = serde_json::from_slice(line).map_err(malformed)?;
    record
        .checked()
        .map(|record| Line::Record(Box::new(record)))
}
