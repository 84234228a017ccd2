//! Lines of the next schema, of a guest that is newer than this program: what is known is read,
//! what is unknown becomes a field.
//!
//! The frame never changes (src/wire/README.md): `seq`, `boottime_ns` and `name` of a record,
//! `boot_id` and `first_seq` of a header, `pong` and `boottime_ns` of an answer. A known key whose
//! value has another type counts as unknown. A record of an unknown kind is an event. A line has
//! the same limits as one of this program's schema.

use super::record::{DecodeError, Header, Kind, Line, Pong, Record, malformed};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Longest text that is made of a value of another type, or that names a version, in characters.
const MAX_TEXT: usize = 512;

type Keys = Map<String, Value>;

/// Decodes a line whose schema was read already.
pub(super) fn decode(line: &[u8], schema: u32) -> Result<Line, DecodeError> {
    let mut keys: Keys = serde_json::from_slice(line).map_err(malformed)?;
    keys.remove("schema");
    if let Some(stream) = keys.get("stream") {
        let stream = Keys::deserialize(stream).map_err(malformed)?;
        let text = |key: &str| {
            known(&stream, key)
                .unwrap_or_else(|| "?".to_string())
                .chars()
                .take(MAX_TEXT)
                .collect()
        };
        let header = Header {
            boot_id: frame(&stream, "boot_id")?,
            version: text("version"),
            kernel: text("kernel"),
            first_seq: frame(&stream, "first_seq")?,
        };
        return header.checked().map(Line::Header);
    }
    if let Some(pong) = known(&keys, "pong") {
        return Ok(Line::Pong(Pong {
            pong,
            boottime_ns: frame(&keys, "boottime_ns")?,
        }));
    }
    record(keys, schema).map(|record| Line::Record(Box::new(record)))
}

fn record(mut keys: Keys, schema: u32) -> Result<Record, DecodeError> {
    // The collector's own lines in a boot's file.
    if keys.get("kind").is_some_and(|kind| kind == "host") {
        return Err(DecodeError::Invalid("kind host is the collector's"));
    }
    let (kind, span) = (known::<Kind>(&keys, "kind"), known(&keys, "span"));
    let fits = kind.filter(|kind| kind.is_of_span() == span.is_some());
    if fits.is_some() {
        keys.remove("kind");
        keys.remove("span");
    }
    let mut record = Record {
        schema,
        seq: frame(&keys, "seq")?,
        boottime_ns: frame(&keys, "boottime_ns")?,
        span: fits.and(span),
        level: take(&mut keys, "level").unwrap_or_default(),
        gpu: take(&mut keys, "gpu"),
        parent: take(&mut keys, "parent"),
        after: take(&mut keys, "after").unwrap_or_default(),
        // A failure stays one, whatever the form of its reason.
        error: keys
            .remove("error")
            .filter(|error| !error.is_null())
            .map(|error| match error {
                Value::String(text) => text,
                other => other.to_string().chars().take(MAX_TEXT).collect(),
            }),
        fields: take(&mut keys, "fields").unwrap_or_default(),
        ..Record::new(
            fits.unwrap_or(Kind::Event),
            &frame::<String>(&keys, "name")?,
        )
    };
    for key in ["seq", "boottime_ns", "name"] {
        keys.remove(key);
    }
    for (key, value) in keys {
        let key = if record.fields.contains_key(&key) {
            format!("record.{key}")
        } else {
            key
        };
        record.fields.entry(key).or_insert(value);
    }
    record.checked()
}

/// Value of a key, if the key is there and its type is the known one.
fn known<'a, T: Deserialize<'a>>(keys: &'a Keys, key: &str) -> Option<T> {
    T::deserialize(keys.get(key)?).ok()
}

/// The same, without the key afterwards.
fn take<T: for<'a> Deserialize<'a>>(keys: &mut Keys, key: &str) -> Option<T> {
    let value = known(keys, key)?;
    keys.remove(key);
    Some(value)
}

/// Value of a key that every schema has.
fn frame<'a, T: Deserialize<'a>>(keys: &'a Keys, key: &str) -> Result<T, DecodeError> {
    let value = keys
        .get(key)
        .ok_or_else(|| malformed(format_args!("no {key}")))?;
    T::deserialize(value).map_err(|e| malformed(format_args!("{key}: {e}")))
}

