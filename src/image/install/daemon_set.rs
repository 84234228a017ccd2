//! `install --print daemonset`: a DaemonSet whose pods run `install --node` on every node that has
//! Kata, as kata-deploy lays Kata out; and the DaemonSet of `uninstall`, which replaces it.
//!
//! The values are for the nodes, so no local file is read. The pods need no rights in the cluster:
//! Node Feature Discovery reads the label from a file. Clusters with GPUs have Node Feature
//! Discovery from NVIDIA's operator or from Kata's chart.

use super::here::{Args, Said};
use super::manifests::{Name, base_config};
use super::node;
use super::place::Place;
use super::uninstall;
use crate::kata::refusal::Refusal;
use std::path::{Path, PathBuf};

const TEMPLATE: &str = include_str!("daemonset.yaml.in");
/// Part of a configuration's path after the folder that kata-deploy installs Kata in.
const DEFAULTS: &str = "/share/defaults/kata-containers/";
const FEATURES: &str = "/etc/kubernetes/node-feature-discovery/features.d";
/// Path of the program in the pods' image.
const PROGRAM: &str = "/kata-gpu-boot";

const INSTALLS: &str = "\
# Makes GPU guests of this configuration start from @GUEST@, on every node that has Kata. Made by
# `kata-gpu-boot install --print daemonset`. The image has to hold kata-gpu-boot, linked statically,
# at @PROGRAM@, and the guest at @GUEST@; nothing else in it is used.
#
# A node on which that is in effect has the label feature.node.kubernetes.io/@LABEL@=true, from Node
# Feature Discovery, which reads a file on the node: the pods need no rights in the cluster. GPU pods
# that shall not start otherwise ask for it with a nodeSelector, their own or their RuntimeClass's.
#
# Going back: `kata-gpu-boot uninstall --print daemonset` prints what takes this one's place and
# uninstalls. To delete this one changes nothing on the nodes.";
const UNINSTALLS: &str = "\
# Takes away from every node what the DaemonSet of this name has installed, whose place it takes.
# Made by `kata-gpu-boot uninstall --print daemonset`. The image has to hold kata-gpu-boot, linked
# statically, at @PROGRAM@. Delete it when all its pods are ready.";

/// Any text as a YAML string: YAML accepts JSON's strings.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A path as text.
fn text(path: &Path) -> Result<&str, Refusal> {
    path.to_str()
        .filter(|path| path.starts_with('/'))
        .ok_or_else(|| {
            Refusal::at(path, "is not a path from the root on, in UTF-8")
                .cure("give the path on the nodes, or in the pods' image")
        })
}

/// The folder that Kata is installed in, from the path of a kata-deploy configuration.
fn prefix(config: &str) -> Result<&str, Refusal> {
    config.find(DEFAULTS).filter(|length| *length > 0).and_then(|length| config.get(..length)).ok_or_else(|| {
        let why = format!("is not below a PREFIX{DEFAULTS} of kata-deploy's, of which nodes are served by a DaemonSet");
        Refusal::at(Path::new(config), why)
            .cure("name one like /opt/kata/share/defaults/kata-containers/configuration-qemu-nvidia-gpu.toml")
    })
}

/// Values that the DaemonSets of `install` and of `uninstall` share.
struct DaemonSet {
    name: String,
    config: String,
    /// Folder of the copies, and file of the label.
    dir: String,
    feature: PathBuf,
    mount: String,
    image: String,
}

impl DaemonSet {
    fn new(
        config: &Path,
        place: &Place,
        name: Option<&Name>,
        image: Option<&str>,
    ) -> Result<Self, Refusal> {
        let path = text(config)?;
        let prefix = prefix(path)?;
        let name = match name {
            Some(name) => name.clone(),
            // Each configuration has a DaemonSet of its own.
            None => format!("kata-gpu-init-{}", base_config(config).unwrap_or("?"))
                .parse()
                .map_err(|why: String| Refusal::at(config, why).cure("give a name with --name"))?,
        };
        let dir = match &place.dir {
            Some(dir) => text(dir)?.to_string(),
            None => format!("{prefix}/share/{name}"),
        };
        if !dir.starts_with(&format!("{prefix}/")) {
            let refusal = Refusal::at(
                Path::new(&dir),
                format!("is not below {prefix}, which is all that the pods see"),
            );
            return Err(refusal.cure("omit --node, or name a folder there"));
        }
        let feature = place
            .node_feature
            .clone()
            .unwrap_or_else(|| PathBuf::from(FEATURES).join(name.to_string()));
        // Mount the parent: kata-deploy removes and recreates the folder, and a mount of the folder
        // would keep the removed one.
        let mount = Path::new(prefix)
            .parent()
            .and_then(Path::to_str)
            .filter(|parent| *parent != "/")
            .unwrap_or(prefix);
        let image = image.map_or_else(
            || format!("kata-gpu-init:{}", env!("CARGO_PKG_VERSION")),
            str::to_string,
        );
        Ok(Self {
            name: name.to_string(),
            config: path.into(),
            dir,
            feature,
            mount: mount.into(),
            image,
        })
    }

