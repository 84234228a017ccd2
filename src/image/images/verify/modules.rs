//! Kernel modules of an image: presence of the driver's modules, the kernel that they were built
//! for, and the driver's version.

use super::driver_root::DriverRoot;
use super::image_rules::*;
use crate::images::entry_text::escaped;
use crate::images::image::Content;
use crate::images::kernel_release::of_vermagic;
use crate::images::newc::Kind;
use crate::images::unpacked_root::{Id, Tree};
use kata_gpu_init::formats::elf::ReadAt;
use kata_gpu_init::formats::modinfo;
use kata_gpu_init::kernel_modules::file::{Format, MAX_UNPACKED, unpack};
use kata_gpu_init::kernel_modules::index::Index;
use kata_gpu_init::kernel_modules::pattern::module_name;
use serde::Serialize;
use std::collections::HashSet;
use std::io::BufReader;

/// Longest index that is read.
const MAX_INDEX: u64 = 64 << 20;
/// Limit of lines of an index; a distribution's has some thousand.
const MAX_MODULES: usize = 30_000;
/// Limit of bytes of all compressed modules of an image, unpacked.
const MAX_ALL_UNPACKED: u64 = 4 << 30;
/// Modules that a guest with GPUs loads.
const DRIVER: [&str; 2] = ["nvidia", "nvidia_uvm"];
/// Directories of modules; a merged /usr makes one a link to the other.
const DIRECTORIES: [&str; 2] = ["/lib/modules", "/usr/lib/modules"];

/// The driver's module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Driver {
    #[serde(rename = "module")]
    pub path: String,
    pub version: Option<String>,
    /// Firmware files that the module lists, below the firmware directory.
    pub firmware: Vec<String>,
}

/// Result of the check.
#[derive(Debug, Default)]
pub struct Modules {
    pub releases: Vec<String>,
    pub count: usize,
    pub driver: Option<Driver>,
    pub findings: Vec<Finding>,
    unpacked: u64,
}

impl Modules {
    /// Whether the kernel has the driver built in.
    pub fn is_builtin(&self) -> bool {
        let is = |finding: &Finding| [&NO_DRIVER, &OTHER_KERNEL].contains(&finding.rule);
        !self.releases.is_empty() && !self.findings.iter().any(is)
    }
}

/// A module's information, or the reason why the file is no module. `unpacked` grows by the
/// unpacked bytes of a compressed module.
pub fn information(content: &Content, unpacked: &mut u64) -> Result<Vec<u8>, String> {
    let mut first = [0; 6];
    let read = content.read_at(&mut first, 0).map_err(|e| e.to_string())?;
    match Format::of(first.get(..read).unwrap_or_default()) {
        None => modinfo::section(content).map_err(|e| e.to_string()),
        Some(format) => {
            let most = MAX_UNPACKED.min(MAX_ALL_UNPACKED - *unpacked);
            let bytes = unpack(BufReader::new(content.reader()), format, most)
                .map_err(|e| format!("{format}: {e}"))?;
            *unpacked += bytes.len() as u64;
            modinfo::section(&bytes).map_err(|e| e.to_string())
        }
    }
}

/// Directories with an index, each with its release: of a release in several, the first, as the
/// init takes it.
fn directories(tree: &Tree, root: &DriverRoot) -> Vec<(String, Id)> {
    let mut all: Vec<(String, Id)> = Vec::new();
    let guests = DIRECTORIES.iter().map(ToString::to_string);
    let paths = root.own(&DIRECTORIES).chain(guests);
    for directory in paths.filter_map(|path| tree.find(path)) {
        for (name, _) in tree.list(directory) {
            let found = tree
                .find_in(directory, name)
                .filter(|id| tree.kind(*id) == Kind::Directory);
            let Some(id) = found.filter(|id| tree.find_in(*id, "modules.dep").is_some()) else {
                continue;
            };
            let release = String::from_utf8_lossy(name).into_owned();
            if !all.iter().any(|(known, _)| *known == release) {
                all.push((release, id));
            }
        }
    }
    all
}

/// An index of a release, or another text of its directory.
fn text(tree: &Tree, directory: Id, name: &str) -> Option<String> {
    let content = tree.content(tree.find_in(directory, name)?)?;
    let bytes = content.bytes(MAX_INDEX).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Checks the modules of one release, or of all.
pub fn check(tree: &Tree, root: &DriverRoot, release: Option<&str>) -> Modules {
    let mut modules = Modules::default();
    let all = directories(tree, root);
    modules.releases = all.iter().map(|(release, _)| release.clone()).collect();
    let wanted: Vec<&(String, Id)> = all
        .iter()
        .filter(|(r, _)| release.is_none_or(|release| release == r))
        .collect();
    match (all.is_empty(), wanted.is_empty(), release) {
        (true, ..) => modules
            .findings
            .push(Finding::new(&NO_MODULES, DIRECTORIES[0])),
        (false, true, Some(release)) => {
            let value = format!("{release}; there is {}", modules.releases.join(", "));
            modules
                .findings
                .push(Finding::new(&OTHER_KERNEL, DIRECTORIES[0]).value(value));
        }
        (false, false, None) if wanted.len() > 1 => {
            modules.findings.push(
                Finding::new(&SEVERAL_KERNELS, DIRECTORIES[0]).value(modules.releases.join(", ")),
            );
        }
        _ => {}
    }
    for (release, directory) in wanted {
        Release {
            tree,
            release,
            directory: *directory,
            out: &mut modules,
        }
        .check();
    }
    modules
}

/// Modules that a guest would not find.
#[derive(Debug, Default)]
pub struct Missing<'a> {
    pub modules: Vec<&'a str>,
    /// The image has the kernel's list of built-in modules, and that list lacks them too.
    pub is_certain: bool,
}

