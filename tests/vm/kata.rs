//! A failure means that a pod under Kata's own shim, containerd and kata-agent goes wrong: a
//! container lacks its GPU or waits for another, a deleted pod or a killed process leaves
//! something, an upgrade touches running pods, or a container sees other things than `cdi check`
//! predicts. Only the GPU is simulated.

use super::container_roots::{has_the_guests_libcuda, said};
use super::emulated_host::guests::event;
use super::harness::{BOOTS, Guest, KataHost, Outcome, Setup, Shim, TestContext, VmTest, agent};
use super::{disk_root, extensions, inside};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_cdi_check::agents::Agent;
use kata_gpu_cdi_check::check as cdi_check;
use kata_gpu_cdi_check::spec_files::SpecFile;
use kata_gpu_wire::arch::Arch;
use kata_gpu_wire::names;
use std::collections::BTreeSet;
use std::time::Instant;

/// Tests that run under either of Kata's shims.
macro_rules! under_both {
    ($($name:literal: |$context:ident, $shim:ident| $run:expr;)*) => {
        &[$(
            VmTest { name: concat!("under_kata_", $name),
                run: |$context| { let $shim = Shim::Go; $run } },
            VmTest { name: concat!("under_runtime_rs_", $name),
                run: |$context| { let $shim = Shim::Rust; $run } },
        )*]
    };
}

pub const TESTS: &[VmTest] = under_both! {
    "containers_have_their_gpus_and_wait_for_no_other":
        |context, shim| KataHost::test(context, shim, "fakepci.gpus=2",
            |kata| containers(context, kata));
    "a_failed_gpu_is_an_error_at_once":
        |context, shim| KataHost::test(context, shim, "fakepci.gpus=2", failures);
    "a_pod_deleted_amid_its_bring_up_leaves_nothing":
        |context, shim| KataHost::test(context, shim, "fakepci.gpus=2", deleted);
    "install_upgrade_and_rollback_leave_running_pods_alone":
        |context, shim| KataHost::test(context, shim, "fakepci.gpus=1", upgrade);
    "install_check_says_what_works_and_why_not":
        |context, shim| KataHost::test(context, shim, "fakepci.gpus=2", check);
    "an_image_without_a_driver_has_it_from_its_gpu_extension":
        |context, shim| KataHost::with(context, shim, || extension_setup(context), extension);
    "a_killed_worker_is_replaced_and_a_killed_agent_ends_its_pod":
        |context, shim| KataHost::test(context, shim, "fakepci.gpus=2", killed);
    "a_cris_pod_is_named_and_explained_and_leaves_nothing":
        |context, shim| KataHost::test(context, shim, "fakepci.gpus=2", |kata| cri(context, kata));
    "a_container_sees_exactly_what_cdi_check_predicts":
        |context, shim| KataHost::with(context, shim, || inside_setup(context), inside);
};

const PROGRAM: &str = "/usr/bin/cuda-program";

/// A container sees the guest's library, these GPUs and no other, as the same program does under
/// the tests' own agent (container_roots.rs).
pub(super) fn sees(output: &str, gpus: &[u32]) -> Result<()> {
    has_the_guests_libcuda(Arch::X86_64, output)?;
    let nodes: Vec<&str> = said(output, "nodes").split(',').collect();
    let wanted = gpus
        .iter()
        .map(|k| format!("/dev/nvidia{k} 195:{k} 666"))
        .chain(["/dev/nvidiactl 195:255 666".into()]);
    for node in wanted {
        ensure!(nodes.contains(&node.as_str()), "no {node}: {output}");
    }
    // Those, nvidia-uvm and nvidia-uvm-tools.
    ensure!(nodes.len() == gpus.len() + 3, "nodes: {output}");
    ensure!(
        said(output, "params") == "ModifyDeviceFiles: 0, write: Read-only file system",
        "{output}"
    );
    ensure!(
        said(output, "env").contains("NVIDIA_VISIBLE_DEVICES=void"),
        "{output}"
    );
    Ok(())
}

