//! A failure means that the printed systemd unit or DaemonSet loses records over a reboot, a
//! restart, an upgrade or a shutdown, is ready later than containerd, or has more rights than it
//! should.

use crate::vm::harness::{EmulatedHost, Outcome, Size, TestContext, VmTest, deployed};
use anyhow::{Context, Result, ensure};
use serde_yaml::Value;
use std::path::{Path, PathBuf};

pub const TESTS: &[VmTest] = &[VmTest {
    name: "emulated_host_runs_the_printed_service_and_container",
    run: as_printed,
}];

pub(super) const PROGRAM: &str = "/usr/local/bin/kata-gpu-boot";
const VMM: &str = "/usr/local/bin/vmm";
const UNIT: &str = "/etc/systemd/system/kata-gpu-boot.service";
/// Highest exposure of the collector's unit, from 0 to 10, as `systemd-analyze security` adds it
/// up.
const EXPOSURE: f64 = 2.2;
/// Records of a guest in this test.
const RECORDS: u64 = 50;

fn boot_id(n: u32) -> String {
    format!("0f7a1f8e-0000-4000-8000-{n:012}")
}

/// Programs for the emulated host: the collector, and the VMM.
fn programs(context: &TestContext) -> Result<[(PathBuf, &'static str); 2]> {
    Ok([
        (EmulatedHost::program(context)?, PROGRAM),
        (context.guest_program("kata-agent"), VMM),
    ])
}

/// A host with the collector's unit, installed as the README says, and a stand-in for containerd's.
pub(super) fn start(
    context: &TestContext,
    size: Size,
    more: &[(&str, &Path)],
) -> Result<EmulatedHost> {
    let programs = programs(context)?;
    let files: Vec<_> = programs
        .iter()
        .map(|(file, name)| (*name, file.as_path()))
        .chain(more.iter().copied())
        .collect();
    let unit = deployed("kata-gpu-boot.service");
    let files = [files, vec![(UNIT, unit.as_path())]].concat();
    let mut host = EmulatedHost::start(context, "host", size, &files)?;
    host.run(
        "printf '[Service]\\nType=oneshot\\nRemainAfterExit=yes\\nExecStart=/usr/bin/true\\n\
         [Install]\\nWantedBy=multi-user.target\\n' > /etc/systemd/system/containerd.service
        systemctl daemon-reload \
         && systemctl enable --quiet kata-gpu-boot.service containerd.service",
    )?;
    Ok(host)
}

/// Starts a VM of the Go runtime's with Cloud Hypervisor, whose guest sends records; it runs until
/// it is killed.
fn vm(host: &mut EmulatedHost, n: u32) -> Result<()> {
    let (socket, boot) = (format!("/run/vc/vm/{n}/clh.sock"), boot_id(n));
    host.run(&format!(
        "setsid {VMM} {socket} {boot} {RECORDS} >/run/vmm-{n} 2>&1 & echo $! >/run/vmm-{n}.pid"
    ))
    .map(drop)
}

/// Waits until a guest's records are all in its boot's file, and verifies that each is there once.
fn received(host: &mut EmulatedHost, n: u32) -> Result<()> {
    let file = format!("/var/lib/kata-gpu-boot/{}.ndjson", boot_id(n));
    let seqs = format!("grep -o '\"seq\":[0-9]*' {file} | cut -d: -f2 | sort -n");
    host.until(
        &format!("{RECORDS} records of VM {n}"),
        &format!("test $({seqs} | uniq | wc -l) -ge {RECORDS}"),
    )?;
    let seqs = host.run(&seqs)?;
    let expected: Vec<String> = (0..RECORDS).map(|seq| seq.to_string()).collect();
    ensure!(
        seqs.lines().eq(expected.iter().map(String::as_str)),
        "VM {n}: records {}",
        seqs.replace('\n', " ")
    );
    Ok(())
}

fn property(host: &mut EmulatedHost, unit: &str, name: &str) -> Result<String> {
    host.run(&format!("systemctl show -P {name} {unit}"))
}

fn as_printed(context: &TestContext) -> Result<Outcome> {
    if let Some(skipped) = EmulatedHost::skipped(context)? {
        return Ok(skipped);
    }
    let mut host = start(context, Size::PLAIN, &[])?;
    host.run(&format!("systemd-analyze verify {UNIT} 2>&1 | (! grep .)"))
        .context("systemd-analyze verify has something to say")?;
    let exposure =
        host.run("systemd-analyze security --no-pager kata-gpu-boot.service | tail -n 1")?;
    let number: f64 = exposure
        .split_whitespace()
        .find_map(|word| word.parse().ok())
        .with_context(|| format!("no number in {exposure:?}"))?;
    ensure!(number <= EXPOSURE, "{exposure}: at most {EXPOSURE}");

    host.run("systemctl start kata-gpu-boot.service")?;
    vm(&mut host, 1)?;
    received(&mut host, 1)?;

    // Nothing of /run is there any more, and Kata has not run yet.
    host.reboot()?;
    host.until(
        "the service",
        "systemctl is-active kata-gpu-boot.service containerd.service",
    )?;
    let ready: u64 = property(
        &mut host,
        "kata-gpu-boot.service",
        "ActiveEnterTimestampMonotonic",
    )?
    .parse()?;
    let runtime: u64 = property(
        &mut host,
        "containerd.service",
        "ExecMainStartTimestampMonotonic",
    )?
    .parse()?;
    ensure!(
        ready <= runtime,
        "ready {ready} us after the start, containerd started after {runtime} us"
    );
    let stopped =
        host.run("journalctl -b -1 -o cat _PID=1 UNIT=kata-gpu-boot.service | tail -n 3")?;
    ensure!(
        stopped.contains("Deactivated successfully"),
        "the shutdown did not stop it in time: {stopped}"
    );
    let directories = host.run("stat -c '%n %U %G %a' /run/vc /run/kata")?;
    ensure!(
        directories == "/run/vc root root 750\n/run/kata root root 750",
        "{directories}"
    );
    let listening = host.run("journalctl -b -o cat -u kata-gpu-boot.service")?;
    ensure!(
        listening.contains("listening on vsock port"),
        "no AF_VSOCK after a reboot: {listening}"
    );
    vm(&mut host, 2)?;
    received(&mut host, 2)?;

    // A guest that is connected, and sends, while the service is started again, and while it is
    // replaced.
    let started = |host: &mut EmulatedHost| property(host, "kata-gpu-boot.service", "MainPID");
    let mut before = started(&mut host)?;
    for (n, change) in [(3, "true"), (4, "cp {} {}.new && mv {}.new {}")] {
        vm(&mut host, n)?;
        host.until(
            "the guest's first records",
            &format!(
                "grep -q '\"seq\":0' /var/lib/kata-gpu-boot/{}.ndjson",
                boot_id(n)
            ),
        )?;
        host.run(&format!(
            "{} && systemctl restart kata-gpu-boot.service",
            change.replace("{}", PROGRAM)
        ))?;
        received(&mut host, n)?;
        let after = started(&mut host)?;
        ensure!(before != after, "process {before} was not replaced");
        before = after;
    }
    for n in 1..=4 {
        received(&mut host, n)?;
    }
    let threads: u64 = property(&mut host, "kata-gpu-boot.service", "TasksCurrent")?.parse()?;
    let most: u64 = property(&mut host, "kata-gpu-boot.service", "TasksMax")?.parse()?;
    ensure!(threads * 2 <= most, "{threads} threads, TasksMax={most}");

    host.run(
        "kill $(cat /run/vmm-*.pid) && systemctl disable --quiet --now kata-gpu-boot.service
        rm -r /run/vc /run/kata /var/lib/kata-gpu-boot /var/lib/private/kata-gpu-boot",
    )?;
    container(&mut host)?;
    Ok(Outcome::Measured(format!(
        "exposure {number}, {threads} threads"
    )))
}

/// Arguments of podman for the DaemonSet's container: command, mounts, user, capabilities, seccomp
/// profile and memory as printed. What the API server and the kubelet do besides (selection of
/// nodes, priority, the probes' times, upgrade) is not tried.
fn podman_arguments(set: &Value) -> Result<(Vec<String>, Vec<String>)> {
    let words = |value: &Value| -> Vec<String> {
        value
            .as_sequence()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(String::from)
            .collect()
    };
    let pod = &set["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let security = &container["securityContext"];
    let user = security["runAsUser"].as_u64().context("no runAsUser")?;
    let memory = container["resources"]["limits"]["memory"]
        .as_str()
        .and_then(|m| m.strip_suffix("Mi"))
        .context("no memory limit in Mi")?;
    let mut options = vec![format!("--user={user} --memory={memory}m")];
    for (set, option) in [
        (pod["hostNetwork"] == true, "--network=host"),
        (security["readOnlyRootFilesystem"] == true, "--read-only"),
        (
            security["allowPrivilegeEscalation"] == false,
            "--security-opt=no-new-privileges",
        ),
        (
            security["seccompProfile"]["type"] == "Unconfined",
            "--security-opt=seccomp=unconfined",
        ),
    ] {
        options.extend(set.then(|| option.to_string()));
    }
    for option in ["drop", "add"] {
        options.extend(
            words(&security["capabilities"][option])
                .iter()
                .map(|name| format!("--cap-{option}={name}")),
        );
    }
    for mount in container["volumeMounts"]
        .as_sequence()
        .context("no volumeMounts")?
    {
        let volume = pod["volumes"]
            .as_sequence()
            .into_iter()
            .flatten()
            .find(|v| v["name"] == mount["name"])
            .context("no volume")?;
        let (from, to) = (
            volume["hostPath"]["path"].as_str().context("no hostPath")?,
            mount["mountPath"].as_str().context("no mountPath")?,
        );
        let access = if mount["readOnly"] == true {
            "ro"
        } else {
            "rw"
        };
        let propagation = if mount["mountPropagation"] == "HostToContainer" {
            "rslave"
        } else {
            "rprivate"
        };
        // DirectoryOrCreate.
        options.push(format!(
            "$(mkdir -p {from}) --volume={from}:{to}:{access},{propagation}"
        ));
    }
    options.extend([
        "--rootfs /image".to_string(),
        // The kubelet's value; the container has the host's network.
        words(&container["command"])
            .join(" ")
            .replace("$(POD_IP)", "127.0.0.1"),
    ]);
    Ok((
        options,
        words(&container["readinessProbe"]["exec"]["command"]),
    ))
}

fn container(host: &mut EmulatedHost) -> Result<()> {
    let set: Value = serde_yaml::from_str(&std::fs::read_to_string(deployed("daemonset.yaml"))?)?;
    let (arguments, probe) = podman_arguments(&set)?;
    let grace = set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        .as_u64()
        .context("no terminationGracePeriodSeconds")?;
    // Image of the program alone, as in the README; with its libraries, as this build is not
    // static.
    host.run(&format!(
        "mkdir -p /image/{{proc,dev,sys,run,etc,tmp,var/lib}} /image/usr/bin && cp {PROGRAM} \
        /image/usr/bin/
        for file in $(ldd {PROGRAM} | grep -o '/[^ ]*'); do mkdir -p /image$(dirname $file) && cp \
            -L $file /image$file; done"
    ))?;
    let podman = "podman --log-level=error --cgroup-manager=cgroupfs";
    for (n, name) in [(6, "old"), (7, "new")] {
        host.run(&format!(
            "{podman} run --detach --name {name} {}",
            arguments.join(" ")
        ))?;
        host.until(
            "readiness",
            &format!("{podman} exec {name} {}", probe.join(" ")),
        )?;
        if n == 7 {
            // Its guest sent to the old one before.
            received(host, 6)?;
        }
        vm(host, n)?;
        host.until(
            "the guest's first records",
            &format!(
                "grep -q '\"seq\":0' /var/lib/kata-gpu-boot/{}.ndjson",
                boot_id(n)
            ),
        )?;
        let status = host.run(&format!(
            "cat /proc/$({podman} inspect --format '{{{{.State.Pid}}}}' {name})/status"
        ))?;
        for line in [
            "Uid:\t394640\t394640\t394640\t394640",
            "CapBnd:\t0000000000000000",
            "CapEff:\t0000000000000002",
            "NoNewPrivs:\t1",
            "Seccomp:\t2",
        ] {
            ensure!(status.contains(line), "no {line:?} in {status}");
        }
        if n == 6 {
            // SIGTERM and time to end, as at an upgrade or on a drained node that is shut down. The
            // old one is gone before the new one comes.
            let code = host.run(&format!(
                "{podman} stop --time {grace} {name} && {podman} inspect \
                    --format '{{{{.State.ExitCode}}}}' {name}"
            ))?;
            ensure!(
                code.lines().last() == Some("0"),
                "the old one ended with {code}"
            );
        }
    }
    received(host, 7)
}
