//! A failure means that `install` takes a configuration with which guests fail, refuses one that
//! works, refuses without place, value and cure, or writes something when it refuses.

use crate::install::{World, done};
use kata_gpu_image::install::Report;
use std::fs;

/// Change of a good configuration.
enum Make {
    Edit(&'static str, &'static str),
    DropIn(&'static str, &'static str),
    /// Another file beside the configuration.
    Beside(&'static str),
    Words(&'static [&'static str]),
    /// An initrd of so many MiB.
    Size(u64),
    Unreadable,
}

use Make::{Beside, DropIn, Edit, Size, Unreadable, Words};

/// Name, fixture, changes, whether `--force` passes, and parts of the printed line.
type Row = (
    &'static str,
    &'static str,
    &'static [Make],
    bool,
    &'static [&'static str],
);

const GO: &str = "go-qemu-nvidia-gpu";
const RUST: &str = "rust-qemu-nvidia-gpu";

const ROWS: &[Row] = &[
    (
        "Go before drop-ins",
        GO,
        &[Words(&["--kata-version", "2.4.3"])],
        false,
        &[
            "Kata version = 2.4.3",
            "reads drop-ins from 2.5.0 on",
            "upgrade",
        ],
    ),
    (
        "runtime-rs before drop-ins",
        RUST,
        &[Words(&["--kata-version", "2.5.2"])],
        false,
        &["Kata version = 2.5.2", "from 3.0.0 on"],
    ),
    (
        "a key that this Kata fails on",
        GO,
        &[Words(&["--kata-version", "3.26.0"])],
        false,
        &[
            "kernel_verity_params = \"root_hash",
            "Kata 3.26.0 fails on this key in a drop-in",
            "3.27.0",
        ],
    ),
    (
        "firecracker",
        GO,
        &[Edit("[hypervisor.qemu]", "[hypervisor.firecracker]")],
        true,
        &["[hypervisor.firecracker]", "no GPU has been seen"],
    ),
    (
        "a guest elsewhere",
        GO,
        &[Edit("[hypervisor.qemu]", "[hypervisor.remote]")],
        false,
        &["[hypervisor.remote]", "start elsewhere"],
    ),
    (
        "an unknown hypervisor",
        GO,
        &[Edit("[hypervisor.qemu]", "[hypervisor.acrn]")],
        false,
        &["[hypervisor.acrn]", "not a hypervisor of the Go runtime"],
    ),
    (
        "runtime-rs' name for Go",
        "go-clh",
        &[Edit("[hypervisor.clh]", "[hypervisor.cloud-hypervisor]")],
        false,
        &["not a hypervisor of the Go runtime"],
    ),
    (
        "no hypervisor",
        GO,
        &[Edit("[hypervisor.qemu]", "[qemu]")],
        false,
        &["has no [hypervisor.NAME] section"],
    ),
    (
        "two hypervisors, Go",
        GO,
        &[DropIn("50-x.toml", "[hypervisor.clh]\npath = \"/x\"\n")],
        false,
        &[
            "[hypervisor.clh], [hypervisor.qemu]",
            "starts one of them at random",
        ],
    ),
    (
        "a hypervisor without section",
        RUST,
        &[Edit(
            "hypervisor_name = \"qemu\"",
            "hypervisor_name = \"clh\"",
        )],
        false,
        &["runtime.hypervisor_name = \"clh\"", "no section"],
    ),
    (
        "no name of the hypervisor",
        RUST,
        &[Edit("hypervisor_name = \"qemu\"\n", "")],
        false,
        &[
            "runtime.name = \"virt_container\"",
            "needs runtime.hypervisor_name",
        ],
    ),
    (
        "a directory that several share",
        GO,
        &[Beside("configuration-qemu.toml")],
        true,
        &[
            "config.d: is read with configuration-qemu.toml as well",
            "directory of its own",
        ],
    ),
    (
        "a key in capitals",
        GO,
        &[DropIn("40-x.toml", "[hypervisor.qemu]\nImage = \"\"\n")],
        false,
        &["40-x.toml: key = hypervisor.qemu.Image", "lower case"],
    ),
    (
        "an unknown drop-in that is no TOML",
        GO,
        &[DropIn("40-x.toml~", "\n[hypervisor.qemu\n")],
        false,
        &["40-x.toml~: not TOML: line 2", "repair it"],
    ),
    (
        "a confidential guest",
        GO,
        &[
            Edit("rootless", "confidential_guest = true\nrootless"),
            Edit(
                "root_hash=0011,salt=aabb,data_blocks=100,data_block_size=4096,hash_block_size=4096",
                "",
            ),
        ],
        true,
        &[
            "confidential_guest = true",
            "launch measurement",
            "register the new measurement",
        ],
    ),
    (
        "an ID block",
        GO,
        &[Edit("rootless", "snp_id_block = \"AAAA\"\nrootless")],
        false,
        &["snp_id_block = \"AAAA\"", "launch digest", "make ID block"],
    ),
    (
        "templates, Go",
        GO,
        &[Edit("enable_template = false", "enable_template = true")],
        true,
        &["factory.enable_template = true", "before its pod is there"],
    ),
    (
        "templates, runtime-rs",
        RUST,
        &[Edit("enable_template = false", "enable_template = true")],
        true,
        &[
            "hypervisor.qemu.factory.enable_template = true",
            "set it to false",
        ],
    ),
    (
        "a cache of guests",
        GO,
        &[Edit("vm_cache_number = 0", "vm_cache_number = 2")],
        true,
        &["factory.vm_cache_number = 2", "set it to 0"],
    ),
    (
        "another init",
        GO,
        &[Edit("pci=nocrs", "rdinit=/sbin/init")],
        false,
        &["kernel_params = rdinit=/sbin/init", "instead of /init"],
    ),
    (
        "no way into the guest for a GPU",
        GO,
        &[Edit(
            "cold_plug_vfio = \"root-port\"",
            "cold_plug_vfio = \"no-port\"",
        )],
        true,
        &[
            "cold_plug_vfio = \"no-port\"",
            "no pod gets a GPU",
            "root-port",
        ],
    ),
    (
        "no root port for a GPU",
        RUST,
        &[Edit("pcie_root_port = 8", "pcie_root_port = 0")],
        true,
        &["pcie_root_port = 0", "no pod gets a GPU", "the node's GPUs"],
    ),
    (
        "a short timeout",
        RUST,
        &[Edit("agent.cdi_timeout=300", "agent.cdi_timeout=10")],
        true,
        &["agent.cdi_timeout=10", "give up on GPUs", "use 100"],
    ),
    (
        "no timeout",
        RUST,
        &[Edit("agent.cdi_timeout=300", "agent.cdi_timeout=0")],
        false,
        &["agent.cdi_timeout=0", "panics"],
    ),
    (
        "a timeout with a unit",
        RUST,
        &[Edit("agent.cdi_timeout=300", "agent.cdi_timeout=300s")],
        false,
        &["agent.cdi_timeout=300s", "panics"],
    ),
    (
        "an open quote",
        GO,
        &[Edit("pci=nocrs", "a=\\\"b")],
        false,
        &[
            "hypervisor.qemu.kernel_params = ",
            "open double quote",
            "close it",
        ],
    ),
    (
        "parameters that are no string",
        GO,
        &[Edit(
            "kernel_params = \"cgroup",
            "kernel_params = 1\nx = \"",
        )],
        false,
        &["kernel_params = 1", "not a string"],
    ),
    (
        "an initrd as large as the guest",
        GO,
        &[
            Edit("default_memory = 8192", "default_memory = 64"),
            Size(64),
        ],
        false,
        &["default_memory = 64", "do not fit"],
    ),
    (
        "an initrd too large for its tmpfs",
        GO,
        &[
            Edit("default_memory = 8192", "default_memory = 64"),
            Size(40),
        ],
        true,
        &["default_memory = 64", "tmpfs", "80 or more"],
    ),
    (
        "an initrd that the hypervisor cannot read",
        GO,
        &[Edit("rootless = false", "rootless = true"), Unreadable],
        false,
        &["rootless = true", "chmod a+r"],
    ),
    (
        "a later drop-in that brings the image back",
        GO,
        &[DropIn(
            "70-x.toml",
            "[hypervisor.qemu]\nimage = \"/other\"\n",
        )],
        false,
        &[
            "70-x.toml: hypervisor.qemu.image = \"/other\"",
            "wins over it",
            "sorts before 60-kata-gpu-init.toml by bytes",
        ],
    ),
    (
        "a later drop-in that replaces the words",
        RUST,
        &[
            DropIn("zz", "hypervisor.qemu.kernel_params = \"quiet\"\n"),
            Words(&["--param", "gpuinit.log=debug"]),
        ],
        false,
        &[
            "zz: hypervisor.qemu.kernel_params = \"quiet\"",
            "wins over it",
        ],
    ),
    (
        "a word that the init does not take",
        GO,
        &[Words(&["--param", "gpuinit.bind=fast"])],
        false,
        &["--param: word = gpuinit.bind=fast", "takes auto, insmod"],
    ),
    (
        "a word that was never given",
        GO,
        &[Words(&["--unset", "gpuinit.log"])],
        false,
        &["--unset: name = gpuinit.log", "none is installed"],
    ),
    (
        "an initrd that is not there",
        GO,
        &[Words(&["--initrd", "/nonexistent/gpu.cpio"])],
        false,
        &["/nonexistent/gpu.cpio: there is no such initrd"],
    ),
    (
        "an initrd that is none",
        GO,
        &[Words(&["--initrd", "/proc/self/exe"])],
        false,
        &[
            "/proc/self/exe: is not an initrd for Kata: it is a program: not an initrd",
            "newc",
        ],
    ),
];

