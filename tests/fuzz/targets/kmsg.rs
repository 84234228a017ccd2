//! A failure means that a line of the kernel's log crashes the init, or that a line which is not
//! the driver's is taken for one of its signals.

#![no_main]

use kata_gpu_init::machine::kernel_log::parse;
use kata_gpu_wire::driver_log::{address, explains, init_code, signal};
use kata_gpu_wire::failure::{Facts, FailedStep, of_gpu};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(line) = parse(bytes) {
        assert!(line.priority < 8 && !line.text.contains('\n'));
        let _meaning = (
            address(&line.text),
            explains(&line.text),
            init_code(&line.text),
        );
        if signal(&line.text).is_some() {
            assert!(line.text.starts_with("NVRM: "));
        }
        let lines = [line.text];
        assert!(of_gpu(FailedStep::Init, &lines, &Facts::default()).words.is_some());
    }
});