    /// `about`: the comment at the top; `words`: arguments in addition to those of both commands.
    fn yaml(
        &self,
        about: &str,
        step: &str,
        guest: &str,
        words: &[&str],
    ) -> Result<String, Refusal> {
        let feature = text(&self.feature)?;
        let common = [
            PROGRAM,
            step,
            "--kata-config",
            &self.config,
            "--node",
            &self.dir,
            "--node-feature",
            feature,
        ];
        let command = common
            .iter()
            .chain(words)
            .map(|word| quoted(word))
            .collect::<Vec<_>>()
            .join(", ");
        let (features, label) = (
            self.feature.parent().unwrap_or(Path::new("/")),
            self.feature.file_name().unwrap_or_default(),
        );
        let values = [
            ("@NAME@", self.name.as_str()),
            ("@STEP@", step),
            ("@LABEL@", &label.to_string_lossy()),
            ("@IMAGE@", &quoted(&self.image)),
            ("@COMMAND@", &command),
            ("@KATA@", &quoted(&self.mount)),
            ("@FEATURES@", &quoted(text(features)?)),
            ("@GUEST@", guest),
            ("@PROGRAM@", PROGRAM),
        ];
        let template = format!("{about}\n{TEMPLATE}");
        // Replace in one pass: a value that looks like a placeholder stays as it is.
        let (mut yaml, mut rest) = (String::new(), template.as_str());
        while let Some((at, place, value)) = values
            .iter()
            .filter_map(|(place, value)| Some((rest.find(place)?, *place, *value)))
            .min()
        {
            let (before, after) = rest.split_at(at);
            yaml.push_str(before);
            yaml.push_str(value);
            rest = after.strip_prefix(place).unwrap_or_default();
        }
        Ok(yaml + rest)
    }
}

fn said(yaml: Result<String, Refusal>) -> Said {
    match yaml {
        Ok(yaml) => Said::done(yaml),
        Err(refusal) => Said::refused(format!("refused: {refusal}\n")),
    }
}

/// `install --print daemonset`.
pub fn of_install(args: &Args) -> Said {
    said(installing(args))
}

fn installing(args: &Args) -> Result<String, Refusal> {
    let set = DaemonSet::new(
        &args.kata_config,
        &args.place,
        args.name.as_ref(),
        args.container_image.as_deref(),
    )?;
    let (option, guest) = match (&args.initrd, &args.image) {
        (Some(initrd), _) => ("--initrd", initrd),
        (None, Some(image)) => ("--image", image),
        (None, None) => {
            let refusal = Refusal::of_argument("--print daemonset", "needs --initrd or --image");
            return Err(refusal.cure("name the file in the pods' image, like --initrd /gpu.initrd"));
        }
    };
    node::nothing_unset(args)?;
    let guest = text(guest)?;
    if guest.chars().any(char::is_control) {
        return Err(Refusal::at(Path::new(guest), "has control characters").cure("rename the file"));
    }
    let mut words = vec![option, guest];
    args.params
        .iter()
        .for_each(|word| words.extend(["--param", word]));
    if let Some(verity) = &args.verity {
        words.extend(["--verity", verity]);
    }
    let version = args.kata_version.map(|version| version.to_string());
    if let Some(version) = &version {
        words.extend(["--kata-version", version]);
    }
    words.extend(args.no_user_space.then_some("--no-user-space"));
    words.extend(args.force.then_some("--force"));
    set.yaml(INSTALLS, "install", guest, &words)
}

/// `uninstall --print daemonset`.
pub fn of_uninstall(args: &uninstall::Args) -> Said {
    let set = DaemonSet::new(
        &args.kata_config,
        &args.place,
        args.name.as_ref(),
        args.container_image.as_deref(),
    );
    said(set.and_then(|set| {
        set.yaml(
            UNINSTALLS,
            "uninstall",
            "",
            if args.force { &["--force"] } else { &[] },
        )
    }))
}
