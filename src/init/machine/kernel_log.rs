//! The kernel's log: one line in, one record out.

use kata_gpu_wire::driver_log;
use std::fs::OpenOptions;
use std::io::{self, Write};

/// Device by which the log is read and written.
pub const PATH: &str = "/dev/kmsg";

/// Writes one line to the kernel's log. `priority` as in syslog: 3 error, 4 warning, 6 info, 7
/// debug.
pub fn write(priority: u8, text: &str) -> io::Result<()> {
    let line: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(900)
        .collect();
    OpenOptions::new()
        .write(true)
        .open(PATH)?
        .write_all(format!("<{priority}>{line}\n").as_bytes())
}

/// A record of /dev/kmsg.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KmsgLine {
    pub priority: u8,
    /// 0: written by the kernel itself.
    pub facility: u32,
    pub seq: u64,
    pub printk_us: u64,
    pub text: String,
}

/// Parses the result of one read of /dev/kmsg: `prio,seq,usec,flags[,..];text\n[ KEY=value\n..]`.
/// Returns `None` for anything else.
pub fn parse(bytes: &[u8]) -> Option<KmsgLine> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once(';')?;
    let mut head = head.split(',');
    let prefix: u32 = head.next()?.parse().ok()?;
    let seq = head.next()?.parse().ok()?;
    let printk_us = head.next()?.parse().ok()?;
    let text = driver_log::joined(body.split('\n').next().unwrap_or(""));
    Some(KmsgLine {
        priority: (prefix & 7) as u8,
        facility: prefix >> 3,
        seq,
        printk_us,
        text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernel_is_read_with_its_clock() {
        let line = parse(
            b"4,1034,5023417,-;nvidia 0001:00:03.0: probe with driver nvidia failed \
            with error -1\n SUBSYSTEM=pci\n",
        )
        .unwrap();
        assert_eq!(
            (line.priority, line.facility, line.seq, line.printk_us),
            (4, 0, 1034, 5_023_417)
        );
        assert_eq!(
            line.text,
            "nvidia 0001:00:03.0: probe with driver nvidia failed with error -1"
        );
    }

    #[test]
    fn a_message_over_several_lines_is_read_as_one() {
        // Message as NVIDIA's 550.163.01 logs it.
        let text = parse(
            b"3,1,2,-;NVRM: The NVIDIA GPU 0001:00:01.0\\x0aNVRM: (PCI ID: \
            10de:2330) installed in this system has\\x0aNVRM: fallen off the bus\n",
        )
        .unwrap()
        .text;
        assert_eq!(
            text,
            "NVRM: The NVIDIA GPU 0001:00:01.0 (PCI ID: 10de:2330) installed in this system has \
                fallen off the bus"
        );
    }

    #[test]
    fn what_is_not_a_record_of_the_log_is_nothing() {
        for bytes in [
            &b""[..],
            b";",
            b"4,1",
            b"x,1,2,-;text",
            b"4,1,2,-",
            b"\xff\xff,1,2;x",
            b"-4,1,2,-;x",
        ] {
            assert_eq!(parse(bytes), None, "{bytes:?}");
        }
    }
}
