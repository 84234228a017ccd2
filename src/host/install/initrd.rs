//! Whether a file looks like an initrd that Kata's guest kernel unpacks: newc, plain or with gzip, and `/init` in it where that can be seen
//! without unpacking everything. The one place where `install` looks into an image; what an image needs to boot is not judged here.

use super::kata_config::unreadable;
use super::refusal::Refusal;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Length of a newc header; all its fields are eight hexadecimal digits after a magic of six.
const HEADER: usize = 110;
const NEWC: [&[u8]; 2] = [b"070701", b"070702"];
const GZIP: &[u8] = &[0x1f, 0x8b];
/// Entries looked at; an image of a whole distribution has some ten thousand.
const MAX_ENTRIES: usize = 1 << 20;
/// Longest name that the kernel takes.
const MAX_NAME: u64 = 4096;

/// Starts of files that people take for initrds, and what they are.
const OTHERS: &[(&[u8], &str)] = &[
    (&[0x28, 0xb5, 0x2f, 0xfd], "compressed with zstd"),
    (&[0xfd, b'7', b'z', b'X', b'Z'], "compressed with xz"),
    (&[0x02, 0x21, 0x4c, 0x18], "compressed with lz4"),
    (b"BZh", "compressed with bzip2"),
    (b"\x7fELF", "an ELF file"),
    (b"hsqs", "a squashfs image"),
    (b"070707", "a cpio archive of the old form"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Plain,
    Gzip,
}

/// A file that looks like an initrd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initrd {
    pub bytes: u64,
    pub form: Form,
    /// Readable by everybody, so also by a hypervisor that does not run as root.
    pub for_everybody: bool,
}

/// Looks at the file.
pub fn look(path: &Path) -> Result<Initrd, Refusal> {
    let file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => Refusal::at(path, "there is no such initrd").cure("give an absolute path with --initrd"),
        _ => unreadable(path, &e),
    })?;
    let metadata = file.metadata().map_err(|e| unreadable(path, &e))?;
    if !metadata.is_file() {
        return Err(Refusal::at(path, "is not a regular file").cure("give an initrd with --initrd"));
    }
    let form = form_of(file)
        .map_err(|why| Refusal::at(path, format!("is no initrd for Kata: {why}")).cure("build one as newc cpio, plain or with gzip"))?;
    Ok(Initrd { bytes: metadata.len(), form, for_everybody: metadata.mode() & 0o004 != 0 })
}

fn form_of(file: File) -> Result<Form, String> {
    let mut reader = BufReader::new(file);
    let mut start = [0; 6];
    reader.read_exact(&mut start).map_err(|_| "too short".to_string())?;
    reader.rewind().map_err(|e| e.to_string())?;
    if start.starts_with(GZIP) {
        let mut inner = [0; 6];
        flate2::read::GzDecoder::new(reader).read_exact(&mut inner).map_err(|e| format!("gzip: {e}"))?;
        return if NEWC.contains(&inner.as_slice()) { Ok(Form::Gzip) } else { Err("gzip of something that is no newc archive".into()) };
    }
    if NEWC.contains(&start.as_slice()) {
        return if has_init(&mut reader)? { Ok(Form::Plain) } else { Err("it has no /init".into()) };
    }
    let known = OTHERS.iter().find(|(magic, _)| start.starts_with(magic)).map(|(_, what)| *what);
    Err(known.unwrap_or("neither newc nor gzip").into())
}

