// SPDX-License-Identifier: GPL-2.0
/*
 * nvidia - simulated driver: character devices
 *
 * The first open of a GPU initialises its adapter, the last close takes it
 * down. A blocking open does it itself; an open with O_NONBLOCK hands it to the
 * GPU's own kernel thread and returns, and an ioctl waits for the outcome.
 *
 * Invariants: gpu->lock is held for the whole initialisation. A blocking open
 * waits for gpu->lock with nv_gpus_lock held: so it stalls every other open of
 * any GPU, as with NVIDIA's driver. Only the wait ioctl can be interrupted.
 *
 * Not simulated: RM clients of files, mmap, events.
 */

#define pr_fmt(fmt) "NVRM: " fmt

#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "nvidia.h"

/* NV_ESC_WAIT_OPEN_COMPLETE and its argument. */
struct nv_wait_open_complete {
	__s32 rc;
	__u32 status;
};

#define NV_WAIT_OPEN_COMPLETE	_IOWR('F', 218, struct nv_wait_open_complete)

/* NV_ESC_STATUS_CODE and its argument. */
struct nv_status_code {
	__u32 domain;
	__u8 bus, slot;
	__u32 status;
};

#define NV_STATUS_CODE		_IOWR('F', 209, struct nv_status_code)

/* NV_ESC_RM_ALLOC and its argument (NVOS64_PARAMETERS). */
struct nv_rm_alloc {
	__u32 root, parent, object, class;
	__u64 parameters, rights;
	__u32 parameters_size, flags, status, unused;
};

#define NV_RM_ALLOC		_IOWR('F', 43, struct nv_rm_alloc)
/* Class of a root client, the only one here. */
#define NV_ROOT			0

/* NV_ERR_OPERATING_SYSTEM: what the ioctl shows for every failed adapter. */
#define NV_STATUS_FAILED	0x59

static bool no_status;
module_param(no_status, bool, 0444);
MODULE_PARM_DESC(no_status, "NV_ESC_STATUS_CODE is refused, as by a driver that has no such call");

NV_LIST(open_fail, "GPUs that cannot be opened: EBUSY");

/* One open file. */
struct nv_file {
	struct kthread_work work;
	struct completion complete;	/* the open has ended, well or not */
	struct nv_gpu *opening;		/* the GPU, until then */
	struct nv_gpu *gpu;		/* the GPU after a good open, else NULL */
	bool control;			/* nvidiactl */
	int rc;
	u32 status;
};

/* Ends the open of `nvf`: initialises the adapter if nobody has yet. */
static void nv_open_locked(struct nv_file *nvf)
{
	struct nv_gpu *gpu = nvf->opening;
	int rc = 0;

	lockdep_assert_held(&gpu->lock);
	if (!gpu->use_count && !gpu->kept)
		rc = nv_start_adapter(gpu);
	if (!rc) {
		gpu->use_count++;
		nvf->gpu = gpu;
	}
	nvf->rc = rc;
	nvf->status = rc ? NV_STATUS_FAILED : 0;
}

/* After gpu->lock was dropped: lets go of a GPU that did not open. */
static void nv_open_done(struct nv_file *nvf)
{
	struct nv_gpu *gpu = nvf->opening;

	nvf->opening = NULL;
	if (nvf->rc)
		nv_put_gpu(gpu);
	complete_all(&nvf->complete);
}

static void nv_open_work(struct kthread_work *work)
{
	struct nv_file *nvf = container_of(work, struct nv_file, work);
	struct nv_gpu *gpu = nvf->opening;

	mutex_lock(&gpu->lock);
	nv_open_locked(nvf);
	mutex_unlock(&gpu->lock);
	nv_open_done(nvf);
}

/* True with gpu->lock held if this open can end at once. */
static bool nv_lock_for_open(struct nv_gpu *gpu, const struct file *file)
{
	if (!nv_opens_nonblocking() || !(file->f_flags & O_NONBLOCK)) {
		mutex_lock(&gpu->lock);
		return true;
	}
	if (!mutex_trylock(&gpu->lock))
		return false;
	if (gpu->use_count || gpu->kept)
		return true;
	mutex_unlock(&gpu->lock);
	return false;
}

/* Takes a reference on the GPU. Under nv_gpus_lock. */
static struct nv_gpu *nv_get_gpu(unsigned int minor)
{
	struct nv_gpu *gpu;

	list_for_each_entry(gpu, &nv_gpus, node) {
		if (gpu->minor == minor) {
			refcount_inc(&gpu->users);
			return gpu;
		}
	}
	return NULL;
}

static int nv_open_gpu(struct nv_file *nvf, unsigned int minor, const struct file *file)
{
	struct nv_gpu *gpu;

	mutex_lock(&nv_gpus_lock);
	gpu = nv_get_gpu(minor);
	if (!gpu) {
		mutex_unlock(&nv_gpus_lock);
		return -ENODEV;
	}
	if (nv_has(open_fail, gpu)) {
		nv_put_gpu(gpu);
		mutex_unlock(&nv_gpus_lock);
		return -EBUSY;
	}
	nvf->opening = gpu;
	atomic_inc(&gpu->opens);

	if (nv_lock_for_open(gpu, file)) {
		mutex_unlock(&nv_gpus_lock);
		nv_open_locked(nvf);
		mutex_unlock(&gpu->lock);
		nv_open_done(nvf);
		return nvf->rc;
	}
	if (!gpu->accepts_opens) {
		nv_put_gpu(gpu);
		mutex_unlock(&nv_gpus_lock);
		return -EBUSY;
	}
	kthread_queue_work(gpu->open_q, &nvf->work);
	mutex_unlock(&nv_gpus_lock);
	return 0;
}

