//! The guest's console in containerd's log: Kata's Go shim, where `enable_debug` is set and containerd
//! logs at level debug, writes each line of it as `vmconsole="..."`, with the sandbox that it is of.

use crate::host::logfmt;

/// A line of a guest's console.
pub struct Shim {
    pub sandbox: String,
    pub line: String,
}

/// What a line of containerd's log, or of a journal with it, says of a guest's console.
pub fn console_line(line: &[u8]) -> Option<Shim> {
    memchr::memmem::find(line, b" vmconsole=")?;
    let line = std::str::from_utf8(line).ok()?;
    // journalctl puts its own date, host and program before it.
    let line = line.get(line.find("time=\"")?..)?;
    let (mut sandbox, mut console) = (None, None);
    for (key, value) in logfmt::pairs(line) {
        match key {
            "sandbox" => sandbox = sandbox.or(Some(value)),
            "vmconsole" => console = console.or(Some(value)),
            _ => {}
        }
    }
    Some(Shim { sandbox: sandbox?, line: console? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str =
        r#"time="2026-11-23T11:17:14Z" level=debug msg="reading guest console" sandbox=train-0 vmconsole="{\"msg\":\"a sandbox=other\"}""#;

    #[test]
    fn the_line_and_its_sandbox_are_those_of_the_shim_whatever_the_guest_writes() {
        for line in [LINE.to_string(), format!("Nov 23 11:17:14 node containerd[7]: {LINE}")] {
            let shim = console_line(line.as_bytes()).unwrap();
            assert_eq!((shim.sandbox.as_str(), shim.line.as_str()), ("train-0", r#"{"msg":"a sandbox=other"}"#));
        }
        for other in ["", "{\"msg\":\" vmconsole=\"}", "time=\"x\" level=info msg=y", "time=\"x\" vmconsole=\"without a sandbox\""] {
            assert!(console_line(other.as_bytes()).is_none(), "{other}");
        }
    }
}
