//! A failure means that `install` changes another key than its own, that a runtime does not see its
//! keys, that an upgrade loses parameters, or that `--remove` leaves something. Reasons to refuse
//! are in refusals.rs, hostile files in attacks.rs.

mod attacks;
mod check;
mod image;
mod node;
mod refusals;

use crate::initrd::verify::{KERNEL, guest};
use crate::initrd::{archive, file};
use crate::{TempDir, golden, make_dir, names, project, write};
use kata_gpu_image::install::Report;
use kata_gpu_image::kata::drop_in;
use kata_gpu_image::kata::kata_config::KataConfig;
use kata_gpu_image::kata::merge::{Effective, Runtime};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Arguments as the command line parses them.
fn from_words<A: clap::Args>(words: &[&str]) -> Result<A, String> {
    let command = A::augment_args(clap::Command::new("kata-gpu-boot").no_binary_name(true));
    let matches = command
        .try_get_matches_from(words)
        .map_err(|e| e.to_string())?;
    A::from_arg_matches(&matches).map_err(|e| e.to_string())
}

/// Below the directory of a test; where kata-deploy puts what it installs.
const RUNTIMES: &str = "opt/kata/share/defaults/kata-containers/runtimes";

/// A Kata configuration on a disk of its own.
pub struct World {
    pub dir: TempDir,
    pub config: PathBuf,
    pub initrd: PathBuf,
}

impl World {
    /// With one of the fixtures.
    pub fn new(test: &str, fixture: &str) -> World {
        let dir = TempDir::new(&format!("install-{test}"));
        // Its name is part of what is compared.
        let root = fs::canonicalize(&dir.0).unwrap();
        let (_, base) = fixture.split_once('-').unwrap();
        let config = root
            .join(RUNTIMES)
            .join(base)
            .join(format!("configuration-{base}.toml"));
        make_dir(config.parent().unwrap());
        let text = crate::text(
            project()
                .join("tests/fixtures/kata")
                .join(fixture)
                .with_extension("toml"),
        );
        // The kernel lies in the test's directory, and not where a Kata of this machine may have
        // one.
        let kernel = format!("\nkernel = \"{}/", root.display());
        assert!(text.contains("\nkernel = \"/opt/kata/share/kata-containers/"));
        write(
            &config,
            text.replace("\nkernel = \"/opt/kata/share/kata-containers/", &kernel),
        );
        for name in ["vmlinux.container", "vmlinux-nvidia.container"] {
            write(
                root.join(name),
                format!("Linux version {KERNEL} (builder) #1"),
            );
        }
        let world = World {
            dir,
            config,
            initrd: root.join("gpu.cpio"),
        };
        world.make_initrd(&world.initrd, 1000);
        world
    }

    pub fn root(&self) -> PathBuf {
        fs::canonicalize(&self.dir.0).unwrap()
    }

    /// A guest that boots, with a file of this size in it.
    pub fn make_initrd(&self, path: &Path, size: usize) {
        let guest = guest()
            .into_iter()
            .chain([file("etc/size", vec![b'x'; size])])
            .collect::<Vec<_>>();
        write(path, archive(&guest));
    }

    pub fn config_d(&self) -> PathBuf {
        self.config.parent().unwrap().join("config.d")
    }

    pub fn ours(&self) -> PathBuf {
        self.config_d().join(drop_in::NAME)
    }

    pub fn drop_in(&self, name: &str, text: &str) -> PathBuf {
        make_dir(self.config_d());
        let path = self.config_d().join(name);
        write(&path, text);
        path
    }

    /// Changes the configuration; the text must be in it.
    pub fn edit(&self, from: &str, to: &str) {
        let text = crate::text(&self.config);
        assert!(text.contains(from), "{from}");
        write(&self.config, text.replacen(from, to, 1));
    }

    /// `install` with a version, so that no shim is looked for.
    pub fn install(&self, words: &[&str]) -> Report {
        let version = if words.contains(&"--kata-version") {
            &[][..]
        } else {
            &["--kata-version", "4.1.0"]
        };
        self.plain_install(&[version, words].concat())
    }

