//! Hostile and odd files around `install`: links, other writers, odd encodings and
//! quoting, directories that cannot be written.

use crate::install::{World, done, from_words, toml_of};
use kata_gpu_boot::install::say;
use kata_gpu_image::install::drop_in_file;
use kata_gpu_image::kata::merge::Runtime;
use nix::sys::stat::Mode;
use nix::unistd::{Uid, mkfifo, setfsuid};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

const GO: &str = "go-qemu-nvidia-gpu";

/// Change of a good configuration or of a path.
type Do<T> = dyn Fn(&T);
/// A text, changed.
type Change = dyn Fn(&str) -> String;

fn text(world: &World, runtime: Runtime, key: &str) -> String {
    world
        .effective(runtime)
        .get(&["hypervisor", "qemu", key])
        .unwrap()
        .as_str()
        .unwrap()
        .to_string()
}

#[test]
fn a_linked_configuration_is_changed_where_the_runtime_looks() {
    let world = World::new("link", GO);
    // As kata-deploy leaves it: the old place is a link to the copy in a directory of its own.
    let old = world
        .root()
        .join("opt/kata/share/defaults/kata-containers/configuration-qemu-nvidia-gpu.toml");
    symlink(&world.config, &old).unwrap();
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
            &|w| symlink(w.drop_in("../../target", foreign), w.ours()).unwrap(),
            true,
            "is a symbolic link",
        ),
        (
            "a dangling link",
            &|w| symlink("/nonexistent", w.ours()).unwrap(),
            true,
            "is a symbolic link",
        ),
        (
            "a directory",
            &|w| fs::create_dir(w.ours()).unwrap(),
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
        fs::create_dir(world.config_d()).unwrap();
        make(&world);
        let before = world.snapshot();
        for said in [world.install_initrd(&[]), world.remove(&[])] {
            assert_eq!(said.code, 1, "{name}: {}", said.out);
            assert!(
                said.err.contains(why) && said.err.contains("60-kata-gpu-init.toml"),
                "{name}: {}",
                said.err
            );
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
            assert!(
                !target.exists() || fs::read_to_string(target).unwrap() == foreign,
                "{name}"
            );
        }
    }
}

