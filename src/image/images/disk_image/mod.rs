//! `image replace-init` of a disk image: replaces the init in its erofs root. Everything else
//! stays: owners, modes, times, links, contents, extended attributes.
//!
//! Images are untrusted: their bytes are read here, by offset and with bounds, and never unpacked
//! or mounted. Written paths are from a closed list ([`wanted`]). Third-party programs run in a
//! sandbox. The new image is checked by these programs, read again and compared before it gets its
//! name.

pub mod erofs;
pub mod erofs_edit;
mod partition;
pub mod reading_limits; // bounds of what is read from one image
pub mod tool_sandbox;
pub mod wanted;

use self::erofs::Erofs;
use self::tool_sandbox::Work;
use self::wanted::Wanted;
use super::diff;
use super::diff::Difference;
use super::driver_list;
use super::entry_text::escaped;
use super::helper;
use super::helper::Helper;
use super::image::{Content, Form, Image, copy, open_regular};
use super::new_image::{NewImage, read_init};
use super::newc::Kind;
use super::output_file::{Output, Written};
use super::unpacked_root::{ROOT, Tree};
use super::verify::INIT;
use crate::guest_disk as disk;
use crate::guest_disk::{Disk, FileSystem, Table};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_init::boot::AGENT;
use kata_gpu_init::cdi::spec::PENDING;
use kata_gpu_init::formats::elf::ReadAt as _;
use kata_gpu_wire::arch::Arch;
use memchr::memmem;
use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Limit of the bytes of all files for each byte of the file system, beyond [`FREE_BYTES`]: holes
/// and hard links make the ratio exceed one.
const MAX_RATIO: u64 = 4;
const FREE_BYTES: u64 = 64 << 20;
/// Bytes read at once.
const CHUNK: usize = 1 << 20;
/// Part of an init that contains the loader's path.
const PAGE: usize = 4096;

/// Arguments of a replacement.
#[derive(Debug)]
pub struct Replacement {
    pub image: PathBuf,
    pub init: PathBuf,
    pub helper: Helper,
    pub output: PathBuf,
    pub manifest: bool,
}

/// Result of a replacement.
#[derive(Debug)]
pub struct Replaced {
    pub new: NewImage,
    pub disk: Disk,
    /// Bytes of the partition, if it was enlarged.
    pub grown: Option<u64>,
    pub has_module: bool,
}

/// Why an ext4 root is refused. Kata's NVIDIA images have erofs in both runtimes, confidential ones
/// too (DEFROOTFSTYPE_NV in its Makefiles, FS_TYPE in kata-deploy-binaries.sh).
const EXT4: &str = "its root is ext4, and this changes and reads erofs, as Kata's NVIDIA images \
                    are: \
                    build the image with FS_TYPE=erofs";

/// Errors: the root is not erofs, or the files' sizes add up to more than the image can hold, by
/// holes or shared data: reading all of them would take days.
fn read_erofs(disk: &Disk, source: Content) -> Result<Erofs> {
    ensure!(disk.root == FileSystem::Erofs, "{EXT4}");
    let fs = Erofs::read(source, None)?;
    let is_read = |index: usize| {
        fs.inodes
            .get(index)
            .is_some_and(|inode| inode.layout != erofs::Layout::Compressed)
    };
    let files = fs
        .image
        .entries
        .iter()
        .enumerate()
        .filter(|(index, entry)| entry.header.kind() == Kind::File && is_read(*index));
    let claimed = files.fold(0_u64, |sum, (_, entry)| {
        sum.saturating_add(entry.data.length)
    });
    let bytes = disk.root_bytes;
    let most = bytes.saturating_mul(MAX_RATIO).saturating_add(FREE_BYTES);
    ensure!(
        claimed <= most,
        "its files have {claimed} bytes, and the file system {bytes}: more than {most} are not \
         read: make it without sparse files"
    );
    Ok(fs)
}

/// Reads a root's names, and all contents that can be read.
pub fn read_all(source: Content) -> Result<(Image, Tree)> {
    let root = Erofs::read(source, None)?.image;
    let tree = Tree::new(&root)?;
    Ok((root, tree))
}

/// A file and its length, and what it is as a disk. The inner error: why it is no disk for Kata.
fn look(path: &Path) -> Result<(File, u64, Result<Disk, String>)> {
    let shown = path.display();
    let file = open(path)?;
    let length = file
        .metadata()
        .with_context(|| format!("look at image {shown}"))?
        .len();
    let disk = disk::look(&file, length).with_context(|| format!("read image {shown}"))?;
    Ok((file, length, disk))
}

