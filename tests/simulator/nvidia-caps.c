// SPDX-License-Identifier: GPL-2.0
/*
 * nvidia - simulated driver: capabilities, and the devices of NVLink
 *
 * The character device regions beside the GPUs' own, of which "nvidia-caps" has
 * a minor for each capability, and the /proc files that say which. Minors are
 * counted through: NVLink's one, MIG's config and monitor, access to every
 * instance of every possible GPU, and the system's one.
 *
 * Not simulated: MIG, NVLink, IMEX or a switch. Instances and switches are what
 * parameters say, only in /proc; the devices open and do nothing.
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

static char *mig;
module_param(mig, charp, 0444);
MODULE_PARM_DESC(mig, "GPUs in MIG mode: K:GIS:CIS[,..], so many compute instances in each of so "
		      "many GPU instances");

static unsigned int switches;
module_param(switches, uint, 0444);
MODULE_PARM_DESC(switches, "NVSwitches that the driver has, 0 to 16");

bool nv_has_switches(void)
{
	return switches;
}

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

/* The minor is all that differs between instances. */
static int nv_instance_show(struct seq_file *m, void *unused)
{
	seq_printf(m, "DeviceFileMinor: %lu\n", (unsigned long)m->private);
	seq_printf(m, "DeviceFileMode: %u\n", 0444);
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
	if (switches)
		remove_proc_subtree("driver/nvidia-nvswitch", NULL);
	remove_proc_subtree("driver/nvidia-nvlink", NULL);
	remove_proc_subtree("driver/nvidia/capabilities", NULL);
	remove_proc_subtree("driver/nvidia-caps", NULL);
}

static int nv_switches_create_proc(void)
{
	char path[64];
	unsigned int i;

	if (!switches)
		return 0;
	if (!proc_mkdir("driver/nvidia-nvswitch", NULL) ||
	    !proc_mkdir("driver/nvidia-nvswitch/devices", NULL))
		return -ENOMEM;
	for (i = 0; i < min(switches, 16U); i++) {
		snprintf(path, sizeof(path), "driver/nvidia-nvswitch/devices/0002:00:%02x.0", i);
		if (!proc_mkdir(path, NULL))
			return -ENOMEM;
	}
	return 0;
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
	return nv_switches_create_proc();
}

/* driver/nvidia/capabilities/gpuN/mig[/giG[/ciC]][/access] */
static bool nv_add_instance_entry(unsigned int gpu, int gi, int ci, unsigned long minor)
{
	char path[96];
	int n = snprintf(path, sizeof(path), "driver/nvidia/capabilities/gpu%u/mig", gpu);

	if (gi >= 0)
		n += snprintf(path + n, sizeof(path) - n, "/gi%d", gi);
	if (ci >= 0)
		n += snprintf(path + n, sizeof(path) - n, "/ci%d", ci);
	if (!proc_mkdir(path, NULL))
		return false;
	if (gi < 0)
		return true;
	snprintf(path + n, sizeof(path) - n, "/access");
	return proc_create_single_data(path, 0444, NULL, nv_instance_show, (void *)minor);
}

/* The directory of a GPU's capabilities: made in its attach, and kept until it leaves. */
void nv_caps_add_gpu(struct nv_gpu *gpu)
{
	char path[64];

	if (gpu->has_caps)
		return;
	snprintf(path, sizeof(path), "driver/nvidia/capabilities/gpu%u", gpu->minor);
	gpu->has_caps = proc_mkdir(path, NULL);
	if (!gpu->has_caps)
		pr_err("GPU %s: cannot make /proc/%s\n", pci_name(gpu->pdev), path);
}

/* Instances of a GPU, once it is up. GPU instances count from 1, as the driver's do. */
void nv_caps_add_instances(const struct nv_gpu *gpu)
{
	unsigned int gis, cis, gi, ci;

	if (!nv_find_entry(mig, gpu, &gis, &cis) || gpu->minor >= CAPS_GPUS)
		return;
	if (!nv_add_instance_entry(gpu->minor, -1, -1, 0))
		goto fail;
	for (gi = 1; gi <= min_t(unsigned int, gis, CAPS_GIS - 1); gi++) {
		unsigned int minor = CAP_MIG_GPUS +
			(gpu->minor * CAPS_GIS + gi) * (1 + CAPS_CIS);

		if (!nv_add_instance_entry(gpu->minor, gi, -1, minor))
			goto fail;
		for (ci = 0; ci < min_t(unsigned int, cis, CAPS_CIS); ci++)
			if (!nv_add_instance_entry(gpu->minor, gi, ci, minor + 1 + ci))
				goto fail;
	}
	return;

fail:
	pr_err("GPU %s: cannot make the /proc files of its instances\n", pci_name(gpu->pdev));
}

void nv_caps_remove_instances(const struct nv_gpu *gpu)
{
	char path[64];

	snprintf(path, sizeof(path), "driver/nvidia/capabilities/gpu%u", gpu->minor);
	remove_proc_subtree(path, NULL);
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
