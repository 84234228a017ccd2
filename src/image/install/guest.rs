//! Initrd or disk image that guests start from, both verified.
//!
//! Kata gives a guest its image as a disk. The kernel mounts the first partition (/dev/vda1 or
//! /dev/pmem0p1) as `rootfs_type`; with `kernel_verity_params`, through dm-verity, whose hash tree
//! is in the second partition. The hash covers the whole root, so replacing the init changes it.

use super::drop_in_plan::Root;
use super::guest_check;
use super::guest_check::{Verified, Wanted};
use super::here::Args;
use crate::guest_disk as disk;
use crate::guest_disk::{Disk, Table};
use crate::images::disk_image::hash_tree;
use crate::images::image::Content;
use crate::kata::drop_in::Found;
use crate::kata::kata_config::unreadable;
use crate::kata::merge::Effective;
use crate::kata::refusal::Refusal;
use crate::kata::version::Configured;
use serde_json::{Value as Json, json};
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// An initrd or image, by its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    path: String,
    is_image: bool,
    verity: Option<Parameters>,
    /// The configuration names it already, so that new pods start from it.
    in_use: bool,
}

/// An image's `kernel_verity_params`, and where they stand: a file or an option.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parameters {
    line: String,
    place: String,
}

/// An initrd or image after it was read.
#[derive(Debug)]
pub struct Guest {
    pub path: PathBuf,
    /// Readable by everybody, so also by a hypervisor that does not run as root.
    pub for_everybody: bool,
    pub what: What,
}

#[derive(Debug)]
pub enum What {
    Initrd(Box<Verified>),
    Image(Box<Image>),
}

/// An image with a root that Kata can name.
#[derive(Debug)]
pub struct Image {
    bytes: u64,
    disk: Disk,
    /// Whether our init is somewhere in the image.
    has_init: bool,
    verity: Option<String>,
    /// The check of its files, or why they cannot be read.
    files: Result<Verified, String>,
}

/// A path that our init contains and Kata's own files do not.
const INIT_MARK: &str = kata_gpu_init::cdi::spec::PENDING;

/// The given initrd or image, or else the installed one. `now`: the configuration with our drop-in.
pub fn choose(args: &Args, of: &Configured, now: &Effective) -> Result<Chosen, Refusal> {
    let text = |key: &str| now.text(&of.key(key)).map(str::to_string);
    if let Some(given) = args.initrd.as_ref().or(args.image.as_ref()) {
        let (path, is_image) = (absolute(given)?, args.initrd.is_none());
        let verity = match &args.verity {
            Some(line) => Some(Parameters {
                line: line.clone(),
                place: "--verity".into(),
            }),
            None if is_image => beside(Path::new(&path))?,
            None => None,
        };
        return Ok(Chosen {
            in_use: text(key(is_image)).as_ref() == Some(&path),
            path,
            is_image,
            verity,
        });
    }
    if let Some(path) = text("initrd") {
        return Ok(Chosen {
            path,
            is_image: false,
            verity: None,
            in_use: true,
        });
    }
    // An image that our drop-in did not set is the one to be replaced.
    let is_ours = matches!(&of.config.ours, Found::Ours { record, .. } if record.image);
    match text("image").filter(|_| is_ours) {
        Some(path) => Ok(Chosen {
            path,
            is_image: true,
            verity: text("kernel_verity_params").map(|line| Parameters {
                line,
                place: of.config.drop_in_path().display().to_string(),
            }),
            in_use: true,
        }),
        None => {
            let why = "is needed, or --image: the configuration has no initrd yet, and its image \
                       is not one that was installed here";
            Err(Refusal::of_argument("--initrd", why).cure("give its path"))
        }
    }
}

/// Parameters in the file beside an image.
fn beside(image: &Path) -> Result<Option<Parameters>, Refusal> {
    let file = hash_tree::file_of(image);
    let line = hash_tree::beside(image).map_err(|e| {
        Refusal::at(&file, e.root_cause().to_string())
            .cure("make it readable, or remove it to install the image without dm-verity")
    })?;
    Ok(line.map(|line| Parameters {
        line,
        place: file.display().to_string(),
    }))
}

fn absolute(given: &Path) -> Result<String, Refusal> {
    let path = std::path::absolute(given).map_err(|e| Refusal::at(given, e.to_string()))?;
    match path.to_str() {
        Some(text) if !text.chars().any(char::is_control) => Ok(text.to_string()),
        _ => Err(Refusal::at(
            &path,
            "TOML and the hypervisor take only UTF-8 without control characters",
        )
        .cure("rename the file")),
    }
}

