//! A failure means that an image of `rootfs-builder/build` differs from build to build, does not
//! boot, lacks a file of the driver's packages in its spec, or reports a GPU's failure without the
//! driver's words. The image with NVIDIA's own driver is made before (`tests/run rootfs`); there is
//! no GPU.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, events, named};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::arch::Arch;
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "rootfs_sim_boots_to_a_container",
        run: simulated,
    },
    VmTest {
        name: "rootfs_real_driver_of_packages_binds_and_says_why_it_stops",
        run: real,
    },
];

/// Folder below target/ in which `tests/run rootfs` leaves image and root, without the name of the
/// distribution (ROOTFS_DISTRO).
const FOLDER: &str = "rootfs/compute-";
const DISTRO: &str = "debian-13";

/// Exit status of nvidia-smi without a device. (9: no driver; 12: no NVML.)
const NOTHING_FOUND: &str = "6";

fn project() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn kata_gpu_boot(context: &TestContext) -> PathBuf {
    context.host_program()
}

fn words(output: &Output) -> String {
    [output.stdout.as_slice(), output.stderr.as_slice()]
        .map(String::from_utf8_lossy)
        .concat()
}

/// Debian's word for an architecture.
fn debian(arch: Arch) -> &'static str {
    match arch {
        Arch::X86_64 => "amd64",
        Arch::Aarch64 => "arm64",
    }
}

/// Made twice, in two folders: the same bytes; then started.
fn simulated(context: &TestContext) -> Result<Outcome> {
    let folder = context.work_dir.join("image");
    // Files of an earlier run.
    let _unused = std::fs::remove_dir_all(&folder);
    let image = folder.join("one.initrd");
    let mut bytes = Vec::new();
    for name in ["one", "another"] {
        let mut build = Command::new(project().join("rootfs-builder/build"));
        build
            .args(["--arch", debian(context.arch), "--profile", "sim", "--work"])
            .arg(folder.join(name))
            .arg("--output")
            .arg(folder.join(name).with_extension("initrd"));
        let output = build
            .env("KATA_GPU_BOOT", kata_gpu_boot(context))
            .output()
            .context("run rootfs-builder/build")?;
        ensure!(
            output.status.success(),
            "rootfs-builder/build: {}",
            words(&output)
        );
        bytes.push(std::fs::read(folder.join(name).with_extension("initrd"))?);
    }
    ensure!(bytes[0] == bytes[1], "two builds differ");
    let mut booted = Guest::new()
        .initrd(&image)
        .append("testagent.containers=all:all")
        .boot(context, "guest")?;
    booted.comes_up_by_its_list()?;
    Ok(Outcome::Passed)
}

fn real(context: &TestContext) -> Result<Outcome> {
    let distro = std::env::var("ROOTFS_DISTRO").unwrap_or_else(|_| DISTRO.into());
    let image = context.target.join(format!("{FOLDER}{distro}.initrd"));
    // To hold the spec against.
    let root = context.target.join(format!("{FOLDER}{distro}/root"));
    if !image.exists() {
        ensure!(
            std::env::var_os("REQUIRE_ROOTFS").is_none(),
            "{} is missing, and REQUIRE_ROOTFS is set",
            image.display()
        );
        return Ok(Outcome::Skipped(format!(
            "{} is not there: `tests/run {}rootfs` makes it where Debian's packages can be had \
            (some minutes)",
            image.display(),
            if context.arch == Arch::X86_64 {
                ""
            } else {
                "arm64 "
            }
        )));
    }
    let version = driver_version(&libraries(context, &root))?;
    // Only then: NVIDIA's nvidia-uvm is not loaded before the initialisations have let the driver's
    // lock go, and nothing is published before it.
    let script = "settled>file:/var/run/cdi/nvidia.yaml+held+run:/usr/bin/nvidia-smi";
    let append = format!("fakepci.gpus=2 testagent.guest=script testagent.script={script}");
    let guest = test_hardware(context, Guest::new().initrd(&image).registers_in_ram())?;
    let mut booted = guest.append(&append).boot(context, "guest")?;

    let files = spec_is_good(context, &booted, &root, &version)?;
    reports_failures(&booted, &version)?;
    // NVIDIA's own program, with the libraries of the image: it finds NVML and the driver, and no
    // GPU that works.
    let smi = booted
        .agent("started", |l| l.get("program") == "/usr/bin/nvidia-smi")?
        .get("child-pid")
        .to_string();
    let end = booted.agent("ended", |l| l.get("child-pid") == smi)?;
    ensure!(
        end.get("status") == NOTHING_FOUND,
        "nvidia-smi has ended with {}",
        end.get("status")
    );
    let held = booted.agent("held", |l| l.get("process") == "gpuinit-keeper")?;
    // A node that could not be opened is not held.
    ensure!(
        held.get("nodes").split_whitespace().count()
            == if opens_without_waiting(&version)? {
                2
            } else {
                0
            },
        "{held:?}"
    );
    // Failed GPUs have left the spec; the agent has answered after that, and runs on.
    let last = booted.agent("script", |l| {
        l.get("when") == "settled" && l.get("did").starts_with("run:")
    })?;
    ensure!(last.get("error").is_empty(), "{last:?}");
    booted.still_runs()?;
    Ok(Outcome::Measured(format!(
        "{distro}, driver {version}: {files} of its files in the spec; image of {} MB",
        std::fs::metadata(&image)?.len() / 1_000_000
    )))
}

