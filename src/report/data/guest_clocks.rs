//! A guest's checked measurements of its own clocks (`clock.tsc`, `clock.printk`, `clock.host`).
//!
//! Invariant: impossible values are left out and noted, never shown. Nothing here moves a time that
//! the collector's own pings have verified.

use super::clock_offset::{Clock, Sample};
use super::compact_record::Record;
use super::text::seconds;
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use serde::Serialize;

/// Limit of the time before the kernel: the longest reported preparation of a VM took half an hour
/// (1.2 TB of guest memory in 4 KiB pages). A TSC beyond this did not begin with the VM.
const MAX_BEFORE_KERNEL_NS: u64 = 3600 * 1_000_000_000;
/// Limit of samples of the hypervisor's clock; the init takes two.
const MAX_HOST_SAMPLES: usize = 64;

/// Time from TSC 0 until the kernel's clock began: firmware and the kernel's first steps, and the
/// VMM's preparation since its first vCPU unless QEMU's reset set the TSC anew (src/tsc.rs). Both
/// in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BeforeKernel {
    pub took_ns: u64,
    pub error_ns: u64,
}

/// The clock of the kernel's log against the boot clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Printk {
    /// Boot clock minus the log's.
    pub offset_ns: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_ns: Option<u64>,
}

/// All measurements of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestClocks {
    pub before_kernel: Option<BeforeKernel>,
    pub printk: Option<Printk>,
    /// The host's wall clock, from the hypervisor.
    pub host: Vec<Sample>,
    /// Reasons for values left out.
    pub notes: Vec<String>,
}

impl GuestClocks {
    pub fn of(records: &[Record]) -> Self {
        let mut clocks = Self::default();
        for record in records.iter().filter(|r| r.kind == Kind::Event) {
            let unsigned = |key: &str| record.fields.number(key);
            let signed = |key: &str| record.fields.signed(key);
            match record.name.as_str() {
                names::CLOCK_TSC if clocks.before_kernel.is_none() && clocks.notes.is_empty() => {
                    if let (Some(before_ns), Some(error_ns)) =
                        (signed("before_kernel_ns"), unsigned("error_ns"))
                    {
                        clocks.tsc(before_ns, error_ns);
                    }
                }
                names::CLOCK_PRINTK if clocks.printk.is_none() => {
                    clocks.printk = signed("offset_ns").map(|offset_ns| Printk {
                        offset_ns,
                        error_ns: unsigned("error_ns"),
                    });
                }
                names::CLOCK_HOST if clocks.host.len() < MAX_HOST_SAMPLES => {
                    if let (Some(realtime_ns), Some(error_ns)) =
                        (signed("realtime_ns"), unsigned("error_ns"))
                        && let Some(offset_ns) = i64::try_from(record.boottime_ns)
                            .ok()
                            .and_then(|b| realtime_ns.checked_sub(b))
                    {
                        clocks.host.push(Sample {
                            boottime_ns: record.boottime_ns,
                            offset_ns,
                            error_ns,
                        });
                    }
                }
                _ => {}
            }
        }
        clocks
    }

    fn tsc(&mut self, before_ns: i64, error_ns: u64) {
        let why = match u64::try_from(before_ns) {
            Err(_) => {
                format!(
                    "the TSC began {} s after the kernel's clock, as after a restored snapshot",
                    seconds(before_ns.unsigned_abs())
                )
            }
            Ok(took_ns) if took_ns > MAX_BEFORE_KERNEL_NS => {
                format!(
                    "the TSC had run for {} s, as that of a host or a migrated VM",
                    seconds(took_ns)
                )
            }
            Ok(took_ns) if error_ns > took_ns => {
                format!(
                    "{} s, known to +-{} s only",
                    seconds(took_ns),
                    seconds(error_ns)
                )
            }
            Ok(took_ns) => {
                self.before_kernel = Some(BeforeKernel { took_ns, error_ns });
                return;
            }
        };
        self.notes
            .push(format!("VMM and firmware are left out: {why}"));
    }

