//! A failure means that a file of the driver is missed, taken from the wrong version or from
//! outside the root, or read more often than once; for the reference root: that the choice differs
//! from the incumbent's.

use crate::{TempDir, golden, make_dir, project, tree};
use kata_gpu_init::driver_files::manifest::{self, Unusable};
use kata_gpu_init::driver_files::{DriverFiles, Kind, Roots, scan};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

const REFERENCE: &str = "kata-8gpu-550";

/// A root in a folder of its own, so that there is an outside.
struct Root {
    folder: TempDir,
    roots: Roots,
}

impl Root {
    fn new(test: &str, name: &str) -> Self {
        Self::with(test, &tree::description(name), "/", "/")
    }

    fn odd(test: &str, name: &str) -> Self {
        let (driver_root, dev_root) = super::odd_place(name);
        Self::with(
            test,
            &tree::description(&format!("roots/{name}")),
            driver_root,
            dev_root,
        )
    }

    fn with(test: &str, description: &str, driver_root: &str, dev_root: &str) -> Self {
        let folder = TempDir::new(&format!("driver-roots-{test}"));
        let root = folder.0.join("root");
        make_dir(&root);
        tree::build(&root, description);
        Self {
            folder,
            roots: Roots {
                root,
                driver_root: driver_root.into(),
                dev_root: dev_root.into(),
            },
        }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.roots.root.join(path.trim_start_matches('/'))
    }

    fn scan(&self) -> DriverFiles {
        scan(&self.roots, None).unwrap_or_else(|e| panic!("{e}"))
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        // A directory that nobody may read cannot be emptied.
        let unreadable = self.at("/usr/lib/i386-linux-gnu");
        if unreadable.exists() {
            crate::chmod(unreadable, 0o755);
        }
    }
}

/// Differences from the incumbent's choice for the reference root, with reasons.
const DIFFERENCES: &[(&str, &str)] = &[
    (
        "incumbent: mount /lib/firmware/nvidia/550.163.01/gsp_ga10x.bin on \
        /lib/firmware/nvidia/550.163.01/gsp_ga10x.bin",
        "the same file: our host paths hold no links, so that nothing has to follow them when a \
        container starts",
    ),
    (
        "incumbent: mount /lib/firmware/nvidia/550.163.01/gsp_tu10x.bin on \
        /lib/firmware/nvidia/550.163.01/gsp_tu10x.bin",
        "as above",
    ),
    (
        "ours: mount /usr/lib/firmware/nvidia/550.163.01/gsp_ga10x.bin on \
        /lib/firmware/nvidia/550.163.01/gsp_ga10x.bin",
        "as above",
    ),
    (
        "ours: mount /usr/lib/firmware/nvidia/550.163.01/gsp_tu10x.bin on \
        /lib/firmware/nvidia/550.163.01/gsp_tu10x.bin",
        "as above",
    ),
];

/// Mounts, links, library directories, version and libcuda's directory of the incumbent's spec, as
/// lines.
fn incumbents() -> BTreeSet<String> {
    let path = project()
        .join("tests/fixtures/cdi")
        .join(REFERENCE)
        .with_extension("json");
    let spec: serde_json::Value = serde_json::from_slice(&crate::bytes(path)).unwrap();
    let edits = &spec["containerEdits"];
    let mut lines = BTreeSet::new();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_string();
    for mount in edits["mounts"].as_array().unwrap() {
        let (from, to) = (text(&mount["hostPath"]), text(&mount["containerPath"]));
        lines.insert(format!("mount {from} on {to}"));
    }
    for hook in edits["hooks"].as_array().unwrap() {
        let arguments: Vec<String> = hook["args"].as_array().unwrap().iter().map(text).collect();
        for pair in arguments.windows(2) {
            match pair[0].as_str() {
                "--link" => {
                    let (target, path) = pair[1].split_once("::").unwrap();
                    lines.insert(format!("link {path} to {target}"));
                }
                "--folder" => drop(lines.insert(format!("library directory {}", pair[1]))),
                _ => {}
            }
        }
        let version = arguments
            .iter()
            .find_map(|a| a.strip_prefix("--host-driver-version="));
        lines.extend(version.map(|version| format!("version {version}")));
    }
    for env in edits["env"].as_array().unwrap().iter().map(text) {
        let directory = env.strip_prefix("NVIDIA_CTK_LIBCUDA_DIR=");
        lines.extend(directory.map(|directory| format!("libcuda in {directory}")));
    }
    lines
}

