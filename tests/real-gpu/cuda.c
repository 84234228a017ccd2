/*
 * A CUDA program in a container, by the driver's library alone: computes on each
 * GPU that it sees, from PTX, so that libcuda, the control nodes, nvidia-uvm and
 * the compiler for PTX all have to work. Prints KEY=VALUE lines:
 *
 *   libcuda  the file that the library was loaded from
 *   driver   its version of CUDA (13000 is 13.0)
 *   gpus     number of GPUs
 *   gpu      one line a GPU: PCI address, name
 *   sum      one line a GPU: what it computed
 *   ms       the program's own time, first CUDA call to last result
 *
 * Exit status: 0 all GPUs computed what they should, 1 an error, which is printed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define THREADS 256
#define BLOCKS 64
#define NUMBERS (THREADS * BLOCKS)

typedef unsigned long long address;

/* Built with -DFAULT, it writes to an address that is no memory of the program's. */
#ifdef FAULT
#define BASE "	mov.u64 %rd2, 4096;\n"
#else
#define BASE "	cvta.to.global.u64 %rd2, %rd1;\n"
#endif

/* out[i] = i * i + 7, for i below NUMBERS. */
static const char ptx[] =
	".version 6.0\n"
	".target sm_50\n"
	".address_size 64\n"
	".visible .entry squares(.param .u64 out)\n"
	"{\n"
	"	.reg .b32 %r<6>;\n"
	"	.reg .b64 %rd<5>;\n"
	"	ld.param.u64 %rd1, [out];\n"
	BASE
	"	mov.u32 %r1, %ctaid.x;\n"
	"	mov.u32 %r2, %ntid.x;\n"
	"	mov.u32 %r3, %tid.x;\n"
	"	mad.lo.s32 %r4, %r1, %r2, %r3;\n"
	"	mad.lo.s32 %r5, %r4, %r4, 7;\n"
	"	mul.wide.u32 %rd3, %r4, 4;\n"
	"	add.s64 %rd4, %rd2, %rd3;\n"
	"	st.global.u32 [%rd4], %r5;\n"
	"	ret;\n"
	"}\n";

static void *cuda;

static void *function(const char *name)
{
	void *found = dlsym(cuda, name);

	if (!found) {
		printf("error=libcuda.so.1 has no %s\n", name);
		exit(1);
	}
	return found;
}

/* Calls a function of CUDA's driver API, and ends with its name and error where it fails. */
#define CALL(name, types, ...) check(#name, ((int (*) types)function(#name))(__VA_ARGS__))

static void check(const char *name, int error)
{
	const char *text = "unknown";

	if (!error)
		return;
	((int (*)(int, const char **))function("cuGetErrorName"))(error, &text);
	printf("error=%s: %d %s\n", name, error, text);
	exit(1);
}

static double now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

static void compute(int index)
{
	static unsigned int numbers[NUMBERS];
	unsigned long long sum = 0, wanted = 0;
	char name[128], at[32];
	int gpu;
	void *context, *module, *squares;
	address memory;
	void *arguments[] = { &memory };

	CALL(cuDeviceGet, (int *, int), &gpu, index);
	CALL(cuDeviceGetName, (char *, int, int), name, sizeof(name), gpu);
	CALL(cuDeviceGetPCIBusId, (char *, int, int), at, sizeof(at), gpu);
	printf("gpu=%s %s\n", at, name);
	CALL(cuDevicePrimaryCtxRetain, (void **, int), &context, gpu);
	CALL(cuCtxSetCurrent, (void *), context);
	CALL(cuModuleLoadData, (void **, const void *), &module, ptx);
	CALL(cuModuleGetFunction, (void **, void *, const char *), &squares, module, "squares");
	CALL(cuMemAlloc_v2, (address *, size_t), &memory, sizeof(numbers));
	CALL(cuLaunchKernel,
	     (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
	      void *, void **, void **),
	     squares, BLOCKS, 1, 1, THREADS, 1, 1, 0, NULL, arguments, NULL);
	CALL(cuMemcpyDtoH_v2, (void *, address, size_t), numbers, memory, sizeof(numbers));
	CALL(cuMemFree_v2, (address), memory);
	for (unsigned int i = 0; i < NUMBERS; i++) {
		sum += numbers[i];
		wanted += (unsigned long long)i * i + 7;
	}
	printf("sum=%llu\n", sum);
	if (sum != wanted) {
		printf("error=GPU %s: the sum is not %llu\n", at, wanted);
		exit(1);
	}
}

int main(void)
{
	struct link_map *loaded;
	double begun = now_ms();
	int version, gpus;

	setvbuf(stdout, NULL, _IOLBF, 0);
	cuda = dlopen("libcuda.so.1", RTLD_NOW);
	if (!cuda) {
		printf("error=%s\n", dlerror());
		return 1;
	}
	if (dlinfo(cuda, RTLD_DI_LINKMAP, &loaded) == 0)
		printf("libcuda=%s\n", loaded->l_name);
	CALL(cuInit, (unsigned), 0);
	CALL(cuDriverGetVersion, (int *), &version);
	CALL(cuDeviceGetCount, (int *), &gpus);
	printf("driver=%d\ngpus=%d\n", version, gpus);
	for (int index = 0; index < gpus; index++)
		compute(index);
	printf("ms=%.1f\n", now_ms() - begun);
	return 0;
}
