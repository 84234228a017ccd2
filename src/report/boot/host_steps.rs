//! The host's share by its own trace: the shim, the VMM, and the memory that was pinned and mapped.
//!
//! A step that lies in another one, the enabling of a GPU for example, is part of that step.

use super::draft::Draft;
use super::intervals::length;
use super::story::{Milestone, RawStep};
use kata_gpu_wire::catalogue::{Form, row_of, traced};

/// Milestone of a traced boot: the shim's process began, or the VMM's where the shim is not known.
pub const PROCESSES_START: &str = "processes start";

/// Adds the steps of the trace, and a milestone where they begin. Call it after all others.
pub fn add(draft: &mut Draft) {
    let Some(host) = draft.boot.host.as_deref() else {
        return;
    };
    let first = draft.story.steps.len();
    let mut places: Vec<Place> = draft
        .story
        .steps
        .iter()
        .enumerate()
        .filter_map(|(i, step)| place(i, step))
        .collect();
    for (at, step) in host.steps.iter().enumerate() {
        let gpu = step.gpu.map(|address| draft.gpu_name(address));
        let parent = around(&places, step.begin_ns, step.end_ns(), step.error_ns);
        draft.story.steps.push(RawStep {
            name: step.traced.name.clone(),
            detail: step.traced.detail.clone(),
            gpu,
            begin_ns: step.begin_ns,
            end_ns: Some(step.end_ns()),
            parent,
            approximate: step.is_approximate(),
            traced: Some(at),
            ..RawStep::default()
        });
        places.extend(
            draft
                .story
                .steps
                .iter()
                .enumerate()
                .next_back()
                .and_then(|(i, step)| place(i, step)),
        );
    }
    let started = |step: &&RawStep| [traced::SHIM, traced::VMM_START].contains(&step.name.as_str());
    let begin = draft
        .story
        .steps
        .iter()
        .skip(first)
        .filter(started)
        .map(|step| step.begin_ns)
        .min();
    let earliest = draft.story.milestones.iter().map(|m| m.at_ns).min();
    if let Some(at_ns) = begin.filter(|begin| earliest.is_none_or(|earliest| *begin < earliest)) {
        let approximate = host
            .steps
            .iter()
            .any(|step| step.begin_ns == at_ns && step.is_approximate());
        draft.story.milestones.push(Milestone {
            name: PROCESSES_START.into(),
            at_ns,
            approximate,
            ..Milestone::default()
        });
    }
    draft.story.missing.extend(host.notes());
}

/// Time of a step that can have others in it: beginning, end, index.
type Place = (i64, i64, usize);

/// The place of a step; none of one that only waits, which has nothing in it.
fn place(index: usize, step: &RawStep) -> Option<Place> {
    let row = row_of(&step.name);
    (row.form == Form::Span && !row.waiting)
        .then(|| (step.begin_ns, step.end_ns.unwrap_or(i64::MAX), index))
}

