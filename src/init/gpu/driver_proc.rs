//! The driver's /proc files: minors of GPUs, registered majors, owner and mode of nodes.
//! Capabilities and switches are in `driver_caps`.
//!
//! Only files that answer at once and never initialise a GPU: `power` and `numa_status` wait for a
//! GPU that is initialising, and are not read.

use kata_gpu_wire::pci_address::PciAddress;
use std::io::{self, Read};
use std::path::Path;

/// Fields of `/proc/driver/nvidia/gpus/<address>/information`. The file appears after everything
/// that can fail in probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Information {
    /// Minor of /dev/nvidiaN: in the order in which probes ended, not PCI order.
    pub minor: u32,
    /// `GPU-xxxxxxxx-...`; absent until the driver knows it.
    pub uuid: Option<String>,
    pub model: Option<String>,
}

/// Error of reading a file of the driver.
fn cannot(path: &Path, why: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("read {}: {why}", path.display()))
}

/// Limit of a file except mig-minors; the real ones have some hundred bytes, /proc/devices some
/// thousand.
const MAX_TEXT: u64 = 64 * 1024;

fn read(path: &Path) -> io::Result<String> {
    read_bounded(path, MAX_TEXT)
}

/// Reads the information file of one GPU below `proc` (`/proc` in a guest).
pub fn information(proc: &Path, gpu: PciAddress) -> io::Result<Information> {
    let path = proc
        .join("driver/nvidia/gpus")
        .join(gpu.to_string())
        .join("information");
    parse_information(&read(&path)?).ok_or_else(|| {
        cannot(
            &path,
            "no \"Device Minor:\" line with a number; this driver's format is not known",
        )
    })
}

/// Parses an information file: `Key: <tabs or spaces> value` lines. None without a minor.
pub fn parse_information(text: &str) -> Option<Information> {
    let value = |key: &str| {
        text.lines()
            .filter_map(|l| l.split_once(':'))
            .find(|(k, _)| k.trim() == key)
            .map(|(_, v)| v.trim())
    };
    Some(Information {
        minor: value("Device Minor")?.parse().ok()?,
        uuid: value("GPU UUID")
            .filter(|u| is_uuid("GPU-", u))
            .map(str::to_string),
        model: value("Model").filter(|m| !m.is_empty()).map(str::to_string),
    })
}

/// Whether a text is a known UUID with this prefix: the driver prints question marks before it is
/// known. CDI accepts it as a name.
pub fn is_uuid(beginning: &str, text: &str) -> bool {
    text.strip_prefix(beginning).is_some_and(|hex| {
        hex.len() == 36 && hex.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
    })
}

/// Majors of the driver's character devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Majors {
    pub nvidia: Option<u32>,
    pub uvm: Option<u32>,
    /// Major of `/dev/nvidia-caps/nvidia-cap<minor>`.
    pub caps: Option<u32>,
    /// Major of `/dev/nvidia-caps-imex-channels/channel<minor>`.
    pub imex_channels: Option<u32>,
    /// Major of `/dev/nvidia-nvswitch<minor>` and `/dev/nvidia-nvswitchctl`.
    pub nvswitch: Option<u32>,
    /// Major of `/dev/nvidia-nvlink`.
    pub nvlink: Option<u32>,
}

/// Reads the majors from `/proc/devices`.
pub fn majors(proc: &Path) -> io::Result<Majors> {
    let path = proc.join("devices");
    Ok(parse_majors(&read(&path)?))
}

/// Parses /proc/devices: `major name` lines after "Character devices:". Names are whole words:
/// `nvidia-caps` is not `nvidia`.
pub fn parse_majors(text: &str) -> Majors {
    let mut majors = Majors::default();
    for line in text.lines().take_while(|l| !l.starts_with("Block devices")) {
        let mut words = line.split_whitespace();
        let (Some(major), Some(name), None) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let Ok(major) = major.parse() else { continue };
        match name {
            // -frontend: drivers up to 535.
            "nvidia" | "nvidia-frontend" => majors.nvidia = Some(major),
            "nvidia-uvm" => majors.uvm = Some(major),
            "nvidia-caps" => majors.caps = Some(major),
            "nvidia-caps-imex-channels" => majors.imex_channels = Some(major),
            "nvidia-nvswitch" => majors.nvswitch = Some(major),
            "nvidia-nvlink" => majors.nvlink = Some(major),
            _ => {}
        }
    }
    majors
}

