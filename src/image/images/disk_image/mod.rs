//! `image replace-init` of a disk image: replaces the init in its erofs root. Everything else
//! stays: owners, modes, times, links, contents, extended attributes.
//!
//! Images are untrusted: their bytes are read here, by offset and with bounds, and never unpacked
//! or mounted. Written paths are from a closed list ([`wanted`]). Third-party programs run in a
//! sandbox. The new image is checked by these programs, read again and compared before it gets its
//! name.

pub mod erofs;
pub mod erofs_edit;
pub mod hash_tree; // dm-verity, and its parameters
mod partition;
pub mod reading_limits; // bounds of what is read from one image
pub mod tool_sandbox;
pub mod wanted;

use self::erofs::Erofs;
use self::erofs_edit::Edit;
use self::hash_tree::HashTree;
use self::partition::Around;
use self::tool_sandbox::Work;
use self::wanted::{Put, Wanted};
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
use super::unpacked_root::{ROOT, Tree, What};
use super::verify::INIT;
use crate::doing::Doing;
use crate::guest_disk as disk;
use crate::guest_disk::{Disk, FileSystem, Table};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_init::boot::AGENT;
use kata_gpu_init::cdi::spec::PENDING;
use kata_gpu_init::formats::elf::ReadAt as _;
use kata_gpu_report::data::text::hex;
use kata_gpu_wire::arch::Arch;
use memchr::memmem;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Limit of the bytes of all files for each byte of the file system, beyond [`FREE_BYTES`]: holes
/// and hard links make the ratio exceed one.
const MAX_RATIO: u64 = 4;
const FREE_BYTES: u64 = 64 << 20;
/// Bytes read at once.
const CHUNK: usize = 1 << 20;
/// Context of a difference that was found after the image was written.
const WRITTEN_DIFFERS: &str = "the written image differs from the intended one, and is removed";
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
    /// Whether the second partition gets a hash tree.
    pub verity: bool,
}

/// Result of a replacement.
#[derive(Debug)]
pub struct Replaced {
    pub new: NewImage,
    pub disk: Disk,
    /// Bytes of the partition, if it was enlarged.
    pub grown: Option<u64>,
    /// Hash tree in the second partition, and whether that partition was made or moved.
    pub tree: Option<HashTree>,
    pub moved: bool,
    pub has_module: bool,
}

impl Replaced {
    /// Renames the image to its name, `output`, and writes the parameters of its hash tree beside
    /// it; parameters of a former image are removed.
    pub fn keep(&mut self, output: &Path) -> Result<()> {
        let file = hash_tree::file_of(output);
        let parameters = match &self.tree {
            None => None,
            Some(tree) => {
                let mut parameters = Output::create(&file, Form::Plain)?;
                writeln!(parameters, "{}", hash_tree::line(&tree.verity)).doing("write", &file)?;
                Some(parameters.end()?)
            }
        };
        // After a loss of power between both, `install` refuses the former parameters.
        self.new.written.keep()?;
        match parameters {
            Some(mut parameters) => parameters.keep(),
            None => match std::fs::remove_file(&file) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).doing("remove", &file),
                _ => Ok(()),
            },
        }
    }
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

/// A file, and what it is as a disk. The inner error: why it is not a disk for Kata.
fn look(path: &Path) -> Result<(Content, Result<Disk, String>)> {
    let shown = path.display();
    let file = open(path)?;
    let disk = disk::look(&file, file.length).with_context(|| format!("read image {shown}"))?;
    Ok((file, disk))
}

/// State of the hash tree of a disk image; None for another file, or without one.
pub fn hash_tree_state(path: &Path) -> Result<Option<hash_tree::State>> {
    match look(path)? {
        (file, Ok(disk)) => hash_tree::look(path, &file, &disk),
        (_, Err(_)) => Ok(None),
    }
}

/// Whether a file is a disk image, with whatever root.
pub fn is_disk(path: &Path) -> Result<bool> {
    Ok(look(path)?.1.is_ok())
}

