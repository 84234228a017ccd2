//! A failure means that a text of the driver's in /proc crashes the init, or gives a UUID or a mode
//! that none can have.

#![no_main]

use kata_gpu_init::gpu::driver_caps::{parse_access, parse_mig_minors};
use kata_gpu_init::gpu::driver_proc::{parse_information, parse_majors, parse_node_rules};

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Some(information) = parse_information(text) {
        assert!(
            information
                .uuid
                .is_none_or(|u| u.len() == 40 && u.is_ascii())
        );
    }
    let _majors = parse_majors(text);
    assert!(parse_mig_minors(text).len() <= text.lines().count());
    assert!(parse_access(text).is_none_or(|a| a.mode <= 0o777));
    assert!(parse_node_rules(text).mode <= 0o777);
});
