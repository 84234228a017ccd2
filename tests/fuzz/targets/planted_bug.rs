//! Negative control: a bug behind four bytes, which only a fuzzer that sees coverage finds in
//! seconds.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let [b'g', b'p', b'u', b'!', ..] = bytes {
        panic!("the planted bug was found");
    }
});
