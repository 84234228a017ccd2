//! `kata-gpu-boot image`: packs, lists, verifies and changes guest images: initrds, and disk images
//! with an erofs root.

use anyhow::{Result, bail, ensure};
use clap::{ArgGroup, Subcommand};
use kata_gpu_image::guest_disk::Table;
use kata_gpu_image::images::disk_image::hash_tree;
use kata_gpu_image::images::entry_text::{escaped, megabytes};
use kata_gpu_image::images::helper::HelperArgs;
use kata_gpu_image::images::image::{Form, Image};
use kata_gpu_image::images::new_image::list_text;
use kata_gpu_image::images::output_file::Output;
use kata_gpu_image::images::pack::List;
use kata_gpu_image::images::unpacked_root::Tree;
use kata_gpu_image::images::verify::{INIT, INIT_OF_DISK, Question};
use kata_gpu_image::images::{
    components, diff, disk_image, kernel_release, ls, pack, repack, verify,
};
use kata_gpu_init::gpu::topology::Topology;
use kata_gpu_report::data::text::ascii_json;
use kata_gpu_report::data::text::{Ink, Screen, printable};
use kata_gpu_report::terminal::stdout::print;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit status if an image cannot be read or written at all.
const FAILED: u8 = 2;

/// Pack, list, verify and change guest images: initrds and disk images.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Pack(PackArgs),
    Ls(LsArgs),
    Cat(CatArgs),
    Verify(VerifyArgs),
    Diff(DiffArgs),
    ReplaceInit(ReplaceInitArgs),
    #[command(hide = true)]
    InSandbox(InSandboxArgs),
}

/// Make an initrd of directories and lists.
#[derive(clap::Args, Debug)]
#[command(after_help = include_str!("image/pack.txt"))]
struct PackArgs {
    /// Directory whose content becomes the guest's root, or a list of entries; several are merged.
    #[arg(value_name = "DIR|LIST", required = true)]
    sources: Vec<PathBuf>,
    /// Output file; made when it is whole.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Compress the image.
    #[arg(long)]
    gzip: bool,
    /// Do not make the list of the driver's files.
    #[arg(long)]
    no_manifest: bool,
    /// Print sizes as JSON.
    #[arg(long)]
    json: bool,
}