/// How many GPUs are bound in a boot as `show --json` has it.
pub(super) fn bound(boot: &str) -> Result<usize> {
    let boot: serde_json::Value = serde_json::from_str(boot)?;
    Ok(boot["gpus"].as_array().map_or(0, |gpus| {
        gpus.iter()
            .filter(|gpu| gpu["bound"]["at_ns"].is_u64())
            .count()
    }))
}

fn containers(context: &TestContext, kata: &mut KataHost) -> Result<Outcome> {
    let sandbox = kata.pod("train-0", "")?;
    // One after another, as a kubelet does: the shim has one lock for all containers of a pod, and
    // a creation that waits in the agent holds it.
    kata.begin("train-0", "first", "debian", "nvidia.com/gpu=0", PROGRAM)?;
    sees(&kata.ended("first")?, &[0])?;
    kata.begin("train-0", "second", "alpine", "nvidia.com/gpu=1", PROGRAM)?;
    sees(&kata.ended("second")?, &[1])?;
    ensure!(
        bound(&kata.look("show --json", "train-0")?)? == 2,
        "not both GPUs are bound"
    );
    // Its cgroup lets it open what it sees.
    kata.begin(
        "train-0",
        "all",
        "static",
        "nvidia.com/gpu=all",
        "/application cuda",
    )?;
    kata.says("all", "^answer=")?;
    kata.says("all", "^gpus=2$")?;
    // Negative control: what nobody has is refused, by name.
    kata.begin("train-0", "other", "debian", "nvidia.com/gpu=7", PROGRAM)?;
    ensure!(
        kata.ended("other")?.is_empty(),
        "a container with a GPU that is not there ran"
    );
    let errors = kata.errors("other")?;
    ensure!(
        errors.contains("CDI device(s) [\"nvidia.com/gpu=7\"] do not exist"),
        "{errors}"
    );

    kata.sent("train-0", &event(names::SETTLED))?;
    let list = kata.list()?;
    ensure!(
        list.contains("tests/train-0") && list.contains("2/2"),
        "{list}"
    );

    // With the agent's own lines, which the shim writes into containerd's log or the journal.
    let without: serde_json::Value = serde_json::from_str(&kata.look("show --json", "train-0")?)?;
    kata.agents_log("/run/agent.log")?;
    let text = kata.look("show --json --console /run/agent.log", "train-0")?;
    // Both are kept: tests/fixtures/agent has them of one run.
    kept(context, kata, "agent.log")?;
    let with: serde_json::Value = serde_json::from_str(&text)?;
    let ready = |boot: &serde_json::Value| -> Option<u64> {
        boot["milestones"]
            .as_array()?
            .iter()
            .find(|m| m["name"] == "agent ready")?["boottime_ns"]
            .as_u64()
    };
    ensure!(
        ready(&without).is_none(),
        "the control knows when the agent was ready: {without}"
    );
    ensure!(
        ready(&with).is_some(),
        "the agent's lines do not say when it was ready: {text}"
    );
    let first = with["containers"]
        .as_array()
        .and_then(|all| all.iter().find(|container| container["name"] == "first"));
    ensure!(
        first.is_some_and(|first| first["devices"] == "nvidia.com/gpu=0"),
        "what the first container asked for: {text}"
    );
    waits_for_no_other(kata)?;
    Ok(Outcome::Measured(format!("sandbox {sandbox:.1} s")))
}

/// Copies a log of the host's `/run`, and the boot's file, to where a failed test leaves its files.
fn kept(context: &TestContext, kata: &mut KataHost, log: &str) -> Result<()> {
    let boots = format!("{BOOTS}/*.ndjson");
    for (name, from) in [(log, format!("/run/{log}")), ("boot.ndjson", boots)] {
        let text = kata.host.run(&format!("cat {from}"))?;
        std::fs::write(context.work_dir.join(name), text)?;
    }
    Ok(())
}

