//! Comparison, item for item, of what a container sees with what `cdi check` predicts. The half
//! that runs in the container prints its items; the host's half makes the same items of a
//! prediction.
//!
//! An item is a name and a value: `node /dev/nvidia0` is `c 195:0 666 0:0`. A container without
//! GPUs on the same root is what the prediction is added to, so that everything that differs is
//! accounted for.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

pub const NAME: &str = "inside";
/// Items by name.
pub type Items = BTreeMap<String, String>;
/// Environment variable that asks for the devices; they do not bring it.
const ASKS: &str = "VISIBLE_CDI_DEVICES";
pub const PARAMS: &str = "/proc/driver/nvidia/params";
/// Flags of a mount that keep a container from something.
pub const FLAGS: [&str; 4] = ["nodev", "noexec", "nosuid", "ro"];

/// Prints what this container sees, as one JSON object. Arguments are devices (`195:0`) that its
/// cgroup is asked for.
pub fn run() {
    let mut items = Items::new();
    nodes(Path::new("/dev"), &mut items);
    for device in std::env::args().skip(1) {
        items.insert(format!("device c {device}"), access(&device));
    }
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    for line in text("/proc/self/mountinfo").lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        if let [_, _, _, _, at, options, ..] = fields[..] {
            items.insert(format!("mount {at}"), flags(options.split(',')));
        }
    }
    for (key, value) in std::env::vars().filter(|(key, _)| key != ASKS) {
        items.insert(format!("env {key}"), value);
    }
    let cache = std::fs::read("/etc/ld.so.cache").map_err(|e| e.to_string());
    match cache.and_then(|bytes| kata_gpu_init::formats::ld_so_cache::read(&bytes)) {
        Ok(cache) => items.extend(
            cache
                .entries
                .into_iter()
                .map(|e| (format!("library {}", e.name), e.path)),
        ),
        Err(error) => drop(items.insert("library".into(), error)),
    }
    for (key, value) in text(PARAMS)
        .lines()
        .filter_map(|line| line.split_once(": "))
    {
        items.insert(format!("params {key}"), value.into());
    }
    items.insert(
        "params write".into(),
        written(OpenOptions::new().write(true).open(PARAMS)),
    );
    println!("{}", serde_json::json!(items));
}

fn written(opened: std::io::Result<std::fs::File>) -> String {
    opened.map_or_else(|error| error.to_string(), |_| "done".into())
}

/// Device nodes below a directory.
fn nodes(directory: &Path, items: &mut Items) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(meta) = path.symlink_metadata() else {
            continue;
        };
        let kind = meta.file_type();
        if kind.is_dir() {
            nodes(&path, items);
        } else if kind.is_char_device() || kind.is_block_device() {
            let (major, minor) = (
                nix::sys::stat::major(meta.rdev()),
                nix::sys::stat::minor(meta.rdev()),
            );
            let kind = if kind.is_char_device() { "c" } else { "b" };
            let value = format!(
                "{kind} {major}:{minor} {:o} {}:{}",
                meta.mode() & 0o7777,
                meta.uid(),
                meta.gid()
            );
            items.insert(format!("node {}", path.display()), value);
        }
    }
}

/// Access to a character device that the cgroup allows: `m` to make a node, `r` and `w` to open the
/// node. A driver may refuse an open as well, but not with EPERM.
fn access(device: &str) -> String {
    use nix::errno::Errno;
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    const NODE: &str = "/dev/inside";
    let number = |text: &str| text.parse().unwrap_or(0);
    let (major, minor) = device
        .split_once(':')
        .map_or((0, 0), |(major, minor)| (number(major), number(minor)));
    if let Err(error) = mknod(
        NODE,
        SFlag::S_IFCHR,
        Mode::from_bits_truncate(0o600),
        makedev(major, minor),
    ) {
        return if error == Errno::EPERM {
            String::new()
        } else {
            error.to_string()
        };
    }
    let open = |write: bool| OpenOptions::new().read(!write).write(write).open(NODE);
    let allowed =
        |write| !open(write).is_err_and(|e| e.raw_os_error() == Some(Errno::EPERM as i32));
    let access = [
        Some("m"),
        allowed(false).then_some("r"),
        allowed(true).then_some("w"),
    ];
    let _unused = std::fs::remove_file(NODE);
    access.into_iter().flatten().collect()
}

pub fn flags<'a>(options: impl Iterator<Item = &'a str>) -> String {
    let mut flags: Vec<&str> = options.filter(|option| FLAGS.contains(option)).collect();
    flags.sort_unstable();
    flags.join(",")
}
