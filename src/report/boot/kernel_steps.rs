//! Steps by the kernel's own lines: until it starts the first program, its rounds of PCI
//! enumeration, and the probes inside a module load.

use super::draft::Draft;
use super::intervals::ns;
use super::story::RawStep;
use crate::data::compact_record::Record;
use kata_gpu_wire::catalogue::derived;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::{PciAddress, waits_for_bar_firewall};
use kata_gpu_wire::record::Kind;
use std::collections::HashSet;

/// Distance from which lines of PCI enumeration belong to two rounds: a function takes some ms even
/// if each access leaves the VM.
const ROUND_PAUSE_NS: i64 = 100_000_000;
/// Silence of the kernel that its name explains no longer: a guest's kernel says something each few
/// hundred ms, also under emulation.
const SILENCE_NS: i64 = 5_000_000_000;
/// Limit of driver loads examined: there is one, or a second try.
const MAX_LOADS: usize = 8;

/// A line of the kernel about one PCI function.
struct PciLine<'a> {
    at_ns: i64,
    /// Source of the line: `pci`, or a driver's name.
    by: &'a str,
    address: PciAddress,
    enabling: bool,
}

/// `pci 0001:00:00.0: BAR 0 [mem ..]`, `nvidia 0001:00:01.0: enabling device (0000 -> 0002)`.
fn pci_line(record: &Record) -> Option<PciLine<'_>> {
    let (by, rest) = record.kmsg_text().split_once(' ')?;
    let (address, said) = rest.split_once(": ")?;
    let enabling = said.starts_with("enabling device");
    Some(PciLine {
        at_ns: ns(record.boottime_ns),
        by,
        address: address.parse().ok()?,
        enabling,
    })
}

/// Adds the kernel's steps.
pub fn add(draft: &mut Draft) {
    let file = draft.file;
    let mut lines: Vec<&Record> = file
        .records
        .iter()
        .filter(|r| r.kind == Kind::Kmsg)
        .collect();
    lines.sort_by_key(|r| r.boottime_ns);
    let init_ns = draft.milestone("init start");
    let before_init = |at: i64| init_ns.is_some_and(|init| at <= init);
    let run = lines
        .iter()
        .find(|r| r.kmsg_text().starts_with("Run ") && r.kmsg_text().ends_with(" as init process"));
    let run_ns = run.map(|r| ns(r.boottime_ns)).filter(|at| before_init(*at));

    let times: Vec<i64> = lines.iter().map(|r| ns(r.boottime_ns)).collect();
    let mut derive = |name, begin, end| -> Vec<usize> {
        let spoken = spoken(begin, end, &times).into_iter();
        spoken
            .filter_map(|(begin, end)| draft.derive(name, begin, end))
            .collect()
    };
    let kernel = run_ns.or(init_ns);
    let kernel = kernel.map_or_else(Vec::new, |end| derive(derived::KERNEL, 0, end));
    let exec = run_ns.zip(init_ns);
    let exec = exec.map_or_else(Vec::new, |(run, init)| {
        derive(derived::KERNEL_EXEC, run, init)
    });
    let said = |what: &str| {
        lines
            .iter()
            .find(|r| r.kmsg_text().contains(what))
            .map(|r| ns(r.boottime_ns))
            .filter(|at| before_init(*at))
    };
    let inside = |draft: &Draft, begin: i64, end: i64| {
        let holds = |step: &usize| {
            let step = draft.story.steps.get(*step);
            step.is_some_and(|s| s.begin_ns <= begin && s.end_ns >= Some(end))
        };
        kernel.iter().chain(&exec).copied().find(holds)
    };
    if let Some((begin, end)) = said("initramfs...").zip(said("Freeing initrd memory")) {
        let parent = inside(draft, begin, end);
        let initrd = draft.derive(derived::KERNEL_INITRD, begin, end);
        if let Some(initrd) = initrd.and_then(|i| draft.step_mut(i)) {
            initrd.parent = parent;
        }
    }
    let pci: Vec<PciLine> = lines.iter().filter_map(|r| pci_line(r)).collect();
    let enumeration = pci
        .iter()
        .filter(|l| l.by == "pci" && !l.enabling && before_init(l.at_ns))
        .map(|l| l.at_ns);
    // The kernel enumerates one round after another: on the path to a milestone stand all of them,
    // so that a view's sums agree, and not the last one only.
    let mut former = None;
    for (begin, end) in rounds(enumeration) {
        let parent = inside(draft, begin, end);
        let index = draft.derive(derived::KERNEL_PCI, begin, end);
        if let Some(round) = index.and_then(|i| draft.step_mut(i)) {
            round.parent = parent;
            round.follows.extend(former);
            former = index;
        }
    }
    probes(draft, &pci);
}

