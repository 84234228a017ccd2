//! A failure means that on a well-formed container the hooks do other things than the incumbent's:
//! a library is not found, a link leads to another version, a second run changes something, or the
//! driver's parameters can be written.

mod attacks;
pub mod container;
mod container_roots;
mod faults;
mod ldconfig;
mod reads;

use crate::hooks::container::{Container, DRIVER, LIBS, as_a_process, tree, with_section};
use crate::hooks::ldconfig::{comparable, ldconfig};
use kata_gpu_init::cdi::hooks;
use kata_gpu_test_guest::own_mounts::in_own_mounts;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const LIBCUDA: &str = "libcuda.so.550.163.01";
const COMPAT: &str = "/usr/local/cuda/compat";
const COMPAT_CONF: &str = "/etc/ld.so.conf.d/00-compat-kata-gpu-init.conf";
const FOLDERS_CONF: &str = "/etc/ld.so.conf.d/00-nvcr-kata-gpu-init.conf";

#[test]
fn one_hook_does_what_the_incumbents_four_do() {
    let (one, four) = (Container::debian("one"), Container::debian("four"));
    let links = format!(
        "--link libcuda.so.1::{LIBS}/libcuda.so --link \
        ../libnvidia-allocator.so.1::{LIBS}/gbm/nvidia-drm_gbm.so"
    );
    let version = format!("--host-driver-version={DRIVER}");
    for c in [&one, &four] {
        c.library(
            "/opt/elsewhere/libcuda-extra.so.1",
            Some("libcuda-extra.so.1"),
        );
        c.library(
            &format!("{COMPAT}/libcuda.so.560.35.03"),
            Some("libcuda.so.1"),
        );
        c.link(&format!("{COMPAT}/libcuda.so.1"), "libcuda.so.560.35.03");
    }
    let folders = format!("--folder {LIBS} --folder /opt/elsewhere");
    one.hook(&format!("prepare {links} {version} {folders}"))
        .unwrap();
    four.hook(&format!("create-symlinks {links}")).unwrap();
    four.hook(&format!("enable-cuda-compat {version}")).unwrap();
    four.hook(&format!("update-ldcache {folders}")).unwrap();
    four.hook("update-application-profile").unwrap();
    // Times and inodes differ.
    let content = |c: &Container| {
        let of = |p: &Path| {
            fs::read_link(c.path("").join(p)).map_or_else(
                |_| fs::read(c.path("").join(p)).unwrap_or_default(),
                |t| t.into_os_string().into_encoded_bytes(),
            )
        };
        tree(&c.path(""), &[])
            .into_keys()
            .map(|p| (p.clone(), String::from_utf8_lossy(&of(&p)).into_owned()))
            .collect::<Vec<_>>()
    };
    assert_eq!(content(&one), content(&four));
    one.leads("libcuda.so", "libcuda.so.1");
    one.leads("libcuda.so.1", LIBCUDA);
    one.leads("gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1");
    one.has(COMPAT_CONF, "/usr/local/cuda/compat\n");
    one.has(FOLDERS_CONF, "/opt/elsewhere\n");
    one.loads("libcuda.so.1", "/usr/local/cuda/compat/libcuda.so.1");
    one.loads(
        "libnvidia-ml.so.1",
        "/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    );
    one.loads("libcuda.so", "/lib/x86_64-linux-gnu/libcuda.so");
    one.loads("libcuda-extra.so.1", "/opt/elsewhere/libcuda-extra.so.1");
    if comparable() {
        // A later ldconfig in the container keeps all of it.
        let before = one.cache().entries;
        assert!(ldconfig(&["-r"], &one.path("")).status.success());
        assert_eq!(one.cache().entries, before);
    }
}

#[test]
fn a_second_run_changes_nothing_and_another_driver_reverts_it() {
    let c = Container::debian("again");
    c.library(
        &format!("{COMPAT}/libcuda.so.560.35.03"),
        Some("libcuda.so.1"),
    );
    let words = |version: &str| {
        format!(
            "prepare --link libcuda.so.1::{LIBS}/libcuda.so --host-driver-version={version} \
            --folder {LIBS}"
        )
    };
    assert!(c.hook(&words(DRIVER)).unwrap().edits > 3);
    let before = tree(&c.path(""), &[]);
    assert_eq!(c.hook(&words(DRIVER)).unwrap().edits, 0);
    assert_eq!(tree(&c.path(""), &[]), before);
    // The container starts again where the driver is newer than its libraries.
    c.hook(&words("570.1.1")).unwrap();
    assert_eq!(c.read(COMPAT_CONF), None);
    c.loads("libcuda.so.1", "/lib/x86_64-linux-gnu/libcuda.so.1");
}

#[test]
fn the_drivers_own_library_wins_over_one_that_the_image_brought() {
    for brought in ["535.54.03", "560.35.03"] {
        let c = Container::debian(&format!("brought-{brought}"));
        let brought = format!("libcuda.so.{brought}");
        c.library(&format!("{LIBS}/{brought}"), Some("libcuda.so.1"));
        c.link(&format!("{LIBS}/libcuda.so.1"), &brought);
        // Without a version there is no saying which is the driver's; a link that leads somewhere
        // stays.
        c.hook(&format!("update-ldcache --folder {LIBS}")).unwrap();
        c.leads("libcuda.so.1", &brought);
        c.hook(&format!(
            "prepare --host-driver-version={DRIVER} --folder {LIBS}"
        ))
        .unwrap();
        c.leads("libcuda.so.1", LIBCUDA);
    }
    // A link to nowhere is replaced by either.
    let c = Container::debian("nowhere");
    c.link(&format!("{LIBS}/libcuda.so.1"), "libcuda.so.470.1.1");
    c.hook(&format!("update-ldcache --folder {LIBS}")).unwrap();
    c.leads("libcuda.so.1", LIBCUDA);
}

#[test]
fn a_directory_of_the_images_own_gets_no_links() {
    let c = Container::debian("own-links");
    c.library("/usr/local/lib/libfoo.so.1.2", Some("libfoo.so.1"));
    c.library("/usr/local/lib/libnew.so.1.dpkg-new", Some("libnew.so.1"));
    c.hook(&format!("update-ldcache --folder {LIBS}")).unwrap();
    assert_eq!(c.target("/usr/local/lib/libfoo.so.1"), None);
    c.loads("libfoo.so.1", "/usr/local/lib/libfoo.so.1.2");
    assert_eq!(
        c.finds("libnew.so.1"),
        None,
        "a package manager has not finished writing it"
    );
}

#[test]
fn an_image_without_any_configuration_gets_one() {
    let c = Container::new("bare");
    c.driver("/opt/nvidia/lib");
    c.hook("update-ldcache --ldconfig-path /sbin/ldconfig --folder /opt/nvidia/lib")
        .unwrap();
    c.has("/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n");
    c.has(FOLDERS_CONF, "/opt/nvidia/lib\n");
    c.loads("libcuda.so.1", "/opt/nvidia/lib/libcuda.so.1");
    let mode = |path: &str| fs::metadata(c.path(path)).unwrap().permissions().mode() & 0o7777;
    let modes = ["/etc/ld.so.cache", "/etc/ld.so.conf", "/etc"].map(mode);
    assert_eq!(modes, [0o644, 0o644, 0o755]);
    // A configuration that includes nothing stays the image's; the folders are in the cache, first.
    let c = Container::new("own-conf");
    c.file("/etc/ld.so.conf", b"/opt/own\n");
    c.library("/opt/own/libcuda.so.1", Some("libcuda.so.1"));
    c.driver("/opt/nvidia/lib");
    c.hook("update-ldcache --folder /opt/nvidia/lib").unwrap();
    c.has("/etc/ld.so.conf", "/opt/own\n");
    c.loads("libcuda.so.1", "/opt/nvidia/lib/libcuda.so.1");
}

#[test]
fn a_musl_image_gets_its_path_file_and_no_cache() {
    let c = Container::new("alpine");
    c.library("/lib/ld-musl-x86_64.so.1", Some("libc.so"));
    c.driver("/usr/lib64");
    c.hook("update-ldcache --folder /usr/lib64 --folder /usr/lib")
        .unwrap();
    c.has(
        "/etc/ld-musl-x86_64.path",
        "/lib\n/usr/local/lib\n/usr/lib\n/usr/lib64\n",
    );
    assert!(!c.path("/etc/ld.so.cache").exists() && !c.path("/etc/ld.so.conf.d").exists());
    assert_eq!(
        c.target("/usr/lib64/libcuda.so.1").as_deref(),
        Some(LIBCUDA)
    );
    // Earlier lines of the file stay, in their place.
    c.file("/etc/ld-musl-x86_64.path", b"/lib:/opt/own");
    c.hook("update-ldcache --folder /usr/lib64 --folder /lib")
        .unwrap();
    c.has("/etc/ld-musl-x86_64.path", "/lib:/opt/own\n/usr/lib64\n");
    // With glibc's loader beside it (gcompat is none), both are served.
    c.file("/lib64/ld-linux-x86-64.so.2", b"");
    c.hook("update-ldcache --folder /usr/lib64").unwrap();
    assert!(c.finds("libcuda.so.1").is_some());
}

#[test]
fn cuda_libraries_of_the_image_are_chosen_by_their_note() {
    let note = |drivers: &str| {
        let text =
            format!(r#"{{"format":1,"CUDA version":"12.9","driver":[{drivers}],"device":[1]}}"#);
        let head = [19, text.len() as u32 + 1, 0]
            .map(u32::to_le_bytes)
            .concat();
        [
            head,
            b"NVIDIA Corporation\0\0".to_vec(),
            text.into_bytes(),
            vec![0],
        ]
        .concat()
    };

    for (test, drivers, wanted) in [
        ("listed", "535,550,575", true),
        ("unlisted", "535,570", false),
    ] {
        let c = Container::new(&format!("note-{test}"));
        c.file(
            "/opt/cuda/compat/libcuda.so.575.57.08",
            &with_section(".note.cuda.fwd_compatibility", &note(drivers)),
        );
        c.link("/usr/local/cuda", "../../../../opt/cuda");
        c.hook(&format!(
            "enable-cuda-compat --host-driver-version={DRIVER}"
        ))
        .unwrap();
        assert_eq!(c.read(COMPAT_CONF).is_some(), wanted, "{test}");
    }
    // Without a note the newer major version counts, in the folder that is given; two of them are
    // no choice.
    let c = Container::new("no-note");
    c.library("/compat/libcuda.so.560.1.1", None);
    let words = format!(
        "enable-cuda-compat --host-driver-version {DRIVER} --cuda-compat-container-root=/compat"
    );
    c.hook(&words).unwrap();
    c.has(COMPAT_CONF, "/compat\n");
    c.has("/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n");
    c.library("/compat/libcuda.so.570.1.1", None);
    let outcome = c.hook(&words).unwrap();
    assert!(
        outcome.notes[0].contains("both libcuda.so.560.1.1 and libcuda.so.570.1.1"),
        "{outcome:?}"
    );
    assert_eq!(c.read(COMPAT_CONF), None);
}

#[test]
fn the_profile_names_the_gpus_whose_nodes_the_container_has() {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("skipped: not root, which making device nodes needs");
    }
    let c = Container::new("profile");
    c.hook("update-application-profile").unwrap();
    assert!(
        !c.path("/etc").exists(),
        "a container without /dev got a profile"
    );
    c.directory("/dev");
    for (name, minor) in [
        ("nvidia0", 0),
        ("nvidia12", 12),
        ("nvidia99", 99),
        ("nvidiactl", 255),
        ("nvidia-uvm", 1),
    ] {
        mknod(
            &c.path("/dev").join(name),
            SFlag::S_IFCHR,
            Mode::S_IRUSR,
            makedev(195, minor),
        )
        .unwrap();
    }
    c.file("/dev/nvidia3", b"no device");
    c.hook("update-application-profile").unwrap();
    let text = c
        .read("/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf")
        .unwrap();
    let settings = r#""settings":["EGLVisibleDGPUDevices",0x1001]"#;
    assert_eq!(
        text,
        format!(
            r#"{{"profiles":[{{"name":"_container_",{settings}}}],"rules":[{{"pattern":[],"profile":"_container_"}}]}}"#
        )
    );
}

#[test]
fn the_parameters_are_covered_by_a_file_that_cannot_be_written() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("skipped: not root, which mounting needs");
    }
    let c = Container::new("params");
    c.file("/proc/driver/nvidia/params", b"ModifyDeviceFiles: 1\n");
    c.link("/proc/driver/link", "nvidia/params");
    c.link("/proc/linked", "driver/nvidia");
    c.directory("/proc/driver/directory");
    in_own_mounts(move || {
        use nix::mount::{MsFlags, mount};
        let none = None::<&str>;
        let scratch = c.dir.0.join("run");
        crate::make_dir(&scratch);
        mount(
            Some("tmpfs"),
            &scratch,
            Some("tmpfs"),
            MsFlags::empty(),
            none,
        )
        .unwrap();
        let root = hooks::container_root::ContainerRoot::open(&c.path("")).unwrap();
        let cover = |path: &str| {
            hooks::cover(&root, Path::new(path), b"ModifyDeviceFiles: 0\n", &scratch)
                .map_err(|e| e.to_string())
        };
        cover("/proc/driver/nvidia/params").unwrap();
        c.has("/proc/driver/nvidia/params", "ModifyDeviceFiles: 0\n");
        let path = c.path("/proc/driver/nvidia/params");
        let written = File::options()
            .write(true)
            .open(&path)
            .and_then(|mut f| f.write_all(b"x"))
            .unwrap_err();
        assert_eq!(written.raw_os_error(), Some(nix::libc::EROFS), "{written}");
        assert_eq!(
            fs::read_dir(&scratch).unwrap().count(),
            0,
            "the copy still has a name"
        );
        for (path, why) in [
            ("/proc/driver/link", "a link, not a regular file"),
            ("/proc/linked/params", "Too many symbolic links"),
            ("/proc/driver/directory", "a directory, not a regular file"),
            ("/proc/driver/nosuch", "No such file"),
        ] {
            let error = cover(path).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        // Negative control: without the mount the file is the one of before, and can be written.
        nix::mount::umount(&path).unwrap();
        crate::write(&path, b"ModifyDeviceFiles: 1 again\n");
    });
}

