//! The dm-verity hash tree of a disk image's root, in the second partition, as Kata's image builder
//! makes it (`veritysetup format --no-superblock`): sha256, format 1, blocks of 4096 bytes, the
//! highest level first.
//!
//! The tree has no header, so nothing can be read of it without its parameters. They are in a file
//! beside the image, on one line, in the form of Kata's `kernel_verity_params`.

use crate::doing::Doing;
use crate::guest_disk::Disk;
use crate::images::image::{Content, open_regular};
use anyhow::{Context, Result};
use kata_gpu_init::extensions::Verity;
use kata_gpu_report::data::text::hex;
use sha2::{Digest, Sha256};
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Bytes of a block of data and of hashes, as Kata's image builder takes them.
pub const BLOCK: u32 = 4096;
/// Bytes read at once.
const BUFFER: usize = 1 << 20;
/// Bytes of a sha256 digest.
const DIGEST: usize = 32;
/// Most blocks of a root, which may be a hole of any size: their digests take 512 MiB.
const MAX_BLOCKS: u64 = 1 << 24;
/// Suffix of the name of the file with the parameters.
const SUFFIX: &str = ".verity";
/// Largest accepted file with parameters, in bytes: with the longest salt they have 800.
const MAX_PARAMETERS: u64 = 4096;

/// A hash tree, and the parameters with which a guest's kernel reads it.
#[derive(Debug)]
pub struct HashTree {
    pub verity: Verity,
    pub bytes: Vec<u8>,
}

/// Whether the hash tree of an image is that of its root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// A second partition without parameters beside the image.
    Unknown,
    Fits,
    /// The reason why no guest can read the root with these parameters.
    Wrong(String),
}

impl State {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Fits => "fits",
            Self::Wrong(_) => "wrong",
        }
    }
}

/// Parameters for a root of this many bytes, still without its hash. `salt`: hexadecimal digits.
pub fn parameters(salt: String, root_bytes: u64) -> Verity {
    Verity {
        root_hash: String::new(),
        salt,
        data_blocks: root_bytes / u64::from(BLOCK),
        data_block_size: BLOCK,
        hash_block_size: BLOCK,
    }
}

/// The tree of a root, whatever root hash the parameters have. Errors: the root is shorter than its
/// blocks.
pub fn of(root: impl Read, verity: Verity) -> io::Result<HashTree> {
    if verity.data_blocks > MAX_BLOCKS {
        let why = format!(
            "{} blocks: at most {MAX_BLOCKS} are hashed",
            verity.data_blocks
        );
        return Err(io::Error::new(ErrorKind::InvalidData, why));
    }
    let mut root = BufReader::with_capacity(BUFFER, root);
    let salt: Vec<u8> = verity
        .salt
        .as_bytes()
        .chunks(2)
        .filter_map(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok())
        .collect();
    let salted = Sha256::new_with_prefix(salt);
    let digest =
        |block: &[u8]| -> [u8; DIGEST] { salted.clone().chain_update(block).finalize().into() };
    let (mut block, mut level) = (vec![0; verity.data_block_size as usize], Vec::new());
    for _ in 0..verity.data_blocks {
        root.read_exact(&mut block)?;
        level.extend(digest(&block));
    }
    let (size, mut levels) = (verity.hash_block_size as usize, Vec::new());
    while level.len() > DIGEST {
        level.resize(level.len().next_multiple_of(size), 0);
        let above = level.chunks(size).flat_map(digest).collect();
        levels.push(std::mem::replace(&mut level, above));
    }
    levels.reverse();
    Ok(HashTree {
        verity: Verity {
            root_hash: hex(&level),
            ..verity
        },
        bytes: levels.concat(),
    })
}

/// The parameters in Kata's form and order.
pub fn line(verity: &Verity) -> String {
    format!(
        "root_hash={},salt={},data_blocks={},data_block_size={},hash_block_size={}",
        verity.root_hash,
        verity.salt,
        verity.data_blocks,
        verity.data_block_size,
        verity.hash_block_size
    )
}

/// Path of the file with an image's parameters.
pub fn file_of(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_os_string();
    name.push(SUFFIX);
    name.into()
}

/// The parameters beside an image; None where no file has them. Errors: the file cannot be read, or
/// is no text.
pub fn beside(image: &Path) -> Result<Option<String>> {
    let path = file_of(image);
    let file = match open_regular(&path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        file => file,
    };
    let bytes = file
        .and_then(Content::of_file)
        .and_then(|file| file.bytes(MAX_PARAMETERS))
        .doing("read", &path)?;
    let text = String::from_utf8(bytes).doing("read", &path)?;
    Ok(Some(text.trim_end().to_string()))
}

/// Checks the whole root and its tree. The inner error: the reason why a guest's kernel would not
/// read the root with these parameters.
pub fn check(image: &Content, disk: &Disk, line: &str) -> io::Result<Result<(), String>> {
    let fault = |why: String| Ok(Err(why));
    let verity = match Verity::parse(line) {
        Ok(verity) => verity,
        Err(why) => return fault(why),
    };
    if verity.salt.is_empty() {
        return fault("salt is missing: Kata's runtimes take no parameters without one".into());
    }
    if verity.data_bytes() > disk.root_bytes {
        return fault(format!(
            "{} blocks of {} bytes are more than the root's {} bytes",
            verity.data_blocks, verity.data_block_size, disk.root_bytes
        ));
    }
    let Some(second) = &disk.second else {
        return fault("the image has no second partition, where Kata expects the hash tree".into());
    };
    let root = image.part(disk.root_at..disk.root_at + disk.root_bytes);
    let tree = of(root.reader(), verity.clone())?;
    if tree.verity.root_hash != verity.root_hash {
        return fault(format!(
            "the root hash of this image's root is {}: the parameters are of another image",
            tree.verity.root_hash
        ));
    }
    let stored = image.part(second.clone());
    let mut there = Vec::new();
    stored
        .reader()
        .take(tree.bytes.len() as u64)
        .read_to_end(&mut there)?;
    if there != tree.bytes {
        return fault("the second partition has another hash tree than this image's root".into());
    }
    Ok(Ok(()))
}

/// State of an image by the parameters beside it. None: the image has neither a second partition
/// nor parameters.
pub fn look(path: &Path, image: &Content, disk: &Disk) -> Result<Option<State>> {
    let Some(line) = beside(path)? else {
        return Ok(disk.second.is_some().then_some(State::Unknown));
    };
    let checked = check(image, disk, &line).context("read the root for its hash tree")?;
    Ok(Some(match checked {
        Ok(()) => State::Fits,
        Err(why) => State::Wrong(why),
    }))
}
