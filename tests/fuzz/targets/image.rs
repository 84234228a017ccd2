//! A failure means that some disk image or initrd crashes a reader, keeps it in a loop or takes
//! memory without bound, or that replacing the init of an erofs image changes what else can be read
//! of it.

#![no_main]

use kata_gpu_image::guest_disk as disk;
use kata_gpu_image::images::diff;
use kata_gpu_image::images::disk_image::erofs::Erofs;
use kata_gpu_image::images::disk_image::{erofs_edit, read_all, wanted};
use kata_gpu_image::images::image::{Content, Image};
use kata_gpu_image::images::unpacked_root::Tree;
use std::rc::Rc;

/// Contents that are read, so that one input does not take a second.
const MAX_READ: u64 = 1 << 20;

fn content(bytes: Vec<u8>) -> Content {
    let length = bytes.len() as u64;
    Content::of(Rc::new(bytes), length)
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((first, bytes)) = bytes.split_first() else {
        return;
    };
    // Small inputs stand for larger images: zeros behind them.
    let mut image = bytes.to_vec();
    image.resize(bytes.len() + usize::from(first >> 2) * 4096, 0);
    let length = image.len() as u64;
    if let Ok(Ok(disk)) = disk::look(image.as_slice(), length) {
        assert!(disk.root_at + disk.root_bytes <= length);
    }
    match first & 3 {
        0 => initrd(bytes),
        1 => {
            if let Ok((image, tree)) = read_all(content(image)) {
                read(&image);
                let _unused = wanted::sbin(&tree);
            }
        }
        _ => erofs(image),
    }
});

fn read(image: &Image) {
    for entry in image
        .entries
        .iter()
        .filter(|entry| entry.data.length <= MAX_READ)
    {
        let _unused = entry.data.bytes(MAX_READ);
    }
}

fn erofs(mut bytes: Vec<u8>) {
    let Ok(fs) = Erofs::read(content(bytes.clone()), None) else {
        return;
    };
    read(&fs.image);
    let Ok(tree) = Tree::new(&fs.image) else {
        return;
    };
    let Ok(sbin) = wanted::sbin(&tree) else {
        return;
    };
    if wanted::check_list_place(&tree).is_err() {
        return;
    }
    let wanted = wanted::Wanted {
        init: b"init",
        sbin,
        helper: Some(b"helper"),
        list: Some(b"list"),
    };
    let Ok(edit) = erofs_edit::edit(&fs, &tree, &wanted) else {
        return;
    };
    bytes.truncate(edit.at as usize);
    bytes.resize(edit.bytes() as usize, 0);
    for (at, new) in edit.patches.iter().chain([(&edit.at, &edit.added)]) {
        bytes[*at as usize..*at as usize + new.len()].copy_from_slice(new);
    }
    // Inodes that overlap what they describe can make an image that is none: that is refused where
    // it is read again.
    let Ok(new) = Erofs::read(content(bytes), Some((&fs, edit.at))) else {
        return;
    };
    let Ok(new_tree) = Tree::new(&new.image) else {
        return;
    };
    let _unused = diff::differences(&tree, &new_tree, true);
}

fn initrd(bytes: &[u8]) {
    let path = std::env::temp_dir().join(format!("kata-gpu-fuzz-image-{}", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    if let Ok(image) = Image::open(&path) {
        read(&image);
        let _unused = Tree::new(&image);
    }
}
