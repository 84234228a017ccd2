/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Shared by the parts of the simulated nvidia module.
 *
 * Locks, as in NVIDIA's driver, outermost first:
 *   L  nv_gpus_lock   the list of GPUs and the minors in use
 *   D  gpu->lock      one GPU's use count; held while it initialises
 *   A  nv_api_lock    the resource manager's lock, taken by writers only
 *   G  nv_gpu_locks   one lock a GPU, below A
 */
#ifndef NVIDIA_SIM_H
#define NVIDIA_SIM_H

#include <linux/atomic.h>
#include <linux/completion.h>
#include <linux/kthread.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/refcount.h>
#include <linux/workqueue.h>

/* As NVIDIA's driver names the machine that it is for. */
#ifdef CONFIG_X86
#define NVIDIA_MACHINE	"x86_64"
#else
#define NVIDIA_MACHINE	"aarch64"
#endif

#define NV_MAX_GPUS	32
#define NV_MAJOR	195
#define NV_MINOR_MAX	247	/* the last minor that a GPU can have */
#define NV_MINOR_CTL	255

/* State of a GPU's adapter. Written under gpu->lock, read by /proc without. */
enum nv_adapter {
	NV_ADAPTER_DOWN,
	NV_ADAPTER_INITIALISING,
	NV_ADAPTER_UP,
	NV_ADAPTER_FAILED,
};

/* RM_INIT_* and NV_STATUS, as the driver prints them. */
struct nv_init_code {
	unsigned int stage, status;
};

#define INIT_OK		((struct nv_init_code){ 0, 0 })
#define INIT_FAILED(stage, status) ((struct nv_init_code){ stage, status })

/* Part of an initialisation. */
enum nv_cause_in {
	NV_CAUSE_IN_S1,
	NV_CAUSE_IN_S2,
};

struct nv_gpu {
	struct pci_dev *pdev;
	struct list_head node;
	unsigned int position;		/* among all GPUs, in PCI order */
	unsigned int minor;
	unsigned int instance;		/* the resource manager's number, while attached */
	struct proc_dir_entry *proc;

	/* Opens in flight and open files, plus one for the binding. */
	refcount_t users;
	struct completion unused;

	struct kthread_worker *open_q;	/* runs the non-blocking opens */
	bool accepts_opens;		/* it still takes some: written under L */
	struct delayed_work xid;	/* says what the parameter wants said */
	struct delayed_work display;	/* adds its display */
	struct mutex lock;
	unsigned int use_count;		/* under lock: successful opens */
	enum nv_adapter adapter;
	bool kept;			/* initialised in the probe, and for good */
	bool seen;			/* has been up once: UUID and VBIOS are known */
	bool has_caps;			/* /proc has the directory of its capabilities */

	atomic_t opens, closes, inits, init_failures, teardowns;
};

/* nvidia-driver.c */
extern struct list_head nv_gpus;
extern struct mutex nv_gpus_lock;
extern char *nv_version;
bool nv_version_at_least(unsigned int branch, unsigned int minor, unsigned int patch);
void nv_put_gpu(struct nv_gpu *gpu);
void nv_sleep_ms(unsigned int ms);
const char *nv_driver_version(void);	/* exported, for nvidia-uvm */
void nv_open_session(void);		/* likewise */
void nv_take_api_lock(void);	/* likewise: NV_ESC_STATUS_CODE */
void nv_allocate(void);		/* NV_ESC_RM_ALLOC */

/* nvidia-adapter.c */
void nv_adapter_init(void);
void nv_read_uuid(struct nv_gpu *gpu);
int nv_start_adapter(struct nv_gpu *gpu);
void nv_stop_adapter(struct nv_gpu *gpu);
bool nv_find_entry(const char *list, const struct nv_gpu *gpu, unsigned int *a, unsigned int *b);
bool nv_inits_on_probe(void);
bool nv_opens_nonblocking(void);
unsigned int nv_most_at_once(void);
const char *nv_registry_dwords(void);

/* nvidia-words.c */
struct nv_init_code nv_say_cause(const struct nv_gpu *gpu, enum nv_cause_in part);
void nv_say_xid(const struct nv_gpu *gpu, unsigned int number);
void nv_init_xid(struct nv_gpu *gpu);
void nv_schedule_xid(struct nv_gpu *gpu);

/* nvidia-open.c */
int nv_open_init(void);
void nv_open_exit(void);
void nv_stop_opens(struct nv_gpu *gpu);

/* nvidia-proc.c */
int nv_proc_init(void);
void nv_proc_exit(void);
int nv_proc_add_gpu(struct nv_gpu *gpu);
void nv_proc_remove_gpu(struct nv_gpu *gpu);

/* nvidia-caps.c */
bool nv_has_switches(void);
int nv_caps_init(void);
void nv_caps_exit(void);
void nv_caps_add_gpu(struct nv_gpu *gpu);
void nv_caps_add_instances(const struct nv_gpu *gpu);
void nv_caps_remove_instances(const struct nv_gpu *gpu);

/* nvidia-displays.c */
int nv_displays_init(void);
void nv_displays_exit(void);
void nv_displays_prepare(struct nv_gpu *gpu);
void nv_displays_add(struct nv_gpu *gpu);
void nv_displays_remove(struct nv_gpu *gpu);

/* A parameter that has a value per GPU: the last value goes for the rest. */
static inline unsigned int nv_per_gpu(const unsigned int *values, unsigned int count,
				      unsigned int position, unsigned int otherwise)
{
	return count ? values[min(position, count - 1)] : otherwise;
}

/* A parameter that lists GPUs by their position. */
static inline bool nv_listed(const unsigned int *list, unsigned int count,
			     unsigned int position)
{
	unsigned int i;

	for (i = 0; i < count; i++)
		if (list[i] == position)
			return true;
	return false;
}

/* An array parameter, with its count, as the two above want them. */
#define NV_LIST(name, text)						\
	static unsigned int name[NV_MAX_GPUS];				\
	static unsigned int name##_count;				\
	module_param_array(name, uint, &name##_count, 0444);		\
	MODULE_PARM_DESC(name, text)

#define nv_time(name, gpu, otherwise) \
	nv_per_gpu(name, name##_count, (gpu)->position, otherwise)
#define nv_has(name, gpu) nv_listed(name, name##_count, (gpu)->position)

/* Never returns, and cannot be killed. */
void __noreturn nv_hang(void);

#endif
