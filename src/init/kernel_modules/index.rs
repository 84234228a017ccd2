//! The indexes of depmod: files of modules, their dependencies and aliases, and the kernel's
//! built-in modules.
//!
//! The text forms are read, each once at its first use: modules.dep always, modules.alias and
//! modules.builtin only for a name that modules.dep lacks. kmod's `.bin` files hold the same for
//! faster searches among thousands of modules; a guest has a few dozen. Not read: modules.symbols
//! (no request is by symbol here) and the aliases of built-in modules.

use super::pattern::{matches, module_name, normalised};
use crate::machine::files;
use std::cell::OnceCell;
use std::path::{Path, PathBuf};

/// Limit of an index: a distribution's largest (modules.alias) has 2 MB.
const MAX_FILE: u64 = 64 << 20;

/// An index file that cannot be read, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    pub path: PathBuf,
    pub why: String,
    pub missing: bool,
}

/// A text that is read at its first use.
struct Lazy {
    path: PathBuf,
    text: OnceCell<Result<String, Unreadable>>,
}

impl Lazy {
    fn new(path: PathBuf) -> Self {
        Self {
            path,
            text: OnceCell::new(),
        }
    }

    fn get(&self) -> Result<&str, Unreadable> {
        match self.text.get_or_init(|| self.read()) {
            Ok(text) => Ok(text),
            Err(unreadable) => Err(unreadable.clone()),
        }
    }

    /// Like [`Lazy::get`], for an optional file.
    fn get_if_there(&self) -> Result<&str, Unreadable> {
        self.get().or_else(|unreadable| {
            if unreadable.missing {
                Ok("")
            } else {
                Err(unreadable)
            }
        })
    }

    fn read(&self) -> Result<String, Unreadable> {
        let unreadable = |why: String, missing| Unreadable {
            path: self.path.clone(),
            why,
            missing,
        };
        let bytes = files::read(&self.path, MAX_FILE + 1).map_err(|error| {
            let missing = error.kind() == std::io::ErrorKind::NotFound;
            unreadable(files::errno(&error).to_string(), missing)
        })?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(unreadable(format!("longer than {MAX_FILE} bytes"), false));
        }
        // A path that is not UTF-8 is not found later, and the error names it.
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }
}

/// A module's line in modules.dep. Paths are as written there, mostly relative to the folder of the
/// index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line<'a> {
    pub file: &'a str,
    /// All direct and indirect dependencies, in load order.
    pub dependencies: Vec<&'a str>,
}

/// The indexes of one kernel's modules.
pub struct Index {
    dep: Lazy,
    alias: Lazy,
    builtin: Lazy,
}

impl Index {
    pub fn new(directory: &Path) -> Self {
        let lazy = |name: &str| Lazy::new(directory.join(name));
        Self {
            dep: lazy("modules.dep"),
            alias: lazy("modules.alias"),
            builtin: lazy("modules.builtin"),
        }
    }

    /// Index from texts: modules.dep, modules.alias, modules.builtin.
    pub fn from_texts(dep: &str, alias: &str, builtin: &str) -> Self {
        let index = Self::new(Path::new(""));
        for (lazy, text) in [
            (&index.dep, dep),
            (&index.alias, alias),
            (&index.builtin, builtin),
        ] {
            let _first = lazy.text.set(Ok(text.into()));
        }
        index
    }

    /// Path of modules.dep, whether or not it exists.
    pub fn path(&self) -> &Path {
        &self.dep.path
    }

