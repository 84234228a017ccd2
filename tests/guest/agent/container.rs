//! Creating a container: devices are injected into its OCI spec, and its device nodes are made, or
//! all of it on a root of its own, where it runs its program. No GPU is ever opened.

use super::cdi;
use super::config::{Config, Wanted};
use super::container_root::{self, Change};
use super::pod::{Asked, Pod};
use super::{container_run, log, pid1, words};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use oci_spec::runtime::{LinuxDevice, LinuxDeviceType, Spec};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// A container's root is a directory of its name in here.
const CONTAINERS: &str = "/run/test-agent";
/// The bits of a mode that are not the file's type.
const PERMISSIONS: u32 = 0o7777;

/// A device's whole name; one without a kind is a GPU's.
fn qualified(device: &str) -> String {
    if device.contains('=') {
        device.to_string()
    } else {
        format!("nvidia.com/gpu={device}")
    }
}

/// Creates one container, and reports what it got.
pub fn create(wanted: &Wanted, config: &Config) {
    let asked: Vec<String> = wanted
        .devices
        .iter()
        .map(String::as_str)
        .map(qualified)
        .collect();
    let devices = asked.join(",");
    let fields = [
        ("container", wanted.name.as_str()),
        ("devices", devices.as_str()),
    ];
    let (mut spec, bundle) = match wanted
        .root
        .as_deref()
        .map(|root| prepare(&wanted.name, root))
    {
        None => (Spec::default(), None),
        Some(Ok((spec, bundle))) => (spec, Some(bundle)),
        Some(Err(error)) => {
            return log::error(
                "container failed",
                &[&fields[..], &[("error", &format!("{error:#}"))]].concat(),
            );
        }
    };
    spec.set_annotations(Some(annotations(&wanted.name, &asked)));
    words::rpc("create_container").write();
    words::asked(&spec).write();
    words::no_storages().write();
    let of = config.cdi_timeout_s;
    let mut failed_try =
        |number: u64, error: &str| words::waiting(number.saturating_sub(1), of, error).write();
    let injected = cdi::inject(
        cdi::chosen(),
        &mut spec,
        cdi::DIRECTORY,
        &asked,
        config.cdi_timeout_s,
        config.fail_fast,
        &std::thread::sleep,
        &mut failed_try,
    );
    if injected.is_ok() {
        words::injected(&spec).write();
    }
    // The real one makes one container after another.
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let made = injected.and_then(|tries| {
        words::making(&wanted.name).write();
        let mounts = spec.mounts().iter().flatten();
        let refused = mounts
            .filter_map(|m| container_root::destination(m).err())
            .next();
        let nodes = refused
            .map_or(Ok(()), |error| Err(error.to_string()))
            .and_then(|()| {
                let is_only_named = bundle.is_none();
                is_only_named
                    .then(|| nodes(&wanted.name, &spec))
                    .transpose()
            });
        nodes
            .inspect_err(|e| words::start_failed(e).write())
            .map(|nodes| (tries, nodes))
            .map_err(|e| (tries, e))
    });
    let (tries, what, said) = match &made {
        Ok((tries, nodes)) => (tries, "nodes", nodes.as_deref().unwrap_or_default()),
        Err((tries, error)) => (tries, "error", error.as_str()),
    };
    let tries = tries.to_string();
    let fields = [&fields[..], &[("tries", &tries), (what, said)]].concat();
    if made.is_err() {
        return log::error("container failed", &fields);
    }
    words::made(&wanted.name).write();
    words::created().write();
    log::info("container created", &fields);
    drop(turn);
    if let Some(bundle) = bundle {
        if !wanted.hooks {
            spec.set_hooks(None);
        }
        run(&wanted.name, &bundle, &spec);
    }
}

/// Held from a container's bundle to its process.
static TURN: Mutex<()> = Mutex::new(());

