// SPDX-License-Identifier: GPL-2.0
/*
 * nvidia - simulated driver: loading, probing and removing GPUs
 *
 * Keeps to the load rules of NVIDIA's driver: no GPU, or none that was probed,
 * fails the load; every probe of a plain load runs inside pci_register_driver();
 * the character devices come last, so that no GPU can be opened before.
 *
 * Invariants: what can fail in a probe comes before the GPU is on the list. A
 * minor is taken at the end of the probe: minors follow the order of finishing,
 * not PCI order. A removal ends when nobody has the GPU open: opens that are under
 * way end first, well or not, and only files that did open it are waited for.
 *
 * The order of a probe is NVIDIA's: firewall, enable, interrupt, BARs, the GPU's
 * answer, UUID under the RM lock, minor and list, /proc.
 *
 * Not simulated: BARs, which are never touched, and hardware. Times, failures
 * and minors are what the parameters say; a BAR or an interrupt is missing when
 * the function has none.
 */

#define pr_fmt(fmt) "NVRM: " fmt

#include <linux/bitmap.h>
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/version.h>

#include "nvidia.h"

#define NV_MODULE_VERSION	"550.163.01"
#define NV_DMA_BITS		52
#define PROBE_MS		3
#define BARFW_MS		4000
#define REMOVE_LOOK_MS		500	/* between two looks whether a GPU is closed */

char *nv_version = NV_MODULE_VERSION;
module_param_named(version, nv_version, charp, 0444);
MODULE_PARM_DESC(version, "driver version to show");

NV_LIST(probe_ms, "time of a probe, per GPU; default 3");
NV_LIST(barfw_ms, "how long a Blackwell's BAR firewall stays up, per GPU; default 4000");
NV_LIST(probe_fail, "GPUs that have fallen off the bus when they are probed");
NV_LIST(probe_silent, "GPUs whose probe fails without a word");
NV_LIST(firewall_fail, "GPUs whose BAR firewall stays up");
NV_LIST(unsupported, "GPUs that this driver does not know");
NV_LIST(minors, "minor of each GPU by position; the rest take the lowest free one");

static int force_sync = -1;
module_param(force_sync, int, 0444);
MODULE_PARM_DESC(force_sync, "refuse asynchronous probing: 0, 1; default: as the version does");

static int load_fail;
module_param(load_fail, int, 0444);
MODULE_PARM_DESC(load_fail, "errno that the load fails with");

static unsigned int judge_ms;
module_param(judge_ms, uint, 0444);
MODULE_PARM_DESC(judge_ms,
		 "count the load's own probe of one GPU, and end it so much later; default: 0, all");

static bool blind;
module_param(blind, bool, 0444);
MODULE_PARM_DESC(blind, "the load finds no GPU at all");

LIST_HEAD(nv_gpus);
DEFINE_MUTEX(nv_gpus_lock);
static DECLARE_BITMAP(nv_minors, NV_MINOR_MAX + 1);
static atomic_t nv_probes = ATOMIC_INIT(0);
static atomic_t nv_probed = ATOMIC_INIT(0);
static const struct task_struct *nv_loader;

/* Whether the version to show is this one or a later one. */
bool nv_version_at_least(unsigned int branch, unsigned int minor, unsigned int patch)
{
	unsigned int b = 0, m = 0, p = 0;

	if (sscanf(nv_version, "%u.%u.%u", &b, &m, &p) < 2)
		return true;
	if (b != branch)
		return b > branch;
	if (m != minor)
		return m > minor;
	return p >= patch;
}

void nv_sleep_ms(unsigned int ms)
{
	/* msleep() rounds to timer ticks: up to 8 ms too long at HZ=250. */
	if (ms)
		usleep_range(ms * 1000UL, ms * 1000UL + 200);
}

void nv_put_gpu(struct nv_gpu *gpu)
{
	if (refcount_dec_and_test(&gpu->users))
		complete(&gpu->unused);
}

static bool nv_is_gpu(const struct pci_dev *pdev)
{
	unsigned int class = pdev->class >> 8;

	return pdev->vendor == PCI_VENDOR_ID_NVIDIA &&
	       (class == PCI_CLASS_DISPLAY_VGA || class == PCI_CLASS_DISPLAY_3D);
}

static u64 nv_pci_order(const struct pci_dev *pdev)
{
	return (u64)pci_domain_nr(pdev->bus) << 16 | pci_dev_id((struct pci_dev *)pdev);
}

/* GPUs on this machine; with `below`, only those before it in PCI order. */
static unsigned int nv_count_gpus(const struct pci_dev *below)
{
	struct pci_dev *pdev = NULL;
	unsigned int count = 0;

	for_each_pci_dev(pdev)
		if (nv_is_gpu(pdev) &&
		    (!below || nv_pci_order(pdev) < nv_pci_order(below)))
			count++;
	return count;
}

