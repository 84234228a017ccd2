//! A failure means that a real kernel does not unpack what `kata-gpu-boot image` has packed and
//! repacked, or that the guest does not come up by the image's list of the driver's files.

use super::harness::{Guest, Outcome, TestContext, VmTest};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_image::images::helper::Helper;
use kata_gpu_image::images::image::{Form, Image};
use kata_gpu_image::images::output_file::Output;
use kata_gpu_image::images::pack::{List, Packing, pack};
use kata_gpu_image::images::repack::{Options, repack};
use kata_gpu_image::images::unpacked_root::Tree;
use kata_gpu_image::images::verify::Question;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const TESTS: &[VmTest] = &[VmTest {
    name: "an_image_that_was_packed_and_repacked_boots_to_a_container",
    run: packed,
}];

fn base(context: &TestContext) -> PathBuf {
    context.target.join("initrd.cpio")
}

fn folder(context: &TestContext) -> Result<PathBuf> {
    let folder = context.work_dir.join("image");
    // Files of an earlier run.
    let _unused = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(folder.join("root"))
        .with_context(|| format!("make {}", folder.display()))?;
    Ok(folder)
}

/// Boots to a container. The image has a list of the driver's files, which the guest goes by.
fn boots(context: &TestContext, image: &Path) -> Result<Outcome> {
    let mut booted = Guest::new()
        .initrd(image)
        .append("testagent.containers=all:all")
        .boot(context, "guest")?;
    booted.comes_up_by_its_list()?;
    Ok(Outcome::Passed)
}

/// Unpacked by cpio, packed by us, with the driver's stand-ins.
fn packed(context: &TestContext) -> Result<Outcome> {
    let folder = folder(context)?;
    let base = base(context);
    let archive = File::open(&base).with_context(|| format!("open {}", base.display()))?;
    let unpacked = Command::new("cpio")
        .args(["-idmu", "--quiet"])
        .current_dir(folder.join("root"))
        .stdin(archive)
        .status();
    ensure!(
        unpacked
            .context("run cpio (initrd/setup installs it)")?
            .success(),
        "cpio does not unpack {}",
        base.display()
    );
    let driver = context.target.join("containers/driver");
    ensure!(
        driver.is_dir(),
        "{} is missing: make it with tests/containers/build",
        driver.display()
    );
    let mut output = Output::create(&folder.join("packed"), Form::Plain)?;
    let packed = pack(
        &[folder.join("root"), driver],
        Packing {
            mtime: 0,
            manifest: true,
        },
        &mut output,
    )?;
    let List::Of(files) = packed.list else {
        bail!("no list of the driver's files: {:?}", packed.list)
    };
    ensure!(
        files == 5,
        "{files} files in the list: three libraries, nvidia-smi and firmware are there"
    );
    output.end()?.keep()?;
    let repacked = repacked(context, &folder)?;
    boots(context, &repacked)
}

/// The same with the init replaced, and compressed.
fn repacked(context: &TestContext, folder: &Path) -> Result<PathBuf> {
    let image = Image::open(&folder.join("packed"))?;
    let init = context.guest_program("kata-gpu-init");
    let options = Options {
        init,
        helper: Helper::None,
        manifest: true,
        form: Some(Form::Gzip),
        drop_old: false,
    };
    let question = Question {
        user_space: false,
        ..Question::default()
    };
    let mut done = repack(
        &image,
        &Tree::new(&image)?,
        &options,
        &question,
        &folder.join("repacked"),
    )?;
    ensure!(done.report.boots(), "{:?}", done.report.findings);
    done.new.written.keep()?;
    Ok(folder.join("repacked"))
}
