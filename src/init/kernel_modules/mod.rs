//! Kernel module loading: modprobe's rules, in process, for the few modules that a GPU guest needs.
//!
//! Names, order and options are kmod's ([`load_plan`], [`settings`], [`index`]), except that no
//! command is ever run: `install` and `remove` lines of modprobe.d are logged and skipped. Files
//! enter the kernel as they were shipped ([`mod@file`]). Not here: removing modules, and the time
//! at which each is loaded.

mod error;
pub mod file;
pub mod index;
pub mod load_plan;
pub mod pattern;
pub mod settings;

pub use error::{Cause, LoadError};

use crate::driver_files;
use crate::step;
use crate::stream::{After, StepId};
use file::{Fault, Format};
use index::Index;
use kata_gpu_wire::names;
use load_plan::{Found, Meaning, Plan, Planned};
use nix::errno::Errno;
use settings::Settings;
use std::cell::OnceCell;
use std::collections::HashSet;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use tracing::field::Empty;

/// Directories of modules; kmod uses the first, which leads to the second in a merged /usr.
const DIRECTORIES: [&str; 2] = ["lib/modules", "usr/lib/modules"];

/// Modules of one kernel version. Files are read at their first use, and only once.
pub struct Modules {
    root: PathBuf,
    kernel: String,
    /// Directory of the index files; relative paths in them start here.
    directory: PathBuf,
    command_line: Vec<u8>,
    index: Index,
    settings: OnceCell<Settings>,
    /// Options by module, added by a caller: last in order.
    added: Vec<(String, String)>,
    /// Modules loaded here: a shared dependency is neither loaded nor logged again.
    loaded: HashSet<String>,
    /// Steps that the next load comes after: loads are sequential.
    after: After,
}

impl Modules {
    /// Modules of this guest's kernel and driver.
    pub fn of_guest(command_line: &[u8]) -> Self {
        // Without the kernel's release, modules.dep is not found, which is reported.
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let root = Path::new("/");
        Self::new(
            root,
            driver_files::driver_root(),
            kernel.trim(),
            command_line,
        )
    }

    /// Modules of `kernel` (`uname -r`), with parameters from a kernel command line. modprobe.d is
    /// below `root`, module files are below `tree`, as with `modprobe --dirname`, or below `root`
    /// where `tree` has none.
    pub fn new(root: &Path, tree: &Path, kernel: &str, command_line: &[u8]) -> Self {
        let [first, second] = DIRECTORIES.map(|d| tree.join(d).join(kernel));
        let directory = [first.clone(), second]
            .into_iter()
            .chain(DIRECTORIES.map(|d| root.join(d).join(kernel)))
            .find(|d| d.join("modules.dep").exists())
            .unwrap_or(first);
        Self {
            root: root.into(),
            kernel: kernel.into(),
            index: Index::new(&directory),
            directory,
            command_line: command_line.into(),
            settings: OnceCell::new(),
            added: Vec::new(),
            loaded: HashSet::new(),
            after: After::default(),
        }
    }

    /// Adds options for a module that is not loaded yet, after its others: the kernel uses the last
    /// of two values.
    pub fn add_options(&mut self, module: &str, options: &str) {
        self.added.push((module.replace('-', "_"), options.into()));
    }

    /// Sets the steps that the next load waited for.
    pub fn follow(&mut self, steps: After) {
        self.after = steps;
    }

    /// All options of a module that is requested by its own name.
    pub fn options(&self, module: &str) -> String {
        self.options_of(&module.replace('-', "_"), None)
    }

    /// Path and options of each file that a name would load, in order, like `modprobe
    /// --show-depends`. Empty for built-in modules.
    pub fn show_depends(&self, asked: &str) -> Result<Vec<(PathBuf, String)>, LoadError> {
        let plans = self.plans(asked)?;
        let mut seen = HashSet::new();
        let modules = plans
            .iter()
            .flat_map(|plan| &plan.modules)
            .filter(|m| seen.insert(&m.module));
        Ok(modules
            .map(|m| (self.path(m), self.options_of(&m.module, m.alias.as_deref())))
            .collect())
    }

