//! glibc's `/etc/ld.so.cache`: maps library names to files. Written without running anything, and
//! read. Pure: bytes in, bytes out.
//!
//! The format is the one every glibc since 2.2 reads, "glibc-ld.so.cache1.1": a header, a table of
//! entries, their strings, and a directory of extensions. glibc 2.33 and later know two extensions:
//! the generator of the file, and the names of `glibc-hwcaps` subdirectories. The loader does a
//! binary search in the table, so its order is part of the format: [`order`] is the loader's own.
//! Little-endian, as every machine with these GPUs is.

use crate::formats::bytes_at;
use crate::formats::elf::{Class, Library};
use kata_gpu_wire::arch::Arch;
use std::cmp::Ordering;
use std::collections::HashMap;

const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// Magic of the older format, which may precede this one in the same file.
const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
const OLD_HEADER: usize = 16;
const OLD_ENTRY: usize = 12;
const HEADER: usize = 48;
const ENTRY: usize = 24;
/// Header flag: the file's numbers are little-endian.
const LITTLE_ENDIAN: u8 = 2;
const EXTENSIONS_MAGIC: u32 = 0xeaa4_2174;
const EXTENSIONS_HEADER: usize = 8;
const EXTENSION: usize = 16;
const GENERATOR: u32 = 0;
const SUBDIRECTORIES: u32 = 1;
/// Set in an entry's hwcap when its lower half is an index into the names of subdirectories; bits
/// 32 to 41 are then the x86-64 level.
const IS_SUBDIRECTORY: u64 = 1 << 62;
const ISA_LEVELS: u32 = 0x3ff;
/// Limit of a cache, read and written: a full distribution has half a megabyte.
pub const MAX_SIZE: usize = 64 << 20;
/// Longest name or path.
const MAX_STRING: usize = 4096;

/// Processors that an entry is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hwcap {
    /// All processors.
    Any,
    /// `glibc-hwcaps` subdirectory: the loader decides by its name, and by the level (see
    /// [`crate::formats::elf::Library::isa_level`]).
    Subdirectory { name: String, isa_level: u32 },
    /// Value of glibc before 2.37 for subdirectories such as `haswell`: read, never written.
    Platform(u64),
}

impl Hwcap {
    fn subdirectory(&self) -> Option<&str> {
        match self {
            Self::Subdirectory { name, .. } => Some(name),
            Self::Any | Self::Platform(_) => None,
        }
    }
}

/// Flags of a library for the loader (`FLAG_*` in glibc's ldconfig.h); None for libraries that
/// `ldconfig` skips on this architecture.
pub fn flags(arch: Arch, library: &Library) -> Option<u32> {
    use Class::{Elf32, Elf64};
    const LIBC6: u32 = 0x3;
    const EM_386: u16 = 3;
    const EM_ARM: u16 = 40;
    const ARM_EABI: u32 = 0xff00_0000;
    const ARM_EABI_5: u32 = 0x0500_0000;
    const ARM_FLOAT_HARD: u32 = 0x400;
    const ARM_FLOAT_SOFT: u32 = 0x200;
    let own = library.machine == arch.facts().elf_machine;
    match (arch, library.machine, library.class) {
        (Arch::X86_64, _, Elf64) if own => Some(0x300 | LIBC6),
        (Arch::X86_64, _, Elf32) if own => Some(0x800 | LIBC6), // x32
        (Arch::X86_64, EM_386, Elf32) => Some(LIBC6),
        (Arch::Aarch64, _, Elf64) if own => Some(0xa00 | LIBC6),
        (Arch::Aarch64, EM_ARM, Elf32) => Some(match library.flags {
            f if f & ARM_EABI == ARM_EABI_5 && f & ARM_FLOAT_HARD != 0 => 0x900 | LIBC6,
            f if f & ARM_EABI == ARM_EABI_5 && f & ARM_FLOAT_SOFT != 0 => 0xb00 | LIBC6,
            _ => LIBC6,
        }),
        (Arch::X86_64 | Arch::Aarch64, _, _) => None,
    }
}

