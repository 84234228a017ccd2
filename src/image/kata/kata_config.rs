//! Reads a Kata configuration and its drop-ins as files of limited size, and collects every reason
//! why the runtime could not read them either.
//!
//! Both runtimes resolve symbolic links of the configuration's path first and look for `config.d`
//! beside the resolved file. Every entry is read, whatever its extension. One unreadable or
//! unparsable entry makes every pod of the runtime fail.
//!
//! Not here: merging the files; see [`super::merge`].

use super::drop_in;
use super::drop_in::{Found, read_bounded};
use super::refusal::Refusal;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use toml::Table;
/// Limit of entries read from `config.d` and from the configuration's directory.
const MAX_ENTRIES: usize = 1024;

/// A file, read and parsed.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    pub path: PathBuf,
    pub bytes: Vec<u8>,
    pub table: Table,
}

/// A configuration and the files beside it.
#[derive(Debug)]
pub struct KataConfig {
    pub base: Source,
    /// `config.d` beside the resolved file; it need not exist.
    pub drop_in_dir: PathBuf,
    pub dir_exists: bool,
    /// All drop-ins but ours, in the order in which they are read.
    pub others: Vec<Source>,
    pub ours: Found,
    /// Symbolic links in `config.d`: one runtime follows links, the other refuses them.
    pub links: Vec<PathBuf>,
    /// Other configurations in the same directory, which read the same `config.d`.
    pub siblings: Vec<PathBuf>,
}

impl KataConfig {
    /// Reads all files, or returns all refusals.
    pub fn read(given: &Path) -> Result<KataConfig, Vec<Refusal>> {
        let one = |refusal| vec![refusal];
        let path = fs::canonicalize(given).map_err(|e| one(unreadable(given, &e)))?;
        let base = read_source(&path).map_err(one)?;
        let Some(dir) = path.parent() else {
            return Err(one(Refusal::at(&path, "has no directory")));
        };
        let drop_in_dir = dir.join(drop_in::DIRECTORY);
        let mut config = KataConfig {
            siblings: siblings(dir, &path).map_err(one)?,
            base,
            dir_exists: false,
            others: Vec::new(),
            ours: Found::Absent,
            links: Vec::new(),
            drop_in_dir,
        };
        let names = match entries(&config.drop_in_dir) {
            Ok(names) => names,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(config),
            Err(e) => return Err(one(unreadable(&config.drop_in_dir, &e))),
        };
        config.dir_exists = true;
        let mut refusals = Vec::new();
        for path in names {
            if path.file_name().is_some_and(|name| name == drop_in::NAME) {
                match drop_in::look(&path) {
                    Ok(found) => config.ours = found,
                    Err(e) => refusals.push(unreadable(&path, &e)),
                }
                continue;
            }
            if fs::symlink_metadata(&path).is_ok_and(|m| m.is_symlink()) {
                config.links.push(path.clone());
            }
            match read_source(&path) {
                Ok(source) => config.others.push(source),
                Err(refusal) => refusals
                    .push(refusal.cure(
                        "Kata reads every entry of config.d: repair it or move it elsewhere",
                    )),
            }
        }
        if refusals.is_empty() {
            Ok(config)
        } else {
            Err(refusals)
        }
    }

    /// Path of our drop-in, whether or not it exists.
    pub fn drop_in_path(&self) -> PathBuf {
        self.drop_in_dir.join(drop_in::NAME)
    }

    /// Drop-ins that are read before ours, and after.
    pub fn around_ours(&self) -> (&[Source], &[Source]) {
        let before = |source: &Source| {
            source
                .path
                .file_name()
                .is_some_and(|name| name.as_encoded_bytes() < drop_in::NAME.as_bytes())
        };
        self.others.split_at(self.others.partition_point(before))
    }

    /// The first file that changed since the configuration was read.
    pub fn changed_since(&self) -> Option<PathBuf> {
        let now = match KataConfig::read(&self.base.path) {
            Ok(now) => now,
            Err(refusals) => {
                return Some(
                    refusals
                        .first()
                        .map_or_else(|| self.base.path.clone(), |r| PathBuf::from(&r.place)),
                );
            }
        };
        if now.base != self.base {
            return Some(self.base.path.clone());
        }
        if now.ours != self.ours {
            return Some(self.drop_in_path());
        }
        let differs = |a: &[Source], b: &[Source]| {
            a.iter()
                .find(|source| !b.contains(source))
                .map(|source| source.path.clone())
        };
        differs(&now.others, &self.others).or_else(|| differs(&self.others, &now.others))
    }
}

/// Refusal for an unreadable file.
pub fn unreadable(path: &Path, error: &io::Error) -> Refusal {
    let refusal = Refusal::at(path, format!("read: {error}"));
    match error.kind() {
        io::ErrorKind::NotFound => refusal.cure("name the file that the runtime is started with"),
        io::ErrorKind::PermissionDenied => refusal.cure("run it as root"),
        _ => refusal,
    }
}

/// Reads a regular file of at most 1 MiB. A FIFO does not block.
pub fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(path)?;
    read_bounded(file)
}

fn read_source(path: &Path) -> Result<Source, Refusal> {
    let bytes = read_regular(path).map_err(|e| unreadable(path, &e))?;
    let table = parse(&bytes).map_err(|why| Refusal::at(path, why))?;
    Ok(Source {
        path: path.into(),
        bytes,
        table,
    })
}

/// Parses a file's content. The error names the line.
pub fn parse(bytes: &[u8]) -> Result<Table, String> {
    let text = std::str::from_utf8(bytes)
        .map_err(|e| format!("not UTF-8 from byte {} on", e.valid_up_to()))?;
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let at = error
            .span()
            .and_then(|span| text.get(..span.start))
            .map(|before| before.matches('\n').count() + 1);
        let line = at.map(|line| format!("line {line}: ")).unwrap_or_default();
        format!("not TOML: {line}{}", error.message())
    })
}

/// Paths of a directory's entries, sorted by name as bytes.
fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir)? {
        if paths.len() == MAX_ENTRIES {
            return Err(io::Error::other(format!("more than {MAX_ENTRIES} entries")));
        }
        paths.push(entry?.path());
    }
    paths.sort_by(|a, b| {
        a.as_os_str()
            .as_encoded_bytes()
            .cmp(b.as_os_str().as_encoded_bytes())
    });
    Ok(paths)
}

/// Other configurations whose `config.d` is the same directory. A link to another directory reads
/// that directory's `config.d`.
fn siblings(dir: &Path, own: &Path) -> Result<Vec<PathBuf>, Refusal> {
    let names = entries(dir).map_err(|e| unreadable(dir, &e))?;
    let is_configuration = |path: &PathBuf| {
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        name.starts_with("configuration") && name.ends_with(".toml")
    };
    Ok(names
        .into_iter()
        .filter(is_configuration)
        // No runtime reads a dangling link.
        .filter_map(|path| fs::canonicalize(path).ok())
        .filter(|path| path.parent() == Some(dir) && path != own)
        .collect())
}
