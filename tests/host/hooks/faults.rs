//! A failure means that a hook which fails half-way leaves the container changed, that a malformed
//! state or bundle is taken, or that the image's environment reaches the hook's program.

use crate::hooks::attacks::{NONE, PREPARE, surroundings};
use crate::hooks::container::{Container, LIBS, as_a_process, program, tree};
use crate::remove;
use kata_gpu_test_guest::own_mounts::in_own_mounts;
use nix::mount::{MsFlags, mount};
use nix::sys::stat::Mode;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

fn bind(from: &Path, to: &Path) {
    mount(Some(from), to, NONE, MsFlags::MS_BIND, NONE).unwrap();
}

#[track_caller]
fn fails<T: std::fmt::Debug>(result: Result<T, String>, says: &str) {
    assert!(
        result.as_ref().is_err_and(|error| error.contains(says)),
        "{says}: {result:?}"
    );
}

/// Names and contents, without times.
fn contents(c: &Container) -> BTreeMap<PathBuf, (Option<PathBuf>, Option<Vec<u8>>)> {
    let of = |p: &PathBuf| {
        let path = c.path("").join(p);
        let link = fs::read_link(&path).ok();
        let content = fs::read(&path).ok().filter(|_| link.is_none());
        (link, content)
    };
    tree(&c.path(""), &["proc"])
        .into_keys()
        .map(|p| (p.clone(), of(&p)))
        .collect()
}

#[test]
fn a_hook_that_fails_leaves_the_container_as_it_was() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("skipped: not root, which mounts need");
    }
    let words = format!("update-ldcache --folder {LIBS} --folder /opt/driver");
    // While it prepares: a directory is where the last file goes.
    let conf = "/etc/ld.so.conf.d/00-nvcr-kata-gpu-init.conf";
    let image = |c: &Container| c.file(conf, b"/of/an/earlier/start\n");
    let c = Container::debian("undo-early");
    image(&c);
    c.directory("/etc/ld.so.cache");
    let before = contents(&c);
    fails(c.hook(&words), "a directory is in its place");
    assert_eq!(contents(&c), before);
    // While it puts things into place: the last file is a mount, which nothing replaces.
    let c = Arc::new(Container::debian("undo-late"));
    image(&c);
    c.file("/etc/ld.so.cache", b"mounted over");
    let before = contents(&c);
    let (container, hook) = (Arc::clone(&c), words.clone());
    let result = in_own_mounts(move || {
        bind(
            &container.outside().join("secret"),
            &container.path("/etc/ld.so.cache"),
        );
        container.hook(&hook)
    });
    fails(result, "write /etc/ld.so.cache: a mount is in its place");
    assert_eq!(contents(&c), before);
    // Nothing is written at all on a root that cannot be.
    let (container, hook) = (Arc::clone(&c), words.clone());
    let result = in_own_mounts(move || {
        let root = container.path("");
        bind(&root, &root);
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(NONE, &root, NONE, flags, NONE).unwrap();
        container.hook(&hook)
    });
    fails(result, "Read-only file system");
    assert_eq!(contents(&c), before);
    // Negative control: where nothing is in the way, all of it changes.
    c.hook(&words).unwrap();
    assert_eq!(c.read(conf).as_deref(), Some("/opt/driver\n"));
    assert!(
        c.target(&format!("{LIBS}/libcuda.so.1")).is_some() && c.finds("libcuda.so.1").is_some()
    );
}

