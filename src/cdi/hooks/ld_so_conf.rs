//! Where a container's loader looks for libraries: `/etc/ld.so.conf`, what it includes, and the
//! directories that are built into `ldconfig`.
//!
//! Read as `ldconfig` reads them, with what is about to be written there already counted in.
//! However many files and lines an image has, and whatever they include, the end is reached; what
//! goes beyond the limits is left out, and said.

use super::container_root::ContainerRoot;
use super::edits::Edit;
use crate::cdi::ld_so_cache::Machine;
use crate::kernel_modules::pattern;
use nix::sys::stat::SFlag;
use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

pub const CONF: &str = "/etc/ld.so.conf";
pub const CONF_DIRECTORY: &str = "/etc/ld.so.conf.d";
/// What distributions have in [`CONF`], and what an image without that file gets.
pub const INCLUDE_ALL: &str = "include /etc/ld.so.conf.d/*.conf\n";

/// Most files that are read, over all includes.
const MAX_FILES: usize = 1024;
/// Most of each, in bytes.
const MAX_FILE: u64 = 1024 * 1024;
/// Most of all of them, in bytes: a distribution's have some hundred.
const MAX_BYTES: u64 = 4 * MAX_FILE;
/// Longest line: a path of the kernel's longest kind.
const MAX_LINE: usize = 4096;
/// How long reading them may take: the whole hook has 10 s.
const DEADLINE: Duration = Duration::from_secs(2);
/// How deep includes go.
const MAX_DEPTH: usize = 16;
/// Most different directories.
const MAX_DIRECTORIES: usize = 4096;
/// How much work patterns may make, in comparisons of a byte: a tenth of a second. Opening a
/// directory and reading a name count as so many.
const MAX_WORK: usize = 50_000_000;
const WORK_OF_DIRECTORY: usize = 2000;
const WORK_OF_NAME: usize = 200;
const WORK_OF_INCLUDE: usize = 2000;
/// Longest part of a pattern: the longest name.
const MAX_PATTERN: usize = 255;
/// Most notes.
const MAX_NOTES: usize = 16;

/// What the configuration says.
#[derive(Debug, Default)]
pub struct Conf {
    /// In the order in which they are searched, each once, as they are written.
    pub directories: Vec<String>,
    /// What was left out, and why.
    pub notes: Vec<String>,
}

/// Reads [`CONF`] with these edits made.
pub fn read(root: &ContainerRoot, planned: &[Edit]) -> Conf {
    let mut reader = Reader {
        root,
        planned,
        files: HashSet::new(),
        known: HashSet::new(),
        bytes: 0,
        work: 0,
        start: Instant::now(),
        conf: Conf::default(),
    };
    reader.file(Path::new(CONF), 0);
    reader.conf
}

/// The directories that are built into the loader of this container, in the order in which
/// `ldconfig` adds them.
pub fn built_in(root: &ContainerRoot, machine: Machine) -> Vec<String> {
    let triplet = match machine {
        Machine::X86_64 => "x86_64-linux-gnu",
        Machine::Aarch64 => "aarch64-linux-gnu",
    };
    let is_file = |path: &str| root.kind(Path::new(path)) == Some(SFlag::S_IFREG);
    // An image without a package manager may have Debian's libc and nothing else of it.
    if is_file("/etc/debian_version") || is_file(&format!("/lib/{triplet}/libc.so.6")) || is_file(&format!("/usr/lib/{triplet}/libc.so.6"))
    {
        return [format!("/lib/{triplet}"), format!("/usr/lib/{triplet}"), "/lib".into(), "/usr/lib".into()].to_vec();
    }
    let widths: &[&str] = match machine {
        Machine::X86_64 => &["", "64", "x32"],
        Machine::Aarch64 => &["", "64"],
    };
    ["/lib", "/usr/lib"].iter().flat_map(|lib| widths.iter().map(move |width| format!("{lib}{width}"))).collect()
}

struct Reader<'a> {
    root: &'a ContainerRoot,
    planned: &'a [Edit],
    /// What was read: reading it again would add no directory.
    files: HashSet<PathBuf>,
    known: HashSet<String>,
    /// Read so far.
    bytes: u64,
    work: usize,
    start: Instant,
    conf: Conf,
}

