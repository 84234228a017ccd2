//! A pod of a RuntimeClass on the node: the kubelet runs it under Kata's own shim and agent, with
//! the guest that the installer's DaemonSet has installed; GPUs are simulated in the guest.

use super::{
    ARCHIVES, COLLECTOR, INSTALLER, KERNEL, NAMESPACE, RUNTIME_DIR, archive, named_initrd,
};
use crate::vm::emulated_host::guests::event;
use crate::vm::harness::{
    BOOTS, Cluster, KVM_KERNEL, KataHost, KvmImage, Outcome, PATIENCE, RUNTIME, Setup, Shim,
    TestContext,
};
use crate::vm::kata::{bound, sees};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use std::time::Instant;

/// A RuntimeClass of this handler and a pod of it. One container asks for the guest's GPUs and
/// ends, the other one stays.
const POD: &str = "apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: class-of-@POD@}
handler: @HANDLER@
---
apiVersion: v1
kind: Pod
metadata: {name: @POD@, namespace: tests}
spec:
  runtimeClassName: class-of-@POD@
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  containers:
    - name: cuda
      image: tests/debian:1
      imagePullPolicy: Never
      env: [{name: VISIBLE_CDI_DEVICES, value: nvidia.com/gpu=all}]
    - name: stays
      image: tests/static:1
      imagePullPolicy: Never
      args: [pause]
";

/// Lists what pods have on a node: containers, networks and addresses, Kata's folders, shims and
/// VMs with their programs.
const OF_PODS: &str = "ctr --namespace k8s.io containers ls -q | sort
    ls -d /run/netns/* /var/lib/cni/networks/pods/10.* /run/vc/sbs/* /run/vc/vm/* \
        /run/kata-containers/shared/sandboxes/* 2>/dev/null
    readlink /proc/[0-9]*/exe | grep -e qemu -e virtiofsd -e containerd-shim | sort";

pub(super) fn runtime_class(context: &TestContext) -> Result<Outcome> {
    let shim = Shim::Go;
    if let Some(skipped) = Cluster::skipped(context)? {
        return Ok(skipped);
    }
    if let Some(skipped) = KataHost::skipped(context, shim)? {
        return Ok(skipped);
    }
    let start = Instant::now();
    let image = KvmImage::make(context, Setup::initrd("fakepci.gpus=2")?.guest)?;
    let initrd = named_initrd(context, &image)?;
    let archives = [
        (ARCHIVES[0], archive(context, "collector.tar", None)?),
        (
            ARCHIVES[1],
            archive(context, "installer.tar", Some(&initrd))?,
        ),
    ];
    let mut cluster = Cluster::start_with_kata(context, shim, &image, &archives)?;
    cluster.has_images(&["1"])?;
    cluster.has_kernel()?;
    cluster.run(&format!(
        "sed -i 's,{KVM_KERNEL},{KERNEL},' {RUNTIME_DIR}/config.d/*.toml"
    ))?;
    cluster.writes_overlay()?;
    cluster.has_namespace()?;
    // Long before its first pod, which needs the account that the controllers make there.
    cluster.run("kubectl create namespace tests")?;
    cluster.has_kata()?;
    // Without the component events, which is another test's.
    cluster.applies("/^components:/d; /deploy.events/d")?;
    cluster.rolled_out(NAMESPACE, INSTALLER)?;
    cluster.installed()?;
    cluster.rolled_out(NAMESPACE, COLLECTOR)?;
    let ready = start.elapsed().as_secs_f64();

    cluster.run(&format!("({OF_PODS}) > /run/of-pods"))?;
    without_its_handler(&mut cluster)?;
    let before = Instant::now();
    creates(&mut cluster, "train-0", RUNTIME)?;
    runs(&mut cluster)?;
    let ran = before.elapsed().as_secs_f64();
    is_in_the_list(&mut cluster)?;
    is_deleted(&mut cluster)?;
    Ok(Outcome::Measured(format!(
        "the DaemonSets were ready after {ready:.0} s, the pod ran {ran:.0} s after its creation, \
         all of it took {:.0} s",
        start.elapsed().as_secs_f64()
    )))
}

