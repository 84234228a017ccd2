//! Result of a scan, kept in the image: written once when the image is built, verified at boot by
//! the files' sizes alone.
//!
//! Paths are below the driver root, so that an image built in one place may be mounted in another.
//! A file outside (NixOS has links into its store) is kept by the path that leads to it.
//! Verification uses facts that survive the making of an image: a file's size, and a library
//! directory's time in seconds; if an archive or a packer sets other times, the directory's names
//! are compared instead. Sockets are never included: they are searched for at boot. Write the
//! manifest last: ldconfig changes library directories.
//!
//! Not detected: a configuration or program added later outside the library directories.

use super::tree::{Found, Places, below, plain_name, plain_path};
use super::{DriverFiles, Kind, Problems, Roots, is_version, module_version, named, scan};
use nix::sys::stat::SFlag;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Directory of the manifest, below the driver root.
pub const DIRECTORY: &str = "/usr/share/kata-gpu-init";
/// File name of the manifest.
pub const FILE: &str = "driver-files.json";
/// Limit of a manifest's size; that of a complete driver has 20 kB.
pub const MAX_BYTES: usize = 1 << 20;
/// The only schema that a reader accepts.
const SCHEMA: u32 = 1;

/// A manifest's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    schema: u32,
    /// Host paths start at the driver root.
    files: DriverFiles,
    /// Size of each mount, in bytes.
    sizes: Vec<u64>,
    /// The library directories.
    directories: Vec<Directory>,
}

/// Facts by which a library directory is recognised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Directory {
    path: PathBuf,
    modified_s: i64,
    /// See [`names_sum`].
    names: u64,
}

/// Reason why a manifest is not used. The root is scanned instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// The manifest does not exist.
    Absent { path: PathBuf },
    /// The manifest cannot be read or parsed.
    Broken { path: PathBuf, why: String },
    /// The manifest is of another state of the image, or of another driver.
    Stale { path: PathBuf, what: String },
}

impl Unusable {
    /// The reason without the path and the cure.
    pub fn reason(&self) -> &str {
        match self {
            Self::Absent { .. } => "there is none",
            Self::Broken { why, .. } => why,
            Self::Stale { what, .. } => what,
        }
    }
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent { path } => write!(f, "driver files: no manifest {}", path.display()),
            Self::Broken { path, why } => {
                write!(
                    f,
                    "driver files: manifest {} cannot be used: {why}; write it again when the \
                        image is built",
                    path.display()
                )
            }
            Self::Stale { path, what } => {
                write!(
                    f,
                    "driver files: manifest {} is stale: {what}; write it as the last step of the \
                        image's build",
                    path.display()
                )
            }
        }
    }
}

impl std::error::Error for Unusable {}

/// Parses a manifest from any bytes; the result has only paths and names that a scan could have
/// found.
pub fn parse(bytes: &[u8]) -> Result<Manifest, String> {
    if bytes.len() > MAX_BYTES {
        return Err(format!(
            "{} bytes: a manifest has at most {MAX_BYTES}",
            bytes.len()
        ));
    }
    let manifest: Manifest = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    manifest.check()?;
    Ok(manifest)
}

impl Manifest {
    /// Manifest of a scan's result. Fails if a path could not be examined, or no path below the
    /// driver root leads to a file.
    fn new(places: &Places, found: &DriverFiles) -> io::Result<Self> {
        if let Some(problem) = found.problems.first() {
            return Err(io::Error::other(format!(
                "not all could be read: {problem}"
            )));
        }
        let mut files = found.clone();
        files.set_sockets(Vec::new());
        let mut sizes = Vec::with_capacity(files.mounts.len());
        for mount in &mut files.mounts {
            let path = places
                .in_container(&mount.host_path)
                .unwrap_or_else(|| mount.container_path.clone());
            let found = look(places, &path, SFlag::S_IFREG);
            let size = found.ok().filter(|found| found.path == mount.host_path);
            sizes.push(size.ok_or_else(|| outside(&mount.host_path))?.size());
            mount.host_path = path;
        }
        for link in &mut files.links {
            let mut mounts = found.mounts.iter();
            let of_mount = || {
                let mount = mounts.find(|mount| mount.host_path == link.file)?;
                Some(mount.container_path.clone())
            };
            let path = places.in_container(&link.file).or_else(of_mount);
            link.file = path.ok_or_else(|| outside(&link.file))?;
        }
        let directory = |path: &PathBuf| {
            let found = look(places, path, SFlag::S_IFDIR).map_err(io::Error::other)?;
            Ok(Directory {
                path: path.clone(),
                modified_s: found.modified_s(),
                names: names_sum(&found)?,
            })
        };
        let directories = files
            .library_directories
            .iter()
            .map(directory)
            .collect::<io::Result<_>>()?;
        Ok(Self {
            schema: SCHEMA,
            files,
            sizes,
            directories,
        })
    }

