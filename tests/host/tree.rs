//! Guest roots for tests, from descriptions that read like one (tests/fixtures/cdi/README.md has
//! the words).

use kata_gpu_test_support::elf_stand_in as stand_in;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use std::fmt::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// The description `tests/fixtures/cdi/<name>.tree`.
pub fn description(name: &str) -> String {
    let path = crate::project()
        .join("tests/fixtures/cdi")
        .join(name)
        .with_extension("tree");
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Makes the tree below `root`; gives the device nodes that could not be made, which takes
/// privileges.
pub fn build(root: &Path, description: &str) -> Vec<PathBuf> {
    let mut skipped = Vec::new();
    let mut modes = Vec::new();
    for line in description
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        let (kind, rest) = line.split_once(' ').unwrap_or_else(|| panic!("{line}"));
        let words: Vec<&str> = rest.split(' ').collect();
        let mode = || u32::from_str_radix(words[0], 8).unwrap_or_else(|e| panic!("{line}: {e}"));
        match kind {
            "dir" => {
                let path = place(root, words[1]);
                std::fs::create_dir_all(&path).unwrap();
                modes.push((path, mode()));
            }
            "link" => {
                let (path, target) = rest.split_once(" -> ").unwrap_or_else(|| panic!("{line}"));
                symlink(target, place(root, path)).unwrap_or_else(|e| panic!("{line}: {e}"));
            }
            "text" => {
                let (path, text) = rest[words[0].len() + 1..]
                    .split_once(' ')
                    .unwrap_or_else(|| panic!("{line}"));
                file(&place(root, path), text_of(text).as_bytes(), mode());
            }
            "file" => {
                let library = words.get(2).and_then(|word| word.strip_prefix("soname="));
                let bytes = library.map_or_else(
                    || words[1].as_bytes().to_vec(),
                    |soname| stand_in::library(Some(soname), &["libc.so.6"]),
                );
                file(&place(root, words[1]), &bytes, mode());
            }
            "char" => {
                let (major, minor) = words[2].split_once(':').unwrap_or_else(|| panic!("{line}"));
                let number = makedev(major.parse().unwrap(), minor.parse().unwrap());
                let path = place(root, words[3]);
                match mknod(
                    &path,
                    SFlag::S_IFCHR,
                    Mode::from_bits_truncate(mode()),
                    number,
                ) {
                    Ok(()) => modes.push((path, mode())),
                    Err(_) => skipped.push(PathBuf::from(words[3])),
                }
            }
            "socket" => drop(
                UnixListener::bind(place(root, words[1])).unwrap_or_else(|e| panic!("{line}: {e}")),
            ),
            "strays" => {
                for number in 0..words[0].parse::<u32>().unwrap() {
                    std::fs::write(place(root, &words[1].replace('%', &number.to_string())), "")
                        .unwrap();
                }
            }
            _ => panic!("{line}: a line begins with dir, link, text, file, char, socket or strays"),
        }
    }
    // Last: a directory may forbid what was put into it.
    for (path, mode) in modes.into_iter().rev() {
        chmod(&path, mode);
    }
    skipped
}

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// A path below the root, whose directories are there.
fn place(root: &Path, path: &str) -> PathBuf {
    let path = root.join(
        path.strip_prefix('/')
            .unwrap_or_else(|| panic!("{path} is not absolute")),
    );
    let parent = path.parent().unwrap();
    // Through the tree's own links, which the fixtures keep relative where something is put behind
    // them.
    if !parent.is_dir() {
        std::fs::create_dir_all(parent).unwrap_or_else(|e| panic!("{}: {e}", parent.display()));
    }
    path
}

fn file(path: &Path, bytes: &[u8], mode: u32) {
    std::fs::write(path, bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    chmod(path, mode);
}

/// `'quoted\n'`, or what the driver prints.
fn text_of(word: &str) -> String {
    if word.starts_with("<as the driver prints it: config 1") {
        return mig_minors();
    }
    let inside = word
        .strip_prefix('\'')
        .and_then(|w| w.strip_suffix('\''))
        .unwrap_or_else(|| panic!("{word} has no quotes"));
    let mut text = String::new();
    let mut characters = inside.chars();
    while let Some(character) = characters.next() {
        text.push(match character {
            '\\' => match characters.next() {
                Some('n') => '\n',
                Some('t') => '\t',
                Some(other) if "\\'".contains(other) => other,
                other => panic!("{word}: \\{other:?} means nothing"),
            },
            plain => plain,
        });
    }
    text
}

/// /proc/driver/nvidia-caps/mig-minors: 32 GPUs with 15 instances each, of 8 compute instances.
pub fn mig_minors() -> String {
    let mut text = String::from("config 1\nmonitor 2\n");
    for gpu in 0..32 {
        for instance in 0..15 {
            let access = 3 + 135 * gpu + 9 * instance;
            writeln!(text, "gpu{gpu}/gi{instance}/access {access}").unwrap();
            for compute in 0..8 {
                writeln!(
                    text,
                    "gpu{gpu}/gi{instance}/ci{compute}/access {}",
                    access + 1 + compute
                )
                .unwrap();
            }
        }
    }
    text
}
