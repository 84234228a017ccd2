//! Kata itself on an emulated host: one of its shims under containerd, its agent in the guest, the
//! printed unit of the collector, and the guest installed by `kata-gpu-boot install`.
//!
//! `KATA` names a folder laid out as kata-deploy lays out /opt/kata: the shims and their
//! configurations ([`Shim`]); and bin/kata-agent, which kata-deploy has in its images alone, linked
//! statically. The rest of it is not looked at.

use super::emulated_host::{deployed, tar};
use super::{DEADLINE, EmulatedHost, Guest, KvmGuest, KvmImage, Outcome, Size, TestContext};
use anyhow::{Context, Result, ensure};
use kata_gpu_report::data::containerd_log;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub const BOOTS: &str = "/var/lib/kata-gpu-boot";
const PROGRAM: &str = "/usr/local/bin/kata-gpu-boot";
const UNIT: &str = "/etc/systemd/system/kata-gpu-boot.service";
/// Directory in which kata-deploy makes a folder for each runtime.
const RUNTIMES: &str = "/opt/kata/share/defaults/kata-containers/runtimes";
const KATA_TAR: &str = "/var/kata.tar";
const ROOTS_TAR: &str = "/var/roots.tar";
/// containerd's client, in the namespace of its CRI plugin: whose pod a sandbox is, is looked for
/// there.
const CTR: &str = "ctr --namespace k8s.io";
/// Roots of the containers, as tests/containers/build makes them.
pub(super) const ROOTS: &str = "/var/containers";

/// Paths of this host's programs; and, as there is no device to pass through, containers ask by
/// their environment for GPUs that are simulated in the guest.
const DROP_IN: &str = r#"[hypervisor.qemu]
path = "/usr/local/bin/qemu"
valid_hypervisor_paths = ["/usr/local/bin/qemu"]
kernel = "/var/guests/vmlinux"
firmware = ""
shared_fs = "virtio-fs"
virtio_fs_daemon = "/usr/libexec/virtiofsd"
valid_virtio_fs_daemon_paths = ["/usr/libexec/virtiofsd"]
default_memory = 768
pcie_root_port = 1
block_device_aio = "threads"
enable_debug = true
[runtime]
enable_debug = true
[agent.kata]
visible_cdi_devices = true
"#;

/// QEMU with one more word on the kernel's command line, which install would refuse: the test
/// kernel has as modules what a Kata kernel has built in, and the program that loads them comes
/// first. Of an image the same program mounts the root, from an initrd that Kata knows nothing of.
/// Each VM stays on the last processor: free to move between two emulated ones, one was followed by
/// a panic of the host's kernel; kept on one, none was. Whether that is the cause is not known.
const QEMU: &str = r#"#!/bin/bash
args=()
for word; do [ "${last:-}" != -append ] || word="$word $(cat /run/words)"; args+=("$word") last=$word; done
[[ " $* " = *" -initrd "* ]] || args+=(-initrd /var/guests/initrd.cpio)
exec taskset -c $(($(nproc) - 1)) /usr/bin/qemu-system-x86_64 "${args[@]}"
"#;

/// Kata's program that containerd starts for each pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shim {
    Go,
    /// Shim of runtime-rs.
    Rust,
}

