// SPDX-License-Identifier: GPL-2.0
/*
 * fakepci - serial ports of the guest
 *
 * QEMU writes a character of a serial port with its global lock held, which the
 * mapping of a BAR holds, too: so a write waits until no BAR is being mapped. The
 * kernel writes with interrupts off: its CPU waits, too. Seen under KVM with QEMU
 * 11.1 (tests/guest/halves/stalls.rs).
 *
 * Invariant: a CPU that maps a BAR writes nothing; its own wait would never end.
 */

#include <linux/serial_8250.h>

#include "fakepci.h"

/* Ports that every kernel has room for. */
#define FAKEPCI_PORTS	4

/* Exported; its declaration is in a header of the driver's own. */
struct uart_8250_port *serial8250_get_port(int line);

static bool serial = true;
module_param(serial, bool, 0444);
MODULE_PARM_DESC(serial, "serial ports wait while a BAR is mapped; default 1");

/* As the kernel has it: the types of the arguments differ between versions. */
typedef typeof(((struct uart_port *)0)->serial_out) fakepci_serial_out_t;

static fakepci_serial_out_t serial_outs[FAKEPCI_PORTS];

static void fakepci_serial_out(struct uart_port *port, int offset, int value)
{
	fakepci_wait_for_host();
	serial_outs[port->line](port, offset, value);
}

void fakepci_serial_init(void)
{
	unsigned int line;

	for (line = 0; serial && line < FAKEPCI_PORTS; line++) {
		struct uart_port *port = &serial8250_get_port(line)->port;

		if (!port->iobase)
			continue;
		serial_outs[line] = port->serial_out;
		WRITE_ONCE(port->serial_out, (fakepci_serial_out_t)fakepci_serial_out);
	}
}

void fakepci_serial_exit(void)
{
	unsigned int line;

	for (line = 0; line < FAKEPCI_PORTS; line++)
		if (serial_outs[line])
			WRITE_ONCE(serial8250_get_port(line)->port.serial_out, serial_outs[line]);
}
