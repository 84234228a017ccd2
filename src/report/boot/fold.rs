//! Records and the agent's lines in, [`Boot`] out.

use super::cause::End;
use super::containers::Containers;
use super::coverage::coverage;
use super::gpu_health::GuestHealth;
use super::gpus::{gpus, spans};
use super::host_trace::HostTrace;
use super::model::{Boot, ClockSummary, KERNEL_START, Lost, MODEL, Milestone, SETTLED, Xids};
use super::steps;
use super::timeline::Timeline;
use crate::data::agent_log;
use crate::data::agent_log::{AgentEvent, AgentLine};
use crate::data::boot_file::{BootFile, HostEvent};
use crate::data::clock_offset::Clock;
use crate::data::clock_points::ClockPoints;
use crate::data::compact_record::Record;
use crate::data::compact_record::in_time;
use crate::data::guest_clocks::GuestClocks;
use crate::data::imported_record;
use crate::data::text::start;
use kata_gpu_wire::driver_log;
use kata_gpu_wire::driver_log::Signal;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::Kind;

/// Limit of ends that are kept: a boot has one, and the runtime's errors about it.
const MAX_ENDS: usize = 16;
/// Limit of kinds of Xids that are kept.
const MAX_XIDS: usize = 64;
/// Limit of the words of one, in bytes.
const MAX_WORDS: usize = 1000;
/// Limit of gaps that are listed.
const MAX_NAMED_GAPS: usize = 32;