/// A container of one GPU runs in a pod whose other GPU is never bound. Of a load that probes all
/// none is ready before it ends.
fn waits_for_no_other(kata: &mut KataHost) -> Result<()> {
    kata.pod(
        "one-bound",
        "gpuinit.bind=pipelined nvidia.probe_ms=3,3600000",
    )?;
    kata.begin("one-bound", "early", "debian", "nvidia.com/gpu=0", PROGRAM)?;
    sees(&kata.ended("early")?, &[0])?;
    let boot = kata.look("show --json", "one-bound")?;
    ensure!(
        bound(&boot)? == 1,
        "the control: {} GPUs are bound: {boot}",
        bound(&boot)?
    );
    Ok(())
}

fn failures(kata: &mut KataHost) -> Result<Outcome> {
    kata.pod("one-failed", "nvidia.probe_fail=1")?;
    kata.sent("one-failed", &event(names::SETTLED))?;
    kata.begin(
        "one-failed",
        "failed",
        "debian",
        "nvidia.com/gpu=1",
        PROGRAM,
    )?;
    kata.begin("one-failed", "good", "debian", "nvidia.com/gpu=0", PROGRAM)?;
    ensure!(
        kata.ended("failed")?.is_empty(),
        "a container with a failed GPU ran"
    );
    let errors = kata.errors("failed")?;
    ensure!(
        errors.contains("CDI device(s) [\"nvidia.com/gpu=1\"] do not exist")
            || errors.contains(" has failed (off-the-bus): "),
        "{errors}"
    );
    sees(&kata.ended("good")?, &[0])?;
    kata.delete("one-failed", &["failed", "good"])?;

    kata.pod("none", "fakepci.gpus=0 agent.cdi_timeout=2")?;
    kata.sent("none", &event(names::SETTLED))?;
    kata.begin("none", "asks", "debian", "nvidia.com/gpu=0", PROGRAM)?;
    kata.begin("none", "asks-nothing", "static", "", "/application pause")?;
    ensure!(
        kata.ended("asks")?.is_empty(),
        "a container with a GPU that is not there ran"
    );
    let errors = kata.errors("asks")?;
    // One may be plugged in until then.
    ensure!(
        errors.contains("failed to inject devices after CDI timeout of 2 seconds"),
        "{errors}"
    );
    kata.says("asks-nothing", "^start=")?;
    Ok(Outcome::Passed)
}

fn deleted(kata: &mut KataHost) -> Result<Outcome> {
    // An initialisation that outlives the pod, with a container that waits for a bind.
    kata.pod(
        "gone",
        "gpuinit.bind=pipelined nvidia.s2_ms=3600000 nvidia.probe_ms=3,3600000",
    )?;
    kata.sent("gone", &event(names::GPU_PUBLISHED))?;
    kata.begin("gone", "waits", "debian", "nvidia.com/gpu=1", PROGRAM)?;
    kata.delete("gone", &["waits"])?;
    kata.sent("gone", "\"event\":\"disconnected\"")?;
    ensure!(kata.ended("waits")?.is_empty(), "it ran");
    ensure!(kata.list()?.contains("tests/gone"), "{}", kata.list()?);

    // The next pod comes up; with the agent as the init's child.
    kata.pod("next", "gpuinit.agent=child")?;
    kata.begin("next", "both", "debian", "nvidia.com/gpu=all", PROGRAM)?;
    sees(&kata.ended("both")?, &[0, 1])?;
    kata.delete("next", &["both"])?;
    Ok(Outcome::Passed)
}

fn upgrade(kata: &mut KataHost) -> Result<Outcome> {
    kata.pod("old", "")?;
    kata.host
        .run("cp /var/guests/initrd.cpio /var/guests/newer.cpio")?;
    kata.install("--initrd /var/guests/newer.cpio")?;
    kata.pod("new", "")?;
    let initrds = kata.host.run(
        "for file in /proc/[0-9]*/cmdline; do tr '\\0' '\\n' <$file 2>/dev/null | grep -A 1 \
            -x -e -initrd; done | grep /; true",
    )?;
    ensure!(
        initrds
            .lines()
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .eq(["/var/guests/initrd.cpio", "/var/guests/newer.cpio"]),
        "{initrds}"
    );
    kata.uninstall()?;
    // Both go on, and get containers.
    for pod in ["old", "new"] {
        let name = format!("{pod}-late");
        kata.begin(pod, &name, "debian", "nvidia.com/gpu=0", PROGRAM)?;
        sees(&kata.ended(&name)?, &[0])?;
    }
    // Rolled back: Kata's own image, which is not there.
    let refused = kata.pod("rolled-back", "");
    ensure!(
        refused
            .as_ref()
            .is_err_and(|e| format!("{e:#}").contains(kata.shim.image())),
        "{refused:?}"
    );
    Ok(Outcome::Passed)
}

