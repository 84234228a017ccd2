//! A failure means that an image boots with a list of the driver's files that does not hold, that a
//! stale list goes unreported, or that a good one is missing or differs from build to build.

use crate::initrd::verify::{VERSION, guest};
use crate::initrd::{image, packed_as, write};
use crate::{TempDir, bytes, make_dir};
use kata_gpu_image::images::image::Form;
use kata_gpu_image::images::pack::{List, Packing};
use kata_gpu_image::images::verify::{Question, check};
use kata_gpu_test_support::elf_stand_in as stand_in;
use std::path::{Path, PathBuf};

const MANIFEST: &str = "usr/share/kata-gpu-init/driver-files.json";
/// Two libraries, two firmware files, nvidia-smi.
const FILES: usize = 5;
const WITH: Packing = Packing {
    mtime: 0,
    manifest: true,
};
const WITHOUT: Packing = Packing {
    mtime: 0,
    manifest: false,
};

fn rules(path: &Path) -> Vec<&'static str> {
    let (image, tree) = image(&bytes(path)).unwrap();
    check(&image, &tree, &Question::default())
        .findings
        .iter()
        .map(|f| f.rule.name)
        .collect()
}

/// The list in an image.
fn list_in(path: &Path) -> Option<Vec<u8>> {
    let (_, tree) = image(&bytes(path)).unwrap();
    Some(tree.content(tree.find(MANIFEST)?)?.bytes(1 << 20).unwrap())
}

struct Case {
    dir: TempDir,
    root: PathBuf,
}

impl Case {
    fn new(test: &str) -> Self {
        let dir = TempDir::new(&format!("initrd-list-{test}"));
        let root = dir.0.join("root");
        write(&guest(), &root);
        Self { dir, root }
    }

    fn pack(&self, name: &str, packing: Packing) -> (PathBuf, List) {
        let to = self.dir.0.join(name);
        let (_, packed) = packed_as(&[&self.root], Form::Plain, packing, &to).unwrap();
        (to, packed.list)
    }
}

#[test]
fn a_packed_driver_brings_the_list_that_verify_finds_to_hold() {
    let case = Case::new("made");
    let (image, list) = case.pack("image", WITH);
    assert_eq!((list, rules(&image)), (List::Of(FILES), vec![]));
    let text = String::from_utf8(list_in(&image).unwrap()).unwrap();
    assert!(
        text.contains(&format!("\"version\":\"{VERSION}\"")) && text.contains("libnvidia-ml.so.1"),
        "{text}"
    );
    // The control: without, verify misses it.
    let (image, list) = case.pack("without", WITHOUT);
    assert_eq!(
        (list, rules(&image)),
        (List::None("not asked for".into()), vec!["no-manifest"])
    );
}

#[test]
fn a_valid_list_stays_and_a_stale_one_is_reported_and_replaced() {
    let case = Case::new("stale");
    let (image, _) = case.pack("image", WITH);
    let good = list_in(&image).unwrap();
    make_dir(case.root.join(MANIFEST).parent().unwrap());
    let put = |text: &[u8]| crate::write(case.root.join(MANIFEST), text);
    put(&good);
    assert_eq!(case.pack("again", WITH).1, List::Of(FILES));
    let firmware = case
        .root
        .join(format!("usr/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin"));
    crate::write(&firmware, "longer firmware");
    // As it is kept without being made anew, verify says so.
    assert_eq!(rules(&case.pack("kept", WITHOUT).0), ["manifest-stale"]);
    let (image, list) = case.pack("replaced", WITH);
    let List::Replaced(FILES, why) = list else {
        panic!("{list:?}")
    };
    assert!(
        why.ends_with("gsp_tu10x.bin has 15 bytes, it had 8"),
        "{why}"
    );
    assert_eq!(rules(&image), Vec::<&str>::new());
    put(b"{}");
    assert!(
        matches!(case.pack("broken", WITH).1, List::Replaced(FILES, why) if why.contains("missing field"))
    );
    // A program that came later is not seen at boot, and is here.
    put(&list_in(&image).unwrap());
    crate::write(
        case.root.join("usr/bin/nvidia-debugdump"),
        stand_in::library(None, &[]),
    );
    crate::chmod(case.root.join("usr/bin/nvidia-debugdump"), 0o755);
    assert_eq!(
        case.pack("more", WITH).1,
        List::Replaced(FILES + 1, "it was written for other files".into())
    );
}

#[test]
fn why_there_is_no_list_is_said() {
    let case = Case::new("none");
    for library in ["libcuda", "libnvidia-ml"] {
        crate::remove(case.root.join(format!("usr/lib64/{library}.so.{VERSION}")));
    }
    let none = |list: List| match list {
        List::None(why) => why,
        other => panic!("{other:?}"),
    };
    let why = none(case.pack("no-driver", WITH).1);
    assert!(
        why.contains(&format!("has libcuda.so.{VERSION}")) && !why.contains("/tmp/"),
        "{why}"
    );
    // The module says which version is meant, not the libraries.
    let other = "580.95.05";
    crate::write(
        case.root.join(format!("usr/lib64/libcuda.so.{other}")),
        stand_in::library(Some("libcuda.so.1"), &[]),
    );
    let why = none(case.pack("other", WITH).1);
    assert!(why.contains(VERSION) && why.contains(other), "{why}");
    let elsewhere = Case::new("elsewhere");
    make_dir(elsewhere.root.join("usr/data"));
    crate::link("data", elsewhere.root.join("usr/share"));
    let why = none(elsewhere.pack("link", WITH).1);
    assert!(why.starts_with("/usr/share is no directory"), "{why}");
}
