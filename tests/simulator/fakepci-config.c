// SPDX-License-Identifier: GPL-2.0
/*
 * fakepci - config space of the functions
 *
 * To the PCI core they are NVIDIA H100s as firmware leaves them: identity, BARs
 * with addresses, PCIe and MSI-X capability, memory decoding off.
 *
 * What costs time: the config write that turns memory decoding on. Under QEMU
 * the host maps the BARs inside that exit, with its global lock held and the
 * guest's CPU gone; the guest's own config lock is held around it. So the write
 * spins for `enable_ms` with host_lock held and interrupts off, and every other
 * config access of any function spins behind it.
 *
 * Invariants: config space is read and written only under host_lock. An access
 * never sleeps: the PCI core makes some of them in atomic context.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/mm.h>
#include <linux/module.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/version.h>
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
#include <linux/unaligned.h>
#else
#include <asm/unaligned.h>
#endif

#include <asm/tsc.h>

#include "fakepci.h"

/* Interrupts are off for this long: well below the stall detectors' 20 s. */
#define FAKEPCI_MAX_ENABLE_MS	10000

/* Identity and capability layout of an H100 SXM5 80GB. */
#define GPU_DEVICE_ID		0x2330
#define GPU_SUBSYSTEM_ID	0x16c1
#define GPU_REVISION		0xa1
#define GPU_CAP_PCIE		0x60
#define GPU_CAP_MSIX		0x80
#define GPU_MSIX_VECTORS	9
#define GPU_MSIX_TABLE		0x00b90000	/* offset in BAR0 */
#define GPU_MSIX_PBA		0x00ba0000

struct fakepci_gpu {
	u8 config[PCI_CFG_SPACE_EXP_SIZE];
	/* Bits of the first 256 bytes that a write changes; the rest is fixed. */
	u8 writable[PCI_CFG_SPACE_SIZE];
	bool present;
	struct fakepci_counters count;
};

FAKEPCI_LIST(enable_ms,
	     "what turning memory decoding on costs, per GPU; the last value goes for the rest");
FAKEPCI_LIST(device, "PCI device id, per GPU; the last value goes for the rest; default 0x2330");
FAKEPCI_LIST(no_msix, "GPUs without MSI-X, that is without any interrupt");

static struct fakepci_gpu *gpus;
static DEFINE_RAW_SPINLOCK(host_lock);

unsigned int fakepci_enable_ms(unsigned int k)
{
	return fakepci_value(enable_ms, k, 0);
}

static struct fakepci_gpu *fakepci_find(struct pci_bus *bus, unsigned int devfn,
					int where, int size)
{
	if (bus->number || PCI_FUNC(devfn) || PCI_SLOT(devfn) >= fakepci_gpus)
		return NULL;
	if (where < 0 || where + size > PCI_CFG_SPACE_EXP_SIZE)
		return NULL;
	return &gpus[PCI_SLOT(devfn)];
}

static int fakepci_read(struct pci_bus *bus, unsigned int devfn, int where,
			int size, u32 *val)
{
	struct fakepci_gpu *gpu = fakepci_find(bus, devfn, where, size);
	unsigned long flags;
	int i;

	if (!gpu) {
		PCI_SET_ERROR_RESPONSE(val);
		return PCIBIOS_DEVICE_NOT_FOUND;
	}

	*val = 0;
	raw_spin_lock_irqsave(&host_lock, flags);
	gpu->count.reads++;
	for (i = 0; i < size; i++)
		*val |= (u32)(gpu->present ? gpu->config[where + i] : 0xff) << (8 * i);
	raw_spin_unlock_irqrestore(&host_lock, flags);
	return PCIBIOS_SUCCESSFUL;
}

/* The CPU is gone for this time, whatever else the machine is doing: mdelay() counts
 * loops where the kernel does not trust the TSC, and takes longer on a busy host.
 */
static void fakepci_map_bars(unsigned int ms)
{
	u64 end = rdtsc_ordered() + (u64)ms * tsc_khz;

	while ((s64)(rdtsc_ordered() - end) < 0)
		cpu_relax();
}

static int fakepci_write(struct pci_bus *bus, unsigned int devfn, int where,
			 int size, u32 val)
{
	struct fakepci_gpu *gpu = fakepci_find(bus, devfn, where, size);
	unsigned long flags;
	u16 before, after;
	int i;

	if (!gpu)
		return PCIBIOS_DEVICE_NOT_FOUND;

	raw_spin_lock_irqsave(&host_lock, flags);
	gpu->count.writes++;
	before = get_unaligned_le16(&gpu->config[PCI_COMMAND]);
	for (i = 0; gpu->present && i < size && where + i < PCI_CFG_SPACE_SIZE; i++) {
		u8 *byte = &gpu->config[where + i];
		u8 mask = gpu->writable[where + i];

		*byte = (*byte & ~mask) | ((val >> (8 * i)) & mask);
	}
	after = get_unaligned_le16(&gpu->config[PCI_COMMAND]);
	if (after & ~before & PCI_COMMAND_MEMORY) {
		gpu->count.enables++;
		fakepci_map_bars(fakepci_enable_ms(PCI_SLOT(devfn)));
	}
	raw_spin_unlock_irqrestore(&host_lock, flags);
	return PCIBIOS_SUCCESSFUL;
}