/// Runs `install --check`, an operator's first command after installing.
fn check(kata: &mut KataHost) -> Result<Outcome> {
    let config = kata.config.clone();
    kata.words("")?;
    let (status, said) = kata.check(&config, "")?;
    ensure!(
        status == 0 && said.contains("works: containerd had started the sandbox after "),
        "{status}: {said}"
    );
    ensure!(
        said.contains(", all 2 GPUs were usable ") && said.contains("agent exec"),
        "{said}"
    );
    let works = said.lines().last().unwrap_or_default().to_string();
    nothing_left(kata)?;
    // By the name that a RuntimeClass has, and as JSON.
    kata.host.run(&format!(
        "printf '[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.kata-gpu]\\nruntime_type = \"io.containerd.kata.v2\"\\n\
         [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.kata-gpu.options]\\nConfigPath \
         = \"{config}\"\\n' >> /etc/containerd/config.toml
         systemctl restart containerd"
    ))?;
    let (status, said) = kata.check("kata-gpu", "--json")?;
    let json: serde_json::Value = serde_json::from_str(&said).with_context(|| said.clone())?;
    ensure!(
        status == 0 && json["works"] == true && bound(&json["boot"].to_string())? == 2,
        "{status}: {said}"
    );
    // A name that nobody has is refused before anything starts.
    let (status, said) = kata.check("kata-other", "")?;
    ensure!(
        status == 2 && said.contains("containerd has no runtime kata-other, it has kata-gpu"),
        "{status}: {said}"
    );

    kata.words("nvidia.probe_fail=1")?;
    let (status, said) = kata.check(&config, "")?;
    ensure!(
        status == 1 && said.contains("does not work: containerd had started the sandbox after "),
        "{status}: {said}"
    );
    ensure!(
        said.contains("the boot failed: GPU 1 (0001:00:01.0) failed in"),
        "{said}"
    );
    nothing_left(kata)?;
    // Given up before the agent answers.
    kata.words("")?;
    let (status, said) = kata.check(&config, "--give-up 6")?;
    ensure!(
        status == 1 && said.contains("containerd did not start the sandbox within 6 s (--give-up)"),
        "{status}: {said}"
    );
    // Kata's Go runtime cannot remove what was not started.
    let left = kata.host.run(
        "ls -d /run/vc/sbs/* /run/vc/vm/* /run/kata/* \
        /run/kata-containers/shared/sandboxes/* 2>/dev/null; true",
    )?;
    for directory in left.lines() {
        ensure!(
            said.contains(directory),
            "{directory} is left, and not said: {said}"
        );
        kata.host.run(&format!(
            "umount -R {directory}/* 2>/dev/null; rm -r --one-file-system {directory}"
        ))?;
    }
    nothing_left(kata)?;
    // Kata's own image, which is not there.
    kata.uninstall()?;
    let (status, said) = kata.check(&config, "")?;
    ensure!(
        status == 1 && said.contains(kata.shim.image()),
        "{status}: {said}"
    );
    ensure!(
        said.contains("the configuration has no guest of ours: kata-gpu-boot install"),
        "{said}"
    );
    nothing_left(kata)?;
    Ok(Outcome::Measured(works))
}

/// No sandbox of a check is left: neither with containerd, nor as a shim or a VM, nor its root.
fn nothing_left(kata: &mut KataHost) -> Result<()> {
    let left = "! (ctr --namespace kata-gpu-boot containers ls -q; ls /tmp /run/vc/sbs /run/kata; \
        cat /proc/[0-9]*/cmdline | tr '\\0' ' ') 2>/dev/null | grep -a '[k]ata-gpu-check'";
    kata.host
        .until("the end of the check's sandbox", left)
        .map(drop)
}

