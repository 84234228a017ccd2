//! Modules of a name, and the load order of each with its dependencies: kmod's rules, without
//! loading anything.
//!
//! Dependencies come before the module, all in modules.dep's order; soft dependencies of each
//! module directly before and after it, with their own dependencies. A module that is needed twice
//! is loaded at its first place. A module that only a soft dependency needs may fail.

use super::index::{Index, Unreadable};
use super::pattern::{module_name, normalised};
use super::settings::Settings;
use std::collections::HashSet;

/// Limit of nested soft dependencies; a chain of modules has two or three.
const MAX_DEPTH: usize = 32;
/// Limit of looked-up soft dependencies of one plan; a chain of modules has some dozen.
const MAX_SOFT: usize = 4096;
/// Limit of notes.
const MAX_NOTES: usize = 64;

/// A module, and the alias that led to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Found {
    pub module: String,
    pub alias: Option<String>,
}

/// Meaning of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// Modules; several if the aliases of several match.
    Modules(Vec<Found>),
    /// Part of the kernel: there is nothing to load.
    Builtin,
    /// No module, and no part of the kernel.
    Unknown,
}

/// A file to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The kernel's name of the module.
    pub module: String,
    /// Path as in modules.dep.
    pub file: String,
    /// The alias that led to the module, which may have options of its own.
    pub alias: Option<String>,
    /// Whether the requested module fails without this one.
    pub required: bool,
}

/// Files in load order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub modules: Vec<Planned>,
    /// Reasons for soft dependencies left out.
    pub notes: Vec<String>,
}

/// Meaning of a name: an alias of modprobe.d before a module, a module before a module's own alias.
pub fn meaning(name: &str, index: &Index, settings: &Settings) -> Result<Meaning, Unreadable> {
    let Some(name) = normalised(name) else {
        return Ok(Meaning::Unknown);
    };
    let found = |module: &str, alias: Option<&str>| Found {
        module: module.into(),
        alias: alias.map(Into::into),
    };
    let aliased: Vec<Found> = settings
        .aliased(&name)
        .into_iter()
        .map(|(alias, module)| found(module, Some(alias)))
        .collect();
    if !aliased.is_empty() {
        return Ok(Meaning::Modules(aliased));
    }
    // No module has a colon in its name.
    if !name.contains(':') && index.line(&name)?.is_some() {
        return Ok(Meaning::Modules(vec![found(&name, None)]));
    }
    let aliased: Vec<Found> = index
        .aliased(&name)?
        .into_iter()
        .map(|module| found(module, Some(&name)))
        .collect();
    if !aliased.is_empty() {
        return Ok(Meaning::Modules(aliased));
    }
    Ok(if index.is_builtin(&name)? {
        Meaning::Builtin
    } else {
        Meaning::Unknown
    })
}

/// Plan for a module; None if modules.dep does not list it.
pub fn plan(found: &Found, index: &Index, settings: &Settings) -> Result<Option<Plan>, Unreadable> {
    let Some(line) = index.line(&found.module)? else {
        return Ok(None);
    };
    let required = line
        .dependencies
        .iter()
        .map(|file| module_name(file))
        .chain([found.module.clone()])
        .collect();
    let mut walk = Walk {
        index,
        settings,
        visited: HashSet::new(),
        listed: HashSet::new(),
        required,
        soft: 0,
        plan: Plan::default(),
    };
    walk.visit(found, 0)?;
    Ok(Some(walk.plan))
}

struct Walk<'a> {
    index: &'a Index,
    settings: &'a Settings,
    visited: HashSet<Found>,
    listed: HashSet<String>,
    required: HashSet<String>,
    /// Soft dependencies looked up so far.
    soft: usize,
    plan: Plan,
}

