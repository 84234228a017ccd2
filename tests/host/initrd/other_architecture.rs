//! `kata-gpu-boot image` and `kata-gpu-init cdi` on files of the architecture that this machine is
//! not: nothing of them is run.

use crate::cdi::generate::run;
use crate::collect::program;
use crate::initrd::verify::{KERNEL, VERSION, guest};
use crate::initrd::{Made, archive, for_arch, image, packed_as, write};
use crate::{TempDir, project, tree};
use kata_gpu_image::images::helper::Helper;
use kata_gpu_image::images::image::{Form, Image};
use kata_gpu_image::images::pack::{List, Packing};
use kata_gpu_image::images::repack::{Options, Repacked, repack};
use kata_gpu_image::images::unpacked_root::Tree;
use kata_gpu_image::images::verify::{Question, check};
use kata_gpu_test_support::elf_stand_in as stand_in;
use kata_gpu_wire::arch::Arch;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn arm64_guest() -> Vec<Made> {
    guest()
        .into_iter()
        .map(|made| Made {
            data: for_arch(Arch::Aarch64, made.data),
            ..made
        })
        .collect()
}

/// Repacks an arm64 image with an init of an architecture.
fn repacked(test: &str, init: Arch) -> (TempDir, anyhow::Result<Repacked>) {
    let dir = TempDir::new(&format!("initrd-arch-{test}"));
    fs::write(dir.0.join("image"), archive(&arm64_guest())).unwrap();
    fs::write(
        dir.0.join("init"),
        for_arch(init, stand_in::library(None, &[])),
    )
    .unwrap();
    let old = Image::open(&dir.0.join("image")).unwrap();
    let options = Options {
        init: dir.0.join("init"),
        helper: Helper::None,
        manifest: true,
        form: None,
        drop_old: false,
    };
    let done = repack(
        &old,
        &Tree::new(&old).unwrap(),
        &options,
        &Question::default(),
        &dir.0.join("out"),
    );
    (dir, done)
}

#[test]
fn an_image_of_another_architecture_is_packed_and_verified() {
    let dir = TempDir::new("initrd-arch-pack");
    write(&arm64_guest(), &dir.0.join("root"));
    let to = dir.0.join("image");
    let (written, packed) = packed_as(
        &[&dir.0.join("root")],
        Form::Plain,
        Packing {
            mtime: 0,
            manifest: true,
        },
        &to,
    )
    .unwrap();
    assert!(matches!(packed.list, List::Of(5)), "{:?}", packed.list);
    drop(written);
    let (image, tree) = image(&fs::read(&to).unwrap()).unwrap();
    let report = check(&image, &tree, &Question::default());
    assert!(
        report.boots() && report.findings.is_empty(),
        "{:?}",
        report.findings
    );
}

#[test]
fn an_init_for_another_architecture_than_the_image_is_an_error() {
    let (_dir, done) = repacked("right", Arch::Aarch64);
    let right = done.unwrap();
    assert!(
        right.report.boots() && right.report.findings.is_empty(),
        "{:?}",
        right.report.findings
    );
    let (_dir, done) = repacked("wrong", Arch::X86_64);
    let wrong = done.unwrap();
    let rules: Vec<&str> = wrong.report.findings.iter().map(|f| f.rule.name).collect();
    assert!(
        !wrong.report.boots() && rules.contains(&"wrong-machine"),
        "{rules:?}"
    );
}

#[test]
fn a_spec_and_a_list_are_made_of_another_architectures_root() {
    let dir = TempDir::new("initrd-arch-cdi");
    write(&arm64_guest(), &dir.0);
    let listed = run(&dir.0, &["manifest"]);
    assert!(
        listed.status.success(),
        "{}",
        String::from_utf8_lossy(&listed.stderr)
    );
    let list = fs::read_to_string(dir.0.join("usr/share/kata-gpu-init/driver-files.json")).unwrap();
    assert!(
        list.contains("libcuda.so.1") && list.contains("libnvidia-ml.so.1"),
        "{list}"
    );
    // Byte for byte that of the same root for this machine.
    let own = TempDir::new("initrd-own-cdi");
    write(&guest(), &own.0);
    assert!(run(&own.0, &["manifest"]).status.success());
    let own = fs::read_to_string(own.0.join("usr/share/kata-gpu-init/driver-files.json")).unwrap();
    let names = |list: &str| list.matches("/usr/").count();
    assert_eq!(names(&list), names(&own), "{list}\n{own}");
}

