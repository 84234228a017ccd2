//! A failure means that an image's shared library crashes the hook, or gives it names without
//! bound.

#![no_main]

use kata_gpu_init::formats::elf::library;
use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;

thread_local! {
    /// File for all inputs, without a name: the file goes with the process.
    static FILE: RefCell<File> = RefCell::new(unnamed());
}

fn unnamed() -> File {
    let path = std::env::temp_dir().join(format!("kata-gpu-fuzz-library-{}", std::process::id()));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    FILE.with_borrow(|file| {
        file.set_len(0).unwrap();
        file.write_all_at(bytes, 0).unwrap();
        if let Ok(library) = library(file) {
            assert!(
                library
                    .soname
                    .iter()
                    .chain(&library.needed)
                    .all(|name| name.len() < 4096 && !name.contains('\0'))
            );
            assert!(library.needed.len() <= 4096);
        }
    });
});
