/*
 * A program in a container: linked against libcuda.so.1, so that it starts only
 * where its loader finds that. Says what it sees of the driver, as KEY=VALUE
 * lines:
 *
 *   libcuda   the file that the library was loaded from
 *   version   what the library says of itself
 *   flags     of the mount that the file is on
 *   searched  where the loader found it, by its own word (glibc's, where the
 *             container has LD_DEBUG=libs LD_DEBUG_OUTPUT=/run/loader)
 *   nodes     everything below /dev whose name begins with nvidia
 *   params    the driver's parameter ModifyDeviceFiles, and what opening its
 *             file for writing ends with
 *   env       variables that a loader or a driver looks at
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

int cuInit(unsigned int flags);
const char *stand_in_version(void);

#define PARAMS "/proc/driver/nvidia/params"

/* The file that is mapped where this function is. */
static void library(const void *function)
{
	uintptr_t from, to, wanted = (uintptr_t)function;
	char line[4608], path[4096] = "";
	FILE *maps = fopen("/proc/self/maps", "r");
	struct statvfs at;

	while (maps && fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %*s %*s %*s %4095[^\n]",
			   &from, &to, path) == 3 && from <= wanted && wanted < to)
			break;
		path[0] = 0;
	}
	printf("libcuda=%s\nversion=%s\n", path, stand_in_version());
	if (statvfs(path, &at) == 0)
		printf("flags=%s%s%s\n", at.f_flag & ST_RDONLY ? "ro," : "rw,",
		       at.f_flag & ST_NOSUID ? "nosuid," : "",
		       at.f_flag & ST_NODEV ? "nodev" : "");
}

/* The last place that the loader searched for libcuda: it goes on until it finds it. */
static void searched(void)
{
	char path[64], line[4608], place[4608] = "";
	int ours = 0;
	FILE *file;

	snprintf(path, sizeof(path), "/run/loader.%d", (int)getpid());
	file = fopen(path, "r");
	while (file && fgets(line, sizeof(line), file)) {
		const char *at = strstr(line, " search ");

		if (strstr(line, "find library="))
			ours = strstr(line, "find library=libcuda.so.1 ") != NULL;
		else if (ours && at)
			snprintf(place, sizeof(place), "%.*s", (int)strcspn(at + 8, "\t\n"), at + 8);
	}
	printf("searched=%s\n", place);
}

/* Nodes, in the order of their names: `PATH major:minor mode`. */
static void nodes(const char *directory, const char *prefix, int *count)
{
	struct dirent **entries;
	int n = scandir(directory, &entries, NULL, alphasort);

	for (int i = 0; i < n; i++) {
		const char *name = entries[i]->d_name;
		char path[4096];
		struct stat st;

		if (name[0] == '.' || strncmp(name, prefix, strlen(prefix)))
			continue;
		snprintf(path, sizeof(path), "%s/%s", directory, name);
		if (lstat(path, &st))
			printf("%s: %s", path, strerror(errno));
		else if (S_ISDIR(st.st_mode))
			nodes(path, "", count);
		else
			printf("%s%s %s%u:%u %o", (*count)++ ? "," : "", path, S_ISCHR(st.st_mode) ? "" : "no node ",
			       major(st.st_rdev), minor(st.st_rdev), st.st_mode & 07777);
	}
}

static void params(void)
{
	const char *what = "absent", *written = "done";
	char line[256];
	FILE *file = fopen(PARAMS, "r");

	while (file && fgets(line, sizeof(line), file)) {
		if (strncmp(line, "ModifyDeviceFiles: ", 19) == 0) {
			line[strcspn(line, "\n")] = 0;
			what = line;
			break;
		}
	}
	if (open(PARAMS, O_WRONLY) < 0)
		written = strerror(errno);
	printf("params=%s, write: %s\n", what, written);
}

static void variable(const char *name)
{
	const char *value = getenv(name);

	if (value)
		printf(" %s=%s", name, value);
}

int main(void)
{
	int count = 0, result = cuInit(0);

	library((const void *)stand_in_version);
	searched();
	printf("nodes=");
	nodes("/dev", "nvidia", &count);
	printf("\n");
	params();
	printf("env=");
	variable("LD_LIBRARY_PATH");
	variable("NVIDIA_VISIBLE_DEVICES");
	printf("\n");
	return result;
}
