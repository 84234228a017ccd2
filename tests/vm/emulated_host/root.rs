//! A failure means that a guest whose read-only root comes by virtio-fs does not bring its GPUs up,
//! or that the init writes to that root.

use crate::vm::harness::{
    AgentLine, EmulatedHost, Guest, KvmGuest, KvmImage, Outcome, SHARED, Size, TestContext, VmTest,
};
use anyhow::{Context, Result, ensure};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

pub const TESTS: &[VmTest] = &[VmTest {
    name: "emulated_host_boots_a_guest_from_a_virtio_fs_root",
    run: root_on_virtio_fs,
}];

const ARCHIVE: &str = "/var/guests/root.tar";
const ROOT: &str = "/var/guests/root";

/// Archive of the initrd's files, laid out as a root on a disk.
fn root(context: &TestContext) -> Result<PathBuf> {
    let (root, archive) = (
        context.work_dir.join("root"),
        context.work_dir.join("root.tar"),
    );
    let _unused = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(root.join("sbin"))
        .with_context(|| format!("make {}", root.display()))?;
    symlink("../init", root.join("sbin/init"))?;
    let make = "cpio -idmu --quiet <\"$0\" && tar --owner=0 --group=0 -cf \"$1\" .";
    let initrd = context.target.join("initrd.cpio");
    let done = Command::new("sh")
        .args(["-ec", make])
        .arg(&initrd)
        .arg(&archive)
        .current_dir(&root)
        .status()
        .context("cpio")?;
    ensure!(done.success(), "unpack {}: {done}", initrd.display());
    Ok(archive)
}

fn root_on_virtio_fs(context: &TestContext) -> Result<Outcome> {
    if let Some(skipped) = EmulatedHost::skipped(context)? {
        return Ok(skipped);
    }
    let words = format!(
        "fakepci.gpus=2 hardware.root={SHARED}:virtiofs testagent.guest=root \
        testagent.containers=all:all"
    );
    // The initrd has no init: what comes up came from the root, and nothing does where that is not
    // mounted.
    let guest = Guest::new()
        .cpus(1)
        .append(&words)
        .file("etc/hardware.root-modules", b"")
        .without("init");
    let (image, archive) = (KvmImage::make(context, guest)?, root(context)?);
    let files = [&image.files()[..], &[(ARCHIVE, archive.as_path())]].concat();
    let mut host = EmulatedHost::start(context, "host", Size::WITH_GUESTS, &files)?;
    KvmGuest::prepare(&mut host)?;
    host.run(&format!("mkdir {ROOT} && tar -C {ROOT} -xf {ARCHIVE}"))?;
    let guest = KvmGuest::start_shared(&mut host, &image, "0a1b", 33, "", ROOT, "")?;
    guest.wait_lines(&mut host, 1, "\"msg\":\"container \\(created\\|failed\\)\"")?;
    guest.wait_lines(&mut host, 1, "\"msg\":\"settled\"")?;
    guest.wait_lines(&mut host, 1, "\"msg\":\"root\"")?;
    let console = guest.console(&mut host)?;
    let lines: Vec<AgentLine> = console.lines().filter_map(AgentLine::parse).collect();
    let line = |message: &str| {
        lines
            .iter()
            .find(|l| l.get("msg") == message)
            .with_context(|| format!("no {message:?}: {console}"))
    };
    let root = line("root")?;
    ensure!(
        root.get("mount")
            .starts_with(&format!("{SHARED} / virtiofs ro")),
        "the root is {}",
        root.get("mount")
    );
    ensure!(
        root.get("written").contains("Read-only file system"),
        "written: {}",
        root.get("written")
    );
    let nodes = line("container created")?.get("nodes").to_string();
    ensure!(
        (0..2).all(|k| nodes.contains(&format!("/dev/nvidia{k} 195:{k} 666"))),
        "nodes: {nodes}"
    );
    ensure!(
        console.contains("\"usable\":\"2\""),
        "not all GPUs are usable: {console}"
    );
    host.run(&format!("test ! -e {ROOT}/written"))?;
    Ok(Outcome::Passed)
}
