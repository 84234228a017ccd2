//! State from the runtime on a hook's standard input: it names the bundle, whose `config.json`
//! names the container's root. Everything is bounded, in size and in time.

use super::container_root::{cannot, read_bounded};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Deserialize;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Limit of a state: the agent's has half a kilobyte, annotations may add some.
pub const MAX_STATE: u64 = 64 * 1024;
/// Limit of a `config.json`: that of a pod with hundreds of mounts has some 100 kB.
pub const MAX_CONFIG: u64 = 4 * 1024 * 1024;
/// Time limit for the runtime to write the state; the agent gives a hook 10 s in all.
const STATE_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Deserialize)]
struct State {
    bundle: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Config {
    root: Option<Root>,
}

#[derive(Deserialize)]
struct Root {
    path: Option<PathBuf>,
}

/// Bundle directory in the text of a state.
pub fn bundle(state: &[u8]) -> Result<PathBuf, String> {
    let state: State =
        serde_json::from_slice(state).map_err(|e| format!("it is no OCI state: {e}"))?;
    match state.bundle {
        Some(bundle) if bundle.is_absolute() => Ok(bundle),
        Some(bundle) => Err(format!("its \"bundle\", {bundle:?}, is not absolute")),
        None => Err("it has no \"bundle\"".into()),
    }
}

/// Path of the container's root in the text of a `config.json`.
pub fn root_path(config: &[u8]) -> Result<PathBuf, String> {
    let config: Config =
        serde_json::from_slice(config).map_err(|e| format!("it is no OCI configuration: {e}"))?;
    match config.root.and_then(|r| r.path) {
        Some(path) if path.is_absolute() => Ok(path),
        Some(path) => Err(format!(
            "its \"root.path\", {path:?}, is not absolute; kata-agent writes the whole path"
        )),
        None => Err("it has no \"root.path\"".into()),
    }
}

/// Reads a state up to its end; fails at the deadline.
pub fn read_state(input: impl Read + AsFd) -> io::Result<Vec<u8>> {
    read_state_within(input, STATE_DEADLINE)
}

fn read_state_within(mut input: impl Read + AsFd, deadline: Duration) -> io::Result<Vec<u8>> {
    let start = Instant::now();
    let (mut state, mut part) = (Vec::new(), [0; 4096]);
    let failed =
        |why: String| io::Error::other(format!("read the OCI state from standard input: {why}"));
    loop {
        let left = deadline.saturating_sub(start.elapsed());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        match poll(
            &mut [PollFd::new(input.as_fd(), PollFlags::POLLIN)],
            timeout,
        ) {
            Ok(0) => {
                return Err(failed(format!(
                    "no end of it within {} ms",
                    deadline.as_millis()
                )));
            }
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => continue,
            Err(e) => return Err(failed(e.to_string())),
        }
        let length = input.read(&mut part).map_err(|e| failed(e.to_string()))?;
        if length == 0 {
            return Ok(state);
        }
        state.extend(part.iter().take(length));
        if state.len() as u64 > MAX_STATE {
            return Err(failed(format!("it has more than {MAX_STATE} bytes")));
        }
    }
}

/// Reads the path of the root of the container that a state describes.
pub fn root_of(state: &[u8]) -> io::Result<PathBuf> {
    let bundle = bundle(state).map_err(|e| io::Error::other(format!("read the OCI state: {e}")))?;
    let path = bundle.join("config.json");
    let config = read_regular(&path, MAX_CONFIG)?;
    root_path(&config).map_err(|e| cannot("read", &path, e))
}

/// Reads a file of the guest; refuses links and files that block.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let flags = (OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW | OFlag::O_NOCTTY).bits();
    let read = |file: File| match file.metadata()? {
        meta if meta.is_file() => read_bounded(meta.len(), file, limit),
        _ => Err(io::Error::other("it is not a regular file")),
    };
    OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .and_then(read)
        .map_err(|e| cannot("read", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn the_bundle_and_the_root_are_found_among_everything_else() {
        let state = br#"{"ociVersion":"1.0.2","id":"c","status":"created","pid":7,
            "bundle":"/run/kata-containers/c","annotations":{"a":"b"}}"#;
        assert_eq!(bundle(state), Ok("/run/kata-containers/c".into()));
        let config = br#"{"ociVersion":"1.0.2",
            "root":{"path":"/run/kata-containers/c/rootfs","readonly":true},
            "process":{"args":["sh"]}}"#;
        assert_eq!(
            root_path(config),
            Ok("/run/kata-containers/c/rootfs".into())
        );
    }

    #[test]
    fn missing_relative_and_non_json_inputs_are_named() {
        let cases: [(&[u8], &str); 5] = [
            (b"{}", "no \"bundle\""),
            (br#"{"bundle":"rootfs"}"#, "not absolute"),
            (br#"{"bundle":7}"#, "no OCI state"),
            (b"garbage", "no OCI state"),
            (b"", "no OCI state"),
        ];
        for (state, says) in cases {
            assert!(
                bundle(state).is_err_and(|e| e.contains(says)),
                "{:?}: {:?}",
                String::from_utf8_lossy(state),
                bundle(state)
            );
        }
        let cases: [(&[u8], &str); 4] = [
            (b"{}", "no \"root.path\""),
            (br#"{"root":{}}"#, "no \"root.path\""),
            (br#"{"root":{"path":"rootfs"}}"#, "not absolute"),
            (b"[1", "no OCI configuration"),
        ];
        for (config, says) in cases {
            assert!(
                root_path(config).is_err_and(|e| e.contains(says)),
                "{:?}",
                root_path(config)
            );
        }
        let deep = [b"{\"x\":".repeat(100_000), b"1".to_vec()].concat();
        assert!(root_path(&deep).is_err_and(|e| e.contains("no OCI configuration")));
    }

    #[test]
    fn a_state_without_an_end_and_one_that_is_too_long_are_refused() {
        let (read_end, write_end) = nix::unistd::pipe().unwrap();
        let deadline = Duration::from_millis(50);
        assert!(
            read_state_within(File::from(read_end), deadline)
                .unwrap_err()
                .to_string()
                .contains("no end of it within 50 ms")
        );
        let folder = temp_dir();
        let file = &folder.path().join("state");
        std::fs::write(file, vec![b' '; MAX_STATE as usize + 1]).unwrap();
        assert!(
            read_state(File::open(file).unwrap())
                .unwrap_err()
                .to_string()
                .contains("more than 65536 bytes")
        );
        std::fs::write(file, vec![b' '; MAX_STATE as usize]).unwrap();
        assert_eq!(
            read_state(File::open(file).unwrap()).unwrap().len() as u64,
            MAX_STATE
        );
        drop(write_end);
    }
}
