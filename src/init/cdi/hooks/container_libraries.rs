//! Libraries of a container, as `ldconfig` counts them: for each directory of the loader and each
//! `glibc-hwcaps` subdirectory, one file for each SONAME. Reads only; returns entries for the
//! cache, and the SONAME links that the driver's folders lack.
//!
//! Unlike `ldconfig`, links in the image's own directories stay as they are: for a missing link the
//! cache leads to the file itself.

use super::arguments::Link;
use super::container_root::{ContainerRoot, Directory, FileId, Name};
use super::edits::Edit;
use crate::formats::elf;
use crate::formats::ld_so_cache::{Entry, Hwcap, order};
use kata_gpu_wire::arch::Arch;
use nix::dir::Type;
use nix::fcntl::readlinkat;
use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

const HWCAPS: &str = "glibc-hwcaps";
/// Limit of files examined, over all directories.
const MAX_FILES: usize = 65_536;
/// Time limit since the hook's start: the agent kills a hook after 10 s.
const DEADLINE: Duration = Duration::from_secs(8);
/// Limit of steps from a planned link over planned links to a file.
const MAX_LINKS: usize = 8;
const MAX_NOTES: usize = 16;

/// Input of a search.
pub struct Search<'a> {
    pub root: &'a ContainerRoot,
    pub arch: Arch,
    /// Directories in the loader's order.
    pub directories: &'a [String],
    /// Directories that the driver's libraries were mounted into; they get links.
    pub folders: &'a [String],
    /// Planned links.
    pub links: &'a [Link],
    /// The driver's version, if known: of two libraries with one SONAME, the library of this
    /// version wins in the driver's folders.
    pub driver: Option<&'a str>,
}

/// Result of a search.
#[derive(Debug, Default)]
pub struct Found {
    pub entries: Vec<Entry>,
    /// SONAME links that the driver's folders lack.
    pub links: Vec<Edit>,
    pub notes: Vec<String>,
}

/// ELF facts of a library.
#[derive(Clone, Debug)]
struct Library {
    soname: Option<String>,
    flags: u32,
    isa_level: u32,
}

/// A library under one of its names in a directory.
#[derive(Clone, Debug)]
struct Candidate {
    name: String,
    id: FileId,
    library: Library,
    is_link: bool,
}

/// A directory, and the facts known about its names.
struct Listing<'a> {
    path: &'a str,
    directory: &'a Directory,
    /// Name of the `glibc-hwcaps` subdirectory, if the directory is one.
    hwcap: Option<&'a str>,
    /// Sorted.
    names: Vec<Name>,
    files: HashMap<String, Looked>,
    /// Targets of the links; None if the name is no link any more.
    targets: HashMap<String, Option<PathBuf>>,
}

/// Result of opening a name that was listed as a regular file.
#[derive(Clone, Copy, Debug)]
enum Looked {
    /// The file is in [`Searcher::seen`].
    Regular(FileId),
    /// Another kind of file by now, or absent.
    Other,
    /// The file cannot be opened; a note gives the reason.
    Unreadable,
}

impl Listing<'_> {
    /// File kind of a name in the listing; the outer None: no such name.
    fn kind(&self, name: &str) -> Option<Option<Type>> {
        let at = self
            .names
            .binary_search_by(|n| n.name.as_str().cmp(name))
            .ok()?;
        self.names.get(at).map(|n| n.kind)
    }

    fn full(&self, name: &str) -> PathBuf {
        Path::new(self.path).join(name)
    }

    /// Target of the link of this name.
    fn target(&mut self, name: &str) -> Option<PathBuf> {
        let directory = self.directory;
        let read = |name: &String| readlinkat(directory, name.as_str()).ok().map(PathBuf::from);
        self.targets
            .entry(name.to_string())
            .or_insert_with_key(read)
            .clone()
    }
}

/// Planned links of one directory: names and targets, in order. The first of two with one name
/// counts.
#[derive(Clone, Debug, Default)]
struct Planned {
    names: Vec<String>,
    targets: HashMap<String, PathBuf>,
}

