//! The record decoder takes any bytes; what it takes, it writes again and reads as the same.
#![no_main]

use kata_gpu_init::events::record::{Line, MAX_LINE, decode, record_line};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(Line::Record(record)) = decode(bytes) {
        let line = record_line(&record);
        assert!(line.len() <= MAX_LINE && line.ends_with('\n'));
        let Ok(Line::Record(again)) = decode(line.as_bytes()) else { panic!("what was written does not decode: {line}") };
        assert!(again == record || again.fields.contains_key("cut_bytes"), "{again:?} != {record:?}");
    }
});
