//! A failure means that `install --image` writes a drop-in which one of the runtimes reads
//! otherwise, keeps a hash of another image, or cannot be undone.

use crate::initrd::verify::guest;
use crate::initrd::{Made, archive, directory, file, link, program};
use crate::install::{World, done, from_words};
use crate::{golden, write};
use kata_gpu_boot::install::Args;
use kata_gpu_image::images::disk_image::hash_tree;
use kata_gpu_image::install::Report;
use kata_gpu_image::kata::merge::Runtime;
use std::path::{Path, PathBuf};

/// A guest that boots from a disk.
fn guest_of_disk() -> Vec<Made> {
    let init = guest().into_iter().find(|made| made.name == b"init");
    let marked = [init.unwrap().data, kata_gpu_init::cdi::spec::PENDING.into()].concat();
    let mut all = guest();
    all.retain(|made| made.name != b"init");
    all.extend([
        program("init", marked),
        directory("usr/sbin"),
        link("sbin", "usr/sbin"),
        link("usr/sbin/init", "/init"),
    ]);
    all
}

/// A guest of which no part of the driver is in the image.
fn without_driver(mut guest: Vec<Made>) -> Vec<Made> {
    guest.retain(|made| {
        let name = String::from_utf8_lossy(&made.name);
        let of_driver = ["nvidia", "libcuda", "libnvidia", "usr/lib/modules"];
        !of_driver.iter().any(|part| name.contains(part))
    });
    guest
}

/// An erofs file system with a guest's files; none where its tool is missing.
fn erofs(world: &World, guest: &[Made]) -> Option<Vec<u8>> {
    let (root, image) = (world.root().join("files"), world.root().join("erofs"));
    crate::initrd::write(guest, &root);
    let made = std::process::Command::new("mkfs.erofs")
        .arg("--quiet")
        .args([&image, &root])
        .status();
    let is_made = made.is_ok_and(|status| status.success());
    if !is_made {
        crate::skip(
            "KATA_GPU_BUILT",
            "no mkfs.erofs here (tests/setup installs it)",
        );
    }
    let bytes = is_made.then(|| crate::bytes(&image));
    std::fs::remove_dir_all(root).unwrap();
    // Not there where the tool is missing.
    let _gone = std::fs::remove_file(image);
    bytes
}

/// The magic number of ext4 and a word of the init.
fn ext4() -> Vec<u8> {
    let mut root = vec![0; 8192];
    root[1080..1082].copy_from_slice(&[0x53, 0xef]);
    let mark = kata_gpu_init::cdi::spec::PENDING.as_bytes();
    root[5000..5000 + mark.len()].copy_from_slice(mark);
    root
}

/// A disk with an MBR, this root in its first partition, and no hash tree in the second.
fn disk(world: &World, name: &str, root: &[u8], has_second: bool) -> PathBuf {
    let mut bytes = [vec![0; 4096], root.to_vec()].concat();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    let sectors = (bytes.len() as u32 - 4096) / 512;
    let mut put = |at: usize, what: &[u8]| bytes[at..at + what.len()].copy_from_slice(what);
    put(510, &[0x55, 0xaa]);
    put(450, &[0x83]);
    put(454, &8_u32.to_le_bytes());
    put(458, &sectors.to_le_bytes());
    put(466, &[if has_second { 0x83 } else { 0 }]);
    let path = world.root().join(name);
    write(&path, bytes);
    path
}

/// A disk whose second partition has the root's hash tree, and the parameters.
fn with_tree(world: &World, name: &str, root: &[u8]) -> (PathBuf, String) {
    let path = disk(world, name, root, true);
    let parameters = hash_tree::parameters("ab".into(), root.len() as u64);
    let tree = hash_tree::of(root, parameters).unwrap();
    let mut bytes = crate::bytes(&path);
    for (at, number) in [(470, bytes.len() as u32), (474, tree.bytes.len() as u32)] {
        bytes[at..at + 4].copy_from_slice(&(number / 512).to_le_bytes());
    }
    bytes.extend(&tree.bytes);
    write(&path, bytes);
    (path, hash_tree::line(&tree.verity))
}

fn install(world: &World, image: &Path, words: &[&str]) -> Report {
    world.install(&[&["--image", image.to_str().unwrap()], words].concat())
}

