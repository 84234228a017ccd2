// SPDX-License-Identifier: GPL-2.0
/*
 * fakepci - PCI root bus with GPU functions that have no hardware behind them
 *
 * Registers a root bus in a PCI domain of its own (0001) with `gpus`
 * functions, one per slot. To the PCI core they are NVIDIA H100s as firmware
 * leaves them: identity, BARs with addresses, PCIe and MSI-X capability,
 * memory decoding off. Everything above config space (scan, sysfs, claim,
 * enable, bind) is the kernel's own code.
 *
 * What costs time: the config write that turns memory decoding on. Under QEMU
 * the host maps the BARs inside that exit, with its global lock held and the
 * guest's CPU gone; the guest's own config lock is held around it. So the write
 * spins for `enable_ms` with host_lock held and interrupts off, and every other
 * config access of any function spins behind it.
 *
 * Functions come and go: "add K" and "remove K" written to /proc/fakepci plug
 * one in, or take it away by surprise: config space and registers read all ones
 * from then on, and then the PCI core removes it. "lose K" stops before that:
 * the function has fallen off the bus, and nobody has been told.
 *
 * With `bar0`, register spaces lie in RAM that the kernel was told to leave
 * alone (mem=), and hold the few registers from which NVIDIA's own driver knows
 * an H100 and believes that its FSP has booted. That is all of the hardware
 * that this driver needs to bind, and to fail its initialisation honestly.
 *
 * Invariants: config space is read and written only under host_lock. An access
 * never sleeps: the PCI core makes some of them in atomic context.
 *
 * What it is not: there is nothing else behind the BARs. Without `bar0`, reading
 * one gives what the machine gives for an unused address.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/io.h>
#include <linux/ioport.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/uaccess.h>
#include <linux/version.h>
#include <linux/workqueue.h>
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
#include <linux/unaligned.h>
#else
#include <asm/unaligned.h>
#endif

#include <asm/tsc.h>

#ifndef CONFIG_X86_64
#error "fakepci needs the x86-64 struct pci_sysdata"
#endif

#define FAKEPCI_DOMAIN		1
#define FAKEPCI_MAX_GPUS	16
/* Interrupts are off for this long: well below the stall detectors' 20 s. */
#define FAKEPCI_MAX_ENABLE_MS	10000

/*
 * BARs lie in one window from 16 TiB on: above any RAM and above what PC
 * firmware gives its own root bus, below 2^46 (QEMU -cpu max,phys-bits=46).
 */
#define FAKEPCI_WINDOW_BASE	0x100000000000ULL

/* Identity and capability layout of an H100 SXM5 80GB. */
#define GPU_DEVICE_ID		0x2330
#define GPU_SUBSYSTEM_ID	0x16c1
#define GPU_REVISION		0xa1
#define GPU_CAP_PCIE		0x60
#define GPU_CAP_MSIX		0x80
#define GPU_MSIX_VECTORS	9
#define GPU_MSIX_TABLE		0x00b90000	/* offset in BAR0 */
#define GPU_MSIX_PBA		0x00ba0000

static const struct fakepci_bar {
	unsigned int reg;
	u64 size;
} gpu_bars[] = {
	/* Largest first: that keeps all of them naturally aligned. */
	{ PCI_BASE_ADDRESS_2, 128ULL * SZ_1G },
	{ PCI_BASE_ADDRESS_4, SZ_32M },
	{ PCI_BASE_ADDRESS_0, SZ_16M },
};

/* Indices in the table. */
#define GPU_BAR1	0	/* the GPU's memory; PCI's BAR 2 */
#define GPU_BAR0	2	/* its registers */

/* Registers of an H100 that NVIDIA's driver reads before it touches anything. */
#define NV_PMC_BOOT_0		0x00000000
#define NV_PMC_BOOT_42		0x00000a00
#define NV_FSP_BOOT_COMPLETE	0x000200bc
#define GH100_BOOT_42		0x180a1000
/* PMC_BOOT_0 has architecture and implementation at the same place. */
#define BOOT_CHIP_MASK		0x1ff00000
#define BOOT_0_REVISION		0xa1
#define FSP_BOOT_OK		0xff

struct fakepci_gpu {
	u8 config[PCI_CFG_SPACE_EXP_SIZE];
	/* Bits of the first 256 bytes that a write changes; the rest is fixed. */
	u8 writable[PCI_CFG_SPACE_SIZE];
	bool present;
	u64 reads;
	u64 writes;
	u64 enables;
};

static unsigned int gpus = 8;
module_param(gpus, uint, 0444);
MODULE_PARM_DESC(gpus, "number of GPU functions, 0..16");

