// SPDX-License-Identifier: GPL-2.0
/*
 * nvidia - simulated driver: initialising an adapter and taking it down
 *
 * An initialisation has three parts. S1 (attach, firmware) is under the resource
 * manager's lock A and the GPU's own G; S2 (the GPU's own processor boots) under
 * G, and under A as well unless the driver is relaxed; S3 (state) under A and the
 * G of all GPUs, so beside no other GPU's S2. N at once take
 * N S1 + S2 + N S3, or N (S1 + S2 + S3) without relaxation.
 *
 * Invariants: called with gpu->lock held. A is never waited for with a G held.
 * Nothing here can be interrupted or killed.
 *
 * Not simulated: the real division of an initialisation into its parts, which
 * nobody outside has measured; firmware is asked for and not looked at.
 */

#define pr_fmt(fmt) "NVRM: " fmt

#include <linux/firmware.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/sched.h>
#include <linux/string.h>

#include "nvidia.h"

/* An H100's, roughly. */
#define S1_MS	300
#define S2_MS	1300
#define S3_MS	500

/* Offset at which GPUs without a capability for it have their mailbox in config space. */
#define MAILBOX		0xb4
/* Offset at which fakepci counts a GPU's resets in its config space (FAKEPCI_RESETS). */
#define RESETS		0xfc

NV_LIST(s1_ms, "initialisation, attach: under the RM lock, per GPU; default 300");
NV_LIST(s2_ms,
	"initialisation, GSP boot: without the RM lock where relaxed, per GPU; default 1300");
NV_LIST(s3_ms, "initialisation, state load: under the RM lock and all GPUs', per GPU; default 500");
NV_LIST(fw_ms, "copying the firmware, within S1, per GPU");
NV_LIST(init_fail, "GPUs whose firmware does not boot: (0x62:0x65)");
NV_LIST(init_hang, "GPUs whose initialisation never ends");
NV_LIST(wpr2,
	"GPUs that need a reset: unexpected WPR2, (0x62:0x40); a reset (fakepci.flr) cures that");
NV_LIST(wpr2_stuck, "GPUs with the same fault that no reset cures");
NV_LIST(fabric, "GPUs whose NVLink fabric is not ready: status 0x81");
NV_LIST(cc_mixed,
	"GPUs whose confidential-computing mode is another than the others': (0x22:0x56)");

NV_LIST(coherent, "GPUs whose memory the kernel must add as movable (Grace): else the state load "
		  "fails, (0x25:0x40)");

static char *init_code;
module_param(init_code, charp, 0444);
MODULE_PARM_DESC(init_code, "GPUs whose initialisation fails with a code: K:INIT:STATUS[,..]");

static unsigned int call_ms = 2;
module_param(call_ms, uint, 0444);
MODULE_PARM_DESC(call_ms, "a program's allocation, under the RM lock and all GPUs'; default 2");

static bool cc;
module_param(cc, bool, 0444);
MODULE_PARM_DESC(cc, "confidential computing: all under the RM lock, and once per GPU");

static bool firmware;
module_param(firmware, bool, 0444);
MODULE_PARM_DESC(firmware, "ask the kernel for the GSP's firmware, and fail without it");

static int relaxed = -1;
module_param(relaxed, int, 0444);
MODULE_PARM_DESC(relaxed, "S2 without the RM lock: 0, 1; default: as the version does");

static bool nonblocking_open = true;
module_param_named(NVreg_EnableNonblockingOpen, nonblocking_open, bool, 0444);
static bool init_on_probe;
module_param_named(NVreg_GpuInitOnProbe, init_on_probe, bool, 0444);
static char *registry_dwords = "";
module_param_named(NVreg_RegistryDwords, registry_dwords, charp, 0444);

static DEFINE_MUTEX(nv_api_lock);
static struct mutex nv_gpu_locks[NV_MAX_GPUS];
static DEFINE_SPINLOCK(nv_booting_lock);
static unsigned int nv_booting, nv_booting_most;
/* Numbers of the GPUs that are attached; under the same lock. */
static DECLARE_BITMAP(nv_instances, NV_MAX_GPUS);

const char *nv_registry_dwords(void)
{
	return registry_dwords;
}

bool nv_opens_nonblocking(void)
{
	return nonblocking_open && nv_version_at_least(550, 40, 7);
}

/* Older drivers take the parameter for an unknown one. */
bool nv_inits_on_probe(void)
{
	return init_on_probe && nv_version_at_least(595, 44, 2);
}

/* GPUs in S2 at one time, at most so far. */
unsigned int nv_most_at_once(void)
{
	return READ_ONCE(nv_booting_most);
}