impl Walk<'_> {
    fn note(&mut self, text: String) {
        if self.plan.notes.len() < MAX_NOTES {
            self.plan.notes.push(text);
        }
    }

    /// Adds a module with its dependencies, unless visited already: cycles end here.
    fn visit(&mut self, found: &Found, depth: usize) -> Result<(), Unreadable> {
        if !self.visited.insert(found.clone()) {
            return Ok(());
        }
        if depth > MAX_DEPTH {
            self.note(format!(
                "{} is left out: more than {MAX_DEPTH} soft dependencies deep",
                found.module
            ));
            return Ok(());
        }
        let Some(line) = self.index.line(&found.module)? else {
            if !self.index.is_builtin(&found.module)? {
                self.note(format!(
                    "{} is left out: modules.dep does not list it",
                    found.module
                ));
            }
            // A module without a file still gets its soft dependencies.
            return self.place(found, None, depth);
        };
        for file in line.dependencies {
            self.place(
                &Found {
                    module: module_name(file),
                    alias: None,
                },
                Some(file),
                depth,
            )?;
        }
        self.place(found, Some(line.file), depth)
    }

    /// Adds a module, if it has a file, between its soft dependencies.
    fn place(&mut self, found: &Found, file: Option<&str>, depth: usize) -> Result<(), Unreadable> {
        let settings = self.settings;
        let softdep = settings.softdep(&found.module);
        for name in softdep.iter().flat_map(|s| &s.pre) {
            self.soft(name, &found.module, depth)?;
        }
        if let Some(file) = file
            && self.listed.insert(found.module.clone())
        {
            self.plan.modules.push(Planned {
                module: found.module.clone(),
                file: file.into(),
                alias: found.alias.clone(),
                required: self.required.contains(&found.module),
            });
        }
        for name in softdep.iter().flat_map(|s| &s.post) {
            self.soft(name, &found.module, depth)?;
        }
        Ok(())
    }

    fn soft(&mut self, name: &str, of: &str, depth: usize) -> Result<(), Unreadable> {
        self.soft += 1;
        if self.soft > MAX_SOFT {
            if self.soft == MAX_SOFT + 1 {
                self.plan.notes.push(format!(
                    "{name} is left out: more than {MAX_SOFT} soft dependencies"
                ));
            }
            return Ok(());
        }
        match meaning(name, self.index, self.settings)? {
            Meaning::Modules(all) => all
                .iter()
                .try_for_each(|found| self.visit(found, depth + 1)),
            Meaning::Builtin => self.visit(
                &Found {
                    module: name.replace('-', "_"),
                    alias: None,
                },
                depth + 1,
            ),
            Meaning::Unknown => {
                self.note(format!(
                    "{name}, a soft dependency of {of}, is left out: there is no such module"
                ));
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const DEP: &str = include_str!("../../../tests/fixtures/modules/modules.dep");
    const ALIAS: &str = include_str!("../../../tests/fixtures/modules/modules.alias");

    fn settings(text: &str) -> Settings {
        let mut settings = Settings::default();
        assert_eq!(settings.parse(Path::new("t.conf"), text), []);
        settings
    }

    /// Names in load order, with a `?` behind optional ones, and the notes.
    fn order(dep: &str, conf: &str, name: &str) -> (String, Vec<String>) {
        let (index, settings) = (
            Index::from_texts(dep, ALIAS, "kernel/lib/built-in.ko\n"),
            settings(conf),
        );
        let Meaning::Modules(found) = meaning(name, &index, &settings).unwrap() else {
            panic!("{name} is no module")
        };
        assert_eq!(found.len(), 1);
        let plan = plan(&found[0], &index, &settings).unwrap().unwrap();
        let names: Vec<String> = plan
            .modules
            .iter()
            .map(|m| format!("{}{}", m.module, if m.required { "" } else { "?" }))
            .collect();
        (names.join(" "), plan.notes)
    }

    #[test]
    fn dependencies_come_first_and_soft_ones_around() {
        assert_eq!(
            order(DEP, "", "nvidia-uvm").0,
            "ecc ecdh_generic nvidia nvidia_uvm"
        );
        let conf = "softdep nvidia pre: drm post: nvidia-drm\nsoftdep ecc pre: built-in";
        assert_eq!(
            order(DEP, conf, "nvidia_uvm").0,
            "ecc ecdh_generic drm? nvidia nvidia_drm? nvidia_uvm"
        );
        let (names, notes) = order(DEP, "softdep nv* pre: nosuch crypto-ecdh", "nvidia");
        assert_eq!(names, "ecc ecdh_generic nvidia");
        assert_eq!(
            notes,
            ["nosuch, a soft dependency of nvidia, is left out: there is no such module"]
        );
    }

    #[test]
    fn cycles_end() {
        let dep = "a.ko: b.ko a.ko\nb.ko: a.ko b.ko\nc.ko:\n";
        assert_eq!(order(dep, "", "a").0, "a b");
        assert_eq!(
            order(
                dep,
                "softdep c pre: c post: c\nsoftdep a pre: b c post: a",
                "c"
            )
            .0,
            "c"
        );
        assert_eq!(
            order(
                dep,
                "softdep a pre: c\nsoftdep b pre: c\nsoftdep c pre: a post: b",
                "c"
            )
            .0,
            "a? b? c"
        );
    }

    #[test]
    fn a_long_chain_of_soft_dependencies_is_cut() {
        let dep: String = (0..1000).map(|n| format!("m{n}.ko:\n")).collect();
        let conf: String = (0..999)
            .map(|n| format!("softdep m{n} pre: m{}\n", n + 1))
            .collect();
        let (names, notes) = order(&dep, &conf, "m0");
        assert_eq!(names.split(' ').count(), MAX_DEPTH + 1);
        assert_eq!(
            notes,
            ["m33 is left out: more than 32 soft dependencies deep"]
        );
    }

    #[test]
    fn soft_dependencies_without_end_take_bounded_time_and_memory() {
        let dep = format!("a.ko:{}\nb.ko:\n", " b.ko".repeat(1000));
        let names = |of: &str| (0..1000).map(|n| format!(" {of}{n}")).collect::<String>();
        let (order, notes) = order(&dep, &format!("softdep * pre:{}", names("no")), "a");
        assert_eq!(order, "b a");
        assert_eq!(notes.len(), MAX_NOTES + 1);
        let last = notes.last().unwrap();
        assert!(last.contains("more than 4096 soft dependencies"), "{last}");
    }

    #[test]
    fn names_have_kmods_meaning() {
        let index = Index::from_texts(DEP, ALIAS, "kernel/lib/built-in.ko\n");
        let settings = settings("alias ecc off\nalias gpu nvidia\nalias gpu* drm");
        let all = |name: &str| match meaning(name, &index, &settings).unwrap() {
            Meaning::Modules(found) => found
                .iter()
                .map(|f| format!("{}={}", f.module, f.alias.as_deref().unwrap_or("-")))
                .collect(),
            Meaning::Builtin => "builtin".to_string(),
            Meaning::Unknown => "nothing".to_string(),
        };
        assert_eq!(
            all("ecc"),
            "off=ecc",
            "an alias of modprobe.d comes before a module"
        );
        assert_eq!(all("gpu"), "nvidia=gpudrm=gpu*");
        assert_eq!(all("nvidia-uvm"), "nvidia_uvm=-");
        assert_eq!(all("char-major-195-255"), "nvidia=char_major_195_255");
        assert_eq!(
            all("pci:v000010DEd00002330sv0sd0bc03sc02i00"),
            "nouveau=pci:v000010DEd00002330sv0sd0bc03sc02i00\
             nvidia=pci:v000010DEd00002330sv0sd0bc03sc02i00"
        );
        assert_eq!(
            (all("built_in"), all("nosuch"), all("a]b"), all("")),
            (
                "builtin".into(),
                "nothing".into(),
                "nothing".into(),
                "nothing".into()
            )
        );
    }
}
