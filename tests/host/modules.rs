//! A failure means that the init would load other modules, in another order or with other options
//! than `modprobe` for some configuration of modprobe.d. Judge: kmod's own `modprobe
//! --show-depends` on a folder; nothing is loaded.

use crate::{TempDir, make_dir, project, write};
use kata_gpu_init::kernel_modules::Modules;
use kata_gpu_test_support::property;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use std::cell::Cell;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const KERNEL: &str = "6.1.0-test";
/// Rounds, each with a configuration of its own; all of them take two seconds, and 20,000 have been
/// tried.
const ROUNDS: u32 = 500;

/// sbin, which a user's PATH may lack.
fn kmod(tool: &str) -> Command {
    let mut command = Command::new(tool);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    command
        .env(
            "PATH",
            std::env::join_paths(std::env::split_paths(&path).chain(sbin)).unwrap(),
        )
        .env("LC_ALL", "C");
    command
}

/// A tree with indexes by depmod. None, and a reason printed, where there is no depmod or no
/// modules; not allowed in `tests/run`, which makes both.
fn tree(test: &str) -> Option<TempDir> {
    let files = ["target/kernel/modules", "target/simulator"]
        .map(|folder| std::fs::read_dir(project().join(folder)));
    let files: Vec<PathBuf> = files
        .into_iter()
        .flatten()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .collect();
    let files: Vec<&PathBuf> = files
        .iter()
        .filter(|f| f.extension().is_some_and(|e| e == "ko"))
        .collect();
    let missing = if files.len() < 8 {
        Some("modules (initrd/setup gets them)")
    } else {
        None
    };
    let missing = missing.or_else(|| {
        kmod("depmod")
            .arg("--version")
            .output()
            .is_err()
            .then_some("depmod and modprobe (package kmod)")
    });
    if let Some(missing) = missing {
        crate::skip("KATA_GPU_BUILT", &format!("no {missing}"));
        return None;
    }
    let root = TempDir::new(test);
    let modules = root.0.join("lib/modules").join(KERNEL);
    make_dir(modules.join("extra"));
    for file in files {
        std::fs::copy(file, modules.join("extra").join(file.file_name().unwrap())).unwrap();
    }
    write(modules.join("modules.order"), "");
    write(modules.join("modules.builtin"), "kernel/lib/built-in.ko\n");
    write(
        modules.join("modules.builtin.modinfo"),
        b"built_in.file=lib/built-in\0",
    );
    let output = kmod("depmod")
        .arg("-b")
        .arg(&root.0)
        .arg(KERNEL)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    Some(root)
}

fn modprobe(root: &Path, arguments: &[&str]) -> Output {
    let config = root.join("etc/modprobe.d");
    kmod("modprobe")
        .arg("-d")
        .arg(root)
        .args(["-S", KERNEL, "-C"])
        .arg(config)
        .args(arguments)
        .output()
        .unwrap()
}

/// `insmod PATH OPTIONS` lines as path and options; a module that is printed twice is loaded where
/// it comes first.
fn shown(output: &Output) -> Vec<(PathBuf, String)> {
    let mut seen = HashSet::new();
    let text = crate::stdout(output);
    text.lines()
        .filter_map(|l| l.strip_prefix("insmod "))
        .map(|l| l.split_once(' ').unwrap_or((l, "")))
        .map(|(path, options)| {
            (
                PathBuf::from(path),
                options.split_whitespace().collect::<Vec<_>>().join(" "),
            )
        })
        .filter(|(path, _)| seen.insert(path.clone()))
        .collect()
}

fn ours(root: &Path, name: &str) -> Result<Vec<(PathBuf, String)>, String> {
    let all = Modules::new(root, root, KERNEL, b"")
        .show_depends(name)
        .map_err(|e| e.to_string())?;
    Ok(all
        .into_iter()
        .map(|(path, options)| {
            (
                path,
                options.split_whitespace().collect::<Vec<_>>().join(" "),
            )
        })
        .collect())
}

/// Number of names that are modules.
const MODULES: usize = 11;
/// Names as people write them: modules, what is built in, what is not there.
const NAMES: &[&str] = &[
    "virtio",
    "virtio_ring",
    "virtio-pci",
    "virtio_pci_modern_dev",
    "virtio-pci-legacy-dev",
    "vsock",
    "vmw_vsock_virtio_transport",
    "vmw-vsock-virtio-transport-common",
    "nvidia",
    "nvidia-uvm",
    "fakepci",
    "built-in",
    "nosuch",
    "gpu",
    "x-alias",
];
const PATTERNS: &[&str] = &[
    "virtio*",
    "nv[a-z]idia*",
    "v?ock",
    "[!v]*",
    "gp?",
    "x-*",
    "*_uvm",
    "fake[!x]ci",
];