#[cfg(test)]
mod tests {
    use super::super::decode::decode;
    use crate::record::{DecodeError, Kind, Level, Line, MAX_LINE, Record, record_line};
    use serde_json::Value;

    fn read(rest: &str) -> Record {
        let line = format!(r#"{{"schema":2,"seq":7,"boottime_ns":9,"name":"x",{rest}}}"#);
        match decode(line.as_bytes()) {
            Ok(Line::Record(record)) => *record,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn what_is_known_of_a_newer_record_is_read_as_ever() {
        let rest = r#""kind":"end","level":"warn","gpu":"0001:00:03.0","span":4,"parent":1,
            "after":[2,3],"error":"e","fields":{"a":"b"}"#;
        let own = format!(r#"{{"schema":1,"seq":7,"boottime_ns":9,"name":"x",{rest}}}"#);
        let Ok(Line::Record(own)) = decode(own.as_bytes()) else {
            panic!("{own}")
        };
        assert_eq!(read(rest), Record { schema: 2, ..*own });
    }

    #[test]
    fn what_is_unknown_of_a_newer_record_is_a_field() {
        let record = read(
            r#""kind":"counter","level":"fatal","gpu":{"bus":1},"span":"s","parent":-1,
                "after":{"ids":[1]},"error":{"code":5},"fields":[1],"numa":2"#,
        );
        assert_eq!(
            (
                record.kind,
                record.level,
                record.gpu,
                record.span,
                record.parent
            ),
            (Kind::Event, Level::Info, None, None, None)
        );
        assert_eq!(
            (
                record.name.as_str(),
                record.error.as_deref(),
                record.after.len()
            ),
            ("x", Some(r#"{"code":5}"#), 0)
        );
        assert_eq!(
            Value::Object(record.fields),
            serde_json::json!({
                "after": {"ids": [1]}, "fields": [1], "gpu": {"bus": 1}, "kind": "counter",
                "level": "fatal", "numa": 2, "parent": -1, "span": "s"
            })
        );
        // A begin without its span's id, and a key that is a field, too.
        let record = read(r#""kind":"begin","numa":1,"fields":{"numa":2}"#);
        assert_eq!(
            (
                record.kind,
                Value::Object(record.fields).to_string().as_str()
            ),
            (Kind::Event, r#"{"kind":"begin","numa":2,"record.numa":1}"#)
        );
    }

    #[test]
    fn a_newer_record_is_the_same_after_it_was_written() {
        for rest in [
            r#""kind":"counter","span":5,"error":[1],"numa":2"#,
            r#""kind":"end","span":5,"gpu":null"#,
        ] {
            let record = read(rest);
            assert_eq!(
                decode(record_line(&record).as_bytes()),
                Ok(Line::Record(Box::new(record)))
            );
        }
    }

    #[test]
    fn a_newer_line_without_its_frame_is_refused_with_the_reason() {
        let why = |line: &str| decode(line.as_bytes()).unwrap_err().to_string();
        for (line, reason) in [
            (
                r#"{"schema":2,"boottime_ns":9,"name":"x","kind":"event"}"#,
                "no seq",
            ),
            (
                r#"{"schema":2,"seq":"7","boottime_ns":9,"name":"x","kind":"event"}"#,
                "seq: invalid type",
            ),
            (
                r#"{"schema":2,"seq":7,"boottime_ns":9,"name":"\u001b[2J","kind":"event"}"#,
                "not printable",
            ),
            (
                r#"{"schema":2,"seq":7,"boottime_ns":9,"name":"x","kind":"host","event":"sandbox",
                    "id":"a"}"#,
                "the collector's",
            ),
            (
                r#"{"schema":2,"stream":{"boot_id":"../../etc","first_seq":0}}"#,
                "not a UUID",
            ),
            (
                r#"{"schema":2,"stream":{"boot_id":"0f7a1f8e-0000-4000-8000-00000000beef"}}"#,
                "no first_seq",
            ),
            (r#"{"schema":2,"stream":7}"#, "invalid type"),
            (r#"{"schema":2,"pong":1}"#, "no boottime_ns"),
        ] {
            assert!(why(line).contains(reason), "{line}: {}", why(line));
        }
        assert_eq!(
            decode(&[br#"{"schema":2}"#, &vec![b' '; MAX_LINE][..]].concat()),
            Err(DecodeError::TooLong(MAX_LINE + 12))
        );
    }
}