    /// Nothing but these words and the configuration.
    pub fn plain_install(&self, words: &[&str]) -> Report {
        let config = ["--kata-config", self.config.to_str().unwrap()];
        kata_gpu_boot::install::say(&from_words(&[config.as_slice(), words].concat()).unwrap())
    }

    pub fn install_initrd(&self, words: &[&str]) -> Report {
        self.install(&[&["--initrd", self.initrd.to_str().unwrap()], words].concat())
    }

    pub fn remove(&self, words: &[&str]) -> Report {
        self.plain_install(&[&["--remove"], words].concat())
    }

    /// Configuration that the runtime sees.
    pub fn effective(&self, runtime: Runtime) -> Effective {
        let config = KataConfig::read(&self.config).unwrap();
        let mut all: Vec<_> = config.others.clone();
        if let Some(text) = config.ours.text() {
            let table = toml_of(text);
            all.push(kata_gpu_image::kata::kata_config::Source {
                path: config.drop_in_path(),
                bytes: text.to_vec(),
                table,
            });
            all.sort_by(|a, b| a.path.cmp(&b.path));
        }
        Effective::of(runtime, &config.base, &all)
    }

    /// A key of the hypervisor's section, as the runtime sees it.
    pub fn key(&self, runtime: Runtime, section: &str, key: &str) -> String {
        let effective = self.effective(runtime);
        let value = effective.get(&["hypervisor", section, key]);
        value
            .and_then(|value| value.as_str())
            .unwrap_or_default()
            .to_string()
    }

    /// Every path below the directory with its kind, mode and content.
    pub fn snapshot(&self) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
        let mut found = BTreeMap::new();
        let mut todo = vec![self.root()];
        while let Some(path) = todo.pop() {
            let metadata = fs::symlink_metadata(&path).unwrap();
            let content = if metadata.is_dir() {
                todo.extend(names(&path).iter().map(|name| path.join(name)));
                Vec::new()
            } else if metadata.is_symlink() {
                fs::read_link(&path)
                    .unwrap()
                    .into_os_string()
                    .into_encoded_bytes()
            } else if metadata.is_file() {
                crate::bytes(&path)
            } else {
                Vec::new()
            };
            found.insert(path, (metadata.mode(), content));
        }
        found
    }

    /// Text with this test's directory as /test.
    pub fn shown(&self, text: &str) -> String {
        text.replace(self.root().to_str().unwrap(), "/test")
    }
}

pub fn toml_of(text: &[u8]) -> toml::Table {
    std::str::from_utf8(text).unwrap().parse().unwrap()
}

#[track_caller]
pub fn done(said: &Report) -> &str {
    assert_eq!((said.code, said.err.as_str()), (0, ""), "{}", said.out);
    &said.out
}

/// kata-deploy's own drop-in.
const KERNEL_PARAMS: &str = "[hypervisor.qemu]\nkernel_params = \"cgroup_no_v1=all pci=realloc \
                             pci=nocrs pci=assign-busses agent.https_proxy=\\\"http://p:1 \
                             x\\\"\"\n";

/// Fixture, its runtime and section, words given, other drop-ins.
type Case = (
    &'static str,
    Runtime,
    &'static str,
    &'static [&'static str],
    &'static [(&'static str, &'static str)],
);

const CASES: &[Case] = &[
    (
        "go-qemu-nvidia-gpu",
        Runtime::Go,
        "qemu",
        &["--param", "gpuinit.log=debug"],
        &[("30-kernel-params.toml", KERNEL_PARAMS)],
    ),
    (
        "rust-qemu-nvidia-gpu",
        Runtime::Rust,
        "qemu",
        &[
            "--param",
            "gpuinit.bind=concurrent",
            "--param",
            "agent.cdi_timeout=120",
        ],
        &[],
    ),
    ("go-clh", Runtime::Go, "clh", &[], &[]),
    (
        "rust-clh",
        Runtime::Rust,
        "cloud-hypervisor",
        &["--param", "gpuinit.gpus=8"],
        &[("50-mine.toml", "[runtime]\nenable_debug = true\n")],
    ),
];

