//! Programs of an image: whether the kernel can start them and the loader finds their libraries.
//! Programs are read, and never run.
//!
//! Libraries are searched where glibc's and musl's loaders search: the program's own search path,
//! ld.so.cache, and the directories that any distribution's loader has built in. A library that
//! only some loader would find counts as found, so every reported library is really missing.

use super::image_rules::*;
use crate::images::image::Content;
use crate::images::newc::Kind;
use crate::images::unpacked_root::{Id, ROOT, Tree};
use kata_gpu_init::formats::elf;
use kata_gpu_init::formats::elf::{Class, ReadAt};
use kata_gpu_init::formats::ld_so_cache;
use kata_gpu_wire::arch::Arch;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::rc::Rc;

const DIRECTORIES: &[&str] = &[
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
];
const CACHE: &str = "/etc/ld.so.cache";
/// Programs, and libraries that they open by name when they run.
const OPENED: [(&str, &str); 1] = [(
    kata_gpu_wire::nvml_messages::PROGRAM,
    kata_gpu_wire::nvml_messages::LIBRARY,
)];
/// Limit of libraries of one program; a browser has some hundred.
const MAX_LIBRARIES: usize = 2000;
/// Limit of programs of an image that are checked.
const MAX_PROGRAMS: usize = 20_000;
/// Limit of paths tried for libraries, for all programs of an image; a distribution's thousand
/// programs take some hundred thousand.
const MAX_LOOKUPS: usize = 2_000_000;
/// Mark that UPX writes after the headers, and the bytes to search for it.
const UPX: (&[u8], usize) = (b"UPX!", 512);

/// Headers of an executable file.
#[derive(Clone, Debug)]
pub struct Executable {
    pub machine: u16,
    class: Class,
    pub interpreter: Option<String>,
    needed: Vec<String>,
    search_path: Option<String>,
    pub packed: bool,
}

pub struct Programs<'a> {
    tree: &'a Tree,
    cache: HashMap<String, Vec<String>>,
    read: HashMap<Id, Option<Rc<Executable>>>,
    lookups: usize,
}

impl<'a> Programs<'a> {
    pub fn new(tree: &'a Tree) -> Self {
        let bytes = tree
            .find(CACHE)
            .and_then(|id| tree.content(id))
            .and_then(|c| c.bytes(ld_so_cache::MAX_SIZE as u64).ok());
        let mut cache: HashMap<String, Vec<String>> = HashMap::new();
        // Ignore an unreadable cache, as a loader does.
        for entry in bytes
            .and_then(|bytes| ld_so_cache::read(&bytes).ok())
            .unwrap_or_default()
            .entries
        {
            cache.entry(entry.name).or_default().push(entry.path);
        }
        Self {
            tree,
            cache,
            read: HashMap::new(),
            lookups: 0,
        }
    }

    /// A file's headers; None for a file that is no ELF file.
    pub fn executable(&mut self, id: Id) -> Option<Rc<Executable>> {
        if let Some(known) = self.read.get(&id) {
            return known.clone();
        }
        let read = self.tree.content(id).and_then(read).map(Rc::new);
        self.read.insert(id, read.clone());
        read
    }

    /// Reasons why a file cannot start, as findings; empty if it can.
    pub fn faults(&mut self, id: Id) -> Vec<Finding> {
        let path = self.tree.path(id);
        let Some(program) = self.executable(id) else {
            return Vec::new();
        };
        let mut findings = Vec::new();
        let mut own = vec![(id, program.clone())];
        if let Some(loader) = &program.interpreter {
            match self
                .tree
                .find(loader)
                .filter(|id| self.tree.kind(*id) == Kind::File)
            {
                None => findings.push(Finding::new(&LOADER_MISSING, &path).value(loader)),
                Some(loader_id) => {
                    if self.tree.meta(loader_id).mode & 0o111 == 0 {
                        findings.push(
                            Finding::new(&LOADER_MISSING, &path)
                                .value(format!("{loader} is not executable")),
                        );
                    }
                }
            }
        }
        let (mut seen, mut missing) = (HashSet::from([id]), BTreeSet::new());
        // A library that the image does not have may be on an extension disk.
        let opened = OPENED
            .iter()
            .filter(|(by, _)| self.tree.name(id) == by.as_bytes());
        for (_, name) in opened {
            if let Some(found) = self
                .library(name, id, &program, (id, &program))
                .filter(|found| seen.insert(*found))
            {
                own.extend(self.executable(found).map(|library| (found, library)));
            }
        }
        while let Some((of, library)) = own.pop() {
            for name in &library.needed {
                if self.lookups > MAX_LOOKUPS {
                    break;
                }
                match self.library(name, of, &library, (id, &program)) {
                    Some(found) if seen.len() < MAX_LIBRARIES => {
                        if seen.insert(found)
                            && let Some(executable) = self.executable(found)
                        {
                            own.push((found, executable));
                        }
                    }
                    Some(_) => {}
                    None => drop(missing.insert((name.clone(), of))),
                }
            }
        }
        for (name, of) in missing {
            let by = if of == id {
                String::new()
            } else {
                format!(
                    " (needed by {})",
                    crate::images::entry_text::escaped(&self.tree.path(of))
                )
            };
            findings.push(Finding::new(&LIBRARY_MISSING, &path).value(format!("{name}{by}")));
        }
        findings
    }

