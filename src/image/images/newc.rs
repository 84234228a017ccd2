//! The newc format of cpio: a header of 110 ASCII characters, a name, data, each padded to four
//! bytes, and an entry that ends the archive. Read and written as Linux does
//! (Documentation/driver-api/early-userspace/buffer-format.rst). This module handles single
//! entries, and no files.

use std::io::{self, Read, Write};

/// Bytes of a header.
pub const HEADER: usize = 110;
/// Digits after the magic: 13 numbers of 8.
const NUMBERS: usize = 13;
const MAGIC: &[u8; 6] = b"070701";
/// Magic of the format with a sum of the data's bytes.
const MAGIC_WITH_SUM: &[u8; 6] = b"070702";
/// Older forms, which the kernel refuses: the portable one in octal, and the binary one in both
/// byte orders.
const OLD: [&[u8]; 3] = [b"070707", &[0xc7, 0x71], &[0x71, 0xc7]];
/// The name that ends an archive.
pub const TRAILER: &[u8] = b"TRAILER!!!";
/// PATH_MAX: the kernel skips an entry whose name with its NUL, or link target, is longer.
pub const MAX_NAME: u64 = 4096;

const S_IFMT: u32 = 0o170_000;

/// Type of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    File,
    Directory,
    Link,
    Char,
    Block,
    Fifo,
    Socket,
    /// A type that Linux does not have.
    Unknown,
}

impl Kind {
    const ALL: [(Kind, u32, char, &'static str); 7] = [
        (Kind::File, 0o100_000, '-', "file"),
        (Kind::Directory, 0o040_000, 'd', "directory"),
        (Kind::Link, 0o120_000, 'l', "link"),
        (Kind::Char, 0o020_000, 'c', "char"),
        (Kind::Block, 0o060_000, 'b', "block"),
        (Kind::Fifo, 0o010_000, 'p', "fifo"),
        (Kind::Socket, 0o140_000, 's', "socket"),
    ];

    pub fn of(mode: u32) -> Self {
        Self::ALL
            .iter()
            .find(|(_, bits, ..)| mode & S_IFMT == *bits)
            .map_or(Self::Unknown, |(kind, ..)| *kind)
    }

    fn row(self) -> Option<&'static (Kind, u32, char, &'static str)> {
        Self::ALL.iter().find(|(kind, ..)| *kind == self)
    }

    /// Type bits of a mode.
    pub fn bits(self) -> u32 {
        self.row().map_or(0, |(_, bits, ..)| *bits)
    }

    /// Letter in `ls -l`.
    pub fn letter(self) -> char {
        self.row().map_or('?', |(_, _, letter, _)| *letter)
    }

    pub fn name(self) -> &'static str {
        self.row().map_or("unknown", |(.., name)| name)
    }

    pub fn is_device(self) -> bool {
        matches!(self, Self::Char | Self::Block)
    }
}

/// A header's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Whether `sum` is the sum of the data.
    pub has_sum: bool,
    pub ino: u32,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub mtime: u32,
    pub size: u32,
    /// Device of the original file system: entries with equal `dev` and `ino` are the same file.
    pub dev: (u32, u32),
    pub rdev: (u32, u32),
    /// Length of the name with its NUL.
    pub name_size: u32,
    pub sum: u32,
}

impl Header {
    /// Errors describe the defect.
    pub fn parse(bytes: &[u8; HEADER]) -> Result<Self, String> {
        let (magic, digits) = bytes.split_at(MAGIC.len());
        if magic != MAGIC && magic != MAGIC_WITH_SUM {
            let old = OLD.iter().any(|old| magic.starts_with(old));
            return Err(if old {
                "an old cpio format, which no kernel unpacks: use cpio -H newc"
            } else {
                "no newc header"
            }
            .into());
        }
        let mut numbers = [0_u32; NUMBERS];
        for (number, digits) in numbers.iter_mut().zip(digits.chunks_exact(8)) {
            // Accept digits alone: from_str_radix accepts a sign.
            let text = std::str::from_utf8(digits)
                .ok()
                .filter(|t| t.bytes().all(|b| b.is_ascii_hexdigit()));
            *number = text
                .and_then(|t| u32::from_str_radix(t, 16).ok())
                .ok_or("a number in the header has other than hexadecimal digits")?;
        }
        let [
            ino,
            mode,
            uid,
            gid,
            nlink,
            mtime,
            size,
            major,
            minor,
            rmajor,
            rminor,
            name_size,
            sum,
        ] = numbers;
        let has_sum = magic == MAGIC_WITH_SUM;
        Ok(Self {
            has_sum,
            ino,
            mode,
            uid,
            gid,
            nlink,
            mtime,
            size,
            dev: (major, minor),
            rdev: (rmajor, rminor),
            name_size,
            sum,
        })
    }

    pub fn bytes(&self) -> Vec<u8> {
        let Self {
            has_sum,
            ino,
            mode,
            uid,
            gid,
            nlink,
            mtime,
            size,
            dev,
            rdev,
            name_size,
            sum,
        } = self;
        let mut out = if *has_sum { MAGIC_WITH_SUM } else { MAGIC }.to_vec();
        for number in [
            ino, mode, uid, gid, nlink, mtime, size, &dev.0, &dev.1, &rdev.0, &rdev.1, name_size,
            sum,
        ] {
            out.extend(format!("{number:08x}").bytes());
        }
        out
    }

