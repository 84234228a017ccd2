//! The requests that Kata's runtime sends for a pod, as messages of kata-agent 4.1.0.
//!
//! Content as the runtime's: no hooks, no seccomp, device rules and limits of processes removed,
//! namespaces without paths and without those of the network, cgroup and PID, GPUs asked for by the
//! annotation `cdi.k8s.io/vfio<N>`. Not sent: storages and shared file systems (a root is a
//! directory of the guest), network interfaces, the PCI devices to wait for.

use kata_gpu_test_guest::agent::pod::{MASKED, READ_ONLY};
use kata_gpu_test_guest::protobuf::Message;

/// Capabilities that containerd gives every container.
const CAPABILITIES: [&str; 14] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FSETID",
    "CAP_FOWNER",
    "CAP_MKNOD",
    "CAP_NET_RAW",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETFCAP",
    "CAP_SETPCAP",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT",
    "CAP_KILL",
    "CAP_AUDIT_WRITE",
];
/// Options of a container's /dev/pts.
const PTS: &[&str] = &[
    "nosuid",
    "noexec",
    "newinstance",
    "ptmxmode=0666",
    "mode=0620",
    "gid=5",
];
/// Destination, type, source and options of a container's mounts.
const MOUNTS: &[(&str, &str, &str, &[&str])] = &[
    ("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
    (
        "/dev",
        "tmpfs",
        "tmpfs",
        &["nosuid", "strictatime", "mode=755", "size=65536k"],
    ),
    ("/dev/pts", "devpts", "devpts", PTS),
    (
        "/dev/mqueue",
        "mqueue",
        "mqueue",
        &["nosuid", "noexec", "nodev"],
    ),
    (
        "/sys",
        "sysfs",
        "sysfs",
        &["nosuid", "noexec", "nodev", "ro"],
    ),
    (
        "/sys/fs/cgroup",
        "cgroup",
        "cgroup",
        &["nosuid", "noexec", "nodev", "relatime", "ro"],
    ),
    (
        "/run",
        "tmpfs",
        "tmpfs",
        &["nosuid", "strictatime", "mode=755", "size=65536k"],
    ),
    (
        "/dev/shm",
        "tmpfs",
        "shm",
        &["nosuid", "noexec", "nodev", "mode=1777", "size=67108864"],
    ),
];
/// Limit of open files that containerd gives a container.
pub const FILES: u64 = 1_048_576;
/// The pod's cgroup, as kubelet names it with the driver cgroupfs.
const POD_CGROUP: &str = "/kubepods/besteffort/pod7d1a3c52-0c0d-4f2e-9a53-4be2c5a1f6d0";

/// A container to ask for.
#[derive(Clone, Debug)]
pub struct Container {
    pub id: String,
    /// Directory of the guest that is its root.
    pub root: String,
    pub arguments: Vec<String>,
    /// GPUs as the runtime names them: positions, or `all`.
    pub gpus: Vec<String>,
    /// Whether it is the pod's pause container.
    pub sandbox: bool,
    /// Limit of its open files: [`FILES`], where the kernel allows that.
    pub files: u64,
}

impl Container {
    /// A container of the workload, with the root of its name, that runs the application as `what`.
    pub fn new(name: &str, what: &str, gpus: &[&str]) -> Self {
        Self {
            id: name.into(),
            root: format!("/containers/{name}"),
            arguments: vec!["/application".into(), what.into()],
            gpus: gpus.iter().map(ToString::to_string).collect(),
            sandbox: false,
            files: FILES,
        }
    }
}

pub fn create_sandbox(id: &str) -> Message {
    Message::new().text(1, "bench").text(5, id)
}

pub fn start_container(id: &str) -> Message {
    Message::new().text(1, id)
}

/// Up to `length` bytes that the container's first process has written.
pub fn read_stdout(id: &str, length: u64) -> Message {
    Message::new().text(1, id).text(2, id).number(3, length)
}

pub fn write_stdin(id: &str, bytes: &[u8]) -> Message {
    Message::new().text(1, id).text(2, id).bytes(3, bytes)
}

pub fn create_container(container: &Container, sandbox: &str) -> Message {
    // containerID, execID, OCI
    Message::new()
        .text(1, &container.id)
        .text(2, &container.id)
        .message(6, spec(container, sandbox))
}

fn spec(container: &Container, sandbox: &str) -> Message {
    let user = Message::new();
    let capabilities = (1..=4).fold(Message::new(), |all, set| all.texts(set, CAPABILITIES));
    let limit = Message::new()
        .text(1, "RLIMIT_NOFILE")
        .number(2, container.files)
        .number(3, container.files);
    let process = Message::new()
        .message(3, user)
        .texts(4, &container.arguments)
        .texts(
            5,
            [
                "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "HOSTNAME=bench",
            ],
        )
        .text(6, "/")
        .message(7, capabilities)
        .message(8, limit);
    let root = Message::new().text(1, &container.root);
    let mut spec = Message::new()
        .text(1, "1.2.0")
        .message(2, process)
        .message(3, root)
        .text(4, "bench");
    for (destination, kind, source, options) in MOUNTS {
        let mount = Message::new()
            .text(1, destination)
            .text(2, source)
            .text(3, kind)
            .texts(4, *options);
        spec = spec.message(5, mount);
    }
    for (name, value) in annotations(container, sandbox) {
        spec = spec.message(7, Message::new().text(1, &name).text(2, &value));
    }
    // CPU shares and the period as kubelet sets them for a pod without limits.
    let resources = Message::new().message(3, Message::new().number(1, 2).number(3, 100_000));
    let mut linux = Message::new()
        .message(4, resources)
        .text(5, &format!("{POD_CGROUP}/{}", container.id));
    for namespace in ["ipc", "uts", "mount"] {
        linux = linux.message(6, Message::new().text(1, namespace));
    }
    spec.message(8, linux.texts(10, MASKED).texts(11, READ_ONLY))
}

fn annotations(container: &Container, sandbox: &str) -> Vec<(String, String)> {
    let kind = if container.sandbox {
        "sandbox"
    } else {
        "container"
    };
    let mut all = vec![
        (
            "io.kubernetes.cri.container-type".to_string(),
            kind.to_string(),
        ),
        (
            "io.kubernetes.cri.sandbox-id".to_string(),
            sandbox.to_string(),
        ),
        (
            "io.kubernetes.cri.sandbox-name".to_string(),
            "bench".to_string(),
        ),
    ];
    let named = |(k, gpu)| {
        (
            format!("cdi.k8s.io/vfio{k}"),
            format!("nvidia.com/gpu={gpu}"),
        )
    };
    all.extend(container.gpus.iter().enumerate().map(named));
    all
}
