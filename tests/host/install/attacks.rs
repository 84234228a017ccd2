//! A failure means that a link, another writer, an odd encoding or a directory that cannot be
//! written makes `install` change a file that is not its own, leave one in part, or misread the
//! configuration.

use crate::install::{World, done, from_words, toml_of};
use crate::{assert_printable, chmod, link, make_dir, remove, write};
use kata_gpu_boot::install::say;
use kata_gpu_image::install::{Report, drop_in_file};
use kata_gpu_image::kata::merge::Runtime;
use nix::sys::stat::Mode;
use nix::unistd::{Uid, mkfifo, setfsuid};
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;

const GO: &str = "go-qemu-nvidia-gpu";

/// Change of a good configuration or of a path.
type Do<T> = dyn Fn(&T);
/// A text, changed.
type Change = dyn Fn(&str) -> String;

fn text(world: &World, key: &str) -> String {
    world.key(Runtime::Go, "qemu", key)
}

/// Fails unless an install ended with this status and these texts.
#[track_caller]
fn fails(said: &Report, code: u8, texts: &[&str]) {
    assert_eq!(said.code, code, "{said:?}");
    for text in texts {
        assert!(said.err.contains(text), "no {text:?} in {}", said.err);
    }
}

#[test]
fn a_linked_configuration_is_changed_where_the_runtime_looks() {
    let world = World::new("link", GO);
    // As kata-deploy leaves it: the old place is a link to the copy in a directory of its own.
    let old = world
        .root()
        .join("opt/kata/share/defaults/kata-containers/configuration-qemu-nvidia-gpu.toml");
    link(&world.config, &old);
    let words = [
        "--kata-config",
        old.to_str().unwrap(),
        "--kata-version",
        "4.1.0",
        "--initrd",
        world.initrd.to_str().unwrap(),
    ];
    done(&say(&from_words(&words).unwrap()));
    assert!(world.ours().exists());
    assert!(
        !old.with_file_name("config.d").exists(),
        "the link's own directory is not read by any runtime"
    );
    done(&say(
        &from_words(&[&words[..2], &["--remove"]].concat()).unwrap()
    ));
    assert!(!world.ours().exists());
    assert_eq!(fs::read_link(&old).unwrap(), world.config);
}

/// A socket's path must be short where it is made.
fn socket(world: &World) {
    let short = world.root().join("s");
    drop(UnixListener::bind(&short).unwrap());
    fs::rename(short, world.ours()).unwrap();
}

#[test]
fn a_drop_in_of_our_name_that_is_none_of_ours_is_left_alone() {
    let foreign = "[hypervisor.qemu]\nimage = \"/mine\"\n";
    let cases: &[(&str, &Do<World>, bool, &str)] = &[
        (
            "a file of somebody else",
            &|w| drop(w.drop_in("60-kata-gpu-init.toml", foreign)),
            false,
            "was not written by kata-gpu-boot",
        ),
        (
            "a link",
            &|w| link(w.drop_in("../../target", foreign), w.ours()),
            true,
            "is a symbolic link",
        ),
        (
            "a dangling link",
            &|w| link("/nonexistent", w.ours()),
            true,
            "is a symbolic link",
        ),
        (
            "a directory",
            &|w| make_dir(w.ours()),
            false,
            "is not a file",
        ),
        (
            "a FIFO",
            &|w| mkfifo(&w.ours(), Mode::S_IRWXU).unwrap(),
            false,
            "is not a file",
        ),
        ("a socket", &|w| socket(w), false, "is not a file"),
    ];
    for (name, make, forcible, why) in cases {
        let world = World::new("own", GO);
        make_dir(world.config_d());
        make(&world);
        let before = world.snapshot();
        for said in [world.install_initrd(&[]), world.remove(&[])] {
            fails(&said, 1, &[why, "60-kata-gpu-init.toml"]);
            assert_eq!(world.snapshot(), before, "{name}");
        }
        assert_eq!(
            world.install_initrd(&["--force"]).code,
            u8::from(!forcible),
            "{name}"
        );
        if *forcible {
            // The link gives way, what it led to does not.
            assert!(
                fs::symlink_metadata(world.ours()).unwrap().is_file(),
                "{name}"
            );
            let target = world.config_d().join("../../target");
            assert!(!target.exists() || crate::text(target) == foreign, "{name}");
            remove(world.ours());
            make(&world);
            let said = world.remove(&["--force"]);
            assert!(done(&said).contains("which stays as it is"), "{name}");
            assert!(fs::symlink_metadata(world.ours()).is_err(), "{name}");
        }
    }
}

