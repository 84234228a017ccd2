//! Every state a spec can be in, before the crates that kata-agent resolves devices with: 0.1.2
//! (Kata <= 3.32) and 1.1.1 (Kata 4).
//!
//! The agent looks at the nodes of a ready GPU. Device nodes that every machine has stand for them
//! here.

use crate::TempDir;
use kata_gpu_init::cdi::publish::Publisher;
use kata_gpu_init::cdi::spec::{Device, Entry, Extras, Instance, Options, Ready, generate};
use kata_gpu_init::config::Naming;
use kata_gpu_init::gpu::device_nodes::Node;
use kata_gpu_init::gpu::driver_caps::MigInstance;
use std::path::Path;

/// For minors 0 to 3 of the GPUs.
const GPUS: [&str; 4] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random"];
const CONTROL: &str = "/dev/urandom";
const UVM: &str = "/dev/tty";

fn node(path: &str, major: u32, minor: u32) -> Node {
    Node {
        path: path.into(),
        major,
        minor,
        mode: 0o666,
        gid: 0,
    }
}

fn device(index: usize, entry: Entry) -> Device {
    Device {
        index,
        address: format!("0001:00:{index:02x}.0").parse().unwrap(),
        entry,
    }
}

fn ready(index: usize, minor: usize) -> Device {
    device(
        index,
        Entry::Ready(Ready {
            nodes: vec![node(GPUS[minor], 195, minor as u32)],
            ..Ready::default()
        }),
    )
}

/// Result of one agent for a directory of specs: paths, numbers and modes of the container's device
/// nodes, by path.
type Injected = Result<Vec<(String, i64, i64, Option<u32>)>, String>;

macro_rules! agent {
    ($agent:ident, $cdi:ident, $oci:ident) => {
        mod $agent {
            use super::Injected;
            use $cdi::cache::{new_cache, with_auto_refresh};
            use $cdi::spec_dirs::with_spec_dirs;
            use $oci::runtime::Spec;

            pub fn inject(directory: &str, ask: &str) -> Injected {
                let cache = new_cache(vec![with_auto_refresh(false), with_spec_dirs(&[directory])]);
                let mut cache = cache.lock().unwrap();
                cache.refresh().map_err(|e| format!("refresh: {e}"))?;
                let mut spec = Spec::default();
                let untouched = serde_json::to_string(&spec).unwrap();
                cache
                    .inject_devices(Some(&mut spec), vec![format!("nvidia.com/gpu={ask}")])
                    .map_err(|e| {
                        assert_eq!(
                            serde_json::to_string(&spec).unwrap(),
                            untouched,
                            "an injection that failed has changed the container"
                        );
                        e.to_string()
                    })?;
                let devices = spec
                    .linux()
                    .as_ref()
                    .and_then(|l| l.devices().clone())
                    .unwrap_or_default();
                let rules = spec
                    .linux()
                    .as_ref()
                    .and_then(|l| l.resources().as_ref()?.devices().clone())
                    .unwrap_or_default();
                let env = spec
                    .process()
                    .as_ref()
                    .and_then(|p| p.env().clone())
                    .unwrap_or_default();
                assert!(
                    env.contains(&"NVIDIA_VISIBLE_DEVICES=void".to_string()),
                    "{env:?}"
                );
                let allowed = |major, minor| {
                    rules
                        .iter()
                        .any(|r| r.allow() && (r.major(), r.minor()) == (Some(major), Some(minor)))
                };
                assert!(
                    devices.iter().all(|d| allowed(d.major(), d.minor())),
                    "{devices:?} {rules:?}"
                );
                let mut nodes: Vec<_> = devices
                    .iter()
                    .map(|d| {
                        (
                            d.path().display().to_string(),
                            d.major(),
                            d.minor(),
                            d.file_mode(),
                        )
                    })
                    .collect();
                nodes.sort();
                Ok(nodes)
            }
        }
    };
}

agent!(kata3, container_device_interface_0, oci_spec_0);
agent!(kata4, container_device_interface_1, oci_spec);

fn inject_from(directory: &Path, ask: &str) -> [Injected; 2] {
    let directory = directory.to_str().unwrap();
    [kata3::inject(directory, ask), kata4::inject(directory, ask)]
}