/// Goes from header to header until it meets `init`. Archives may follow each other, with zeros between; one with gzip cannot be looked into.
fn has_init(reader: &mut BufReader<File>) -> Result<bool, String> {
    let mut at = 0_u64;
    let cut = |e: io::Error| format!("the archive is cut off or damaged: {e}");
    for _ in 0..MAX_ENTRIES {
        let mut header = [0; HEADER];
        loop {
            let mut word = [0; 4];
            match reader.read_exact(&mut word) {
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
                read => read.map_err(cut)?,
            }
            if word != [0; 4] {
                header[..4].copy_from_slice(&word);
                break;
            }
            at += 4;
        }
        if header.starts_with(GZIP) {
            return Ok(true);
        }
        reader.read_exact(&mut header[4..]).map_err(cut)?;
        if !NEWC.iter().any(|magic| header.starts_with(magic)) {
            return Err(format!("no newc header at byte {at}"));
        }
        let field = |index: usize| -> Result<u64, String> {
            let digits = header.get(6 + index * 8..14 + index * 8).and_then(|d| std::str::from_utf8(d).ok());
            digits.and_then(|d| u64::from_str_radix(d, 16).ok()).ok_or(format!("no newc header at byte {at}"))
        };
        let (size, name_size) = (field(6)?, field(11)?);
        if name_size > MAX_NAME {
            return Err(format!("a name of {name_size} bytes at byte {at}"));
        }
        let mut name = Vec::new();
        reader.by_ref().take(name_size).read_to_end(&mut name).map_err(cut)?;
        let name = name.strip_suffix(b"\0").unwrap_or(&name);
        if matches!(name, b"init" | b"./init" | b"/init") {
            return Ok(true);
        }
        // Names end and data end at multiples of four.
        let data = (at + HEADER as u64 + name_size).next_multiple_of(4);
        at = (data + size).next_multiple_of(4);
        reader.seek(SeekFrom::Start(at)).map_err(cut)?;
    }
    Err(format!("more than {MAX_ENTRIES} entries"))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::io::Write;

    /// A newc archive of empty directories and files with some content.
    pub fn newc(names: &[(&str, &[u8])]) -> Vec<u8> {
        let mut out = Vec::new();
        for (name, data) in names.iter().chain(&[("TRAILER!!!", b"".as_slice())]) {
            let mut fields = [0_usize; 13];
            (fields[6], fields[11]) = (data.len(), name.len() + 1);
            out.extend(b"070701");
            fields.iter().for_each(|field| out.extend(format!("{field:08X}").bytes()));
            out.extend(name.bytes().chain([0]));
            out.resize(out.len().next_multiple_of(4), 0);
            out.extend(*data);
            out.resize(out.len().next_multiple_of(4), 0);
        }
        out
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn initrds_are_told_from_what_is_none() {
        let good = newc(&[("bin", b""), ("bin/a", b"some data"), ("init", b"#!"), ("x", b"y")]);
        let without = newc(&[("bin", b"abc"), ("sbin/init", b"x")]);
        let joined = [&newc(&[("kernel/x86/microcode/a", b"m")]), [0; 512].as_slice(), &good].concat();
        let early_and_gzip = [newc(&[("kernel/x86/microcode/a", b"m")]), gzip(&good)].concat();
        let cases: &[(&str, &[u8], Result<Form, &str>)] = &[
            ("plain", &good, Ok(Form::Plain)),
            ("gzip", &gzip(&good), Ok(Form::Gzip)),
            ("two archives", &joined, Ok(Form::Plain)),
            ("an archive and gzip", &early_and_gzip, Ok(Form::Plain)),
            ("no init", &without, Err("it has no /init")),
            ("empty", b"", Err("too short")),
            ("cut in a header", &good[..60], Err("cut off")),
            ("cut before init", &good[..116], Err("no /init")),
            ("cut in the second header", &good[..130], Err("cut off")),
            ("damaged", &[&good[..116], b"XXXXXXXX".as_slice(), &good[124..]].concat(), Err("no newc header")),
            ("gzip of text", &gzip(b"hello world"), Err("no newc archive")),
            ("cut gzip", &gzip(&good)[..8], Err("gzip: ")),
            ("zstd", &[0x28, 0xb5, 0x2f, 0xfd, 0, 0, 0, 0], Err("zstd")),
            ("ELF", b"\x7fELF\x02\x01\x01\x00", Err("an ELF file")),
            ("text", b"hello world", Err("neither newc nor gzip")),
        ];
        let dir = crate::host::testing::TempDir::new();
        for (name, bytes, wanted) in cases {
            let path = dir.path().join("initrd");
            std::fs::write(&path, bytes).unwrap();
            match (look(&path), wanted) {
                (Ok(found), Ok(form)) => assert_eq!((found.form, found.bytes), (*form, bytes.len() as u64), "{name}"),
                (Err(refusal), Err(why)) => assert!(refusal.why.contains(why), "{name}: {refusal}"),
                (found, _) => panic!("{name}: {found:?}"),
            }
        }
        assert!(look(dir.path()).unwrap_err().why.contains("not a regular file"));
        assert!(look(&dir.path().join("nothing")).unwrap_err().why.contains("no such initrd"));
    }
}
