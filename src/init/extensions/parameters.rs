//! Declaration of an extension: its name, and the parameters of its hash tree as
//! `veritysetup format` printed them when the image was built. Pure.

use std::fmt;

/// virtio-blk carries serials of at most this many bytes (VIRTIO_BLK_ID_BYTES).
const MAX_SERIAL: usize = 20;
/// Serial of an extension's disk, and name of its dm-verity device, without the extension's name.
pub const PREFIX: &str = "extension-";
/// Length of a sha256 digest in bytes; Kata's images know no other algorithm.
pub const DIGEST: u64 = 32;
/// Longest salt in bytes, as in veritysetup's superblock.
const MAX_SALT: usize = 256;
/// Block sizes that dm-verity takes: powers of two from a sector to the largest page.
const BLOCK_SIZES: std::ops::RangeInclusive<u32> = 512..=65536;
/// Bytes of a sector of the block layer.
pub const SECTOR: u64 = 512;

/// Name of an extension: a path component, and part of a disk's serial.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name(String);

impl Name {
    /// Takes ASCII letters, digits, `_`, `-` and `.`, as Kata's runtimes do; not dots alone.
    pub fn parse(text: &str) -> Result<Self, String> {
        let is_allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
        let shown: String = text.chars().take(64).collect();
        if text.bytes().all(|b| b == b'.') || !text.bytes().all(is_allowed) {
            return Err(format!(
                "{shown:?} is no name of an extension: use letters, digits, _, - and ."
            ));
        }
        let longest = MAX_SERIAL - PREFIX.len();
        if text.len() > longest {
            return Err(format!(
                "the name {shown} has {} characters: use at most {longest}, a virtio-blk serial \
                    holds no more",
                text.len()
            ));
        }
        Ok(Self(text.to_string()))
    }

