//! Reader of an initrd's file: places of its archives and their entries. Plain archives and gzip
//! follow one another, as the kernel accepts them (init/initramfs.c).
//!
//! Headers, names and targets of links are read at once; data is read on request. Compressed parts
//! are unpacked into an unnamed file. Images are untrusted: everything is bounded, and an entry
//! that is longer than the file is an error.

use super::disk_image::reading_limits::Limits;
use super::newc::{HEADER, Header, Kind, MAX_NAME, TRAILER, data_offset, padded};
use crate::guest_disk as disk;
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_init::formats::elf::ReadAt;
use kata_gpu_report::terminal::progress_line::ByteProgress;
use nix::fcntl::OFlag;
use sha2::{Digest, Sha256};
use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, BufReader, Read, Write};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::rc::Rc;

/// Largest sum of unpacked parts. A guest with all of NVIDIA's files has about 1.5 GB, and must fit
/// into the guest's memory.
const MAX_UNPACKED: u64 = 4 << 30;
/// Largest growth of a compressed part, beyond [`FREE_UNPACKED`]: initrds grow to 2 to 5 times
/// their size, deflate allows 1032.
const MAX_RATIO: u64 = 32;
/// Unpacked bytes that no ratio limits: padding and empty files make small archives grow more.
const FREE_UNPACKED: u64 = 64 << 20;
/// Limit of parts, compressed or not. A microcode archive before the rest makes two.
const MAX_PARTS: usize = 64;
/// Bytes read at once for headers.
const WINDOW: usize = 32 * 1024;
/// Bytes read at once for data.
pub const CHUNK: usize = 256 * 1024;
/// gzip header: magic with deflate, the text flag, which has no effect, and the flag of a file
/// name, which the kernel's unpacker skips.
const GZIP: [u8; 3] = [0x1f, 0x8b, 8];
const GZIP_TEXT: u8 = 1;
const GZIP_NAME: u8 = 8;
/// First bytes of formats that other kernels unpack, and Kata's does not.
const OTHERS: [(&[u8], &str); 6] = [
    (b"\xfd7zXZ", "xz"),
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd"),
    (&[0x02, 0x21], "lz4"),
    (b"BZh", "bzip2"),
    (&[0x5d, 0, 0], "lzma"),
    (&[0x89, b'L'], "lzo"),
];

/// Text of an error about a file that a guest could boot as an image, but not as an initrd.
pub const DISK: &str = "disk image";
/// Unpacked bytes that suffice to recognize that they are no archive. Only zeros that pad to a page
/// may come before an archive.
const MAX_BEFORE_ARCHIVE: u64 = 1 << 20;

/// Storage form of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Plain,
    Gzip,
}

impl Form {
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Gzip => "gzip",
        }
    }
}

/// A range of a file, or of anything else that can be read by offset.
#[derive(Clone)]
pub struct Content {
    source: Rc<dyn ReadAt>,
    at: u64,
    pub length: u64,
}

impl Default for Content {
    fn default() -> Self {
        Self::of_bytes(Vec::new())
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Content({}..+{})", self.at, self.length)
    }
}

impl ReadAt for Content {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let left = self.length.saturating_sub(offset);
        let length = usize::try_from(left)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        self.source.read_at(
            buffer.get_mut(..length).unwrap_or_default(),
            self.at.saturating_add(offset),
        )
    }
}

/// Reads a [`Content`] from its beginning.
pub struct Reader<'a> {
    content: &'a Content,
    at: u64,
}

impl Read for Reader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.content.read_at(buffer, self.at)?;
        if read == 0 && !buffer.is_empty() && self.at < self.content.length {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file has become shorter while it was read",
            ));
        }
        self.at += read as u64;
        Ok(read)
    }
}

impl Content {
    /// The whole content of any file.
    pub fn of_file(file: File) -> io::Result<Self> {
        let length = file.metadata()?.len();
        Ok(Self::of(Rc::new(file), length))
    }

    pub fn of_bytes(bytes: Vec<u8>) -> Self {
        let length = bytes.len() as u64;
        Self::of(Rc::new(bytes), length)
    }

