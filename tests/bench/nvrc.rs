//! Row `nvrc` of `bench boot`: a boot by the incumbent's own programs, which `NVRC=DIR` has. The
//! README beside this file describes the folder.
//!
//! A script in the place of NVRC, of nvidia-ctk and of the agent has each begin and end stamped on
//! the console (tests/guest/stamped.rs). nvidia-persistenced and NVML are the tests' stand-ins.

use super::boot::Milestones;
use super::cdi::below;
use anyhow::{Context, Result, ensure};
use kata_gpu_tests::vm::harness::{Booted, Guest, TestContext};
use std::path::{Path, PathBuf};
use std::process::Command;

pub const ROW: &str = "nvrc";
/// Word of the kernel command line that starts it.
pub const WORDS: &str = "hardware.init=/NVRC";
/// Text on the console from which the agent can be asked.
pub const AGENT_BEGINS: &str = "stamped: kata-agent begin ";

/// Files that the folder must have. All of its files go into the guest, at the same paths.
const PROGRAMS: [&str; 4] = [
    "NVRC",
    "sbin/modprobe",
    "bin/nvidia-ctk",
    "usr/bin/nvidia-cdi-hook",
];
const AGENT: &str = "usr/bin/kata-agent";
/// Programs whose times the row has.
const STAMPED: [&str; 3] = ["NVRC", "bin/nvidia-ctk", AGENT];

/// The incumbent's programs, by their paths in the guest.
pub struct Nvrc(Vec<(String, Vec<u8>)>);

/// The folder's files, where `NVRC=DIR` is set.
pub fn find() -> Result<Option<Nvrc>> {
    let Some(folder) = std::env::var_os("NVRC").map(PathBuf::from) else {
        return Ok(None);
    };
    for path in PROGRAMS {
        ensure!(
            folder.join(path).is_file(),
            "NVRC={}: {path} is missing: tests/bench/README.md lists what belongs there",
            folder.display()
        );
    }
    read_all(&folder).context("NVRC").map(Nvrc).map(Some)
}

/// All files of a folder, by their paths below it.
fn read_all(folder: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let all = below(folder).with_context(|| format!("read {}", folder.display()))?;
    let read = |file: PathBuf| {
        let path = file.strip_prefix(folder)?.to_str();
        let path = path.with_context(|| format!("{} is no UTF-8", file.display()))?;
        let text = std::fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        Ok((path.to_string(), text))
    };
    let no_folder = |path: &PathBuf| path.is_symlink() || !path.is_dir();
    all.into_iter().filter(no_folder).map(read).collect()
}

impl Nvrc {
    /// The guest with these programs, this agent (the test agent by default) and the stand-ins.
    pub fn add_to(
        &self,
        guest: Guest,
        context: &TestContext,
        agent: Option<&[u8]>,
    ) -> Result<Guest> {
        let read =
            |path: &Path| std::fs::read(path).with_context(|| format!("read {}", path.display()));
        let agent = match agent {
            Some(agent) => agent.to_vec(),
            None => read(&context.guest_program("kata-agent"))?,
        };
        let mut guest = guest
            .nvml()
            .file("bin/nvidia-persistenced", b"#!/usr/bin/test-programs\n");
        let agent = (AGENT.to_string(), agent);
        for (path, text) in self.0.iter().chain([&agent]) {
            if !STAMPED.contains(&path.as_str()) {
                guest = guest.file(path, text);
                continue;
            }
            let name = path.rsplit('/').next().unwrap_or(path);
            guest = guest
                .file(&format!("stamped/{name}"), text)
                .file(path, b"#!/usr/bin/test-programs stamped\n");
        }
        for (path, text) in module_index(context)? {
            guest = guest.file(&path, &text);
        }
        Ok(guest)
    }
}

/// The index of the simulated driver's modules, which modprobe reads; nothing else in a guest does.
fn module_index(context: &TestContext) -> Result<Vec<(String, Vec<u8>)>> {
    let release = context.kernel_version()?;
    let tree = context.work_dir.join("nvrc-modules");
    let folder = tree.join(context.modules()?);
    std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    for module in ["nvidia.ko", "nvidia-uvm.ko"] {
        let from = context.target.join("simulator").join(module);
        let copied = std::fs::copy(&from, folder.join(module));
        copied.with_context(|| format!("copy {}", from.display()))?;
    }
    let made = Command::new("/sbin/depmod")
        .arg("-b")
        .args([&tree, Path::new(&release)])
        .output()
        .context("execute depmod")?;
    ensure!(
        made.status.success(),
        "depmod: {}: {}",
        made.status,
        String::from_utf8_lossy(&made.stderr).trim()
    );
    let mut files = read_all(&tree)?;
    files.retain(|(path, _)| path.ends_with(".bin"));
    ensure!(!files.is_empty(), "depmod has made no index");
    Ok(files)
}

/// Milestones from the console. The spec is there when nvidia-ctk has ended.
pub fn milestones(booted: &Booted) -> Result<Milestones> {
    let stamp = |text: &str| {
        let found = booted.console.number_after(text);
        found.with_context(|| format!("{text:?} is not on the console"))
    };
    let published = stamp("stamped: nvidia-ctk end ")?;
    Ok(Milestones {
        start_ns: stamp("stamped: NVRC begin ")?,
        exec_ns: stamp(AGENT_BEGINS)?,
        first_publication_ns: published,
        last_publication_ns: published,
    })
}
