//! The files that an agent would read: found as the agent finds them, each read once, within
//! bounds, without blocking.

use super::spec_rules::*;
use anyhow::{Context, Result, bail};
use nix::fcntl::OFlag;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Largest file that is read: an agent would take a third of a second for it, at every try. The
/// reference spec of 8 GPUs has 35 kB.
pub const MAX_FILE: u64 = 1 << 20;
/// Largest size of all files together.
const MAX_ALL: usize = 4 << 20;
/// Spec files that are read.
const MAX_FILES: usize = 64;
/// Entries of directories that are looked at.
const MAX_ENTRIES: usize = 10_000;
/// Directories within directories.
const MAX_DEPTH: usize = 16;

/// A file and its content.
#[derive(Debug)]
pub struct SpecText {
    /// Path below the directory that was given, or the file's name.
    pub name: String,
    pub text: Vec<u8>,
}

/// Files to check, and findings from reading them.
#[derive(Debug, Default)]
pub struct Input {
    pub files: Vec<SpecText>,
    pub findings: Vec<Finding>,
    /// Files that the agent passes over.
    pub ignored: usize,
    entries: usize,
    bytes: usize,
}

/// Reads a file, or a directory with everything in it. Fails if there is no such path.
pub fn read(path: &Path) -> Result<Input> {
    let meta = std::fs::metadata(path).with_context(|| format!("look at {}", path.display()))?;
    let mut input = Input::default();
    if meta.is_dir() {
        input
            .directory(path, "", &mut vec![(meta.dev(), meta.ino())])
            .with_context(|| format!("read directory {}", path.display()))?;
        // Sort the files: a directory has no order, and the same directory gives the same report.
        input.files.sort_by(|a, b| a.name.cmp(&b.name));
        input.findings.sort_by(|a, b| a.file.cmp(&b.file));
        if input.files.is_empty() && input.findings.is_empty() {
            input.findings.push(Finding::new(&NO_SPEC, "", ""));
        }
    } else {
        let Some(name) = path.file_name() else {
            bail!("{}: not a file and not a directory", path.display())
        };
        let name = name.to_string_lossy().into_owned();
        if !is_spec_name(&name) {
            input.findings.push(Finding::new(&NOT_READ, &name, ""));
        }
        input.file(path, name);
    }
    Ok(input)
}

/// Whether an agent reads a file of this name.
pub fn is_spec_name(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|e| e.to_str());
    extension.is_some_and(|e| e.eq_ignore_ascii_case("json") || e.eq_ignore_ascii_case("yaml"))
}

impl Input {
    /// `above`: device and inode of this directory and of its parents, the outermost first.
    fn directory(
        &mut self,
        path: &Path,
        name: &str,
        above: &mut Vec<(u64, u64)>,
    ) -> std::io::Result<()> {
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            self.entries += 1;
            if self.entries > MAX_ENTRIES || self.files.len() >= MAX_FILES {
                if !self.findings.iter().any(|f| f.rule == &TOO_MANY_FILES) {
                    self.findings.push(Finding::new(&TOO_MANY_FILES, name, ""));
                }
                return Ok(());
            }
            let own = entry.file_name().to_string_lossy().into_owned();
            let shown = if name.is_empty() {
                own
            } else {
                format!("{name}/{own}")
            };
            // Follows links, like the agent.
            match std::fs::metadata(entry.path()) {
                Ok(meta) if meta.is_dir() => {
                    let id = (meta.dev(), meta.ino());
                    if above.contains(&id) || above.len() > MAX_DEPTH {
                        self.findings
                            .push(Finding::new(&DIRECTORY_LOOP, &shown, ""));
                        continue;
                    }
                    above.push(id);
                    let read = self.directory(&entry.path(), &shown, above);
                    above.pop();
                    if let Err(error) = read {
                        self.findings
                            .push(Finding::new(&UNREADABLE, &shown, "").value(error));
                    }
                }
                _ if is_spec_name(&shown) => self.file(&entry.path(), shown),
                _ => {
                    if shown.to_ascii_lowercase().ends_with(".yml") {
                        self.findings.push(Finding::new(&NOT_READ, &shown, ""));
                    }
                    self.ignored += 1;
                }
            }
        }
        Ok(())
    }

    fn file(&mut self, path: &Path, name: String) {
        match read_file(path) {
            Ok(Bounded::Whole(text)) if self.bytes + text.len() > MAX_ALL => {
                self.findings.push(
                    Finding::new(&TOO_LARGE, &name, "")
                        .value(format!("{} bytes in all", self.bytes + text.len())),
                );
            }
            Ok(Bounded::Whole(text)) => {
                self.bytes += text.len();
                self.files.push(SpecText { name, text });
            }
            Ok(Bounded::TooLarge(bytes)) => self
                .findings
                .push(Finding::new(&TOO_LARGE, &name, "").value(format!("{bytes} bytes"))),
            Ok(Bounded::NotAFile) => self.findings.push(Finding::new(&NOT_A_FILE, &name, "")),
            Err(error) if error.kind() == ErrorKind::NotFound => self
                .findings
                .push(Finding::new(&NOT_A_FILE, &name, "").value("a link to nothing")),
            Err(error) => self
                .findings
                .push(Finding::new(&UNREADABLE, &name, "").value(error)),
        }
    }
}

