//! A failure means that the manifests do not work in a cluster: a DaemonSet does not come up, is
//! not replaced, hides why it cannot, or leaves something on a node; or that a boot or its Event
//! does not reach whoever asks kubectl.
//!
//! Kubernetes' own programs make, schedule and run the pods, with the images of a release and the
//! overlay of src/cli/README.md. In the first test the guest under KVM is real; its sandbox's file
//! is Kata's as the tests write it, and so are Kata's configuration and the shim that reports a
//! version. In the second all of these are Kata's own; GPUs are simulated in the guest.

mod runtime_class;

use super::harness::{
    BOOTS, Cluster, Guest, KVM_KERNEL, KvmGuest, KvmImage, NODE, Outcome, PATIENCE, PROJECT,
    TestContext, VmTest,
};
use crate::trials;
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "on_a_cluster_both_daemonsets_install_upgrade_drain_and_leave",
        run: both_daemonsets,
    },
    VmTest {
        name: "on_a_cluster_a_pod_of_a_runtime_class_boots_and_is_in_the_list",
        run: runtime_class::runtime_class,
    },
];

/// The overlay's.
const NAMESPACE: &str = "gpu-nodes";
const INSTALLER: &str = "kata-gpu-installer";
const COLLECTOR: &str = "kata-gpu-collector";
const REGISTRY: &str = "registry.example";
const OVERLAY: &str = "/var/cluster/kustomization.yaml";
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Kata's files on the node.
const KATA: &str = "/opt/kata";
const RUNTIME_DIR: &str = "/opt/kata/share/defaults/kata-containers/runtimes/qemu-nvidia-gpu";
const CONFIG: &str = "configuration-qemu-nvidia-gpu.toml";
const KERNEL: &str = "/opt/kata/share/kata-containers/vmlinux-nvidia.container";
const SHIM: &str = "/opt/kata/bin/containerd-shim-kata-v2";
/// The installer's label for Node Feature Discovery.
const FEATURE: &str = "/etc/kubernetes/node-feature-discovery/features.d/kata-gpu-init";

/// Archives on the host: the collector's image, and the installer's with one guest and another.
const ARCHIVES: [&str; 3] = [
    "/var/cluster/collector.tar",
    "/var/cluster/installer-1.tar",
    "/var/cluster/installer-2.tar",
];

/// Lists, with sums and modes, all that the pods may write to, but the shim, which the test itself
/// replaces; boots stay by intention, and the directories that a pod's volume makes are there
/// afterwards.
const SNAPSHOT: &str = "cd / && find opt etc/kubernetes/node-feature-discovery -type f ! -path \
    '*/kata/bin/*' -exec sha256sum {} + -o -type l -printf '%p -> %l\\n' 2>/dev/null | sort; find \
    opt -printf '%p %m %U:%G %y\\n' | sort";

/// The image of a release, or with a guest that of the installer: initrd/parts/oci.
fn archive(context: &TestContext, name: &str, guest: Option<&PathBuf>) -> Result<PathBuf> {
    let program = context
        .guest_program("kata-gpu-boot")
        .canonicalize()
        .context("the static kata-gpu-boot: tests/run cluster builds it")?;
    let archive = context.work_dir.join(name);
    let done = Command::new(trials::project().join("initrd/parts/oci"))
        .arg(program)
        .arg("x86_64")
        .arg(&archive)
        .args(guest)
        .status()
        .context("initrd/parts/oci")?;
    ensure!(done.success(), "initrd/parts/oci: {done}");
    Ok(archive)
}

/// The guest, and another one: with one more file.
fn guests(context: &TestContext) -> Result<(KvmImage, [PathBuf; 2])> {
    let guest = || {
        Guest::new()
            .cpus(1)
            .append("fakepci.gpus=2")
            .archive("driver")
    };
    let mut initrds = Vec::new();
    for (n, guest) in [guest(), guest().file("etc/other", b"x")]
        .into_iter()
        .enumerate()
    {
        let mut of = context.clone();
        of.work_dir = context.work_dir.join(n.to_string());
        let image = KvmImage::make(&of, guest)?;
        let initrd = named_initrd(&of, &image)?;
        initrds.push((image, initrd));
    }
    let other = initrds.pop().context("two guests")?;
    let first = initrds.pop().context("two guests")?;
    Ok((first.0, [first.1, other.1]))
}