/// The shortest step that has this time in it, but for the error of the clocks.
fn around(places: &[Place], begin_ns: i64, end_ns: i64, error_ns: u64) -> Option<usize> {
    let error = i64::try_from(error_ns).unwrap_or(i64::MAX);
    let is_around = |(begin, end, _): &&Place| {
        *begin <= begin_ns && end.saturating_add(error) >= end_ns && *end > begin_ns
    };
    places
        .iter()
        .filter(is_around)
        .min_by_key(|(begin, end, _)| length(*begin, *end))
        .map(|(.., index)| *index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::model::Boot;
    use crate::data::boot_file::{BootFile, HostEvent, HostLine};
    use crate::data::trace_file::{Recording, Traced};
    use kata_gpu_wire::catalogue::traced as names;
    use kata_gpu_wire::pci_address::PciAddress;

    const STREAM: &str = r#"{"schema":1,"seq":0,"boottime_ns":1000,"kind":"kmsg","level":"info","name":"kmsg","fields":{"text":"pci 0000:01:00.0: BAR 2 [mem 0x1000-0x1fff 64bit pref]"}}
{"schema":1,"seq":1,"boottime_ns":5000000,"kind":"event","name":"init.start"}
{"schema":1,"seq":2,"boottime_ns":10000000,"kind":"begin","name":"gpu.enable","gpu":"0000:01:00.0","span":1}
{"schema":1,"seq":3,"boottime_ns":90000000,"kind":"end","name":"gpu.enable","gpu":"0000:01:00.0","span":1}
{"schema":1,"kind":"host","realtime_ns":1,"event":"clock","boottime_ns":0,"offset_ns":1000000000000,"error_ns":1000}
"#;

    fn boot(traced: &[Traced]) -> Boot {
        let mut file = BootFile::read(STREAM.as_bytes()).unwrap();
        let recording = HostEvent::Recording(Box::new(Recording {
            missing: vec!["x cannot be probed".into()],
            ..Recording::default()
        }));
        let events = traced
            .iter()
            .map(|traced| HostEvent::Traced(Box::new(traced.clone())));
        let lines: String = [recording]
            .into_iter()
            .chain(events)
            .map(|event| HostLine::now(event).to_line())
            .collect();
        file.read_trace(lines.as_bytes()).unwrap();
        assert_eq!(file.damaged, 0, "{:?}", file.damage);
        Boot::new(&file, &[])
    }

    fn traced(name: &str, at_ms: i64, took_ms: u64) -> Traced {
        let began_realtime_ns = 1_000_000_000_000 + at_ms * 1_000_000;
        Traced {
            name: name.into(),
            began_realtime_ns,
            took_ns: took_ms * 1_000_000,
            ..Traced::default()
        }
    }

    #[test]
    fn steps_of_the_host_stand_on_the_guests_clock() {
        let function: PciAddress = "0000:81:00.0".parse().unwrap();
        let bar = Traced {
            function: Some(function),
            guest_address: Some(0x1800),
            ..traced(names::VMM_MAP_BAR, 20, 50)
        };
        let open = Traced {
            function: Some(function),
            ..traced(names::VFIO_OPEN, -300, 10)
        };
        let boot = boot(&[
            traced(names::SHIM, -500, 100),
            traced(names::VMM_START, -400, 380),
            open,
            bar,
            traced(names::KVM_EXITS, -400, 0),
        ]);
        let steps = &boot.timeline.steps;
        let of = |name: &str| steps.iter().position(|step| step.name == name).unwrap();
        let times = |name: &str| {
            (
                steps[of(name)].begin_ns / 1_000_000,
                steps[of(name)].end_ns / 1_000_000,
            )
        };
        assert_eq!(
            [names::SHIM, names::VMM_START, names::VMM_MAP_BAR].map(times),
            [(-500, -400), (-400, -20), (20, 70)]
        );
        assert_eq!(
            steps[of(names::VMM_MAP_BAR)].parent,
            Some(of("gpu.enable")),
            "the host's cause of an enabling"
        );
        assert_eq!(
            steps[of(names::VFIO_OPEN)].parent,
            Some(of(names::VMM_START))
        );
        // One BAR names the function for all of its steps.
        let gpu = |name: &str| steps[of(name)].gpu.map(|gpu| gpu.address.to_string());
        assert_eq!(
            [
                gpu(names::VFIO_OPEN),
                gpu(names::VMM_MAP_BAR),
                gpu(names::SHIM)
            ],
            [
                Some("0000:01:00.0".into()),
                Some("0000:01:00.0".into()),
                None
            ]
        );
        assert!(
            steps.iter().all(|step| step.name != names::KVM_EXITS),
            "a count explains no time"
        );
        assert_eq!(boot.host.as_ref().unwrap().counts.len(), 1);
        let first = &boot.timeline.milestones[0];
        assert_eq!(
            (first.name.as_str(), first.at_ns / 1_000_000),
            (PROCESSES_START, -500)
        );
        assert!(
            boot.timeline
                .notes
                .iter()
                .any(|note| note == "trace: x cannot be probed"),
            "{:?}",
            boot.timeline.notes
        );
    }
}
