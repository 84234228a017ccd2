//! The guest's console: a file that QEMU appends to, followed with inotify.

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// A log line in the agent's shape.
#[derive(Clone, Debug)]
pub struct AgentLine(BTreeMap<String, String>);

impl AgentLine {
    /// Parses a line of the agent. None for any other.
    pub fn parse(line: &str) -> Option<Self> {
        // Two writers share a serial line: a kernel message may stand before the JSON.
        let map: BTreeMap<String, String> =
            serde_json::from_str(line.get(line.find("{\"")?..)?).ok()?;
        (map.get("source").map(String::as_str) == Some("agent")).then_some(Self(map))
    }

    /// The value of a key, or nothing.
    pub fn get(&self, key: &str) -> &str {
        self.0.get(key).map_or("", String::as_str)
    }

    /// Its keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Time of the line in ns since 1970.
    pub fn realtime_ns(&self) -> Result<u64> {
        let time = humantime::parse_rfc3339(self.get("ts"))
            .with_context(|| format!("time {:?}", self.get("ts")))?;
        Ok(u64::try_from(time.duration_since(UNIX_EPOCH)?.as_nanos())?)
    }
}

pub struct Console {
    path: PathBuf,
}

impl Console {
    pub fn new(path: &Path) -> Self {
        Self {
            path: path.to_path_buf(),
        }
    }

    /// Everything so far, with no line torn by a line of the kernel.
    pub fn text(&self) -> String {
        whole_lines(
            &std::fs::read(&self.path)
                .map(|b| String::from_utf8_lossy(&b).into_owned())
                .unwrap_or_default(),
        )
    }

    /// CLOCK_BOOTTIME in ns of the newest record that the init has written here.
    pub fn newest_record_ns(&self) -> Option<u64> {
        newest_record_ns(&self.text())
    }

    /// The number that follows this text.
    pub fn number_after(&self, text: &str) -> Option<u64> {
        self.text()
            .split_once(text)?
            .1
            .split(|c: char| !c.is_ascii_digit())
            .next()?
            .parse()
            .ok()
    }

    /// All of the agent's lines so far.
    pub fn agent_lines(&self) -> Vec<AgentLine> {
        self.text().lines().filter_map(AgentLine::parse).collect()
    }

    pub fn wait_agent(
        &self,
        deadline: Duration,
        message: &str,
        wanted: impl Fn(&AgentLine) -> bool,
    ) -> Option<AgentLine> {
        self.wait_agent_any(deadline, |l| l.get("msg") == message && wanted(l))
    }

    pub fn wait_agent_any(
        &self,
        deadline: Duration,
        wanted: impl Fn(&AgentLine) -> bool,
    ) -> Option<AgentLine> {
        self.wait(deadline, |text| {
            text.lines().filter_map(AgentLine::parse).find(&wanted)
        })
    }

    /// Waits for a text anywhere on the console.
    pub fn wait_text(&self, deadline: Duration, wanted: &str) -> bool {
        self.wait(deadline, |text| text.contains(wanted).then_some(()))
            .is_some()
    }

    fn wait<T>(&self, deadline: Duration, find: impl Fn(&str) -> Option<T>) -> Option<T> {
        let end = Instant::now() + deadline;
        // Watched before the first look: what is written in between wakes us.
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).ok()?;
        inotify
            .add_watch(&self.path, AddWatchFlags::IN_MODIFY)
            .ok()?;
        loop {
            if let Some(found) = find(&self.text()) {
                return Some(found);
            }
            let left = end.checked_duration_since(Instant::now())?;
            poll(
                &mut [PollFd::new(inotify.as_fd(), PollFlags::POLLIN)],
                PollTimeout::try_from(left).ok()?,
            )
            .ok()?;
            let _unused = inotify.read_events(); // only the wake-up counts
        }
    }
}

fn newest_record_ns(text: &str) -> Option<u64> {
    let time = |line: &str| -> Option<u64> {
        let line: serde_json::Value = serde_json::from_str(line.get(line.find("{\"")?..)?).ok()?;
        (line["source"] == "kata-gpu-init").then(|| line["boottime_ns"].as_str()?.parse().ok())?
    };
    text.lines().filter_map(time).max()
}

/// The same lines, each whole: two writers share a serial line, and the kernel writes lines of its
/// own in the middle of a process's one, be it between its `\r` and its `\n`. The kernel's come
/// first then.
fn whole_lines(text: &str) -> String {
    let mut whole = String::with_capacity(text.len());
    // Beginning of a line whose end has not come yet.
    let mut begun = String::new();
    for line in text.split_inclusive('\n') {
        let quoted = line
            .find("{\"")
            .is_some_and(|json| serde_json::from_str::<serde_json::Value>(&line[json..]).is_ok());
        match kernel_stamp(line) {
            Some(at) if !quoted => {
                begun.push_str(&line[..at]);
                whole.push_str(&line[at..]);
            }
            _ => {
                whole.push_str(&begun);
                whole.push_str(line);
                begun.clear();
            }
        }
    }
    whole + &begun
}

/// Offset at which a line of the kernel begins: `[    9.020341] `.
fn kernel_stamp(line: &str) -> Option<usize> {
    line.match_indices('[').map(|(at, _)| at).find(|at| {
        let stamp = line[at + 1..].trim_start_matches(' ');
        let seconds = stamp.bytes().take_while(u8::is_ascii_digit).count();
        let fraction = stamp[seconds..].strip_prefix('.').unwrap_or("");
        seconds > 0
            && fraction.bytes().take_while(u8::is_ascii_digit).count() == 6
            && fraction[6..].starts_with("] ")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_the_kernel_has_torn_is_whole_again() {
        let agent = "{\"source\":\"agent\",\"msg\":\"container created\"}";
        let kernel = "[    9.020341] NVRM: failed\r\n[   10.000001] NVRM: again\r\n";
        for tear in 0..agent.len() + 2 {
            let line = format!("{agent}\r\n");
            let text = format!(
                "first\r\n{}{kernel}{}last\r\n",
                &line[..tear],
                &line[tear..]
            );
            assert_eq!(
                whole_lines(&text),
                format!("first\r\n{kernel}{line}last\r\n"),
                "torn at {tear}"
            );
        }
    }

    #[test]
    fn a_line_that_quotes_the_kernel_is_left_alone() {
        let text = "{\"line\":\"[    9.020341] NVRM: failed\"}\r\n[1.2] no stamp\r\nunended";
        assert_eq!(whole_lines(text), text);
    }
}