impl Chosen {
    /// Reads and verifies the file.
    pub fn look(self, wanted: &Wanted) -> Result<Guest, Refusal> {
        let path = PathBuf::from(self.path);
        let (file, metadata) = open(&path, key(self.is_image), self.in_use)?;
        let what = match self.is_image {
            true => {
                let image = look(&path, &file, metadata.len(), self.verity, wanted)?;
                What::Image(Box::new(image))
            }
            false => What::Initrd(Box::new(guest_check::look(&path, wanted)?)),
        };
        Ok(Guest {
            path,
            for_everybody: metadata.mode() & 0o004 != 0,
            what,
        })
    }
}

/// Kata's key, and our option's name.
fn key(is_image: bool) -> &'static str {
    if is_image { "image" } else { "initrd" }
}

/// Opens an initrd or image. `key`: see [`key`]. `in_use`: the configuration names it already.
fn open(path: &Path, key: &str, in_use: bool) -> Result<(File, Metadata), Refusal> {
    // A device or pipe at this path must not block.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(path)
        .map_err(|e| match e.kind() {
            io::ErrorKind::NotFound if in_use => Refusal::at(
                path,
                format!(
                    "there is no such {key}, and the configuration names it: new pods cannot start"
                ),
            )
            .cure(format!(
                "put it back, give another with --{key}, or undo it with install --remove"
            )),
            io::ErrorKind::NotFound => Refusal::at(path, format!("there is no such {key}"))
                .cure(format!("give an absolute path with --{key}")),
            _ => unreadable(path, &e),
        })?;
    let metadata = file.metadata().map_err(|e| unreadable(path, &e))?;
    if metadata.is_file() {
        Ok((file, metadata))
    } else {
        let what = if key == "image" {
            "a disk image"
        } else {
            "an initrd"
        };
        let cure = format!("give {what} with --{key}");
        Err(Refusal::at(path, "is not a regular file").cure(cure))
    }
}

fn look(
    path: &Path,
    file: &File,
    bytes: u64,
    verity: Option<Parameters>,
    wanted: &Wanted,
) -> Result<Image, Refusal> {
    let disk = disk::look(file, bytes)
        .map_err(|e| unreadable(path, &e))?
        .map_err(|why| {
            let refusal = Refusal::at(path, format!("is not an image for Kata: {why}"));
            if why.contains("initrd") {
                refusal.cure("give it with --initrd")
            } else {
                refusal.cure(
                    "give one with erofs or ext4, made by kata-gpu-boot image replace-init \
                          from Kata's own",
                )
            }
        })?;
    let has_init = disk::contains(file, INIT_MARK.as_bytes()).map_err(|e| unreadable(path, &e))?;
    if let Some(verity) = &verity {
        check_verity(path, file, &disk, verity)?;
    }
    Ok(Image {
        bytes,
        disk,
        has_init,
        verity: verity.map(|verity| verity.line),
        files: guest_check::look_into_disk(path, wanted),
    })
}

/// Refuses parameters with which the kernel finds no root, so that no pod starts.
fn check_verity(path: &Path, file: &File, disk: &Disk, verity: &Parameters) -> Result<(), Refusal> {
    let Parameters { line, place } = verity;
    let content = file.try_clone().and_then(Content::of_file);
    content
        .and_then(|content| hash_tree::check(&content, disk, line))
        .map_err(|e| unreadable(path, &e))?
        .map_err(|why| {
            Refusal::of_argument(place, why)
                .key("kernel_verity_params", line)
                .cure(
                    "make the image with kata-gpu-boot image replace-init --verity, and give it \
                     with --image: its parameters are in the file beside it",
                )
        })
}

impl Image {
    fn refusals(&self, path: &Path) -> Vec<Refusal> {
        let mut refusals = Vec::new();
        if self.disk.table == Table::None {
            let why = "is a file system without a partition table, and Kata's guests mount the \
                       first partition: the kernel would find no root";
            refusals.push(
                Refusal::at(path, why)
                    .cure("put it into a partition, as Kata's image builder does")
                    .forcible(),
            );
        }
        if !self.has_init {
            let why =
                "there is no trace of kata-gpu-init in it: guests would start from it as before";
            let cure = "make it with kata-gpu-boot image replace-init (a compressed file system \
                        hides it: that one may be passed)";
            refusals.push(Refusal::at(path, why).cure(cure).forcible());
        }
        match &self.files {
            Ok(verified) => refusals.extend(verified.refusals(path)),
            Err(why) => {
                let why = format!("cannot be checked: {why}");
                let cure = "use an uncompressed erofs root, as Kata's NVIDIA images have";
                refusals.push(Refusal::at(path, why).cure(cure).forcible());
            }
        }
        refusals
    }

