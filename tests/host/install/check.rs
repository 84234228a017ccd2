//! A failure means that `install --check` calls a guest working that is not, names the wrong cause,
//! or leaves its sandbox behind. containerd's client is a script here; Kata itself is in
//! tests/vm/kata.rs.

use crate::collect::{Collector, program, until};
use crate::install::World;
use crate::{project, write};
use kata_gpu_wire::failure::Reason;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

const BOOT: &str = "5fc5e893-0a7f-4713-801b-744ac3d76b1b";
/// Asked to run, it writes a boot of the sandbox that it is asked for; what it was asked goes to a
/// file.
const CLIENT: &str = r#"#!/bin/sh
echo "$*" >> ROOT/asked
case "$*" in *" run "*)
    for word; do id=$last last=$word; done
    [ ! -e ROOT/sandbox ] || id=$(cat ROOT/sandbox)
    sed "s/SANDBOX/$id/" ROOT/boot > ROOT/boots/.new && mv ROOT/boots/.new ROOT/boots/BOOT.ndjson
    if [ -e ROOT/error ]; then cat ROOT/error >&2; exit 1; fi
    [ ! -e ROOT/stranger ] ||
        { setpriv --reuid 64321 --clear-groups tail -f /dev/null $id >/dev/null 2>&1 & echo $! > ROOT/stranger; }
    [ ! -e ROOT/pipe ] || sh -c 'read line < ROOT/pipe' shim -id $id
esac
"#;

struct Node {
    world: World,
    collector: Option<Collector>,
}

impl Node {
    fn new(test: &str, boot: &str) -> Self {
        let world = World::new(&format!("check-{test}"), "go-qemu-nvidia-gpu");
        let root = world.root();
        crate::make_dir(root.join("boots"));
        let client = CLIENT
            .replace("ROOT", root.to_str().unwrap())
            .replace("BOOT", BOOT);
        write(root.join("ctr"), client);
        crate::chmod(root.join("ctr"), 0o755);
        let text = crate::text(project().join(format!("tests/fixtures/boots/{boot}.ndjson")));
        let (header, rest) = text.split_once('\n').unwrap();
        let sandbox =
            r#"{"schema":1,"kind":"host","realtime_ns":1,"event":"sandbox","id":"SANDBOX"}"#;
        write(root.join("boot"), format!("{header}\n{sandbox}\n{rest}"));
        let collector = Collector::start(&root, &["--uds", root.join("vm").to_str().unwrap()]);
        Self {
            world,
            collector: Some(collector),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.world.root().join(name)
    }

    fn start(&self, words: &[&str]) -> Child {
        let mut command = Command::new(program());
        command
            .args(["install", "--check"])
            .arg(&self.world.config)
            .arg("--dir")
            .arg(self.path("boots"));
        if !words.contains(&"--ctr") {
            command
                .arg("--ctr")
                .arg(format!("{} --address x", self.path("ctr").display()));
        }
        command.args(words);
        command
            .env("TMPDIR", self.world.root())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Exit status, standard output and standard error.
    fn check(&self, words: &[&str]) -> (Option<i32>, String, String) {
        said(self.start(words))
    }

    /// Commands of the client, without the sandbox's name.
    fn asked(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("asked")).unwrap_or_default();
        let id = text
            .split(' ')
            .find(|word| word.starts_with("kata-gpu-check-"))
            .map(|word| word.trim().to_string());
        text.lines()
            .map(|line| id.as_ref().map_or(line.into(), |id| line.replace(id, "ID")))
            .collect()
    }

    /// The sandbox was removed, and nothing is left of it.
    fn removed(&self) {
        let asked = self.asked();
        let words = [
            "tasks kill --signal KILL ID",
            "tasks rm --force ID",
            "containers rm ID",
        ];
        let removal = words.map(|words| format!("--address x --namespace kata-gpu-boot {words}"));
        assert!(asked.ends_with(&removal), "{asked:#?}");
        let left = crate::names(self.world.root());
        assert!(
            !left.iter().any(|name| name.starts_with("kata-gpu-check")),
            "{left:?}"
        );
    }
}

fn said(child: Child) -> (Option<i32>, String, String) {
    let output = child.wait_with_output().unwrap();
    (
        output.status.code(),
        crate::stdout(&output),
        crate::stderr(&output),
    )
}

#[test]
fn a_sandbox_that_comes_up_works_and_is_removed() {
    let node = Node::new("works", "recorded-8-gpus-fast-host");
    let (code, out, err) = node.check(&["--device", "/dev/vfio/42", "--device", "/dev/vfio/43"]);
    assert_eq!(code, Some(0), "{out}{err}");
    let last = out.lines().last().unwrap();
    assert!(
        last.starts_with("works: containerd had started the sandbox after "),
        "{out}"
    );
    assert!(
        last.contains(", all 8 GPUs were usable 8.3 s after kernel start"),
        "{last}"
    );
    assert!(
        out.contains("8 GPUs usable after ") && out.contains("kernel start"),
        "no timeline: {out}"
    );
    let root = node.world.root();
    let config = node.world.config.display();
    let run = format!(
        "--address x --namespace kata-gpu-boot run --detach --null-io --runtime \
         io.containerd.kata.v2 --runtime-config-path {config} \
         --device /dev/vfio/42 --device /dev/vfio/43 --rootfs {}/ID ID /wait",
        root.display()
    );
    assert_eq!(node.asked()[0], run);
    node.removed();
    // The shim that was installed with the configuration is the one that is used.
    let shim = node.path("opt/kata/bin/containerd-shim-kata-v2");
    write(&shim, "");
    let (code, out, err) = node.check(&["--json"]);
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["works"], true, "{out}");
    assert_eq!(json["shim"], shim.to_str().unwrap());
    assert_eq!(json["boot"]["gpus"].as_array().unwrap().len(), 8);
}