static bool nv_relaxed(void)
{
	if (cc || strstr(registry_dwords, "RmRelaxedGspInitLocking=0"))
		return false;
	if (relaxed >= 0)
		return relaxed;
	return nv_version_at_least(555, 0, 0) ||
	       (nv_version_at_least(550, 142, 0) && !nv_version_at_least(551, 0, 0));
}

static struct mutex *nv_gpu_lock(const struct nv_gpu *gpu)
{
	return &nv_gpu_locks[gpu->position % NV_MAX_GPUS];
}

static void nv_lock_all_gpus(void)
{
	int i;

	for (i = 0; i < NV_MAX_GPUS; i++)
		mutex_lock(&nv_gpu_locks[i]);
}

static void nv_unlock_all_gpus(void)
{
	int i;

	for (i = NV_MAX_GPUS - 1; i >= 0; i--)
		mutex_unlock(&nv_gpu_locks[i]);
}

static void nv_count_booting(int change)
{
	spin_lock(&nv_booting_lock);
	nv_booting += change;
	nv_booting_most = max(nv_booting_most, nv_booting);
	spin_unlock(&nv_booting_lock);
}

/*
 * Before its first initialisation a GPU may tell its UUID through a mailbox in
 * config space: a capability, or a fixed place. None here has one, so each search
 * goes to the end of the list. That of a GPU that reads all ones has none: as with
 * NVIDIA's driver, whoever searches it never comes back.
 */
static void nv_search_mailbox(struct pci_dev *pdev)
{
	u8 at = 0, byte;

	pci_read_config_byte(pdev, PCI_CAPABILITY_LIST, &at);
	while (at) {
		pci_read_config_byte(pdev, at + PCI_CAP_LIST_ID, &byte);
		pci_read_config_byte(pdev, at + PCI_CAP_LIST_NEXT, &at);
		/* NVIDIA's keeps the CPU, too. */
		cond_resched();
	}
	pci_read_config_byte(pdev, MAILBOX, &byte);
}

/* Waits for whoever initialises a GPU under A. */
void nv_read_uuid(struct nv_gpu *gpu)
{
	mutex_lock(&nv_api_lock);
	if (!gpu->seen)
		nv_search_mailbox(gpu->pdev);
	mutex_unlock(&nv_api_lock);
}

/* Needed of the resource manager by nvidia-uvm's start: a session, under A. */
void nv_open_session(void)
{
	mutex_lock(&nv_api_lock);
	mutex_unlock(&nv_api_lock);
}
EXPORT_SYMBOL_GPL(nv_open_session);

/* NV_ESC_STATUS_CODE does no more: who asks while an S1 runs has the answer at its end. */
void nv_take_api_lock(void)
{
	mutex_lock(&nv_api_lock);
	mutex_unlock(&nv_api_lock);
}

/* Keeps the CPU, as RM does until the GPU's processor has answered: osSpinLoop() is empty. */
static void nv_spin_ms(unsigned int ms)
{
	ktime_t end = ktime_add_ms(ktime_get(), ms);

	while (ktime_before(ktime_get(), end))
		cpu_relax();
}

/*
 * A root client, and most classes: A, and with A held the G of all GPUs, so that
 * it waits for everybody's S2 and keeps everybody from an S1.
 */
void nv_allocate(void)
{
	mutex_lock(&nv_api_lock);
	nv_lock_all_gpus();
	nv_spin_ms(call_ms);
	nv_unlock_all_gpus();
	mutex_unlock(&nv_api_lock);
}

/* The entry of this GPU in a list K:A:B[,..]. */
bool nv_find_entry(const char *list, const struct nv_gpu *gpu,
		   unsigned int *a, unsigned int *b)
{
	unsigned int k;

	while (list && *list) {
		if (sscanf(list, "%u:%i:%i", &k, a, b) == 3 && k == gpu->position)
			return true;
		list = strchr(list, ',');
		if (list)
			list++;
	}
	return false;
}

static bool nv_load_firmware(struct nv_gpu *gpu)
{
	const struct firmware *image;
	char name[64];

	nv_sleep_ms(nv_time(fw_ms, gpu, 0));
	if (!firmware)
		return true;
	snprintf(name, sizeof(name), "nvidia/%s/gsp_ga10x.bin", nv_version);
	if (request_firmware(&image, name, &gpu->pdev->dev)) {
		pr_err("RmFetchGspRmImages: No firmware image found\n");
		return false;
	}
	release_firmware(image);
	return true;
}

/*
 * Config accesses of a part: when, in thousandths of it, and how many. While the
 * host maps another GPU's BARs each group waits.
 *
 * S1: NVIDIA's module 550.163.01 makes these (MSI-X first, PCIe capabilities last).
 * S3: nobody has seen it without a GPU. That module's source reads the bridge above
 * the GPU (RmCheckForExternalGpu), and later clears the GPU's own error registers
 * (kbifStateLoad); when, and how often, is assumed.
 */
