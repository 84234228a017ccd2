//! Shim and configuration of a sandbox, from a configuration file or from a runtime in containerd's
//! own configuration, by the name that a RuntimeClass uses.

use crate::kata::refusal::Refusal;
use crate::kata::version::{self, Configured};
use anyhow::{Context, Result, anyhow, bail};
use kata_gpu_report::data::text::printable;
use std::path::{Path, PathBuf};
use std::process::Command;
use toml::{Table, Value};

/// A runtime as containerd starts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// Name or absolute path of the shim.
    pub shim: String,
    pub config: PathBuf,
}

/// Shim where none is known: containerd finds its program in PATH.
const DEFAULT: &str = "io.containerd.kata.v2";

impl Runtime {
    /// `wanted`: path of a configuration file, with a `/`, or the name of a runtime in containerd's
    /// configuration. A name never means a file in the working directory: anybody can write to
    /// /tmp.
    pub fn find(wanted: &str) -> Result<Self> {
        if wanted.contains('/') {
            if !Path::new(wanted).is_file() {
                bail!(
                    "{}: no such file: give a Kata configuration, or the name of a runtime that \
                     containerd knows",
                    printable(wanted)
                );
            }
            return Self::of_file(Path::new(wanted));
        }
        let cure = "give the Kata configuration file instead";
        let dump = Command::new("containerd").args(["config", "dump"]).output();
        let dump = dump.with_context(|| {
            format!(
                "run containerd config dump, to find runtime {}: {cure}",
                printable(wanted)
            )
        })?;
        if !dump.status.success() {
            bail!(
                "containerd config dump: {}: {cure}",
                printable(String::from_utf8_lossy(&dump.stderr).trim())
            );
        }
        let text = String::from_utf8_lossy(&dump.stdout);
        let table: Table = text
            .parse()
            .with_context(|| format!("containerd config dump: {cure}"))?;
        Self::in_containerds(&table, wanted)
    }

    fn of_file(file: &Path) -> Result<Self> {
        let of = Configured::read(file).map_err(|refusals| {
            let first = refusals
                .first()
                .map_or("not read".into(), Refusal::to_string);
            anyhow!(first)
        })?;
        let config = of.config.base.path;
        let shim = version::shim(&config, of.runtime).filter(|shim| shim.is_file());
        let shim = shim.map_or_else(
            || DEFAULT.to_string(),
            |shim| shim.to_string_lossy().into_owned(),
        );
        Ok(Self { shim, config })
    }

    /// Finds the runtime in the table that containerd prints. Table versions 1 and 2 have different
    /// names for the CRI plugin.
    fn in_containerds(table: &Table, name: &str) -> Result<Self> {
        let plugins = table.get("plugins").and_then(Value::as_table);
        let all: Vec<&Table> = plugins
            .into_iter()
            .flat_map(|plugins| plugins.values())
            .filter_map(|plugin| plugin.get("containerd")?.get("runtimes")?.as_table())
            .collect();
        let Some(runtime) = all.iter().find_map(|runtimes| runtimes.get(name)) else {
            let names: Vec<String> = all
                .iter()
                .flat_map(|runtimes| runtimes.keys())
                .map(|name| printable(name))
                .collect();
            bail!(
                "containerd has no runtime {}, it has {}; a file is given with a /, like ./{0}",
                printable(name),
                if names.is_empty() {
                    "none".into()
                } else {
                    names.join(", ")
                }
            );
        };
        let text = |value: Option<&Value>| {
            value
                .and_then(Value::as_str)
                .filter(|text| !text.is_empty())
                .map(str::to_string)
        };
        let config = text(
            runtime
                .get("options")
                .and_then(|options| options.get("ConfigPath")),
        );
        let config = config.with_context(|| {
            format!(
                "containerd's runtime {} names no ConfigPath: give the Kata configuration file \
                     instead",
                printable(name)
            )
        })?;
        let shim = text(runtime.get("runtime_path")).or_else(|| text(runtime.get("runtime_type")));
        Ok(Self {
            shim: shim.unwrap_or_else(|| DEFAULT.into()),
            config: config.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = r#"
        version = 2
        [plugins."io.containerd.gc.v1.scheduler"]
        mutation_threshold = 100
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kata-gpu]
        runtime_type = "io.containerd.kata-gpu.v2"
        runtime_path = "/opt/kata/bin/containerd-shim-kata-v2"
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kata-gpu.options]
        ConfigPath = "/opt/kata/c.toml"
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kata]
        runtime_type = "io.containerd.kata.v2"
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kata.options]
        ConfigPath = "/etc/c.toml"
    "#;

    #[test]
    fn a_runtime_is_found_in_either_version_of_containerds_config() {
        for cri in ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"] {
            let table: Table = DUMP
                .replace("io.containerd.grpc.v1.cri", cri)
                .parse()
                .unwrap();
            let found =
                |name| Runtime::in_containerds(&table, name).map_err(|error| error.to_string());
            let of = |shim: &str, config: &str| {
                Ok(Runtime {
                    shim: shim.into(),
                    config: config.into(),
                })
            };
            assert_eq!(
                found("kata-gpu"),
                of("/opt/kata/bin/containerd-shim-kata-v2", "/opt/kata/c.toml")
            );
            assert_eq!(found("kata"), of("io.containerd.kata.v2", "/etc/c.toml"));
            let error = found("kata-qemu").unwrap_err();
            assert!(
                error.contains("no runtime kata-qemu, it has kata, kata-gpu, runc"),
                "{error}"
            );
            assert!(found("runc").unwrap_err().contains("names no ConfigPath"));
        }
    }
}