/// Kata 4's layout: an erofs image without a driver, and a GPU extension with a hash tree.
fn extension_setup(context: &TestContext) -> Result<Setup> {
    let (image, disk) = ("/var/guests/base.image", "/var/guests/gpu.image");
    let root = disk_root::unpacked(context)?;
    std::fs::write(root.join("usr/bin/kata-agent"), agent()?)?;
    // The kernel loads firmware from there, and an extension's comes over it.
    for directory in ["sbin", "lib/firmware/nvidia"] {
        std::fs::create_dir_all(root.join(directory))?;
    }
    std::os::unix::fs::symlink("../init", root.join("sbin/init"))?;
    let modules = root.join(context.modules()?);
    for module in extensions::DRIVER {
        std::fs::remove_file(modules.join(module))?;
    }
    // Kata's builder lists what is there.
    let list = modules.join("modules.dep");
    let text = std::fs::read_to_string(&list)?;
    let left = text.lines().filter(|line| {
        extensions::DRIVER
            .iter()
            .all(|module| !line.starts_with(&format!("{module}:")))
    });
    std::fs::write(
        &list,
        left.map(|line| format!("{line}\n")).collect::<String>(),
    )?;
    let base = disk_root::erofs_image(context, &root)?;
    let gpu = extensions::gpu_image(context, extensions::PACKED)?;
    let drop_in = format!(
        "[[hypervisor.qemu.guest_extension_images]]\nname = \"gpu\"\npath = \
        \"{disk}\"\nverity_params = \"{}\"\n",
        gpu.parameters
    );
    let guest = Guest::new().cpus(1).append("fakepci.gpus=2").root_disk(
        context,
        &base,
        "/dev/vda1",
        "erofs",
    )?;
    Ok(Setup {
        guest,
        files: vec![(image, base), (disk, gpu.file)],
        drop_in,
        install: "--image /var/guests/base.image",
    })
}

fn extension(kata: &mut KataHost) -> Result<Outcome> {
    kata.pod("train-0", "")?;
    kata.begin("train-0", "both", "debian", "nvidia.com/gpu=all", PROGRAM)?;
    sees(&kata.ended("both")?, &[0, 1])?;
    kata.sent("train-0", &event(names::SETTLED))?;
    for step in [
        names::EXTENSION_VERITY,
        names::EXTENSION_MOUNT,
        names::EXTENSION_LIBRARIES,
    ] {
        kata.sent("train-0", &format!("\"kind\":\"end\",\"name\":\"{step}\""))?;
    }
    let boot = kata.look("show --json", "train-0")?;
    ensure!(bound(&boot)? == 2, "{boot}");
    // The driver came by a disk, which the image alone does not have. The Rust runtime hands QEMU
    // open files.
    let disks = "(cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'; find /proc/[0-9]*/fd -printf '%l\\n' \
        2>/dev/null)";
    let disks = kata.host.run(&format!(
        "{disks} | grep -a -e base.image -e gpu.image -e kata.extension"
    ))?;
    for wanted in [
        "base.image",
        "gpu.image",
        "kata.extension.gpu.verity_params=root_hash=",
    ] {
        ensure!(disks.contains(wanted), "no {wanted}: {disks}");
    }
    kata.delete("train-0", &["both"])?;
    Ok(Outcome::Passed)
}

