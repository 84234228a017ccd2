//! `update-ldcache`: the container's loader finds the driver's libraries. For glibc: a file in
//! `/etc/ld.so.conf.d` with the folders that its configuration does not have, and a new
//! `/etc/ld.so.cache`; for musl, which has no cache: its path file. In both cases the SONAME links
//! that the folders lack.
//!
//! Nothing of the container's is executed, and no `ldconfig` of anybody's. A later `ldconfig` in
//! the container keeps what this hook added.

use super::arguments::Link;
use super::container_root::ContainerRoot;
use super::edits::Edit;
use super::ld_so_conf::{self, CONF, CONF_DIRECTORY, INCLUDE_ALL};
use super::libraries::{self, Search};
use crate::cdi::ld_so_cache::{self, Machine};
use nix::sys::stat::SFlag;
use std::io;
use std::path::Path;

const CACHE: &str = "/etc/ld.so.cache";
/// The incumbent's prefix, so that it sorts where the incumbent's sorts: after CUDA's compatibility
/// libraries, before the image's own. One name, where the incumbent makes a new one each time: a
/// container that is started again has one file.
pub const FOLDERS_CONF: &str = "/etc/ld.so.conf.d/00-nvcr-kata-gpu-init.conf";
/// Largest path file of musl's.
const MAX_PATH_FILE: u64 = 64 * 1024;
/// What musl searches when it has no path file.
const MUSL_BUILT_IN: &str = "/lib\n/usr/local/lib\n/usr/lib\n";
/// glibc's loaders, where their programs expect them.
const GLIBC_LOADERS: &[&str] = &[
    "/lib64/ld-linux-x86-64.so.2",
    "/lib/ld-linux-aarch64.so.1",
    "/lib/ld-linux.so.2",
    "/lib/ld-linux-armhf.so.3",
    "/libx32/ld-linux-x32.so.2",
];

/// Who wrote the cache, as `ldconfig -p` tells.
const GENERATOR: &str = concat!("kata-gpu-init ", env!("CARGO_PKG_VERSION"));

/// What is to be done, and what was left out on the way.
#[derive(Debug, Default)]
pub struct Plan {
    pub edits: Vec<Edit>,
    pub notes: Vec<String>,
}

/// Plans it. `plan` has the edits that are made before, which count as made; `links` are those of
/// them that are links.
pub fn plan(root: &ContainerRoot, folders: &[String], links: &[Link], driver: Option<&str>, plan: &mut Plan) -> io::Result<()> {
    let machine = Machine::OURS;
    let musl = musl_loaders(root);
    let search = |directories: &[String]| libraries::search(&Search { root, machine, directories, folders, links, driver });
    if !musl.is_empty() {
        for architecture in &musl {
            plan.edits.extend(musl_path_file(root, architecture, folders)?);
        }
        if !GLIBC_LOADERS.iter().any(|loader| root.kind(Path::new(loader)) == Some(SFlag::S_IFREG)) {
            let found = search(folders)?;
            plan.edits.extend(found.links);
            plan.notes.extend(found.notes);
            return Ok(());
        }
    }
    let directories = directories(root, folders, machine, plan);
    let found = search(&directories)?;
    plan.notes.extend(found.notes);
    plan.edits.extend(found.links);
    let content = ld_so_cache::write(&found.entries, GENERATOR, machine).map_err(|e| io::Error::other(format!("write {CACHE}: {e}")))?;
    plan.edits.push(Edit::File { path: CACHE.into(), content, mode: 0o644 });
    Ok(())
}

