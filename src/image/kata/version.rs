//! Runtime that reads a configuration, the section that it reads, and its version.
//!
//! The configuration identifies the runtime: runtime-rs needs `runtime.hypervisor_name`, and the Go
//! runtime has no such key. The version is the answer to `--version` of the shim that was installed
//! with the configuration; containerd starts the same program as root. No other program is run. The
//! shim is not run where a user other than root and the caller could have replaced it. Where it
//! does not answer, the file VERSION below Kata's prefix has the version: archives of releases have
//! it.

use super::kata_config::KataConfig;
use super::merge::{Effective, Runtime, with_ours};
use super::refusal::Refusal;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use toml::Value;

/// Both shims answer within milliseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The answer, or the file, is one line.
const MAX_ANSWER: u64 = 4096;
/// Directory of configurations below Kata's prefix.
const CONFIG_DIR: &str = "share/defaults/kata-containers";
const SHIM: &str = "containerd-shim-kata-v2";
const VERSION: &str = "VERSION";

/// A configuration with its runtime, and the section of the hypervisor that it starts.
#[derive(Debug)]
pub struct Configured {
    pub config: KataConfig,
    pub runtime: Runtime,
    pub section: String,
}

impl Configured {
    /// Reads all files, or returns all refusals.
    pub fn read(given: &Path) -> Result<Self, Vec<Refusal>> {
        let config = KataConfig::read(given)?;
        let (runtime, section) = runtime_and_section(&config).map_err(|refusal| vec![refusal])?;
        Ok(Self {
            config,
            runtime,
            section,
        })
    }

    /// Effective values with this text as our drop-in.
    pub fn with(&self, text: Option<&[u8]>) -> Effective {
        with_ours(&self.config, self.runtime, text)
    }

    /// Effective values with the drop-in that is there.
    pub fn now(&self) -> Effective {
        self.with(self.config.ours.text())
    }

    /// Path of a key of the section.
    pub fn key<'a>(&'a self, key: &'a str) -> [&'a str; 3] {
        ["hypervisor", &self.section, key]
    }
}

/// A release; a suffix after `-` or `+` is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl std::str::FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.split(['-', '+']).next().unwrap_or_default();
        let parts: Vec<u32> = number
            .split('.')
            .map_while(|part| part.parse().ok())
            .collect();
        match parts.as_slice() {
            [major, minor, patch] if number.split('.').count() == 3 => {
                Ok(Version::new(*major, *minor, *patch))
            }
            _ => Err("a Kata version looks like 3.27.0".into()),
        }
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl Version {
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }
}

/// Kata's version, and how it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Known {
    Stated(Version),
    /// By the shim, or by the file.
    Asked(Version, PathBuf),
    Unknown(String),
}

impl Known {
    pub fn version(&self) -> Option<Version> {
        match self {
            Known::Stated(version) | Known::Asked(version, _) => Some(*version),
            Known::Unknown(_) => None,
        }
    }
}

/// The runtime, and the section of the hypervisor that it starts.
fn runtime_and_section(config: &KataConfig) -> Result<(Runtime, String), Refusal> {
    // Keys of [runtime] merge the same way in both runtimes.
    let effective = Effective::of(Runtime::Rust, &config.base, &config.others);
    let file = &config.base.path;
    let named = |key: &str| effective.text(&["runtime", key]);
    if let Some(name) = named("hypervisor_name") {
        return match effective.get(&["hypervisor", name]) {
            Some(Value::Table(_)) => Ok((Runtime::Rust, name.to_string())),
            _ => {
                let origin = effective
                    .origin(&["runtime", "hypervisor_name"])
                    .unwrap_or(file);
                Err(
                    Refusal::at(origin, "names a hypervisor that has no section")
                        .key("runtime.hypervisor_name", &format!("\"{name}\""))
                        .cure(format!("add [hypervisor.{name}]")),
                )
            }
        };
    }
    if let Some(name) = named("name") {
        return Err(Refusal::at(
            file,
            "is of runtime-rs, which needs runtime.hypervisor_name as well",
        )
        .key("runtime.name", &format!("\"{name}\""))
        .cure("name the hypervisor"));
    }
    let effective = Effective::of(Runtime::Go, &config.base, &config.others);
    let sections: Vec<&String> = match effective.table.get("hypervisor") {
        Some(Value::Table(all)) => all
            .iter()
            .filter(|(_, section)| section.is_table())
            .map(|(name, _)| name)
            .collect(),
        _ => Vec::new(),
    };
    match sections.as_slice() {
        [] => Err(Refusal::at(file, "has no [hypervisor.NAME] section")
            .cure("name a Kata configuration, like configuration-qemu-nvidia-gpu.toml")),
        [only] => Ok((Runtime::Go, (*only).clone())),
        several => {
            let names: Vec<String> = several
                .iter()
                .map(|name| format!("[hypervisor.{name}]"))
                .collect();
            Err(
                Refusal::at(file, "the Go runtime starts one of them at random")
                    .key("hypervisor", &names.join(", "))
                    .cure("keep one section, in the file and in config.d"),
            )
        }
    }
}

