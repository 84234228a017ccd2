/*
 * Measures the parts of one GPU's initialisation: S1 (under the global lock of NVIDIA's resource
 * manager), S2 (the GPU's processor boots, the lock is free), S3 (under that lock again). One
 * thread opens /dev/nvidia<minor>; another one calls NV_ESC_STATUS_CODE on /dev/nvidiactl again and
 * again, which takes and gives back the lock: a long call shows from when to when it was held.
 *
 *   parts [RUNS]      (3 runs by default; the GPU of the lowest minor)
 *
 * Prints one JSON object a run: ms since the open, for each time that the lock was held for 5 ms or
 * longer, and for the open. Only where nobody holds the GPU and it is not kept initialised: else it
 * says so, status 1. Changes no setting: the last close leaves the GPU as it was.
 *
 * Source: kernel-open/nvidia/nv.c and escape.c of NVIDIA's open modules (535 to 595).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

struct status_code {
	unsigned domain;
	unsigned char bus, slot;
	unsigned status;
};
#define NV_ESC_STATUS_CODE _IOWR('F', 209, struct status_code)
#define LONG_MS 5.0

static atomic_int opened;
static char node[64];
static double open_began, open_took;

static double now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

/* Number of processes with an open descriptor of the node. */
static int holders(void)
{
	char path[600], target[600];
	int found = 0;
	DIR *proc = opendir("/proc");

	for (struct dirent *p; proc && (p = readdir(proc));) {
		if (atoi(p->d_name) <= 0)
			continue;
		snprintf(path, sizeof path, "/proc/%s/fd", p->d_name);
		DIR *fds = opendir(path);
		for (struct dirent *f; fds && (f = readdir(fds));) {
			snprintf(path, sizeof path, "/proc/%s/fd/%s", p->d_name, f->d_name);
			ssize_t n = readlink(path, target, sizeof target - 1);
			if (n > 0 && (target[n] = 0, !strcmp(target, node)))
				found++;
		}
		if (fds)
			closedir(fds);
	}
	if (proc)
		closedir(proc);
	return found;
}

static void *opener(void *fd)
{
	open_began = now_ms();
	*(int *)fd = open(node, O_RDWR | O_CLOEXEC);
	open_took = now_ms() - open_began;
	atomic_store(&opened, 1);
	return NULL;
}

/* Address and minor of the GPU with the lowest minor. */
static int find(struct status_code *gpu)
{
	char path[600], line[300];
	int least = -1;
	DIR *gpus = opendir("/proc/driver/nvidia/gpus");

	for (struct dirent *g; gpus && (g = readdir(gpus));) {
		unsigned domain, bus, slot;
		int minor;

		if (sscanf(g->d_name, "%x:%x:%x", &domain, &bus, &slot) != 3)
			continue;
		snprintf(path, sizeof path, "/proc/driver/nvidia/gpus/%s/information", g->d_name);
		FILE *information = fopen(path, "r");
		while (information && fgets(line, sizeof line, information))
			if (sscanf(line, "Device Minor: %d", &minor) == 1 &&
			    (least < 0 || minor < least)) {
				least = minor;
				*gpu = (struct status_code){ domain, bus, slot, 0 };
			}
		if (information)
			fclose(information);
	}
	if (gpus)
		closedir(gpus);
	return least;
}

int main(int argc, char **argv)
{
	struct status_code gpu;
	int runs = argc > 1 ? atoi(argv[1]) : 3, minor = find(&gpu);
	int ctl = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);

	if (minor < 0 || ctl < 0) {
		fprintf(stderr, "parts: no GPU with NVIDIA's driver here\n");
		return 1;
	}
	snprintf(node, sizeof node, "/dev/nvidia%d", minor);
	if (holders()) {
		fprintf(stderr, "parts: %s is held by %d descriptor(s): nothing to measure\n", node, holders());
		return 1;
	}
	for (int run = 0; run < runs; run++) {
		pthread_t thread;
		int fd = -1, held = 0, calls = 0, failed = 0;

		atomic_store(&opened, 0);
		if (pthread_create(&thread, NULL, opener, &fd))
			return 1;
		printf("{\"gpu\": \"%04x:%02x:%02x\", \"held\": [", gpu.domain, gpu.bus, gpu.slot);
		while (!atomic_load(&opened)) {
			struct status_code asked = gpu;
			double from = now_ms();

			failed += ioctl(ctl, NV_ESC_STATUS_CODE, &asked) != 0;
			double until = now_ms();
			calls++;
			if (until - from >= LONG_MS)
				printf("%s[%.1f, %.1f]", held++ ? ", " : "", from - open_began, until - open_began);
			usleep(500);
		}
		pthread_join(thread, NULL);
		printf("], \"open\": %.1f, \"calls\": %d, \"failed\": %d}\n", open_took, calls, failed);
		fflush(stdout);
		if (fd < 0) {
			perror(node);
			return 1;
		}
		if (open_took < 100) {
			fprintf(stderr, "parts: the GPU is kept initialised (persistence): nothing to measure\n");
			return 1;
		}
		close(fd);
		usleep(200000);
	}
	return 0;
}