impl Reader<'_> {
    fn note(&mut self, text: String) {
        if self.conf.notes.len() < MAX_NOTES {
            self.conf.notes.push(text);
        }
    }

    /// Reads one file. One that cannot be read is no reason to leave the others out.
    fn file(&mut self, path: &Path, depth: usize) {
        if depth > MAX_DEPTH || self.files.len() >= MAX_FILES {
            return self.note(format!("leave out {}: more than {MAX_FILES} files, or deeper than {MAX_DEPTH} includes", path.display()));
        }
        if !self.files.insert(path.to_path_buf()) {
            return;
        }
        if self.bytes >= MAX_BYTES || self.is_late() {
            return self.note(format!("leave out {}: {MAX_BYTES} bytes or {} s are over", path.display(), DEADLINE.as_secs()));
        }
        let content = match self.planned.iter().find(|e| e.path() == path) {
            Some(Edit::File { content, .. }) => Ok(Some(content.clone())),
            Some(Edit::Absent { .. }) => Ok(None),
            Some(Edit::Link { .. }) | None => self.root.read(path, MAX_FILE).map_err(|e| format!("leave out: {e}")),
        };
        match content {
            Ok(None) => {}
            Ok(Some(bytes)) => {
                self.bytes += bytes.len() as u64;
                for line in bytes.split(|b| *b == b'\n') {
                    match std::str::from_utf8(line) {
                        Ok(_) if line.len() > MAX_LINE => {
                            self.note(format!("leave out a line of {}: it has more than {MAX_LINE} bytes", path.display()));
                        }
                        Ok(line) => self.line(path, line, depth),
                        Err(_) => {}
                    }
                }
            }
            Err(note) => self.note(note),
        }
    }

    fn line(&mut self, from: &Path, line: &str, depth: usize) {
        let line = line.split('#').next().unwrap_or_default().trim();
        let word = |name: &str| line.get(..name.len()).filter(|w| w.eq_ignore_ascii_case(name)).and_then(|_| line.get(name.len()..));
        let argument = |name: &str| word(name).filter(|rest| rest.starts_with([' ', '\t']));
        if let Some(patterns) = argument("include").filter(|_| line.starts_with("include")) {
            for pattern in patterns.split_ascii_whitespace() {
                self.work += WORK_OF_INCLUDE;
                if self.work > MAX_WORK || self.is_late() {
                    return self.note(format!("leave out what {} includes: it takes too long", from.display()));
                }
                self.include(from, pattern, depth);
            }
        } else if argument("hwcap").is_none() {
            self.directory(line);
        }
    }

    fn is_late(&self) -> bool {
        self.start.elapsed() > DEADLINE
    }

    /// Relative ones would be searched from wherever a program is started.
    fn directory(&mut self, line: &str) {
        let directory = line.trim_end_matches('/');
        if !directory.starts_with('/') || directory.contains('\0') || self.known.contains(directory) {
            return;
        }
        if self.known.len() >= MAX_DIRECTORIES {
            return self.note(format!("leave out directory {}: {MAX_DIRECTORIES} came before it", directory.escape_debug()));
        }
        self.known.insert(directory.to_string());
        self.conf.directories.push(directory.to_string());
    }

    fn include(&mut self, from: &Path, pattern: &str, depth: usize) {
        let pattern = from.parent().unwrap_or(Path::new("/")).join(pattern);
        for path in self.expand(&pattern) {
            self.file(&path, depth + 1);
        }
    }

    /// The paths that a pattern stands for, sorted. Those without `*`, `?` or `[` need not exist.
    fn expand(&mut self, pattern: &Path) -> Vec<PathBuf> {
        let mut paths = vec![PathBuf::from("/")];
        for component in pattern.components().take(64) {
            match component.as_os_str().to_str() {
                Some(part) if part.contains(['*', '?', '[']) => {
                    let mut next = Vec::new();
                    for path in &paths {
                        if self.work > MAX_WORK || part.len() > MAX_PATTERN || self.is_late() {
                            self.note(format!(
                                "leave out {}: it takes too long",
                                pattern.display().to_string().chars().take(100).collect::<String>()
                            ));
                            break;
                        }
                        let names = self.names(path);
                        self.work += names.iter().map(|n| WORK_OF_NAME + n.len() * part.len()).sum::<usize>();
                        next.extend(names.into_iter().filter(|n| hidden_or_not(part, n)).map(|n| path.join(n)));
                        if next.len() > MAX_FILES {
                            next.sort_unstable();
                            next.truncate(MAX_FILES);
                            self.note(format!("leave out what comes after the first {MAX_FILES} of {}", pattern.display()));
                            break;
                        }
                    }
                    paths = next;
                }
                _ if matches!(component, Component::RootDir | Component::CurDir) => {}
                _ => paths.iter_mut().for_each(|p| p.push(component)),
            }
        }
        paths.sort_unstable_by(|a, b| a.as_os_str().cmp(b.as_os_str()));
        paths
    }

    /// Names in a directory, with those that are about to be there.
    fn names(&mut self, path: &Path) -> Vec<String> {
        self.work += WORK_OF_DIRECTORY;
        let there = self.root.directory(path).and_then(|d| d.map(|d| d.names()).transpose());
        let mut names: Vec<String> = match there {
            Ok(names) => names.unwrap_or_default().into_iter().map(|n| n.name).collect(),
            Err(e) => {
                self.note(format!("leave out what {} has: {e}", path.display()));
                Vec::new()
            }
        };
        let planned = self.planned.iter().filter(|e| matches!(e, Edit::File { .. }) && e.path().parent() == Some(path));
        names.extend(planned.filter_map(|e| e.path().file_name()?.to_str().map(str::to_string)));
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// As in a shell: names with a dot in front are found only by patterns with one.
fn hidden_or_not(part: &str, name: &str) -> bool {
    (part.starts_with('.') || !name.starts_with('.')) && pattern::matches(part, name)
}
