// SPDX-License-Identifier: GPL-2.0
/*
 * fakepci - config space of the functions
 *
 * To the PCI core they are NVIDIA H100s as firmware leaves them: identity, BARs
 * with addresses, PCIe and MSI-X capability, memory decoding off.
 *
 * NVSwitches and Mellanox functions have an identity and no BARs; the latter have
 * vital product data (VPD), whose bytes are there at once.
 *
 * Cost in time: the config write that turns memory decoding on. Under QEMU
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
#include <linux/timekeeping.h>
#include <linux/version.h>
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
#include <linux/unaligned.h>
#else
#include <asm/unaligned.h>
#endif

#ifdef CONFIG_X86
#include <asm/tsc.h>
#else
#include <asm/sysreg.h>
#endif

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

#define SWITCH_DEVICE_ID	0x22a3
#define CX7_DEVICE_ID		0x1021
#define CX7_CAP_VPD		0x48

/* A large resource: its tag, and its length in two bytes. */
#define VPD_LARGE(tag, length)	tag, (length) & 0xff, (length) >> 8
#define VPD_NAME_TAG		0x82
#define VPD_READ_ONLY_TAG	0x90
#define VPD_END			0x78

/* As NVIDIA's boards have it, shortened. The second one is that of an ordinary function. */
static const char cx7_name[] = "ConnectX-7";
static const char cx7_manages[] = "MLX:MN=MLNX:CSKU=V2:UUID=V3:PCI=V0:MODL=CX7:SMDL=SW_MNG";
static const char cx7_ordinary[] = "MLX:MN=MLNX:CSKU=V2:UUID=V3:PCI=V0:MODL=CX75310A";

static void fakepci_init_config(unsigned int k);

struct fakepci_gpu {
	u8 config[PCI_CFG_SPACE_EXP_SIZE];
	/* Bits of the first 256 bytes that a write changes; the rest is fixed. */
	u8 writable[PCI_CFG_SPACE_SIZE];
	bool present;
	struct fakepci_counters count;
	u8 vpd[128];
	unsigned int vpd_size;
};

FAKEPCI_LIST(enable_ms,
	     "what turning memory decoding on costs, per GPU; the last value goes for the rest");
FAKEPCI_LIST(device, "PCI device id, per GPU; the last value goes for the rest; default 0x2330");
FAKEPCI_LIST(flr, "GPUs that can be reset: function-level reset, counted at 0xfc of config space");
FAKEPCI_LIST(flr_hang, "GPUs that read all ones for ever after a function-level reset");
FAKEPCI_LIST(cx7_plain, "Mellanox functions, from 0, that are ordinary ones");
FAKEPCI_LIST(cx7_silent, "Mellanox functions, from 0, whose VPD never comes");
FAKEPCI_LIST(no_msix, "GPUs without MSI-X, that is without any interrupt");

static struct fakepci_gpu *gpus;
static DEFINE_RAW_SPINLOCK(host_lock);

unsigned int fakepci_enable_ms(unsigned int k)
{
	return fakepci_value(enable_ms, k, 0);
}

bool fakepci_is_there(unsigned int slot)
{
	if (slot < FAKEPCI_FIRST_SWITCH)
		return slot < fakepci_gpus;
	if (slot < FAKEPCI_FIRST_CX7)
		return slot - FAKEPCI_FIRST_SWITCH < fakepci_switches;
	return slot < FAKEPCI_FUNCTIONS && slot - FAKEPCI_FIRST_CX7 < fakepci_cx7;
}

