//! A failure means that a release lacks what its page promises: packages, images, provenance and
//! signatures that the programs of others take, the same bytes each time.
//!
//! Releases here are made by initrd/release itself, of programs that take no time to build: each is
//! a stand-in with a build id, which runs this build's kata-gpu-boot.

mod crates;
mod image;
mod packages;
mod provenance;
mod signature;

use crate::{TempDir, project, text};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Date of the commit: November 2023.
const EPOCH: &str = "1700000000";
/// Replacement of initrd/cargo.
const CARGO: &str = r#"#!/bin/bash
set -euo pipefail
while [ $# -gt 1 ]; do
    case $1 in --target) target=$2 ;; -p) program=$2 ;; esac
    shift
done
mkdir -p "target/$target/release"
cc -x c -Wl,--build-id=sha1 -o "target/$target/release/$program" - <<END
#include <unistd.h>
const char *name = "$program";
int main(int c, char **v) { (void)c; v[0] = "kata-gpu-boot"; return execv("BOOT", v); }
END
"#;
/// Replacement of initrd/parts/sbom, which has tests of its own.
const SBOM: &str = "#!/bin/sh\necho '{\"bomFormat\": \"CycloneDX\"}'\n";

/// A clean checkout of what a release is made of, with a commit of its own.
struct Checkout {
    folder: PathBuf,
    _gone_when_dropped: TempDir,
}

impl Checkout {
    /// None, with the reason printed, where this machine cannot make a release.
    fn new(test: &str, folder: &str) -> Option<Self> {
        Self::below(TempDir::new(test), folder)
    }

    fn below(temp: TempDir, folder: &str) -> Option<Self> {
        let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
        let words = ["--print", "target-libdir", "--target", &target];
        let libdir = crate::stdout(&Command::new("rustc").args(words).output().unwrap());
        let missing: Vec<&str> = ["dpkg-deb", "rpmbuild", "git", "jq", "cc"]
            .into_iter()
            .filter(|name| crate::export::program(name).is_none())
            .collect();
        if !missing.is_empty() || !Path::new(libdir.trim()).is_dir() {
            let why = format!("no {missing:?}, or no Rust for {target}: tests/setup installs them");
            crate::skip("KATA_GPU_BUILT", &why);
            return None;
        }
        // Left by a run that was killed, or by an earlier one that shared its release.
        let _unused = fs::remove_dir_all(&temp.0);
        let checkout = Self {
            folder: temp.0.join(folder),
            _gone_when_dropped: temp,
        };
        let files = ["initrd", "src/collect/deploy"]
            .into_iter()
            .flat_map(crate::files);
        let alone = ["Cargo.toml", "Cargo.lock", "LICENSE", ".gitignore"];
        for file in files.chain(alone.map(|name| project().join(name))) {
            let to = checkout.path(file.strip_prefix(project()).unwrap());
            crate::make_dir(to.parent().unwrap());
            fs::copy(&file, to).unwrap();
        }
        let boot = fs::canonicalize(crate::collect::program()).unwrap();
        let cargo = CARGO.replace("BOOT", boot.to_str().unwrap());
        crate::write(checkout.path("initrd/cargo"), cargo);
        crate::write(checkout.path("initrd/parts/sbom"), SBOM);
        checkout.git("init --quiet");
        checkout.commit();
        Some(checkout)
    }

    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.folder.join(name)
    }

    fn git(&self, words: &str) -> String {
        let output = Command::new("git")
            .arg("-C")
            .arg(&self.folder)
            .args([
                "-c",
                "user.name=releaser",
                "-c",
                "user.email=releaser@kata.test",
            ])
            .args(words.split(' '))
            .env("GIT_AUTHOR_DATE", format!("{EPOCH} +0000"))
            .env("GIT_COMMITTER_DATE", format!("{EPOCH} +0000"))
            .output()
            .unwrap();
        assert!(output.status.success(), "git {words}: {output:?}");
        crate::stdout(&output).trim().to_string()
    }

    /// Id of a commit of all that the folder has.
    fn commit(&self) -> String {
        self.git("add --all");
        self.git("commit --quiet --message release");
        self.git("rev-parse HEAD")
    }

    /// A script of the folder, in an environment that is the same for everybody.
    fn command(&self, script: &str) -> Command {
        let mut command = Command::new(self.path(script));
        command
            .current_dir(self.folder.parent().unwrap())
            .env("MAINTAINER", "A Releaser <releases@kata.test>")
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("LD_LIBRARY_PATH");
        command
    }

    /// A release of init and host's program with these options: its folder, or what was printed.
    fn release(&self, name: &str, options: &[&str]) -> Result<PathBuf, String> {
        let out = self.folder.parent().unwrap().join(name);
        let programs = ["kata-gpu-boot", "kata-gpu-init"];
        let mut command = self.command("initrd/release");
        let output = command
            .args(options)
            .arg(&out)
            .args(programs)
            .output()
            .unwrap();
        match output.status.success() {
            true => Ok(out.join(std::env::consts::ARCH)),
            false => Err(crate::stderr(&output)),
        }
    }
}

