// SPDX-License-Identifier: GPL-2.0
/*
 * nvidia - simulated driver: what it logs of a GPU's fault
 *
 * Causes of a failed initialisation as NVIDIA's driver logs them: lines without an
 * address, with the resource manager's own number of the GPU or without any, then
 * the code on a line with the address. Errors (Xid) that GPUs report.
 *
 * A GPU that falls off the bus is lost before anybody says so: its config space
 * reads all ones. What is only said (xid_now) changes nothing.
 */

#define pr_fmt(fmt) "NVRM: " fmt

#include <linux/module.h>
#include <linux/pci.h>
#include <linux/string.h>

#include "nvidia.h"

/* A write there makes fakepci lose the GPU (FAKEPCI_LOSE_AT). */
#define LOSE		0xf8
#define OFF_THE_BUS	79

static char *cause;
module_param(cause, charp, 0444);
MODULE_PARM_DESC(cause,
		 "causes of failed initialisations: K:NAME[,..], NAME one of cc, stubs, encryption, fsp, other");

static char *xid;
module_param(xid, charp, 0444);
MODULE_PARM_DESC(xid, "errors that GPUs report: K:NUMBER:MS[,..], MS after the adapter came up");

/* Lines with a function's name before them have the number, the others none. */
static const struct nv_cause {
	const char *name;
	enum nv_cause_in part;
	struct nv_init_code code;
	const char *numbered[2];
	const char *plain[2];
} nv_causes[] = {
	{ "cc", NV_CAUSE_IN_S1, { 0x22, 0x38 },
	  { "confComputeConstructEngine_IMPL: CPU does not support confidential compute.",
	    "nvAssertFailedNoLog: Assertion failed: 0 @ conf_compute.c:161" },
	  { "osInitNvMapping: *** Cannot attach gpu",
	    "RmInitAdapter: osInitNvMapping failed, bailing out of RmInitAdapter" } },
	{ "stubs", NV_CAUSE_IN_S2, { 0x62, 0x65 },
	  { NULL },
	  { "libspdm_check_crypto_backend: Error - libspdm expects LKCA but found stubs!" } },
	{ "encryption", NV_CAUSE_IN_S2, { 0x62, 0x65 },
	  { "spdmDheCheck_IMPL: Encryption FAILED" } },
	{ "fsp", NV_CAUSE_IN_S2, { 0x62, 0x65 },
	  { "kfspPollForResponse_IMPL: FSP command timed out",
	    "nvAssertOkFailedNoLog: Assertion failed: Call timed out @ kern_fsp.c:1" } },
	{ "other", NV_CAUSE_IN_S2, { 0x99, 0x1 },
	  { "someEngineInit_IMPL: something that nobody knows" } },
};

static const struct nv_cause *nv_find_cause(const struct nv_gpu *gpu)
{
	const char *entry = cause;
	char name[16];
	unsigned int k;
	int i;

	while (entry && *entry) {
		if (sscanf(entry, "%u:%15s", &k, name) == 2 && k == gpu->position) {
			name[strcspn(name, ",")] = 0;
			for (i = 0; i < ARRAY_SIZE(nv_causes); i++)
				if (!strcmp(name, nv_causes[i].name))
					return &nv_causes[i];
		}
		entry = strchr(entry, ',');
		if (entry)
			entry++;
	}
	return NULL;
}

/* Logs the cause by which this part of an initialisation fails, if any; returns its code. */
struct nv_init_code nv_say_cause(const struct nv_gpu *gpu, enum nv_cause_in part)
{
	const struct nv_cause *c = nv_find_cause(gpu);
	int i;

	if (!c || c->part != part)
		return INIT_OK;
	for (i = 0; i < ARRAY_SIZE(c->numbered) && c->numbered[i]; i++)
		pr_err("GPU%u %s\n", gpu->instance, c->numbered[i]);
	for (i = 0; i < ARRAY_SIZE(c->plain) && c->plain[i]; i++)
		pr_err("%s\n", c->plain[i]);
	return c->code;
}

void nv_say_xid(const struct nv_gpu *gpu, unsigned int number)
{
	const struct pci_dev *pdev = gpu->pdev;

	pr_err("Xid (PCI:%04x:%02x:%02x): %u, pid='<unknown>', name=<unknown>, %s\n",
	       pci_domain_nr(pdev->bus), pdev->bus->number, PCI_SLOT(pdev->devfn),
	       number, number == OFF_THE_BUS ? "GPU has fallen off the bus." : "simulated");
	if (number == OFF_THE_BUS)
		pr_err("GPU %s: GPU has fallen off the bus.\n", pci_name(pdev));
}

static void nv_xid_work(struct work_struct *work)
{
	struct nv_gpu *gpu = container_of(to_delayed_work(work), struct nv_gpu, xid);
	unsigned int number, ms;

	if (!nv_find_entry(xid, gpu, &number, &ms))
		return;
	if (number == OFF_THE_BUS)
		pci_write_config_byte(gpu->pdev, LOSE, 1);
	nv_say_xid(gpu, number);
}

void nv_init_xid(struct nv_gpu *gpu)
{
	INIT_DELAYED_WORK(&gpu->xid, nv_xid_work);
}

/* The adapter is up. */
void nv_schedule_xid(struct nv_gpu *gpu)
{
	unsigned int number, ms;

	if (nv_find_entry(xid, gpu, &number, &ms))
		schedule_delayed_work(&gpu->xid, msecs_to_jiffies(ms));
}

/* "K:NUMBER" written to the parameter: the driver says so at once, and the GPU goes on. */
static int nv_set_xid_now(const char *text, const struct kernel_param *unused)
{
	struct nv_gpu *gpu;
	unsigned int k, number;

	if (sscanf(text, "%u:%u", &k, &number) != 2)
		return -EINVAL;
	mutex_lock(&nv_gpus_lock);
	list_for_each_entry(gpu, &nv_gpus, node)
		if (gpu->position == k)
			nv_say_xid(gpu, number);
	mutex_unlock(&nv_gpus_lock);
	return 0;
}

static const struct kernel_param_ops nv_xid_now_ops = {
	.set = nv_set_xid_now,
};
module_param_cb(xid_now, &nv_xid_now_ops, NULL, 0200);
MODULE_PARM_DESC(xid_now, "written later: K:NUMBER, an error that the driver reports at once");
