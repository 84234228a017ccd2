//! Drops privileges that the collector does not need.
//!
//! Capabilities, the bounding set and no_new_privs belong to a thread and are inherited by threads
//! that it starts: all of this happens while there is one thread. Left over: the user of `--user`,
//! no supplementary groups, an empty bounding set, and CAP_DAC_OVERRIDE where another user, or a
//! root without capabilities, has to make sockets in Kata's directories (0700, root's), in the one
//! thread that makes them. Threads that read guests' data or write files have nothing at all
//! ([`drop_in_thread`]).

use super::host_clock;
use anyhow::{Context, Result};
use kata_gpu_report::data::{boot_file, trace_file};
use kata_gpu_wire::record::is_boot_id;
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Group, Uid, User, fchown, geteuid, setgid, setgroups, setuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_keep_capabilities, set_no_new_privs,
};
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Open files that belong to no guest.
const OWN_FILES: u64 = 64;
/// Files per guest: its socket's listener, its connection, its boot's file.
const FILES_PER_GUEST: u64 = 3;

/// User and group to run as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunAs {
    pub uid: Uid,
    pub gid: Gid,
}

impl RunAs {
    /// Parses `NAME`, `UID`, or either with `:GROUP`.
    pub fn parse(text: &str) -> Result<Self> {
        let (user, group) = match text.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (text, None),
        };
        let missing = |what: &str| {
            format!("--user {text}: there is no {what}: name one that exists, or give a number")
        };
        let number = user.parse().ok().map(Uid::from_raw);
        let known = match number {
            Some(uid) => User::from_uid(uid),
            None => User::from_name(user),
        };
        let known = nobody_where_missing(known).with_context(|| format!("look up user {user}"))?;
        let uid = known.as_ref().map(|known| known.uid).or(number);
        let uid = uid.with_context(|| missing(&format!("user {user}")))?;
        let gid = match group {
            None => known.map_or(Gid::from_raw(uid.as_raw()), |known| known.gid),
            Some(group) => match group.parse() {
                Ok(gid) => Gid::from_raw(gid),
                Err(_) => {
                    nobody_where_missing(Group::from_name(group))
                        .with_context(|| format!("look up group {group}"))?
                        .with_context(|| missing(&format!("group {group}")))?
                        .gid
                }
            },
        };
        Ok(Self { uid, gid })
    }
}

/// Treats a missing user database, as in an image of this program alone, as empty: for glibc that
/// is an answer, for musl an error.
fn nobody_where_missing<T>(answer: nix::Result<Option<T>>) -> nix::Result<Option<T>> {
    match answer {
        Err(Errno::ENOENT) => Ok(None),
        answer => answer,
    }
}

/// Gives the directory of the boots to `to`, and the files in it that are a collector's: they are
/// root's or the directory's owner's, whichever a former collector ran as. A file with another name
/// elsewhere, or a link, is somebody else's. Returns notes on files that stay as they are.
pub fn hand_over(dir: &File, path: &Path, to: RunAs) -> Result<Vec<String>> {
    let owned = |meta: &Metadata| (meta.uid(), meta.gid()) == (to.uid.as_raw(), to.gid.as_raw());
    let give = |file: &File| fchown(file, Some(to.uid), Some(to.gid));
    let mut notes = Vec::new();
    let former = dir.metadata().context("look at --dir")?;
    if !owned(&former) {
        give(dir).with_context(|| {
            format!("give --dir to user {}: run as root or omit --user", to.uid)
        })?;
    }
    let mut names =
        Dir::from_fd(dir.try_clone().context("dup --dir")?.into()).context("read --dir")?;
    for entry in names.iter() {
        let entry = entry.context("read --dir")?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if !is_collectors(name) {
            continue;
        }
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = match openat(dir, name, flags, Mode::empty()) {
            // A link, a socket, or gone meanwhile.
            Err(Errno::ELOOP | Errno::ENXIO | Errno::ENOENT) => continue,
            file => file.map(File::from).map_err(anyhow::Error::from),
        };
        let given = file.and_then(|file| {
            let meta = file.metadata()?;
            let is_formers = [0, former.uid()].contains(&meta.uid());
            if meta.is_file() && meta.nlink() == 1 && is_formers && !owned(&meta) {
                give(&file)?;
            }
            Ok(())
        });
        // Its records are lost until then, and those of no other boot.
        if let Err(error) = given {
            let (name, path) = (Path::new(name).display(), path.display());
            let (uid, gid) = (to.uid, to.gid);
            notes.push(format!(
                "give {name} to user {uid}: {error:#}: as root, run chown -hR {uid}:{gid} {path}"
            ));
        }
    }
    Ok(notes)
}

/// Whether a file of this name in the directory of the boots is one that a collector, or the
/// recorder for it, makes.
fn is_collectors(name: &OsStr) -> bool {
    let of_boot = |name: &str| {
        let (stem, extension) = name.split_once('.')?;
        let is_ours = [boot_file::EXTENSION, trace_file::EXTENSION].contains(&extension);
        (is_ours && is_boot_id(stem)).then_some(())
    };
    name == host_clock::FILE || name.to_str().and_then(of_boot).is_some()
}