impl Shim {
    /// The program below the folder.
    fn program(self) -> &'static str {
        match self {
            Self::Go => "bin/containerd-shim-kata-v2",
            Self::Rust => "runtime-rs/bin/containerd-shim-kata-v2",
        }
    }

    /// Folder of its configuration below the folder, and the configuration's name.
    fn config(self) -> (&'static str, &'static str) {
        match self {
            Self::Go => (
                "share/defaults/kata-containers",
                "configuration-qemu-nvidia-gpu.toml",
            ),
            Self::Rust => (
                "share/defaults/kata-containers/runtime-rs",
                "configuration-qemu-nvidia-gpu-runtime-rs.toml",
            ),
        }
    }

    /// Name of Kata's own image, which its configuration has.
    pub fn image(self) -> &'static str {
        match self {
            Self::Go => "kata-containers-nvidia-gpu.img",
            Self::Rust => "kata-containers-nvidia.img",
        }
    }

    /// More keys of its configuration. The Rust shim passes the agent's lines on only where the
    /// agent logs at level debug.
    fn keys(self) -> &'static str {
        match self {
            Self::Go => "",
            Self::Rust => "enable_debug = true\n",
        }
    }

    /// Its configuration on the host.
    fn installed(self) -> String {
        match self {
            Self::Go => format!("{RUNTIMES}/qemu-nvidia-gpu/{}", self.config().1),
            Self::Rust => format!("{RUNTIMES}/qemu-nvidia-gpu-runtime-rs/{}", self.config().1),
        }
    }

    /// Archives for a host, by their names there: the shim with its configuration, and the roots of
    /// containers.
    pub(super) fn archives(self, context: &TestContext) -> Result<[(&'static str, PathBuf); 2]> {
        let kata = folder().context("KATA is not set")?;
        let config = self.config_below();
        let roots = context.target.join("containers");
        let (of, names) = (&context.work_dir, ["debian", "alpine", "application"]);
        Ok([
            (
                KATA_TAR,
                tar(of, "kata.tar", &kata, &[self.program(), &config])?,
            ),
            (ROOTS_TAR, tar(of, "roots.tar", &roots, &names)?),
        ])
    }

    /// Puts the archives' files in their places on the host, with more keys of the configuration;
    /// gives the configuration's path.
    pub(super) fn unpack(self, host: &mut EmulatedHost, more: &str) -> Result<String> {
        let (config, installed) = (self.config_below(), self.installed());
        let runtime = Path::new(&installed)
            .parent()
            .context("a configuration in no folder")?
            .display();
        host.run(&format!(
            "set -e; mkdir -p {ROOTS}/static {runtime}/config.d && tar -C /opt/kata -xf {KATA_TAR} \
            && tar -C {ROOTS} -xf {ROOTS_TAR}
            rm {KATA_TAR} {ROOTS_TAR} && mv {ROOTS}/application {ROOTS}/static/
            mv /opt/kata/{config} {installed} && ln -s /opt/kata/{shim} /usr/local/bin/
            echo '{DROP_IN}{keys}{more}' > {runtime}/config.d/10-host.toml
            echo '{QEMU}' > /usr/local/bin/qemu && chmod +x /usr/local/bin/qemu",
            keys = self.keys(),
            shim = self.program(),
            QEMU = QEMU.replace('\'', "'\\''"),
        ))?;
        Ok(installed)
    }

    /// Its configuration below the folder.
    fn config_below(self) -> String {
        let (folder, name) = self.config();
        format!("{folder}/{name}")
    }
}

/// Guest that pods boot, and how it is installed.
pub struct Setup {
    /// Initrd, command line and number of vCPUs of the guest.
    pub guest: Guest,
    /// More files for the host, by their names there.
    pub files: Vec<(&'static str, PathBuf)>,
    /// More keys of the configuration.
    pub drop_in: String,
    /// Arguments of `install`.
    pub install: &'static str,
}

impl Setup {
    /// From the tests' initrd; `words` go to each guest's kernel.
    pub fn initrd(words: &str) -> Result<Self> {
        let guest = Guest::new()
            .cpus(1)
            .append(words)
            .agent(&agent()?)
            .archive("driver");
        Ok(Self {
            guest,
            files: Vec::new(),
            drop_in: String::new(),
            install: "--initrd /var/guests/initrd.cpio",
        })
    }
}

/// Kata's agent.
pub fn agent() -> Result<Vec<u8>> {
    let agent = folder().context("KATA is not set")?.join("bin/kata-agent");
    std::fs::read(&agent).with_context(|| format!("read {}", agent.display()))
}

/// A host with Kata; pods are named by their sandbox.
pub struct KataHost {
    pub host: EmulatedHost,
    pub shim: Shim,
    /// Configuration that pods are started with.
    pub config: String,
    words: String,
}

fn folder() -> Option<PathBuf> {
    std::env::var_os("KATA").map(PathBuf::from)
}

impl KataHost {
    /// Runs a test on one, or skips it where there is no Kata; `words` go to each guest's kernel.
    pub fn test(
        context: &TestContext,
        shim: Shim,
        words: &str,
        run: impl FnOnce(&mut Self) -> Result<Outcome>,
    ) -> Result<Outcome> {
        Self::with(context, shim, || Setup::initrd(words), run)
    }

