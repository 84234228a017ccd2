//! A failure means that a compressed module, an option or a soft dependency of modprobe.d does not
//! reach a real kernel, or that the kernel's refusal of a module is reported without its cause and
//! cure.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::Record;
use std::path::PathBuf;
use std::process::Command;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "compressed_modules_load_with_options_of_modprobe_d",
        run: compressed,
    },
    VmTest {
        name: "a_module_that_fails_to_load_is_reported_with_errno_and_cure",
        run: refused,
    },
];

/// The soft dependency of the first test: without it no record reaches the host.
const TRANSPORT: &str = "vmw_vsock_virtio_transport";

/// Path of a module in the initrd, for [`Guest::without`].
fn path(context: &TestContext, module: &str) -> Result<&'static str> {
    Ok(Box::leak(
        format!("{}/{module}.ko", context.modules()?).into_boxed_str(),
    ))
}

/// A module's file on this machine.
fn module_file(context: &TestContext, module: &str) -> PathBuf {
    let folder = if module.starts_with("nvidia") {
        "simulator"
    } else {
        "kernel/modules"
    };
    context.target.join(folder).join(format!("{module}.ko"))
}

/// Output of a command that gets a module's file.
fn packed(context: &TestContext, module: &str, command: &[&str]) -> Result<Vec<u8>> {
    let file = module_file(context, module);
    let output = Command::new(command[0])
        .args(&command[1..])
        .arg("-c")
        .arg(&file)
        .output()
        .with_context(|| command[0].to_string())?;
    ensure!(
        output.status.success(),
        "{command:?} {}: {}",
        file.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(output.stdout)
}

/// The end of a module's load.
fn loaded(booted: &Booted, module: &str) -> Result<(Record, Record)> {
    booted.span_of(names::MODULE_LOAD, ("module", module), 1)
}

fn compressed(context: &TestContext) -> Result<Outcome> {
    let folder = context.modules()?;
    // Everything but the transport comes from the kernel's side, as with a Kata kernel.
    let hardware = [
        "virtio_ring",
        "virtio",
        "virtio_pci_modern_dev",
        "virtio_pci_legacy_dev",
        "virtio_pci",
        "vsock",
        "fakepci",
    ]
    .map(|m| format!("/{folder}/{m}.ko\n"))
    .concat();
    let index = "nvidia.ko.xz:\nnvidia-uvm.ko.zst: \
        nvidia.ko.xz\nbroken.ko:\nvirtio_ring.ko:\nvirtio.ko: virtio_ring.ko\nvsock.ko:\n\
        vmw_vsock_virtio_transport_common.ko: vsock.ko\n\
        vmw_vsock_virtio_transport.ko.gz: vmw_vsock_virtio_transport_common.ko vsock.ko virtio.ko \
            virtio_ring.ko\n";
    let conf = "options nvidia minors=5,3,0,1,2,7,4,6 NVreg_DeviceFileMode=0600\n\
        softdep nvidia pre: vmw-vsock-virtio-transport broken nosuch\n\
        install nvidia /bin/false\nfrobnicate\n";
    // As the kernel's build packs them, and xz with the filter for x86 on top.
    let booted = Guest::new()
        .without(path(context, "nvidia")?)
        .without(path(context, "nvidia-uvm")?)
        .without(path(context, TRANSPORT)?)
        .file(
            &format!("{folder}/nvidia.ko.xz"),
            &packed(
                context,
                "nvidia",
                &["xz", "--check=crc32", "--x86", "--lzma2=dict=1MiB"],
            )?,
        )
        .file(
            &format!("{folder}/nvidia-uvm.ko.zst"),
            &packed(context, "nvidia-uvm", &["zstd", "-q", "-19"])?,
        )
        .file(
            &format!("{folder}/{TRANSPORT}.ko.gz"),
            &packed(context, TRANSPORT, &["gzip", "-n"])?,
        )
        .file(&format!("{folder}/broken.ko"), b"no module")
        .file(&format!("{folder}/modules.dep"), index.as_bytes())
        .file("etc/modprobe.d/nvidia.conf", conf.as_bytes())
        // Hidden by the file of the same name in /etc.
        .file(
            "lib/modprobe.d/nvidia.conf",
            b"options nvidia minors=7,6,5,4,3,2,1,0\n",
        )
        .file("etc/hardware.modules", hardware.as_bytes())
        .append("nvidia.NVreg_DeviceFileMode=0660 testagent.containers=zero:0;all:all")
        .boot(context, "compressed")?;

    // Minors by modprobe.d, the mode by the command line, which comes after it.
    let zero = booted.created("zero")?;
    ensure!(
        zero.get("nodes").contains("/dev/nvidia5 195:5 660"),
        "nodes: {}",
        zero.get("nodes")
    );
    let all = booted.created("all")?;
    ensure!(
        all.get("nodes").contains("/dev/nvidia-uvm "),
        "nodes: {}",
        all.get("nodes")
    );
    booted.settles(8, 0)?;

    let (_, transport) = loaded(&booted, TRANSPORT)?;
    let (nvidia_begin, nvidia) = loaded(&booted, "nvidia")?;
    let (_, uvm) = loaded(&booted, "nvidia_uvm")?;
    for (record, format) in [(&transport, "gzip"), (&nvidia, "xz"), (&uvm, "zstd")] {
        ensure!(
            record.error.is_none() && record.fields.get("unpacked") == Some(&format.into()),
            "{record:?}"
        );
    }
    ensure!(
        transport.seq < nvidia_begin.seq,
        "the soft dependency is loaded after what needs it"
    );
    // The pre-init has loaded these; they are found, and not loaded again.
    ensure!(
        loaded(&booted, "vsock")?.1.fields.get("already") == Some(&true.into()),
        "vsock: {:?}",
        loaded(&booted, "vsock")?
    );

    // Lines that are not followed are reported.
    let reported: Vec<Record> = booted
        .records()
        .into_iter()
        .filter(|r| r.name == names::MODULE_CONFIG)
        .collect();
    let errors: Vec<&str> = reported.iter().filter_map(|r| r.error.as_deref()).collect();
    for wanted in [
        "/etc/modprobe.d/nvidia.conf:4: \"frobnicate\" is not a line that modprobe.d knows",
        "/etc/modprobe.d/nvidia.conf:3: install command for nvidia is not run",
        "broken.ko: ENOEXEC: Exec format error (not a module: the file is damaged, or something \
        else); it is a soft dependency: going on without it",
    ] {
        ensure!(
            errors.iter().any(|e| e.contains(wanted)),
            "nothing says {wanted:?}: {errors:#?}"
        );
    }
    ensure!(reported.iter().any(|r| {
        r.fields
            .get("note")
            .and_then(|n| n.as_str())
            .is_some_and(|n| n.starts_with("nosuch, a soft dependency"))
    }));
    Ok(Outcome::Passed)
}

/// All GPUs have failed with an error that has these words, in order.
fn all_failed(mut booted: Booted, words: &[&str]) -> Result<()> {
    booted.settles(0, 8)?;
    let failed = booted.event(names::GPU_FAILED)?;
    ensure!(
        failed.fields["reason"] == "driver-load-failed",
        "{failed:?}"
    );
    let error = failed.error.unwrap_or_default();
    let mut rest = error.as_str();
    for word in words {
        let at = rest
            .find(word)
            .with_context(|| format!("{word:?} is not in, or not at its place in: {error}"))?;
        rest = &rest[at + word.len()..];
    }
    booted.still_runs()
}

fn position(bytes: &[u8], text: &[u8]) -> Result<usize> {
    bytes
        .windows(text.len())
        .position(|w| w == text)
        .with_context(|| format!("nvidia.ko has no {:?}", String::from_utf8_lossy(text)))
}

/// The kernel's own refusals; damaged files and missing ones are unit tests of `kernel_modules`.
fn refused(context: &TestContext) -> Result<Outcome> {
    let folder = context.modules()?;
    let plain = format!("{folder}/nvidia.ko");
    // The same module for a kernel of another name, and with another layout: by its checksum this
    // kernel knows, and does not look at the name.
    let mut other = std::fs::read(module_file(context, "nvidia"))?;
    let find = |text: &[u8]| position(&other, text);
    let (name, checksum) = (
        find(b"vermagic=")? + b"vermagic=".len(),
        find(b"module_layout\0")? - 8,
    );
    other[name] = b'9';
    other[checksum] ^= 1;
    let booted = Guest::new()
        .file(&plain, &other)
        .boot(context, "other-kernel")?;
    let kernel = folder.trim_start_matches("lib/modules/");
    let words = [
        "ENOEXEC: Exec format error (built for another kernel: its vermagic is \"9.",
        &format!("uname -r is \"{kernel}\""),
    ];
    all_failed(booted, &words)?;

    let booted = Guest::new()
        .file("etc/modprobe.d/x.conf", b"options nvidia probe_ms=soon\n")
        .boot(context, "bad-option")?;
    all_failed(
        booted,
        &[
            "load module nvidia: /",
            &plain,
            ": EINVAL: Invalid argument (a parameter has a bad value",
        ],
    )?;
    Ok(Outcome::Passed)
}
