//! The files that an agent would read: found as the agent finds them, each read once, within
//! bounds, without blocking. A file that an agent could not read, or should not, is an error.

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::OFlag;
use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Largest file that is read: an agent would take a third of a second for it, at every try. The
/// reference spec of 8 GPUs has 35 kB.
pub const MAX_FILE: u64 = 1 << 20;
/// Most spec files that are read, and most entries of directories that are looked at.
const MAX_FILES: usize = 64;
const MAX_ENTRIES: usize = 10_000;
/// Directories within directories; links can make a loop.
const MAX_DEPTH: usize = 16;
/// Most opening brackets of a file that is YAML and not JSON: its parser takes time with the square
/// of their depth, which only a parser knows.
const MAX_BRACKETS: usize = 4000;

/// A file and its content.
#[derive(Debug)]
pub struct SpecFile {
    /// Path below the directory that was given, or the file's name.
    pub name: String,
    pub text: Vec<u8>,
}

/// Reads a file, or all specs of a directory and of those below it.
pub fn read(path: &Path) -> Result<Vec<SpecFile>> {
    let meta = std::fs::metadata(path).with_context(|| format!("look at {}", path.display()))?;
    let mut files = Vec::new();
    if meta.is_dir() {
        directory(path, "", 0, &mut 0, &mut files)?;
        // Sort the files: a directory has no order, and the same directory gives the same report.
        files.sort_by(|a, b| a.name.cmp(&b.name));
    } else {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        files.push(file(path, name.into_owned())?);
    }
    ensure!(
        !files.is_empty(),
        "{}: no *.json and no *.yaml, which agents read",
        path.display()
    );
    Ok(files)
}

fn directory(
    path: &Path,
    name: &str,
    depth: usize,
    entries: &mut usize,
    files: &mut Vec<SpecFile>,
) -> Result<()> {
    ensure!(depth < MAX_DEPTH, "{name}: too deep, or a loop of links");
    let read = std::fs::read_dir(path).with_context(|| format!("read {}", path.display()))?;
    for entry in read {
        let entry = entry.with_context(|| format!("read {}", path.display()))?;
        *entries += 1;
        ensure!(*entries <= MAX_ENTRIES, "{name}: too many entries");
        let own = entry.file_name().to_string_lossy().into_owned();
        let own = if name.is_empty() {
            own
        } else {
            format!("{name}/{own}")
        };
        // Follows links, like the agent.
        if std::fs::metadata(entry.path()).is_ok_and(|meta| meta.is_dir()) {
            directory(&entry.path(), &own, depth + 1, entries, files)?;
        } else if is_spec_name(&own) {
            ensure!(files.len() < MAX_FILES, "{own}: too many files");
            files.push(file(&entry.path(), own)?);
        }
    }
    Ok(())
}

/// Whether an agent reads a file of this name.
fn is_spec_name(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|e| e.to_str());
    extension.is_some_and(|e| e.eq_ignore_ascii_case("json") || e.eq_ignore_ascii_case("yaml"))
}

fn file(path: &Path, name: String) -> Result<SpecFile> {
    let text = read_file(path).with_context(|| format!("read {name}"))?;
    if let Some(alias) = alias(&text) {
        bail!("{name}: YAML alias *{alias}: a small file could take all of the agent's memory");
    }
    let brackets = text.iter().filter(|b| matches!(b, b'[' | b'{')).count();
    // JSON that parses is not deep: the parser limits its depth.
    let is_json = || serde_json::from_slice::<serde::de::IgnoredAny>(&text).is_ok();
    ensure!(
        brackets <= MAX_BRACKETS || is_json(),
        "{name}: {brackets} opening brackets, and no JSON"
    );
    Ok(SpecFile { name, text })
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    // Check the type before the open, which could trigger an action of a device, and after it,
    // because a name can change its file.
    ensure!(std::fs::metadata(path)?.is_file(), "not a regular file");
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits() | OFlag::O_NOCTTY.bits())
        .open(path)?;
    ensure!(file.metadata()?.is_file(), "not a regular file");
    let mut text = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut text)?;
    ensure!(
        text.len() as u64 <= MAX_FILE,
        "larger than {MAX_FILE} bytes"
    );
    Ok(text)
}

/// Name of an anchor that the text has and refers to, if there is one. Every YAML reference looks
/// so (an anchor's name is a longest run of these characters); other text of this form stands in
/// strings, and nearly never twice.
fn alias(text: &[u8]) -> Option<String> {
    let names = |mark: u8| {
        let rests = text.split(move |b| *b == mark).skip(1);
        rests.filter_map(|rest| {
            let end = rest
                .iter()
                .position(|b| !(b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-')))
                .unwrap_or(rest.len());
            rest.get(..end).filter(|name| !name.is_empty())
        })
    };
    let anchors: HashSet<&[u8]> = names(b'&').collect();
    names(b'*')
        .find(|name| anchors.contains(name))
        .map(|name| String::from_utf8_lossy(name).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use std::os::unix::fs::symlink;

    fn error(path: &Path) -> String {
        format!("{:#}", read(path).unwrap_err())
    }

    #[test]
    fn a_directory_is_read_as_the_agent_reads_it() {
        let dir = temp_dir();
        assert!(error(dir.path()).contains("no *.json"));
        assert!(error(&dir.path().join("none")).contains("No such file"));
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
        let files = read(dir.path()).unwrap();
        let names: Vec<&str> = files.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, [".hidden.json", "b.YAML", "deep/er/a.yaml"]);
        assert!(files.iter().all(|f| f.name.as_bytes() == f.text));
    }

    #[test]
    fn only_regular_files_are_opened() {
        for target in ["nowhere", "/dev/zero", "fifo", "."] {
            let dir = temp_dir();
            let fifo = dir.path().join("fifo");
            nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
            symlink(target, dir.path().join("x.json")).unwrap();
            assert!(error(dir.path()).contains("x.json"), "{target}");
        }
    }

    #[test]
    fn files_are_read_up_to_their_bounds() {
        let dir = temp_dir();
        let path = dir.path().join("x.json");
        std::fs::write(&path, vec![b' '; MAX_FILE as usize]).unwrap();
        assert_eq!(read(&path).unwrap()[0].text.len() as u64, MAX_FILE);
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        assert!(error(&path).contains("larger than"));
        std::fs::write(&path, "[".repeat(MAX_BRACKETS + 1)).unwrap();
        assert!(error(&path).contains("brackets"));
        std::fs::write(&path, "x").unwrap();
        for n in 1..MAX_FILES {
            std::fs::write(dir.path().join(format!("{n}.json")), "x").unwrap();
        }
        assert_eq!(read(dir.path()).unwrap().len(), MAX_FILES);
        std::fs::write(dir.path().join("one-more.json"), "x").unwrap();
        assert!(error(dir.path()).contains("too many files"));
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