/// Whether a file is a disk image, with whatever root.
pub fn is_disk(path: &Path) -> Result<bool> {
    Ok(look(path)?.2.is_ok())
}

/// Reads the root of a disk image; None for a file that is not a disk image.
pub fn read_disk(path: &Path) -> Result<Option<Image>> {
    let (file, _, Ok(disk)) = look(path)? else {
        return Ok(None);
    };
    let source = Content::of_file(file)?.part(disk.root_at..disk.root_at + disk.root_bytes);
    let root = read_erofs(&disk, source).with_context(|| format!("image {}", path.display()))?;
    Ok(Some(root.image))
}

/// Writes an image with another init beside the output. The caller renames it.
pub fn replace(wish: &Replacement) -> Result<Replaced> {
    let init = own_init(&wish.init)?;
    let shown = wish.image.display();
    let (image, length, disk) = look(&wish.image)?;
    let disk = disk.map_err(|why| anyhow::anyhow!("{shown}: {why}"))?;
    ensure!(disk.root == FileSystem::Erofs, "image {shown}: {EXT4}");
    // Create the output first: an unusable name must fail before an hour of work.
    let mut output = Output::create(&wish.output, Form::Plain)?;
    let work = Work::new()?;
    let old =
        Content::of_file(image.try_clone()?)?.part(disk.root_at..disk.root_at + disk.root_bytes);
    copy_sparse(&old, &work.image()).with_context(|| {
        format!(
            "copy the root of {shown} to {} (TMPDIR names another place)",
            work.image().display()
        )
    })?;
    let name = disk.root.name();
    let (sound, said) = work.check()?;
    ensure!(
        sound,
        "{shown}: its {name} file system is not sound, and nothing of it is used: {said}"
    );
    let root = read_erofs(&disk, old.clone()).with_context(|| {
        format!("{shown}: its {name} file system is not sound, and nothing of it is used")
    })?;
    let tree = Tree::new(&root.image).with_context(|| format!("read image {shown}"))?;
    let sbin = wanted::sbin(&tree).with_context(|| format!("image {shown}"))?;
    check_arch(&wish.init, &init, &tree).with_context(|| format!("image {shown}"))?;
    wanted::check_list_place(&tree).with_context(|| format!("image {shown}"))?;
    let helper = helper::read(&wish.helper, &tree)?;
    let list = if wish.manifest {
        driver_list::of(&tree, driver_list::path().as_bytes())?
    } else {
        Err("not asked for".into())
    };
    let bytes = helper.as_ref().ok().map(|(_, bytes)| bytes.as_slice());
    let wanted = Wanted {
        init: &init,
        sbin,
        helper: bytes,
        list: list.as_ref().ok().map(|(text, _)| text.as_slice()),
    };
    let changed = change(&work, &root, &tree, &wanted)?;
    let (sound, said) = work.check()?;
    ensure!(
        sound,
        "the changed {name} file system is not sound (is the file system full?): {said}"
    );
    let new_root = open(&work.image())?;
    let root_bytes = new_root.metadata()?.len();
    let grown = partition::grow(&image, &disk, root_bytes, &work.path("/work/table"))?;
    write(
        &image,
        length,
        &disk,
        &new_root,
        root_bytes,
        grown.as_ref(),
        &mut output,
    )?;
    let written = output.end()?;
    let (differences, helper_lacks) =
        check_written(&written, &disk, &old, &root, &tree, &wanted, &changed)
            .context("the written image differs from the intended one, and is removed")?;
    let kept = tree.below(ROOT).len() + 1
        - differences
            .iter()
            .filter(|d| !matches!(d.what, diff::Change::Added(_)))
            .count();
    Ok(Replaced {
        new: NewImage {
            written,
            differences,
            kept,
            manifest: list.map(|(_, files)| files),
            helper: helper.map(|(path, _)| path),
            helper_lacks,
        },
        disk,
        grown: grown.map(|grown| grown.partition),
        has_module: !driver_list::modules(&tree).is_empty(),
    })
}

fn open(path: &Path) -> Result<File> {
    open_regular(path).with_context(|| format!("open image {}", path.display()))
}