impl Planned {
    fn add(&mut self, name: &str, target: &Path) {
        if !self.targets.contains_key(name) {
            self.names.push(name.to_string());
            self.targets.insert(name.to_string(), target.to_path_buf());
        }
    }

    fn has(&self, name: &str) -> bool {
        self.targets.contains_key(name)
    }
}

struct Searcher<'a> {
    what: &'a Search<'a>,
    files: usize,
    /// Files by identity: a file with several names is read once.
    seen: HashMap<FileId, Option<Library>>,
    folders: HashSet<FileId>,
    /// Planned links by their directory.
    planned: HashMap<FileId, Planned>,
    found: Found,
    /// Never used. While a buffer of this size is allocated, musl keeps the memory for the buffers
    /// that links are read into, instead of mapping it anew.
    _keeps_memory: Vec<u8>,
}

/// Size of the buffer for the target of a link.
const LINK_BUFFER: usize = 4096;

/// Searches all directories. Errors: too many files, or too slow a file system, for the hook's time
/// limit.
pub fn search(what: &Search) -> io::Result<Found> {
    let id = |path: &Path| what.root.directory(path).ok().flatten().map(|d| d.id);
    let mut planned: HashMap<FileId, Planned> = HashMap::new();
    for link in what.links {
        let name = link.path.file_name().and_then(|n| n.to_str());
        if let (Some(name), Some(id)) = (name, link.path.parent().and_then(id)) {
            planned.entry(id).or_default().add(name, &link.target);
        }
    }
    let folders = what
        .folders
        .iter()
        .filter_map(|f| id(Path::new(f)))
        .collect();
    let mut searcher = Searcher {
        what,
        files: 0,
        seen: HashMap::new(),
        folders,
        planned,
        found: Found::default(),
        _keeps_memory: std::hint::black_box(Vec::with_capacity(LINK_BUFFER)),
    };
    let mut done = HashSet::new();
    for path in what.directories {
        let directory = match what.root.directory(Path::new(path)) {
            Ok(Some(directory)) if done.insert(directory.id) => directory,
            Ok(_) => continue,
            Err(e) => {
                searcher.note(format!("leave out: {e}"));
                continue;
            }
        };
        if !searcher.directory(path, &directory, None)? {
            continue;
        }
        let hwcaps = format!("{path}/{HWCAPS}");
        for name in searcher.subdirectories(&hwcaps) {
            let path = format!("{hwcaps}/{name}");
            if let Ok(Some(directory)) = what.root.directory(Path::new(&path))
                && done.insert(directory.id)
            {
                searcher.directory(&path, &directory, Some(&name))?;
            }
        }
    }
    Ok(searcher.found)
}

/// Whether `ldconfig` takes a name for a library.
fn is_library(name: &str) -> bool {
    ((name.starts_with("lib") || name.starts_with("ld-")) && name.contains(".so"))
        || name.starts_with("ld.so.")
        || name.starts_with("ld64.so.")
}

/// Whether a name is a temporary file of a package manager.
fn is_unfinished(name: &str) -> bool {
    let prelink = name
        .len()
        .checked_sub(17)
        .and_then(|at| name.get(at..))
        .is_some_and(|end| end.starts_with(".#prelink#."));
    prelink
        || name.ends_with(".#prelink#")
        || name.contains(';')
        || name.ends_with(".dpkg-new")
        || name.ends_with(".dpkg-tmp")
}

/// Whether a SONAME is a valid file name.
fn is_name(soname: &str) -> bool {
    !matches!(soname, "" | "." | "..")
        && soname.len() <= 255
        && !soname.contains(|c: char| c == '/' || c.is_control())
}

