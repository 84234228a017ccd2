//! Whose VM it is: from what Kata and the container runtime keep about a sandbox on the host, where that can be read.
//!
//! What was found to be there (Kata Containers 4.1.0):
//! - Kata's Go runtime writes `/run/vc/sbs/<id>/persist.json`, for the first time when the VM is up, and again with every change, in place (so that
//!   it can be found half written): `AgentState.URL` is `vsock://<CID>:<port>` or `hvsock://<path>:<port>`, `Config.ContainerConfigs[].Annotations`
//!   are the CRI's.
//! - Its Rust runtime writes `/run/kata/<id>/state.json`, which has neither a CID nor the pod's names.
//! - containerd and CRI-O keep the sandbox container's `config.json`, with the CRI's annotations, before the VM is started.
//!
//! So a hybrid-vsock VM is known by its directory's name at once; one of QEMU when the Go runtime has written its CID, and with the Rust
//! runtime not at all. Nothing that a guest says goes in here.

pub use crate::host::boot_file::Sandbox;
use crate::host::text::printable_start;
use serde::Deserialize;
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Longest file that is read: a persist.json has some ten kB.
const MAX_FILE: u64 = 4 << 20;
/// Longest name that is taken: Kubernetes' own limit of names.
const MAX_NAME: usize = 253;

/// Where containerd and CRI-O keep a sandbox container's OCI configuration; `*` is the sandbox's id.
pub const BUNDLES: &[&str] = &[
    "/run/containerd/io.containerd.runtime.v2.task/k8s.io/*/config.json",
    "/run/containers/storage/overlay-containers/*/userdata/config.json",
];

/// Annotations that carry name, namespace and uid of the pod: containerd's, and CRI-O's.
const POD: &[&str] = &["io.kubernetes.cri.sandbox-name", "io.kubernetes.cri-o.KubeName", "io.kubernetes.pod.name"];
const NAMESPACE: &[&str] = &["io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri-o.Namespace", "io.kubernetes.pod.namespace"];
const UID: &[&str] = &["io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid"];

type Annotations = HashMap<String, String>;

#[derive(Deserialize)]
struct Persist {
    #[serde(rename = "AgentState", default)]
    agent: Agent,
    #[serde(rename = "Config", default)]
    config: Config,
}

#[derive(Default, Deserialize)]
struct Agent {
    #[serde(rename = "URL", default)]
    url: String,
}

#[derive(Default, Deserialize)]
struct Config {
    #[serde(rename = "ContainerConfigs", default)]
    containers: Option<Vec<Container>>,
}

#[derive(Deserialize)]
struct Container {
    #[serde(rename = "Annotations", default)]
    annotations: Option<Annotations>,
}

#[derive(Deserialize)]
struct Bundle {
    #[serde(default)]
    annotations: Annotations,
}

/// Names from annotations.
fn named(id: &str, annotations: &Annotations) -> Sandbox {
    let first = |keys: &[&str]| {
        let value = keys.iter().find_map(|key| annotations.get(*key)).filter(|v| !v.is_empty())?;
        Some(printable_start(value.as_bytes(), MAX_NAME))
    };
    Sandbox { id: printable_start(id.as_bytes(), MAX_NAME), pod: first(POD), namespace: first(NAMESPACE), uid: first(UID) }
}

/// What a persist.json says: the sandbox, and the CID of its VM if it has one. None where it is not (yet) one.
pub fn from_persist(id: &str, text: &[u8]) -> Option<(Sandbox, Option<u32>)> {
    let persist: Persist = serde_json::from_slice(text).ok()?;
    let cid = persist.agent.url.strip_prefix("vsock://").and_then(|rest| rest.split(':').next()?.parse().ok());
    let containers = persist.config.containers.unwrap_or_default();
    let annotations = containers.into_iter().filter_map(|c| c.annotations).find(|a| POD.iter().any(|key| a.contains_key(*key)));
    Some((named(id, &annotations.unwrap_or_default()), cid))
}

/// What a sandbox container's config.json says.
pub fn from_bundle(id: &str, text: &[u8]) -> Option<Sandbox> {
    let bundle: Bundle = serde_json::from_slice(text).ok()?;
    Some(named(id, &bundle.annotations))
}