#[test]
fn an_edited_file_of_ours_is_replaced_or_removed_only_by_force() {
    let world = World::new("edited", GO);
    done(&world.install_initrd(&["--param", "gpuinit.log=debug"]));
    let edited = crate::text(world.ours()) + "default_memory = 4096\n";
    for forced in ["install", "uninstall"] {
        write(world.ours(), &edited);
        for said in [world.install_initrd(&[]), world.remove(&[])] {
            fails(&said, 1, &["was edited since it was written", "--force"]);
            assert_eq!(crate::text(world.ours()), edited);
        }
        if forced == "install" {
            assert_eq!(world.install_initrd(&["--force"]).code, 0);
            let text = crate::text(world.ours());
            assert!(
                !text.contains("default_memory") && text.contains("gpuinit.log=debug"),
                "{text}"
            );
        } else {
            assert_eq!(world.remove(&["--force"]).code, 0);
            assert!(!world.ours().exists());
        }
    }
}

#[test]
fn entries_of_config_d_that_break_the_runtime_are_named() {
    let cases: &[(&str, &str, &Do<Path>, &str)] = &[
        ("a directory", GO, &|p| make_dir(p), "not a regular file"),
        (
            "a FIFO, which must not hold us up",
            GO,
            &|p| mkfifo(p, Mode::S_IRWXU).unwrap(),
            "not a regular file",
        ),
        (
            "a dangling link",
            GO,
            &|p| link("/nonexistent", p),
            "read: ",
        ),
        (
            "a link that only Go follows",
            "rust-qemu-nvidia-gpu",
            &|p| link("/dev/null", p),
            "40-x",
        ),
        (
            "not UTF-8",
            GO,
            &|p| write(p, b"a = '\xff'"),
            "not UTF-8 from byte 5 on",
        ),
        (
            "UTF-16",
            GO,
            &|p| write(p, b"\xff\xfea\0=\0\x31\0"),
            "not UTF-8 from byte 0 on",
        ),
        (
            "endless",
            GO,
            &|p| link("/dev/zero", p),
            "not a regular file",
        ),
        (
            "large",
            GO,
            &|p| fs::File::create(p).unwrap().set_len(1 << 40).unwrap(),
            "more than 1048576 bytes",
        ),
        (
            "deep",
            GO,
            &|p| write(p, format!("a = {}", "[".repeat(100_000))),
            "not TOML: line 1",
        ),
        (
            "twice the same key",
            GO,
            &|p| write(p, "[a]\nb = 1\nb = 2\n"),
            "not TOML: line 3",
        ),
    ];
    for (name, fixture, make, why) in cases {
        let world = World::new("entries", fixture);
        make_dir(world.config_d());
        make(&world.config_d().join("40-x"));
        fails(
            &world.install_initrd(&["--force"]),
            1,
            &["config.d/40-x: ", why],
        );
        assert!(!world.ours().exists(), "{name}");
    }
}

#[test]
fn a_link_in_config_d_is_refused_for_runtime_rs_alone() {
    for (fixture, code) in [(GO, 0), ("rust-qemu-nvidia-gpu", 1)] {
        let world = World::new("dir-link", fixture);
        make_dir(world.config_d());
        let target = world.root().join("elsewhere.toml");
        write(
            &target,
            "[hypervisor.qemu]\nkernel_params = \"from=elsewhere\"\n",
        );
        link(target, world.config_d().join("40-x.toml"));
        let said = world.install_initrd(&["--param", "gpuinit.log=off"]);
        if code == 0 {
            done(&said);
            assert_eq!(
                text(&world, "kernel_params"),
                "from=elsewhere gpuinit.log=off"
            );
        } else {
            fails(
                &said,
                code,
                &["40-x.toml: is a symbolic link, which runtime-rs refuses"],
            );
        }
    }
}

