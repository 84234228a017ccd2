//! Comparison of a container's items, which its half in the guest prints, with a prediction's.

use anyhow::{Context, Result};
use kata_gpu_test_guest::halves::inside::{FLAGS, Items, PARAMS, flags};
use serde_json::Value;

/// Items as the program prints them. A cache has its folders as the loader's configuration has
/// them.
pub fn items(output: &str) -> Result<Items> {
    let items: Items = serde_json::from_str(output).with_context(|| format!("read {output:?}"))?;
    Ok(items
        .into_iter()
        .map(|(name, value)| {
            if name.starts_with("library ") {
                (name, in_usr(&value))
            } else {
                (name, value)
            }
        })
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
    list(gets, "cgroupRules")
        .map(|rule| format!("{}:{}", rule["major"], rule["minor"]))
        .collect()
}

/// Items that a container sees by the prediction `gets` of `cdi check --json`: those of a
/// container without GPUs, and the added ones.
pub fn expected(plain: &Items, gets: &Value) -> Items {
    let mut all = plain.clone();
    for node in list(gets, "deviceNodes") {
        let number = |key: &str| node[key].as_i64().unwrap_or(0);
        let (mode, uid, gid) = (number("fileMode"), number("uid"), number("gid"));
        let value = format!(
            "{} {}:{} {mode:o} {uid}:{gid}",
            text(node, "type"),
            node["major"],
            node["minor"]
        );
        all.insert(format!("node {}", text(node, "path")), value);
    }
    for rule in list(gets, "cgroupRules").filter(|rule| rule["allow"] == true) {
        let mut access: Vec<char> = text(rule, "access").chars().collect();
        access.sort_unstable();
        all.insert(
            format!(
                "device {} {}:{}",
                text(rule, "type"),
                rule["major"],
                rule["minor"]
            ),
            access.into_iter().collect(),
        );
    }
    let mounts = || {
        list(gets, "mounts")
            .map(|mount| (in_usr(text(mount, "destination")), list(mount, "options")))
    };
    for (at, options) in mounts() {
        all.insert(
            format!("mount {at}"),
            flags(options.filter_map(Value::as_str)),
        );
    }
    for (key, value) in list(gets, "env").filter_map(|variable| variable.as_str()?.split_once('='))
    {
        all.entry(format!("env {key}"))
            .or_insert_with(|| value.into());
    }
    for hook in list(gets, "hooks") {
        let arguments: Vec<&str> = list(hook, "args").filter_map(Value::as_str).collect();
        let folders: Vec<&str> = arguments
            .windows(2)
            .filter(|pair| pair[0] == "--folder")
            .map(|pair| pair[1])
            .collect();
        for (at, _) in mounts() {
            let Some((folder, name)) = at.rsplit_once('/') else {
                continue;
            };
            // By its SONAME: the loader looks for nothing else.
            if folders.contains(&folder)
                && name
                    .rsplit_once(".so.")
                    .is_some_and(|(_, version)| !version.contains('.'))
            {
                all.insert(format!("library {name}"), at.clone());
            }
        }
        if arguments
            .iter()
            .any(|word| ["prepare", "disable-device-node-modification"].contains(word))
        {
            all.insert(format!("mount {PARAMS}"), FLAGS.join(","));
            all.insert("params ModifyDeviceFiles".into(), "0".into());
            all.insert(
                "params write".into(),
                std::io::Error::from(nix::errno::Errno::EROFS).to_string(),
            );
        }
    }
    all
}

/// A path in a root whose /bin, /lib and /sbin are links into /usr, as the kernel has it.
fn in_usr(path: &str) -> String {
    let moved = ["/bin/", "/lib/", "/lib64/", "/sbin/"]
        .iter()
        .any(|folder| path.starts_with(folder));
    if moved {
        format!("/usr{path}")
    } else {
        path.into()
    }
}

/// Each item that is not what it is expected to be.
pub fn differences(expected: &Items, seen: &Items) -> Vec<String> {
    let names: std::collections::BTreeSet<&String> = expected.keys().chain(seen.keys()).collect();
    let differs = |name: &&String| expected.get(*name) != seen.get(*name);
    names
        .into_iter()
        .filter(differs)
        .map(|name| format!("{name}: {:?}, not {:?}", seen.get(name), expected.get(name)))
        .collect()
}
