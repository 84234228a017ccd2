//! A failure means that `kata-gpu-boot image` packs the same files into other bytes, reads an
//! archive otherwise than cpio and the kernel do, or reports a wrong difference.

mod hash_tree;
mod hostile;
mod manifest;
mod other_architecture;
mod output;
pub mod repack;
mod replace_init;
pub mod verify;

use crate::{TempDir, chmod, make_dir};
use kata_gpu_image::images::diff;
use kata_gpu_image::images::image::{Form, Image};
use kata_gpu_image::images::ls;
use kata_gpu_image::images::newc::{Header, Kind, write_entry, write_trailer};
use kata_gpu_image::images::output_file::{Output, Written};
use kata_gpu_image::images::pack::{Packed, Packing, pack};
use kata_gpu_image::images::unpacked_root::Tree;
use kata_gpu_report::data::text::Screen;
use kata_gpu_wire::arch::Arch;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

/// An entry for [`archive`].
#[derive(Clone)]
pub struct Made {
    pub name: Vec<u8>,
    pub header: Header,
    pub data: Vec<u8>,
}

pub fn made(name: &str, mode: u32, data: impl AsRef<[u8]>) -> Made {
    let data = data.as_ref().to_vec();
    Made {
        name: name.into(),
        header: Header {
            mode,
            nlink: 1,
            size: data.len() as u32,
            ..Header::default()
        },
        data,
    }
}

pub fn file(name: &str, data: impl AsRef<[u8]>) -> Made {
    made(name, 0o100_644, data)
}

pub fn program(name: &str, data: impl AsRef<[u8]>) -> Made {
    made(name, 0o100_755, data)
}

pub fn directory(name: &str) -> Made {
    made(name, 0o040_755, "")
}

pub fn link(name: &str, target: &str) -> Made {
    made(name, 0o120_777, target)
}

/// A guest as a folder.
pub fn write(guest: &[Made], root: &Path) {
    make_dir(root);
    for made in guest.iter().filter(|made| made.name != b".") {
        let path = root.join(std::str::from_utf8(&made.name).unwrap());
        match Kind::of(made.header.mode) {
            Kind::Directory => make_dir(&path),
            Kind::Link => crate::link(std::str::from_utf8(&made.data).unwrap(), &path),
            _ => crate::write(&path, &made.data),
        }
        if Kind::of(made.header.mode) != Kind::Link {
            chmod(&path, made.header.mode & 0o7777);
        }
    }
}

/// The same ELF file, for another architecture.
pub fn for_arch(arch: Arch, mut file: Vec<u8>) -> Vec<u8> {
    if file.starts_with(b"\x7fELF") && file.len() > 20 {
        file[18..20].copy_from_slice(&arch.facts().elf_machine.to_le_bytes());
    }
    file
}

/// The entries without an end.
pub fn entries(all: &[Made]) -> Vec<u8> {
    let mut out = Vec::new();
    all.iter()
        .for_each(|m| write_entry(&mut out, &m.header, &m.name, &mut m.data.as_slice()).unwrap());
    out
}

/// A whole archive.
pub fn archive(all: &[Made]) -> Vec<u8> {
    let mut out = entries(all);
    write_trailer(&mut out).unwrap();
    out
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = Command::new("gzip")
        .args(["-n", "-1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("gzip");
    let mut stdin = gzip.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&bytes).unwrap());
    let output = gzip.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    output.stdout
}

/// An image of these bytes; the file may go afterwards.
pub fn image(bytes: &[u8]) -> anyhow::Result<(Image, Tree)> {
    let dir = TempDir::new(&format!("initrd-image-{:?}", std::thread::current().id()));
    let path = dir.0.join("image");
    crate::write(&path, bytes);
    let image = Image::open(&path)?;
    let tree = Tree::new(&image)?;
    Ok((image, tree))
}