/// Adds modules that a Kata kernel has built in and the test kernel has not (virtio, vsock, the
/// simulated functions), and the program that loads them before the init starts.
fn test_hardware(context: &TestContext, guest: Guest) -> Result<Guest> {
    let read =
        |path: PathBuf| std::fs::read(&path).with_context(|| format!("read {}", path.display()));
    let text =
        |path: &str| Ok::<_, anyhow::Error>(String::from_utf8(read(context.target.join(path))?)?);
    let folder = format!("usr/{}", context.modules()?);
    let order = text("kernel/modules/load-order")?;
    let modules = order
        .lines()
        .map(|name| (name, format!("kernel/modules/{name}")))
        .chain([("fakepci.ko", "simulator/fakepci.ko".into())]);
    let (mut guest, mut list) = (guest, String::new());
    for (name, path) in modules {
        guest = guest.file(
            &format!("{folder}/{name}"),
            &read(context.target.join(path))?,
        );
        list.push_str(&format!("/{folder}/{name}\n"));
    }
    let agent = read(context.guest_program("kata-agent"))?;
    Ok(guest
        .file("etc/hardware.modules", list.as_bytes())
        .file("hardware", &agent))
}

/// Folder of the libraries below a root.
fn libraries(context: &TestContext, root: &Path) -> PathBuf {
    root.join("usr/lib").join(context.arch.facts().triplet)
}

/// Version of the driver's libraries in the image's folder of libraries.
fn driver_version(folder: &Path) -> Result<String> {
    let names = std::fs::read_dir(folder)
        .with_context(|| format!("read {}", folder.display()))?
        .flatten();
    let version = names
        .filter_map(|e| {
            e.file_name()
                .to_str()?
                .strip_prefix("libcuda.so.")
                .map(str::to_string)
        })
        .find(|v| v.len() > 1);
    version.with_context(|| format!("no libcuda.so.VERSION in {}", folder.display()))
}

/// Drivers before 550.40.07 know no open that does not wait: it is the whole initialisation.
fn opens_without_waiting(version: &str) -> Result<bool> {
    let branch: u32 = version
        .split('.')
        .next()
        .unwrap_or_default()
        .parse()
        .with_context(|| format!("driver version {version}"))?;
    Ok(branch >= 550)
}

