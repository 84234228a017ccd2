//! Directories that a container's loader searches: `/etc/ld.so.conf`, its includes, and the
//! directories built into `ldconfig`.
//!
//! Parsed as `ldconfig` does, with planned edits already counted in. Reading ends for any number of
//! files, lines and includes; whatever exceeds the limits is left out and noted.

use super::container_root::ContainerRoot;
use super::edits::Edit;
use crate::kernel_modules::pattern;
use kata_gpu_wire::arch::{Arch, Facts};
use nix::sys::stat::SFlag;
use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

pub const CONF: &str = "/etc/ld.so.conf";
pub const CONF_DIRECTORY: &str = "/etc/ld.so.conf.d";
/// Content of [`CONF`] in distributions, and for an image without that file.
pub const INCLUDE_ALL: &str = "include /etc/ld.so.conf.d/*.conf\n";

/// Limit of files read, over all includes.
const MAX_FILES: usize = 1024;
/// Limit of one file, in bytes.
const MAX_FILE: u64 = 1024 * 1024;
/// Limit of all files, in bytes: a distribution's have some hundred.
const MAX_BYTES: u64 = 4 * MAX_FILE;
/// Longest line: PATH_MAX of the kernel.
const MAX_LINE: usize = 4096;
/// Time limit of the reading: the whole hook has 10 s.
const DEADLINE: Duration = Duration::from_secs(2);
/// Limit of nested includes.
const MAX_DEPTH: usize = 16;
/// Limit of different directories.
const MAX_DIRECTORIES: usize = 4096;
/// Limit of work for patterns, in comparisons of a byte: a tenth of a second. Opening a directory
/// and reading a name have fixed costs in that unit.
const MAX_WORK: usize = 50_000_000;
const WORK_OF_DIRECTORY: usize = 2000;
const WORK_OF_NAME: usize = 200;
const WORK_OF_INCLUDE: usize = 2000;
/// Longest part of a pattern: NAME_MAX of the kernel.
const MAX_PATTERN: usize = 255;
/// Limit of notes.
const MAX_NOTES: usize = 16;

/// Parsed configuration.
#[derive(Debug, Default)]
pub struct Conf {
    /// In search order, each once, as written.
    pub directories: Vec<String>,
    /// Parts left out, and why.
    pub notes: Vec<String>,
}

/// Reads [`CONF`] as if these edits were made.
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

/// Directories built into the loader of this container, in the order of `ldconfig`.
pub fn built_in(root: &ContainerRoot, arch: Arch) -> Vec<String> {
    let Facts {
        triplet,
        lib_suffixes,
        ..
    } = arch.facts();
    let is_file = |path: &str| root.kind(Path::new(path)) == Some(SFlag::S_IFREG);
    // An image without a package manager may have Debian's libc and nothing else of Debian.
    if is_file("/etc/debian_version")
        || is_file(&format!("/lib/{triplet}/libc.so.6"))
        || is_file(&format!("/usr/lib/{triplet}/libc.so.6"))
    {
        return [
            format!("/lib/{triplet}"),
            format!("/usr/lib/{triplet}"),
            "/lib".into(),
            "/usr/lib".into(),
        ]
        .to_vec();
    }
    ["/lib", "/usr/lib"]
        .iter()
        .flat_map(|lib| {
            lib_suffixes
                .iter()
                .map(move |suffix| format!("{lib}{suffix}"))
        })
        .collect()
}

