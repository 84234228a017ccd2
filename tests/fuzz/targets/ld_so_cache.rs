//! A failure means that an image's loader cache crashes or bloats the hook, or that a cache which
//! the hook read is written as another one.

#![no_main]

use kata_gpu_init::formats::ld_so_cache::{Hwcap, MAX_SIZE, read, write};
use kata_gpu_wire::arch::Arch;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(mut cache) = read(bytes) else { return };
    let size: usize = cache
        .entries
        .iter()
        .map(|e| e.name.len() + e.path.len())
        .sum();
    assert!(size <= 2 * MAX_SIZE);
    // These are only read.
    cache
        .entries
        .retain(|e| !matches!(e.hwcap, Hwcap::Platform(_)));
    for arch in Arch::ALL {
        let Ok(written) = write(&cache.entries, "", arch) else {
            continue;
        };
        let again = read(&written).unwrap_or_else(|e| panic!("what was written is not read: {e}"));
        assert_eq!(again.entries.len(), cache.entries.len());
        assert!(cache.entries.iter().all(|e| again.entries.contains(e)));
        // In its own order it stays.
        assert_eq!(
            read(&write(&again.entries, "", arch).unwrap())
                .unwrap()
                .entries,
            again.entries
        );
    }
});
