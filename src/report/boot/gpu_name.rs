//! A GPU by its CDI name and its address.

use kata_gpu_wire::pci_address::PciAddress;
use std::fmt;

/// Index and address of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuName {
    pub index: Option<u64>,
    pub address: PciAddress,
}

/// `GPU 3 (0001:00:03.0)`.
impl fmt::Display for GpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.index {
            Some(index) => write!(f, "GPU {index} ({})", self.address),
            None => write!(f, "GPU {}", self.address),
        }
    }
}

impl GpuName {
    /// The index, with `?` for one that is not known.
    pub fn number(&self) -> String {
        self.index
            .map_or("?".to_string(), |index| index.to_string())
    }
}
