//! The last steps before a service's program: `/proc/self/exe launch ..` is a fresh process with
//! one thread, in which every preparation is ordinary code; then it becomes the program, under the
//! same process id.
//!
//! Standard input is a pipe to the worker. The pipe closes when the program runs; an error is
//! written to it before.

use super::service_processes::MARK;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::{Gid, Pid, Uid, dup2_stdin, setgid, setgroups, setsid, setuid};
use serde::{Deserialize, Serialize};
use std::ffi::{CString, OsString};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// First word of the command line.
pub const WORD: &str = "launch";
/// Search path of a service, which starts helpers such as nvidia-modprobe.
const PATH: &str = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";

/// Preparations for one service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    pub service: String,
    pub oom_score: i32,
    /// Numbers of the capabilities that stay.
    pub capabilities: Vec<u32>,
    /// User and group to drop to.
    pub account: Option<(u32, u32)>,
    /// cgroup to join.
    pub cgroup: Option<PathBuf>,
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
}

impl Launch {
    /// Command line of the process that prepares.
    pub fn words(&self) -> [OsString; 2] {
        // Structs of strings and numbers cannot fail; an empty word would be refused.
        let launch = serde_json::to_string(self).unwrap_or_default();
        [WORD.into(), launch.into()]
    }

    /// Reads a command line behind its first word.
    pub fn from_words(mut words: impl Iterator<Item = OsString>) -> Option<Self> {
        serde_json::from_str(words.next()?.to_str()?).ok()
    }
}

/// Prepares and becomes the program; returns an exit status where that failed.
pub fn main(words: impl Iterator<Item = OsString>) -> u8 {
    let Some(launch) = Launch::from_words(words) else {
        eprintln!("kata-gpu-init: {WORD} is for this init's own use");
        return 2;
    };
    // The copy closes with the exec.
    let Ok(report) = std::io::stdin().as_fd().try_clone_to_owned() else {
        return 126;
    };
    let error = prepare(&launch)
        .err()
        .unwrap_or_else(|| become_program(&launch));
    // The worker may be gone.
    let _unused = std::fs::File::from(report).write_all(error.as_bytes());
    127
}

fn prepare(launch: &Launch) -> Result<(), String> {
    let null = std::fs::File::open("/dev/null").map_err(|e| format!("open /dev/null: {e}"))?;
    dup2_stdin(&null).map_err(|e| format!("put /dev/null on descriptor 0: {e}"))?;
    // A session of its own: signals for the agent's console are not for services. A process that
    // was just started leads no group, so this does not fail.
    let _unused = setsid();
    // The worker stays off the lane's vCPU; its children need not.
    let mut all = CpuSet::new();
    for cpu in 0..CpuSet::count() {
        let _unused = all.set(cpu);
    }
    let _unused = sched_setaffinity(Pid::from_raw(0), &all);
    // Without cgroups or OOM scores the service runs all the same.
    crate::machine::sys::set_oom_score(&launch.oom_score.to_string());
    if let Some(cgroup) = &launch.cgroup {
        let _unused = std::fs::create_dir_all(cgroup)
            .and_then(|()| std::fs::write(cgroup.join("cgroup.procs"), "0"));
    }
    std::env::set_current_dir("/").map_err(|e| format!("change to /: {e}"))?;
    crate::machine::sys::keep_capabilities(&launch.capabilities)
        .map_err(|e| format!("drop capabilities: {e}"))?;
    if let Some((user, group)) = launch.account {
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
        let dropped = setgroups(&[group])
            .and_then(|()| setgid(group))
            .and_then(|()| setuid(user));
        dropped.map_err(|e| format!("drop to user {user}, group {group}: {e}"))?;
    }
    nix::sys::prctl::set_no_new_privs().map_err(|e| format!("forbid new privileges: {e}"))
}

fn become_program(launch: &Launch) -> String {
    let of = |text: &OsString| {
        CString::new(text.clone().into_vec())
            .map_err(|_| format!("{}: a NUL in its arguments", launch.program.display()))
    };
    let made = of(&launch.program.clone().into()).and_then(|program| {
        let arguments = launch
            .arguments
            .iter()
            .map(of)
            .collect::<Result<Vec<_>, _>>()?;
        let environment = [
            format!("{MARK}={}", launch.service),
            PATH.into(),
            "HOME=/".into(),
        ];
        let environment = environment
            .into_iter()
            .map(|entry| of(&entry.into()))
            .collect::<Result<Vec<_>, _>>()?;
        Ok((program, arguments, environment))
    });
    match made {
        Ok((program, arguments, environment)) => {
            let mut words = vec![program.as_c_str()];
            words.extend(arguments.iter().map(CString::as_c_str));
            let errno = crate::machine::sys::exec(&program, &words, &environment);
            format!("execute {}: {errno}", launch.program.display())
        }
        Err(error) => error,
    }
}

/// User and group of an account in the guest's /etc/passwd.
pub fn account(root: &Path, name: &str) -> Option<(u32, u32)> {
    account_in(
        &std::fs::read_to_string(root.join("etc/passwd")).ok()?,
        name,
    )
}

/// User and group of an account in the text of /etc/passwd.
pub fn account_in(passwd: &str, name: &str) -> Option<(u32, u32)> {
    let mut fields = passwd
        .lines()
        .map(|line| line.split(':'))
        .find(|fields| fields.clone().next() == Some(name))?
        .skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_survives_its_command_line() {
        let launch = Launch {
            service: "fabricmanager".into(),
            oom_score: -900,
            capabilities: vec![0, 21],
            account: Some((990, 991)),
            cgroup: Some("/sys/fs/cgroup/x".into()),
            program: "/usr/bin/nv-fabricmanager".into(),
            arguments: vec!["-c".into(), OsString::from_vec(b"a \xff".to_vec())],
        };
        let bare = Launch {
            account: None,
            cgroup: None,
            capabilities: vec![],
            arguments: vec![],
            ..launch.clone()
        };
        for launch in [launch, bare] {
            assert_eq!(
                Launch::from_words(launch.words().into_iter().skip(1)),
                Some(launch)
            );
        }
        assert_eq!(Launch::from_words(["x".into()].into_iter()), None);
    }
}