/// Parts of an interval in which the kernel said something. A silence is no part: what took its
/// time is not known.
fn spoken(begin: i64, end: i64, times: &[i64]) -> Vec<(i64, i64)> {
    let inside = times.iter().copied().filter(|at| (begin..end).contains(at));
    let mut parts = vec![(begin, begin)];
    for at in inside.chain([end]) {
        match parts.last_mut() {
            Some(part) if at.saturating_sub(part.1) < SILENCE_NS => part.1 = at,
            _ => parts.push((at, at)),
        }
    }
    parts
}

/// First and last of times that follow each other closely.
fn rounds(times: impl Iterator<Item = i64>) -> Vec<(i64, i64)> {
    let mut rounds: Vec<(i64, i64)> = Vec::new();
    for at in times {
        match rounds.last_mut() {
            Some(round) if at.saturating_sub(round.1) <= ROUND_PAUSE_NS => round.1 = at,
            _ => rounds.push((at, at)),
        }
    }
    rounds
}

/// Adds the probes inside a module load, which are sequential. The kernel logs `enabling device`
/// right before the host maps a GPU's BARs; that probe ends when the GPU is bound, when the next
/// one begins, or with the load.
fn probes(draft: &mut Draft, lines: &[PciLine]) {
    let mut loads: Vec<(usize, i64, i64)> = Vec::new();
    for (i, step) in draft.story.steps.iter().enumerate() {
        if loads.len() < MAX_LOADS && step.name == names::MODULE_LOAD && step.detail == "nvidia" {
            loads.push((i, step.begin_ns, step.end_ns.unwrap_or(draft.story.last_ns)));
        }
    }
    // An import has made steps of these lines already.
    let enablings = draft
        .story
        .steps
        .iter()
        .filter(|step| step.name == names::GPU_ENABLE);
    let enablings: HashSet<_> = enablings
        .map(|step| (step.gpu.map(|gpu| gpu.address), step.begin_ns))
        .collect();
    for (load, begin, end) in loads {
        let inside: Vec<&PciLine> = lines
            .iter()
            .filter(|l| l.by == "nvidia" && l.enabling && (begin..=end).contains(&l.at_ns))
            .collect();
        for (at, line) in inside.iter().enumerate() {
            if enablings.contains(&(Some(line.address), line.at_ns)) {
                continue;
            }
            let next = inside.get(at + 1).map_or(end, |next| next.at_ns);
            let gpu = draft.gpus.get(&line.address).copied().unwrap_or_default();
            let bound = gpu.bound_ns.filter(|at| *at >= line.at_ns).unwrap_or(end);
            let sleeps = gpu.device.is_some_and(waits_for_bar_firewall);
            let step = RawStep {
                name: if sleeps {
                    derived::GPU_PROBE
                } else {
                    derived::GPU_MAP
                }
                .to_string(),
                gpu: Some(draft.gpu_name(line.address)),
                begin_ns: line.at_ns,
                end_ns: Some(next.min(bound).min(end)),
                parent: Some(load),
                derived: true,
                ..RawStep::default()
            };
            draft.story.steps.push(step);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_wire::record;

    #[test]
    fn lines_about_functions_are_recognised() {
        let line = |text: &str| {
            let mut record = record::Record::new(Kind::Kmsg, "kmsg");
            record.fields.insert("text".into(), text.into());
            pci_line(&record.into()).map(|l| (l.by.to_string(), l.address.to_string(), l.enabling))
        };
        let of = |by: &str, enabling| Some((by.to_string(), "0001:00:02.0".to_string(), enabling));
        assert_eq!(
            line("pci 0001:00:02.0: BAR 0 [mem 0x120022000000-0x120022ffffff 64bit pref]"),
            of("pci", false)
        );
        assert_eq!(
            line("nvidia 0001:00:02.0: enabling device (0000 -> 0002)"),
            of("nvidia", true)
        );
        for other in [
            "",
            "pci",
            "NVRM: GPU 0001:00:02.0: RmInitAdapter failed!",
            "pci_bus 0001:00: root bus",
            "pci 0001:00: x",
        ] {
            assert_eq!(line(other), None, "{other}");
        }
    }

    #[test]
    fn a_silence_of_the_kernel_is_not_explained_by_its_name() {
        let s = |t: i64| t * 1_000_000_000;
        assert_eq!(spoken(0, s(3), &[s(1)]), [(0, s(3))]);
        // 26 s between `Run /init` and the init's first instruction.
        assert_eq!(
            spoken(s(2), s(28), &[s(2), s(3)]),
            [(s(2), s(3)), (s(28), s(28))]
        );
        let lines = [s(1), s(9), s(10), s(40)];
        assert_eq!(spoken(0, s(12), &lines), [(0, s(1)), (s(9), s(12))]);
    }

    #[test]
    fn lines_that_are_far_apart_are_two_rounds() {
        let ms = |t: i64| t * 1_000_000;
        assert_eq!(
            rounds([ms(1), ms(90), ms(180), ms(500), ms(501)].into_iter()),
            [(ms(1), ms(180)), (ms(500), ms(501))]
        );
        assert_eq!(rounds([i64::MIN, i64::MAX].into_iter()).len(), 2);
    }
}