fn ours(files: &DriverFiles) -> BTreeSet<String> {
    let mounts = files.mounts.iter().map(|m| {
        format!(
            "mount {} on {}",
            m.host_path.display(),
            m.container_path.display()
        )
    });
    let links = files
        .links
        .iter()
        .map(|l| format!("link {} to {}", l.link.display(), l.target));
    let directories = files
        .library_directories
        .iter()
        .map(|d| format!("library directory {}", d.display()));
    let libcuda = files
        .libcuda_directory
        .iter()
        .map(|d| format!("libcuda in {}", d.display()));
    mounts
        .chain(links)
        .chain(directories)
        .chain(libcuda)
        .chain([format!("version {}", files.version)])
        .collect()
}

fn differences(files: &DriverFiles) -> BTreeSet<String> {
    let (theirs, ours) = (incumbents(), ours(files));
    assert!(theirs.len() > 25, "{theirs:#?}");
    let missing = theirs
        .difference(&ours)
        .map(|line| format!("incumbent: {line}"));
    missing
        .chain(ours.difference(&theirs).map(|line| format!("ours: {line}")))
        .collect()
}

#[test]
fn the_reference_root_gives_what_the_incumbent_gives_but_a_list() {
    let root = Root::new("reference", REFERENCE);
    let files = root.scan();
    assert_eq!(files.problems, Vec::<String>::new());
    let listed: BTreeSet<String> = DIFFERENCES
        .iter()
        .map(|(line, _)| (*line).to_string())
        .collect();
    assert_eq!(differences(&files), listed);

    // Negative control of the comparison.
    crate::remove(root.at("/usr/bin/nvidia-smi"));
    let differences = differences(&root.scan());
    assert!(
        differences.contains("incumbent: mount /usr/bin/nvidia-smi on /usr/bin/nvidia-smi"),
        "{differences:#?}"
    );
    assert_eq!(differences.len(), DIFFERENCES.len() + 1);
}

/// A result as text: one line for each thing.
fn shown(result: &Result<DriverFiles, String>) -> String {
    let files = match result {
        Ok(files) => files,
        Err(error) => return format!("error: {error}\n"),
    };
    let mut text = format!("version {}\n", files.version);
    let mut line = |line: String| writeln!(text, "{line}").unwrap();
    let libcuda = files
        .libcuda_directory
        .as_ref()
        .map_or("nowhere".into(), |d| d.display().to_string());
    line(format!("libcuda {libcuda}"));
    files
        .library_directories
        .iter()
        .for_each(|d| line(format!("directory {}", d.display())));
    for mount in &files.mounts {
        let kind = match mount.kind {
            Kind::File => "file",
            Kind::Socket => "socket",
        };
        line(format!(
            "{kind} {} <- {}",
            mount.container_path.display(),
            mount.host_path.display()
        ));
    }
    files.links.iter().for_each(|l| {
        line(format!(
            "link {} -> {} = {}",
            l.link.display(),
            l.target,
            l.file.display()
        ))
    });
    files
        .problems
        .iter()
        .for_each(|p| line(format!("problem {p}")));
    let absent = files.absent();
    absent
        .iter()
        .for_each(|name| line(format!("absent {name}")));
    text
}

#[test]
fn every_odd_root_gives_what_its_golden_file_says() {
    let mut names = super::odd_roots();
    names.retain(|name| !NEED_MORE.contains(&name.as_str()));
    assert!(names.len() >= 10, "{names:?}");
    for name in names {
        let root = Root::odd(&name, &name);
        let first = shown(&scan(&root.roots, None));
        golden(&format!("driver-files/{name}"), &first);
        assert_eq!(
            shown(&scan(&root.roots, None)),
            first,
            "{name}: two scans differ"
        );
    }
}

/// Roots with a test of their own.
const NEED_MORE: &[&str] = &["unreadable-directory", "links-out-of-the-root"];