/// Fixture, its runtime and section, and its root's type.
const FIXTURES: &[(&str, Runtime, &str, &str)] = &[
    ("go-qemu-nvidia-gpu", Runtime::Go, "qemu", "erofs"),
    ("rust-qemu-nvidia-gpu", Runtime::Rust, "qemu", "erofs"),
    ("go-clh", Runtime::Go, "clh", "ext4"),
    ("rust-clh", Runtime::Rust, "cloud-hypervisor", "ext4"),
];

#[test]
fn the_images_drop_in_and_output_are_golden_and_can_be_undone() {
    for (fixture, runtime, section, _) in FIXTURES {
        let world = World::new(&format!("image-{fixture}"), fixture);
        // With a hash or without.
        let is_go = *runtime == Runtime::Go;
        let Some(root) = erofs(&world, &guest_of_disk()) else {
            return;
        };
        let (image, verity) = if is_go {
            (disk(&world, "gpu.image", &root, false), String::new())
        } else {
            with_tree(&world, "gpu.image", &root)
        };
        let words: &[&str] = if is_go {
            &["--param", "gpuinit.log=debug"]
        } else {
            &["--verity", &verity]
        };
        let before = world.snapshot();
        let dry = install(&world, &image, &[words, &["--dry-run"]].concat());
        assert_eq!(
            world.snapshot(),
            before,
            "{fixture}: a dry run writes nothing"
        );
        let said = install(&world, &image, words);
        let written = crate::text(world.ours());
        let at = written.find("\"checksum\":\"").unwrap() + 12;
        let sum = &written[at..at + 8];
        let page = format!("{}\n--- the file\n{written}", done(&said)).replace(sum, "........");
        // The root's bytes have times in them, and their number depends on mkfs.erofs.
        let page = verity
            .split_inclusive(',')
            .take(3)
            .fold(page, |page, field| {
                page.replace(field, &format!("{}=..,", field.split('=').next().unwrap()))
            });
        golden(&format!("install/image-{fixture}.txt"), &world.shown(&page));
        assert!(done(&dry).contains("+image = "), "{}", dry.out);
        // Never the hash of the image that was.
        let kind = "erofs";
        let keys = ["image", "initrd", "rootfs_type", "kernel_verity_params"];
        assert_eq!(
            keys.map(|key| world.key(*runtime, section, key)),
            [image.to_str().unwrap(), "", kind, &verity],
            "{fixture}"
        );
        assert!(
            done(&install(&world, &image, words)).contains("nothing to do"),
            "{fixture}: twice is once"
        );
        done(&world.remove(&[]));
        assert_eq!(world.snapshot(), before, "{fixture}");
    }
}

#[test]
fn an_image_stays_until_another_or_an_initrd_takes_its_place() {
    let world = World::new("image-upgrade", "go-qemu-nvidia-gpu");
    let Some(root) = erofs(&world, &guest_of_disk()) else {
        return;
    };
    let (one, verity) = with_tree(&world, "one.image", &root);
    let two = disk(&world, "two.image", &root, false);
    let get = |key: &str| world.key(Runtime::Go, "qemu", key);
    let said = world.install(&["--param", "gpuinit.log=debug"]);
    assert!(
        said.code == 1 && said.err.contains("--image"),
        "an image of somebody else is none to keep: {}",
        said.err
    );
    done(&install(&world, &one, &["--verity", &verity]));
    done(&world.install(&["--param", "gpuinit.log=debug"]));
    let now = || ["image", "kernel_verity_params", "rootfs_type"].map(get);
    assert_eq!(now()[..2], [one.to_str().unwrap(), &verity]);
    done(&install(&world, &two, &[]));
    // The other image's hash does not stay.
    assert_eq!(now(), [two.to_str().unwrap(), "", "erofs"]);
    done(&world.install_initrd(&[]));
    assert_eq!(
        [get("image"), get("initrd")],
        ["", world.initrd.to_str().unwrap()]
    );
    assert_eq!(get("rootfs_type"), "erofs", "the configuration's own again");
    assert!(
        get("kernel_params").ends_with(" gpuinit.log=debug"),
        "{}",
        get("kernel_params")
    );
    done(&install(&world, &one, &[]));
    assert_eq!([get("image"), get("initrd")], [one.to_str().unwrap(), ""]);
}

#[test]
fn a_second_partition_that_nobody_uses_is_noted() {
    let world = World::new("image-note", "rust-qemu-nvidia-gpu");
    let Some(root) = erofs(&world, &guest_of_disk()) else {
        return;
    };
    let (image, verity) = with_tree(&world, "gpu.image", &root);
    let dry = |words: &[&str]| {
        let said = install(&world, &image, &[&["--dry-run"], words].concat());
        done(&said).to_string()
    };
    assert!(dry(&[]).contains("note: the image has a second partition"));
    assert!(!dry(&["--verity", &verity]).contains("note: "));
}