/// Annotations that a runtime writes to the spec of a container when Kubernetes asks for it.
fn annotations(name: &str, devices: &[String]) -> HashMap<String, String> {
    let text = |key: &str, value: &str| (key.to_string(), value.to_string());
    let bundle = format!("/run/containerd/io.containerd.runtime.v2.task/k8s.io/{name}");
    let plain = [
        text("io.kubernetes.cri.container-type", "container"),
        text("io.kubernetes.cri.container-name", name),
        text("io.katacontainers.pkg.oci.bundle_path", &bundle),
    ];
    let devices = devices
        .iter()
        .enumerate()
        .map(|(k, device)| (format!("cdi.k8s.io/vfio{k}"), device.clone()));
    plain.into_iter().chain(devices).collect()
}

/// Creates containers in a pod, which is made first; each on a thread of its own.
pub fn create_in_pod(wanted: &[Wanted], pod: &Arc<Pod>) -> Vec<JoinHandle<()>> {
    if let Err(error) = pod.begin() {
        log::error("no pod", &[("error", &format!("{error:#}"))]);
    }
    let each = wanted.iter().cloned().map(|wanted| {
        let pod = Arc::clone(pod);
        std::thread::spawn(move || create_one_in_pod(&wanted, &pod))
    });
    each.collect()
}

fn create_one_in_pod(wanted: &Wanted, pod: &Pod) {
    let name = wanted.name.as_str();
    let devices: Vec<String> = wanted
        .devices
        .iter()
        .map(String::as_str)
        .map(qualified)
        .collect();
    words::rpc("create_container").write();
    let asked = Asked {
        id: name.into(),
        root: wanted
            .root
            .as_ref()
            .map(|root| Path::new(container_run::ROOTS).join(root)),
        arguments: wanted
            .root
            .iter()
            .map(|_| container_run::PROGRAM.to_string())
            .collect(),
        annotations: annotations(name, &devices),
        devices,
        hooks: wanted.hooks,
        cgroup: None,
    };
    let devices = asked.devices.join(",");
    let failed = |error: &anyhow::Error| {
        log::error(
            "container failed",
            &[
                ("container", name),
                ("devices", &devices),
                ("error", &format!("{error:#}")),
            ],
        );
    };
    match pod.create(&asked) {
        Ok(outcome) => log::info(
            "container created",
            &[
                ("container", name),
                ("devices", &devices),
                ("tries", &outcome.tries.to_string()),
                ("nodes", &listed(&outcome.spec)),
            ],
        ),
        Err(error) => return failed(&error),
    }
    words::rpc("start_container").write();
    if let Err(error) = pod.start(name) {
        return failed(&error);
    }
    log::info("container started", &[("container", name)]);
    let mut output = Vec::new();
    while let Ok(more) = pod.read(name, 4096) {
        output.extend(more);
    }
    log::info(
        "container ended",
        &[
            ("container", name),
            ("output", &String::from_utf8_lossy(&output)),
        ],
    );
}

/// The device nodes of a spec, as [`nodes`] describes them.
fn listed(spec: &Spec) -> String {
    let devices = spec
        .linux()
        .as_ref()
        .and_then(|l| l.devices().clone())
        .unwrap_or_default();
    let one = |d: &LinuxDevice| {
        format!(
            "{} {}:{} {:o}",
            d.path().display(),
            d.major(),
            d.minor(),
            d.file_mode().unwrap_or(0) & PERMISSIONS
        )
    };
    let mut all: Vec<String> = devices.iter().map(one).collect();
    all.sort();
    all.join(",")
}

/// The spec and the bundle of a container with a root.
fn prepare(container: &str, root: &str) -> anyhow::Result<(Spec, PathBuf)> {
    let (bundle, rootfs) = container_run::bundle(container, root)?;
    Ok((container_run::spec(&rootfs)?, bundle))
}

/// Runs it, and reports how it went.
fn run(container: &str, bundle: &Path, spec: &Spec) {
    let own = Path::new("/proc/self/exe");
    let ended = pid1::root_type()
        .map_err(anyhow::Error::msg)
        .and_then(|root| container_run::run(own, bundle, spec, Change::of(&root)));
    match ended {
        Ok(ended) => log::info(
            "container ended",
            &[
                ("container", container),
                ("status", &ended.status),
                ("output", &ended.output),
                ("hooks", &ended.hooks.join("; ")),
                ("failed hooks", &ended.failed_hooks.join("; ")),
                ("guest", &traces()),
            ],
        ),
        Err(error) => log::error(
            "container failed",
            &[("container", container), ("error", &format!("{error:#}"))],
        ),
    }
}

