//! The VPD parser takes any bytes, and finds only what is in them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if kata_gpu_init::gpu::vpd::manages_switches(bytes) {
        assert!(bytes.windows(6).any(|part| part == b"SW_MNG"));
    }
});