#[test]
fn the_program_is_the_hook_under_its_name_and_by_its_first_word() {
    let c = Container::debian("process");
    let state = c.state();
    for (name, words) in [
        ("/usr/bin/nvidia-cdi-hook", vec![]),
        ("kata-gpu-init", vec!["hook"]),
    ] {
        let run = |more: &[&str]| {
            as_a_process(
                name,
                &[&words[..], more].concat(),
                state.as_bytes(),
                &[("LD_PRELOAD", "/nosuch.so")],
            )
        };
        let Some(output) = run(&["update-ldcache", "--folder", LIBS]) else {
            return;
        };
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{output:?}"
        );
        c.loads("libcuda.so.1", "/lib/x86_64-linux-gnu/libcuda.so.1");
        crate::remove(c.path("/etc/ld.so.cache"));
        // A failure is one line that names the hook, the step and the value.
        let failed = run(&["create-symlinks", "--link", "a::/usr/lib"]).unwrap();
        let text = crate::stderr(&failed);
        assert_eq!(
            (failed.status.code(), text.lines().count()),
            (Some(1), 1),
            "{text}"
        );
        assert!(
            text.starts_with(
                "nvidia-cdi-hook: create-symlinks: link /usr/lib: a directory is in its place"
            ),
            "{text}"
        );
        let refused = run(&["chmod", "--mode", "755", "--path", "/dev"]).unwrap();
        assert!(
            !refused.status.success()
                && crate::stderr(&refused).contains("refused: it changes the mode"),
            "{refused:?}"
        );
        // A hook of a later generator must not keep a container from starting.
        let unknown = run(&["frobnicate", "--x"]).unwrap();
        assert!(
            unknown.status.success()
                && crate::stderr(&unknown).contains("unsupported hook \"frobnicate\""),
            "{unknown:?}"
        );
    }
    // Negative control: under another name it is no hook.
    let other = as_a_process("kata-gpu-init", &["update-ldcache"], state.as_bytes(), &[]).unwrap();
    assert_eq!(other.status.code(), Some(2), "{other:?}");
}