    /// Whether this is the driver's extension.
    pub fn is_gpu(&self) -> bool {
        self.0 == "gpu"
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Serial of the disk, and name of the dm-verity device.
    pub fn serial(&self) -> String {
        format!("{PREFIX}{}", self.0)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Parameters of a hash tree (sha256, format 1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verity {
    /// Lower-case hexadecimal digits.
    pub root_hash: String,
    /// Salt in the same form; empty for none.
    pub salt: String,
    pub data_blocks: u64,
    /// In bytes.
    pub data_block_size: u32,
    /// In bytes.
    pub hash_block_size: u32,
}

/// An extension that the command line declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    pub name: Name,
    pub verity: Verity,
}

impl Verity {
    /// Takes `root_hash=..,salt=..,data_blocks=..,data_block_size=..,hash_block_size=..` in any
    /// order. Other keys are ignored, as the incumbent does.
    pub fn parse(text: &str) -> Result<Self, String> {
        let value = |key: &str| {
            let mut values = text
                .split(',')
                .filter_map(|pair| pair.split_once('='))
                .filter(|(k, _)| *k == key)
                .map(|(_, v)| v);
            match (values.next(), values.next()) {
                (Some(value), None) => Ok(value),
                (Some(_), Some(_)) => Err(format!("{key} is given twice: give it once")),
                (None, _) => Err(format!(
                    "{key} is missing: give what `veritysetup format` printed for this image"
                )),
            }
        };
        let number = |key: &str| {
            let digits = value(key)?;
            let parsed = digits
                .parse::<u64>()
                .ok()
                .filter(|n| *n > 0 && digits.bytes().all(|b| b.is_ascii_digit()));
            parsed.ok_or_else(|| {
                format!(
                    "{key}={} is no number from 1 on: give what `veritysetup format` printed",
                    shown(digits)
                )
            })
        };
        let block_size = |key: &str| {
            let size = number(key)?;
            let valid = u32::try_from(size)
                .ok()
                .filter(|s| s.is_power_of_two() && BLOCK_SIZES.contains(s));
            valid.ok_or_else(|| {
                format!(
                    "{key}={size} is no power of two from {} to {}",
                    BLOCK_SIZES.start(),
                    BLOCK_SIZES.end()
                )
            })
        };
        let root_hash = hexadecimal("root_hash", value("root_hash")?)?;
        if root_hash.len() as u64 != 2 * DIGEST {
            let length = root_hash.len();
            return Err(format!(
                "root_hash has {length} digits, sha256 has {}: build the image with sha256",
                2 * DIGEST
            ));
        }
        let salt = match value("salt")? {
            "-" => String::new(),
            salt => hexadecimal("salt", salt)?,
        };
        if salt.len() > 2 * MAX_SALT {
            return Err(format!(
                "salt has {} digits, at most {} are possible",
                salt.len(),
                2 * MAX_SALT
            ));
        }
        let verity = Self {
            root_hash,
            salt,
            data_blocks: number("data_blocks")?,
            data_block_size: block_size("data_block_size")?,
            hash_block_size: block_size("hash_block_size")?,
        };
        if verity.checked_data_bytes().is_none() || verity.tree_bytes().is_none() {
            return Err(format!(
                "data_blocks={} of {} bytes are more than a disk can have",
                verity.data_blocks, verity.data_block_size
            ));
        }
        Ok(verity)
    }

    fn checked_data_bytes(&self) -> Option<u64> {
        // The kernel counts in signed bytes.
        self.data_blocks
            .checked_mul(self.data_block_size.into())
            .filter(|bytes| *bytes <= i64::MAX as u64)
    }

    /// Bytes of data.
    pub fn data_bytes(&self) -> u64 {
        self.checked_data_bytes().unwrap_or(u64::MAX)
    }

    /// Bytes of the hash tree without a superblock: levels of blocks of digests, up to one block.
    /// The kernel puts a power of two of digests into a block. The root hash of one data block is
    /// that block's own: no tree.
    pub fn tree_bytes(&self) -> Option<u64> {
        let digests = 1 << (u64::from(self.hash_block_size) / DIGEST).checked_ilog2()?;
        let (mut blocks, mut level) = (0_u64, self.data_blocks);
        while level > 1 {
            level = level.div_ceil(digests);
            blocks = blocks.checked_add(level)?;
        }
        blocks
            .checked_mul(self.hash_block_size.into())
            .filter(|bytes| *bytes <= i64::MAX as u64)
    }
}

fn shown(text: &str) -> String {
    text.chars()
        .take(32)
        .map(|c| if c.is_ascii_graphic() { c } else { '?' })
        .collect()
}

fn hexadecimal(key: &str, text: &str) -> Result<String, String> {
    let is_hexadecimal = text.len() % 2 == 0 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let wrong = || {
        format!(
            "{key}={} is not an even number of hexadecimal digits: give what `veritysetup format` \
                printed",
            shown(text)
        )
    };
    is_hexadecimal
        .then(|| text.to_ascii_lowercase())
        .ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "9f74809a2ee7607b16fcc70d9399a4de9725a727f6ab6b4db5ea1a2da2ee5be4";

    fn text(change: (&str, &str)) -> String {
        let fields = [
            ("root_hash", ROOT),
            ("salt", "ab01"),
            ("data_blocks", "96512"),
            ("data_block_size", "4096"),
            ("hash_block_size", "4096"),
        ];
        let fields = fields.map(|(key, value)| {
            format!("{key}={}", if key == change.0 { change.1 } else { value })
        });
        fields.join(",")
    }

    #[test]
    fn parameters_in_any_order_are_taken_and_unknown_ones_ignored() {
        let verity = Verity::parse(&text(("", ""))).unwrap();
        assert_eq!(
            verity,
            Verity {
                root_hash: ROOT.into(),
                salt: "ab01".into(),
                data_blocks: 96512,
                data_block_size: 4096,
                hash_block_size: 4096
            }
        );
        let mut fields: Vec<String> = text(("", "")).split(',').map(str::to_string).collect();
        fields.reverse();
        fields.push("later=1".into());
        assert_eq!(Verity::parse(&fields.join(",")), Ok(verity));
        for none in ["-", ""] {
            assert_eq!(Verity::parse(&text(("salt", none))).unwrap().salt, "");
        }
        assert_eq!(
            Verity::parse(&text(("root_hash", &ROOT.to_uppercase())))
                .unwrap()
                .root_hash,
            ROOT
        );
    }

    #[test]
    fn each_bad_parameter_is_named_with_its_value_and_what_to_do() {
        let long = "ab".repeat(MAX_SALT + 1);
        for (key, value, wanted) in [
            (
                "root_hash",
                &ROOT[2..],
                "root_hash has 62 digits, sha256 has 64",
            ),
            (
                "root_hash",
                &ROOT[1..],
                "root_hash=f74809a2ee7607b16fcc70d9399a4de9 is not an even number",
            ),
            ("root_hash", "", "root_hash has 0 digits"),
            (
                "salt",
                "xy",
                "salt=xy is not an even number of hexadecimal digits: give what `veritysetup \
                    format` printed",
            ),
            ("salt", long.as_str(), "salt has 514 digits, at most 512"),
            ("data_blocks", "0", "data_blocks=0 is no number from 1 on"),
            ("data_blocks", "+5", "data_blocks=+5 is no number"),
            (
                "data_blocks",
                "18446744073709551616",
                "data_blocks=18446744073709551616 is no number",
            ),
            (
                "data_blocks",
                "18446744073709551615",
                "data_blocks=18446744073709551615 of 4096 bytes are more than a disk",
            ),
            (
                "data_block_size",
                "1000",
                "data_block_size=1000 is no power of two from 512 to 65536",
            ),
            (
                "hash_block_size",
                "131072",
                "hash_block_size=131072 is no power of two",
            ),
            (
                "hash_block_size",
                "lots",
                "hash_block_size=lots is no number",
            ),
        ] {
            let error = Verity::parse(&text((key, value))).unwrap_err();
            assert!(error.starts_with(wanted), "{key}={value}: {error}");
        }
        for key in [
            "root_hash",
            "salt",
            "data_blocks",
            "data_block_size",
            "hash_block_size",
        ] {
            let without: Vec<String> = text(("", ""))
                .split(',')
                .filter(|f| !f.starts_with(&format!("{key}=")))
                .map(str::to_string)
                .collect();
            assert!(
                Verity::parse(&without.join(","))
                    .unwrap_err()
                    .starts_with(&format!("{key} is missing")),
                "{key}"
            );
            let twice = format!("{},{key}=1", text(("", "")));
            assert_eq!(
                Verity::parse(&twice).unwrap_err(),
                format!("{key} is given twice: give it once")
            );
        }
        assert_eq!(
            Verity::parse("").unwrap_err(),
            "root_hash is missing: give what `veritysetup format` printed for this image"
        );
    }

    #[test]
    fn names_are_path_components_that_fit_into_a_serial() {
        for good in ["gpu", "coco", "a.b_c-1", "x"] {
            assert_eq!(
                Name::parse(good).unwrap().serial(),
                format!("extension-{good}")
            );
        }
        for bad in ["", ".", "..", "a/b", "../evil", "a b", "\u{e9}", "a\0"] {
            assert!(
                Name::parse(bad)
                    .unwrap_err()
                    .contains("is no name of an extension"),
                "{bad:?}"
            );
        }
        let error = Name::parse("eleven-char").unwrap_err();
        assert_eq!(
            error,
            "the name eleven-char has 11 characters: use at most 10, a virtio-blk serial holds no \
                more"
        );
    }

    #[test]
    fn the_tree_is_as_large_as_veritysetup_makes_it() {
        // Bytes that `veritysetup format --no-superblock` 2.6.1 wrote for these numbers of blocks.
        let tree = |data_blocks, hash_block_size| {
            Verity {
                root_hash: ROOT.into(),
                salt: String::new(),
                data_blocks,
                data_block_size: 4096,
                hash_block_size,
            }
            .tree_bytes()
        };
        for (blocks, size, bytes) in [
            (1, 4096, 0),
            (128, 4096, 4096),
            (129, 4096, 3 * 4096),
            (16385, 4096, 132 * 4096),
            (33, 1024, 3 * 1024),
        ] {
            assert_eq!(tree(blocks, size), Some(bytes), "{blocks} blocks of {size}");
        }
    }
}
