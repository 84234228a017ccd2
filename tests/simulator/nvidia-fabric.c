// SPDX-License-Identifier: GPL-2.0
/*
 * nvidia - simulated driver: the NVLink fabric and the ready state of
 * confidential GPUs.
 *
 * The driver does nothing with either: it keeps what the stand-ins of fabric
 * manager and NVML write to /sys/module/nvidia/parameters, for everybody to
 * read. So the state outlives the process that made it, as NVIDIA's does.
 */

#include <linux/module.h>

#include "nvidia.h"

#define NV_STATE(name, text)						\
	static unsigned int name[NV_MAX_GPUS];				\
	static unsigned int name##_count;				\
	module_param_array(name, uint, &name##_count, 0644);		\
	MODULE_PARM_DESC(name, text)

NV_STATE(fabric_state,
	 "per GPU, NVML's numbers: 0 no fabric, 1 not started, 2 in progress, 3 completed");
NV_STATE(fabric_status, "per GPU, NVML's return code of a completed fabric");
NV_STATE(fabric_health, "per GPU, NVML's health mask");

static bool cc_ready;
module_param(cc_ready, bool, 0644);
MODULE_PARM_DESC(cc_ready, "confidential GPUs take work of clients");
