//! Merges a configuration file with its drop-ins as its runtime does, and records which file each
//! value comes from.
//!
//! Both runtimes read the file, then every entry of `config.d` beside the *resolved* file, sorted
//! by name as bytes. Later entries win, by different rules:
//!
//! - runtime-rs (since 3.0.0): tables are merged at any depth, everything else, arrays too,
//!   replaces what was there, whatever its type was.
//! - Go (since 2.5.0): the same, except that a key of `[hypervisor.X]` or `[agent.X]` is replaced
//!   as a whole even when it is a table; that a drop-in makes no section by an empty table; and
//!   that keys of the file itself, not of drop-ins, may be written in any case.
//!
//! Not here: validation. Unknown keys are kept for the runtime.

use super::kata_config::{KataConfig, Source, parse};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Program that reads the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    Go,
    Rust,
}

impl Runtime {
    pub fn name(self) -> &'static str {
        match self {
            Runtime::Go => "Go runtime",
            Runtime::Rust => "runtime-rs",
        }
    }

    /// First release that reads `config.d`.
    pub fn drop_ins_since(self) -> (u32, u32) {
        match self {
            Runtime::Go => (2, 5),
            Runtime::Rust => (3, 0),
        }
    }
}

/// A configuration as its runtime sees it.
#[derive(Clone, Debug, Default)]
pub struct Effective {
    pub table: Table,
    /// File that last wrote each value that is no table.
    origins: BTreeMap<Vec<String>, PathBuf>,
}

impl Effective {
    /// Merges drop-ins, in this order, into a file.
    pub fn of<'a>(
        runtime: Runtime,
        base: &Source,
        drop_ins: impl IntoIterator<Item = &'a Source>,
    ) -> Effective {
        let mut effective = Effective::default();
        let folded = if runtime == Runtime::Go {
            fold(&base.table)
        } else {
            base.table.clone()
        };
        // Both rules are the same for a merge into an empty table.
        effective.merge(Runtime::Rust, &mut Vec::new(), &folded, &base.path);
        for drop_in in drop_ins {
            effective.merge(runtime, &mut Vec::new(), &drop_in.table, &drop_in.path);
        }
        effective
    }

    pub fn get(&self, path: &[&str]) -> Option<&Value> {
        let (last, parents) = path.split_last()?;
        let mut table = &self.table;
        for part in parents {
            table = table.get(*part)?.as_table()?;
        }
        table.get(*last)
    }

    /// A text that is not empty.
    pub fn text(&self, path: &[&str]) -> Option<&str> {
        self.get(path)?.as_str().filter(|text| !text.is_empty())
    }

    /// The file that wrote this value.
    pub fn origin(&self, path: &[&str]) -> Option<&Path> {
        let path: Vec<String> = path.iter().map(ToString::to_string).collect();
        self.origins.get(&path).map(PathBuf::as_path)
    }

    fn merge(&mut self, runtime: Runtime, path: &mut Vec<String>, incoming: &Table, file: &Path) {
        for (key, value) in incoming {
            path.push(key.clone());
            let of_section =
                path.len() >= 2 && path.first().is_some_and(|first| is_sections(first));
            match value {
                Value::Table(table)
                    if !(runtime == Runtime::Go && of_section && path.len() == 3) =>
                {
                    let makes_nothing = runtime == Runtime::Go && of_section && table.is_empty();
                    if !makes_nothing {
                        self.table_at(path);
                        self.merge(runtime, path, table, file);
                    }
                }
                value => self.put(path, value.clone(), file),
            }
            path.pop();
        }
    }

    /// The table at a path, in place of a value of another type.
    fn table_at(&mut self, path: &[String]) -> &mut Table {
        let mut table = &mut self.table;
        for (depth, part) in path.iter().enumerate() {
            let entry = table
                .entry(part.clone())
                .or_insert_with(|| Value::Table(Table::new()));
            if !entry.is_table() {
                *entry = Value::Table(Table::new());
                self.origins.remove(path.get(..=depth).unwrap_or_default());
            }
            let Value::Table(inner) = entry else {
                unreachable!("it has just been made a table")
            };
            table = inner;
        }
        table
    }

    fn put(&mut self, path: &[String], value: Value, file: &Path) {
        let Some((last, parents)) = path.split_last() else {
            return;
        };
        self.table_at(parents).insert(last.clone(), value);
        self.origins.retain(|known, _| !known.starts_with(path));
        self.origins.insert(path.to_vec(), file.to_path_buf());
    }
}

/// Tables whose entries are named sections.
fn is_sections(name: &str) -> bool {
    matches!(name, "hypervisor" | "agent")
}

