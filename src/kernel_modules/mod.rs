//! Loading kernel modules: modules.dep order, finit_module on the file as it was shipped (signatures stay valid), parameters from the kernel
//! command line. Does in process what modprobe does for the few modules a GPU guest needs; options of modprobe.d are not read yet.

use crate::events::{StepId, names};
use crate::step;
use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use std::ffi::CString;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

/// MODULE_INIT_COMPRESSED_FILE (linux/module.h): the kernel decompresses; nix has no name for it.
const COMPRESSED_FILE: ModuleInitFlags = ModuleInitFlags::from_bits_retain(4);

/// Why a module is not there.
#[derive(Debug)]
pub enum LoadError {
    /// modules.dep cannot be read.
    NoIndex { path: PathBuf, error: std::io::Error },
    /// modules.dep does not know the module.
    Unknown { module: String, index: PathBuf },
    /// A file that modules.dep names cannot be opened.
    NoFile { module: String, path: PathBuf, error: std::io::Error },
    /// The kernel refused.
    Refused { module: String, path: PathBuf, errno: Errno },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoIndex { path, error } => {
                write!(
                    f,
                    "load modules: read {}: {error}; the image has no modules for the running kernel: run depmod when it is built",
                    path.display()
                )
            }
            Self::Unknown { module, index } => {
                write!(
                    f,
                    "load module {module}: {} does not list it; put the driver's modules for this kernel into the image and run depmod",
                    index.display()
                )
            }
            Self::NoFile { module, path, error } => {
                write!(f, "load module {module}: open {}: {error}; modules.dep is older than the modules", path.display())
            }
            Self::Refused { module, path, errno } => {
                write!(f, "load module {module}: {}: {errno}", path.display())?;
                match errno {
                    Errno::ENOEXEC => write!(f, " (built for another kernel: compare its vermagic with uname -r)"),
                    Errno::EKEYREJECTED => write!(f, " (signature: the kernel does not trust the key this file was signed with)"),
                    Errno::EPERM => write!(f, " (module loading is locked down)"),
                    Errno::ENOENT => write!(f, " (it needs a symbol that no loaded module has, or a parameter it does not know)"),
                    Errno::ENODEV => write!(f, " (it found no device it can drive)"),
                    Errno::EINVAL => write!(f, " (a parameter has a bad value)"),
                    _ => Ok(()),
                }
            }
        }
    }
}

impl std::error::Error for LoadError {}

/// The modules of one kernel version.
pub struct Modules {
    directory: PathBuf,
    command_line: Vec<u8>,
    /// What was loaded here: a dependency of the next module is not tried, and not told, again.
    loaded: Vec<PathBuf>,
}

impl Modules {
    /// Modules of `kernel` (`uname -r`) below `root`, with parameters from a kernel command line.
    pub fn new(root: &Path, kernel: &str, command_line: &[u8]) -> Self {
        Self { directory: root.join("lib/modules").join(kernel), command_line: command_line.to_vec(), loaded: Vec::new() }
    }

    /// Loads a module and what it depends on, one `module.load` step each; gives the last one's id. Blocks until the module's init has
    /// returned. Already loaded is success.
    pub fn load(&mut self, module: &str) -> Result<StepId, LoadError> {
        let mut last = StepId(0);
        for path in self.load_order(module)? {
            if self.loaded.contains(&path) {
                continue;
            }
            let name = module_name(&path);
            let step = step!(names::MODULE_LOAD, module = %name);
            last = step.id();
            step.run(|| self.load_file(&name, &path))?;
            self.loaded.push(path);
        }
        Ok(last)
    }

    fn load_file(&self, module: &str, path: &Path) -> Result<(), LoadError> {
        let parameters = crate::config::module_parameters(&self.command_line, module);
        // The command line is one C string of the kernel's: it holds no NUL.
        let parameters = CString::new(parameters).unwrap_or_default();
        let file = File::open(path).map_err(|error| LoadError::NoFile { module: module.into(), path: path.into(), error })?;
        let compressed = path.extension().is_some_and(|e| e != "ko");
        let flags = if compressed { COMPRESSED_FILE } else { ModuleInitFlags::empty() };
        match finit_module(&file, &parameters, flags) {
            Ok(()) | Err(Errno::EEXIST) => Ok(()),
            Err(errno) => Err(LoadError::Refused { module: module.into(), path: path.into(), errno }),
        }
    }

    /// Files to load for a module, dependencies first.
    fn load_order(&self, module: &str) -> Result<Vec<PathBuf>, LoadError> {
        let index = self.directory.join("modules.dep");
        let text = std::fs::read_to_string(&index).map_err(|error| LoadError::NoIndex { path: index.clone(), error })?;
        order(&text, module)
            .map(|files| files.into_iter().map(|f| self.directory.join(f)).collect())
            .ok_or(LoadError::Unknown { module: module.into(), index })
    }
}

/// Order in which modules.dep wants a module and its dependencies loaded. A line is `file: dep dep ..`, and lists all of them, last first.
fn order<'a>(index: &'a str, module: &str) -> Option<Vec<&'a str>> {
    let wanted = module.replace('-', "_");
    index
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(file, _)| module_name(Path::new(file)) == wanted)
        .map(|(file, dependencies)| dependencies.split_whitespace().rev().chain([file]).collect())
}

/// The kernel's name for the module in a file: `nvidia-uvm.ko.xz` is `nvidia_uvm`.
fn module_name(path: &Path) -> String {
    let file = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    file.split(".ko").next().unwrap_or_default().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const INDEX: &str = "kernel/a.ko:\nkernel/b.ko.xz: kernel/a.ko\nextra/nvidia-uvm.ko: extra/nvidia.ko kernel/b.ko.xz kernel/a.ko\nextra/nvidia.ko: kernel/b.ko.xz kernel/a.ko\n";

    #[test]
    fn dependencies_come_first_and_names_are_the_kernels() {
        assert_eq!(order(INDEX, "nvidia-uvm").unwrap(), ["kernel/a.ko", "kernel/b.ko.xz", "extra/nvidia.ko", "extra/nvidia-uvm.ko"]);
        assert_eq!(order(INDEX, "nvidia_uvm"), order(INDEX, "nvidia-uvm"));
        assert_eq!(order(INDEX, "b").unwrap(), ["kernel/a.ko", "kernel/b.ko.xz"]);
        assert_eq!(order(INDEX, "nvidia-drm"), None);
    }

    #[test]
    fn what_is_missing_is_named_with_the_cure() {
        let mut modules = Modules::new(Path::new("/nonexistent"), "6.1.0-test", b"");
        let error = modules.load("nvidia").unwrap_err().to_string();
        assert!(error.contains("/nonexistent/lib/modules/6.1.0-test/modules.dep") && error.contains("run depmod"), "{error}");
    }
}