/// Drops all privileges but, with `make_sockets`, CAP_DAC_OVERRIDE for sockets in other users'
/// directories. Requires a single thread.
pub fn drop_all_but(run_as: Option<RunAs>, make_sockets: bool) -> Result<()> {
    let before = capabilities(None)
        .context("read the capabilities")?
        .permitted;
    let kept = if make_sockets {
        before & CapabilitySet::DAC_OVERRIDE
    } else {
        CapabilitySet::empty()
    };
    // Needs CAP_SETPCAP; without it the bounding set cannot be used either, because no_new_privs
    // follows.
    if before.contains(CapabilitySet::SETPCAP) {
        for bit in 0..u64::BITS {
            // A capability that this kernel does not know cannot be in its set.
            let _unknown =
                remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << bit));
        }
    }
    if let Some(to) = run_as
        && (to.uid != geteuid() || before.contains(CapabilitySet::SETGID))
    {
        set_keep_capabilities(true).context("keep capabilities")?;
        let cure = || format!("become user {}: run as root, or omit --user", to.uid);
        setgroups(&[]).with_context(cure)?;
        setgid(to.gid).with_context(cure)?;
        setuid(to.uid).with_context(cure)?;
        set_keep_capabilities(false).context("keep no more capabilities")?;
    }
    clear_ambient_capability_set().context("clear ambient capabilities")?;
    set(kept)?;
    set_no_new_privs(true).context("set no_new_privs")
}

fn set(kept: CapabilitySet) -> Result<()> {
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).context("drop capabilities")
}

/// Drops the capabilities of a thread that needs none, at its begin.
pub fn drop_in_thread() {
    if let Err(e) = set(CapabilitySet::empty()) {
        eprintln!("kata-gpu-boot: {e:#}");
    }
}

/// Allows as many open files as possible. Returns the number of guests that they suffice for.
pub fn raise_file_limit() -> Result<u64> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("read RLIMIT_NOFILE")?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("raise RLIMIT_NOFILE")?;
    Ok((hard.saturating_sub(OWN_FILES) / FILES_PER_GUEST).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn users_are_taken_by_name_and_number() {
        let root = RunAs {
            uid: Uid::from_raw(0),
            gid: Gid::from_raw(0),
        };
        assert_eq!(
            [
                RunAs::parse("root").unwrap(),
                RunAs::parse("0").unwrap(),
                RunAs::parse("root:root").unwrap()
            ],
            [root; 3]
        );
        let numbers = RunAs {
            uid: Uid::from_raw(4_000_123),
            gid: Gid::from_raw(7),
        };
        assert_eq!(RunAs::parse("4000123:7").unwrap(), numbers);
        assert_eq!(RunAs::parse("4000123").unwrap().gid.as_raw(), 4_000_123);
        assert!(
            RunAs::parse("no-such-user-here")
                .unwrap_err()
                .to_string()
                .contains("name one that exists")
        );
        assert!(
            RunAs::parse("root:no-such-group-here")
                .unwrap_err()
                .to_string()
                .contains("no group")
        );
    }

    #[test]
    fn boots_of_a_collector_that_ran_as_root_are_handed_over_and_nothing_else() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root can give files away");
            return;
        }
        let dir = temp_dir();
        let at = |name: &str| dir.path().join(name);
        let boot = |n: u8| format!("0f7a1f8e-0000-4000-8000-00000000000{n}.ndjson");
        let ours = [&boot(1), ".clock"];
        let console = boot(1).replace("ndjson", "console");
        let others = [&boot(2), &console, "notes.txt", "elsewhere"];
        let made = ours
            .into_iter()
            .chain([&*console, "notes.txt", "elsewhere"]);
        made.for_each(|name| std::fs::write(at(name), "").unwrap());
        std::fs::hard_link(at("elsewhere"), at(&boot(2))).unwrap();
        std::os::unix::fs::symlink(at("notes.txt"), at(&boot(3))).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at(&boot(4))).unwrap();
        // A boot that belongs to neither root nor the directory's owner.
        std::fs::write(at(&boot(5)), "").unwrap();
        std::os::unix::fs::chown(at(&boot(5)), Some(77), Some(77)).unwrap();
        let to = RunAs {
            uid: Uid::from_raw(4242),
            gid: Gid::from_raw(4243),
        };
        for _ in 0..2 {
            let notes = hand_over(&File::open(dir.path()).unwrap(), dir.path(), to);
            assert_eq!(notes.unwrap(), [""; 0]);
        }
        let owner = |name: &str| std::fs::metadata(at(name)).map(|m| (m.uid(), m.gid()));
        for name in ["."].into_iter().chain(ours) {
            assert_eq!(owner(name).unwrap(), (4242, 4243), "{name}");
        }
        for name in others {
            assert_eq!(owner(name).unwrap(), (0, 0), "{name}");
        }
        assert_eq!(owner(&boot(5)).unwrap(), (77, 77));
    }

    #[test]
    fn a_missing_database_is_empty_and_an_unreadable_one_an_error() {
        assert_eq!(nobody_where_missing::<u8>(Err(Errno::ENOENT)), Ok(None));
        assert_eq!(
            nobody_where_missing::<u8>(Err(Errno::EACCES)),
            Err(Errno::EACCES)
        );
        assert_eq!(nobody_where_missing(Ok(Some(7))), Ok(Some(7)));
    }
}