/// Publishes and injects; gives the paths of the container's device nodes, on which the agents
/// agree.
fn inject(test: &str, devices: &[Device], ask: &str) -> Result<Vec<String>, String> {
    let directory = TempDir::new(test);
    let common = [node(CONTROL, 195, 255), node(UVM, 240, 0)];
    let options = Options {
        namings: vec![Naming::Index, Naming::Uuid],
        ..Options::default()
    };
    let spec = generate(devices, &common, None, &options);
    crate::cdi::schema::fits(&spec.to_json());
    Publisher::new(&directory.0)
        .unwrap()
        .publish(&spec)
        .unwrap();
    let [kata3, kata4] = inject_from(&directory.0, ask);
    assert_eq!(kata3, kata4, "the agents differ");
    for (path, major, _, mode) in kata4.iter().flatten() {
        assert_eq!(
            (*major, *mode),
            (if path == UVM { 240 } else { 195 }, Some(0o666)),
            "{path}: the numbers are not those of the spec"
        );
    }
    kata4.map(|nodes| nodes.into_iter().map(|(path, ..)| path).collect())
}

#[test]
fn a_ready_gpu_is_injected_while_another_one_is_pending() {
    let devices = [ready(0, 3), device(1, Entry::Pending)];
    assert_eq!(
        inject("ready", &devices, "0").unwrap(),
        [GPUS[3], UVM, CONTROL]
    );
}

#[test]
fn a_pending_gpu_and_all_are_refused_for_now() {
    let devices = [ready(0, 0), device(1, Entry::Pending)];
    for ask in ["1", "all"] {
        let error = inject(&format!("pending-{ask}"), &devices, ask).unwrap_err();
        assert!(
            error.starts_with("failed to inject devices"),
            "{ask}: {error}"
        );
    }
}

#[test]
fn all_has_every_gpu_that_has_not_failed() {
    let devices = [ready(0, 1), device(1, Entry::Failed), ready(2, 0)];
    assert_eq!(
        inject("all", &devices, "all").unwrap(),
        [GPUS[0], UVM, CONTROL, GPUS[1]]
    );
}

#[test]
fn a_failed_gpu_is_unresolvable_at_once_even_if_all_failed() {
    for devices in [
        vec![ready(0, 0), device(1, Entry::Failed)],
        vec![device(0, Entry::Failed), device(1, Entry::Failed)],
    ] {
        let error = inject(
            &format!("failed-{}", devices[0].entry == Entry::Failed),
            &devices,
            "1",
        )
        .unwrap_err();
        assert!(
            error.contains("unresolvable CDI devices nvidia.com/gpu=1"),
            "{error}"
        );
    }
}

#[test]
fn an_instance_is_injected_by_its_uuid_as_by_its_index() {
    const UUID: &str = "MIG-01234567-89ab-cdef-0123-456789abcdef";
    let id = |ci| MigInstance { gpu: 0, gi: 1, ci };
    let instances = [0, 1].map(|ci| Instance {
        id: id(ci),
        nodes: vec![node(GPUS[1 + ci as usize], 195, 1 + ci)],
    });
    let extras = Extras {
        instances: instances.to_vec(),
        ..Extras::default()
    };
    let instance_uuids = [(id(1), UUID.to_string())].into();
    let gpu = Entry::Ready(Ready {
        nodes: vec![node(GPUS[0], 195, 0)],
        extras,
        instance_uuids,
        ..Ready::default()
    });
    let devices = [device(0, gpu), device(1, Entry::Pending)];
    let by_uuid = inject("mig-uuid", &devices, UUID).unwrap();
    assert_eq!(by_uuid, inject("mig-index", &devices, "0:1").unwrap());
    assert_eq!(by_uuid, [GPUS[2], GPUS[0], UVM, CONTROL]);
    let error = inject(
        "mig-unknown",
        &devices,
        "MIG-01234567-89ab-cdef-0123-456789abcdee",
    )
    .unwrap_err();
    assert!(error.contains("unresolvable CDI devices"), "{error}");
}

/// Negative control: one field more in our own spec, and one of the two agents refuses it.
#[test]
fn a_spec_whose_nodes_have_a_type_is_refused_by_one_agent_alone() {
    let directory = TempDir::new("typed");
    let publisher = Publisher::new(&directory.0).unwrap();
    publisher
        .publish(&generate(
            &[ready(0, 0)],
            &[node(CONTROL, 195, 255)],
            None,
            &Options::default(),
        ))
        .unwrap();
    assert!(inject_from(&directory.0, "0").iter().all(Result::is_ok));
    let file = directory.0.join(kata_gpu_init::cdi::publish::FILE);
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace(r#"{"path":"#, r#"{"type":"c","path":"#)).unwrap();
    let [kata3, kata4] = inject_from(&directory.0, "0");
    assert!(kata3.unwrap_err().starts_with("refresh: "));
    assert_eq!(kata4.unwrap().len(), 2);
}
