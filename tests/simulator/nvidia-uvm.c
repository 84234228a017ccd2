// SPDX-License-Identifier: GPL-2.0
/*
 * nvidia-uvm - simulated driver: the unified memory module's devices
 *
 * Depends on nvidia through a symbol, and gives the character devices
 * nvidia-uvm (minor 0) and nvidia-uvm-tools (minor 1) of a dynamic major. They
 * open and close; there is no memory to manage and every ioctl fails.
 */

#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>

#include "nvidia.h"

#define UVM_MINORS	2

static dev_t uvm_dev;
static struct cdev uvm_cdev;

static const struct file_operations uvm_fops = {
	.owner = THIS_MODULE,
	.llseek = noop_llseek,
};

static int __init uvm_init(void)
{
	int err;

	nv_open_session();
	err = alloc_chrdev_region(&uvm_dev, 0, UVM_MINORS, "nvidia-uvm");
	if (err)
		return err;
	cdev_init(&uvm_cdev, &uvm_fops);
	uvm_cdev.owner = THIS_MODULE;
	err = cdev_add(&uvm_cdev, uvm_dev, UVM_MINORS);
	if (err) {
		unregister_chrdev_region(uvm_dev, UVM_MINORS);
		return err;
	}
	pr_info("nvidia-uvm: Loaded the UVM driver, major device number %u, for %s.\n",
		MAJOR(uvm_dev), nv_driver_version());
	return 0;
}

static void __exit uvm_exit(void)
{
	cdev_del(&uvm_cdev);
	unregister_chrdev_region(uvm_dev, UVM_MINORS);
}

module_init(uvm_init);
module_exit(uvm_exit);

MODULE_DESCRIPTION("Simulated NVIDIA unified memory driver");
MODULE_VERSION("550.163.01");
MODULE_LICENSE("GPL");
