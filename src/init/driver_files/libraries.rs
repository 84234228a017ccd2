//! The driver's libraries: their directories and version, and the links by which programs find
//! them.
//!
//! Links come from the files' own SONAMEs, so a container gets them whether or not ldconfig ran in
//! the image.

use super::files::{Kind, Link, Mount, Problems};
use super::refused;
use super::tree::{Entry, Found, NOT_PLAIN, OPTIONS, Places, below, plain_name, plain_path};
use crate::formats::elf;
use crate::formats::elf::Class;
use crate::formats::ld_so_cache;
use nix::sys::stat::SFlag;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// Library directories of packages, below the driver root; 64-bit ones first.
const DIRECTORIES: &[&str] = &[
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    // Debian: several drivers side by side, one chosen by links.
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/lib/x86_64-linux-gnu/nvidia/current",
    "/lib/aarch64-linux-gnu/nvidia/current",
    // For 32-bit programs; /usr/lib holds everything if there is no other, as in roots made by
    // hand.
    "/usr/lib",
    "/lib",
    "/usr/lib/i386-linux-gnu",
    "/usr/lib/i386-linux-gnu/nvidia/current",
    "/usr/lib32",
    "/",
];
/// Cache in which glibc's loader looks names up, the limit of its size (a distribution's has some
/// 100 kB), and that of its entries that are looked at: one for each of two libraries is usual.
const LOADER_CACHE: &str = "/etc/ld.so.cache";
const MAX_LOADER_CACHE: u64 = 1 << 20;
const MAX_LOADER_ENTRIES: usize = 16;
/// Limit of libraries in one directory: a driver has about 60.
const MAX_LIBRARIES: usize = 512;
/// Libraries with versions of their own: EGL platforms, and the compiler for old programs.
const EGL_PLATFORMS: &[&str] = &[
    "libnvidia-egl-gbm",
    "libnvidia-egl-wayland",
    "libnvidia-egl-wayland2",
    "libnvidia-egl-xcb",
    "libnvidia-egl-xlib",
];
const LEGACY_COMPILER: &str = "libnvidia-nvvm70";
/// Libraries whose names give the driver's version.
const TELLING: [&str; 2] = ["libcuda", "libnvidia-ml"];
/// Libraries that only CUDA uses: if one of them is there, a missing libcuda is not intended.
const FOR_CUDA_ONLY: &[&str] = &[
    "libnvidia-ptxjitcompiler",
    "libnvidia-nvvm",
    LEGACY_COMPILER,
    "libcudadebugger",
];
/// Links that programs need besides the SONAMEs: library -> link, and whether it points to the
/// SONAME's link (else to the file).
const MORE_LINKS: &[(&str, &str, bool)] = &[
    // Many programs open libcuda by this name.
    ("libcuda", "libcuda.so", true),
    ("libnvidia-opticalflow", "libnvidia-opticalflow.so", true),
    // Names opened by the X server, and by libglvnd for indirect rendering.
    (
        "libnvidia-vulkan-producer",
        "libnvidia-vulkan-producer.so",
        false,
    ),
    ("libGLX_nvidia", "libGLX_indirect.so.0", false),
];
/// Name under which Mesa's GBM opens the driver's back end, a link to the driver's allocator.
const GBM: (&str, &str) = ("libnvidia-allocator", "gbm/nvidia-drm_gbm.so");

/// Whether a text is a driver version: two to four numbers, the first of three or four digits (the
/// 1.1 of Tegra's libcuda.so.1.1 is none).
pub fn is_version(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    (2..=4).contains(&parts.len())
        && parts
            .first()
            .is_some_and(|first| (3..=4).contains(&first.len()))
        && parts
            .iter()
            .all(|part| (1..=4).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit()))
}

/// `libcuda.so.550.163.01` -> `libcuda`, `550.163.01`.
fn split(name: &str) -> Option<(&str, &str)> {
    name.split_once(".so.")
}

/// Whether a library's name gives the driver's version.
fn is_telling(name: &str) -> bool {
    split(name).is_some_and(|(stem, _)| TELLING.contains(&stem))
}

/// A directory that may hold libraries.
pub struct Directory {
    found: Found,
    /// Path in a container.
    container_path: PathBuf,
    /// Names that look like the driver's, sorted.
    entries: Vec<(String, bool)>,
}

