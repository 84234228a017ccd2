//! A failure means that an image gets a program of another architecture, or that a program of
//! another architecture is run to look at it.

use crate::TempDir;
use crate::initrd::repack::Case;
use crate::initrd::verify::{KERNEL, VERSION, guest};
use crate::initrd::{Made, archive, for_arch, image, packed_as, write};
use kata_gpu_image::images::image::Form;
use kata_gpu_image::images::pack::{List, Packing};
use kata_gpu_image::images::repack::Repacked;
use kata_gpu_image::images::verify::{Question, check};
use kata_gpu_test_support::elf_stand_in as stand_in;
use kata_gpu_wire::arch::Arch;

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
fn repacked(test: &str, init: Arch) -> Repacked {
    let case = Case::new(test, &archive(&arm64_guest()));
    crate::write(
        case.dir.0.join("init"),
        for_arch(init, stand_in::library(None, &[])),
    );
    case.repack(|_| ()).unwrap().0
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
    let (image, tree) = image(&crate::bytes(&to)).unwrap();
    let report = check(&image, &tree, &Question::default());
    assert!(
        report.boots() && report.findings.is_empty(),
        "{:?}",
        report.findings
    );
}

#[test]
fn an_init_for_another_architecture_than_the_image_is_an_error() {
    let right = repacked("arch-right", Arch::Aarch64);
    assert!(
        right.report.boots() && right.report.findings.is_empty(),
        "{:?}",
        right.report.findings
    );
    let wrong = repacked("arch-wrong", Arch::X86_64);
    let rules: Vec<&str> = wrong.report.findings.iter().map(|f| f.rule.name).collect();
    assert!(
        !wrong.report.boots() && rules.contains(&"wrong-machine"),
        "{rules:?}"
    );
}

#[test]
fn what_is_for_another_architecture_is_named_in_an_image() {
    let modules = format!("usr/lib/modules/{KERNEL}/extra");
    let cuda = format!("usr/lib64/libcuda.so.{VERSION}");
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
    assert_eq!(found, wanted);
    assert!(!report.boots());
}