    /// Text of the file.
    pub fn to_json(&self) -> Vec<u8> {
        // Structs of strings and numbers with UTF-8 paths cannot fail. No reader accepts an empty
        // text.
        serde_json::to_vec(self).unwrap_or_default()
    }

    fn check(&self) -> Result<(), String> {
        let Self {
            schema,
            files,
            sizes,
            directories,
        } = self;
        if *schema != SCHEMA {
            return Err(format!("schema {schema}: this program knows {SCHEMA}"));
        }
        if !is_version(&files.version) {
            return Err(format!(
                "version {:?} is none of the driver's",
                files.version
            ));
        }
        let paths = [
            files.libcuda_directory.iter().collect::<Vec<_>>(),
            files.library_directories.iter().collect(),
            files
                .mounts
                .iter()
                .flat_map(|m| [&m.host_path, &m.container_path])
                .collect(),
            files
                .links
                .iter()
                .flat_map(|l| [&l.link, &l.file])
                .collect(),
            directories.iter().map(|d| &d.path).collect(),
        ];
        if let Some(path) = paths.into_iter().flatten().find(|path| !plain_path(path)) {
            return Err(format!("{path:?} is no path that a driver's file has"));
        }
        if let Some(link) = files.links.iter().find(|link| !plain_target(&link.target)) {
            return Err(format!(
                "link {} leads to {:?}: that is not a file next to it",
                link.link.display(),
                link.target
            ));
        }
        if let Some(socket) = files.mounts.iter().find(|mount| mount.kind == Kind::Socket) {
            return Err(format!("{} is a socket", socket.container_path.display()));
        }
        if sizes.len() != files.mounts.len() {
            return Err(format!(
                "{} sizes for {} mounts",
                sizes.len(),
                files.mounts.len()
            ));
        }
        let in_order = files
            .mounts
            .is_sorted_by(|a, b| a.container_path < b.container_path);
        if !in_order || !files.links.is_sorted_by(|a, b| a.link < b.link) {
            return Err("mounts or links are not in order".into());
        }
        if !directories
            .iter()
            .map(|d| &d.path)
            .eq(&files.library_directories)
        {
            return Err("library directories are not those of the files".into());
        }
        Ok(())
    }

    /// Files that a scan of this driver root would find, except sockets. Error: the first
    /// difference from the manifest.
    fn verify(mut self, places: &Places) -> Result<DriverFiles, String> {
        let mounts = &mut self.files.mounts;
        for (mount, size) in mounts.iter_mut().zip(&self.sizes) {
            let file = look(places, &mount.host_path, SFlag::S_IFREG)?;
            if file.size() != *size {
                return Err(format!(
                    "{} has {} bytes, it had {size}",
                    mount.host_path.display(),
                    file.size()
                ));
            }
            mount.host_path = file.path;
        }
        for link in &mut self.files.links {
            link.file = match mounts.binary_search_by(|m| m.container_path.cmp(&link.file)) {
                Ok(at) => mounts[at].host_path.clone(),
                Err(_) => below(&places.driver_root, &link.file),
            };
        }
        for Directory {
            path,
            modified_s,
            names,
        } in &self.directories
        {
            let found = look(places, path, SFlag::S_IFDIR)?;
            if found.modified_s() != *modified_s
                && names_sum(&found).map_err(|e| format!("{}: {e}", path.display()))? != *names
            {
                return Err(format!("{} has other entries", path.display()));
            }
        }
        Ok(self.files)
    }
}