#[test]
fn parameters_beside_an_image_are_taken_if_they_are_its_own() {
    let world = World::new("image-beside", "rust-qemu-nvidia-gpu");
    let Some(root) = erofs(&world, &guest_of_disk()) else {
        return;
    };
    let (image, verity) = with_tree(&world, "gpu.image", &root);
    let beside = world.root().join("gpu.image.verity");
    let get = || world.key(Runtime::Rust, "qemu", "kernel_verity_params");
    write(&beside, format!("{verity}\n"));
    done(&install(&world, &image, &[]));
    assert_eq!(get(), verity);
    // On a node, the copy has the parameters of its source.
    let node = world.root().join("node");
    done(&install(
        &world,
        &image,
        &["--node", node.to_str().unwrap()],
    ));
    let copy = world.key(Runtime::Rust, "qemu", "image");
    assert!(
        copy.contains("node/gpu-sha256-") && get() == verity,
        "{copy}"
    );
    done(&install(&world, &image, &[]));
    // The option goes before the file.
    write(&beside, "root_hash=00ff");
    assert!(done(&install(&world, &image, &["--verity", &verity])).contains("nothing to do"));
    let refused = |words: &[&str], place: &str, why: &str| {
        let said = world.install(words);
        assert!(
            said.code == 1
                && said
                    .err
                    .contains(&format!("refused: {place}: kernel_verity_params"))
                && said.err.contains(why)
                && said
                    .err
                    .contains("image replace-init --verity, and give it with --image"),
            "{}",
            said.err
        );
        assert_eq!(get(), verity, "nothing was written");
    };
    let given = ["--image", image.to_str().unwrap()];
    let file = beside.to_str().unwrap();
    refused(&given, file, "root_hash has 4 digits");
    write(&beside, verity.replace("salt=ab", "salt=ac"));
    refused(&given, file, "the parameters are of another image");
    // An image that was made again under its name, and the parameters in the drop-in.
    let mut changed = crate::bytes(&image);
    changed[4096 + 5000] ^= 1;
    write(&image, changed);
    refused(
        &[],
        world.ours().to_str().unwrap(),
        "the parameters are of another image",
    );
}

#[test]
fn a_configuration_without_a_hash_gets_one_with_a_note() {
    let world = World::new("image-first-hash", "rust-clh");
    let Some(root) = erofs(&world, &guest_of_disk()) else {
        return;
    };
    let (image, verity) = with_tree(&world, "gpu.image", &root);
    let note = "note: kernel_verity_params is new here: the kernel needs dm-verity and dm-init";
    assert!(done(&install(&world, &image, &["--verity", &verity])).contains(note));
    done(&world.remove(&[]));
    assert!(!done(&install(&world, &image, &[])).contains(note));
}

#[test]
fn what_cannot_work_is_refused_with_the_cure() {
    let world = World::new("image-refused", "go-qemu-nvidia-gpu");
    let Some(root) = erofs(&world, &guest_of_disk()) else {
        return;
    };
    let image = disk(&world, "gpu.image", &root, false);
    let unread = disk(&world, "ext4.image", &ext4(), false);
    let bare = world.root().join("bare");
    write(&bare, &crate::bytes(&image)[4096..]);
    let old = ["--kata-version", "3.27.0"];
    let none = world.root().join("none");
    let (other, verity) = with_tree(&world, "other.image", &root);
    let wrong = verity.replace("salt=ab", "salt=");
    let cases: [(&Path, &[&str], bool, &str); 8] = [
        (&unread, &[], true, "cannot be checked: its root is ext4"),
        (
            &world.initrd,
            &[],
            false,
            "is not an image for Kata: it is an initrd, or compressed; give it with --initrd",
        ),
        (
            &bare,
            &[],
            true,
            "a file system without a partition table, and Kata's guests mount the first partition",
        ),
        (
            &world.config,
            &[],
            false,
            "is not an image for Kata: it is nothing that is known, and no disk with erofs or ext4",
        ),
        (&none, &[], false, "there is no such image"),
        (
            &image,
            &["--verity", &verity],
            false,
            "no second partition, where Kata expects the hash",
        ),
        (&other, &["--verity", &wrong], false, "salt is missing"),
        (
            &image,
            &["--param", "init=/bin/NVRC"],
            true,
            "the kernel would start this program of the image instead of /sbin/init",
        ),
    ];
    for (given, words, forcible, says) in cases {
        let before = world.snapshot();
        let said = install(&world, given, &[words, &old].concat());
        assert!(
            said.code == 1 && said.err.contains(says),
            "{says}: {}{}",
            said.out,
            said.err
        );
        assert_eq!(
            (
                world.snapshot() == before,
                said.err.contains("(or --force)")
            ),
            (true, forcible),
            "{says}: {}",
            said.err
        );
    }
    let said = world.install(&["--initrd", image.to_str().unwrap()]);
    assert!(
        said.err.contains("a disk image: not an initrd")
            && said.err.contains("; give it with --image"),
        "{}",
        said.err
    );
    // The control: the same image, with nothing wrong about it.
    world.edit("pci=nocrs", "init=/sbin/init rdinit=/elsewhere");
    done(&install(&world, &image, &old));
    // A key that this Kata's runtime would fail on.
    let world = World::new("image-old", "go-clh");
    let said = install(
        &world,
        &disk(&world, "gpu.image", &root, false),
        &["--kata-version", "3.0.0"],
    );
    assert!(
        said.err.contains("rootfs_type") && said.err.contains("known from 3.1.0 on"),
        "{}",
        said.err
    );
}

