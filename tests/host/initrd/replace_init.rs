//! A failure means that `image replace-init` of a file system changes more than the init, follows a
//! link out of the image, runs a name as a command, reaches a file of the host from its sandbox, or
//! leaves something when it refuses.

use crate::collect::program;
use crate::initrd::{entries, file, for_arch, gzip};
use crate::{TempDir, bytes, chmod, make_dir, stderr, write};
use kata_gpu_image::images::disk_image::read_all;
use kata_gpu_image::images::image::{Content, Entry, Image};
use kata_gpu_init::cdi::spec::PENDING;
use kata_gpu_test_support::elf_stand_in as stand_in;
use kata_gpu_wire::arch::Arch;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Whether it cannot run here: these tools and those that all need are there where tests/setup has
/// run.
pub fn cannot_run(more: &[&str]) -> bool {
    let there = |name: &str| {
        ["/usr/bin", "/bin", "/usr/sbin", "/sbin"]
            .iter()
            .any(|directory| Path::new(directory).join(name).exists())
    };
    let missing: Vec<&str> = ["mkfs.erofs", "fsck.erofs", "sfdisk"]
        .into_iter()
        .chain(more.iter().copied())
        .filter(|name| !there(name))
        .collect();

    if !missing.is_empty() {
        crate::skip(
            "KATA_GPU_BUILT",
            &format!("no {missing:?} here (tests/setup installs them)"),
        );
    }
    !missing.is_empty()
}

/// Makes and looks into images; they need no owners but this user.
pub fn shell(script: &str, arguments: &[&Path]) -> Output {
    let mut command = Command::new("sh");
    command
        .args([
            "-ec",
            &format!("PATH=$PATH:/usr/sbin:/sbin; {script}"),
            "sh",
        ])
        .args(arguments);
    command.output().unwrap()
}

