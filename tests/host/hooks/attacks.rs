//! A failure means that a hostile image makes a hook change something beside the container's root,
//! hang, or fail without a clear error. Each check is tried on a hook that joins paths, too, and
//! catches it.

use crate::hooks::container::{Container, DRIVER, LIBS, tree, with_section};
use crate::make_dir;
use kata_gpu_init::cdi::hooks::Outcome;
use kata_gpu_test_guest::own_mounts::in_own_mounts;
use kata_gpu_test_support::elf_stand_in as stand_in;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// End of a hook without an end. No verdict on a slow machine: the hooks' own limits, of seconds,
/// are reported in their notes.
const HANG: Duration = Duration::from_secs(300);
pub const NONE: Option<&str> = None;

/// Expected outcome of an attack.
#[derive(Clone, Copy)]
enum Then {
    /// An error with these words.
    Refused(&'static str),
    /// Success, with the effect inside the root that the function checks.
    Contained(fn(&Container, &Outcome)),
}
use Then::{Contained, Refused};

/// Name, image, words of the hook, and its outcome.
type Attack = (&'static str, fn(&Container), &'static str, Then);

/// Everything that is not the container's root.
pub fn surroundings(c: &Container) -> BTreeMap<PathBuf, String> {
    let mut all = tree(&c.outside(), &[]);
    all.extend(
        tree(&c.dir.0.join("bundle"), &["rootfs"])
            .into_iter()
            .map(|(p, s)| (Path::new("bundle").join(p), s)),
    );
    all
}

/// Runs a hook on a container that has its /proc, as it has when the agent runs one.
fn run(c: &Arc<Container>, words: &str) -> Result<Outcome, String> {
    let (container, words) = (Arc::clone(c), words.to_string());
    let proc = c.path("/proc");
    mount(Some("/proc"), &proc, NONE, MsFlags::MS_BIND, NONE).unwrap();
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || send.send(container.hook(&words)).unwrap());
    let result = receive.recv_timeout(HANG);
    umount2(&proc, MntFlags::MNT_DETACH).unwrap();
    result.unwrap_or_else(|e| panic!("the hook panicked, or did not end within {HANG:?}: {e}"))
}

fn device(c: &Container, path: &str, minor: u64) {
    make_dir(c.path(path).parent().unwrap());
    let number = makedev(1, minor);
    mknod(&c.path(path), SFlag::S_IFCHR, Mode::S_IRUSR, number).unwrap();
}

