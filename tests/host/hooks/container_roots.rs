//! Real containers, made by the test agent on this machine: what of them does not need a guest. The
//! spec is a hand-written one, so that this is about the agent, the hooks and the loaders; for what
//! the init publishes see the VM tests.

use crate::hooks::container::program;
use crate::{TempDir, project};
use kata_gpu_test_guest::agent::cdi;
use kata_gpu_test_guest::agent::container_root::Change;
use kata_gpu_test_guest::agent::container_run::{self, Ended};
use oci_spec::runtime::Spec;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::Duration;

const LIBS: &str = "/usr/lib/x86_64-linux-gnu";
const VERSION: &str = "550.163.01";
const COMPAT: &str = "560.35.03";

/// A container on one of the roots of tests/containers/build, not running yet.
struct Bundle {
    dir: TempDir,
    program: PathBuf,
    /// The driver's files.
    driver: PathBuf,
    /// Directory of the container's libraries.
    libs: &'static str,
    /// One more mount.
    mount: Option<&'static str>,
    /// Whether the SONAMEs are mounts, too.
    links: bool,
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
            assert!(
                std::env::var_os("KATA_GPU_BUILT").is_none(),
                "{} is not built",
                containers.display()
            );
            eprintln!(
                "skipped: {} is not built (tests/containers/build builds it)",
                containers.display()
            );
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
            mount: None,
            links: true,
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
            let at = |version: &str| format!("{}/{name}.so.{version}", self.libs);
            let targets = [
                Some(at(VERSION)),
                self.links.then(|| at("1")),
                self.mount.map(str::to_string),
            ];
            mounts.extend(targets.into_iter().flatten().map(
                |path| json!({ "hostPath": file, "containerPath": path, "options": options }),
            ));
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
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("nvidia.json"), self.cdi().to_string()).unwrap();
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

    fn run_spec(&self, spec: &Spec, change: Change) -> Result<Ended, String> {
        let agent = crate::built("kata-gpu-test-agent", "kata-agent");
        container_run::run(&agent, &self.dir.0, spec, change).map_err(|e| format!("{e:#}"))
    }

    fn run(&self) -> Ended {
        self.run_spec(&self.spec(&["1"]), Change::PivotRoot)
            .unwrap()
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

/// Place at which glibc's loader found libcuda; musl's has no cache.
const THROUGH_THE_CACHE: &str = "cache=/etc/ld.so.cache";
const NODES: &str = "/dev/nvidia-uvm 511:0 666,/dev/nvidia1 195:1 666,/dev/nvidiactl 195:255 666";

#[test]
fn a_program_finds_libcuda_and_sees_its_gpus_nodes() {
    let mounts_before = fs::read_to_string("/proc/self/mountinfo").unwrap();
    for root in ["debian", "alpine"] {
        for change in [Change::PivotRoot, Change::Move] {
            let Some(bundle) = Bundle::new(&format!("finds-{root}-{change:?}"), root) else {
                return;
            };
            let ended = bundle.run_spec(&bundle.spec(&["1"]), change).unwrap();
            assert_eq!(ended.status, "exit status: 0", "{ended:?}");
            assert_eq!(
                (said(&ended, "version"), said(&ended, "flags")),
                (VERSION, "ro,nosuid,nodev"),
                "{ended:?}"
            );
            assert!(
                said(&ended, "libcuda").starts_with(&format!("{LIBS}/libcuda.so.")),
                "{ended:?}"
            );
            assert_eq!(
                said(&ended, "searched"),
                if root == "debian" {
                    THROUGH_THE_CACHE
                } else {
                    ""
                },
                "{ended:?}"
            );
            assert_eq!(said(&ended, "nodes"), NODES);
            // The spec's value overrules the image's.
            assert_eq!(said(&ended, "env"), " NVIDIA_VISIBLE_DEVICES=void");
            assert!(
                ended.hooks.len() == 1 && ended.failed_hooks.is_empty(),
                "{ended:?}"
            );
        }
    }
    assert_eq!(
        fs::read_to_string("/proc/self/mountinfo").unwrap(),
        mounts_before,
        "a container's mounts are seen outside"
    );
}

#[test]
fn without_its_hook_a_container_has_no_libcuda_in_the_cache() {
    let bundle = |root: &str| {
        Bundle::new(&format!("hookless-{root}"), root).map(|b| Bundle { hook: false, ..b })
    };
    let (Some(debian), Some(alpine)) = (bundle("debian"), bundle("alpine")) else {
        return;
    };
    let ended = alpine.run();
    assert!(
        ended.status == "exit status: 127" && ended.output.contains("libcuda.so.1"),
        "{ended:?}"
    );
    // Debian's loader looks into this very directory at last, cache or not: only the mount at the
    // SONAME's path helps it there.
    let ended = debian.run();
    assert!(
        ended.status == "exit status: 0"
            && said(&ended, "searched").starts_with("path=/lib/x86_64-linux-gnu"),
        "{ended:?}"
    );
    let Some(linkless) = Bundle::new("linkless", "debian") else {
        return;
    };
    let ended = Bundle {
        links: false,
        hook: false,
        ..linkless
    }
    .run();
    assert!(
        ended.status == "exit status: 127" && ended.output.contains("libcuda.so.1"),
        "{ended:?}"
    );
}

#[test]
fn libraries_where_no_loader_of_the_image_looks_are_found_too() {
    for (root, hook) in [("debian", true), ("alpine", true), ("debian", false)] {
        let Some(mut bundle) = Bundle::new(&format!("elsewhere-{root}-{hook}"), root) else {
            return;
        };
        // As a guest of the RHEL family has them.
        (bundle.libs, bundle.hook) = ("/usr/lib64", hook);
        let ended = bundle.run();
        assert_eq!(
            ended.status,
            if hook {
                "exit status: 0"
            } else {
                "exit status: 127"
            },
            "{ended:?}"
        );
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
    fs::remove_file(bundle.rootfs().join("etc/ld.so.cache")).unwrap();
    fs::create_dir(bundle.rootfs().join("etc/ld.so.cache")).unwrap();
    let mut spec = bundle.spec(&["1"]);
    let ended = bundle.run_spec(&spec, Change::PivotRoot).unwrap();
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
            .run_spec(&spec, Change::PivotRoot)
            .unwrap_err()
            .contains("execute /usr/bin/none")
    );
}

#[test]
fn only_newer_compatibility_libraries_of_the_image_are_used() {
    let Some(bundle) = Bundle::new("compat", "cuda") else {
        return;
    };
    let ended = bundle.run();
    assert_eq!(
        said(&ended, "libcuda"),
        format!("/usr/local/cuda/compat/libcuda.so.{COMPAT}"),
        "{ended:?}"
    );
    assert_eq!(said(&ended, "version"), COMPAT);
    let Some(bundle) = Bundle::new("older-compat", "cuda") else {
        return;
    };
    let compat = bundle.rootfs().join("usr/local/cuda/compat");
    fs::rename(
        compat.join(format!("libcuda.so.{COMPAT}")),
        compat.join("libcuda.so.535.54.03"),
    )
    .unwrap();
    assert_eq!(said(&bundle.run(), "version"), VERSION);
}

#[test]
fn what_the_image_has_in_the_drivers_places_is_covered() {
    let Some(bundle) = Bundle::new("covered", "debian") else {
        return;
    };
    let libs = bundle.rootfs().join(&LIBS[1..]);
    // An older driver that somebody has installed into the image, and a link that leads nowhere.
    fs::write(libs.join("libcuda.so.535.54.03"), "no library").unwrap();
    symlink("libcuda.so.535.54.03", libs.join("libcuda.so.1")).unwrap();
    fs::write(
        libs.join(format!("libnvidia-ml.so.{VERSION}")),
        "the image's own",
    )
    .unwrap();
    symlink("libnvidia-ml.so.1.2.3", libs.join("libnvidia-ml.so.1")).unwrap();
    let ended = bundle.run();
    assert_eq!(
        (said(&ended, "version"), ended.status.as_str()),
        (VERSION, "exit status: 0"),
        "{ended:?}"
    );
}

#[test]
fn a_read_only_root_runs_too() {
    let Some(bundle) = Bundle::new("read-only", "debian") else {
        return;
    };
    let mut spec = bundle.spec(&["0", "2"]);
    spec.root_mut().as_mut().unwrap().set_readonly(Some(true));
    let ended = bundle.run_spec(&spec, Change::PivotRoot).unwrap();
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

#[test]
fn mounts_below_proc_and_out_of_the_root_are_refused() {
    for (path, says) in [
        ("/proc/driver/nvidia/params", "inside /proc"),
        ("/usr/../../x", "invalid"),
        ("/opt/file", ""),
    ] {
        let Some(mut bundle) = Bundle::new(&format!("refused-{}", says.len()), "debian") else {
            return;
        };
        bundle.mount = Some(path);
        let result = bundle.run_spec(&bundle.spec(&["0"]), Change::PivotRoot);
        match says {
            "" => assert!(
                bundle.rootfs().join(&path[1..]).exists() && result.is_ok(),
                "{result:?}"
            ),
            _ => assert!(result.unwrap_err().contains(says)),
        }
    }
}