#[test]
fn no_link_leads_out_of_the_root() {
    let root = Root::odd("links", "links-out-of-the-root");
    let outside = root.folder.0.join("outside");
    make_dir(&outside);
    for name in [
        "libnvidia-up.so.550.163.01",
        "libcuda.so.550.163.01",
        "nvidia-smi",
    ] {
        let bytes = kata_gpu_test_support::elf_stand_in::library(Some("liboutside.so.1"), &[]);
        crate::write(outside.join(name), bytes);
        crate::chmod(outside.join(name), 0o755);
    }
    // Negative control: whoever follows them as they are gets out.
    for path in [
        "/usr/lib64/libnvidia-up.so.550.163.01",
        "/usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01",
        "/usr/bin/nvidia-smi",
    ] {
        assert!(
            root.at(path).canonicalize().unwrap().starts_with(&outside),
            "{path} does not lead out of the root"
        );
    }
    golden(
        "driver-files/links-out-of-the-root",
        &shown(&scan(&root.roots, None)),
    );
}

#[test]
fn an_unreadable_directory_is_reported_and_hides_no_other() {
    let root = Root::odd("unreadable", "unreadable-directory");
    let readable = root.scan();
    let roots = root.roots.clone();
    // A thread of its own: it gives up root's rights over files.
    let scanned = std::thread::spawn(move || {
        nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
        shown(&scan(&roots, None))
    });
    golden(
        "driver-files/unreadable-directory",
        &scanned.join().unwrap(),
    );
    if nix::unistd::geteuid().is_root() {
        assert_eq!(
            readable.library_directories.len(),
            2,
            "negative control: whoever may read it finds both"
        );
    }
}

#[track_caller]
fn fails(roots: &Roots, version: Option<&str>, says: &str) {
    let error = scan(roots, version).unwrap_err().to_string();
    assert!(error.contains(says), "no {says:?} in {error}");
}

#[test]
fn the_version_that_is_expected_comes_before_that_of_the_module() {
    let root = Root::odd("expected", "version-mismatch");
    let asked = "the driver is 550.163.01 (as was asked for)";
    fails(&root.roots, Some("550.163.01"), asked);
    fails(
        &root.roots,
        Some("550.163.01"),
        "libnvidia-ml.so.570.124.06",
    );
    let two = Root::odd("expected-two", "two-versions");
    for version in ["550.163.01", "570.124.06"] {
        let files = scan(&two.roots, Some(version)).unwrap();
        assert_eq!((files.version.as_str(), files.mounts.len()), (version, 1));
    }
    fails(&two.roots, Some("999.1"), "the driver is 999.1");
    fails(
        &two.roots,
        Some("../etc"),
        "\"../etc\" is not a version of the driver",
    );
}

#[test]
fn a_root_that_is_not_there_is_named() {
    let gone = Root::odd("no-root", "management-only").roots.clone();
    fails(&gone, None, gone.root.to_str().unwrap());
    fails(&gone, None, "No such file or directory");
    let root = Root::odd("no-driver-root", "management-only");
    let roots = Roots {
        driver_root: "/run/nvidia/driver".into(),
        ..root.roots.clone()
    };
    fails(
        &roots,
        None,
        "open the root /run/nvidia/driver: no such directory",
    );
    let empty = Root::with("empty", "dir 0755 /usr/lib64\n", "/", "/");
    fails(
        &empty.roots,
        None,
        "no library directory below / has libcuda.so.<version>",
    );
}

#[test]
fn sockets_that_come_later_are_found_without_a_scan() {
    let root = Root::new("sockets", REFERENCE);
    let files = root.scan();
    assert!(files.mounts.iter().all(|m| m.kind == Kind::File));
    manifest::write(&root.roots, &files).unwrap();
    tree::build(
        &root.roots.root,
        "socket 0666 /run/nvidia-persistenced/socket\ndir 1777 /tmp/nvidia-mps\nfile 0644 \
        /run/nvidia-fabricmanager/socket\n",
    );
    let files = manifest::load(&root.roots, None).unwrap();
    let found: Vec<String> = files
        .mounts
        .iter()
        .filter(|m| m.kind == Kind::Socket)
        .map(|m| m.container_path.display().to_string())
        .collect();
    // A regular file in a socket's place is none.
    assert_eq!(
        found,
        ["/run/nvidia-persistenced/socket", "/tmp/nvidia-mps"]
    );
    assert_eq!(files, root.scan());
}

