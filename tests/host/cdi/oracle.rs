//! A failure means that, in some state of a spec, the crates of Kata 3 and Kata 4 give a container
//! other nodes than those of its ready GPUs, wait for a GPU that failed, or fail for one that is
//! pending.

use crate::TempDir;
use kata_gpu_init::cdi::publish::Publisher;
use kata_gpu_init::cdi::spec::{Device, Entry, Options, Ready, generate};
use kata_gpu_init::config::Naming;
use kata_gpu_init::gpu::device_nodes::Node;
use kata_gpu_wire::failure::Reason;
use std::path::Path;

/// For minors 0 to 3 of the GPUs: the agent looks at the nodes of a ready GPU, and every machine
/// has these.
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
                // kata-agent's own look at each mount of the container, in all its releases.
                let mounts = spec.mounts().iter().flatten();
                for path in mounts.map(|mount| mount.destination().display().to_string()) {
                    if !path.starts_with('/') || path.contains("..") {
                        return Err(format!("the mount destination {path} is invalid"));
                    }
                }
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

// 0.1.2, of Kata up to 3.32, and 1.1.1, of Kata 4.
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
fn a_container_gets_its_ready_gpus_and_waits_for_or_lacks_others() {
    use Entry::{Absent, Failed, Pending};
    const NOT_YET: &str = "failed to inject devices";
    const GONE: &str = "unresolvable CDI devices nvidia.com/gpu=1";
    let one_pends = [ready(0, 3), device(1, Pending)];
    const VERDICT: &str = "/../GPU 0001:00:01.0 has failed (off-the-bus): reset it";
    let failed = |index| device(index, Failed(Some(Reason::OffTheBus)));
    let one_failed = [ready(0, 1), failed(1), ready(2, 0)];
    let one_failed_early = [ready(0, 1), failed(1), device(2, Pending)];
    let one_left = [ready(0, 1), device(1, Absent)];
    let all_failed = [failed(0), failed(1)];
    type Wanted = Result<&'static [&'static str], &'static str>;
    let cases: [(&[Device], &str, Wanted); 10] = [
        (&one_pends, "0", Ok(&[GPUS[3], UVM, CONTROL])),
        (&one_pends, "1", Err(NOT_YET)),
        (&one_pends, "all", Err(NOT_YET)),
        (&one_failed, "all", Ok(&[GPUS[0], UVM, CONTROL, GPUS[1]])),
        (&one_failed, "1", Err(VERDICT)),
        (&one_failed_early, "1", Err(GONE)),
        (&one_failed_early, "0", Ok(&[UVM, CONTROL, GPUS[1]])),
        (&one_left, "1", Err(GONE)),
        (&all_failed, "1", Err(VERDICT)),
        (&all_failed, "all", Err("has failed (off-the-bus)")),
    ];
    for (index, (devices, ask, wanted)) in cases.into_iter().enumerate() {
        match (inject(&format!("oracle-{index}"), devices, ask), wanted) {
            (Ok(nodes), Ok(wanted)) => assert_eq!(nodes, wanted, "{index}"),
            (Err(error), Err(why)) => assert!(error.contains(why), "{index}: {error}"),
            (got, wanted) => panic!("{index}: {got:?} for {wanted:?}"),
        }
    }
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
    let text = crate::text(&file);
    crate::write(&file, text.replace(r#"{"path":"#, r#"{"type":"c","path":"#));
    let [kata3, kata4] = inject_from(&directory.0, "0");
    assert!(kata3.unwrap_err().starts_with("refresh: "));
    assert_eq!(kata4.unwrap().len(), 2);
}
