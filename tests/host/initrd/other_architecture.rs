//! `kata-gpu-boot initrd` and `kata-gpu-init cdi` on files of the architecture that this machine is
//! not: nothing of them is run.

use crate::TempDir;
use crate::cdi::generate::run;
use crate::initrd::verify::guest;
use crate::initrd::{Made, archive, for_arch, image, packed_as, write};
use kata_gpu_init::arch::Arch;
use kata_gpu_init::elf::stand_in;
use kata_gpu_init::host::tools::initrd::helper::Helper;
use kata_gpu_init::host::tools::initrd::image::{Form, Image};
use kata_gpu_init::host::tools::initrd::pack::{List, Wish as PackWish};
use kata_gpu_init::host::tools::initrd::repack::{Repacked, Wish, repack};
use kata_gpu_init::host::tools::initrd::unpacked_root::Tree;
use kata_gpu_init::host::tools::initrd::verify::{Question, check};
use std::fs;

fn arm64_guest() -> Vec<Made> {
    guest().into_iter().map(|made| Made { data: for_arch(Arch::Aarch64, made.data), ..made }).collect()
}

/// Repacks an arm64 image with an init of an architecture.
fn repacked(test: &str, init: Arch) -> (TempDir, anyhow::Result<Repacked>) {
    let dir = TempDir::new(&format!("initrd-arch-{test}"));
    fs::write(dir.0.join("image"), archive(&arm64_guest())).unwrap();
    fs::write(dir.0.join("init"), for_arch(init, stand_in::library(None, &[]))).unwrap();
    let old = Image::open(&dir.0.join("image")).unwrap();
    let wish = Wish { init: dir.0.join("init"), helper: Helper::None, manifest: true, form: None, drop_old: false };
    let done = repack(&old, &Tree::new(&old).unwrap(), &wish, &Question::default(), &dir.0.join("out"));
    (dir, done)
}

#[test]
fn an_image_of_another_architecture_is_packed_and_verified() {
    let dir = TempDir::new("initrd-arch-pack");
    write(&arm64_guest(), &dir.0.join("root"));
    let to = dir.0.join("image");
    let (written, packed) = packed_as(&[&dir.0.join("root")], Form::Plain, PackWish { mtime: 0, manifest: true }, &to).unwrap();
    assert!(matches!(packed.list, List::Of(5)), "{:?}", packed.list);
    drop(written);
    let (image, tree) = image(&fs::read(&to).unwrap()).unwrap();
    let report = check(&image, &tree, &Question::default());
    assert!(report.boots() && report.findings.is_empty(), "{:?}", report.findings);
}

#[test]
fn an_init_for_another_architecture_than_the_image_is_an_error() {
    let (_dir, done) = repacked("right", Arch::Aarch64);
    let right = done.unwrap();
    assert!(right.report.boots() && right.report.findings.is_empty(), "{:?}", right.report.findings);
    let (_dir, done) = repacked("wrong", Arch::X86_64);
    let wrong = done.unwrap();
    let rules: Vec<&str> = wrong.report.findings.iter().map(|f| f.rule.name).collect();
    assert!(!wrong.report.boots() && rules.contains(&"wrong-machine"), "{rules:?}");
}

#[test]
fn a_spec_and_a_list_are_made_of_another_architectures_root() {
    let dir = TempDir::new("initrd-arch-cdi");
    write(&arm64_guest(), &dir.0);
    let listed = run(&dir.0, &["manifest"]);
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let list = fs::read_to_string(dir.0.join("usr/share/kata-gpu-init/driver-files.json")).unwrap();
    assert!(list.contains("libcuda.so.1") && list.contains("libnvidia-ml.so.1"), "{list}");
    // Byte for byte that of the same root for this machine.
    let own = TempDir::new("initrd-own-cdi");
    write(&guest(), &own.0);
    assert!(run(&own.0, &["manifest"]).status.success());
    let own = fs::read_to_string(own.0.join("usr/share/kata-gpu-init/driver-files.json")).unwrap();
    let names = |list: &str| list.matches("/usr/").count();
    assert_eq!(names(&list), names(&own), "{list}\n{own}");
}