    /// The first `length` bytes of a source.
    pub fn of(source: Rc<dyn ReadAt>, length: u64) -> Self {
        Self {
            source,
            at: 0,
            length,
        }
    }

    /// Whether both are the same range of the same source, and so equal without being read.
    pub fn is_same_range(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.source, &other.source)
            && (self.at, self.length) == (other.at, other.length)
    }

    pub fn reader(&self) -> Reader<'_> {
        Reader {
            content: self,
            at: 0,
        }
    }

    pub fn part(&self, range: Range<u64>) -> Content {
        let at = range.start.min(self.length);
        Content {
            source: self.source.clone(),
            at: self.at + at,
            length: range.end.clamp(at, self.length) - at,
        }
    }

    /// All bytes. Errors: more than `most`.
    pub fn bytes(&self, most: u64) -> io::Result<Vec<u8>> {
        if self.length > most {
            return Err(io::Error::other(format!(
                "{} bytes: more than {most}",
                self.length
            )));
        }
        let mut bytes = Vec::new();
        self.reader().read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Passes the chunks to `take`, in order.
    pub fn chunks(&self, mut take: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let (mut reader, mut buffer) = (self.reader(), vec![0; CHUNK]);
        loop {
            match reader.read(&mut buffer)? {
                0 => return Ok(()),
                read => take(buffer.get(..read).unwrap_or_default())?,
            }
        }
    }

    pub fn sha256(&self) -> io::Result<[u8; 32]> {
        let mut hash = Sha256::new();
        self.chunks(|chunk| {
            hash.update(chunk);
            Ok(())
        })?;
        Ok(hash.finalize().into())
    }
}

/// An entry of an archive; trailers are omitted.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    pub header: Header,
    /// Name as stored, without NULs.
    pub name: Vec<u8>,
    /// Target of a link.
    pub target: Vec<u8>,
    /// Indices of the part and, in the image, of the archive: hard links do not cross archives.
    pub part: usize,
    pub archive: usize,
    /// Header, name, data and padding, in the part's content.
    pub range: Range<u64>,
    pub data: Content,
    /// Longer than the kernel accepts: the kernel skips the entry.
    pub too_long: bool,
}

/// Bytes stored in one form: one archive or several, with zeros between them.
#[derive(Debug)]
pub struct Part {
    pub form: Form,
    /// Stored bytes.
    pub raw: Content,
    /// Unpacked bytes.
    pub content: Content,
    /// Offsets of the trailers in `content`.
    pub trailers: Vec<u64>,
    /// Whether the last archive has a trailer.
    pub ended: bool,
}

/// A whole initrd.
#[derive(Debug, Default)]
pub struct Image {
    pub bytes: u64,
    pub parts: Vec<Part>,
    pub entries: Vec<Entry>,
}

impl Image {
    /// Reads a file's entries. Errors name the place in the file.
    pub fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let file = open_regular(path).with_context(|| format!("open initrd {shown}"))?;
        let file = Rc::new(file);
        let bytes = file
            .metadata()
            .with_context(|| format!("look at initrd {shown}"))?
            .len();
        ensure!(bytes > 0, "read initrd {shown}: it is empty");
        let mut image = Self {
            bytes,
            ..Self::default()
        };
        Scan {
            image: &mut image,
            file,
            limits: Limits::default(),
            unpacked: 0,
            archives: 0,
        }
        .run()
        .with_context(|| format!("read initrd {shown}"))?;
        ensure!(
            !image.entries.is_empty(),
            "read initrd {shown}: there is no entry in it"
        );
        Ok(image)
    }

    /// Form of the file: gzip if any part is gzip.
    pub fn form(&self) -> Form {
        if self.parts.iter().any(|p| p.form == Form::Gzip) {
            Form::Gzip
        } else {
            Form::Plain
        }
    }
}

struct Scan<'a> {
    image: &'a mut Image,
    file: Rc<File>,
    limits: Limits,
    unpacked: u64,
    archives: usize,
}

/// End of an archive's reading.
enum End {
    /// End of the content.
    Content,
    /// First byte that is no archive.
    Other(u64),
}