#[test]
fn odd_encodings_and_quotes_are_read_as_by_the_runtimes() {
    fn crlf(text: &str) -> String {
        text.replace('\n', "\r\n")
    }
    let cases: &[(&str, &Change)] = &[
        ("CRLF", &crlf),
        ("a byte order mark", &|text| format!("\u{feff}{text}")),
        ("both", &|text| format!("\u{feff}{}", crlf(text))),
        ("no newline at the end", &|text| text.trim_end().into()),
        ("quoted section and keys", &|text| {
            text.replace("[hypervisor.qemu]", "[\"hypervisor\".'qemu']")
                .replace("\nkernel_params", "\n\"kernel\\u005fparams\"")
                .replace("\nimage", "\n'image'")
        }),
        ("dotted keys", &|text| {
            text.replace("[factory]", "[unknown.\"a.b\".c]\nd.e.f = 1\n[factory]")
        }),
        ("a multi-line string", &|text| {
            text.replace("\"cgroup_no_v1=all ", "\"\"\"\ncgroup_no_v1=all \\\n   ")
                .replace("pci=assign-busses\"", "pci=assign-busses\"\"\"")
        }),
    ];
    for (name, change) in cases {
        let world = World::new("odd", GO);
        let original = crate::text(&world.config);
        let changed = change(&original);
        assert_ne!(changed, original, "{name}");
        write(&world.config, &changed);
        done(&world.install_initrd(&["--param", "gpuinit.log=off"]));
        assert_eq!(text(&world, "image"), "", "{name}");
        let params = text(&world, "kernel_params");
        assert_eq!(
            params, "cgroup_no_v1=all pci=realloc pci=nocrs pci=assign-busses gpuinit.log=off",
            "{name}"
        );
        assert_eq!(
            crate::text(&world.config),
            changed,
            "{name}: the configuration itself is never touched"
        );
    }
}

#[test]
fn kernel_parameters_of_two_kilobytes_pass_and_longer_fail() {
    let word = |n: usize| format!("w{n:03}=\\\"a b {}\\\" ", "x".repeat(20));
    let fill = |words: usize| (0..words).map(word).collect::<String>();
    let world = World::new("long", GO);
    world.edit("cgroup_no_v1=all", fill(58).trim_end());
    done(&world.install_initrd(&["--param", "gpuinit.log=off"]));
    let params = text(&world, "kernel_params");
    assert!(
        params.len() > 1700
            && params.contains("w057=\"a b xx")
            && params.ends_with("\" pci=realloc pci=nocrs pci=assign-busses gpuinit.log=off"),
        "{params}"
    );
    assert_eq!(params.matches('"').count(), 116);
    let world = World::new("longer", GO);
    world.edit("cgroup_no_v1=all", fill(70).trim_end());
    let said = world.install_initrd(&[]);
    fails(&said, 1, &["the kernel cuts its command line at 2047"]);
    assert!(
        said.err.lines().all(|line| line.len() < 500),
        "a line a person can read: {}",
        said.err
    );
}

#[test]
fn values_of_the_configuration_cannot_write_to_the_terminal() {
    let world = World::new("escape", GO);
    world.edit(
        "/opt/kata/share/kata-containers/nvidia.image",
        "\\u001b[2J\\u202e\\u009b31m",
    );
    world.edit("agent.kata", "agent.\"\\u001b[31m\"");
    let said = world.install_initrd(&["--dry-run"]);
    assert_printable(done(&said));
    world.edit("enable_template = false", "enable_template = true");
    world.drop_in(
        "99-\u{1b}[2J.toml",
        "[hypervisor.qemu]\nimage = \"\\u001b[2J\"\n",
    );
    let said = world.install_initrd(&[]);
    fails(&said, 1, &["99-\\x1b[2J.toml"]);
    assert_printable(&said.err);
}

