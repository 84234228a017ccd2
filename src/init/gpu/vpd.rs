//! Vital product data (VPD) of a PCI function in sysfs (PCI 3.0, appendix I): identifies Mellanox
//! functions that manage NVSwitches.
//!
//! Each four bytes of VPD cost some accesses to config space, which the device's firmware answers
//! and which wait for a BAR mapping that is under way: read it only where the topology depends on
//! it. Any bytes are accepted, none is trusted: they come from a device, in a guest from its host.

use crate::gpu::pci;
use crate::machine::files;
use kata_gpu_wire::pci_address::PciAddress;
use std::io;
use std::path::Path;

/// Limit of bytes read; real VPD has some hundred. The kernel's limit is 32 KiB, and 125 ms for
/// each four bytes.
const MAX: u64 = 4096;
/// Large resource with the read-only fields.
const READ_ONLY: u8 = 0x90;
/// Type of the small resource at the end.
const END: u8 = 0x0f;
/// Sub-model in the VPD of functions that manage NVSwitches: `SMDL=SW_MNG` among a vendor's
/// parameters, which no specification orders.
const MANAGES_SWITCHES: &[u8] = b"SW_MNG";

/// Reads the VPD of a function below `sysfs`; None: the function has none. Blocks for as long as
/// the device takes.
///
/// Errors: the kernel got no answer or found no VPD format (path, errno).
pub fn read(sysfs: &Path, function: PciAddress) -> io::Result<Option<Vec<u8>>> {
    let path = pci::function(sysfs, function).join("vpd");
    match files::read(&path, MAX) {
        // The kernel returns 0 bytes for a device that is silent from the first byte on.
        Ok(vpd) if vpd.is_empty() => Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("read {}: there is nothing in it", path.display()),
        )),
        Ok(vpd) => Ok(Some(vpd)),
        // A virtual function, for example.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(files::failed("read", &path)(e)),
    }
}

/// Whether a function with this VPD manages NVSwitches.
pub fn manages_switches(vpd: &[u8]) -> bool {
    resources(vpd)
        .filter(|(tag, _)| *tag == READ_ONLY)
        .flat_map(|(_, data)| fields(data))
        .any(|value| {
            value
                .windows(MANAGES_SWITCHES.len())
                .any(|part| part == MANAGES_SWITCHES)
        })
}

/// Tag and data of each resource; truncated data is returned as is.
fn resources(mut vpd: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        let (tag, length, data) = match vpd {
            // Large: bit 7 is set, and 16 bits of length follow.
            [tag @ 0x80..=0xff, low, high, data @ ..] => {
                (*tag, usize::from(u16::from_le_bytes([*low, *high])), data)
            }
            [tag @ 0..=0x7f, data @ ..] if tag >> 3 != END => {
                (tag >> 3, usize::from(tag & 7), data)
            }
            _ => return None,
        };
        let (data, rest) = data.split_at_checked(length).unwrap_or((data, &[]));
        vpd = rest;
        Some((tag, data))
    })
}

/// Value of each field of a resource, behind a keyword of two bytes; a truncated value is returned
/// as is.
fn fields(mut data: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let [_, _, length, rest @ ..] = data else {
            return None;
        };
        let (value, rest) = rest
            .split_at_checked(usize::from(*length))
            .unwrap_or((rest, &[]));
        data = rest;
        Some(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    /// VPD with a name and these read-only fields.
    fn vpd(values: &[(&[u8; 2], &[u8])]) -> Vec<u8> {
        let fields: Vec<u8> = values
            .iter()
            .flat_map(|(key, value)| [&key[..], &[value.len() as u8], value].concat())
            .collect();
        let large =
            |tag: u8, data: &[u8]| [&[tag], &(data.len() as u16).to_le_bytes()[..], data].concat();
        [
            large(0x82, b"ConnectX-7 SW_MNG"),
            large(READ_ONLY, &fields),
            vec![END << 3],
        ]
        .concat()
    }

    const PARAMETERS: &[u8] = b"MLX:MN=MLNX:CSKU=V2:UUID=V3:PCI=V0:MODL=C7:SMDL=SW_MNG";

    #[test]
    fn a_switch_management_function_is_known_by_a_vpd_field() {
        assert!(manages_switches(&vpd(&[
            (b"PN", b"MCX750500"),
            (b"V3", b"d5c0"),
            (b"VA", PARAMETERS)
        ])));
        // The name is not a field, and another model is another one.
        assert!(!manages_switches(&vpd(&[
            (b"PN", b"MCX750500"),
            (b"VA", b"SMDL=DEFAULT")
        ])));
        // Nothing counts after the end, nor in the part that can be written.
        let ended = [&[END << 3][..], &vpd(&[(b"VA", PARAMETERS)])].concat();
        assert!(!manages_switches(&ended));
        let mut written = vpd(&[(b"VA", PARAMETERS)]);
        let at = written.iter().position(|byte| *byte == READ_ONLY).unwrap();
        written[at] = 0x91;
        assert!(!manages_switches(&written));
    }

    #[test]
    fn any_bytes_are_taken_and_give_an_answer() {
        let whole = vpd(&[(b"PN", b"MCX750500"), (b"VA", PARAMETERS)]);
        for length in 0..whole.len() {
            manages_switches(&whole[..length]);
        }
        // Each byte wrong in turn, with lengths that go beyond the end among them.
        for at in 0..whole.len() {
            for wrong in [0, 0x7f, 0x80, 0x90, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = wrong;
                manages_switches(&bytes);
            }
        }
        assert!(
            !manages_switches(&[0xff; 4096])
                && !manages_switches(&[0; 4096])
                && !manages_switches(&[])
        );
        assert_eq!(
            resources(&[0x82, 0xff, 0xff, b'a']).collect::<Vec<_>>(),
            [(0x82, &b"a"[..])]
        );
        assert_eq!(fields(b"AB\x09abc").collect::<Vec<_>>(), [b"abc"]);
    }

    #[test]
    fn of_a_long_vpd_only_the_beginning_is_read() {
        let folder = temp_dir();
        let sysfs = folder.path();
        let function = sysfs.join("bus/pci/devices/0000:03:00.0");
        std::fs::create_dir_all(&function).unwrap();
        let address = "0000:03:00.0".parse().unwrap();
        assert_eq!(read(sysfs, address).unwrap(), None);
        std::fs::write(function.join("vpd"), vec![0x90; 40_000]).unwrap();
        assert_eq!(
            read(sysfs, address).unwrap().map(|vpd| vpd.len()),
            Some(MAX as usize)
        );
        std::fs::write(function.join("vpd"), "").unwrap();
        assert!(read(sysfs, address).is_err());
        std::fs::remove_file(function.join("vpd")).unwrap();
        std::fs::create_dir(function.join("vpd")).unwrap();
        let error = read(sysfs, address).unwrap_err().to_string();
        assert!(error.contains("0000:03:00.0/vpd"), "{error}");
    }
}
