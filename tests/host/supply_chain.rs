//! A failure means that PID 1 links an unreviewed crate, that a licence or source is not on the
//! list, that the init has a path of its builder, or that a release's list of parts is wrong.

use crate::export::Package;
use crate::project;
use kata_gpu_wire::build_id;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-musl";
/// CycloneDX's own library, with its schemas.
const CYCLONEDX: Package = Package {
    name: "cyclonedx-python-lib[json-validation]==11.12.0",
    module: "cyclonedx.validation.json",
};

pub fn cargo(words: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(words)
        .current_dir(project())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "cargo {words:?}: {}",
        crate::stderr(&output)
    );
    crate::stdout(&output)
}

/// Packages of the lock file that are built here, by name and version.
fn packages() -> Vec<Value> {
    let text = cargo(&[
        "metadata",
        "--frozen",
        "--format-version",
        "1",
        "--filter-platform",
        TARGET,
    ]);
    let metadata: Value = serde_json::from_str(&text).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

/// Names and versions in cargo's tree of the init, without our own crates.
fn versions(edges: &str) -> Vec<(String, String)> {
    let words = "tree --frozen -p kata-gpu-init --prefix none --format {p} --target";
    let text = cargo(
        &words
            .split(' ')
            .chain([TARGET, "-e", edges])
            .collect::<Vec<_>>(),
    );
    let crates = text
        .lines()
        .filter_map(|line| line.split_once(" v"))
        .filter(|(name, _)| !name.starts_with("kata-gpu-"));
    crates
        .map(|(name, rest)| {
            (
                name.to_string(),
                rest.split(' ').next().unwrap_or(rest).to_string(),
            )
        })
        .collect()
}

fn tree(edges: &str) -> BTreeSet<String> {
    versions(edges).into_iter().map(|(name, _)| name).collect()
}

/// Rows of a page's table below a heading, by the name in the first cell.
fn rows<'a>(page: &'a str, heading: &str) -> BTreeMap<&'a str, Vec<&'a str>> {
    let section = page
        .split(heading)
        .nth(1)
        .unwrap_or_else(|| panic!("no {heading}"));
    let section = section.split("\n## ").next().unwrap();
    let cells = |line: &'a str| {
        line.strip_prefix("| `")?
            .strip_suffix(" |")?
            .split_once("` | ")
    };
    section
        .lines()
        .filter_map(cells)
        .map(|(name, rest)| (name, rest.split(" | ").collect()))
        .collect()
}

/// Whether a crate's source has unsafe code outside of comments.
fn has_unsafe(folder: &Path) -> bool {
    crate::files_below(folder.join("src")).iter().any(|path| {
        let is_rust = path.extension().is_some_and(|extension| extension == "rs");
        let code = |line: &str| line.split("//").next().unwrap_or_default().to_string();
        is_rust
            && crate::text(path).lines().map(code).any(|line| {
                ["unsafe {", "unsafe fn", "unsafe impl"]
                    .iter()
                    .any(|word| line.contains(word))
            })
    })
}

/// Differences between the reviews and what cargo links.
fn unreviewed(page: &str) -> Vec<String> {
    let linked = tree("normal,no-proc-macro");
    let built: BTreeSet<String> = tree("normal,build").difference(&linked).cloned().collect();
    let mut wrong = Vec::new();
    for (heading, names, columns) in [
        ("## Linked", &linked, 4),
        ("## On the builder's machine", &built, 2),
    ] {
        let rows = rows(page, heading);
        let reviewed: BTreeSet<String> = rows.keys().map(|name| name.to_string()).collect();
        wrong.extend(
            names
                .symmetric_difference(&reviewed)
                .map(|name| format!("{heading}: {name}")),
        );
        let incomplete = rows.iter().filter(|(_, cells)| {
            cells.len() != columns || cells.iter().any(|cell| cell.trim().is_empty())
        });
        wrong.extend(incomplete.map(|(name, _)| format!("{heading}: {name} lacks a cell")));
    }
    let (packages, versions) = (packages(), versions("normal,no-proc-macro"));
    for (name, cells) in rows(page, "## Linked") {
        let is_linked = |p: &&Value| {
            versions.iter().any(|(linked, version)| {
                linked == name && p["name"] == *name && p["version"] == *version
            })
        };
        let Some(package) = packages.iter().find(is_linked) else {
            continue;
        };
        let has_script = package["targets"]
            .as_array()
            .unwrap()
            .iter()
            .any(|target| target["kind"][0] == "custom-build");
        if has_script != cells[2].starts_with("yes: ") {
            wrong.push(format!(
                "{name}: build script is {has_script}, the page has {}",
                cells[2]
            ));
        }
        let folder = Path::new(package["manifest_path"].as_str().unwrap())
            .parent()
            .unwrap();
        if has_unsafe(folder) == (cells[3] == "none") {
            wrong.push(format!(
                "{name}: unsafe is {}, the page has {}",
                has_unsafe(folder),
                cells[3]
            ));
        }
    }
    wrong
}

