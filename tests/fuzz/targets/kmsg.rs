//! Records of the kernel's log, and the PCI addresses in their text.
#![no_main]

use kata_gpu_init::events::kmsg::{address_in, parse};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(line) = parse(bytes) {
        assert!(line.priority < 8 && !line.text.contains('\n'));
        let _address = address_in(&line.text);
    }
});
