//! Guests of the emulated host, under its own KVM: the test kernel and initrd, AF_VSOCK with a CID,
//! and Kata's own file about the sandbox.
//!
//! Each character on a serial port is an exit to a VMM that is emulated itself: the console is
//! virtio's, and the serial port has only what comes before it.

use super::{EmulatedHost, Guest, TestContext};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};

/// Memory of a guest. Every page that it touches first is a nested page fault.
const MEMORY_MIB: u32 = 512;
/// Tag of a folder that a guest has by virtio-fs.
pub const SHARED: &str = "shared";
pub const KERNEL: &str = "/var/guests/vmlinux";
const INITRD: &str = "/var/guests/initrd.cpio";
/// A shell under the name of Kata's shim: parent of every guest's VMM, as on a host with Kata.
const SHIM: &str = "/run/containerd-shim-kata-v2";

/// Kernel and initrd that all guests of a host boot.
pub struct KvmImage {
    kernel: PathBuf,
    initrd: PathBuf,
    append: String,
    cpus: u32,
}

impl KvmImage {
    /// Takes initrd, command line and number of vCPUs from a [`Guest`].
    pub fn make(context: &TestContext, guest: Guest) -> Result<Self> {
        std::fs::create_dir_all(&context.work_dir)
            .with_context(|| format!("make {}", context.work_dir.display()))?;
        let guest = guest.under_kvm(context)?;
        Ok(Self {
            kernel: context.kernel(),
            initrd: guest.pack(context, &context.work_dir)?,
            append: guest.append.join(" "),
            cpus: guest.cpus,
        })
    }

    /// The kernel command line.
    pub fn append(&self) -> &str {
        &self.append
    }

    /// Names in the host, and the files.
    pub fn files(&self) -> [(&'static str, &Path); 2] {
        [(KERNEL, &self.kernel), (INITRD, &self.initrd)]
    }
}

/// A guest, which runs until it is killed or its host ends.
pub struct KvmGuest {
    name: String,
    cid: u32,
}

impl KvmGuest {
    /// Gives a host what its guests need.
    pub fn prepare(host: &mut EmulatedHost) -> Result<()> {
        // A processor that waits by spinning takes the other guest's time.
        host.run(
            "modprobe kvm_amd || modprobe kvm_intel
            modprobe vhost_vsock && test -c /dev/kvm -a -c /dev/vhost-vsock && echo 0 > \
                /sys/module/kvm/parameters/halt_poll_ns",
        )
        .context("the emulated host has no KVM or no vhost-vsock")
        .map(drop)
    }

    /// Starts one as the sandbox `name` of the pod `pod`; `words` go behind the image's command
    /// line.
    pub fn start(
        host: &mut EmulatedHost,
        image: &KvmImage,
        name: &str,
        pod: &str,
        cid: u32,
        words: &str,
    ) -> Result<Self> {
        Self::start_with(host, image, name, pod, cid, words, "")
    }

    /// Starts one that has the host's `folder` by virtio-fs, under the tag [`SHARED`], and
    /// `devices` of QEMU's.
    pub fn start_shared(
        host: &mut EmulatedHost,
        image: &KvmImage,
        name: &str,
        cid: u32,
        words: &str,
        folder: &str,
        devices: &str,
    ) -> Result<Self> {
        let socket = format!("/run/{name}.virtiofs");
        let daemon = format!(
            "/usr/libexec/virtiofsd --sandbox chroot --socket-path {socket} --shared-dir {folder}"
        );
        host.run(&format!("setsid {daemon} >/run/{name}.log 2>&1 &"))?;
        host.until(
            "virtiofsd's socket",
            &format!("test -S {socket} || (cat /run/{name}.log; false)"),
        )?;
        // The daemon reads and writes the guest's memory in place.
        let devices = format!(
            "-object memory-backend-memfd,id=ram,size={MEMORY_MIB}M,share=on -machine \
            memory-backend=ram \
            -chardev socket,id=shared,path={socket} -device \
                vhost-user-fs-pci,chardev=shared,tag={SHARED} {devices}"
        );
        Self::start_with(host, image, name, name, cid, words, &devices)
    }

    /// Gives QEMU's monitor a command.
    pub fn monitor(&self, host: &mut EmulatedHost, command: &str) -> Result<()> {
        host.run(&format!(
            "echo '{command}' > /run/guests/{}/monitor.in",
            self.name
        ))
        .map(drop)
    }

