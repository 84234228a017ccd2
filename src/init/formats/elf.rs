//! ELF parser for the driver's libraries, a container's libraries and kernel modules: reads by
//! offset, never whole files, every length bounded.
//!
//! Takes any bytes: an error states the fault of a file that is not valid ELF. Little-endian only,
//! as every machine with these GPUs is.

use super::bytes_at;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Source of bytes: a file, or a file within another one.
pub trait ReadAt {
    /// Like [`FileExt::read_at`].
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for [u8] {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|at| self.get(at..))
            .unwrap_or_default();
        let length = rest.len().min(buffer.len());
        buffer[..length].copy_from_slice(&rest[..length]);
        Ok(length)
    }
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.as_slice().read_at(buffer, offset)
    }
}

impl ReadAt for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, offset)
    }
}

/// Limit of section headers (the kernel's own modules have fewer than 100; with a section per
/// function some thousand).
const MAX_SECTIONS: u64 = 65_536;
/// Limit of a section's size.
const MAX_SECTION: u64 = 4 * 1024 * 1024;
/// Limit of program headers (a library has about ten).
const MAX_SEGMENTS: u64 = 256;
/// Limit of entries in a dynamic segment (the largest of the driver's libraries have about 40).
const MAX_DYNAMIC: u64 = 4096;
/// Limit of a name in a string table.
const MAX_NAME: u64 = 4096;
/// Bytes read at once from the beginning of a file (a page, which in small libraries includes the
/// names), and of a name.
const HEAD: usize = 4096;
const NAME_PART: usize = 128;
/// Longest part that is read onto the stack: the dynamic segments of most libraries have 500 to 600
/// bytes.
const NEAR: usize = 1024;
/// Limit of a list of properties (compilers write some ten bytes for each of fewer than ten kinds).
const MAX_PROPERTIES: u64 = 4096;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const PT_GNU_PROPERTY: u32 = 0x6474_e553;
const DT_NULL: u64 = 0;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;
const DT_SONAME: u64 = 14;
const DT_RPATH: u64 = 15;
const DT_RUNPATH: u64 = 29;
const NT_GNU_PROPERTY_TYPE_0: u32 = 5;
/// The only property that is read: required x86-64 levels of the code, a bit for each.
const GNU_PROPERTY_X86_ISA_1_NEEDED: u32 = 0xc000_8002;

/// `e_type` of shared objects and of position-independent programs.
pub const ET_DYN: u16 = 3;

/// Width of a file's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Elf32,
    Elf64,
}

/// ELF facts of a library or a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    pub class: Class,
    /// `e_type`.
    pub kind: u16,
    /// `e_machine` (62: x86-64, 183: AArch64).
    pub machine: u16,
    /// `e_flags`.
    pub flags: u32,
    /// DT_SONAME; None in a file without a dynamic segment or that entry.
    pub soname: Option<String>,
    /// DT_NEEDED, in file order.
    pub needed: Vec<String>,
    /// Whether a loader could use the file: it has a dynamic segment with a string table. Debug
    /// files have none.
    pub loadable: bool,
    /// Required x86-64 level: 1 is x86-64-v2, 2 is -v3, 3 is -v4; 0 is none or unspecified.
    pub isa_level: u32,
    /// Loader that the kernel starts for a program; None for static programs and for libraries.
    pub interpreter: Option<String>,
    /// DT_RUNPATH, else DT_RPATH: directories separated by colons.
    pub search_path: Option<String>,
}

/// Reads the headers and the dynamic segment.
///
/// Errors state the fault in the file, not the file's name.
pub fn library(file: &dyn ReadAt) -> io::Result<Library> {
    describe(file, true)
}

/// Like [`library`], but leaves `needed`, `interpreter` and `search_path` empty: half the reads.
pub fn identity(file: &dyn ReadAt) -> io::Result<Library> {
    describe(file, false)
}

