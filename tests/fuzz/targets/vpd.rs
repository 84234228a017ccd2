//! A failure means that vital product data crashes the init, or that a field is found which is not
//! in the data.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if kata_gpu_init::gpu::vpd::manages_switches(bytes) {
        assert!(bytes.windows(6).any(|part| part == b"SW_MNG"));
    }
});
