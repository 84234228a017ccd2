//! Reasons for having no list of the driver's files, each in one sentence with the cure.

use std::fmt;
use std::path::PathBuf;

/// Reason why a driver root cannot be used.
#[derive(Debug)]
pub enum Error {
    /// A root does not exist.
    NoRoot { path: PathBuf, why: String },
    /// The version of the loaded module, or the requested one, is malformed.
    BadVersion { source: PathBuf, value: String },
    /// The loaded module's version cannot be read.
    UnreadableVersion { source: PathBuf, why: String },
    /// No part of the driver is there. `problems` lists paths that could not be examined.
    NoDriver {
        driver_root: PathBuf,
        version: Option<String>,
        problems: Vec<String>,
    },
    /// A compute library (`needed_by`) is there, but libcuda, which all compute goes through, is
    /// missing.
    NoLibcuda {
        directory: PathBuf,
        version: String,
        needed_by: String,
        problems: Vec<String>,
    },
    /// The libraries belong to another driver version.
    Mismatch {
        module: String,
        source: VersionSource,
        library: PathBuf,
        found: String,
    },
    /// Libraries of several versions, and no module to decide between them.
    Ambiguous { first: PathBuf, second: PathBuf },
    /// A directory with more libraries than any driver has.
    TooMany { directory: PathBuf, most: usize },
}

/// Source of a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionSource {
    /// The caller.
    Given,
    /// A file of the loaded module.
    Module(PathBuf),
}

impl fmt::Display for VersionSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given => f.write_str("as was asked for"),
            Self::Module(path) => write!(f, "from {}", path.display()),
        }
    }
}

fn also(f: &mut fmt::Formatter<'_>, problems: &[String]) -> fmt::Result {
    if problems.is_empty() {
        Ok(())
    } else {
        write!(f, " (not all could be read: {})", problems.join("; "))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("driver files: ")?;
        match self {
            Self::NoRoot { path, why } => {
                write!(
                    f,
                    "open the root {}: {why}; name the directory that the driver's user space was \
                        installed into",
                    path.display()
                )
            }
            Self::BadVersion { source, value } => write!(
                f,
                "{}: {value:?} is no version of the driver (one looks like 550.163.01); is \
                    another module loaded under its name?",
                source.display()
            ),
            Self::UnreadableVersion { source, why } => {
                write!(f, "read {}: {why}", source.display())
            }
            Self::NoDriver {
                driver_root,
                version,
                problems,
            } => {
                let version = version.as_deref().unwrap_or("<version>");
                write!(
                    f,
                    "no library directory below {} has libcuda.so.{version} or \
                        libnvidia-ml.so.{version}; install the driver's user space into \
                     the image, or give the root that it lies in",
                    driver_root.display()
                )?;
                also(f, problems)
            }
            Self::NoLibcuda {
                directory,
                version,
                needed_by,
                problems,
            } => {
                write!(
                    f,
                    "{} has {needed_by}, but libcuda.so.{version} is nowhere: no CUDA program \
                        could start; install it (Debian: libcuda1, \
                     Ubuntu: libnvidia-compute, RHEL: nvidia-driver-cuda-libs)",
                    directory.display()
                )?;
                also(f, problems)
            }
            Self::Mismatch {
                module,
                source,
                library,
                found,
            } => write!(
                f,
                "the driver is {module} ({source}), and its user space is {found} ({}): put the \
                    libraries of {module} into the image, or load \
                 the module of {found}",
                library.display()
            ),
            Self::Ambiguous { first, second } => write!(
                f,
                "two versions are installed, {} and {}, and no loaded module selects one: remove \
                    one, or name the version",
                first.display(),
                second.display()
            ),
            Self::TooMany { directory, most } => {
                write!(
                    f,
                    "{} has more than {most} libraries of the driver: that is no driver's \
                        directory",
                    directory.display()
                )
            }
        }
    }
}

impl std::error::Error for Error {}
