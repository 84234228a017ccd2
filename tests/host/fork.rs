//! A failure means that a child of PID 1 which panics runs on in its parent's code: two agents
//! would be started.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Behind PID 1's fork is the start of the agent: a child of ours that panics must not come there.
#[test]
fn a_child_that_panics_runs_nothing_of_its_parents() {
    let output = Command::new(crate::built("kata-gpu-test-agent", "kata-agent"))
        .arg0("fork-panics")
        .output()
        .unwrap();
    let text = crate::stdout(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        output.status.success() && lines.len() == 2 && lines[0] == "behind the fork: the parent",
        "{text}"
    );
    assert!(
        lines[1].starts_with("both: Ok((true, Exited(") && lines[1].ends_with(", 101)))"),
        "{text}"
    );
}