static struct fakepci_gpu *fakepci_find(struct pci_bus *bus, unsigned int devfn,
					int where, int size)
{
	if (bus->number || PCI_FUNC(devfn) || !fakepci_is_there(PCI_SLOT(devfn)))
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

/* The CPU's own counter, in order with what surrounds it, and its ticks per millisecond. */
#ifdef CONFIG_X86
#define fakepci_counter()	rdtsc_ordered()
#define fakepci_counter_khz()	tsc_khz
#else
static u64 fakepci_counter(void)
{
	isb();
	return read_sysreg(cntvct_el0);
}
#define fakepci_counter_khz()	(read_sysreg(cntfrq_el0) / 1000)
#endif

/* Times by which the counter's rate may be wrong. */
#define FAKEPCI_WRONG_RATE	32
/* Turns between two looks at the clock, whose register is a device's. */
#define FAKEPCI_TURNS		256

/* The CPU is gone for this time, by the kernel's clock: the rate of the counter is measured as the
 * kernel boots, and was a tenth of the true one on a busy machine; mdelay() counts loops where the
 * kernel does not trust the counter. A clock that needs interrupts of this CPU would stand still:
 * the counter ends that.
 */
static void fakepci_map_bars(unsigned int ms)
{
	u64 end = ktime_get_mono_fast_ns() + (u64)ms * NSEC_PER_MSEC;
	u64 limit = (u64)ms * fakepci_counter_khz() * FAKEPCI_WRONG_RATE;
	u64 begin = fakepci_counter();
	unsigned int i;

	while (ktime_get_mono_fast_ns() < end && fakepci_counter() - begin < limit)
		for (i = 0; i < FAKEPCI_TURNS; i++)
			cpu_relax();
}

/* Until no BAR is being mapped. */
void fakepci_wait_for_host(void)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&host_lock, flags);
	raw_spin_unlock_irqrestore(&host_lock, flags);
}

/* Four bytes of VPD, once their address was written; the flag says that they are there. */
static void fakepci_read_vpd(struct fakepci_gpu *function, unsigned int slot)
{
	u8 *cap = function->config + CX7_CAP_VPD;
	u16 at = get_unaligned_le16(cap + PCI_VPD_ADDR);
	unsigned int i;

	if (at & PCI_VPD_ADDR_F)
		return;
	function->count.vpd++;
	if (fakepci_listed(cx7_silent, slot - FAKEPCI_FIRST_CX7))
		return;
	for (i = 0; i < 4; i++)
		cap[PCI_VPD_DATA + i] = at + i < function->vpd_size ? function->vpd[at + i] : 0;
	put_unaligned_le16(at | PCI_VPD_ADDR_F, cap + PCI_VPD_ADDR);
}

/*
 * A function-level reset: config space is as after power-on, addresses of BARs
 * included, which the core restores anyway. The count stays, for the driver.
 */
