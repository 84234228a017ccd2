// SPDX-License-Identifier: GPL-2.0
/*
 * nvidia - simulated driver: /proc/driver/nvidia
 *
 * version, params, and a folder per bound GPU. `information` never initialises,
 * but reads config space and, until 590.44.01, waits for the resource manager's
 * lock, that is for the part of any GPU's initialisation that holds it; `power`
 * and `numa_status` wait for an initialisation of their GPU.
 *
 * Beyond NVIDIA's driver: gpus/<address>/sim, this simulator's own
 * counters, for tests.
 */

#define pr_fmt(fmt) "NVRM: " fmt

#include <linux/compiler.h>
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#include "nvidia.h"

static unsigned int modify_device_files = 1;
module_param_named(NVreg_ModifyDeviceFiles, modify_device_files, uint, 0444);
static unsigned int nvlink_disable;
module_param_named(NVreg_NvLinkDisable, nvlink_disable, uint, 0444);
static unsigned int device_file_uid;
module_param_named(NVreg_DeviceFileUID, device_file_uid, uint, 0444);
static unsigned int device_file_gid;
module_param_named(NVreg_DeviceFileGID, device_file_gid, uint, 0444);
static unsigned int device_file_mode = 0666;
module_param_named(NVreg_DeviceFileMode, device_file_mode, uint, 0444);
static bool numa;
module_param(numa, bool, 0444);
MODULE_PARM_DESC(numa, "GPUs have a numa_status file, as on coherent systems");

/* Lines that /proc/driver/nvidia/params has besides the above, with 550's defaults. */
static const struct nv_default {
	const char *name;
	unsigned int value;
} nv_before_files[] = {
	{ "ResmanDebugLevel", ~0U }, { "RmLogonRC", 1 },
}, nv_after_files[] = {
	{ "InitializeSystemMemoryAllocations", 1 }, { "UsePageAttributeTable", ~0U },
	{ "EnableMSI", 1 }, { "EnablePCIeGen3", 0 }, { "MemoryPoolSize", 0 },
	{ "KMallocHeapMaxSize", 0 }, { "VMallocHeapMaxSize", 0 },
	{ "IgnoreMMIOCheck", 0 }, { "TCEBypassMode", 0 }, { "EnableStreamMemOPs", 0 },
	{ "EnableUserNUMAManagement", 1 },
}, nv_after_nvlink[] = {
	{ "RmProfilingAdminOnly", 1 }, { "PreserveVideoMemoryAllocations", 0 },
	{ "EnableS0ixPowerManagement", 0 },
	{ "S0ixPowerManagementVideoMemoryThreshold", 256 },
	{ "DynamicPowerManagement", 3 },
	{ "DynamicPowerManagementVideoMemoryThreshold", 200 },
	{ "RegisterPCIDriver", 1 }, { "EnablePCIERelaxedOrderingMode", 0 },
	{ "EnableResizableBar", 0 }, { "EnableGpuFirmware", 18 },
	{ "EnableGpuFirmwareLogs", 2 }, { "EnableDbgBreakpoint", 0 },
	{ "OpenRmEnableUnsupportedGpus", 1 }, { "DmaRemapPeerMmio", 1 },
	{ "ImexChannelCount", 2048 },
};

static const char * const nv_strings_after[] = {
	"RegistryDwordsPerDevice", "RmMsg", "GpuBlacklist", "TemporaryFilePath",
	"ExcludedGpus",
};

NV_LIST(information_hang, "GPUs without information: lost, and never up before");

static bool no_minor;
module_param(no_minor, bool, 0444);
MODULE_PARM_DESC(no_minor, "information files lack the minor");

static struct proc_dir_entry *nv_proc, *nv_proc_gpus;

static int nv_version_show(struct seq_file *m, void *unused)
{
	seq_printf(m, "NVRM version: NVIDIA UNIX Open Kernel Module for " NVIDIA_MACHINE
		   "  %s  Simulator\n", nv_version);
	seq_puts(m, "GCC version:  " CONFIG_CC_VERSION_TEXT "\n");
	return 0;
}

static void nv_show_defaults(struct seq_file *m, const struct nv_default *list, int count)
{
	int i;

	for (i = 0; i < count; i++)
		seq_printf(m, "%s: %u\n", list[i].name, list[i].value);
}

static int nv_params_show(struct seq_file *m, void *unused)
{
	int i;

	nv_show_defaults(m, nv_before_files, ARRAY_SIZE(nv_before_files));
	seq_printf(m, "ModifyDeviceFiles: %u\n", modify_device_files);
	seq_printf(m, "DeviceFileUID: %u\n", device_file_uid);
	seq_printf(m, "DeviceFileGID: %u\n", device_file_gid);
	seq_printf(m, "DeviceFileMode: %u\n", device_file_mode);
	nv_show_defaults(m, nv_after_files, ARRAY_SIZE(nv_after_files));
	seq_printf(m, "NvLinkDisable: %u\n", nvlink_disable);
	nv_show_defaults(m, nv_after_nvlink, ARRAY_SIZE(nv_after_nvlink));
	seq_printf(m, "RegistryDwords: \"%s\"\n", nv_registry_dwords());
	for (i = 0; i < ARRAY_SIZE(nv_strings_after); i++)
		seq_printf(m, "%s: \"\"\n", nv_strings_after[i]);
	return 0;
}

static int nv_registry_show(struct seq_file *m, void *unused)
{
	seq_puts(m, "Binary: \"\"\n");
	return 0;
}

