//! A failure means that a uevent crashes the init, or names another address than it has.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(address) = kata_gpu_init::machine::uevents::parse_display(bytes) {
        assert_eq!(address.to_string().parse(), Ok(address));
    }
    if let Some(event) = kata_gpu_init::machine::uevents::parse(bytes) {
        assert_eq!(event.address.to_string().parse(), Ok(event.address));
    }
});