    /// The same with what `setup` makes, where there is a Kata.
    pub fn with(
        context: &TestContext,
        shim: Shim,
        setup: impl FnOnce() -> Result<Setup>,
        run: impl FnOnce(&mut Self) -> Result<Outcome>,
    ) -> Result<Outcome> {
        match Self::skipped(context, shim)? {
            Some(skipped) => Ok(skipped),
            None => run(&mut Self::start(context, shim, setup()?)?),
        }
    }

    /// How a test ends without this shim.
    pub fn skipped(context: &TestContext, shim: Shim) -> Result<Option<Outcome>> {
        let Some(folder) = folder() else {
            return Ok(Some(Outcome::Skipped(
                "KATA names no folder like kata-deploy's /opt/kata: KATA=DIR tests/run kata".into(),
            )));
        };
        let program = folder.join(shim.program());
        if !program.exists() {
            return Ok(Some(Outcome::Skipped(format!(
                "{} is not there",
                program.display()
            ))));
        }
        EmulatedHost::skipped(context)
    }

    fn start(context: &TestContext, shim: Shim, setup: Setup) -> Result<Self> {
        let image = KvmImage::make(context, setup.guest)?;
        let mut files = image.files().to_vec();
        let archives = shim.archives(context)?;
        let program = EmulatedHost::program(context)?;
        let unit = deployed("kata-gpu-boot.service");
        files.extend(
            archives
                .iter()
                .chain(&setup.files)
                .map(|(name, file)| (*name, file.as_path()))
                .chain([(PROGRAM, program.as_path()), (UNIT, unit.as_path())]),
        );
        let mut host = EmulatedHost::start(context, "host", Size::WITH_PODS, &files)?;
        KvmGuest::prepare(&mut host)?;
        let config = shim.unpack(&mut host, &setup.drop_in)?;
        host.run(
            "printf '\n[debug]\n  level = \"debug\"\n' >> /etc/containerd/config.toml
            systemctl daemon-reload && systemctl restart containerd && systemctl start \
                kata-gpu-boot.service",
        )?;
        let mut kata = Self {
            host,
            shim,
            config,
            words: image.append().into(),
        };
        kata.install(setup.install)?;
        Ok(kata)
    }

    /// Has new pods start from an initrd or image, as the words say.
    pub fn install(&mut self, words: &str) -> Result<String> {
        self.host.run(&format!(
            "{PROGRAM} install --kata-config {} {words}",
            self.config
        ))
    }

    pub fn uninstall(&mut self) -> Result<String> {
        self.host.run(&format!(
            "{PROGRAM} install --remove --kata-config {}",
            self.config
        ))
    }

    /// Sets the words that kernels of new pods get.
    pub fn words(&mut self, words: &str) -> Result<()> {
        set_words(&mut self.host, &format!("{} {words}", self.words))
    }

    /// `install --check` of a configuration or runtime, with more words; gives its exit status and
    /// what it has said.
    pub fn check(&mut self, what: &str, words: &str) -> Result<(i32, String)> {
        self.status_of(&format!(
            "{PROGRAM} install --check {what} --dir {BOOTS} {words}"
        ))
    }

    /// Runs a pod's sandbox with the annotations that a CRI gives it; `words` go to its kernel.
    /// Gives the seconds that it took.
    pub fn pod(&mut self, name: &str, words: &str) -> Result<f64> {
        let before = std::time::Instant::now();
        self.words(words)?;
        let annotations = annotations(&[
            ("container-type", "sandbox"),
            ("sandbox-name", name),
            ("sandbox-namespace", "tests"),
            ("sandbox-uid", &format!("uid-of-{name}")),
        ]);
        self.host
            .run(&format!(
                "{CTR} run --runtime io.containerd.kata.v2 --runtime-config-path {} {annotations} \
                    --detach --rootfs {ROOTS}/static {name} /application pause",
                self.config
            ))
            .with_context(|| format!("run pod {name}"))?;
        Ok(before.elapsed().as_secs_f64())
    }