/// The initrd under the name that it has in the installer's image.
fn named_initrd(context: &TestContext, image: &KvmImage) -> Result<PathBuf> {
    let initrd = context.work_dir.join("gpu.initrd");
    std::fs::copy(image.files()[1].1, &initrd)?;
    Ok(initrd)
}

/// The page's overlay without what needs the Prometheus operator.
fn overlay() -> Result<String> {
    let page = std::fs::read_to_string(trials::project().join("src/cli/README.md"))?;
    let example = page
        .split("```yaml\n")
        .filter_map(|block| block.split("```").next())
        .find(|block| block.contains("kata-gpu-init/src/collect/deploy/events"))
        .context("no overlay in src/cli/README.md")?;
    let lines = example
        .lines()
        .filter(|line| !line.contains("Prometheus operator"));
    Ok(lines.map(|line| format!("{line}\n")).collect())
}

/// Starts a node with Kata's files as kata-deploy lays them out, and all images.
fn node(context: &TestContext, image: &KvmImage, initrds: &[PathBuf; 2]) -> Result<Cluster> {
    let fixture = trials::project().join("tests/fixtures/kata/go-qemu-nvidia-gpu.toml");
    let config = format!("{RUNTIME_DIR}/{CONFIG}");
    let files = [
        (config.as_str(), fixture),
        ("/var/cluster/shim", context.guest_program("kata-agent")),
        (ARCHIVES[0], archive(context, "collector.tar", None)?),
        (
            ARCHIVES[1],
            archive(context, "installer-1.tar", Some(&initrds[0]))?,
        ),
        (
            ARCHIVES[2],
            archive(context, "installer-2.tar", Some(&initrds[1]))?,
        ),
    ];
    let mut cluster = Cluster::start(context, image, &files)?;
    cluster.run(&format!(
        "set -e; mkdir -p $(dirname {SHIM})
        printf '#!/bin/sh\\n' > {SHIM} && chmod 755 {SHIM} /var/cluster/shim"
    ))?;
    cluster.has_kernel()?;
    cluster.writes_overlay()?;
    cluster.has_images(&["1", "2"])?;
    cluster.run(&format!(
        "ctr --namespace k8s.io images tag {REGISTRY}/{COLLECTOR}:{VERSION} \
         {REGISTRY}/{COLLECTOR}:next"
    ))?;
    // The image that the component events names, of the cluster's own kubectl.
    let events = format!("{PROJECT}/src/collect/deploy/events/kustomization.yaml");
    cluster.import(&format!(
        "name=$(sed -n 's/.*newName: \\([^,]*\\), newTag: \\([^}}]*\\)}}.*/\\1:\\2/p' {events})
        root=/var/cluster/kubectl; mkdir -p $root/bin; cp /usr/local/bin/kubectl $root/bin/
        for file in $(ldd $root/bin/kubectl 2>/dev/null | grep -o '/[^ ]*'); do mkdir -p \
            $root$(dirname $file); cp -L $file $root$file; done
        image $name $root '[\"/bin/kubectl\"]'; rm -r $root"
    ))?;
    Ok(cluster)
}

impl Cluster {
    /// Puts the guests' kernel where Kata has its own, which the installer's pod reads.
    fn has_kernel(&mut self) -> Result<()> {
        self.run(&format!(
            "mkdir -p $(dirname {KERNEL}) && ln {KVM_KERNEL} {KERNEL}"
        ))
        .map(drop)
    }

    /// Imports the collector's image, and the installer's under these tags.
    fn has_images(&mut self, tags: &[&str]) -> Result<()> {
        let installers = tags.iter().map(|tag| (INSTALLER, *tag));
        let images = [(COLLECTOR, VERSION)].into_iter().chain(installers);
        for (archive, (name, tag)) in ARCHIVES.iter().zip(images) {
            self.import_archive(archive, &format!("{REGISTRY}/{name}"), tag)?;
        }
        Ok(())
    }

    fn writes_overlay(&mut self) -> Result<()> {
        let overlay = overlay()?;
        self.run(&format!("cat > {OVERLAY} <<'END'\n{overlay}END"))
            .map(drop)
    }

    /// Makes the namespace of the DaemonSets, as the page says.
    fn has_namespace(&mut self) -> Result<()> {
        self.run(&format!(
            "kubectl create namespace {NAMESPACE} && kubectl label namespace {NAMESPACE} \
             pod-security.kubernetes.io/enforce=privileged"
        ))
        .map(drop)
    }