    /// Loads a module (or all of an alias) and its dependencies, one `module.load` step each;
    /// returns the module's own step. Blocks until its init has returned. A loaded or built-in
    /// module is success. A soft dependency that fails is an event.
    pub fn load(&mut self, asked: &str) -> Result<StepId, LoadError> {
        let mut last = StepId(0);
        let mut failed = None;
        for plan in self.plans(asked)? {
            for note in &plan.notes {
                tracing::info!(name: names::MODULE_CONFIG, module = %asked, note = %note);
            }
            // Try each module of the alias.
            failed = failed.or(self
                .load_all(&asked.replace('-', "_"), &plan, &mut last)
                .err());
        }
        failed.map_or(Ok(last), Err)
    }

    fn load_all(&mut self, asked: &str, plan: &Plan, last: &mut StepId) -> Result<(), LoadError> {
        for module in &plan.modules {
            if self.loaded.contains(&module.module) {
                continue;
            }
            let step = step!(
                names::MODULE_LOAD, after = ?self.after, module = %module.module, already = Empty,
                unpacked = Empty,
            );
            let id = step.id();
            let result = step.run(|| self.load_one(asked, module));
            self.follow(After(vec![id]));
            match result {
                Ok(()) => {
                    self.loaded.insert(module.module.clone());
                    // Soft dependencies may come after the requested module, and no later step
                    // waits for them.
                    if module.required {
                        *last = id;
                    }
                }
                Err(error) if module.required => return Err(error),
                Err(error) => {
                    tracing::warn!(
                        name: names::MODULE_CONFIG, module = %asked,
                        error = %format!("{error}; it is a soft dependency: going on without it"),
                    )
                }
            }
        }
        Ok(())
    }

    /// Runs inside the module's step.
    fn load_one(&self, asked: &str, planned: &Planned) -> Result<(), LoadError> {
        let module = &planned.module;
        // Check first: the kernel would read and verify the whole file before EEXIST, or return
        // EPERM once modules_disabled is set.
        if self.is_live(module) {
            tracing::Span::current().record("already", true);
            return Ok(());
        }
        for command in self.settings().commands(module) {
            tracing::warn!(name: names::MODULE_CONFIG, module = %module, error = %command);
        }
        let path = self.path(planned);
        let failed = |fault| {
            let disabled = self.modules_disabled();
            LoadError::of_file(asked, (module, &path), &fault, &self.kernel, disabled)
        };
        // Neither modprobe.d nor the command line can contain a NUL.
        let parameters = CString::new(self.options_of(module, planned.alias.as_deref()));
        let parameters = parameters.map_err(|_| {
            failed(Fault::Refused {
                errno: Errno::EINVAL,
                magic: None,
            })
        })?;
        let format = file::load(&path, &parameters, || self.kernel_unpacks()).map_err(failed)?;
        if let Some(format) = format {
            tracing::Span::current().record("unpacked", tracing::field::display(format));
        }
        Ok(())
    }

    /// A plan for each module of the name; none if it is built in.
    fn plans(&self, asked: &str) -> Result<Vec<Plan>, LoadError> {
        let name = asked.replace('-', "_");
        let failed = |cause, why: String| LoadError::new(cause, &name, why);
        let no_index = |e: index::Unreadable| {
            let why = format!(
                "read {}: {}; the image has no modules for the running kernel: run depmod when it \
                 is built",
                e.path.display(),
                e.why
            );
            failed(Cause::Missing, why)
        };
        let settings = self.settings();
        let all = match load_plan::meaning(asked, &self.index, settings).map_err(no_index)? {
            Meaning::Modules(all) => all,
            Meaning::Builtin => return Ok(Vec::new()),
            Meaning::Unknown => {
                let why = format!(
                    "{} does not list it; put the driver's modules for this kernel into the image \
                     and run depmod",
                    self.index.path().display()
                );
                return Err(failed(Cause::Missing, why));
            }
        };
        let (black, wanted): (Vec<&Found>, Vec<&Found>) = all
            .iter()
            .partition(|found| found.alias.is_some() && settings.is_blacklisted(&found.module));
        if wanted.is_empty() {
            let modules: Vec<&str> = black.iter().map(|f| f.module.as_str()).collect();
            let why = format!(
                "it stands for {}, blacklisted in modprobe.d or by modprobe.blacklist= on the \
                 kernel command line; take that out, or ask by the module's own name",
                modules.join(" and ")
            );
            return Err(failed(Cause::Other, why));
        }
        let mut plans = Vec::new();
        let mut off = None;
        for found in wanted {
            match load_plan::plan(found, &self.index, settings).map_err(no_index)? {
                Some(plan) => plans.push(plan),
                None if self.index.is_builtin(&found.module).map_err(no_index)? => {}
                None => {
                    // Usually because of `alias NAME off` in modprobe.d.
                    let why = format!(
                        "an alias makes it {}, and there is no such module; take the alias out of \
                         modprobe.d, or run depmod",
                        found.module
                    );
                    off = Some(failed(Cause::Other, why));
                }
            }
        }
        // An alias may stand for several modules; one of them suffices.
        off.filter(|_| plans.is_empty()).map_or(Ok(plans), Err)
    }