fn describe(file: &dyn ReadAt, with_all: bool) -> io::Result<Library> {
    let elf = Elf::open(file)?;
    let mut room = Room::new();
    let table = elf.program_headers(&mut room)?;
    let segments = || {
        table
            .chunks_exact(elf.program_header())
            .map(|header| elf.segment(header))
    };
    let interpreter = segments().find(|s| with_all && s.kind == PT_INTERP);
    let isa_level = segments().find(|s| s.kind == PT_GNU_PROPERTY);
    let mut library = Library {
        class: elf.class,
        kind: elf.u16(0x10),
        machine: elf.u16(0x12),
        flags: elf.flags(),
        soname: None,
        needed: Vec::new(),
        loadable: false,
        isa_level: isa_level.map_or(0, |s| elf.isa_level(&s)),
        interpreter: interpreter.map(|s| elf.name(s.offset)).transpose()?,
        search_path: None,
    };
    if let Some(dynamic) = segments().find(|s| s.kind == PT_DYNAMIC) {
        let mut room = Room::new();
        let bytes = elf.dynamic(&dynamic, &mut room)?;
        let entries = || elf.entries(bytes);
        let value = |tag| entries().find(|(t, _)| *t == tag).map(|(_, value)| value);
        if let Some(table) = value(DT_STRTAB).and_then(|address| offset_of(segments(), address)) {
            let name = |at: u64| elf.name(table.saturating_add(at));
            library.loadable = true;
            library.soname = value(DT_SONAME).map(name).transpose()?;
            if with_all {
                let needed = entries().filter(|(tag, _)| *tag == DT_NEEDED);
                library.needed = needed.map(|(_, at)| name(at)).collect::<io::Result<_>>()?;
                let path = value(DT_RUNPATH).or(value(DT_RPATH));
                library.search_path = path.map(name).transpose()?;
            }
        }
    }
    Ok(library)
}

/// Content of the section of this name; None if there is none. 64-bit files only, as modules are.
pub fn section(file: &dyn ReadAt, wanted: &[u8]) -> io::Result<Option<Vec<u8>>> {
    const HEADER: u64 = 64;
    let elf = Elf::open(file)?;
    if elf.class != Class::Elf64 {
        return Err(io::Error::other("not a 64-bit ELF file"));
    }
    let (table, count, names) = (elf.u64(0x28), elf.u16(0x3c), elf.u16(0x3e));
    if u64::from(elf.u16(0x3a)) != HEADER || names >= count || u64::from(count) > MAX_SECTIONS {
        return Err(io::Error::other("its section headers are of another form"));
    }
    let headers = read(file, table, u64::from(count) * HEADER)?;
    let header = |index: u16| {
        headers
            .get(usize::from(index) * 64..)
            .and_then(|rest| rest.get(..64))
            .unwrap_or(&[0; 64])
    };
    let content = |header: &[u8]| read(file, u64_at(header, 0x18), u64_at(header, 0x20));
    let names = content(header(names))?;
    for index in 0..count {
        let start = u32_at(header(index), 0) as usize;
        let name = names
            .get(start..)
            .and_then(|rest| rest.split(|b| *b == 0).next());
        if name == Some(wanted) {
            return content(header(index)).map(Some);
        }
    }
    Ok(None)
}

/// A program header.
struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    length: u64,
}

/// Offset in the file of an address.
fn offset_of(mut segments: impl Iterator<Item = Segment>, address: u64) -> Option<u64> {
    let segment = segments
        .find(|s| s.kind == PT_LOAD && address >= s.address && address - s.address < s.length)?;
    segment.offset.checked_add(address - segment.address)
}

/// Buffer for a part of a file, on the stack for usual sizes: hundreds of libraries are read one
/// after the other, and musl maps and unmaps memory for a buffer of a kilobyte.
struct Room {
    near: [u8; NEAR],
    far: Vec<u8>,
}

impl Room {
    fn new() -> Self {
        Self {
            near: [0; NEAR],
            far: Vec::new(),
        }
    }

    /// The first `length` bytes of the buffer.
    fn of(&mut self, length: usize) -> &mut [u8] {
        match self.near.get_mut(..length) {
            Some(near) => near,
            None => {
                self.far.resize(length, 0);
                &mut self.far
            }
        }
    }
}

struct Elf<'a> {
    file: &'a dyn ReadAt,
    /// Beginning of the file: the header, and usually the segments, in one read. Zeros beyond the
    /// end of the file.
    head: [u8; HEAD],
    /// Number of bytes read into `head`.
    length: usize,
    class: Class,
}