struct pci_ops fakepci_ops = {
	.read = fakepci_read,
	.write = fakepci_write,
};

/* As firmware leaves the function: identity and addresses, nothing enabled. */
static void fakepci_init_config(unsigned int k)
{
	u8 *config = gpus[k].config;
	u8 *writable = gpus[k].writable;
	unsigned int bar;

	memset(config, 0, sizeof(gpus[k].config));
	memset(writable, 0, sizeof(gpus[k].writable));
	put_unaligned_le16(PCI_VENDOR_ID_NVIDIA, config + PCI_VENDOR_ID);
	put_unaligned_le16(fakepci_value(device, k, GPU_DEVICE_ID), config + PCI_DEVICE_ID);
	put_unaligned_le16(PCI_STATUS_CAP_LIST, config + PCI_STATUS);
	put_unaligned_le32(PCI_CLASS_DISPLAY_3D << 16 | GPU_REVISION,
			   config + PCI_CLASS_REVISION);
	put_unaligned_le16(PCI_VENDOR_ID_NVIDIA, config + PCI_SUBSYSTEM_VENDOR_ID);
	put_unaligned_le16(GPU_SUBSYSTEM_ID, config + PCI_SUBSYSTEM_ID);
	config[PCI_CAPABILITY_LIST] = GPU_CAP_PCIE;

	put_unaligned_le16(PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER |
			   PCI_COMMAND_PARITY | PCI_COMMAND_SERR |
			   PCI_COMMAND_INTX_DISABLE, writable + PCI_COMMAND);
	writable[PCI_CACHE_LINE_SIZE] = 0xff;
	writable[PCI_INTERRUPT_LINE] = 0xff;

	for (bar = 0; bar < FAKEPCI_BARS; bar++) {
		const struct fakepci_bar *b = &fakepci_bars[bar];

		if (!fakepci_has_bar(k, bar))
			continue;
		put_unaligned_le64(fakepci_bar_address(k, bar) |
				   PCI_BASE_ADDRESS_MEM_TYPE_64 |
				   PCI_BASE_ADDRESS_MEM_PREFETCH,
				   config + b->reg);
		/* Address bits below the size are fixed: so sizing works. */
		put_unaligned_le64(~(b->size - 1), writable + b->reg);
	}

	/*
	 * A root complex integrated endpoint: the type for a function that sits
	 * on a root bus, without a link whose partner the core would look for.
	 */
	config[GPU_CAP_PCIE + PCI_CAP_LIST_ID] = PCI_CAP_ID_EXP;
	config[GPU_CAP_PCIE + PCI_CAP_LIST_NEXT] =
		fakepci_listed(no_msix, k) ? 0 : GPU_CAP_MSIX;
	put_unaligned_le16(PCI_EXP_TYPE_RC_END << 4 | 2,
			   config + GPU_CAP_PCIE + PCI_EXP_FLAGS);
	put_unaligned_le32(PCI_EXP_DEVCAP_RBER,
			   config + GPU_CAP_PCIE + PCI_EXP_DEVCAP);
	put_unaligned_le16(0x7fff, writable + GPU_CAP_PCIE + PCI_EXP_DEVCTL);

	config[GPU_CAP_MSIX + PCI_CAP_LIST_ID] = PCI_CAP_ID_MSIX;
	put_unaligned_le16(GPU_MSIX_VECTORS - 1,
			   config + GPU_CAP_MSIX + PCI_MSIX_FLAGS);
	put_unaligned_le16(PCI_MSIX_FLAGS_ENABLE | PCI_MSIX_FLAGS_MASKALL,
			   writable + GPU_CAP_MSIX + PCI_MSIX_FLAGS);
	put_unaligned_le32(GPU_MSIX_TABLE, config + GPU_CAP_MSIX + PCI_MSIX_TABLE);
	put_unaligned_le32(GPU_MSIX_PBA, config + GPU_CAP_MSIX + PCI_MSIX_PBA);
}

void fakepci_set_present(unsigned int k, bool present)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&host_lock, flags);
	if (present && !gpus[k].present)
		fakepci_init_config(k);
	gpus[k].present = present;
	raw_spin_unlock_irqrestore(&host_lock, flags);
}

struct fakepci_counters fakepci_count(unsigned int k)
{
	struct fakepci_counters count;
	unsigned long flags;

	raw_spin_lock_irqsave(&host_lock, flags);
	count = gpus[k].count;
	raw_spin_unlock_irqrestore(&host_lock, flags);
	return count;
}

int fakepci_config_init(void)
{
	unsigned int i;

	for (i = 0; i < enable_ms_count; i++) {
		if (enable_ms[i] > FAKEPCI_MAX_ENABLE_MS) {
			pr_err("enable_ms=%u: want 0..%u\n", enable_ms[i],
			       FAKEPCI_MAX_ENABLE_MS);
			return -EINVAL;
		}
	}
	gpus = kvcalloc(FAKEPCI_MAX_GPUS, sizeof(*gpus), GFP_KERNEL);
	return gpus ? 0 : -ENOMEM;
}

void fakepci_config_exit(void)
{
	kvfree(gpus);
}