fn killed(kata: &mut KataHost) -> Result<Outcome> {
    // In the probe of the second GPU; the real agent is PID 1, and reaps what dies.
    kata.pod(
        "worker",
        "gpuinit.bind=pipelined nvidia.probe_ms=3,20000 hardware.kill=gpuinit-worker:6000",
    )?;
    kata.begin("worker", "both", "debian", "nvidia.com/gpu=all", PROGRAM)?;
    sees(&kata.ended("both")?, &[0, 1])?;
    kata.sent("worker", "killed by SIGKILL")?;
    kata.sent("worker", &event(names::SETTLED))?;
    let boot = kata.look("show --json", "worker")?;
    ensure!(bound(&boot)? == 2, "{boot}");
    kata.delete("worker", &["both"])?;

    kata.pod(
        "agent",
        "gpuinit.agent=child hardware.kill=kata-agent:70000",
    )?;
    kata.begin("agent", "both", "debian", "nvidia.com/gpu=all", PROGRAM)?;
    sees(&kata.ended("both")?, &[0, 1])?;
    kata.host.until(
        "the end of its VM",
        "! cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -aq '[s]andbox-agent'",
    )?;
    kata.sent("agent", "\"event\":\"disconnected\"")?;
    kata.delete("agent", &["both"])?;
    kata.pod("next", "")?;
    kata.begin("next", "one", "debian", "nvidia.com/gpu=0", PROGRAM)?;
    sees(&kata.ended("one")?, &[0])?;
    Ok(Outcome::Passed)
}

/// A pod of two containers as a kubelet makes it, through containerd's CRI.
fn cri(context: &TestContext, kata: &mut KataHost) -> Result<Outcome> {
    kata.with_cri()?;
    let before = Instant::now();
    let pod = kata.run_pod_sandbox("train-0", "")?;
    let sandbox = before.elapsed().as_secs_f64();
    for (name, gpu) in [("first", 0), ("second", 1)] {
        let id =
            kata.create_container(&pod, name, "debian", &[], &format!("nvidia.com/gpu={gpu}"))?;
        kata.start_container(&id)?;
        sees(&kata.cri_output(&pod, name, &id)?, &[gpu])?;
    }
    // Negative control: what nobody has is refused, by name.
    let other = kata.create_container(&pod, "other", "debian", &[], "nvidia.com/gpu=7")?;
    let error = kata
        .start_container(&other)
        .map_err(|error| format!("{error:#}").replace('\\', ""));
    ensure!(
        error
            .as_ref()
            .is_err_and(|e| e.contains("CDI device(s) [\"nvidia.com/gpu=7\"] do not exist")),
        "{error:?}"
    );

    let list = kata.list()?;
    ensure!(
        list.contains("tests/train-0") && list.contains("2/2"),
        "{list}"
    );
    let (status, followed) = kata.follow("tests/train-0")?;
    ensure!(
        status == 0 && followed.contains(": all 2 GPUs ready "),
        "{status}: {followed}"
    );

    // Whose time it was, by containerd's and the shim's lines beside the stream.
    kata.agents_log("/run/runtime.log")?;
    kept(context, kata, "runtime.log")?;
    // Not the kernel itself: its silence of over 5 s is unexplained, and an emulated one on a busy
    // machine is silent for as long.
    let mut shares = Vec::new();
    for window in [
        "--from RunPodSandbox --to 'kernel start'",
        "--from 'init start' --to 'first container started'",
    ] {
        let share = kata.unexplained("/run/runtime.log", "train-0", window)?;
        ensure!(share < 1.0, "{window}: {share} % is unexplained");
        shares.push(format!("{share:.1} %"));
    }
    // Negative control: without containerd's own lines nobody knows what passes between two
    // containers.
    kata.host.run(
        "grep -vE '(RunPodSandbox|CreateContainer|StartContainer) (for|within) ' \
        /run/runtime.log > /run/without.log",
    )?;
    let window = "--from 'init start' --to 'last container'";
    let without = kata.unexplained("/run/without.log", "train-0", window)?;
    ensure!(without > 1.0, "{without} % is unexplained");

    kata.remove_pod_sandbox(&pod)?;
    kata.sent("train-0", "\"event\":\"disconnected\"")?;
    Ok(Outcome::Measured(format!(
        "RunPodSandbox {sandbox:.1} s; unexplained to the kernel and from the init on {}, without \
         containerd's lines {without:.1} %",
        shares.join(", ")
    )))
}

const INSIDE: &str = "/var/containers/debian/usr/bin/inside";