/// A line of `ldconfig -p`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// SONAME that programs need.
    pub name: String,
    /// Path of the library's file.
    pub path: String,
    /// Kind of library: see [`flags`].
    pub flags: u32,
    pub hwcap: Hwcap,
}

/// A parsed cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cache {
    /// In the file's order.
    pub entries: Vec<Entry>,
}

/// The loader's comparison of names: as text, but digits count as numbers and sort after everything
/// else.
///
/// Numbers are 32 bits wide and wrap, as in the loader. If two differ by more than 2^31, the
/// loader's own comparison is inconsistent, because its difference wraps, too.
pub fn order(a: &str, b: &str, arch: Arch) -> Ordering {
    let (mut a, mut b) = (a.as_bytes(), b.as_bytes());
    // `char` has a sign on x86 and none on Arm.
    let character = |c: u8| {
        if arch.facts().signed_char {
            i32::from(c as i8)
        } else {
            i32::from(c)
        }
    };
    loop {
        match (a.first(), b.first()) {
            (Some(x), Some(y)) if x.is_ascii_digit() && y.is_ascii_digit() => {
                match number(&mut a).cmp(&number(&mut b)) {
                    Ordering::Equal => {}
                    different => return different,
                }
            }
            (Some(x), _) if x.is_ascii_digit() => return Ordering::Greater,
            (_, Some(y)) if y.is_ascii_digit() => return Ordering::Less,
            (Some(x), Some(y)) if x == y => {
                a = a.get(1..).unwrap_or_default();
                b = b.get(1..).unwrap_or_default();
            }
            (x, y) => {
                return character(x.copied().unwrap_or(0)).cmp(&character(y.copied().unwrap_or(0)));
            }
        }
    }
}

/// Removes the leading digits and returns their number.
fn number(text: &mut &[u8]) -> i32 {
    let digits = text.iter().take_while(|c| c.is_ascii_digit()).count();
    let value = text.iter().take(digits).fold(0_i32, |n, c| {
        n.wrapping_mul(10).wrapping_add(i32::from(*c - b'0'))
    });
    *text = text.get(digits..).unwrap_or_default();
    value
}

/// Sorts names from last to first; for one name larger flags first, then entries for some
/// processors before entries for all.
fn order_of_entries(a: &Entry, b: &Entry, arch: Arch) -> Ordering {
    let (x, y) = (a.hwcap.subdirectory(), b.hwcap.subdirectory());
    order(&b.name, &a.name, arch)
        .then_with(|| b.flags.cmp(&a.flags))
        .then_with(|| y.is_some().cmp(&x.is_some()))
        .then_with(|| x.cmp(&y))
}