/// Reads the init. Errors: the program is another, or an image cannot start it.
fn own_init(path: &Path) -> Result<Vec<u8>> {
    let shown = path.display();
    let init = read_init(path)?;
    let head = init.get(..PAGE).unwrap_or(&init);
    // The first page holds a loader's path. An image has no libraries for such an init.
    ensure!(
        memmem::find(head, b"/ld-").is_none(),
        "init {shown}: dynamically linked, or another program (INIT is the guest's program, \
         kata-gpu-init): build it with cargo build --release --target \
         {}-unknown-linux-musl -p kata-gpu-init",
        Arch::of_head(&init).unwrap_or(Arch::OURS)
    );
    ensure!(
        memmem::find(&init, PENDING.as_bytes()).is_some(),
        "init {shown}: another program (INIT is the guest's program, kata-gpu-init)"
    );
    Ok(init)
}

/// Errors: the init is for another architecture than the image's agent. An agent whose start cannot
/// be read (it may be compressed) is no reason to refuse.
fn check_arch(path: &Path, init: &[u8], tree: &Tree) -> Result<()> {
    let mut head = [0; Arch::HEAD];
    let agent = tree
        .find(&*AGENT.to_string_lossy())
        .and_then(|id| tree.content(id));
    let length = agent
        .and_then(|agent| agent.read_at(&mut head, 0).ok())
        .unwrap_or(0);
    if let (Some(inits), Some(agents)) = (
        Arch::of_head(init),
        head.get(..length).and_then(Arch::of_head),
    ) {
        ensure!(
            inits == agents,
            "init {} is for {inits}, and the image's agent for {agents}: build it with cargo build \
             --release --target {agents}-unknown-linux-musl \
             -p kata-gpu-init",
            path.display()
        );
    }
    Ok(())
}

/// Copies a root, with holes in place of zeros.
fn copy_sparse(from: &Content, to: &Path) -> Result<()> {
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(to)?;
    let mut at = 0;
    from.chunks(|chunk| {
        if chunk.iter().any(|byte| *byte != 0) {
            file.write_all_at(chunk, at)?;
        }
        at += chunk.len() as u64;
        Ok(())
    })?;
    file.set_len(from.length)?;
    Ok(())
}

/// Changed places of an erofs file system.
#[derive(Default)]
struct Changed {
    /// Byte from which on everything is new.
    from: u64,
    /// Changed ranges before `from`, in order.
    places: Vec<Range<u64>>,
}

/// Changes the copy of the root.
fn change(work: &Work, root: &Erofs, tree: &Tree, wanted: &Wanted) -> Result<Changed> {
    let edit = erofs_edit::edit(root, tree, wanted)?;
    let file = File::options()
        .write(true)
        .open(work.image())
        .context("open the copy")?;
    file.set_len(edit.at)
        .and_then(|()| file.set_len(edit.bytes()))
        .context("change the copy")?;
    for (at, bytes) in edit.patches.iter().chain([(&edit.at, &edit.added)]) {
        file.write_all_at(bytes, *at)
            .context("change the copy (TMPDIR names another place)")?;
    }
    let places = edit.patches.iter();
    Ok(Changed {
        from: edit.at,
        places: places
            .map(|(at, bytes)| *at..*at + bytes.len() as u64)
            .collect(),
    })
}

/// Assembles the disk.
fn write(
    image: &File,
    length: u64,
    disk: &Disk,
    root: &File,
    root_bytes: u64,
    grown: Option<&partition::Grown>,
    out: &mut Output,
) -> Result<()> {
    let old = Content::of_file(image.try_clone()?)?;
    let root = Content::of_file(root.try_clone()?)?;
    let zeros =
        |length: u64, out: &mut Output| io::copy(&mut io::repeat(0).take(length), out).map(|_| ());
    let mut put = || -> io::Result<()> {
        if disk.table == Table::None {
            return copy(&root, out);
        }
        match grown {
            None => {
                copy(&old.part(0..disk.root_at), out)?;
                copy(&root, out)?;
                zeros(disk.root_bytes - root_bytes, out)?;
                copy(&old.part(disk.root_at + disk.root_bytes..length), out)
            }
            Some(grown) => {
                out.write_all(&grown.head)?;
                copy(&root, out)?;
                zeros(grown.partition - root_bytes, out)?;
                out.write_all(&grown.tail)
            }
        }
    };
    put().context("write the new image")
}