/// Reads each library directory below the driver root once, and its vdpau/: those of packages, and
/// if the driver is in none of them, those from which the root's loader has it.
pub fn directories(places: &Places, problems: &mut Problems) -> Result<Vec<Directory>, String> {
    let packages = DIRECTORIES.iter().map(PathBuf::from).collect();
    let mut all = read_directories(places, packages, problems)?;
    if !all
        .iter()
        .flat_map(|directory| &directory.entries)
        .any(|(name, _)| is_telling(name))
    {
        let more = of_loader(places, problems);
        all.extend(read_directories(places, more, problems)?);
    }
    Ok(all)
}

fn read_directories(
    places: &Places,
    candidates: Vec<PathBuf>,
    problems: &mut Problems,
) -> Result<Vec<Directory>, String> {
    let mut all = Vec::new();
    let mut seen = HashSet::new();
    for candidate in candidates
        .into_iter()
        .flat_map(|d| [d.clone(), d.join("vdpau")])
    {
        let found = match places.driver(&candidate) {
            Ok(Some(found)) if found.is(SFlag::S_IFDIR) => found,
            Ok(_) => continue,
            Err(error) => {
                problems.add(&below(&places.driver_root, &candidate), error);
                continue;
            }
        };
        if seen.insert(found.path.clone()) {
            all.extend(directory(places, &candidate, found, problems)?);
        }
    }
    Ok(all)
}

/// Directories, below the driver root, from which glibc's loader has the driver's libraries. A
/// driver in a directory of its own (`/usr/local/nvidia/lib64`) comes with an entry in
/// /etc/ld.so.conf.d.
fn of_loader(places: &Places, problems: &mut Problems) -> Vec<PathBuf> {
    let read = match places.driver(Path::new(LOADER_CACHE)) {
        Ok(None) => return Vec::new(),
        Ok(Some(found)) => found
            .read(MAX_LOADER_CACHE)
            .map_err(|e| e.to_string())
            .and_then(|bytes| ld_so_cache::read(&bytes)),
        Err(error) => Err(error.to_string()),
    };
    let cache = read.unwrap_or_else(|error| {
        problems.add(&below(&places.driver_root, Path::new(LOADER_CACHE)), error);
        ld_so_cache::Cache::default()
    });
    let mut directories = Vec::new();
    for entry in cache
        .entries
        .iter()
        .filter(|entry| is_telling(&entry.name))
        .take(MAX_LOADER_ENTRIES)
    {
        // An entry may be a link into the directory that has the driver.
        let file = places.driver(Path::new(&entry.path)).ok().flatten();
        let directory = file.and_then(|file| places.in_container(file.path.parent()?));
        directories.extend(directory.filter(|directory| !directories.contains(directory)));
    }
    directories
}

fn directory(
    places: &Places,
    candidate: &Path,
    found: Found,
    problems: &mut Problems,
) -> Result<Option<Directory>, String> {
    let container_path = places
        .in_container(&found.path)
        .unwrap_or_else(|| candidate.to_path_buf());
    let listed = match found.entries(looks_like_ours) {
        Ok(listed) => listed,
        Err(error) => {
            problems.add(&found.path, error);
            return Ok(None);
        }
    };
    if listed.len() > MAX_LIBRARIES {
        return Err(refused(format!(
            "{} has more than {MAX_LIBRARIES} libraries of the driver: that is no driver's \
             directory",
            found.path.display()
        )));
    }
    if listed.is_empty() {
        return Ok(None);
    }
    if !plain_path(&container_path) || !plain_path(&found.path) {
        problems.add(
            &found.path,
            "a path with a colon or control characters cannot be written into a spec",
        );
        return Ok(None);
    }
    let mut entries = Vec::new();
    for Entry { name, is_link } in listed {
        match plain_name(&name) {
            Some(name) => entries.push((name.to_string(), is_link)),
            None => problems.add(
                &found.path.join(String::from_utf8_lossy(&name).as_ref()),
                "no name that a library has",
            ),
        }
    }
    Ok(Some(Directory {
        found,
        container_path,
        entries,
    }))
}

/// Preselection by name before the version is known.
fn looks_like_ours(name: &[u8]) -> bool {
    let text = String::from_utf8_lossy(name);
    let Some((stem, rest)) = split(&text) else {
        return false;
    };
    is_version(rest) || is_other(stem, rest)
}

/// Whether a library has a version of its own. The file of an EGL platform is the name with the
/// whole version.
fn is_other(stem: &str, rest: &str) -> bool {
    stem == LEGACY_COMPILER || (EGL_PLATFORMS.contains(&stem) && rest.contains('.'))
}