pub fn packed(sources: &[&Path], form: Form, to: &Path) -> anyhow::Result<Written> {
    packed_as(
        sources,
        form,
        Packing {
            mtime: 0,
            manifest: true,
        },
        to,
    )
    .map(|(written, _)| written)
}

pub fn packed_as(
    sources: &[&Path],
    form: Form,
    packing: Packing,
    to: &Path,
) -> anyhow::Result<(Written, Packed)> {
    let sources: Vec<PathBuf> = sources.iter().map(|s| s.to_path_buf()).collect();
    let mut output = Output::create(to, form)?;
    let packed = pack(&sources, packing, &mut output)?;
    let mut written = output.end()?;
    written.keep()?;
    Ok((written, packed))
}

/// A root with everything that a directory can hold without privileges.
fn root(at: &Path, backwards: bool) {
    let mut steps: Vec<Box<dyn Fn()>> = Vec::new();
    for (name, text, mode) in [
        ("init", "#!/bin/sh\n", 0o755),
        ("etc/passwd", "root:x:0:0\n", 0o644),
        ("usr/bin/su", "x", 0o4755),
        ("empty", "", 0o600),
    ] {
        let path = at.join(name);
        steps.push(Box::new(move || {
            crate::write(&path, text);
            chmod(&path, mode);
        }));
    }
    for n in 0..50 {
        let path = at.join(format!("many/file-{n}"));
        steps.push(Box::new(move || {
            crate::write(&path, vec![n; usize::from(n) * 7]);
            chmod(&path, 0o644);
        }));
    }
    if backwards {
        steps.reverse();
    }
    steps.iter().for_each(|step| step());
    make_dir(at.join("var"));
    crate::link("../run", at.join("var/run"));
    std::fs::hard_link(at.join("init"), at.join("usr/bin/also-init")).unwrap();
    std::fs::hard_link(at.join("init"), at.join("zz-init")).unwrap();
    nix::unistd::mkfifo(
        &at.join("pipe"),
        nix::sys::stat::Mode::from_bits_truncate(0o600),
    )
    .unwrap();
    // A umask of this machine is none of the guest's.
    for directory in ["etc", "usr", "usr/bin", "many", "var"] {
        chmod(at.join(directory), 0o755);
    }
}

#[test]
fn two_builds_in_two_folders_give_the_same_bytes() {
    let dir = TempDir::new("initrd-same");
    let (a, b) = (dir.0.join("a"), dir.0.join("somewhere/else/b"));
    root(&a, false);
    root(&b, true);
    // With a driver, of which the list is made.
    for root in [&a, &b] {
        write(&verify::guest(), &root.join("guest"));
    }
    // Another time, another mode of the root itself: neither is the guest's.
    chmod(&b, 0o700);
    let old = SystemTime::now() - Duration::from_secs(1_000_000);
    std::fs::File::open(b.join("etc/passwd"))
        .unwrap()
        .set_modified(old)
        .unwrap();
    assert_ne!(
        std::fs::metadata(a.join("init")).unwrap().ino(),
        std::fs::metadata(b.join("init")).unwrap().ino()
    );
    let to = dir.0.join("image");
    let pack = |root: &Path, form, mtime| {
        let packing = Packing {
            mtime,
            manifest: true,
        };
        let (written, _) = packed_as(&[root], form, packing, &to).unwrap();
        let bytes = crate::bytes(&to);
        assert_eq!(bytes.len() as u64, written.bytes);
        (bytes, written.sha256.clone())
    };
    assert!(pack(&a, Form::Gzip, 0) == pack(&b, Form::Gzip, 0));
    let same = pack(&a, Form::Plain, 0);
    assert!(same == pack(&b, Form::Plain, 0));
    // The control: a time, one bit of a mode, and one byte more.
    assert!(same != pack(&a, Form::Plain, 7));
    chmod(b.join("empty"), 0o644);
    assert!(same != pack(&b, Form::Plain, 0));
    crate::write(a.join("empty"), "x");
    assert!(same != pack(&a, Form::Plain, 0));
}

