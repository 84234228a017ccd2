/*
 * Stands for libnvidia-ml.so.1 over the simulated driver. Functions, structures and return codes
 * are those of nvml.h; devices are those of /proc/driver/nvidia/gpus. Like the real library, opens
 * /dev/nvidiactl when it starts and a GPU's node when its handle is asked for, and keeps them.
 *
 * Words of the kernel command line:
 *   nvml.fault=crash|hang|no-count|fewer|other-minor   at the first question about a GPU
 *   nvml.fabric=STATE:STATUS:HEALTH           of every GPU, whatever the driver has
 *   nvml.cc=ENABLED:READY                     of the system, whatever the driver has
 *   nvml.unprotected=POSITION                 the GPU in this slot is not confidential
 *
 * Without nvml.fabric and nvml.cc the fabric's and the confidential state are those of the
 * simulated driver (/sys/module/nvidia/parameters), where the stand-in of fabric manager changes
 * the first and this library the second.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
	SUCCESS = 0,
	UNINITIALIZED = 1,
	INVALID_ARGUMENT = 2,
	NOT_SUPPORTED = 3,
	NO_PERMISSION = 4,
	NOT_FOUND = 6,
	INSUFFICIENT_SIZE = 7,
	DRIVER_NOT_LOADED = 9,
	UNKNOWN = 999
};
enum { MAX_GPUS = 32, MAX_INSTANCES = 7, LINKS = 18, ACTIVE_LINKS = 17 };

struct gpu {
	char address[32];
	unsigned minor, position;
	char uuid[80];
	char model[96];
	unsigned graphics, memory, power;
	int opened;
	unsigned gi, ci; /* of a MIG instance */
};

static struct gpu gpus[MAX_GPUS];
static struct gpu instances[MAX_GPUS][MAX_INSTANCES];
static unsigned count;
static int control = -1;
static char words[4096];

/* Value of a word of the kernel command line, or NULL. */
static const char *word(const char *name)
{
	const char *at = words;
	size_t length = strlen(name);

	while ((at = strstr(at, name))) {
		if ((at == words || at[-1] == ' ') && at[length] == '=')
			return at + length + 1;
		at++;
	}
	return NULL;
}

static int is(const char *name, const char *value)
{
	const char *found = word(name);

	return found && !strncmp(found, value, strlen(value)) && strchr(" \n", found[strlen(value)]);
}

static unsigned number(const char *name, unsigned place, unsigned otherwise)
{
	const char *found = word(name);

	while (found && place--) {
		found = strpbrk(found, ": \n");
		found = found && *found == ':' ? found + 1 : NULL;
	}
	return found ? strtoul(found, NULL, 0) : otherwise;
}

/* The driver's value for the GPU at this place of a list, whose last value goes for the rest. */
static unsigned parameter(const char *name, unsigned place)
{
	char path[100], text[256] = "", *at = text;
	FILE *file;

	snprintf(path, sizeof(path), "/sys/module/nvidia/parameters/%s", name);
	file = fopen(path, "r");
	if (file) {
		text[fread(text, 1, sizeof(text) - 1, file)] = 0;
		fclose(file);
	}
	while (place-- && strchr(at, ','))
		at = strchr(at, ',') + 1;
	return *at == 'Y' ? 1 : strtoul(at, NULL, 0);
}

static int by_address(const void *a, const void *b)
{
	return strcmp(((const struct gpu *)a)->address, ((const struct gpu *)b)->address);
}

static void read_gpu(struct gpu *gpu, const char *address)
{
	char path[300], line[256];
	FILE *file;

	snprintf(gpu->address, sizeof(gpu->address), "%s", address);
	snprintf(path, sizeof(path), "/proc/driver/nvidia/gpus/%s/information", address);
	file = fopen(path, "r");
	while (file && fgets(line, sizeof(line), file)) {
		sscanf(line, "Model: %95[^\n]", gpu->model);
		sscanf(line, "GPU UUID: %79s", gpu->uuid);
		sscanf(line, "Device Minor: %u", &gpu->minor);
	}
	if (file)
		fclose(file);
	snprintf(path, sizeof(path), "/proc/driver/nvidia/gpus/%s/sim", address);
	file = fopen(path, "r");
	while (file && fgets(line, sizeof(line), file))
		sscanf(line, "position: %u", &gpu->position);
	if (file)
		fclose(file);
	gpu->graphics = 345;
	gpu->memory = 2619;
	gpu->power = 700000;
	gpu->opened = -1;
}

int nvmlInitWithFlags(unsigned flags)
{
	FILE *line = fopen("/proc/cmdline", "r");
	DIR *directory;
	struct dirent *entry;

	(void)flags;
	if (line) {
		words[fread(words, 1, sizeof(words) - 1, line)] = 0;
		fclose(line);
	}
	control = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	directory = opendir("/proc/driver/nvidia/gpus");
	if (control < 0 || !directory)
		return DRIVER_NOT_LOADED;
	while (count < MAX_GPUS && (entry = readdir(directory)))
		if (entry->d_name[0] != '.')
			read_gpu(&gpus[count++], entry->d_name);
	closedir(directory);
	qsort(gpus, count, sizeof(*gpus), by_address);
	return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
	while (count)
		close(gpus[--count].opened);
	close(control);
	return SUCCESS;
}

