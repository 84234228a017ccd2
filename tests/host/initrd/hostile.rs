//! A failure means that a damaged or hostile image crashes or stalls a reader, drives a terminal,
//! gets something written outside, or is taken where the kernel would not take it.

use crate::TempDir;
use crate::initrd::repack::Case;
use crate::initrd::{archive, directory, entries, file, gzip, image, link, made};
use kata_gpu_image::images::image::Image;
use kata_gpu_image::images::unpacked_root::{LeftOut, Tree};
use kata_gpu_image::images::verify;
use kata_gpu_image::images::verify::{Question, verify_text};
use kata_gpu_image::images::{diff, ls};
use kata_gpu_report::data::text::Screen;
use kata_gpu_report::data::text::ascii_json;
use kata_gpu_test_support::elf_stand_in as stand_in;

fn error(bytes: &[u8]) -> String {
    format!(
        "{:#}",
        image(bytes)
            .map(|(image, _)| image.entries.len())
            .unwrap_err()
    )
}

/// Everything that reads an image.
fn look(image: &Image, tree: &Tree) -> String {
    let report = verify::check(image, tree, &Question::default());
    let mut text = verify_text::page(&report, &Screen::PLAIN);
    text.push_str(&ascii_json(&report.json()).unwrap());
    text.push_str(&ls::text(image, &[], &Screen::PLAIN).0);
    text.push_str(&ascii_json(&ls::json(image, &[])).unwrap());
    text.push_str(&diff::text(
        &diff::differences(tree, tree, true).unwrap(),
        &Screen::PLAIN,
    ));
    text
}

fn small() -> Vec<u8> {
    archive(&[
        directory("lib"),
        made(
            "init",
            0o100_755,
            stand_in::program("/lib/ld.so", &["libc.so.6"], Some("$ORIGIN")),
        ),
        link("lib/x", "../init"),
        made("dev", 0o020_600, ""),
        file("lib/libc.so.6", stand_in::library(Some("libc.so.6"), &[])),
    ])
}

#[test]
fn an_image_that_is_cut_is_refused_wherever_it_ends() {
    let good = small();
    let whole = image(&good).unwrap().0.entries.len();
    // Steps of three meet every place within a word.
    for length in (0..good.len()).step_by(3) {
        match image(&good[..length]) {
            Err(error) => assert!(!format!("{error:#}").is_empty()),
            // Between two entries: the kernel takes that, and verify says that the end is missing.
            Ok((image, tree)) => {
                assert!(
                    image.entries.len() <= whole && image.parts.iter().any(|p| !p.ended),
                    "{length}"
                );
                assert!(look(&image, &tree).contains("no-trailer"), "{length}");
            }
        }
    }
    let packed = gzip(&good);
    for length in (0..packed.len()).step_by(3) {
        assert!(
            image(&packed[..length]).is_err(),
            "{length} of {} bytes",
            packed.len()
        );
    }
}

#[test]
fn no_changed_byte_does_harm() {
    let good = small();
    let (whole, _) = image(&good).unwrap();
    let (mut read, mut refused) = (0, 0);
    // Headers, names and targets; what is in files, others test.
    for entry in &whole.entries {
        let start = entry.range.start as usize;
        for at in start..start + 110 + entry.name.len() + 1 + entry.target.len() {
            for byte in [b'f', 0xff] {
                let mut bytes = good.clone();
                bytes[at] = byte;
                match image(&bytes) {
                    Ok((image, tree)) => {
                        read += 1;
                        let report = verify::check(&image, &tree, &Question::default());
                        assert!(!verify_text::page(&report, &Screen::PLAIN).is_empty());
                    }
                    Err(_) => refused += 1,
                }
            }
        }
    }
    assert!(
        read > 100 && refused > 500,
        "{read} read, {refused} refused"
    );
}