enum Bounded {
    Whole(Vec<u8>),
    TooLarge(u64),
    NotAFile,
}

fn read_file(path: &Path) -> std::io::Result<Bounded> {
    // Check the type before the open, which could trigger an action of a device, and after it,
    // because a name can change its file.
    if !std::fs::metadata(path)?.is_file() {
        return Ok(Bounded::NotAFile);
    }
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits() | OFlag::O_NOCTTY.bits())
        .open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Ok(Bounded::NotAFile);
    }
    let mut text = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_FILE {
        return Ok(Bounded::TooLarge(meta.len()));
    }
    Ok(Bounded::Whole(text))
}

/// Name of an anchor that the text has and refers to, if there is one. Every YAML reference looks
/// so (an anchor's name is a longest run of these characters); other text of this form stands in
/// strings, and nearly never twice.
pub fn alias(text: &[u8]) -> Option<String> {
    let names = |mark: u8| {
        let starts = text
            .iter()
            .enumerate()
            .filter(move |(_, b)| **b == mark)
            .map(|(at, _)| at + 1);
        starts.filter_map(|start| {
            let rest = text.get(start..)?;
            let end = rest
                .iter()
                .position(|b| !(b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-')))
                .unwrap_or(rest.len());
            rest.get(..end).filter(|name| !name.is_empty())
        })
    };
    let anchors: std::collections::HashSet<&[u8]> = names(b'&').collect();
    names(b'*')
        .find(|name| anchors.contains(name))
        .map(|name| String::from_utf8_lossy(name).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use std::os::unix::fs::symlink;

    fn rules(input: &Input) -> Vec<(&str, &str)> {
        input
            .findings
            .iter()
            .map(|f| (f.rule.name, f.file.as_str()))
            .collect()
    }

    #[test]
    fn a_directory_is_read_as_the_agent_reads_it() {
        let dir = temp_dir();
        std::fs::create_dir_all(dir.path().join("deep/er")).unwrap();
        for name in [
            "b.YAML",
            ".hidden.json",
            "deep/er/a.yaml",
            "c.yaml.tmp",
            "README",
            "d.yml",
        ] {
            std::fs::write(dir.path().join(name), name).unwrap();
        }
        let input = read(dir.path()).unwrap();
        let names: Vec<&str> = input.files.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, [".hidden.json", "b.YAML", "deep/er/a.yaml"]);
        assert!(input.files.iter().all(|f| f.name.as_bytes() == f.text));
        assert_eq!(input.ignored, 3);
        assert_eq!(rules(&input), [("not-read", "d.yml")]);
    }

    #[test]
    fn what_is_no_file_is_never_opened() {
        let dir = temp_dir();
        nix::unistd::mkfifo(&dir.path().join("fifo.yaml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        symlink("nowhere", dir.path().join("link.json")).unwrap();
        symlink("/dev/zero", dir.path().join("zero.json")).unwrap();
        symlink(".", dir.path().join("loop")).unwrap();
        let input = read(dir.path()).unwrap();
        assert_eq!(
            rules(&input),
            [
                ("not-a-file", "fifo.yaml"),
                ("not-a-file", "link.json"),
                ("directory-loop", "loop"),
                ("not-a-file", "zero.json")
            ]
        );
        assert!(input.files.is_empty());
    }

    #[test]
    fn a_file_is_read_up_to_its_bound_and_not_beyond() {
        let dir = temp_dir();
        let path = dir.path().join("x.json");
        std::fs::write(&path, vec![b' '; MAX_FILE as usize]).unwrap();
        assert_eq!(read(&path).unwrap().files[0].text.len() as u64, MAX_FILE);
        std::fs::File::create(&path)
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        assert_eq!(rules(&read(&path).unwrap()), [("too-large", "x.json")]);
    }

    #[test]
    fn no_more_files_are_read_than_the_bound() {
        let dir = temp_dir();
        (0..MAX_FILES + 2)
            .for_each(|n| std::fs::write(dir.path().join(format!("{n}.json")), "x").unwrap());
        let input = read(dir.path()).unwrap();
        assert_eq!((input.files.len(), input.findings.len()), (MAX_FILES, 1));
        assert_eq!(input.findings[0].rule, &TOO_MANY_FILES);
    }

    #[test]
    fn an_empty_directory_differs_from_a_missing_one() {
        let dir = temp_dir();
        assert_eq!(rules(&read(dir.path()).unwrap()), [("no-spec", "")]);
        let error = read(&dir.path().join("none")).unwrap_err();
        assert!(format!("{error:#}").contains("No such file"), "{error:#}");
    }

    #[test]
    fn an_alias_is_found_wherever_a_parser_would() {
        for text in [
            "a: &x 1\nb: *x",
            "{a: &x-1 [1],b:*x-1}",
            "- &a-b_c z\n- *a-b_c",
            "&1 a: *1",
        ] {
            assert!(alias(text.as_bytes()).is_some(), "{text}");
        }
        for text in [
            "a: &x 1",
            "b: *x",
            "a: &x 1\nb: *xy",
            r#"{"args":["*.so","a&b"],"c":"& *"}"#,
        ] {
            assert_eq!(alias(text.as_bytes()), None, "{text}");
        }
    }
}