    fn settings(&self) -> &Settings {
        self.settings.get_or_init(|| {
            let (settings, problems) =
                Settings::read(&self.root, &self.directory, &self.command_line);
            for problem in problems {
                tracing::warn!(name: names::MODULE_CONFIG, error = %problem);
            }
            settings
        })
    }

    fn options_of(&self, module: &str, alias: Option<&str>) -> String {
        let added = self
            .added
            .iter()
            .filter(|(name, _)| name == module)
            .map(|(_, options)| options.clone());
        let all: Vec<String> = [self.settings().options(module, alias)]
            .into_iter()
            .chain(added)
            .filter(|o| !o.is_empty())
            .collect();
        all.join(" ")
    }

    fn path(&self, planned: &Planned) -> PathBuf {
        self.directory.join(&planned.file)
    }

    /// Whether the kernel has the module, and its init has succeeded.
    pub fn is_live(&self, module: &str) -> bool {
        std::fs::read_to_string(self.root.join("sys/module").join(module).join("initstate"))
            .is_ok_and(|state| state.trim() == "live")
    }

    /// Format that the kernel decompresses itself: only with CONFIG_MODULE_DECOMPRESS, since 5.17.
    fn kernel_unpacks(&self) -> Option<Format> {
        std::fs::read_to_string(self.root.join("sys/module/compression"))
            .ok()
            .and_then(|word| Format::named(&word))
    }

    fn modules_disabled(&self) -> Option<bool> {
        std::fs::read_to_string(self.root.join("proc/sys/kernel/modules_disabled"))
            .ok()
            .map(|text| text.trim() == "1")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::{TempDir, temp_dir};

    /// A root with the fixtures as modules of kernel 6.1.0-test; none of its files can be loaded.
    struct Root(TempDir);

    impl Root {
        fn new() -> Self {
            let root = Self(temp_dir());
            root.write(
                "lib/modules/6.1.0-test/modules.dep",
                include_bytes!("../../../tests/fixtures/modules/modules.dep"),
            );
            root.write(
                "lib/modules/6.1.0-test/modules.alias",
                include_bytes!("../../../tests/fixtures/modules/modules.alias"),
            );
            root
        }

        fn write(&self, path: &str, bytes: &[u8]) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }

        fn modules(&self, command_line: &str) -> Modules {
            let root = self.0.path();
            Modules::new(root, root, "6.1.0-test", command_line.as_bytes())
        }
    }

    #[test]
    fn options_order_is_modprobe_d_command_line_caller() {
        let root = Root::new();
        root.write(
            "etc/modprobe.d/nvidia.conf",
            b"options nvidia a=1\noptions nvidia-uvm u=1\n",
        );
        let mut modules = root.modules("nvidia.a=2 nvidia-uvm.u=2");
        modules.add_options("nvidia-uvm", "u=3");
        assert_eq!(
            (
                modules.options("nvidia").as_str(),
                modules.options("nvidia-uvm").as_str()
            ),
            ("a=1 a=2", "u=1 u=2 u=3")
        );
        let all: Vec<String> = modules
            .show_depends("nvidia-uvm")
            .unwrap()
            .iter()
            .map(|(path, options)| {
                format!(
                    "{} {options}",
                    path.strip_prefix(root.0.path()).unwrap().display()
                )
            })
            .collect();
        assert_eq!(
            all,
            [
                "lib/modules/6.1.0-test/kernel/crypto/ecc.ko ",
                "lib/modules/6.1.0-test/kernel/crypto/ecdh_generic.ko ",
                "lib/modules/6.1.0-test/extra/nvidia.ko.xz a=1 a=2",
                "lib/modules/6.1.0-test/extra/nvidia-uvm.ko.zst u=1 u=2 u=3",
            ]
        );
    }