fn root_of(image: &Content, disk: &Disk) -> Content {
    image.part(disk.root_at..disk.root_at + disk.root_bytes)
}

/// Root of a disk image.
#[derive(Debug)]
pub struct DiskRoot {
    pub image: Image,
    /// Whether files are compressed, whose contents are not read.
    pub compressed: bool,
}

/// Reads the root of a disk image; None for a file that is not a disk image.
pub fn read_disk(path: &Path) -> Result<Option<DiskRoot>> {
    let (file, Ok(disk)) = look(path)? else {
        return Ok(None);
    };
    let root = read_erofs(&disk, root_of(&file, &disk)).doing("image", path)?;
    Ok(Some(DiskRoot {
        compressed: is_compressed(&root),
        image: root.image,
    }))
}

fn is_compressed(root: &Erofs) -> bool {
    let mut layouts = root.inodes.iter().map(|inode| inode.layout);
    layouts.any(|layout| layout == erofs::Layout::Compressed)
}

/// Writes an image with another init beside the output. The caller renames it.
pub fn replace(wish: &Replacement) -> Result<Replaced> {
    let init = own_init(&wish.init)?;
    let shown = wish.image.display();
    let (image, disk) = look(&wish.image)?;
    let disk = disk.map_err(|why| anyhow::anyhow!("{shown}: {why}"))?;
    ensure!(disk.root == FileSystem::Erofs, "image {shown}: {EXT4}");
    ensure!(
        !wish.verity || disk.table != Table::None,
        "image {shown}: a file system without a partition table has no second partition for the \
         hash tree: put it into a partition, as Kata's image builder does, or omit --verity"
    );
    // Create the output first: an unusable name must fail before an hour of work.
    let mut output = Output::create(&wish.output, Form::Plain)?;
    let work = Work::new()?;
    let old = root_of(&image, &disk);
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
    let edit = erofs_edit::edit(&root, &tree, &wanted)?;
    change(&work, &edit)?;
    let (sound, said) = work.check()?;
    ensure!(
        sound,
        "the changed {name} file system is not sound (is the file system full?): {said}"
    );
    let new_root = open(&work.image())?;
    let scratch = work.path("/work/table");
    let tree_bytes = |partition| {
        let parameters = hash_tree::parameters(String::new(), partition);
        parameters.tree_bytes().unwrap_or(u64::MAX / 2)
    };
    let around = partition::around(
        &image,
        &disk,
        new_root.length,
        wish.verity.then_some(&tree_bytes),
        &scratch,
    )
    .with_context(|| format!("image {shown}"))?;
    let hash_tree = wish
        .verity
        .then(|| hash_tree_of(&new_root, around.partition))
        .transpose()
        .context("compute the hash tree of the new root")?;
    write(&around, &new_root, hash_tree.as_ref(), &mut output).context("write the new image")?;
    let written = output.end()?;
    if let Some(hash_tree) = &hash_tree {
        check_tree(&written, hash_tree).context(WRITTEN_DIFFERS)?;
    }
    let (differences, helper_lacks) =
        check_written(&written, &disk, &old, &root, &tree, &wanted, &edit)
            .context(WRITTEN_DIFFERS)?;
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
        grown: around.grown.then_some(around.partition),
        tree: hash_tree,
        moved: around.moved,
        has_module: !driver_list::modules(&tree).is_empty(),
    })
}

