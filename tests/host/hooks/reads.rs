//! A failure means that a hook reads a library more than once, so that a container's start grows
//! with names and links, or follows a chain of links for ever.

use crate::hooks::container::{Container, DRIVER, LIBS};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use std::collections::BTreeMap;

/// How often each file of these directories is opened for reading meanwhile; a descriptor that only
/// names a file opens nothing.
fn opened(
    container: &Container,
    directories: &[&str],
    work: impl FnOnce(),
) -> BTreeMap<String, usize> {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK).unwrap();
    for directory in directories {
        // Closing is watched, too, because equal events that follow each other are reported as one.
        inotify
            .add_watch(
                &container.path(directory),
                AddWatchFlags::IN_OPEN | AddWatchFlags::IN_CLOSE,
            )
            .unwrap();
    }
    work();
    let mut opened = BTreeMap::new();
    while let Ok(events) = inotify.read_events() {
        for event in events.iter().filter(|e| {
            e.mask.contains(AddWatchFlags::IN_OPEN) && !e.mask.contains(AddWatchFlags::IN_ISDIR)
        }) {
            *opened
                .entry(event.name.as_ref().unwrap().to_str().unwrap().to_string())
                .or_default() += 1;
        }
    }
    opened
}

#[test]
fn each_library_is_opened_once_whatever_its_names() {
    let c = Container::debian("reads");
    for (link, target) in [
        ("libz.so.1", "libz.so.1.2.13"),
        ("libz.so", "libz.so.1"),
        ("libzother.so.7", "/lib/x86_64-linux-gnu/libz.so.1.2.13"),
    ] {
        c.link(&format!("{LIBS}/{link}"), target);
    }
    c.library(&format!("{LIBS}/libz.so.1.2.13"), Some("libz.so.1"));
    // The driver's libraries have no links yet: the directory is gone through twice.
    let hook = || {
        drop(
            c.hook(&format!(
                "prepare --folder {LIBS} --host-driver-version={DRIVER}"
            ))
            .unwrap(),
        )
    };
    let once = opened(&c, &[LIBS, "/etc/ld.so.conf.d"], hook);
    for name in [
        "libz.so.1.2.13",
        "libc.so.6",
        &format!("libcuda.so.{DRIVER}"),
        "libc.conf",
        "x86_64-linux-gnu.conf",
    ] {
        assert_eq!(once.get(name), Some(&1), "{name} of {once:?}");
    }
    c.leads("libcuda.so.1", &format!("libcuda.so.{DRIVER}"));
    for name in ["libz.so.1", "libz.so", "libcuda.so.1"] {
        assert!(c.finds(name).is_some(), "{name}");
    }
    let twice = opened(&c, &[LIBS], || (0..2).for_each(|_| hook()));
    assert_eq!(
        twice.get("libc.so.6"),
        Some(&2),
        "negative control: reading twice is seen"
    );
}

#[test]
fn a_chain_of_links_ends_at_its_file_or_is_left_out() {
    let c = Container::debian("chain");
    c.library(&format!("{LIBS}/libend.so.1.0"), Some("libend.so.1"));
    let link = |n: usize, target: String| c.link(&format!("{LIBS}/libchain{n}.so"), target);
    // Longer than is followed by names alone, and what the kernel follows.
    (1..30).for_each(|n| link(n, format!("libchain{}.so", n + 1)));
    link(30, "libend.so.1.0".into());
    for (name, target) in [
        ("libloop.so", "libloop.so.1"),
        ("libloop.so.1", "libloop.so"),
        ("libgone.so", "libgone.so.1"),
        ("libself.so", "libself.so"),
    ] {
        c.link(&format!("{LIBS}/{name}"), target);
    }
    c.hook("update-ldcache").unwrap();
    let entries = c.cache().entries;
    let path = |name: &str| {
        entries
            .iter()
            .find(|e| e.name == name)
            .map(|e| e.path.rsplit('/').next().unwrap().to_string())
    };
    // A link of another name than the SONAME counts as the file.
    assert_eq!(path("libend.so.1").as_deref(), Some("libend.so.1.0"));
    assert!(
        entries.iter().all(|e| !["libloop", "libgone", "libself"]
            .iter()
            .any(|n| e.name.starts_with(n))),
        "{entries:?}"
    );
}
