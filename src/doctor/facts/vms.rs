//! Running VMs with passed-through devices: QEMU processes of root's, or of who asks.

use super::bounded::{Depth, HostRoot, seen};
use crate::rules::host_facts::{Files, Seen, Vm};
use kata_gpu_host::processes::of_user;
use nix::unistd::geteuid;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

const PROC: &str = "/proc";
/// Limit of VMs looked at.
const MAX_VMS: usize = 64;
/// Limit of words of a command line.
const MAX_WORDS: usize = 4096;
/// Files of a process whose reading walks all its page tables, below the lock of its memory.
const WALKS: [&str; 2] = ["smaps_rollup", "numa_maps"];

pub fn read(root: &HostRoot, depth: Depth, files: &mut Files) -> Vec<Vm> {
    let proc = root.place(Path::new(PROC)).unwrap_or_default();
    let owners = BTreeSet::from([0, geteuid().as_raw()]);
    let mut vms: Vec<Vm> = owners
        .into_iter()
        .flat_map(|owner| of_user(&proc, owner))
        .filter_map(|(pid, words)| vm(pid.as_raw(), &words))
        .collect();
    vms.sort_by_key(|vm| vm.pid);
    vms.truncate(MAX_VMS);
    for vm in &vms {
        let dir = format!("{PROC}/{}", vm.pid);
        let mut put = |name: &str, result| {
            if let Some(seen) = seen(result) {
                files.insert(vm.proc(name), seen);
            }
        };
        put("status", root.text(format!("{dir}/status")));
        for name in WALKS {
            put(name, depth.costly(|| root.text(format!("{dir}/{name}"))));
        }
        put("fd", targets(root, &format!("{dir}/fd")));
        put("vcpus", vcpus(root, &format!("{dir}/task")));
        // The kernel gives an empty file to a reader without the right to it.
        if geteuid().is_root() {
            continue;
        }
        for name in WALKS {
            if files.text(&vm.proc(name)).is_ok_and(str::is_empty) {
                files.insert(vm.proc(name), Seen::Denied);
            }
        }
    }
    vms
}

/// A process that is QEMU and has a device of VFIO.
fn vm(pid: i32, words: &[u8]) -> Option<Vm> {
    let words: Vec<String> = words
        .split(|byte| *byte == 0)
        .take(MAX_WORDS)
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect();
    let is_qemu = words.first()?.rsplit('/').next()?.starts_with("qemu-");
    let vm = Vm {
        pid: pid.try_into().ok()?,
        words,
    };
    let has_device = vm.passed_through().next().is_some();
    (is_qemu && has_device).then_some(vm)
}

/// Different targets of the open descriptors, one a line.
fn targets(root: &HostRoot, dir: &str) -> io::Result<String> {
    let mut targets = BTreeSet::new();
    for name in root.names(dir)? {
        match root.link(format!("{dir}/{name}")) {
            Ok(target) => targets.extend((!target.contains('\n')).then_some(target)),
            // Closed meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(targets.into_iter().collect::<Vec<_>>().join("\n"))
}

/// Threads that are vCPUs, `CPU 0/KVM`, with the CPUs that each may run on.
fn vcpus(root: &HostRoot, dir: &str) -> io::Result<String> {
    let mut lines = Vec::new();
    for thread in root.names(dir)? {
        let comm = root
            .text(format!("{dir}/{thread}/comm"))
            .unwrap_or_default();
        if comm.starts_with("CPU ") && comm.ends_with("/KVM") {
            let status = root.text(format!("{dir}/{thread}/status"))?;
            let list = status
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
                .unwrap_or_default();
            lines.push(format!("{comm} {}", list.trim()));
        }
    }
    Ok(lines.join("\n"))
}
