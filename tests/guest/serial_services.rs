//! The incumbent's services, for the serial init of the benchmarks: fabric manager where four
//! NVSwitches and eight GPUs are there, then nvidia-persistenced; each is waited for by a line of
//! its log, and a daemon that is not ready within the limit powers the guest off.
//!
//! The socket of the log is looked at once, then every half second for as long as it is empty, so
//! that each wait is rounded up; daemons that log faster than that are held up by a full socket.
//!
//! Words of the kernel command line: `serial_init.uvm=off` for persistenced without
//! `--uvm-persistence-mode`, `serial_init.limit_ms=120000`, `serial_init.poll_ms=500`,
//! `serial_init.srs=1` for the ready state of confidential GPUs.

use crate::services::{FABRIC_MANAGER_MARKER, PERSISTENCED_MARKER};
use kata_gpu_init::config::module_parameters;
use kata_gpu_init::gpu::pci::Scan;
use kata_gpu_init::services::configuration::with_values;
use nix::sys::reboot::{RebootMode, reboot};
use std::error::Error;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const PERSISTENCED: &str = "/usr/bin/nvidia-persistenced";
const FABRIC_MANAGER: &str = "/usr/bin/nv-fabricmanager";
const PACKAGE: &str = "/usr/share/nvidia/nvswitch/fabricmanager.cfg";
const CONFIGURATION: &str = "/run/fabricmanager.cfg";
const READY_STATE: &str = "/sys/module/nvidia/parameters/cc_ready";

/// Services of the image; None in an image without persistenced.
pub struct Services {
    log: UnixDatagram,
    limit: Duration,
    poll: Duration,
    uvm: bool,
    set_ready: bool,
}

impl Services {
    pub fn find(command_line: &[u8]) -> Result<Option<Self>> {
        if !Path::new(PERSISTENCED).exists() {
            return Ok(None);
        }
        let words = module_parameters(command_line, "serial_init");
        let word = |name: &str| {
            words
                .split(' ')
                .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
        };
        let ms = |name: &str, otherwise: u64| {
            word(name)
                .map_or(Ok(otherwise), str::parse)
                .map(Duration::from_millis)
        };
        let log = UnixDatagram::bind("/dev/log")?;
        log.set_nonblocking(true)?;
        Ok(Some(Self {
            log,
            limit: ms("limit_ms", 120_000)?,
            poll: ms("poll_ms", 500)?,
            uvm: word("uvm") != Some("off"),
            set_ready: word("srs") == Some("1"),
        }))
    }

    /// Fabric manager where the functions want it, then persistenced, each waited for.
    pub fn start(&self, scan: &Scan) -> Result<()> {
        match (scan.switches.len(), scan.gpus.len()) {
            (0, _) => {}
            (4, 8) => self.fabric_manager()?,
            (switches, gpus) => power_off(&format!(
                "unexpected topology: {gpus} GPUs, {switches} NVSwitches"
            )),
        }
        fs::create_dir_all("/run/nvidia-persistenced")?;
        let uvm: &[&str] = if self.uvm {
            &["--uvm-persistence-mode"]
        } else {
            &[]
        };
        self.daemon(
            PERSISTENCED,
            &[&["--verbose"], uvm].concat(),
            PERSISTENCED_MARKER,
        )
    }

    fn fabric_manager(&self) -> Result<()> {
        let values = [("FABRIC_MODE", "0"), ("PARTITION_RAIL_POLICY", "greedy")];
        fs::write(
            CONFIGURATION,
            with_values(&fs::read_to_string(PACKAGE)?, &values)?,
        )?;
        self.daemon(
            FABRIC_MANAGER,
            &["-c", CONFIGURATION],
            FABRIC_MANAGER_MARKER,
        )
    }

    fn daemon(&self, program: &str, arguments: &[&str], marker: &str) -> Result<()> {
        Command::new(program)
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let end = Instant::now() + self.limit;
        let mut line = [0_u8; 4096];
        loop {
            let received = self.log.recv(&mut line);
            if Instant::now() > end {
                power_off(&format!("timeout waiting for: {marker}"));
            }
            match received {
                Ok(length) if String::from_utf8_lossy(&line[..length]).contains(marker) => break,
                Ok(_) => {}
                Err(_) => std::thread::sleep(self.poll),
            }
        }
        println!(
            "serial-init: ready {} {program}",
            kata_gpu_init::machine::clock::boottime_ns()
        );
        Ok(())
    }

    /// The ready state, after the spec.
    pub fn set_ready(&self) -> Result<()> {
        if self.set_ready {
            fs::write(READY_STATE, "1")?;
        }
        Ok(())
    }
}

/// The incumbent's answer to everything that it did not expect. Only ever called by PID 1 of a VM.
fn power_off(why: &str) -> ! {
    println!(
        "serial-init: powers off {}: {why}",
        kata_gpu_init::machine::clock::boottime_ns()
    );
    nix::unistd::sync();
    if std::process::id() == 1 {
        let _unused = reboot(RebootMode::RB_POWER_OFF);
    }
    std::process::exit(1)
}