/* Takes the GPU's minor and puts it on the list. */
static int nv_publish(struct nv_gpu *gpu)
{
	int err = 0;

	mutex_lock(&nv_gpus_lock);
	if (gpu->position < minors_count)
		gpu->minor = minors[gpu->position];
	else
		gpu->minor = find_first_zero_bit(nv_minors, NV_MINOR_MAX + 1);
	if (gpu->minor > NV_MINOR_MAX || test_bit(gpu->minor, nv_minors)) {
		pr_err("GPU %s: minor %u is taken or above %u\n",
		       pci_name(gpu->pdev), gpu->minor, NV_MINOR_MAX);
		err = -EBUSY;
	} else {
		__set_bit(gpu->minor, nv_minors);
		list_add_tail(&gpu->node, &nv_gpus);
	}
	mutex_unlock(&nv_gpus_lock);
	return err;
}

/* With L and D held, which it drops meanwhile. */
static void nv_wait_until_closed(struct nv_gpu *gpu)
{
	if (!gpu->use_count)
		return;
	pr_err("Attempting to remove device %s with non-zero usage count!\n",
	       pci_name(gpu->pdev));
	while (gpu->use_count) {
		mutex_unlock(&gpu->lock);
		mutex_unlock(&nv_gpus_lock);
		msleep(REMOVE_LOOK_MS);
		mutex_lock(&nv_gpus_lock);
		mutex_lock(&gpu->lock);
	}
	pr_err("Continuing with GPU removal for device %s\n", pci_name(gpu->pdev));
}

/* Takes the GPU off the list and its minor back; waits, without end, until it is closed. */
static void nv_unpublish(struct nv_gpu *gpu)
{
	/* Until 595.44.02 a GPU can still be found, and opened, while its removal waits. */
	bool found = !nv_version_at_least(595, 44, 2);

	nv_stop_opens(gpu);

	mutex_lock(&nv_gpus_lock);
	mutex_lock(&gpu->lock);
	if (!found)
		list_del(&gpu->node);
	nv_wait_until_closed(gpu);
	if (found)
		list_del(&gpu->node);
	__clear_bit(gpu->minor, nv_minors);
	mutex_unlock(&gpu->lock);
	mutex_unlock(&nv_gpus_lock);

	/* Those who have closed it are about to let go. */
	nv_put_gpu(gpu);
	wait_for_completion(&gpu->unused);
}

static struct kthread_worker *nv_create_open_q(void)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 14, 0)
	return kthread_run_worker(0, "nv_open_q");
#else
	return kthread_create_worker(0, "nv_open_q");
#endif
}

static struct nv_gpu *nv_alloc_gpu(struct pci_dev *pdev)
{
	struct nv_gpu *gpu = kzalloc(sizeof(*gpu), GFP_KERNEL);

	if (!gpu)
		return NULL;
	gpu->open_q = nv_create_open_q();
	if (IS_ERR(gpu->open_q)) {
		kfree(gpu);
		return NULL;
	}
	gpu->pdev = pdev;
	gpu->position = nv_count_gpus(pdev);
	gpu->accepts_opens = true;
	refcount_set(&gpu->users, 1);
	init_completion(&gpu->unused);
	mutex_init(&gpu->lock);
	nv_init_xid(gpu);
	nv_displays_prepare(gpu);
	return gpu;
}

static void nv_free_gpu(struct nv_gpu *gpu)
{
	cancel_delayed_work_sync(&gpu->xid);
	kthread_destroy_worker(gpu->open_q);
	kfree(gpu);
}

/* Device ids of GPUs that keep their BARs closed for a while (Blackwell). */
static bool nv_has_bar_firewall(const struct pci_dev *pdev)
{
	return (pdev->device >= 0x2900 && pdev->device <= 0x29ff) ||
	       (pdev->device >= 0x3180 && pdev->device <= 0x327f);
}

/* Sleeps, with no lock held: GPUs that are probed at once sleep at once. */
static bool nv_wait_for_firewall(struct nv_gpu *gpu)
{
	if (!nv_has_bar_firewall(gpu->pdev))
		return true;
	nv_sleep_ms(nv_time(barfw_ms, gpu, BARFW_MS));
	if (!nv_has(firewall_fail, gpu))
		return true;
	pr_err("failed to wait for bar firewall to lower\n");
	return false;
}

static bool nv_has_irq(struct pci_dev *pdev)
{
	if (pdev->irq || pdev->msix_cap || pdev->msi_cap)
		return true;
	pr_err("Can't find an IRQ for your NVIDIA card!\n");
	pr_err("Please check your BIOS settings.\n");
	pr_err("[Plug & Play OS] should be set to NO\n");
	pr_err("[Assign IRQ to VGA] should be set to YES \n");
	return false;
}