static int nv_information_show(struct seq_file *m, void *unused)
{
	struct nv_gpu *gpu = m->private;
	struct pci_dev *pdev = gpu->pdev;
	bool asks = !nv_version_at_least(590, 44, 1);
	bool seen;

	if (nv_has(information_hang, gpu))
		nv_hang();
	if (asks)
		nv_read_uuid(gpu);
	seen = READ_ONCE(gpu->seen);
	seq_puts(m, "Model: \t\t NVIDIA H100 80GB HBM3\n");
	seq_printf(m, "IRQ:   \t\t %u\n", pdev->irq);
	/* Made from the address: the same in every boot, another per GPU. */
	if (seen)
		seq_printf(m, "GPU UUID: \t GPU-%08x-51d0-5afe-9000-%012x\n",
			   pci_domain_nr(pdev->bus), pci_dev_id(pdev));
	else if (asks)
		seq_puts(m, "GPU UUID: \t GPU-????????-????-????-????-????????????\n");
	seq_printf(m, "Video BIOS: \t %s\n", seen ? "96.00.74.00.01" : "??.??.??.??.??");
	seq_printf(m, "Bus Type: \t %s\n",
		   pci_find_capability(pdev, PCI_CAP_ID_EXP) ? "PCIe" : "PCI");
	seq_printf(m, "DMA Size: \t %d bits\n", fls64(pdev->dma_mask));
	seq_printf(m, "DMA Mask: \t 0x%llx\n", pdev->dma_mask);
	seq_printf(m, "Bus Location: \t %s\n", pci_name(pdev));
	if (!no_minor)
		seq_printf(m, "Device Minor: \t %u\n", gpu->minor);
	seq_printf(m, "GPU Firmware: \t %s\n", seen ? nv_version : "N/A");
	seq_puts(m, "GPU Excluded:\t No\n");
	return 0;
}

static int nv_power_show(struct seq_file *m, void *unused)
{
	struct nv_gpu *gpu = m->private;

	mutex_lock(&gpu->lock);
	seq_printf(m, "Runtime D3 status:          %s\n", gpu->seen ? "Disabled by default" : "?");
	seq_printf(m, "Video Memory:               %s\n", gpu->seen ? "Active" : "?");
	seq_puts(m, "\nGPU Hardware Support:\n");
	seq_printf(m, " Video Memory Self Refresh: %s\n", gpu->seen ? "Not Supported" : "?");
	seq_printf(m, " Video Memory Off:          %s\n", gpu->seen ? "Supported" : "?");
	mutex_unlock(&gpu->lock);
	return 0;
}

static int nv_numa_show(struct seq_file *m, void *unused)
{
	struct nv_gpu *gpu = m->private;

	mutex_lock(&gpu->lock);
	seq_puts(m, "Node:    0\nStatus:  online\n");
	mutex_unlock(&gpu->lock);
	return 0;
}

static const char *nv_adapter_name(enum nv_adapter adapter)
{
	switch (adapter) {
	case NV_ADAPTER_DOWN:
		return "down";
	case NV_ADAPTER_INITIALISING:
		return "initialising";
	case NV_ADAPTER_UP:
		return "up";
	case NV_ADAPTER_FAILED:
		return "failed";
	}
	return "?";
}

static int nv_sim_show(struct seq_file *m, void *unused)
{
	struct nv_gpu *gpu = m->private;

	seq_printf(m, "position: %u\n", gpu->position);
	seq_printf(m, "adapter: %s\n", nv_adapter_name(READ_ONCE(gpu->adapter)));
	seq_printf(m, "use_count: %u\n", READ_ONCE(gpu->use_count));
	seq_printf(m, "opens: %d\n", atomic_read(&gpu->opens));
	seq_printf(m, "closes: %d\n", atomic_read(&gpu->closes));
	seq_printf(m, "inits: %d\n", atomic_read(&gpu->inits));
	seq_printf(m, "init_failures: %d\n", atomic_read(&gpu->init_failures));
	seq_printf(m, "teardowns: %d\n", atomic_read(&gpu->teardowns));
	/* Number of GPUs that were in S2 at once, at most. */
	seq_printf(m, "at_once: %u\n", nv_most_at_once());
	return 0;
}

/* The folder appears with everything in it or, on an error, not at all. */
int nv_proc_add_gpu(struct nv_gpu *gpu)
{
	struct proc_dir_entry *dir = proc_mkdir(pci_name(gpu->pdev), nv_proc_gpus);

	if (!dir)
		goto fail;
	if (!proc_create_single_data("power", 0444, dir, nv_power_show, gpu) ||
	    !proc_create_single("registry", 0444, dir, nv_registry_show) ||
	    (numa && !proc_create_single_data("numa_status", 0444, dir, nv_numa_show, gpu)) ||
	    !proc_create_single_data("sim", 0444, dir, nv_sim_show, gpu) ||
	    !proc_create_single_data("information", 0444, dir, nv_information_show, gpu)) {
		proc_remove(dir);
		goto fail;
	}
	gpu->proc = dir;
	return 0;

fail:
	pr_err("GPU %s: cannot make its /proc folder\n", pci_name(gpu->pdev));
	return -ENOMEM;
}

void nv_proc_remove_gpu(struct nv_gpu *gpu)
{
	proc_remove(gpu->proc);
}

int nv_proc_init(void)
{
	nv_proc = proc_mkdir("driver/nvidia", NULL);
	if (!nv_proc)
		return -ENOMEM;
	nv_proc_gpus = proc_mkdir("gpus", nv_proc);
	if (!nv_proc_gpus ||
	    !proc_create_single("version", 0444, nv_proc, nv_version_show) ||
	    !proc_create_single("registry", 0444, nv_proc, nv_registry_show) ||
	    !proc_create_single("params", 0444, nv_proc, nv_params_show)) {
		proc_remove(nv_proc);
		return -ENOMEM;
	}
	return 0;
}

void nv_proc_exit(void)
{
	proc_remove(nv_proc);
}
