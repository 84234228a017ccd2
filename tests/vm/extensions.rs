//! A failure means that a sound extension disk of Kata 4 brings up no GPU or holds the agent up
//! without need, or that anything of a tampered, missing or undeclared disk is used and the guest
//! does not power off with the reason. Judges: the kernel's dm-verity and EROFS, and veritysetup.

use super::container_roots::Ended;
use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, named};
use anyhow::{Context, Result, ensure};
use kata_gpu_init::services::service_table::SERVICES;
use kata_gpu_test_guest::halves::extensions::PROGRAM;
use kata_gpu_wire::arch::Arch;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "a_gpu_extension_brings_the_driver_while_the_agent_runs",
        run: gpu,
    },
    VmTest {
        name: "coco_is_mounted_before_the_agent_as_veritysetup_would",
        run: coco,
    },
    VmTest {
        name: "tampered_data_powers_the_guest_off_when_read",
        run: tampered,
    },
    VmTest {
        name: "a_wrong_root_hash_powers_the_guest_off_before_any_mount",
        run: wrong_hash,
    },
    VmTest {
        name: "disks_that_do_not_match_the_command_line_power_the_guest_off",
        run: mismatched,
    },
    VmTest {
        name: "a_disk_that_comes_late_is_waited_for_by_its_uevent",
        run: late,
    },
    VmTest {
        name: "a_malformed_extension_parameter_powers_off_without_an_agent",
        run: malformed,
    },
    VmTest {
        name: "a_new_worker_completes_the_extensions_binds",
        run: worker_dies,
    },
    VmTest {
        name: "a_boot_uses_a_driver_in_a_root_of_its_own",
        run: own_root,
    },
];

/// First sector of partition 1, as parted aligns it.
const FIRST: u64 = 2048;
const SECTOR: u64 = 512;

/// An extension's disk, and its parameters.
pub struct Image {
    pub file: PathBuf,
    pub parameters: String,
}