#[test]
fn a_failed_gpu_is_the_reason_why_it_does_not_work() {
    let node = Node::new("failed", "made-8-gpus-one-failed");
    let (code, out, err) = node.check(&[]);
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(
        out.contains("\ndoes not work: containerd had started the sandbox after "),
        "{out}"
    );
    assert!(
        out.contains(
            "  the boot failed: GPU 5 (0001:00:05.0) failed in initialisation: the GPU's own \
             processor (GSP) did not start (firmware-boot)"
        ),
        "{out}"
    );
    node.removed();
    let (_, out, _) = node.check(&["--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&json["works"], json["reasons"].as_array().unwrap().len()),
        (&false.into(), 1),
        "{out}"
    );
    let cause = &json["causes"][0];
    assert_eq!(
        (&cause["reason"], &cause["cure"]),
        (&"firmware-boot".into(), &Reason::FirmwareBoot.cure().into()),
        "{out}"
    );
}

#[test]
fn an_error_of_containerds_has_its_cure_and_leaves_nothing() {
    let node = Node::new("error", "made-8-gpus-one-hangs");
    write(
        node.path("error"),
        "ctr: failed to create shim task: vfio 0000:01:00.0: Device or resource busy\x1b[2J\n",
    );
    let (code, out, err) = node.check(&[]);
    assert_eq!(code, Some(1), "{out}{err}");
    let reason = r"containerd did not start the sandbox: ctr: failed to create shim task: vfio 0000:01:00.0: Device or resource busy\x1b[2J";
    assert!(out.contains(reason), "{out}");
    let row = Reason::VfioGroup;
    let cause = format!("\n    vfio-group (certain): {}\n", row.what());
    let cure = format!("\n    cure (host): {}\n", row.cure());
    assert!(out.contains(&cause) && out.contains(&cure), "{out}");
    node.removed();
    let (code, out, _) = node.check(&["--ctr", "/nonexistent/ctr"]);
    assert_eq!(code, Some(1));
    assert!(
        out.contains("install containerd's client")
            && out.contains("no event of its boot has come"),
        "{out}"
    );
}

#[test]
fn the_boot_of_another_sandbox_is_not_taken_for_it() {
    let node = Node::new("other", "recorded-8-gpus-fast-host");
    write(node.path("sandbox"), "train-0");
    let (code, out, err) = node.check(&["--give-up", "10"]);
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(
        out.contains(
            "no event of its boot has come: the configuration has no guest of ours: \
                          kata-gpu-boot install"
        ),
        "{out}"
    );
    node.removed();
}

#[test]
fn interrupted_it_still_removes_the_sandbox() {
    let node = Node::new("interrupted", "made-8-gpus-one-hangs");
    // A process of the sandbox that the client waits for reads it, and nobody writes.
    nix::unistd::mkfifo(&node.path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let child = node.start(&[]);
    until("the boot", || {
        node.path(&format!("boots/{BOOT}.ndjson")).exists()
    });
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let (code, out, err) = said(child);
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(
        out.contains("containerd did not start the sandbox before it was interrupted"),
        "{out}"
    );
    node.removed();
}

#[test]
fn another_users_process_with_the_sandboxs_name_is_none_of_it() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("skipped: only root can start a process as somebody else");
    }
    let node = Node::new("stranger", "recorded-8-gpus-fast-host");
    write(node.path("stranger"), "");
    let (code, out, err) = node.check(&[]);
    let stranger = crate::text(node.path("stranger"));
    kill(
        Pid::from_raw(stranger.trim().parse().unwrap()),
        Signal::SIGKILL,
    )
    .expect("it was left alone");
    assert_eq!(code, Some(0), "{out}{err}");
}

