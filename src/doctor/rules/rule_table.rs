//! The check of each rule on a host. The rules themselves, with titles, sources and figures, are
//! data: [`kata_gpu_report::analysis::rules::RULES`].

use super::checked::Checked;
use super::host_facts::HostFacts;
use super::{device_rules, guest_rules, kata_rules, kernel_rules, memory_rules, vm_rules};
use kata_gpu_report::analysis::rules::{RULES, Rule};

/// Question to a host.
pub type Check = fn(&HostFacts) -> Checked;

/// Checks by the rule's id, in the order of the rules.
const CHECKS: &[(&str, Check)] = &[
    ("huge-pfnmaps", kernel_rules::huge_pfnmaps),
    ("iommufd", kernel_rules::iommufd),
    ("dma-entries", kernel_rules::dma_entries),
    ("type1-huge-pages", kernel_rules::type1_huge_pages),
    ("thp", memory_rules::thp),
    ("thp-shared", memory_rules::thp_shared),
    ("thp-defrag", memory_rules::thp_defrag),
    ("huge-pages", memory_rules::huge_pages),
    ("huge-pages-free", memory_rules::huge_pages_free),
    ("fragmentation", memory_rules::fragmentation),
    ("unmovable", memory_rules::unmovable),
    ("zeroing", memory_rules::zeroing),
    ("governor", memory_rules::governor),
    ("iommu", kernel_rules::iommu),
    ("iommu-mode", kernel_rules::iommu_mode),
    ("interrupt-remapping", kernel_rules::interrupt_remapping),
    ("groups", kernel_rules::groups),
    ("agent-log", kata_rules::agent_log),
    ("console", kata_rules::console),
    ("guest-initrd", kata_rules::guest_initrd),
    ("firmware", kata_rules::firmware),
    ("hot-plug", kata_rules::hot_plug),
    ("root-ports", kata_rules::root_ports),
    ("vcpus", kata_rules::vcpus),
    ("deadlines", kata_rules::deadlines),
    ("qemu-version", vm_rules::qemu_version),
    ("iommufd-used", vm_rules::iommufd_used),
    ("huge-page-use", vm_rules::huge_page_use),
    ("memory-node", vm_rules::memory_node),
    ("no-mmap", vm_rules::no_mmap),
    ("prealloc", vm_rules::prealloc),
    ("pinning", vm_rules::pinning),
    ("bar-alignment", device_rules::bar_alignment),
    ("bar-size", device_rules::bar_size),
    ("power-state", device_rules::power_state),
    ("link", device_rules::link),
    ("reset-method", device_rules::reset_method),
    ("gpu-outlier", device_rules::outlier),
    ("guest-kernel", guest_rules::kernel),
    ("guest-pci", guest_rules::pci),
    ("guest-modules", guest_rules::modules),
    ("guest-firmware", guest_rules::firmware),
    ("memory-acceptance", guest_rules::acceptance),
    ("clocksource", guest_rules::clocksource),
    ("gaps", guest_rules::gaps),
];

/// All rules with their checks.
pub fn checks() -> impl Iterator<Item = (&'static Rule, Check)> {
    RULES
        .iter()
        .zip(CHECKS)
        .map(|(rule, (_, check))| (rule, *check))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_has_its_own_check() {
        let rules: Vec<&str> = RULES.iter().map(|rule| rule.id).collect();
        let checks: Vec<&str> = CHECKS.iter().map(|(id, _)| *id).collect();
        assert_eq!(rules, checks);
    }
}
