//! A failure means that `install --image` writes a drop-in which one of the runtimes reads
//! otherwise, keeps a hash of another image, or cannot be undone.

use crate::install::{World, done, from_words};
use crate::{golden, write};
use kata_gpu_boot::install::Args;
use kata_gpu_image::install::Report;
use kata_gpu_image::kata::merge::Runtime;
use std::path::{Path, PathBuf};

const VERITY: &str =
    "root_hash=00ff,salt=ab,data_blocks=2,data_block_size=4096,hash_block_size=4096";
const EROFS: (usize, &[u8]) = (1024, &[0xe2, 0xe1, 0xf5, 0xe0]);
const EXT4: (usize, &[u8]) = (1080, &[0x53, 0xef]);

/// A disk with an MBR, and a root of 8 KiB in its first partition, of which the magic number and a
/// word of the init are all that there is.
fn disk(world: &World, name: &str, magic: (usize, &[u8]), has_second: bool) -> PathBuf {
    let mut bytes = vec![0; 4096 + 8192];
    let mut put = |at: usize, what: &[u8]| bytes[at..at + what.len()].copy_from_slice(what);
    put(510, &[0x55, 0xaa]);
    put(450, &[0x83]);
    put(454, &8_u32.to_le_bytes());
    put(458, &16_u32.to_le_bytes());
    put(466, &[if has_second { 0x83 } else { 0 }]);
    put(4096 + magic.0, magic.1);
    put(4096 + 5000, kata_gpu_init::cdi::spec::PENDING.as_bytes());
    let path = world.root().join(name);
    write(&path, bytes);
    path
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
        // Another type of root than the configuration has, with a hash or without.
        let is_go = *runtime == Runtime::Go;
        let (image, words): (_, &[&str]) = if is_go {
            (
                disk(&world, "gpu.image", EXT4, false),
                &["--param", "gpuinit.log=debug"],
            )
        } else {
            (
                disk(&world, "gpu.image", EROFS, true),
                &["--verity", VERITY],
            )
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
        golden(&format!("install/image-{fixture}.txt"), &world.shown(&page));
        assert!(done(&dry).contains("+image = "), "{}", dry.out);
        // Never the hash of the image that was.
        let (kind, verity) = if is_go {
            ("ext4", "")
        } else {
            ("erofs", VERITY)
        };
        let keys = ["image", "initrd", "rootfs_type", "kernel_verity_params"];
        assert_eq!(
            keys.map(|key| world.key(*runtime, section, key)),
            [image.to_str().unwrap(), "", kind, verity],
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
    let (one, two) = (
        disk(&world, "one.image", EROFS, true),
        disk(&world, "two.image", EXT4, false),
    );
    let get = |key: &str| world.key(Runtime::Go, "qemu", key);
    let said = world.install(&["--param", "gpuinit.log=debug"]);
    assert!(
        said.code == 1 && said.err.contains("--image"),
        "an image of somebody else is none to keep: {}",
        said.err
    );
    done(&install(&world, &one, &["--verity", VERITY]));
    done(&world.install(&["--param", "gpuinit.log=debug"]));
    let now = || ["image", "kernel_verity_params", "rootfs_type"].map(get);
    assert_eq!(now()[..2], [one.to_str().unwrap(), VERITY]);
    done(&install(&world, &two, &[]));
    // The other image's hash does not stay.
    assert_eq!(now(), [two.to_str().unwrap(), "", "ext4"]);
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
    let image = disk(&world, "gpu.image", EROFS, true);
    assert!(
        done(&install(&world, &image, &["--dry-run"]))
            .contains("note: the image has a second partition")
    );
    assert!(!done(&install(&world, &image, &["--dry-run", "--verity", VERITY])).contains("note: "));
}

#[test]
fn what_cannot_work_is_refused_with_the_cure() {
    let world = World::new("image-refused", "go-qemu-nvidia-gpu");
    let image = disk(&world, "gpu.image", EXT4, false);
    let bare = world.root().join("bare");
    write(&bare, &crate::bytes(&image)[4096..]);
    let old = ["--kata-version", "3.27.0"];
    let none = world.root().join("none");
    let cases: [(&Path, &[&str], bool, &str); 7] = [
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
            &["--verity", VERITY],
            false,
            "no second partition, where Kata expects the hash",
        ),
        (
            &image,
            &["--verity", "root_hash=1"],
            false,
            "salt is missing",
        ),
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
        &disk(&world, "gpu.image", EROFS, false),
        &["--kata-version", "3.0.0"],
    );
    assert!(
        said.err.contains("rootfs_type") && said.err.contains("known from 3.1.0 on"),
        "{}",
        said.err
    );
}

#[test]
fn a_guest_that_was_deleted_after_its_install_stops_new_pods() {
    let world = World::new("image-deleted", "go-qemu-nvidia-gpu");
    let image = disk(&world, "gpu.image", EROFS, false);
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
