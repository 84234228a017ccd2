// SPDX-License-Identifier: GPL-2.0
/*
 * nvidia - simulated driver: capabilities
 *
 * The character device region "nvidia-caps" and the /proc files that say which
 * minor stands for which capability. Minors are counted through: NVLink's one,
 * MIG's config and monitor, access to every instance of every possible GPU, and
 * the system's one.
 *
 * What it is not: MIG. No GPU here has instances; the devices open and do
 * nothing.
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

static dev_t nv_caps_dev;
static struct cdev nv_caps_cdev;

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

int nv_caps_init(void)
{
	int err;

	err = alloc_chrdev_region(&nv_caps_dev, 0, CAPS_MINORS, "nvidia-caps");
	if (err)
		return err;
	cdev_init(&nv_caps_cdev, &nv_caps_fops);
	nv_caps_cdev.owner = THIS_MODULE;
	err = cdev_add(&nv_caps_cdev, nv_caps_dev, CAPS_MINORS);
	if (err)
		goto unregister;
	err = nv_caps_create_proc();
	if (err)
		goto remove_proc;
	return 0;

remove_proc:
	nv_caps_remove_proc();
	cdev_del(&nv_caps_cdev);
unregister:
	unregister_chrdev_region(nv_caps_dev, CAPS_MINORS);
	return err;
}

void nv_caps_exit(void)
{
	nv_caps_remove_proc();
	cdev_del(&nv_caps_cdev);
	unregister_chrdev_region(nv_caps_dev, CAPS_MINORS);
}
