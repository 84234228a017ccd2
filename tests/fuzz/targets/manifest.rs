//! A manifest of the driver's files as an image has it: what is taken is written again as the same.
#![no_main]

use kata_gpu_init::driver_files::manifest::parse;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(manifest) = parse(bytes) {
        assert_eq!(parse(&manifest.to_json()), Ok(manifest));
    }
});
