//! A failure means that a script can change a lock file of cargo, takes packages from an archive
//! that the machine's owner did not choose, or fails where Kata is not there to be tested.

use crate::{files, project};
use std::path::PathBuf;

/// Subcommands of cargo that resolve dependencies, and write Cargo.lock where nothing forbids that.
const RESOLVING: &str = "bench build check clippy doc fetch install metadata run test tree vendor";
/// Options that forbid the change.
const LOCKING: &[&str] = &["--locked", "--frozen"];

/// Files that a shell or a container builder runs.
fn scripts() -> Vec<PathBuf> {
    let mut all = files("");
    all.retain(|path| {
        let is_dockerfile = path
            .file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("Dockerfile");
        let is_candidate = path
            .extension()
            .is_none_or(|extension| extension == "initrd");
        is_candidate && (is_dockerfile || crate::bytes(path).starts_with(b"#!"))
    });
    all
}

/// Lines with a command of cargo that may change a lock file, in comments and messages, too: what
/// they say is copied.
fn unlocked(text: &str) -> Vec<String> {
    // A command may go on in the next line.
    let text = text.replace("\\\n", " ");
    let may_change = |line: &&str| {
        let mut commands = line.split("cargo ").skip(1);
        commands.any(|command| {
            // Quotes and brackets end a word, too.
            let mut words = command.split(|c: char| c.is_whitespace() || "\"'`()|;&".contains(c));
            let subcommand = words.next();
            let is_resolving = RESOLVING.split(' ').any(|word| subcommand == Some(word));
            is_resolving && !words.any(|word| LOCKING.contains(&word))
        })
    };
    text.lines()
        .filter(may_change)
        .map(|line| line.trim().to_string())
        .collect()
}

#[test]
fn no_script_changes_a_lock_file_of_cargo() {
    let all = scripts();
    for name in [
        ".ci/run",
        "Dockerfile.initrd",
        "initrd/demo",
        "tests/run",
        "tests/fuzz/run",
    ] {
        assert!(
            all.contains(&project().join(name)),
            "{name} is not among {all:?}"
        );
    }
    for path in all {
        let found = unlocked(&crate::text(&path));
        assert!(
            found.is_empty(),
            "{}: add --locked: {found:#?}",
            path.display()
        );
    }
    // Negative control.
    let found = [
        "build 'the init' cargo build -q",
        "[ \"$(cargo test -q)\" ] || :",
        "cargo run",
    ];
    let kept = "cargo fmt --all\ncargo build --locked -q\ncargo clippy \\\n    --frozen";
    assert_eq!(unlocked(&format!("{kept}\n{}", found.join("\n"))), found);
}

#[test]
fn a_tier_without_its_folder_is_skipped_with_one_line() {
    for (tier, variable) in [("kata", "KATA"), ("cluster", "KUBERNETES")] {
        for folder in ["", "/nonexistent/folder"] {
            let mut command = std::process::Command::new(project().join("tests/run"));
            let output = command.arg(tier).env(variable, folder).output().unwrap();
            let err = crate::stderr(&output);
            assert_eq!(output.status.code(), Some(3), "{err}");
            assert!(
                output.stdout.is_empty() && err.lines().count() == 1,
                "{output:?}"
            );
            let command = format!("{variable}=DIR tests/run {tier}");
            assert!(err.contains(&command) && err.contains(folder), "{err}");
        }
    }
}

/// Hosts that packages can be had from.
const ARCHIVES: &[&str] = &[
    "debian.org",
    "ubuntu.com",
    "nvidia.com/compute",
    "nvidia.github.io",
];

/// Lines that name such a host.
fn archives(text: &str) -> Vec<&str> {
    text.lines()
        .filter(|line| ARCHIVES.iter().any(|host| line.contains(host)))
        .collect()
}

#[test]
fn no_script_names_an_archive_of_packages() {
    let folder = project().join("rootfs-builder");
    let inner = |name| std::fs::read_dir(folder.join(name)).unwrap().flatten();
    let pages = [
        "README.md",
        "rootfs-builder/README.md",
        "initrd/README.md",
        "tests/README.md",
    ];
    let mut all = scripts();
    all.extend(
        inner("parts")
            .chain(inner("distributions"))
            .map(|entry| entry.path()),
    );
    all.extend(pages.iter().map(|page| project().join(page)));
    assert!(
        all.iter()
            .any(|path| path.ends_with("distributions/debian-13")),
        "{all:?}"
    );
    for path in all {
        let text = crate::text(&path);
        assert_eq!(archives(&text), [""; 0], "{}", path.display());
    }
    // Negative control.
    let named = "mirror=http://deb.debian.org/debian";
    assert_eq!(archives(&format!("suite=trixie\n{named}")), [named]);
}