struct Reader<'a> {
    root: &'a ContainerRoot,
    planned: &'a [Edit],
    /// Files read so far: reading one again would add no directory.
    files: HashSet<PathBuf>,
    known: HashSet<String>,
    /// Bytes read so far.
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

    /// Reads one file. An unreadable file does not stop the others.
    fn file(&mut self, path: &Path, depth: usize) {
        if depth > MAX_DEPTH || self.files.len() >= MAX_FILES {
            return self.note(format!(
                "leave out {}: more than {MAX_FILES} files, or deeper than {MAX_DEPTH} includes",
                path.display()
            ));
        }
        if !self.files.insert(path.to_path_buf()) {
            return;
        }
        if self.bytes >= MAX_BYTES || self.is_late() {
            return self.note(format!(
                "leave out {}: {MAX_BYTES} bytes or {} s are over",
                path.display(),
                DEADLINE.as_secs()
            ));
        }
        let content = match self.planned.iter().find(|e| e.path() == path) {
            Some(Edit::File { content, .. }) => Ok(Some(content.clone())),
            Some(Edit::Absent { .. }) => Ok(None),
            Some(Edit::Link { .. }) | None => self
                .root
                .read(path, MAX_FILE)
                .map_err(|e| format!("leave out: {e}")),
        };
        match content {
            Ok(None) => {}
            Ok(Some(bytes)) => {
                self.bytes += bytes.len() as u64;
                for line in bytes.split(|b| *b == b'\n') {
                    match std::str::from_utf8(line) {
                        Ok(_) if line.len() > MAX_LINE => {
                            self.note(format!(
                                "leave out a line of {}: it has more than {MAX_LINE} bytes",
                                path.display()
                            ));
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
        let word = |name: &str| {
            line.get(..name.len())
                .filter(|w| w.eq_ignore_ascii_case(name))
                .and_then(|_| line.get(name.len()..))
        };
        let argument = |name: &str| word(name).filter(|rest| rest.starts_with([' ', '\t']));
        if let Some(patterns) = argument("include").filter(|_| line.starts_with("include")) {
            for pattern in patterns.split_ascii_whitespace() {
                self.work += WORK_OF_INCLUDE;
                if self.work > MAX_WORK || self.is_late() {
                    return self.note(format!(
                        "leave out what {} includes: it takes too long",
                        from.display()
                    ));
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

    /// Adds a directory. Relative ones are refused: they depend on a program's working directory.
    fn directory(&mut self, line: &str) {
        let directory = line.trim_end_matches('/');
        if !directory.starts_with('/') || directory.contains('\0') || self.known.contains(directory)
        {
            return;
        }
        if self.known.len() >= MAX_DIRECTORIES {
            return self.note(format!(
                "leave out directory {}: {MAX_DIRECTORIES} came before it",
                directory.escape_debug()
            ));
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

    /// Paths that match a pattern, sorted. Patterns without `*`, `?` or `[` need not exist.
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
                                pattern
                                    .display()
                                    .to_string()
                                    .chars()
                                    .take(100)
                                    .collect::<String>()
                            ));
                            break;
                        }
                        let names = self.names(path);
                        self.work += names
                            .iter()
                            .map(|n| WORK_OF_NAME + n.len() * part.len())
                            .sum::<usize>();
                        // One more than the limit shows that the limit is exceeded.
                        let room = MAX_FILES + 1 - next.len();
                        next.extend(
                            names
                                .into_iter()
                                .filter(|n| hidden_or_not(part, n))
                                .take(room)
                                .map(|n| path.join(n)),
                        );
                        if next.len() > MAX_FILES {
                            next.truncate(MAX_FILES);
                            self.note(format!(
                                "leave out what comes after the first {MAX_FILES} of {}",
                                pattern.display()
                            ));
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

    /// Names in a directory, including planned ones.
    fn names(&mut self, path: &Path) -> Vec<String> {
        self.work += WORK_OF_DIRECTORY;
        let there = self
            .root
            .directory(path)
            .and_then(|d| d.map(|d| d.names()).transpose());
        let mut names: Vec<String> = match there {
            Ok(names) => names
                .unwrap_or_default()
                .into_iter()
                .map(|n| n.name)
                .collect(),
            Err(e) => {
                self.note(format!("leave out what {} has: {e}", path.display()));
                Vec::new()
            }
        };
        let planned = self
            .planned
            .iter()
            .filter(|e| matches!(e, Edit::File { .. }) && e.path().parent() == Some(path));
        names.extend(planned.filter_map(|e| e.path().file_name()?.to_str().map(str::to_string)));
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// Matches as a shell does: names with a leading dot need a pattern with one.
fn hidden_or_not(part: &str, name: &str) -> bool {
    (part.starts_with('.') || !name.starts_with('.')) && pattern::matches(part, name)
}