/* For a removal: no more non-blocking opens, and the end of those that are under way. */
void nv_stop_opens(struct nv_gpu *gpu)
{
	mutex_lock(&nv_gpus_lock);
	WRITE_ONCE(gpu->accepts_opens, false);
	mutex_unlock(&nv_gpus_lock);
	kthread_flush_worker(gpu->open_q);
}

static int nv_open(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);
	struct nv_file *nvf;
	int err;

	nvf = kzalloc(sizeof(*nvf), GFP_KERNEL);
	if (!nvf)
		return -ENOMEM;
	init_completion(&nvf->complete);
	kthread_init_work(&nvf->work, nv_open_work);
	file->private_data = nvf;

	if (minor == NV_MINOR_CTL) {
		nvf->control = true;
		complete_all(&nvf->complete);
		return 0;
	}
	err = nv_open_gpu(nvf, minor, file);
	if (err)
		kfree(nvf);
	return err;
}

static int nv_release(struct inode *inode, struct file *file)
{
	struct nv_file *nvf = file->private_data;
	struct nv_gpu *gpu;

	wait_for_completion(&nvf->complete);
	gpu = nvf->gpu;
	if (gpu) {
		mutex_lock(&gpu->lock);
		atomic_inc(&gpu->closes);
		if (!--gpu->use_count && !gpu->kept)
			nv_stop_adapter(gpu);
		mutex_unlock(&gpu->lock);
		nv_put_gpu(gpu);
	}
	kfree(nvf);
	return 0;
}

/* Only by nvidiactl, as with NVIDIA's driver. */
static long nv_get_status(unsigned long arg)
{
	struct nv_status_code asked;
	struct nv_gpu *gpu;
	bool found = false;

	if (copy_from_user(&asked, (void __user *)arg, sizeof(asked)))
		return -EFAULT;
	mutex_lock(&nv_gpus_lock);
	list_for_each_entry(gpu, &nv_gpus, node)
		found |= pci_domain_nr(gpu->pdev->bus) == asked.domain &&
			 gpu->pdev->bus->number == asked.bus &&
			 PCI_SLOT(gpu->pdev->devfn) == asked.slot;
	mutex_unlock(&nv_gpus_lock);
	if (!found)
		return -EINVAL;
	nv_take_api_lock();
	asked.status = 0;
	return copy_to_user((void __user *)arg, &asked, sizeof(asked)) ? -EFAULT : 0;
}

/* Only by nvidiactl, as with NVIDIA's driver. */
static long nv_rm_alloc(unsigned long arg)
{
	struct nv_rm_alloc asked;

	if (copy_from_user(&asked, (void __user *)arg, sizeof(asked)))
		return -EFAULT;
	if (asked.class != NV_ROOT)
		return -EINVAL;
	nv_allocate();
	asked.status = 0;
	return copy_to_user((void __user *)arg, &asked, sizeof(asked)) ? -EFAULT : 0;
}

static long nv_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct nv_file *nvf = file->private_data;
	struct nv_wait_open_complete answer;

	/* A signal ends the wait, not the initialisation. */
	if (wait_for_completion_interruptible(&nvf->complete))
		return -ERESTARTSYS;
	if (cmd == NV_WAIT_OPEN_COMPLETE) {
		answer.rc = nvf->rc;
		answer.status = nvf->status;
		return copy_to_user((void __user *)arg, &answer, sizeof(answer)) ? -EFAULT : 0;
	}
	if (!nvf->gpu && !nvf->control)
		return -EIO;
	if (cmd == NV_STATUS_CODE && nvf->control && !no_status)
		return nv_get_status(arg);
	if (cmd == NV_RM_ALLOC && nvf->control)
		return nv_rm_alloc(arg);
	return -EINVAL;
}

static __poll_t nv_poll(struct file *file, poll_table *wait)
{
	struct nv_file *nvf = file->private_data;

	if (!completion_done(&nvf->complete))
		return EPOLLERR;
	if (!nvf->gpu && !nvf->control)
		return EPOLLERR;
	return 0;
}

static const struct file_operations nv_fops = {
	.owner = THIS_MODULE,
	.open = nv_open,
	.release = nv_release,
	.unlocked_ioctl = nv_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.poll = nv_poll,
	.llseek = noop_llseek,
};

static struct nv_region {
	const char *name;
	unsigned int first, count;
	struct cdev cdev;
} nv_regions[] = {
	{ .name = "nvidia", .first = 0, .count = NV_MINOR_MAX + 1 },
	{ .name = "nvidiactl", .first = NV_MINOR_CTL, .count = 1 },
};

static void nv_remove_regions(int count)
{
	while (count--) {
		struct nv_region *r = &nv_regions[count];

		cdev_del(&r->cdev);
		unregister_chrdev_region(MKDEV(NV_MAJOR, r->first), r->count);
	}
}

int nv_open_init(void)
{
	int i, err;

	for (i = 0; i < ARRAY_SIZE(nv_regions); i++) {
		struct nv_region *r = &nv_regions[i];
		dev_t first = MKDEV(NV_MAJOR, r->first);

		err = register_chrdev_region(first, r->count, r->name);
		if (err)
			goto remove;
		cdev_init(&r->cdev, &nv_fops);
		r->cdev.owner = THIS_MODULE;
		err = cdev_add(&r->cdev, first, r->count);
		if (err) {
			unregister_chrdev_region(first, r->count);
			goto remove;
		}
	}
	return 0;

remove:
	pr_err("cannot register %s at major %d: %d\n", nv_regions[i].name, NV_MAJOR, err);
	nv_remove_regions(i);
	return err;
}

void nv_open_exit(void)
{
	nv_remove_regions(ARRAY_SIZE(nv_regions));
}