/// Lower-cases the keys that the Go runtime accepts in any case; names of sections stay.
fn fold(table: &Table) -> Table {
    let lower = |table: &Table| -> Table {
        let mut out: Table = table
            .iter()
            .map(|(k, v)| (k.to_ascii_lowercase(), v.clone()))
            .collect();
        // A key written in lower case wins over its other spellings.
        out.extend(
            table
                .iter()
                .filter(|(k, _)| **k == k.to_ascii_lowercase())
                .map(|(k, v)| (k.clone(), v.clone())),
        );
        out
    };
    let mut out = lower(table);
    for (key, value) in &mut out {
        let Value::Table(inner) = value else { continue };
        if is_sections(key) {
            for section in inner
                .iter_mut()
                .filter_map(|(_, section)| section.as_table_mut())
            {
                *section = lower(section);
            }
        } else {
            *inner = lower(inner);
        }
    }
    out
}

/// A key that makes the Go runtime refuse its whole configuration: below a section, keys of a
/// drop-in are looked up as written, and all of Kata's are in lower case.
pub fn refused_by_go(drop_in: &Table) -> Option<String> {
    let sections = drop_in
        .iter()
        .filter(|(key, _)| is_sections(key))
        .filter_map(|(key, value)| Some((key, value.as_table()?)));
    for (kind, sections) in sections {
        for (name, section) in sections
            .iter()
            .filter_map(|(name, section)| Some((name, section.as_table()?)))
        {
            if let Some(key) = section
                .keys()
                .find(|key| key.chars().any(|c| c.is_ascii_uppercase()))
            {
                return Some(format!("{kind}.{name}.{key}"));
            }
        }
    }
    None
}

/// Default of both runtimes for a `default_memory` that is absent or 0.
const DEFAULT_MEMORY_MIB: i64 = 2048;

/// Memory in MiB of a guest whose pod sets no limits.
pub fn default_memory(effective: &Effective, section: &str) -> i64 {
    let memory = effective
        .get(&["hypervisor", section, "default_memory"])
        .and_then(Value::as_integer);
    memory.filter(|mib| *mib > 0).unwrap_or(DEFAULT_MEMORY_MIB)
}

