//! Components of a guest's files, by path, and the bytes of each component.

use super::entry_text::table;
use super::newc::Kind;
use super::unpacked_root::{ROOT, Tree};
use kata_gpu_report::data::text::Screen;
use std::collections::BTreeMap;
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
    pub const ALL: [Component; 6] = [
        Self::Init,
        Self::Agent,
        Self::Modules,
        Self::Firmware,
        Self::Libraries,
        Self::Rest,
    ];

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

    /// Component of a path, with or without a leading slash.
    pub fn of(path: &[u8]) -> Self {
        let path = path.strip_prefix(b"/").unwrap_or(path);
        let in_usr = path.strip_prefix(b"usr/").unwrap_or(path);
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
        if in_usr == b"init"
            || in_usr == b"sbin/init"
            || name.starts_with(b"kata-gpu-init")
            || name.starts_with(b"NVRC")
        {
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

/// Counts a file.
pub fn count(sizes: &mut Sizes, path: &[u8], bytes: u64) {
    let (files, all) = sizes.entry(Component::of(path)).or_default();
    *files += 1;
    *all += bytes;
}

/// Sizes of a guest's files. A file with several names counts once.
pub fn sizes(tree: &Tree) -> Sizes {
    let (mut sizes, mut seen) = (Sizes::new(), HashSet::new());
    for id in tree.below(ROOT) {
        if tree.kind(id) == Kind::File && tree.file(id).is_some_and(|file| seen.insert(file)) {
            count(
                &mut sizes,
                &tree.path(id),
                tree.content(id).map_or(0, |c| c.length),
            );
        }
    }
    sizes
}

/// Files and bytes of each component.
pub type Sizes = BTreeMap<Component, (u64, u64)>;

/// Sizes by component, with their sum.
pub fn sizes_text(sizes: &Sizes, screen: &Screen) -> String {
    let total = sizes
        .values()
        .fold((0, 0), |sum, (files, bytes)| (sum.0 + files, sum.1 + bytes));
    let mut rows = vec![
        ["COMPONENT", "FILES", "BYTES", "SHARE"]
            .map(str::to_string)
            .to_vec(),
    ];
    let all = Component::ALL
        .iter()
        .filter_map(|c| Some((c.name(), *sizes.get(c)?)))
        .chain([("all", total)]);
    for (name, (files, bytes)) in all {
        let share = bytes
            .checked_mul(100)
            .and_then(|b| (b + total.1 / 2).checked_div(total.1))
            .unwrap_or(0);
        rows.push(vec![
            name.to_string(),
            files.to_string(),
            bytes.to_string(),
            format!("{share}%"),
        ]);
    }
    table(&rows, &[1, 2, 3], screen)
}

/// The sizes as JSON.
pub fn sizes_json(sizes: &Sizes) -> serde_json::Value {
    let component = |(c, (files, bytes)): (&Component, &(u64, u64))| {
        (
            c.name().to_string(),
            serde_json::json!({"files": files, "bytes": bytes}),
        )
    };
    sizes
        .iter()
        .map(component)
        .collect::<serde_json::Map<_, _>>()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_component_follows_from_its_path() {
        for (path, component) in [
            ("init", Component::Init),
            ("/usr/sbin/init", Component::Init),
            ("bin/NVRC-x86_64-unknown-linux-musl", Component::Init),
            ("usr/bin/kata-agent", Component::Agent),
            ("usr/lib/modules/6.1/kernel/x.ko", Component::Modules),
            (
                "lib/firmware/nvidia/550.163.01/gsp_tu10x.bin",
                Component::Firmware,
            ),
            ("lib64/ld-linux-x86-64.so.2", Component::Libraries),
            ("usr/lib/libcuda.so", Component::Libraries),
            ("etc/init", Component::Rest),
            ("usr/lib/x.sow", Component::Rest),
        ] {
            assert_eq!(Component::of(path.as_bytes()), component, "{path}");
        }
    }

    #[test]
    fn shares_add_up_and_nothing_divides_by_zero() {
        let some = Sizes::from([(Component::Init, (1, 25)), (Component::Rest, (2, 75))]);
        let text = sizes_text(&some, &Screen::PLAIN);
        assert_eq!(
            text,
            "COMPONENT  FILES  BYTES  SHARE\ninit           1     25    25%\nrest           2     \
             75    75%\nall            3    100   100%\n"
        );
        assert!(
            sizes_text(&Sizes::new(), &Screen::PLAIN).contains("all            0      0     0%")
        );
    }
}