fn case(test: &str, case: &Case) -> World {
    let world = World::new(&format!("{test}-{}", case.0), case.0);
    for (name, text) in case.4 {
        world.drop_in(name, text);
    }
    world
}

#[test]
fn the_drop_ins_and_output_for_each_runtime_are_golden() {
    for one in CASES {
        let world = case("golden", one);
        let dry = world.install_initrd(&[one.3, &["--dry-run"]].concat());
        assert!(!world.ours().exists(), "a dry run writes nothing");
        let said = world.install_initrd(one.3);
        let written = crate::text(world.ours());
        let text = format!(
            "{}\n--- dry run\n{}\n--- the file\n{written}",
            done(&said),
            done(&dry)
        );
        golden(
            &format!("install/{}.txt", one.0),
            &world.shown(&mask_checksum(&text)),
        );
    }
}

/// The checksum covers the test's directory, which differs from run to run.
fn mask_checksum(text: &str) -> String {
    let mark = "\"checksum\":\"";
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(mark) {
        let (before, after) = rest.split_at(at + mark.len());
        out.push_str(before);
        out.push_str("........");
        rest = &after[8..];
    }
    out + rest
}

#[test]
fn our_keys_become_effective_and_nothing_else_changes() {
    for one in CASES {
        let (fixture, runtime, section, words, _) = *one;
        let world = case("effective", one);
        let text = |key: &str| world.key(runtime, section, key);
        let (before, old) = (world.effective(runtime), text("kernel_params"));
        done(&world.install_initrd(words));
        let after = world.effective(runtime);
        assert_eq!(text("image"), "", "{fixture}");
        assert_eq!(text("initrd"), world.initrd.to_str().unwrap(), "{fixture}");
        assert_eq!(text("kernel_verity_params"), "", "{fixture}");
        // Every word that was there is there, unless we gave one of its name; and ours are there.
        let ours: Vec<&str> = words
            .iter()
            .copied()
            .filter(|word| *word != "--param")
            .collect();
        let name = |word: &str| word.split('=').next().unwrap_or_default().to_string();
        let params = text("kernel_params");
        for word in old
            .split(' ')
            .filter(|word| !ours.iter().any(|own| name(own) == name(word)))
        {
            assert!(
                params.split(' ').any(|w| w == word),
                "{fixture}: {word} is lost in {params}"
            );
        }
        for word in &ours {
            assert_eq!(
                params
                    .split(' ')
                    .filter(|w| name(w) == name(word))
                    .collect::<Vec<_>>(),
                [*word],
                "{fixture}: {params}"
            );
        }
        // Without our keys, both are the same.
        let without = |effective: &Effective| {
            let mut table = effective.table.clone();
            let section = table["hypervisor"].as_table_mut().unwrap()[section]
                .as_table_mut()
                .unwrap();
            for key in [
                "image",
                "initrd",
                "kernel_params",
                "kernel_verity_params",
                "guest_extension_images",
            ] {
                section.remove(key);
            }
            table
        };
        assert_eq!(without(&after), without(&before), "{fixture}");
        assert_ne!(
            after.table, before.table,
            "{fixture}: the negative control of the line above"
        );
    }
}

