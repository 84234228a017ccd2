//! A failure means that an erofs image whose init `image replace-init` has replaced does not boot
//! from its partition or behind dm-verity, that the init writes to a read-only root, that it does
//! not read firmware ahead, or that a guest uses changed data of a root behind dm-verity. Judge of
//! the hash tree: the kernel.

use super::harness::{DEADLINE, Guest, Outcome, TestContext, VmTest, spans};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_image::kata::drop_in;
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "an_erofs_image_with_another_init_boots_from_its_partition",
        run: erofs,
    },
    VmTest {
        name: "an_image_boots_behind_dm_verity_with_what_install_has_written",
        run: behind_verity,
    },
    VmTest {
        name: "a_changed_root_or_another_root_hash_starts_no_init",
        run: changed,
    },
    VmTest {
        name: "firmware_on_a_disk_is_in_memory_before_the_driver_asks_for_it",
        run: readahead,
    },
];

/// First sector of the root in images of Kata's builder, in units of 512 bytes.
const FIRST: u64 = 6144;
/// Bytes of the partition here that the old root leaves: the new one must fit.
const ROOM: u64 = 32 << 20;
/// Directory of firmware for the simulated driver's version.
pub const FIRMWARE: &str = "lib/firmware/nvidia/550.163.01";
/// Bytes of a block of erofs and of dm-verity.
const BLOCK: usize = 4096;
/// Padding in the first bytes of an ELF file, which nobody reads.
const ELF_PADDING: usize = 15;

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
pub fn root(context: &TestContext) -> Result<PathBuf> {
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
fn replaced(context: &TestContext, image: &Path, words: &[&str]) -> Result<PathBuf> {
    let out = context.work_dir.join("new.image");
    let init = context.guest_program("kata-gpu-init");
    replaced_with(context, image, &init, &out, words)?;
    Ok(out)
}

/// Writes the image with another init.
pub fn replaced_with(
    context: &TestContext,
    image: &Path,
    init: &Path,
    out: &Path,
    words: &[&str],
) -> Result<()> {
    let program = context.host_program();
    // NVML's helper with its debugging symbols is larger than the image.
    done(
        Command::new(program)
            .args(["image", "replace-init", "--no-nvml"])
            .args(words)
            .arg(image)
            .arg("--init")
            .arg(init)
            .arg("-o")
            .arg(out),
    )
}

/// Boots the image with its root on this device, and with these further words.
fn boots(context: &TestContext, image: &Path, device: &str, words: &str) -> Result<Outcome> {
    let fs = "erofs";
    let guest = Guest::new().root_disk(context, image, device, fs)?;
    let mut booted = guest
        .append("testagent.containers=all:all testagent.guest=root")
        .append(words)
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
    let sectors = (std::fs::metadata(&fs)?.len() + ROOM).div_ceil(512);
    File::create(&image)?.set_len((FIRST + sectors + 2048) * 512)?;
    let table = format!(
        "printf 'label: dos\\nstart={FIRST}, size={sectors}, type=83\\n' | \
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
    boots(context, &replaced(context, &image, &[])?, "/dev/vda1", "")
}

/// An image with a hash tree, and the `kernel_verity_params` that `install` writes for it.
fn measured(context: &TestContext) -> Result<(PathBuf, String)> {
    let image = erofs_image(context, &root(context)?)?;
    let image = replaced(context, &image, &["--verity"])?;
    let (config, boots) = (
        context.work_dir.join("configuration-qemu-nvidia-gpu.toml"),
        context.work_dir.join("boots"),
    );
    let fixture = include_str!("../fixtures/kata/go-qemu-nvidia-gpu.toml");
    let kernel = "/opt/kata/share/kata-containers/vmlinux-nvidia.container";
    ensure!(fixture.contains(kernel), "the fixture has another kernel");
    let own = context.kernel();
    std::fs::write(&config, fixture.replace(kernel, &own.to_string_lossy()))?;
    done(
        Command::new(context.host_program())
            .args(["install", "--kata-version", "4.1.0", "--kata-config"])
            .arg(&config)
            .arg("--image")
            .arg(&image)
            .arg("--dir")
            .arg(boots),
    )?;
    let written = context.work_dir.join("config.d").join(drop_in::NAME);
    let written =
        std::fs::read_to_string(&written).with_context(|| format!("read {}", written.display()))?;
    let value = written.lines().find_map(|line| {
        line.strip_prefix("kernel_verity_params = \"")?
            .strip_suffix('"')
    });
    let value = value.with_context(|| format!("no kernel_verity_params: {written}"))?;
    Ok((image, value.into()))
}

/// Words of the kernel command line that Kata's runtimes make of `kernel_verity_params` for a root
/// on virtio-blk (parse_kernel_verity_params and its callers in Kata 4.1; GetKernelRootParams in
/// Go). Not by our own parser: a form that Kata does not read must not pass.
fn katas_words(parameters: &str) -> Result<String> {
    let value = |key: &str| {
        let mut fields = parameters.split(',').filter_map(|f| f.split_once('='));
        fields
            .find_map(|(k, value)| (k == key).then_some(value))
            .filter(|value| !value.is_empty())
            .with_context(|| format!("no {key} in {parameters}"))
    };
    let number = |key: &str| Ok::<u64, anyhow::Error>(value(key)?.parse()?);
    let (blocks, block, hash_block) = (
        number("data_blocks")?,
        number("data_block_size")?,
        number("hash_block_size")?,
    );
    let (root_hash, salt) = (value("root_hash")?, value("salt")?);
    Ok(format!(
        "dm-mod.create=\"dm-verity,,,ro,0 {} verity 1 /dev/vda1 /dev/vda2 {block} {hash_block} \
         {blocks} 0 sha256 {root_hash} {salt}\" root=/dev/dm-0 rootflags=ro rootfstype=erofs",
        block / 512 * blocks,
    ))
}

fn behind_verity(context: &TestContext) -> Result<Outcome> {
    let (image, parameters) = measured(context)?;
    boots(context, &image, "/dev/dm-0", &katas_words(&parameters)?)
}

/// Boots the image behind dm-verity: the kernel says this, the init does not start, and the guest
/// ends.
fn refused(
    context: &TestContext,
    name: &str,
    image: &Path,
    parameters: &str,
    says: &str,
) -> Result<()> {
    let guest = Guest::new().root_disk(context, image, "/dev/dm-0", "erofs")?;
    let mut booted = guest
        .append(&katas_words(parameters)?)
        .boot(context, name)?;
    ensure!(
        booted.console.wait_text(DEADLINE, says),
        "{name}: the kernel does not say {says:?}: {}",
        booted.console.text()
    );
    booted.exit()?;
    let console = booted.console.text();
    ensure!(
        console.contains("device-mapper: verity: ") && console.contains("Kernel panic"),
        "{name}: {console}"
    );
    ensure!(
        booted.records().is_empty()
            && booted.console.newest_record_ns().is_none()
            && booted.lines().is_empty(),
        "{name}: the init or the agent has run: {console}"
    );
    Ok(())
}

fn changed(context: &TestContext) -> Result<Outcome> {
    let (image, parameters) = measured(context)?;
    // First block of the init, by which its whole file is found.
    let init = std::fs::read(context.guest_program("kata-gpu-init"))?;
    let init = init.get(..BLOCK).context("the init is a short file")?;
    let mut bytes = std::fs::read(&image)?;
    let root = bytes.get_mut((FIRST * 512) as usize..).context("no root")?;
    let mut found = root
        .chunks_mut(BLOCK)
        .enumerate()
        .filter(|(_, block)| *block == init);
    let (number, block) = found.next().context("the init is not in the image")?;
    ensure!(found.next().is_none(), "the init is in the image twice");
    block[ELF_PADDING] ^= 1;
    let changed = context.work_dir.join("changed.image");
    std::fs::write(&changed, bytes)?;
    refused(
        context,
        "changed",
        &changed,
        &parameters,
        &format!("data block {number} is corrupted"),
    )?;
    let hash = parameters.split(',').find(|f| f.starts_with("root_hash="));
    let hash = hash.with_context(|| format!("no root hash in {parameters}"))?;
    // Its last digit is another one.
    let last = if hash.ends_with('0') { '1' } else { '0' };
    let other = format!("{}{last}", &hash[..hash.len() - 1]);
    let other = parameters.replace(hash, &other);
    // The top of the tree, of which only the root hash knows.
    let says = "metadata block 0 is corrupted";
    refused(context, "hash", &image, &other, says)?;
    // Nobody but dm-verity minds the byte.
    boots(context, &changed, "/dev/vda1", "")
}

/// Firmware of two generations, in the root of GPUs of one. The simulated driver asks for none, so
/// only the init reads it.
fn readahead(context: &TestContext) -> Result<Outcome> {
    const PAGES: usize = 1500;
    const NEEDED: &str = "gsp_ga10x.bin";
    const OTHER: &str = "gsp_tu10x.bin";
    let bytes = vec![7; PAGES * 4096];
    let root = root(context)?;
    for name in [NEEDED, OTHER] {
        std::fs::write(root.join(FIRMWARE).join(name), &bytes)?;
    }
    let image = replaced(context, &erofs_image(context, &root)?, &[])?;
    let booted = Guest::with("testagent.guest=resident")
        .root_disk(context, &image, "/dev/vda1", "erofs")?
        .boot(context, "disk")?;
    for (name, resident) in [(NEEDED, PAGES), (OTHER, 0)] {
        let line = booted.agent("resident", |line| line.get("file") == name)?;
        let (pages, of) = (line.get("pages"), line.get("of"));
        ensure!(
            (pages, of) == (&resident.to_string(), &PAGES.to_string()),
            "{name}: {pages} of {of} pages are in memory, not {resident} of {PAGES}"
        );
    }
    let records = booted.records();
    let steps = spans(&records, names::READAHEAD)?;
    let [(begin, _)] = steps[..] else {
        bail!("not one step of readahead: {steps:?}")
    };
    let field = |key: &str| begin.fields.get(key).cloned().unwrap_or_default();
    ensure!(
        field("files") == format!("nvidia.ko {NEEDED}")
            && field("bytes").as_u64() > Some(bytes.len() as u64),
        "the step is {begin:?}"
    );
    let scan = booted.record("the scan", |r| r.name == names::PCI_SCAN)?;
    ensure!(
        scan.span.is_some_and(|id| begin.after == [id]),
        "{begin:?} after {scan:?}"
    );

    // An initrd is in memory already.
    let booted = Guest::new()
        .file(&format!("{FIRMWARE}/{NEEDED}"), &bytes)
        .boot(context, "initrd")?;
    booted.settles(8, 0)?;
    booted.has_no(names::READAHEAD)?;
    Ok(Outcome::Passed)
}