impl Boot {
    /// Computes the boot from a file and, if there is one, the console's agent lines.
    pub fn new(file: &BootFile, agent: &[AgentLine]) -> Self {
        let clock = file.clock();
        let points = ClockPoints::of(&file.records);
        let place = |line: &AgentLine| {
            let placed = points.place(line.realtime_ns, &clock);
            (line.event.clone(), placed)
        };
        let records = in_time(&file.records);
        let mut too_large = file.too_large;
        too_large.agent_lines = agent_log::is_full(agent);
        let spans = spans(&records, &mut too_large);

        let mut boot = Boot {
            model: MODEL,
            boot_id: file.header.as_ref().map(|h| h.boot_id.clone()),
            version: file.header.as_ref().map(|h| h.version.clone()),
            kernel: file.header.as_ref().map(|h| h.kernel.clone()),
            sandbox: file.sandbox().cloned(),
            gpus: gpus(&records, &spans, &mut too_large),
            health: GuestHealth::of(records.iter().copied()),
            clock: clock_summary(file, &clock),
            lost: Lost {
                records: file.seqs.missing(),
                gaps: file.seqs.gaps().take(MAX_NAMED_GAPS).collect(),
                reported_by_guest: 0,
            },
            newer_schema: file.newer_schema,
            damaged_lines: file.damaged,
            damage: file.damage.clone(),
            imported: file.imported().cloned(),
            host: HostTrace::of(file, &records, &clock).map(Box::new),
            agent: agent.iter().map(place).collect(),
            ..Boot::default()
        };
        for line in &file.host {
            match &line.event {
                HostEvent::Garbage { lines, .. } => {
                    boot.garbage_lines = boot.garbage_lines.saturating_add(*lines)
                }
                HostEvent::Capped { why } => boot.capped = Some(why.clone()),
                HostEvent::Unknown => boot.unknown_host_lines += 1,
                // Records that were dropped and did not come again are in `lost`.
                HostEvent::Connected { .. }
                | HostEvent::Disconnected { .. }
                | HostEvent::Clock(_)
                | HostEvent::Lost { .. }
                | HostEvent::Dropped { .. }
                | HostEvent::Sandbox(_)
                | HostEvent::Trace { .. }
                | HostEvent::Exported { .. }
                | HostEvent::Imported(_)
                | HostEvent::Traced(_)
                | HostEvent::Recording(_) => {}
            }
        }
        let lines = records.iter().filter(|r| r.kind == Kind::Kmsg);
        lines.for_each(|record| boot.take_xid_line(record));
        let reports = |r: &&&Record| r.kind == Kind::Event || r.name == names::DRIVER_FILES;
        let ends = records
            .iter()
            .filter(reports)
            .filter_map(|record| End::of(record));
        boot.ends.extend(ends.take(MAX_ENDS));
        for record in records.iter().filter(|r| r.kind == Kind::Event) {
            match record.name.as_str() {
                names::GPU_XID => boot.take_xid(record),
                names::SETTLED => boot.settled_ns = Some(record.boottime_ns),
                names::POWER_OFF => {
                    boot.power_off = Some(record.error.as_deref().unwrap_or_default().to_string())
                }
                names::INIT_START => {
                    boot.build = record.fields.text("build").map(str::to_string);
                }
                names::STREAM_LOST => {
                    let lost = record.fields.number("lost").unwrap_or(0);
                    boot.lost.reported_by_guest = boot.lost.reported_by_guest.saturating_add(lost);
                }
                _ => {}
            }
        }
        // Lines that the init took for nobody's are in no event.
        boot.xids.retain(|xids| xids.count > 0);
        let mut ready = None;
        let imported = records.iter().filter_map(|record| {
            let placed = imported_record::placed(record);
            Some((imported_record::of_record(record)?, Some(placed)))
        });
        let mut containers = Containers::default();
        let mut heard = false;
        for (event, placed) in imported.chain(boot.agent.iter().cloned()) {
            // An agent at log level warning logs these, and nothing about containers.
            heard |= !matches!(
                event,
                AgentEvent::HookFailed { .. } | AgentEvent::Bound(_) | AgentEvent::Start { .. }
            );
            if event == AgentEvent::Ready {
                ready = ready.or(placed);
            }
            containers.take(event, placed, &mut too_large);
        }
        if !heard {
            records
                .iter()
                .for_each(|record| containers.see(record, boot.sandbox.as_ref(), &mut too_large));
        }
        boot.containers = containers.all;
        boot.too_large = too_large.some();
        boot.containers.sort_by_key(|c| c.at_ns.unwrap_or(u64::MAX));
        let event = |name: &str| {
            let first = records
                .iter()
                .find(|r| r.kind == Kind::Event && r.name == *name);
            first.map(|r| (r.boottime_ns, imported_record::is_approximate(r)))
        };
        let created: Vec<(u64, bool)> = boot
            .containers
            .iter()
            .filter(|c| c.error.is_none() && !c.pause)
            .filter_map(|c| Some((c.at_ns?, c.approximate)))
            .collect();
        // Use the beginning: the end is the time of the detection, which on a busy guest can be
        // after the agent is ready.
        let exec = spans
            .iter()
            .find(|s| s.name == names::AGENT_EXEC && s.error.is_none())
            .and_then(|s| s.begin_ns);
        let milestone = |name, at: Option<(u64, bool)>| Milestone {
            name,
            boottime_ns: at.map(|a| a.0),
            approximate: at.is_some_and(|a| a.1),
            wall: at.and_then(|a| clock.wall_at(a.0)),
        };
        let from_kernel = boot
            .imported
            .as_ref()
            .is_none_or(|i| i.zero == KERNEL_START);
        boot.milestones = vec![
            milestone(
                KERNEL_START,
                (!records.is_empty() && from_kernel).then_some((0, false)),
            ),
            milestone("init start", event(names::INIT_START)),
            milestone("agent exec", exec.map(|t| (t, false))),
            milestone("agent ready", ready.map(|p| (p.boottime_ns, p.approximate))),
            milestone("first container", created.first().copied()),
            milestone("last container", created.last().copied()),
            milestone(SETTLED, boot.settled_ns.map(|t| (t, false))),
        ];
        boot.spans = spans;
        boot.host_clock = clock;
        boot.timeline = Timeline::new(steps::story(&boot, file));
        let window = boot.timeline.window(None, None).ok();
        boot.coverage = window.map(|window| coverage(&boot.timeline, &window).summary());
        boot
    }
}

impl Boot {
    fn take_xid(&mut self, record: &Record) {
        let (Some(gpu), Some(xid)) = (record.gpu, record.fields.number("xid")) else {
            return;
        };
        let at_ns = record.boottime_ns;
        if let Some(known) = self.xids_of(gpu, xid, at_ns) {
            known.count = known.count.saturating_add(1);
        }
    }

