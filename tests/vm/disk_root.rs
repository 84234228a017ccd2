//! A failure means that an erofs image whose init `image replace-init` has replaced does not boot
//! from its partition, or that the init writes to a read-only root.

use super::harness::{Guest, Outcome, TestContext, VmTest};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const TESTS: &[VmTest] = &[VmTest {
    name: "an_erofs_image_with_another_init_boots_from_its_partition",
    run: erofs,
}];

/// First sector of the root in images of Kata's builder, in units of 512 bytes, and size of the
/// partition here: the new root must fit.
const FIRST: u64 = 6144;
const SECTORS: u64 = 64 << 11;

fn done(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("run {command:?} (tests/setup installs it)"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Unpacks the initrd into a folder.
pub fn unpacked(context: &TestContext) -> Result<PathBuf> {
    // Files of an earlier run.
    let _unused = std::fs::remove_dir_all(&context.work_dir);
    let root = context.work_dir.join("root");
    std::fs::create_dir_all(&root).with_context(|| format!("make {}", root.display()))?;
    let archive = context.target.join("initrd.cpio");
    let archive = File::open(&archive).with_context(|| format!("open {}", archive.display()))?;
    done(
        Command::new("cpio")
            .args(["-idmu", "--quiet"])
            .current_dir(&root)
            .stdin(archive),
    )?;
    Ok(root)
}

/// A guest's root as a folder: what the initrd has, the driver's stand-ins, and an init that is not
/// ours where Kata's images have theirs.
fn root(context: &TestContext) -> Result<PathBuf> {
    let root = unpacked(context)?;
    let driver = context.target.join("containers/driver");
    done(
        Command::new("cp")
            .arg("-a")
            .arg(format!("{}/.", driver.display()))
            .arg(&root),
    )?;
    std::fs::create_dir(root.join("sbin"))?;
    std::fs::create_dir(root.join("bin"))?;
    std::fs::remove_file(root.join("init"))?;
    std::fs::write(root.join("bin/NVRC"), "not our init, and no program at all")?;
    symlink("/bin/NVRC", root.join("init"))?;
    symlink("/bin/NVRC", root.join("sbin/init"))?;
    Ok(root)
}

/// The image with our init.
fn replaced(context: &TestContext, image: &Path) -> Result<PathBuf> {
    let out = context.work_dir.join("new.image");
    let init = context.guest_program("kata-gpu-init");
    let program = context.host_program();
    // NVML's helper with its debugging symbols is larger than the image.
    let words = ["image", "replace-init", "--no-nvml"];
    done(
        Command::new(program)
            .args(words)
            .arg(image)
            .arg("--init")
            .arg(init)
            .arg("-o")
            .arg(&out),
    )?;
    Ok(out)
}

fn boots(context: &TestContext, image: &Path, device: &str, fs: &str) -> Result<Outcome> {
    let guest = Guest::new().root_disk(context, image, device, fs)?;
    let mut booted = guest
        .append("testagent.containers=all:all testagent.guest=root")
        .boot(context, "guest")?;
    booted.comes_up_by_its_list()?;
    let root = booted.agent("root", |_| true)?;
    ensure!(
        root.get("mount")
            .starts_with(&format!("{device} / {fs} ro")),
        "the root is {}",
        root.get("mount")
    );
    ensure!(
        root.get("written").contains("Read-only file system"),
        "written: {}",
        root.get("written")
    );
    let stage0 = booted.record("stage0", |r| r.kind == Kind::End && r.name == names::STAGE0)?;
    ensure!(
        !stage0.fields.contains_key("error"),
        "stage 0 on a read-only root: {:?}",
        stage0.fields
    );
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

/// A disk with the folder as erofs in its first partition.
pub fn erofs_image(context: &TestContext, root: &Path) -> Result<PathBuf> {
    let (fs, image) = (
        context.work_dir.join("root.erofs"),
        context.work_dir.join("old.image"),
    );
    done(
        Command::new("mkfs.erofs")
            .args(["--quiet", "-Enoinline_data"])
            .args([fs.as_path(), root]),
    )?;
    File::create(&image)?.set_len((FIRST + SECTORS + 2048) * 512)?;
    let table = format!(
        "printf 'label: dos\\nstart={FIRST}, size={SECTORS}, type=83\\n' | \
        PATH=$PATH:/usr/sbin:/sbin sfdisk --quiet \"$0\""
    );
    done(Command::new("sh").args(["-c", &table]).arg(&image))?;
    let seek = format!("seek={}", FIRST * 512);
    done(
        Command::new("dd")
            .args([
                "status=none",
                "conv=notrunc",
                "bs=1M",
                "oflag=seek_bytes",
                &seek,
            ])
            .args([
                format!("if={}", fs.display()),
                format!("of={}", image.display()),
            ]),
    )?;
    Ok(image)
}

fn erofs(context: &TestContext) -> Result<Outcome> {
    let image = erofs_image(context, &root(context)?)?;
    boots(context, &replaced(context, &image)?, "/dev/vda1", "erofs")
}
