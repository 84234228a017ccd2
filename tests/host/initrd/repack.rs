//! A failure means that `image replace-init` of an initrd changes an entry besides the init, is not
//! reproducible, or accepts an archive that it cannot keep as it is.

use crate::initrd::verify::guest;
use crate::initrd::{Made, archive, directory, entries, file, gzip, link, program};
use crate::{TempDir, write};
use kata_gpu_image::images::diff::Change;
use kata_gpu_image::images::helper::Helper;
use kata_gpu_image::images::image::{Entry, Form, Image};
use kata_gpu_image::images::repack::{Options, Repacked, repack};
use kata_gpu_image::images::unpacked_root::Tree;
use kata_gpu_image::images::verify::Question;
use kata_gpu_test_support::elf_stand_in as stand_in;
use std::collections::BTreeMap;

const NVRC: &str = "/bin/NVRC-x86_64-unknown-linux-musl";
const MANIFEST: &str = "/usr/share/kata-gpu-init/driver-files.json";

/// A guest whose init is another one, under another name, as Kata's image has it.
fn kata() -> Vec<Made> {
    let mut all: Vec<Made> = guest().into_iter().filter(|m| m.name != b"init").collect();
    let old = stand_in::program("/lib64/ld-linux-x86-64.so.2", &[], None);
    let mut more = vec![
        directory("bin"),
        directory("sbin"),
        program(&NVRC[1..], old),
        file(&format!("{}.sig", &NVRC[1..]), "signature"),
    ];
    more.extend([
        link("init", NVRC),
        link("sbin/init", NVRC),
        file("etc/kata-opa", "policy"),
    ]);
    more.iter_mut().for_each(|m| m.header.mtime = 1_700_000_000);
    all.extend(more);
    all
}

/// An image and an init, to be repacked.
pub struct Case {
    pub dir: TempDir,
}
impl Case {
    pub fn new(test: &str, bytes: &[u8]) -> Self {
        let dir = TempDir::new(&format!("initrd-repack-{test}"));
        write(dir.0.join("image"), bytes);
        write(dir.0.join("init"), new_init());
        Self { dir }
    }

    fn before(&self) -> (Image, Tree) {
        let image = Image::open(&self.dir.0.join("image")).unwrap();
        let tree = Tree::new(&image).unwrap();
        (image, tree)
    }

    pub fn repack(&self, change: impl Fn(&mut Options)) -> anyhow::Result<(Repacked, Image, Tree)> {
        let (image, tree) = self.before();
        let mut options = Options {
            init: self.dir.0.join("init"),
            helper: Helper::None,
            manifest: true,
            form: None,
            drop_old: false,
        };
        change(&mut options);
        let done = repack(
            &image,
            &tree,
            &options,
            &Question::default(),
            &self.dir.0.join("out"),
        )?;
        let after = Image::open(done.new.written.temporary())?;
        let tree = Tree::new(&after)?;
        Ok((done, after, tree))
    }
}

fn new_init() -> Vec<u8> {
    [stand_in::library(None, &[]), vec![7; 1001]].concat()
}

/// Header, name, data and padding, as they stand.
fn raw(image: &Image, entry: &Entry) -> Vec<u8> {
    image.parts[entry.part]
        .content
        .part(entry.range.clone())
        .bytes(1 << 30)
        .unwrap()
}

/// Names with their bytes, in their order, of all but these.
fn others(image: &Image, except: &[&str]) -> Vec<(String, Vec<u8>)> {
    let all = image
        .entries
        .iter()
        .map(|e| (String::from_utf8_lossy(&e.name).into_owned(), raw(image, e)));
    all.filter(|(name, _)| !except.contains(&name.as_str()))
        .collect()
}

fn differences(done: &Repacked) -> BTreeMap<String, &'static str> {
    let word = |change: &Change| match change {
        Change::Added(_) => "added",
        Change::Removed(_) => "removed",
        Change::Changed(_) => "changed",
    };
    done.new
        .differences
        .iter()
        .map(|d| (String::from_utf8_lossy(&d.path).into_owned(), word(&d.what)))
        .collect()
}

pub fn content(tree: &Tree, path: &str) -> Option<Vec<u8>> {
    tree.content(tree.find(path)?)
        .map(|c| c.bytes(1 << 30).unwrap())
}

