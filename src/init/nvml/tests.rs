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
    in_runtime(Helpers::default().ask(script(&folder, text), requests))
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
    let missing = in_runtime(Helpers::default().ask(
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

/// Deadline of a question to a helper that hangs.
const SHORT: Duration = Duration::from_millis(50);

/// The processes that the script of a helper has noted.
fn begun(path: &Path) -> Vec<nix::unistd::Pid> {
    let text = std::fs::read_to_string(format!("{}.pids", path.display())).unwrap_or_default();
    let pids = text
        .split_inclusive('\n')
        .filter(|line| line.ends_with('\n'));
    pids.map(|pid| nix::unistd::Pid::from_raw(pid.trim().parse().unwrap()))
        .collect()
}

fn until(holds: impl Fn() -> bool) {
    while !holds() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn two_helpers_that_hang_are_left_alone_and_no_third_one_is_started() {
    let folder = temp_dir();
    let path = script(
        &folder,
        r#"read -r line; test -e $0.answers && echo '"done"' && exit
echo $$ >> $0.pids; exec sleep 600"#,
    );
    let Helpers(places) = Helpers::default();
    let ask = |deadline| {
        let requests = vec![Request::Facts(vec![])];
        let mut asked = in_runtime(ask_within(deadline, &places, path.clone(), requests));
        assert_eq!(asked.len(), 1);
        asked.remove(0).1
    };
    for count in 1..=HELPERS {
        assert!(matches!(ask(SHORT), Err(Failure::Late(_))));
        until(|| begun(&path).len() == count);
    }
    assert!(matches!(ask(SHORT), Err(Failure::Hang)));
    let pids = begun(&path);
    assert_eq!(pids.len(), HELPERS, "another helper was started");
    for pid in &pids {
        let alive = nix::sys::signal::kill(*pid, None);
        assert_eq!(alive, Ok(()), "a helper was killed");
    }
    // The end of one makes room for another.
    std::fs::write(format!("{}.answers", path.display()), "").unwrap();
    nix::sys::signal::kill(pids[0], nix::sys::signal::Signal::SIGKILL).unwrap();
    until(|| places.available_permits() == 1);
    assert_eq!(ask(ANSWER).unwrap(), Answer::Done);
    nix::sys::signal::kill(pids[1], nix::sys::signal::Signal::SIGKILL).unwrap();
    until(|| places.available_permits() == HELPERS);
}

#[test]
fn a_helper_that_writes_without_end_to_standard_error_is_heard_out() {
    let folder = temp_dir();
    // More than a pipe holds, before, between and after the answers.
    let path = script(
        &folder,
        r#"flood() { head -c 300000 /dev/zero | tr '\0' x >&2; }
flood; read -r line; flood; echo '"done"'; flood; read -r line; echo '"done"'; read -r line; flood
echo over > $0.over"#,
    );
    let Helpers(places) = Helpers::default();
    let requests = vec![Request::Ready(true), Request::Ready(false)];
    let asked = in_runtime(ask_within(ANSWER, &places, path.clone(), requests));
    let answers: Vec<_> = asked
        .into_iter()
        .map(|(_, answer)| answer.unwrap())
        .collect();
    assert_eq!(answers, [Answer::Done, Answer::Done]);
    until(|| places.available_permits() == HELPERS);
    assert!(Path::new(&format!("{}.over", path.display())).exists());
    // The last words of a helper that fails count.
    let failure = failure_of(
        "head -c 300000 /dev/zero | tr '\\0' x >&2; echo 'libnvidia-ml.so.1: no such file' >&2; \
            exit 3",
    );
    assert!(
        failure.ends_with("xxlibnvidia-ml.so.1: no such file"),
        "{failure}"
    );
    assert!(failure.len() < 2 * MAX_LAST, "{}", failure.len());
}
