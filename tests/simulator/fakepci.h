/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Shared by the parts of fakepci.
 *
 * Each part has its own parameters and state; a GPU is known by its slot
 * everywhere, 0 <= k < fakepci_gpus. NVSwitches and Mellanox functions have the
 * slots after those that GPUs can have; they never come or go.
 */
#ifndef FAKEPCI_H
#define FAKEPCI_H

#include <linux/minmax.h>
#include <linux/moduleparam.h>
#include <linux/pci.h>
#include <linux/types.h>

#define FAKEPCI_DOMAIN		1
/* Byte of a GPU's config space that counts its resets; the simulated driver reads it, too. */
#define FAKEPCI_RESETS		0xfc
/* A write to this byte of it lets the GPU fall off the bus. */
#define FAKEPCI_LOSE_AT		0xf8
#define FAKEPCI_MAX_GPUS	16

/* After the GPUs, in the same order: switches, then Mellanox functions. */
#define FAKEPCI_MAX_OTHERS	8
#define FAKEPCI_FIRST_SWITCH	FAKEPCI_MAX_GPUS
#define FAKEPCI_FIRST_CX7	(FAKEPCI_FIRST_SWITCH + FAKEPCI_MAX_OTHERS)
#define FAKEPCI_FUNCTIONS	(FAKEPCI_FIRST_CX7 + FAKEPCI_MAX_OTHERS)

/* fakepci-bus.c */
extern unsigned int fakepci_gpus;
extern unsigned int fakepci_switches;
extern unsigned int fakepci_cx7;
extern struct pci_bus *fakepci_bus;

/* fakepci-config.c */
struct fakepci_counters {
	u64 reads;
	u64 writes;
	u64 enables;
	u64 resets;
	u64 vpd;	/* reads of four bytes of it */
};

extern struct pci_ops fakepci_ops;
int fakepci_config_init(void);
void fakepci_config_exit(void);
void fakepci_set_present(unsigned int k, bool present);
bool fakepci_is_there(unsigned int slot);
struct fakepci_counters fakepci_count(unsigned int k);
unsigned int fakepci_enable_ms(unsigned int k);

void fakepci_wait_for_host(void);

/* fakepci-serial.c */
void fakepci_serial_init(void);
void fakepci_serial_exit(void);

/* fakepci-bars.c */
enum {
	FAKEPCI_BAR_MEMORY,	/* the GPU's memory; PCI's BAR 2 */
	FAKEPCI_BAR_OTHER,
	FAKEPCI_BAR_REGISTERS,	/* PCI's BAR 0 */
	FAKEPCI_BARS,
};

struct fakepci_bar {
	unsigned int reg;	/* in config space */
	u64 size;
};

extern const struct fakepci_bar fakepci_bars[FAKEPCI_BARS];
bool fakepci_has_bar(unsigned int k, unsigned int bar);
u64 fakepci_bar_address(unsigned int k, unsigned int bar);
int fakepci_set_registers(unsigned int k, bool there);
int fakepci_request_bars(void);
void fakepci_release_bars(void);
void fakepci_add_bars(struct list_head *resources);

/* fakepci-plug.c */
int fakepci_plug_init(void);
void fakepci_plug_exit(void);

/* A parameter that has a value per GPU: the last value goes for the rest. */
static inline unsigned int fakepci_per_gpu(const unsigned int *values, unsigned int count,
					   unsigned int k, unsigned int otherwise)
{
	return count ? values[min(k, count - 1)] : otherwise;
}

/* A parameter that lists GPUs by their slot. */
static inline bool fakepci_in_list(const unsigned int *list, unsigned int count,
				   unsigned int k)
{
	unsigned int i;

	for (i = 0; i < count; i++)
		if (list[i] == k)
			return true;
	return false;
}

/* An array parameter, with its count, as the two above want them. */
#define FAKEPCI_LIST(name, text)					\
	static unsigned int name[FAKEPCI_MAX_GPUS];			\
	static unsigned int name##_count;				\
	module_param_array(name, uint, &name##_count, 0444);		\
	MODULE_PARM_DESC(name, text)

#define fakepci_value(name, k, otherwise) \
	fakepci_per_gpu(name, name##_count, k, otherwise)
#define fakepci_listed(name, k)	fakepci_in_list(name, name##_count, k)

#endif
