//! The machine with the GPUs, and the folder of the tests' programs.

use anyhow::{Context, Result, ensure};
use kata_gpu_wire::pci_address::PciAddress;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Folders of programs that `PATH` may lack.
const PROGRAMS: [&str; 4] = [
    "/usr/sbin",
    "/sbin",
    "/usr/local/sbin",
    "/usr/local/nvidia/bin",
];

/// Longest run of a program, in seconds.
const PATIENCE_S: &str = "180";

/// Folder that tests/real-gpu/build makes: this program lies in it.
pub struct Folder(PathBuf);

impl Folder {
    fn find() -> Result<Self> {
        let own = std::env::current_exe().context("find this program")?;
        let beside = own.parent().map(Path::to_path_buf).unwrap_or_default();
        let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/real-gpu");
        let found = [beside, built]
            .into_iter()
            .find(|folder| folder.join("kata-gpu-init").exists() && folder.join("root").exists());
        found
            .map(Self)
            .context("not run from the folder that tests/real-gpu/build makes")
    }

    pub fn program(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

/// Makes a directory for root alone. Error: there is something of that name already.
pub fn make_directory(path: &Path) -> Result<()> {
    DirBuilder::new()
        .mode(0o700)
        .create(path)
        .with_context(|| format!("make {}", path.display()))
}

/// A machine with a driver and GPUs.
pub struct Machine {
    pub folder: Folder,
    /// Addresses of the GPUs that the driver has, ascending.
    pub gpus: Vec<PciAddress>,
    /// Directory of libcuda.so.1.
    pub libraries: PathBuf,
    /// Root of the driver's user space: `/`, or the directory above its libraries.
    pub driver_root: PathBuf,
}

impl Machine {
    /// The machine, or why it is none for these tests.
    pub fn find() -> std::result::Result<Self, String> {
        let gpus = fs::read_dir("/proc/driver/nvidia/gpus")
            .map_err(|_| "no NVIDIA driver is loaded".to_string())?;
        let mut gpus: Vec<PciAddress> = gpus
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        gpus.sort();
        if gpus.is_empty() {
            return Err("the driver has no GPU".into());
        }
        if !nix::unistd::geteuid().is_root() {
            return Err("not root, who makes namespaces and device nodes".into());
        }
        // The guest's is a directory of it; with another one, the init would mount the machine's.
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        if !mounts
            .lines()
            .any(|line| line.split(' ').skip(1).take(2).eq(["/dev", "devtmpfs"]))
        {
            return Err("/dev is no devtmpfs".into());
        }
        if !Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
            return Err("no cgroups of version 2 at /sys/fs/cgroup".into());
        }
        let folder = Folder::find().map_err(|error| format!("{error:#}"))?;
        let cache = run(command("ldconfig").arg("-p"))
            .or_else(|_| run(command("/sbin/ldconfig").arg("-p")));
        let cached = cache.unwrap_or_default();
        let library = cached
            .lines()
            .filter(|line| line.contains("libcuda.so.1 "))
            .find_map(|line| line.split("=> ").nth(1));
        let library = library
            .and_then(|path| fs::canonicalize(path.trim()).ok())
            .ok_or("ldconfig -p lists no libcuda.so.1")?;
        let libraries = library.parent().map(Path::to_path_buf).unwrap_or_default();
        let packaged = ["/usr/lib", "/lib"]
            .iter()
            .any(|root| libraries.starts_with(root));
        let driver_root = if packaged {
            Path::new("/")
        } else {
            libraries.parent().unwrap_or(Path::new("/"))
        }
        .to_path_buf();
        Ok(Self {
            folder,
            gpus,
            libraries,
            driver_root,
        })
    }

    /// Spec that `cdi generate` writes here, which must be complete.
    pub fn our_spec(&self, driver_root: &Path) -> Result<String> {
        run(command(self.folder.program("kata-gpu-init"))
            .args(["cdi", "generate", "--driver-root"])
            .arg(driver_root))
    }

    /// Answer of the helper for NVML to one request.
    pub fn ask_helper(&self, request: &str) -> Result<String> {
        let mut command = command(self.folder.program("kata-gpu-nvml"));
        command
            .arg("--library")
            .arg(self.libraries.join("libnvidia-ml.so.1"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().context("start kata-gpu-nvml")?;
        child
            .stdin
            .take()
            .context("its input")?
            .write_all(format!("{request}\n").as_bytes())?;
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "kata-gpu-nvml: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Keeps what a program has printed in the folder that RECORD names.
    pub fn record(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let Some(folder) = std::env::var_os("RECORD").map(PathBuf::from) else {
            return Ok(());
        };
        fs::create_dir_all(&folder)?;
        fs::write(folder.join(name), bytes)
            .with_context(|| format!("write {name} to {}", folder.display()))
    }
}

/// A program that is killed if it runs for too long.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", PATIENCE_S]).arg(program);
    command
}

/// A program of the machine.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(PROGRAMS.map(PathBuf::from));
    folders
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// Standard output of a program that must succeed.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("run {command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{command:?}: {}: {}{text}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(text)
}