fn fifo(c: &Container, path: &str) {
    make_dir(c.path(path).parent().unwrap());
    nix::unistd::mkfifo(&c.path(path), Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
}

/// A file with this many names.
fn many(c: &Container, count: usize, prefix: &str, suffix: &str, content: &[u8]) {
    let name = |n: usize| format!("{prefix}{n}{suffix}");
    c.file(&name(0), content);
    (1..count).for_each(|n| fs::hard_link(c.path(&name(0)), c.path(&name(n))).unwrap());
}

fn instead(c: &Container, path: &str, target: impl AsRef<Path>) {
    let _unused = fs::remove_dir_all(c.path(path));
    c.link(path, target);
}

/// The usual good end.
fn works(c: &Container, _: &Outcome) {
    let found = c.finds("libcuda.so.1");
    assert!(
        found.as_ref().is_some_and(|p| p.ends_with("/libcuda.so.1")),
        "{found:?}"
    );
}

fn works_and_says(c: &Container, outcome: &Outcome, words: &str) {
    works(c, outcome);
    says(outcome, words);
}

fn says(outcome: &Outcome, words: &str) {
    assert!(
        outcome.notes.iter().any(|n| n.contains(words)),
        "{words:?} is not in {:?}",
        outcome.notes
    );
}

const CACHE: &str = "update-ldcache --folder /usr/lib/x86_64-linux-gnu --folder /opt/driver";
pub const PREPARE: &str = "prepare --host-driver-version=550.163.01 --link \
    libcuda.so.1::/usr/lib/x86_64-linux-gnu/libcuda.so --folder /usr/lib/x86_64-linux-gnu";

/// SONAMEs that would be paths, were they used as such, or that are no names.
const SONAMES: [&str; 5] = [
    "../../../outside/evil",
    "/etc/passwd",
    "..",
    "",
    "lib\nx.so",
];

/// Numbers at places of a library's header.
const PATCHES: [&[(usize, u64)]; 3] = [
    &[(32, u64::MAX - 8)],
    &[(64 + 56 + 32, u64::MAX), (64 + 56 + 40, u64::MAX)],
    &[(64 + 8, u64::MAX - 7), (64 + 16, 1)],
];

fn patched(c: &Container) {
    for (n, patches) in PATCHES.iter().enumerate() {
        let mut file = stand_in::library(Some("libpatched.so.1"), &[]);
        for (at, value) in *patches {
            file[*at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        c.file(&format!("/opt/driver/libpatched{n}.so.1"), &file);
    }
}

const ATTACKS: &[Attack] = &[
    // Parents that are links.
    (
        "etc-absolute",
        |c| instead(c, "/etc", c.outside().join("etc")),
        CACHE,
        Refused("open /etc: No such file"),
    ),
    (
        "etc-relative",
        |c| instead(c, "/etc", "../../outside/etc"),
        CACHE,
        Refused("open /etc: No such file"),
    ),
    (
        "etc-inside",
        |c| {
            instead(c, "/etc", "../../outside/etc");
            c.directory("/outside/etc");
        },
        CACHE,
        Contained(|c, _| assert!(c.path("/outside/etc/ld.so.cache").is_file())),
    ),
    (
        "etc-by-proc",
        |c| {
            instead(
                c,
                "/etc",
                Path::new("/proc/self/root")
                    .join(c.outside().join("etc").strip_prefix("/").unwrap()),
            )
        },
        CACHE,
        Refused("leads into another mount"),
    ),
    (
        "etc-by-cwd",
        |c| instead(c, "/etc", "/proc/self/cwd"),
        CACHE,
        Refused("leads into another mount"),
    ),
    (
        "etc-in-sys",
        |c| instead(c, "/etc", "/proc/sys/kernel"),
        CACHE,
        Refused("leads into another mount"),
    ),
    (
        "path-in-sys",
        |_| {},
        "create-symlinks --link a::/proc/sys/kernel/evil",
        Refused("leads into another mount"),
    ),
    (
        "path-by-proc",
        |_| {},
        "create-symlinks --link a::/proc/self/root/tmp/evil",
        Refused("leads into another mount"),
    ),
    (
        "etc-loop",
        |c| instead(c, "/etc", "etc"),
        CACHE,
        Refused("symbolic links"),
    ),
    (
        "etc-file",
        |c| {
            let _unused = fs::remove_dir_all(c.path("/etc"));
            c.file("/etc", b"")
        },
        CACHE,
        Refused("Not a directory"),
    ),
    (
        "no-etc",
        |c| fs::remove_dir_all(c.path("/etc")).unwrap(),
        CACHE,
        Contained(works),
    ),
    (
        "conf-directory",
        |c| instead(c, "/etc/ld.so.conf.d", c.outside().join("etc")),
        CACHE,
        Refused("open /etc/ld.so.conf.d: No such file"),
    ),
    (
        "lib-loop",
        |c| instead(c, "/lib", "/lib"),
        CACHE,
        Contained(|c, _| assert!(c.path("/etc/ld.so.cache").exists())),
    ),
    (
        "libraries-outside",
        |c| instead(c, LIBS, "../../../../outside"),
        "create-symlinks --link a::/usr/lib/x86_64-linux-gnu/liba.so --link \
            b::/usr/lib/x86_64-linux-gnu/gbm/libb.so",
        Refused("No such file"),
    ),
    (
        "parent-in-the-path",
        |_| {},
        "create-symlinks --link a::/usr/../../../../outside/link",
        Refused("is not there, and is not made"),
    ),
    (
        "profile-outside",
        |c| {
            c.link("/etc/nvidia", c.outside().join("etc"));
            device(c, "/dev/nvidia0", 0);
        },
        "update-application-profile",
        Refused("open /etc/nvidia: No such file"),
    ),
    (
        "compat-outside",
        |c| c.link("/usr/local/cuda", c.outside()),
        PREPARE,
        Contained(works),
    ),
    (
        "compat-loop",
        |c| c.link("/usr/local/cuda", "cuda"),
        PREPARE,
        Contained(|c, o| works_and_says(c, o, "leave /usr/local/cuda/compat alone")),
    ),
    // Things that are no files, where files belong.
    (
        "cache-link",
        |c| c.link("/etc/ld.so.cache", c.outside().join("etc/ld.so.cache")),
        CACHE,
        Contained(works),
    ),
    (
        "cache-fifo",
        |c| fifo(c, "/etc/ld.so.cache"),
        CACHE,
        Refused("write /etc/ld.so.cache: a FIFO is in its place"),
    ),
    (
        "cache-device",
        |c| device(c, "/etc/ld.so.cache", 3),
        CACHE,
        Refused("a device is in its place"),
    ),
    (
        "cache-directory",
        |c| c.directory("/etc/ld.so.cache"),
        CACHE,
        Refused("a directory is in its place"),
    ),
    (
        "cache-socket",
        |c| drop(UnixListener::bind(c.path("/etc/ld.so.cache")).unwrap()),
        CACHE,
        Refused("a socket is in its place"),
    ),
    (
        "conf-fifo",
        |c| {
            crate::remove(c.path("/etc/ld.so.conf"));
            fifo(c, "/etc/ld.so.conf")
        },
        CACHE,
        Contained(|c, o| works_and_says(c, o, "it is a FIFO, not a regular file")),
    ),
    (
        "conf-zero",
        |c| device(c, "/etc/ld.so.conf.d/a.conf", 5),
        CACHE,
        Contained(|c, o| works_and_says(c, o, "it is a device, not a regular file")),
    ),
    (
        "conf-kmsg",
        |c| c.link("/etc/ld.so.conf.d/a.conf", "/proc/kmsg"),
        CACHE,
        Contained(|c, o| works_and_says(c, o, "a file of the kernel's")),
    ),
    (
        "conf-outside",
        |c| c.link("/etc/ld.so.conf.d/a.conf", "../../../../outside/secret"),
        CACHE,
        Contained(works),
    ),
    (
        "link-over-fifo",
        |c| fifo(c, "/usr/lib/x86_64-linux-gnu/libcuda.so"),
        PREPARE,
        Refused("a FIFO is in its place"),
    ),
    (
        "soname-fifo",
        |c| fifo(c, "/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
        CACHE,
        Contained(|c, _| assert!(c.finds("libcuda.so.1").unwrap().ends_with(DRIVER))),
    ),
    // Libraries that are not what they seem.
    (
        "libraries-that-block",
        |c| {
            fifo(c, "/opt/driver/libfifo.so.1");
            c.link("/opt/driver/libtofifo.so.1", "libfifo.so.1");
            device(c, "/opt/driver/libzero.so.1", 5);
            c.link("/opt/driver/libtozero.so.1", "libzero.so.1");
            c.link("/opt/driver/libtomem.so.1", "/proc/self/mem");
            c.link("/opt/driver/libtoself.so.1", "/proc/self/exe");
            c.link("/opt/driver/libloop.so.1", "libloop.so.1");
        },
        CACHE,
        Contained(|c, o| {
            works(c, o);
            assert!(
                c.cache()
                    .entries
                    .iter()
                    .all(|e| !e.path.starts_with("/opt/driver")),
                "{:?}",
                c.cache()
            );
        }),
    ),
    (
        "huge-library",
        |c| {
            c.library("/opt/driver/libhuge.so.1", Some("libhuge.so.1"));
            File::options()
                .write(true)
                .open(c.path("/opt/driver/libhuge.so.1"))
                .unwrap()
                .set_len(1 << 40)
                .unwrap();
        },
        CACHE,
        Contained(works),
    ),
    (
        "impossible-segments-and-strings",
        patched,
        CACHE,
        Contained(works),
    ),
    (
        "sonames",
        |c| {
            for (n, soname) in SONAMES.iter().chain([&&*"x".repeat(4000)]).enumerate() {
                c.library(&format!("/opt/driver/libevil{n}.so.1"), Some(soname));
            }
        },
        CACHE,
        Contained(|c, o| {
            works(c, o);
            let is_said = |note: &&String| note.contains("is no file name");
            let said = o.notes.iter().filter(is_said).count();
            assert_eq!(said, SONAMES.len() + 1, "{:?}", o.notes);
        }),
    ),
    (
        "huge-note",
        |c| {
            let note = [
                [19, u32::MAX, 0].map(u32::to_le_bytes).concat(),
                b"NVIDIA Corporation\0\0{}".to_vec(),
            ]
            .concat();
            c.file(
                "/usr/local/cuda/compat/libcuda.so.999.1.1",
                &with_section(".note.cuda.fwd_compatibility", &note),
            );
        },
        PREPARE,
        Contained(|_, o| says(o, "description of 4294967295 bytes")),
    ),
    (
        "huge-note-section",
        |c| {
            let mut file = with_section(".note.cuda.fwd_compatibility", b"x");
            let at = u64::from_le_bytes(*file[40..].first_chunk().unwrap()) as usize + 64 + 32;
            file[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
            c.file("/usr/local/cuda/compat/libcuda.so.999.1.1", &file);
        },
        PREPARE,
        Contained(|_, o| says(o, "more than any such file has")),
    ),
    (
        "compat-fifo",
        |c| fifo(c, "/usr/local/cuda/compat/libcuda.so.999.1.1"),
        PREPARE,
        Contained(works),
    ),
    // Configurations without an end.
    (
        "conf-loop",
        |c| {
            c.file(
                "/etc/ld.so.conf.d/a.conf",
                b"include /etc/ld.so.conf\ninclude a.conf\ninclude ../ld.so.conf.d/a.conf\n",
            )
        },
        CACHE,
        Contained(works),
    ),
    (
        "conf-long-loop",
        |c| {
            c.file(
                "/etc/ld.so.conf.d/a.conf",
                b"include ./x/../a.conf\ninclude ../*.d/*.conf\n",
            )
        },
        CACHE,
        Contained(works),
    ),
    (
        "conf-lines",
        |c| {
            let lines: String = (0..100_000).map(|n| format!("/d{n}\n")).collect();
            c.file("/etc/ld.so.conf.d/a.conf", lines.as_bytes());
        },
        CACHE,
        Contained(|c, o| works_and_says(c, o, "came before it")),
    ),
    (
        "conf-huge",
        |c| c.file("/etc/ld.so.conf.d/a.conf", &vec![b'/'; 2_000_000]),
        CACHE,
        Contained(|c, o| works_and_says(c, o, "more than 1048576 bytes")),
    ),
    (
        "conf-globs",
        |c| {
            many(
                c,
                3000,
                "/etc/ld.so.conf.d/f",
                ".conf",
                b"include /etc/*/*/*\ninclude /etc/l*/*f*\n/opt\n",
            );
        },
        CACHE,
        Contained(|_, o| says(o, "leave out")),
    ),
    (
        "conf-stars",
        |c| {
            c.file(
                "/etc/ld.so.conf.d/a.conf",
                format!("include /{}\n", "*a".repeat(2000)).as_bytes(),
            )
        },
        CACHE,
        Contained(works),
    ),
    (
        "conf-long-lines",
        |c| {
            let mut line = vec![b'x'; 1_000_000];
            line[0] = b'/';
            many(c, 1000, "/etc/ld.so.conf.d/long", ".conf", &line);
        },
        CACHE,
        Contained(|c, o| {
            works_and_says(
                c,
                o,
                "a line of /etc/ld.so.conf.d/long0.conf: it has more than 4096 bytes",
            );
            says(o, "4194304 bytes or 2 s are over");
        }),
    ),
    (
        "conf-many-includes",
        |c| {
            many(
                c,
                1000,
                "/etc/ld.so.conf.d/many",
                ".conf",
                format!("include{}\n", " a".repeat(2000))
                    .repeat(200)
                    .as_bytes(),
            )
        },
        CACHE,
        Contained(|c, o| works_and_says(c, o, "includes: it takes too long")),
    ),
    (
        "stray-files",
        |c| many(c, 10_000, "/opt/driver/libstray", ".so", b""),
        CACHE,
        Contained(works),
    ),
    (
        "musl-path-fifo",
        |c| {
            c.library("/usr/lib/ld-musl-x86_64.so.1", None);
            fifo(c, "/etc/ld-musl-x86_64.path");
        },
        CACHE,
        Refused("read /etc/ld-musl-x86_64.path: it is a FIFO"),
    ),
];

#[test]
fn nothing_outside_the_root_changes_whatever_an_image_has() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("skipped: not root, which device nodes and mounts need");
    }
    in_own_mounts(|| ATTACKS.iter().for_each(attack));
}

fn attack((name, image, words, then): &Attack) {
    let c = Arc::new(Container::debian(&format!("attack-{name}")));
    c.directory("/proc");
    image(&c);
    let before = surroundings(&c);
    let result = run(&c, words);
    assert_eq!(
        surroundings(&c),
        before,
        "{name}: something outside the root has changed"
    );
    match (then, result) {
        (Refused(says), Err(error)) => assert!(error.contains(says), "{name}: {error}"),
        (Contained(check), Ok(outcome)) => check(&c, &outcome),
        (Refused(_), Ok(outcome)) => panic!("{name} was not refused: {outcome:?}"),
        (Contained(_), Err(error)) => panic!("{name} was refused: {error}"),
    }
    let leftovers = tree(&c.path(""), &["proc"])
        .into_keys()
        .filter(|p| p.to_str().unwrap().contains(".kata-gpu-init-"));
    assert_eq!(leftovers.count(), 0, "{name}: temporary files are left");
}

/// Behaviour of a hook that joins paths.
fn naive(c: &Container) -> std::io::Result<()> {
    fs::write(c.path("/etc/ld.so.cache"), "a new cache")?;
    let link = c.path(LIBS).join("libcuda.so");
    symlink("libcuda.so.1", link)
}

#[test]
fn a_hook_that_joins_paths_would_be_caught() {
    // Negative control of the comparison: on images with links, this one changes what is outside.
    let escapes: [fn(&Container); 4] = [
        |c| instead(c, "/etc", c.outside().join("etc")),
        |c| instead(c, "/etc", "../../outside/etc"),
        |c| c.link("/etc/ld.so.cache", c.outside().join("etc/ld.so.cache")),
        |c| instead(c, LIBS, "../../../../outside"),
    ];
    for (n, image) in escapes.into_iter().enumerate() {
        let c = Container::debian(&format!("naive-{n}"));
        image(&c);
        let before = surroundings(&c);
        naive(&c).unwrap();
        assert_ne!(
            surroundings(&c),
            before,
            "image {n}: the escape was not seen"
        );
    }
    let c = Container::debian("naive");
    let before = surroundings(&c);
    naive(&c).unwrap();
    assert_eq!(surroundings(&c), before, "an honest image is no escape");
}

/// A process that exchanges directories for links to outside and back as fast as it can.
struct Swapper(Child);

/// Hooks that run while directories are swapped.
const HOOKS: usize = 200;
/// Variable with the two paths that the swapper exchanges.
const SWAPS: &str = "KATA_GPU_TESTS_SWAPS";

impl Swapper {
    fn start(c: &Container) -> Self {
        let mut pairs = Vec::new();
        for (path, target) in [("/etc", "../../outside/etc"), (LIBS, "../../../../outside")] {
            let (path, other) = (c.path(path), c.path(&format!("{path}.other")));
            crate::link(target, &other);
            pairs.extend([path, other].map(|p| p.to_str().unwrap().to_string()));
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "hooks::attacks::swapper",
                "--ignored",
                "--nocapture",
            ])
            .env(SWAPS, pairs.join("\n"));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The swapper prints a line once it has begun.
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let begun = output
            .by_ref()
            .lines()
            .any(|line| line.unwrap() == "swapping");
        assert!(begun, "the other process has ended");
        child.stdout = Some(output.into_inner());
        Self(child)
    }

    /// Ends it; gives the number of rounds.
    fn stop(mut self) -> usize {
        drop(self.0.stdin.take());
        let output = self.0.wait_with_output().unwrap();
        let text = crate::stdout(&output);
        assert!(output.status.success(), "{text}");
        text.lines()
            .find_map(|l| l.strip_prefix("rounds: ")?.parse().ok())
            .unwrap_or_else(|| panic!("{text}"))
    }
}

#[test]
#[ignore = "the other process of a_link_that_is_swapped_in_while_hooks_run_leads_nowhere, which \
    starts it"]
fn swapper() {
    let swaps = std::env::var(SWAPS).expect("what to exchange");
    let paths: Vec<&str> = swaps.lines().collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The end of its input is the end of its work.
            let _unused = std::io::stdin().read_to_end(&mut Vec::new());
            stop.store(true, Ordering::Relaxed);
        });
        println!("\nswapping");
        let mut rounds = 0;
        while !stop.load(Ordering::Relaxed) {
            for pair in paths.chunks(2) {
                renameat2(
                    AT_FDCWD,
                    pair[0],
                    AT_FDCWD,
                    pair[1],
                    RenameFlags::RENAME_EXCHANGE,
                )
                .unwrap();
            }
            rounds += 1;
        }
        println!("\nrounds: {rounds}");
    });
}

#[test]
fn a_link_that_is_swapped_in_while_hooks_run_leads_nowhere() {
    let c = Container::debian("swap");
    let before = surroundings(&c);
    let swapping = Swapper::start(&c);
    // Anything may come of a hook in the middle of this, but nothing outside.
    let well = (0..HOOKS).filter(|_| c.hook(PREPARE).is_ok()).count();
    let rounds = swapping.stop();
    assert_eq!(surroundings(&c), before, "a swapped link led outside");
    assert!(
        rounds > HOOKS,
        "{well} of {HOOKS} hooks well, {rounds} rounds"
    );
    // Negative control: one that joins paths is caught by the same swapping.
    let c = Container::debian("swap-naive");
    let before = surroundings(&c);
    let swapping = Swapper::start(&c);
    let caught = (0..100 * HOOKS).any(|_| {
        let _unused = naive(&c);
        surroundings(&c) != before
    });
    swapping.stop();
    assert!(caught, "the swapping would not show an escape");
}