#[test]
fn a_job_of_prepare_that_fails_keeps_no_other_from_being_done() {
    let conf = "/etc/ld.so.conf.d/00-compat-kata-gpu-init.conf";
    let (link, other) = ("libcuda.so", "libnvidia-ml.so");
    let words = format!("{PREPARE} --link libnvidia-ml.so.1::{LIBS}/{other}");
    for (name, spoil, says) in [
        (
            "cache",
            (|c| c.directory("/etc/ld.so.cache")) as fn(&Container),
            "write /etc/ld.so.cache: a directory is in its place",
        ),
        (
            "links",
            |c| c.directory(&format!("{LIBS}/libcuda.so")),
            "link /usr/lib/x86_64-linux-gnu/libcuda.so: a directory",
        ),
    ] {
        let c = Container::debian(&format!("jobs-{name}"));
        c.file(conf, b"/of/an/earlier/start\n");
        spoil(&c);
        fails(c.hook(&words), says);
        assert_eq!(c.read(conf), None, "{name}: the compat job");
        let is_link = |link: &str| c.target(&format!("{LIBS}/{link}")).is_some();
        for link in [link, other] {
            assert_eq!(is_link(link), name != "links", "{name}: {link}");
        }
        // The links to SONAMEs belong to the cache's job: all of it or nothing.
        assert_eq!(is_link("libcuda.so.1"), name != "cache", "{name}: its link");
        // A cache that lists a link which was not made sends the loader to nowhere.
        if name == "links" {
            assert!(c.finds("libcuda.so.1").is_some(), "the cache's job");
            let listed = [link, other].map(|link| c.finds(link));
            assert_eq!(listed, [None, None], "links that were not made");
        }
    }
}

#[test]
fn malformed_bundles_and_states_are_refused() {
    let root = |path: &str| serde_json::json!({ "root": { "path": path } }).to_string();
    let cases: &[(&str, &str, &str)] = &[
        (
            "the guest's root",
            &root("/"),
            "this is the root of the guest itself",
        ),
        (
            "the guest's root again",
            &root("/usr/.."),
            "this is the root of the guest itself",
        ),
        (
            "by a link of the kernel's",
            &root("/proc/self/root"),
            "symbolic links",
        ),
        (
            "a file system of the kernel's",
            &root("/proc"),
            "this is a file system of the kernel's",
        ),
        ("relative", &root("rootfs"), "is not absolute"),
        ("empty", &root(""), "is not absolute"),
        ("nowhere", &root("/nosuch/rootfs"), "No such file"),
        ("a file", &root("/etc/hostname"), "Not a directory"),
        ("no root", "{}", "no \"root.path\""),
        ("garbage", "\0\u{1}garbage", "no OCI configuration"),
        (
            "huge",
            &format!("{{\"x\":\"{}\"}}", "x".repeat(5 << 20)),
            "more than 4194304 bytes",
        ),
        ("deep", &"[".repeat(1 << 20), "no OCI configuration"),
    ];
    for (name, config, says) in cases {
        let c = Container::debian("bundle");
        c.config(config);
        let before = (surroundings(&c), contents(&c));
        fails(c.hook(PREPARE), says);
        assert_eq!((surroundings(&c), contents(&c)), before, "{name}");
    }
    let c = Container::debian("state");
    let config = c.dir.0.join("bundle/config.json");
    let states: &[(&[u8], &str)] = &[
        (b"", "no OCI state"),
        (b"\xff\xfe", "no OCI state"),
        (b"{}", "no \"bundle\""),
        (br#"{"bundle":"."}"#, "not absolute"),
        (&[b' '; 70_000], "more than 65536 bytes"),
    ];
    for (state, says) in states {
        fails(c.hook_with_state(PREPARE, state), says);
    }
    remove(&config);
    fails(c.hook(PREPARE), "config.json: No such file");
    crate::link("/etc/hostname", &config);
    fails(
        c.hook(PREPARE),
        "config.json: Too many levels of symbolic links",
    );
    remove(&config);
    nix::unistd::mkfifo(&config, Mode::S_IRUSR).unwrap();
    fails(c.hook(PREPARE), "config.json: it is not a regular file");
}

#[test]
fn the_environment_changes_nothing() {
    let environment = [
        ("LD_PRELOAD", "/tmp/evil.so"),
        ("LD_LIBRARY_PATH", "/tmp/evil"),
        ("LD_AUDIT", "/tmp/evil.so"),
        ("NVIDIA_VISIBLE_DEVICES", "all"),
        ("NVIDIA_CTK_DEBUG", "true"),
        ("NVIDIA_CTK_LIBCUDA_DIR", "/tmp/evil"),
        ("PATH", "/tmp/evil"),
        ("HOME", "/root"),
        ("RUST_LOG", "trace"),
        ("TMPDIR", "/tmp/evil"),
    ];
    let run = |test: &str, environment: &[(&str, &str)]| {
        let c = Container::debian(test);
        let words: Vec<&str> = PREPARE.split(' ').collect();
        let output = as_a_process("nvidia-cdi-hook", &words, c.state().as_bytes(), environment)?;
        assert!(
            output.status.success() && output.stderr.is_empty() && output.stdout.is_empty(),
            "{output:?}"
        );
        Some(contents(&c))
    };
    let (Some(with), Some(without)) = (
        run("with-environment", &environment),
        run("without-environment", &[]),
    ) else {
        return;
    };
    assert!(with == without && with.contains_key(Path::new("etc/ld.so.cache")));
}

/// A library that says that it was loaded by making a file; None without a compiler.
fn telltale(folder: &Path, marker: &Path) -> Option<PathBuf> {
    let (source, library) = (folder.join("telltale.c"), folder.join("telltale.so"));
    let text = format!(
        "#include <fcntl.h>\n__attribute__((constructor)) static void mark(void) {{ \
        open({marker:?}, O_CREAT | O_WRONLY, 0600); }}\n"
    );
    crate::write(&source, text);
    match Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source)
        .status()
    {
        Ok(status) => {
            assert!(status.success(), "cc: {status}");
            Some(library)
        }
        Err(error) => {
            eprintln!("skipped: cc: {error}");
            None
        }
    }
}