impl Scan<'_> {
    fn run(&mut self) -> Result<()> {
        let whole = Content::of(self.file.clone(), self.image.bytes);
        let mut at = 0;
        loop {
            ensure!(
                self.image.parts.len() < MAX_PARTS,
                "byte {at}: more than {MAX_PARTS} parts: no initrd has so many"
            );
            // Skip zeros, which belong to no part: a part's alignment depends on its place.
            at = skip_zeros(&whole, at)?;
            if at >= self.image.bytes {
                return Ok(());
            }
            let rest = whole.part(at..whole.length);
            if first_byte(&rest)? == Some(b'0') {
                ensure!(
                    at % 4 == 0,
                    "byte {at}: an archive must begin at a multiple of 4, or the kernel does not \
                     unpack it: put zeros before it"
                );
                let (part, end) = self.part(Form::Plain, rest.clone(), rest.clone(), at)?;
                let length = match end {
                    End::Content => rest.length,
                    End::Other(length) => length,
                };
                self.image.parts.push(Part {
                    raw: rest.part(0..length),
                    content: rest.part(0..length),
                    ..part
                });
                at += length;
            } else {
                if self.image.parts.is_empty()
                    && let Some(what) = what_it_is(&whole)?
                {
                    bail!("it is {what}");
                }
                let (content, used) = self.unpack(&rest).with_context(|| format!("byte {at}"))?;
                let (part, end) = self.part(Form::Gzip, rest.part(0..used), content, at)?;
                if let End::Other(inside) = end {
                    if part.trailers.is_empty()
                        && let Some(what) = what_it_is(&part.content)?
                    {
                        bail!("byte {at}: what is unpacked there is {what}");
                    }
                    bail!(
                        "byte {at}: byte {inside} of what is unpacked there is neither the \
                         beginning of an entry nor zero"
                    );
                }
                self.image.parts.push(part);
                at += used;
            }
        }
    }

    /// Reads archives up to the content's end, or up to bytes that are no archive.
    fn part(&mut self, form: Form, raw: Content, content: Content, at: u64) -> Result<(Part, End)> {
        let mut part = Part {
            form,
            raw,
            content: content.clone(),
            trailers: Vec::new(),
            ended: true,
        };
        let mut window = Window {
            content: content.clone(),
            at: 0,
            bytes: Vec::new(),
        };
        let place = |offset: u64| match form {
            Form::Plain => format!("byte {}", at + offset),
            Form::Gzip => format!("byte {offset} of what is unpacked at byte {at}"),
        };
        let mut offset = 0;
        loop {
            offset = if part.ended {
                skip_zeros(&content, offset)?
            } else {
                offset
            };
            if offset >= content.length {
                return Ok((part, End::Content));
            }
            if part.ended && window.get(offset, 1)? != b"0" {
                return Ok((part, End::Other(offset)));
            }
            ensure!(
                offset % 4 == 0,
                "{}: an archive must begin at a multiple of 4: put zeros before it",
                place(offset)
            );
            if part.ended {
                self.archives += 1;
                part.ended = false;
            }
            let (entry, next) = self
                .entry(&mut window, offset)
                .with_context(|| place(offset))?;
            match entry {
                Some(entry) => self.image.entries.push(entry),
                None => {
                    part.trailers.push(offset);
                    part.ended = true;
                }
            }
            offset = next;
        }
    }

    /// The entry at an offset (None: a trailer), and the offset of the next entry.
    fn entry(&mut self, window: &mut Window, offset: u64) -> Result<(Option<Entry>, u64)> {
        let header = window.get(offset, HEADER)?;
        let header: &[u8; HEADER] = header
            .try_into()
            .map_err(|_| anyhow::anyhow!("the archive ends inside a header: the file is cut"))?;
        let header = Header::parse(header).map_err(anyhow::Error::msg)?;
        let (name_size, size) = (u64::from(header.name_size), u64::from(header.size));
        let data = offset + data_offset(header.name_size);
        let end = data + size;
        let length = window.content.length;
        ensure!(
            end <= length,
            "an entry of {name_size} and {size} bytes ends at {end}, and the archive at {length}: \
             the file is cut, or the header wrong"
        );
        ensure!(name_size > 0, "an entry without a name");
        // A trailer's data is skipped like any other, although no writer adds any.
        let next = padded(end).min(length);
        let is_link = header.kind() == Kind::Link;
        let too_long = name_size > MAX_NAME || (is_link && size > MAX_NAME);
        let stored = window.get(offset + HEADER as u64, name_size.min(MAX_NAME) as usize)?;
        let name = stored
            .split(|b| *b == 0)
            .next()
            .unwrap_or_default()
            .to_vec();
        if !too_long {
            ensure!(stored.ends_with(&[0]), "a name without its end");
            // Some writers pad a name with NULs to begin data on a page of its own.
            ensure!(
                stored.iter().skip(name.len()).all(|b| *b == 0),
                "a name that goes on behind its end"
            );
        }
        if name == TRAILER {
            return Ok((None, next));
        }
        let target = if is_link {
            window.get(data, size.min(MAX_NAME) as usize)?.to_vec()
        } else {
            Vec::new()
        };
        self.limits.wait(name.len() + target.len())?;
        let data = window.content.part(data..end);
        if header.has_sum && header.kind() == Kind::File {
            check_sum(&data, header.sum)?;
        }
        let (part, archive) = (self.image.parts.len(), self.archives);
        Ok((
            Some(Entry {
                header,
                name,
                target,
                part,
                archive,
                range: offset..next,
                data,
                too_long,
            }),
            next,
        ))
    }

    /// Unpacks one gzip member; returns its content, and the number of stored bytes.
    fn unpack(&mut self, rest: &Content) -> Result<(Content, u64)> {
        let mut head = [0; 10];
        let read = rest.read_at(&mut head, 0)?;
        let head = head.get(..read).unwrap_or_default();
        if !head.starts_with(&GZIP) {
            if let Some((_, name)) = OTHERS.iter().find(|(magic, _)| head.starts_with(magic)) {
                bail!("{name}: a Kata guest's kernel unpacks gzip and nothing else: decompress it");
            }
            bail!("neither a newc archive nor gzip: not an initrd");
        }
        let flags = head.get(3).copied().unwrap_or_default();
        ensure!(
            flags & !(GZIP_TEXT | GZIP_NAME) == 0,
            "a gzip header with flags {flags:#x}: the kernel steps over a file name alone; \
             compress it with gzip -n"
        );
        let spool = Rc::new(unnamed_file()?);
        let mut file = BufReader::with_capacity(CHUNK, rest.reader());
        // Other parts may follow: the ratio applies to the rest of the file.
        let most = FREE_UNPACKED.max(rest.length.saturating_mul(MAX_RATIO));
        let mut gzip = flate2::bufread::GzDecoder::new(&mut file);
        let mut progress = ByteProgress::new("unpacking", 0);
        let (mut buffer, mut length, mut first) = (vec![0; CHUNK], 0_u64, None);
        loop {
            let read = gzip
                .read(&mut buffer)
                .context("unpack gzip: the file is damaged or cut")?;
            if read == 0 {
                break;
            }
            length += read as u64;
            progress.add(read as u64);
            self.unpacked += read as u64;
            let cure = "nothing more of it is unpacked; if it is to be trusted, unpack it with \
                        gzip -d and give the plain archive";
            ensure!(
                self.unpacked <= MAX_UNPACKED,
                "more than {MAX_UNPACKED} bytes come out: no guest has so much; {cure}"
            );
            ensure!(
                length <= most,
                "{} compressed bytes grow to more than {most}, {MAX_RATIO} times: no initrd does; \
                 {cure}",
                rest.length
            );
            let chunk = buffer.get(..read).unwrap_or_default();
            first = first.or_else(|| chunk.iter().copied().find(|byte| *byte != 0));
            spool
                .as_ref()
                .write_all(chunk)
                .with_context(|| no_room(&std::env::temp_dir()))?;
            // Check early: otherwise a small file could fill a disk.
            if length > MAX_BEFORE_ARCHIVE && first != Some(b'0') {
                let content = Content::of(spool, length);
                match (first, what_it_is(&content)?) {
                    (_, Some(what)) => bail!("what is unpacked is {what}"),
                    (Some(_), None) => bail!("what is unpacked is no newc archive: not an initrd"),
                    (None, None) => bail!(
                        "what is unpacked begins with more than {MAX_BEFORE_ARCHIVE} zeros: no \
                         initrd does"
                    ),
                }
            }
        }
        let used = file.get_ref().at - file.buffer().len() as u64;
        Ok((Content::of(spool, length), used))
    }
}

