//! A failure means that the fuzzer sees no coverage, so that the other targets find nothing: a bug
//! behind four bytes is not found in seconds.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let [b'g', b'p', b'u', b'!', ..] = bytes {
        panic!("the planted bug was found");
    }
});
