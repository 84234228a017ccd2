//! Output of an image: only over a regular file, only when the image is whole, and never into its
//! sources. The rest of a killed run is replaced, the file of a running one is not; a full disk
//! leaves the old image.

use crate::TempDir;
use crate::collect::program;
use crate::initrd::packed;
use kata_gpu_image::images::image::Form;
use kata_gpu_image::images::output_file::Output;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of an unfinished file.
fn partial(of: &Path) -> PathBuf {
    let mut name = of.file_name().unwrap().to_os_string();
    name.push(".kata-gpu-boot-partial");
    of.with_file_name(name)
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A directory with a root in it.
fn world(test: &str) -> (TempDir, PathBuf) {
    let dir = TempDir::new(&format!("initrd-output-{test}"));
    let root = dir.0.join("root");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("init"), "x").unwrap();
    (dir, root)
}

#[test]
fn a_device_a_link_or_a_directory_is_never_replaced() {
    let (dir, root) = world("kinds");
    let at = |name: &str| dir.0.join(name);
    mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
    fs::write(at("old"), "old").unwrap();
    symlink("old", at("link")).unwrap();
    symlink("nothing", at("dangling")).unwrap();
    fs::create_dir(at("directory")).unwrap();
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
    assert!(
        fs::symlink_metadata(at("fifo"))
            .unwrap()
            .file_type()
            .is_fifo()
    );
    assert!(
        fs::symlink_metadata(at("link")).unwrap().is_symlink()
            && fs::read(at("old")).unwrap() == b"old"
    );
    // The control: a regular file is.
    packed(&[&root], Form::Plain, &at("old")).unwrap();
    assert!(fs::read(at("old")).unwrap().starts_with(b"070701"));
}

#[test]
fn an_image_never_holds_itself_nor_replaces_what_it_is_made_of() {
    let (dir, root) = world("itself");
    fs::write(dir.0.join("list"), "file /x 0644 data\n").unwrap();
    fs::write(dir.0.join("tree"), "tree / root\n").unwrap();
    fs::write(dir.0.join("data"), "data").unwrap();
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
    fs::write(&to, "old").unwrap();
    // Nobody holds it: whoever wrote it is gone.
    fs::write(partial(&to), "half an image").unwrap();
    packed(&[&root], Form::Plain, &to).unwrap();
    assert_eq!(names(&dir.0), ["image", "root"]);
    let whole = fs::read(&to).unwrap();
    assert!(whole.starts_with(b"070701"));
    let mut running = Output::create(&to, Form::Plain).unwrap();
    running.write_all(b"the other run's").unwrap();
    let error = format!("{:#}", packed(&[&root], Form::Plain, &to).unwrap_err());
    assert!(error.contains("another run is writing it"), "{error}");
    assert!(
        partial(&to).exists() && fs::read(&to).unwrap() == whole,
        "both are as they were"
    );
    let mut written = running.end().unwrap();
    assert!(
        packed(&[&root], Form::Plain, &to).is_err(),
        "it is held until it has its name"
    );
    written.keep().unwrap();
    drop(written);
    assert_eq!(fs::read(&to).unwrap(), b"the other run's");
    packed(&[&root], Form::Plain, &to).unwrap();
    assert_eq!(
        (names(&dir.0), fs::read(&to).unwrap()),
        (vec!["image".to_string(), "root".into()], whole)
    );
    // A link that others put at that name is neither followed nor removed unseen.
    symlink(dir.0.join("root/init"), partial(&to)).unwrap();
    assert!(packed(&[&root], Form::Plain, &to).is_err());
    assert_eq!(fs::read(root.join("init")).unwrap(), b"x");
}

#[test]
fn a_full_disk_leaves_the_old_image_whole_and_nothing_beside_it() {
    let (dir, root) = world("full");
    fs::write(root.join("large"), vec![7; 300_000]).unwrap();
    let script = "mount -t tmpfs -o size=128k none \"$1\" && echo old > \"$1/image\" && { \"$0\" \
                  image pack \"$2\" -o \"$1/image\"; \
                  echo \"status $?\"; cat \"$1/image\"; ls -A \"$1\"; }";
    fs::create_dir(dir.0.join("small")).unwrap();
    let ran = Command::new("unshare")
        .args(["-Urm", "sh", "-c", script])
        .arg(program())
        .arg(dir.0.join("small"))
        .arg(&root)
        .output();
    let output = match ran {
        Ok(output) if !output.stdout.is_empty() => output,
        other => {
            assert!(
                std::env::var_os("REQUIRE_NAMESPACES").is_none(),
                "no tmpfs in a namespace: {other:?}"
            );
            eprintln!("skipped: no tmpfs in a namespace: {other:?}");
            return;
        }
    };
    let (said, error) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(said, "status 2\nold\nimage\n", "{error}");
    assert!(error.contains("No space left on device"), "{error}");
}