#[test]
fn every_other_entry_stays_byte_for_byte_in_its_order() {
    let new = ["usr/share", "usr/share/kata-gpu-init", &MANIFEST[1..]];
    for (name, bytes) in [
        ("plain", archive(&kata())),
        ("gzip", gzip(&archive(&kata()))),
    ] {
        let case = Case::new(name, &bytes);
        let (before, _) = case.before();
        let (done, after, tree) = case.repack(|_| ()).unwrap();
        let changed: Vec<&str> = ["init", "sbin/init"].into_iter().chain(new).collect();
        let kept = others(&before, &changed);
        assert!(kept == others(&after, &changed), "{name}");
        assert_eq!(done.new.kept, before.entries.len() - 2, "{name}");
        // In their places, too: what is new comes last.
        let names = |image: &Image| -> Vec<_> {
            others(image, &[])
                .into_iter()
                .map(|(name, _)| name)
                .collect()
        };
        assert_eq!(
            names(&before),
            names(&after)[..before.entries.len()],
            "{name}"
        );
        assert_eq!(
            (content(&tree, "/init"), content(&tree, "/sbin/init")),
            (Some(new_init()), Some(new_init())),
            "{name}"
        );
        assert_eq!(after.form(), before.form(), "{name}");
        assert!(done.report.boots(), "{:#?}", done.report.findings);
        assert_eq!(done.old_init.as_deref(), Some(NVRC), "{name}");
        assert_eq!(
            done.new.manifest,
            Ok(5),
            "{name}: two libraries, two firmware files, nvidia-smi"
        );
        let wanted = [
            ("/init", "changed"),
            ("/sbin/init", "changed"),
            ("/usr/share", "added"),
            ("/usr/share/kata-gpu-init", "added"),
            (MANIFEST, "added"),
        ];
        assert_eq!(
            differences(&done),
            wanted.map(|(path, word)| (path.to_string(), word)).into(),
            "{name}"
        );
        // The control: the comparison sees one bit of one entry.
        let mut other = kata();
        other.last_mut().unwrap().header.mtime ^= 1;
        let (other, _) = Case::new(&format!("{name}-control"), &archive(&other)).before();
        assert!(kept != others(&other, &changed), "{name}");
    }
}

#[test]
fn the_helper_for_nvml_comes_along_where_it_is_given_or_found() {
    const HELPER: &str = "/usr/bin/kata-gpu-nvml";
    let program_with = |loader: &str| {
        [
            stand_in::program(loader, &[], None),
            b"kata-gpu-nvml".to_vec(),
        ]
        .concat()
    };
    let case = Case::new("helper", &archive(&kata()));
    let path = case.dir.0.join("kata-gpu-nvml");
    write(&path, program_with("/lib64/ld-linux-x86-64.so.2"));
    for helper in [Helper::Given(path.clone()), Helper::Found(path.clone())] {
        let (done, _, tree) = case
            .repack(|options| options.helper = helper.clone())
            .unwrap();
        assert_eq!(content(&tree, HELPER), Some(crate::bytes(&path)));
        assert_eq!(tree.meta(tree.find(HELPER).unwrap()).mode & 0o7777, 0o755);
        assert_eq!(
            (&done.new.helper, done.new.helper_lacks.len()),
            (&Ok(path.clone()), 0),
            "{:?}",
            done.new.helper_lacks
        );
        assert_eq!(differences(&done).get(HELPER), Some(&"added"));
    }
    // An image that does not have its loader gets it, and that is reported.
    write(&path, program_with("/lib64/ld-other.so.1"));
    let lacks = case
        .repack(|options| options.helper = Helper::Found(path.clone()))
        .unwrap()
        .0
        .new
        .helper_lacks;
    assert!(
        lacks.iter().any(|lack| lack.contains("ld-other.so.1")),
        "{lacks:?}"
    );
    // Another program is refused where it is given, and left out where it was found.
    write(&path, new_init());
    let error = case
        .repack(|options| options.helper = Helper::Given(path.clone()))
        .unwrap_err()
        .to_string();
    assert!(error.contains("another program"), "{error}");
    let (done, _, tree) = case
        .repack(|options| options.helper = Helper::Found(path.clone()))
        .unwrap();
    assert!(
        done.new
            .helper
            .is_err_and(|why| why.contains("another program"))
            && content(&tree, HELPER).is_none()
    );
}

#[test]
fn repacking_is_reproducible_and_twice_changes_nothing() {
    let case = Case::new("twice", &archive(&kata()));
    let first = case.repack(|_| ()).unwrap().0.new.written.sha256.clone();
    assert_eq!(case.repack(|_| ()).unwrap().0.new.written.sha256, first);
    assert_eq!(
        crate::names(&case.dir.0),
        ["image", "init"],
        "what is not kept is gone"
    );
    let (mut done, ..) = case.repack(|_| ()).unwrap();
    done.new.written.keep().unwrap();
    let again = Case::new("again", &crate::bytes(case.dir.0.join("out")));
    let (done, ..) = again.repack(|_| ()).unwrap();
    assert_eq!(
        (differences(&done), done.new.written.sha256.clone()),
        (BTreeMap::new(), first)
    );
    assert_eq!(done.old_init, None, "it was replaced in its place");
}