/// How often each directory is opened to be read meanwhile, and how often files in them are.
/// Closing is watched, too, because equal events that follow each other are reported as one.
fn opened(directories: &[PathBuf], work: impl FnOnce()) -> (BTreeMap<PathBuf, usize>, usize) {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK).unwrap();
    let events = AddWatchFlags::IN_OPEN | AddWatchFlags::IN_CLOSE;
    let watch = |path: &PathBuf| (inotify.add_watch(path, events).unwrap(), path.clone());
    let watches: Vec<_> = directories.iter().map(watch).collect();
    work();
    let (mut of_directories, mut files) = (BTreeMap::new(), 0);
    while let Ok(events) = inotify.read_events() {
        for event in events
            .iter()
            .filter(|e| e.mask.contains(AddWatchFlags::IN_OPEN))
        {
            let (_, path) = watches
                .iter()
                .find(|(watch, _)| *watch == event.wd)
                .unwrap();
            // Events without a name are of the directory itself.
            match event.name {
                None => *of_directories.entry(path.clone()).or_default() += 1,
                Some(_) => files += 1,
            }
        }
    }
    (of_directories, files)
}

#[test]
fn each_directory_is_read_once() {
    let root = Root::new("once", REFERENCE);
    let directories = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/lib/firmware/nvidia/550.163.01",
    ];
    let watched = directories.map(|d| root.at(d));
    let directories = |times| watched.each_ref().map(|path| (path.clone(), times)).into();
    let reads = |scans: usize| {
        let (of_directories, _) = opened(&watched, || (0..scans).for_each(|_| drop(root.scan())));
        of_directories
    };
    assert_eq!(reads(1), directories(1));
    assert_eq!(
        reads(2),
        directories(2),
        "negative control: reading twice is seen"
    );
    // None of ten thousand strays next to the libraries is opened.
    let strays = Root::odd("strays", "ten-thousand-strays");
    let folder = strays.scan().libcuda_directory.unwrap();
    let (of_directories, files) = opened(&[strays.at(folder.to_str().unwrap())], || {
        drop(strays.scan())
    });
    assert_eq!(of_directories.into_values().collect::<Vec<_>>(), [1]);
    assert!(files > 0 && files < 100, "{files} files were opened");
}

#[test]
fn a_manifest_gives_what_the_scan_gave_at_any_mount_point() {
    // Written while the image is built, where it is a root of its own.
    let disk = Root::odd("manifest-disk", "extension-disk");
    let build = Roots {
        root: disk.at("/run/kata-extensions/gpu"),
        ..Roots::default()
    };
    let (path, bytes) = manifest::write(&build, &scan(&build, None).unwrap()).unwrap();
    assert_eq!(
        (path, bytes < 8000),
        (
            PathBuf::from("/usr/share/kata-gpu-init/driver-files.json"),
            true
        ),
        "{bytes} bytes"
    );
    let loaded = manifest::load(&disk.roots, None).unwrap();
    assert_eq!(loaded, disk.scan());
    assert!(
        loaded.mounts.iter().any(|m| m.kind == Kind::Socket),
        "sockets are those of now"
    );
    let (files, why) = manifest::load_or_scan(&disk.roots, Some("595.45.04")).unwrap();
    assert_eq!((files, why), (loaded, None));
}

#[test]
fn a_manifest_keeps_files_to_which_links_lead_out_of_the_driver_root() {
    for name in ["nixos", "split-driver-root"] {
        let root = Root::odd(&name[..5], name);
        let files = root.scan();
        let (path, _) = manifest::write(&root.roots, &files).unwrap();
        assert_eq!(manifest::load(&root.roots, None), Ok(files), "{name}");
        // An update of the store under an old list is noticed.
        let text = crate::text(root.at(path.to_str().unwrap()));
        assert!(
            !text.contains("/nix/store/1") && !text.contains("/guest"),
            "{text}"
        );
        let outside = match name {
            "nixos" => "/nix/store/1-nvidia-x11/lib/libcuda.so.550.163.01",
            _ => "/guest/nvidia-persistenced",
        };
        crate::write(root.at(outside), "another one");
        let why = manifest::load(&root.roots, None).unwrap_err().to_string();
        assert!(why.contains(" has 11 bytes, it had "), "{why}");
    }
}

