//! A failure means that a node labelled for GPUs has no guest to boot, that the DaemonSet's pod
//! loses or leaves a copy, or that a refusal leaves the label.

use crate::collect::{program, until};
use crate::install::{World, done, from_words};
use crate::{bytes, project, remove, text};
use kata_gpu_image::install::Report;
use kata_gpu_image::kata::merge::Runtime;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_yaml::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

fn node(world: &World) -> PathBuf {
    world.root().join("opt/kata/share/kata-gpu-init")
}

fn feature(world: &World) -> PathBuf {
    world.root().join("features.d/kata-gpu-init")
}

fn words(world: &World) -> Vec<String> {
    [
        "--node",
        node(world).to_str().unwrap(),
        "--node-feature",
        feature(world).to_str().unwrap(),
    ]
    .map(String::from)
    .to_vec()
}

fn copies(world: &World) -> Vec<String> {
    if !node(world).exists() {
        return Vec::new();
    }
    let mut names = crate::names(node(world));
    names.retain(|name| !name.starts_with('.'));
    names
}
fn initrd_of(world: &World) -> String {
    world.key(Runtime::Go, "qemu", "initrd")
}

fn strs(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

#[test]
fn the_guest_is_copied_and_the_former_copy_stays() {
    let world = World::new("node", "go-qemu-nvidia-gpu");
    let before = world.snapshot();
    let words = words(&world);
    let mut seen = Vec::new();
    for size in [1000, 2000, 3000] {
        world.make_initrd(&world.initrd, size);
        done(&world.install_initrd(&strs(&words)));
        let copy = initrd_of(&world);
        assert_eq!(bytes(&copy), bytes(&world.initrd));
        seen.push(copy.rsplit('/').next().unwrap().to_string());
        // Again: nothing is copied, and nothing goes.
        let listed = copies(&world);
        assert!(done(&world.install_initrd(&strs(&words))).contains("nothing to do"));
        assert_eq!(copies(&world), listed);
    }
    assert_eq!(text(feature(&world)), "kata-gpu-init=true\n");
    let mut newest = seen.split_off(1);
    newest.sort();
    assert_eq!(copies(&world), newest, "the first of three is gone");
    done(&world.remove(&strs(&words)));
    assert!(!node(&world).exists() && !feature(&world).exists());
    for (path, content) in before {
        assert!(
            path.is_dir() || path == world.initrd || bytes(&path) == content.1,
            "{}",
            path.display()
        );
    }
    assert!(!world.ours().exists());
}

#[test]
fn what_is_refused_leaves_no_copy_and_no_label() {
    let world = World::new("node-refused", "go-qemu-nvidia-gpu");
    let words = words(&world);
    world.edit("vm_cache_number = 0", "vm_cache_number = 1");
    let initrd = ["--initrd", world.initrd.to_str().unwrap()];
    let plain = world.plain_install(&[&strs(&words)[..], &initrd].concat());
    let with = |more: &[&str]| world.install_initrd(&[&strs(&words)[..], more].concat());
    let refused = |said: Report, why: &str| {
        assert!(said.code == 1 && said.err.contains(why), "{said:?}");
        assert!(
            copies(&world).is_empty() && !feature(&world).exists(),
            "{why}"
        );
    };
    refused(with(&[]), "vm_cache_number");
    refused(world.install(&strs(&words)), "needs --initrd or --image");
    refused(with(&["--dry-run"]), "omit --node");
    refused(with(&["--unset", "gpuinit.log"]), "--unset");
    refused(plain, "--kata-version");
    remove(&world.initrd);
    refused(with(&[]), "no such initrd");
    assert!(!node(&world).exists());
}

#[test]
fn words_of_a_manifest_that_are_gone_are_gone_from_the_node() {
    let world = World::new("node-words", "go-qemu-nvidia-gpu");
    let words = words(&world);
    let params = |world: &World| world.key(Runtime::Go, "qemu", "kernel_params");
    done(&world.install_initrd(&[strs(&words), vec!["--param", "gpuinit.log=debug"]].concat()));
    assert!(params(&world).contains("gpuinit.log=debug"));
    done(&world.install_initrd(&strs(&words)));
    assert!(!params(&world).contains("gpuinit.log"));
}

/// A pod's process.
struct Pod {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Pod {
    fn start(world: &World, more: &[&str]) -> Pod {
        let mut command = Command::new(program());
        command
            .args(["install", "--repeat", "--kata-config"])
            .arg(&world.config)
            .args(words(world))
            .args(more);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Pod { child, lines }
    }

    /// Installs this file.
    fn installs(world: &World, guest: &Path) -> Pod {
        Pod::start(
            world,
            &[
                "--kata-version",
                "4.1.0",
                "--initrd",
                guest.to_str().unwrap(),
            ],
        )
    }

    /// Waits for a line that starts with this; returns all lines until then.
    fn says(&mut self, start: &str) -> String {
        let mut all = String::new();
        loop {
            let from = all.len();
            assert!(
                self.lines.read_line(&mut all).unwrap() > 0,
                "no {start:?} in {all}"
            );
            if all[from..].starts_with(start) {
                return all;
            }
        }
    }

    fn end(mut self) {
        kill(
            Pid::from_raw(self.child.id().try_into().unwrap()),
            Signal::SIGTERM,
        )
        .unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

/// A test that fails leaves no process.
impl Drop for Pod {
    fn drop(&mut self) {
        // After `end` there is none.
        let _unused = self.child.kill();
    }
}

#[test]
fn a_pod_reinstalls_what_kata_removes_and_keeps_it_at_its_end() {
    let world = World::new("node-stay", "go-qemu-nvidia-gpu");
    let mut old = Pod::installs(&world, &world.initrd);
    old.says("wrote ");
    let first = initrd_of(&world);
    // Kata's upgrade writes its folder anew, and with it goes what lay there.
    fs::remove_dir_all(world.config_d()).unwrap();
    fs::remove_dir_all(node(&world)).unwrap();
    old.says("wrote ");
    assert!(initrd_of(&world) == first && Path::new(&first).exists());
    // So does somebody who removes the label alone; it is said as nothing to do.
    remove(feature(&world));
    old.says("nothing to do");
    old.end();
    assert!(initrd_of(&world) == first && feature(&world).exists());
    // The DaemonSet's upgrade, with another guest; then its uninstalling one.
    let other = world.root().join("other.cpio");
    world.make_initrd(&other, 5000);
    let mut new = Pod::installs(&world, &other);
    new.says("wrote ");
    assert_ne!(initrd_of(&world), first);
    new.end();
    let mut last = Pod::start(&world, &["--remove"]);
    last.says("removed ");
    last.says("New pods start as before");
    last.end();
    assert_eq!(initrd_of(&world), "");
    assert!(!node(&world).exists() && !feature(&world).exists());
}

#[test]
fn a_pod_compares_deadlines_with_the_nodes_boots_at_each_installation() {
    let world = World::new("node-boots", "go-qemu-nvidia-gpu");
    let key = "\ncreate_container_timeout = ";
    world.edit(&format!("{key}1200"), &format!("{key}41"));
    let boots = world.root().join("boots");
    let (guest, dir) = (world.initrd.to_str().unwrap(), boots.to_str().unwrap());
    let mut pod = Pod::start(
        &world,
        &["--kata-version", "4.1.0", "--initrd", guest, "--dir", dir],
    );
    let note = "note: runtime.create_container_timeout = 41 s gives up on a boot that takes longer";
    // No collector has run: there is no such directory.
    let page = pod.says("wrote ");
    assert!(page.contains(&format!("{note}; raise it\n")), "{page}");
    // The written files are a change.
    pod.says("nothing to do");
    crate::make_dir(&boots);
    let boot = project().join("tests/fixtures/boots/recorded-8-gpus-serial.ndjson");
    let id = "8b1f6e0c-0000-4000-8000-000000000001.ndjson";
    fs::copy(boot, boots.join(id)).unwrap();
    remove(feature(&world));
    let page = pod.says("nothing to do");
    let longest = format!("{note}; longest until its GPUs were settled here: ");
    assert!(page.contains(&longest), "{page}");
    pod.end();
}

#[test]
fn a_refused_pod_removes_the_label_and_installs_when_it_can() {
    let world = World::new("node-refused-later", "go-qemu-nvidia-gpu");
    let mut pod = Pod::installs(&world, &world.initrd);
    pod.says("wrote ");
    world.edit("vm_cache_number = 0", "vm_cache_number = 1");
    until("the label to go", || !feature(&world).exists());
    world.edit("vm_cache_number = 1", "vm_cache_number = 0");
    pod.says("nothing to do");
    until("the label", || feature(&world).exists());
    pod.end();
}

/// The manifests, with the configuration's literals in the arguments, as the kubelet puts them.
fn manifests(guest: &str) -> (Value, Value, Vec<String>) {
    let read = |name: &str| -> Value {
        let path = project().join("src/image/deploy").join(name);
        serde_yaml::from_str(&text(path)).unwrap()
    };
    let (kustomization, mut set) = (read("kustomization.yaml"), read("daemonset.yaml"));
    set.apply_merge().unwrap();
    let literals = &kustomization["configMapGenerator"][0]["literals"];
    let mut values: Vec<(&str, &str)> = literals
        .as_sequence()
        .unwrap()
        .iter()
        .map(|literal| literal.as_str().unwrap().split_once('=').unwrap())
        .collect();
    if !guest.is_empty() {
        values[1].1 = guest;
    }
    let args = set["spec"]["template"]["spec"]["containers"][0]["args"]
        .as_sequence()
        .unwrap();
    let words = args
        .iter()
        .map(|word| {
            let word = word.as_str().unwrap().to_string();
            values.iter().fold(word, |word, (name, value)| {
                word.replace(&format!("$({name})"), value)
            })
        })
        .collect();
    (kustomization, set, words)
}

#[test]
fn the_daemon_set_runs_what_install_takes_where_it_can_see_it() {
    let (kustomization, set, words) = manifests("");
    let pod = &set["spec"]["template"]["spec"];
    let (first, second) = (&pod["initContainers"][0], &pod["containers"][0]);
    assert_eq!(first["command"].as_sequence().unwrap().len(), 2);
    assert_eq!(second["command"][2], "--repeat");
    for key in [
        "image",
        "args",
        "envFrom",
        "securityContext",
        "volumeMounts",
    ] {
        assert_eq!(first[key], second[key], "{key}");
    }
    assert_eq!(kustomization["images"][0]["name"], first["image"]);
    assert_eq!(
        kustomization["configMapGenerator"][0]["name"],
        first["envFrom"][0]["configMapRef"]["name"]
    );
    for guest in ["", "--image=/gpu.image", "--remove"] {
        let words = [manifests(guest).2, vec!["--repeat".into()]].concat();
        from_words::<kata_gpu_boot::install::Args>(&strs(&words)).unwrap();
    }
    assert!(from_words::<kata_gpu_boot::install::Args>(&["--stay"]).is_err());
    // Every path of the command but those of the pods' image is in a mount, which is a folder of
    // the node at the same place.
    let texts = |list: &Value, of: &dyn Fn(&Value) -> Value| -> Vec<String> {
        let list = list.as_sequence().unwrap();
        list.iter()
            .map(|one| of(one).as_str().unwrap().to_string())
            .collect()
    };
    let mounts = texts(&second["volumeMounts"], &|one| one["mountPath"].clone());
    let volumes = texts(&pod["volumes"], &|one| one["hostPath"]["path"].clone());
    assert_eq!(mounts, volumes);
    for option in ["--kata-config=", "--node=", "--node-feature="] {
        let path = words
            .iter()
            .find_map(|word| word.strip_prefix(option))
            .unwrap();
        assert!(
            mounts
                .iter()
                .any(|mount| path.starts_with(&format!("{mount}/"))),
            "{option}{path}"
        );
    }
    let security = &second["securityContext"];
    for (field, wanted) in [
        (&security["readOnlyRootFilesystem"], true),
        (&security["allowPrivilegeEscalation"], false),
        (&pod["automountServiceAccountToken"], false),
    ] {
        assert_eq!(*field, wanted);
    }
    assert_eq!(security["capabilities"]["drop"][0], "ALL");
}