#[test]
fn a_part_that_nothing_changes_in_is_copied_as_it_is_stored() {
    let microcode = archive(&[directory("kernel"), file("kernel/microcode", "m")]);
    let main = gzip(&archive(&kata()));
    let case = Case::new("parts", &[microcode.clone(), main.clone()].concat());
    let (done, after, _) = case.repack(|_| ()).unwrap();
    assert_eq!(
        after.parts.iter().map(|p| p.form).collect::<Vec<_>>(),
        [Form::Plain, Form::Gzip]
    );
    assert_eq!(after.parts[0].raw.bytes(1 << 20).unwrap(), microcode);
    assert!(done.report.boots());
    // The other way round: the rest behind what is compressed begins where the kernel looks for it.
    let gap = vec![0; 4 - main.len() % 4];
    let case = Case::new("parts-turned", &[main, gap, microcode.clone()].concat());
    let (done, after, tree) = case.repack(|options| options.manifest = false).unwrap();
    assert_eq!(after.parts[1].raw.bytes(1 << 20).unwrap(), microcode);
    assert_eq!(
        (content(&tree, "/init"), content(&tree, "/kernel/microcode")),
        (Some(new_init()), Some(b"m".to_vec()))
    );
    assert_eq!(done.new.manifest, Err("not asked for".to_string()));
}

#[test]
fn the_form_can_be_changed() {
    let plain = Case::new("to-gzip", &archive(&kata()));
    let (done, after, tree) = plain
        .repack(|options| options.form = Some(Form::Gzip))
        .unwrap();
    assert_eq!(
        (after.form(), content(&tree, "/init")),
        (Form::Gzip, Some(new_init()))
    );
    assert!(done.new.written.bytes < std::fs::metadata(plain.dir.0.join("image")).unwrap().len());
    drop(done);
    let packed = Case::new("to-plain", &gzip(&archive(&kata())));
    let (done, after, _) = packed
        .repack(|options| options.form = Some(Form::Plain))
        .unwrap();
    assert_eq!(after.form(), Form::Plain);
    assert_eq!(
        done.new.written.sha256,
        plain.repack(|_| ()).unwrap().0.new.written.sha256,
        "the same as from a plain image"
    );
}

#[test]
fn the_old_init_can_be_left_out_and_the_agent_never() {
    let case = Case::new("drop", &archive(&kata()));
    let (done, _, tree) = case.repack(|options| options.drop_old = true).unwrap();
    let gone = differences(&done)
        .into_iter()
        .filter(|(_, word)| *word == "removed")
        .map(|(path, _)| path)
        .collect::<Vec<_>>();
    assert_eq!(gone, [NVRC.to_string(), format!("{NVRC}.sig")]);
    assert_eq!((done.old_init.as_deref(), tree.find(NVRC)), (None, None));
    assert!(done.report.boots());
    let mut all = guest();
    all.retain(|m| m.name != b"init");
    all.push(link("init", "/usr/bin/kata-agent"));
    let case = Case::new("agent", &archive(&all));
    let (done, _, tree) = case.repack(|options| options.drop_old = true).unwrap();
    assert!(done.report.boots() && tree.find("/usr/bin/kata-agent").is_some());
}

#[test]
fn an_image_without_an_init_or_with_it_elsewhere_gets_one() {
    let without: Vec<Made> = kata().into_iter().filter(|m| m.name != b"init").collect();
    let case = Case::new("elsewhere", &archive(&without));
    let (done, _, tree) = case.repack(|_| ()).unwrap();
    assert_eq!(
        (
            differences(&done)["/init"],
            differences(&done)["/sbin/init"]
        ),
        ("added", "changed")
    );
    assert_eq!(
        (content(&tree, "/sbin/init"), done.old_init.as_deref()),
        (Some(new_init()), Some(NVRC))
    );
    // Without an end mark, too: it gets one.
    let none: Vec<Made> = without
        .into_iter()
        .filter(|m| m.name != b"sbin/init")
        .collect();
    let case = Case::new("none", &entries(&none));
    let (done, after, tree) = case.repack(|_| ()).unwrap();
    assert_eq!(
        (content(&tree, "/init"), done.old_init, after.parts[0].ended),
        (Some(new_init()), None, true)
    );
}

#[test]
fn what_cannot_be_kept_as_it_is_is_refused() {
    // The init shares its bytes with another name.
    let mut shared = kata();
    shared.retain(|m| m.name != b"init");
    for name in ["init", "usr/bin/other"] {
        let mut one = program(name, stand_in::library(None, &[]));
        (one.header.nlink, one.header.ino) = (2, 77);
        shared.push(one);
    }
    // An earlier entry of the same name does: the kernel would write through it.
    let mut hidden = shared.clone();
    hidden.push(link("init", NVRC));
    for (name, all, part) in [("shared", shared, "hard links"), ("hidden", hidden, "")] {
        let case = Case::new(name, &archive(&all));
        match case.repack(|_| ()) {
            Err(error) => assert!(format!("{error:#}").contains(part), "{error:#}"),
            Ok((_, _, tree)) => {
                let other = content(&tree, "/usr/bin/other").unwrap();
                assert!(
                    name == "hidden" && other == stand_in::library(None, &[]),
                    "{name}"
                );
            }
        }
        let left = crate::names(&case.dir.0);
        assert_eq!(left, ["image", "init"], "{name}: nothing is left behind");
    }
    let case = Case::new("not-a-program", &archive(&kata()));
    write(case.dir.0.join("init"), "#!/bin/sh\n");
    let directory = Case::new("directory", &archive(&[directory("init")]));
    for (case, why) in [(case, "not an ELF file"), (directory, "it is a directory")] {
        let error = case.repack(|_| ()).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}