impl<'a> Elf<'a> {
    fn open(file: &'a dyn ReadAt) -> io::Result<Self> {
        const SHORTEST: usize = 52;
        const HEADER_64: usize = 64;
        let refused = || io::Error::other("not a little-endian ELF file");
        let (mut head, mut length) = ([0; HEAD], 0);
        // After a short read, read again only if the header is incomplete: other parts are read
        // where they are needed.
        while length < HEADER_64 {
            match some(
                file,
                length as u64,
                head.get_mut(length..).unwrap_or_default(),
            )? {
                0 => break,
                more => length += more,
            }
        }
        let (class, header) = match head {
            [0x7f, b'E', b'L', b'F', 1, 1, ..] => (Class::Elf32, SHORTEST),
            [0x7f, b'E', b'L', b'F', 2, 1, ..] => (Class::Elf64, HEADER_64),
            _ => return Err(refused()),
        };
        if length < header {
            Err(refused())
        } else {
            Ok(Self {
                file,
                head,
                length,
                class,
            })
        }
    }

    /// A part of the file: from `head` if it is there, or read into `room`.
    fn part<'r>(&'r self, offset: u64, length: u64, room: &'r mut Room) -> io::Result<&'r [u8]> {
        if let Some(part) = self
            .beginning(offset)
            .get(..usize::try_from(length).unwrap_or(usize::MAX))
        {
            return Ok(part);
        }
        let part = room.of(bounded(length)?);
        exactly(self.file, offset, part)?;
        Ok(part)
    }

    /// Bytes of `head` from this offset on.
    fn beginning(&self, offset: u64) -> &[u8] {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        self.head
            .get(..self.length)
            .and_then(|head| head.get(offset..))
            .unwrap_or_default()
    }

    fn u16(&self, at: usize) -> u16 {
        u16_at(&self.head, at)
    }

    fn u64(&self, at: usize) -> u64 {
        u64_at(&self.head, at)
    }

    fn wide(&self) -> bool {
        self.class == Class::Elf64
    }

    fn flags(&self) -> u32 {
        u32_at(&self.head, if self.wide() { 0x30 } else { 0x24 })
    }

    /// Size of a program header.
    fn program_header(&self) -> usize {
        if self.wide() { 56 } else { 32 }
    }

    /// All program headers.
    fn program_headers<'r>(&'r self, room: &'r mut Room) -> io::Result<&'r [u8]> {
        let (table, size, count) = if self.wide() {
            (self.u64(0x20), self.u16(0x36), self.u16(0x38))
        } else {
            (
                u32_at(&self.head, 0x1c).into(),
                self.u16(0x2a),
                self.u16(0x2c),
            )
        };
        if count == 0 {
            return Ok(&[]);
        }
        if usize::from(size) != self.program_header() || u64::from(count) > MAX_SEGMENTS {
            return Err(io::Error::other("its program headers are of another form"));
        }
        self.part(table, u64::from(size) * u64::from(count), room)
    }

    fn segment(&self, header: &[u8]) -> Segment {
        if self.wide() {
            Segment {
                kind: u32_at(header, 0),
                offset: u64_at(header, 8),
                address: u64_at(header, 16),
                length: u64_at(header, 32),
            }
        } else {
            let wide = |at| u64::from(u32_at(header, at));
            Segment {
                kind: u32_at(header, 0),
                offset: wide(4),
                address: wide(8),
                length: wide(16),
            }
        }
    }

    /// Bytes of the dynamic segment.
    fn dynamic<'r>(&'r self, segment: &Segment, room: &'r mut Room) -> io::Result<&'r [u8]> {
        if segment.length > MAX_DYNAMIC * self.entry() as u64 {
            return Err(io::Error::other(format!(
                "a dynamic segment of {} bytes: more than any library has",
                segment.length
            )));
        }
        self.part(segment.offset, segment.length, room)
    }

    /// Size of an entry of the dynamic segment.
    fn entry(&self) -> usize {
        if self.wide() { 16 } else { 8 }
    }

    /// Tags and values up to DT_NULL.
    fn entries(&self, dynamic: &[u8]) -> impl Iterator<Item = (u64, u64)> {
        let wide = self.wide();
        let pair = move |e: &[u8]| {
            if wide {
                (u64_at(e, 0), u64_at(e, 8))
            } else {
                (u32_at(e, 0).into(), u32_at(e, 4).into())
            }
        };
        dynamic
            .chunks_exact(self.entry())
            .map(pair)
            .take_while(|(tag, _)| *tag != DT_NULL)
    }