static unsigned int enable_ms[FAKEPCI_MAX_GPUS];
static unsigned int enable_ms_count;
module_param_array(enable_ms, uint, &enable_ms_count, 0444);
MODULE_PARM_DESC(enable_ms,
		 "what turning memory decoding on costs, per GPU; the last value goes for the rest");

static unsigned int device[FAKEPCI_MAX_GPUS];
static unsigned int device_count;
module_param_array(device, uint, &device_count, 0444);
MODULE_PARM_DESC(device, "PCI device id, per GPU; the last value goes for the rest; default 0x2330");

static unsigned int chip[FAKEPCI_MAX_GPUS];
static unsigned int chip_count;
module_param_array(chip, uint, &chip_count, 0444);
MODULE_PARM_DESC(chip,
		 "PMC_BOOT_42 per GPU, that is its chip (bar0); the last value goes for the rest; 0: none; default 0x180a1000, GH100");

static unsigned long bar0;
module_param(bar0, ulong, 0444);
MODULE_PARM_DESC(bar0, "address of RAM that nobody uses, for 16 MiB of registers per GPU; default: no registers");

/* Lists of GPUs, by slot. */
#define FAKEPCI_LIST(name, text)					\
	static unsigned int name[FAKEPCI_MAX_GPUS];			\
	static unsigned int name##_count;				\
	module_param_array(name, uint, &name##_count, 0444);		\
	MODULE_PARM_DESC(name, text)

FAKEPCI_LIST(absent, "GPUs that are not there until they are added");
FAKEPCI_LIST(off_bus, "GPUs whose registers read all ones (bar0)");
FAKEPCI_LIST(fsp_dead, "GPUs whose FSP never says that it has booted (bar0)");
FAKEPCI_LIST(no_msix, "GPUs without MSI-X, that is without any interrupt");
FAKEPCI_LIST(bar_missing, "GPUs without a BAR 0");
FAKEPCI_LIST(bar_conflict, "GPUs whose BAR 0 lies where that of GPU 0 is: they cannot be enabled");
FAKEPCI_LIST(bar_unassigned,
	     "GPUs whose BAR of 128 GiB has no address, as where the guest's window is too small");

#define fakepci_listed(name, k)	fakepci_in_list(name, name##_count, k)

static bool fakepci_in_list(const unsigned int *list, unsigned int count,
			    unsigned int k)
{
	unsigned int i;

	for (i = 0; i < count; i++)
		if (list[i] == k)
			return true;
	return false;
}

static struct fakepci_gpu *fakepci_gpus;
static struct workqueue_struct *fakepci_plugging;
static DEFINE_RAW_SPINLOCK(host_lock);

static struct pci_bus *fakepci_bus;
static struct pci_sysdata fakepci_sysdata = {
	.domain = FAKEPCI_DOMAIN,
	.node = NUMA_NO_NODE,
};

static struct resource fakepci_busn = {
	.name = "fakepci bus",
	.flags = IORESOURCE_BUS,
};

static struct resource fakepci_window = {
	.name = "fakepci BARs",
	.start = FAKEPCI_WINDOW_BASE,
	.flags = IORESOURCE_MEM | IORESOURCE_MEM_64,
};

static struct resource fakepci_registers = {
	.name = "fakepci registers",
	.flags = IORESOURCE_MEM,
};

/* BARs of one kind lie side by side; the kinds follow each other by size. */
static u64 fakepci_bar_base(unsigned int gpu, unsigned int bar)
{
	u64 base = FAKEPCI_WINDOW_BASE;
	unsigned int i;

	if (bar == GPU_BAR0 && bar0)
		return bar0 + gpu_bars[GPU_BAR0].size * gpu;

	for (i = 0; i < bar; i++)
		base += gpu_bars[i].size * FAKEPCI_MAX_GPUS;
	return base + gpu_bars[bar].size * gpu;
}

/* Where firmware, good or bad, has put it. */
static u64 fakepci_bar_address(unsigned int gpu, unsigned int bar)
{
	if (bar == GPU_BAR1 && fakepci_listed(bar_unassigned, gpu))
		return 0;
	if (bar == GPU_BAR0 && fakepci_listed(bar_conflict, gpu))
		gpu = 0;
	return fakepci_bar_base(gpu, bar);
}

static unsigned int fakepci_device_id(unsigned int gpu)
{
	if (!device_count)
		return GPU_DEVICE_ID;
	return device[min(gpu, device_count - 1)];
}

static unsigned int fakepci_chip(unsigned int gpu)
{
	if (!chip_count)
		return GH100_BOOT_42;
	return chip[min(gpu, chip_count - 1)];
}

static unsigned int fakepci_enable_ms(unsigned int gpu)
{
	if (!enable_ms_count)
		return 0;
	return enable_ms[min(gpu, enable_ms_count - 1)];
}

static struct fakepci_gpu *fakepci_find(struct pci_bus *bus, unsigned int devfn,
					int where, int size)
{
	if (bus->number || PCI_FUNC(devfn) || PCI_SLOT(devfn) >= gpus)
		return NULL;
	if (where < 0 || where + size > PCI_CFG_SPACE_EXP_SIZE)
		return NULL;
	return &fakepci_gpus[PCI_SLOT(devfn)];
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
	gpu->reads++;
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
	gpu->writes++;
	before = get_unaligned_le16(&gpu->config[PCI_COMMAND]);
	for (i = 0; gpu->present && i < size && where + i < PCI_CFG_SPACE_SIZE; i++) {
		u8 *byte = &gpu->config[where + i];
		u8 mask = gpu->writable[where + i];

		*byte = (*byte & ~mask) | ((val >> (8 * i)) & mask);
	}
	after = get_unaligned_le16(&gpu->config[PCI_COMMAND]);
	if (after & ~before & PCI_COMMAND_MEMORY) {
		gpu->enables++;
		fakepci_map_bars(fakepci_enable_ms(PCI_SLOT(devfn)));
	}
	raw_spin_unlock_irqrestore(&host_lock, flags);
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops fakepci_ops = {
	.read = fakepci_read,
	.write = fakepci_write,
};

/* As firmware leaves the function: identity and addresses, nothing enabled. */
static void fakepci_init_config(unsigned int k)
{
	u8 *config = fakepci_gpus[k].config;
	u8 *writable = fakepci_gpus[k].writable;
	unsigned int bar;

	memset(config, 0, sizeof(fakepci_gpus[k].config));
	memset(writable, 0, sizeof(fakepci_gpus[k].writable));
	put_unaligned_le16(PCI_VENDOR_ID_NVIDIA, config + PCI_VENDOR_ID);
	put_unaligned_le16(fakepci_device_id(k), config + PCI_DEVICE_ID);
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

	for (bar = 0; bar < ARRAY_SIZE(gpu_bars); bar++) {
		const struct fakepci_bar *b = &gpu_bars[bar];

		if (bar == GPU_BAR0 && fakepci_listed(bar_missing, k))
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

/* Registers of a function: as after its power-on, or of one that is not there. */
static int fakepci_set_registers(unsigned int k, bool there)
{
	size_t size = gpu_bars[GPU_BAR0].size;
	u32 boot_42 = fakepci_chip(k);
	void __iomem *regs;

	if (!bar0)
		return 0;
	regs = ioremap(fakepci_bar_base(k, GPU_BAR0), size);
	if (!regs) {
		pr_err("bar0=%#lx: cannot be mapped; is it behind the kernel's own RAM (mem=)?\n",
		       bar0);
		return -ENXIO;
	}
	if (!there || fakepci_listed(off_bus, k)) {
		memset_io(regs, 0xff, size);
	} else {
		memset_io(regs, 0, size);
		writel(boot_42 ? (boot_42 & BOOT_CHIP_MASK) | BOOT_0_REVISION : 0,
		       regs + NV_PMC_BOOT_0);
		writel(boot_42, regs + NV_PMC_BOOT_42);
		writel(fakepci_listed(fsp_dead, k) ? 0 : FSP_BOOT_OK,
		       regs + NV_FSP_BOOT_COMPLETE);
	}
	iounmap(regs);
	return 0;
}

static void fakepci_set_present(unsigned int k, bool present)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&host_lock, flags);
	if (present && !fakepci_gpus[k].present)
		fakepci_init_config(k);
	fakepci_gpus[k].present = present;
	raw_spin_unlock_irqrestore(&host_lock, flags);
}

/* What happens to a function. */
enum fakepci_event {
	FAKEPCI_ADD,
	FAKEPCI_REMOVE,
	FAKEPCI_LOSE,
};

static const char * const fakepci_verbs[] = {
	[FAKEPCI_ADD] = "add",
	[FAKEPCI_REMOVE] = "remove",
	[FAKEPCI_LOSE] = "lose",
};

/* One command: "add K", "remove K" or "lose K". */
struct fakepci_plug {
	struct work_struct work;
	unsigned int slot;
	enum fakepci_event event;
};

static void fakepci_plug_in(unsigned int k)
{
	struct pci_dev *pdev = pci_get_slot(fakepci_bus, PCI_DEVFN(k, 0));
	int bar;

	if (pdev) {
		pr_err("add %u: it is there already\n", k);
		pci_dev_put(pdev);
		return;
	}
	fakepci_set_registers(k, true);
	fakepci_set_present(k, true);
	pdev = pci_scan_single_device(fakepci_bus, PCI_DEVFN(k, 0));
	if (!pdev) {
		pr_err("add %u: the scan finds nothing\n", k);
		return;
	}
	/* The BARs have their addresses, as at boot; the core says what is wrong with one. */
	for (bar = 0; bar < PCI_STD_NUM_BARS; bar++)
		if (pdev->resource[bar].flags && !pdev->resource[bar].parent)
			(void)pci_claim_resource(pdev, bar);
	pci_bus_add_device(pdev);
}

/* First the hardware goes, then somebody notices. */
static void fakepci_lose(unsigned int k)
{
	fakepci_set_present(k, false);
	fakepci_set_registers(k, false);
}

static void fakepci_pull_out(unsigned int k)
{
	struct pci_dev *pdev = pci_get_slot(fakepci_bus, PCI_DEVFN(k, 0));

	fakepci_lose(k);
	if (!pdev)
		return;
	pci_stop_and_remove_bus_device(pdev);
	pci_dev_put(pdev);
}

static void fakepci_plug_work(struct work_struct *work)
{
	struct fakepci_plug *plug = container_of(work, struct fakepci_plug, work);

	pci_lock_rescan_remove();
	switch (plug->event) {
	case FAKEPCI_ADD:
		fakepci_plug_in(plug->slot);
		break;
	case FAKEPCI_REMOVE:
		fakepci_pull_out(plug->slot);
		break;
	case FAKEPCI_LOSE:
		fakepci_lose(plug->slot);
		break;
	}
	pci_unlock_rescan_remove();
	kfree(plug);
}

/* Returns before it is done: a removal waits for the driver. */
static ssize_t fakepci_write_proc(struct file *file, const char __user *text,
				  size_t count, loff_t *pos)
{
	struct fakepci_plug *plug;
	char command[32], verb[8];
	unsigned int slot;
	int event;

	if (count >= sizeof(command))
		return -EINVAL;
	if (copy_from_user(command, text, count))
		return -EFAULT;
	command[count] = 0;
	if (sscanf(command, "%7s %u", verb, &slot) != 2 || slot >= gpus)
		return -EINVAL;
	event = match_string(fakepci_verbs, ARRAY_SIZE(fakepci_verbs), verb);
	if (event < 0)
		return event;

	plug = kzalloc(sizeof(*plug), GFP_KERNEL);
	if (!plug)
		return -ENOMEM;
	INIT_WORK(&plug->work, fakepci_plug_work);
	plug->slot = slot;
	plug->event = event;
	queue_work(fakepci_plugging, &plug->work);
	return count;
}

/* /proc/fakepci: one line per function. Reading it makes no config access. */
static int fakepci_show(struct seq_file *m, void *unused)
{
	unsigned int k;

	for (k = 0; k < gpus; k++) {
		u64 reads, writes, enables;
		unsigned long flags;

		raw_spin_lock_irqsave(&host_lock, flags);
		reads = fakepci_gpus[k].reads;
		writes = fakepci_gpus[k].writes;
		enables = fakepci_gpus[k].enables;
		raw_spin_unlock_irqrestore(&host_lock, flags);

		seq_printf(m, "%04x:00:%02x.0 reads=%llu writes=%llu enables=%llu enable_ms=%u\n",
			   FAKEPCI_DOMAIN, k, reads, writes, enables,
			   fakepci_enable_ms(k));
	}
	return 0;
}

static int fakepci_open_proc(struct inode *inode, struct file *file)
{
	return single_open(file, fakepci_show, NULL);
}

static const struct proc_ops fakepci_proc_ops = {
	.proc_open = fakepci_open_proc,
	.proc_read = seq_read,
	.proc_lseek = seq_lseek,
	.proc_release = single_release,
	.proc_write = fakepci_write_proc,
};

static int fakepci_check_params(void)
{
	unsigned int i;

	if (gpus > FAKEPCI_MAX_GPUS) {
		pr_err("gpus=%u: want 0..%u\n", gpus, FAKEPCI_MAX_GPUS);
		return -EINVAL;
	}
	for (i = 0; i < enable_ms_count; i++) {
		if (enable_ms[i] > FAKEPCI_MAX_ENABLE_MS) {
			pr_err("enable_ms=%u: want 0..%u\n", enable_ms[i],
			       FAKEPCI_MAX_ENABLE_MS);
			return -EINVAL;
		}
	}
	return 0;
}

static u64 fakepci_window_size(void)
{
	u64 size = 0;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(gpu_bars); i++)
		size += gpu_bars[i].size * FAKEPCI_MAX_GPUS;
	return size;
}

static int fakepci_request_registers(void)
{
	int err;

	if (!bar0)
		return 0;
	fakepci_registers.start = bar0;
	fakepci_registers.end = bar0 + gpu_bars[GPU_BAR0].size * FAKEPCI_MAX_GPUS - 1;
	err = insert_resource(&iomem_resource, &fakepci_registers);
	if (err)
		pr_err("registers %pR are in use, see /proc/iomem: %d\n",
		       &fakepci_registers, err);
	return err;
}

static int fakepci_request_window(void)
{
	int err;

	fakepci_window.end = FAKEPCI_WINDOW_BASE + fakepci_window_size() - 1;
	if (fakepci_window.end > iomem_resource.end) {
		pr_err("window %pR is above the CPU's addresses (%pa): start QEMU with -cpu max,phys-bits=46\n",
		       &fakepci_window, &iomem_resource.end);
		return -ENXIO;
	}
	err = insert_resource(&iomem_resource, &fakepci_window);
	if (err)
		pr_err("window %pR is in use, see /proc/iomem: %d\n",
		       &fakepci_window, err);
	return err;
}

static int fakepci_add_bus(void)
{
	LIST_HEAD(resources);

	pci_add_resource(&resources, &fakepci_window);
	if (bar0)
		pci_add_resource(&resources, &fakepci_registers);
	pci_add_resource(&resources, &fakepci_busn);

	pci_lock_rescan_remove();
	fakepci_bus = pci_scan_root_bus(NULL, fakepci_busn.start, &fakepci_ops,
					&fakepci_sysdata, &resources);
	if (fakepci_bus) {
		/* The BARs already have addresses, as after firmware. */
		pci_bus_claim_resources(fakepci_bus);
		pci_bus_add_devices(fakepci_bus);
	}
	pci_unlock_rescan_remove();

	if (!fakepci_bus) {
		pci_free_resource_list(&resources);
		pr_err("no root bus in domain %04x: is the domain taken?\n",
		       FAKEPCI_DOMAIN);
		return -ENODEV;
	}
	return 0;
}

static int __init fakepci_init(void)
{
	unsigned int k;
	int err;

	err = fakepci_check_params();
	if (err)
		return err;

	fakepci_gpus = kvcalloc(FAKEPCI_MAX_GPUS, sizeof(*fakepci_gpus), GFP_KERNEL);
	if (!fakepci_gpus)
		return -ENOMEM;
	fakepci_plugging = alloc_ordered_workqueue("fakepci", 0);
	if (!fakepci_plugging) {
		err = -ENOMEM;
		goto free_gpus;
	}
	for (k = 0; k < gpus; k++)
		fakepci_set_present(k, !fakepci_listed(absent, k));

	err = fakepci_request_window();
	if (err)
		goto free_workqueue;
	err = fakepci_request_registers();
	if (err)
		goto release_window;
	for (k = 0; k < gpus; k++) {
		err = fakepci_set_registers(k, fakepci_gpus[k].present);
		if (err)
			goto release_registers;
	}

	if (!proc_create("fakepci", 0644, NULL, &fakepci_proc_ops)) {
		err = -ENOMEM;
		goto release_registers;
	}

	err = fakepci_add_bus();
	if (err)
		goto remove_proc;

	pr_info("%u GPU functions in domain %04x\n", gpus, FAKEPCI_DOMAIN);
	return 0;

remove_proc:
	remove_proc_entry("fakepci", NULL);
release_registers:
	if (bar0)
		remove_resource(&fakepci_registers);
release_window:
	remove_resource(&fakepci_window);
free_workqueue:
	destroy_workqueue(fakepci_plugging);
free_gpus:
	kvfree(fakepci_gpus);
	return err;
}

static void __exit fakepci_exit(void)
{
	/* No command any more, then none that is under way. */
	remove_proc_entry("fakepci", NULL);
	destroy_workqueue(fakepci_plugging);
	pci_lock_rescan_remove();
	pci_stop_root_bus(fakepci_bus);
	pci_remove_root_bus(fakepci_bus);
	pci_unlock_rescan_remove();
	if (bar0)
		remove_resource(&fakepci_registers);
	remove_resource(&fakepci_window);
	kvfree(fakepci_gpus);
}

module_init(fakepci_init);
module_exit(fakepci_exit);

MODULE_DESCRIPTION("PCI root bus with simulated GPU functions");
MODULE_LICENSE("GPL");