/// Reads at most `most` bytes of a file of /proc.
pub fn read_bounded(path: &Path, most: u64) -> io::Result<String> {
    let at = |error: io::Error| {
        io::Error::new(error.kind(), format!("read {}: {error}", path.display()))
    };
    // Files of /proc have no size.
    let mut text = String::with_capacity(4 * 1024);
    std::fs::File::open(path)
        .and_then(|file| file.take(most).read_to_string(&mut text))
        .map_err(at)?;
    Ok(text)
}

/// Rules of the driver for its nodes: owner, mode, and whether programs without administrator
/// rights may make them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRules {
    pub uid: u32,
    pub gid: u32,
    pub mode: u32,
}

impl Default for NodeRules {
    fn default() -> Self {
        Self {
            uid: 0,
            gid: 0,
            mode: 0o666,
        }
    }
}

/// Reads the rules from `/proc/driver/nvidia/params`; defaults for a driver without that file.
pub fn node_rules(proc: &Path) -> NodeRules {
    read(&proc.join("driver/nvidia/params"))
        .map_or_else(|_| NodeRules::default(), |text| parse_node_rules(&text))
}

/// Parses `Key: value` lines of the driver's params file, values in decimal. `ModifyDeviceFiles: 0`
/// only forbids *changing* existing nodes.
pub fn parse_node_rules(text: &str) -> NodeRules {
    let mut rules = NodeRules::default();
    for (key, value) in text.lines().filter_map(|l| l.split_once(':')) {
        let Ok(value) = value.trim().parse::<u32>() else {
            continue;
        };
        match key.trim() {
            "DeviceFileUID" => rules.uid = value,
            "DeviceFileGID" => rules.gid = value,
            "DeviceFileMode" if value <= 0o777 => rules.mode = value,
            _ => {}
        }
    }
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minor_is_read_before_and_after_the_first_initialisation() {
        let before = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 27\nVideo BIOS: \t \
            ??.??.??.??.??\nBus Type: \t PCIe\nDevice Minor: \t 5\nGPU Excluded:\t No\n";
        let information = parse_information(before).unwrap();
        assert_eq!(
            (
                information.minor,
                information.uuid,
                information.model.as_deref()
            ),
            (5, None, Some("NVIDIA H100 80GB HBM3"))
        );
        let after = "GPU UUID: \t GPU-01234567-89ab-cdef-0123-456789abcdef\nDevice Minor: \t 0\n";
        assert_eq!(
            parse_information(after).unwrap().uuid.as_deref(),
            Some("GPU-01234567-89ab-cdef-0123-456789abcdef")
        );
        assert_eq!(
            parse_information(
                "GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: 1\n"
            )
            .unwrap()
            .uuid,
            None
        );
    }

    #[test]
    fn without_a_minor_there_is_no_information() {
        for text in [
            "",
            "Device Minor:",
            "Device Minor: -1",
            "Device Minor: x",
            "Minor: 1",
            "Device Minor: 99999999999",
        ] {
            assert_eq!(parse_information(text), None, "{text:?}");
        }
    }

    #[test]
    fn majors_are_matched_by_whole_names_of_character_devices() {
        let text = "Character devices:\n  1 mem\n195 nvidia\n233 nvidia-caps-imex-channels\n234 \
            nvidia-caps\n235 nvidia-uvm\n236 nvidia-nvswitch\n237 nvidia-nvlink\n\nBlock \
            devices:\n  8 nvidia-uvm\n";
        let all = Majors {
            nvidia: Some(195),
            uvm: Some(235),
            caps: Some(234),
            imex_channels: Some(233),
            nvswitch: Some(236),
            nvlink: Some(237),
        };
        assert_eq!(parse_majors(text), all);
        assert_eq!(parse_majors("195 nvidia-frontend\n").nvidia, Some(195));
        assert_eq!(
            parse_majors("195 nvidia-cap\nx nvidia\n"),
            Majors::default()
        );
    }

    #[test]
    fn node_rules_are_the_drivers() {
        assert_eq!(
            parse_node_rules("DeviceFileUID: 0\nDeviceFileGID: 44\nDeviceFileMode: 432\n"),
            NodeRules {
                uid: 0,
                gid: 44,
                mode: 0o660
            }
        );
        assert_eq!(
            parse_node_rules("DeviceFileMode: 99999\ngarbage"),
            NodeRules::default()
        );
    }
}
