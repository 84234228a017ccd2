//! A failure means that a real container of the test agent does not find the driver's library where
//! only the hook's cache names it, or does not start because a hook fails or its root is read-only.

use crate::hooks::container::program;
use crate::{TempDir, make_dir, project};
use kata_gpu_test_guest::agent::cdi;
use kata_gpu_test_guest::agent::container_root::Change;
use kata_gpu_test_guest::agent::container_run::{self, Ended};
use oci_spec::runtime::Spec;
use serde_json::{Value, json};

use std::path::PathBuf;
use std::time::Duration;

const LIBS: &str = "/usr/lib/x86_64-linux-gnu";
const VERSION: &str = "550.163.01";
/// A container on one of the roots of tests/containers/build, not running yet.
struct Bundle {
    dir: TempDir,
    program: PathBuf,
    /// The driver's files.
    driver: PathBuf,
    /// Directory of the container's libraries.
    libs: &'static str,
    hook: bool,
}

impl Bundle {
    /// None, with its reason, where this machine cannot run one.
    fn new(test: &str, root: &str) -> Option<Self> {
        let containers = project().join("target/containers");
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: not root, which mounts need");
            return None;
        }
        if !containers.join("inputs").exists() {
            let why = "target/containers is not built (tests/containers/build builds it)";
            crate::skip("KATA_GPU_BUILT", why);
            return None;
        }
        let program = program()?;
        let dir = TempDir::new(&format!("root-{test}"));
        container_run::copy_tree(&containers.join(root), &dir.0.join("rootfs")).unwrap();
        let driver = containers.join("driver").canonicalize().unwrap();
        Some(Self {
            dir,
            program,
            driver: driver.join(&LIBS[1..]),
            libs: LIBS,
            hook: true,
        })
    }

    fn rootfs(&self) -> PathBuf {
        self.dir.0.join("rootfs")
    }

    /// A spec with three GPUs and the driver's files.
    fn cdi(&self) -> Value {
        let node = |path: &str, major: u32, minor: u32| {
            json!({ "path": path, "type": "c",
            "major": major, "minor": minor, "fileMode": 0o666 })
        };
        let gpu = |k: u32| {
            json!({ "name": k.to_string(),
            "containerEdits": { "deviceNodes": [node(&format!("/dev/nvidia{k}"), 195, k)] } })
        };
        let options = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
        let mut mounts = vec![];
        for name in ["libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"] {
            let file = self.driver.join(format!("{name}.so.{VERSION}"));
            mounts.extend([VERSION, "1"].map(|version| {
                let path = format!("{}/{name}.so.{version}", self.libs);
                json!({ "hostPath": file, "containerPath": path, "options": options })
            }));
        }
        let version = format!("--host-driver-version={VERSION}");
        let hook = json!({
            "hookName": "createContainer", "path": self.program, "env": ["NVIDIA_CTK_DEBUG=false"],
            "args": ["nvidia-cdi-hook", "prepare", "--folder", self.libs, version],
        });
        let hooks: Vec<Value> = self.hook.then_some(hook).into_iter().collect();
        json!({
            "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [gpu(0), gpu(1), gpu(2)],
            "containerEdits": {
                "env": ["NVIDIA_VISIBLE_DEVICES=void"], "deviceNodes": [node("/dev/nvidiactl",
                195, 255), node("/dev/nvidia-uvm", 511, 0)],
                "mounts": mounts, "hooks": hooks,
            },
        })
    }

    fn spec(&self, devices: &[&str]) -> Spec {
        let directory = self.dir.0.join("cdi");
        make_dir(&directory);
        crate::write(directory.join("nvidia.json"), self.cdi().to_string());
        let mut spec = container_run::spec(&self.rootfs()).unwrap();
        let devices: Vec<String> = devices
            .iter()
            .map(|d| format!("nvidia.com/gpu={d}"))
            .collect();
        let sleep = |_: Duration| panic!("a try failed");
        cdi::inject(
            kata_gpu_test_agent::specs,
            &mut spec,
            directory.to_str().unwrap(),
            &devices,
            1,
            true,
            &sleep,
            &mut |_, e| panic!("{e}"),
        )
        .unwrap();
        spec
    }

    fn run(&self, spec: &Spec) -> Result<Ended, String> {
        let agent = crate::built("kata-gpu-test-agent", "kata-agent");
        container_run::run(&agent, &self.dir.0, spec, Change::PivotRoot)
            .map_err(|e| format!("{e:#}"))
    }
}

/// The value of a key in the program's output.
fn said<'a>(ended: &'a Ended, key: &str) -> &'a str {
    ended
        .output
        .lines()
        .find_map(|l| l.split_once('=').filter(|(k, _)| *k == key))
        .map_or("", |(_, value)| value)
}

#[test]
fn libraries_where_no_loader_of_the_image_looks_are_found_too() {
    for (root, hook) in [("debian", true), ("alpine", true), ("debian", false)] {
        let Some(mut bundle) = Bundle::new(&format!("elsewhere-{root}-{hook}"), root) else {
            return;
        };
        // As a guest of the RHEL family has them.
        (bundle.libs, bundle.hook) = ("/usr/lib64", hook);
        let ended = bundle.run(&bundle.spec(&["1"])).unwrap();
        let status = if hook {
            "exit status: 0"
        } else {
            "exit status: 127"
        };
        assert_eq!(ended.status, status, "{ended:?}");
        assert!(
            !hook || said(&ended, "libcuda").starts_with("/usr/lib64/libcuda.so."),
            "{ended:?}"
        );
    }
}

#[test]
fn a_hook_that_fails_does_not_keep_the_container_from_starting() {
    let Some(bundle) = Bundle::new("failing", "debian") else {
        return;
    };
    crate::remove(bundle.rootfs().join("etc/ld.so.cache"));
    make_dir(bundle.rootfs().join("etc/ld.so.cache"));
    let mut spec = bundle.spec(&["1"]);
    let ended = bundle.run(&spec).unwrap();
    assert!(
        ended.failed_hooks.len() == 1 && ended.failed_hooks[0].contains("ld.so.cache"),
        "{ended:?}"
    );
    assert!(
        ended.status == "exit status: 0" && said(&ended, "searched").starts_with("path="),
        "{ended:?}"
    );
    // A program that is not there does.
    spec.process_mut()
        .as_mut()
        .unwrap()
        .set_args(Some(vec!["/usr/bin/none".into()]));
    let Some(bundle) = Bundle::new("no-program", "debian") else {
        return;
    };
    spec.set_root(bundle.spec(&["1"]).root().clone());
    assert!(
        bundle
            .run(&spec)
            .unwrap_err()
            .contains("execute /usr/bin/none")
    );
}

#[test]
fn a_read_only_root_runs_too() {
    let Some(bundle) = Bundle::new("read-only", "debian") else {
        return;
    };
    let mut spec = bundle.spec(&["0", "2"]);
    spec.root_mut().as_mut().unwrap().set_readonly(Some(true));
    let ended = bundle.run(&spec).unwrap();
    assert_eq!(
        (said(&ended, "version"), ended.status.as_str()),
        (VERSION, "exit status: 0"),
        "{ended:?}"
    );
    let gpus = said(&ended, "nodes")
        .split(',')
        .filter(|n| !n.contains("uvm") && !n.contains("ctl"))
        .collect::<Vec<_>>();
    assert_eq!(gpus, ["/dev/nvidia0 195:0 666", "/dev/nvidia2 195:2 666"]);
}