    pub fn kind(&self) -> Kind {
        Kind::of(self.mode)
    }
}

/// Up to the next multiple of four.
pub fn padded(length: u64) -> u64 {
    length.next_multiple_of(4)
}

/// Offset of the data from the header, after a name with its NUL.
pub fn data_offset(name_size: u32) -> u64 {
    padded(HEADER as u64 + u64::from(name_size))
}

/// Writes an entry: header, name and data of `header.size` bytes, all padded. `name_size` is
/// computed.
///
/// Errors: the data is shorter than `header.size`, the name is too long, or `out` fails.
pub fn write_entry(
    out: &mut dyn Write,
    header: &Header,
    name: &[u8],
    data: &mut dyn Read,
) -> io::Result<()> {
    let name_size = name.len() as u64 + 1;
    if name_size > MAX_NAME {
        return Err(io::Error::other(format!(
            "a name of {} bytes: the kernel omits names of more than {}",
            name.len(),
            MAX_NAME - 1
        )));
    }
    let header = Header {
        name_size: name_size as u32,
        ..*header
    };
    out.write_all(&header.bytes())?;
    out.write_all(name)?;
    // The name's NUL and padding.
    pad(
        out,
        data_offset(header.name_size) - HEADER as u64 - name.len() as u64,
    )?;
    let size = u64::from(header.size);
    let copied = io::copy(&mut data.take(size), out)?;
    if copied != size {
        return Err(io::Error::other(format!(
            "it has {copied} bytes, and had {size} at first: it changes while it is packed"
        )));
    }
    pad(out, padded(size) - size)
}

/// Writes the entry that ends an archive.
pub fn write_trailer(out: &mut dyn Write) -> io::Result<()> {
    write_entry(
        out,
        &Header {
            nlink: 1,
            ..Header::default()
        },
        TRAILER,
        &mut io::empty(),
    )
}

fn pad(out: &mut dyn Write, length: u64) -> io::Result<()> {
    io::copy(&mut io::repeat(0).take(length), out).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written() {
        let header = Header {
            mode: 0o100_755,
            size: 5,
            rdev: (1, 2),
            dev: (3, 4),
            mtime: u32::MAX,
            name_size: 5,
            ..Header::default()
        };
        let bytes: [u8; HEADER] = header.bytes().try_into().unwrap();
        assert_eq!(Header::parse(&bytes), Ok(header));
        let with_sum = Header {
            has_sum: true,
            ..header
        };
        assert_eq!(
            Header::parse(&with_sum.bytes().try_into().unwrap()),
            Ok(with_sum)
        );
    }

    #[test]
    fn entries_are_padded_to_four_and_the_name_ends_with_a_nul() {
        let mut out = Vec::new();
        write_entry(
            &mut out,
            &Header {
                size: 5,
                ..Header::default()
            },
            b"init",
            &mut &b"12345"[..],
        )
        .unwrap();
        assert_eq!(
            (out.len(), &out[HEADER..HEADER + 6], &out[116..]),
            (124, &b"init\0\0"[..], &b"12345\0\0\0"[..])
        );
        write_trailer(&mut out).unwrap();
        assert_eq!(out.len() % 4, 0);
    }

    #[test]
    fn what_is_no_header_is_refused_with_the_reason() {
        let good = Header::default().bytes();
        for (at, byte, part) in [
            (0, b'1', "no newc header"),
            (5, b'7', "use cpio -H newc"),
            (6, b'+', "hexadecimal"),
            (20, b' ', "hexadecimal"),
        ] {
            let mut bytes: [u8; HEADER] = good.clone().try_into().unwrap();
            bytes[at] = byte;
            assert!(Header::parse(&bytes).unwrap_err().contains(part), "{at}");
        }
    }

    #[test]
    fn data_that_is_not_as_long_as_announced_is_an_error() {
        let write = |data: &[u8]| {
            write_entry(
                &mut Vec::new(),
                &Header {
                    size: 5,
                    ..Header::default()
                },
                b"a",
                &mut &*data,
            )
        };
        assert!(
            write(b"1234")
                .unwrap_err()
                .to_string()
                .contains("it has 4 bytes, and had 5")
        );
        assert!(
            write(b"123456").is_ok(),
            "a file may grow: what was there is packed"
        );
        let long = vec![b'a'; MAX_NAME as usize];
        assert!(
            write_entry(&mut Vec::new(), &Header::default(), &long, &mut io::empty())
                .unwrap_err()
                .to_string()
                .contains("4096 bytes")
        );
    }

    #[test]
    fn kinds_are_those_of_ls() {
        let letters: String = [
            0o100_644, 0o040_755, 0o120_777, 0o020_600, 0o060_600, 0o010_600, 0o140_600, 0,
        ]
        .map(|m| Kind::of(m).letter())
        .iter()
        .collect();
        assert_eq!(letters, "-dlcbps?");
        assert!(
            Kind::ALL
                .iter()
                .all(|(kind, bits, ..)| kind.bits() == *bits)
        );
    }
}