/// The driver's version, if module and libraries agree.
pub fn version(
    directories: &[Directory],
    module: Option<(String, String)>,
    driver_root: &Path,
    problems: &Problems,
) -> Result<String, String> {
    let mut telling: Vec<(&str, &str, PathBuf)> = Vec::new();
    for directory in directories {
        for (name, _) in &directory.entries {
            if let Some((stem, found)) =
                split(name).filter(|(stem, found)| TELLING.contains(stem) && is_version(found))
            {
                telling.push((stem, found, directory.found.path.join(name)));
            }
        }
    }
    match module {
        Some((module, source)) => {
            for stem in TELLING {
                let mut of_stem = telling.iter().filter(|(s, ..)| *s == stem).peekable();
                if let Some((_, found, library)) = of_stem.peek().copied()
                    && of_stem.all(|(_, found, _)| *found != module)
                {
                    return Err(refused(format!(
                        "the driver is {module} ({source}), and its user space is {found} ({}): \
                         put the libraries of {module} into the image, or load the module of {found}",
                        library.display()
                    )));
                }
            }
            let any = |d: &Directory| {
                d.entries
                    .iter()
                    .any(|(name, _)| split(name).is_some_and(|(_, v)| v == module))
            };
            if directories.iter().any(any) {
                return Ok(module);
            }
            Err(no_driver(driver_root, &module, problems))
        }
        None => {
            let Some((_, found, first)) = telling.first() else {
                return Err(no_driver(driver_root, "<version>", problems));
            };
            match telling.iter().find(|(_, other, _)| other != found) {
                Some((.., second)) => Err(refused(format!(
                    "two versions are installed, {} and {}, and no loaded module selects one: \
                     remove one, or name the version",
                    first.display(),
                    second.display()
                ))),
                None => Ok((*found).to_string()),
            }
        }
    }
}

/// No part of the driver is there.
fn no_driver(driver_root: &Path, version: &str, problems: &Problems) -> String {
    refused(format!(
        "no library directory below {} has libcuda.so.{version} or libnvidia-ml.so.{version}; \
         install the driver's user space into the image, or give the root that it lies in \
         ({OPTIONS}){}",
        driver_root.display(),
        also(problems)
    ))
}

/// Paths that could not be examined, for the error about a missing file.
fn also(Problems(problems): &Problems) -> String {
    if problems.is_empty() {
        String::new()
    } else {
        format!(" (not all could be read: {})", problems.join("; "))
    }
}

/// Libraries found, and links to them.
#[derive(Default)]
pub struct Libraries {
    pub mounts: Vec<Mount>,
    pub links: BTreeMap<PathBuf, Link>,
    pub directories: Vec<PathBuf>,
    pub libcuda_directory: Option<PathBuf>,
}

/// A library for containers.
struct Library<'a> {
    directory: &'a Directory,
    name: &'a str,
    found: Found,
}

/// All libraries of this version, and the links to them.
pub fn collect(
    places: &Places,
    all: &[Directory],
    version: &str,
    problems: &mut Problems,
) -> Result<Libraries, String> {
    let mut out = Libraries::default();
    let mut wide = false;
    for library in choose(places, all, version, problems) {
        let Library {
            directory,
            name,
            found,
        } = &library;
        let read = found.open().and_then(|file| elf::identity(&file));
        let class = read.as_ref().ok().map(|elf| elf.class);
        let soname = match read {
            Ok(elf) => elf.soname,
            Err(error) => {
                problems.add(&found.path, format!("{error}: no link can be made to it"));
                None
            }
        };
        add_links(&mut out.links, &library, soname.as_deref(), problems);
        if split(name) == Some(("libcuda", version))
            && (out.libcuda_directory.is_none() || (!wide && class == Some(Class::Elf64)))
        {
            out.libcuda_directory = Some(directory.container_path.clone());
            wide = class == Some(Class::Elf64);
        }
        if !out.directories.contains(&directory.container_path) {
            out.directories.push(directory.container_path.clone());
        }
        let container_path = directory.container_path.join(name);
        out.mounts.push(Mount {
            host_path: found.path.clone(),
            container_path,
            kind: Kind::File,
        });
    }
    let mounted: HashSet<&PathBuf> = out.mounts.iter().map(|m| &m.container_path).collect();
    out.links.retain(|path, _| !mounted.contains(path));
    // Sort by preference: files and links were taken in another order.
    out.directories
        .sort_by_key(|path| all.iter().position(|d| d.container_path == *path));
    if out.libcuda_directory.is_none() {
        refuse_cuda_without_libcuda(all, version, problems)?;
    }
    Ok(out)
}

