// SPDX-License-Identifier: GPL-2.0
/*
 * fakepci - /proc/fakepci: functions come and go
 *
 * "add K" and "remove K" written to it plug one in, or take it away by surprise:
 * config space and registers read all ones from then on, and then the PCI core
 * removes it. "lose K" stops before that: the function has fallen off the bus,
 * and nothing announces it. Read, it counts config accesses.
 *
 * Invariants: commands are carried out one after another, in the order in which
 * they were written.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>
#include <linux/workqueue.h>

#include "fakepci.h"

static struct workqueue_struct *fakepci_plugging;

/* Event of a function. */
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
	if (sscanf(command, "%7s %u", verb, &slot) != 2 || slot >= fakepci_gpus)
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

/* One line per function. Reading it makes no config access. */
static int fakepci_show(struct seq_file *m, void *unused)
{
	unsigned int k;

	for (k = 0; k < FAKEPCI_FUNCTIONS; k++) {
		struct fakepci_counters count = fakepci_count(k);

		if (!fakepci_is_there(k))
			continue;
		if (k >= FAKEPCI_FIRST_SWITCH) {
			seq_printf(m, "%04x:00:%02x.0 reads=%llu writes=%llu vpd=%llu\n",
				   FAKEPCI_DOMAIN, k, count.reads, count.writes, count.vpd);
			continue;
		}
		seq_printf(m, "%04x:00:%02x.0 reads=%llu writes=%llu enables=%llu enable_ms=%u resets=%llu\n",
			   FAKEPCI_DOMAIN, k, count.reads, count.writes, count.enables,
			   fakepci_enable_ms(k), count.resets);
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

int fakepci_plug_init(void)
{
	fakepci_plugging = alloc_ordered_workqueue("fakepci", 0);
	if (!fakepci_plugging)
		return -ENOMEM;
	if (!proc_create("fakepci", 0644, NULL, &fakepci_proc_ops)) {
		destroy_workqueue(fakepci_plugging);
		return -ENOMEM;
	}
	return 0;
}

void fakepci_plug_exit(void)
{
	/* No command any more, then none that is under way. */
	remove_proc_entry("fakepci", NULL);
	destroy_workqueue(fakepci_plugging);
}