/// CVE-2025-23266: a runtime that hands the image's environment on. The guest's program has no
/// loader that would look at it.
#[test]
fn a_library_that_the_environment_preloads_is_not_loaded() {
    let guests = crate::guests_init();
    if !crate::are_built(std::slice::from_ref(&guests), "hooks") {
        return;
    }
    let c = Container::debian("preload");
    let marker = c.dir.0.join("loaded");
    let Some(library) = telltale(&c.dir.0, &marker) else {
        return;
    };
    for variable in ["LD_PRELOAD", "LD_AUDIT"] {
        let mut hook = Command::new(&guests);
        hook.args(["hook"])
            .args(PREPARE.split(' '))
            .env_clear()
            .env(variable, &library)
            .stdin(Stdio::piped());
        let mut child = hook.spawn().unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(c.state().as_bytes())
            .unwrap();
        assert!(child.wait().unwrap().success() && c.finds("libcuda.so.1").is_some());
        assert!(!marker.exists(), "{variable}: the library was loaded");
    }
    // Negative control: a program with a loader.
    assert!(
        Command::new("/bin/true")
            .env("LD_PRELOAD", &library)
            .status()
            .unwrap()
            .success()
    );
    assert!(
        marker.exists(),
        "the library would not have said that it was loaded"
    );
}

#[test]
fn a_hook_goes_first_where_memory_is_short() {
    let guests = crate::guests_init();
    if !crate::are_built(std::slice::from_ref(&guests), "hooks") {
        return;
    }
    // A hook that waits for its state.
    let mut child = Command::new(&guests)
        .args(["hook", "prepare"])
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let score = PathBuf::from(format!("/proc/{}/oom_score_adj", child.id()));
    crate::collect::until("the hook's score", || crate::text(&score).trim() == "1000");
    drop(child.stdin.take());
    child.wait().unwrap();
}