static void fakepci_reset(struct fakepci_gpu *gpu, unsigned int k)
{
	u8 count = gpu->config[FAKEPCI_RESETS] + 1;

	fakepci_init_config(k);
	gpu->config[FAKEPCI_RESETS] = count;
	gpu->count.resets++;
	if (fakepci_listed(flr_hang, k))
		gpu->present = false;
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
	if (where == GPU_CAP_PCIE + PCI_EXP_DEVCTL && val & PCI_EXP_DEVCTL_BCR_FLR &&
	    fakepci_listed(flr, PCI_SLOT(devfn)))
		fakepci_reset(gpu, PCI_SLOT(devfn));
	if (where == FAKEPCI_LOSE_AT && PCI_SLOT(devfn) < FAKEPCI_FIRST_SWITCH)
		gpu->present = false;
	if (gpu->vpd_size && where <= CX7_CAP_VPD + PCI_VPD_ADDR + 1 &&
	    where + size > CX7_CAP_VPD + PCI_VPD_ADDR)
		fakepci_read_vpd(gpu, PCI_SLOT(devfn));
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
	put_unaligned_le32(PCI_EXP_DEVCAP_RBER |
			   (fakepci_listed(flr, k) ? PCI_EXP_DEVCAP_FLR : 0),
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

/* Identity, and a PCIe capability as the GPUs have it. */
static void fakepci_init_other(unsigned int k, u16 vendor, u16 device, u32 class, u8 next)
{
	u8 *config = gpus[k].config;
	u8 *writable = gpus[k].writable;

	memset(config, 0, sizeof(gpus[k].config));
	memset(writable, 0, sizeof(gpus[k].writable));
	put_unaligned_le16(vendor, config + PCI_VENDOR_ID);
	put_unaligned_le16(device, config + PCI_DEVICE_ID);
	put_unaligned_le16(PCI_STATUS_CAP_LIST, config + PCI_STATUS);
	put_unaligned_le32(class << 8, config + PCI_CLASS_REVISION);
	put_unaligned_le16(vendor, config + PCI_SUBSYSTEM_VENDOR_ID);
	put_unaligned_le16(PCI_COMMAND_MASTER | PCI_COMMAND_INTX_DISABLE, writable + PCI_COMMAND);
	config[PCI_CAPABILITY_LIST] = GPU_CAP_PCIE;
	config[GPU_CAP_PCIE + PCI_CAP_LIST_ID] = PCI_CAP_ID_EXP;
	config[GPU_CAP_PCIE + PCI_CAP_LIST_NEXT] = next;
	put_unaligned_le16(PCI_EXP_TYPE_RC_END << 4 | 2, config + GPU_CAP_PCIE + PCI_EXP_FLAGS);
	put_unaligned_le32(PCI_EXP_DEVCAP_RBER, config + GPU_CAP_PCIE + PCI_EXP_DEVCAP);
}

static u8 *fakepci_put(u8 *to, const void *from, unsigned int size)
{
	memcpy(to, from, size);
	return to + size;
}

static void fakepci_init_cx7(unsigned int k)
{
	bool plain = fakepci_listed(cx7_plain, k - FAKEPCI_FIRST_CX7);
	const char *parameters = plain ? cx7_ordinary : cx7_manages;
	unsigned int length = strlen(parameters), name = strlen(cx7_name);
	const u8 head[] = { VPD_LARGE(VPD_NAME_TAG, name) };
	const u8 fields[] = { VPD_LARGE(VPD_READ_ONLY_TAG, 3 + length), 'V', 'A', length };
	const u8 end = VPD_END;
	u8 *vpd = gpus[k].vpd;

	fakepci_init_other(k, PCI_VENDOR_ID_MELLANOX, CX7_DEVICE_ID,
			   plain ? PCI_CLASS_NETWORK_ETHERNET << 8 : 0x020700, CX7_CAP_VPD);
	gpus[k].config[CX7_CAP_VPD + PCI_CAP_LIST_ID] = PCI_CAP_ID_VPD;
	put_unaligned_le16(0xffff, gpus[k].writable + CX7_CAP_VPD + PCI_VPD_ADDR);
	vpd = fakepci_put(vpd, head, sizeof(head));
	vpd = fakepci_put(vpd, cx7_name, name);
	vpd = fakepci_put(vpd, fields, sizeof(fields));
	vpd = fakepci_put(vpd, parameters, length);
	vpd = fakepci_put(vpd, &end, sizeof(end));
	gpus[k].vpd_size = vpd - gpus[k].vpd;
}

static void fakepci_init_function(unsigned int k)
{
	if (k < FAKEPCI_FIRST_SWITCH)
		fakepci_init_config(k);
	else if (k < FAKEPCI_FIRST_CX7)
		fakepci_init_other(k, PCI_VENDOR_ID_NVIDIA, SWITCH_DEVICE_ID,
				   PCI_CLASS_BRIDGE_OTHER << 8, 0);
	else
		fakepci_init_cx7(k);
}

void fakepci_set_present(unsigned int k, bool present)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&host_lock, flags);
	if (present && !gpus[k].present)
		fakepci_init_function(k);
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
	gpus = kvcalloc(FAKEPCI_FUNCTIONS, sizeof(*gpus), GFP_KERNEL);
	return gpus ? 0 : -ENOMEM;
}

void fakepci_config_exit(void)
{
	kvfree(gpus);
}
