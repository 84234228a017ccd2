//! Reasons why a module is not loaded, in one sentence: the request, the module that failed, its
//! file, the errno with its text, and the cure if one is known.

use super::file::Format;
use nix::errno::Errno;
use std::fmt;
use std::path::PathBuf;

/// Reason why a module is not loaded. `asked` is the requested name, `module` the module that
/// failed (the requested one or a dependency), by the kernel's names.
#[derive(Debug)]
pub enum LoadError {
    /// An index cannot be read.
    NoIndex {
        asked: String,
        path: PathBuf,
        why: String,
    },
    /// No module has that name or alias.
    Unknown { asked: String, index: PathBuf },
    /// An alias leads to no module; usually because of `alias NAME off` in modprobe.d.
    Off { asked: String, target: String },
    /// All modules of the alias are blacklisted.
    Blacklisted { asked: String, modules: Vec<String> },
    /// A file that modules.dep names cannot be opened.
    NoFile {
        asked: String,
        module: String,
        path: PathBuf,
        errno: Errno,
    },
    /// A file exists, but its content cannot be read.
    Unreadable {
        asked: String,
        module: String,
        path: PathBuf,
        why: Unreadable,
    },
    /// The kernel refused.
    Refused {
        asked: String,
        module: String,
        path: PathBuf,
        errno: Errno,
        hint: Box<Hint>,
    },
}

/// Reason why a file's content cannot be read.
#[derive(Debug)]
pub enum Unreadable {
    Read(Errno),
    Packed { format: Format, why: String },
}

/// Facts that explain why the kernel refused.
#[derive(Debug, Default)]
pub struct Hint {
    /// The version magic of the file, for ENOEXEC and EINVAL.
    pub magic: Option<String>,
    /// `uname -r`.
    pub kernel: String,
    /// Whether /proc/sys/kernel/modules_disabled is 1, for EPERM; None if unreadable.
    pub disabled: Option<bool>,
}

/// `load module nvidia_uvm: its dependency nvidia: `, or the first half for the module itself.
fn head(f: &mut fmt::Formatter<'_>, asked: &str, module: &str) -> fmt::Result {
    write!(f, "load module {asked}: ")?;
    if asked == module {
        Ok(())
    } else {
        write!(f, "it needs {module}: ")
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoIndex { asked, path, why } => write!(
                f,
                "load module {asked}: read {}: {why}; the image has no modules for the running \
                    kernel: run depmod when it is built",
                path.display()
            ),
            Self::Unknown { asked, index } => write!(
                f,
                "load module {asked}: {} does not list it; put the driver's modules for this \
                    kernel into the image and run depmod",
                index.display()
            ),
            Self::Off { asked, target } => {
                write!(
                    f,
                    "load module {asked}: an alias makes it {target}, and there is no such \
                        module; take the alias out of modprobe.d, or run depmod"
                )
            }
            Self::Blacklisted { asked, modules } => write!(
                f,
                "load module {asked}: it stands for {}, blacklisted in modprobe.d or by \
                    modprobe.blacklist= on the kernel command line; take that out, or ask by the \
                    module's own name",
                modules.join(" and ")
            ),
            Self::NoFile {
                asked,
                module,
                path,
                errno,
            } => {
                head(f, asked, module)?;
                write!(f, "open {}: {errno}", path.display())?;
                if *errno == Errno::ENOENT {
                    write!(f, "; modules.dep is older than the modules: run depmod")
                } else {
                    Ok(())
                }
            }
            Self::Unreadable {
                asked,
                module,
                path,
                why,
            } => {
                head(f, asked, module)?;
                match why {
                    Unreadable::Read(errno) => write!(f, "read {}: {errno}", path.display()),
                    Unreadable::Packed { format, why } => {
                        write!(
                            f,
                            "decompress {}: {format}: {why}; the file is damaged, or no module: \
                                build the image again",
                            path.display()
                        )
                    }
                }
            }
            Self::Refused {
                asked,
                module,
                path,
                errno,
                hint,
            } => {
                head(f, asked, module)?;
                write!(f, "{}: {errno}", path.display())?;
                reason(f, *errno, hint)
            }
        }
    }
}