fn creates(cluster: &mut Cluster, pod: &str, handler: &str) -> Result<()> {
    let manifest = POD.replace("@POD@", pod).replace("@HANDLER@", handler);
    cluster
        .run(&format!("kubectl apply -f - <<'END'\n{manifest}END"))
        .map(drop)
}

/// Negative control: a handler that containerd does not have runs no pod, and the pod says so.
fn without_its_handler(cluster: &mut Cluster) -> Result<()> {
    creates(cluster, "train-1", "not-there")?;
    cluster.until(
        "the missing handler in the pod's events",
        "said=$(kubectl get events -n tests -o 'jsonpath={.items[*].message}'); echo \"$said\"
        grep -F 'no runtime for \"not-there\" is configured' <<<\"$said\" || { sleep 5; false; }",
    )?;
    cluster.until(
        "the end of the pod without a handler",
        &format!("kubectl delete pod -n tests train-1 --ignore-not-found --timeout={PATIENCE}"),
    )?;
    let list = cluster.refused_in_collector("list")?;
    ensure!(list.contains("no boot in"), "the control: {list}");
    Ok(())
}

/// Both containers have run; the first one saw the GPUs of its guest. One kubectl waits: each that
/// starts takes seconds of the processor that the guest boots on.
fn runs(cluster: &mut Cluster) -> Result<()> {
    for (container, state) in [
        ("stays", "running.startedAt"),
        ("cuda", "terminated.reason"),
    ] {
        cluster.until(
            &format!("container {container}"),
            &format!(
                "kubectl wait -n tests pod/train-0 --timeout=600s --for=jsonpath=\
                 '{{.status.containerStatuses[?(@.name==\"{container}\")].state.{state}}}' && exit
                kubectl describe pod -n tests train-0 | sed -n '/^Events:/,$p'; false"
            ),
        )?;
    }
    sees(
        &cluster.run("kubectl logs -n tests train-0 -c cuda")?,
        &[0, 1],
    )
}

/// The collector's DaemonSet has the boot by the pod's name, with the guest's own records.
fn is_in_the_list(cluster: &mut Cluster) -> Result<()> {
    let list = cluster.until_collector_says("list", "2/2")?;
    ensure!(list.contains("tests/train-0"), "{list}");
    let boot = cluster.in_collector("show --json tests/train-0")?;
    let bound = bound(&boot).with_context(|| format!("show --json has said {boot:?}"))?;
    ensure!(bound == 2, "{boot}");
    let other = cluster.refused_in_collector("show --json tests/train-1")?;
    ensure!(
        other.contains("no boot of tests/train-1"),
        "the control: {other}"
    );
    let file = cluster.run(&format!(
        "cat $(grep -lF '\"pod\":\"train-0\"' {BOOTS}/*.ndjson)"
    ))?;
    let count = |words: &[&str]| {
        file.lines()
            .filter(|line| words.iter().all(|word| line.contains(word)))
            .count()
    };
    ensure!(count(&[&event(names::GPU_PUBLISHED)]) == 2, "{file}");
    let made = count(&[&event(names::AGENT_CONTAINER), "\"made\""]);
    // The sandbox's own, and the pod's two.
    ensure!(made == 3, "{made} containers were made: {file}");
    Ok(())
}

/// The pod ends when it is deleted, and leaves nothing on its node but its boot.
fn is_deleted(cluster: &mut Cluster) -> Result<()> {
    let left = format!("diff /run/of-pods <({OF_PODS})");
    let running = cluster.run(&format!("{left}; true"))?;
    ensure!(
        running.contains("containerd-shim-kata-v2") && running.contains("qemu"),
        "the control: no VM of the pod's: {running}"
    );
    cluster.until(
        "the end of the pod",
        &format!("kubectl delete pod -n tests train-0 --ignore-not-found --timeout={PATIENCE}"),
    )?;
    // The kubelet removes containers of deleted pods once a minute.
    cluster.until(
        "a node as before",
        &format!("{left} >/run/left && exit; cat /run/left; sleep 3; false"),
    )?;
    cluster.until(
        "the end of the boot",
        &format!(
            "grep -F '\"event\":\"disconnected\"' $(grep -lF '\"pod\":\"train-0\"' \
             {BOOTS}/*.ndjson)"
        ),
    )?;
    let list = cluster.in_collector("list")?;
    ensure!(list.contains("tests/train-0"), "{list}");
    Ok(())
}