#[test]
fn a_manifest_outlives_changed_times_and_nothing_else() {
    let root = Root::new("manifest-stale", REFERENCE);
    let library = |name: &str| root.at("/usr/lib/x86_64-linux-gnu").join(name);
    let absent = manifest::load(&root.roots, None).unwrap_err();
    assert!(matches!(absent, Unusable::Absent { .. }), "{absent}");
    manifest::write(&root.roots, &root.scan()).unwrap();
    // A packer that sets all times.
    let touch = |seconds| {
        let time = std::fs::FileTimes::new()
            .set_modified(std::time::UNIX_EPOCH + Duration::from_secs(seconds));
        std::fs::File::open(library("."))
            .unwrap()
            .set_times(time)
            .unwrap();
    };
    touch(0);
    assert_eq!(manifest::load(&root.roots, None), Ok(root.scan()));

    let stale = |change: &dyn Fn(), undo: &dyn Fn(), part: &str| {
        change();
        let (files, why) = manifest::load_or_scan(&root.roots, None).unwrap();
        undo();
        let why = why.unwrap_or_else(|| panic!("not stale though {part}"));
        assert!(
            matches!(why, Unusable::Stale { .. }) && why.to_string().contains(part),
            "{why}"
        );
        assert!(!files.mounts.is_empty());
    };
    let new = library("libnvidia-new.so.550.163.01");
    stale(
        &|| {
            crate::write(&new, "");
            touch(1);
        },
        &|| crate::remove(&new),
        "/usr/lib/x86_64-linux-gnu has other entries",
    );
    let smi = root.at("/usr/bin/nvidia-smi");
    let old = crate::bytes(&smi);
    stale(
        &|| crate::write(&smi, "grown and grown"),
        &|| crate::write(&smi, &old),
        "nvidia-smi has 15 bytes, it had 19",
    );
    let moved = smi.with_file_name("moved");
    stale(
        &|| std::fs::rename(&smi, &moved).unwrap(),
        &|| std::fs::rename(&moved, &smi).unwrap(),
        "/usr/bin/nvidia-smi is gone",
    );
    // A link to a file of the same size, which a container would get in the place of this one.
    stale(
        &|| {
            std::fs::rename(&smi, &moved).unwrap();
            crate::link("moved", &smi);
        },
        &|| std::fs::rename(&moved, &smi).unwrap(),
        "/usr/bin/nvidia-smi is something else now",
    );
    assert!(
        manifest::load(&root.roots, None).is_ok(),
        "all changes are undone"
    );

    let why = manifest::load(&root.roots, Some("570.124.06"))
        .unwrap_err()
        .to_string();
    assert!(
        why.contains("the driver is 570.124.06 (as was asked for), it was written for 550.163.01"),
        "{why}"
    );
    let path = root.at(manifest::DIRECTORY).join(manifest::FILE);
    for (bytes, part) in [
        (&b"{\"schema\":1"[..], "EOF"),
        (b"", "EOF"),
        (
            &[b' '; manifest::MAX_BYTES + 7],
            "bytes: a manifest has at most",
        ),
    ] {
        crate::write(&path, bytes);
        let (_, why) = manifest::load_or_scan(&root.roots, None).unwrap();
        let why = why.unwrap();
        assert!(
            matches!(why, Unusable::Broken { .. }) && why.to_string().contains(part),
            "{why}"
        );
    }
    crate::remove(&path);
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let why = manifest::load(&root.roots, None).unwrap_err().to_string();
    assert!(why.contains("not a regular file"), "{why}");
}

#[test]
fn a_manifest_is_not_written_of_what_it_could_not_keep() {
    let refused = |root: &Root, why: &str| {
        let error = manifest::write(&root.roots, &root.scan()).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert!(!root.at(manifest::DIRECTORY).exists());
    };
    refused(
        &Root::odd("missing", "missing-soname-links"),
        "not all could be read",
    );
    // The path of a configuration in containers is not the one that leads out of the root.
    let root = Root::odd("config", "nixos");
    tree::build(&root.roots.root, "file 0644 /nix/store/x/icd\n");
    let vulkan = root.at("/nix/store/0-graphics-drivers/vulkan/icd.d");
    std::fs::create_dir_all(&vulkan).unwrap();
    crate::link("/nix/store/x/icd", vulkan.join("nvidia_icd.json"));
    refused(&root, "/nix/store/x/icd lies outside the driver root");
    // Its own path may lead out of the root, and does not.
    let root = Root::new("manifest-link", REFERENCE);
    crate::link("../../../outside", root.at("/usr/share/kata-gpu-init"));
    let outside = root.folder.0.join("outside");
    make_dir(&outside);
    assert!(manifest::write(&root.roots, &root.scan()).is_err());
    assert!(crate::names(outside).is_empty());
}