/// Traces that a container would leave in the guest if it were not kept to its root: names in /etc,
/// mounts below the bundles or on a file `params`.
fn traces() -> String {
    let names = std::fs::read_dir("/etc")
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned());
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    let mounts = mounts
        .lines()
        .filter(|l| l.contains(container_run::BUNDLES) || l.contains("/params "))
        .map(str::to_string);
    let mut all: Vec<String> = names.chain(mounts).collect();
    all.sort();
    all.join(",")
}

/// Makes the nodes of a container under its own directory and describes them: `path major:minor
/// mode,..`.
fn nodes(container: &str, spec: &Spec) -> Result<String, String> {
    let devices = spec
        .linux()
        .as_ref()
        .and_then(|l| l.devices().clone())
        .unwrap_or_default();
    let mut made = Vec::new();
    for device in devices {
        let mode = node(&Path::new(CONTAINERS).join(container), &device)?;
        made.push(format!(
            "{} {}:{} {mode:o}",
            device.path().display(),
            device.major(),
            device.minor()
        ));
    }
    made.sort();
    Ok(made.join(","))
}

/// Makes one node below a root; gives its permission bits. A mode of 0 or none in the spec means
/// that of the guest's node; without such a node it stays 0.
pub fn node(root: &Path, device: &LinuxDevice) -> Result<u32, String> {
    let name = device.path().display();
    let kind = match device.typ() {
        LinuxDeviceType::C => SFlag::S_IFCHR,
        LinuxDeviceType::B => SFlag::S_IFBLK,
        LinuxDeviceType::P => SFlag::S_IFIFO,
        LinuxDeviceType::U | LinuxDeviceType::A => {
            return Err(format!(
                "{name}: type {}: invalid spec",
                device.typ().as_str()
            ));
        }
    };
    let Some(relative) = below_dev(device.path()) else {
        return Err(format!("{name} is not a valid device path"));
    };
    let mode = match device.file_mode().unwrap_or(0) {
        0 => match std::fs::metadata(device.path()) {
            Ok(guest) => guest.permissions().mode(),
            Err(error) if error.kind() == ErrorKind::NotFound => 0,
            Err(error) => return Err(format!("mode of {name}: {error}")),
        },
        mode => mode,
    } & PERMISSIONS;
    let path = root.join(relative);
    let failed =
        |what: &str, error: &dyn std::fmt::Display| format!("{what} {}: {error}", path.display());
    let number = |n: i64| u64::try_from(n).map_err(|e| failed("number of", &e));
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(|e| failed("directory of", &e))?;
    }
    mknod(
        &path,
        kind,
        Mode::from_bits_truncate(mode),
        makedev(number(device.major())?, number(device.minor())?),
    )
    .map_err(|e| failed("mknod", &e))?;
    std::os::unix::fs::chown(
        &path,
        Some(device.uid().unwrap_or(0)),
        Some(device.gid().unwrap_or(0)),
    )
    .map_err(|e| failed("chown", &e))?;
    // The real one makes its nodes in a process of its own with umask 0; here other threads share
    // the mask.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))
        .map_err(|e| failed("chmod", &e))?;
    Ok(mode)
}

/// The path below the container's root. Only what lies under /dev is made.
fn below_dev(path: &Path) -> Option<&Path> {
    let inside = path.starts_with("/dev")
        && path != Path::new("/dev")
        && !path.components().any(|c| c == Component::ParentDir);
    if inside {
        path.strip_prefix("/").ok()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_made_only_below_dev() {
        assert_eq!(
            below_dev(Path::new("/dev/nvidia-caps/nvidia-cap1")),
            Some(Path::new("dev/nvidia-caps/nvidia-cap1"))
        );
        for path in [
            "/dev",
            "/dev/",
            "/dev/../etc/x",
            "/devil",
            "/run/kata-gpu-init/pending/0000:01:00.0",
            "dev/nvidia0",
        ] {
            assert_eq!(below_dev(Path::new(path)), None, "{path}");
        }
    }
}