/// The spec has the packages' files, each of which is in the image, and both agents take it. Gives
/// how many.
fn spec_is_good(
    context: &TestContext,
    booted: &Booted,
    root: &Path,
    version: &str,
) -> Result<usize> {
    let files = booted.record("the driver's files", |r| {
        r.name == names::DRIVER_FILES && r.kind == Kind::End
    })?;
    ensure!(
        files.error.is_none()
            && files.fields["manifest"] == true
            && files.fields["version"] == version,
        "{files:?}"
    );
    let spec = booted
        .agent("file", |l| l.get("path").contains("/cdi/"))?
        .get("text")
        .to_string();
    let parsed: Value =
        serde_json::from_str(&spec).with_context(|| format!("the spec is not JSON: {spec}"))?;
    // Nodes that all GPUs share; nvidia-uvm takes NVIDIA's own module.
    let nodes_of = |edits: &Value| -> Vec<String> {
        edits["deviceNodes"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|n| n["path"].as_str().unwrap_or_default().to_string())
            .collect()
    };
    let common = nodes_of(&parsed["containerEdits"]);
    ensure!(
        ["/dev/nvidiactl", "/dev/nvidia-uvm"]
            .iter()
            .all(|node| common.iter().any(|n| n == node)),
        "common nodes: {common:?}"
    );
    let mounts = parsed["containerEdits"]["mounts"]
        .as_array()
        .context("no mounts")?;
    let has = |path: &str| mounts.iter().any(|m| m["containerPath"] == path);
    for library in [
        "libcuda",
        "libnvidia-ml",
        "libnvidia-ptxjitcompiler",
        "libnvidia-nvvm",
        "libnvidia-opencl",
        "libcudadebugger",
        "libnvidia-cfg",
    ] {
        let path = libraries(context, Path::new("/"))
            .join(format!("{library}.so.{version}"))
            .display()
            .to_string();
        ensure!(has(&path), "{path} is not in the spec: {spec}");
    }
    for file in ["gsp_ga10x.bin", "gsp_tu10x.bin"]
        .map(|name| format!("/lib/firmware/nvidia/{version}/{name}"))
    {
        ensure!(has(&file), "{file} is not in the spec");
    }
    for program in [
        "nvidia-smi",
        "nvidia-persistenced",
        "nvidia-cuda-mps-control",
        "nvidia-cuda-mps-server",
    ] {
        ensure!(
            has(&format!("/usr/bin/{program}")),
            "{program} is not in the spec"
        );
    }
    // The control: this way of looking finds what is not there missing.
    ensure!(
        !has(&format!(
            "/usr/lib/{}/libGLX_nvidia.so.{version}",
            context.arch.facts().triplet
        )),
        "the profile has no graphics, and the spec has"
    );
    let path = booted.work_dir().join("nvidia.json");
    std::fs::write(&path, &spec)?;
    let check = |path: &Path| {
        let mut check = Command::new(kata_gpu_boot(context).with_file_name("kata-gpu-cdi-check"));
        check
            .arg(path)
            .arg("--json")
            .output()
            .context("run kata-gpu-cdi-check")
    };
    let good = check(&path)?;
    ensure!(
        good.status.success(),
        "kata-gpu-cdi-check: {}",
        words(&good)
    );
    let bad = booted.work_dir().join("bad.json");
    std::fs::write(&bad, spec.replace("\"hostPath\"", "\"hostPaht\""))?;
    ensure!(
        check(&bad)?.status.code() == Some(1),
        "cdi check takes a spec with an unknown field"
    );
    for mount in mounts {
        let host = mount["hostPath"]
            .as_str()
            .context("a mount without hostPath")?;
        ensure!(
            root.join(host.trim_start_matches('/')).is_file(),
            "{host} of the spec is not in the image's root"
        );
    }
    Ok(mounts.len())
}

/// Every GPU has failed where there is no processor to start, and each says so with the driver's
/// own line.
fn reports_failures(booted: &Booted, version: &str) -> Result<()> {
    let step = if opens_without_waiting(version)? {
        "init"
    } else {
        "open"
    };
    booted.settles(0, 2)?;
    let records = booted.records();
    let bound = events(&records, names::GPU_BOUND);
    ensure!(
        bound.len() == 2
            && bound
                .iter()
                .all(|r| r.fields["minor"].as_u64().is_some_and(|minor| minor < 2)),
        "{bound:?}"
    );
    let failed = events(&records, names::GPU_FAILED);
    ensure!(failed.len() == 2, "{failed:?}");
    for record in failed {
        let error = record.error.as_deref().unwrap_or_default();
        let address = record.gpu.context("no GPU")?;
        ensure!(
            record.fields["step"] == step && record.fields.contains_key("cure"),
            "{record:?}"
        );
        ensure!(
            error.contains("the driver logged: ") && error.contains("RmInitAdapter failed! (0x62:"),
            "{address}: {error}"
        );
    }
    let modules = named(&records, Kind::End, names::MODULE_LOAD);
    ensure!(
        modules.len() == 2 && modules.iter().all(|r| r.error.is_none()),
        "{modules:?}"
    );
    Ok(())
}