/// A sandbox of this id, named by the first bundle that can be read.
pub fn look_up(id: &str, bundles: &[String]) -> Sandbox {
    let plain = id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) && !id.starts_with('.');
    let found = bundles.iter().filter(|_| plain).find_map(|pattern| from_bundle(id, &read(Path::new(&pattern.replace('*', id)))?));
    found.unwrap_or_else(|| named(id, &Annotations::new()))
}

/// A regular file of bounded size; None where it cannot be read, which is no error: it may not be there, or not be ours to read.
pub fn read(path: &Path) -> Option<Vec<u8>> {
    use nix::fcntl::OFlag;
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
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
    use crate::host::testing::TempDir;

    const PERSIST: &str = r#"{"CgroupPaths":null,"SandboxContainer":"0a1b","AgentState":{"URL":"vsock://1903452:1024"},"PersistVersion":2,
        "Config":{"HypervisorType":"qemu","ContainerConfigs":[
            {"ID":"x","Annotations":null},
            {"ID":"0a1b","Annotations":{"io.kubernetes.cri.container-type":"sandbox","io.kubernetes.cri.sandbox-name":"train-0",
             "io.kubernetes.cri.sandbox-namespace":"ml","io.kubernetes.cri.sandbox-uid":"8b5e"}}]}}"#;

    fn sandbox() -> Sandbox {
        Sandbox { id: "0a1b".into(), pod: Some("train-0".into()), namespace: Some("ml".into()), uid: Some("8b5e".into()) }
    }

    #[test]
    fn katas_file_has_cid_and_names() {
        assert_eq!(from_persist("0a1b", PERSIST.as_bytes()), Some((sandbox(), Some(1_903_452))));
        let hybrid = PERSIST.replace("vsock://1903452:1024", "hvsock:///run/vc/vm/0a1b/clh.sock:1024");
        assert_eq!(from_persist("0a1b", hybrid.as_bytes()), Some((sandbox(), None)));
    }

    #[test]
    fn a_file_that_is_half_written_or_of_another_kind_is_no_error() {
        for end in 0..PERSIST.len() {
            assert_eq!(from_persist("0a1b", &PERSIST.as_bytes()[..end]), None);
        }
        for text in ["{}", r#"{"AgentState":{"URL":"vsock://99999999999:1"},"Config":{"ContainerConfigs":null}}"#] {
            assert_eq!(from_persist("s", text.as_bytes()), Some((Sandbox { id: "s".into(), ..Sandbox::default() }, None)), "{text}");
        }
    }

    #[test]
    fn the_runtimes_configuration_names_the_pod_in_either_dialect() {
        let dir = TempDir::new();
        let bundles = [format!("{}/a/*/config.json", dir.path().display()), format!("{}/b/*/userdata/config.json", dir.path().display())];
        assert_eq!(look_up("0a1b", &bundles), Sandbox { id: "0a1b".into(), ..Sandbox::default() });
        std::fs::create_dir_all(dir.path().join("b/0a1b/userdata")).unwrap();
        let crio = r#"{"ociVersion":"1.0.0","annotations":{"io.kubernetes.cri-o.KubeName":"train-0","io.kubernetes.cri-o.Namespace":"ml","io.kubernetes.pod.uid":"8b5e"}}"#;
        std::fs::write(dir.path().join("b/0a1b/userdata/config.json"), crio).unwrap();
        assert_eq!(look_up("0a1b", &bundles), sandbox());
        assert_eq!(look_up("../b/0a1b", &bundles).pod, None, "an id is never a path");
    }

    #[test]
    fn nothing_in_a_name_drives_a_terminal_or_is_endless() {
        let evil = format!(r#"{{"annotations":{{"io.kubernetes.cri.sandbox-name":"\u001b[2J{}"}}}}"#, "x".repeat(1000));
        let pod = from_bundle("s", evil.as_bytes()).unwrap().pod.unwrap();
        assert!(pod.starts_with("\\x1b[2J") && pod.len() < 300 && pod.is_ascii(), "{pod}");
    }

    #[test]
    fn a_file_that_is_too_large_or_none_is_not_read() {
        let dir = TempDir::new();
        let path = dir.path().join("x");
        std::fs::File::create(&path).unwrap().set_len(MAX_FILE + 1).unwrap();
        assert_eq!(read(&path), None);
        assert_eq!(read(dir.path()), None);
        nix::unistd::mkfifo(&dir.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(read(&dir.path().join("fifo")), None, "and it does not wait for a writer");
    }
}
