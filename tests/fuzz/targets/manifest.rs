//! A failure means that an image's list of the driver's files crashes the init, or is taken and
//! then written as another one.

#![no_main]

use kata_gpu_init::driver_files::manifest::parse;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(manifest) = parse(bytes) {
        assert_eq!(parse(&manifest.to_json()), Ok(manifest));
    }
});
