//! A failure means that some command line of the kernel crashes the init, or makes notes that are
//! unbounded or not printable.

#![no_main]

use kata_gpu_init::config::{Config, module_parameters, words};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let (_, notes) = Config::parse(bytes);
    assert!(notes.len() <= 33);
    for note in notes {
        assert!(
            !note.parameter.contains(char::is_control) && !note.value.contains(char::is_control)
        );
        assert!(note.parameter.chars().count() <= 64 && note.value.chars().count() <= 64);
    }
    assert!(words(bytes).iter().all(|w| !w.is_empty()));
    let _parameters = module_parameters(bytes, "nvidia");
});