#[test]
fn what_the_kernel_would_not_take_is_refused_with_the_reason() {
    let good = small();
    let header = |change: fn(&mut kata_gpu_image::images::newc::Header)| {
        let mut one = file("x", "1");
        change(&mut one.header);
        let mut bytes = one.header.bytes();
        bytes.extend(b"x\0");
        bytes.resize(112, 0);
        [bytes, vec![0; 64]].concat()
    };
    // A name with a NUL, and these bytes behind it.
    let hidden = |rest: &[u8]| {
        let mut bytes = header(|h| (h.name_size, h.size) = (5, 1));
        bytes[111] = 0;
        bytes[112..115].copy_from_slice(rest);
        bytes
    };
    let mut extra = gzip(&good);
    extra[3] |= 4;
    let mut named = gzip(&good);
    named[3] |= 8;
    named.splice(10..10, *b"name\0");
    assert_eq!(
        image(&named).unwrap().0.entries.len(),
        5,
        "a file name in the header is stepped over"
    );
    let disk = |at: usize, magic: &[u8]| [vec![0; at], magic.to_vec(), vec![0; 64]].concat();
    for (bytes, part) in [
        (Vec::new(), "it is empty"),
        (vec![0; 1000], "there is no entry"),
        (archive(&[]), "there is no entry"),
        (b"#!/bin/sh\n".to_vec(), "neither a newc archive nor gzip"),
        (
            disk(512, &[0x55, 0xaa]),
            "byte 512: neither a newc archive nor gzip",
        ),
        (
            b"\xfd7zXZ\0...".to_vec(),
            "xz: a Kata guest's kernel unpacks gzip and nothing else",
        ),
        (
            vec![0x28, 0xb5, 0x2f, 0xfd, 0],
            "zstd: a Kata guest's kernel",
        ),
        (b"070707".repeat(40), "an old cpio format"),
        (
            disk(1024, &[0xe2, 0xe1, 0xf5, 0xe0]),
            "it is an erofs file system, a disk image: not an initrd (`kata-gpu-boot install \
             --image`",
        ),
        (
            disk(1080, &[0x53, 0xef]),
            "it is an ext4 file system, a disk image",
        ),
        (disk(257, b"ustar"), "it is a tar archive: not an initrd"),
        (
            gzip(&disk(257, b"ustar")),
            "what is unpacked there is a tar archive",
        ),
        (
            gzip(&[disk(257, b"ustar"), vec![7; 2 << 20]].concat()),
            "what is unpacked is a tar archive",
        ),
        (
            gzip(&vec![7; 2 << 20]),
            "what is unpacked is no newc archive",
        ),
        (
            gzip(&vec![0; 2 << 20]),
            "begins with more than 1048576 zeros",
        ),
        (
            [good.clone(), b"junk".to_vec()].concat(),
            "neither a newc archive nor gzip",
        ),
        ([vec![0; 2], good.clone()].concat(), "multiple of 4"),
        (
            gzip(&[good.clone(), b"junk".to_vec()].concat()),
            "neither the beginning of an entry nor zero",
        ),
        (gzip(&[vec![0; 1], good.clone()].concat()), "multiple of 4"),
        (extra, "compress it with gzip -n"),
        (
            [gzip(&good), b"x".to_vec()].concat(),
            "neither a newc archive nor gzip",
        ),
        (header(|h| h.name_size = 0), "an entry without a name"),
        (
            header(|h| (h.name_size, h.size) = (2, u32::MAX)),
            "the file is cut, or the header wrong",
        ),
        (
            header(|h| h.name_size = u32::MAX),
            "the file is cut, or the header wrong",
        ),
        (
            header(|h| (h.name_size, h.size) = (1, 1)),
            "a name without its end",
        ),
        (hidden(b"hid"), "a name without its end"),
        (hidden(b"hi\0"), "goes on behind its end"),
    ] {
        let error = error(&bytes);
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn what_the_kernel_leaves_out_is_left_out_and_listed() {
    let long = "x".repeat(4096);
    let mut full = directory("full");
    full.data = b"data".to_vec();
    full.header.size = 4;
    let mut lost = file("lost", "");
    (lost.header.nlink, lost.header.ino) = (2, 9);
    let mut first = lost.clone();
    first.name = b"first".to_vec();
    let bytes = entries(&[
        directory("d"),
        file("d/in", "1"),
        file("none/x", "2"),
        file("d", "a directory that is not empty stays"),
        link("toolong", &long.clone().repeat(2)),
        full,
        made("odd", 0o150_644, ""),
        first,
        link("first", "elsewhere"),
        lost,
        file("/abs", "3"),
        file("../../up", "4"),
        file("d/./in", "5"),
    ]);
    let (image, tree) = image(&[bytes, archive(&[])].concat()).unwrap();
    let reported: Vec<(usize, LeftOut)> = tree.left_out.clone();
    use LeftOut::*;
    assert_eq!(
        reported,
        [
            (2, NoDirectory),
            (3, DirectoryNotEmpty),
            (4, TooLong),
            (5, DirectoryWithData),
            (6, UnknownType),
            (9, LinkToNothing)
        ]
    );
    let read = |path: &str| {
        tree.find(path)
            .and_then(|id| tree.content(id))
            .map(|c| String::from_utf8(c.bytes(100).unwrap()).unwrap())
    };
    assert_eq!(
        (
            read("abs").as_deref(),
            read("up").as_deref(),
            read("d/in").as_deref()
        ),
        (Some("3"), Some("4"), Some("5"))
    );
    assert_eq!(tree.find_no_follow("lost"), None);
    let text = look(&image, &tree);
    for rule in ["left-out", "odd-name", "again"] {
        assert!(text.contains(rule), "{rule}: {text}");
    }
}

#[test]
fn links_in_a_circle_and_deep_ones_end() {
    let mut all = vec![
        link("a", "b"),
        link("b", "a"),
        link("self", "self/x"),
        file("a/x", ""),
    ];
    // 2^60 steps for who follows them without counting.
    all.push(directory("d0"));
    for n in 1..60 {
        all.push(directory(&format!("d{n}")));
        all.push(link(
            &format!("d{n}/l"),
            &format!("../d{}/l/../d{}/l", n - 1, n - 1),
        ));
    }
    (0..2000).for_each(|n| all.push(file(&format!("d59/l/{n}"), "")));
    let mut deep = String::from("p");
    for _ in 0..1000 {
        all.push(directory(&deep));
        deep.push_str("/p");
    }
    // A second here; without bounds, never.
    let (image, tree) = image(&archive(&all)).unwrap();
    assert_eq!(tree.find("a"), None);
    assert!(look(&image, &tree).contains("left-out"));
}

#[test]
fn a_path_that_no_process_could_name_is_refused() {
    // Each link leads a hundred bytes deeper than the one before.
    let step = "s".repeat(100);
    let mut all = vec![directory(&step), link("l0", &step)];
    for n in 1..50 {
        all.push(directory(&format!("l{}/{step}", n - 1)));
        all.push(link(&format!("l{n}"), &format!("l{}/{step}", n - 1)));
    }
    assert!(image(&archive(&all[..60])).is_ok());
    // The links themselves end at forty, as in the kernel: then nothing is there to go deeper.
    assert!(error(&archive(&deeper(&step))).contains("more than 4095 bytes"));
}

/// The same with few links on each way: every link's target is a path of its own.
fn deeper(step: &str) -> Vec<crate::initrd::Made> {
    let mut all = Vec::new();
    let mut base = String::new();
    for n in 0..4 {
        let mut path = base.clone();
        for _ in 0..15 {
            path = if path.is_empty() {
                step.to_string()
            } else {
                format!("{path}/{step}")
            };
            all.push(directory(&path));
        }
        base = format!("b{n}");
        all.push(link(&base, &path));
    }
    all
}

#[test]
fn names_of_no_end_are_refused() {
    // 64 MB of names: each may be a page long.
    let name = "n".repeat(4000);
    let one = entries(&[directory(&name)]);
    let bytes: Vec<u8> = one
        .iter()
        .copied()
        .cycle()
        .take(one.len() * 17_000)
        .collect();
    assert!(
        error(&bytes).contains("names of more than"),
        "{}",
        error(&bytes)
    );
}

#[test]
fn nothing_in_an_image_drives_a_terminal() {
    let evil = "\u{1b}[2J\u{9b}31m\u{202e}\r\n";
    let mut raw = file("x", "");
    raw.name = [b"\xff\x1b]0;".as_slice(), evil.as_bytes()].concat();
    let all = [
        raw,
        link(evil, evil),
        file(&format!("none/{evil}"), ""),
        directory("lib"),
        directory("lib/modules"),
        directory(&format!("lib/modules/{evil}")),
        file(
            &format!("lib/modules/{evil}/modules.dep"),
            format!("{evil}.ko: other{evil}.ko\nnvidia.ko: {evil}\n"),
        ),
        file(
            &format!("lib/modules/{evil}/nvidia.ko"),
            stand_in::module(
                format!("version={evil}\0vermagic={evil}\0firmware={evil}").as_bytes(),
            ),
        ),
        made(
            "init",
            0o104_777,
            stand_in::program(evil, &[evil], Some(evil)),
        ),
        made("script", 0o100_755, format!("#!{evil}")),
    ];
    let (a, tree) = image(&archive(&all)).unwrap();
    let (_, other) = image(&archive(&all[3..5])).unwrap();
    let changes = diff::differences(&tree, &other, true).unwrap();
    let text = look(&a, &tree)
        + &diff::text(&changes, &Screen::PLAIN)
        + &ascii_json(&diff::json(&changes)).unwrap();
    let report = verify::check(
        &a,
        &tree,
        &Question {
            init: format!("/script{evil}"),
            ..Question::default()
        },
    );
    let json = ascii_json(&report.json()).unwrap();
    let text = text
        + &json
        + &verify_text::page(
            &report,
            &Screen {
                width: Some(80),
                colour: false,
            },
        );
    assert!(
        text.contains("\\x1b[2J") && text.contains("\\xff"),
        "{text}"
    );
    crate::assert_printable(&text);
}

#[test]
fn nothing_is_written_outside() {
    let dir = TempDir::new("initrd-outside");
    let outside = dir.0.join("outside");
    crate::make_dir(&outside);
    crate::write(outside.join("kept"), "as it was");
    let outside_name = outside.to_str().unwrap().trim_start_matches('/');
    let mut all = Vec::new();
    // The image has the same path as the directory outside: links lead to it in the guest, and must
    // not on the host.
    for (end, _) in format!("{outside_name}/").match_indices('/') {
        all.push(directory(&outside_name[..end]));
    }
    all.extend([
        directory("usr"),
        link("esc", outside.to_str().unwrap()),
        link("usr/share", outside.to_str().unwrap()),
        file("esc/written", "x"),
        file(&format!("{}{outside_name}/up", "../".repeat(30)), "x"),
        file(&format!("/{outside_name}/kept"), "changed"),
        directory("lib"),
        file(
            "lib/libcuda.so.550.163.01",
            stand_in::library(Some("libcuda.so.1"), &[]),
        ),
    ]);
    let case = Case::new("outside", &archive(&all));
    let (done, ..) = case.repack(|_| ()).unwrap();
    assert_eq!(done.new.manifest, Ok(1));
    // In the guest the list is where its links lead.
    let list = format!("/{outside_name}/kata-gpu-init/driver-files.json");
    let paths: Vec<_> = done
        .new
        .differences
        .iter()
        .map(|d| String::from_utf8_lossy(&d.path))
        .collect();
    assert!(paths.iter().any(|path| *path == list), "{paths:?}");
    assert_eq!(crate::names(&outside), ["kept"]);
    assert_eq!(crate::bytes(outside.join("kept")), b"as it was");
}
