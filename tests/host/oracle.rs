//! Every state a spec can be in, before the crate that kata-agent resolves devices with.

use crate::TempDir;
use container_device_interface::cache::{new_cache, with_auto_refresh};
use container_device_interface::spec_dirs::with_spec_dirs;
use kata_gpu_init::cdi::publish::Publisher;
use kata_gpu_init::cdi::spec::{Device, Entry, generate};
use kata_gpu_init::device_nodes::Node;
use oci_spec::runtime::Spec;

fn node(name: &str, major: u32, minor: u32) -> Node {
    Node { path: format!("/dev/{name}").into(), major, minor, mode: 0o666, gid: 0 }
}

fn device(index: usize, entry: Entry) -> Device {
    Device { index, address: format!("0001:00:{index:02x}.0").parse().unwrap(), entry }
}

fn ready(index: usize, minor: u32) -> Device {
    device(index, Entry::Ready(vec![node(&format!("nvidia{minor}"), 195, minor)]))
}

/// Publishes and injects; gives the paths of the container's device nodes.
fn inject(test: &str, devices: &[Device], ask: &str) -> Result<Vec<String>, String> {
    let directory = TempDir::new(test);
    let common = [node("nvidiactl", 195, 255), node("nvidia-uvm", 240, 0)];
    Publisher::new(&directory.0).unwrap().publish(&generate(devices, &common)).unwrap();
    let cache = new_cache(vec![with_auto_refresh(false), with_spec_dirs(&[directory.0.to_str().unwrap()])]);
    let mut cache = cache.lock().unwrap();
    cache.refresh().map_err(|e| format!("refresh: {e}"))?;
    let mut spec = Spec::default();
    let untouched = spec.clone();
    cache.inject_devices(Some(&mut spec), vec![format!("nvidia.com/gpu={ask}")]).map_err(|e| {
        assert_eq!(spec_or(&spec), spec_or(&untouched), "an injection that failed has changed the container");
        e.to_string()
    })?;
    let devices = spec.linux().as_ref().and_then(|l| l.devices().clone()).unwrap_or_default();
    let env = spec.process().as_ref().and_then(|p| p.env().clone()).unwrap_or_default();
    assert!(env.contains(&"NVIDIA_VISIBLE_DEVICES=void".to_string()), "{env:?}");
    Ok(devices.iter().map(|d| d.path().display().to_string()).collect())
}

fn spec_or(spec: &Spec) -> String {
    serde_json::to_string(spec).unwrap()
}

#[test]
fn a_ready_gpu_is_injected_while_another_one_is_pending() {
    let devices = [ready(0, 3), device(1, Entry::Pending)];
    let mut paths = inject("ready", &devices, "0").unwrap();
    paths.sort();
    assert_eq!(paths, ["/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidiactl"]);
}

#[test]
fn a_pending_gpu_and_all_are_refused_for_now() {
    let devices = [ready(0, 0), device(1, Entry::Pending)];
    for ask in ["1", "all"] {
        let error = inject(&format!("pending-{ask}"), &devices, ask).unwrap_err();
        assert!(error.starts_with("failed to inject devices"), "{ask}: {error}");
    }
}

#[test]
fn all_has_every_gpu_that_has_not_failed() {
    let devices = [ready(0, 1), device(1, Entry::Failed), ready(2, 0)];
    let mut paths = inject("all", &devices, "all").unwrap();
    paths.sort();
    assert_eq!(paths, ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]);
}

#[test]
fn a_failed_gpu_is_unresolvable_at_once_even_when_all_have_failed() {
    for devices in [vec![ready(0, 0), device(1, Entry::Failed)], vec![device(0, Entry::Failed), device(1, Entry::Failed)]] {
        let error = inject(&format!("failed-{}", devices[0].entry == Entry::Failed), &devices, "1").unwrap_err();
        assert!(error.contains("unresolvable CDI devices nvidia.com/gpu=1"), "{error}");
    }
}