/// Meaning of an errno of the kernel's module loader (kernel/module/main.c), and its cure.
fn reason(f: &mut fmt::Formatter<'_>, errno: Errno, hint: &Hint) -> fmt::Result {
    match (errno, &hint.magic, hint.disabled) {
        (Errno::ENOEXEC | Errno::EINVAL, Some(magic), _)
            if magic.split(' ').next() != Some(hint.kernel.as_str()) =>
        {
            write!(
                f,
                " (built for another kernel: its vermagic is {magic:?}, uname -r is {:?}: build \
                    it for this one)",
                hint.kernel
            )
        }
        (Errno::ENOEXEC, Some(magic), _) => {
            write!(
                f,
                " (built for this kernel, {magic:?}: the file is damaged, or was built with other \
                    options; see the kernel's log)"
            )
        }
        (Errno::ENOEXEC, None, _) => {
            write!(f, " (no module: the file is damaged, or something else)")
        }
        (
            Errno::ENOKEY
            | Errno::EKEYREJECTED
            | Errno::EKEYEXPIRED
            | Errno::EBADMSG
            | Errno::ENODATA
            | Errno::ENOPKG,
            ..,
        ) => {
            write!(
                f,
                " (signature: it has none that this kernel trusts: sign it with the kernel's key, \
                    and do not strip or edit it after that)"
            )
        }
        (Errno::EPERM, _, Some(true)) => write!(
            f,
            " (kernel.modules_disabled is 1: modules can be loaded again after a reboot only)"
        ),
        (Errno::EPERM, ..) => {
            write!(
                f,
                " (forbidden: by module_blacklist= on the kernel command line, kernel lockdown, \
                    or a missing CAP_SYS_MODULE)"
            )
        }
        (Errno::ENOENT, ..) => write!(
            f,
            " (it needs a symbol that no loaded module has: the kernel's log names it)"
        ),
        (Errno::ENODEV, ..) => write!(f, " (it found no device it can drive)"),
        (Errno::EINVAL, ..) => write!(
            f,
            " (a parameter has a bad value, or the file is damaged; the kernel's log names it)"
        ),
        (Errno::EBUSY, ..) => write!(
            f,
            " (another load of it, or of what it needs, is under way and has not ended)"
        ),
        (Errno::ENOMEM, ..) => write!(f, " (give the guest more memory)"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(errno: Errno, magic: Option<&str>, disabled: Option<bool>) -> String {
        let hint = Box::new(Hint {
            magic: magic.map(Into::into),
            kernel: "6.18.5".into(),
            disabled,
        });
        LoadError::Refused {
            asked: "nvidia_uvm".into(),
            module: "nvidia".into(),
            path: "/m/nvidia.ko".into(),
            errno,
            hint,
        }
        .to_string()
    }

    #[test]
    fn errors_name_module_dependency_path_errno_and_cure() {
        assert_eq!(
            refused(Errno::ENOEXEC, Some("6.1.0 SMP mod_unload"), None),
            "load module nvidia_uvm: it needs nvidia: /m/nvidia.ko: ENOEXEC: Exec format error \
                (built for another kernel: its vermagic is \"6.1.0 SMP mod_unload\", uname -r is \
                \"6.18.5\": build it for this one)"
        );
        for (errno, magic, disabled, part) in [
            (
                Errno::ENOEXEC,
                Some("6.18.5 SMP"),
                None,
                "the file is damaged",
            ),
            (Errno::ENOEXEC, None, None, "no module: the file is damaged"),
            (
                Errno::EINVAL,
                Some("6.18.5 SMP"),
                None,
                "EINVAL: Invalid argument (a parameter has a bad value",
            ),
            (
                Errno::EINVAL,
                Some("6.18.4 SMP"),
                None,
                "built for another kernel",
            ),
            (
                Errno::ENOKEY,
                None,
                None,
                "ENOKEY: Required key not available (signature: ",
            ),
            (
                Errno::EKEYREJECTED,
                None,
                None,
                "sign it with the kernel's key",
            ),
            (
                Errno::EPERM,
                None,
                Some(true),
                "kernel.modules_disabled is 1",
            ),
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
        let error = LoadError::NoFile {
            asked: "m".into(),
            module: "m".into(),
            path: "/m.ko".into(),
            errno: Errno::ENOENT,
        };
        assert_eq!(
            error.to_string(),
            "load module m: open /m.ko: ENOENT: No such file or directory; modules.dep is older \
                than the modules: run depmod"
        );
        let why = Unreadable::Packed {
            format: Format::Xz,
            why: "unexpected end".into(),
        };
        let error = LoadError::Unreadable {
            asked: "m".into(),
            module: "d".into(),
            path: "/d.ko.xz".into(),
            why,
        };
        assert_eq!(
            error.to_string(),
            "load module m: it needs d: decompress /d.ko.xz: xz: unexpected end; the file is \
                damaged, or no module: build the image again"
        );
    }
}
