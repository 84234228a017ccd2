//! The format of a file, by its first lines.

use super::console_lines::kernel_line;
use crate::data::imported_record::Format;

/// Format of a file by its beginning: the format of most lines, or None.
pub fn detect(head: &[u8]) -> Option<Format> {
    let text = String::from_utf8_lossy(head);
    let start = text.trim_start();
    if start.starts_with('{') && start.contains("\"kind\"") && is_pod(start) {
        return Some(Format::Pod);
    }
    let mut votes: Vec<(Format, usize)> = [Format::Stream, Format::Journal, Format::Console]
        .map(|f| (f, 0))
        .into();
    for line in text.lines() {
        let Some(format) = of_line(line.trim()) else {
            continue;
        };
        for (_, n) in votes.iter_mut().filter(|(f, _)| *f == format) {
            *n += 1;
        }
    }
    // In doubt take the first format: its lines contain those of the later formats.
    votes
        .into_iter()
        .rev()
        .max_by_key(|(_, n)| *n)
        .filter(|(_, n)| *n > 0)
        .map(|(f, _)| f)
}

/// True for a JSON object over several lines: only its first keys are there for certain.
fn is_pod(text: &str) -> bool {
    let kind = |name: &str| {
        text.contains(&format!("\"kind\": \"{name}\""))
            || text.contains(&format!("\"kind\":\"{name}\""))
    };
    text.contains("\"apiVersion\"") && (kind("Pod") || kind("List") || kind("PodList"))
}

fn of_line(line: &str) -> Option<Format> {
    if line.starts_with("{\"schema\":") {
        return Some(Format::Stream);
    }
    if line.contains("vmconsole=")
        || line.contains("__REALTIME_TIMESTAMP")
        || line.contains("\"vmconsole\"")
        || is_logfmt(line)
    {
        return Some(Format::Journal);
    }
    let stamped = kernel_line(line).is_some();
    let agent =
        line.contains("\"name\":\"kata-agent\"") || line.contains("\"name\":\"kata-gpu-init\"");
    (stamped || agent).then_some(Format::Console)
}

fn is_logfmt(line: &str) -> bool {
    line.contains("time=\"")
        && line.contains(" level=")
        && line.contains(" msg=")
        && kernel_line(line).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_found_by_their_lines() {
        let of = |text: &str| detect(text.as_bytes());
        assert_eq!(
            of("[    0.000000] Linux version 6.1\n"),
            Some(Format::Console)
        );
        assert_eq!(of("{\"schema\":1,\"seq\":0}\n"), Some(Format::Stream));
        assert_eq!(
            of("time=\"2026-01-02T03:04:05Z\" level=info msg=\"x\" vmconsole=\"[    0.1] y\"\n"),
            Some(Format::Journal)
        );
        assert_eq!(
            of("Jan 02 h kata[1]: time=\"2026-01-02T03:04:05Z\" level=info msg=\"x\"\n"),
            Some(Format::Journal)
        );
        assert_eq!(
            of("{\"__REALTIME_TIMESTAMP\":\"1\",\"MESSAGE\":\"x\"}\n"),
            Some(Format::Journal)
        );
        assert_eq!(
            of("{\n  \"apiVersion\": \"v1\",\n  \"kind\": \"Pod\"\n}\n"),
            Some(Format::Pod)
        );
        assert_eq!(of("hello\nworld\n"), None);
        assert_eq!(detect(&[0xff, 0, 1, 2, 200]), None);
        // A guest's console may hold lines of nvidia-ctk, which look like containerd's.
        assert_eq!(
            of("[    1.000000] time=\"2026-01-02T03:04:05Z\" level=info msg=\"x\"\n"),
            Some(Format::Console)
        );
    }
}