fn done(command: &mut Command) -> Result<String> {
    command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
    let output = command
        .output()
        .with_context(|| format!("run {command:?} (tests/setup installs it)"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn sectors(file: &Path) -> Result<u64> {
    Ok(fs::metadata(file)?
        .len()
        .div_ceil(SECTOR)
        .next_multiple_of(2048))
}

impl Image {
    /// Makes a disk of a tree, with mkfs.erofs's options.
    fn of(context: &TestContext, name: &str, tree: &Path, options: &[&str]) -> Result<Self> {
        let at = |suffix: &str| context.work_dir.join(format!("{name}.{suffix}"));
        let (data, hash, file) = (at("data"), at("hash"), at("disk"));
        done(
            Command::new("mkfs.erofs")
                .arg("--quiet")
                .args(options)
                .args([&data, &tree.into()]),
        )?;
        let length = fs::metadata(&data)?.len().next_multiple_of(4096);
        File::options().write(true).open(&data)?.set_len(length)?;
        let reported = done(
            Command::new("veritysetup")
                .args(["format", "--no-superblock"])
                .args([&data, &hash]),
        )?;
        let field = |label: &str| {
            let value = reported
                .lines()
                .find_map(|line| line.strip_prefix(label)?.strip_prefix(':'))
                .map(str::trim);
            value
                .and_then(|v| v.split(' ').next())
                .with_context(|| format!("veritysetup says no {label}: {reported}"))
        };
        let parameters = format!(
            "root_hash={},salt={},data_blocks={},data_block_size={},hash_block_size={}",
            field("Root hash")?,
            field("Salt")?,
            field("Data blocks")?,
            field("Data block size")?,
            field("Hash block size")?
        );
        let (data_sectors, hash_sectors) = (sectors(&data)?, sectors(&hash)?);
        let disk = File::create(&file)?;
        disk.set_len((FIRST + data_sectors + hash_sectors) * SECTOR)?;
        let table = format!(
            "label: dos\nstart={FIRST}, size={data_sectors}, type=83\nstart={}, \
            size={hash_sectors}, type=83\n",
            FIRST + data_sectors
        );
        done(
            Command::new("sh")
                .args(["-c", "printf \"$1\" | sfdisk --quiet \"$0\""])
                .arg(&file)
                .arg(table),
        )?;
        disk.write_all_at(&fs::read(&data)?, FIRST * SECTOR)?;
        disk.write_all_at(&fs::read(&hash)?, (FIRST + data_sectors) * SECTOR)?;
        Ok(Self { file, parameters })
    }

    /// The same disk with one byte of its data changed: the one after `mark`.
    fn tampered(&self, context: &TestContext, mark: &[u8]) -> Result<Self> {
        let mut bytes = fs::read(&self.file)?;
        let at = bytes
            .windows(mark.len())
            .position(|window| window == mark)
            .context("the mark is not in the image")?;
        let byte = bytes
            .get_mut(at + mark.len())
            .context("the mark ends the image")?;
        *byte ^= 1;
        let file = context.work_dir.join("tampered.disk");
        fs::write(&file, bytes)?;
        Ok(Self {
            file,
            parameters: self.parameters.clone(),
        })
    }
}

/// The driver as Kata's builder lays it out: libraries in the triplet's folder, programs in
/// /bin, a tree of modules with its own index.
pub fn gpu_image(context: &TestContext, options: &[&str]) -> Result<Image> {
    Image::of(context, "gpu", &driver_tree(context)?, options)
}

fn driver_tree(context: &TestContext) -> Result<PathBuf> {
    let tree = fresh(context, "gpu")?;
    let driver = context.target.join("containers/driver");
    done(
        Command::new("cp")
            .arg("-a")
            .arg(format!("{}/.", driver.display()))
            .arg(&tree),
    )?;
    fs::rename(tree.join("usr/bin"), tree.join("bin"))?;
    for service in &SERVICES {
        let name = service
            .programs
            .first()
            .and_then(|path| path.rsplit('/').next())
            .context("no program")?;
        let path = tree.join("bin").join(name);
        fs::write(&path, "#!/usr/bin/test-programs\n")?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    let modules = tree.join(context.modules()?);
    fs::create_dir_all(&modules)?;
    for module in DRIVER {
        fs::copy(
            context.target.join("simulator").join(module),
            modules.join(module),
        )?;
    }
    fs::write(
        modules.join("modules.dep"),
        "nvidia.ko:\nnvidia-uvm.ko: nvidia.ko\n",
    )?;
    Ok(tree)
}

fn coco_image(context: &TestContext) -> Result<Image> {
    let tree = fresh(context, "coco")?;
    fs::write(tree.join("marker"), "coco")?;
    Image::of(context, "coco", &tree, &["-Enoinline_data"])
}

fn fresh(context: &TestContext, name: &str) -> Result<PathBuf> {
    let tree = context.work_dir.join(name);
    let _unused = fs::remove_dir_all(&tree);
    fs::create_dir_all(&tree).with_context(|| format!("make {}", tree.display()))?;
    Ok(tree)
}

/// The driver's modules, which the extension has and the base image lacks.
pub const DRIVER: [&str; 2] = ["nvidia.ko", "nvidia-uvm.ko"];

/// As Kata's image builder packs them.
pub const PACKED: &[&str] = &["-zlz4hc", "-Enoinline_data"];

/// A base image: without the driver's modules, with what a Kata kernel has built in.
fn base(context: &TestContext) -> Result<Guest> {
    let folder = context.modules()?;
    let module =
        |name: &str| -> &'static str { Box::leak(format!("{folder}/{name}").into_boxed_str()) };
    Guest::with("fakepci.gpus=2")
        .mounts_images(context)
        .map(|g| {
            g.without(module("nvidia.ko"))
                .without(module("nvidia-uvm.ko"))
        })
}

fn with(guest: Guest, name: &str, image: &Image) -> Guest {
    declared(guest, name, &image.parameters).serial_disk(&format!("extension-{name}"), &image.file)
}

/// A guest whose driver is on an extension disk; with one that its agent needs, too.
pub fn guest_with_extensions(context: &TestContext, coco: bool) -> Result<Guest> {
    let guest = with(base(context)?, "gpu", &gpu_image(context, PACKED)?);
    Ok(if coco {
        with(guest, "coco", &coco_image(context)?)
    } else {
        guest
    })
}

fn declared(guest: Guest, name: &str, parameters: &str) -> Guest {
    guest.append(&format!("kata.extension.{name}.verity_params={parameters}"))
}

fn ends(booted: &Booted, name: &str) -> Result<Record> {
    booted.record(name, |r| r.kind == Kind::End && r.name == name)
}

fn extension_steps(records: &[Record]) -> Vec<&str> {
    records
        .iter()
        .filter(|r| r.kind == Kind::Begin && r.name.contains("extension"))
        .map(|r| r.name.as_str())
        .collect()
}

fn gpu(context: &TestContext) -> Result<Outcome> {
    let image = gpu_image(context, PACKED)?;
    let words =
        "testagent.containers=debian:0@debian testagent.guest=extensions gpuinit.persistenced=on";
    let guest = with(base(context)?, "gpu", &image)
        .append(words)
        .archive("debian");
    let mut booted = guest.boot(context, "guest")?;
    let container = Ended::wait(&booted, "debian")?;
    container.has_the_guests_libcuda()?;
    booted.settles(2, 0)?;

    // Modules, firmware and libraries come from the extension, and so do the spec's paths.
    let report = booted.agent("extensions when settled", |_| true)?;
    for wanted in [
        "/dev/dm-0 /run/kata-extensions/gpu erofs ro,nosuid,nodev,",
        "/dev/dm-0 /lib/firmware/nvidia erofs ro,nosuid,nodev,",
        " /etc/ld.so.cache tmpfs ",
    ] {
        ensure!(
            report.get("mounts").contains(wanted),
            "{wanted:?} is not in {}",
            report.get("mounts")
        );
    }
    ensure!(
        report.get("variant") == "nvidia",
        "KATA_ATTESTER_VARIANT={:?}",
        report.get("variant")
    );
    let files = ends(&booted, names::DRIVER_FILES)?;
    ensure!(
        files.error.is_none() && files.fields["version"] == "550.163.01",
        "{files:?}"
    );

    // The agent has not waited: the extension is opened after its exec, before the driver is
    // looked for.
    let (exec, disks) = (
        ends(&booted, names::AGENT_EXEC)?,
        booted.record("disks", |r| {
            r.kind == Kind::Begin && r.name == names::EXTENSION_DISKS
        })?,
    );
    ensure!(
        exec.boottime_ns <= disks.boottime_ns,
        "the agent waited for gpu"
    );
    let (extension, look) = (
        ends(&booted, names::EXTENSION)?,
        booted.record("look", |r| {
            r.kind == Kind::Begin && r.name == names::DRIVER_LOOK
        })?,
    );
    ensure!(
        extension.boottime_ns <= look.boottime_ns && extension.error.is_none(),
        "{extension:?}, {look:?}"
    );
    ensure!(
        look.after.contains(&extension.span.unwrap_or(0)),
        "driver.look comes after {:?}, not {:?}",
        look.after,
        extension.span
    );
    let records = booted.records();
    let steps = extension_steps(&records);
    let wanted = [
        "extension.disks",
        "extension",
        "extension.verity",
        "extension.mount",
        "extension.firmware",
        "extension.libraries",
    ];
    ensure!(steps == wanted, "{steps:?}");
    let begin = named(&records, Kind::Begin, names::EXTENSION).remove(0);
    ensure!(
        begin.fields["extension"] == "gpu"
            && begin.fields["verity"] == true
            && begin.fields["bytes"].as_u64() >= Some(4096),
        "{begin:?}"
    );
    let libraries = ends(&booted, names::EXTENSION_LIBRARIES)?;
    ensure!(libraries.error.is_none(), "{libraries:?}");
    // Services, too, where Kata's builder puts them.
    let service = booted.record("a service", |r| {
        r.kind == Kind::Begin && r.name == names::SERVICE_START
    })?;
    ensure!(
        service.fields["program"] == "/run/kata-extensions/gpu/bin/nvidia-persistenced",
        "{service:?}"
    );
    ensure!(
        ends(&booted, names::SERVICE_START)?.error.is_none(),
        "{:?}",
        ends(&booted, names::SERVICE_START)?
    );
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

/// The extension's tree as files of the base image, in a directory where nothing looks by itself.
fn own_root(context: &TestContext) -> Result<Outcome> {
    const CONFIGURATION: &str = "usr/share/nvidia/nvswitch/fabricmanager.cfg";
    let tree = driver_tree(context)?;
    let mut guest = base(context)?;
    let mut folders = vec![tree.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if !path.is_symlink() {
                let below = path.strip_prefix(&tree)?;
                guest = guest.file(&format!("usr/local/{}", below.display()), &fs::read(&path)?);
            }
        }
    }
    let package = b"DAEMONIZE=1\nLOG_USE_SYSLOG=1\nFABRIC_MODE=0\n\
        TOPOLOGY_FILE_PATH=/usr/share/nvidia/nvswitch\n";
    let booted = guest
        .file(&format!("usr/local/{CONFIGURATION}"), package)
        .append(
            "gpuinit.driver-root=/usr/local gpuinit.topology=hopper-fabric gpuinit.ready=bound \
            testagent.containers=debian:0@debian",
        )
        .archive("debian")
        .script(
            "settled>file:/proc/self/mounts;\
            service.start!end>file:/run/kata-gpu-init/fabricmanager.cfg",
        )
        .boot(context, "own-root")?;
    Ended::wait(&booted, "debian")?.has_the_guests_libcuda()?;
    booted.settles(2, 0)?;
    let mounts = booted.agent("file", |l| l.get("text").contains(" /proc "))?;
    ensure!(
        mounts.get("text").contains(" /lib/firmware/nvidia "),
        "{}",
        mounts.get("text")
    );
    let files = ends(&booted, names::DRIVER_FILES)?;
    ensure!(files.error.is_none(), "{files:?}");
    let made = booted.agent("file", |l| l.get("text").contains("FABRIC_MODE"))?;
    ensure!(
        made.get("text")
            .contains("TOPOLOGY_FILE_PATH=/usr/local/usr/share/nvidia/nvswitch"),
        "{}",
        made.get("text")
    );
    Ok(Outcome::Passed)
}

fn worker_dies(context: &TestContext) -> Result<Outcome> {
    let image = gpu_image(context, PACKED)?;
    let booted = with(base(context)?, "gpu", &image)
        .script("extension!end>kill;settled>file:/proc/self/mounts")
        .boot(context, "guest")?;
    booted.settles(2, 0)?;
    let mounts = booted.agent("file", |_| true)?;
    let lines = |wanted: &str| {
        mounts
            .get("text")
            .lines()
            .filter(|line| line.contains(wanted))
            .count()
    };
    for wanted in [
        " /run/kata-extensions/gpu erofs ",
        " /lib/firmware/nvidia erofs ",
        " /etc/ld.so.cache tmpfs ",
    ] {
        ensure!(
            lines(wanted) == 1,
            "{} times {wanted:?} in {}",
            lines(wanted),
            mounts.get("text")
        );
    }
    let records = booted.records();
    ensure!(
        named(&records, Kind::Begin, names::EXTENSION_DISKS).len() == 1,
        "the disks were opened twice"
    );
    Ok(Outcome::Passed)
}

/// A program of this machine with everything it loads, for the guest's root.
fn program(mut guest: Guest, path: &str) -> Result<Guest> {
    let listed = done(Command::new("ldd").arg(path))?;
    let libraries = listed.lines().filter_map(|line| {
        line.split_ascii_whitespace()
            .find(|word| word.starts_with('/'))
    });
    for file in libraries.chain([path]) {
        guest = guest.file(
            file.trim_start_matches('/'),
            &fs::read(file).with_context(|| format!("read {file}"))?,
        );
    }
    Ok(guest)
}

fn coco(context: &TestContext) -> Result<Outcome> {
    let (gpu, coco) = (gpu_image(context, PACKED)?, coco_image(context)?);
    let value = |key: &str| {
        gpu.parameters
            .split(',')
            .find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='))
            .unwrap_or_default()
    };
    // The same image on another disk, opened by the program that the incumbent runs.
    let open = format!(
        "/usr/sbin/veritysetup,open,--no-superblock,--hash,sha256,--data-block-size,{},\
        --hash-block-size,{},--data-blocks,{},--salt,{},/dev/vdc1,judge,/dev/vdc2,{}",
        value("data_block_size"),
        value("hash_block_size"),
        value("data_blocks"),
        value("salt"),
        value("root_hash")
    );
    let judges = [
        open.as_str(),
        "/usr/sbin/dmsetup,table",
        "/usr/sbin/veritysetup,status,extension-gpu",
    ]
    .map(|words| format!("{PROGRAM}{words}"))
    .join(" ");
    let guest =
        with(with(base(context)?, "gpu", &gpu), "coco", &coco).serial_disk("judge", &gpu.file);
    let guest = program(
        program(guest, "/usr/sbin/veritysetup")?,
        "/usr/sbin/dmsetup",
    )?;
    // veritysetup keeps its locks there.
    let guest = guest
        .file("run/cryptsetup/x", b"")
        .append(&format!("testagent.guest=extensions {judges}"));
    let mut booted = guest.boot(context, "guest")?;
    let start = booted.agent("extensions at agent start", |_| true)?;
    ensure!(
        start.get("coco") == "coco",
        "the agent started without coco: {}",
        start.get("coco")
    );
    ensure!(
        start
            .get("mounts")
            .contains("/run/kata-extensions/gpu erofs ro,nosuid,nodev"),
        "{start:?}"
    );
    ensure!(start.get("variant") == "nvidia", "{start:?}");
    booted.settles(2, 0)?;
    let records = booted.records();
    let stage0 = named(&records, Kind::Begin, names::STAGE0_EXTENSIONS);
    ensure!(stage0.len() == 1, "{stage0:?}");
    let of_coco = records
        .iter()
        .find(|r| r.name == names::EXTENSION && r.fields.get("extension") == Some(&"coco".into()))
        .context("no step of coco")?;
    ensure!(
        of_coco.parent == stage0[0].span,
        "{of_coco:?} is not inside {:?}",
        stage0[0]
    );

    if context.arch != Arch::X86_64 {
        booted.still_runs()?;
        return Ok(Outcome::Measured(
            "tables not compared: veritysetup is this machine's own, of x86-64".into(),
        ));
    }
    let judge = |words: &str| {
        booted
            .agent("judge", |l| l.get("words").starts_with(words))
            .map(|l| l.get("output").to_string())
    };
    let opened = judge("/usr/sbin/veritysetup,open")?;
    let tables = judge("/usr/sbin/dmsetup,table")?;
    // Without the numbers of the two partitions.
    let of = |device: &str| -> Vec<&str> {
        let line = tables
            .lines()
            .find_map(|line| line.strip_prefix(device)?.strip_prefix(": "))
            .unwrap_or_default();
        line.split(' ')
            .enumerate()
            .filter(|(at, _)| ![4, 5].contains(at))
            .map(|(_, word)| word)
            .collect()
    };
    ensure!(
        of("judge").len() == 11,
        "veritysetup opened nothing: {opened}; {tables}"
    );
    ensure!(
        of("extension-gpu") == of("judge"),
        "tables differ: {tables}"
    );
    let status = judge("/usr/sbin/veritysetup,status")?;
    for wanted in [
        "/dev/mapper/extension-gpu is active",
        "type:        VERITY",
        "status:      verified",
        "hash type:   1",
        "mode:        readonly",
    ] {
        ensure!(
            status.contains(wanted),
            "{wanted:?} is not in veritysetup's words: {status}"
        );
    }
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

/// The guest powers off, and console, kernel's log and stream say why first.
fn powers_off(mut booted: Booted, wanted: &[&str]) -> Result<Booted> {
    booted.exit()?;
    let error = booted.event(names::POWER_OFF)?.error.unwrap_or_default();
    for words in wanted {
        ensure!(
            error.contains(words),
            "{words:?} is not in the reason: {error}"
        );
    }
    let console = booted.console.text();
    let begin: String = error.chars().take(60).collect();
    ensure!(
        console.contains(&format!("kata-gpu-init: {begin}")),
        "the console does not say {error:?}"
    );
    ensure!(
        console
            .lines()
            .any(|l| l.starts_with('[') && l.contains(&format!("] kata-gpu-init: {begin}"))),
        "the kernel's log does not say it"
    );
    ensure!(
        console.contains("Power down") || console.contains("Power off"),
        "the guest did not power off"
    );
    Ok(booted)
}

fn no_gpu_bound(booted: &Booted) -> Result<()> {
    booted.has_no(names::GPU_BOUND)?;
    Ok(())
}

fn tampered(context: &TestContext) -> Result<Outcome> {
    // In the module that is loaded: mounting does not read it.
    let image = gpu_image(context, &["-Enoinline_data"])?
        .tampered(context, b"NVRM: The NVIDIA probe routine")?;
    let booted = powers_off(
        with(base(context)?, "gpu", &image).boot(context, "module")?,
        &["extension gpu: data of the disk extension-gpu does not match its hash tree"],
    )?;
    no_gpu_bound(&booted)?;
    ensure!(
        ends(&booted, names::EXTENSION_MOUNT)?.error.is_none(),
        "the mount has read the changed block"
    );
    Ok(Outcome::Passed)
}

fn wrong_hash(context: &TestContext) -> Result<Outcome> {
    let (gpu, coco) = (gpu_image(context, PACKED)?, coco_image(context)?);
    // Right in form, of another image. With coco the agent never starts.
    let (before, after) = gpu.parameters.split_once(",salt").context("no salt")?;
    let root_hash = before.strip_prefix("root_hash=").context("no root hash")?;
    let other = Image {
        file: gpu.file.clone(),
        parameters: format!(
            "root_hash=00{},salt{after}",
            &root_hash[..root_hash.len() - 2]
        ),
    };
    let guest = with(with(base(context)?, "coco", &coco), "gpu", &other)
        .append("testagent.guest=extensions");
    let booted = powers_off(
        guest.boot(context, "both")?,
        &[
            "extension gpu: mount /dev/dm-",
            "does not match the root hash of the kernel's command line",
        ],
    )?;
    no_gpu_bound(&booted)?;
    no_agent(&booted)?;
    booted.has_no(names::AGENT_EXEC)?;
    let failed = ends(&booted, names::STAGE0_EXTENSIONS)?;
    ensure!(failed.error.is_some(), "{failed:?}");
    Ok(Outcome::Passed)
}

fn no_agent(booted: &Booted) -> Result<()> {
    ensure!(
        !booted.console.text().contains("extensions at agent start"),
        "the agent has started"
    );
    Ok(())
}

/// Every mismatch is a unit test of `disks`; here one that ends a wait, and one that needs none.
fn mismatched(context: &TestContext) -> Result<Outcome> {
    let gpu = gpu_image(context, PACKED)?;
    for (name, guest, wanted) in [
        (
            "missing",
            declared(base(context)?, "gpu", &gpu.parameters),
            &["extension gpu: no disk with the serial extension-gpu within 5s"][..],
        ),
        (
            "stripped",
            base(context)?.serial_disk("extension-gpu", &gpu.file),
            &[
                "extension gpu: disk vda has the serial",
                "no verity parameters",
            ],
        ),
    ] {
        let booted =
            powers_off(guest.boot(context, name)?, wanted).with_context(|| name.to_string())?;
        booted.has_no(names::EXTENSION)?;
    }
    Ok(Outcome::Passed)
}

fn late(context: &TestContext) -> Result<Outcome> {
    let gpu = gpu_image(context, PACKED)?;
    let folder = context.modules()?;
    let list = |name: &str| fs::read_to_string(context.target.join("kernel/modules").join(name));
    let (first, images) = (list("load-order")?, list("image-load-order")?);
    let early = first
        .lines()
        .chain(["fakepci.ko"])
        .chain(images.lines().filter(|module| *module != "virtio_blk.ko"));
    let early: String = early
        .map(|module| format!("/{folder}/{module}\n"))
        .collect();
    let guest = with(base(context)?, "gpu", &gpu)
        .file("etc/hardware.modules", early.as_bytes())
        .append("testagent.guest=late-disks");
    let booted = guest.boot(context, "late")?;
    let loaded = booted.agent("late disks", |_| true)?;
    ensure!(loaded.get("error").is_empty(), "{loaded:?}");
    booted.settles(2, 0)?;
    let disks = ends(&booted, names::EXTENSION_DISKS)?;
    ensure!(disks.error.is_none(), "{disks:?}");
    Ok(Outcome::Passed)
}

fn malformed(context: &TestContext) -> Result<Outcome> {
    let gpu = gpu_image(context, PACKED)?;
    let parameters = gpu.parameters.replacen("root_hash=", "root_hash=zz", 1);
    let guest = declared(base(context)?, "gpu", &parameters)
        .serial_disk("extension-gpu", &gpu.file)
        .append("testagent.guest=extensions");
    let booted = powers_off(
        guest.boot(context, "malformed")?,
        &["kata.extension.gpu.verity_params: root_hash="],
    )?;
    no_agent(&booted)?;
    Ok(Outcome::Passed)
}