/// Whether cpio is there; it must be where initrd/setup has run.
fn cpio_is_missing() -> bool {
    let missing = Command::new("cpio").arg("--version").output().is_err();
    if missing {
        crate::skip("KATA_GPU_BUILT", "no cpio here (initrd/setup installs it)");
    }
    missing
}

fn run(command: &mut Command, input: &[u8]) -> Vec<u8> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut stdin, input) = (child.stdin.take().unwrap(), input.to_vec());
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().unwrap();
    let _broken_pipe = writer.join().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}",
        crate::stderr(&output)
    );
    output.stdout
}

#[test]
fn cpio_unpacks_what_was_packed_and_packs_what_is_read() {
    if cpio_is_missing() {
        return;
    }
    let dir = TempDir::new("initrd-cpio");
    let (from, to) = (dir.0.join("from"), dir.0.join("to"));
    for path in [&from, &to] {
        make_dir(path);
    }
    root(&from, false);
    packed(&[&from], Form::Plain, &dir.0.join("ours")).unwrap();
    let ours = crate::bytes(dir.0.join("ours"));
    // Omit the owners: cpio keeps them as root, and the archive has root's.
    run(
        Command::new("cpio")
            .args(["-idmu", "--quiet", "--no-preserve-owner"])
            .current_dir(&to),
        &ours,
    );
    packed(&[&to], Form::Plain, &dir.0.join("unpacked")).unwrap();
    assert_eq!(
        crate::bytes(dir.0.join("unpacked")),
        ours,
        "packed, unpacked by cpio, packed"
    );
    let names = run(
        Command::new("find")
            .args([".", "-print0"])
            .current_dir(&from),
        b"",
    );
    let [plain, with_crc] = ["newc", "crc"].map(|form| {
        let words = ["-o0", "--quiet", "-H", form, "-R", "0:0"];
        run(Command::new("cpio").args(words).current_dir(&from), &names)
    });
    let (_, ours) = image(&ours).unwrap();
    chmod(&from, 0o755);
    for theirs in [&plain, &with_crc] {
        let (_, theirs) = image(theirs).unwrap();
        let differences: Vec<_> = diff::differences(&ours, &theirs, false).unwrap();
        let other: Vec<_> = differences.iter().filter(|d| d.path != b"/").collect();
        assert!(other.is_empty(), "{other:?}");
    }
    // The control: a sum that is wrong.
    let mut wrong = with_crc.clone();
    let at = wrong
        .windows(11)
        .position(|w| w == b"root:x:0:0\n")
        .unwrap();
    wrong[at] = b'R';
    assert!(format!("{:#}", image(&wrong).unwrap_err()).contains("the sum of its data"));
}

#[test]
fn a_list_says_what_a_directory_cannot() {
    let dir = TempDir::new("initrd-list");
    make_dir(dir.0.join("tree"));
    crate::write(dir.0.join("tree/inside"), "1");
    chmod(dir.0.join("tree/inside"), 0o640);
    crate::write(dir.0.join("program"), "2");
    let list = dir.0.join("list");
    let text = "dir / 0700\nfile /usr/bin/p 0755 program\nchar /dev/console 0600 5:1 # the kernel \
                opens it\nblock /dev/vda 0660 254:0\n\
                link /var/run ../run\nfifo /run/p 0622\ntree /opt/t tree\n";
    crate::write(&list, text);
    packed(&[&list], Form::Plain, &dir.0.join("out")).unwrap();
    let opened = Image::open(&dir.0.join("out")).unwrap();
    let (listing, count) = ls::text(&opened, &[], &Screen::PLAIN);
    let short = |line: &str| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        format!("{} {} {}\n", words[0], words[2], words[5])
    };
    let found: String = listing.lines().skip(1).map(short).collect();
    let wanted = "\
drwx------ 0 .
drwxr-xr-x 0 dev
crw------- 5,1 dev/console
brw-rw---- 254,0 dev/vda
drwxr-xr-x 0 opt
drwxr-xr-x 0 opt/t
-rw-r----- 1 opt/t/inside
drwxr-xr-x 0 run
prw--w--w- 0 run/p
drwxr-xr-x 0 usr
drwxr-xr-x 0 usr/bin
-rwxr-xr-x 1 usr/bin/p
drwxr-xr-x 0 var
lrwxrwxrwx 6 var/run
";
    assert_eq!((found.as_str(), count), (wanted, wanted.lines().count()));
    assert!(listing.ends_with("var/run -> ../run\n"), "{listing}");
}