#[test]
fn an_edited_file_of_ours_is_replaced_or_removed_only_by_force() {
    let world = World::new("edited", GO);
    done(&world.install_initrd(&["--param", "gpuinit.log=debug"]));
    let edited = fs::read_to_string(world.ours()).unwrap() + "default_memory = 4096\n";
    for forced in ["install", "uninstall"] {
        fs::write(world.ours(), &edited).unwrap();
        for said in [world.install_initrd(&[]), world.remove(&[])] {
            assert_eq!(said.code, 1, "{}", said.out);
            assert!(
                said.err.contains("was edited since it was written")
                    && said.err.contains("--force"),
                "{}",
                said.err
            );
            assert_eq!(fs::read_to_string(world.ours()).unwrap(), edited);
        }
        if forced == "install" {
            assert_eq!(world.install_initrd(&["--force"]).code, 0);
            let text = fs::read_to_string(world.ours()).unwrap();
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
        (
            "a directory",
            GO,
            &|p| fs::create_dir(p).unwrap(),
            "not a regular file",
        ),
        (
            "a FIFO, which must not hold us up",
            GO,
            &|p| mkfifo(p, Mode::S_IRWXU).unwrap(),
            "not a regular file",
        ),
        (
            "a dangling link",
            GO,
            &|p| symlink("/nonexistent", p).unwrap(),
            "read: ",
        ),
        (
            "a link that only Go follows",
            "rust-qemu-nvidia-gpu",
            &|p| symlink("/dev/null", p).unwrap(),
            "40-x",
        ),
        (
            "not UTF-8",
            GO,
            &|p| fs::write(p, b"a = '\xff'").unwrap(),
            "not UTF-8 from byte 5 on",
        ),
        (
            "UTF-16",
            GO,
            &|p| fs::write(p, b"\xff\xfea\0=\0\x31\0").unwrap(),
            "not UTF-8 from byte 0 on",
        ),
        (
            "endless",
            GO,
            &|p| symlink("/dev/zero", p).unwrap(),
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
            &|p| fs::write(p, format!("a = {}", "[".repeat(100_000))).unwrap(),
            "not TOML: line 1",
        ),
        (
            "twice the same key",
            GO,
            &|p| fs::write(p, "[a]\nb = 1\nb = 2\n").unwrap(),
            "not TOML: line 3",
        ),
    ];
    for (name, fixture, make, why) in cases {
        let world = World::new("entries", fixture);
        fs::create_dir(world.config_d()).unwrap();
        make(&world.config_d().join("40-x"));
        let said = world.install_initrd(&["--force"]);
        assert_eq!(said.code, 1, "{name}: {}", said.out);
        assert!(
            said.err.contains("config.d/40-x: ") && said.err.contains(why),
            "{name}: {}",
            said.err
        );
        assert!(!world.ours().exists(), "{name}");
    }
}

#[test]
fn a_link_in_config_d_is_refused_for_runtime_rs_alone() {
    for (fixture, code) in [(GO, 0), ("rust-qemu-nvidia-gpu", 1)] {
        let world = World::new("dir-link", fixture);
        fs::create_dir(world.config_d()).unwrap();
        fs::write(
            world.root().join("elsewhere.toml"),
            "[hypervisor.qemu]\nkernel_params = \"from=elsewhere\"\n",
        )
        .unwrap();
        symlink(
            world.root().join("elsewhere.toml"),
            world.config_d().join("40-x.toml"),
        )
        .unwrap();
        let said = world.install_initrd(&["--param", "gpuinit.log=off"]);
        assert_eq!(said.code, code, "{}", said.err);
        if code == 0 {
            assert_eq!(
                text(&world, Runtime::Go, "kernel_params"),
                "from=elsewhere gpuinit.log=off"
            );
        } else {
            assert!(
                said.err
                    .contains("40-x.toml: is a symbolic link, which runtime-rs refuses"),
                "{}",
                said.err
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
        let original = fs::read_to_string(&world.config).unwrap();
        let changed = change(&original);
        assert_ne!(changed, original, "{name}");
        fs::write(&world.config, &changed).unwrap();
        done(&world.install_initrd(&["--param", "gpuinit.log=off"]));
        assert_eq!(text(&world, Runtime::Go, "image"), "", "{name}");
        let params = text(&world, Runtime::Go, "kernel_params");
        assert_eq!(
            params, "cgroup_no_v1=all pci=realloc pci=nocrs pci=assign-busses gpuinit.log=off",
            "{name}"
        );
        assert_eq!(
            fs::read_to_string(&world.config).unwrap(),
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
    let params = text(&world, Runtime::Go, "kernel_params");
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
    assert!(
        said.code == 1
            && said
                .err
                .contains("the kernel cuts its command line at 2047"),
        "{}",
        said.err
    );
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
    assert!(
        done(&said)
            .chars()
            .all(|c| c == '\n' || (' '..='~').contains(&c)),
        "{:?}",
        said.out
    );
    world.edit("enable_template = false", "enable_template = true");
    world.drop_in(
        "99-\u{1b}[2J.toml",
        "[hypervisor.qemu]\nimage = \"\\u001b[2J\"\n",
    );
    let said = world.install_initrd(&[]);
    assert!(
        said.code == 1
            && said
                .err
                .chars()
                .all(|c| c == '\n' || (' '..='~').contains(&c)),
        "{:?}",
        said.err
    );
    assert!(said.err.contains("99-\\x1b[2J.toml"), "{}", said.err);
}

#[test]
fn an_initrd_path_with_quotes_and_blanks_is_written_unchanged() {
    let world = World::new("path", GO);
    let odd = world.root().join("a \"b\" \\ 'c' # é.cpio");
    fs::copy(&world.initrd, &odd).unwrap();
    done(&world.install(&["--initrd", odd.to_str().unwrap()]));
    assert_eq!(text(&world, Runtime::Go, "initrd"), odd.to_str().unwrap());
    let bad = world.root().join("a\nimage = x.cpio");
    fs::copy(&world.initrd, &bad).unwrap();
    let said = world.install(&["--initrd", bad.to_str().unwrap()]);
    assert!(
        said.code == 1 && said.err.contains("control characters"),
        "{}",
        said.err
    );
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
    assert!(text(&world, Runtime::Go, "initrd").starts_with('/'));
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
    fs::set_permissions(dir, fs::Permissions::from_mode(0o555)).unwrap();
    let before = world.snapshot();
    let said = as_nobody(|| world.install_initrd(&[]));
    assert_eq!(said.code, 2, "{}", said.out);
    assert!(
        said.err.contains("ermission denied") && said.err.contains("run it as root"),
        "{}",
        said.err
    );
    assert_eq!(world.snapshot(), before);
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    done(&world.install_initrd(&[]));
    fs::set_permissions(world.config_d(), fs::Permissions::from_mode(0o555)).unwrap();
    let said = as_nobody(|| world.remove(&[]));
    assert!(
        said.code == 2 && said.err.contains("run it as root") && world.ours().exists(),
        "{}",
        said.err
    );
    fs::set_permissions(world.config_d(), fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn an_unreadable_configuration_is_named_with_the_cure() {
    let world = World::new("unreadable", GO);
    fs::set_permissions(&world.config, fs::Permissions::from_mode(0o000)).unwrap();
    let said = as_nobody(|| world.install_initrd(&[]));
    assert!(
        said.code == 1
            && said
                .err
                .contains("configuration-qemu-nvidia-gpu.toml: read: Permission denied"),
        "{}",
        said.err
    );
}

#[test]
fn two_installs_at_once_do_not_mix() {
    let world = World::new("lock", GO);
    let held = drop_in_file::lock(world.config.parent().unwrap()).unwrap();
    for said in [world.install_initrd(&[]), world.remove(&[])] {
        assert!(
            said.code == 2 && said.err.contains("another install is at work"),
            "{}",
            said.err
        );
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
                let names: Vec<_> = fs::read_dir(world.config_d())
                    .unwrap()
                    .map(|entry| entry.unwrap().file_name())
                    .collect();
                assert_eq!(names, ["60-kata-gpu-init.toml"]);
                let table = toml_of(&fs::read(world.ours()).unwrap());
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
            &|w| fs::remove_file(w.config_d().join("10-a.toml")).unwrap(),
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
            &|w| fs::remove_file(&w.config).unwrap(),
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
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, &left).unwrap();
    done(&world.install_initrd(&[]));
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert!(
        fs::symlink_metadata(&left).is_err()
            && fs::symlink_metadata(world.ours()).unwrap().is_file()
    );
}

#[test]
fn rolling_back_works_when_the_configuration_is_broken_or_gone() {
    let cases: &[(&str, &Do<World>)] = &[
        ("broken", &|w| fs::write(&w.config, "[").unwrap()),
        ("gone", &|w| fs::remove_file(&w.config).unwrap()),
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
    let said = say(&args);
    assert!(
        said.code == 2
            && said
                .err
                .contains("is a directory: name the configuration file"),
        "{}{}",
        said.out,
        said.err
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
    fs::create_dir(world.config_d()).unwrap();
    done(&world.install_initrd(&[]));
    done(&world.remove(&[]));
    assert!(world.config_d().exists());
}
