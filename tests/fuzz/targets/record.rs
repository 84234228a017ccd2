//! A failure means that a guest's line crashes the decoder of records, or is taken and then written
//! as another one.

#![no_main]

use kata_gpu_wire::decode::decode;
use kata_gpu_wire::record::{Line, MAX_LINE, header_line, ping, ping_line, pong_line, record_line};
use serde_json::Value;

/// Whether there is a number in it that is no integer. No writer of schema 1 makes one, and
/// serde_json may read its last digit differently.
fn has_fraction(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(values) => values.iter().any(has_fraction),
        Value::Object(map) => map.values().any(has_fraction),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(id) = ping(bytes) {
        assert_eq!(ping(ping_line(id).as_bytes()), Some(id));
    }
    let Ok(line) = decode(bytes) else { return };
    let written = match &line {
        Line::Header(header) => header_line(header),
        Line::Record(record) => record_line(record),
        Line::Pong(pong) => pong_line(*pong),
    };
    assert!(
        written.len() <= MAX_LINE
            && written.ends_with('\n')
            && !written[..written.len() - 1].contains('\n'),
        "{written:?}"
    );
    let again = decode(written.as_bytes())
        .unwrap_or_else(|e| panic!("what was written does not decode: {e}: {written}"));
    let differs = matches!(
        &again,
        Line::Record(r)
            if r.fields.contains_key("cut_bytes") || r.fields.values().any(has_fraction)
    );
    assert!(again == line || differs, "{again:?} != {line:?}");
});
