//! Pod of a VM, from the files that Kata and the container runtime keep about a sandbox on the
//! host, where they are readable.
//!
//! Files (Kata Containers 4.1.0):
//! - Kata's Go runtime writes `/run/vc/sbs/<id>/persist.json`, for the first time when the VM is
//!   up, and again with every change, in place (so that it can be found half written):
//!   `AgentState.URL` is `vsock://<CID>:<port>` or `hvsock://<path>:<port>`,
//!   `Config.ContainerConfigs[].Annotations` are the CRI's.
//! - Kata's Rust runtime writes `/run/kata/<id>/state.json` when the VM is up, and again with every
//!   change. The file has neither CID nor pod names: the CID is on QEMU's command line alone
//!   (kata_gpu_host::qemu).
//! - containerd and CRI-O keep the sandbox container's `config.json`, with the CRI's annotations,
//!   before the VM is started.
//!
//! A hybrid-vsock VM is known by its directory's name at once, a QEMU VM once the runtime has
//! written its file. Data from a guest, or from a pod owner's annotations and labels, is never
//! used: the bundle's directory decides the runtime, and the runtime decides the keys
//! ([`Runtime`]).

use super::vm_dirs::Pattern;
pub use kata_gpu_report::data::boot_file::Sandbox;
use kata_gpu_report::data::text::printable_start;
use nix::fcntl::OFlag;
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Longest file that is read: a persist.json has some ten kB.
const MAX_FILE: u64 = 4 << 20;
/// Longest name that is taken: Kubernetes' own limit of names.
const MAX_NAME: usize = 253;

/// OCI configurations of sandbox containers, of containerd and CRI-O; `*` is the sandbox's id.
pub const BUNDLES: &[&str] = &[
    "/run/containerd/io.containerd.runtime.v2.task/k8s.io/*/config.json",
    "/run/containers/storage/overlay-containers/*/userdata/config.json",
];

/// CRI-O's directory for the run time of a container (containers/storage), which is the bundle.
const CRIO_BUNDLE: &str = "userdata";
/// Annotation with the bundle's path. Kata's Go runtime overwrites a value from the bundle itself:
/// `ContainerConfig`, src/runtime/pkg/oci/utils.go.
const BUNDLE_PATH: &str = "io.katacontainers.pkg.oci.bundle_path";

/// Maker of a bundle; decides which annotations the pod's owner cannot set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Runtime {
    /// Passes the annotations that its configuration names (`pod_annotations`), then writes its own
    /// over them: `sandboxContainerSpec`, internal/cri/server/podsandbox/sandbox_run_linux.go, and
    /// `DefaultCRIAnnotations` (2.x; 1.x has the same order).
    Containerd,
    /// Writes its own annotations (`io.kubernetes.cri-o.*`), over them all annotations of the pod,
    /// and over both the pod's labels: server/sandbox_run_linux.go. Only three labels are sure,
    /// which the kubelet sets over the pod's own: `newPodLabels`,
    /// pkg/kubelet/kuberuntime/labels.go.
    Crio,
}

impl Runtime {
    /// Runtime by the bundle's directory, which no pod chooses.
    fn of(bundle: &Path) -> Self {
        if bundle.file_name().is_some_and(|name| name == CRIO_BUNDLE) {
            Self::Crio
        } else {
            Self::Containerd
        }
    }

    /// Annotations that carry name, namespace and uid of the pod.
    fn keys(self) -> [&'static str; 3] {
        match self {
            Self::Containerd => [
                "io.kubernetes.cri.sandbox-name",
                "io.kubernetes.cri.sandbox-namespace",
                "io.kubernetes.cri.sandbox-uid",
            ],
            Self::Crio => [
                "io.kubernetes.pod.name",
                "io.kubernetes.pod.namespace",
                "io.kubernetes.pod.uid",
            ],
        }
    }
}

/// A sandbox with nothing known but its id.
pub fn unnamed(id: &str) -> Sandbox {
    Sandbox {
        id: printable_start(&id, MAX_NAME),
        ..Sandbox::default()
    }
}

