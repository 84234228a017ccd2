//! Files of others, read and written: bytes in, values out.

pub mod elf; // ELF parser
pub mod ld_so_cache; // cache of glibc's loader
pub mod modinfo; // metadata of a module's file