static bool nv_has_registers(struct pci_dev *pdev)
{
	u64 size = pci_resource_len(pdev, 0);

	if (size && pci_resource_start(pdev, 0))
		return true;
	pr_err("This PCI I/O region assigned to your NVIDIA device is invalid:\n"
	       "NVRM: BAR0 is %lluM @ 0x%llx (PCI:%s)\n", size >> 20,
	       (u64)pci_resource_start(pdev, 0), pci_name(pdev));
	return false;
}

/* The first look at the GPU itself. */
static bool nv_answers(struct nv_gpu *gpu)
{
	struct pci_dev *pdev = gpu->pdev;

	nv_sleep_ms(nv_time(probe_ms, gpu, PROBE_MS));
	if (nv_has(probe_silent, gpu))
		return false;
	if (nv_has(probe_fail, gpu) || !pci_device_is_present(pdev)) {
		pr_err("The NVIDIA GPU %s\n"
		       "NVRM: (PCI ID: %04x:%04x) installed in this system has\n"
		       "NVRM: fallen off the bus and is not responding to commands.\n",
		       pci_name(pdev), pdev->vendor, pdev->device);
		return false;
	}
	if (nv_has(unsupported, gpu)) {
		pr_err("The NVIDIA GPU %s (PCI ID: %04x:%04x)\n"
		       "NVRM: installed in this system is not supported by open\n"
		       "NVRM: nvidia.ko because it does not include the required GPU\n"
		       "NVRM: System Processor (GSP).\n",
		       pci_name(pdev), pdev->vendor, pdev->device);
		return false;
	}
	nv_read_uuid(gpu);
	return true;
}

/* With NVreg_GpuInitOnProbe: up from now on, whoever opens and closes it. */
static int nv_keep_adapter(struct nv_gpu *gpu)
{
	int err;

	mutex_lock(&gpu->lock);
	err = nv_start_adapter(gpu);
	gpu->kept = !err;
	mutex_unlock(&gpu->lock);
	return err;
}

/*
 * Whether a probe is one that the load counts. How many of the others' come
 * before the count is a matter of microseconds: with judge_ms none does, and
 * the load itself probes one GPU.
 */
static bool nv_counts(void)
{
	return !judge_ms || current == nv_loader;
}

static int nv_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct nv_gpu *gpu;

	if (nv_counts()) {
		if (judge_ms && atomic_read(&nv_probes))
			return -ENODEV;
		atomic_inc(&nv_probes);
	}
	gpu = nv_alloc_gpu(pdev);
	if (!gpu)
		goto fail;

	if (!nv_wait_for_firewall(gpu))
		goto free;
	if (pci_enable_device(pdev)) {
		pr_err("pci_enable_device failed, aborting\n");
		goto free;
	}
	if (!nv_has_irq(pdev) || !nv_has_registers(pdev))
		goto disable;
	if (pci_request_regions(pdev, "nvidia")) {
		pr_err("GPU %s: its memory regions are in use\n", pci_name(pdev));
		goto disable;
	}
	if (dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(NV_DMA_BITS)))
		pr_warn("GPU %s: no %d bit DMA\n", pci_name(pdev), NV_DMA_BITS);
	if (!nv_answers(gpu))
		goto release;

	if (nv_publish(gpu))
		goto release;
	pci_set_drvdata(pdev, gpu);
	if (nv_proc_add_gpu(gpu))
		goto unpublish;
	if (nv_inits_on_probe() && nv_keep_adapter(gpu))
		goto remove_proc;
	if (nv_counts())
		atomic_inc(&nv_probed);
	return 0;

remove_proc:
	nv_proc_remove_gpu(gpu);
unpublish:
	pci_set_drvdata(pdev, NULL);
	nv_unpublish(gpu);
release:
	pci_release_regions(pdev);
disable:
	pci_disable_device(pdev);
free:
	nv_free_gpu(gpu);
fail:
	/* NVIDIA's probe fails with a bare -1 whatever went wrong: EPERM. */
	return -1;
}

static void nv_remove(struct pci_dev *pdev)
{
	struct nv_gpu *gpu = pci_get_drvdata(pdev);

	nv_unpublish(gpu);
	nv_displays_remove(gpu);
	nv_caps_remove_instances(gpu);
	nv_proc_remove_gpu(gpu);
	pci_release_regions(pdev);
	pci_disable_device(pdev);
	pci_set_drvdata(pdev, NULL);
	nv_free_gpu(gpu);
}

