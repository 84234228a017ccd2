// SPDX-License-Identifier: GPL-2.0
/*
 * Stands for the InfiniBand driver of Mellanox' network functions: each function that fakepci has
 * gets a device with one port in sysfs, with the port's capability mask and first GID, as far as
 * nvlsm's start looks at them. No packet is ever sent.
 *
 *   closed=N   ports of the first N functions are closed to subnet managers
 */
#include <linux/kobject.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/sysfs.h>

#define FUNCTIONS	8
/* IB_PORT_SM_DISABLED of the kernel's ib_verbs.h, and what a port of a CX7 has besides. */
#define SM_DISABLED	(1 << 10)
#define CAPABILITIES	0xa751e848

static unsigned int closed;
module_param(closed, uint, 0444);
MODULE_PARM_DESC(closed, "number of functions whose ports are closed to subnet managers");

/* infiniband, the device, ports, 1, gids: each below the one before. */
enum { CLASS, DEVICE, PORTS, PORT, GIDS, LEVELS };

static struct function {
	struct pci_dev *pdev;
	struct kobject *levels[LEVELS];
	struct kobj_attribute mask;
	struct kobj_attribute gid;
} functions[FUNCTIONS];

static ssize_t mask_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	struct function *function = container_of(attr, struct function, mask);
	u32 mask = CAPABILITIES | (function - functions < closed ? SM_DISABLED : 0);

	return sysfs_emit(buf, "0x%08x\n", mask);
}

static ssize_t gid_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	struct function *function = container_of(attr, struct function, gid);

	return sysfs_emit(buf, "fe80:0000:0000:0000:b83f:d203:00d4:%04x\n",
			  0x1a20 + (unsigned int)(function - functions));
}

static void remove(struct function *function)
{
	int level;

	for (level = GIDS; level >= CLASS; level--)
		if (function->levels[level])
			kobject_put(function->levels[level]);
	pci_dev_put(function->pdev);
	memset(function, 0, sizeof(*function));
}

static int add(struct function *function, struct pci_dev *pdev)
{
	struct kobject *parent = &pdev->dev.kobj;
	char device[16];
	const char *names[LEVELS] = { "infiniband", device, "ports", "1", "gids" };
	int level, err;

	function->pdev = pci_dev_get(pdev);
	snprintf(device, sizeof(device), "mlx5_%u", (unsigned int)(function - functions));
	for (level = CLASS; level < LEVELS; level++) {
		parent = kobject_create_and_add(names[level], parent);
		if (!parent)
			return -ENOMEM;
		function->levels[level] = parent;
	}
	sysfs_attr_init(&function->mask.attr);
	function->mask.attr.name = "cap_mask";
	function->mask.attr.mode = 0444;
	function->mask.show = mask_show;
	sysfs_attr_init(&function->gid.attr);
	function->gid.attr.name = "0";
	function->gid.attr.mode = 0444;
	function->gid.show = gid_show;
	err = sysfs_create_file(function->levels[PORT], &function->mask.attr);
	return err ?: sysfs_create_file(function->levels[GIDS], &function->gid.attr);
}

static void mlx5_exit(void)
{
	int i;

	for (i = 0; i < FUNCTIONS; i++)
		if (functions[i].pdev)
			remove(&functions[i]);
}

static int __init mlx5_init(void)
{
	struct pci_dev *pdev = NULL;
	int i = 0, err;

	while (i < FUNCTIONS && (pdev = pci_get_device(PCI_VENDOR_ID_MELLANOX, PCI_ANY_ID, pdev))) {
		err = add(&functions[i++], pdev);
		if (err) {
			pci_dev_put(pdev);
			mlx5_exit();
			return err;
		}
	}
	pci_dev_put(pdev);
	return 0;
}

module_init(mlx5_init);
module_exit(mlx5_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("stand-in for the InfiniBand driver of Mellanox' network functions");