#[test]
fn an_upgrade_is_one_command_and_keeps_the_parameters() {
    let world = World::new("upgrade", "go-qemu-nvidia-gpu");
    done(&world.install_initrd(&["--param", "gpuinit.log=debug", "--param", "gpuinit.gpus=8"]));
    let newer = world.root().join("newer.cpio");
    world.make_initrd(&newer, 2000);
    let said = world.install(&["--initrd", newer.to_str().unwrap()]);
    assert_eq!(
        world
            .shown(done(&said))
            .lines()
            .filter(|line| line.starts_with("  hyper"))
            .collect::<Vec<_>>(),
        ["  hypervisor.qemu.initrd: \"/test/gpu.cpio\" -> \"/test/newer.cpio\""]
    );
    let end_with = |words: &str| {
        let params = world.key(Runtime::Go, "qemu", "kernel_params");
        assert!(params.ends_with(words), "{params}");
    };
    end_with("pci=assign-busses gpuinit.log=debug gpuinit.gpus=8");
    done(&world.install(&["--unset", "gpuinit.gpus", "--param", "gpuinit.log=off"]));
    end_with("pci=assign-busses gpuinit.log=off");
    // Words that an upgrade of Kata brings.
    world.edit("pci=assign-busses", "pci=assign-busses pci=hpmmiosize=1G");
    done(&world.install(&[]));
    end_with("pci=assign-busses pci=hpmmiosize=1G gpuinit.log=off");
    // Without any word of ours the key is left to others again.
    done(&world.install(&["--unset", "gpuinit.log"]));
    assert!(!crate::text(world.ours()).contains("kernel_params ="));
}

#[test]
fn the_drop_in_is_read_after_kata_deploys_and_by_everybody() {
    let world = World::new("order", "rust-qemu-nvidia-gpu");
    for name in [
        "10-installation-prefix.toml",
        "20-debug.toml",
        "30-kernel-params.toml",
        "50-user-overrides.toml",
    ] {
        world.drop_in(
            name,
            "[hypervisor.qemu]\nimage = \"/other\"\ninitrd = \"\"\n",
        );
    }
    done(&world.install_initrd(&[]));
    assert_eq!(world.key(Runtime::Rust, "qemu", "image"), "");
    assert_eq!(fs::metadata(world.ours()).unwrap().mode() & 0o7777, 0o644);
    let left = names(world.config.parent().unwrap());
    assert_eq!(
        left.len(),
        2,
        "something is left next to the configuration: {left:?}"
    );
}

#[test]
fn json_says_what_the_page_says() {
    let world = World::new("json", "rust-qemu-nvidia-gpu");
    let parsed = |said: &Report| -> Json { serde_json::from_str(&said.out).unwrap() };
    let json = parsed(&world.install_initrd(&["--json"]));
    assert_eq!(json["action"], "installed");
    assert_eq!(json["runtime"], "rust");
    assert_eq!(json["kataVersion"], "4.1.0");
    assert_eq!(json["file"], world.ours().to_str().unwrap());
    assert_eq!(json["text"], crate::text(world.ours()));
    let changes = json["changes"].as_array().unwrap();
    let key = |change: &Json| {
        change["key"]
            .as_str()
            .unwrap()
            .replace("hypervisor.qemu.", "")
    };
    assert_eq!(
        changes.iter().map(key).collect::<Vec<_>>(),
        [
            "image",
            "initrd",
            "kernel_verity_params",
            "guest_extension_images"
        ]
    );
    assert_eq!(parsed(&world.install(&["--json"]))["action"], "unchanged");
    let json = parsed(&world.remove(&["--json", "--dry-run"]));
    assert!(json["action"] == "would-remove" && world.ours().exists());
    assert_eq!(json["changes"][0]["before"], "");
    assert_eq!(parsed(&world.remove(&["--json"]))["action"], "removed");
    let refused = world.install(&["--json"]);
    let json = parsed(&refused);
    assert!(json["action"] == "refused" && refused.code == 1);
    assert_eq!(json["refusals"][0]["place"], "--initrd");
}