#[test]
fn an_initrd_path_with_quotes_and_blanks_is_written_unchanged() {
    let world = World::new("path", GO);
    let odd = world.root().join("a \"b\" \\ 'c' # é.cpio");
    fs::copy(&world.initrd, &odd).unwrap();
    done(&world.install(&["--initrd", odd.to_str().unwrap()]));
    assert_eq!(text(&world, "initrd"), odd.to_str().unwrap());
    let bad = world.root().join("a\nimage = x.cpio");
    fs::copy(&world.initrd, &bad).unwrap();
    let said = world.install(&["--initrd", bad.to_str().unwrap()]);
    fails(&said, 1, &["control characters"]);
}

#[test]
fn a_relative_path_becomes_absolute() {
    let world = World::new("relative", GO);
    let up = "../".repeat(std::env::current_dir().unwrap().components().count());
    let relative = format!(
        "{up}{}",
        world.initrd.to_str().unwrap().trim_start_matches('/')
    );
    done(&world.install(&["--initrd", &relative]));
    assert!(text(&world, "initrd").starts_with('/'));
}

/// Runs as somebody who may not write here: a thread has file system credentials of its own.
fn as_nobody<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    let nobody = Uid::from_raw(65534);
    std::thread::scope(|scope| {
        let run = move || {
            let _before = setfsuid(nobody);
            run()
        };
        scope.spawn(run).join().unwrap()
    })
}

#[test]
fn an_unwritable_directory_is_reported_with_the_cure_and_kept() {
    let world = World::new("read-only", GO);
    let dir = world.config.parent().unwrap();
    chmod(dir, 0o555);
    let before = world.snapshot();
    let said = as_nobody(|| world.install_initrd(&[]));
    fails(&said, 2, &["ermission denied", "run it as root"]);
    assert_eq!(world.snapshot(), before);
    chmod(dir, 0o755);
    done(&world.install_initrd(&[]));
    chmod(world.config_d(), 0o555);
    fails(&as_nobody(|| world.remove(&[])), 2, &["run it as root"]);
    assert!(world.ours().exists());
    chmod(world.config_d(), 0o755);
}

#[test]
fn an_unreadable_configuration_is_named_with_the_cure() {
    let world = World::new("unreadable", GO);
    chmod(&world.config, 0o000);
    let why = "configuration-qemu-nvidia-gpu.toml: read: Permission denied";
    fails(&as_nobody(|| world.install_initrd(&[])), 1, &[why]);
}

#[test]
fn two_installs_at_once_do_not_mix() {
    let world = World::new("lock", GO);
    let held = drop_in_file::lock(world.config.parent().unwrap()).unwrap();
    for said in [world.install_initrd(&[]), world.remove(&[])] {
        fails(&said, 2, &["another install is at work"]);
    }
    assert_eq!(
        world.install_initrd(&["--dry-run"]).code,
        0,
        "looking is allowed"
    );
    drop(held);
    done(&world.install_initrd(&[]));
}

#[test]
fn readers_see_the_old_or_the_new_file_and_never_a_piece() {
    let world = World::new("atomic", GO);
    done(&world.install_initrd(&[]));
    let over = std::sync::atomic::AtomicBool::new(false);
    let looks = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut looks = 0;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                assert_eq!(crate::names(world.config_d()), ["60-kata-gpu-init.toml"]);
                let table = toml_of(&crate::bytes(world.ours()));
                assert_eq!(table["hypervisor"]["qemu"]["image"].as_str(), Some(""));
                looks += 1;
            }
            looks
        });
        for round in 0..10 {
            done(&world.install(&["--param", &format!("gpuinit.gpus={round}")]));
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        reader.join().unwrap()
    });
    assert!(looks > 0);
}