impl Searcher<'_> {
    fn note(&mut self, text: String) {
        if self.found.notes.len() < MAX_NOTES {
            self.found.notes.push(text);
        }
    }

    /// Names of `glibc-hwcaps` subdirectories; the loader takes no name with a colon.
    fn subdirectories(&self, hwcaps: &str) -> Vec<String> {
        let names = self
            .what
            .root
            .directory(Path::new(hwcaps))
            .ok()
            .flatten()
            .and_then(|d| d.names().ok())
            .unwrap_or_default();
        let usable = names.into_iter().filter(|n| {
            !n.name.starts_with('.') && !n.name.contains(':') && n.kind != Some(Type::File)
        });
        usable.map(|n| n.name).take(64).collect()
    }

    fn in_time(&self) -> io::Result<()> {
        match self.what.root.elapsed() {
            passed if passed <= DEADLINE => Ok(()),
            _ => Err(io::Error::other(format!(
                "{} files took longer than {} s; a hook has 10",
                self.files,
                DEADLINE.as_secs()
            ))),
        }
    }

    /// Reads one directory; `hwcap` is its name if it is a `glibc-hwcaps` subdirectory. Returns
    /// whether the directory may have such subdirectories.
    fn directory(
        &mut self,
        path: &str,
        directory: &Directory,
        hwcap: Option<&str>,
    ) -> io::Result<bool> {
        let at = |e: io::Error| io::Error::other(format!("look for libraries in {path}: {e}"));
        // A directory with many names but no library costs time, too.
        self.in_time().map_err(at)?;
        let names = match directory.names() {
            Ok(names) => names,
            Err(e) => {
                self.note(format!("leave out {path}: {e}"));
                return Ok(true);
            }
        };
        // Allocate at full size: musl maps and unmaps memory each time that a table of some hundred
        // names grows.
        let (files, targets) = (
            HashMap::with_capacity(names.len()),
            HashMap::with_capacity(names.len()),
        );
        let mut listing = Listing {
            path,
            directory,
            hwcap,
            names,
            files,
            targets,
        };
        let mut planned = self.planned.get(&directory.id).cloned().unwrap_or_default();
        let (mut entries, links) = self.look(&mut listing, &planned).map_err(at)?;
        if !links.is_empty() {
            // Dangling links may lead to these new ones.
            for link in &links {
                if let Edit::Link { path, target } = link
                    && let Some(name) = path.file_name().and_then(|n| n.to_str())
                {
                    planned.add(name, target);
                }
            }
            entries = self.look(&mut listing, &planned).map_err(at)?.0;
            self.found.links.extend(links);
        }
        self.found.entries.extend(entries);
        Ok(!matches!(
            listing.kind(HWCAPS),
            None | Some(Some(Type::File))
        ))
    }

    /// Entries of a directory with the planned links in it, and the links that the directory lacks.
    fn look(
        &mut self,
        listing: &mut Listing,
        planned: &Planned,
    ) -> io::Result<(Vec<Entry>, Vec<Edit>)> {
        let (path, hwcap) = (listing.path, listing.hwcap);
        let count = listing.names.len() + planned.names.len();
        let mut names: Vec<Name> = Vec::with_capacity(count);
        names.extend(
            listing
                .names
                .iter()
                .filter(|n| !planned.has(&n.name))
                .cloned(),
        );
        names.extend(planned.names.iter().map(|n| Name {
            name: n.clone(),
            kind: Some(Type::Symlink),
        }));
        // File of each name that counts as a library or is a planned link.
        let mut leads_to: HashMap<&str, FileId> = HashMap::with_capacity(count);
        let mut chosen: HashMap<String, Candidate> = HashMap::with_capacity(count);
        let own = |name: &str| {
            self.what
                .driver
                .is_some_and(|v| name.strip_suffix(v).is_some_and(|n| n.ends_with(".so.")))
        };
        for Name { name, kind } in &names {
            let counts = is_library(name) || (hwcap.is_some() && *kind != Some(Type::File));
            if !counts
                || is_unfinished(name)
                || !matches!(kind, None | Some(Type::File | Type::Symlink))
            {
                continue;
            }
            let Some(candidate) = self.candidate(listing, name, *kind, planned)? else {
                continue;
            };
            leads_to.insert(name, candidate.id);
            if candidate.library.flags == NOT_A_LIBRARY {
                continue;
            }
            let (soname, candidate) = named(candidate);
            if !is_name(&soname) {
                self.note(format!(
                    "leave out {path}/{name}: its SONAME {:?} is no file name",
                    soname.chars().take(64).collect::<String>()
                ));
                continue;
            }
            match chosen.get(&soname) {
                Some(there) if !better(&candidate, there, self.what.arch, own) => {}
                _ => _ = chosen.insert(soname, candidate),
            }
        }
        let mut chosen: Vec<(String, Candidate)> = chosen.into_iter().collect();
        chosen.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        let (mut entries, mut links) = (Vec::with_capacity(chosen.len()), Vec::new());
        let links_wanted = hwcap.is_none() && self.folders.contains(&listing.directory.id);
        for (soname, candidate) in chosen {
            let full = |name: &str| format!("{path}/{name}");
            let file = if let Some(subdirectory) = hwcap {
                let hwcap = Hwcap::Subdirectory {
                    name: subdirectory.to_string(),
                    isa_level: candidate.library.isa_level,
                };
                let entry = Entry {
                    path: full(&candidate.name),
                    name: soname,
                    flags: candidate.library.flags,
                    hwcap,
                };
                entries.push(entry);
                continue;
            } else if soname == candidate.name {
                soname.clone()
            } else {
                let is_planned = planned.has(&soname);
                let kind = if is_planned {
                    Some(Some(Type::Symlink))
                } else {
                    listing.kind(&soname)
                };
                let there = leads_to.get(soname.as_str()).copied();
                // Skip the lookup if the name is known to be absent.
                let there = there.or_else(|| {
                    kind.and_then(|_| self.what.root.file_id(Path::new(&full(&soname))))
                });
                let can_be_made = matches!(kind, None | Some(Some(Type::Symlink)));
                let another = there.is_some_and(|id| id != candidate.id) && own(&candidate.name);
                if links_wanted
                    && !candidate.is_link
                    && !is_planned
                    && can_be_made
                    && (there.is_none() || another)
                {
                    links.push(Edit::Link {
                        path: full(&soname).into(),
                        target: PathBuf::from(&candidate.name),
                    });
                    soname.clone()
                } else if there.is_some() {
                    soname.clone()
                } else {
                    candidate.name.clone()
                }
            };
            entries.push(Entry {
                path: full(&file),
                name: soname,
                flags: candidate.library.flags,
                hwcap: Hwcap::Any,
            });
        }
        Ok((entries, links))
    }

    /// Library of a name. None if the name leads to no regular file.
    fn candidate(
        &mut self,
        listing: &mut Listing,
        name: &str,
        kind: Option<Type>,
        planned: &Planned,
    ) -> io::Result<Option<Candidate>> {
        self.files += 1;
        if self.files > MAX_FILES {
            return Err(io::Error::other(format!(
                "more than {MAX_FILES} files with names of libraries in all"
            )));
        }
        self.in_time()?;
        let mut is_link = false;
        let id = match self.file(listing, name, kind, planned) {
            Looked::Regular(id) => Some(id),
            Looked::Other => {
                is_link = true;
                self.follow(listing, name, planned)
            }
            Looked::Unreadable => None,
        };
        let known = id.and_then(|id| Some((id, self.seen.get(&id)?.clone())));
        let not_one = || Library {
            soname: None,
            flags: NOT_A_LIBRARY,
            isa_level: 0,
        };
        Ok(known.map(|(id, library)| Candidate {
            name: name.to_string(),
            id,
            library: library.unwrap_or_else(not_one),
            is_link,
        }))
    }

    /// Regular file of a name that is neither a link nor a planned link. Read once.
    fn file(
        &mut self,
        listing: &mut Listing,
        name: &str,
        kind: Option<Type>,
        planned: &Planned,
    ) -> Looked {
        if planned.has(name) || kind == Some(Type::Symlink) {
            return Looked::Other;
        }
        if let Some(looked) = listing.files.get(name) {
            return *looked;
        }
        let looked = match self.what.root.file_in(listing.directory, name, kind) {
            Ok(Some((file, id))) => {
                self.look_into(id, || Ok(Some(file)));
                Looked::Regular(id)
            }
            Ok(None) => Looked::Other,
            Err(e) => {
                self.note(format!("leave out {}/{name}: {e}", listing.path));
                Looked::Unreadable
            }
        };
        listing.files.insert(name.to_string(), looked);
        looked
    }

    /// File that a link leads to, over planned links, too.
    ///
    /// Links within the directory, as most are, are followed by name; the kernel resolves all
    /// others from the root.
    fn follow(&mut self, listing: &mut Listing, name: &str, planned: &Planned) -> Option<FileId> {
        let mut name = name.to_string();
        for _ in 0..MAX_LINKS {
            let target = match (planned.targets.get(&name), listing.kind(&name)) {
                (Some(target), _) => target.clone(),
                (None, None) => return None,
                (None, Some(Some(Type::Symlink))) => listing.target(&name)?,
                (None, Some(kind)) => match self.file(listing, &name, kind, planned) {
                    Looked::Regular(id) => return Some(id),
                    // The file system reports no kind, or the file has changed.
                    Looked::Other | Looked::Unreadable => {
                        match self.resolve(&listing.full(&name)) {
                            None => listing.target(&name)?,
                            found => return found,
                        }
                    }
                },
            };
            match target.to_str() {
                Some(text) if !text.contains('/') => name = text.to_string(),
                _ => return self.resolve(&Path::new(listing.path).join(target)),
            }
        }
        self.resolve(&listing.full(&name))
    }

    /// The regular file at a path, links followed.
    fn resolve(&mut self, path: &Path) -> Option<FileId> {
        let root = self.what.root;
        let id = root.file_id(path)?;
        self.look_into(id, || root.file(path));
        Some(id)
    }

    fn look_into(&mut self, id: FileId, open: impl FnOnce() -> io::Result<Option<std::fs::File>>) {
        let arch = self.what.arch;
        self.seen.entry(id).or_insert_with(|| {
            // A file that is no ELF file of this machine (a linker script, a text) is not for the
            // loader and no fault.
            let library = open()
                .ok()
                .flatten()
                .and_then(|file| elf::identity(&file).ok());
            let library = library.filter(|l| l.kind == elf::ET_DYN && l.loadable)?;
            Some(Library {
                flags: crate::formats::ld_so_cache::flags(arch, &library)?,
                soname: library.soname,
                isa_level: library.isa_level,
            })
        });
    }
}

/// Flags of a file that is no library.
const NOT_A_LIBRARY: u32 = 0;

/// Name of a candidate in the cache. A link keeps its own name if that is the SONAME or the `.so`
/// beside it, which is passed to compilers; any other link counts as the file.
fn named(mut candidate: Candidate) -> (String, Candidate) {
    let soname = candidate
        .library
        .soname
        .clone()
        .unwrap_or_else(|| candidate.name.clone());
    if candidate.is_link {
        let name = &candidate.name;
        candidate.is_link =
            *name == soname || (name.ends_with(".so") && soname.starts_with(name.as_str()));
        if candidate.is_link {
            return (name.clone(), candidate);
        }
    }
    (soname, candidate)
}

/// Choice of two with one SONAME: the driver's own, else a file before a link, else the newer one.
fn better(a: &Candidate, b: &Candidate, arch: Arch, own: impl Fn(&str) -> bool) -> bool {
    let rank = |c: &Candidate| (own(&c.name) && !c.is_link, !c.is_link);
    rank(a)
        .cmp(&rank(b))
        .then_with(|| order(&a.name, &b.name, arch))
        .is_gt()
}
