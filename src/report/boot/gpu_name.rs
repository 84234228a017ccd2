//! A GPU by its CDI name and its address.

use kata_gpu_wire::pci_address::PciAddress;

/// Index and address of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuName {
    pub index: Option<u64>,
    pub address: PciAddress,
}

impl GpuName {
    /// The index, with `?` for one that is not known.
    pub fn number(&self) -> String {
        self.index
            .map_or("?".to_string(), |index| index.to_string())
    }
}
