/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the parts of the simulated nvidia module share.
 *
 * Locks, outermost first:
 *   nv_gpus_lock  the list of GPUs and the minors in use
 *   gpu->lock     one GPU's use count; held while it initialises
 *   nv_rm_lock    the "RM lock": parts S1 and S3 of every initialisation
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

#define NV_MAX_GPUS	32
#define NV_MAJOR	195
#define NV_MINOR_MAX	247	/* the last minor that a GPU can have */
#define NV_MINOR_CTL	255

/* Where a GPU's adapter is. Written under gpu->lock, read by /proc without. */
enum nv_adapter {
	NV_ADAPTER_DOWN,
	NV_ADAPTER_INITIALISING,
	NV_ADAPTER_UP,
	NV_ADAPTER_FAILED,
};

struct nv_gpu {
	struct pci_dev *pdev;
	struct list_head node;
	unsigned int position;		/* among all GPUs, in PCI order */
	unsigned int minor;
	struct proc_dir_entry *proc;

	/* Opens in flight and open files, plus one for the binding. */
	refcount_t users;
	struct completion unused;

	struct kthread_worker *open_q;	/* runs the non-blocking opens */
	struct mutex lock;
	unsigned int use_count;		/* under lock: successful opens */
	enum nv_adapter adapter;
	bool seen;			/* has been up once: UUID and VBIOS are known */

	atomic_t opens, closes, inits, init_failures, teardowns;
};

/* nvidia-driver.c */
extern struct list_head nv_gpus;
extern struct mutex nv_gpus_lock;
extern char *nv_version;
void nv_put_gpu(struct nv_gpu *gpu);
void nv_sleep_ms(unsigned int ms);
const char *nv_driver_version(void);	/* exported, for nvidia-uvm */

/* nvidia-open.c */
int nv_open_init(void);
void nv_open_exit(void);

/* nvidia-proc.c */
int nv_proc_init(void);
void nv_proc_exit(void);
int nv_proc_add_gpu(struct nv_gpu *gpu);
void nv_proc_remove_gpu(struct nv_gpu *gpu);

/* nvidia-caps.c */
int nv_caps_init(void);
void nv_caps_exit(void);

/* A parameter that has a value per GPU: the last value goes for the rest. */
static inline unsigned int nv_per_gpu(const unsigned int *values,
				      unsigned int count, unsigned int position)
{
	return count ? values[min(position, count - 1)] : 0;
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

#endif
