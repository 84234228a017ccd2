//! Each crate of src/ is one that cargo packages: with what a registry asks for, and all its files.

use crate::{TempDir, files_below, names, project};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// The crates of src/, as `cargo metadata` has them.
fn crates() -> Vec<Value> {
    let words = "metadata --frozen --no-deps --format-version 1";
    let text = crate::supply_chain::cargo(&words.split(' ').collect::<Vec<_>>());
    let metadata: Value = serde_json::from_str(&text).unwrap();
    let is_of_src = |package: &&Value| {
        let manifest = Path::new(package["manifest_path"].as_str().unwrap());
        manifest
            .parent()
            .unwrap()
            .parent()
            .unwrap()
            .ends_with("src")
    };
    let packages = metadata["packages"].as_array().unwrap().iter();
    packages.filter(is_of_src).cloned().collect()
}

/// Keys of a crate's metadata that a registry asks for and that are missing.
fn missing(package: &Value) -> Vec<&'static str> {
    let is_missing = |key: &&str| match &package[*key] {
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => true,
    };
    let keys = ["description", "license", "keywords", "categories"];
    keys.into_iter().filter(is_missing).collect()
}

#[test]
fn cargo_packages_every_crate_of_src_with_all_its_files() {
    let (crates, dir) = (crates(), TempDir::new("release-crates"));
    assert_eq!(
        crates.len(),
        names(project().join("src"))
            .iter()
            .filter(|n| !n.contains('.'))
            .count()
    );
    let mut command = Command::new(env!("CARGO"));
    // No lock file in a package: it would name our own crates as those of a registry.
    command
        .args(
            "package --frozen --no-verify --allow-dirty --exclude-lockfile --target-dir".split(' '),
        )
        .arg(&dir.0)
        .current_dir(project());
    for package in &crates {
        command.args(["-p", package["name"].as_str().unwrap()]);
        assert_eq!(missing(package), [""; 0], "{}", package["name"]);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", crate::stderr(&output));
    for package in &crates {
        let (name, version) = (&package["name"], &package["version"]);
        let stem = format!("{}-{}", name.as_str().unwrap(), version.as_str().unwrap());
        let list = Command::new("tar")
            .arg("-tzf")
            .arg(dir.0.join("package").join(format!("{stem}.crate")))
            .output()
            .unwrap();
        let list = crate::stdout(&list);
        let packaged: BTreeSet<&str> = list
            .lines()
            .filter_map(|line| line.strip_prefix(&format!("{stem}/")))
            .collect();
        let folder = Path::new(package["manifest_path"].as_str().unwrap())
            .parent()
            .unwrap();
        for file in files_below(folder.into()) {
            let file = file.strip_prefix(folder).unwrap().to_str().unwrap();
            assert!(packaged.contains(file), "{name}: {file} is not packaged");
        }
    }
    // Negative control.
    let mut bare = crates[0].clone();
    bare["description"] = Value::Null;
    bare["keywords"] = Value::Array(Vec::new());
    assert_eq!(missing(&bare), ["description", "keywords"]);
}