    /// Whether a program finds a library that it opens by name when it runs.
    pub fn opens(&mut self, id: Id, name: &str) -> bool {
        self.executable(id)
            .is_none_or(|program| self.library(name, id, &program, (id, &program)).is_some())
    }

    /// Library that a loader finds by this name.
    fn library(
        &mut self,
        name: &str,
        of: Id,
        library: &Executable,
        program: (Id, &Executable),
    ) -> Option<Id> {
        let fits = |programs: &mut Self, id: Id| {
            programs
                .executable(id)
                .filter(|found| (found.class, found.machine) == (library.class, library.machine))
                .map(|_| id)
        };
        if name.contains('/') {
            let id = self.tree.find(name)?;
            return fits(self, id);
        }
        // Search the library's own path, then the program's (DT_RPATH is inherited), each with
        // $ORIGIN as the directory of its file.
        let paths = [
            (of, &library.search_path),
            (program.0, &program.1.search_path),
        ];
        let mut candidates: Vec<Vec<u8>> = Vec::new();
        for (id, path) in paths {
            let path_of = self.tree.path(id);
            let end = path_of.iter().rposition(|b| *b == b'/').unwrap_or(0);
            let origin =
                String::from_utf8_lossy(path_of.get(..end).unwrap_or_default()).into_owned();
            for directory in path
                .iter()
                .flat_map(|path| path.split(':'))
                .filter(|d| !d.is_empty())
            {
                let directory = directory
                    .replace("${ORIGIN}", &origin)
                    .replace("$ORIGIN", &origin);
                candidates.push(format!("{directory}/{name}").into_bytes());
            }
        }
        candidates.extend(
            self.cache
                .get(name)
                .into_iter()
                .flatten()
                .map(|path| path.clone().into_bytes()),
        );
        candidates.extend(
            DIRECTORIES
                .iter()
                .map(|directory| format!("{directory}/{name}").into_bytes()),
        );
        self.lookups += candidates.len();
        candidates.into_iter().find_map(|path| {
            let id = self.tree.find(path)?;
            fits(self, id)
        })
    }

    /// Findings about all other programs: those that cannot start, among them those of another
    /// architecture than the init's, and those that unpack themselves.
    pub fn others(&mut self, except: &[Id], arch: Option<Arch>) -> Vec<Finding> {
        let mut findings = Vec::new();
        let executable =
            |id: &Id| self.tree.kind(*id) == Kind::File && self.tree.meta(*id).mode & 0o111 != 0;
        let all: Vec<Id> = self
            .tree
            .below(ROOT)
            .into_iter()
            .filter(executable)
            .take(MAX_PROGRAMS)
            .collect();
        for id in all {
            if self.lookups > MAX_LOOKUPS {
                let value = format!(
                    "this and the rest were not checked: libraries are searched at more than \
                     {MAX_LOOKUPS} paths"
                );
                findings.push(Finding::new(&PROGRAM_BROKEN, self.tree.path(id)).value(value));
                break;
            }
            let Some(program) = self.executable(id) else {
                continue;
            };
            if program.packed {
                findings.push(Finding::new(&PACKED, self.tree.path(id)));
            }
            let of = Arch::of_elf_machine(program.machine);
            if let (Some(arch), Some(of)) = (arch, of)
                && arch != of
                && !except.contains(&id)
                && !self.tree.name(id).windows(3).any(|w| w == b".so")
            {
                findings.push(
                    Finding::new(&PROGRAM_BROKEN, self.tree.path(id))
                        .value(format!("for {of}; the init is for {arch}")),
                );
                continue;
            }
            // Skip libraries, executable or not: a library's fault is reported for the programs
            // that use it.
            if program.interpreter.is_none() || except.contains(&id) {
                continue;
            }
            let faults: Vec<String> = self
                .faults(id)
                .into_iter()
                .map(|f| format!("{}: {}", f.rule.name, f.value.unwrap_or_default()))
                .collect();
            if !faults.is_empty() {
                findings.push(
                    Finding::new(&PROGRAM_BROKEN, self.tree.path(id)).value(faults.join("; ")),
                );
            }
        }
        findings
    }
}

fn read(content: &Content) -> Option<Executable> {
    let library = elf::library(content).ok()?;
    let mut head = vec![0; UPX.1];
    let length = content.read_at(&mut head, 0).ok()?;
    let packed = head.get(..length)?.windows(UPX.0.len()).any(|w| w == UPX.0);
    Some(Executable {
        machine: library.machine,
        class: library.class,
        interpreter: library.interpreter,
        needed: library.needed,
        search_path: library.search_path,
        packed,
    })
}

/// The interpreter of a script.
pub fn script(content: &Content) -> Option<String> {
    let mut head = vec![0; 256];
    let length = content.read_at(&mut head, 0).ok()?;
    let line = head
        .get(..length)?
        .strip_prefix(b"#!")?
        .split(|b| *b == b'\n')
        .next()?;
    let text = std::str::from_utf8(line).ok()?;
    text.split_ascii_whitespace().next().map(str::to_string)
}