fn make(world: &World, makes: &[Make]) -> Vec<&'static str> {
    let mut words = Vec::new();
    for make in makes {
        match make {
            Edit(from, to) => world.edit(from, to),
            DropIn(name, text) => drop(world.drop_in(name, text)),
            Beside(name) => crate::write(world.config.with_file_name(name), "[hypervisor.qemu]\n"),
            Words(more) => words.extend(*more),
            Size(mib) => {
                // The rest is a hole.
                let file = fs::File::options().write(true).open(&world.initrd).unwrap();
                file.set_len(mib << 20).unwrap();
            }
            Unreadable => {
                crate::chmod(&world.initrd, 0o600);
            }
        }
    }
    words
}

fn install(world: &World, words: &[&str]) -> Report {
    if words.contains(&"--initrd") {
        world.install(words)
    } else {
        world.install_initrd(words)
    }
}

#[test]
fn every_refusal_names_place_value_and_cure_and_writes_nothing() {
    for (name, fixture, makes, forcible, says) in ROWS {
        let world = World::new("refusals", fixture);
        let words = make(&world, makes);
        let before = world.snapshot();
        let said = install(&world, &words);
        assert_eq!(
            (said.code, said.out.as_str()),
            (1, ""),
            "{name}: {}",
            said.err
        );
        let lines: Vec<&str> = said.err.lines().collect();
        let [line, "nothing was written, for 1 reason"] = lines.as_slice() else {
            panic!("{name}: not one reason:\n{}", said.err)
        };
        assert!(line.starts_with("refused: "), "{name}: {line}");
        for part in *says {
            assert!(line.contains(part), "{name}: no {part:?} in\n{line}");
        }
        assert_eq!(line.ends_with(" (or --force)"), *forcible, "{name}: {line}");
        assert_eq!(world.snapshot(), before, "{name}");
        let forced = install(&world, &[&words[..], &["--force"]].concat());
        assert_eq!(
            forced.code,
            u8::from(!forcible),
            "{name}: {}{}",
            forced.err,
            forced.out
        );
        if *forcible {
            assert_eq!(
                forced.err,
                format!("forced: {}\n", line.strip_prefix("refused: ").unwrap()),
                "{name}: it is still said"
            );
            assert!(world.ours().exists(), "{name}");
        } else {
            assert_eq!(world.snapshot(), before, "{name}, forced");
        }
    }
}