    fn shown(&self, path: &Path) -> String {
        let mib = self.bytes as f64 / f64::from(1 << 20);
        let root = self.disk.root.name();
        let place = match self.disk.table {
            Table::None => "without a partition table",
            Table::Mbr => "in the first partition, MBR",
            Table::Gpt => "in the first partition, GPT",
        };
        let init = if self.has_init {
            "kata-gpu-init is in it"
        } else {
            "no trace of kata-gpu-init"
        };
        let files = match &self.files {
            Ok(verified) => format!("verified: {}", verified.report.counts()),
            Err(why) => format!("not verified: {why}"),
        };
        format!(
            "{}, {mib:.1} MiB, {root} {place}; {init}; {files}",
            path.display()
        )
    }
}

impl Guest {
    /// Kata's key: `initrd` or `image`.
    pub fn key(&self) -> &'static str {
        key(matches!(self.what, What::Image(_)))
    }

    /// The plan's root. The path is UTF-8: it came from an argument or a configuration.
    pub fn root(&self) -> Root {
        Root {
            path: self.path.to_string_lossy().into_owned(),
            image: match &self.what {
                What::Initrd(_) => None,
                What::Image(image) => {
                    Some((image.disk.root, image.verity.clone().unwrap_or_default()))
                }
            },
        }
    }

    pub fn refusals(&self) -> Vec<Refusal> {
        match &self.what {
            What::Initrd(initrd) => initrd.refusals(&self.path),
            What::Image(image) => image.refusals(&self.path),
        }
    }

    /// Lines of the text report.
    pub fn shown(&self) -> Vec<String> {
        match &self.what {
            What::Initrd(initrd) => vec![
                format!("initrd   {}", initrd.shown(&self.path)),
                format!("kernel   {}", initrd.shown_kernel()),
            ],
            What::Image(image) => {
                let mut lines = vec![format!("image    {}", image.shown(&self.path))];
                let kernel = image.files.as_ref().map(Verified::shown_kernel);
                lines.extend(kernel.map(|kernel| format!("kernel   {kernel}")));
                lines
            }
        }
    }

    /// Whether no part of the driver is in it. False where its files cannot be read.
    pub fn driver_is_elsewhere(&self) -> bool {
        let verified = match &self.what {
            What::Initrd(initrd) => Some(&**initrd),
            What::Image(image) => image.files.as_ref().ok(),
        };
        verified.is_some_and(|verified| verified.report.driver_elsewhere)
    }

    /// Whether it is an image whose root no hash covers.
    pub fn is_unmeasured_image(&self) -> bool {
        matches!(&self.what, What::Image(image) if image.verity.is_none())
    }

    /// Loss of a guest without dm-verity, where the configuration had it.
    pub fn given_up(&self) -> Option<&'static str> {
        match &self.what {
            What::Image(image) if image.verity.is_some() => None,
            What::Image(_) => Some(
                "kernel_verity_params is of the former image and is emptied: no guest notices when \
                 the host changes its root's data; kata-gpu-boot image replace-init --verity makes \
                 an image with which they do",
            ),
            What::Initrd(_) => Some(
                "kernel_verity_params is of the former image and is emptied: no hash on the \
                 command line covers the initrd",
            ),
        }
    }

    /// Need of a guest with dm-verity, where the configuration had none.
    pub fn first_verity(&self) -> Option<&'static str> {
        match &self.what {
            What::Image(image) if image.verity.is_some() => Some(
                "kernel_verity_params is new here: the kernel needs dm-verity and dm-init built in \
                 (CONFIG_DM_VERITY, CONFIG_DM_INIT), or it finds no root; if it lacks them, make \
                 the image without --verity",
            ),
            What::Image(_) | What::Initrd(_) => None,
        }
    }

    /// A surprise in the image that is no reason to refuse.
    pub fn note(&self) -> Option<String> {
        match &self.what {
            What::Image(image) if image.disk.second.is_some() && image.verity.is_none() => Some(
                "the image has a second partition: if that is its dm-verity hash, --verity uses \
                 it; now nothing checks the root"
                    .into(),
            ),
            What::Image(_) | What::Initrd(_) => None,
        }
    }

    pub fn json(&self) -> Json {
        let path = self.path.to_string_lossy();
        match &self.what {
            What::Initrd(initrd) => {
                let report = &initrd.report;
                json!({"path": path, "bytes": report.bytes, "verify": report.json()})
            }
            What::Image(image) => {
                let table = match image.disk.table {
                    Table::None => Json::Null,
                    Table::Mbr => "mbr".into(),
                    Table::Gpt => "gpt".into(),
                };
                json!({
                    "path": path,
                    "bytes": image.bytes,
                    "fileSystem": image.disk.root.name(),
                    "partitionTable": table,
                    "init": image.has_init,
                    "verity": image.verity,
                    "verify": image.files.as_ref().ok().map(|verified| verified.report.json()),
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_disk::FileSystem;
    use crate::guest_disk::stand_in::{disk, file_system, file_system_with};
    use kata_gpu_test_support::temp_dir;

    fn guest(path: &Path, verity: Option<String>) -> Result<Guest, Refusal> {
        let chosen = Chosen {
            path: path.display().to_string(),
            is_image: true,
            verity: verity.map(|line| Parameters {
                line,
                place: "--verity".into(),
            }),
            in_use: false,
        };
        chosen.look(&Wanted::default())
    }

    #[test]
    fn verity_parameters_must_be_whole_and_of_this_disk() {
        let dir = temp_dir();
        let path = dir.path().join("image");
        let root = file_system(FileSystem::Erofs);
        let wanted = hash_tree::parameters("ab".into(), root.len() as u64);
        let tree = hash_tree::of(root.as_slice(), wanted).unwrap();
        let verity = hash_tree::line(&tree.verity);
        let mut whole = disk(Table::Mbr, &root, true);
        let at = whole.len() - tree.bytes.len();
        whole[at..].copy_from_slice(&tree.bytes);
        std::fs::write(&path, &whole).unwrap();
        let of = |verity: &str| guest(&path, Some(verity.into()));
        let plan = of(&verity).unwrap().root();
        assert_eq!(plan.image, Some((FileSystem::Erofs, verity.clone())));
        let hash = tree.verity.root_hash.as_str();
        let other = hash.replace(|c| c != '0', "0");
        for (from, to, why) in [
            ("root_hash=", "root=", "root_hash is missing"),
            (hash, "00ff", "root_hash has 4 digits"),
            (hash, &other, hash),
            (
                "salt=ab",
                "salt=x\"y!",
                "is not an even number of hexadecimal",
            ),
            ("salt=ab", "salt=", "salt is missing"),
            ("salt=ab", "salt=ac", "the parameters are of another image"),
            ("blocks=2", "blocks=0", "data_blocks=0 is no number from 1"),
            ("blocks=2", "blocks=3", "more than the root's 8192 bytes"),
            (
                "blocks=2",
                "blocks=18446744073709551615",
                "more than a disk",
            ),
            (
                "hash_block_size=4096",
                "hash_block_size=100",
                "power of two",
            ),
        ] {
            let refusal = of(&verity.replace(from, to)).unwrap_err();
            assert!(
                refusal.why.contains(why) && !refusal.forcible,
                "{to}: {refusal}"
            );
        }
        // A byte of the tree, one of the root, and no tree at all.
        for (index, why) in [
            (at, "another hash tree than this image's root"),
            (4096 + 5000, "the parameters are of another image"),
        ] {
            let mut changed = whole.clone();
            changed[index] ^= 1;
            std::fs::write(&path, changed).unwrap();
            assert!(of(&verity).unwrap_err().why.contains(why), "{index}");
        }
        std::fs::write(&path, disk(Table::Mbr, &root, false)).unwrap();
        assert!(of(&verity).unwrap_err().why.contains("no second partition"));
    }

    #[test]
    fn what_is_no_image_is_refused_with_the_cure() {
        let dir = temp_dir();
        let path = dir.path().join("image");
        for (bytes, why, cure) in [
            (b"07070100000".to_vec(), "it is an initrd", "--initrd"),
            (
                vec![0; 5000],
                "nothing that is known",
                "kata-gpu-boot image replace-init",
            ),
            (
                disk(Table::Mbr, &[0; 4096], false),
                "first partition is neither erofs nor ext4",
                "kata-gpu-boot image replace-init",
            ),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let refusal = guest(&path, None).unwrap_err();
            assert!(
                refusal.why.contains(why) && refusal.cure.contains(cure) && !refusal.forcible,
                "{refusal}"
            );
        }
        for (is_image, missing) in [(false, "no such initrd"), (true, "no such image")] {
            let look = |path: &Path| {
                let chosen = Chosen {
                    path: path.display().to_string(),
                    is_image,
                    verity: None,
                    in_use: false,
                };
                chosen.look(&Wanted::default()).unwrap_err().why
            };
            assert!(look(dir.path()).contains("not a regular file"));
            assert!(look(&dir.path().join("nothing")).contains(missing));
        }
        for (bytes, why) in [
            (
                file_system_with(FileSystem::Ext4, INIT_MARK),
                "without a partition table",
            ),
            (
                disk(Table::Mbr, &file_system(FileSystem::Erofs), false),
                "no trace of kata-gpu-init",
            ),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let refusals = guest(&path, None).unwrap().refusals();
            let [refusal, unread] = refusals.as_slice() else {
                panic!("{refusals:?}")
            };
            assert!(refusal.forcible && refusal.why.contains(why), "{refusal}");
            assert!(unread.forcible && unread.why.contains("cannot be checked"));
        }
        std::fs::write(
            &path,
            disk(
                Table::Mbr,
                &file_system_with(FileSystem::Erofs, INIT_MARK),
                false,
            ),
        )
        .unwrap();
        assert_eq!(guest(&path, None).unwrap().refusals().len(), 1);
    }
}
