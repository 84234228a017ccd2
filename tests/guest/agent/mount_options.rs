//! Meaning of an OCI mount's options for mount(2): flags, a propagation that takes a call of its
//! own, and data for the file system.

use nix::mount::MsFlags;

/// Options that set flags.
const SET: &[(&str, MsFlags)] = &[
    ("bind", MsFlags::MS_BIND),
    ("rbind", MsFlags::MS_BIND.union(MsFlags::MS_REC)),
    ("remount", MsFlags::MS_REMOUNT),
    ("ro", MsFlags::MS_RDONLY),
    ("nosuid", MsFlags::MS_NOSUID),
    ("nodev", MsFlags::MS_NODEV),
    ("noexec", MsFlags::MS_NOEXEC),
    ("noatime", MsFlags::MS_NOATIME),
    ("nodiratime", MsFlags::MS_NODIRATIME),
    ("relatime", MsFlags::MS_RELATIME),
    ("strictatime", MsFlags::MS_STRICTATIME),
    ("sync", MsFlags::MS_SYNCHRONOUS),
    ("dirsync", MsFlags::MS_DIRSYNC),
    ("defaults", MsFlags::empty()),
];

/// Options that take flags back, which earlier options have set.
const CLEAR: &[(&str, MsFlags)] = &[
    ("rw", MsFlags::MS_RDONLY),
    ("suid", MsFlags::MS_NOSUID),
    ("dev", MsFlags::MS_NODEV),
    ("exec", MsFlags::MS_NOEXEC),
    ("atime", MsFlags::MS_NOATIME),
    ("diratime", MsFlags::MS_NODIRATIME),
    ("norelatime", MsFlags::MS_RELATIME),
    ("nostrictatime", MsFlags::MS_STRICTATIME),
    ("async", MsFlags::MS_SYNCHRONOUS),
];

const PROPAGATION: &[(&str, MsFlags)] = &[
    ("private", MsFlags::MS_PRIVATE),
    ("rprivate", MsFlags::MS_PRIVATE.union(MsFlags::MS_REC)),
    ("shared", MsFlags::MS_SHARED),
    ("rshared", MsFlags::MS_SHARED.union(MsFlags::MS_REC)),
    ("slave", MsFlags::MS_SLAVE),
    ("rslave", MsFlags::MS_SLAVE.union(MsFlags::MS_REC)),
    ("unbindable", MsFlags::MS_UNBINDABLE),
    ("runbindable", MsFlags::MS_UNBINDABLE.union(MsFlags::MS_REC)),
];

/// A mount's options, sorted by what they are for.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    pub flags: MsFlags,
    pub propagation: MsFlags,
    /// Options that are none of the known words, comma-separated: the file system may know them.
    pub data: String,
}

impl Options {
    pub fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut flags, mut propagation, mut data) = (MsFlags::empty(), MsFlags::empty(), vec![]);
        let of = |table: &[(&str, MsFlags)], word: &str| {
            table
                .iter()
                .find(|(name, _)| *name == word)
                .map(|(_, flags)| *flags)
        };
        for word in words {
            match (of(SET, word), of(CLEAR, word), of(PROPAGATION, word)) {
                (Some(set), ..) => flags |= set,
                (None, Some(clear), _) => flags &= !clear,
                (None, None, Some(kind)) => propagation |= kind,
                (None, None, None) => data.push(word),
            }
        }
        Self {
            flags,
            propagation,
            data: data.join(","),
        }
    }

    pub fn is_bind(&self) -> bool {
        self.flags.contains(MsFlags::MS_BIND)
    }

    /// Whether a bind mount has flags that take effect only when it is mounted a second time.
    pub fn needs_remount(&self) -> bool {
        self.is_bind()
            && !self
                .flags
                .difference(MsFlags::MS_BIND | MsFlags::MS_REC | MsFlags::MS_REMOUNT)
                .is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_the_drivers_mounts_are_flags_and_a_propagation() {
        let options = Options::parse(["ro", "nosuid", "nodev", "rbind", "rprivate"]);
        let flags = MsFlags::MS_RDONLY
            | MsFlags::MS_NOSUID
            | MsFlags::MS_NODEV
            | MsFlags::MS_BIND
            | MsFlags::MS_REC;
        assert_eq!(
            options,
            Options {
                flags,
                propagation: MsFlags::MS_PRIVATE | MsFlags::MS_REC,
                data: String::new()
            }
        );
        assert!(options.needs_remount() && !Options::parse(["rbind", "rprivate"]).needs_remount());
    }

    #[test]
    fn later_words_count_and_unknown_ones_are_the_file_systems() {
        let options = Options::parse(["ro", "nosuid", "rw", "mode=755", "size=65536k"]);
        assert_eq!(
            (options.flags, options.data.as_str()),
            (MsFlags::MS_NOSUID, "mode=755,size=65536k")
        );
    }
}