#[test]
fn every_crate_that_pid_1_links_is_reviewed() {
    let page = crate::text(project().join("src/DEPENDENCIES.md"));
    assert_eq!(unreviewed(&page), Vec::<String>::new());
    // Negative control: a crate that went, and cells that are no longer true.
    let nix = page
        .lines()
        .find(|line| line.starts_with("| `nix` "))
        .unwrap();
    let wrong = page.replace(nix, &nix.replace("nix", "xin")).replace(
        "| the Rust project | no | none |",
        "| the Rust project | yes: x | a cast |",
    );
    let found = unreviewed(&wrong);
    for part in [
        "## Linked: nix",
        "## Linked: xin",
        "cfg-if: build script",
        "cfg-if: unsafe",
    ] {
        assert!(
            found.iter().any(|line| line.contains(part)),
            "{part}: {found:#?}"
        );
    }
}

/// Whether a licence expression can be met with these licences.
fn is_met(expression: &str, allowed: &[String]) -> bool {
    let expression = expression.replace('/', " OR ").replace(['(', ')'], " ");
    // `(A OR B) AND C` is the only form with both words: each part of AND is met by itself.
    let met = |part: &str| {
        part.split(" OR ")
            .any(|licence| allowed.iter().any(|allowed| allowed == licence.trim()))
    };
    expression.split(" AND ").all(met)
}

#[test]
fn licences_and_sources_of_all_crates_are_those_of_the_list() {
    let list = crate::text(project().join(".cargo/deny.toml"));
    let allow = list
        .split("allow = [")
        .nth(1)
        .unwrap()
        .split(']')
        .next()
        .unwrap();
    let allowed: Vec<String> = allow
        .split('"')
        .skip(1)
        .step_by(2)
        .map(str::to_string)
        .collect();
    let packages = packages();
    assert!(
        packages.len() > 150 && allowed.len() > 3,
        "{} packages, {allowed:?}",
        packages.len()
    );
    for package in &packages {
        let name = &package["name"];
        match package["source"].as_str() {
            Some(source) => {
                assert_eq!(
                    source, "registry+https://github.com/rust-lang/crates.io-index",
                    "{name}"
                );
                let licence = package["license"]
                    .as_str()
                    .unwrap_or_else(|| panic!("{name} has no licence"));
                assert!(
                    is_met(licence, &allowed),
                    "{name}: {licence} is not met by {allowed:?} (.cargo/deny.toml)"
                );
            }
            None => {
                let path = package["manifest_path"].as_str().unwrap();
                assert!(
                    path.starts_with(fs::canonicalize(project()).unwrap().to_str().unwrap()),
                    "{name} is at {path}"
                );
            }
        }
        for dependency in package["dependencies"].as_array().unwrap() {
            assert!(
                dependency["req"] != "*"
                    || dependency["path"].is_string()
                    || package["source"].is_string(),
                "{name}: {dependency}"
            );
        }
    }
    // A licence that no package needs is not allowed.
    let used = |licence: &String| {
        let others: Vec<String> = allowed
            .iter()
            .filter(|other| *other != licence)
            .cloned()
            .collect();
        packages
            .iter()
            .filter_map(|p| p["license"].as_str())
            .any(|expression| !is_met(expression, &others))
    };
    let unused: Vec<_> = allowed.iter().filter(|licence| !used(licence)).collect();
    assert!(unused.is_empty(), "{unused:?}");
    // Negative control.
    let mit = ["MIT".to_string()];
    for (expression, met) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("Apache-2.0/MIT", true),
        ("(MIT OR X) AND Unicode-3.0", false),
        ("X OR Y", false),
    ] {
        assert_eq!(is_met(expression, &mit), met, "{expression}");
    }
}

/// The init that tests/run builds; None, with the reason printed, where it is not built.
fn init() -> Option<PathBuf> {
    let init = project()
        .join("target")
        .join(TARGET)
        .join("release/kata-gpu-init");
    if std::env::var_os("KATA_GPU_BUILT").is_none() {
        eprintln!("skipped: tests/run builds {}", init.display());
        return None;
    }
    Some(init)
}

/// Paths below a root's folders that are the builder's, in the bytes of a program.
fn builders_paths(program: &[u8], folders: &[String]) -> Vec<String> {
    let holds = |folder: &&String| {
        program
            .windows(folder.len())
            .any(|window| window == folder.as_bytes())
    };
    folders.iter().filter(holds).cloned().collect()
}

#[test]
fn the_init_has_no_path_of_its_builder() {
    let Some(init) = init() else { return };
    let program = crate::bytes(&init);
    let project = fs::canonicalize(project())
        .unwrap()
        .to_str()
        .unwrap()
        .to_string();
    let mut folders = vec![project, "/.cargo/".into(), "/.rustup/".into()];
    folders.extend(
        std::env::var("HOME")
            .ok()
            .filter(|home| home.len() > 1)
            .map(|home| format!("{home}/")),
    );
    let found = builders_paths(&program, &folders);
    assert_eq!(
        found,
        Vec::<String>::new(),
        "build it with ./initrd/cargo build --release --target {TARGET} --bin kata-gpu-init"
    );
    // Negative control: a program that cargo has built without initrd/cargo, this one.
    let this = crate::bytes(std::env::current_exe().unwrap());
    assert!(!builders_paths(&this, &folders).is_empty(), "{folders:?}");
}

