//! `initrd/replace-init` on images with a file system: what it changes, what it leaves, and what it refuses. VM tests boot what comes out.

use crate::{TempDir, project};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Whether it can run here: its tools are there where initrd/setup has run.
fn cannot_run() -> bool {
    let there = |name: &str| ["/usr/bin", "/bin", "/usr/sbin", "/sbin"].iter().any(|directory| Path::new(directory).join(name).exists());
    let root = nix::unistd::geteuid().is_root();
    let needed = ["mkfs.erofs", "fsck.erofs", "mkfs.ext4", "debugfs", "sfdisk", if root { "env" } else { "fakeroot" }];
    let missing: Vec<&str> = needed.into_iter().filter(|name| !there(name)).collect();
    assert!(
        missing.is_empty() || std::env::var_os("KATA_GPU_BUILT").is_none() || missing == ["fakeroot"],
        "{missing:?}: initrd/setup installs them"
    );
    if !missing.is_empty() {
        eprintln!("skipped: no {} here (initrd/setup installs them)", missing.join(", "));
    }
    !missing.is_empty()
}

fn shell(script: &str, arguments: &[&Path]) -> Output {
    let runner = if nix::unistd::geteuid().is_root() { "env" } else { "fakeroot" };
    let mut command = Command::new(runner);
    command.args(["sh", "-ec", &format!("PATH=$PATH:/usr/sbin:/sbin; {script}"), "sh"]).args(arguments);
    command.output().unwrap()
}