/// Sandbox named by annotations of a bundle of `runtime`.
fn named(id: &str, annotations: &Value, runtime: Runtime) -> Sandbox {
    let [pod, namespace, uid] = runtime.keys().map(|key| {
        let value = annotations[key].as_str().filter(|value| !value.is_empty());
        value.map(|value| printable_start(&value, MAX_NAME))
    });
    Sandbox {
        pod,
        namespace,
        uid,
        ..unnamed(id)
    }
}

/// Sandbox, and CID of its VM if there is one, from a persist.json. None if `text` is not (yet) a
/// whole file.
pub fn from_persist(id: &str, text: &[u8]) -> Option<(Sandbox, Option<u32>)> {
    let persist: Value = serde_json::from_slice(text).ok()?;
    let url = persist["AgentState"]["URL"].as_str().unwrap_or_default();
    let cid = url.strip_prefix("vsock://");
    let cid = cid.and_then(|rest| rest.split(':').next()?.parse().ok());
    let containers = persist["Config"]["ContainerConfigs"].as_array();
    let containers = containers.map_or(&[][..], Vec::as_slice);
    // The sandbox's container has the sandbox's id. The pod's other containers have annotations of
    // their own.
    let own = containers.iter().find(|container| container["ID"] == id);
    let sandbox = own.and_then(|own| {
        let annotations = &own["Annotations"];
        let bundle = Path::new(annotations[BUNDLE_PATH].as_str()?);
        Some(named(id, annotations, Runtime::of(bundle)))
    });
    Some((sandbox.unwrap_or_else(|| unnamed(id)), cid))
}

/// Sandbox from a sandbox container's config.json.
fn from_bundle(id: &str, text: &[u8], runtime: Runtime) -> Option<Sandbox> {
    let bundle: Value = serde_json::from_slice(text).ok()?;
    Some(named(id, bundle.get("annotations")?, runtime))
}

/// A sandbox of this id, named by the first bundle that can be read.
pub fn look_up(id: &str, bundles: &[Pattern]) -> Sandbox {
    let plain = id
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !id.starts_with('.');
    let named = |pattern: &Pattern| {
        let path = pattern.path(id);
        from_bundle(id, &read(pattern, &path)?, Runtime::of(path.parent()?))
    };
    bundles
        .iter()
        .filter(|_| plain)
        .find_map(named)
        .unwrap_or_else(|| unnamed(id))
}

