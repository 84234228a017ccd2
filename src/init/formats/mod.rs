//! Files of others, read and written: bytes in, values out.

pub mod elf; // ELF parser
pub mod ld_so_cache; // cache of glibc's loader
pub mod modinfo; // metadata of a module's file

/// The bytes at an offset; None where the text ends before.
pub fn bytes_at<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk().copied()
}