/// The effective configuration with this text as our drop-in. A text that does not parse counts as
/// no drop-in.
pub fn with_ours(config: &KataConfig, runtime: Runtime, text: Option<&[u8]>) -> Effective {
    let (earlier, later) = config.around_ours();
    let parsed = text.and_then(|text| Some((text, parse(text).ok()?)));
    let ours = parsed.map(|(text, table)| Source {
        path: config.drop_in_path(),
        bytes: text.to_vec(),
        table,
    });
    Effective::of(
        runtime,
        &config.base,
        earlier.iter().chain(&ours).chain(later),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(name: &str, text: &str) -> Source {
        Source {
            path: name.into(),
            bytes: Vec::new(),
            table: text.parse().unwrap(),
        }
    }

    fn merged(runtime: Runtime, base: &str, drop_ins: &[&str]) -> Effective {
        let drop_ins: Vec<Source> = drop_ins
            .iter()
            .enumerate()
            .map(|(i, text)| source(&format!("{i}"), text))
            .collect();
        Effective::of(runtime, &source("base", base), &drop_ins)
    }

    /// Name, file, drop-ins, result in runtime-rs, result in Go (None: the same).
    type Row = (
        &'static str,
        &'static str,
        &'static [&'static str],
        &'static str,
        Option<&'static str>,
    );

    const RULES: &[Row] = &[
        (
            "no drop-in",
            "[hypervisor.qemu]\na = 1",
            &[],
            "[hypervisor.qemu]\na = 1",
            None,
        ),
        (
            "a key is replaced, its neighbours stay",
            "[hypervisor.qemu]\na = 1\nb = 2",
            &["[hypervisor.qemu]\na = 3"],
            "[hypervisor.qemu]\na = 3\nb = 2",
            None,
        ),
        (
            "the later file wins",
            "[runtime]\na = 1",
            &["[runtime]\na = 2", "[runtime]\na = 3"],
            "[runtime]\na = 3",
            None,
        ),
        (
            "arrays are replaced, not joined",
            "[runtime]\na = [1, 2, 3]",
            &["[runtime]\na = [4]"],
            "[runtime]\na = [4]",
            None,
        ),
        (
            "arrays of tables are replaced, not joined",
            "[[hypervisor.qemu.x]]\nname = 'a'\n[[hypervisor.qemu.x]]\nname = 'b'",
            &["[[hypervisor.qemu.x]]\nname = 'c'"],
            "[[hypervisor.qemu.x]]\nname = 'c'",
            None,
        ),
        (
            "an empty string is a value",
            "[hypervisor.qemu]\nimage = '/i'",
            &["[hypervisor.qemu]\nimage = ''"],
            "[hypervisor.qemu]\nimage = ''",
            None,
        ),
        (
            "a table below a section is merged, or replaced",
            "[agent.kata.mem]\na = 1\nb = 2",
            &["[agent.kata.mem]\na = 3"],
            "[agent.kata.mem]\na = 3\nb = 2",
            Some("[agent.kata.mem]\na = 3"),
        ),
        (
            "a table elsewhere is merged",
            "[factory]\na = 1",
            &["[factory]\nb = 2"],
            "[factory]\na = 1\nb = 2",
            None,
        ),
        (
            "a new section",
            "[hypervisor.qemu]\na = 1",
            &["[hypervisor.clh]\nb = 1"],
            "[hypervisor.qemu]\na = 1\n[hypervisor.clh]\nb = 1",
            None,
        ),
        (
            "an empty section",
            "[hypervisor.qemu]\na = 1",
            &["[hypervisor.clh]"],
            "[hypervisor.qemu]\na = 1\n[hypervisor.clh]",
            Some("[hypervisor.qemu]\na = 1"),
        ),
        (
            "another type",
            "[runtime]\na = 1",
            &["[runtime.a]\nb = 'x'"],
            "[runtime.a]\nb = 'x'",
            None,
        ),
        (
            "back again",
            "[runtime.a]\nb = 1",
            &["[runtime]\na = true"],
            "[runtime]\na = true",
            None,
        ),
        (
            "keys of the file in another case",
            "[Runtime]\nDebug = true\n[hypervisor.Qemu]\nImage = '/a'",
            &[],
            "[Runtime]\nDebug = true\n[hypervisor.Qemu]\nImage = '/a'",
            Some("[runtime]\ndebug = true\n[hypervisor.Qemu]\nimage = '/a'"),
        ),
        (
            "quoted keys",
            "[hypervisor.\"qemu\"]\n'image' = '/a'",
            &["hypervisor.qemu.\"image\" = '/b'"],
            "[hypervisor.qemu]\nimage = '/b'",
            None,
        ),
        (
            "unknown tables stay",
            "[x.y.z]\na = 1",
            &["[x.y]\nb = 2"],
            "[x.y]\nb = 2\n[x.y.z]\na = 1",
            None,
        ),
    ];

    #[test]
    fn drop_ins_are_merged_as_each_runtime_merges_them() {
        for (name, base, drop_ins, rust, go) in RULES {
            for (runtime, wanted) in [(Runtime::Rust, *rust), (Runtime::Go, go.unwrap_or(rust))] {
                let wanted: Table = wanted.parse().unwrap();
                assert_eq!(
                    merged(runtime, base, drop_ins).table,
                    wanted,
                    "{name}, {runtime:?}"
                );
            }
        }
    }

    #[test]
    fn every_value_knows_the_file_it_comes_from() {
        let effective = merged(
            Runtime::Rust,
            "[a]\nx = 1\ny = 2\nz.q = 1",
            &["[a]\ny = 3", "[a]\nw = 1\nz = 5"],
        );
        let origin = |path: &[&str]| {
            effective
                .origin(path)
                .map(|p| p.to_string_lossy().into_owned())
        };
        assert_eq!(origin(&["a", "x"]).as_deref(), Some("base"));
        assert_eq!(origin(&["a", "y"]).as_deref(), Some("0"));
        assert_eq!(origin(&["a", "w"]).as_deref(), Some("1"));
        assert_eq!(origin(&["a", "z"]).as_deref(), Some("1"));
        assert_eq!(origin(&["a", "z", "q"]), None, "it is gone");
        assert_eq!(origin(&["a"]), None, "a table comes from several files");
    }

    #[test]
    fn a_drop_in_key_in_another_case_is_one_that_go_refuses() {
        let refused = |text: &str| refused_by_go(&text.parse().unwrap());
        assert_eq!(
            refused("[hypervisor.qemu]\nImage = ''").as_deref(),
            Some("hypervisor.qemu.Image")
        );
        assert_eq!(
            refused("[agent.kata]\nenable_Debug = true").as_deref(),
            Some("agent.kata.enable_Debug")
        );
        assert_eq!(
            refused("[runtime]\nDebug = true\n[hypervisor.Qemu]\nimage = ''"),
            None
        );
    }
}