struct nv_group {
	unsigned int at, reads, writes;
};

static const struct nv_group nv_attach_groups[] = {
	{ 0, 12, 3 }, { 695, 10, 0 }, { 735, 3, 0 }, { 850, 2, 0 }, { 868, 4, 0 }, { 1000, 3, 2 },
};

static const struct nv_group nv_state_groups[] = { { 0, 1, 0 }, { 700, 1, 1 } };

static void nv_access_config(struct nv_gpu *gpu, unsigned int reads, unsigned int writes)
{
	u16 command = 0;

	while (reads--)
		pci_read_config_word(gpu->pdev, PCI_COMMAND, &command);
	/* As it is; all ones: gone. */
	while (command != 0xffff && writes--)
		pci_write_config_word(gpu->pdev, PCI_COMMAND, command);
}

/* Sleeps until a group of a part that takes `whole` ms is due, and makes it; returns ms slept. */
static unsigned int nv_reach_group(struct nv_gpu *gpu, const struct nv_group *group,
				   unsigned int whole, unsigned int slept)
{
	unsigned int until = whole * group->at / 1000;

	nv_sleep_ms(until - slept);
	nv_access_config(gpu, group->reads, group->writes);
	return until;
}

/*
 * The resource manager's own number of a GPU, by which its messages name it: the
 * lowest that is free, from the attach until the initialisation fails or the
 * adapter is taken down.
 */
static void nv_number(struct nv_gpu *gpu)
{
	spin_lock(&nv_booting_lock);
	gpu->instance = find_first_zero_bit(nv_instances, NV_MAX_GPUS);
	__set_bit(gpu->instance, nv_instances);
	spin_unlock(&nv_booting_lock);
}

static void nv_unnumber(struct nv_gpu *gpu)
{
	spin_lock(&nv_booting_lock);
	__clear_bit(gpu->instance, nv_instances);
	spin_unlock(&nv_booting_lock);
}

/* S1, under A and G. */
static struct nv_init_code nv_attach(struct nv_gpu *gpu)
{
	unsigned int whole = nv_time(s1_ms, gpu, S1_MS), slept = 0, i;

	for (i = 0; i < ARRAY_SIZE(nv_attach_groups); i++) {
		slept = nv_reach_group(gpu, &nv_attach_groups[i], whole, slept);
		nv_caps_add_gpu(gpu);
	}
	nv_sleep_ms(whole - slept);
	if (cc && (gpu->seen || nv_has(cc_mixed, gpu)))
		return INIT_FAILED(0x22, 0x56);
	if (!nv_load_firmware(gpu))
		return INIT_FAILED(0x61, 0x56);
	return nv_say_cause(gpu, NV_CAUSE_IN_S1);
}

void __noreturn nv_hang(void)
{
	for (;;) {
		set_current_state(TASK_UNINTERRUPTIBLE);
		schedule();
	}
}

/* Left half initialised by the last guest, unless it was reset since. */
static bool nv_is_dirty(const struct nv_gpu *gpu)
{
	u8 resets = 0;

	if (nv_has(wpr2_stuck, gpu))
		return true;
	if (!nv_has(wpr2, gpu))
		return false;
	pci_read_config_byte(gpu->pdev, RESETS, &resets);
	return !resets;
}

/* S2, under G. */
static struct nv_init_code nv_boot_gsp(struct nv_gpu *gpu)
{
	unsigned int stage, status;

	if (nv_is_dirty(gpu)) {
		pr_err("GPU%u kgspBootstrap: unexpected WPR2 already up, cannot proceed with booting GSP\n",
		       gpu->instance);
		pr_err("GPU%u kgspBootstrap: (the GPU is likely in a bad state and may need to be reset)\n",
		       gpu->instance);
		return INIT_FAILED(0x62, 0x40);
	}
	nv_count_booting(1);
	if (nv_has(init_hang, gpu))
		nv_hang();
	nv_sleep_ms(nv_time(s2_ms, gpu, S2_MS));
	nv_count_booting(-1);
	/* Torn out meanwhile: it was waited for in vain. */
	if (!READ_ONCE(gpu->accepts_opens) && !pci_device_is_present(gpu->pdev)) {
		nv_say_xid(gpu, 79);
		return INIT_FAILED(0x62, 0x65);
	}
	if (nv_has(init_fail, gpu))
		return INIT_FAILED(0x62, 0x65);
	if (nv_find_entry(init_code, gpu, &stage, &status))
		return INIT_FAILED(stage, status);
	return nv_say_cause(gpu, NV_CAUSE_IN_S2);
}

