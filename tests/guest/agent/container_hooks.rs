//! The createContainer hooks of a container, run as kata-agent runs them: one after another, in the
//! container's mount namespace, before its root is the process's; with the environment of the spec
//! alone and the OCI state on standard input. A hook that fails is reported and passed over.

use oci_spec::runtime::Hook;
use serde_json::json;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Unless the hook has a timeout of its own.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How one hook went.
pub struct Run {
    /// First two arguments, which are its name and its command: `nvidia-cdi-hook prepare`.
    pub name: String,
    pub took: Duration,
    /// Output of the hook, or the reason why it failed.
    pub result: Result<String, String>,
}

/// The state of a container whose root is made, for its hooks. `pid` is that of the container's
/// first process as it sees itself.
pub fn state(id: &str, bundle: &Path, pid: u32) -> String {
    json!({ "ociVersion": "1.0.2", "id": id, "status": "created", "pid": pid, "bundle": bundle })
        .to_string()
}

/// Runs hooks.
pub fn run(hooks: &[Hook], state: &str) -> Vec<Run> {
    hooks
        .iter()
        .map(|hook| {
            let words = hook
                .args()
                .iter()
                .flatten()
                .take(2)
                .cloned()
                .collect::<Vec<_>>()
                .join(" ");
            let start = Instant::now();
            let result = run_one(hook, state);
            if let Err(error) = &result {
                // The one place where the real agent's word of it can be seen, too.
                crate::hardware::kmsg(&format!(
                    "kata-agent: hook failed: {}: {error}",
                    hook.path().display()
                ));
            }
            Run {
                name: words,
                took: start.elapsed(),
                result,
            }
        })
        .collect()
}

fn run_one(hook: &Hook, state: &str) -> Result<String, String> {
    if !hook.path().is_absolute() || !hook.path().exists() {
        return Err("its path is not absolute, or not there".into());
    }
    let mut command = Command::new(hook.path());
    if let Some((name, words)) = hook.args().as_deref().and_then(<[String]>::split_first) {
        command.arg0(name).args(words);
    }
    let variables = hook
        .env()
        .iter()
        .flatten()
        .filter_map(|v| v.split_once('='))
        .filter(|(name, _)| !name.is_empty());
    command
        .env_clear()
        .envs(variables)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("start: {e}"))?;
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).map_err(|e| e.to_string())?);
    if let Some(mut input) = child.stdin.take() {
        let _unused = input.write_all(state.as_bytes()); // a hook need not read it
    }
    let timeout = hook
        .timeout()
        .and_then(|s| u64::try_from(s).ok())
        .filter(|s| *s > 0)
        .map_or(TIMEOUT, Duration::from_secs);
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    match ended.recv_timeout(timeout) {
        Ok(Ok(output)) => {
            let text = [output.stdout, output.stderr]
                .map(|b| String::from_utf8_lossy(&b).trim().to_string())
                .concat();
            if output.status.success() {
                Ok(text)
            } else {
                Err(format!("{}: {text}", output.status))
            }
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => {
            let _unused = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL); // the hook may have ended meanwhile
            Err(format!("no end of it within {} s", timeout.as_secs()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook(text: serde_json::Value) -> Hook {
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn a_hook_gets_the_state_and_no_environment_but_its_own() {
        let script = "cat; echo; echo \"$0\"; env | grep -v -e ^PWD= -e ^SHLVL= -e ^_=";
        let runs = run(
            &[hook(
                json!({ "path": "/bin/sh", "args": ["sh", "-c", script, "name"],
                    "env": ["A=B=C"] }),
            )],
            &state("c", Path::new("/b"), 1),
        );
        let text = runs[0].result.as_ref().unwrap();
        let (state, rest) = text.split_once('\n').unwrap();
        let state: serde_json::Value = serde_json::from_str(state).unwrap();
        assert_eq!(
            (state["bundle"].as_str(), state["pid"].as_u64()),
            (Some("/b"), Some(1))
        );
        assert_eq!(rest, "name\nA=B=C");
    }

    #[test]
    fn a_failed_hanging_or_missing_hook_does_not_stop_the_next() {
        let runs = run(
            &[
                hook(json!({ "path": "/bin/sh", "args": ["sh", "-c", "echo why >&2; exit 3"] })),
                hook(json!({ "path": "/nonexistent" })),
                hook(json!({ "path": "/bin/sleep", "args": ["sleep", "100"], "timeout": 1 })),
                hook(json!({ "path": "/bin/sh", "args": ["sh", "-c", "echo done"] })),
            ],
            "{}",
        );
        let said: Vec<_> = runs
            .iter()
            .map(|r| r.result.clone().unwrap_or_else(|e| e))
            .collect();
        assert_eq!(
            said,
            [
                "exit status: 3: why",
                "its path is not absolute, or not there",
                "no end of it within 1 s",
                "done"
            ]
        );
        assert!(runs[0].result.is_err() && runs[3].result.is_ok());
    }
}
