//! A failure means that a real kernel's trace is folded into wrong steps, or that one damaged or
//! endless event costs more than itself. The trace is of Linux 6.12.117 and QEMU 11.1, with one
//! function passed through, 256 MiB of memory and a BAR of 512 MiB.

use super::probes::{FAULTS, PROBES, RUN};
use super::recorded::Recorded;
use super::trace_line::{Event, Line, parse};
use super::traced_steps::{Fold, MAX_STEPS};
use super::{boot_of_vm, report};
use crate::rules::host_facts::bars;
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::data::text::Screen;
use kata_gpu_report::data::trace_file::Recording;
use kata_gpu_test_support::{golden, tests_dir};
use kata_gpu_wire::catalogue::traced as names;

/// `resource` of the function on that host, its first three lines.
const RESOURCE: &str = "0x00000000fe800000 0x00000000fe803fff 0x0000000000140204\n\
    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
    0x0000000140000000 0x000000015fffffff 0x000000000014220c\n";

/// The trace; its event `opened` had another name when it was recorded.
fn recorded_trace() -> Vec<u8> {
    std::fs::read(tests_dir("fixtures/trace/trace-pipe-6.12.117.txt")).unwrap()
}

/// The fold, and the number of lines that were not understood.
fn folded(text: &[u8]) -> (Fold, usize) {
    let (mut fold, mut unreadable) = (Fold::default(), 0);
    for line in text.split(|b| *b == b'\n') {
        match parse(line) {
            Line::Event(event) => fold.take(&event),
            Line::Unreadable => unreadable += 1,
            Line::Lost(_) | Line::Comment => {}
        }
    }
    fold.number_bars(|_| bars(RESOURCE));
    (fold, unreadable)
}

fn event<'a>(tid: u32, at_ns: i64, name: &'a str, args: &'a str) -> Event<'a> {
    Event {
        comm: b"qemu-system-x86",
        tid,
        at_ns,
        name,
        args,
    }
}

fn take(fold: &mut Fold, events: &[(i64, &str, &str)]) {
    for (at_ns, name, args) in events {
        fold.take(&event(203, *at_ns, name, args));
    }
}

fn recorded(fold: Fold) -> Recorded {
    let recording = Recording {
        kernel: "6.12.117".into(),
        began_realtime_ns: 32_583_677_000,
        ended: "the VM ended".into(),
        ..Recording::default()
    };
    Recorded {
        recording,
        traced: fold.steps,
        boot: None,
    }
}

#[test]
fn a_real_kernels_trace_becomes_steps() {
    let (fold, unreadable) = folded(&recorded_trace());
    assert_eq!((unreadable, fold.left_out), (0, 0));
    let of = |name: &str| {
        fold.steps
            .iter()
            .filter(|step| step.name == name)
            .collect::<Vec<_>>()
    };
    let memory = of(names::VMM_PIN);
    assert_eq!(
        (memory[0].bytes, memory[0].calls, memory[0].thread.as_str()),
        (Some(256 << 20), Some(2), "qemu-system-x86")
    );
    let mapped: Vec<_> = of(names::VMM_MAP_BAR)
        .iter()
        .map(|bar| (bar.bar, bar.bytes, bar.thread.clone()))
        .collect();
    assert!(
        mapped.contains(&(Some(2), Some(512 << 20), "CPU 0/KVM".into())),
        "{mapped:?}"
    );
    assert_eq!(
        of(names::VFIO_OPEN)[0]
            .function
            .map(|function| function.to_string())
            .as_deref(),
        Some("0000:81:00.0")
    );
    golden(
        "trace/qemu-11.1-linux-6.12.117.txt",
        &(report::lines(
            &recorded(fold),
            &Screen {
                width: None,
                colour: false,
            },
        )
        .join("\n")
            + "\n"),
    );
}

#[test]
fn the_file_of_a_trace_is_read_back_as_it_was() {
    let recorded = recorded(folded(&recorded_trace()).0);
    let mut file = BootFile::default();
    file.read_trace(boot_of_vm::lines(&recorded).as_bytes())
        .unwrap();
    assert_eq!(
        (file.damaged, file.recording()),
        (0, Some(&recorded.recording))
    );
    assert!(file.traced().eq(&recorded.traced));
    // A guest's line, and one of the collector's, are nothing that the recorder writes.
    let others = "{\"schema\":1,\"seq\":1,\"boottime_ns\":1,\"kind\":\"event\",\
                  \"name\":\"settled\"}\n\
        {\"schema\":1,\"kind\":\"host\",\"realtime_ns\":1,\"event\":\"capped\",\"why\":\"x\"}\n";
    file.read_trace(others.as_bytes()).unwrap();
    assert_eq!((file.damaged, file.records.len()), (2, 0));
}

#[test]
fn no_event_has_the_name_of_a_file_of_its_group() {
    let faults = |names: &[&str]| {
        names
            .iter()
            .filter(|name| ["enable", "filter"].contains(name))
            .count()
    };
    let names: Vec<&str> = PROBES
        .iter()
        .chain(FAULTS)
        .chain([&RUN])
        .map(|probe| probe.event)
        .collect();
    assert!(names.len() > 15 && faults(&names) == 0, "{names:?}");
    // Negative control: the event of vfio_pci_core_enable once had that name.
    assert_eq!(faults(&["opened", "enable"]), 1);
}