/// Changes that look like a reason for refusal and are none.
const TWINS: &[(&str, &str, &[Make])] = &[
    (
        "Go from 2.5 on",
        "go-clh",
        &[Words(&["--kata-version", "2.5.0"])],
    ),
    (
        "runtime-rs from 3.0 on",
        RUST,
        &[Words(&["--kata-version", "3.0.0"])],
    ),
    (
        "Kata that knows the key",
        GO,
        &[Words(&["--kata-version", "3.27.0-rc0"])],
    ),
    (
        "nvdimm images: not with an initrd",
        GO,
        &[Edit(
            "disable_image_nvdimm = true",
            "disable_image_nvdimm = false",
        )],
    ),
    (
        "two hypervisors, runtime-rs",
        RUST,
        &[DropIn("50-x.toml", "[hypervisor.clh]\npath = \"/x\"\n")],
    ),
    (
        "a file beside it that is no configuration",
        GO,
        &[Beside("configuration-qemu.toml.orig")],
    ),
    (
        "capitals where Go takes them",
        GO,
        &[Edit("[runtime]\nenable_debug", "[runtime]\nEnable_Debug")],
    ),
    (
        "capitals in runtime-rs",
        RUST,
        &[DropIn("40-x.toml", "[hypervisor.qemu]\nImage = \"\"\n")],
    ),
    (
        "an empty ID block",
        GO,
        &[Edit("rootless", "snp_id_block = \"\"\nrootless")],
    ),
    ("the same init", GO, &[Edit("pci=nocrs", "rdinit=/init")]),
    (
        "a word for another init",
        GO,
        &[Edit("pci=assign-busses", "-- rdinit=/x")],
    ),
    (
        "root ports that the Go runtime adds",
        GO,
        &[Edit("pcie_root_port = 8", "pcie_root_port = 0")],
    ),
    (
        "modes that are not written",
        RUST,
        &[Edit("cold_plug_vfio = \"root-port\"\n", "")],
    ),
    (
        "a timeout that is long enough",
        RUST,
        &[Edit("agent.cdi_timeout=300", "agent.cdi_timeout=40")],
    ),
    (
        "a short timeout that is replaced",
        RUST,
        &[
            Edit("agent.cdi_timeout=300", "agent.cdi_timeout=1"),
            Words(&["--param", "agent.cdi_timeout=100"]),
        ],
    ),
    (
        "half of the memory",
        GO,
        &[
            Edit("default_memory = 8192", "default_memory = 64"),
            Size(32),
        ],
    ),
    (
        "an initrd that everybody can read",
        GO,
        &[Edit("rootless = false", "rootless = true")],
    ),
    (
        "a later drop-in with other keys",
        GO,
        &[DropIn(
            "70-x.toml",
            "[hypervisor.qemu]\ndefault_memory = 4096\n",
        )],
    ),
    (
        "a later drop-in with the same value",
        GO,
        &[DropIn("70-x.toml", "[hypervisor.qemu]\nimage = \"\"\n")],
    ),
    (
        "later words where we have none",
        GO,
        &[DropIn(
            "70-x.toml",
            "[hypervisor.qemu]\nkernel_params = \"quiet\"\n",
        )],
    ),
    (
        "unknown tables",
        GO,
        &[DropIn("10-x.toml", "[a.b.c]\nd = [[1], {e = 2}]\n")],
    ),
];

