//! A failure means that an image's compressed module crashes PID 1's decoder, or unpacks to more
//! than was allowed.

#![no_main]

use kata_gpu_init::kernel_modules::file::{Format, unpack, version_magic};

const LIMIT: u64 = 1 << 20;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(format) = Format::of(bytes)
        && let Ok(out) = unpack(bytes, format, LIMIT)
    {
        assert!(out.len() as u64 <= LIMIT);
    }
    assert!(version_magic(bytes).is_none_or(|m| !m.contains(char::is_control)));
});