#[test]
fn what_cannot_be_packed_is_refused_and_leaves_nothing() {
    let dir = TempDir::new("initrd-refused");
    make_dir(dir.0.join("root/usr/lib"));
    crate::link("usr/lib", dir.0.join("root/lib"));
    crate::write(dir.0.join("root/file"), "");
    let (out, list) = (dir.0.join("out"), dir.0.join("list"));
    for (text, part) in [
        // The kernel meets `lib/x` before `usr/lib`, and leaves it out.
        (
            "file /lib/x 0644 root/file",
            "lies in /lib, which is no directory",
        ),
        ("dir /file 0755", "/file comes from"),
        ("file /x 0644 missing", "missing in list"),
        ("tree /x root/file", "not a directory"),
        ("file /x 0644 root", "not a regular file"),
        ("char /x 0600 x", "list line 1: device"),
    ] {
        crate::write(&list, text);
        let error = format!(
            "{:#}",
            packed(&[&dir.0.join("root"), &list], Form::Plain, &out).unwrap_err()
        );
        let error = error.replace(&format!("{}/", dir.0.display()), "");
        assert!(error.contains(part), "{text}: {error}");
    }
    assert!(packed(&[&dir.0.join("none")], Form::Plain, &out).is_err());
    assert_eq!(crate::names(&dir.0), ["list", "root"]);
}

#[test]
fn a_difference_is_what_changed_and_nothing_else() {
    let base = vec![
        directory("etc"),
        file("etc/a", "1"),
        file("etc/b", "22"),
        link("etc/c", "a"),
        made("etc/d", 0o020_600, ""),
        file("etc/e", "5"),
        file("etc/f", "6"),
    ];
    let other = |change: &dyn Fn(&mut Vec<Made>)| {
        let mut all = base.clone();
        change(&mut all);
        let ((_, a), (_, b)) = (
            image(&archive(&base)).unwrap(),
            image(&archive(&all)).unwrap(),
        );
        diff::text(&diff::differences(&a, &b, false).unwrap(), &Screen::PLAIN)
    };
    // Order, inode numbers, and times that nobody asked for do not count.
    for change in [
        &(|_: &mut Vec<Made>| ()) as &dyn Fn(&mut Vec<Made>),
        &|all| all[1..].reverse(),
        &|all| all[2].header.ino = 7,
        &|all| all[2].header.mtime = 7,
    ] {
        assert_eq!(other(change), "no difference\n");
    }
    for (change, line) in [
        (
            &(|all: &mut Vec<Made>| all[1].header.mode = 0o104_755) as &dyn Fn(&mut Vec<Made>),
            "changed  /etc/a  mode rw-r--r-- -> rwsr-xr-x",
        ),
        (
            &|all| all[1].data = b"x".to_vec(),
            "changed  /etc/a  sha256 6b86b273ff34 -> 2d711642b726",
        ),
        (
            &|all| all[2] = file("etc/b", "333"),
            "changed  /etc/b  size 2 -> 3, sha256 785f3ec7eb32 -> 556d7dc3a115",
        ),
        (
            &|all| all[3] = link("etc/c", "b"),
            "changed  /etc/c  target a -> b",
        ),
        (
            &|all| all[3] = file("etc/c", ""),
            "changed  /etc/c  kind link -> file, mode rwxrwxrwx -> rw-r--r--",
        ),
        (
            &|all| all[4].header.rdev = (1, 3),
            "changed  /etc/d  device 0:0 -> 1:3",
        ),
        (
            &|all| all[5].header.gid = 5,
            "changed  /etc/e  owner 0/0 -> 0/5",
        ),
        (
            &|all| drop(all.remove(6)),
            "removed  /etc/f  -rw-r--r-- 1 bytes",
        ),
        (
            &|all| all.push(directory("etc/g")),
            "added  /etc/g  drwxr-xr-x",
        ),
    ] {
        let text = other(change);
        assert_eq!(text.lines().next(), Some(line), "{text}");
        assert_eq!(text.lines().count(), 2, "{text}");
    }
    let last = [&base[..], &[file("etc/f", "6")]].concat();
    let [(_, a), (_, b)] = [&base, &last].map(|all| image(&archive(all)).unwrap());
    assert_eq!(
        diff::json(&diff::differences(&a, &b, true).unwrap()),
        serde_json::json!({"same": true, "differences": []})
    );
}

