//! A failure means that a runtime's state, a bundle's configuration or the note of a CUDA library
//! crashes a hook, or gives it a root that is no absolute path.

#![no_main]

use kata_gpu_init::cdi::hooks::enable_cuda_compat::{Version, decide, parse_note};
use kata_gpu_init::cdi::hooks::{arguments, oci_state};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(path) = oci_state::bundle(bytes) {
        assert!(path.is_absolute());
    }
    if let Ok(path) = oci_state::root_path(bytes) {
        assert!(path.is_absolute());
    }
    if let Ok(note) = parse_note(bytes) {
        let _wanted = decide(note.as_ref(), "575.57.08", "550.163.01", "");
    }
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let _version = Version::parse(text);
    let words: Vec<String> = text.split('\n').map(str::to_string).collect();
    if let Ok(arguments::Meaning::Run(_, arguments)) = arguments::parse(&words) {
        assert!(
            arguments
                .folders
                .iter()
                .all(|f| f.starts_with('/') && !f.contains(['\n', '#', ':']))
        );
    }
});