/// Name of a format that is no initrd, with the cure.
fn what_it_is(content: &Content) -> Result<Option<String>> {
    Ok(
        disk::known(content)?.map(|disk::Known { name, is_disk }| match is_disk {
            true => {
                format!(
                    "{name}, a {DISK}: not an initrd (`kata-gpu-boot install --image` takes one, \
                 `kata-gpu-boot image replace-init` gives it another init)"
                )
            }
            false => format!("{name}: not an initrd"),
        }),
    )
}

fn no_room(directory: &Path) -> String {
    format!(
        "write what is unpacked to {} (TMPDIR names another place)",
        directory.display()
    )
}

/// Opens a regular file for reading, never a FIFO or device: to open one could block, or have side
/// effects.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let is_file = |meta: io::Result<Metadata>| match meta?.is_file() {
        true => Ok(()),
        false => Err(io::Error::other("not a regular file")),
    };
    is_file(std::fs::metadata(path))?;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)?;
    is_file(file.metadata())?;
    Ok(file)
}

/// A file that is removed by closing it.
fn unnamed_file() -> Result<File> {
    let directory = std::env::temp_dir();
    let flags = OFlag::O_TMPFILE.bits();
    OpenOptions::new()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(flags)
        .open(&directory)
        .with_context(|| no_room(&directory))
}