/// Kata's directory; None if the configuration is not in it.
fn prefix(config: &Path) -> Option<&Path> {
    let dir = config.ancestors().find(|dir| dir.ends_with(CONFIG_DIR))?;
    dir.ancestors()
        .nth(Path::new(CONFIG_DIR).components().count())
}

fn shim_below(prefix: &Path, runtime: Runtime) -> PathBuf {
    match runtime {
        Runtime::Go => prefix.join("bin").join(SHIM),
        Runtime::Rust => prefix.join("runtime-rs/bin").join(SHIM),
    }
}

/// The shim installed with a configuration; None if the configuration is not in Kata's directory.
pub fn shim(config: &Path, runtime: Runtime) -> Option<PathBuf> {
    prefix(config).map(|prefix| shim_below(prefix, runtime))
}

/// Asks a configuration's shim for its version, and else the file.
pub fn ask(config: &Path, runtime: Runtime) -> Known {
    let Some(prefix) = prefix(config) else {
        return Known::Unknown(format!("{} is not below a {CONFIG_DIR}", config.display()));
    };
    let shim = shim_below(prefix, runtime);
    let no_answer = match answer(&shim).and_then(|answer| version_in(&answer)) {
        Ok(version) => return Known::Asked(version, shim),
        Err(why) => why,
    };
    let file = prefix.join(VERSION);
    match written(&file) {
        Ok(version) => Known::Asked(version, file),
        Err(why) => Known::Unknown(format!(
            "{} --version: {no_answer}; {}: {why}",
            shim.display(),
            file.display()
        )),
    }
}

/// The version in a file, which is that of a release, or that of a tag before the build.
fn written(file: &Path) -> Result<Version, String> {
    is_trusted(file)?;
    let mut text = String::new();
    if !file.is_file() {
        return Err("not a file".into());
    }
    let file = std::fs::File::open(file).map_err(|e| e.to_string())?;
    file.take(MAX_ANSWER)
        .read_to_string(&mut text)
        .map_err(|e| e.to_string())?;
    text.trim().parse()
}

/// `Kata Containers containerd shim (Golang): id: "io.containerd.kata.v2", version: 3.27.0, commit:
/// ...`
fn version_in(answer: &str) -> Result<Version, String> {
    let word = answer
        .split_once("version: ")
        .map(|(_, rest)| rest.split([',', '\n', ' ']).next().unwrap_or_default());
    word.ok_or("no version in its answer".to_string())?.parse()
}

/// Fails unless only root and the caller can change the file and each directory of its path.
fn is_trusted(file: &Path) -> Result<(), String> {
    let file = std::fs::canonicalize(file).map_err(|e| e.to_string())?;
    let caller = nix::unistd::geteuid().as_raw();
    for path in file.ancestors() {
        let metadata = std::fs::symlink_metadata(path).map_err(|e| e.to_string())?;
        let (owner, mode) = (metadata.uid(), metadata.mode());
        let owned = owner == 0 || owner == caller;
        // In a sticky directory like /tmp, users cannot replace each other's entries.
        let shut = mode & 0o022 == 0 || metadata.is_dir() && mode & 0o1000 != 0;
        if !owned || !shut {
            return Err(format!(
                "not trusted: others can change {} (owner {owner}, mode {:o})",
                path.display(),
                mode & 0o7777
            ));
        }
    }
    Ok(())
}

fn answer(shim: &Path) -> Result<String, String> {
    is_trusted(shim)?;
    let mut child = Command::new(shim)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| e.to_string())?;
    let Some(stdout) = child.stdout.take() else {
        return Err("no pipe".into());
    };
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut answer = Vec::new();
        let read = stdout.take(MAX_ANSWER).read_to_end(&mut answer);
        // The receiver may have timed out.
        let _late = sender.send(read.map(|_| answer));
    });
    let read = receiver.recv_timeout(ANSWER_TIMEOUT);
    // The answer was read or the time is over. A child that has ended is not signalled.
    let _ended = child.kill();
    let _status = child.wait();
    match read {
        Ok(Ok(answer)) => Ok(String::from_utf8_lossy(&answer).into_owned()),
        Ok(Err(e)) => Err(e.to_string()),
        Err(_) => Err(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared_as_numbers() {
        let version = |text: &str| text.parse::<Version>();
        assert!(version("3.9.0").unwrap() < version("3.27.0").unwrap());
        assert_eq!(version("4.0.0-rc1").unwrap(), version("4.0.0").unwrap());
        for bad in [
            "",
            "3",
            "3.27",
            "v3.27.0",
            "3.27.x",
            "3.27.0.1",
            "99999999999.0.0",
        ] {
            assert!(version(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_shims_own_line_has_the_version() {
        let go = "Kata Containers containerd shim (Golang): id: \"io.containerd.kata.v2\", \
                  version: 3.27.0, commit: abc-dirty\n";
        let rust = "Kata Containers containerd shim (Rust): id: io.containerd.kata.v2, version: \
                    4.1.0, commit: abc";
        assert_eq!(version_in(go).unwrap().to_string(), "3.27.0");
        assert_eq!(version_in(rust).unwrap().to_string(), "4.1.0");
        assert!(version_in("Usage: shim\n").is_err());
        assert!(version_in("version: ").is_err());
    }
}
