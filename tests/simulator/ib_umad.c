// SPDX-License-Identifier: GPL-2.0
/* Stands for the module that makes device nodes for management packets: it makes none. */
#include <linux/module.h>

static int __init umad_init(void)
{
	return 0;
}

static void __exit umad_exit(void)
{
}

module_init(umad_init);
module_exit(umad_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("stand-in for the nodes of management packets");