    /// Required x86-64 level; 0 for a malformed note, which is no reason to refuse a file.
    fn isa_level(&self, segment: &Segment) -> u32 {
        if segment.length > MAX_PROPERTIES {
            return 0;
        }
        let mut room = Room::new();
        let Ok(note) = self.part(segment.offset, segment.length, &mut room) else {
            return 0;
        };
        let (name, kind) = (u32_at(note, 0), u32_at(note, 8));
        if name != 4
            || kind != NT_GNU_PROPERTY_TYPE_0
            || note.get(12..16) != Some(b"GNU\0".as_slice())
        {
            return 0;
        }
        let width = if self.wide() { 8 } else { 4 };
        let mut rest = note
            .get(16..)
            .and_then(|d| d.get(..u32_at(note, 4) as usize))
            .unwrap_or_default();
        while rest.len() >= 8 {
            let (kind, size) = (u32_at(rest, 0), u32_at(rest, 4) as usize);
            let Some(value) = rest.get(8..).and_then(|d| d.get(..size)) else {
                return 0;
            };
            if kind == GNU_PROPERTY_X86_ISA_1_NEEDED {
                return if size == 4 {
                    u32_at(value, 0).checked_ilog2().unwrap_or(0)
                } else {
                    0
                };
            }
            rest = rest
                .get(8 + size.next_multiple_of(width)..)
                .unwrap_or_default();
        }
        0
    }

    fn name(&self, offset: u64) -> io::Result<String> {
        let mut name = Vec::new();
        // A string table may end the file: the bytes before the end count.
        while (name.len() as u64) < MAX_NAME {
            let (at, mut read) = (offset.saturating_add(name.len() as u64), [0; NAME_PART]);
            let part = match self.beginning(at) {
                [] => {
                    let length = some(self.file, at, &mut read)?;
                    read.get(..length).unwrap_or_default()
                }
                there => there.get(..NAME_PART).unwrap_or(there),
            };
            if part.is_empty() {
                break;
            }
            let end = part.iter().position(|b| *b == 0);
            name.extend(part.iter().take(end.unwrap_or(part.len())));
            // Parts are shorter where the file's beginning ends: the last can go beyond the limit.
            if end.is_some() && (name.len() as u64) < MAX_NAME {
                return String::from_utf8(name)
                    .map_err(|_| io::Error::other("a name in it is no text"));
            }
        }
        Err(io::Error::other("a name in it has no end"))
    }
}

/// A read into the buffer; 0 at the end of the file.
fn some(file: &dyn ReadAt, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        match file.read_at(bytes, offset) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Reads the whole buffer.
fn exactly(file: &dyn ReadAt, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    let mut length = 0;
    while let Some(rest) = bytes.get_mut(length..).filter(|rest| !rest.is_empty()) {
        match some(file, offset.saturating_add(length as u64), rest)? {
            0 => {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the file ends before it",
                ));
            }
            more => length += more,
        }
    }
    Ok(())
}

fn read(file: &dyn ReadAt, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; bounded(length)?];
    exactly(file, offset, &mut bytes)?;
    Ok(bytes)
}

fn bounded(length: u64) -> io::Result<usize> {
    let refused = || {
        io::Error::other(format!(
            "a part of {length} bytes: more than any such file has"
        ))
    };
    usize::try_from(length)
        .ok()
        .filter(|_| length <= MAX_SECTION)
        .ok_or_else(refused)
}

fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    bytes_at(bytes, offset).map_or(0, u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    bytes_at(bytes, offset).map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    bytes_at(bytes, offset).map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::elf_stand_in as stand_in;
    use kata_gpu_test_support::temp_dir;

    fn of(bytes: &[u8]) -> io::Result<Library> {
        let folder = temp_dir();
        let path = folder.path().join("library");
        std::fs::write(&path, bytes).unwrap();
        library(&File::open(&path).unwrap())
    }

    #[test]
    fn a_library_names_itself_and_its_dependencies() {
        let bytes = stand_in::library(Some("libcuda.so.1"), &["libc.so.6", "libm.so.6"]);
        let read = of(&bytes).unwrap();
        assert_eq!(
            (read.class, read.kind, read.machine),
            (Class::Elf64, ET_DYN, 62)
        );
        assert_eq!(
            (read.soname.as_deref(), read.needed),
            (
                Some("libcuda.so.1"),
                vec!["libc.so.6".to_string(), "libm.so.6".into()]
            )
        );
        assert_eq!((read.interpreter, read.search_path), (None, None));
        let program = of(&stand_in::program(
            "/lib64/ld.so",
            &["libc.so.6"],
            Some("$ORIGIN:/opt"),
        ))
        .unwrap();
        assert_eq!(
            (
                program.interpreter.as_deref(),
                program.search_path.as_deref()
            ),
            (Some("/lib64/ld.so"), Some("$ORIGIN:/opt"))
        );
        let nameless = of(&stand_in::library(None, &[])).unwrap();
        assert_eq!(
            (nameless.soname, nameless.loadable, nameless.isa_level),
            (None, true, 0)
        );
    }

    #[test]
    fn a_name_has_less_than_4096_bytes_wherever_it_begins() {
        for length in MAX_NAME - 1..MAX_NAME + NAME_PART as u64 {
            // Libraries before it move the name's beginning.
            for before in 0..4 {
                let (name, others) = ("x".repeat(length as usize), vec!["abc"; before]);
                let read = of(&stand_in::library(Some(&name), &others));
                match read {
                    Ok(library) => assert_eq!(
                        (library.soname.unwrap().len() as u64, length),
                        (MAX_NAME - 1, MAX_NAME - 1)
                    ),
                    Err(error) => assert!(
                        length >= MAX_NAME && error.to_string() == "a name in it has no end",
                        "{length}: {error}"
                    ),
                }
            }
        }
    }

    #[test]
    fn the_level_of_the_processor_is_read_and_nonsense_is_none() {
        let property = |kind: u32, value: &[u8]| {
            [
                &kind.to_le_bytes()[..],
                &(value.len() as u32).to_le_bytes(),
                value,
                &[0; 4],
            ]
            .concat()
        };
        let note = |properties: Vec<u8>| {
            let head = [4, properties.len() as u32, super::NT_GNU_PROPERTY_TYPE_0]
                .map(u32::to_le_bytes)
                .concat();
            [head, b"GNU\0".to_vec(), properties].concat()
        };
        let features = property(0xc000_0002, &[3, 0, 0, 0]);
        let v3 = property(super::GNU_PROPERTY_X86_ISA_1_NEEDED, &[0b111, 0, 0, 0]);
        let cases = [
            (note(v3.clone()), 2),
            (note([features.clone(), v3.clone()].concat()), 2),
            (note(features), 0),
            (
                note(property(super::GNU_PROPERTY_X86_ISA_1_NEEDED, &[0; 4])),
                0,
            ),
            (
                note(property(super::GNU_PROPERTY_X86_ISA_1_NEEDED, &[7])),
                0,
            ),
            (note(property(1, &[0; 4]))[..20].to_vec(), 0),
            (v3, 0),
        ];
        for (n, (note, level)) in cases.into_iter().enumerate() {
            // The properties replace the dynamic segment in the list of segments: the file then has
            // no SONAME, and is not loadable.
            let mut bytes = stand_in::library(Some("liba.so"), &[]);
            let (at, size) = (bytes.len() as u64, note.len() as u64);
            bytes[120..124].copy_from_slice(&super::PT_GNU_PROPERTY.to_le_bytes());
            bytes[128..136].copy_from_slice(&at.to_le_bytes());
            bytes[152..160].copy_from_slice(&size.to_le_bytes());
            bytes.extend(note);
            let read = of(&bytes).unwrap();
            assert_eq!((read.isa_level, read.loadable), (level, false), "case {n}");
        }
    }

    #[test]
    fn this_program_is_read_like_any_other() {
        let file = File::open("/proc/self/exe").unwrap();
        let library = library(&file).unwrap();
        assert!(
            library.needed.iter().any(|n| n.starts_with("libc.so")),
            "{library:?}"
        );
        assert!(
            library
                .interpreter
                .is_some_and(|i| i.starts_with("/lib") && i.contains("ld-"))
        );
    }

    #[test]
    fn every_cut_and_every_flipped_byte_is_read_or_refused() {
        let good = stand_in::library(Some("libcuda.so.1"), &["libc.so.6"]);
        for length in 0..good.len() {
            assert!(
                of(&good[..length]).is_err(),
                "{length} bytes of {} were read",
                good.len()
            );
        }
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 0xff;
            let _any = of(&bytes);
        }
        assert!(
            of(&[b'x'; 100])
                .unwrap_err()
                .to_string()
                .contains("not a little-endian ELF file")
        );
    }
}