fn configuration() -> impl Strategy<Value = String> {
    let name = || select(NAMES);
    let names = || {
        (
            prop_oneof![3 => select(NAMES), 1 => select(PATTERNS)],
            name(),
            name(),
        )
    };
    let alias = select(&["gpu", "x-*", "nosuch", "char-major-195-*", "g?u"]);
    let line = prop_oneof![
        (name(), 0..9, 0..9)
            .prop_map(|(name, a, b)| format!("options {name} a{a}={b} \\\n  b=\"c d\"")),
        name().prop_map(|name| format!("\toptions\t{name}\tflag")),
        // To modules only: where an alias leads to what is built in or to nothing, a load ends,
        // and --show-depends goes on.
        (alias, select(&NAMES[..MODULES])).prop_map(|(alias, to)| format!("alias {alias} {to}")),
        name().prop_map(|name| format!("blacklist {name}")),
        names().prop_map(|(name, a, _)| format!("softdep {name} post: {a}")),
        (names(), name())
            .prop_map(|((name, a, b), c)| format!("softdep {name} ignored pre: {a} {b} post: {c}")),
        names().prop_map(|(name, a, _)| format!("weakdep {name} {a}\nfrobnicate {a}\nalias {a}")),
        names().prop_map(|(name, a, b)| format!("softdep {name} pre: {a} {b}")),
    ];
    vec(line, 0..12).prop_map(|lines| format!("# random\n{}\n", lines.join("\n")))
}

#[test]
fn the_order_and_the_options_are_those_of_modprobe() {
    let Some(root) = tree("modprobe") else { return };
    let (compared, with_softdeps) = (Cell::new(0), Cell::new(0));
    let asked = select(&[
        "nvidia-uvm",
        "nvidia",
        "virtio_pci",
        "vmw-vsock-virtio-transport",
        "gpu",
        "x-1",
        "char-major-195-0",
    ]);
    let folder = root.0.join("etc/modprobe.d");
    make_dir(&folder);
    proptest!(property(ROUNDS), |(b in configuration(), n in configuration(), asked in asked)| {
        write(folder.join("b.conf"), b);
        write(folder.join("n.conf"), n);
        let output = modprobe(&root.0, &["--show-depends", asked]);
        let theirs = shown(&output);
        match ours(&root.0, asked) {
            Err(error) => prop_assert!(theirs.is_empty(), "{error}\nmodprobe: {output:?}"),
            Ok(ours) => prop_assert_eq!(ours, theirs.clone(), "modprobe: {:?}", output),
        }
        compared.set(compared.get() + usize::from(!theirs.is_empty()));
        with_softdeps.set(with_softdeps.get() + usize::from(theirs.len() > 4));
    });
    // The other rounds asked for an alias that was not there.
    assert!(
        compared.get() > 60 && with_softdeps.get() > 10,
        "{compared:?} lists of files were compared, {with_softdeps:?} long ones"
    );
}

#[test]
fn a_gpus_own_alias_leads_to_the_driver_as_for_modprobe() {
    let Some(root) = tree("alias") else { return };
    make_dir(root.0.join("etc/modprobe.d"));
    let gpu = "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00";
    let output = modprobe(&root.0, &["--show-depends", gpu]);
    let ours = ours(&root.0, gpu).unwrap();
    assert_eq!(ours, shown(&output));
    assert!(
        ours.last().unwrap().0.ends_with("extra/nvidia.ko"),
        "{ours:?}"
    );
}

#[test]
fn a_wrong_order_would_be_seen() {
    // Negative control: modprobe's list, and the same the other way round.
    let Some(root) = tree("control") else { return };
    make_dir(root.0.join("etc/modprobe.d"));
    let theirs = shown(&modprobe(&root.0, &["--show-depends", "virtio_pci"]));
    assert!(theirs.len() >= 4, "{theirs:?}");
    write(
        root.0.join("etc/modprobe.d/x.conf"),
        "softdep virtio pre: vsock\n",
    );
    assert_ne!(
        ours(&root.0, "virtio_pci").unwrap(),
        theirs,
        "a soft dependency more changes nothing"
    );
    assert_eq!(
        ours(&root.0, "virtio_pci").unwrap(),
        shown(&modprobe(&root.0, &["--show-depends", "virtio_pci"]))
    );
}