const char *nvmlErrorString(int code) { return code ? "an error" : "Success"; }

static int text(char *to, unsigned size, const char *from)
{
	return snprintf(to, size, "%s", from) < (int)size ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlSystemGetDriverVersion(char *to, unsigned size)
{
	char version[64] = "";
	FILE *file = fopen("/sys/module/nvidia/version", "r");

	if (!file)
		return UNINITIALIZED;
	if (!fgets(version, sizeof(version), file))
		version[0] = 0;
	fclose(file);
	version[strcspn(version, "\n")] = 0;
	return text(to, size, version);
}

int nvmlSystemGetNVMLVersion(char *to, unsigned size) { return text(to, size, "12.550.163.01"); }

/* GPUs that this library lets be seen. */
static unsigned listed(void)
{
	return is("nvml.fault", "fewer") && count ? count - 1 : count;
}

int nvmlDeviceGetCount_v2(unsigned *number_of)
{
	if (is("nvml.fault", "no-count"))
		return UNKNOWN;
	*number_of = listed();
	return SUCCESS;
}

static int handle(struct gpu *gpu, struct gpu **device)
{
	char node[64];

	if (is("nvml.fault", "crash"))
		abort();
	while (is("nvml.fault", "hang"))
		pause();
	if (gpu->opened < 0) {
		snprintf(node, sizeof(node), "/dev/nvidia%u", gpu->minor);
		gpu->opened = open(node, O_RDWR | O_CLOEXEC);
	}
	*device = gpu;
	return gpu->opened < 0 ? UNKNOWN : SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **device)
{
	return index < count ? handle(&gpus[index], device) : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, struct gpu **device)
{
	for (unsigned k = 0; k < listed(); k++)
		if (!strcmp(gpus[k].address, address))
			return handle(&gpus[k], device);
	return NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **device)
{
	for (unsigned k = 0; k < listed(); k++)
		if (!strcmp(gpus[k].uuid, uuid))
			return handle(&gpus[k], device);
	return NOT_FOUND;
}

struct pci {
	char legacy[16];
	unsigned domain, bus, device, device_id, subsystem_id;
	char address[32];
};

int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci *pci)
{
	memset(pci, 0, sizeof(*pci));
	sscanf(gpu->address, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
	snprintf(pci->legacy, sizeof(pci->legacy), "%04X:%02X:%02X.0",
		 pci->domain & 0xffff, pci->bus & 0xff, pci->device & 0x1f);
	snprintf(pci->address, sizeof(pci->address), "%08X:%02X:%02X.0",
		 pci->domain, pci->bus, pci->device);
	pci->device_id = 0x233010de;
	return SUCCESS;
}

int nvmlDeviceGetMinorNumber(struct gpu *gpu, unsigned *minor)
{
	*minor = gpu->minor + is("nvml.fault", "other-minor");
	return SUCCESS;
}

int nvmlDeviceGetUUID(struct gpu *gpu, char *to, unsigned size)
{
	return text(to, size, gpu->uuid);
}

int nvmlDeviceGetName(struct gpu *gpu, char *to, unsigned size)
{
	return text(to, size, gpu->model);
}

int nvmlDeviceGetMaxMigDeviceCount(struct gpu *gpu, unsigned *number_of)
{
	char path[128];

	snprintf(path, sizeof(path), "/proc/driver/nvidia/capabilities/gpu%u/mig", gpu->minor);
	*number_of = access(path, F_OK) ? 0 : MAX_INSTANCES;
	return SUCCESS;
}

/* Index 0 is the last of the instances that /proc has: the order is nobody's promise. */
int nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *gpu, unsigned index, struct gpu **instance)
{
	char path[128];
	unsigned gi, ci, left = index;

	for (gi = 16; gi-- > 0;) {
		for (ci = 8; ci-- > 0;) {
			snprintf(path, sizeof(path),
				 "/proc/driver/nvidia/capabilities/gpu%u/mig/gi%u/ci%u/access",
				 gpu->minor, gi, ci);
			if (!access(path, F_OK) && !left--)
				goto found;
		}
	}
	return NOT_FOUND;

found:
	if (index >= MAX_INSTANCES)
		return INVALID_ARGUMENT;
	*instance = &instances[gpu - gpus][index];
	snprintf((*instance)->uuid, sizeof((*instance)->uuid),
		 "MIG-%08x-%04x-%04x-0000-000000000000", gpu->minor, gi, ci);
	(*instance)->gi = gi;
	(*instance)->ci = ci;
	return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(struct gpu *instance, unsigned *gi)
{
	*gi = instance->gi;
	return SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(struct gpu *instance, unsigned *ci)
{
	*ci = instance->ci;
	return SUCCESS;
}

int nvmlDeviceGetPersistenceMode(struct gpu *gpu, int *mode)
{
	(void)gpu;
	*mode = 0;
	return SUCCESS;
}

int nvmlDeviceGetClockInfo(struct gpu *gpu, int type, unsigned *mhz)
{
	*mhz = type == 2 /* memory */ ? gpu->memory : gpu->graphics;
	return SUCCESS;
}

int nvmlDeviceGetPowerUsage(struct gpu *gpu, unsigned *milliwatts)
{
	(void)gpu;
	*milliwatts = 71000;
	return SUCCESS;
}

int nvmlDeviceGetPowerManagementLimit(struct gpu *gpu, unsigned *milliwatts)
{
	*milliwatts = gpu->power;
	return SUCCESS;
}

int nvmlDeviceGetEccMode(struct gpu *gpu, int *current, int *pending)
{
	(void)gpu;
	*current = *pending = 1;
	return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(struct gpu *gpu, int type, int counter, unsigned long long *errors)
{
	(void)gpu, (void)type, (void)counter;
	*errors = 0;
	return SUCCESS;
}

int nvmlDeviceGetRemappedRows(struct gpu *gpu, unsigned *correctable, unsigned *uncorrectable,
			      unsigned *pending, unsigned *failed)
{
	(void)gpu;
	*correctable = 1;
	*uncorrectable = *pending = *failed = 0;
	return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(struct gpu *gpu, unsigned long long *reasons)
{
	(void)gpu;
	*reasons = 1; /* idle */
	return SUCCESS;
}

struct fabric {
	unsigned version;
	unsigned char cluster[16];
	unsigned status, clique;
	unsigned char state;
	unsigned health;
};

int nvmlDeviceGetGpuFabricInfoV(struct gpu *gpu, struct fabric *fabric)
{
	int given = !!word("nvml.fabric");

	if (fabric->version != (sizeof(*fabric) | 2 << 24))
		return 25; /* argument version mismatch */
	fabric->state = given ? number("nvml.fabric", 0, 0) : parameter("fabric_state", gpu->position);
	fabric->status = given ? number("nvml.fabric", 1, 0) : parameter("fabric_status", gpu->position);
	fabric->health = given ? number("nvml.fabric", 2, 0) : parameter("fabric_health", gpu->position);
	fabric->clique = 7;
	return SUCCESS;
}

int nvmlDeviceGetNvLinkState(struct gpu *gpu, unsigned link, int *active)
{
	(void)gpu;
	if (link >= LINKS)
		return INVALID_ARGUMENT;
	*active = link < ACTIVE_LINKS;
	return SUCCESS;
}

/* The range of clocks that the board has. */
static int in_range(unsigned min, unsigned max) { return min <= max && min >= 210 && max <= 2619; }

int nvmlDeviceSetGpuLockedClocks(struct gpu *gpu, unsigned min, unsigned max)
{
	if (!in_range(min, max))
		return INVALID_ARGUMENT;
	gpu->graphics = min;
	return SUCCESS;
}

int nvmlDeviceSetMemoryLockedClocks(struct gpu *gpu, unsigned min, unsigned max)
{
	if (!in_range(min, max))
		return INVALID_ARGUMENT;
	gpu->memory = max;
	return SUCCESS;
}

int nvmlDeviceSetPowerManagementLimit(struct gpu *gpu, unsigned milliwatts)
{
	if (milliwatts < 200000 || milliwatts > 700000)
		return INVALID_ARGUMENT;
	gpu->power = milliwatts;
	return SUCCESS;
}

struct confidential {
	unsigned version, environment, enabled, devtools, multi_gpu;
};

int nvmlSystemGetConfComputeSettings(struct confidential *settings)
{
	settings->environment = 2;
	settings->enabled = word("nvml.cc") ? number("nvml.cc", 0, 0) : parameter("cc", 0);
	if (!word("nvml.cc") && !settings->enabled)
		return NOT_SUPPORTED;
	settings->devtools = 0;
	/* Protected PCIe, where the switches are in the guest: the feature is then reported as off. */
	settings->multi_gpu = settings->enabled && !access("/proc/driver/nvidia-nvswitch/devices", F_OK);
	if (settings->multi_gpu)
		settings->enabled = 0;
	return SUCCESS;
}

struct memory_sizes {
	unsigned long long protected_kib, unprotected_kib;
};

int nvmlDeviceGetConfComputeMemSizeInfo(struct gpu *gpu, struct memory_sizes *sizes)
{
	if (!(word("nvml.cc") ? number("nvml.cc", 0, 0) : parameter("cc", 0)))
		return NOT_SUPPORTED;
	sizes->protected_kib = number("nvml.unprotected", 0, MAX_GPUS) != gpu->position ? 80 << 20 : 0;
	sizes->unprotected_kib = (80 << 20) - sizes->protected_kib;
	return SUCCESS;
}

int nvmlSystemGetConfComputeGpusReadyState(unsigned *ready)
{
	*ready = number("nvml.cc", 1, 0) || parameter("cc_ready", 0);
	return SUCCESS;
}

int nvmlSystemSetConfComputeGpusReadyState(unsigned ready)
{
	FILE *file = fopen("/sys/module/nvidia/parameters/cc_ready", "w");

	if (!file)
		return NO_PERMISSION;
	fputs(ready ? "1" : "0", file);
	return fclose(file) ? NO_PERMISSION : SUCCESS;
}