/// Writes a cache. The loader takes the first of the entries that differ only in the path: pass
/// them in search order of their directories.
///
/// Errors: more than [`MAX_SIZE`] bytes.
pub fn write(entries: &[Entry], generator: &str, arch: Arch) -> Result<Vec<u8>, String> {
    let mut sorted: Vec<&Entry> = entries.iter().collect();
    sorted.sort_by(|a, b| order_of_entries(a, b, arch));
    let mut subdirectories: Vec<&str> = sorted
        .iter()
        .filter_map(|e| e.hwcap.subdirectory())
        .collect();
    subdirectories.sort_unstable();
    subdirectories.dedup();
    let all = sorted
        .iter()
        .flat_map(|e| [e.name.as_str(), e.path.as_str()])
        .chain(subdirectories.iter().copied());
    let strings = Strings::new(all.collect(), HEADER + ENTRY * sorted.len());
    let size = HEADER + ENTRY * sorted.len() + strings.bytes.len();
    if size > MAX_SIZE {
        return Err(format!(
            "{} libraries with {} bytes of names: more than a cache of {MAX_SIZE} bytes holds",
            sorted.len(),
            strings.bytes.len()
        ));
    }
    let mut file = Vec::with_capacity(size + 256);
    file.extend(MAGIC);
    put(&mut file, sorted.len());
    put(&mut file, strings.bytes.len());
    file.extend([LITTLE_ENDIAN, 0, 0, 0]);
    let extensions = size.next_multiple_of(4);
    put(&mut file, extensions);
    file.extend([0; 12]);
    for entry in &sorted {
        let hwcap = entry.hwcap.subdirectory().map_or(0, |name| {
            let index = subdirectories.binary_search(&name).unwrap_or_default() as u64;
            let Hwcap::Subdirectory { isa_level, .. } = &entry.hwcap else {
                return 0;
            };
            IS_SUBDIRECTORY | u64::from(*isa_level & ISA_LEVELS) << 32 | index
        });
        file.extend(entry.flags.to_le_bytes());
        put(&mut file, strings.offset(&entry.name));
        put(&mut file, strings.offset(&entry.path));
        file.extend([0; 4]); // once the kernel's version
        file.extend(hwcap.to_le_bytes());
    }
    file.extend(&strings.bytes);
    file.resize(extensions, 0);
    let names_size = 4 * subdirectories.len();
    let sections = if names_size > 0 { 2 } else { 1 };
    let names_at = extensions + EXTENSIONS_HEADER + EXTENSION * sections;
    let section = |file: &mut Vec<u8>, tag: u32, at: usize, size: usize| {
        [tag as usize, 0, at, size].map(|v| put(file, v))
    };
    file.extend(EXTENSIONS_MAGIC.to_le_bytes());
    file.extend((sections as u32).to_le_bytes());
    section(&mut file, GENERATOR, names_at + names_size, generator.len());
    if names_size > 0 {
        section(&mut file, SUBDIRECTORIES, names_at, names_size);
    }
    subdirectories
        .iter()
        .for_each(|name| file.extend((strings.offset(name) as u32).to_le_bytes()));
    file.extend(generator.as_bytes());
    Ok(file)
}

/// Appends a number of 32 bits; no number written here is above [`MAX_SIZE`].
fn put(file: &mut Vec<u8>, value: usize) {
    file.extend((value as u32).to_le_bytes());
}

/// Strings of a cache, each NUL-terminated; a string that ends another one is not stored twice.
/// Ordered as by `ldconfig`, so that its file and ours can be compared byte by byte.
struct Strings<'a> {
    bytes: Vec<u8>,
    offsets: HashMap<&'a str, usize>,
}

impl<'a> Strings<'a> {
    /// `base`: offset of the strings in the file.
    fn new(mut all: Vec<&'a str>, base: usize) -> Self {
        // Sort by the reversed text, last first: a string precedes its own suffixes.
        all.sort_unstable_by(|a, b| b.bytes().rev().cmp(a.bytes().rev()));
        all.dedup();
        let (mut bytes, mut offsets) = (Vec::new(), HashMap::with_capacity(all.len()));
        let mut before = "";
        for text in all {
            if text.is_empty() || !before.ends_with(text) {
                bytes.extend(text.as_bytes());
                bytes.push(0);
                before = text;
            }
            offsets.insert(text, base + bytes.len() - 1 - text.len());
        }
        Self { bytes, offsets }
    }

    fn offset(&self, text: &str) -> usize {
        self.offsets.get(text).copied().unwrap_or_default()
    }
}

