//! Kata's configuration for the rules: merged as its runtime merges it, each value with its file.

use super::bounded::HostRoot;
use super::host_programs::compression;
use crate::rules::host_facts::{GuestFile, Kata};
use kata_gpu_image::kata::merge::{Effective, Runtime, default_memory};
use kata_gpu_image::kata::version::Configured;
use kata_gpu_report::data::text::clipped;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Places of Kata's configurations for GPUs, the most special first.
const PLACES: &[&str] = &[
    concat!(
        "/opt/kata/share/defaults/kata-containers/runtimes/qemu-nvidia-gpu/",
        "configuration-qemu-nvidia-gpu.toml"
    ),
    "/opt/kata/share/defaults/kata-containers/configuration-qemu-nvidia-gpu.toml",
    concat!(
        "/opt/kata/share/defaults/kata-containers/runtime-rs/",
        "configuration-qemu-nvidia-gpu-runtime-rs.toml"
    ),
    "/etc/kata-containers/configuration.toml",
    "/usr/share/defaults/kata-containers/configuration.toml",
];

/// The configuration that is named, below the root as well, or the first of the usual ones. None:
/// no usual one is there.
pub fn read(root: &HostRoot, named: Option<&Path>) -> Option<Result<Kata, String>> {
    let usual = || {
        PLACES
            .iter()
            .map(Path::new)
            .find(|path| root.place(path).is_ok())
    };
    let path = named.or_else(usual)?;
    let place = match root.place(path) {
        Ok(place) => place,
        Err(error) => return Some(Err(clipped(&format!("{}: {error}", path.display())))),
    };
    let read = Configured::read(&place).map_err(|refusals| {
        refusals
            .first()
            .map_or(String::new(), |r| format!("{}: {}", r.place, r.why))
    });
    Some(
        read.and_then(|of| merged(root, path, &of))
            .map_err(|why| clipped(&why)),
    )
}

fn merged(root: &HostRoot, path: &Path, of: &Configured) -> Result<Kata, String> {
    let (section, effective) = (&of.section, of.now());
    let host = root
        .place(Path::new("/"))
        .map_err(|error| format!("/: {error}"))?;
    let mut kata = Kata {
        path: clipped(&path.to_string_lossy()),
        section: section.clone(),
        is_rust: of.runtime == Runtime::Rust,
        ..Kata::default()
    };
    collect(
        &host,
        &effective,
        &mut Vec::new(),
        &effective.table,
        &mut kata,
    );
    let key = format!("hypervisor.{section}.default_memory");
    kata.values.entry(key).or_insert_with(|| {
        (
            default_memory(&effective, section).to_string(),
            format!("{} (Kata's default)", kata.path),
        )
    });
    kata.guest = ["initrd", "image"].into_iter().find_map(|key| {
        let file = kata
            .hypervisor(key)
            .map(|(value, _)| PathBuf::from(value))
            .filter(|file| !file.as_os_str().is_empty())?;
        let bytes = root.regular(&file).ok()?.metadata().ok()?.len();
        Some(GuestFile {
            path: clipped(&file.to_string_lossy()),
            is_initrd: key == "initrd",
            bytes,
            compression: compression(root, &file).ok()?,
        })
    });
    Ok(kata)
}

/// Adds all values that are no tables; the files are at most 1 MiB each.
fn collect(
    root: &Path,
    effective: &Effective,
    path: &mut Vec<String>,
    table: &Table,
    kata: &mut Kata,
) {
    for (key, value) in table {
        path.push(key.clone());
        match value {
            Value::Table(inner) => collect(root, effective, path, inner, kata),
            value => {
                let words: Vec<&str> = path.iter().map(String::as_str).collect();
                let origin = effective.origin(&words).unwrap_or(Path::new(&kata.path));
                let origin = origin
                    .strip_prefix(root)
                    .map_or(origin.to_path_buf(), |inner| Path::new("/").join(inner));
                if let Some(text) = scalar(value) {
                    kata.values
                        .insert(path.join("."), (text, clipped(&origin.to_string_lossy())));
                }
            }
        }
        path.pop();
    }
}

/// Text of a value that rules ask for; arrays are none.
fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        Value::Boolean(is_on) => Some(is_on.to_string()),
        Value::Datetime(_) | Value::Array(_) | Value::Table(_) => None,
    }
}
