//! Manifests for a cluster: a RuntimeClass for a node whose configuration was changed here, or
//! values for kata-deploy's chart, which then writes the same drop-in on every node.
//!
//! The chart (since Kata 3.26) reads the handler from the line `handler: ` of the RuntimeClass's
//! text and keeps quotes, so names are unquoted; [`Name`] makes sure that YAML allows that. The
//! chart copies `configuration-<baseConfig>.toml` and writes `dropIn` to 50-overrides.toml, after
//! its own files. Not here: changing anything in a cluster.

use super::drop_in_plan::Plan;
use crate::kata::drop_in;
use crate::kata::refusal::Refusal;
use std::path::Path;

/// Host memory of the hypervisor in addition to the guest's: kata-deploy's figure for its GPU
/// classes, 10240 MiB for guests of 8192.
const OVERHEAD_MIB: i64 = 2048;
/// kata-deploy's label for nodes that have Kata.
const NODE_LABEL: &str = "katacontainers.io/kata-runtime";

/// The name of a RuntimeClass and of its handler: a DNS label that YAML parses as a string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name(String);

impl std::str::FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let ends_well = !text.starts_with('-') && !text.ends_with('-');
        // YAML may parse other words as a number or a truth value.
        let is_string = text.starts_with(|c: char| c.is_ascii_lowercase()) && text.contains('-');
        if text.len() <= 63 && text.chars().all(inner) && ends_well && is_string {
            Ok(Name(text.into()))
        } else {
            Err("a name is a word like kata-gpu-init: at most 63 of a-z, 0-9 and -, with a letter first and a - in it".into())
        }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// X of `configuration-X.toml`.
pub fn base_config(config: &Path) -> Option<&str> {
    config
        .file_name()?
        .to_str()?
        .strip_prefix("configuration-")?
        .strip_suffix(".toml")
}

/// The handler of this configuration, from the path where kata-deploy installed it.
fn installed_handler(config: &Path) -> Option<Name> {
    let dir = config.parent()?;
    if dir.parent()?.file_name()? == "custom-runtimes" {
        return dir.file_name()?.to_str()?.parse().ok();
    }
    format!("kata-{}", base_config(config)?).parse().ok()
}

/// The pod is charged for all of the guest's memory: GPU guests have it pinned.
fn overhead_mib(default_memory: i64) -> i64 {
    default_memory.saturating_add(OVERHEAD_MIB)
}

fn class(name: &Name, handler: &Name, default_memory: i64) -> String {
    let memory = overhead_mib(default_memory);
    format!(
        "kind: RuntimeClass\napiVersion: node.k8s.io/v1\nmetadata:\n  name: {name}\nhandler: {handler}\noverhead:\n  podFixed:\n    memory: \"{memory}Mi\"\n    cpu: \"1\"\nscheduling:\n  nodeSelector:\n    {NODE_LABEL}: \"true\"\n"
    )
}

/// A RuntimeClass for the configuration on this node.
pub fn runtime_class(
    name: Option<&Name>,
    config: &Path,
    default_memory: i64,
) -> Result<String, Refusal> {
    let handler = installed_handler(config)
        .or_else(|| name.cloned())
        .ok_or_else(|| {
            Refusal::at(
                config,
                "its name does not contain containerd's handler for it",
            )
            .cure("give that handler with --name")
        })?;
    let name = name.unwrap_or(&handler);
    let head = "# memory: default_memory, which VFIO pins whole, and 2 GiB for the hypervisor.\n";
    Ok(format!("{head}{}", class(name, &handler, default_memory)))
}

/// Values for kata-deploy's chart: a new runtime in addition to the existing ones.
pub fn helm(
    name: Option<&Name>,
    config: &Path,
    plan: &Plan,
    default_memory: i64,
) -> Result<String, Refusal> {
    let refuse = |why: &str, cure: &str| Refusal::at(config, why).cure(cure);
    let base = base_config(config)
        .filter(|base| {
            base.chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
        })
        .ok_or_else(|| {
            refuse(
                "its name does not contain kata-deploy's base configuration",
                "name a file like configuration-qemu-nvidia-gpu.toml",
            )
        })?;
    let name = match name {
        Some(name) => name.clone(),
        None => format!("kata-{base}-init")
            .parse()
            .map_err(|why: String| refuse(&why, "give a name with --name"))?,
    };
    let root = if plan.image { "image" } else { "initrd" };
    let indented = |text: &str| {
        text.lines()
            .map(|line| format!("        {line}\n"))
            .collect::<String>()
    };
    Ok(format!(
        "# helm upgrade kata-deploy CHART --version VERSION -f YOUR-VALUES -f this-file: those that the release has now, and these.\n# The {root} must be on every node, at this path, before a pod asks for this runtime.\ncustomRuntimes:\n  enabled: true\n  runtimes:\n    {name}:\n      baseConfig: \"{base}\"\n      dropIn: |\n{}      runtimeClass: |\n{}",
        indented(&drop_in::toml_text(plan)),
        indented(&class(&name, &name, default_memory)),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_kubernetes_and_yaml_take() {
        for good in ["kata-gpu-init", "kata-qemu-nvidia-gpu", "a-1"] {
            assert!(good.parse::<Name>().is_ok(), "{good}");
        }
        for bad in [
            "",
            "kata",
            "true",
            "1-2",
            "Kata-x",
            "kata_x-y",
            "-a-b",
            "a-b-",
            "a-b: c",
            "a-\u{e9}",
            "a-b\n",
            &format!("a-{}", "b".repeat(62)),
        ] {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_handler_follows_from_kata_deploys_configuration_path() {
        let handler = |path: &str| installed_handler(Path::new(path)).map(|name| name.to_string());
        assert_eq!(
            handler("/d/runtimes/qemu-nvidia-gpu/configuration-qemu-nvidia-gpu.toml").as_deref(),
            Some("kata-qemu-nvidia-gpu")
        );
        assert_eq!(
            handler("/d/custom-runtimes/kata-mine/configuration-qemu-nvidia-gpu.toml").as_deref(),
            Some("kata-mine")
        );
        assert_eq!(handler("/etc/kata-containers/configuration.toml"), None);
    }
}
