//! Every format takes any bytes, and what is made of them is the file of a boot without damage.
#![no_main]

use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::data::imported_record::Format;
use kata_gpu_report::import::assemble::{import, read};
use kata_gpu_report::import::log_files::Input;
use std::io::Cursor;

const FORMATS: [Option<Format>; 5] = [
    None,
    Some(Format::Journal),
    Some(Format::Console),
    Some(Format::Pod),
    Some(Format::Stream),
];

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((first, rest)) = bytes.split_first() else {
        return;
    };
    let format = FORMATS[usize::from(*first) % FORMATS.len()];
    // Two files of one boot, in this format and in the one that is found.
    let (one, other) = rest.split_at(rest.len() / 2);
    let open = |bytes: &[u8], format| {
        read(
            "fuzz",
            Input::new("fuzz", Box::new(Cursor::new(bytes.to_vec()))).ok()?,
            format,
        )
        .ok()
    };
    let sources: Vec<_> = [open(one, format), open(other, None), open(rest, format)]
        .into_iter()
        .flatten()
        .collect();
    if sources.is_empty() {
        return;
    }
    let Ok((_, text)) = import(sources, Some(1)) else {
        return;
    };
    let file = BootFile::read(text.as_bytes()).expect("what was made can be read");
    assert!(file.damaged == 0, "{:?}", file.damage);
});