/// Looks for modules in one release, or in all.
pub fn missing<'a>(tree: &Tree, release: Option<&str>, wanted: &[&'a str]) -> Missing<'a> {
    // Modules of services are the kernel's own.
    let directories = directories(tree, &DriverRoot::default());
    let mut missing = Missing {
        modules: Vec::new(),
        is_certain: !directories.is_empty(),
    };
    for (_, directory) in directories
        .iter()
        .filter(|(r, _)| release.is_none_or(|release| release == r))
    {
        let text = |name: &str| text(tree, *directory, name);
        // A kernel's own list is never empty; an empty list is made to silence depmod.
        let builtin = text("modules.builtin").filter(|list| !list.trim().is_empty());
        missing.is_certain &= builtin.is_some();
        let index = Index::from_texts(
            &text("modules.dep").unwrap_or_default(),
            "",
            &builtin.unwrap_or_default(),
        );
        let is_there = |module: &str| {
            matches!(index.line(module), Ok(Some(_)))
                || index.is_builtin(module).unwrap_or_default()
        };
        missing
            .modules
            .extend(wanted.iter().copied().filter(|module| !is_there(module)));
    }
    missing.modules.sort_unstable();
    missing.modules.dedup();
    missing
}

struct Release<'a> {
    tree: &'a Tree,
    release: &'a str,
    directory: Id,
    out: &'a mut Modules,
}

impl Release<'_> {
    fn check(&mut self) {
        let text = |name: &str| text(self.tree, self.directory, name);
        let dep = text("modules.dep").unwrap_or_default();
        let index = Index::from_texts(&dep, "", &text("modules.builtin").unwrap_or_default());
        let mut needed = HashSet::new();
        for module in DRIVER {
            // A text that was read is no error.
            match index.line(module) {
                Ok(Some(line)) => {
                    needed.extend(line.dependencies.iter().copied().chain([line.file]))
                }
                Ok(None) | Err(_) if index.is_builtin(module).unwrap_or_default() => {}
                Ok(None) | Err(_) => {
                    let path =
                        [&self.tree.path(self.directory), b"/modules.dep".as_slice()].concat();
                    self.found(&NO_DRIVER, path, module);
                }
            }
        }
        let mut versions: Vec<(&str, Option<String>)> = Vec::new();
        let files = dep
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(file, _)| file.trim())
            .filter(|f| !f.is_empty());
        let listed: Vec<&str> = files.take(MAX_MODULES).collect();
        for file in listed.iter().copied() {
            if let Some(version) = self.module(file, needed.contains(file)) {
                versions.push((file, version));
            }
        }
        // Files that a dependency names and no line of the index has.
        let listed: HashSet<&str> = listed.into_iter().collect();
        let mut unlisted: Vec<&str> = needed
            .iter()
            .copied()
            .filter(|file| !listed.contains(file))
            .take(MAX_MODULES)
            .collect();
        unlisted.sort_unstable();
        for file in unlisted {
            self.module(file, true);
        }
        let version = |module: &str| {
            versions
                .iter()
                .find(|(file, _)| module_name(file) == module)
                .and_then(|(_, version)| version.clone())
        };
        if let (Some(nvidia), Some(uvm)) = (version(DRIVER[0]), version(DRIVER[1]))
            && nvidia != uvm
        {
            let value = format!("nvidia {nvidia}, nvidia-uvm {uvm}");
            self.found(&MODULE_VERSIONS, self.tree.path(self.directory), value);
        }
    }

    fn found(&mut self, rule: &'static Rule, path: impl AsRef<[u8]>, value: impl ToString) {
        self.out
            .findings
            .push(Finding::new(rule, path).value(value));
    }

    /// Checks a module's file; returns its version if the file exists.
    fn module(&mut self, file: &str, needed: bool) -> Option<Option<String>> {
        let base = self.tree.path(self.directory);
        let shown = if file.starts_with('/') {
            file.as_bytes().to_vec()
        } else {
            [base.as_slice(), b"/", file.as_bytes()].concat()
        };
        let found = self
            .tree
            .find_in(self.directory, file)
            .and_then(|id| self.tree.content(id));
        let Some(content) = found else {
            self.out.findings.push(Finding::new(
                if needed {
                    &MODULE_MISSING
                } else {
                    &OTHER_MODULE_MISSING
                },
                shown,
            ));
            return None;
        };
        self.out.count += 1;
        let section = match information(content, &mut self.out.unpacked) {
            Ok(section) => section,
            Err(why) => {
                self.found(&NOT_A_MODULE, shown, why);
                return None;
            }
        };
        let value = |key| modinfo::values(&section, key).next();
        let magic = value("vermagic").unwrap_or_default();
        if of_vermagic(&magic) != self.release {
            let magic = if magic.is_empty() { "none" } else { &magic };
            self.found(&VERMAGIC, &shown, magic);
        }
        let version = value("version");
        if module_name(file) == DRIVER[0] && self.out.driver.is_none() {
            let firmware = modinfo::values(&section, "firmware").collect();
            self.out.driver = Some(Driver {
                path: escaped(&shown),
                version: version.clone(),
                firmware,
            });
        }
        Some(version)
    }
}