/// Reads a cache of any of glibc's three formats. Nothing in the file is trusted.
///
/// Errors state the fault in the file, not the file's name.
pub fn read(file: &[u8]) -> Result<Cache, String> {
    if file.len() > MAX_SIZE {
        return Err(format!(
            "{} bytes: no cache is larger than {MAX_SIZE}",
            file.len()
        ));
    }
    if file.starts_with(MAGIC) {
        return read_new(file, file);
    }
    if !file.starts_with(OLD_MAGIC) {
        return Err("not a cache of glibc's loader".into());
    }
    let count = word(file, 12).ok_or("it ends in its header")? as usize;
    let end = count
        .checked_mul(OLD_ENTRY)
        .map(|size| size + OLD_HEADER)
        .filter(|end| *end <= file.len());
    let end = end.ok_or_else(|| format!("it ends before the {count} entries it announces"))?;
    // The new format begins at a multiple of eight on these machines.
    match file.get(end.next_multiple_of(8)..) {
        Some(inner) if inner.starts_with(MAGIC) => read_new(file, inner),
        _ => {
            let strings = file.get(end..).unwrap_or_default();
            let entries = entries(count, |n| {
                let at = OLD_HEADER + n * OLD_ENTRY;
                let text = |at| word(file, at).and_then(|offset| string(strings, offset));
                Some(Entry {
                    name: text(at + 4)?,
                    path: text(at + 8)?,
                    flags: word(file, at)?,
                    hwcap: Hwcap::Any,
                })
            });
            Ok(Cache { entries: entries? })
        }
    }
}

/// Offsets of extensions count from `whole`, offsets of strings from `cache`.
fn read_new(whole: &[u8], cache: &[u8]) -> Result<Cache, String> {
    let header = cache.get(..HEADER).ok_or("it ends in its header")?;
    if !matches!(header.get(28), Some(0 | &LITTLE_ENDIAN)) {
        return Err("its numbers are not little-endian".into());
    }
    let count = word(header, 20).unwrap_or_default() as usize;
    if count > (cache.len() - HEADER) / ENTRY {
        return Err(format!("it ends before the {count} entries it announces"));
    }
    let subdirectories = subdirectories(whole, word(header, 32).unwrap_or_default())?;
    let entries = entries(count, |n| {
        let at = HEADER + n * ENTRY;
        let text = |at| word(cache, at).and_then(|offset| string(cache, offset));
        let hwcap = u64::from(word(cache, at + 16)?) | u64::from(word(cache, at + 20)?) << 32;
        let hwcap = match (hwcap, hwcap >> 32 & !u64::from(ISA_LEVELS)) {
            (0, _) => Hwcap::Any,
            (value, high) if high == IS_SUBDIRECTORY >> 32 => {
                let name = usize::try_from(value & 0xffff_ffff)
                    .ok()
                    .and_then(|index| subdirectories.get(index)?.clone())?;
                Hwcap::Subdirectory {
                    name,
                    isa_level: (value >> 32) as u32 & ISA_LEVELS,
                }
            }
            (value, _) => Hwcap::Platform(value),
        };
        Some(Entry {
            name: text(at + 4)?,
            path: text(at + 8)?,
            flags: word(cache, at)?,
            hwcap,
        })
    });
    Ok(Cache { entries: entries? })
}

/// Reads the entries. A small file can lead all of them to one long string: their total size is
/// bounded, too.
fn entries(count: usize, entry: impl Fn(usize) -> Option<Entry>) -> Result<Vec<Entry>, String> {
    let (mut entries, mut size) = (Vec::new(), 0);
    for n in 0..count {
        let entry = entry(n).ok_or_else(|| format!("entry {n} leads to no string"))?;
        size += entry.name.len() + entry.path.len() + size_of::<Entry>();
        if size > 2 * MAX_SIZE {
            return Err(format!(
                "its first {n} entries have more text than a cache has"
            ));
        }
        entries.push(entry);
    }
    Ok(entries)
}