/// A checkout and its release, which tests only read.
fn released() -> Option<(&'static Checkout, &'static Path)> {
    static RELEASED: OnceLock<Option<(Checkout, PathBuf)>> = OnceLock::new();
    let made = RELEASED.get_or_init(|| {
        // Never dropped, so always at the same place.
        let temp = TempDir(Path::new(env!("CARGO_TARGET_TMPDIR")).join("release"));
        let checkout = Checkout::below(temp, "checkout")?;
        let out = checkout
            .release("out", &[])
            .unwrap_or_else(|e| panic!("{e}"));
        Some((checkout, out))
    });
    made.as_ref()
        .map(|(checkout, out)| (checkout, out.as_path()))
}

/// Standard output of a program that has to succeed.
fn printed(program: &str, arguments: &[&str], folder: &Path) -> String {
    let output = run(program, arguments, folder);
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {output:?}"
    );
    crate::stdout(&output)
}

fn run(program: &str, arguments: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap()
}

/// Sums and names of SHA256SUMS.
fn sums(release: &Path) -> Vec<(String, String)> {
    let text = text(release.join("SHA256SUMS"));
    let pairs = text.lines().map(|line| line.split_once("  ").unwrap());
    pairs.map(|(sum, name)| (name.into(), sum.into())).collect()
}

#[test]
fn the_sums_are_of_all_files_of_a_release() {
    let Some((_, release)) = released() else {
        return;
    };
    let mut names: Vec<String> = sums(release).into_iter().map(|(name, _)| name).collect();
    printed(
        "sha256sum",
        &["--check", "--strict", "--quiet", "SHA256SUMS"],
        release,
    );
    names.push("SHA256SUMS".into());
    names.sort();
    assert_eq!(names, crate::names(release));
    let has = |end: &str| names.iter().any(|name| name.ends_with(end));
    assert!(
        has(".deb") && has(".rpm") && has(".oci.tar") && has("provenance.json"),
        "{names:?}"
    );
    let ids = text(release.join("BUILD-IDS"));
    assert_eq!(ids.lines().count(), 2, "{ids}");
}

#[test]
fn a_release_has_the_same_bytes_in_another_folder_for_another_user() {
    let Some((first_checkout, release)) = released() else {
        return;
    };
    let other = Checkout::new("release-again", "of another/length").unwrap();
    let tmp = TempDir::new("release-again-tmp");
    let tmp = &tmp.0;
    let script = "umask 077; exec \"$0\" \"$@\"";
    let again = |name: &str, epoch: &str| {
        let mut command = Command::new("bash");
        let mut out = other.folder.parent().unwrap().join(name);
        let output = command
            .args(["-c", script])
            .arg(other.path("initrd/release"))
            .arg(&out)
            .args(["kata-gpu-boot", "kata-gpu-init"])
            .env("MAINTAINER", "A Releaser <releases@kata.test>")
            .env("SOURCE_DATE_EPOCH", epoch)
            .env("TZ", "Asia/Tokyo")
            .env("TMPDIR", tmp)
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("LD_LIBRARY_PATH")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", crate::stderr(&output));
        out.push(std::env::consts::ARCH);
        sums(&out)
    };
    let commit = |checkout: &Checkout| checkout.git("show --raw --format=raw HEAD");
    assert_eq!(
        commit(&other),
        commit(first_checkout),
        "the checkouts differ"
    );
    let first = sums(release);
    assert_eq!(again("same", EPOCH), first);
    // Negative control: another date, which programs and their lists do not have.
    for ((name, sum), (_, later)) in first.iter().zip(again("later", "1700000001")) {
        let is_dated = [".deb", ".rpm", ".oci.tar", "provenance.json"];
        let is_dated = is_dated.iter().any(|end| name.ends_with(end));
        assert_eq!(*sum != later, is_dated, "{name}");
    }
}

#[test]
fn a_release_of_changed_sources_has_no_provenance() {
    let Some(checkout) = Checkout::new("release-changed", "checkout") else {
        return;
    };
    crate::write(checkout.path("initrd/new"), "");
    let key = checkout.folder.parent().unwrap().join("key");
    crate::write(&key, "");
    let error = checkout
        .release("signed", &["--sign", "minisign:key"])
        .unwrap_err();
    assert!(error.contains("no commit has these sources"), "{error}");
    let release = checkout.release("out", &[]).unwrap();
    assert!(
        sums(&release)
            .iter()
            .all(|(name, _)| name != "provenance.json")
    );
    assert!(!release.join("provenance.json").exists());
}