#[test]
fn a_hash_that_is_given_up_is_noted_and_refused_for_a_confidential_guest() {
    let world = World::new("image-hash", "go-qemu-nvidia-gpu");
    let Some(root) = erofs(&world, &guest_of_disk()) else {
        return;
    };
    let (image, verity) = with_tree(&world, "gpu.image", &root);
    let note = "note: kernel_verity_params is of the former image and is emptied";
    let verity = ["--dry-run", "--verity", &verity];
    assert!(done(&install(&world, &image, &["--dry-run"])).contains(note));
    assert!(done(&world.install_initrd(&["--dry-run"])).contains(note));
    assert!(!done(&install(&world, &image, &verity)).contains(note));
    // The note stays as long as the configuration has a hash that is not used.
    done(&install(&world, &image, &[]));
    assert!(done(&install(&world, &image, &[])).contains(note));
    let without = World::new("image-no-hash", "go-clh");
    let other = disk(&without, "gpu.image", &root, false);
    assert!(!done(&install(&without, &other, &["--dry-run"])).contains("note: kernel_verity"));
    // A confidential guest of which nothing measures the root.
    world.edit("rootless", "confidential_guest = true\nrootless");
    let unmeasured = "no measurement covers this confidential guest's root";
    let refused = install(&world, &image, &["--dry-run"]);
    assert!(
        refused.code == 1 && refused.err.contains(unmeasured),
        "{}",
        refused.err
    );
    let measured = install(&world, &image, &verity);
    assert!(
        measured.code == 1 && !measured.err.contains(unmeasured),
        "its measurement is another all the same: {}",
        measured.err
    );
}

#[test]
fn an_image_is_verified_and_needs_a_driver_from_somewhere() {
    let said = |world: &World, guest: &[Made]| {
        let root = erofs(world, guest)?;
        let image = disk(world, "gpu.image", &root, true);
        Some((image.clone(), install(world, &image, &["--dry-run"])))
    };
    let world = World::new("image-verified", "go-qemu-nvidia-gpu");
    let mut broken = guest_of_disk();
    broken.retain(|made| !made.name.ends_with(b"/libc.so.6"));
    let Some((image, of_broken)) = said(&world, &broken) else {
        return;
    };
    assert_eq!(of_broken.code, 1, "{}", of_broken.out);
    let wanted = "gpu.image: library-missing /usr/bin/kata-agent: libc.so.6";
    assert!(of_broken.err.contains(wanted), "{}", of_broken.err);
    // The same verdict as that of `image verify`.
    let mut verify = std::process::Command::new(crate::collect::program());
    let verify = verify.args(["image", "verify"]).arg(&image).output();
    let page = String::from_utf8(verify.unwrap().stdout).unwrap();
    assert!(page.contains("library-missing"), "{page}");
    // An agent that is there, and nothing else of a guest with GPUs.
    let bare = without_driver(guest_of_disk());
    let none = "no part of NVIDIA's driver is in the image, and no extension image \"gpu\"";
    let (_, of_bare) = said(&world, &bare).unwrap();
    assert!(
        of_bare.code == 1 && of_bare.err.contains(none),
        "{}{}",
        of_bare.out,
        of_bare.err
    );
    // runtime-rs' configuration has that disk.
    let world = World::new("image-extension", "rust-qemu-nvidia-gpu");
    let (_, of_extension) = said(&world, &bare).unwrap();
    assert!(done(&of_extension).contains("verified: 0 errors"));
    // An initrd takes its driver from no disk.
    let initrd = world.root().join("bare.cpio");
    write(&initrd, archive(&without_driver(guest())));
    let of_initrd = world.install(&["--initrd", initrd.to_str().unwrap()]);
    assert!(
        of_initrd.err.contains("driver is in the initrd"),
        "{}{}",
        of_initrd.out,
        of_initrd.err
    );
}