#[test]
fn the_version_is_asked_of_the_configurations_shim_and_else_of_katas_file() {
    for (fixture, shim, words) in [
        ("go-qemu-nvidia-gpu", "opt/kata/bin", "(Golang): id: \"i\""),
        (
            "rust-qemu-nvidia-gpu",
            "opt/kata/runtime-rs/bin",
            "(Rust): id: i",
        ),
    ] {
        let world = World::new("shim", fixture);
        let says = |text: &str| {
            let initrd = world.initrd.to_str().unwrap();
            let said = world.plain_install(&["--initrd", initrd, "--dry-run"]);
            assert!(done(&said).contains(text), "{}", said.out);
            said.out
        };
        says("Kata of unknown version, it must be");
        let shim = world.root().join(shim).join("containerd-shim-kata-v2");
        make_program(
            &shim,
            &format!(
                "#!/bin/sh\n[ \"$*\" = --version ] && echo 'Kata Containers containerd shim \
                 {words}, version: 3.27.0, commit: c'\n"
            ),
        );
        // Whatever this machine's umask is.
        for dir in shim
            .ancestors()
            .skip(1)
            .take_while(|dir| dir.starts_with(world.root()))
        {
            crate::chmod(dir, 0o755);
        }
        says(&format!("Kata 3.27.0 (by {})", shim.display()));
        // A program, or a directory on the way to it, that others can write is not run.
        for (path, mode) in [(shim.as_path(), 0o777), (shim.parent().unwrap(), 0o775)] {
            crate::chmod(path, mode);
            assert!(!says("not trusted: others can change").contains("3.27.0"));
            crate::chmod(path, 0o755);
        }
        // A shim of another libc, as in the installer's pod.
        let file = world.root().join("opt/kata/VERSION");
        write(&file, "3.28.0-5-gabcdef0\n");
        crate::chmod(&file, 0o644);
        says(&format!("Kata 3.27.0 (by {})", shim.display()));
        make_program(&shim, "#!/nowhere/ld.so\n");
        says(&format!("Kata 3.28.0 (by {})", file.display()));
        crate::chmod(&file, 0o646);
        assert!(!says("not trusted: others can change").contains("3.28.0"));
        write(&file, "unreleased\n");
        crate::chmod(&file, 0o644);
        says("a Kata version looks like");
    }
}

/// Writes a program by a process of its own: a descriptor open for writing here could be inherited
/// by another test's child, and keep it from being run.
fn make_program(path: &Path, text: &str) {
    make_dir(path.parent().unwrap());
    let script = "printf %s \"$1\" > \"$2\" && chmod 755 \"$2\"";
    let status = Command::new("sh")
        .args(["-c", script, "sh", text])
        .arg(path)
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
}

/// A guest with some of its entries left out.
fn guest_without(world: &World, name: &str, gone: &[&str]) -> PathBuf {
    let before = guest().len();
    let rest: Vec<_> = guest()
        .into_iter()
        .filter(|made| !gone.iter().any(|name| made.name == name.as_bytes()))
        .collect();
    assert_eq!(rest.len() + gone.len(), before, "{gone:?}");
    let path = world.root().join(name);
    write(&path, archive(&rest));
    path
}

#[test]
fn an_initrd_that_cannot_boot_is_refused_with_reasons() {
    let world = World::new("cannot-boot", "go-qemu-nvidia-gpu");
    let before = world.snapshot();
    let broken = guest_without(&world, "broken.cpio", &["init", "usr/bin/kata-agent"]);
    let said = world.install(&["--initrd", broken.to_str().unwrap()]);
    let err = world.shown(&said.err);
    let lines: Vec<&str> = err.lines().collect();
    assert_eq!((said.code, lines.len()), (1, 3), "{err}");
    assert!(
        lines[0].starts_with("refused: /test/broken.cpio: no-agent /usr/bin/kata-agent: "),
        "{err}"
    );
    assert!(
        lines[1].starts_with("refused: /test/broken.cpio: no-init /init: ")
            && lines[1].contains("; put kata-gpu-init there"),
        "{err}"
    );
    assert_eq!(lines[2], "nothing was written, for 2 reasons");
    crate::remove(&broken);
    assert_eq!(world.snapshot(), before);
    // Somebody who knows better sees what they passed.
    let forced = world.install(&[
        "--initrd",
        guest_without(&world, "c", &["init"]).to_str().unwrap(),
        "--force",
    ]);
    assert_eq!(forced.code, 0);
    assert!(
        forced.err.starts_with("forced: ")
            && forced.out.contains("verified: 1 error, 0 warnings, 1 note"),
        "{forced:?}"
    );
}