/// List an image's entries, in their order.
#[derive(clap::Args, Debug)]
struct LsArgs {
    /// An initrd, or a disk image.
    image: PathBuf,
    /// Paths to list, with all entries below them [default: all].
    paths: Vec<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Write a file of an image to standard output. Links are followed as in the guest. Exit status 1:
/// there is no such path.
#[derive(clap::Args, Debug)]
struct CatArgs {
    /// An initrd, or a disk image.
    image: PathBuf,
    /// The file's path in it.
    path: String,
}

/// Check that an image can boot as a Kata guest with NVIDIA GPUs.
#[derive(clap::Args, Debug)]
#[command(after_help = include_str!("image/verify.txt"))]
struct VerifyArgs {
    /// An initrd, or a disk image.
    #[arg(required_unless_present = "rules")]
    image: Option<PathBuf>,
    /// The guest's kernel (its file, or its release as `uname -r` prints it), which the modules
    /// must fit.
    #[arg(long, value_name = "FILE|RELEASE")]
    kernel: Option<String>,
    /// Program that the kernel starts, as in rdinit= [default: /init, of a disk image /sbin/init].
    #[arg(long, value_name = "PATH")]
    rdinit: Option<String>,
    /// The driver's root, as in gpuinit.driver-root= [default: the one that the init finds].
    #[arg(long, value_name = "DIR")]
    driver_root: Option<PathBuf>,
    /// Do not require the driver's libraries and firmware: they come from elsewhere, or are not
    /// needed.
    #[arg(long)]
    no_user_space: bool,
    /// Topology whose services the image must have; may be given several times.
    #[arg(long, value_name = "TOPOLOGY", value_parser = topology)]
    topology: Vec<Topology>,
    /// With --topology: check for confidential guests.
    #[arg(long, requires = "topology")]
    confidential: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Print the rules, and exit.
    #[arg(long, exclusive = true)]
    rules: bool,
}

/// Replace the init of a guest image, and nothing else.
#[derive(clap::Args, Debug)]
#[command(
    after_help = include_str!("image/replace_init.txt"),
    group = ArgGroup::new("form").multiple(false)
)]
struct ReplaceInitArgs {
    /// The image that Kata boots now: an initrd, or a disk image.
    image: PathBuf,
    /// The new init, the program kata-gpu-init.
    #[arg(long, value_name = "FILE")]
    init: PathBuf,
    /// Output file; made when it is whole and compared with the image.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    helper: HelperArgs,
    /// Do not add the list of the driver's files.
    #[arg(long)]
    no_manifest: bool,
    /// Make a new dm-verity hash tree in the second partition, and write its parameters into
    /// FILE.verity, from which install takes them (disk images only).
    #[arg(long)]
    verity: bool,
    #[command(flatten)]
    initrd: InitrdArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Options of `replace-init` for an initrd.
#[derive(clap::Args, Debug, Default, PartialEq)]
struct InitrdArgs {
    /// The guest's kernel, as for verify (initrds only).
    #[arg(long, value_name = "FILE|RELEASE")]
    kernel: Option<String>,
    /// Do not require the driver's libraries and firmware, as for verify (initrds only).
    #[arg(long)]
    no_user_space: bool,
    /// Omit the old init and its signature (initrds only).
    #[arg(long)]
    drop_old: bool,
    /// Store it uncompressed [default: as it is stored now] (initrds only).
    #[arg(long, group = "form")]
    plain: bool,
    /// Compress it (initrds only).
    #[arg(long, group = "form")]
    gzip: bool,
    /// Write it even if it cannot boot (initrds only).
    #[arg(long)]
    force: bool,
}

/// Show the differences of two images for a guest.
#[derive(clap::Args, Debug)]
struct DiffArgs {
    /// The first image.
    a: PathBuf,
    /// The second image.
    b: PathBuf,
    /// Compare times, too.
    #[arg(long)]
    times: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Check a disk image's root in a sandbox.
#[derive(clap::Args, Debug)]
struct InSandboxArgs {
    directory: PathBuf,
}

/// Runs `image`.
pub fn run(args: &Args) -> ExitCode {
    let done = match &args.command {
        Command::Pack(args) => pack(args),
        Command::Ls(args) => ls(args),
        Command::Cat(args) => cat(args),
        Command::Verify(args) => verify(args),
        Command::Diff(args) => diff(args),
        Command::ReplaceInit(args) => replace_init(args),
        Command::InSandbox(args) => {
            return disk_image::tool_sandbox::run_inside(&args.directory);
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("kata-gpu-boot: {}", printable(&format!("{error:#}")));
            ExitCode::from(FAILED)
        }
    }
}

/// Reads a disk image's root, or an initrd.
fn read_image(path: &Path) -> Result<Image> {
    match disk_image::read_disk(path)? {
        Some(root) => Ok(root.image),
        None => Image::open(path),
    }
}

fn read(path: &Path) -> Result<(Image, Tree)> {
    let image = read_image(path)?;
    let tree = Tree::new(&image)?;
    Ok((image, tree))
}

fn pack(args: &PackArgs) -> Result<bool> {
    let mut output = Output::create(
        &args.output,
        if args.gzip { Form::Gzip } else { Form::Plain },
    )?;
    let packing = pack::Packing {
        mtime: pack::mtime()?,
        manifest: !args.no_manifest,
    };
    let packed = pack::pack(&args.sources, packing, &mut output)?;
    let mut done = output.end()?;
    done.keep()?;
    let left_out: Vec<String> = packed
        .left_out
        .iter()
        .map(|path| printable(&path.display().to_string()))
        .collect();
    left_out.iter().for_each(|path| {
        eprintln!(
            "kata-gpu-boot: {path} is a socket, and omitted: no program listens on it in a guest"
        )
    });
    let screen = Screen::of_stdout();
    let (files, stale, none) = match &packed.list {
        List::Of(files) => (Some(files), None, None),
        List::Replaced(files, why) => (Some(files), Some(printable(why)), None),
        List::None(why) => (None, None, Some(printable(why))),
    };
    let text = if args.json {
        ascii_json(&json!({
            "path": done.shown_path(),
            "bytes": done.bytes,
            "sha256": done.sha256,
            "entries": packed.entries,
            "components": components::sizes_json(&packed.sizes),
            "leftOut": left_out,
            "manifestFiles": files,
            "staleManifest": stale,
            "noManifest": none,
        }))?
    } else {
        let list = match packed.list {
            List::Of(files) => list_text(&Ok(files)),
            List::None(why) => list_text(&Err(why)),
            List::Replaced(files, why) => format!(
                "the list of the driver's {files} files is in the image, in place of a stale \
                     one: {}\n",
                printable(&why)
            ),
        };
        format!(
            "{}{list}{}, {} entries\n",
            components::sizes_text(&packed.sizes, &screen),
            done.text(),
            packed.entries
        )
    };
    print(&text)?;
    Ok(true)
}

fn ls(args: &LsArgs) -> Result<bool> {
    let image = read_image(&args.image)?;
    let (text, listed) = ls::text(&image, &args.paths, &Screen::of_stdout());
    print(&if args.json {
        ascii_json(&ls::json(&image, &args.paths))?
    } else {
        text
    })?;
    let missing = ls::missing(&image, &args.paths);
    for path in &missing {
        eprintln!(
            "kata-gpu-boot: {}: no such path in {}",
            escaped(path.as_bytes()),
            printable(&args.image.display().to_string())
        );
    }
    Ok(listed > 0 && missing.is_empty())
}

fn cat(args: &CatArgs) -> Result<bool> {
    let (_, tree) = read(&args.image)?;
    let found = ls::cat(&tree, &args.path)?;
    if !found {
        eprintln!(
            "kata-gpu-boot: {}: no such path in {}",
            escaped(args.path.as_bytes()),
            printable(&args.image.display().to_string())
        );
    }
    Ok(found)
}

fn topology(text: &str) -> Result<Topology, String> {
    Topology::named(text).ok_or_else(|| {
        format!(
            "there are {}",
            Topology::ALL
                .map(|topology| topology.to_string())
                .join(", ")
        )
    })
}

fn question(kernel: Option<&str>, init: &str, user_space: bool) -> Result<Question> {
    Ok(Question {
        release: kernel.map(kernel_release::release).transpose()?,
        init: init.to_string(),
        user_space,
        ..Question::default()
    })
}

fn verify(args: &VerifyArgs) -> Result<bool> {
    let screen = Screen::of_stdout();
    if args.rules {
        print(&verify::verify_text::rules(
            verify::image_rules::RULES,
            &screen,
        ))?;
        return Ok(true);
    }
    let Some(path) = &args.image else {
        bail!("give an image")
    };
    let kernels_own = if disk_image::is_disk(path)? {
        INIT_OF_DISK
    } else {
        INIT
    };
    let init = args.rdinit.as_deref().unwrap_or(kernels_own);
    let question = question(args.kernel.as_deref(), init, !args.no_user_space)?;
    let question = Question {
        driver_root: args.driver_root.clone(),
        topologies: args.topology.clone(),
        confidential: args.confidential,
        hash_tree: disk_image::hash_tree_state(path)?,
        ..question
    };
    let (image, tree) = read(path)?;
    let report = verify::check(&image, &tree, &question);
    print(&if args.json {
        ascii_json(&report.json())?
    } else {
        verify::verify_text::page(&report, &screen)
    })?;
    Ok(report.boots())
}

/// A file to be written or removed is neither the image, nor the init, nor the helper.
fn check_output(image: &Path, init: &Path, helper: &HelperArgs, output: &Path) -> Result<()> {
    let same = |a: &Path| {
        std::fs::canonicalize(a)
            .ok()
            .is_some_and(|a| std::fs::canonicalize(output).ok() == Some(a))
    };
    ensure!(
        !same(image),
        "{}: give the new image another name: the old one is what to roll back to",
        output.display()
    );
    ensure!(
        !same(init),
        "{}: that is the new init: give the new image another name",
        output.display()
    );
    let is_helper = helper.given.as_deref().is_some_and(same);
    ensure!(
        !is_helper,
        "{}: that is NVML's helper: give the new image another name",
        output.display()
    );
    Ok(())
}

fn replace_init(args: &ReplaceInitArgs) -> Result<bool> {
    for file in [&args.output, &hash_tree::file_of(&args.output)] {
        check_output(&args.image, &args.init, &args.helper, file)?;
    }
    if disk_image::is_disk(&args.image)? {
        ensure!(
            args.initrd == InitrdArgs::default(),
            "{}: a disk image: --kernel, --no-user-space, --drop-old, --plain, --gzip and --force \
             are for initrds",
            printable(&args.image.display().to_string())
        );
        replace_in_disk(args)
    } else {
        ensure!(
            !args.verity,
            "{}: no disk image: --verity is for disk images, whose second partition holds the \
             hash tree",
            printable(&args.image.display().to_string())
        );
        replace_in_initrd(args)
    }
}

fn replace_in_disk(args: &ReplaceInitArgs) -> Result<bool> {
    let (image, init, output) = (args.image.clone(), args.init.clone(), args.output.clone());
    let helper = args.helper.helper(&args.init);
    let mut done = disk_image::replace(&disk_image::Replacement {
        image,
        init,
        helper,
        output,
        manifest: !args.no_manifest,
        verity: args.verity,
    })?;
    done.keep(&args.output)?;
    if !done.has_module {
        let why = "its guests take the driver from the extension disk `gpu` (Kata 4), and without \
                   that disk no GPU comes up";
        eprintln!("kata-gpu-boot: note: no nvidia.ko in the image: {why}");
    }
    let disk = &done.disk;
    let parameters = done.tree.as_ref().map(|tree| hash_tree::line(&tree.verity));
    if args.json {
        let mut json = done.new.json();
        json["fileSystem"] = disk.root.name().into();
        json["grownPartition"] = done.grown.into();
        json["verity"] = parameters.into();
        print(&ascii_json(&json)?)?;
        return Ok(true);
    }
    let place = if disk.table == Table::None {
        ""
    } else {
        "first partition, "
    };
    let mut text = format!(
        "{}: {place}{}, {}\n",
        printable(&args.image.display().to_string()),
        disk.root.name(),
        megabytes(disk.root_bytes)
    );
    text.push_str(&done.new.text(
        "names stay with owners, modes, times, links, contents and extended attributes",
        &Screen::of_stdout(),
    ));
    if let Some(bytes) = done.grown {
        text.push_str(&format!("the partition has grown to {} MiB\n", bytes >> 20));
    }
    match parameters {
        Some(parameters) => {
            let place = if done.moved { "a new" } else { "the" };
            let file = hash_tree::file_of(&args.output).display().to_string();
            text.push_str(&format!(
                "the hash tree is in {place} second partition; kernel_verity_params is in {}, from \
                 which install --image takes it:\n{parameters}\n",
                printable(&file)
            ));
        }
        None if disk.second.is_some() => text.push_str(
            "a second partition, as one with a dm-verity hash, is the old root's: set \
             kernel_verity_params = \"\", or make the hash anew with --verity\n",
        ),
        None => {}
    }
    text.push_str(&format!(
        "{}, {}\n",
        done.new.written.text(),
        megabytes(done.new.written.bytes)
    ));
    print(&text)?;
    Ok(true)
}

fn replace_in_initrd(args: &ReplaceInitArgs) -> Result<bool> {
    let own = &args.initrd;
    let question = question(own.kernel.as_deref(), INIT, !own.no_user_space)?;
    let image = Image::open(&args.image)?;
    let tree = Tree::new(&image)?;
    let form = match (own.plain, own.gzip) {
        (true, _) => Some(Form::Plain),
        (_, true) => Some(Form::Gzip),
        _ => None,
    };
    let options = repack::Options {
        init: args.init.clone(),
        helper: args.helper.helper(&args.init),
        manifest: !args.no_manifest,
        form,
        drop_old: own.drop_old,
    };
    let mut done = repack::repack(&image, &tree, &options, &question, &args.output)?;
    let keep = done.report.boots() || own.force;
    if keep {
        done.new.written.keep()?;
    }
    let screen = Screen::of_stdout();
    if args.json {
        let mut json = done.new.json();
        json["written"] = keep.into();
        json["oldInit"] = done.old_init.into();
        json["verify"] = done.report.json();
        print(&ascii_json(&json)?)?;
        return Ok(keep);
    }
    let mut text = done
        .new
        .text("entries stay as they are, byte for byte", &screen);
    text.push_str(
        "the kernel starts /init; remove rdinit= from its parameters if there is one (init= is for \
         disk images and means nothing here)\n",
    );
    if let Some(old) = &done.old_init {
        text.push_str(&format!("the old init stays: rdinit={old} starts it\n"));
    }
    text.push('\n');
    text.push_str(&verify::verify_text::page(&done.report, &screen));
    let last = if keep {
        done.new.written.text()
    } else {
        format!(
            "{} is not written (--force writes it)",
            printable(&args.output.display().to_string())
        )
    };
    text.push_str(&format!(
        "{}, {}\n",
        screen.paint(if keep { Ink::Plain } else { Ink::Error }, &last),
        megabytes(done.new.written.bytes)
    ));
    print(&text)?;
    Ok(keep)
}

fn diff(args: &DiffArgs) -> Result<bool> {
    let (_, a) = read(&args.a)?;
    let (_, b) = read(&args.b)?;
    let differences = diff::differences(&a, &b, args.times)?;
    print(&if args.json {
        ascii_json(&diff::json(&differences))?
    } else {
        diff::text(&differences, &Screen::of_stdout())
    })?;
    Ok(differences.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use kata_gpu_test_support::elf_stand_in as stand_in;
    use kata_gpu_test_support::temp_dir;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn done(words: &[&str]) -> Result<bool> {
        let cli = Cli::try_parse_from(["image"].iter().chain(words))
            .map_err(|e| anyhow::anyhow!("usage {}", e.exit_code()))?;
        match &cli.args.command {
            Command::Pack(args) => pack(args),
            Command::Ls(args) => ls(args),
            Command::Cat(args) => cat(args),
            Command::Verify(args) => verify(args),
            Command::Diff(args) => diff(args),
            Command::ReplaceInit(args) => replace_init(args),
            Command::InSandbox(args) => unreachable!("{args:?} is for this program itself"),
        }
    }

    #[test]
    fn yes_no_and_impossible_have_different_results() {
        let dir = temp_dir();
        let at = |name: &str| dir.path().join(name).display().to_string();
        std::fs::create_dir(dir.path().join("root")).unwrap();
        std::fs::write(at("root/file"), "text\n").unwrap();
        std::fs::write(at("init"), stand_in::library(None, &[])).unwrap();
        let (root, a, b) = (at("root"), at("a"), at("b"));
        assert!(done(&["pack", &root, "-o", &a, "--json"]).unwrap());
        assert!(done(&["pack", &root, "-o", &b, "--gzip"]).unwrap());
        assert!(
            done(&["diff", &a, &b]).unwrap(),
            "compressed or not, a guest finds the same"
        );
        assert!(done(&["ls", &a, "file", "--json"]).unwrap());
        assert!(!done(&["ls", &a, "fil"]).unwrap());
        assert!(
            !done(&["ls", &a, "file", "fil"]).unwrap(),
            "one of two is missing"
        );
        assert!(done(&["cat", &a, "/file"]).unwrap());
        assert!(!done(&["cat", &a, "/none"]).unwrap());
        assert!(
            done(&["cat", &a, "/"])
                .unwrap_err()
                .to_string()
                .contains("a directory, and no file")
        );
        assert!(!done(&["verify", &a]).unwrap());
        assert!(done(&["verify", "--rules"]).unwrap());
        assert!(
            done(&["verify", &at("root/file")])
                .unwrap_err()
                .to_string()
                .contains("read initrd")
        );
        assert!(
            format!("{:#}", done(&["verify", &at("none")]).unwrap_err()).contains("No such file")
        );
        let (init, c) = (at("init"), at("c"));
        assert!(
            !done(&["replace-init", &a, "--init", &init, "-o", &c]).unwrap(),
            "it would not boot"
        );
        assert!(!dir.path().join("c").exists());
        assert!(!done(&["replace-init", &a, "--init", &init, "-o", &c, "--json"]).unwrap());
        assert!(done(&["replace-init", &a, "--init", &init, "-o", &c, "--force"]).unwrap());
        assert!(!done(&["diff", &a, &c]).unwrap());
        assert!(
            done(&["replace-init", &a, "--init", &init, "-o", &a])
                .unwrap_err()
                .to_string()
                .contains("another name")
        );
        for wrong in [
            &[
                "replace-init",
                &a,
                "--init",
                &init,
                "-o",
                &c,
                "--gzip",
                "--plain",
            ][..],
            &["verify"],
            &["pack", "-o", &c],
            &["ls"],
        ] {
            assert_eq!(done(wrong).unwrap_err().to_string(), "usage 2", "{wrong:?}");
        }
        let left: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(
            left.len(),
            5,
            "nothing is left of what was not kept: {left:?}"
        );
    }
}
