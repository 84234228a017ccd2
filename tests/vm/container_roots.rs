//! A failure means that a program linked against libcuda.so.1 does not start on a Debian's or an
//! Alpine's root, loads another library than the guest's, sees a GPU that is not its own, or may
//! make the driver's nodes.

use super::harness::{AgentLine, Booted, DEADLINE, Guest, Outcome, TestContext, VmTest};
use anyhow::{Result, anyhow, ensure};
use kata_gpu_wire::arch::Arch;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "containers_load_the_guests_libcuda_and_see_only_their_gpus",
        run: one_hook,
    },
    VmTest {
        name: "an_image_that_makes_the_hook_fail_changes_no_device_node",
        run: failing_hook,
    },
];

const VERSION: &str = "550.163.01";
/// Version of the CUDA image's compatibility libraries.
const COMPAT: &str = "560.35.03";
/// Containers, their devices and roots. The last two are without their hooks.
const CONTAINERS: &str = "debian:0@debian;all:all@debian;alpine:1@alpine;cuda:2@cuda;\
    bare-cuda:2@cuda;bare-alpine:1@alpine";
const WITHOUT_HOOKS: &str = "bare-cuda,bare-alpine";

/// The value of a key in the program's output.
pub(super) fn said<'a>(output: &'a str, key: &str) -> &'a str {
    output
        .lines()
        .find_map(|l| l.split_once('=').filter(|(k, _)| *k == key))
        .map_or("", |(_, value)| value)
}

/// Checks by the program's output that libcuda is the guest's, on a mount that the container cannot
/// change.
pub(super) fn has_the_guests_libcuda(arch: Arch, output: &str) -> Result<()> {
    let libs = format!("/usr/lib/{}", arch.facts().triplet);
    let is = |key: &str, wanted: &[&str]| {
        ensure!(
            wanted.contains(&said(output, key)),
            "{key} is {:?}, not {wanted:?}: {output}",
            said(output, key)
        );
        Ok(())
    };
    is(
        "libcuda",
        &[
            &format!("{libs}/libcuda.so.1"),
            &format!("{libs}/libcuda.so.{VERSION}"),
        ],
    )?;
    is("version", &[VERSION])?;
    is("flags", &["ro,nosuid,nodev"])
}

/// A container whose program has ended.
pub(super) struct Ended(AgentLine, Arch);

impl Ended {
    pub(super) fn wait(booted: &Booted, container: &str) -> Result<Self> {
        booted.created(container)?;
        let line = booted
            .console
            .wait_agent_any(DEADLINE, |l| {
                l.get("container") == container
                    && ["container ended", "container failed"].contains(&l.get("msg"))
            })
            .ok_or_else(|| anyhow!("container {container} has not ended within {DEADLINE:?}"))?;
        ensure!(
            line.get("msg") == "container ended",
            "container {container}: {}",
            line.get("error")
        );
        Ok(Self(line, booted.arch))
    }

    fn said(&self, key: &str) -> &str {
        said(self.0.get("output"), key)
    }

    fn is(&self, key: &str, wanted: &str) -> Result<()> {
        let name = self.0.get("container");
        ensure!(
            self.said(key) == wanted,
            "container {name}: {key} is {:?}, not {wanted:?}: {:?}",
            self.said(key),
            self.0
        );
        Ok(())
    }

    /// Checks everything that is the same in all containers with their hooks.
    fn check(&self, gpus: &[u32]) -> Result<()> {
        ensure!(
            self.0.get("status") == "exit status: 0" && self.0.get("failed hooks").is_empty(),
            "{:?}",
            self.0
        );
        let nodes: Vec<&str> = self.said("nodes").split(',').collect();
        let wanted = |node: &str| {
            gpus.iter()
                .any(|k| node == format!("/dev/nvidia{k} 195:{k} 666"))
                || node == "/dev/nvidiactl 195:255 666"
                || ["/dev/nvidia-uvm ", "/dev/nvidia-uvm-tools "]
                    .iter()
                    .any(|n| node.starts_with(n) && node.ends_with(" 666"))
        };
        ensure!(
            nodes.len() == gpus.len() + 3 && nodes.iter().all(|n| wanted(n)),
            "container {}: nodes {nodes:?}",
            self.0.get("container")
        );
        // Nothing of it is outside: the initrd has this one file in /etc.
        ensure!(
            self.0.get("guest") == "hardware.modules",
            "container {}: in the guest: {}",
            self.0.get("container"),
            self.0.get("guest")
        );
        self.is("env", " NVIDIA_VISIBLE_DEVICES=void")?;
        self.is(
            "params",
            "ModifyDeviceFiles: 0, write: Read-only file system",
        )
    }

