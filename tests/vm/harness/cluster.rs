//! A cluster of one node on an emulated host: Kubernetes' own programs, containerd, and nothing but
//! what the test gives it (tests/emulated-host/node).
//!
//! `KUBERNETES` names a folder with the programs, as a distribution ships them: [`PROGRAMS`]. There
//! is no network: images come from archives, and containerd's own for a pod's sandbox is made here.

use super::cri::{IMPORT, has_runtime, images};
use super::emulated_host::tar;
use super::kata::{ROOTS, set_words};
use super::{EmulatedHost, KvmGuest, KvmImage, Outcome, Shim, Size, TestContext};
use crate::trials;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Programs in the folder. The controller manager makes the pods of DaemonSets, the scheduler gives
/// them their nodes.
const PROGRAMS: [&str; 6] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kubectl",
];
const KEYS: &str = "/var/cluster/keys";
const CERTIFICATE: &str = "/var/cluster/keys/cert.pem";
const KEY: &str = "/var/cluster/keys/key.pem";
const NODE_SCRIPT: &str = "/var/cluster/node";
/// The project's folder, as far as a cluster needs it.
pub const PROJECT: &str = "/var/cluster/kata-gpu-init";
const PROJECT_TAR: &str = "/var/cluster/project.tar";
/// Name of the node: that of the host.
pub const NODE: &str = "emulated-host";
/// The two addresses of tests/emulated-host/node.
const NAMES: &str = "subjectAltName=IP:10.99.0.1,IP:10.96.0.1";
/// How long one kubectl waits: less than a script on the host may run.
pub const PATIENCE: &str = "100s";
/// How long one thing may take: ends nothing but a hang.
const DEADLINE: Duration = Duration::from_secs(1800);

/// Before a script whose kubectl is the administrator's. Over WebSockets kubectl 1.34 drops what a
/// command prints before kubectl has made the stream for that, as can happen on a busy machine.
const ADMINISTRATOR: &str = "export HOME=/root KUBECONFIG=/etc/kubernetes/admin.conf \
    KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false";

fn folder() -> Option<PathBuf> {
    std::env::var_os("KUBERNETES").map(PathBuf::from)
}

/// A node that is ready, and an administrator's kubectl on it.
pub struct Cluster {
    pub host: EmulatedHost,
}

impl Cluster {
    /// How a test ends without the programs.
    pub fn skipped(context: &TestContext) -> Result<Option<Outcome>> {
        let Some(folder) = folder() else {
            return Ok(Some(Outcome::Skipped(
                "KUBERNETES names no folder with Kubernetes' programs: KUBERNETES=DIR tests/run \
                 cluster"
                    .into(),
            )));
        };
        for program in PROGRAMS {
            let file = folder.join(program);
            ensure!(
                file.exists(),
                "{} is not there: KUBERNETES needs {}",
                file.display(),
                PROGRAMS.join(", ")
            );
        }
        EmulatedHost::skipped(context)
    }

    /// Starts one that can run guests, with more files (names on the host, and the files).
    pub fn start(
        context: &TestContext,
        image: &KvmImage,
        more: &[(&str, PathBuf)],
    ) -> Result<Self> {
        Self::start_on(context, image, more, |_| Ok(()))
    }

    /// Starts one whose containerd has a runtime of Kata's ([`super::RUNTIME`]), with images for
    /// its pods; their guests have the command line of `image`.
    pub fn start_with_kata(
        context: &TestContext,
        shim: Shim,
        image: &KvmImage,
        more: &[(&str, PathBuf)],
    ) -> Result<Self> {
        let files = [shim.archives(context)?.as_slice(), more].concat();
        let mut cluster = Self::start_on(context, image, &files, |host| {
            let config = shim.unpack(host, "")?;
            set_words(host, image.append())?;
            has_runtime(host, &config)
        })?;
        cluster.import(&images())?;
        Ok(cluster)
    }