    /// Labels the node as kata-deploy does.
    fn has_kata(&mut self) -> Result<()> {
        self.run(&format!(
            "kubectl label node {NODE} katacontainers.io/kata-runtime=true"
        ))
        .map(drop)
    }

    /// Applies the overlay after a change of it, by sed.
    fn applies(&mut self, change: &str) -> Result<()> {
        self.run(&format!("sed -i '{change}' {OVERLAY}"))?;
        self.apply("/var/cluster")
    }

    /// A command in the collector's pod, as the pages have it.
    fn in_collector(&mut self, words: &str) -> Result<String> {
        let command = of_collector(words);
        self.run(&format!(
            "{command} 2>/run/messages || {{ cat /run/messages; false; }}"
        ))
    }

    /// Runs a command in the collector's pod that must fail; its words.
    fn refused_in_collector(&mut self, words: &str) -> Result<String> {
        self.run(&format!("! {} 2>&1", of_collector(words)))
    }

    /// Waits until a command in the collector's pod prints this.
    fn until_collector_says(&mut self, words: &str, text: &str) -> Result<String> {
        self.until(
            &format!("{text:?} of {words:?} in the collector's pod"),
            &format!(
                "said=$({} 2>&1); echo \"$said\"; grep -qF '{text}' <<<\"$said\"",
                of_collector(words)
            ),
        )
    }

    /// The key of Kata's configuration as the drop-in has it.
    fn installed(&mut self) -> Result<String> {
        let initrd = self.run(&format!(
            "sed -n 's/^initrd *= *\"\\(.*\\)\"/\\1/p' {RUNTIME_DIR}/config.d/*kata-gpu-init*"
        ))?;
        // A copy of the image's.
        ensure!(
            initrd.starts_with(&format!("{KATA}/share/kata-gpu-init/gpu-sha256-")),
            "installed: {initrd:?}"
        );
        Ok(initrd)
    }

    /// Uid of the pod of a DaemonSet.
    fn pod(&mut self, set: &str) -> Result<String> {
        self.run(&format!(
            "kubectl get pods -n {NAMESPACE} -l app.kubernetes.io/name={set} -o \
             'jsonpath={{.items[*].metadata.uid}}'"
        ))
    }
}

/// The command as the pages have it.
fn of_collector(words: &str) -> String {
    format!("kubectl exec -n {NAMESPACE} ds/{COLLECTOR} -- kata-gpu-boot {words}")
}

fn both_daemonsets(context: &TestContext) -> Result<Outcome> {
    if let Some(skipped) = Cluster::skipped(context)? {
        return Ok(skipped);
    }
    let start = Instant::now();
    let (image, initrds) = guests(context)?;
    let mut cluster = node(context, &image, &initrds)?;
    let ready = start.elapsed().as_secs_f64();
    let before = cluster.run(SNAPSHOT)?;

    refused_then_installed(&mut cluster)?;
    collects(&mut cluster, &image)?;
    upgrade(&mut cluster)?;
    drain(&mut cluster)?;
    no_image(&mut cluster)?;
    leave(&mut cluster, &before)?;
    Ok(Outcome::Measured(format!(
        "the node was ready after {ready:.0} s, all of it took {:.0} s",
        start.elapsed().as_secs_f64()
    )))
}

/// Negative control first: a shim that the pod cannot run gives no version, and the rollout stops
/// with the reason in the pod's log. With the right one the same pod goes on by itself.
fn refused_then_installed(cluster: &mut Cluster) -> Result<()> {
    cluster.has_namespace()?;
    cluster.applies("")?;
    // Without kata-deploy's label no node is meant.
    let desired = "-o 'jsonpath={.items[*].status.desiredNumberScheduled}'";
    cluster.until(
        "DaemonSets that mean no node",
        &format!("test \"$(kubectl get ds -n {NAMESPACE} {desired})\" = '0 0'"),
    )?;
    cluster.has_kata()?;
    let why = "Kata'\\''s version is not known: its shim does not run here";
    let log = format!("kubectl logs -n {NAMESPACE} ds/{INSTALLER} -c install 2>&1");
    cluster.until(
        "the refusal in the installer's log",
        &format!("said=$({log}); echo \"$said\"; grep -qF '{why}' <<<\"$said\""),
    )?;
    let status = cluster.run(&format!(
        "kubectl rollout status -n {NAMESPACE} ds/{INSTALLER} --watch=false; test ! -e {FEATURE}; \
         ls {RUNTIME_DIR}"
    ))?;
    ensure!(
        status.contains("0 of 1 updated pods are available") && !status.contains("config.d"),
        "{status}"
    );
    cluster.run(&format!(
        "cp /var/cluster/shim {SHIM}.new && mv {SHIM}.new {SHIM}"
    ))?;
    cluster.rolled_out(NAMESPACE, INSTALLER)?;
    let initrd = cluster.installed()?;
    let label = cluster.run(&format!("cat {FEATURE} && test -s {initrd}"))?;
    ensure!(label == "kata-gpu-init=true", "{label}");
    Ok(())
}

