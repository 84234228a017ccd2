// SPDX-License-Identifier: GPL-2.0
/*
 * fakepci - what lies behind the BARs: addresses, and a few registers
 *
 * With `bar0`, register spaces lie in RAM that the kernel has to leave
 * alone (mem=), and hold the few registers from which NVIDIA's own driver knows
 * an H100 and believes that its FSP has booted. That is all of the hardware
 * that this driver needs to bind, and to fail its initialisation honestly.
 *
 * Not simulated: anything else behind the BARs. Without `bar0`, reading
 * one gives what the machine gives for an unused address.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/io.h>
#include <linux/ioport.h>
#include <linux/module.h>
#include <linux/sizes.h>

#include "fakepci.h"

/*
 * BARs lie in one window from 16 TiB on: above any RAM and above what PC
 * firmware gives its own root bus, below 2^46 (QEMU -cpu max,phys-bits=46).
 */
#define FAKEPCI_WINDOW_BASE	0x100000000000ULL

/* Largest first: that keeps all of them naturally aligned. */
const struct fakepci_bar fakepci_bars[FAKEPCI_BARS] = {
	[FAKEPCI_BAR_MEMORY] = { PCI_BASE_ADDRESS_2, 128ULL * SZ_1G },
	[FAKEPCI_BAR_OTHER] = { PCI_BASE_ADDRESS_4, SZ_32M },
	[FAKEPCI_BAR_REGISTERS] = { PCI_BASE_ADDRESS_0, SZ_16M },
};

/* Registers of an H100 that NVIDIA's driver reads before it touches anything. */
#define NV_PMC_BOOT_0		0x00000000
#define NV_PMC_BOOT_42		0x00000a00
#define NV_FSP_BOOT_COMPLETE	0x000200bc
#define GH100_BOOT_42		0x180a1000
/* PMC_BOOT_0 has architecture and implementation at the same place. */
#define BOOT_CHIP_MASK		0x1ff00000
#define BOOT_0_REVISION		0xa1
#define FSP_BOOT_OK		0xff

static unsigned long bar0;
module_param(bar0, ulong, 0444);
MODULE_PARM_DESC(bar0, "address of RAM that the kernel does not use, for 16 MiB of registers "
		       "per GPU; default: no registers");

FAKEPCI_LIST(chip, "PMC_BOOT_42 per GPU, that is its chip (bar0); the last value goes for the "
		   "rest; 0: none; default 0x180a1000, GH100");
FAKEPCI_LIST(off_bus, "GPUs whose registers read all ones (bar0)");
FAKEPCI_LIST(fsp_dead, "GPUs whose FSP never says that it has booted (bar0)");
FAKEPCI_LIST(bar_missing, "GPUs without a BAR 0");
FAKEPCI_LIST(bar_unassigned,
	     "GPUs whose BAR of 128 GiB has no address, as where the guest's window is too small");

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
static u64 fakepci_bar_base(unsigned int k, unsigned int bar)
{
	u64 base = FAKEPCI_WINDOW_BASE;
	unsigned int i;

	if (bar == FAKEPCI_BAR_REGISTERS && bar0)
		return bar0 + fakepci_bars[bar].size * k;

	for (i = 0; i < bar; i++)
		base += fakepci_bars[i].size * FAKEPCI_MAX_GPUS;
	return base + fakepci_bars[bar].size * k;
}

bool fakepci_has_bar(unsigned int k, unsigned int bar)
{
	return bar != FAKEPCI_BAR_REGISTERS || !fakepci_listed(bar_missing, k);
}

/* Address that firmware, good or bad, has given it. */
u64 fakepci_bar_address(unsigned int k, unsigned int bar)
{
	if (bar == FAKEPCI_BAR_MEMORY && fakepci_listed(bar_unassigned, k))
		return 0;
	return fakepci_bar_base(k, bar);
}

/* Registers of a function: as after its power-on, or of one that is not there. */
int fakepci_set_registers(unsigned int k, bool there)
{
	size_t size = fakepci_bars[FAKEPCI_BAR_REGISTERS].size;
	u32 boot_42 = fakepci_value(chip, k, GH100_BOOT_42);
	void __iomem *regs;

	if (!bar0)
		return 0;
	regs = ioremap(fakepci_bar_base(k, FAKEPCI_BAR_REGISTERS), size);
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

static u64 fakepci_window_size(void)
{
	u64 size = 0;
	unsigned int i;

	for (i = 0; i < FAKEPCI_BARS; i++)
		size += fakepci_bars[i].size * FAKEPCI_MAX_GPUS;
	return size;
}

static int fakepci_request_registers(void)
{
	int err;

	if (!bar0)
		return 0;
	fakepci_registers.start = bar0;
	fakepci_registers.end = bar0 - 1 +
		fakepci_bars[FAKEPCI_BAR_REGISTERS].size * FAKEPCI_MAX_GPUS;
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

int fakepci_request_bars(void)
{
	int err;

	err = fakepci_request_window();
	if (err)
		return err;
	err = fakepci_request_registers();
	if (err)
		remove_resource(&fakepci_window);
	return err;
}

void fakepci_release_bars(void)
{
	if (bar0)
		remove_resource(&fakepci_registers);
	remove_resource(&fakepci_window);
}

/* To what the root bus hands out. */
void fakepci_add_bars(struct list_head *resources)
{
	pci_add_resource(resources, &fakepci_window);
	if (bar0)
		pci_add_resource(resources, &fakepci_registers);
}