    /// Checks that libcuda is the guest's, on a mount that the container cannot change.
    pub(super) fn has_the_guests_libcuda(&self) -> Result<()> {
        has_the_guests_libcuda(self.1, self.0.get("output"))
    }

    /// Milliseconds of each hook.
    fn hook_times(&self) -> Vec<f64> {
        let time = |hook: &str| hook.split_once(" (")?.1.split_once(" ms")?.0.parse().ok();
        self.0.get("hooks").split("; ").filter_map(time).collect()
    }
}

fn boot(context: &TestContext) -> Result<Booted> {
    let words = format!(
        "fakepci.gpus=3 testagent.containers={CONTAINERS} \
        testagent.without_hooks={WITHOUT_HOOKS}"
    );
    ["driver", "debian", "cuda", "alpine"]
        .into_iter()
        .fold(Guest::with(&words), Guest::archive)
        .boot(context, "roots")
}

/// Looks at all containers of a guest; gives the number of hooks of one, and their time in ms.
fn check(booted: &Booted) -> Result<(usize, f64)> {
    let ended = |container: &str| Ended::wait(booted, container);
    let through_the_cache = "cache=/etc/ld.so.cache";
    let (debian, all, alpine, cuda) = (
        ended("debian")?,
        ended("all")?,
        ended("alpine")?,
        ended("cuda")?,
    );
    for (container, gpus) in [
        (&debian, &[0][..]),
        (&all, &[0, 1, 2]),
        (&alpine, &[1]),
        (&cuda, &[2]),
    ] {
        container.check(gpus)?;
    }
    for container in [&debian, &all, &alpine] {
        container.has_the_guests_libcuda()?;
    }
    for container in [&debian, &all, &cuda] {
        container.is("searched", through_the_cache)?;
    }
    cuda.is("version", COMPAT)?;
    cuda.is(
        "libcuda",
        &format!("/usr/local/cuda/compat/libcuda.so.{COMPAT}"),
    )?;
    let times = debian.hook_times();
    Ok((times.len(), times.iter().sum()))
}

fn one_hook(context: &TestContext) -> Result<Outcome> {
    let mut booted = boot(context)?;
    let (hooks, ms) = check(&booted)?;
    ensure!(hooks == 1, "{hooks} hooks have run");
    // The negative controls. Debian's loader looks into its own directories at last, where the link
    // is a mount; the image's libraries are elsewhere.
    let bare = Ended::wait(&booted, "bare-cuda")?;
    ensure!(
        bare.said("searched")
            .starts_with(&format!("path=/lib/{}", context.arch.facts().triplet)),
        "a container without hooks: {:?}",
        bare.0
    );
    bare.is("version", VERSION)?;
    bare.is("params", "ModifyDeviceFiles: 1, write: done")?;
    let bare = Ended::wait(&booted, "bare-alpine")?;
    ensure!(
        bare.0.get("status") == "exit status: 127" && bare.0.get("output").contains("libcuda.so.1"),
        "without hooks: {:?}",
        bare.0
    );
    booted.still_runs()?;
    Ok(Outcome::Measured(format!(
        "the hook of a container takes {ms:.1} ms in the guest"
    )))
}

fn failing_hook(context: &TestContext) -> Result<Outcome> {
    // A directory where the hook's own configuration of the loader belongs.
    let in_the_way = "etc/ld.so.conf.d/00-nvcr-kata-gpu-init.conf";
    let guest = Guest::with("fakepci.gpus=1 testagent.containers=odd:0@debian")
        .archive("driver")
        .archive("debian");
    let booted = guest
        .file(&format!("containers/debian/{in_the_way}/x"), b"")
        .boot(context, "failing")?;
    let odd = Ended::wait(&booted, "odd")?;
    let failed = odd.0.get("failed hooks");
    ensure!(!failed.is_empty(), "the hook does not fail: {:?}", odd.0);
    odd.is(
        "params",
        "ModifyDeviceFiles: 0, write: Read-only file system",
    )?;
    Ok(Outcome::Passed)
}