/// Management or graphics libraries alone count as intended; half of CUDA does not.
fn refuse_cuda_without_libcuda(
    all: &[Directory],
    version: &str,
    problems: &Problems,
) -> Result<(), String> {
    for directory in all {
        let for_cuda = |name: &&(String, bool)| {
            split(&name.0).is_some_and(|(stem, rest)| {
                FOR_CUDA_ONLY.contains(&stem) && (rest == version || stem == LEGACY_COMPILER)
            })
        };
        if let Some((name, _)) = directory.entries.iter().find(for_cuda) {
            return Err(refused(format!(
                "{} has {name}, but libcuda.so.{version} is nowhere: no CUDA program could start; \
                 install it (Debian: libcuda1, Ubuntu: libnvidia-compute, RHEL: \
                 nvidia-driver-cuda-libs){}",
                directory.found.path.display(),
                also(problems)
            )));
        }
    }
    Ok(())
}

/// Files first, then links to none of these files: alternatives lead to files already taken.
fn choose<'a>(
    places: &Places,
    all: &'a [Directory],
    version: &str,
    problems: &mut Problems,
) -> Vec<Library<'a>> {
    let wanted = |name: &str| {
        split(name).is_some_and(|(stem, rest)| rest == version || is_other(stem, rest))
    };
    let mut chosen = Vec::new();
    let mut taken = HashSet::new();
    for links in [false, true] {
        for directory in all {
            for (name, _) in directory
                .entries
                .iter()
                .filter(|(name, is_link)| *is_link == links && wanted(name))
            {
                let path = directory.found.path.join(name);
                let found = match places.in_container(&path) {
                    Some(path) => places.driver(&path),
                    None => places.guest().find(&path),
                };
                match found {
                    Ok(Some(found)) if taken.contains(&found.path) => {}
                    Ok(Some(found)) if !found.is(SFlag::S_IFREG) => {
                        problems.add(&path, "not a regular file")
                    }
                    Ok(Some(found)) if !plain_path(&found.path) => {
                        problems.add(&path, NOT_PLAIN);
                    }
                    Ok(Some(found)) => {
                        taken.insert(found.path.clone());
                        chosen.push(Library {
                            directory,
                            name,
                            found,
                        });
                    }
                    Ok(None) => problems.add(&path, "a link that leads to nothing"),
                    Err(error) => problems.add(&path, error),
                }
            }
        }
    }
    chosen
}

