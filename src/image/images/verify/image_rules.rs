//! Rules for an image: one a row, with the effect of a violation, the failure that guests then
//! report, and the cure. A row without a cure has that of the failure's row in the catalogue.

use crate::images::entry_text::escaped;
use kata_gpu_report::data::text::clipped;
use kata_gpu_report::severity::Severity;
use kata_gpu_wire::failure::Reason;

/// A possible fault of an image.
#[derive(Debug, PartialEq, Eq)]
pub struct Rule {
    pub name: &'static str,
    /// Error: the image does not boot, or none of its containers gets a GPU.
    pub severity: Severity,
    /// Failure that a guest of such an image reports, if it is one of the catalogue's.
    pub predicts: Option<Reason>,
    pub breaks: &'static str,
    pub cure: &'static str,
}

macro_rules! rules {
    ($(
        $id:ident $name:literal $severity:ident $($predicts:ident)?,
        $breaks:expr $(, $cure:expr)?;
    )*) => {
        $(pub static $id: Rule = Rule {
            name: $name,
            severity: Severity::$severity,
            predicts: [$(Some(Reason::$predicts),)? None][0],
            breaks: $breaks,
            cure: [$($cure,)? $(Reason::$predicts.cure(),)? ""][0],
        };)*
        /// Every rule.
        pub static RULES: &[&Rule] = &[$(&$id),*];
    };
}

rules! {
    NO_INIT "no-init" Error NoInitProgram,
        "the kernel finds no program to start, looks for a root disk instead, and panics (--rdinit \
         names another program)";
    INIT_DANGLING "init-dangling" Error NoInitProgram,
        "the kernel's init is a link that leads to nothing: it panics",
        "put the link's target into the image, or a program in the link's place";
    NO_AGENT "no-agent" Error AgentNoAnswer,
        "the init has nothing to hand PID 1 to: the guest powers off",
        "put kata-agent there";
    NOT_A_PROGRAM "not-a-program" Error,
        "the kernel cannot start it",
        "put an executable ELF file there, mode 0755";
    LOADER_MISSING "loader-missing" Error,
        "the kernel cannot start it and returns ENOENT, as if the program itself were missing",
        "put the loader it names into the image, or link the program statically";
    LIBRARY_MISSING "library-missing" Error,
        "its loader finds no such library, and ends it",
        "put the library into a directory that the loader searches, and run ldconfig in the image";
    WRONG_MACHINE "wrong-machine" Error,
        "it is for another kind of processor than the init",
        "build it for the same";
    PROGRAM_BROKEN "program-broken" Warning,
        "this program does not start",
        "put its needs into the image, or omit the program";
    NO_MODULES "no-modules" Error DriverMissing,
        "no kernel's modules can be found: neither the driver nor its dependencies are loaded";
    OTHER_KERNEL "other-kernel" Error DriverMissing,
        "the modules are those of another kernel: none is found",
        "put this kernel's modules into the image, or boot the kernel that they are for";
    SEVERAL_KERNELS "several-kernels" Note,
        "modules of several kernels are in the image: all are checked, and one is used",
        "choose one with --kernel";
    NO_DRIVER "no-driver" Error DriverMissing,
        "the driver's module is not listed: no GPU is ever usable";
    MODULE_MISSING "module-missing" Error DriverMissing,
        "the driver's module, or one that it depends on, is listed and not there: it cannot be \
         loaded",
        "put it there, and run depmod -b on the image's root";
    OTHER_MODULE_MISSING "other-module-missing" Warning,
        "a module is listed and not there: its users fail",
        "run depmod -b on the image's root, or put it there";
    NOT_A_MODULE "not-a-module" Error DriverLoadFailed,
        "the kernel refuses it",
        "put the module there byte for byte as it was built";
    VERMAGIC "vermagic" Error DriverLoadFailed,
        "it was built for another kernel: the kernel refuses it (ENOEXEC)",
        "build it for this kernel";
    MODULE_VERSIONS "module-versions" Error DriverLoadFailed,
        "nvidia-uvm and nvidia are of different versions: one refuses the other",
        "put modules of one version into the image";
    DRIVER_ELSEWHERE "driver-elsewhere" Note,
        "no part of NVIDIA's driver is in the image: its guests take the driver and its services \
         from the extension disk `gpu` (Kata 4), and without \
         that disk no GPU comes up",
        "have that disk in Kata's configuration (guest_extension_images, name = \"gpu\"), or put \
         the driver into the image";
    NO_FIRMWARE "no-firmware" Error FirmwareMissing,
        "GPUs with a GSP (Turing and later) are not initialised without the firmware of the \
         driver's own version";
    FIRMWARE_PARTIAL "firmware-partial" Warning FirmwareMissing,
        "GPUs that need this one of the firmware files are not initialised",
        "put it there, uncompressed, unless no such GPU is ever passed in";
    NO_LIBCUDA "no-libcuda" Error,
        "no CUDA program starts in a container",
        "put the driver's user space into the image; --no-user-space if it comes from elsewhere, \
         or is not needed";
    NO_NVML "no-nvml" Warning,
        "nvidia-smi and all other users of NVML find no library",
        "put libnvidia-ml of the driver's version into the image";
    VERSION_DIFFERS "version-differs" Error,
        "the driver refuses a user space of another version (API mismatch)",
        "put module, libraries and firmware of one version into the image";
    SERVICE_BROKEN "service-broken" Warning,
        "this service has its program in the image and would not start",
        "put the missing files there (rootfs-builder/build --services DIR takes them from NVIDIA's \
         packages), or omit the program";
    SERVICE_REMARK "service-differs" Warning,
        "this service starts otherwise than it should",
        "put what is named into the image (rootfs-builder/build does), or use such a kernel";
    SERVICE_MISSING "service-missing" Error,
        "a guest of this topology, named by --topology, starts this service and cannot",
        "put the service's package into the image (rootfs-builder/build --services DIR takes it \
         from NVIDIA's packages, unpacked)";
    SERVICE_WANTED "service-wanted" Warning,
        "a guest of this topology, named by --topology, runs without this service",
        "put the service's package into the image (rootfs-builder/build --services DIR takes it \
         from NVIDIA's packages, unpacked)";
    HASH_TREE "hash-tree" Error,
        "with the parameters beside the image (FILE.verity), dm-verity refuses the root, and the \
         kernel finds none",
        "make image and parameters again: `kata-gpu-boot image replace-init --verity`";
    VAR_RUN_DIRECTORY "var-run-directory" Warning,
        "/var/run is not /run, and no init can replace it by a link: kata-gpu-init mounts /run \
         there, others do not, and their agent does not find the CDI spec",
        "make it a link: ln -s ../run var/run";
    VAR_RUN "var-run" Warning,
        "/var/run does not lead to /run; kata-gpu-init makes it so, other inits do not",
        "make it a link: ln -s ../run var/run";
    MOUNT_POINT "mount-point" Error,
        "a file system has to be mounted there, and it is no directory",
        "make it a directory";
    PTMX "ptmx" Warning,
        "it is no terminal multiplexer: where an init mounts no devtmpfs over it, the agent powers \
         off and logs nothing",
        "omit it: devtmpfs has it";
    SETUID "setuid" Warning,
        "any user runs it with its owner's rights, and nothing in a guest needs that",
        "chmod u-s,g-s, or omit it";
    WRITABLE "writable-by-all" Warning,
        "anybody in the guest can change it",
        "chmod o-w";
    LEFT_OUT "left-out" Warning,
        "the kernel omits this entry and logs nothing",
        "pack the image again: `kata-gpu-boot image pack`";
    OUTSIDE "odd-name" Warning,
        "tools that unpack images elsewhere refuse it, or write where they should not",
        "pack the image again: `kata-gpu-boot image pack`";
    AGAIN "again" Warning,
        "an earlier entry has the same name, and is replaced: lists of other tools may differ from \
         the guest's files",
        "pack the image again: `kata-gpu-boot image pack`";
    NO_TRAILER "no-trailer" Warning,
        "an archive ends without its end mark: it may have been cut, and the kernel does not \
         notice",
        "write it again";
    PACKED "packed" Note,
        "a program that unpacks itself (UPX) does so at every start, which takes 200 ms for a \
         large one; which libraries it needs cannot be seen",
        "use the program as it was built";
    COMPRESSED "compressed" Note,
        "the guest decompresses it at every boot: that costs time, and saves memory of guests that \
         have no GPU (initrd/README.md has figures)",
        "store it uncompressed if the time matters";
    NO_MANIFEST "no-manifest" Note,
        "the init searches for the driver's files at every boot",
        "write the list with `kata-gpu-init cdi manifest`, or pack the image again";
    MANIFEST "manifest-stale" Warning,
        "the list of the driver's files is not of this state of the image: the init searches for \
         them at every boot",
        "write it again as the last step: `kata-gpu-init cdi manifest`, or pack the image again";
}