#[test]
fn the_version_has_the_build_and_the_sum_of_the_program() {
    let Some(init) = init() else { return };
    let output = Command::new(&init).arg("--version").output().unwrap();
    let sum = Command::new("sha256sum").arg(&init).output().unwrap();
    let sum = crate::stdout(&sum);
    let id = build_id::of(fs::File::open(&init)).expect("the linker has made an id");
    assert_eq!(id.len(), 40, "{id}");
    let want = format!(
        "kata-gpu-init {}\nbuild {id}\nsha256 {}\n",
        env!("CARGO_PKG_VERSION"),
        sum.split(' ').next().unwrap()
    );
    assert_eq!(crate::stdout(&output), want);
}

#[test]
fn the_hosts_version_has_the_build_of_the_program() {
    let program = crate::collect::program();
    let id = build_id::of(fs::File::open(&program));
    let output = |option: &str| Command::new(&program).arg(option).output().unwrap();
    let short = concat!("kata-gpu-boot ", env!("CARGO_PKG_VERSION"), "\n");
    let long = format!("{short}build {}\n", id.as_deref().unwrap_or("unknown"));
    assert_eq!(crate::stdout(&output("--version")), long);
    assert_eq!(crate::stdout(&output("-V")), short);
}

#[test]
fn the_helpers_version_has_the_build_of_the_program() {
    let program = crate::built("kata-gpu-nvml", "kata-gpu-nvml");
    let id = build_id::of(fs::File::open(&program)).unwrap_or_else(|| "unknown".into());
    let want = format!("kata-gpu-nvml {}\nbuild {id}\n", env!("CARGO_PKG_VERSION"));
    for option in ["--version", "-V"] {
        let output = Command::new(&program).arg(option).output().unwrap();
        assert_eq!(crate::stdout(&output), want);
    }
}

/// Whether CycloneDX's own schema takes a list.
fn validated(python: &Path, list: &str) -> bool {
    let script = "import sys
from cyclonedx.validation.json import JsonStrictValidator
from cyclonedx.schema import SchemaVersion
list = open(sys.argv[1]).read()
sys.exit(JsonStrictValidator(SchemaVersion.V1_5).validate_str(list) is not None)";
    let dir = crate::TempDir::new("supply-chain-list");
    let path = dir.0.join("list.json");
    crate::write(&path, list);
    Command::new(python)
        .args(["-c", script])
        .arg(&path)
        .status()
        .unwrap()
        .success()
}

#[test]
fn a_parts_list_is_what_cyclonedx_takes_and_cargo_links() {
    // Any program has a sum; only a release's is the init itself.
    let file = init().unwrap_or_else(|| std::env::current_exe().unwrap());
    let list = |offline: &str| {
        let mut command = Command::new(project().join("initrd/parts/sbom"));
        let output = command
            .arg(&file)
            .args(["kata-gpu-init", TARGET, offline])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        crate::stdout(&output)
    };
    let text = list("--offline");
    assert_eq!(text, list("--offline"), "the same program has another list");
    let parsed: Value = serde_json::from_str(&text).unwrap();
    let components = parsed["components"].as_array().unwrap();
    // Our own crates have no sum: they are the release itself.
    let is_foreign = |c: &&Value| {
        c["name"] != "rust-std" && !c["name"].as_str().unwrap().starts_with("kata-gpu-")
    };
    let names: BTreeSet<String> = components
        .iter()
        .filter(is_foreign)
        .map(|c| c["name"].as_str().unwrap().to_string())
        .collect();
    assert_eq!(names, tree("normal,no-proc-macro"));
    let lock = crate::text(project().join("Cargo.lock"));
    for component in components.iter().filter(is_foreign) {
        let sum = component["hashes"][0]["content"].as_str().unwrap();
        assert!(sum.len() == 64 && lock.contains(sum), "{component}");
    }
    let own = &parsed["metadata"]["component"];
    assert!(
        own["name"] == "kata-gpu-init" && own["hashes"][0]["content"].as_str().unwrap().len() == 64,
        "{own}"
    );
    let Some(python) = CYCLONEDX.python() else {
        return;
    };
    assert!(validated(&python, &text), "{text}");
    // Negative control.
    assert!(!validated(
        &python,
        &text.replacen("\"library\"", "\"crate\"", 1)
    ));
}

/// The image's base is named by its digest, by whoever builds: no line takes what a name points to.
#[test]
fn the_dockerfile_takes_its_base_by_digest_alone() {
    let text = crate::text(project().join("Dockerfile.initrd"));
    let bases: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("FROM "))
        .collect();
    // The first stage is of the machine that builds, whatever the guest's platform.
    assert_eq!(
        bases,
        ["--platform=${BUILDPLATFORM} ${BASE} AS build", "scratch"]
    );
    assert!(
        text.contains("\nARG BASE\n") && text.contains("*@sha256:*)"),
        "BASE has a default, or no check"
    );
}