fn first_byte(content: &Content) -> io::Result<Option<u8>> {
    let mut byte = [0];
    Ok((content.read_at(&mut byte, 0)? == 1).then_some(byte[0]))
}

/// Offset of the first byte that is not zero, or of the end.
fn skip_zeros(content: &Content, mut at: u64) -> io::Result<u64> {
    // Tools write at most some hundred zeros; after more, take larger steps.
    let mut buffer = vec![0; 512];
    loop {
        let read = content.read_at(&mut buffer, at)?;
        let zeros = buffer
            .iter()
            .take(read)
            .position(|b| *b != 0)
            .unwrap_or(read);
        at += zeros as u64;
        if zeros < read || read == 0 {
            return Ok(at);
        }
        buffer.resize(CHUNK, 0);
    }
}

/// Checks the sum of an archive's data as the kernel does.
fn check_sum(data: &Content, wanted: u32) -> Result<()> {
    let mut sum = 0_u32;
    data.chunks(|chunk| {
        sum = chunk
            .iter()
            .fold(sum, |sum, byte| sum.wrapping_add(u32::from(*byte)));
        Ok(())
    })?;
    ensure!(
        sum == wanted,
        "the sum of its data is {sum:#x}, and {wanted:#x} in the header: the file is damaged"
    );
    Ok(())
}

/// Buffer for headers: they lie close together, so one read serves many.
struct Window {
    content: Content,
    at: u64,
    bytes: Vec<u8>,
}

impl Window {
    /// Bytes at an offset; fewer at the end.
    fn get(&mut self, offset: u64, length: usize) -> io::Result<&[u8]> {
        let inside =
            offset >= self.at && offset + length as u64 <= self.at + self.bytes.len() as u64;
        if !inside {
            self.bytes.resize(WINDOW.max(length), 0);
            let mut there = 0;
            while let Some(rest) = self.bytes.get_mut(there..).filter(|rest| !rest.is_empty()) {
                match self.content.read_at(rest, offset + there as u64)? {
                    0 => break,
                    read => there += read,
                }
            }
            self.bytes.truncate(there);
            self.at = offset;
        }
        let rest = usize::try_from(offset - self.at)
            .ok()
            .and_then(|skip| self.bytes.get(skip..))
            .unwrap_or_default();
        Ok(rest.get(..length).unwrap_or(rest))
    }
}

/// Copies content into an archive.
pub fn copy(content: &Content, out: &mut dyn Write) -> io::Result<()> {
    content.chunks(|chunk| out.write_all(chunk))
}
