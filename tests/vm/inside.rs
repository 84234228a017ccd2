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
const PARAMS: &str = "/proc/driver/nvidia/params";
/// Flags of a mount that keep a container from something.
const FLAGS: [&str; 4] = ["nodev", "noexec", "nosuid", "ro"];

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
    match cache.and_then(|bytes| kata_gpu_init::ld_so_cache::read(&bytes)) {
        Ok(cache) => items.extend(cache.entries.into_iter().map(|e| (format!("library {}", e.name), e.path))),
        Err(error) => drop(items.insert("library".into(), error)),
    }
    for (key, value) in text(PARAMS).lines().filter_map(|line| line.split_once(": ")) {
        items.insert(format!("params {key}"), value.into());
    }
    items.insert("params write".into(), written(OpenOptions::new().write(true).open(PARAMS)));
    println!("{}", serde_json::json!(items));
}

fn written(opened: std::io::Result<std::fs::File>) -> String {
    opened.map_or_else(|error| error.to_string(), |_| "done".into())
}

/// Device nodes below a directory.
fn nodes(directory: &Path, items: &mut Items) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(meta) = path.symlink_metadata() else { continue };
        let kind = meta.file_type();
        if kind.is_dir() {
            nodes(&path, items);
        } else if kind.is_char_device() || kind.is_block_device() {
            let (major, minor) = (nix::sys::stat::major(meta.rdev()), nix::sys::stat::minor(meta.rdev()));
            let kind = if kind.is_char_device() { "c" } else { "b" };
            let value = format!("{kind} {major}:{minor} {:o} {}:{}", meta.mode() & 0o7777, meta.uid(), meta.gid());
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
    let (major, minor) = device.split_once(':').map_or((0, 0), |(major, minor)| (number(major), number(minor)));
    if let Err(error) = mknod(NODE, SFlag::S_IFCHR, Mode::from_bits_truncate(0o600), makedev(major, minor)) {
        return if error == Errno::EPERM { String::new() } else { error.to_string() };
    }
    let open = |write: bool| OpenOptions::new().read(!write).write(write).open(NODE);
    let allowed = |write| !open(write).is_err_and(|e| e.raw_os_error() == Some(Errno::EPERM as i32));
    let access = [Some("m"), allowed(false).then_some("r"), allowed(true).then_some("w")];
    let _unused = std::fs::remove_file(NODE);
    access.into_iter().flatten().collect()
}

fn flags<'a>(options: impl Iterator<Item = &'a str>) -> String {
    let mut flags: Vec<&str> = options.filter(|option| FLAGS.contains(option)).collect();
    flags.sort_unstable();
    flags.join(",")
}

#[cfg(feature = "host")]
pub use host::{devices, differences, expected, items};

#[cfg(feature = "host")]
mod host {
    use super::*;
    use anyhow::{Context, Result};
    use serde_json::Value;

    /// Items as the program prints them. A cache has its folders as the loader's configuration has
    /// them.
    pub fn items(output: &str) -> Result<Items> {
        let items: Items = serde_json::from_str(output).with_context(|| format!("read {output:?}"))?;
        Ok(items
            .into_iter()
            .map(|(name, value)| if name.starts_with("library ") { (name, in_usr(&value)) } else { (name, value) })
            .collect())
    }

    fn list<'a>(gets: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
        gets[key].as_array().into_iter().flatten()
    }

    fn text<'a>(value: &'a Value, key: &str) -> &'a str {
        value[key].as_str().unwrap_or_default()
    }

    /// Devices that a prediction's rules are about.
    pub fn devices(gets: &Value) -> Vec<String> {
        list(gets, "cgroupRules").map(|rule| format!("{}:{}", rule["major"], rule["minor"])).collect()
    }

    /// Items that a container sees by the prediction `gets` of `cdi check --json`: those of a
    /// container without GPUs, and the added ones.
    pub fn expected(plain: &Items, gets: &Value) -> Items {
        let mut all = plain.clone();
        for node in list(gets, "deviceNodes") {
            let number = |key: &str| node[key].as_i64().unwrap_or(0);
            let (mode, uid, gid) = (number("fileMode"), number("uid"), number("gid"));
            let value = format!("{} {}:{} {mode:o} {uid}:{gid}", text(node, "type"), node["major"], node["minor"]);
            all.insert(format!("node {}", text(node, "path")), value);
        }
        for rule in list(gets, "cgroupRules").filter(|rule| rule["allow"] == true) {
            let mut access: Vec<char> = text(rule, "access").chars().collect();
            access.sort_unstable();
            all.insert(format!("device {} {}:{}", text(rule, "type"), rule["major"], rule["minor"]), access.into_iter().collect());
        }
        let mounts = || list(gets, "mounts").map(|mount| (in_usr(text(mount, "destination")), list(mount, "options")));
        for (at, options) in mounts() {
            all.insert(format!("mount {at}"), flags(options.filter_map(Value::as_str)));
        }
        for (key, value) in list(gets, "env").filter_map(|variable| variable.as_str()?.split_once('=')) {
            all.entry(format!("env {key}")).or_insert_with(|| value.into());
        }
        for hook in list(gets, "hooks") {
            let arguments: Vec<&str> = list(hook, "args").filter_map(Value::as_str).collect();
            let folders: Vec<&str> = arguments.windows(2).filter(|pair| pair[0] == "--folder").map(|pair| pair[1]).collect();
            for (at, _) in mounts() {
                let Some((folder, name)) = at.rsplit_once('/') else { continue };
                // By its SONAME: the loader looks for nothing else.
                if folders.contains(&folder) && name.rsplit_once(".so.").is_some_and(|(_, version)| !version.contains('.')) {
                    all.insert(format!("library {name}"), at.clone());
                }
            }
            if arguments.iter().any(|word| ["prepare", "disable-device-node-modification"].contains(word)) {
                all.insert(format!("mount {PARAMS}"), FLAGS.join(","));
                all.insert("params ModifyDeviceFiles".into(), "0".into());
                all.insert("params write".into(), std::io::Error::from(nix::errno::Errno::EROFS).to_string());
            }
        }
        all
    }

    /// A path in a root whose /bin, /lib and /sbin are links into /usr, as the kernel has it.
    fn in_usr(path: &str) -> String {
        let moved = ["/bin/", "/lib/", "/lib64/", "/sbin/"].iter().any(|folder| path.starts_with(folder));
        if moved { format!("/usr{path}") } else { path.into() }
    }

    /// Each item that is not what it is expected to be.
    pub fn differences(expected: &Items, seen: &Items) -> Vec<String> {
        let names: std::collections::BTreeSet<&String> = expected.keys().chain(seen.keys()).collect();
        let differs = |name: &&String| expected.get(*name) != seen.get(*name);
        names.into_iter().filter(differs).map(|name| format!("{name}: {:?}, not {:?}", seen.get(name), expected.get(name))).collect()
    }
}