#[track_caller]
fn done(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

struct Case {
    dir: TempDir,
}

impl Case {
    /// A guest's root, and an ELF file that stands for the init: it fails when it is run, as one of another machine would.
    fn new(test: &str) -> Self {
        let dir = TempDir::new(&format!("replace-init-{test}"));
        let root = dir.0.join("root");
        for directory in ["dev", "proc", "sys", "run", "etc", "bin", "usr/bin", "usr/sbin", "var"] {
            std::fs::create_dir_all(root.join(directory)).unwrap();
        }
        for (name, text, mode) in [
            ("usr/bin/kata-agent", "agent", 0o755),
            ("bin/NVRC", "old", 0o755),
            ("etc/shadow", "secret", 0o640),
            ("usr/bin/su", "s", 0o4755),
        ] {
            std::fs::write(root.join(name), text).unwrap();
            std::fs::set_permissions(root.join(name), std::fs::Permissions::from_mode(mode)).unwrap();
        }
        for (name, target) in [("init", "/bin/NVRC"), ("sbin", "usr/sbin"), ("usr/sbin/init", "/bin/NVRC"), ("var/run", "../run")] {
            symlink(target, root.join(name)).unwrap();
        }
        std::fs::write(dir.0.join("init"), b"\x7fELF and nothing that runs").unwrap();
        Self { dir }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.0.join(name)
    }

    /// Replaces the init of `image`.
    fn replace(&self, image: &str) -> Output {
        let script = project().join("initrd/replace-init");
        shell("\"$@\"", &[&script, &self.at(image), &self.at("init"), &self.at("new")])
    }

    /// Refused, and nothing of it is left.
    #[track_caller]
    fn refused(&self, image: &str, why: &str) {
        let output = self.replace(image);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(why), "{said}");
        let left: Vec<_> = std::fs::read_dir(&self.dir.0)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .filter(|n| n.to_string_lossy().starts_with("new"))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

const EROFS: &str = "chown 0:42 \"$1/etc/shadow\"; mkfs.erofs --quiet \"$2\" \"$1\"";
/// The mode in an inode of an erofs image.
const SETUID: &str = "nid=$(dump.erofs --path=/usr/bin/su \"$1\" | sed -nE 's/^NID: ([0-9]+) .*/\\1/p'); od -An -to2 -j $(($(od -An -tu4 -j 1064 -N4 \"$1\") * 4096 + nid * 32 + 4)) -N2 \"$1\"";
const EXT4: &str = "mkfs.ext4 -q -d \"$1\" \"$2\" 4M";

#[test]
fn an_images_init_is_replaced_and_all_else_stays_as_it_was() {
    if cannot_run() {
        return;
    }
    for (name, make, unpack) in [
        ("erofs", EROFS, "fsck.erofs --extract=\"$2\" \"$1\" >/dev/null"),
        ("ext4", EXT4, "mkdir \"$2\"; debugfs -R \"rdump / $2\" \"$1\" 2>/dev/null"),
    ] {
        let case = Case::new(name);
        if name == "ext4" {
            std::fs::create_dir_all(case.at("root/usr/lib/modules/6.1")).unwrap();
            std::fs::write(case.at("root/usr/lib/modules/6.1/nvidia.ko.xz"), "module").unwrap();
        }
        done(&shell(make, &[&case.at("root"), &case.at("old")]));
        let old = std::fs::read(case.at("old")).unwrap();
        let said = done(&case.replace("old"));
        assert!(said.contains(&format!("{name}, ")) && said.contains("are the same before and after"), "{said}");
        assert!(said.contains("no list of the driver's files"), "{said}");
        assert!(said.contains("warning: no nvidia.ko in the image") == (name == "erofs"), "{said}");
        assert!(std::fs::read(case.at("old")).unwrap() == old, "what to roll back to is not touched");
        done(&shell(unpack, &[&case.at("new"), &case.at("tree")]));
        let tree = case.at("tree");
        assert_eq!(std::fs::read(tree.join("init")).unwrap(), std::fs::read(case.at("init")).unwrap(), "{name}");
        assert_eq!(std::fs::metadata(tree.join("init")).unwrap().permissions().mode() & 0o7777, 0o755, "{name}");
        assert_eq!(std::fs::read_link(tree.join("usr/sbin/init")).unwrap(), Path::new("/init"), "{name}");
        assert_eq!(std::fs::read(tree.join("bin/NVRC")).unwrap(), b"old", "{name}: it stays, to roll back to with init=");
        // Both unpackers take the setuid bit away: the image itself has to say.
        let (ask, wanted) = if name == "erofs" { (SETUID, "104755") } else { ("debugfs -R 'stat /usr/bin/su' \"$1\"", "Mode:  04755") };
        let told = done_out(&shell(ask, &[&case.at("new")]));
        assert!(told.contains(wanted), "{name}: {told}");
        for path in ["bin/NVRC", "etc/shadow"] {
            let of = |root: &str| std::fs::metadata(case.at(root).join(path)).unwrap();
            assert_eq!((of("tree").mode(), of("tree").mtime()), (of("root").mode(), of("root").mtime()), "{name}: {path}");
        }
    }
}

#[test]
fn a_table_stays_where_the_root_fits_into_its_partition_and_grows_with_it_where_not() {
    if cannot_run() {
        return;
    }
    for (label, sectors, grows) in [("dos", 8192, false), ("gpt", 8192, false), ("dos", 96, true), ("gpt", 96, true)] {
        let case = Case::new(&format!("{label}-{sectors}"));
        std::fs::write(case.at("init"), [b"\x7fELF".as_slice(), &vec![7; 200_000]].concat()).unwrap();
        done(&shell(EROFS, &[&case.at("root"), &case.at("fs")]));
        let disk = format!(
            "truncate -s 8M \"$2\"; printf 'label: {label}\\nstart=2048, size={sectors}\\n' | sfdisk -q \"$2\"; dd status=none conv=notrunc bs=512 seek=2048 if=\"$1\" of=\"$2\""
        );
        done(&shell(&disk, &[&case.at("fs"), &case.at("old")]));
        let said = done(&case.replace("old"));
        assert_eq!(said.contains("the partition has grown to 1 MiB"), grows, "{label} {sectors}: {said}");
        let table = done_out(&shell("sfdisk -d \"$1\"", &[&case.at("new")]));
        let size = if grows { 2048 } else { sectors };
        assert!(table.contains(&format!("size={size:>12}")), "{label} {sectors}: {table}");
        let found = done_out(&shell("blkid -p -O 1048576 -o value -s TYPE \"$1\"", &[&case.at("new")]));
        assert_eq!(found, "erofs\n", "{label} {sectors}");
        if !grows {
            let (old, new) = (std::fs::read(case.at("old")).unwrap(), std::fs::read(case.at("new")).unwrap());
            assert!(old[..1 << 20] == new[..1 << 20] && old.len() == new.len(), "{label}: what is before the partition stays");
        }
    }
}

#[track_caller]
fn done_out(output: &Output) -> String {
    done(output);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_name_that_leads_out_of_the_image_is_refused_before_anything_is_unpacked() {
    if cannot_run() {
        return;
    }
    // Names of the same length, in images whose sums nobody checks: what somebody would make who wants a file elsewhere.
    let patch = "sed -i 's#QQyWWyTTyescaped#../../../escaped#' \"$2\"";
    let erofs = format!("{EROFS}; {patch}; printf '\\0\\0\\0\\0' | dd of=\"$2\" bs=1 seek=1032 conv=notrunc status=none");
    let ext4 = format!("mkfs.ext4 -q -O ^metadata_csum,^dir_index -d \"$1\" \"$2\" 4M; {patch}");
    for (name, make) in [("erofs", erofs), ("ext4", ext4)] {
        let case = Case::new(&format!("traversal-{name}"));
        std::fs::write(case.at("root/etc/QQyWWyTTyescaped"), "of the image").unwrap();
        done(&shell(&make, &[&case.at("root"), &case.at("old")]));
        let temporary = case.at("tmp");
        std::fs::create_dir(&temporary).unwrap();
        let script = project().join("initrd/replace-init");
        let output =
            shell("TMPDIR=$4 \"$1\" \"$2\" \"$3\" \"$5\"", &[&script, &case.at("old"), &case.at("init"), &temporary, &case.at("new")]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("is not sound: nothing of it is unpacked"), "{name}: {said}");
        assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0, "{name}: nothing was written beside the folder of work");
        assert!(!case.at("escaped").exists() && !case.at("new").exists(), "{name}");
    }
}

#[test]
fn only_a_regular_file_is_replaced_and_files_of_others_beside_it_stay() {
    if cannot_run() {
        return;
    }
    let case = Case::new("output");
    done(&shell(EROFS, &[&case.at("root"), &case.at("old")]));
    nix::unistd::mkfifo(&case.at("new"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let said = String::from_utf8_lossy(&case.replace("old").stderr).into_owned();
    assert!(said.contains("what is there is no regular file: name another"), "{said}");
    std::fs::remove_file(case.at("new")).unwrap();
    std::fs::write(case.at("new.new"), "somebody's").unwrap();
    assert!(!case.replace("none").status.success());
    done(&case.replace("old"));
    assert_eq!(std::fs::read_to_string(case.at("new.new")).unwrap(), "somebody's");
    assert_eq!(std::fs::metadata(case.at("new")).unwrap().permissions().mode() & 0o777, 0o644);
}

#[test]
fn what_cannot_be_done_is_refused_and_leaves_nothing() {
    if cannot_run() {
        return;
    }
    let case = Case::new("refused");
    case.refused("none", "no such file");
    std::fs::write(case.at("text"), "text").unwrap();
    case.refused("text", "this takes erofs and ext4");
    std::fs::write(case.at("init"), [b"\x7fELF".as_slice(), &vec![7; 5 << 20]].concat()).unwrap();
    done(&shell(EXT4, &[&case.at("root"), &case.at("full")]));
    case.refused("full", "is the file system full?");
    std::fs::write(case.at("init"), "#!/bin/sh\n").unwrap();
    case.refused("full", "not an ELF file");
    // Programs that are no init of ours, or none that an image can start.
    std::fs::write(case.at("init"), b"\x7fELF\x02...\0/lib64/ld-linux-x86-64.so.2\0").unwrap();
    case.refused("full", "dynamically linked: build it with cargo build --release --target x86_64-unknown-linux-musl");
    std::fs::copy("/bin/true", case.at("init")).unwrap();
    case.refused("full", "INIT is the guest's program, kata-gpu-init");
    std::fs::remove_file(case.at("init")).unwrap();
    std::fs::write(case.at("init"), b"\x7fELF and nothing that runs").unwrap();
    let lost = shell("\"$@\"", &[&project().join("initrd/replace-init"), &case.at("full"), &case.at("init"), &case.at("none/new")]);
    assert!(!lost.status.success() && String::from_utf8_lossy(&lost.stderr).contains("none: no folder that can be written to"));
    // What would lead a privileged hand out of the root.
    let escape = Case::new("escape");
    let outside = escape.at("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("init"), "the host's own").unwrap();
    std::fs::remove_file(escape.at("root/sbin")).unwrap();
    symlink(&outside, escape.at("root/sbin")).unwrap();
    done(&shell(EROFS, &[&escape.at("root"), &escape.at("old")]));
    escape.refused("old", "a link out of the root");
    assert_eq!(std::fs::read_to_string(outside.join("init")).unwrap(), "the host's own");
    let other = Case::new("no-guest");
    std::fs::remove_file(other.at("root/usr/bin/kata-agent")).unwrap();
    done(&shell(EROFS, &[&other.at("root"), &other.at("old")]));
    other.refused("old", "no guest root");
    assert!(!nix::unistd::geteuid().is_root() || other.at("old").exists());
}
