// SPDX-License-Identifier: GPL-2.0
/*
 * nvidia - simulated driver: capabilities, and the devices of NVLink
 *
 * The character device regions beside the GPUs' own, of which "nvidia-caps" has
 * a minor for each capability, and the /proc files that say which. Minors are counted through: NVLink's one,
 * MIG's config and monitor, access to every instance of every possible GPU, and
 * the system's one.
 *
 * What it is not: MIG, NVLink, IMEX or a switch. No GPU here has instances; the
 * devices open and do nothing.
 */

#define pr_fmt(fmt) "NVRM: " fmt

#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#include "nvidia.h"

#define CAPS_GPUS	32
#define CAPS_GIS	15	/* GPU instances of a GPU */
#define CAPS_CIS	8	/* compute instances of a GPU instance */

enum {
	CAP_FABRIC_MGMT,
	CAP_MIG_CONFIG,
	CAP_MIG_MONITOR,
	CAP_MIG_GPUS,
	CAP_FABRIC_IMEX_MGMT = CAP_MIG_GPUS + CAPS_GPUS * CAPS_GIS * (1 + CAPS_CIS),
	CAPS_MINORS,
};

static const struct nv_cap {
	const char *path;
	unsigned int minor;
	umode_t mode;
} nv_caps[] = {
	{ "driver/nvidia/capabilities/mig/config", CAP_MIG_CONFIG, 0400 },
	{ "driver/nvidia/capabilities/mig/monitor", CAP_MIG_MONITOR, 0444 },
	{ "driver/nvidia/capabilities/fabric-imex-mgmt", CAP_FABRIC_IMEX_MGMT, 0400 },
	{ "driver/nvidia-nvlink/capabilities/fabric-mgmt", CAP_FABRIC_MGMT, 0400 },
};

/* Folders that hold nothing else, parents first. */
static const char * const nv_caps_dirs[] = {
	"driver/nvidia-caps",
	"driver/nvidia/capabilities",
	"driver/nvidia/capabilities/mig",
	"driver/nvidia-nvlink",
	"driver/nvidia-nvlink/capabilities",
};

/* In the order in which the driver registers them. */
static struct nv_caps_region {
	const char *name;
	unsigned int minors;
	dev_t first;
	struct cdev cdev;
} nv_caps_regions[] = {
	{ .name = "nvidia-caps-imex-channels", .minors = 2048 },
	{ .name = "nvidia-caps", .minors = CAPS_MINORS },
	{ .name = "nvidia-nvlink", .minors = 1 },
	{ .name = "nvidia-nvswitch", .minors = 256 },
};

#define NVLINK_REGION	2

static const struct file_operations nv_caps_fops = {
	.owner = THIS_MODULE,
	.llseek = noop_llseek,
};

static int nv_cap_show(struct seq_file *m, void *unused)
{
	const struct nv_cap *cap = m->private;

	seq_printf(m, "DeviceFileMinor: %u\n", cap->minor);
	seq_printf(m, "DeviceFileMode: %u\n", cap->mode);
	seq_puts(m, "DeviceFileModify: 1\n");
	return 0;
}

static int nv_mig_minors_show(struct seq_file *m, void *unused)
{
	unsigned int minor = CAP_MIG_GPUS, gpu, gi, ci;

	seq_printf(m, "config %u\nmonitor %u\n", CAP_MIG_CONFIG, CAP_MIG_MONITOR);
	for (gpu = 0; gpu < CAPS_GPUS; gpu++) {
		for (gi = 0; gi < CAPS_GIS; gi++) {
			seq_printf(m, "gpu%u/gi%u/access %u\n", gpu, gi, minor++);
			for (ci = 0; ci < CAPS_CIS; ci++)
				seq_printf(m, "gpu%u/gi%u/ci%u/access %u\n",
					   gpu, gi, ci, minor++);
		}
	}
	return 0;
}

static int nv_nvlink_minors_show(struct seq_file *m, void *unused)
{
	seq_printf(m, "fabric-mgmt %u\n", CAP_FABRIC_MGMT);
	return 0;
}

static int nv_sys_minors_show(struct seq_file *m, void *unused)
{
	seq_printf(m, "fabric-imex-mgmt %u\n", CAP_FABRIC_IMEX_MGMT);
	return 0;
}

static void nv_caps_remove_proc(void)
{
	/* Missing ones are passed over: fine for a half-made tree as well. */
	remove_proc_subtree("driver/nvidia-nvlink", NULL);
	remove_proc_subtree("driver/nvidia/capabilities", NULL);
	remove_proc_subtree("driver/nvidia-caps", NULL);
}

static int nv_caps_create_proc(void)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(nv_caps_dirs); i++)
		if (!proc_mkdir(nv_caps_dirs[i], NULL))
			return -ENOMEM;
	for (i = 0; i < ARRAY_SIZE(nv_caps); i++)
		if (!proc_create_single_data(nv_caps[i].path, 0444, NULL, nv_cap_show,
					     (void *)&nv_caps[i]))
			return -ENOMEM;
	if (!proc_create_single("driver/nvidia-caps/mig-minors", 0444, NULL,
				nv_mig_minors_show) ||
	    !proc_create_single("driver/nvidia-caps/nvlink-minors", 0444, NULL,
				nv_nvlink_minors_show) ||
	    !proc_create_single("driver/nvidia-caps/sys-minors", 0444, NULL,
				nv_sys_minors_show))
		return -ENOMEM;
	return 0;
}

static int nv_caps_add_region(struct nv_caps_region *r)
{
	int err;

	err = alloc_chrdev_region(&r->first, 0, r->minors, r->name);
	if (err)
		return err;
	cdev_init(&r->cdev, &nv_caps_fops);
	r->cdev.owner = THIS_MODULE;
	err = cdev_add(&r->cdev, r->first, r->minors);
	if (err)
		unregister_chrdev_region(r->first, r->minors);
	return err;
}

static void nv_caps_remove_regions(int count)
{
	while (count--) {
		struct nv_caps_region *r = &nv_caps_regions[count];

		cdev_del(&r->cdev);
		unregister_chrdev_region(r->first, r->minors);
	}
}

/* Not the resource manager's, and so without its prefix. */
static void nv_say_nvlink(const char *what)
{
	printk(KERN_INFO "nvidia-nvlink: %s, major device number %u\n", what,
	       MAJOR(nv_caps_regions[NVLINK_REGION].first));
}

int nv_caps_init(void)
{
	int i, err;

	for (i = 0; i < ARRAY_SIZE(nv_caps_regions); i++) {
		err = nv_caps_add_region(&nv_caps_regions[i]);
		if (err)
			goto remove_regions;
	}
	nv_say_nvlink("Nvlink Core is being initialized");
	err = nv_caps_create_proc();
	if (err)
		goto remove_proc;
	return 0;

remove_proc:
	nv_caps_remove_proc();
remove_regions:
	nv_caps_remove_regions(i);
	return err;
}

void nv_caps_exit(void)
{
	nv_caps_remove_proc();
	nv_caps_remove_regions(ARRAY_SIZE(nv_caps_regions));
	nv_say_nvlink("Unregistered Nvlink Core");
}
