//! Files at paths of the guest: looked up below a root that stands for the guest's, or assumed to
//! exist where no root was named.

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::{Mode, SFlag, fstat, major, minor};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Result of a look at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Not looked up: assumed to exist.
    Assumed,
    Node {
        /// `b` or `c`.
        kind: &'static str,
        major: i64,
        minor: i64,
    },
    Fifo,
    File {
        executable: bool,
    },
    Other,
    Missing,
}

/// Place where paths of a spec are looked up.
#[derive(Debug)]
pub enum Look {
    /// No lookup: every path is assumed to exist.
    Nowhere,
    Below {
        root: OwnedFd,
        shown: PathBuf,
    },
}

impl Look {
    /// Looks up paths below `root`, from which no link leads out.
    pub fn below(root: &Path) -> Result<Look> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let fd = open(root, flags, Mode::empty())
            .with_context(|| format!("open root directory {}", root.display()))?;
        Ok(Look::Below {
            root: fd,
            shown: root.to_path_buf(),
        })
    }

    /// Follows links, as a stat would with this root; opens nothing. A relative path is taken from
    /// the root, where the agent works.
    pub fn at(&self, path: &str) -> Result<Found> {
        let Look::Below { root, shown } = self else {
            return Ok(Found::Assumed);
        };
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        let fd = match openat2(root, path, how) {
            Ok(fd) => fd,
            // An impossible path is missing.
            Err(
                Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ENAMETOOLONG | Errno::EINVAL,
            ) => return Ok(Found::Missing),
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("look at {path:?} below {}", shown.display()));
            }
        };
        let stat =
            fstat(&fd).with_context(|| format!("stat {path:?} below {}", shown.display()))?;
        let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let node = |kind| Found::Node {
            kind,
            major: number(major(stat.st_rdev)),
            minor: number(minor(stat.st_rdev)),
        };
        Ok(
            match SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits()) {
                SFlag::S_IFCHR => node("c"),
                SFlag::S_IFBLK => node("b"),
                SFlag::S_IFIFO => Found::Fifo,
                SFlag::S_IFREG => Found::File {
                    executable: stat.st_mode & 0o111 != 0,
                },
                _ => Found::Other,
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn everything_below_the_root_is_what_it_is() {
        let dir = temp_dir();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "").unwrap();
        std::fs::write(at("program"), "").unwrap();
        std::fs::set_permissions(at("program"), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::create_dir(at("dir")).unwrap();
        nix::unistd::mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
        symlink("/program", at("link")).unwrap();
        let look = Look::below(dir.path()).unwrap();
        assert_eq!(look.at("/file").unwrap(), Found::File { executable: false });
        assert_eq!(look.at("/link").unwrap(), Found::File { executable: true });
        assert_eq!(look.at("/dir").unwrap(), Found::Other);
        assert_eq!(look.at("/fifo").unwrap(), Found::Fifo);
        for missing in ["/none", "/file/x", "", &"/x".repeat(5000)] {
            assert_eq!(look.at(missing).unwrap(), Found::Missing, "{missing:.20}");
        }
        assert_eq!(
            Look::below(Path::new("/"))
                .unwrap()
                .at("/dev/null")
                .unwrap(),
            Found::Node {
                kind: "c",
                major: 1,
                minor: 3
            }
        );
        assert_eq!(Look::Nowhere.at("/none").unwrap(), Found::Assumed);
    }

    #[test]
    fn no_link_leads_out_of_the_root() {
        let dir = temp_dir();
        symlink("/../../../../../../../etc/passwd", dir.path().join("up")).unwrap();
        symlink("/proc/self/root/etc/passwd", dir.path().join("magic")).unwrap();
        symlink("loop", dir.path().join("loop")).unwrap();
        let look = Look::below(dir.path()).unwrap();
        for path in [
            "up",
            "magic",
            "loop",
            "../../../etc/passwd",
            "/../etc/passwd",
        ] {
            assert_eq!(look.at(path).unwrap(), Found::Missing, "{path}");
        }
        assert!(
            Path::new("/etc/passwd").exists(),
            "the control: outside it is there"
        );
    }
}
