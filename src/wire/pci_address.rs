//! PCI addresses, and the ids by which a GPU of NVIDIA is known.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Address of a PCI function. Its order is the order of CDI index names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl PciAddress {
    /// Domain, and the 16 bits by which PCI itself knows a function.
    pub fn routing_id(self) -> (u32, u16) {
        (
            self.domain,
            u16::from(self.bus) << 8 | u16::from(self.device) << 3 | u16::from(self.function),
        )
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:04x}:{:02x}:{:02x}.{:x}",
            self.domain, self.bus, self.device, self.function
        )
    }
}

impl fmt::Debug for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Error: the text is not a PCI address in the format of sysfs: `dddd:bb:dd.f`, lower-case
/// hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotAnAddress(pub String);

impl fmt::Display for NotAnAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a PCI address (want dddd:bb:dd.f, e.g. 0000:01:00.0)",
            self.0
        )
    }
}

impl std::error::Error for NotAnAddress {}

impl FromStr for PciAddress {
    type Err = NotAnAddress;

    fn from_str(text: &str) -> Result<Self, NotAnAddress> {
        let parse = || -> Option<Self> {
            let (domain, rest) = text.split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            let hex =
                |digits: &str, len: std::ops::RangeInclusive<usize>, max: u32| -> Option<u32> {
                    // from_str_radix also accepts a sign: only digits may reach it.
                    let ok = len.contains(&digits.len())
                        && digits.bytes().all(|b| b.is_ascii_hexdigit());
                    if ok {
                        u32::from_str_radix(digits, 16).ok().filter(|v| *v <= max)
                    } else {
                        None
                    }
                };
            Some(Self {
                domain: hex(domain, 4..=8, u32::MAX)?,
                bus: hex(bus, 2..=2, 0xff)? as u8,
                device: hex(device, 2..=2, 0x1f)? as u8,
                function: hex(function, 1..=1, 7)? as u8,
            })
        };
        parse().ok_or_else(|| NotAnAddress(text.chars().take(64).collect()))
    }
}

impl TryFrom<String> for PciAddress {
    type Error = NotAnAddress;
    fn try_from(text: String) -> Result<Self, NotAnAddress> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> String {
        address.to_string()
    }
}

/// NVIDIA's PCI vendor id.
pub const NVIDIA: u16 = 0x10de;
/// PCI class (base and subclass) of GPUs: 3D controller without display, and VGA controller.
const GPU_CLASSES: [u32; 2] = [0x0302, 0x0300];
/// Whether vendor and 24-bit class are those of an NVIDIA GPU.
pub fn is_gpu(vendor: u16, class: u32) -> bool {
    vendor == NVIDIA && GPU_CLASSES.contains(&(class >> 8))
}

/// Longest sleep in the driver's probe of such a GPU, always used up if it cannot see the firewall.
pub const BAR_FIREWALL_WAIT: Duration = Duration::from_secs(4);
/// Device ids of GPUs whose probe waits for the BAR firewall (Blackwell; the driver's own ranges).
const BAR_FIREWALL: [std::ops::RangeInclusive<u16>; 2] = [0x2900..=0x29ff, 0x3180..=0x327f];

/// Whether this GPU's probe sleeps until its BAR firewall is down.
pub fn waits_for_bar_firewall(device: u16) -> bool {
    BAR_FIREWALL.iter().any(|ids| ids.contains(&device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_order_by_number_not_by_text() {
        let mut list: Vec<PciAddress> = [
            "0000:10:00.0",
            "10000:01:00.0",
            "0000:0a:00.0",
            "0000:02:1f.7",
        ]
        .iter()
        .map(|t| t.parse().unwrap())
        .collect();
        list.sort();
        let texts: Vec<String> = list.iter().map(|a| a.to_string()).collect();
        assert_eq!(
            texts,
            [
                "0000:02:1f.7",
                "0000:0a:00.0",
                "0000:10:00.0",
                "10000:01:00.0"
            ]
        );
    }

    #[test]
    fn what_is_not_an_address_is_refused() {
        for text in [
            "",
            "0000:01:00",
            "0000:01:00.8",
            "0000:01:20.0",
            "000:01:00.0",
            "0000:+1:00.0",
            "0000:01:00.0 ",
            "0000:01:00.0\n",
            "123456789:01:00.0",
        ] {
            assert!(
                text.parse::<PciAddress>().is_err(),
                "{text:?} was taken for an address"
            );
        }
    }
}
