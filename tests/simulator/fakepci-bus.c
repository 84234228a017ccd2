// SPDX-License-Identifier: GPL-2.0
/*
 * fakepci - PCI root bus with GPU functions that have no hardware behind them
 *
 * Registers a root bus in a PCI domain of its own (0001) with `gpus`
 * functions, one per slot, and on demand NVSwitches and Mellanox functions.
 * Everything above config space (scan, sysfs, claim, enable, bind) is the
 * kernel's own code. This file has the bus itself; what is on it is in
 * fakepci-config.c and fakepci-bars.c, and how functions come and go in
 * fakepci-plug.c.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/acpi.h>
#include <linux/ioport.h>
#include <linux/irqdomain.h>
#include <linux/module.h>

#include "fakepci.h"

unsigned int fakepci_gpus = 8;
module_param_named(gpus, fakepci_gpus, uint, 0444);
MODULE_PARM_DESC(gpus, "number of GPU functions, 0..16");

unsigned int fakepci_switches;
module_param_named(switches, fakepci_switches, uint, 0444);
MODULE_PARM_DESC(switches, "number of NVSwitch functions, 0..8");

unsigned int fakepci_cx7;
module_param_named(cx7, fakepci_cx7, uint, 0444);
MODULE_PARM_DESC(cx7, "number of Mellanox functions (ConnectX-7), 0..8");

FAKEPCI_LIST(absent, "GPUs that are not there until they are added");

FAKEPCI_LIST(bar_unclaimed, "GPUs whose BAR 0 the kernel does not claim: they cannot be enabled");

struct pci_bus *fakepci_bus;

/* Source of a root bus's domain: the architecture's data on x86, else its bridge. */
#ifdef CONFIG_X86
static struct pci_sysdata fakepci_sysdata = {
	.domain = FAKEPCI_DOMAIN,
	.node = NUMA_NO_NODE,
};

static int fakepci_set_up_bridge(struct pci_host_bridge *bridge)
{
	bridge->sysdata = &fakepci_sysdata;
	return 0;
}
#else
static int fakepci_set_up_bridge(struct pci_host_bridge *bridge)
{
	/* The machine's own bridge: its bus has no domain, where a map in the device tree gives one
	 * to each function.
	 */
	struct pci_dev *machines = pci_get_domain_bus_and_slot(0, 0, PCI_DEVFN(0, 0));

	/* With ACPI, arm64 takes a root bus's data for that of a bridge in ACPI's tables. */
	if (!acpi_disabled) {
		pr_err("this machine has ACPI: boot it by a device tree (acpi=off)\n");
		return -ENODEV;
	}
	bridge->domain_nr = FAKEPCI_DOMAIN;
	/* Interrupts are messages to the machine's own controller, which knows their senders by
	 * bus and slot: no function of the machine may have the slot of one of these.
	 */
	if (machines)
		dev_set_msi_domain(&bridge->dev, dev_get_msi_domain(&machines->dev));
	pci_dev_put(machines);
	return 0;
}
#endif

static struct resource fakepci_busn = {
	.name = "fakepci bus",
	.flags = IORESOURCE_BUS,
};

/* As where the bridge's window, which firmware has set up, has no room for it. */
static void fakepci_unclaim(unsigned int k)
{
	struct pci_dev *pdev = pci_get_slot(fakepci_bus, PCI_DEVFN(k, 0));

	if (pdev && pdev->resource[0].parent)
		release_resource(&pdev->resource[0]);
	pci_dev_put(pdev);
}

static int fakepci_add_bus(void)
{
	struct pci_host_bridge *bridge = pci_alloc_host_bridge(0);
	unsigned int k;
	int err;

	if (!bridge)
		return -ENOMEM;
	fakepci_add_bars(&bridge->windows);
	pci_add_resource(&bridge->windows, &fakepci_busn);
	bridge->busnr = fakepci_busn.start;
	bridge->ops = &fakepci_ops;
	err = fakepci_set_up_bridge(bridge);
	if (err)
		goto free_bridge;

	pci_lock_rescan_remove();
	err = pci_scan_root_bus_bridge(bridge);
	if (!err) {
		fakepci_bus = bridge->bus;
		/* The BARs already have addresses, as after firmware. */
		pci_bus_claim_resources(fakepci_bus);
		for (k = 0; k < fakepci_gpus; k++)
			if (fakepci_listed(bar_unclaimed, k))
				fakepci_unclaim(k);
		pci_bus_add_devices(fakepci_bus);
	}
	pci_unlock_rescan_remove();
	if (!err)
		return 0;
	pr_err("no root bus in domain %04x: is the domain taken? (%d)\n", FAKEPCI_DOMAIN, err);

free_bridge:
	pci_free_host_bridge(bridge);
	return err;
}

static void fakepci_remove_bus(void)
{
	pci_lock_rescan_remove();
	pci_stop_root_bus(fakepci_bus);
	pci_remove_root_bus(fakepci_bus);
	pci_unlock_rescan_remove();
}

static int __init fakepci_init(void)
{
	unsigned int k;
	int err;

	if (fakepci_gpus > FAKEPCI_MAX_GPUS) {
		pr_err("gpus=%u: want 0..%u\n", fakepci_gpus, FAKEPCI_MAX_GPUS);
		return -EINVAL;
	}
	if (fakepci_switches > FAKEPCI_MAX_OTHERS || fakepci_cx7 > FAKEPCI_MAX_OTHERS) {
		pr_err("switches=%u cx7=%u: want 0..%u\n", fakepci_switches, fakepci_cx7,
		       FAKEPCI_MAX_OTHERS);
		return -EINVAL;
	}
	err = fakepci_config_init();
	if (err)
		return err;
	err = fakepci_request_bars();
	if (err)
		goto exit_config;
	for (k = 0; k < fakepci_gpus; k++) {
		bool present = !fakepci_listed(absent, k);

		fakepci_set_present(k, present);
		err = fakepci_set_registers(k, present);
		if (err)
			goto release_bars;
	}
	for (k = FAKEPCI_FIRST_SWITCH; k < FAKEPCI_FUNCTIONS; k++)
		fakepci_set_present(k, fakepci_is_there(k));
	err = fakepci_add_bus();
	if (err)
		goto release_bars;
	/* Commands need the bus. */
	err = fakepci_plug_init();
	if (err)
		goto remove_bus;
	fakepci_serial_init();

	pr_info("%u GPU functions, %u switches, %u Mellanox functions in domain %04x\n",
		fakepci_gpus, fakepci_switches, fakepci_cx7, FAKEPCI_DOMAIN);
	return 0;

remove_bus:
	fakepci_remove_bus();
release_bars:
	fakepci_release_bars();
exit_config:
	fakepci_config_exit();
	return err;
}

static void __exit fakepci_exit(void)
{
	fakepci_serial_exit();
	fakepci_plug_exit();
	fakepci_remove_bus();
	fakepci_release_bars();
	fakepci_config_exit();
}

module_init(fakepci_init);
module_exit(fakepci_exit);

MODULE_DESCRIPTION("PCI root bus with simulated GPU functions");
MODULE_LICENSE("GPL");