    /// Runs a container of a pod in the background: `root` is a folder of tests/containers/build,
    /// `devices` what it asks for, as CDI names it.
    pub fn begin(
        &mut self,
        pod: &str,
        name: &str,
        root: &str,
        devices: &str,
        program: &str,
    ) -> Result<()> {
        let annotations = annotations(&[
            ("container-type", "container"),
            ("sandbox-id", pod),
            ("container-name", name),
        ]);
        let ask = if devices.is_empty() {
            String::new()
        } else {
            format!("--env VISIBLE_CDI_DEVICES={devices}")
        };
        self.host
            .run(&format!(
                "mkdir -p /run/out; rm -f /run/out/{name}.ended; ({CTR} run --runtime \
                io.containerd.kata.v2 {annotations} {ask} --rootfs {ROOTS}/{root} {name} {program} \
                    </dev/null >/run/out/{name} 2>/run/out/{name}.errors; touch \
                        /run/out/{name}.ended) >/dev/null 2>&1 &"
            ))
            .map(drop)
    }

    /// Waits until a container that was begun has ended; gives what it has written.
    pub fn ended(&mut self, name: &str) -> Result<String> {
        self.host.until(
            &format!("end of container {name}"),
            &format!("test -e /run/out/{name}.ended"),
        )?;
        self.host.run(&format!("cat /run/out/{name}"))
    }

    /// Errors of a container, as containerd reports them; without the escapes that the Rust runtime
    /// adds.
    pub fn errors(&mut self, name: &str) -> Result<String> {
        Ok(self
            .host
            .run(&format!("cat /run/out/{name}.errors"))?
            .replace('\\', ""))
    }

    /// Waits for a text in what a container writes.
    pub fn says(&mut self, name: &str, text: &str) -> Result<()> {
        let look = format!(
            "grep -q '{text}' /run/out/{name} || (cat /run/out/{name} /run/out/{name}.errors; \
            false)"
        );
        self.host
            .until(&format!("{text:?} of container {name}"), &look)
            .map(drop)
    }

    /// The boot of a pod, by the collector's own line about the sandbox.
    pub fn boot_id(&mut self, pod: &str) -> Result<String> {
        let files = self.host.run(&format!(
            "cd {BOOTS} && grep -lF '\"pod\":\"{pod}\"' *.ndjson"
        ))?;
        let mut ids = files
            .lines()
            .filter_map(|name| name.strip_suffix(".ndjson"));
        let (Some(id), None) = (ids.next(), ids.next()) else {
            anyhow::bail!("boots of pod {pod}: {files:?}")
        };
        Ok(id.into())
    }

    /// Waits for a text in the boot file of a pod.
    pub fn sent(&mut self, pod: &str, text: &str) -> Result<()> {
        let look = format!(
            "cd {BOOTS} && files=$(grep -lF '\"pod\":\"{pod}\"' *.ndjson) && grep -qF '{text}' \
            $files"
        );
        self.host
            .until(&format!("{text:?} of pod {pod}"), &look)
            .map(drop)
    }

    /// A boot through a command of `kata-gpu-boot`, whose exit status 1 is its verdict on the boot.
    pub fn look(&mut self, command: &str, pod: &str) -> Result<String> {
        let id = self.boot_id(pod)?;
        self.host.run(&format!(
            "{PROGRAM} {command} --dir {BOOTS} {id} || test $? = 1"
        ))
    }

    /// Follows a sandbox or NAMESPACE/POD until its boot is over; gives its exit status and what it
    /// has said.
    pub fn follow(&mut self, sandbox: &str) -> Result<(i32, String)> {
        self.status_of(&format!(
            "{PROGRAM} show --follow --dir {BOOTS} {sandbox} --timeout 120"
        ))
    }