/// A file of containerd's name for a runtime, in a directory where anybody may write.
#[test]
fn a_file_in_the_working_directory_is_no_runtime() {
    let node = Node::new("directory", "recorded-8-gpus-fast-host");
    let config = crate::text(&node.world.config);
    write(node.path("kata"), config);
    crate::make_dir(node.path("bin"));
    let dump = "#!/bin/sh\necho '[plugins.cri.containerd.runtimes.runc]'\n";
    write(node.path("bin/containerd"), dump);
    crate::chmod(node.path("bin/containerd"), 0o755);
    let path = format!(
        "{}:{}",
        node.path("bin").display(),
        std::env::var("PATH").unwrap()
    );
    let mut command = Command::new(program());
    command
        .args(["install", "--check", "kata", "--dir"])
        .arg(node.path("boots"))
        .arg("--ctr")
        .arg(node.path("ctr"));
    let refused = command
        .current_dir(node.world.root())
        .env("PATH", path)
        .output()
        .unwrap();
    let err = crate::stderr(&refused);
    assert!(
        err.contains(
            "containerd has no runtime kata, it has runc; a file is given with a /, like ./kata"
        ),
        "{err}"
    );
    assert_eq!((refused.status.code(), node.asked()), (Some(2), Vec::new()));
}

#[test]
fn without_a_collector_nothing_is_started() {
    let mut node = Node::new("alone", "recorded-8-gpus-fast-host");
    node.collector.take().unwrap().stop();
    let (code, _, err) = node.check(&[]);
    assert_eq!(code, Some(2), "{err}");
    assert!(
        err.contains("start the collector (kata-gpu-boot collect)")
            && err.contains("no collector listens"),
        "{err}"
    );
    assert_eq!(node.asked(), Vec::<String>::new());
    // Nor with arguments that belong to installing, or for a file that is not there.
    let (code, _, err) = node.check(&["--initrd", "x"]);
    assert!(
        code == Some(2) && err.contains("cannot be used with"),
        "{err}"
    );
    let none = "/nonexistent/c.toml: no such file: give a Kata configuration";
    for (words, why) in [
        (&["install", "--check", "/nonexistent/c.toml"][..], none),
        (&["install"], "--kata-config <FILE>"),
    ] {
        let err = crate::stderr(&Command::new(program()).args(words).output().unwrap());
        assert!(err.contains(why), "{err}");
    }
}
