//! Reasons why a module is not loaded, in one sentence: the request, the module that failed, its
//! file, the errno with its text, and the cure if one is known.

use super::file::Fault;
use nix::errno::Errno;
use std::fmt;
use std::path::Path;

/// Reason why a module is not loaded.
#[derive(Debug)]
pub struct LoadError {
    pub cause: Cause,
    text: String,
}

/// Kind of a reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The image lacks an index, the module or its file.
    Missing,
    /// The module's init found no device (ENODEV).
    NoDevice,
    Other,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl LoadError {
    /// `asked`: the requested name.
    pub fn new(cause: Cause, asked: &str, why: impl fmt::Display) -> Self {
        let text = format!("load module {asked}: {why}");
        Self { cause, text }
    }

    /// The error of the file of `module`: the requested one or a dependency. `kernel`: `uname -r`.
    /// `disabled`: whether /proc/sys/kernel/modules_disabled is 1; None if unreadable.
    pub fn of_file(
        asked: &str,
        (module, path): (&str, &Path),
        fault: &Fault,
        kernel: &str,
        disabled: Option<bool>,
    ) -> Self {
        let path = path.display();
        let (cause, why) = match fault {
            Fault::Open(errno) => {
                let cure = match errno {
                    Errno::ENOENT => "; modules.dep is older than the modules: run depmod",
                    Errno::EINVAL => "; it is not a regular file: build the image again",
                    _ => "",
                };
                (Cause::Missing, format!("open {path}: {errno}{cure}"))
            }
            Fault::Read(errno) => (Cause::Other, format!("read {path}: {errno}")),
            Fault::Packed { format, why } => {
                let why = format!(
                    "decompress {path}: {format}: {why}; the file is damaged, or not a module: \
                     build the image again"
                );
                (Cause::Other, why)
            }
            Fault::Refused { errno, magic } => {
                let cause = match errno {
                    Errno::ENODEV => Cause::NoDevice,
                    _ => Cause::Other,
                };
                let reason = reason(*errno, magic.as_deref(), kernel, disabled);
                (cause, format!("{path}: {errno}{reason}"))
            }
        };
        if asked == module {
            Self::new(cause, asked, why)
        } else {
            Self::new(cause, asked, format_args!("it needs {module}: {why}"))
        }
    }
}

/// Meaning of an errno of the kernel's module loader (kernel/module/main.c), and its cure. `magic`:
/// the version magic of the file, for ENOEXEC and EINVAL.
fn reason(errno: Errno, magic: Option<&str>, kernel: &str, disabled: Option<bool>) -> String {
    let why = match (errno, magic, disabled) {
        (Errno::ENOEXEC | Errno::EINVAL, Some(magic), _)
            if magic.split(' ').next() != Some(kernel) =>
        {
            &format!(
                "built for another kernel: its vermagic is {magic:?}, uname -r is {kernel:?}: \
                 build it for this one"
            )
        }
        (Errno::ENOEXEC, Some(magic), _) => &format!(
            "built for this kernel, {magic:?}: the file is damaged, or was built with other \
             options; see the kernel's log"
        ),
        (Errno::ENOEXEC, None, _) => "not a module: the file is damaged, or something else",
        (
            Errno::ENOKEY
            | Errno::EKEYREJECTED
            | Errno::EKEYEXPIRED
            | Errno::EBADMSG
            | Errno::ENODATA
            | Errno::ENOPKG,
            ..,
        ) => {
            "signature: it has none that this kernel trusts: sign it with the kernel's key, and \
             do not strip or edit it after that"
        }
        (Errno::EPERM, _, Some(true)) => {
            "kernel.modules_disabled is 1: modules can be loaded again after a reboot only"
        }
        (Errno::EPERM, ..) => {
            "forbidden: by module_blacklist= on the kernel command line, kernel lockdown, or a \
             missing CAP_SYS_MODULE"
        }
        (Errno::ENOENT, ..) => {
            "it needs a symbol that no loaded module has: the kernel's log names it"
        }
        (Errno::ENODEV, ..) => "it found no device it can drive",
        (Errno::EINVAL, ..) => {
            "a parameter has a bad value, or the file is damaged; the kernel's log names it"
        }
        (Errno::EBUSY, ..) => {
            "another load of it, or of what it needs, is under way and has not ended"
        }
        (Errno::ENOMEM, ..) => "give the guest more memory",
        _ => return String::new(),
    };
    format!(" ({why})")
}

#[cfg(test)]
mod tests {
    use super::super::file::Format;
    use super::*;

    fn of_file(module: &str, path: &str, fault: Fault, disabled: Option<bool>) -> String {
        let file = (module, Path::new(path));
        LoadError::of_file("nvidia_uvm", file, &fault, "6.18.5", disabled).to_string()
    }

    #[test]
    fn errors_name_module_dependency_path_errno_and_cure() {
        let refused = |errno, magic: Option<&str>, disabled| {
            let magic = magic.map(Into::into);
            let fault = Fault::Refused { errno, magic };
            of_file("nvidia", "/m/nvidia.ko", fault, disabled)
        };
        assert_eq!(
            refused(Errno::ENOEXEC, Some("6.1.0 SMP mod_unload"), None),
            "load module nvidia_uvm: it needs nvidia: /m/nvidia.ko: ENOEXEC: Exec format error \
                (built for another kernel: its vermagic is \"6.1.0 SMP mod_unload\", uname -r is \
                \"6.18.5\": build it for this one)"
        );
        let ours = Some("6.18.5 SMP");
        for (errno, magic, disabled, part) in [
            (Errno::ENOEXEC, ours, None, "the file is damaged"),
            (Errno::ENOEXEC, None, None, "not a module: the file is"),
            (
                Errno::EINVAL,
                ours,
                None,
                "EINVAL: Invalid argument (a parameter has a bad value",
            ),
            (Errno::EINVAL, Some("6.18.4 SMP"), None, "another kernel"),
            (Errno::ENOKEY, None, None, "not available (signature: "),
            (Errno::EKEYREJECTED, None, None, "sign it with the kernel's"),
            (Errno::EPERM, None, Some(true), "modules_disabled is 1"),
            (Errno::EPERM, None, Some(false), "module_blacklist="),
            (Errno::EBUSY, None, None, "another load of it"),
            (Errno::ENOENT, None, None, "needs a symbol"),
            (Errno::EIO, None, None, "nvidia.ko: EIO: "),
        ] {
            let text = refused(errno, magic, disabled);
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_dependency_is_named_only_when_it_is_another_module() {
        assert_eq!(
            of_file("nvidia_uvm", "/m.ko", Fault::Open(Errno::ENOENT), None),
            "load module nvidia_uvm: open /m.ko: ENOENT: No such file or directory; modules.dep \
                is older than the modules: run depmod"
        );
        let (format, why) = (Format::Xz, "unexpected end".into());
        assert_eq!(
            of_file("d", "/d.ko.xz", Fault::Packed { format, why }, None),
            "load module nvidia_uvm: it needs d: decompress /d.ko.xz: xz: unexpected end; the file \
                is damaged, or not a module: build the image again"
        );
    }
}
