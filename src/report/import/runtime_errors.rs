//! Errors of containerd, CRI-O and Kata's shims: which lines are one, and what went wrong inside
//! all the words that each runtime puts around the error of the one below it. Pure.

use crate::data::containerd_log::Entry;

/// Messages at the level of errors with which the shim gives a sandbox or container up, whatever
/// the error is: of sandbox.go, qemu.go and the service of both shims.
const GIVEN_UP: &[&str] = &[
    "Cannot start VM",
    "Failed to start VM",
    "failed to start vm",
    "Unable to launch qemu",
    "Create container failed",
    "failed to create container",
    "failed to start sandbox",
    "failed to create shim task",
];

/// Messages after which errors are those of the end.
pub const ENDS: &[&str] = &["Stopping Sandbox", "Sandbox is stopped", "stop sandbox"];

/// Words that a runtime puts before the error of the one below it.
const WRAPPERS: &[&str] = &[
    "failed to create containerd task: ",
    "failed to start sandbox container task: ",
    "failed to start sandbox: ",
    "failed to create shim task: ",
    "failed to create containerd container: ",
    "createContainer: ",
    "CreateContainer failed: ",
    "rpc error: code = ",
    "Unknown desc = ",
    "Internal desc = ",
];

/// The text without `failed to start sandbox "<id>": ` before it.
fn without_id(text: &str) -> Option<&str> {
    let rest = text.strip_prefix("failed to start sandbox ")?;
    let (id, rest) = rest.split_once(": ")?;
    id.trim_start_matches('\\').starts_with('"').then_some(rest)
}

/// The innermost error, without what the runtimes around it add.
pub fn innermost(error: &str) -> &str {
    let mut text = error.trim();
    let unwrapped = |text| {
        let mut outer = WRAPPERS.iter();
        outer
            .find_map(|outer| str::strip_prefix(text, *outer))
            .or_else(|| without_id(text))
    };
    while let Some(rest) = unwrapped(text) {
        // `rpc error: code = DeadlineExceeded desc = ..`: the code is an error's, unless it is that
        // of another error behind it.
        let is_code = text.starts_with("rpc error") && !rest.starts_with(['U', 'I']);
        let behind = rest.split_once(" desc = ").map_or("", |(_, behind)| behind);
        let is_outer = WRAPPERS.iter().any(|outer| behind.starts_with(outer));
        if rest.is_empty() || (is_code && !is_outer) {
            break;
        }
        text = if is_code { behind } else { rest };
    }
    let text = text.strip_suffix(": unknown").unwrap_or(text);
    last_cause(text).unwrap_or(text)
}

/// The last cause of an error of the Rust shim, which lists them outermost first and escapes their
/// newlines: `Others("failed to handle message ..\\n\\nCaused by:\\n    0: start vm\\n    1: ..")`.
fn last_cause(text: &str) -> Option<&str> {
    let text = text.split("Stack backtrace").next()?;
    let (_, causes) = text.rsplit_once("Caused by:")?;
    let lines = causes.split('\n').flat_map(|line| line.split("\\n"));
    let is_around = |c: char| c.is_whitespace() || matches!(c, '"' | ')' | '\\');
    let lines = lines.map(|line| line.trim_matches(is_around));
    let last = lines.filter(|line| !line.is_empty()).last()?;
    let numbered = last.split_once(": ");
    let is_number = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    match numbered {
        Some((number, cause)) if is_number(number) => Some(cause),
        _ => Some(last),
    }
}

/// Whether the shim gives up with this message.
pub fn gives_up(msg: &str) -> bool {
    GIVEN_UP.iter().any(|text| msg.starts_with(text))
}

/// Whether an entry is an error. That the agent gave up waiting for devices is one at any level.
pub fn is_error(entry: &Entry) -> bool {
    let (level, error) = (entry.get("level"), entry.get("error"));
    let is_error = level.is_some_and(|level| ["error", "fatal", "panic"].contains(&level));
    let cdi = "failed to inject devices after CDI timeout";
    is_error || error.is_some_and(|error| error.contains(cdi))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_error_is_what_went_wrong() {
        for (error, wanted) in [
            (
                "failed to create containerd task: failed to create shim task: Failed to Check if \
                 grpc server is working: rpc error: code = DeadlineExceeded desc = timed out",
                "Failed to Check if grpc server is working: rpc error: code = DeadlineExceeded \
                 desc = timed out",
            ),
            (
                "rpc error: code = Unknown desc = failed to create shim task: ttrpc: closed",
                "ttrpc: closed",
            ),
            (
                "failed to create shim task: Others(\"failed to handle\\n\\nCaused by:\\n    \
                 0: start vm\\n    1: timed out connecting to vsock\"): unknown",
                "timed out connecting to vsock",
            ),
            (
                "rpc error: code = DeadlineExceeded desc = failed to create containerd task: x",
                "x",
            ),
            (
                "rpc error: code = DeadlineExceeded desc = x",
                "rpc error: code = DeadlineExceeded desc = x",
            ),
            ("", ""),
            ("Caused by:", "Caused by:"),
        ] {
            assert_eq!(innermost(error), wanted);
        }
    }
}
