/*
 * A static program for containers of the benchmarks: writes the guest's
 * CLOCK_BOOTTIME, in ns, at its milestones, as KEY=NS lines, and then lives on
 * with its descriptors open. Its first word says what it is:
 *
 *   pause   opens nothing
 *   cuda    opens nvidiactl, nvidia-uvm, then its GPUs, as CUDA does
 *   nvml    opens nvidiactl, then its GPUs, as NVML does: without nvidia-uvm
 *
 * Both allocate from the resource manager, once before they open a GPU and then
 * as often as a program may before it computes, with work in between; number and
 * times are assumed, as in the tests' model of the locks. The last allocation is
 * computes=NS.
 *
 * GPUs are those whose nodes it has, by number, one after another, blocking.
 * start comes first, answer when everything is open; failed=NODE: CAUSE where
 * something is not. CUDA would fail then with error 802, and not wait, where the
 * fabric of a GPU is not complete or confidential GPUs are not ready:
 * error802=CAUSE says so, then waits=NS each second, and works=NS when it would
 * not any more. A container's
 * sysfs shows the simulated driver's state. For each line that comes in, a line
 * now=NS goes out.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define MOST 64
#define CALLS 40

/* NV_ESC_RM_ALLOC of a root client (class 0), the driver choosing its number. */
struct allocation {
	uint32_t root, parent, object, class;
	uint64_t parameters, rights;
	uint32_t parameters_size, flags, status, unused;
};

#define RM_ALLOC _IOWR('F', 43, struct allocation)

static int control = -1;

static void stamp(const char *key)
{
	struct timespec now;

	clock_gettime(CLOCK_BOOTTIME, &now);
	printf("%s=%lld\n", key, now.tv_sec * 1000000000LL + now.tv_nsec);
	fflush(stdout);
}

static int by_number(const void *a, const void *b)
{
	return *(const int *)a - *(const int *)b;
}

static int opened(const char *node)
{
	int file = open(node, O_RDWR | O_CLOEXEC);

	if (file < 0)
		printf("failed=%s: %s\n", node, strerror(errno));
	return file;
}

/* One call; says whether it succeeded. */
static int allocate(void)
{
	struct allocation asked = { 0 };

	if (!ioctl(control, RM_ALLOC, &asked) && !asked.status)
		return 1;
	printf("failed=allocation: %s, status %#x\n", strerror(errno), asked.status);
	return 0;
}

/* Computes for so long, on whatever processor there is. */
static void work(long ns)
{
	struct timespec from, now;

	clock_gettime(CLOCK_MONOTONIC, &from);
	do
		clock_gettime(CLOCK_MONOTONIC, &now);
	while ((now.tv_sec - from.tv_sec) * 1000000000L + now.tv_nsec - from.tv_nsec < ns);
}

/* Makes the rest of a program's calls. */
static void compute(void)
{
	for (int calls = 1; calls < CALLS; calls++) {
		work(8 * 1000 * 1000);
		if (!allocate())
			return;
	}
	stamp("computes");
}

/* Opens the driver's nodes; says whether all could be opened. */
static int all_opened(int with_uvm)
{
	int numbers[MOST], count = 0, good;
	DIR *directory = opendir("/dev");
	struct dirent *entry;

	control = opened("/dev/nvidiactl");
	good = control >= 0 && allocate();
	if (with_uvm)
		good &= opened("/dev/nvidia-uvm") >= 0;
	while (directory && (entry = readdir(directory))) {
		char *end;
		long number;

		if (strncmp(entry->d_name, "nvidia", 6))
			continue;
		number = strtol(entry->d_name + 6, &end, 10);
		if (end != entry->d_name + 6 && !*end && count < MOST)
			numbers[count++] = number;
	}
	qsort(numbers, count, sizeof(*numbers), by_number);
	for (int i = 0; i < count; i++) {
		char node[32];

		snprintf(node, sizeof(node), "/dev/nvidia%d", numbers[i]);
		good &= opened(node) >= 0;
	}
	printf("gpus=%d\n", count);
	return good && count;
}

/* First line of a parameter of the simulated driver; empty where there is none. */
static const char *parameter(const char *name)
{
	static char text[256];
	char path[100];
	FILE *file;

	snprintf(path, sizeof(path), "/sys/module/nvidia/parameters/%s", name);
	file = fopen(path, "r");
	if (!file || !fgets(text, sizeof(text), file))
		text[0] = 0;
	if (file)
		fclose(file);
	return text;
}

/* Why CUDA would fail with 802 now; NULL: it would not. */
static const char *not_usable(void)
{
	for (const char *at = parameter("fabric_state"); at;
	     at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
		if (*at == '1' || *at == '2')
			return "the fabric is not complete";
	if (*parameter("cc") == 'Y' && *parameter("cc_ready") != 'Y')
		return "the ready state is off";
	return NULL;
}

static void wait_until_usable(void)
{
	const struct timespec pause = { .tv_nsec = 10 * 1000 * 1000 };
	const char *why = not_usable();

	if (why)
		printf("error802=%s\n", why);
	fflush(stdout);
	for (unsigned looks = 0; not_usable(); looks++) {
		if (looks % 100 == 99)
			stamp("waits");
		nanosleep(&pause, NULL);
	}
	stamp("works");
}

int main(int argc, char **argv)
{
	char line[64];
	const char *what = argc > 1 ? argv[1] : "pause";

	stamp("start");
	if (strcmp(what, "pause") && all_opened(!strcmp(what, "cuda"))) {
		stamp("answer");
		wait_until_usable();
		compute();
	}
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin))
		stamp("now");
	for (;;)
		pause();
}
