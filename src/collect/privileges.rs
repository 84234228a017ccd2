//! Drops privileges that the collector does not need.
//!
//! Capabilities, the bounding set and no_new_privs belong to a thread and are inherited by threads
//! that it starts: all of this happens while there is one thread. Left over: the user of `--user`,
//! no supplementary groups, an empty bounding set, and CAP_DAC_OVERRIDE where another user, or a
//! root without capabilities, has to make sockets in Kata's directories (0700, root's), in the one
//! thread that makes them. Threads that read guests' data or write files have nothing at all
//! ([`drop_in_thread`]).

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{Gid, Group, Uid, User, fchown, geteuid, setgid, setgroups, setuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_keep_capabilities, set_no_new_privs,
};
use std::fs::File;
use std::os::unix::fs::MetadataExt;

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

/// Gives the directory of the boots to `to`. Files of other users in it keep their owner: writing
/// to them fails.
pub fn hand_over(dir: &File, to: RunAs) -> Result<()> {
    let meta = dir.metadata().context("look at --dir")?;
    if (meta.uid(), meta.gid()) != (to.uid.as_raw(), to.gid.as_raw()) {
        fchown(dir, Some(to.uid), Some(to.gid)).with_context(|| {
            format!("give --dir to user {}: run as root or omit --user", to.uid)
        })?;
    }
    Ok(())
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
    fn a_missing_database_is_empty_and_an_unreadable_one_an_error() {
        assert_eq!(nobody_where_missing::<u8>(Err(Errno::ENOENT)), Ok(None));
        assert_eq!(
            nobody_where_missing::<u8>(Err(Errno::EACCES)),
            Err(Errno::EACCES)
        );
        assert_eq!(nobody_where_missing(Ok(Some(7))), Ok(Some(7)));
    }
}