    /// Starts one on a host that is prepared before Kubernetes begins.
    fn start_on(
        context: &TestContext,
        image: &KvmImage,
        more: &[(&str, PathBuf)],
        prepare: impl FnOnce(&mut EmulatedHost) -> Result<()>,
    ) -> Result<Self> {
        let folder = folder().context("KUBERNETES is not set")?;
        let (certificate, key) = key_pair(&context.work_dir)?;
        let project = trials::project();
        let manifests = ["src/image/deploy", "src/collect/deploy"];
        let mut files = vec![
            (CERTIFICATE.to_string(), certificate),
            (KEY.into(), key),
            (NODE_SCRIPT.into(), project.join("tests/emulated-host/node")),
            (
                PROJECT_TAR.into(),
                tar(&context.work_dir, "project.tar", &project, &manifests)?,
            ),
            (
                format!("{ROOTS}/static/application"),
                context.target.join("containers/application"),
            ),
        ];
        for program in PROGRAMS {
            files.push((format!("/usr/local/bin/{program}"), folder.join(program)));
        }
        let image_files = image.files();
        let files: Vec<(&str, &Path)> = files
            .iter()
            .map(|(name, file)| (name.as_str(), file.as_path()))
            .chain(image_files)
            .chain(more.iter().map(|(name, file)| (*name, file.as_path())))
            .collect();
        say("starting the host ...");
        let mut host = EmulatedHost::start(context, "host", Size::AS_NODE, &files)?;
        KvmGuest::prepare(&mut host)?;
        prepare(&mut host)?;
        // A VM that never runs: with it the kernel patches its scheduler's code for KVM now, on an
        // idle machine, and no guest that comes or goes has it patched again (Size::WITH_GUESTS).
        host.run(
            "setsid qemu-system-x86_64 -accel kvm -machine q35 -m 16M -S -nodefaults -display none \
             >/run/holder.log 2>&1 & sleep 1; kill -0 $! || cat /run/holder.log",
        )?;
        let start = format!(
            "set -e; mkdir -p {PROJECT} && tar -C {PROJECT} -xf {PROJECT_TAR} && rm {PROJECT_TAR}
            chmod +x {NODE_SCRIPT}; {NODE_SCRIPT} {KEYS}"
        );
        host.run_long("the start of Kubernetes", &start, DEADLINE)?;
        let mut cluster = Self { host };
        cluster.until("the API", "kubectl get --raw /readyz")?;
        cluster.import(&format!(
            "image \"$(sandbox_image)\" {ROOTS}/static '[\"/application\", \"pause\"]'"
        ))?;
        cluster.until(
            "the node",
            &format!("kubectl wait --for=condition=Ready node/{NODE} --timeout={PATIENCE}"),
        )?;
        Ok(cluster)
    }

    /// Runs a script on the host, where kubectl is the administrator's.
    pub fn run(&mut self, script: &str) -> Result<String> {
        self.host.run(&format!("{ADMINISTRATOR}\n{script}"))
    }

    /// Runs a script until it succeeds, and prints what is waited for. The script waits by itself,
    /// or looks once.
    pub fn until(&mut self, what: &str, script: &str) -> Result<String> {
        let start = Instant::now();
        say(&format!("waiting for {what} ..."));
        let script = format!("{}\n{script}", ADMINISTRATOR);
        let said = self.host.until_waited(what, &script, DEADLINE)?;
        say(&format!("  {:.0} s", start.elapsed().as_secs_f64()));
        Ok(said)
    }

    /// Waits until the newest pods of a DaemonSet are ready on all nodes.
    pub fn rolled_out(&mut self, namespace: &str, set: &str) -> Result<()> {
        let look = format!(
            "kubectl rollout status -n {namespace} ds/{set} --timeout={PATIENCE} || (kubectl get \
             pods -n {namespace} -o wide; kubectl get events -n {namespace} | tail -n 8; false)"
        );
        self.until(&format!("the rollout of {set}"), &look)
            .map(drop)
    }

    /// Runs a script that may take minutes.
    fn run_long(&mut self, what: &str, script: &str) -> Result<()> {
        let start = Instant::now();
        say(&format!("{what} ..."));
        self.host
            .run_long(what, &format!("{ADMINISTRATOR}\n{script}"), DEADLINE)?;
        say(&format!("  {:.0} s", start.elapsed().as_secs_f64()));
        Ok(())
    }

    /// Applies the kustomization of a folder.
    pub fn apply(&mut self, folder: &str) -> Result<()> {
        self.run_long("applying", &format!("kubectl apply -k {folder}"))
    }

    /// Gives containerd images, by lines `image NAME FOLDER ENTRYPOINT`.
    pub fn import(&mut self, lines: &str) -> Result<()> {
        self.run_long("importing an image", &format!("set -e\n{IMPORT}\n{lines}"))
    }

    /// Gives containerd the image of an OCI archive, which has the version as its name there, under
    /// NAME:TAG.
    pub fn import_archive(&mut self, archive: &str, name: &str, tag: &str) -> Result<()> {
        let (version, ctr) = (env!("CARGO_PKG_VERSION"), "ctr --namespace k8s.io images");
        let rename = match tag == version {
            true => "true".into(),
            false => format!("{ctr} tag --force {name}:{version} {name}:{tag}"),
        };
        let script =
            format!("{ctr} import --base-name {name} {archive} && {rename} && rm {archive}");
        self.run_long("importing an archive", &script)
    }
}

/// Waits are long here, so that they are printed.
fn say(what: &str) {
    trials::print_line(&format!("cluster: {what}"));
}

/// Certificate and key of the cluster.
fn key_pair(folder: &Path) -> Result<(PathBuf, PathBuf)> {
    std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    let (certificate, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    let output = Command::new("openssl")
        .args("req -x509 -newkey rsa:2048 -nodes -days 2".split(' '))
        .args(["-subj", "/O=system:masters/CN=api", "-addext", NAMES])
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .context("openssl is missing: apt-get install openssl")?;
    ensure!(
        output.status.success(),
        "openssl: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok((certificate, key))
}
