//! Checks of the shell scripts: cargo takes the crates that the lock files name, and changes none of
//! these files.

use crate::project;
use std::path::{Path, PathBuf};

/// Subcommands of cargo that resolve dependencies, and write Cargo.lock where that is not forbidden.
const RESOLVING: &[&str] =
    &["bench", "build", "check", "clippy", "doc", "fetch", "install", "metadata", "run", "rustc", "test", "tree", "vendor"];
/// Options that forbid the change.
const LOCKING: &[&str] = &["--locked", "--frozen"];

/// Files that a shell or a container builder runs, below a folder.
fn scripts(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let is_built = ["target", ".git"].iter().any(|built| name == *built);
        if path.is_dir() && !path.is_symlink() && !is_built {
            found.extend(scripts(&path));
        } else if path.is_file() && path.extension().is_none_or(|e| e == "initrd") {
            let is_dockerfile = name.to_string_lossy().starts_with("Dockerfile");
            if is_dockerfile || std::fs::read(&path).unwrap().starts_with(b"#!") {
                found.push(path);
            }
        }
    }
    found
}

/// Lines with a command of cargo that may change a lock file, in comments and messages, too: what
/// they say is copied.
fn unlocked(text: &str) -> Vec<String> {
    // A command may go on in the next line.
    let text = text.replace("\\\n", " ");
    let may_change = |line: &&str| {
        let mut commands = line.split("cargo ").skip(1);
        commands.any(|command| {
            // In quotes, brackets or an assignment; options that precede the subcommand name others.
            let mut words = command.split(|c: char| c.is_whitespace() || "\"'`()|;&".contains(c));
            words.next().is_some_and(|word| RESOLVING.contains(&word)) && !words.any(|word| LOCKING.contains(&word))
        })
    };
    text.lines().filter(may_change).map(|line| line.trim().to_string()).collect()
}

#[test]
fn no_script_changes_a_lock_file_of_cargo() {
    let all = scripts(&project());
    let names: Vec<_> = all.iter().map(|path| path.strip_prefix(project()).unwrap().to_str().unwrap()).collect();
    for name in [".ci/run", "Dockerfile.initrd", "initrd/demo", "tests/run", "tests/fuzz/run", "rootfs-builder/build"] {
        assert!(names.contains(&name), "{name} is not among {names:?}");
    }
    for (path, name) in all.iter().zip(names) {
        let found = unlocked(&std::fs::read_to_string(path).unwrap());
        assert!(found.is_empty(), "{name}: add --locked: {found:#?}");
    }
    // Negative control.
    let text = "cargo fmt --all\ncargo build --locked -q\nbuild \"the init\" cargo build -q\n\
                cargo clippy \\\n    --frozen\n[ \"$(cargo test -q)\" ] || cargo test --locked\ncargo run";
    let found = ["build \"the init\" cargo build -q", "[ \"$(cargo test -q)\" ] || cargo test --locked", "cargo run"];
    assert_eq!(unlocked(text), found);
}