#[test]
fn a_file_that_changes_while_it_is_looked_at_is_seen() {
    use kata_gpu_image::kata::kata_config::KataConfig;
    let cases: &[(&str, &Do<World>, &str)] = &[
        (
            "the configuration",
            &|w| w.edit("pci=nocrs", "pci=x"),
            "configuration-qemu-nvidia-gpu.toml",
        ),
        (
            "a drop-in",
            &|w| drop(w.drop_in("10-a.toml", "[runtime]\nenable_debug = true\n")),
            "10-a.toml",
        ),
        (
            "a new drop-in",
            &|w| drop(w.drop_in("70-b.toml", "")),
            "70-b.toml",
        ),
        (
            "a drop-in that goes",
            &|w| remove(w.config_d().join("10-a.toml")),
            "10-a.toml",
        ),
        (
            "our own",
            &|w| drop(w.drop_in("60-kata-gpu-init.toml", "# x\n")),
            "60-kata-gpu-init.toml",
        ),
        (
            "no TOML any more",
            &|w| drop(w.drop_in("10-a.toml", "[")),
            "10-a.toml",
        ),
        (
            "gone",
            &|w| remove(&w.config),
            "configuration-qemu-nvidia-gpu.toml",
        ),
    ];
    for (name, change, file) in cases {
        let world = World::new("changed", GO);
        world.drop_in("10-a.toml", "");
        let config = KataConfig::read(&world.config).unwrap();
        assert_eq!(config.changed_since(), None, "{name}: the negative control");
        change(&world);
        let changed = config
            .changed_since()
            .unwrap_or_else(|| panic!("{name}: not seen"));
        assert!(changed.ends_with(file), "{name}: {}", changed.display());
    }
}

#[test]
fn leftovers_of_an_interrupted_install_do_not_stop_the_next() {
    let world = World::new("left-over", GO);
    let left = world.config.with_file_name(".60-kata-gpu-init.toml.new");
    let victim = world.root().join("victim");
    write(&victim, "precious");
    link(&victim, &left);
    done(&world.install_initrd(&[]));
    assert_eq!(crate::text(&victim), "precious");
    assert!(
        fs::symlink_metadata(&left).is_err()
            && fs::symlink_metadata(world.ours()).unwrap().is_file()
    );
    // One that has nothing to write, and a removal, leave none either.
    for more in [&[][..], &["--remove"]] {
        write(&left, "half");
        match more {
            [] => done(&world.install_initrd(&[])),
            _ => done(&world.remove(&[])),
        };
        assert!(!left.exists(), "{more:?}");
    }
}

#[test]
fn rolling_back_works_when_the_configuration_is_broken_or_gone() {
    let cases: &[(&str, &Do<World>)] = &[
        ("broken", &|w| write(&w.config, "[")),
        ("gone", &|w| remove(&w.config)),
        ("another drop-in is broken", &|w| {
            drop(w.drop_in("99-x", "["))
        }),
    ];
    for (name, make) in cases {
        let world = World::new("roll-back", GO);
        done(&world.install_initrd(&[]));
        make(&world);
        done(&world.remove(&[]));
        assert!(!world.ours().exists(), "{name}");
    }
}

#[test]
fn a_directory_in_place_of_the_configuration_is_an_error() {
    let world = World::new("given-directory", GO);
    done(&world.install_initrd(&[]));
    let directory = world.config.parent().unwrap();
    let args = from_words(&["--remove", "--kata-config", directory.to_str().unwrap()]).unwrap();
    fails(
        &say(&args),
        2,
        &["is a directory: name the configuration file"],
    );
    assert!(world.ours().exists());
}

#[test]
fn a_directory_made_for_us_stays_when_somebody_uses_it() {
    let world = World::new("directory", GO);
    done(&world.install_initrd(&[]));
    world.drop_in("50-mine.toml", "[runtime]\nenable_debug = true\n");
    done(&world.remove(&[]));
    assert!(world.config_d().join("50-mine.toml").exists());
    // One that was there before us stays, empty as it is.
    let world = World::new("directory-before", GO);
    make_dir(world.config_d());
    done(&world.install_initrd(&[]));
    done(&world.remove(&[]));
    assert!(world.config_d().exists());
}