    /// Runs a command that may fail; gives its exit status and what it has said.
    fn status_of(&mut self, command: &str) -> Result<(i32, String)> {
        let text = self
            .host
            .run(&format!("{command} 2>&1; echo \"status $?\""))?;
        let (text, status) = text
            .trim_end()
            .rsplit_once("status ")
            .context("no status")?;
        Ok((status.parse()?, text.into()))
    }

    /// Writes the log that has the agent's lines, and those of containerd and the shim, to a file
    /// of the host.
    pub fn agents_log(&mut self, path: &str) -> Result<()> {
        let journal = match self.shim {
            Shim::Go => "journalctl -u containerd -o cat",
            // Only the journal's fields name the pod; without --all, long fields are left out.
            Shim::Rust => {
                "journalctl _SYSTEMD_UNIT=containerd.service + SYSLOG_IDENTIFIER=kata -o json --all"
            }
        };
        self.host.run(&format!("{journal} > {path}")).map(drop)
    }

    /// The text of a guest's file that its `/hardware` shows on the console, as soon as it is as
    /// wanted.
    pub fn shown(&mut self, file: &str, wanted: impl Fn(&str) -> bool) -> Result<String> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            self.agents_log("/run/agent.log")?;
            let lines = self.host.run(&format!(
                "grep -F 'cdiVersion' /run/agent.log | grep -F {file}; true"
            ))?;
            let text = |line: &str| -> Option<String> {
                let shown: serde_json::Value =
                    serde_json::from_str(containerd_log::entry(line)?.console()?.1).ok()?;
                Some(shown["text"].as_str()?.to_string())
            };
            if let Some(text) = lines
                .lines()
                .rev()
                .find_map(text)
                .filter(|text| wanted(text))
            {
                return Ok(text);
            }
            ensure!(
                Instant::now() < deadline,
                "the guest has not shown {file} as wanted within {DEADLINE:?}: {lines}"
            );
        }
    }

    /// Percentage of a pod's boot that no step explains, by a log and the boot's file; whatever the
    /// verdict on it, as in [`Self::look`].
    pub fn unexplained(&mut self, log: &str, pod: &str, window: &str) -> Result<f64> {
        let id = self.boot_id(pod)?;
        let shown = self.host.run(&format!(
            "{PROGRAM} show {log} {BOOTS}/{id}.ndjson --by gap --json {window} || test $? = 1"
        ))?;
        let shown: serde_json::Value = serde_json::from_str(&shown)?;
        let share = shown["account"]["unexplained_share"].as_f64();
        share.with_context(|| format!("no share in {shown}"))
    }

    /// All boots, as people see them.
    pub fn list(&mut self) -> Result<String> {
        self.host.run(&format!("{PROGRAM} list --dir {BOOTS}"))
    }

    /// Kills a pod, as its deletion does, and waits until nothing of it is left.
    pub fn delete(&mut self, pod: &str, containers: &[&str]) -> Result<()> {
        let all = [containers, &[pod]].concat().join(" ");
        self.host.run(&format!(
            "for name in {all}; do {CTR} task kill --signal KILL $name; done
            for name in {all}; do for try in 1 2 3 4 5 6; do {CTR} task rm --force $name && \
                break; sleep 1; done; {CTR} container rm $name; done; true"
        ))?;
        self.nothing_left(pod)
    }

    /// Waits until nothing of a sandbox is left.
    pub(super) fn nothing_left(&mut self, pod: &str) -> Result<()> {
        let left = format!(
            "! ({CTR} container ls -q; ls /run/vc/sbs /run/kata; cat /proc/[0-9]*/cmdline | tr \
            '\\0' ' ' | grep -o 'sandbox-{pod} ') 2>/dev/null | grep -w {pod}"
        );
        self.host
            .until(&format!("end of pod {pod}"), &left)
            .map(drop)
    }
}

/// Sets the command line that kernels of new pods get.
pub(super) fn set_words(host: &mut EmulatedHost, words: &str) -> Result<()> {
    host.run(&format!("echo '{words}' > /run/words")).map(drop)
}

fn annotations(of: &[(&str, &str)]) -> String {
    of.iter()
        .map(|(name, value)| format!("--annotation io.kubernetes.cri.{name}={value}"))
        .collect::<Vec<_>>()
        .join(" ")
}