/// Standard output and error of a command that succeeded.
#[track_caller]
pub fn done(output: &Output) -> String {
    let said =
        String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

pub struct Case {
    pub dir: TempDir,
}

/// A program that is taken for the init; nobody runs it.
pub fn init(more: &[u8]) -> Vec<u8> {
    [b"\x7fELF and nothing that runs ", PENDING.as_bytes(), more].concat()
}

impl Case {
    /// A guest's root, and an ELF file that stands for the init.
    pub fn new(test: &str) -> Self {
        let dir = TempDir::new(&format!("replace-init-{test}"));
        let root = dir.0.join("root");
        for directory in [
            "dev", "proc", "sys", "run", "etc", "bin", "usr/bin", "usr/sbin", "var",
        ] {
            make_dir(root.join(directory));
        }
        for (name, text, mode) in [
            ("usr/bin/kata-agent", "agent", 0o755),
            ("bin/NVRC", "old", 0o755),
            ("etc/shadow", "secret", 0o640),
            ("usr/bin/su", "s", 0o4755),
        ] {
            write(root.join(name), text);
            chmod(root.join(name), mode);
        }
        for (name, target) in [
            ("init", "/bin/NVRC"),
            ("sbin", "usr/sbin"),
            ("usr/sbin/init", "/bin/NVRC"),
            ("var/run", "../run"),
        ] {
            crate::link(target, root.join(name));
        }
        write(dir.0.join("init"), init(b""));
        Self { dir }
    }

    /// With the driver's user space, of which the list is made.
    fn with_driver(test: &str) -> Self {
        let case = Self::new(test);
        make_dir(case.at("root/usr/lib64"));
        for name in ["libcuda.so", "libnvidia-ml.so"] {
            // Long enough to be compressed where files are.
            let library = [
                stand_in::library(Some(&format!("{name}.1")), &[]),
                vec![0; 20_000],
            ]
            .concat();
            write(
                case.at("root/usr/lib64").join(format!("{name}.550.163.01")),
                library,
            );
        }
        case
    }

    /// With its root made into the image `old`.
    pub fn made(test: &str) -> Self {
        let case = Self::new(test);
        case.make(EROFS, "old");
        case
    }

    /// Makes the root into an image, by a script.
    pub fn make(&self, script: &str, image: &str) {
        done(&shell(script, &[&self.at("root"), &self.at(image)]));
    }

    /// Replaces the init of `old` by a script, which gets the command as its words.
    fn by_script(&self, script: &str) -> Output {
        let words = ["image", "replace-init", "--no-nvml"].map(Path::new);
        let paths = [
            program(),
            self.at("old"),
            "--init".into(),
            self.at("init"),
            "-o".into(),
        ];
        let new = self.at("new");
        let mut all = vec![paths[0].as_path()];
        all.extend(words);
        all.extend(paths[1..].iter().map(PathBuf::as_path));
        all.push(&new);
        shell(script, &all)
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.dir.0.join(name)
    }

    /// Replaces the init of `image`.
    pub fn replace(&self, image: &str) -> Output {
        self.replace_to(image, "new")
    }

    fn replace_to(&self, image: &str, new: &str) -> Output {
        self.command(image, new).arg("--no-nvml").output().unwrap()
    }

    pub fn command(&self, image: &str, new: &str) -> Command {
        let mut command = Command::new(program());
        command.args(["image", "replace-init"]).arg(self.at(image));
        command
            .arg("--init")
            .arg(self.at("init"))
            .arg("-o")
            .arg(self.at(new));
        command
    }

    /// Image as the readers read it.
    fn read(&self, image: &str) -> Image {
        read_all(Content::of_file(fs::File::open(self.at(image)).unwrap()).unwrap())
            .unwrap()
            .0
    }

    /// Refused, and nothing of it is left.
    #[track_caller]
    fn refused(&self, image: &str, why: &str) {
        let output = self.replace(image);
        let said = stderr(&output);
        assert!(!output.status.success() && said.contains(why), "{said}");
        let left = crate::names(&self.dir.0);
        assert!(!left.iter().any(|name| name.starts_with("new")), "{left:?}");
    }
}

pub const EROFS: &str = "mkfs.erofs --quiet \"$2\" \"$1\"";
/// The mode in an inode of an erofs image.
const SETUID: &str = "nid=$(dump.erofs --path=/usr/bin/su \"$1\" | sed -nE 's/^NID: ([0-9]+) \
                      .*/\\1/p'); od -An -to2 -j $(($(od -An -tu4 -j 1064 -N4 \"$1\") * 4096 + nid \
                      * 32 + 4)) -N2 \"$1\"";

#[test]
fn an_arm64_image_takes_an_arm64_init_and_no_other() {
    if cannot_run(&[]) {
        return;
    }
    let case = Case::with_driver("erofs-arm64");
    for library in fs::read_dir(case.at("root/usr/lib64")).unwrap() {
        let path = library.unwrap().path();
        write(&path, for_arch(Arch::Aarch64, bytes(&path)));
    }
    write(
        case.at("root/usr/bin/kata-agent"),
        for_arch(Arch::Aarch64, stand_in::library(None, &[])),
    );
    let init = |arch| [for_arch(arch, stand_in::library(None, &[])), PENDING.into()].concat();
    case.make(EROFS, "old");
    write(case.at("init"), init(Arch::X86_64));
    case.refused(
        "old",
        "is for x86_64, and the image's agent for aarch64: build it with",
    );
    write(case.at("init"), init(Arch::Aarch64));
    let said = done(&case.replace("old"));
    assert!(
        said.contains("the list of the driver's 2 files is in the image"),
        "{said}"
    );
}

#[test]
fn an_images_init_is_replaced_and_all_else_stays_as_it_was() {
    if cannot_run(&[]) {
        return;
    }
    for has_module in [false, true] {
        let case = Case::new(&format!("module-{has_module}"));
        if has_module {
            make_dir(case.at("root/usr/lib/modules/6.1"));
            write(case.at("root/usr/lib/modules/6.1/nvidia.ko.xz"), "module");
        }
        case.make(EROFS, "old");
        let old = bytes(case.at("old"));
        let said = done(&case.replace("old"));
        assert!(
            said.contains("erofs, ")
                && said.contains(
                    "names stay with owners, modes, times, links, contents and extended attributes"
                )
                && said.contains("no list of the driver's files"),
            "{said}"
        );
        assert_eq!(
            said.contains("note: no nvidia.ko in the image"),
            !has_module,
            "{said}"
        );
        assert!(
            bytes(case.at("old")) == old,
            "the former image is not touched"
        );
        let unpack = "fsck.erofs --extract=\"$2\" \"$1\" >/dev/null";
        done(&shell(unpack, &[&case.at("new"), &case.at("tree")]));
        let tree = case.at("tree");
        assert_eq!(bytes(tree.join("init")), bytes(case.at("init")));
        let mode = |path: &str| fs::metadata(tree.join(path)).unwrap().permissions().mode();
        assert_eq!(mode("init") & 0o7777, 0o755);
        assert_eq!(
            fs::read_link(tree.join("usr/sbin/init")).unwrap(),
            Path::new("/init")
        );
        assert_eq!(
            bytes(tree.join("bin/NVRC")),
            b"old",
            "the old init stays: init= starts it"
        );
        // Unpacking takes the setuid bit away: the image itself has it.
        let reported = done_out(&shell(SETUID, &[&case.at("new")]));
        assert!(reported.contains("104755"), "{reported}");
        for path in ["bin/NVRC", "etc/shadow"] {
            let of = |root: &str| fs::metadata(case.at(root).join(path)).unwrap();
            assert_eq!(
                (of("tree").mode(), of("tree").mtime()),
                (of("root").mode(), of("root").mtime()),
                "{path}"
            );
        }
    }
}

#[test]
fn a_partition_table_changes_only_if_the_root_outgrows_it() {
    if cannot_run(&[]) {
        return;
    }
    for (label, sectors, grows) in [
        ("dos", 8192, false),
        ("gpt", 8192, false),
        ("dos", 96, true),
        ("gpt", 96, true),
    ] {
        let case = Case::new(&format!("{label}-{sectors}"));
        write(case.at("init"), init(&[7; 200_000]));
        case.make(EROFS, "fs");
        let disk = format!(
            "truncate -s 8M \"$2\"; printf 'label: {label}\\nstart=2048, size={sectors}\\n' | \
             sfdisk -q \"$2\"; dd status=none conv=notrunc bs=512 seek=2048 if=\"$1\" of=\"$2\""
        );
        done(&shell(&disk, &[&case.at("fs"), &case.at("old")]));
        let said = done(&case.replace("old"));
        assert_eq!(
            said.contains("the partition has grown to 1 MiB"),
            grows,
            "{label} {sectors}: {said}"
        );
        let table = done_out(&shell("sfdisk -d \"$1\"", &[&case.at("new")]));
        let size = if grows { 2048 } else { sectors };
        assert!(
            table.contains(&format!("size={size:>12}")),
            "{label} {sectors}: {table}"
        );
        let found = done_out(&shell(
            "blkid -p -O 1048576 -o value -s TYPE \"$1\"",
            &[&case.at("new")],
        ));
        assert_eq!(found, "erofs\n", "{label} {sectors}");
        if !grows {
            let (old, new) = (bytes(case.at("old")), bytes(case.at("new")));
            assert!(
                old[..1 << 20] == new[..1 << 20] && old.len() == new.len(),
                "{label}: what is before the partition stays"
            );
        }
    }
}

#[track_caller]
pub fn done_out(output: &Output) -> String {
    done(output);
    crate::stdout(output)
}

#[test]
fn a_name_that_leads_out_of_the_image_is_refused() {
    if cannot_run(&[]) {
        return;
    }
    // Names of the same length, in images whose sums nobody checks: what somebody would make who
    // wants a file elsewhere.
    let patch = "sed -i 's#QQyWWyTTyescaped#../../../escaped#' \"$2\"";
    let make = format!(
        "{EROFS}; {patch}; printf '\\0\\0\\0\\0' | dd of=\"$2\" bs=1 seek=1032 conv=notrunc \
         status=none"
    );
    let case = Case::new("traversal");
    write(case.at("root/etc/QQyWWyTTyescaped"), "of the image");
    case.make(&make, "old");
    let temporary = case.at("tmp");
    make_dir(&temporary);
    let mut command = case.command("old", "new");
    let output = command
        .arg("--no-nvml")
        .env("TMPDIR", &temporary)
        .output()
        .unwrap();
    let said = stderr(&output);
    assert!(
        !output.status.success() && said.contains("is not sound, and nothing of it is used"),
        "{said}"
    );
    assert_eq!(
        fs::read_dir(&temporary).unwrap().count(),
        0,
        "nothing was written beside the folder of work"
    );
    assert!(!case.at("escaped").exists() && !case.at("new").exists());
}

#[test]
fn only_a_regular_file_is_replaced_and_other_files_stay() {
    if cannot_run(&[]) {
        return;
    }
    let case = Case::made("output");
    nix::unistd::mkfifo(&case.at("new"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let said = String::from_utf8_lossy(&case.replace("old").stderr).into_owned();
    assert!(
        said.contains("it exists and is no regular file: name another file"),
        "{said}"
    );
    crate::remove(case.at("new"));
    write(case.at("new.new"), "somebody's");
    assert!(!case.replace("none").status.success());
    done(&case.by_script("umask 077; exec \"$@\""));
    assert_eq!(crate::text(case.at("new.new")), "somebody's");
    assert_eq!(
        fs::metadata(case.at("new")).unwrap().permissions().mode() & 0o777,
        0o644,
        "whatever the umask"
    );
}

#[test]
fn what_cannot_be_done_is_refused_and_leaves_nothing() {
    if cannot_run(&[]) {
        return;
    }
    let case = Case::new("refused");
    case.refused("none", "No such file");
    write(case.at("text"), "text");
    case.refused("text", "neither a newc archive nor gzip");
    let ext4 = "truncate -s 1M \"$1\"; printf '\\123\\357' | dd of=\"$1\" bs=1 seek=1080 \
                conv=notrunc status=none";
    done(&shell(ext4, &[&case.at("ext4")]));
    case.refused("ext4", "its root is ext4, and this changes and reads erofs");
    case.make(EROFS, "full");
    write(case.at("init"), "#!/bin/sh\n");
    case.refused("full", "not an ELF file");
    // Programs that are no init of ours, or none that an image can start.
    write(
        case.at("init"),
        b"\x7fELF\x02...\0/lib64/ld-linux-x86-64.so.2\0",
    );
    case.refused("full", "dynamically linked, or another program");
    for program in [b"\x7fELF of another program".to_vec(), bytes("/bin/true")] {
        write(case.at("init"), program);
        case.refused("full", "INIT is the guest's program, kata-gpu-init");
    }
    write(case.at("init"), init(b""));
    let lost = case.replace_to("full", "none/new");
    assert!(!lost.status.success() && stderr(&lost).contains("none/new"));
    // Links that lead out of the root, which a privileged writer must not follow.
    let escape = Case::new("escape");
    let outside = escape.at("outside");
    make_dir(&outside);
    write(outside.join("init"), "the host's own");
    crate::remove(escape.at("root/sbin"));
    crate::link(&outside, escape.at("root/sbin"));
    escape.make(EROFS, "old");
    escape.refused("old", "a link out of the root");
    assert_eq!(crate::text(outside.join("init")), "the host's own");
    let other = Case::new("no-guest");
    crate::remove(other.at("root/usr/bin/kata-agent"));
    other.make(EROFS, "old");
    other.refused("old", "no guest root");
}

/// An attribute that a guest's files have, as far as this user may set it, on `usr/bin/su`.
fn set_attribute(case: &Case) {
    let (name, value): (_, &[u8]) = match nix::unistd::geteuid().is_root() {
        true => (
            "security.capability",
            &[1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ),
        false => ("user.capability", b"of the test"),
    };
    rustix::fs::setxattr(
        case.at("root/usr/bin/su"),
        name,
        value,
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
}

#[test]
fn ten_upgrades_in_place_leave_a_sound_image_of_the_same_size() {
    if cannot_run(&[]) {
        return;
    }
    for (name, make) in [
        ("erofs", EROFS),
        ("erofs-lz4", "mkfs.erofs --quiet -zlz4 \"$2\" \"$1\""),
    ] {
        let case = Case::with_driver(&format!("ten-{name}"));
        write(case.at("root/etc/large"), vec![b'x'; 200_000]);
        set_attribute(&case);
        case.make(make, "0");
        let show = "dump.erofs --path=/usr/bin/su \"$1\" | grep 'Xattr size'";
        let before = done_out(&shell(show, &[&case.at("0")]));
        assert!(
            before.contains("Xattr size: ") && !before.contains("Xattr size: 0"),
            "{name}: {before}"
        );
        for round in 0..10 {
            // Larger and smaller ones.
            write(
                case.at("init"),
                init(&vec![b'0' + round; 10_000 * (1 + usize::from(round) % 3)]),
            );
            let said = done(&case.replace_to(&round.to_string(), &(round + 1).to_string()));
            let listed = if name == "erofs-lz4" {
                "the file system is compressed"
            } else {
                "the list of the driver's 2 files is in the image"
            };
            assert!(said.contains(listed), "{name} {round}: {said}");
            assert_eq!(
                done_out(&shell(show, &[&case.at(&(round + 1).to_string())])),
                before,
                "{name} {round}"
            );
        }
        let check = "fsck.erofs --extract=\"$1.tree\" \"$1\" 2>&1";
        let said = done(&shell(check, &[&case.at("10")]));
        assert!(!said.contains("<E>"), "{name}: {said}");
        // The init of the first and of the last are as large.
        assert_eq!(
            fs::metadata(case.at("10")).unwrap().len(),
            fs::metadata(case.at("1")).unwrap().len(),
            "{name}"
        );
        let image = case.read("10");
        let is_init = |entry: &&Entry| entry.name == b"init";
        let entry = image.entries.iter().find(is_init).unwrap();
        assert_eq!(
            entry.data.bytes(1 << 20).unwrap(),
            bytes(case.at("init")),
            "{name}"
        );
        let large = bytes(case.at("10.tree/etc/large"));
        assert_eq!(
            large,
            vec![b'x'; 200_000],
            "{name}: what is compressed stays so"
        );
        let names = |image: &Image| {
            image
                .entries
                .iter()
                .map(|entry| entry.name.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&case.read("1")), names(&image), "{name}");
    }
}

#[test]
fn the_target_of_a_link_never_becomes_a_command() {
    if cannot_run(&[]) {
        return;
    }
    let case = Case::new("commands");
    crate::remove(case.at("root/sbin"));
    write(case.at("root/payload"), "of the image");
    let written = case.at("written");
    // A link target with what a shell or another program would take for commands, and a directory
    // of that name, so that the link leads somewhere.
    let target = format!("usr/sbin\ndump /payload {}\ncd /", written.display());
    make_dir(case.at("root").join(&target));
    crate::link(&target, case.at("root/sbin"));
    case.make(EROFS, "old");
    case.refused("old", "this takes /sbin, /usr/sbin, /usr/bin, /bin");
    assert!(!written.exists(), "a file of the host was written");
}

#[test]
fn a_list_or_a_directory_above_it_that_is_a_link_is_refused() {
    if cannot_run(&[]) {
        return;
    }
    for (at, target) in [
        ("usr/share/kata-gpu-init/driver-files.json", "/etc/hostname"),
        ("usr/share/kata-gpu-init", "../../etc"),
        ("usr/share", "/etc"),
    ] {
        let case = Case::with_driver("list-link");
        let link = case.at("root").join(at);
        make_dir(link.parent().unwrap());
        crate::link(target, &link);
        case.make(EROFS, "old");
        case.refused(
            "old",
            "is not written through links: remove it from the image",
        );
    }
}

/// First process below `pid` that runs a program of this name.
fn below(pid: u32, program: &str) -> Option<u32> {
    let read = |pid: u32, file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
    let children = read(pid, &format!("task/{pid}/children"))?;
    children.split_whitespace().find_map(|child| {
        let child = child.parse().ok()?;
        if read(child, "comm")?.trim() == program {
            Some(child)
        } else {
            below(child, program)
        }
    })
}

#[test]
fn a_program_in_the_sandbox_reaches_no_file_of_the_host() {
    if cannot_run(&[]) {
        return;
    }
    let case = Case::new("sandbox");
    chmod(&case.dir.0, 0o777);
    make_dir(case.at("work/root"));
    // The program waits at a pipe in place of an image, and can be looked at.
    let pipe = case.at("work/root.img");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    if nix::unistd::geteuid().is_root() {
        done(&shell("chown -R 65534:65534 \"$1\"", &[&case.at("work")]));
    }
    let mut inside = Command::new(program())
        .args(["image", "in-sandbox"])
        .arg(case.at("work"))
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = loop {
        if let Some(pid) = below(inside.id(), "fsck.erofs") {
            break pid;
        }
        if inside.try_wait().unwrap().is_some() {
            let output = inside.wait_with_output().unwrap();
            panic!("the program did not start: {output:?}");
        }
        std::thread::yield_now();
    };
    let of = |pid: &str, what: &str| PathBuf::from(format!("/proc/{pid}/{what}"));
    let its = |what: &str| of(&pid.to_string(), what);
    for kind in ["user", "mnt", "pid", "net", "ipc"] {
        let link = format!("ns/{kind}");
        let (own, other) = (of("self", &link), its(&link));
        assert_ne!(
            fs::read_link(own).unwrap(),
            fs::read_link(other).unwrap(),
            "{kind}"
        );
    }
    let mut names = crate::names(its("root"));
    names.retain(|name| !["bin", "lib", "lib32", "lib64", "libx32", "sbin"].contains(&&**name));
    assert_eq!(names, ["usr", "work"]);
    // Negative control: the same look at this process finds the host's files.
    assert!(of("self", "root/etc/passwd").exists());
    let status = crate::text(its("status"));
    let has = |line: &str| status.lines().any(|l| l.starts_with(line));
    assert!(
        has("CapEff:\t0000000000000000") && has("NoNewPrivs:\t1"),
        "{status}"
    );
    if nix::unistd::geteuid().is_root() {
        assert!(has("Uid:\t65534"), "{status}");
    }
    // Without an image in the pipe the program ends.
    drop(fs::File::options().write(true).open(&pipe).unwrap());
    inside.wait().unwrap();
}

#[test]
fn a_stricter_limit_of_the_callers_stays() {
    if cannot_run(&[]) {
        return;
    }
    let case = Case::made("limits");
    done(&case.by_script("ulimit -v 4000000; ulimit -t 600; exec \"$@\""));
}

#[test]
fn an_unsound_image_is_refused_with_its_own_fault() {
    if cannot_run(&[]) {
        return;
    }
    let case = Case::new("unsound");
    let count_of_blocks =
        "printf '\\377\\377\\377\\377' | dd of=\"$2\" bs=1 seek=1028 conv=notrunc status=none";
    case.make(&format!("{EROFS}; {count_of_blocks}"), "old");
    let said = String::from_utf8_lossy(&case.replace("old").stderr).into_owned();
    assert!(
        said.contains("is not sound") && said.contains("superblock"),
        "{said}"
    );
    assert!(
        !said.contains("/dev/null") && !said.contains("mtab"),
        "{said}"
    );
}

#[test]
fn without_namespaces_the_cure_is_named_and_nothing_written() {
    if cannot_run(&[]) {
        return;
    }
    let case = Case::made("namespaces");
    let script = "unshare -Ur true || exit 9; unshare -Ur sh -ec 'echo 0 \
>/proc/sys/user/max_user_namespaces; exec \"$@\"' sh \"$@\"";
    let output = case.by_script(script);
    if output.status.code() == Some(9) {
        return eprintln!("skipped: no user namespaces here");
    }
    let said = stderr(&output);
    assert!(
        !output.status.success() && said.contains("sysctl user.max_user_namespaces above 0"),
        "{said}"
    );
    assert!(!case.at("new").exists());
}

#[test]
fn the_nvml_helper_is_taken_if_given_or_next_to_the_init() {
    if cannot_run(&[]) {
        return;
    }
    let helper: &[u8] = b"\x7fELF with the loader /lib64/ld-linux-x86-64.so.2, for kata-gpu-nvml";
    let case = Case::with_driver("helper-erofs");
    case.make(EROFS, "old");
    write(case.at("kata-gpu-nvml"), helper);
    let run = |image: &str, new: &str, more: &[&str]| {
        case.command(image, new).args(more).output().unwrap()
    };
    let said = done(&run("old", "new", &[]));
    assert!(
        said.contains("added    /usr/bin/kata-gpu-nvml") && said.contains("kata-gpu-nvml is /"),
        "{said}"
    );
    let entry_of = |image: &str| {
        let image = case.read(image);
        let entry = image
            .entries
            .iter()
            .find(|entry| entry.name.ends_with(b"usr/bin/kata-gpu-nvml"))?;
        Some((
            entry.header.mode,
            (entry.header.uid, entry.header.gid),
            entry.data.bytes(1 << 20).unwrap(),
        ))
    };
    assert_eq!(entry_of("new"), Some((0o100_755, (0, 0), helper.to_vec())));
    // An upgrade takes the place of what the last one added.
    let newer = [helper, b" of a later version"].concat();
    write(case.at("later"), &newer);
    let later = case.at("later").display().to_string();
    done(&run("new", "newer", &["--nvml", &later]));
    assert_eq!(entry_of("newer").unwrap().2, newer);
    assert_eq!(
        fs::metadata(case.at("newer")).unwrap().len(),
        fs::metadata(case.at("new")).unwrap().len()
    );
    done(&run("old", "without", &["--no-nvml"]));
    assert_eq!(entry_of("without"), None);
    // Another program, found, is left out, and that is said.
    write(case.at("kata-gpu-nvml"), "text");
    let said = done(&run("old", "other", &[]));
    assert!(
        said.contains("no kata-gpu-nvml was added: helper ") && entry_of("other").is_none(),
        "{said}"
    );
    // Links lead elsewhere.
    let case = Case::new("helper-link");
    fs::rename(case.at("root/usr/bin"), case.at("root/usr/programs")).unwrap();
    crate::link("programs", case.at("root/usr/bin"));
    case.make(EROFS, "old");
    write(case.at("kata-gpu-nvml"), helper);
    let mut command = case.command("old", "new");
    let output = command
        .arg("--nvml")
        .arg(case.at("kata-gpu-nvml"))
        .output()
        .unwrap();
    let why = stderr(&output);
    assert!(
        !output.status.success() && why.contains("not written through links: /usr/bin"),
        "{why}"
    );
}

#[test]
fn gzip_that_grows_without_bounds_is_refused_with_the_cure() {
    let dir = TempDir::new("gzip-bomb");
    let path = dir.0.join("bomb");
    // 200 MB of one file, of which 200 KB remain.
    write(&path, gzip(&entries(&[file("x", vec![0; 200 << 20])])));
    let before = fs::metadata(&path).unwrap().len();
    assert!(before < 1 << 20, "{before}");
    let said = format!("{:#}", Image::open(&path).unwrap_err());
    assert!(
        said.contains("compressed bytes grow to more than")
            && said.contains("unpack it with gzip -d"),
        "{said}"
    );
}

#[test]
fn files_larger_than_the_image_are_refused_with_the_cure() {
    if cannot_run(&[]) {
        return;
    }
    let case = Case::with_driver("sparse");
    let sparse = fs::File::create(case.at("root/usr/lib64/libnvidia-large.so.550.163.01")).unwrap();
    sparse.set_len(256 << 20).unwrap();
    case.make("mkfs.erofs --quiet --chunksize=4096 \"$2\" \"$1\"", "old");
    case.refused("old", "make it without sparse files");
}
