//! What a file of a guest is for, told by its path: where the bytes of an image go.

use super::newc::Kind;
use super::text::Sizes;
use super::tree::{ROOT, Tree};
use std::collections::HashSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Component {
    Init,
    Agent,
    Modules,
    Firmware,
    Libraries,
    Rest,
}

impl Component {
    pub const ALL: [Component; 6] = [Self::Init, Self::Agent, Self::Modules, Self::Firmware, Self::Libraries, Self::Rest];

    pub fn name(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::Agent => "agent",
            Self::Modules => "modules",
            Self::Firmware => "firmware",
            Self::Libraries => "libraries",
            Self::Rest => "rest",
        }
    }

    /// By path, with or without a slash in front.
    pub fn of(path: &[u8]) -> Self {
        let path = path.strip_prefix(b"/").unwrap_or(path);
        let in_usr = path.strip_prefix(b"usr/").unwrap_or(path);
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
        if in_usr == b"init" || in_usr == b"sbin/init" || name.starts_with(b"kata-gpu-init") || name.starts_with(b"NVRC") {
            Self::Init
        } else if name == b"kata-agent" {
            Self::Agent
        } else if in_usr.starts_with(b"lib/modules/") {
            Self::Modules
        } else if in_usr.starts_with(b"lib/firmware/") {
            Self::Firmware
        } else if name.ends_with(b".so") || name.windows(4).any(|w| w == b".so.") {
            Self::Libraries
        } else {
            Self::Rest
        }
    }
}

/// Adds a file.
pub fn count(sizes: &mut Sizes, path: &[u8], bytes: u64) {
    let (files, all) = sizes.entry(Component::of(path)).or_default();
    *files += 1;
    *all += bytes;
}

/// Of the files that a guest gets; one with several names counts once.
pub fn sizes(tree: &Tree) -> Sizes {
    let (mut sizes, mut seen) = (Sizes::new(), HashSet::new());
    for id in tree.below(ROOT) {
        if tree.kind(id) == Kind::File && tree.file(id).is_some_and(|file| seen.insert(file)) {
            count(&mut sizes, &tree.path(id), tree.content(id).map_or(0, |c| c.length));
        }
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_tell_what_a_file_is_for() {
        for (path, component) in [
            ("init", Component::Init),
            ("/usr/sbin/init", Component::Init),
            ("bin/NVRC-x86_64-unknown-linux-musl", Component::Init),
            ("usr/bin/kata-agent", Component::Agent),
            ("usr/lib/modules/6.1/kernel/x.ko", Component::Modules),
            ("lib/firmware/nvidia/550.163.01/gsp_tu10x.bin", Component::Firmware),
            ("lib64/ld-linux-x86-64.so.2", Component::Libraries),
            ("usr/lib/libcuda.so", Component::Libraries),
            ("etc/init", Component::Rest),
            ("usr/lib/x.sow", Component::Rest),
        ] {
            assert_eq!(Component::of(path.as_bytes()), component, "{path}");
        }
    }
}