#[test]
fn archives_are_put_together_as_the_kernel_does() {
    let first = archive(&[directory("a"), file("a/x", "1"), file("a/y", "1")]);
    let second = archive(&[
        directory("a"),
        file("a/x", "2"),
        link("b", "a"),
        file("b/z", "3"),
    ]);
    let zeros = |n: usize| vec![0; n];
    let all = [
        [first.clone(), second.clone()].concat(),
        [first.clone(), zeros(4), second.clone(), zeros(512)].concat(),
        [first.clone(), gzip(&second)].concat(),
        [gzip(&first), gzip(&second)].concat(),
        [
            gzip(&first),
            zeros(4 - gzip(&first).len() % 4),
            second.clone(),
        ]
        .concat(),
        gzip(&[first.clone(), zeros(100), second.clone()].concat()),
        [zeros(8), first.clone(), zeros(1), gzip(&second), zeros(3)].concat(),
    ];
    for (n, bytes) in all.iter().enumerate() {
        let (image, tree) = image(bytes).unwrap_or_else(|e| panic!("{n}: {e:#}"));
        assert_eq!(image.entries.len(), 7, "{n}");
        let read = |path: &str| {
            tree.find(path)
                .and_then(|id| tree.content(id))
                .map(|c| c.bytes(100).unwrap())
        };
        assert_eq!(
            (read("a/x"), read("/a/z"), read("b/y")),
            (
                Some(b"2".to_vec()),
                Some(b"3".to_vec()),
                Some(b"1".to_vec())
            ),
            "{n}"
        );
        assert_eq!(tree.again.len(), 1, "{n}: a/x, and not the directory");
    }
}

#[test]
fn hard_links_are_one_file_whichever_entry_has_the_data() {
    let shared = |name: &str, data: &str, ino: u32| {
        let mut made = file(name, data);
        (made.header.nlink, made.header.ino) = (2, ino);
        made
    };
    for (first, second) in [("", "data"), ("data", "")] {
        let bytes = archive(&[
            shared("a", first, 7),
            shared("b", second, 7),
            shared("c", "other", 8),
        ]);
        let (_, tree) = image(&bytes).unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|path| tree.find(path).unwrap());
        assert_eq!(
            (
                tree.names(a),
                tree.file(a) == tree.file(b),
                tree.file(a) == tree.file(c)
            ),
            (2, true, false)
        );
        assert_eq!(tree.content(a).unwrap().bytes(10).unwrap(), b"data");
        assert_eq!(tree.kind(a), Kind::File);
    }
    // Archives number their files themselves.
    let (_, tree) = image(
        &[
            archive(&[shared("a", "1", 7)]),
            archive(&[shared("b", "2", 7)]),
        ]
        .concat(),
    )
    .unwrap();
    let [a, b] = ["a", "b"].map(|path| tree.find(path).unwrap());
    assert_ne!(tree.file(a), tree.file(b));
}
