//! A failure means that some bytes of a log crash `import`, or make it write a boot's file that its
//! own reader calls damaged.

#![no_main]

use kata_gpu_report::import::Logs;
use std::io::Cursor;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((first, rest)) = bytes.split_first() else {
        return;
    };
    // Up to three files of one boot.
    let (one, other) = rest.split_at(rest.len() / 2);
    let mut logs = Logs::default();
    let files = [one, other, rest];
    let files = files.into_iter().take(usize::from(*first) % 3 + 1);
    let added = files.filter(|file| logs.add("fuzz", Cursor::new(file.to_vec())).is_ok());
    if added.count() == 0 {
        return;
    }
    let Ok(made) = logs.boot(None) else {
        return;
    };
    assert!(made.boot.damaged == 0, "{:?}", made.boot.damage);
});