#[test]
fn a_driver_in_a_root_of_its_own_is_found_as_the_init_finds_it() {
    let world = World::new("driver-root", "go-qemu-nvidia-gpu");
    let mut moved = guest();
    for made in &mut moved {
        let name = String::from_utf8(made.name.clone()).unwrap();
        let own = ["usr/lib/modules", "usr/lib/firmware"]
            .iter()
            .any(|part| name.starts_with(part));
        if own {
            made.name = name.replacen("usr/lib", "srv/driver/lib", 1).into();
        }
    }
    let folders = ["srv", "srv/driver", "srv/driver/lib"].map(directory);
    let moved = [folders.into(), moved].concat();
    write(&world.initrd, archive(&moved));
    let refused = world.install_initrd(&["--dry-run"]);
    assert!(refused.err.contains("no-modules"), "{}", refused.err);
    let named = ["--param", "gpuinit.driver-root=/srv/driver", "--dry-run"];
    assert!(done(&world.install_initrd(&named)).contains("verified: 0 errors"));
    // A root that the init knows, by its list.
    let known = moved.iter().cloned().map(|made| {
        let name = String::from_utf8(made.name.clone()).unwrap();
        let name = name.replacen("srv/driver", "opt/nvidia", 1);
        let name = if name == "srv" { "opt".into() } else { name };
        Made {
            name: name.into(),
            ..made
        }
    });
    let of_list = "opt/nvidia/usr opt/nvidia/usr/share opt/nvidia/usr/share/kata-gpu-init";
    let known: Vec<Made> = known
        .chain(of_list.split(' ').map(directory))
        .chain([file(
            "opt/nvidia/usr/share/kata-gpu-init/driver-files.json",
            "{}",
        )])
        .collect();
    write(&world.initrd, archive(&known));
    let said = world.install_initrd(&["--dry-run"]);
    assert!(
        done(&said).contains("verified: 0 errors, 1 warning"),
        "a list of another state: {}",
        said.out
    );
}

#[test]
fn a_guest_that_was_deleted_after_its_install_stops_new_pods() {
    let world = World::new("image-deleted", "go-qemu-nvidia-gpu");
    let Some(root) = erofs(&world, &guest_of_disk()) else {
        return;
    };
    let image = disk(&world, "gpu.image", &root, false);
    let stops = |said: &Report, key: &str| {
        let why = format!(
            ": there is no such {key}, and the configuration names it: new pods cannot start; put \
             it back, give another with --{key}, or undo it with install --remove"
        );
        assert!(said.code == 1 && said.err.contains(&why), "{}", said.err);
    };
    done(&install(&world, &image, &[]));
    std::fs::remove_file(&image).unwrap();
    stops(&world.install(&["--dry-run"]), "image");
    stops(&install(&world, &image, &["--dry-run"]), "image");
    // Control: the configuration does not name this one.
    let other = install(&world, &world.root().join("none"), &["--dry-run"]);
    assert!(!other.err.contains("new pods"), "{}", other.err);
    done(&world.install_initrd(&[]));
    std::fs::remove_file(&world.initrd).unwrap();
    stops(&world.install(&["--dry-run"]), "initrd");
}

#[test]
fn initrd_excludes_image_and_a_hash_needs_an_image() {
    let words = |words: &[&str]| {
        from_words::<Args>(&[&["--kata-config", "c"], words].concat())
            .map(|_| ())
            .unwrap_err()
    };
    assert!(words(&["--initrd", "a", "--image", "b"]).contains("cannot be used with"));
    assert!(words(&["--verity", "b"]).contains("--image"));
    assert!(words(&["--initrd", "a", "--verity", "b"]).contains("cannot be used with"));
}
