//! `install --print daemonset`: a DaemonSet whose pods run `install --node` on every node that has
//! Kata, as kata-deploy lays it out.
//!
//! What stands in it is for the nodes, so nothing is read here. It needs no rights in the cluster:
//! the label comes from a file that Node Feature Discovery reads, which clusters with GPUs have from
//! NVIDIA's operator or Kata's chart.

use super::Args;
use super::refusal::Refusal;
use std::path::{Path, PathBuf};

const TEMPLATE: &str = include_str!("daemonset.yaml.in");
/// Where a path of kata-deploy's configurations leaves the folder that Kata is installed in.
const DEFAULTS: &str = "/share/defaults/kata-containers/";
const NAME: &str = "kata-gpu-init";
const FEATURES: &str = "/etc/kubernetes/node-feature-discovery/features.d";
/// In the pods' image.
const PROGRAM: &str = "/kata-gpu-boot";

/// A text in YAML, whatever is in it: YAML takes JSON's strings.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A path as text.
fn text(path: &Path) -> Result<&str, Refusal> {
    path.to_str().filter(|path| path.starts_with('/')).ok_or_else(|| {
        Refusal::at(path, "is not a path from the root on, in UTF-8").cure("give the path on the nodes, or in the pods' image")
    })
}

/// The folder that Kata is installed in, of a configuration of kata-deploy's.
fn prefix(config: &str) -> Result<&str, Refusal> {
    config.find(DEFAULTS).filter(|length| *length > 0).and_then(|length| config.get(..length)).ok_or_else(|| {
        let why = format!("is not below a PREFIX{DEFAULTS} of kata-deploy's, of which nodes are served by a DaemonSet");
        Refusal::at(Path::new(config), why)
            .cure("name one like /opt/kata/share/defaults/kata-containers/configuration-qemu-nvidia-gpu.toml")
    })
}

/// The YAML.
pub fn print(args: &Args) -> Result<String, Refusal> {
    let config = text(&args.kata_config)?;
    let prefix = prefix(config)?;
    let (option, guest) = match (&args.initrd, &args.image) {
        (Some(initrd), _) => ("--initrd", initrd),
        (None, Some(image)) => ("--image", image),
        (None, None) => {
            let refusal = Refusal::of_argument("--print daemonset", "needs --initrd or --image");
            return Err(refusal.cure("name the file in the pods' image, like --initrd /gpu.initrd"));
        }
    };
    let name = args.name.as_ref().map_or(NAME.to_string(), |name| name.to_string());
    let dir = match &args.place.dir {
        Some(dir) => text(dir)?.to_string(),
        None => format!("{prefix}/share/{name}"),
    };
    if !dir.starts_with(&format!("{prefix}/")) {
        let refusal = Refusal::at(Path::new(&dir), format!("is not below {prefix}, which is all that the pods see"));
        return Err(refusal.cure("leave --node away, or name a folder there"));
    }
    let feature = match &args.place.node_feature {
        Some(file) => file.clone(),
        None => PathBuf::from(FEATURES).join(&name),
    };
    let (features, label) = (feature.parent().unwrap_or(Path::new("/")), feature.file_name().unwrap_or_default());
    let mut words =
        vec![PROGRAM, "install", "--kata-config", config, option, text(guest)?, "--node", &dir, "--node-feature", text(&feature)?];
    args.params.iter().for_each(|word| words.extend(["--param", word]));
    args.unset.iter().for_each(|word| words.extend(["--unset", word]));
    if let Some(verity) = &args.verity {
        words.extend(["--verity", verity]);
    }
    let version = args.kata_version.map(|version| version.to_string());
    if let Some(version) = &version {
        words.extend(["--kata-version", version]);
    }
    words.extend(args.no_user_space.then_some("--no-user-space"));
    words.extend(args.force.then_some("--force"));
    let command = words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(", ");
    // Not the folder itself: kata-deploy removes and makes it, and the pods would go on with the one that was.
    let mount = Path::new(prefix).parent().and_then(Path::to_str).filter(|parent| *parent != "/").unwrap_or(prefix);
    let image = args.container_image.clone().unwrap_or_else(|| format!("{NAME}:{}", env!("CARGO_PKG_VERSION")));
    let values = [
        ("@NAME@", name.as_str()),
        ("@LABEL@", &label.to_string_lossy()),
        ("@IMAGE@", &quoted(&image)),
        ("@COMMAND@", &command),
        ("@KATA@", &quoted(mount)),
        ("@FEATURES@", &quoted(text(features)?)),
        ("@GUEST@", text(guest)?),
        ("@PROGRAM@", PROGRAM),
    ];
    // Once through the template: a value that looks like another's place stays as it is.
    let mut yaml = String::new();
    let mut rest = TEMPLATE;
    while let Some((at, place, value)) = values.iter().filter_map(|(place, value)| Some((rest.find(place)?, *place, *value))).min() {
        let (before, after) = rest.split_at(at);
        yaml.push_str(before);
        yaml.push_str(value);
        rest = after.strip_prefix(place).unwrap_or_default();
    }
    yaml.push_str(rest);
    Ok(yaml)
}
