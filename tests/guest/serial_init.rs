//! The incumbent's order, for the benchmarks: an init that brings everything up, one thing after
//! another, and becomes the agent last.
//!
//! Mounts; nvidia and nvidia-uvm; device nodes; a process that opens every GPU, one after another
//! and blocking, and keeps it open (what nvidia-persistenced does); the spec, generated once
//! everything is up; the agent. Each step begins when the one before has ended.
//!
//! Faster than NVRC v0.1.5 where they differ, so that a comparison flatters the incumbent: no
//! modprobe and no nvidia-smi processes, no waits that are rounded up to 0.5 s, no lockdown, a
//! generator of 10 ms instead of nvidia-ctk's 250 ms. An image with nvidia-persistenced has the
//! waits: there the incumbent's services take the holder's place (serial_services.rs).

use crate::minimal_init::{become_agent, reopen_console};
use crate::serial_services::Services;
use kata_gpu_init::config::module_parameters;
use kata_gpu_init::gpu::device_nodes::DeviceNodes;
use kata_gpu_init::gpu::driver_proc::{information, majors, node_rules};
use kata_gpu_init::gpu::pci;
use kata_gpu_init::machine::{clock, mounts};
use nix::fcntl::{OFlag, open};
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::sys::stat::Mode;
use std::error::Error;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const PROC: &str = "/proc";
const SPEC: &str = "/var/run/cdi/nvidia.yaml";
/// This program's own name for the process that holds the GPUs.
pub const HOLDER: &str = "serial-holder";

pub fn run() -> ! {
    let start = clock::boottime_ns();
    let _unused = mounts::make(mounts::EARLY);
    reopen_console();
    println!("serial-init: start {start}");
    if let Err(error) = bring_up() {
        println!("serial-init: {error}");
    }
    println!("serial-init: exec {}", clock::boottime_ns());
    become_agent()
}

fn bring_up() -> Result<()> {
    kata_gpu_init::machine::sys::loopback_up()?;
    let command_line = fs::read("/proc/cmdline")?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    for module in ["nvidia", "nvidia-uvm"] {
        load(module, release.trim(), &command_line)?;
    }
    let scan = pci::scan(Path::new("/sys"))?;
    let nodes = make_nodes(&scan)?;
    let services = Services::find(&command_line)?;
    match &services {
        Some(services) => services.start(&scan)?,
        None => hold_all(&nodes)?,
    }
    fs::create_dir_all("/run/cdi")?;
    let status = Command::new("/init")
        .args(["cdi", "generate", "--output", SPEC])
        .status()?;
    println!("serial-init: published {} {status}", clock::boottime_ns());
    services.map_or(Ok(()), |services| services.set_ready())
}

/// Starts the process that opens the GPUs, and waits until it has.
fn hold_all(nodes: &[PathBuf]) -> Result<()> {
    let mut holder = Command::new("/proc/self/exe")
        .arg0(HOLDER)
        .args(nodes)
        .stdout(Stdio::piped())
        .spawn()?;
    // The holder closes its standard output once everything is open. The process stays.
    let mut failures = String::new();
    holder
        .stdout
        .take()
        .ok_or("no pipe")?
        .read_to_string(&mut failures)?;
    if !failures.is_empty() {
        println!("serial-init: {}", failures.trim());
    }
    Ok(())
}

fn load(module: &str, release: &str, command_line: &[u8]) -> Result<()> {
    let path = format!("/lib/modules/{release}/{module}.ko");
    let parameters = CString::new(module_parameters(command_line, module))?;
    let loaded = finit_module(File::open(&path)?, &parameters, ModuleInitFlags::empty());
    loaded.map_err(|errno| format!("load {path}: {errno}").into())
}

/// All nodes; gives the GPUs', in PCI order.
pub fn make_nodes(scan: &pci::Scan) -> Result<Vec<PathBuf>> {
    let proc = Path::new(PROC);
    let majors = majors(proc)?;
    let nodes = DeviceNodes::at(Path::new("/dev"), node_rules(proc));
    let major = majors.nvidia.ok_or("no major of nvidia")?;
    nodes.control(major)?;
    nodes.uvm(majors.uvm.ok_or("no major of nvidia-uvm")?)?;
    scan.gpus
        .iter()
        .map(|gpu| {
            Ok(nodes
                .gpu(major, information(proc, gpu.address)?.minor)?
                .path)
        })
        .collect()
}

/// The process that opens the GPUs whose nodes are its words, in their order, and holds them for
/// ever.
pub fn hold() -> ! {
    let mut held = Vec::new();
    for node in std::env::args().skip(1) {
        match open(
            Path::new(&node),
            OFlag::O_RDWR | OFlag::O_CLOEXEC,
            Mode::empty(),
        ) {
            Ok(fd) => held.push(fd),
            Err(errno) => println!("open {node}: {errno}"),
        }
    }
    let _unused = nix::unistd::close(1); // its reader learns that all is done
    loop {
        std::thread::park();
    }
}