fn outside(path: &Path) -> io::Error {
    io::Error::other(format!(
        "{} lies outside the driver root: such an image is scanned at boot",
        path.display()
    ))
}

/// Whether a link's target looks like `libcuda.so.1` or `../libnvidia-allocator.so.1`.
fn plain_target(target: &str) -> bool {
    plain_name(target.strip_prefix("../").unwrap_or(target).as_bytes()).is_some()
}

/// Finds a path of the driver root; it must be of this kind, and have no link on the way but one
/// out of the root.
fn look(places: &Places, path: &Path, kind: SFlag) -> Result<Found, String> {
    let root = &places.driver_root;
    match places.driver(path) {
        Ok(Some(found))
            if found.is(kind)
                && (found.path == below(root, path)
                    || !found.path.starts_with(root) && plain_path(&found.path)) =>
        {
            Ok(found)
        }
        Ok(Some(_)) => Err(format!("{} is something else now", path.display())),
        Ok(None) => Err(format!("{} is gone", path.display())),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// Checksum of the set of a directory's names: the sum of their FNV-1a hashes, in any order.
fn names_sum(directory: &Found) -> io::Result<u64> {
    let mut sum = 0_u64;
    directory.entries(|name| {
        let hash = name.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        sum = sum.wrapping_add(hash);
        false
    })?;
    Ok(sum)
}

/// Writes the manifest of a scan of these roots; returns its path in the guest and its size.
///
/// Run as the last step of an image's build. Errors name the obstacle.
pub fn write(roots: &Roots, files: &DriverFiles) -> io::Result<(PathBuf, usize)> {
    let places = Places::open(roots).map_err(io::Error::other)?;
    let directory = Path::new(DIRECTORY);
    let path = below(&places.driver_root, &directory.join(FILE));
    let at = |e: io::Error| {
        io::Error::new(
            e.kind(),
            format!("driver files: write manifest {}: {e}", path.display()),
        )
    };
    let text = Manifest::new(&places, files).map_err(at)?.to_json();
    // The written text must parse again.
    parse(&text).map_err(|why| at(io::Error::other(why)))?;
    places
        .make_directory(directory)
        .and_then(|directory| directory.write(FILE, &text))
        .map_err(at)?;
    Ok((path, text.len()))
}

/// Reads and verifies the manifest, and searches for the current sockets.
pub fn load(roots: &Roots, expected_version: Option<&str>) -> Result<DriverFiles, Unusable> {
    let path = Path::new(DIRECTORY).join(FILE);
    let places = Places::open(roots).map_err(|e| Unusable::Broken {
        path: path.clone(),
        why: e,
    })?;
    let path = below(&places.driver_root, &path);
    let broken = |why: String| Unusable::Broken {
        path: path.clone(),
        why,
    };
    let stale = |what: String| Unusable::Stale {
        path: path.clone(),
        what,
    };
    let found = places
        .driver(&Path::new(DIRECTORY).join(FILE))
        .map_err(|e| broken(e.to_string()))?;
    let found = found.ok_or_else(|| Unusable::Absent { path: path.clone() })?;
    let bytes = found
        .read(MAX_BYTES as u64 + 1)
        .map_err(|e| broken(e.to_string()))?;
    let manifest = parse(&bytes).map_err(broken)?;
    if let Some((module, source)) = module_version(&places, expected_version).map_err(stale)?
        && module != manifest.files.version
    {
        return Err(stale(format!(
            "the driver is {module} ({source}), it was written for {}",
            manifest.files.version
        )));
    }
    let mut files = manifest.verify(&places).map_err(stale)?;
    let mut problems = Problems::default();
    let sockets = named::sockets(&places, roots, &mut problems);
    files.set_sockets(sockets);
    files.problems = problems.0;
    Ok(files)
}

/// Loads a valid manifest, else scans; also returns why the manifest was not used.
pub fn load_or_scan(
    roots: &Roots,
    expected_version: Option<&str>,
) -> Result<(DriverFiles, Option<Unusable>), String> {
    match load(roots, expected_version) {
        Ok(files) => Ok((files, None)),
        Err(why) => scan(roots, expected_version).map(|files| (files, Some(why))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver_files::{Link, Mount};

    fn manifest() -> Manifest {
        let library = PathBuf::from("/usr/lib64/libcuda.so.550.163.01");
        let files = DriverFiles {
            version: "550.163.01".into(),
            libcuda_directory: Some("/usr/lib64".into()),
            library_directories: vec!["/usr/lib64".into()],
            mounts: vec![Mount {
                host_path: library.clone(),
                container_path: library.clone(),
                kind: Kind::File,
            }],
            links: vec![
                Link {
                    link: "/usr/lib64/gbm/nvidia-drm_gbm.so".into(),
                    target: "../libnvidia-allocator.so.1".into(),
                    file: library.clone(),
                },
                Link {
                    link: "/usr/lib64/libcuda.so".into(),
                    target: "libcuda.so.1".into(),
                    file: library,
                },
            ],
            problems: vec![],
        };
        let directories = vec![Directory {
            path: "/usr/lib64".into(),
            modified_s: 1_753_000_000,
            names: u64::MAX,
        }];
        Manifest {
            schema: SCHEMA,
            files,
            sizes: vec![1],
            directories,
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let manifest = manifest();
        assert_eq!(parse(&manifest.to_json()), Ok(manifest));
    }

    #[test]
    fn a_cut_is_refused_and_a_changed_byte_gives_no_unsafe_path() {
        let good = manifest().to_json();
        for length in 0..good.len() {
            assert!(
                parse(&good[..length]).is_err(),
                "{length} of {} bytes were read",
                good.len()
            );
        }
        for at in 0..good.len() {
            for changed in [b'.', b'/', b'0', b'"', 0xff] {
                let mut bytes = good.clone();
                bytes[at] = changed;
                if let Ok(manifest) = parse(&bytes) {
                    assert!(manifest.check().is_ok());
                }
            }
        }
    }

    #[test]
    fn a_value_that_no_scan_gives_is_refused_by_its_name() {
        let changed = |change: fn(&mut Manifest)| {
            let mut manifest = manifest();
            change(&mut manifest);
            parse(&manifest.to_json()).unwrap_err()
        };
        for (error, part) in [
            (changed(|m| m.schema = 2), "schema 2: this program knows 1"),
            (
                changed(|m| m.files.version = "1.1".into()),
                "version \"1.1\"",
            ),
            (
                changed(|m| m.files.mounts[0].host_path = "/usr/../../etc/shadow".into()),
                "\"/usr/../../etc/shadow\" is no path",
            ),
            (
                changed(|m| m.files.mounts[0].container_path = "relative".into()),
                "\"relative\" is no path",
            ),
            (
                changed(|m| m.files.links[0].target = "../../etc/passwd".into()),
                "that is not a file next to it",
            ),
            (
                changed(|m| m.files.links[0].target = "/etc/passwd".into()),
                "that is not a file next to it",
            ),
            (
                changed(|m| m.files.links[0].target = "..".into()),
                "that is not a file next to it",
            ),
            (
                changed(|m| m.files.links[0].target = "../../x".into()),
                "that is not a file next to it",
            ),
            (
                changed(|m| m.files.mounts[0].kind = Kind::Socket),
                "is a socket",
            ),
            (changed(|m| m.sizes.push(2)), "2 sizes for 1 mounts"),
            (changed(|m| m.files.links.reverse()), "not in order"),
            (
                changed(|m| m.directories.clear()),
                "library directories are not",
            ),
        ] {
            assert!(error.contains(part), "{error}");
        }
        assert!(
            parse(&vec![b' '; MAX_BYTES + 1])
                .unwrap_err()
                .contains("1048577 bytes")
        );
        assert!(
            parse(br#"{"schema":1,"extra":1}"#)
                .unwrap_err()
                .contains("unknown field `extra`")
        );
    }
}