static const struct pci_device_id nv_pci_ids[] = {
	{
		PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID),
		.class = PCI_CLASS_DISPLAY_VGA << 8,
		.class_mask = ~0,
	},
	{
		PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID),
		.class = PCI_CLASS_DISPLAY_3D << 8,
		.class_mask = ~0,
	},
	{ }
};
MODULE_DEVICE_TABLE(pci, nv_pci_ids);

static struct pci_driver nv_pci_driver = {
	.name = "nvidia",
	.id_table = nv_pci_ids,
	.probe = nv_probe,
	.remove = nv_remove,
};

/*
 * /sys/module/nvidia/version shows the loader's copy of MODULE_VERSION, which
 * it kfree()s on unload. Another version is shown by another copy; the first
 * stays until the end, somebody may be reading it.
 */
static const char *nv_first_version;

static int nv_show_version(void)
{
	char *copy;

	if (!strcmp(nv_version, NV_MODULE_VERSION))
		return 0;
	copy = kstrdup(nv_version, GFP_KERNEL);
	if (!copy)
		return -ENOMEM;
	nv_first_version = THIS_MODULE->version;
	WRITE_ONCE(THIS_MODULE->version, copy);
	return 0;
}

/* Result of the probes, after registration. */
static int nv_judge_probes(int gpus)
{
	int probes = atomic_read(&nv_probes);
	int probed = atomic_read(&nv_probed);

	/* GPUs that are probed meanwhile do not count. */
	nv_sleep_ms(judge_ms);
	if (probes != gpus) {
		pr_err("The NVIDIA probe routine was not called for %d device(s).\n",
		       gpus - probes);
		pr_err("This can occur when another driver was loaded and \n"
		       "NVRM: obtained ownership of the NVIDIA device(s).\n");
		pr_err("Try unloading the conflicting kernel module (and/or\n"
		       "NVRM: reconfigure your kernel without the conflicting\n"
		       "NVRM: driver(s)), then try loading the NVIDIA kernel module\n"
		       "NVRM: again.\n");
	}
	/* NVSwitches alone are enough for the driver. */
	if (!probes && nv_has_switches())
		return 0;
	if (!probes) {
		pr_err("No NVIDIA devices probed.\n");
		return -ENODEV;
	}
	if (probed != probes)
		pr_err("The NVIDIA probe routine failed for %d device(s).\n",
		       probes - probed);
	if (!probed) {
		pr_err("None of the NVIDIA devices were initialized.\n");
		return -ENODEV;
	}
	return 0;
}

static int __init nv_init(void)
{
	int gpus, err;

	if (load_fail) {
		err = -abs(load_fail);
		pr_err("the load fails with %d, as load_fail=%d asks\n", err, load_fail);
		return err < -MAX_ERRNO ? -EINVAL : err;
	}
	nv_adapter_init();
	err = nv_show_version();
	if (err)
		return err;
	err = nv_proc_init();
	if (err)
		goto free_version;
	err = nv_displays_init();
	if (err)
		goto remove_proc;
	err = nv_caps_init();
	if (err)
		goto remove_displays;

	gpus = nv_count_gpus(NULL);
	if (blind || (!gpus && !nv_has_switches())) {
		pr_err("No NVIDIA GPU found.\n");
		err = -ENODEV;
		goto remove_caps;
	}
	if (force_sync > 0 || (force_sync < 0 && nv_version_at_least(590, 44, 1)))
		nv_pci_driver.driver.probe_type = PROBE_FORCE_SYNCHRONOUS;
	nv_loader = current;
	err = pci_register_driver(&nv_pci_driver);
	if (err)
		goto remove_caps;
	err = nv_judge_probes(gpus);
	if (err)
		goto unregister_driver;
	err = nv_open_init();
	if (err)
		goto unregister_driver;

	pr_info("loading NVIDIA UNIX Open Kernel Module for " NVIDIA_MACHINE "  %s  Simulator\n",
		nv_version);
	return 0;

unregister_driver:
	pci_unregister_driver(&nv_pci_driver);
remove_caps:
	nv_caps_exit();
remove_displays:
	nv_displays_exit();
remove_proc:
	nv_proc_exit();
free_version:
	kfree(nv_first_version);
	return err;
}

static void __exit nv_exit(void)
{
	nv_open_exit();
	pci_unregister_driver(&nv_pci_driver);
	nv_caps_exit();
	nv_displays_exit();
	nv_proc_exit();
	kfree(nv_first_version);
}

module_init(nv_init);
module_exit(nv_exit);

/* Symbol that makes nvidia-uvm depend on this module. */
const char *nv_driver_version(void)
{
	return nv_version;
}
EXPORT_SYMBOL_GPL(nv_driver_version);

MODULE_DESCRIPTION("Simulated NVIDIA GPU driver");
MODULE_VERSION(NV_MODULE_VERSION);
MODULE_LICENSE("GPL");