/// Names of subdirectories, from the extensions at this offset.
fn subdirectories(file: &[u8], at: u32) -> Result<Vec<Option<String>>, String> {
    let mut subdirectories = Vec::new();
    if at == 0 {
        return Ok(subdirectories); // glibc before 2.33
    }
    let directory = file
        .get(at as usize..)
        .filter(|d| at % 4 == 0 && word(d, 0) == Some(EXTENSIONS_MAGIC));
    let directory = directory.ok_or("its extensions are not at the stated offset")?;
    let count = word(directory, 4).ok_or("it ends in its extensions")? as usize;
    let list = count
        .checked_mul(EXTENSION)
        .and_then(|size| directory.get(EXTENSIONS_HEADER..)?.get(..size));
    for section in list
        .ok_or("it ends in its extensions")?
        .chunks_exact(EXTENSION)
    {
        let field = |at| word(section, at).unwrap_or_default() as usize;
        let content = file
            .get(field(8)..)
            .and_then(|rest| rest.get(..field(12)))
            .ok_or("an extension lies beyond its end")?;
        if field(0) as u32 == SUBDIRECTORIES {
            // The loader needs no more than a few.
            let names = content.chunks_exact(4).take(MAX_STRING);
            subdirectories = names
                .map(|offset| word(offset, 0).and_then(|offset| string(file, offset)))
                .collect();
        }
    }
    Ok(subdirectories)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes_at(bytes, at).map(u32::from_le_bytes)
}