fn add_links(
    links: &mut BTreeMap<PathBuf, Link>,
    library: &Library,
    soname: Option<&str>,
    problems: &mut Problems,
) {
    let Library {
        directory,
        name,
        found,
    } = library;
    let plain = soname.filter(|soname| plain_name(soname.as_bytes()).is_some());
    if let (Some(soname), None) = (soname, plain) {
        problems.add(
            &found.path,
            format!("its SONAME {soname:?} is no file name"),
        );
    }
    let mut link = |path: &str, target: &str| {
        let path = directory.container_path.join(path);
        let new = Link {
            link: path.clone(),
            target: target.to_string(),
            file: found.path.clone(),
        };
        let old = links.entry(path).or_insert_with(|| new.clone());
        if old.file != new.file {
            problems.add(
                &found.path,
                format!(
                    "{} leads to {} already",
                    new.link.display(),
                    old.file.display()
                ),
            );
        }
    };
    let soname = plain.unwrap_or(name);
    if soname != *name {
        link(soname, name);
    }
    let stem = split(name).map_or("", |(stem, _)| stem);
    for (_, path, to_soname) in MORE_LINKS.iter().filter(|(of, ..)| *of == stem) {
        link(path, if *to_soname { soname } else { name });
    }
    if stem == GBM.0 {
        link(GBM.1, &format!("../{soname}"));
    }
    // Names without a number serve for building programs: add them only if the image has them.
    let bare = format!("{stem}.so");
    if !MORE_LINKS.iter().any(|(_, path, _)| *path == bare) && directory.found.has_link(&bare) {
        link(&bare, soname);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver_files::{Roots, scan};
    use crate::formats::ld_so_cache::{Entry, Hwcap};
    use kata_gpu_test_support::temp_dir;
    use kata_gpu_wire::arch::Arch;

    #[test]
    fn a_driver_in_its_own_directory_is_found_by_the_loaders_cache() {
        let folder = temp_dir();
        let root = folder.path();
        let (own, lib) = (root.join("usr/local/nvidia/lib64"), root.join("usr/lib"));
        for directory in [&own, &lib, &root.join("etc")] {
            std::fs::create_dir_all(directory).unwrap();
        }
        for name in ["libcuda", "libnvidia-ml"] {
            let soname = format!("{name}.so.1");
            std::fs::write(
                own.join(format!("{name}.so.580.1")),
                kata_gpu_test_support::elf_stand_in::library(Some(&soname), &[]),
            )
            .unwrap();
            std::os::unix::fs::symlink(format!("{name}.so.580.1"), own.join(&soname)).unwrap();
            // As an installer leaves it: a link in a directory that every loader searches.
            std::os::unix::fs::symlink(
                format!("/usr/local/nvidia/lib64/{soname}"),
                lib.join(&soname),
            )
            .unwrap();
        }
        let roots = Roots {
            root: root.into(),
            ..Roots::default()
        };
        let missing = scan(&roots, Some("580.1")).unwrap_err().to_string();
        assert!(
            missing.contains("no library directory below / has libcuda.so.580.1"),
            "{missing}"
        );
        let entry = |name: &str, folder: &str| Entry {
            name: name.into(),
            path: format!("{folder}/{name}"),
            flags: 0x303,
            hwcap: Hwcap::Any,
        };
        let entries = [
            entry("libcuda.so.1", "/usr/lib"),
            entry("libnvidia-ml.so.1", "/usr/local/nvidia/lib64"),
            entry("libz.so.1", "/opt"),
        ];
        std::fs::write(
            root.join("etc/ld.so.cache"),
            ld_so_cache::write(&entries, "test", Arch::OURS).unwrap(),
        )
        .unwrap();
        let files = scan(&roots, Some("580.1")).unwrap();
        assert_eq!(
            (files.library_directories, files.problems),
            (
                vec![PathBuf::from("/usr/local/nvidia/lib64")],
                Vec::<String>::new()
            )
        );
        let mounts: Vec<_> = files
            .mounts
            .iter()
            .map(|m| m.container_path.to_string_lossy().into_owned())
            .collect();
        assert_eq!(
            mounts,
            ["libcuda", "libnvidia-ml"]
                .map(|name| format!("/usr/local/nvidia/lib64/{name}.so.580.1"))
        );
        // Whatever an image's cache has, few of its entries are looked at.
        let [good, ..] = entries;
        let many: Vec<Entry> = (0..100)
            .map(|n| entry("libnvidia-ml.so.1", &format!("/opt/{n}")))
            .chain([good])
            .collect();
        std::fs::write(
            root.join("etc/ld.so.cache"),
            ld_so_cache::write(&many, "test", Arch::OURS).unwrap(),
        )
        .unwrap();
        assert!(scan(&roots, Some("580.1")).is_err());
        // A cache that cannot be read is named beside what is missing.
        std::fs::write(root.join("etc/ld.so.cache"), "no cache").unwrap();
        let broken = scan(&roots, Some("580.1")).unwrap_err().to_string();
        assert!(
            broken.contains("/etc/ld.so.cache: not a cache of glibc's loader"),
            "{broken}"
        );
    }

    #[test]
    fn a_version_is_the_drivers_and_not_another_librarys() {
        for version in ["550.163.01", "595.45.04", "450.51", "999.88.77", "1000.1"] {
            assert!(is_version(version), "{version}");
        }
        for other in [
            "1",
            "1.1",
            "6.0.30",
            "20220623.0.0",
            "550",
            "550.",
            "550.163.01.1.1",
            "550.x",
            "550.163.01\n",
            "",
            "550..1",
            "+50.1",
        ] {
            assert!(!is_version(other), "{other}");
        }
    }

    #[test]
    fn names_are_taken_by_what_follows_so() {
        for (name, ours) in [
            ("libcuda.so.550.163.01", true),
            ("libnvidia-egl-gbm.so.1.1.2", true),
            ("libnvidia-egl-gbm.so.1", false),
            ("libnvidia-nvvm70.so.4", true),
            ("libnvidia-nvvm.so.4", false),
            ("libcuda.so.1", false),
            ("libcuda.so", false),
            ("libcuda.550.163.01", false),
        ] {
            assert_eq!(looks_like_ours(name.as_bytes()), ours, "{name}");
        }
    }
}