/// Reads the new image, as a guest finds it, and compares everything with the old one.
fn check_written(
    written: &Written,
    disk: &Disk,
    old: &Content,
    root: &Erofs,
    tree: &Tree,
    wanted: &Wanted,
    changed: &Changed,
) -> Result<(Vec<Difference>, Vec<String>)> {
    let file = open(written.temporary())?;
    let length = file.metadata()?.len();
    let new_disk = disk::look(&file, length)?.map_err(|why| anyhow::anyhow!(why))?;
    ensure!(
        (new_disk.table, new_disk.root, new_disk.root_at) == (disk.table, disk.root, disk.root_at),
        "the partition table is another"
    );
    let new =
        Content::of_file(file)?.part(new_disk.root_at..new_disk.root_at + new_disk.root_bytes);
    compare_bytes(old, &new, changed)?;
    let after = Erofs::read(new.clone(), Some((root, changed.from)))?;
    let after_tree = Tree::new(&after.image)?;
    check_path(&after_tree, INIT, Kind::File, 0o755, Some(wanted.init))?;
    check_path(
        &after_tree,
        &format!("{}/init", wanted.sbin),
        Kind::Link,
        0o777,
        None,
    )?;
    ensure!(
        after_tree
            .find("/sbin/init")
            .is_some_and(|id| Some(id) == after_tree.find(INIT)),
        "/sbin/init does not lead to {INIT}"
    );
    let mut helper_lacks = Vec::new();
    if let Some(program) = wanted.helper {
        check_path(
            &after_tree,
            &helper::path(),
            Kind::File,
            0o755,
            Some(program),
        )?;
        helper_lacks = lacks(&after, &after_tree);
    }
    if let Some(list) = wanted.list {
        check_path(
            &after_tree,
            &driver_list::path(),
            Kind::File,
            0o644,
            Some(list),
        )?;
    }
    let differences = diff::differences(tree, &after_tree, true)?;
    let meant = wanted.paths();
    if let Some(surprise) = differences
        .iter()
        .find(|d| !meant.iter().any(|path| path.as_bytes() == d.path))
    {
        bail!("{} would change", escaped(&surprise.path));
    }
    Ok((differences, helper_lacks))
}

/// Loader and libraries that the helper does not find. Empty if the image has compressed files,
/// which cannot be read.
fn lacks(root: &Erofs, tree: &Tree) -> Vec<String> {
    let mut layouts = root.inodes.iter().map(|inode| inode.layout);
    if layouts.any(|layout| layout == erofs::Layout::Compressed) {
        Vec::new()
    } else {
        helper::lacks(tree)
    }
}

/// Errors: the path does not have this kind, mode and content, or does not belong to root.
fn check_path(
    tree: &Tree,
    path: &str,
    kind: Kind,
    mode: u32,
    content: Option<&[u8]>,
) -> Result<()> {
    let full = || format!("{path} has other content than was written (is the file system full?)");
    let id = tree.find_no_follow(path).with_context(full)?;
    let meta = tree.meta(id);
    ensure!(
        tree.kind(id) == kind && meta.mode & 0o7777 == mode && (meta.uid, meta.gid) == (0, 0),
        "{}",
        full()
    );
    if let Some(wanted) = content {
        let found = tree
            .content(id)
            .with_context(full)?
            .bytes(wanted.len() as u64)
            .with_context(full)?;
        ensure!(found == wanted, "{}", full());
    }
    Ok(())
}

/// Errors: bytes outside the changed places differ.
fn compare_bytes(old: &Content, new: &Content, changed: &Changed) -> Result<()> {
    let (mut a, mut b) = (vec![0; CHUNK], vec![0; CHUNK]);
    let ends = changed
        .places
        .iter()
        .map(|place| (place.start, place.end))
        .chain([(changed.from, changed.from)]);
    let mut at = 0;
    for (start, end) in ends {
        while at < start {
            let length = usize::try_from(start - at).unwrap_or(CHUNK).min(CHUNK);
            let (a, b) = (&mut a[..length], &mut b[..length]);
            erofs::exact(old, at, a)?;
            erofs::exact(new, at, b)?;
            if let Some(index) = a.iter().zip(b.iter()).position(|(a, b)| a != b) {
                bail!("byte {} of the root would change", at + index as u64);
            }
            at += length as u64;
        }
        at = at.max(end);
    }
    Ok(())
}
