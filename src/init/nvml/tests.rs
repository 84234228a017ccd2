//! A failure means that an answer of the helper for NVML goes to another request, or that a helper
//! which crashes, hangs or talks nonsense is taken for one that answered.

use super::*;
use kata_gpu_test_support::{TempDir, temp_dir};
use std::os::unix::fs::PermissionsExt;

fn in_runtime<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(work)
}

/// A helper that is this shell script.
fn script(folder: &TempDir, text: &str) -> PathBuf {
    let path = folder.path().join("helper");
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn asked(text: &str, requests: Vec<Request>) -> Vec<(Request, Result<Answer, Failure>)> {
    let folder = temp_dir();
    in_runtime(ask(script(&folder, text), requests))
}

fn failure_of(text: &str) -> String {
    let mut asked = asked(text, vec![Request::Facts(vec![]), Request::Ready(true)]);
    assert_eq!(asked.len(), 1, "a failure ends the row");
    asked.remove(0).1.unwrap_err().to_string()
}

#[test]
fn each_request_gets_its_own_answer() {
    let asked = asked(
        r#"while read -r line; do case $line in facts|state) echo '{"facts":{"devices":[]}}';; *) echo '"done"';; esac; done"#,
        vec![
            Request::Facts(vec![]),
            Request::Ready(true),
            Request::State(vec![]),
        ],
    );
    let answers: Vec<Answer> = asked
        .into_iter()
        .map(|(_, answer)| answer.unwrap())
        .collect();
    assert_eq!(
        answers,
        [
            Answer::Facts(Box::default()),
            Answer::Done,
            Answer::Facts(Box::default())
        ]
    );
}

#[test]
fn a_refusal_does_not_keep_the_next_request_from_its_answer() {
    let asked = asked(
        r#"read -r line; echo '{"error":"out of range"}'; read -r line; echo '"done"'"#,
        vec![Request::Facts(vec![]), Request::Ready(true)],
    );
    let refused = Answer::Error("out of range".into());
    assert_eq!(asked[0].1.as_ref().unwrap(), &refused);
    assert_eq!(asked[1].1.as_ref().unwrap(), &Answer::Done);
}

#[test]
fn a_helper_that_crashes_is_a_failure_with_its_last_output() {
    assert_eq!(
        failure_of("echo 'libnvidia-ml.so.1: no such file' >&2; exit 3"),
        "kata-gpu-nvml has ended: exit status: 3: libnvidia-ml.so.1: no such file"
    );
    assert!(failure_of("kill -SEGV $$").contains("signal: 11"));
}

#[test]
fn an_answer_that_is_none_is_a_failure() {
    assert!(failure_of("read -r line; echo hello; sleep 1").contains("not readable"));
    assert!(
        failure_of("read -r line; head -c 2000000 /dev/zero | tr '\\0' x").contains("longer than")
    );
    let missing = in_runtime(ask(
        "/nonexistent/kata-gpu-nvml".into(),
        vec![Request::Facts(vec![])],
    ));
    assert!(
        missing[0]
            .1
            .as_ref()
            .unwrap_err()
            .to_string()
            .contains("start /nonexistent/kata-gpu-nvml")
    );
}

#[test]
fn a_helper_that_hangs_is_reported_and_left_alone() {
    let folder = temp_dir();
    let path = script(&folder, "echo $$ > $0.pid; read -r line; exec sleep 600");
    let asked = in_runtime(ask_within(
        Duration::from_millis(50),
        path.clone(),
        vec![Request::Facts(vec![])],
    ));
    assert!(matches!(
        asked[..],
        [(Request::Facts(_), Err(Failure::Late(_)))]
    ));
    let pid_file = PathBuf::from(format!("{}.pid", path.display()));
    let pid = loop {
        match std::fs::read_to_string(&pid_file)
            .ok()
            .and_then(|text| text.trim().parse::<i32>().ok())
        {
            Some(pid) => break nix::unistd::Pid::from_raw(pid),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    assert_eq!(
        nix::sys::signal::kill(pid, None),
        Ok(()),
        "the helper was killed"
    );
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
}