#[test]
fn the_modules_are_held_against_the_kernel_of_the_configuration() {
    let world = World::new("kernel", "rust-qemu-nvidia-gpu");
    let kernel = world.root().join("vmlinux-nvidia.container");
    assert!(
        done(&world.install_initrd(&["--dry-run"]))
            .contains(&format!("{}, {KERNEL}", kernel.display()))
    );
    write(&kernel, "Linux version 6.1.0 (builder) #1");
    let said = world.install_initrd(&[]);
    assert!(
        said.code == 1
            && said
                .err
                .contains("other-kernel /lib/modules: 6.1.0; there is "),
        "{}",
        said.err
    );
    assert!(!world.ours().exists());
    // One that is not there, as where a cluster's configuration is prepared elsewhere, keeps
    // nobody.
    crate::remove(&kernel);
    assert!(
        done(&world.install_initrd(&[]))
            .contains("not there, so the modules were not held against it")
    );
}

#[test]
fn a_driver_from_elsewhere_is_asked_for_by_name() {
    let world = World::new("no-user-space", "go-qemu-nvidia-gpu");
    let version = crate::initrd::verify::VERSION;
    let gone = [
        format!("usr/lib64/libcuda.so.{version}"),
        format!("usr/lib64/libnvidia-ml.so.{version}"),
    ];
    let base = guest_without(&world, "base.cpio", &gone.each_ref().map(String::as_str));
    let words = ["--initrd", base.to_str().unwrap()];
    let said = world.install(&words);
    assert!(
        said.code == 1 && said.err.contains("no-libcuda"),
        "{}",
        said.err
    );
    done(&world.install(&[&words[..], &["--no-user-space"]].concat()));
}

#[test]
fn install_upgrade_roll_back_and_remove_are_one_command_each() {
    for one in CASES {
        let world = case("life", one);
        let newer = world.root().join("newer.cpio");
        world.make_initrd(&newer, 2000);
        let before = world.snapshot();
        let initrd = || world.key(one.1, one.2, "initrd");
        let was = initrd();
        let old = world.initrd.to_str().unwrap();
        done(&world.install_initrd(one.3));
        let (installed, inode) = (world.snapshot(), fs::metadata(world.ours()).unwrap().ino());
        assert_eq!(initrd(), old, "{}", one.0);
        // Twice is once, with the same words and without.
        for again in [world.install_initrd(one.3), world.install(&[])] {
            assert!(done(&again).contains("nothing to do"), "{}", again.out);
        }
        let kept = (world.snapshot(), fs::metadata(world.ours()).unwrap().ino());
        assert!(
            kept == (installed.clone(), inode),
            "{}: the file was written again",
            one.0
        );
        done(&world.install(&["--initrd", newer.to_str().unwrap()]));
        assert_eq!(initrd(), newer.to_str().unwrap(), "{}", one.0);
        assert_ne!(world.snapshot(), installed, "{}", one.0);
        // The former initrd again, and nothing is left of the upgrade.
        done(&world.install(&["--initrd", old]));
        assert_eq!(world.snapshot(), installed, "{}", one.0);
        // Every file, directory and mode is as it was.
        assert!(done(&world.remove(&[])).contains("removed /"));
        assert_eq!((world.snapshot(), initrd()), (before, was), "{}", one.0);
        assert!(done(&world.remove(&[])).starts_with("nothing to remove"));
    }
}

/// The program itself, as a umask is a process's.
#[test]
fn a_strict_umask_keeps_no_runtime_from_the_drop_in() {
    let world = World::new("umask", "go-qemu-nvidia-gpu");
    let script =
        "umask 077; exec \"$0\" install --kata-version 4.1.0 --kata-config \"$1\" --initrd \"$2\"";
    let program = crate::collect::program();
    let mut command = Command::new("sh");
    let command = command.args(["-ec", script]).arg(program);
    let output = command
        .args([&world.config, &world.initrd])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode(world.config_d()), mode(world.ours())), (0o755, 0o644));
}
