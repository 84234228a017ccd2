//! A failure means that writing an image replaces a device, a link or its own source, takes the
//! file of a run that lives, or that a full disk costs the old image.

use crate::collect::program;
use crate::initrd::packed;
use crate::{TempDir, bytes, link, make_dir, names, write};
use kata_gpu_image::images::image::Form;
use kata_gpu_image::images::output_file::Output;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use std::fs;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of an unfinished file.
fn partial(of: &Path) -> PathBuf {
    let mut name = of.file_name().unwrap().to_os_string();
    name.push(".kata-gpu-boot-partial");
    of.with_file_name(name)
}

/// A directory with a root in it.
fn world(test: &str) -> (TempDir, PathBuf) {
    let dir = TempDir::new(&format!("initrd-output-{test}"));
    let root = dir.0.join("root");
    make_dir(&root);
    write(root.join("init"), "x");
    (dir, root)
}

#[test]
fn a_device_a_link_or_a_directory_is_never_replaced() {
    let (dir, root) = world("kinds");
    let at = |name: &str| dir.0.join(name);
    mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
    write(at("old"), "old");
    link("old", at("link"));
    link("nothing", at("dangling"));
    make_dir(at("directory"));
    let before = names(&dir.0);
    for (name, why) in [
        ("fifo", "no regular file: name another"),
        ("link", "a symbolic link is there"),
        ("dangling", "a symbolic link is there"),
        ("directory", "a directory is there"),
        ("new/", "that is no name of a file"),
        ("..", "that is no name of a file"),
        ("none/new", "No such file or directory"),
    ] {
        let error = format!(
            "{:#}",
            packed(&[&root], Form::Plain, &at(name)).unwrap_err()
        );
        assert!(error.contains(why), "{name}: {error}");
    }
    assert_eq!(names(&dir.0), before);
    let fifo = fs::symlink_metadata(at("fifo")).unwrap().file_type();
    assert!(fifo.is_fifo() && at("link").is_symlink());
    assert_eq!(bytes(at("old")), b"old");
    // The control: a regular file is.
    packed(&[&root], Form::Plain, &at("old")).unwrap();
    assert!(bytes(at("old")).starts_with(b"070701"));
}

#[test]
fn an_image_never_holds_itself_nor_replaces_what_it_is_made_of() {
    let (dir, root) = world("itself");
    write(dir.0.join("list"), "file /x 0644 data\n");
    write(dir.0.join("tree"), "tree / root\n");
    write(dir.0.join("data"), "data");
    let at = |name: &str| dir.0.join(name);
    for (source, to) in [
        ("root", "root/new"),
        ("root", "root/init"),
        ("tree", "root/new"),
        ("list", "list"),
        ("list", "data"),
    ] {
        let before = (names(&dir.0), names(&root));
        let old = fs::read(at(to)).ok();
        let error = format!(
            "{:#}",
            packed(&[&at(source)], Form::Plain, &at(to)).unwrap_err()
        );
        assert!(
            error.contains("the new image would be, or replace, what it is made of"),
            "{source} to {to}: {error}"
        );
        assert_eq!(
            ((names(&dir.0), names(&root)), fs::read(at(to)).ok()),
            (before, old),
            "{source} to {to}"
        );
    }
    packed(&[&root, &at("list")], Form::Plain, &at("new")).unwrap();
}

#[test]
fn only_the_output_of_a_dead_run_is_replaced() {
    let (dir, root) = world("killed");
    let to = dir.0.join("image");
    write(&to, "old");
    // Nobody holds it: whoever wrote it is gone.
    write(partial(&to), "half an image");
    packed(&[&root], Form::Plain, &to).unwrap();
    assert_eq!(names(&dir.0), ["image", "root"]);
    let whole = bytes(&to);
    assert!(whole.starts_with(b"070701"));
    let mut running = Output::create(&to, Form::Plain).unwrap();
    running.write_all(b"the other run's").unwrap();
    let error = format!("{:#}", packed(&[&root], Form::Plain, &to).unwrap_err());
    assert!(error.contains("another run is writing it"), "{error}");
    assert!(
        partial(&to).exists() && bytes(&to) == whole,
        "both are as they were"
    );
    let mut written = running.end().unwrap();
    assert!(
        packed(&[&root], Form::Plain, &to).is_err(),
        "it is held until it has its name"
    );
    written.keep().unwrap();
    drop(written);
    assert_eq!(bytes(&to), b"the other run's");
    packed(&[&root], Form::Plain, &to).unwrap();
    assert_eq!(
        (names(&dir.0), bytes(&to)),
        (vec!["image".to_string(), "root".into()], whole)
    );
    // A link that others put at that name is neither followed nor removed unseen.
    link(dir.0.join("root/init"), partial(&to));
    assert!(packed(&[&root], Form::Plain, &to).is_err());
    assert_eq!(bytes(root.join("init")), b"x");
}

#[test]
fn a_full_disk_leaves_the_old_image_whole_and_nothing_beside_it() {
    let (dir, root) = world("full");
    write(root.join("large"), vec![7; 300_000]);
    let script = "mount -t tmpfs -o size=128k none \"$1\" && echo old > \"$1/image\" && { \"$0\" \
                  image pack \"$2\" -o \"$1/image\"; \
                  echo \"status $?\"; cat \"$1/image\"; ls -A \"$1\"; }";
    make_dir(dir.0.join("small"));
    let ran = Command::new("unshare")
        .args(["-Urm", "sh", "-c", script])
        .arg(program())
        .arg(dir.0.join("small"))
        .arg(&root)
        .output();
    let output = match ran {
        Ok(output) if !output.stdout.is_empty() => output,
        other => {
            let why = format!("no tmpfs in a namespace: {other:?}");
            return crate::skip("REQUIRE_NAMESPACES", &why);
        }
    };
    let (said, error) = (crate::stdout(&output), crate::stderr(&output));
    assert_eq!(said, "status 2\nold\nimage\n", "{error}");
    assert!(error.contains("No space left on device"), "{error}");
}