/// The collector answers, and a guest's boot and failure are where the pages say.
fn collects(cluster: &mut Cluster, image: &KvmImage) -> Result<()> {
    cluster.rolled_out(NAMESPACE, COLLECTOR)?;
    let metrics = cluster.run(&format!(
        "curl --silent --show-error --fail http://$(kubectl get pods -n {NAMESPACE} -l \
         app.kubernetes.io/name={COLLECTOR} -o 'jsonpath={{.items[0].status.podIP}}'):9464/metrics"
    ))?;
    ensure!(metrics.contains("kata_gpu_boot_build_info{"), "{metrics}");
    cluster.in_collector(&format!("collect --check --dir={BOOTS}"))?;
    let log = cluster.run(&format!("kubectl logs -n {NAMESPACE} ds/{COLLECTOR}"))?;
    ensure!(log.contains("listening on vsock port"), "{log}");

    cluster.run("kubectl create namespace tests")?;
    let host = &mut cluster.host;
    KvmGuest::start(host, image, "0a1b", "train-0", 33, "")?;
    let list = cluster.until_collector_says("list", "2/2")?;
    ensure!(list.contains("tests/train-0"), "{list}");
    let events = "kubectl get events -n tests -o \
        'jsonpath={range .items[*]}{.involvedObject.name} {.reason} {.message}{\"\\n\"}{end}'";
    // A good boot has no Event.
    let none = cluster.run(events)?;
    ensure!(none.is_empty(), "{none}");
    let host = &mut cluster.host;
    let failed = KvmGuest::start(host, image, "2c3d", "train-1", 34, "nvidia.probe_fail=1")?;
    let events = cluster.until(
        "the Event of the failed boot",
        &format!("said=$({events}); echo \"$said\"; grep -q GPUFailed <<<\"$said\""),
    )?;
    ensure!(
        events.starts_with("train-1 GPUFailed ") && events.lines().count() == 1,
        "{events}"
    );
    failed.kill(&mut cluster.host)
}

/// New images of both, while a guest runs: the boots are there, the guest is heard again, the node
/// has the new initrd and the former one.
fn upgrade(cluster: &mut Cluster) -> Result<()> {
    let (before, pods) = (
        cluster.installed()?,
        [cluster.pod(INSTALLER)?, cluster.pod(COLLECTOR)?],
    );
    cluster.applies(&format!(
        "s/newTag: \"1\"/newTag: \"2\"/; s/newTag: {VERSION}/newTag: next/"
    ))?;
    cluster.rolled_out(NAMESPACE, INSTALLER)?;
    cluster.rolled_out(NAMESPACE, COLLECTOR)?;
    let now = [cluster.pod(INSTALLER)?, cluster.pod(COLLECTOR)?];
    ensure!(
        pods.iter().zip(&now).all(|(old, new)| old != new),
        "pods were not replaced: {pods:?}, {now:?}"
    );
    let after = cluster.installed()?;
    ensure!(before != after, "no other initrd is installed: {after}");
    cluster.run(&format!(
        "cmp {before} {after}; test -s {before} -a -s {after}"
    ))?;
    let list = cluster.in_collector("list")?;
    for pod in ["tests/train-0", "tests/train-1"] {
        ensure!(list.contains(pod), "{pod} is gone: {list}");
    }
    // The guest that runs has connected to the new one.
    cluster
        .until(
            "the guest again",
            &format!(
                "test $(grep -cF '\"event\":\"connected\",\"peer\":\"cid 33\"' $(grep -lF \
                 '\"pod\":\"train-0\"' {BOOTS}/*.ndjson)) -ge 2"
            ),
        )
        .map(drop)
}