    /// Keeps the driver's line about an Xid, which comes before the event.
    fn take_xid_line(&mut self, record: &Record) {
        let text = record.kmsg_text();
        if let Some(Signal::Xid(gpu, xid)) = driver_log::signal(text)
            && let Some(known) = self.xids_of(gpu, xid.into(), record.boottime_ns)
        {
            known.words = Some(start(text, MAX_WORDS).to_string());
        }
    }

    fn xids_of(&mut self, gpu: PciAddress, xid: u64, at_ns: u64) -> Option<&mut Xids> {
        let known = self
            .xids
            .iter()
            .position(|known| (known.gpu, known.xid) == (gpu, xid));
        let at = known.unwrap_or(self.xids.len());
        if known.is_none() && at < MAX_XIDS {
            self.xids.push(Xids {
                xid,
                gpu,
                at_ns,
                count: 0,
                words: None,
            });
        }
        self.xids.get_mut(at)
    }
}

fn clock_summary(file: &BootFile, clock: &Clock) -> ClockSummary {
    let guest = GuestClocks::of(&file.records);
    let samples = file.clock_samples().count();
    ClockSummary {
        samples,
        best: file.clock_samples().min_by_key(|s| s.error_ns),
        drift: clock.drift(),
        steps: clock.steps(),
        hypervisor_samples: guest.host.len(),
        hypervisor_samples_used: clock.samples().saturating_sub(samples),
        printk: guest.printk,
        before_kernel: guest.before_kernel,
        notes: guest.notes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::budget::{MAX_CONTAINERS, MAX_GPUS, MAX_SPANS};

    fn read(lines: impl IntoIterator<Item = String>) -> BootFile {
        let line = |(seq, line): (usize, String)| {
            format!("{{\"schema\":1,\"seq\":{seq},\"boottime_ns\":{seq},{line}}}\n")
        };
        let text: String = lines.into_iter().enumerate().map(line).collect();
        let file = BootFile::read(text.as_bytes()).unwrap();
        assert_eq!(file.damaged, 0, "{:?}", file.damage);
        file
    }

    #[test]
    fn a_boot_over_the_limits_is_cut_and_names_what_is_omitted() {
        let gpu = |n: usize| {
            format!(
                r#""kind":"event","name":"gpu.found","gpu":"{:04x}:{:02x}:00.0""#,
                n / 256,
                n % 256
            )
        };
        let boot = Boot::new(&read((0..MAX_GPUS + 7).map(gpu)), &[]);
        assert_eq!(
            (boot.gpus.len(), boot.too_large.map(|t| t.gpu_records)),
            (MAX_GPUS, Some(7))
        );
        let span = |n: usize| format!(r#""kind":"begin","name":"x","span":{n}"#);
        let boot = Boot::new(&read((0..MAX_SPANS + 5).map(span)), &[]);
        assert_eq!(
            (boot.spans.len(), boot.too_large.map(|t| t.spans)),
            (MAX_SPANS, Some(5))
        );
        assert!(
            crate::views::summary::complaints(&boot)
                .iter()
                .any(|c| c.starts_with("too large: 5 span(s) left out"))
        );
        let created = |n: usize| {
            format!(
                r#""kind":"event","name":"container.created","fields":{{"container":"c{n}","import":{{"format":"console","line":1,"error_ns":1}}}}"#
            )
        };
        let boot = Boot::new(&read((0..MAX_CONTAINERS + 3).map(created)), &[]);
        assert_eq!(
            (boot.containers.len(), boot.too_large.map(|t| t.containers)),
            (MAX_CONTAINERS, Some(3))
        );
    }

    #[test]
    fn how_a_large_boot_ended_is_known() {
        let event = |name: &str| format!(r#""kind":"event","name":"{name}""#);
        let many = std::iter::repeat_n(event("x"), crate::data::budget::MAX_RECORDS + 10);
        let boot = Boot::new(&read(many.chain([event("settled"), event("gpu.xid")])), &[]);
        assert_eq!(
            (boot.settled_ns.is_some(), boot.too_large.map(|t| t.records)),
            (true, Some(11))
        );
        assert_eq!(boot.lost.records, 0, "what is left out was not lost");
    }
}
