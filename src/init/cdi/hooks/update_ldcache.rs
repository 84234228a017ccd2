//! `update-ldcache`: makes the container's loader find the driver's libraries. For glibc: a file in
//! `/etc/ld.so.conf.d` with the folders that the configuration lacks, and a new `/etc/ld.so.cache`;
//! for musl, which has no cache: its path file. In both cases also the SONAME links that the
//! folders lack.
//!
//! Nothing of the container is executed, and no `ldconfig` of the guest. A later `ldconfig` in the
//! container keeps the additions of this hook.

use super::arguments::Link;
use super::container_libraries::{self, Search};
use super::container_root::ContainerRoot;
use super::edits::Edit;
use super::ld_so_conf::{self, CONF, CONF_DIRECTORY, INCLUDE_ALL};
use crate::formats::ld_so_cache;
use kata_gpu_wire::arch::Arch;
use nix::sys::stat::SFlag;
use std::io;
use std::path::Path;

const CACHE: &str = "/etc/ld.so.cache";
/// The incumbent's prefix, so that the file sorts after CUDA's compatibility libraries and before
/// the image's own. The name is fixed, unlike the incumbent's: a container that is started again
/// has one file.
pub const FOLDERS_CONF: &str = "/etc/ld.so.conf.d/00-nvcr-kata-gpu-init.conf";
/// Limit of musl's path file.
const MAX_PATH_FILE: u64 = 64 * 1024;
/// Directories that musl searches without a path file.
const MUSL_BUILT_IN: &str = "/lib\n/usr/local/lib\n/usr/lib\n";
/// Paths of glibc's loaders.
const GLIBC_LOADERS: &[&str] = &[
    "/lib64/ld-linux-x86-64.so.2",
    "/lib/ld-linux-aarch64.so.1",
    "/lib/ld-linux.so.2",
    "/lib/ld-linux-armhf.so.3",
    "/libx32/ld-linux-x32.so.2",
];

/// Generator of the cache, shown by `ldconfig -p`.
const GENERATOR: &str = concat!("kata-gpu-init ", env!("CARGO_PKG_VERSION"));

/// Planned edits, and notes about parts left out.
#[derive(Debug, Default)]
pub struct Plan {
    pub edits: Vec<Edit>,
    pub notes: Vec<String>,
}

/// Plans the edits. `plan` holds earlier edits, which count as made; `links` are the links among
/// them.
pub fn plan(
    root: &ContainerRoot,
    folders: &[String],
    links: &[Link],
    driver: Option<&str>,
    plan: &mut Plan,
) -> io::Result<()> {
    let arch = Arch::OURS;
    let musl = musl_loaders(root);
    let search = |directories: &[String]| {
        container_libraries::search(&Search {
            root,
            arch,
            directories,
            folders,
            links,
            driver,
        })
    };
    if !musl.is_empty() {
        for architecture in &musl {
            plan.edits
                .extend(musl_path_file(root, architecture, folders)?);
        }
        if !GLIBC_LOADERS
            .iter()
            .any(|loader| root.kind(Path::new(loader)) == Some(SFlag::S_IFREG))
        {
            let found = search(folders)?;
            plan.edits.extend(found.links);
            plan.notes.extend(found.notes);
            return Ok(());
        }
    }
    let directories = directories(root, folders, arch, plan);
    let found = search(&directories)?;
    plan.notes.extend(found.notes);
    plan.edits.extend(found.links);
    let content = ld_so_cache::write(&found.entries, GENERATOR, arch)
        .map_err(|e| io::Error::other(format!("write {CACHE}: {e}")))?;
    plan.edits.push(Edit::File {
        path: CACHE.into(),
        content,
        mode: 0o644,
    });
    Ok(())
}