/// A violated rule and the place of the violation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub rule: &'static Rule,
    /// Path in the guest; printable.
    pub path: String,
    /// The present or missing value; may hold anything.
    pub value: Option<String>,
}

impl Finding {
    pub fn new(rule: &'static Rule, path: impl AsRef<[u8]>) -> Self {
        Self {
            rule,
            path: escaped(path.as_ref()),
            value: None,
        }
    }

    pub fn value(mut self, value: impl ToString) -> Self {
        self.value = Some(value.to_string());
        self
    }

    /// The value for text output: printable and short.
    fn shown_value(&self) -> Option<String> {
        self.value.as_deref().map(clipped)
    }

    /// Path and value, as text.
    pub fn place(&self) -> String {
        match self.shown_value() {
            Some(value) if self.path.is_empty() => value,
            Some(value) => format!("{}: {value}", self.path),
            None => self.path.clone(),
        }
    }

    /// The finding as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "severity": self.rule.severity,
            "rule": self.rule.name,
            "path": self.path,
            "value": self.shown_value(),
            "breaks": self.rule.breaks,
            "predicts": self.rule.predicts.map(Reason::name),
            "cure": self.rule.cure,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_has_a_name_of_its_own_and_a_cure() {
        let mut names: Vec<&str> = RULES.iter().map(|r| r.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), RULES.len());
        assert!(
            RULES
                .iter()
                .all(|rule| !rule.breaks.is_empty() && !rule.cure.is_empty())
        );
    }

    #[test]
    fn a_rule_that_predicts_a_failure_names_its_row() {
        let json = Finding::new(&NO_DRIVER, "/lib/modules/6.18.3").json();
        assert_eq!(json["predicts"], "driver-missing");
        assert_eq!(json["cure"], Reason::DriverMissing.cure());
        // A cure of its own stands before the row's.
        assert_eq!(FIRMWARE_PARTIAL.predicts, Some(Reason::FirmwareMissing));
        assert_ne!(FIRMWARE_PARTIAL.cure, Reason::FirmwareMissing.cure());
        // Negative control.
        assert!(Finding::new(&SETUID, "/bin/su").json()["predicts"].is_null());
    }
}
