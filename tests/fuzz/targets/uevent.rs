//! The uevent parser takes any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(event) = kata_gpu_init::uevents::parse(bytes) {
        assert_eq!(event.address.to_string().parse(), Ok(event.address));
    }
});