#[test]
fn a_closed_standard_error_does_not_fail_a_hook() {
    let Some(program) = program() else { return };
    let (read_end, write_end) = nix::unistd::pipe().unwrap();
    drop(read_end);
    // The hook has a line to print: there is none of this name.
    let status = Command::new(program)
        .args(["hook", "of-another-spec"])
        .stderr(write_end)
        .status();
    assert!(status.as_ref().is_ok_and(|s| s.success()), "{status:?}");
}

/// kata-agent's umask is what its own start was given.
#[test]
fn what_a_hook_makes_can_be_read_whatever_the_umask_is() {
    let guests = crate::guests_init();
    if !crate::are_built(std::slice::from_ref(&guests), "hooks") {
        return;
    }
    let c = Container::debian("umask");
    fs::remove_dir_all(c.path("/etc")).unwrap();
    let mut child = Command::new("sh")
        .args([
            "-c",
            "umask 077; exec \"$0\" hook update-ldcache --folder \"$1\"",
        ])
        .arg(&guests)
        .arg("/opt/driver")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut state = child.stdin.take().unwrap();
    state.write_all(c.state().as_bytes()).unwrap();
    drop(state);
    assert!(child.wait().unwrap().success());
    for (path, mode) in [("/etc", 0o755), ("/etc/ld.so.cache", 0o644)] {
        let meta = fs::metadata(c.path(path)).unwrap();
        assert_eq!(meta.permissions().mode() & 0o777, mode, "{path}");
    }
}

/// A volume of the container's, which other containers and the host may have, too.
#[test]
fn no_hook_writes_into_a_volume_wherever_it_is_mounted() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("skipped: not root, which mounts need");
    }
    const ELSEWHERE: &str = "leads into another mount";
    for (name, link) in [("absolute", "/data"), ("relative", "../rootfs/data/.")] {
        let c = Arc::new(Container::debian(&format!("volume-{name}")));
        fs::remove_dir_all(c.path("/etc")).unwrap();
        c.link("/etc", link);
        c.directory("/data");
        c.directory("/rootfs/data");
        let container = Arc::clone(&c);
        let (result, before, after) = in_own_mounts(move || {
            let volume = container.outside().join("volume");
            crate::make_dir(&volume);
            for place in ["/data", "/rootfs/data"] {
                bind(&volume, &container.path(place));
            }
            let before = surroundings(&container);
            (container.hook(PREPARE), before, surroundings(&container))
        });
        fails(result, ELSEWHERE);
        assert_eq!(before, after, "{name}: the volume has changed");
    }
    // A volume that the path itself names, as a hostPath at /etc; only the tmpfs at /dev is the
    // container's own.
    let c = Arc::new(Container::debian("volume-named"));
    let container = Arc::clone(&c);
    let (results, there, before, after) = in_own_mounts(move || {
        bind(&container.outside().join("etc"), &container.path("/etc"));
        container.directory("/dev");
        let (tmpfs, dev) = (Some("tmpfs"), container.path("/dev"));
        mount(tmpfs, &dev, tmpfs, MsFlags::empty(), NONE).unwrap();
        let before = surroundings(&container);
        let link = |at: &str| {
            container.hook(&format!(
                "create-symlinks --link ../card1::{at}/dri/by-path/card"
            ))
        };
        let results =
            [container.hook(PREPARE), link("/etc"), link("/dev")].map(|result| result.map(drop));
        (
            results,
            container.target("/dev/dri/by-path/card"),
            before,
            surroundings(&container),
        )
    });
    assert_eq!(before, after, "the volume has changed");
    let [prepared, in_etc, in_dev] = results;
    assert!(
        prepared
            .as_ref()
            .is_err_and(|e| e.contains("write /etc/ld.so.c")),
        "{prepared:?}"
    );
    fails(prepared, ELSEWHERE);
    fails(in_etc, ELSEWHERE);
    assert_eq!((in_dev, there.as_deref()), (Ok(()), Some("../card1")));
    // The link that prepare makes is no part of the volume.
    assert!(c.target(&format!("{LIBS}/libcuda.so")).is_some());
}