/// All directories in the loader's order; plans the configuration that results in this order.
fn directories(
    root: &ContainerRoot,
    folders: &[String],
    arch: Arch,
    plan: &mut Plan,
) -> Vec<String> {
    let built_in = ld_so_conf::built_in(root, arch);
    // The image's own configuration; our file from an earlier start does not count.
    let without = with(
        &plan.edits,
        Edit::Absent {
            path: FOLDERS_CONF.into(),
        },
    );
    let conf = ld_so_conf::read(root, &without);
    let there: Vec<&String> = conf.directories.iter().chain(&built_in).collect();
    let unnamed: Vec<&String> = folders.iter().filter(|f| !there.contains(f)).collect();
    let id = |folder: &str| {
        root.directory(Path::new(folder))
            .ok()
            .flatten()
            .map(|d| d.id)
    };
    // Folders may be in the configuration under other names.
    let ids: Vec<_> = if unnamed.is_empty() {
        Vec::new()
    } else {
        there.iter().filter_map(|d| id(d)).collect()
    };
    // A folder that has its place already keeps it: at the front, an older library could hide the
    // image's own.
    let missing: Vec<&String> = unnamed
        .into_iter()
        .filter(|f| id(f).is_none_or(|id| !ids.contains(&id)))
        .collect();
    let content: String = missing.iter().map(|f| format!("{f}\n")).collect();
    let ours = match content.is_empty() {
        true => Edit::Absent {
            path: FOLDERS_CONF.into(),
        },
        false => Edit::File {
            path: FOLDERS_CONF.into(),
            content: content.into_bytes(),
            mode: 0o644,
        },
    };
    plan.edits.push(ours);
    include_all(root, plan);
    // Read again only if the edits make a difference.
    let conf = if plan.edits == without {
        conf
    } else {
        ld_so_conf::read(root, &plan.edits)
    };
    plan.notes.extend(conf.notes);
    // The image's ld.so.conf may include nothing; then a later ldconfig does not know the folders,
    // but this cache does.
    let ahead = missing
        .into_iter()
        .filter(|f| !conf.directories.contains(f))
        .cloned();
    ahead
        .chain(conf.directories.iter().cloned())
        .chain(built_in)
        .collect()
}

/// Plans an ld.so.conf that includes the directory of configurations, for an image without that
/// file.
pub fn include_all(root: &ContainerRoot, plan: &mut Plan) {
    let adds = |e: &Edit| {
        matches!(e, Edit::File { path, .. }
                if path.parent() == Some(Path::new(CONF_DIRECTORY)))
    };
    if plan.edits.iter().any(adds)
        && matches!(root.file(Path::new(CONF)), Ok(None))
        && !plan.edits.iter().any(|e| e.path() == Path::new(CONF))
    {
        plan.edits.push(Edit::File {
            path: CONF.into(),
            content: INCLUDE_ALL.into(),
            mode: 0o644,
        });
    }
}

fn with(edits: &[Edit], edit: Edit) -> Vec<Edit> {
    edits.iter().cloned().chain([edit]).collect()
}

/// Architectures of the musl loaders of this image.
fn musl_loaders(root: &ContainerRoot) -> Vec<String> {
    // A /lib that cannot be listed holds no usable loader.
    let names = root
        .directory(Path::new("/lib"))
        .ok()
        .flatten()
        .and_then(|lib| lib.names().ok())
        .unwrap_or_default();
    let architecture = |name: &str| {
        name.strip_prefix("ld-musl-")?
            .strip_suffix(".so.1")
            .map(str::to_string)
    };
    names
        .iter()
        .filter_map(|n| architecture(&n.name))
        .take(4)
        .collect()
}

/// Path file of one loader with the missing folders added; None if none is missing. The image's
/// directories keep their order and come first.
fn musl_path_file(
    root: &ContainerRoot,
    architecture: &str,
    folders: &[String],
) -> io::Result<Option<Edit>> {
    let path = format!("/etc/ld-musl-{architecture}.path");
    let there = root
        .read(Path::new(&path), MAX_PATH_FILE)?
        .unwrap_or_else(|| MUSL_BUILT_IN.into());
    let has = |folder: &str| {
        there
            .split(|b| matches!(b, b'\n' | b':'))
            .any(|d| d == folder.as_bytes())
    };
    let missing: Vec<&String> = folders.iter().filter(|f| !has(f)).collect();
    if missing.is_empty() {
        return Ok(None);
    }
    let mut content = there.clone();
    if !content.is_empty() && !content.ends_with(b"\n") {
        content.push(b'\n');
    }
    missing
        .iter()
        .for_each(|f| content.extend(format!("{f}\n").bytes()));
    Ok(Some(Edit::File {
        path: path.into(),
        content,
        mode: 0o644,
    }))
}