    /// Starts one with `devices` of QEMU's.
    pub fn start_with(
        host: &mut EmulatedHost,
        image: &KvmImage,
        name: &str,
        pod: &str,
        cid: u32,
        words: &str,
        devices: &str,
    ) -> Result<Self> {
        ensure!(!words.contains('\''), "a quote in {words:?}");
        let (persist, cpus, append) = (persist(name, pod, cid), image.cpus, &image.append);
        // A flat kernel by PVH: the firmware copies nothing, and nothing is unpacked. With several
        // ports the console would come some time after its driver, and the agent write to the
        // serial port.
        host.run(&format!(
            "mkdir -p -m 0750 /run/vc/sbs /run/vc/sbs/{name} && echo '{persist}' > \
            /run/vc/sbs/{name}/persist.json
            mkdir -p /run/guests/{name} && cd /run/guests/{name} && mkfifo monitor.in monitor.out
            test -e {SHIM} || cp /bin/bash {SHIM}
            cat > start <<'END'\nqemu-system-x86_64 -nodefaults -no-user-config -no-reboot \
                -display none -machine q35 -accel kvm -cpu host \
                -m {MEMORY_MIB}M -smp {cpus} -kernel {KERNEL} -initrd {INITRD} -append '{append} \
                    {words}' -serial file:serial.log -monitor pipe:monitor \
                -device virtio-serial-pci,max_ports=1 -chardev file,id=console,path=console.log \
                    -device virtconsole,chardev=console \
                -device vhost-vsock-pci,guest-cid={cid} {devices} >qemu.log 2>&1 &
            echo $! > pid.new && mv pid.new pid && wait\nEND\n\
            setsid {SHIM} start </dev/null >/dev/null 2>&1 &"
        ))
        .with_context(|| format!("start guest {name}"))?;
        host.until(
            &format!("the VMM of guest {name}"),
            &format!("test -e /run/guests/{name}/pid"),
        )?;
        Ok(Self {
            name: name.into(),
            cid,
        })
    }

    /// Name of the guest in the collector's files.
    pub fn peer(&self) -> String {
        format!("cid {}", self.cid)
    }

    /// Waits for so many lines on its console that match grep's `pattern`.
    pub fn wait_lines(&self, host: &mut EmulatedHost, count: usize, pattern: &str) -> Result<()> {
        let console = format!("/run/guests/{}/console.log", self.name);
        let look = format!(
            "test $(grep -c '{pattern}' {console}) -ge {count} || (tail -n 5 {console}; false)"
        );
        host.until(
            &format!(
                "{count} line(s) {pattern:?} on the console of guest {}",
                self.name
            ),
            &look,
        )
        .map(drop)
    }

    pub fn console(&self, host: &mut EmulatedHost) -> Result<String> {
        host.run(&format!(
            "cat /run/guests/{0}/serial.log /run/guests/{0}/qemu.log /run/guests/{0}/console.log",
            self.name
        ))
    }

    /// Log of the guest's VMM.
    pub fn vmm_log(&self, host: &mut EmulatedHost) -> Result<String> {
        host.run(&format!("cat {}", self.vmm_log_path()))
    }

    /// The host's file with what its VMM has written; made just before the VMM's program is loaded.
    pub fn vmm_log_path(&self) -> String {
        format!("/run/guests/{}/qemu.log", self.name)
    }

    /// Ends its VMM as a crash does.
    pub fn kill(&self, host: &mut EmulatedHost) -> Result<()> {
        host.run(&format!("kill -KILL $(cat /run/guests/{}/pid)", self.name))
            .map(drop)
    }
}

/// As Kata's Go runtime writes it once the VM is up, under containerd.
fn persist(name: &str, pod: &str, cid: u32) -> serde_json::Value {
    serde_json::json!({
        "AgentState": {"URL": format!("vsock://{cid}:1024")},
        "Config": {"HypervisorType": "qemu", "ContainerConfigs": [{"ID": name, "Annotations": {
            "io.katacontainers.pkg.oci.bundle_path": format!("/run/containerd/io.containerd.runtime.v2.task/k8s.io/{name}"),
            "io.kubernetes.cri.sandbox-name": pod,
            "io.kubernetes.cri.sandbox-namespace": "tests",
            "io.kubernetes.cri.sandbox-uid": format!("uid-of-{pod}"),
        }}]}
    })
}