/// All directories in the loader's order; plans the configuration that gives them this order.
fn directories(root: &ContainerRoot, folders: &[String], machine: Machine, plan: &mut Plan) -> Vec<String> {
    let built_in = ld_so_conf::built_in(root, machine);
    // What the image says without us; a file of ours from an earlier start does not count.
    let without = with(&plan.edits, Edit::Absent { path: FOLDERS_CONF.into() });
    let conf = ld_so_conf::read(root, &without);
    let there: Vec<&String> = conf.directories.iter().chain(&built_in).collect();
    let unnamed: Vec<&String> = folders.iter().filter(|f| !there.contains(f)).collect();
    let id = |folder: &str| root.directory(Path::new(folder)).ok().flatten().map(|d| d.id);
    // Under other names.
    let ids: Vec<_> = if unnamed.is_empty() { Vec::new() } else { there.iter().filter_map(|d| id(d)).collect() };
    // Where a folder has its place already, it keeps it: before others it could give programs an
    // older library than the image means them to have.
    let missing: Vec<&String> = unnamed.into_iter().filter(|f| id(f).is_none_or(|id| !ids.contains(&id))).collect();
    let content: String = missing.iter().map(|f| format!("{f}\n")).collect();
    let ours = match content.is_empty() {
        true => Edit::Absent { path: FOLDERS_CONF.into() },
        false => Edit::File { path: FOLDERS_CONF.into(), content: content.into_bytes(), mode: 0o644 },
    };
    plan.edits.push(ours);
    include_all(root, plan);
    // Read again only where the edits make a difference.
    let conf = if plan.edits == without { conf } else { ld_so_conf::read(root, &plan.edits) };
    plan.notes.extend(conf.notes);
    // An ld.so.conf of the image's may include nothing; then a later ldconfig does not know the
    // folders, but this cache does.
    let ahead = missing.into_iter().filter(|f| !conf.directories.contains(f)).cloned();
    ahead.chain(conf.directories.iter().cloned()).chain(built_in).collect()
}

/// An image may have no ld.so.conf: then the directory of configurations is not read unless one
/// includes it.
pub fn include_all(root: &ContainerRoot, plan: &mut Plan) {
    let adds = |e: &Edit| matches!(e, Edit::File { path, .. } if path.parent() == Some(Path::new(CONF_DIRECTORY)));
    if plan.edits.iter().any(adds)
        && matches!(root.file(Path::new(CONF)), Ok(None))
        && !plan.edits.iter().any(|e| e.path() == Path::new(CONF))
    {
        plan.edits.push(Edit::File { path: CONF.into(), content: INCLUDE_ALL.into(), mode: 0o644 });
    }
}

fn with(edits: &[Edit], edit: Edit) -> Vec<Edit> {
    edits.iter().cloned().chain([edit]).collect()
}

/// The architectures of the musl loaders of this image.
fn musl_loaders(root: &ContainerRoot) -> Vec<String> {
    // A /lib that cannot be listed holds no loader that could be used.
    let names = root.directory(Path::new("/lib")).ok().flatten().and_then(|lib| lib.names().ok()).unwrap_or_default();
    let architecture = |name: &str| name.strip_prefix("ld-musl-")?.strip_suffix(".so.1").map(str::to_string);
    names.iter().filter_map(|n| architecture(&n.name)).take(4).collect()
}

/// The path file of one loader with the folders it lacks; None if it lacks none. The image's
/// directories keep their order and come first.
fn musl_path_file(root: &ContainerRoot, architecture: &str, folders: &[String]) -> io::Result<Option<Edit>> {
    let path = format!("/etc/ld-musl-{architecture}.path");
    let there = root.read(Path::new(&path), MAX_PATH_FILE)?.unwrap_or_else(|| MUSL_BUILT_IN.into());
    let has = |folder: &str| there.split(|b| matches!(b, b'\n' | b':')).any(|d| d == folder.as_bytes());
    let missing: Vec<&String> = folders.iter().filter(|f| !has(f)).collect();
    if missing.is_empty() {
        return Ok(None);
    }
    let mut content = there.clone();
    if !content.is_empty() && !content.ends_with(b"\n") {
        content.push(b'\n');
    }
    missing.iter().for_each(|f| content.extend(format!("{f}\n").bytes()));
    Ok(Some(Edit::File { path: path.into(), content, mode: 0o644 }))
}
