//! Files for another architecture than the image's init: kernel modules that the kernel refuses,
//! and libraries of the driver that no loader of the image's containers takes.
//!
//! Not here: programs ([`super::programs`]), and compressed modules, which are not unpacked for it.

use super::image_rules::{Finding, WRONG_MACHINE};
use crate::images::newc::Kind;
use crate::images::unpacked_root::{Id, ROOT, Tree};
use kata_gpu_init::formats::elf::ReadAt;
use kata_gpu_wire::arch::Arch;

/// Beginnings of the names of libraries, without which no container has a GPU.
const LIBRARIES: [&[u8]; 2] = [b"libcuda.so.", b"libnvidia-ml.so."];

/// Checks an image for guests of an architecture: one finding for all modules, one for all
/// libraries.
pub fn check(tree: &Tree, arch: Arch, findings: &mut Vec<Finding>) {
    let is_module = |name: &[u8]| name.ends_with(b".ko");
    let is_library = |name: &[u8]| LIBRARIES.iter().any(|library| name.starts_with(library));
    let files: Vec<Id> = tree
        .below(ROOT)
        .into_iter()
        .filter(|id| tree.kind(*id) == Kind::File)
        .collect();
    for is_one in [&is_module as &dyn Fn(&[u8]) -> bool, &is_library] {
        let mut wrong = files
            .iter()
            .filter(|id| is_one(tree.name(**id)))
            .filter_map(|id| Some((*id, other(tree, *id, arch)?)));
        let Some((first, of)) = wrong.next() else {
            continue;
        };
        let more = match wrong.count() {
            0 => String::new(),
            1 => "; 1 more such file".into(),
            count => format!("; {count} more such files"),
        };
        findings.push(
            Finding::new(&WRONG_MACHINE, tree.path(first))
                .value(format!("for {of}; the init is for {arch}{more}")),
        );
    }
}

/// The architecture of a file, if that is another one. i386 is none: images of x86-64 may have its
/// libraries.
fn other(tree: &Tree, id: Id, arch: Arch) -> Option<Arch> {
    let mut head = [0; Arch::HEAD];
    let length = tree.content(id)?.read_at(&mut head, 0).ok()?;
    head.get(..length)
        .and_then(Arch::of_head)
        .filter(|of| *of != arch)
}