/* Policy for memory that is added, which NVIDIA's driver learns from its zone. */
static bool nv_memory_is_movable(void)
{
	struct file *file = filp_open("/sys/devices/system/memory/auto_online_blocks", O_RDONLY, 0);
	char policy[32] = "";
	loff_t at = 0;

	if (IS_ERR(file))
		return false;
	kernel_read(file, policy, sizeof(policy) - 1, &at);
	filp_close(file, NULL);
	return strstarts(policy, "online_movable");
}

/* S3, under A and all G. */
static struct nv_init_code nv_load_state(struct nv_gpu *gpu)
{
	unsigned int whole = nv_time(s3_ms, gpu, S3_MS), slept = 0, i;

	for (i = 0; i < ARRAY_SIZE(nv_state_groups); i++)
		slept = nv_reach_group(gpu, &nv_state_groups[i], whole, slept);
	nv_sleep_ms(whole - slept);
	if (nv_has(coherent, gpu) && !nv_memory_is_movable()) {
		pr_err("Failing GPU memory onlining as the onlining zone is not movable. "
		       "pa: 0x%llx size: 0x%llx\n"
		       "NVRM: The NVIDIA GPU %s installed in the system\n"
		       "NVRM: requires auto onlining mode online_movable enabled in\n"
		       "NVRM: /sys/devices/system/memory/auto_online_blocks\n",
		       (u64)pci_resource_start(gpu->pdev, 4), (u64)pci_resource_len(gpu->pdev, 4),
		       pci_name(gpu->pdev));
		return INIT_FAILED(0x25, 0x40);
	}
	return nv_has(fabric, gpu) ? INIT_FAILED(0x25, 0x81) : INIT_OK;
}

static struct nv_init_code nv_init_adapter(struct nv_gpu *gpu)
{
	bool release = nv_relaxed();
	struct nv_init_code code;

	mutex_lock(&nv_api_lock);
	mutex_lock(nv_gpu_lock(gpu));
	nv_number(gpu);
	code = nv_attach(gpu);
	if (code.stage) {
		mutex_unlock(nv_gpu_lock(gpu));
		mutex_unlock(&nv_api_lock);
		return code;
	}
	if (release)
		mutex_unlock(&nv_api_lock);
	code = nv_boot_gsp(gpu);
	mutex_unlock(nv_gpu_lock(gpu));
	if (code.stage) {
		if (!release)
			mutex_unlock(&nv_api_lock);
		return code;
	}
	if (release)
		mutex_lock(&nv_api_lock);
	nv_lock_all_gpus();
	code = nv_load_state(gpu);
	nv_unlock_all_gpus();
	mutex_unlock(&nv_api_lock);
	return code;
}

/* Initialises. On failure says so in the driver's words; -EIO whatever it was. */
int nv_start_adapter(struct nv_gpu *gpu)
{
	struct nv_init_code code;

	lockdep_assert_held(&gpu->lock);
	atomic_inc(&gpu->inits);
	WRITE_ONCE(gpu->adapter, NV_ADAPTER_INITIALISING);
	code = nv_init_adapter(gpu);
	if (code.stage) {
		nv_unnumber(gpu);
		/* The third number is a line of the driver's source. */
		pr_err("GPU %s: RmInitAdapter failed! (0x%x:0x%x:%d)\n",
		       pci_name(gpu->pdev), code.stage, code.status, __LINE__);
		pr_err("GPU %s: rm_init_adapter failed, device minor number %u\n",
		       pci_name(gpu->pdev), gpu->minor);
		WRITE_ONCE(gpu->adapter, NV_ADAPTER_FAILED);
		atomic_inc(&gpu->init_failures);
		return -EIO;
	}
	if (!gpu->seen) {
		nv_caps_add_instances(gpu);
		nv_displays_add(gpu);
	}
	WRITE_ONCE(gpu->adapter, NV_ADAPTER_UP);
	WRITE_ONCE(gpu->seen, true);
	nv_schedule_xid(gpu);
	return 0;
}

/* The last close. Under A, as an initialisation's ends. */
void nv_stop_adapter(struct nv_gpu *gpu)
{
	lockdep_assert_held(&gpu->lock);
	mutex_lock(&nv_api_lock);
	WRITE_ONCE(gpu->adapter, NV_ADAPTER_DOWN);
	nv_unnumber(gpu);
	atomic_inc(&gpu->teardowns);
	mutex_unlock(&nv_api_lock);
}

void nv_adapter_init(void)
{
	int i;

	for (i = 0; i < NV_MAX_GPUS; i++)
		mutex_init(&nv_gpu_locks[i]);
}
