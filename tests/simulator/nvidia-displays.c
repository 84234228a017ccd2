// SPDX-License-Identifier: GPL-2.0
/*
 * nvidia - simulated driver: displays
 *
 * Devices that nvidia-drm adds to a GPU: a card and a render node, in sysfs below the GPU's
 * function, in /dev by devtmpfs, and with the kernel's uevents. They come some time
 * after the adapter is up, as after a module that is loaded later.
 *
 * Not simulated: a display. Nobody is behind the nodes' numbers.
 */

#define pr_fmt(fmt) "NVRM: " fmt

#include <linux/device.h>
#include <linux/err.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/version.h>

#include "nvidia.h"

#define DRM_MAJOR	226
#define FIRST_RENDER	128

NV_LIST(displays, "GPUs that have a display");
static unsigned int displays_ms;
module_param(displays_ms, uint, 0444);
MODULE_PARM_DESC(displays_ms, "how long after its adapter came up a GPU's display appears");

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
static char *nv_display_node(const struct device *dev, umode_t *mode)
#else
static char *nv_display_node(struct device *dev, umode_t *mode)
#endif
{
	return kasprintf(GFP_KERNEL, "dri/%s", dev_name(dev));
}

static struct class nv_drm_class = {
	.name = "drm",
	.devnode = nv_display_node,
};

static void nv_display_work(struct work_struct *work)
{
	struct nv_gpu *gpu = container_of(to_delayed_work(work), struct nv_gpu, display);
	static const struct {
		const char *name;
		unsigned int first;
	} nodes[] = { { "card", 0 }, { "renderD", FIRST_RENDER } };
	int i;

	for (i = 0; i < ARRAY_SIZE(nodes); i++) {
		unsigned int number = nodes[i].first + gpu->position;

		if (IS_ERR(device_create(&nv_drm_class, &gpu->pdev->dev,
					 MKDEV(DRM_MAJOR, number), NULL, "%s%u",
					 nodes[i].name, number)))
			pr_err("GPU %s: cannot make %s%u\n", pci_name(gpu->pdev),
			       nodes[i].name, number);
	}
}

void nv_displays_prepare(struct nv_gpu *gpu)
{
	INIT_DELAYED_WORK(&gpu->display, nv_display_work);
}

/* The adapter is up, for the first time. */
void nv_displays_add(struct nv_gpu *gpu)
{
	if (nv_has(displays, gpu))
		schedule_delayed_work(&gpu->display, msecs_to_jiffies(displays_ms));
}

void nv_displays_remove(struct nv_gpu *gpu)
{
	if (!nv_has(displays, gpu))
		return;
	cancel_delayed_work_sync(&gpu->display);
	/* Those that are not there are passed over. */
	device_destroy(&nv_drm_class, MKDEV(DRM_MAJOR, gpu->position));
	device_destroy(&nv_drm_class, MKDEV(DRM_MAJOR, FIRST_RENDER + gpu->position));
}

int nv_displays_init(void)
{
	return displays_count ? class_register(&nv_drm_class) : 0;
}

void nv_displays_exit(void)
{
	if (displays_count)
		class_unregister(&nv_drm_class);
}
