//! Detection of confidential guests, whose memory is hidden from the host.

use std::path::Path;

/// Devices that the kernel offers for attestation.
const ATTESTATION: [&str; 5] =
    ["/dev/tdx_guest", "/dev/tdx-guest", "/dev/sev-guest", "/sys/firmware/arm_cca", "/sys/devices/platform/arm-cca-dev"];

/// Whether this guest is confidential, by the kernel's attestation devices.
pub fn is_confidential() -> bool {
    ATTESTATION.iter().any(|path| Path::new(path).exists())
}
