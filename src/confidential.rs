//! Whether this guest's memory is hidden from its host.

use std::path::Path;

/// Devices that a kernel offers for attestation.
const ATTESTATION: [&str; 5] =
    ["/dev/tdx_guest", "/dev/tdx-guest", "/dev/sev-guest", "/sys/firmware/arm_cca", "/sys/devices/platform/arm-cca-dev"];

/// True in a confidential guest: the kernel offers attestation devices then.
pub fn is_confidential() -> bool {
    ATTESTATION.iter().any(|path| Path::new(path).exists())
}