/// Text at an offset, up to the NUL.
fn string(bytes: &[u8], at: u32) -> Option<String> {
    let rest = bytes.get(at as usize..)?;
    let text = rest.get(..MAX_STRING).unwrap_or(rest);
    let end = text.iter().position(|b| *b == 0)?;
    String::from_utf8(text.get(..end)?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, directory: &str) -> Entry {
        Entry {
            name: name.into(),
            path: format!("{directory}/{name}"),
            flags: 0x303,
            hwcap: Hwcap::Any,
        }
    }

    fn for_v3(name: &str) -> Entry {
        let hwcap = Hwcap::Subdirectory {
            name: "x86-64-v3".into(),
            isa_level: 2,
        };
        Entry {
            path: format!("/lib/glibc-hwcaps/x86-64-v3/{name}"),
            hwcap,
            ..entry(name, "")
        }
    }

    /// The loader's binary search: the paths of all entries of this name, in the order of the
    /// search.
    fn search<'a>(cache: &'a Cache, name: &str) -> Vec<&'a str> {
        let mut range = 0..cache.entries.len();
        while !range.is_empty() {
            let middle = usize::midpoint(range.start, range.end - 1);
            match order(name, &cache.entries[middle].name, Arch::X86_64) {
                Ordering::Less => range.start = middle + 1,
                Ordering::Greater => range.end = middle,
                Ordering::Equal => {
                    let same = |e: &&Entry| e.name == name;
                    return cache
                        .entries
                        .iter()
                        .filter(same)
                        .map(|e| e.path.as_str())
                        .collect();
                }
            }
        }
        vec![]
    }

    #[test]
    fn what_is_written_is_read_again() {
        let entries = [
            entry("libc.so.6", "/lib"),
            for_v3("libm.so.6"),
            entry("libm.so.6", "/lib"),
            entry("libcuda.so.1", "/usr/lib"),
        ];
        let file = write(&entries, "a test", Arch::X86_64).unwrap();
        assert!(file.ends_with(b"a test"));
        let cache = read(&file).unwrap();
        // Sorted from the last name to the first.
        assert_eq!(
            cache.entries,
            [1, 2, 3, 0].map(|n: usize| entries[n].clone())
        );
        assert_eq!(
            read(&write(&[], "", Arch::X86_64).unwrap())
                .unwrap()
                .entries,
            []
        );
    }

    #[test]
    fn the_loader_finds_every_name_and_the_first_directory_first() {
        let mut entries = Vec::new();
        for n in 0..300 {
            for name in [
                format!("lib{n}.so.{}", n % 7),
                format!("lib{}x{n}.so", n % 10),
                format!("libz.so.{n}"),
            ] {
                entries.extend([entry(&name, "/first"), entry(&name, "/second")]);
            }
        }
        let cache = read(&write(&entries, "", Arch::X86_64).unwrap()).unwrap();
        assert_eq!(cache.entries.len(), 1800);
        for entry in &entries {
            assert_eq!(
                search(&cache, &entry.name),
                [
                    format!("/first/{}", entry.name),
                    format!("/second/{}", entry.name)
                ],
                "{entry:?}"
            );
        }
        assert!(search(&cache, "libnosuch.so").is_empty());
        // Negative control: sorted as text, names are missed.
        let mut as_text = cache;
        as_text.entries.sort_by(|a, b| b.name.cmp(&a.name));
        assert!(entries.iter().any(|e| search(&as_text, &e.name).is_empty()));
    }

    #[test]
    fn what_is_for_some_processors_comes_before_what_is_for_all() {
        let file = write(
            &[entry("libm.so.6", "/lib"), for_v3("libm.so.6")],
            "",
            Arch::X86_64,
        )
        .unwrap();
        let cache = read(&file).unwrap();
        assert_eq!(
            cache.entries,
            [for_v3("libm.so.6"), entry("libm.so.6", "/lib")]
        );
    }

    #[test]
    fn names_are_ordered_as_the_loader_orders_them() {
        use Ordering::{Equal, Greater, Less};
        let cases = [
            ("libc.so.6", "libc.so.6", Equal),
            ("libc.so.10", "libc.so.9", Greater),
            ("libc.so.1", "libc.so.01", Equal),
            ("libc1.so", "libc.so", Greater),
            ("libc.so", "libc.so.6", Less),
            ("libc.so1", "libc.so", Greater),
            ("lib\u{e9}.so", "liba.so", Less),
            ("liba.so.4294967297", "liba.so.1", Equal),
        ];
        for (a, b, wanted) in cases {
            assert_eq!(
                (order(a, b, Arch::X86_64), order(b, a, Arch::X86_64)),
                (wanted, wanted.reverse()),
                "{a} {b}"
            );
        }
        assert_eq!(order("lib\u{e9}.so", "liba.so", Arch::Aarch64), Greater);
    }

    #[test]
    fn the_older_formats_are_read() {
        let strings = b"libc.so.6\0/lib/libc.so.6\0";
        let mut old = [
            OLD_MAGIC,
            &[0],
            &1_u32.to_le_bytes(),
            &3_u32.to_le_bytes(),
            &0_u32.to_le_bytes(),
            &10_u32.to_le_bytes(),
        ]
        .concat();
        old.extend(strings);
        let of_old = Entry {
            flags: 3,
            ..entry("libc.so.6", "/lib")
        };
        assert_eq!(read(&old).unwrap().entries, [of_old]);
        // In a file with both formats, the new one counts.
        let mut both = [OLD_MAGIC, &[0], &0_u32.to_le_bytes()].concat();
        let mut inner = write(&[entry("libm.so.6", "/lib")], "", Arch::X86_64).unwrap();
        inner[32..36].fill(0); // its extensions count from the file's beginning
        both.extend(inner);
        assert_eq!(read(&both).unwrap().entries, [entry("libm.so.6", "/lib")]);
    }

    #[test]
    fn every_cut_is_read_or_refused() {
        let file = write(
            &[entry("libc.so.6", "/lib"), for_v3("libm.so.6")],
            "gen",
            Arch::X86_64,
        )
        .unwrap();
        assert!(read(&file).is_ok());
        for length in 0..file.len() {
            assert!(
                read(&file[..length]).is_err(),
                "{length} bytes of {} were read",
                file.len()
            );
        }
    }

    #[test]
    fn a_small_file_does_not_grow_without_bound() {
        let count = 200_000;
        let mut file = write(&[entry("x", "/lib")], "", Arch::X86_64).unwrap()[..HEADER].to_vec();
        file[20..24].copy_from_slice(&(count as u32).to_le_bytes());
        file[32..36].fill(0);
        let at = (HEADER + count * ENTRY) as u32;
        (0..count).for_each(|_| {
            file.extend([&[0; 4][..], &at.to_le_bytes(), &at.to_le_bytes(), &[0; 12]].concat())
        });
        file.extend([b'x'; 4000]);
        file.push(0);
        assert!(
            read(&file)
                .unwrap_err()
                .contains("more text than a cache has")
        );
    }
}