#[test]
fn what_is_nearly_the_same_and_right_installs() {
    for (name, fixture, makes) in TWINS {
        let world = World::new("twins", fixture);
        let words = make(&world, makes);
        let said = install(&world, &words);
        assert_eq!(said.code, 0, "{name}: {}", said.err);
        assert!(done(&said).contains("wrote "), "{name}: {}", said.out);
    }
}

#[test]
fn all_reasons_are_listed_at_once() {
    let world = World::new("all", GO);
    world.edit("enable_template = false", "enable_template = true");
    world.edit("vm_cache_number = 0", "vm_cache_number = 2");
    world.edit("rootless", "confidential_guest = true\nrootless");
    let err = world.install_initrd(&[]).err;
    assert_eq!(err.matches("refused: ").count(), 4, "{err}");
    assert!(
        err.ends_with("nothing was written, for 4 reasons\n"),
        "{err}"
    );
}

#[test]
fn a_deadline_under_a_minute_is_noted() {
    let world = World::new("deadline", GO);
    world.edit("dial_timeout = 1200", "dial_timeout = 45");
    let said = world.install_initrd(&["--dry-run"]);
    let note = "note: agent.kata.dial_timeout = 45 s gives up on a boot that takes longer";
    assert!(done(&said).contains(note), "{}", said.out);
}

#[test]
fn words_for_the_incumbent_that_have_no_effect_are_noted() {
    let world = World::new("notes", GO);
    world.edit("pci=nocrs", "nvrc.fm.mode=1 gpuinit.bind=nonsense");
    let said = world.install_initrd(&[]);
    let notes: Vec<&str> = done(&said)
        .lines()
        .filter(|line| line.starts_with("note: "))
        .collect();
    let [_, fabric, bind] = notes.as_slice() else {
        panic!("{}", said.out)
    };
    assert!(
        fabric.contains("nvrc.fm.mode: ignored") && bind.contains("gpuinit.bind: takes auto"),
        "{notes:?}"
    );
}
