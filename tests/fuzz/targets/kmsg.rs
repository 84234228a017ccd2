//! A failure means that a line of the kernel's log crashes the init, or that a line which is not
//! the driver's is taken for one of its signals.

#![no_main]

use kata_gpu_init::machine::kernel_log::parse;
use kata_gpu_wire::driver_log::{
    address, boundary, explains, init_code, is_drivers, is_wanted, rm_number, signal, without_name,
};
use kata_gpu_wire::failure::{Facts, FailedStep, of_gpu};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(line) = parse(bytes) {
        assert!(line.priority < 8 && !line.text.contains('\n'));
        let text = &line.text;
        let _parts = without_name(text);
        let means = signal(text).is_some()
            || init_code(text).is_some()
            || boundary(text).is_some()
            || rm_number(text).is_some();
        assert!(!means || text.starts_with("NVRM: "));
        let counts = means || address(text).is_some() || explains(text);
        assert!(!counts || is_drivers(text) && is_wanted(text));
        let lines = [line.text];
        assert!(
            of_gpu(FailedStep::Init, &lines, &Facts::default())
                .words
                .is_some()
        );
    }
    // A process that dies chooses both.
    let (comm, file) = bytes.split_at(bytes.len().min(15));
    let (comm, file) = (escaped(comm), escaped(file));
    let record = format!("4,1,2,-;{comm}[314]: segfault at 0 ip 0 sp 0 error 4 in {file}[1+1]");
    let Some(line) = parse(record.as_bytes()) else {
        panic!("the kernel's own line is no record");
    };
    let text = &line.text;
    assert!(
        !is_drivers(text) && !is_wanted(text) && !explains(text),
        "{text:?}"
    );
    assert!(
        signal(text).is_none() && address(text).is_none(),
        "{text:?}"
    );
    assert!(
        init_code(text).is_none() && boundary(text).is_none(),
        "{text:?}"
    );
    let mut facts = Facts::default();
    facts.take_line(text);
    assert_eq!(facts, Facts::default(), "{text:?}");
});

/// A text, up to its end in C, as /dev/kmsg shows it (msg_add_ext_text).
fn escaped(text: &[u8]) -> String {
    let shown = |byte: &u8| match byte {
        b' '..=b'[' | b']'..=b'~' => char::from(*byte).to_string(),
        _ => format!("\\x{byte:02x}"),
    };
    text.iter()
        .take_while(|byte| **byte != 0)
        .map(shown)
        .collect()
}