/// Content of a regular file of bounded size; None if it is missing or unreadable, which is no
/// error.
pub fn read(pattern: &Pattern, path: &Path) -> Option<Vec<u8>> {
    let file = File::from(
        pattern
            .open(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK)
            .ok()?,
    );
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = Vec::new();
    let size = file.take(MAX_FILE + 1).read_to_end(&mut text).ok()? as u64;
    (size <= MAX_FILE).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::{TempDir, temp_dir};
    use serde_json::json;
    use std::path::PathBuf;

    const PERSIST: &str = r#"{"CgroupPaths":null,"SandboxContainer":"0a1b",
        "AgentState":{"URL":"vsock://1903452:1024"},"PersistVersion":2,
        "Config":{"HypervisorType":"qemu","ContainerConfigs":[
            {"ID":"x","Annotations":null},
            {"ID":"0a1b","Annotations":{
             "io.katacontainers.pkg.oci.bundle_path":
              "/run/containerd/io.containerd.runtime.v2.task/k8s.io/0a1b",
             "io.kubernetes.cri.container-type":"sandbox",
             "io.kubernetes.cri.sandbox-name":"train-0",
             "io.kubernetes.cri.sandbox-namespace":"ml",
             "io.kubernetes.cri.sandbox-uid":"8b5e"}}]}}"#;

    fn persist(url: &str, containers: Value) -> Value {
        json!({
            "AgentState": {"URL": url},
            "Config": {"ContainerConfigs": containers},
        })
    }

    /// A pod's annotations with every key that a runtime or the kubelet uses, as its owner may
    /// write them.
    const TENANTS: &[(&str, &str)] = &[
        ("io.kubernetes.cri.sandbox-name", "payroll-db-0"),
        ("io.kubernetes.cri.sandbox-namespace", "finance"),
        ("io.kubernetes.cri.sandbox-uid", "6666"),
        ("io.kubernetes.cri-o.KubeName", "payroll-db-0"),
        ("io.kubernetes.cri-o.Namespace", "finance"),
        ("io.kubernetes.pod.name", "payroll-db-0"),
        ("io.kubernetes.pod.namespace", "finance"),
        ("io.kubernetes.pod.uid", "6666"),
        ("io.container.manager", "cri-o"),
    ];

    fn sandbox() -> Sandbox {
        Sandbox {
            id: "0a1b".into(),
            pod: Some("train-0".into()),
            namespace: Some("ml".into()),
            uid: Some("8b5e".into()),
            vmm_user: None,
        }
    }

    /// Writes a bundle with these annotations.
    fn bundle(dir: &TempDir, at: &str, annotations: &Value) -> PathBuf {
        let bundle = dir.path().join(at);
        std::fs::create_dir_all(&bundle).unwrap();
        let text = json!({"ociVersion": "1.0.0", "annotations": annotations});
        std::fs::write(bundle.join("config.json"), text.to_string()).unwrap();
        bundle
    }

    fn pattern(dir: &TempDir, text: &str) -> Pattern {
        format!("{}/{text}", dir.path().display()).parse().unwrap()
    }

    /// Annotations written one over the other, in the order of the runtime.
    fn layers(layers: &[&[(&str, &str)]]) -> Value {
        layers
            .iter()
            .flat_map(|layer| layer.iter())
            .map(|(key, value)| (key.to_string(), Value::from(*value)))
            .collect()
    }

    /// Annotations as CRI-O writes them: its own, the pod's annotations, the labels with the
    /// kubelet's over the pod's.
    fn of_crio() -> Value {
        let own = [
            ("io.kubernetes.cri-o.KubeName", "train-0"),
            ("io.kubernetes.cri-o.Namespace", "ml"),
            ("io.container.manager", "cri-o"),
        ];
        let kubelets = [
            ("io.kubernetes.pod.name", "train-0"),
            ("io.kubernetes.pod.namespace", "ml"),
            ("io.kubernetes.pod.uid", "8b5e"),
        ];
        layers(&[&own, TENANTS, &kubelets])
    }

    /// Annotations as containerd writes them if its configuration passes all of the pod's: the
    /// pod's, and its own over them.
    fn of_containerd() -> Value {
        let own = [
            ("io.kubernetes.cri.sandbox-name", "train-0"),
            ("io.kubernetes.cri.sandbox-namespace", "ml"),
            ("io.kubernetes.cri.sandbox-uid", "8b5e"),
        ];
        layers(&[TENANTS, &own])
    }

    #[test]
    fn katas_file_has_cid_and_names() {
        assert_eq!(
            from_persist("0a1b", PERSIST.as_bytes()),
            Some((sandbox(), Some(1_903_452)))
        );
        let hybrid = PERSIST.replace(
            "vsock://1903452:1024",
            "hvsock:///run/vc/vm/0a1b/clh.sock:1024",
        );
        assert_eq!(
            from_persist("0a1b", hybrid.as_bytes()),
            Some((sandbox(), None))
        );
    }

    #[test]
    fn a_file_that_is_half_written_or_of_another_kind_is_no_error() {
        for end in 0..PERSIST.len() {
            assert_eq!(from_persist("0a1b", &PERSIST.as_bytes()[..end]), None);
        }
        for text in [
            "{}",
            r#"{"AgentState":{"URL":"vsock://99999999999:1"},"Config":{"ContainerConfigs":null}}"#,
        ] {
            assert_eq!(
                from_persist("s", text.as_bytes()),
                Some((
                    Sandbox {
                        id: "s".into(),
                        ..Sandbox::default()
                    },
                    None
                )),
                "{text}"
            );
        }
    }

    #[test]
    fn no_annotation_of_a_pod_names_another_pod() {
        let dir = temp_dir();
        for (at, annotations) in [("a/0a1b", of_containerd()), ("b/0a1b/userdata", of_crio())] {
            let bundle = bundle(&dir, at, &annotations);
            let name = at.split_once('/').unwrap().0;
            let rest = if name == "a" { "" } else { "userdata/" };
            assert_eq!(
                look_up(
                    "0a1b",
                    &[pattern(&dir, &format!("{name}/*/{rest}config.json"))]
                ),
                sandbox(),
                "{at}"
            );
            // Kata's own file: the bundle's annotations, and over them the bundle's path.
            let mut annotations = annotations;
            annotations[BUNDLE_PATH] = bundle.to_str().unwrap().into();
            let evil: Value = layers(&[TENANTS]);
            let containers = json!([
                {"ID": "evil", "Annotations": evil},
                {"ID": "0a1b", "Annotations": annotations},
            ]);
            let persist = persist("vsock://7:1024", containers);
            assert_eq!(
                from_persist("0a1b", persist.to_string().as_bytes()),
                Some((sandbox(), Some(7))),
                "{at}"
            );
        }
    }

    #[test]
    fn texts_of_the_pods_owner_alone_name_no_pod() {
        let dir = temp_dir();
        // Without the kubelet's labels, as for a pod that `crictl` started.
        let annotations: Value = layers(&[&TENANTS[..5], &TENANTS[8..]]);
        bundle(&dir, "b/0a1b/userdata", &annotations);
        assert_eq!(
            look_up("0a1b", &[pattern(&dir, "b/*/userdata/config.json")]),
            unnamed("0a1b")
        );
        let containers = json!([{"ID": "0a1b", "Annotations": layers(&[TENANTS])}]);
        let persist = persist("", containers);
        assert_eq!(
            from_persist("0a1b", persist.to_string().as_bytes()),
            Some((unnamed("0a1b"), None)),
            "nothing says whose bundle it was"
        );
    }

    #[test]
    fn the_first_readable_bundle_names_the_pod_and_no_id_is_a_path() {
        let dir = temp_dir();
        let bundles = [
            pattern(&dir, "a/*/config.json"),
            pattern(&dir, "b/*/userdata/config.json"),
        ];
        assert_eq!(look_up("0a1b", &bundles), unnamed("0a1b"));
        bundle(&dir, "b/0a1b/userdata", &of_crio());
        assert_eq!(look_up("0a1b", &bundles), sandbox());
        assert_eq!(look_up("../b/0a1b", &bundles).pod, None);
        // A link below the pattern's `*` is not followed.
        std::os::unix::fs::symlink(dir.path().join("b/0a1b"), dir.path().join("b/linked")).unwrap();
        assert_eq!(look_up("linked", &bundles).pod, None);
    }

    #[test]
    fn nothing_in_a_name_drives_a_terminal_or_is_endless() {
        let evil = format!(
            r#"{{"annotations":{{"io.kubernetes.cri.sandbox-name":"\u001b[2J{}"}}}}"#,
            "x".repeat(1000)
        );
        let pod = from_bundle("s", evil.as_bytes(), Runtime::Containerd)
            .unwrap()
            .pod
            .unwrap();
        assert!(
            pod.starts_with("\\x1b[2J") && pod.len() < 300 && pod.is_ascii(),
            "{pod}"
        );
    }

    #[test]
    fn a_file_that_is_too_large_or_none_is_not_read() {
        let dir = temp_dir();
        let files = pattern(&dir, "*/x");
        let read = |id: &str| read(&files, &files.path(id));
        for id in ["large", "small", "fifo"] {
            std::fs::create_dir(dir.path().join(id)).unwrap();
        }
        std::fs::File::create(dir.path().join("large/x"))
            .unwrap()
            .set_len(MAX_FILE + 1)
            .unwrap();
        std::fs::write(dir.path().join("small/x"), "y").unwrap();
        std::fs::create_dir_all(dir.path().join("dir/x")).unwrap();
        nix::unistd::mkfifo(&dir.path().join("fifo/x"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let found = ["small", "large", "dir", "fifo", "none"].map(read);
        assert_eq!(
            found,
            [Some(b"y".to_vec()), None, None, None, None],
            "and it does not wait for a writer"
        );
    }
}