fn open(path: &Path) -> Result<Content> {
    open_regular(path)
        .and_then(Content::of_file)
        .doing("open image", path)
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

/// Changes the copy of the root.
fn change(work: &Work, edit: &Edit) -> Result<()> {
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
    Ok(())
}

/// The hash tree of a partition that begins with this root.
fn hash_tree_of(root: &Content, partition: u64) -> io::Result<HashTree> {
    // A salt keeps others from preparing two blocks of one hash. This one is as unknown to them,
    // since it changes with each byte of the root, and the same inputs still give the same image.
    let salt = hex(&root.sha256()?);
    let padded = root
        .reader()
        .chain(io::repeat(0).take(partition - root.length));
    hash_tree::of(padded, hash_tree::parameters(salt, partition))
}

/// Assembles the disk.
fn write(
    around: &Around,
    root: &Content,
    tree: Option<&HashTree>,
    out: &mut Output,
) -> io::Result<()> {
    let zeros = |bytes: u64, out: &mut Output| io::copy(&mut io::repeat(0).take(bytes), out);
    copy(&around.head, out)?;
    copy(root, out)?;
    zeros(around.partition - root.length, out)?;
    copy(&around.between, out)?;
    if let Some(tree) = tree {
        // No rest of a former tree stays behind this one.
        out.write_all(&tree.bytes)?;
        zeros(around.second - tree.bytes.len() as u64, out)?;
    }
    copy(&around.tail, out)
}

/// Computes the tree of the written image again, from the partitions that its table names.
fn check_tree(written: &Written, tree: &HashTree) -> Result<()> {
    let (new, disk) = look(written.temporary())?;
    let disk = disk.map_err(|why| anyhow::anyhow!(why))?;
    hash_tree::check(&new, &disk, &hash_tree::line(&tree.verity))?
        .map_err(|why| anyhow::anyhow!(why))
}

/// Reads the new image, as a guest finds it, and compares everything with the old one.
fn check_written(
    written: &Written,
    disk: &Disk,
    old: &Content,
    root: &Erofs,
    tree: &Tree,
    wanted: &Wanted,
    edit: &Edit,
) -> Result<(Vec<Difference>, Vec<String>)> {
    let (new, new_disk) = look(written.temporary())?;
    let new_disk = new_disk.map_err(|why| anyhow::anyhow!(why))?;
    ensure!(
        (new_disk.table, new_disk.root, new_disk.root_at) == (disk.table, disk.root, disk.root_at),
        "the partition table is another"
    );
    let new = root_of(&new, &new_disk);
    compare_bytes(old, &new, edit)?;
    let after = Erofs::read(new, Some((root, edit.at)))?;
    let after_tree = Tree::new(&after.image)?;
    wanted
        .puts()
        .iter()
        .try_for_each(|put| check_put(&after_tree, put))?;
    ensure!(
        after_tree
            .find("/sbin/init")
            .is_some_and(|id| Some(id) == after_tree.find(INIT)),
        "/sbin/init does not lead to {INIT}"
    );
    let helper_lacks = match wanted.helper {
        Some(_) => lacks(&after, &after_tree),
        None => Vec::new(),
    };
    let differences = diff::differences(tree, &after_tree, true)?;
    if let Some(surprise) = differences.iter().find(|d| !wanted.may_change(&d.path)) {
        bail!("{} would change", escaped(&surprise.path));
    }
    Ok((differences, helper_lacks))
}

/// Loader and libraries that the helper does not find. Empty if the image has compressed files,
/// which cannot be read.
fn lacks(root: &Erofs, tree: &Tree) -> Vec<String> {
    if is_compressed(root) {
        Vec::new()
    } else {
        helper::lacks(tree)
    }
}

/// Errors: the path does not have this kind, mode and content, or does not belong to root.
fn check_put(tree: &Tree, put: &Put) -> Result<()> {
    let is_same = || {
        let id = tree.find_no_follow(&put.path)?;
        let meta = tree.meta(id);
        let data = match &tree.node(id).what {
            What::Link(target) => target.clone(),
            _ => tree.content(id)?.bytes(put.data.len() as u64).ok()?,
        };
        Some((meta.mode, meta.uid, meta.gid) == (put.mode, 0, 0) && data == put.data)
    };
    ensure!(
        is_same() == Some(true),
        "{} has other content than was written (is the file system full?)",
        put.path
    );
    Ok(())
}

/// Errors: bytes outside the changed places differ.
fn compare_bytes(old: &Content, new: &Content, edit: &Edit) -> Result<()> {
    let (mut a, mut b) = (vec![0; CHUNK], vec![0; CHUNK]);
    let ends = edit
        .patches
        .iter()
        .map(|(at, bytes)| (*at, *at + bytes.len() as u64))
        .chain([(edit.at, edit.at)]);
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
