//! Processes of this machine by their command lines, for facts that no file holds.
//!
//! Any process can have any command line. Only those of one user outside of containers count: a
//! set-user-ID program may be started by any user, and root in a container is a tenant. Command
//! lines of other users are not even read: their owner can make a reader wait, or read for long.

use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::Mode;
use nix::unistd::Pid;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Limit of a command line, or status: a command line of QEMU with 16 GPUs has 10 kB.
const MAX_TEXT: u64 = 128 * 1024;

/// Command lines of a user's processes in `proc`: NUL-terminated words.
pub fn of_user(proc: &Path, uid: u32) -> Vec<(Pid, Vec<u8>)> {
    let process = |entry: fs::DirEntry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        // The held descriptor stays with this process, even if its number is reused.
        let dir = open(
            &entry.path(),
            OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
            Mode::empty(),
        )
        .ok()?;
        let is_users = is_users(&String::from_utf8_lossy(&read(&dir, "status")?), uid);
        Some((
            Pid::from_raw(pid.try_into().ok()?),
            is_users.then(|| read(&dir, "cmdline"))??,
        ))
    };
    fs::read_dir(proc)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(process)
        .collect()
}

/// Whether a process is this user's alone, and in no container.
pub fn is_of_user(proc: &Path, pid: u32, uid: u32) -> bool {
    let status = fs::read(proc.join(pid.to_string()).join("status"));
    status.is_ok_and(|status| is_users(&String::from_utf8_lossy(&status), uid))
}

/// Reads a file of a process; None if the process has ended meanwhile.
fn read(dir: &OwnedFd, name: &str) -> Option<Vec<u8>> {
    let file = openat(dir, name, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty()).ok()?;
    let mut text = Vec::new();
    File::from(file)
        .take(MAX_TEXT)
        .read_to_end(&mut text)
        .ok()?;
    Some(text)
}

/// Whether a process with this /proc status has real, effective, saved and file system ID of the
/// user, and no number in a PID namespace below the reader's: proc_pid_status(5).
fn is_users(status: &str, uid: u32) -> bool {
    let numbers = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map(|line| {
            line.split_whitespace()
                .map(|word| word.parse().ok())
                .collect::<Vec<Option<u32>>>()
        })
    };
    // A kernel without PID namespaces has no such line.
    let is_outside = numbers("NSpid:").is_none_or(|pids| pids.len() == 1);
    is_outside && numbers("Uid:").is_some_and(|uids| uids == [Some(uid); 4])
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use nix::unistd::geteuid;
    use std::process::{Command, Stdio};

    #[test]
    fn only_what_is_a_users_alone_and_outside_of_containers_is_his() {
        let status =
            |uids: &str, pids: &str| format!("Name:\tUid:\nUid:\t{uids}\nNSpid:\t{pids}\n");
        assert!(is_users(&status("0\t0\t0\t0", "41"), 0));
        assert!(
            is_users("Uid:\t7\t7\t7\t7\n", 7),
            "a kernel without PID namespaces"
        );
        // `su`, started by user 1000; root's container; another user.
        for (uids, pids) in [
            ("1000\t0\t0\t0", "41"),
            ("0\t0\t0\t0", "41\t1"),
            ("1000\t1000\t1000\t1000", "41"),
            ("", "41"),
        ] {
            assert!(!is_users(&status(uids, pids), 0), "{uids} {pids}");
        }
        assert!(!is_users("", 0));
    }

    #[test]
    fn a_command_line_is_read_of_a_process_and_of_nothing_else() {
        let proc = temp_dir();
        for (name, text) in [("41", "a\0b\0"), ("self", "c\0"), ("-1", "d\0")] {
            fs::create_dir(proc.path().join(name)).unwrap();
            fs::write(proc.path().join(name).join("status"), "Uid:\t7\t7\t7\t7\n").unwrap();
            fs::write(proc.path().join(name).join("cmdline"), text).unwrap();
        }
        fs::create_dir(proc.path().join("42")).unwrap();
        std::os::unix::fs::symlink("41", proc.path().join("43")).unwrap();
        assert_eq!(
            of_user(proc.path(), 7),
            [(Pid::from_raw(41), b"a\0b\0".to_vec())]
        );
        assert_eq!(of_user(proc.path(), 8), []);
        assert_eq!(of_user(&proc.path().join("none"), 7), []);
    }

    #[test]
    fn a_process_is_found_unless_it_is_in_a_container() {
        let mark = format!("mark-{}", std::process::id());
        let found = || {
            let all = of_user(Path::new("/proc"), geteuid().as_raw());
            all.into_iter()
                .filter(|(_, words)| words.ends_with(format!("\0{mark}\0").as_bytes()))
                .count()
        };
        // The child answers once it runs, and ends with its input.
        let start = |words: &[&str]| {
            let mut command = Command::new(words[0]);
            command
                .args(&words[1..])
                .args(["sh", "-c", "echo && read line; :", &mark])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            let mut child = command.stderr(Stdio::null()).spawn().unwrap();
            let runs = child.stdout.as_mut().unwrap().read(&mut [0]).unwrap() == 1;
            (child, runs)
        };
        let (mut outside, runs) = start(&["env"]);
        assert!(runs);
        assert_eq!(found(), 1);
        let (mut inside, runs) =
            start(&["unshare", "--user", "--map-root-user", "--pid", "--fork"]);
        if runs {
            // `unshare` itself, which waits outside, has the same words, and counts.
            assert_eq!(found(), 2);
        } else {
            eprintln!("not tried here: this machine allows no user namespaces");
        }
        for child in [&mut outside, &mut inside] {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
    }
}