#[test]
fn what_is_for_another_architecture_is_named_in_an_image() {
    let modules = format!("usr/lib/modules/{KERNEL}/extra");
    let (cuda, nvml) = (
        format!("usr/lib64/libcuda.so.{VERSION}"),
        format!("usr/lib64/libnvidia-ml.so.{VERSION}"),
    );
    let others = [
        "usr/bin/nvidia-smi",
        &format!("{modules}/nvidia.ko"),
        &format!("{modules}/nvidia-uvm.ko"),
        &cuda,
    ];
    let mut mixed = arm64_guest();
    for made in mixed
        .iter_mut()
        .filter(|made| others.iter().any(|name| made.name == name.as_bytes()))
    {
        made.data = for_arch(Arch::X86_64, made.data.clone());
    }
    let (image, tree) = image(&archive(&mixed)).unwrap();
    let report = check(&image, &tree, &Question::default());
    let found: Vec<String> = report
        .findings
        .iter()
        .filter(|finding| finding.rule.name != "no-manifest")
        .map(|finding| {
            format!(
                "{} {}: {}",
                finding.rule.name,
                finding.path,
                finding.value.as_deref().unwrap_or_default()
            )
        })
        .collect();
    let what = "for x86_64; the init is for aarch64";
    let wanted = [
        format!("wrong-machine /{modules}/nvidia-uvm.ko: {what}; 1 more such file"),
        format!("wrong-machine /{cuda}: {what}"),
        format!("program-broken /usr/bin/nvidia-smi: {what}"),
    ];
    assert_eq!(found, wanted, "{nvml} is as it was");
    assert!(!report.boots());
}

/// A root with the tests' driver and programs for arm64, and the GPUs of the reference root.
fn real_root(root: &Path, driver: &Path, programs: &Path) {
    let text = tree::description("kata-8gpu-550");
    let is_kernels = |line: &&str| {
        ["/proc", "/sys", "/dev"]
            .iter()
            .any(|of| line.contains(&format!(" {of}")))
    };
    tree::build(
        root,
        &text
            .lines()
            .filter(is_kernels)
            .collect::<Vec<_>>()
            .join("\n"),
    );
    let copy = Command::new("cp")
        .arg("-a")
        .arg(driver.join("."))
        .arg(root)
        .status()
        .unwrap();
    assert!(copy.success());
    for (from, to) in [
        ("kata-gpu-init", "init"),
        ("kata-agent", "usr/bin/kata-agent"),
    ] {
        fs::copy(programs.join(from), root.join(to)).unwrap();
    }
}

/// Standard output of a command that succeeded.
#[track_caller]
fn done(output: Output) -> String {
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// No file of the image can be run on this machine, so that every result comes from reading.
#[test]
fn real_files_of_arm64_are_read_where_none_of_them_can_run() {
    let target = project().join("target");
    let (driver, programs) = (
        target.join("arm64/containers/driver"),
        target.join("aarch64-unknown-linux-musl/release"),
    );
    if !driver.exists() || !programs.join("kata-agent").exists() {
        assert!(
            std::env::var_os("REQUIRE_ARM64").is_none(),
            "no files of arm64, and REQUIRE_ARM64 is set"
        );
        return eprintln!(
            "skipped: no files of arm64 (tests/run makes them where its packages can be had)"
        );
    }
    if Command::new(programs.join("kata-gpu-init"))
        .arg("--version")
        .output()
        .is_ok()
    {
        return eprintln!("skipped: this machine runs programs of arm64");
    }
    let dir = TempDir::new("initrd-arch-real");
    let (root, one, two) = (dir.0.join("root"), dir.0.join("one"), dir.0.join("two"));
    fs::create_dir(&root).unwrap();
    real_root(&root, &driver, &programs);
    let cuda = "/usr/lib/aarch64-linux-gnu/libcuda.so.550.163.01";
    let spec = done(run(&root, &["generate"]));
    assert!(
        spec.contains(cuda) && spec.contains("/dev/nvidia7"),
        "{spec}"
    );
    done(run(&root, &["manifest"]));
    let list = fs::read_to_string(root.join("usr/share/kata-gpu-init/driver-files.json")).unwrap();
    assert!(
        list.contains(cuda) && list.contains("libnvidia-ptxjitcompiler.so.1"),
        "{list}"
    );
    for files in ["proc", "sys", "dev"] {
        fs::remove_dir_all(root.join(files)).unwrap();
        fs::create_dir(root.join(files)).unwrap();
    }
    let initrd = |words: &[&str], paths: &[&Path]| {
        Command::new(program())
            .arg("image")
            .args(words)
            .args(paths)
            .output()
            .unwrap()
    };
    done(initrd(&["pack", "-o"], &[&one, &root]));
    assert!(done(initrd(&["ls"], &[&one])).contains(&cuda[1..]));
    assert_eq!(
        initrd(&["cat"], &[&one, Path::new("init")]).stdout,
        fs::read(programs.join("kata-gpu-init")).unwrap()
    );
    // No kernel modules are in it, and nothing of another architecture.
    let verified = String::from_utf8(initrd(&["verify", "--json"], &[&one]).stdout).unwrap();
    assert!(
        verified.contains("no-driver") || verified.contains("no-modules"),
        "{verified}"
    );
    assert!(
        ["wrong-machine", "program-broken", "not-a-program"]
            .iter()
            .all(|rule| !verified.contains(rule)),
        "{verified}"
    );
    fs::remove_file(root.join("usr/bin/nvidia-smi")).unwrap();
    done(initrd(&["pack", "-o"], &[&two, &root]));
    let differs = String::from_utf8(initrd(&["diff"], &[&one, &two]).stdout).unwrap();
    assert!(
        differs.contains("removed  /usr/bin/nvidia-smi"),
        "{differs}"
    );
}