    /// Adds the hypervisor's samples to those of the pings; returns how many fit.
    pub fn add_to(&self, clock: &mut Clock) -> usize {
        self.host
            .iter()
            .filter(|sample| clock.add_if_consistent(**sample))
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_wire::record;

    fn event(name: &str, boottime_ns: u64, fields: &[(&str, i64)]) -> Record {
        let fields = fields
            .iter()
            .map(|(key, value)| (key.to_string(), (*value).into()))
            .collect();
        record::Record {
            boottime_ns,
            fields,
            ..record::Record::new(Kind::Event, name)
        }
        .into()
    }

    fn tsc(before_ns: i64, error_ns: i64) -> GuestClocks {
        GuestClocks::of(&[event(
            names::CLOCK_TSC,
            2_000,
            &[("before_kernel_ns", before_ns), ("error_ns", error_ns)],
        )])
    }

    #[test]
    fn a_tsc_started_with_the_vm_gives_the_time_before_the_kernel() {
        assert_eq!(
            tsc(960_000_000, 40_000).before_kernel,
            Some(BeforeKernel {
                took_ns: 960_000_000,
                error_ns: 40_000
            })
        );
        assert_eq!(
            tsc(1_800_000_000_000, 1_000).notes,
            [] as [String; 0],
            "half an hour was seen"
        );
    }

    #[test]
    fn a_tsc_not_started_with_the_vm_is_omitted_and_noted() {
        for (before_ns, error_ns, why) in [
            (-5_000_000, 10, "restored snapshot"),
            (i64::MIN, 0, "restored snapshot"),
            (86_400_000_000_000, 10, "migrated"),
            (i64::MAX, -1, "migrated"),
            (1_000_000, 5_000_000, "known to"),
        ] {
            let clocks = tsc(before_ns, error_ns.max(0));
            assert_eq!(clocks.before_kernel, None, "{before_ns}");
            assert!(
                clocks.notes.len() == 1 && clocks.notes[0].contains(why),
                "{before_ns}: {:?}",
                clocks.notes
            );
        }
        assert_eq!(
            tsc(5, -1),
            GuestClocks::default(),
            "our init never sends a bound below 0"
        );
    }

    #[test]
    fn the_hypervisors_clock_refines_pings_and_never_overrules_them() {
        let host = |boottime_ns, realtime_ns| {
            event(
                names::CLOCK_HOST,
                boottime_ns,
                &[("realtime_ns", realtime_ns), ("error_ns", 50)],
            )
        };
        let clocks = GuestClocks::of(&[host(1_000, 1_000_900), host(2_000, 9_000_000)]);
        let mut clock = Clock::default();
        assert_eq!(
            clocks.add_to(&mut clock),
            1,
            "the first sample counts, a contradicting one does not"
        );
        let pinged = |offset_ns, error_ns| {
            let mut clock = Clock::default();
            clock.add(Sample {
                boottime_ns: 1_500,
                offset_ns,
                error_ns,
            });
            clock
        };
        let mut clock = pinged(1_000_000, 400);
        assert_eq!(clocks.add_to(&mut clock), 1);
        assert!(
            clock.wall_at(1_500).unwrap().error_ns <= 52,
            "{:?}",
            clock.wall_at(1_500)
        );
        let mut clock = pinged(77, 1);
        let before = clock.wall_at(1_000);
        assert_eq!(
            (clocks.add_to(&mut clock), clock.wall_at(1_000)),
            (0, before)
        );
    }

    #[test]
    fn the_logs_clock_is_known_with_or_without_a_bound() {
        let of = |fields: &[(&str, i64)]| {
            GuestClocks::of(&[event(names::CLOCK_PRINTK, 1, fields)]).printk
        };
        let printk = |offset_ns, error_ns| {
            Some(Printk {
                offset_ns,
                error_ns,
            })
        };
        let bound = ("error_ns", 9_000);
        assert_eq!(
            of(&[("offset_ns", -1_850_000), bound]),
            printk(-1_850_000, Some(9_000))
        );
        assert_eq!(of(&[("offset_ns", 5)]), printk(5, None));
        assert_eq!(of(&[bound]), None);
    }
}