/// IOMMUFD maps memory, and in 6.12 no BAR: it fails with EFAULT. The values are of a real kernel.
#[test]
fn iommufds_pins_and_the_function_that_it_binds_are_known() {
    let function: kata_gpu_wire::pci_address::PciAddress = "0000:81:00.0".parse().unwrap();
    let mut fold = Fold::default();
    fold.vfio_devices.insert("vfio0".into(), function);
    let events = [
        (0, "bind_in", "cmd=0x3b76 name=\"vfio0\""),
        (1, "opened", "dev=0x51"),
        (2, "bind_out", "ret=0"),
        (
            3,
            "mmap",
            "dev=0x51 start=0x7f0000000000 end=0x7f0020000000",
        ),
        (
            4,
            "ioas_in",
            "cmd=0x3b85 vaddr=0x7e0000000000 iova=0x0 size=0x20000000",
        ),
        (5, "pin_fast", "pages=8192"),
        (6, "pin_fast", "pages=122880"),
        (7, "ioas_out", "ret=0"),
        (
            8,
            "ioas_in",
            "cmd=0x3b85 vaddr=0x7f0000000000 iova=0x380000000000 size=0x20000000",
        ),
        (9, "pin_fast", "pages=-14"),
        (10, "ioas_out", "ret=-14"),
        (
            11,
            "ioas_in",
            "cmd=0x3b8f vaddr=0x0 iova=0x0 size=0x20000000",
        ),
        (12, "ioas_out", "ret=-25"),
    ];
    take(&mut fold, &events);
    let seen: Vec<_> = fold
        .steps
        .iter()
        .map(|s| (s.name.as_str(), s.function, s.calls, s.detail.as_str()))
        .collect();
    let want = [
        (names::VFIO_OPEN, Some(function), None, ""),
        (names::VMM_PIN, None, Some(2), ""),
        (
            names::VMM_MAP_BAR,
            Some(function),
            Some(1),
            "failed: errno 14",
        ),
        (names::VMM_PIN, None, Some(0), "failed: errno 25"),
    ];
    assert_eq!(seen, want);
    assert_eq!(fold.steps[1].pages_a_call, [(1000, 1), (100_000, 1)]);
    let mut unknown = Fold::default();
    let events = [
        (0, "bind_in", "cmd=0x3b76 name=\"vfio0\""),
        (1, "bind_out", "ret=0"),
    ];
    take(&mut unknown, &events);
    assert_eq!((unknown.steps.len(), unknown.steps[0].function), (1, None));
}

/// A function without a reset of its own is reset with its bus, by the ioctl of a later moment.
#[test]
fn a_reset_of_a_bus_is_that_of_its_function() {
    let mut fold = Fold::default();
    let events = [
        (0, "open_in", "cmd=0x3b6a name=\"0000:81:00.0\""),
        (1, "reset_in", "pdev=0x91"),
        (2, "reset_out", "ret=-25"),
        (3, "open_out", "ret=41"),
        (4, "bus_reset_in", "pdev=0x91"),
        (9, "bus_reset_out", "ret=0"),
    ];
    take(&mut fold, &events);
    let resets: Vec<_> = fold
        .steps
        .iter()
        .filter(|step| step.name == names::VFIO_RESET)
        .map(|step| (step.function, step.detail.as_str()))
        .collect();
    let function = "0000:81:00.0".parse().ok();
    assert_eq!(
        resets,
        [(function, "failed: errno 25"), (function, "whole bus")]
    );
}

#[test]
fn a_damaged_trace_costs_its_own_lines() {
    let whole = recorded_trace();
    let steps = folded(&whole).0.steps.len();
    for at in (0..whole.len()).step_by(97) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x55;
        // A byte can break a line in two, or join two; the calls on both sides of it then differ.
        let found = folded(&damaged).0.steps.len();
        assert!(
            found.abs_diff(steps) <= 2,
            "byte {at}: {found} of {steps} steps"
        );
        assert!(folded(&whole[at..]).0.steps.len() <= steps);
    }
}

#[test]
fn endless_events_are_bounded_and_counted() {
    let event = |tid, name, args| event(tid, 1, name, args);
    let mut fold = Fold::default();
    for n in 0..u32::try_from(MAX_STEPS).unwrap() + 7 {
        fold.take(&event(
            n,
            "map_in",
            "cmd=0x3b71 vaddr=0x0 iova=0xffffffffffffffff size=0xffffffffffffffff",
        ));
        fold.take(&event(n, "pin", "pages=-12"));
        fold.take(&event(n, "map_out", "ret=-12"));
    }
    assert_eq!((fold.steps.len(), fold.left_out), (MAX_STEPS, 7));
    assert_eq!(
        (fold.steps[0].detail.as_str(), fold.steps[0].calls),
        ("failed: errno 12", Some(1))
    );
    // An end without a beginning, and beginnings without an end.
    let mut fold = Fold::default();
    fold.take(&event(1, "map_out", "ret=0"));
    (0..100_000)
        .for_each(|tid| fold.take(&event(tid, "open_in", "cmd=0x3b6a name=\"0000:81:00.0\"")));
    assert_eq!(fold.steps, []);
}