/// A drain ends other pods, and neither DaemonSet's.
fn drain(cluster: &mut Cluster) -> Result<()> {
    let pods = [cluster.pod(INSTALLER)?, cluster.pod(COLLECTOR)?];
    let sandbox = "containerd config dump | sed -n \"s/^ *sandbox_image = .\\(.*\\).$/\\1/p\"";
    cluster.run(&format!(
        "kubectl run -n tests other --restart=Never --image-pull-policy=Never --image=$({sandbox})"
    ))?;
    cluster.until(
        "another pod",
        &format!("kubectl wait -n tests --for=condition=Ready pod/other --timeout={PATIENCE}"),
    )?;
    cluster.until(
        "the drain",
        &format!(
            "kubectl drain {NODE} --ignore-daemonsets --force --grace-period=1 \
             --timeout={PATIENCE} 2>&1"
        ),
    )?;
    let left = cluster.run("kubectl get pods -n tests -o name")?;
    ensure!(left.is_empty(), "the drain has left {left}");
    let node = cluster.run(&format!("kubectl get node {NODE}"))?;
    ensure!(node.contains("SchedulingDisabled"), "{node}");
    cluster.in_collector("list")?;
    cluster.run(&format!("kubectl uncordon {NODE}"))?;
    ensure!(
        pods == [cluster.pod(INSTALLER)?, cluster.pod(COLLECTOR)?],
        "the drain has replaced a pod"
    );
    Ok(())
}

/// Negative control: an image that is nowhere stops the rollout and is named; the boots outlast it.
fn no_image(cluster: &mut Cluster) -> Result<()> {
    cluster.applies("s/newTag: next/newTag: nowhere/")?;
    cluster.until(
        "the missing image in the pod's status",
        &format!(
            "kubectl get pods -n {NAMESPACE} -l app.kubernetes.io/name={COLLECTOR} -o \
             'jsonpath={{.items[*].status.containerStatuses[*].state.waiting}}' | grep -F \
             {COLLECTOR}:nowhere"
        ),
    )?;
    let status = cluster.run(&format!(
        "kubectl rollout status -n {NAMESPACE} ds/{COLLECTOR} --watch=false"
    ))?;
    ensure!(
        status.contains("0 of 1 updated pods are available"),
        "{status}"
    );
    cluster.applies("s/newTag: nowhere/newTag: next/")?;
    cluster.rolled_out(NAMESPACE, COLLECTOR)?;
    let list = cluster.in_collector("list")?;
    ensure!(list.contains("tests/train-0"), "{list}");
    Ok(())
}

/// The installer undoes its work, both are deleted, and the node is as before, but for the boots.
fn leave(cluster: &mut Cluster, before: &str) -> Result<()> {
    cluster.run(&format!(
        "cat >> {OVERLAY} <<'END'\nconfigMapGenerator:\n  - name: {INSTALLER}\n    \
         namespace: kube-system\n    behavior: merge\n    literals: [GUEST=--remove]\nEND"
    ))?;
    let with = cluster.run(SNAPSHOT)?;
    ensure!(with != before, "the control: nothing was installed");
    cluster.applies("")?;
    cluster.rolled_out(NAMESPACE, INSTALLER)?;
    // The second one deletes the ConfigMaps of earlier settings.
    cluster.run(&format!(
        "kubectl delete -k $(dirname {OVERLAY}) --timeout={PATIENCE} && kubectl delete configmaps \
         -n {NAMESPACE} -l app.kubernetes.io/name={INSTALLER}"
    ))?;
    cluster.until(
        "the end of all pods",
        &format!("test -z \"$(kubectl get pods -n {NAMESPACE} -o name)\""),
    )?;
    let after = cluster.run(SNAPSHOT)?;
    ensure!(after == before, "before:\n{before}\nafter:\n{after}");
    let boots = cluster.run(&format!("ls {BOOTS}/*.ndjson | wc -l"))?;
    ensure!(boots == "2", "{boots} boots are left");
    let left = cluster.run(&format!(
        "kubectl get all,configmaps,serviceaccounts,clusterroles,clusterrolebindings -A -o name | \
         grep kata-gpu; true; kubectl delete namespace {NAMESPACE} --wait=false >/dev/null"
    ))?;
    ensure!(left.is_empty(), "left in the cluster: {left}");
    Ok(())
}