/// A guest that shows its CDI spec, and the program that looks around in a container.
fn inside_setup(context: &TestContext) -> Result<Setup> {
    let mut setup = Setup::initrd("fakepci.gpus=2 hardware.show=/run/cdi/nvidia.yaml")?;
    setup
        .files
        .push((INSIDE, context.guest_program("kata-agent")));
    Ok(setup)
}

/// Differences between a container with GPUs and one without are those that `cdi check` predicts
/// from the guest's spec, item for item.
fn inside(kata: &mut KataHost) -> Result<Outcome> {
    kata.host.run(&format!("chmod +x {INSIDE}"))?;
    kata.pod("train-0", "")?;
    let spec = kata.shown("nvidia.yaml", |text| !text.contains("/pending/"))?;
    let spec = SpecFile {
        name: "nvidia.yaml".into(),
        text: spec.into(),
    };
    let mut predicted = Vec::new();
    for devices in ["0", "1", "all"] {
        let report = cdi_check::check(std::slice::from_ref(&spec), &[devices.to_string()])?;
        let kata4 = report.asked.first().and_then(|a| a.outcomes.last());
        let Some((Agent::Kata4, cdi_check::Outcome::Gets(gets))) = kata4 else {
            bail!("{devices}: {report:?}")
        };
        predicted.push((devices, serde_json::to_value(gets)?));
    }
    // All that any of them may open, and what none may: /dev/mem.
    let devices: BTreeSet<String> = predicted
        .iter()
        .flat_map(|(_, gets)| inside::devices(gets))
        .chain(["1:1".into()])
        .collect();
    let program = format!(
        "/usr/bin/inside {}",
        devices.into_iter().collect::<Vec<_>>().join(" ")
    );
    kata.begin("train-0", "plain", "debian", "", &program)?;
    let plain = inside::items(&kata.ended("plain")?)?;
    let mut added = Vec::new();
    for (devices, gets) in &predicted {
        let name = format!("with-{devices}");
        kata.begin(
            "train-0",
            &name,
            "debian",
            &format!("nvidia.com/gpu={devices}"),
            &program,
        )?;
        let seen = inside::items(&kata.ended(&name)?)?;
        let expected = inside::expected(&plain, gets);
        let wrong = inside::differences(&expected, &seen);
        ensure!(
            wrong.is_empty(),
            "a container with {devices} does not see what is predicted:\n{}",
            wrong.join("\n")
        );
        added.push(format!(
            "{} items of {devices}",
            inside::differences(&plain, &seen).len()
        ));
        // Negative control: each part of another prediction is found out.
        for (pointer, other, item) in CHANGED {
            let mut gets = gets.clone();
            *gets.pointer_mut(pointer).context(*pointer)? = (*other).into();
            let wrong = inside::differences(&inside::expected(&plain, &gets), &seen);
            ensure!(
                wrong.iter().any(|what| what.starts_with(item)),
                "a changed {pointer} is not found: {wrong:?}"
            );
        }
    }
    let devices: Vec<String> = plain
        .iter()
        .filter_map(|(name, access)| Some(format!("{} {access}", name.strip_prefix("device c ")?)))
        .collect();
    Ok(Outcome::Measured(format!(
        "as predicted {}; a container that has none may, of devices, {}",
        added.join(", "),
        devices.join(", ")
    )))
}

/// Changes of a prediction, and the items that are wrong then.
const CHANGED: &[(&str, &str, &str)] = &[
    ("/deviceNodes/0/path", "/dev/other", "node /dev/other"),
    ("/deviceNodes/0/type", "b", "node /dev/nvidia"),
    ("/cgroupRules/0/access", "m", "device c "),
    (
        "/mounts/0/destination",
        "/usr/bin/other",
        "mount /usr/bin/other",
    ),
    ("/mounts/0/options/0", "rw", "mount /usr/"),
    (
        "/env/0",
        "NVIDIA_VISIBLE_DEVICES=all",
        "env NVIDIA_VISIBLE_DEVICES",
    ),
    ("/hooks/0/args", "", "library libcuda.so.1"),
    ("/hooks/0/args", "", "params ModifyDeviceFiles"),
];