    #[test]
    fn a_driver_root_without_this_kernels_modules_leaves_them_to_the_guest() {
        let (guest, driver) = (Root::new(), Root::new());
        let path = |kernel: &str| {
            let modules = Modules::new(guest.0.path(), driver.0.path(), kernel, b"");
            modules.show_depends("nvidia").map(|all| all[0].0.clone())
        };
        assert!(path("6.1.0-test").unwrap().starts_with(driver.0.path()));
        let dep = driver.0.path().join("lib/modules/6.1.0-test/modules.dep");
        std::fs::remove_file(dep).unwrap();
        assert!(path("6.1.0-test").unwrap().starts_with(guest.0.path()));
        // Neither has them: the driver's root is named.
        let error = path("6.2.0-test").unwrap_err().to_string();
        assert!(error.contains(driver.0.path().to_str().unwrap()), "{error}");
    }

    #[test]
    fn what_is_missing_is_named_with_the_cure() {
        let nowhere = Path::new("/nonexistent");
        let mut modules = Modules::new(nowhere, nowhere, "6.1.0-test", b"");
        let error = modules.load("nvidia").unwrap_err().to_string();
        assert!(
            error.contains("/nonexistent/lib/modules/6.1.0-test/modules.dep")
                && error.contains("run depmod"),
            "{error}"
        );
        let root = Root::new();
        let mut modules = root.modules("");
        let error = modules.load("nvidia-peermem").unwrap_err().to_string();
        assert!(
            error.contains("load module nvidia_peermem: ") && error.contains("does not list it"),
            "{error}"
        );
        let error = modules.load("nvidia-uvm").unwrap_err().to_string();
        let wanted = format!(
            "open {}: ENOENT: No such file",
            root.0
                .path()
                .join("lib/modules/6.1.0-test/kernel/crypto/ecc.ko")
                .display()
        );
        assert!(
            error.starts_with("load module nvidia_uvm: it needs ecc: ") && error.contains(&wanted),
            "{error}"
        );
    }

    #[test]
    fn aliases_lead_to_modules_to_nothing_or_to_what_is_blacklisted() {
        let root = Root::new();
        root.write(
            "lib/modprobe.d/x.conf",
            b"alias nvidia-drm off\nalias gpu nvidia\nblacklist nouveau\n",
        );
        let modules = root.modules("modprobe.blacklist=ecdh-generic");
        assert_eq!(modules.show_depends("gpu").unwrap().len(), 3);
        let error = modules.show_depends("nvidia-drm").unwrap_err().to_string();
        assert!(
            error.contains(
                "load module nvidia_drm: an alias makes it off, and there is no such module"
            ),
            "{error}"
        );
        let error = modules.show_depends("crypto-ecdh").unwrap_err().to_string();
        assert!(
            error.contains("it stands for ecdh_generic, blacklisted"),
            "{error}"
        );
        assert_eq!(
            modules.show_depends("ecdh-generic").unwrap().len(),
            2,
            "a module's own name is not an alias"
        );
        // nouveau is blacklisted and absent; nvidia stays.
        assert_eq!(
            modules
                .show_depends("pci:v000010DEd00002330sv0sd0bc03sc02i00")
                .unwrap()
                .len(),
            3
        );
    }

    #[test]
    fn what_the_kernel_has_is_not_loaded_again() {
        let root = Root::new();
        for module in ["ecc", "ecdh_generic", "nvidia"] {
            root.write(&format!("sys/module/{module}/initstate"), b"live\n");
        }
        root.write(
            "lib/modules/6.1.0-test/modules.builtin",
            b"kernel/drivers/vfio/vfio.ko\n",
        );
        let mut modules = root.modules("");
        assert!(modules.load("nvidia").is_ok());
        assert!(modules.load("vfio").is_ok());
        root.write("sys/module/nvidia_uvm/initstate", b"coming\n");
        let error = modules.load("nvidia-uvm").unwrap_err();
        assert_eq!(error.cause, Cause::Missing, "{error}");
    }

    #[test]
    fn a_file_that_is_no_archive_is_refused_before_the_kernel() {
        let root = Root::new();
        for module in ["ecc", "ecdh_generic"] {
            root.write(&format!("sys/module/{module}/initstate"), b"live\n");
        }
        root.write(
            "lib/modules/6.1.0-test/extra/nvidia.ko.xz",
            b"\xfd7zXZ\0 and then nothing that is xz",
        );
        let error = root.modules("").load("nvidia").unwrap_err().to_string();
        assert!(
            error.starts_with("load module nvidia: decompress ")
                && error.contains("extra/nvidia.ko.xz: xz: "),
            "{error}"
        );
    }
}