    /// Line of a module, by its kernel name.
    pub fn line(&self, module: &str) -> Result<Option<Line<'_>>, Unreadable> {
        let found = self
            .dep
            .get()?
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(file, _)| !module.is_empty() && module_name(file) == module);
        Ok(found.map(|(file, rest)| {
            let mut dependencies: Vec<&str> = rest.split_ascii_whitespace().collect();
            dependencies.reverse(); // written with what is needed last in front
            Line { file, dependencies }
        }))
    }

    /// Modules whose own aliases match this name, in the order of the file.
    pub fn aliased(&self, name: &str) -> Result<Vec<&str>, Unreadable> {
        let mut modules = Vec::new();
        for line in self.alias.get_if_there()?.lines() {
            let mut words = line.split_ascii_whitespace();
            if let (Some("alias"), Some(pattern), Some(module), None) =
                (words.next(), words.next(), words.next(), words.next())
                && normalised(pattern).is_some_and(|p| matches(&p, name))
                && !modules.contains(&module)
            {
                modules.push(module);
            }
        }
        Ok(modules)
    }

    pub fn is_builtin(&self, module: &str) -> Result<bool, Unreadable> {
        Ok(self
            .builtin
            .get_if_there()?
            .lines()
            .any(|line| module_name(line.trim()) == module && !module.is_empty()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_by_kernel_name_with_dependencies_in_order() {
        let index = Index::from_texts(
            include_str!("../../../tests/fixtures/modules/modules.dep"),
            "",
            "",
        );
        let line = index.line("nvidia_uvm").unwrap().unwrap();
        assert_eq!(line.file, "extra/nvidia-uvm.ko.zst");
        assert_eq!(
            line.dependencies,
            [
                "kernel/crypto/ecc.ko",
                "kernel/crypto/ecdh_generic.ko",
                "extra/nvidia.ko.xz"
            ]
        );
        assert_eq!(
            index.line("ecc").unwrap().unwrap().dependencies,
            Vec::<&str>::new()
        );
        assert_eq!(
            index.line("nvidia-uvm").unwrap(),
            None,
            "the kernel has no such name"
        );
        assert_eq!(index.line("").unwrap(), None);
    }

    #[test]
    fn aliases_are_patterns_and_builtins_are_names() {
        let alias = include_str!("../../../tests/fixtures/modules/modules.alias");
        let index = Index::from_texts("", alias, "kernel/drivers/pci/pci-stub.ko\n\n");
        assert_eq!(
            index
                .aliased("pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00")
                .unwrap(),
            ["nouveau", "nvidia"]
        );
        assert_eq!(index.aliased("platform:a_b").unwrap(), ["dashed"]);
        assert_eq!(index.aliased("x").unwrap(), Vec::<&str>::new());
        assert!(
            index.is_builtin("pci_stub").unwrap()
                && !index.is_builtin("").unwrap()
                && !index.is_builtin("nvidia").unwrap()
        );
    }

    #[test]
    fn junk_is_passed_over() {
        let junk = "no colon\n:\n: a b\n\u{0}\n/:x\nalias\nalias a\nalias [ nvidia\nalias * m \
            extra\n-- : --\n";
        let index = Index::from_texts(junk, junk, junk);
        assert_eq!(index.line("nvidia").unwrap(), None);
        assert_eq!(index.aliased("nvidia").unwrap(), Vec::<&str>::new());
        let long = format!("a.ko: {}\nb.ko: a.ko\n", "x/y.ko ".repeat(50_000));
        let index = Index::from_texts(&long, "", "");
        assert_eq!(index.line("a").unwrap().unwrap().dependencies.len(), 50_000);
        assert_eq!(index.line("b").unwrap().unwrap().dependencies, ["a.ko"]);
    }

    #[test]
    fn a_missing_index_is_reported_only_if_it_is_needed() {
        let index = Index::new(Path::new("/nonexistent/6.1"));
        assert_eq!(index.aliased("x"), Ok(vec![]));
        assert_eq!(index.is_builtin("x"), Ok(false));
        let missing = index.line("x").unwrap_err();
        assert_eq!(
            (missing.path.as_path(), missing.why.as_str()),
            (
                Path::new("/nonexistent/6.1/modules.dep"),
                "ENOENT: No such file or directory"
            )
        );
    }
}
