//! A failure means that a passed-through function with a large BAR does not come up, from the start
//! or plugged in, that the guest's time before its kernel is wrong, or that the simulator makes
//! something wait, or not wait, where a real mapping by VFIO does otherwise.

use super::guests::{Boot, SERVICE, event, sent};
use super::service;
use crate::vm::harness::{
    AgentLine, BOOTS, EmulatedHost, Guest, KvmGuest, KvmImage, Outcome, Size, TestContext, VmTest,
};
use anyhow::{Context, Result, ensure};
use kata_gpu_report::data::clock_offset::{RATE_ERROR_PPM, Wall};
use kata_gpu_report::data::guest_clocks::{BeforeKernel, GuestClocks};
use kata_gpu_test_guest::halves::stalls::{self, PROBES};
use kata_gpu_wire::names;
use kata_gpu_wire::record::Record;
use std::time::UNIX_EPOCH;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "emulated_host_passes_gpus_with_large_bars_to_a_guest",
        run: passed_through,
    },
    VmTest {
        name: "what_waits_for_a_mapping_waits_for_a_simulated_one",
        run: simulated,
    },
];

/// QEMU's name, and what makes an H100 of it in the guest.
pub(super) fn function(address: &str, port: usize) -> String {
    format!(
        "vfio-pci,host={address},bus=port{port},id=gpu{port},x-pci-vendor-id=0x10de,\
        x-pci-device-id=0x2330,x-pci-class-code=0x030200"
    )
}

/// Ports for two functions, with room for their BARs.
pub(super) const PORTS: &str = "-device pcie-root-port,id=port0,chassis=1,slot=1,pref64-reserve=2G \
    -device pcie-root-port,id=port1,chassis=2,slot=2,pref64-reserve=2G";

fn passed_through(context: &TestContext) -> Result<Outcome> {
    if let Some(skipped) = EmulatedHost::skipped(context)? {
        return Ok(skipped);
    }
    let image = KvmImage::make(context, Guest::new().cpus(2).append("fakepci.gpus=0"))?;
    let mut host = service::start(context, Size::WITH_GUESTS.with_gpus(2), &image.files())?;
    KvmGuest::prepare(&mut host)?;
    let gpus = host.vfio()?;
    ensure!(gpus.len() == 2, "{gpus:?} instead of two functions");
    host.run(&format!("systemctl start {SERVICE}"))?;
    let places = cold_and_hot(&mut host, &image, &gpus)?;
    let stalls = stalls_under_kvm(&mut host, &image, &gpus[0])?;
    Ok(Outcome::Measured(format!("{places}; {stalls}")))
}

/// One GPU that is there from the start, one that is plugged in; gives where QEMU mapped their
/// BARs: of the first one in firmware and kernel alone, of the second one as it is bound. The
/// guest's report of the time before its kernel is compared with KVM's trace of its TSC offset.
fn cold_and_hot(host: &mut EmulatedHost, image: &KvmImage, gpus: &[String]) -> Result<String> {
    let trace = format!("-msg timestamp=on -trace {MAPPED} -trace {MAKES_VCPU} -trace {MADE_VCPU}");
    let devices = format!("{PORTS} -device {} {trace}", function(&gpus[0], 0));
    trace_tsc_offsets(host)?;
    let guest = KvmGuest::start_with(
        host,
        image,
        "0a1b",
        "cold",
        33,
        "testagent.containers=all:all",
        &devices,
    )?;
    sent(host, &guest, &event(names::SETTLED))?;
    guest.wait_lines(host, 1, "\"msg\":\"container \\(created\\|failed\\)\"")?;
    let console = guest.console(host)?;
    let created = console
        .lines()
        .filter_map(AgentLine::parse)
        .find(|line| line.get("msg") == "container created");
    let nodes = created
        .with_context(|| format!("no container: {console}"))?
        .get("nodes")
        .to_string();
    ensure!(nodes.contains("/dev/nvidia0 195:0 666"), "nodes: {nodes}");
    let cold = mappings(&console);

    guest.monitor(host, &format!("device_add {}", function(&gpus[1], 1)))?;
    host.until(
        "the GPU that was plugged in",
        &format!(
            "grep -q '\"name\":\"{}\",\"gpu\":\"{HOT}\"' {BOOTS}/*.ndjson",
            names::GPU_USABLE
        ),
    )?;
    let boot = Boot::only(host, &guest)?;
    let all = mappings(&guest.console(host)?);
    let hot = &all[cold.len()..];
    let tsc = compare_tsc(host, &guest, &boot)?;

    let began = boot.wall("init.start", |r| r.name == names::INIT_START)?;
    // The kernel offers a GPU that is plugged in to the driver at once: enabling is part of the
    // probe.
    let of_hot = |r: &Record| r.gpu.is_some_and(|gpu| gpu.to_string() == HOT);
    let from = boot.wall("record of the GPU that was plugged in", of_hot)?;
    let to = boot.wall("gpu.bound of the GPU that was plugged in", |r| {
        of_hot(r) && r.name == names::GPU_BOUND
    })?;
    let (first, last) = (
        from.realtime_ns - from.error_ns as i64,
        to.realtime_ns + to.error_ns as i64,
    );
    let began_ns = began.realtime_ns - began.error_ns as i64;
    ensure!(
        !cold.is_empty() && cold.iter().all(|at| *at < began_ns),
        "mapped at {cold:?} ns, the init began at {began_ns} ns"
    );
    ensure!(
        !hot.is_empty() && hot.iter().all(|at| (first..last).contains(at)),
        "mapped at {hot:?} ns, there from {first} ns, bound at {last} ns"
    );
    let (cold, hot) = (cold.len(), hot.len());
    Ok(format!(
        "mapped {cold} times by firmware and kernel, {hot} times when plugged in; {tsc}"
    ))
}

/// Address in the guest of the GPU that is plugged in.
const HOT: &str = "0000:02:00.0";

/// QEMU's event of memory that it pins and maps for a passed-through function:
/// `region_add [ram] FIRST - LAST [ADDRESS]`.
const MAPPED: &str = "vfio_listener_region_add_ram";
/// QEMU's event before KVM_CREATE_VCPU: `index: INDEX id: ID`.
const MAKES_VCPU: &str = "kvm_init_vcpu";
/// QEMU's event after KVM_CREATE_VCPU: `index: INDEX, id: ID, kvm fd: FD`.
const MADE_VCPU: &str = "kvm_create_vcpu";
/// QEMU and the host's kernel trace times in microseconds.
const TRACE_NS: i64 = 1_000;

/// CLOCK_REALTIME in ns and text of one event that QEMU has traced: `TIME EVENT TEXT`.
fn traced<'a>(line: &'a str, event: &str) -> Option<(i64, &'a str)> {
    let (time, rest) = line.split_once(' ')?;
    let text = rest.strip_prefix(event)?.strip_prefix(' ')?;
    let time = humantime::parse_rfc3339(time)
        .ok()?
        .duration_since(UNIX_EPOCH)
        .ok()?;
    Some((i64::try_from(time.as_nanos()).ok()?, text))
}

/// CLOCK_REALTIME in ns of each mapping of a large BAR, as QEMU has traced it.
fn mappings(log: &str) -> Vec<i64> {
    let parse = |line: &str| -> Option<i64> {
        let (time_ns, region) = traced(line, MAPPED)?;
        let mut ends = region
            .split_whitespace()
            .filter_map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
        let (first, last) = (ends.next()?, ends.next()?);
        (last - first + 1 == Size::BAR_BYTES).then_some(time_ns)
    };
    log.lines().filter_map(parse).collect()
}

/// The host's CLOCK_REALTIME in ns at one moment, from the least to the most that it can be.
#[derive(Clone, Copy, Debug)]
struct Span {
    least_ns: i64,
    most_ns: i64,
}

impl Span {
    /// Both can be of the same moment.
    fn meets(self, other: Self) -> bool {
        self.least_ns <= other.most_ns && other.least_ns <= self.most_ns
    }

    fn length_ns(self) -> i64 {
        self.most_ns - self.least_ns
    }
}

/// The moment at which the guest's TSC was 0. `wall` is the host's time at which the guest read its
/// TSC and CLOCK_BOOTTIME, `read_ns` the latter.
fn tsc_zero(wall: Wall, read_ns: u64, before: BeforeKernel) -> Span {
    let ran_ns = read_ns + before.took_ns;
    // The guest's clock has counted `ran_ns`, at a rate that is not quite the host's.
    let rate_ns = (ran_ns * RATE_ERROR_PPM).div_ceil(1_000_000);
    let error_ns = (wall.error_ns + before.error_ns + rate_ns) as i64;
    let zero_ns = wall.realtime_ns - ran_ns as i64;
    Span {
        least_ns: zero_ns - error_ns,
        most_ns: zero_ns + error_ns,
    }
}

/// The moment at which QEMU made the guest's first vCPU.
fn first_vcpu_made(log: &str) -> Result<Span> {
    let at = |event, first: &str| -> Result<i64> {
        let mut events = log.lines().filter_map(|line| traced(line, event));
        let found = events.find(|(_, text)| text.starts_with(first));
        found
            .map(|(time_ns, _)| time_ns)
            .with_context(|| format!("no {event} of {first:?}: {log}"))
    };
    let least_ns = at(MAKES_VCPU, "index: 0 ")?;
    Ok(Span {
        least_ns,
        most_ns: at(MADE_VCPU, "index: 0,")? + TRACE_NS,
    })
}

/// Makes the host's kernel trace each TSC offset that KVM sets, and the calls that can set one:
/// KVM_CREATE_VCPU and KVM_SET_MSRS. Clock of the trace: CLOCK_TAI, here CLOCK_REALTIME.
fn trace_tsc_offsets(host: &mut EmulatedHost) -> Result<()> {
    host.run(&format!(
        "mount -t tracefs none {TRACEFS} && cd {TRACEFS} && echo tai > trace_clock
        echo 'cmd == 0xae41 || cmd == 0x4008ae89' > events/syscalls/sys_enter_ioctl/filter
        echo 1 > events/syscalls/sys_enter_ioctl/enable
        echo 1 > events/kvm/kvm_write_tsc_offset/enable"
    ))
    .context("trace KVM")
    .map(drop)
}

const TRACEFS: &str = "/sys/kernel/tracing";

/// The moments at which KVM changed the TSC offset of the first vCPU, in order. In either call KVM
/// sets the TSC to 0 or 1, between entry of the call and the event of the offset.
fn tsc_offsets_set(trace: &str) -> Vec<Span> {
    // TASK-PID [CPU] FLAGS SECONDS.MICROSECONDS: TEXT
    let parse = |line| -> Option<(&str, i64, &str)> {
        let (task, rest) = str::split_once(line, " [")?;
        let (front, text) = rest.split_once(": ")?;
        let time = front.split_whitespace().last()?.replace('.', "");
        Some((task.trim(), time.parse::<i64>().ok()? * 1_000, text))
    };
    let events: Vec<_> = trace.lines().filter_map(parse).collect();
    let changed = |text: &str| {
        let offsets = text.strip_prefix("kvm_write_tsc_offset: vcpu=0 prev=");
        let offsets = offsets.and_then(|rest| rest.split_once(" next="));
        offsets.is_some_and(|(before, after)| before != after)
    };
    let span = |(at, event): (usize, &(&str, i64, &str))| {
        let (task, most_ns, _) = *event;
        let mut earlier = events.iter().take(at);
        let (_, least_ns, _) = earlier.rfind(|e| e.0 == task && e.2.starts_with("sys_ioctl("))?;
        Some(Span {
            least_ns: least_ns - TRACE_NS,
            most_ns: most_ns + TRACE_NS,
        })
    };
    events
        .iter()
        .enumerate()
        .filter(|(_, event)| changed(event.2))
        .filter_map(span)
        .collect()
}

/// Checks `before_kernel_ns` of the guest's `clock.tsc` against the host's trace: the TSC was 0 as
/// KVM last set its offset, within the errors that guest and collector state. Gives the figures.
fn compare_tsc(host: &mut EmulatedHost, guest: &KvmGuest, boot: &Boot) -> Result<String> {
    let made = first_vcpu_made(&guest.vmm_log(host)?)?;
    // A traced system call makes all of them slower: not in what is measured after this.
    let trace = host.run(&format!(
        "cd {TRACEFS} && echo 0 > events/enable && cat trace"
    ))?;
    let offsets = tsc_offsets_set(&trace);
    let (Some(first), Some(set)) = (offsets.first().copied(), offsets.last().copied()) else {
        anyhow::bail!("no offset in KVM's trace: {trace}")
    };
    // The first offset is of KVM_CREATE_VCPU; both traces are of one clock. A later one is of
    // QEMU's reset of the VM, where that took over 1 s: see src/init/machine/tsc.rs.
    ensure!(
        first.meets(made),
        "first offset in {first:?}, first vCPU made in {made:?}"
    );

    let clocks = GuestClocks::of(&boot.file.records);
    let before = clocks.before_kernel;
    let before = before.with_context(|| format!("no usable clock.tsc: {:?}", clocks.notes))?;
    // The record's own time is that of the reading.
    let record = boot
        .file
        .records
        .iter()
        .find(|r| r.name == names::CLOCK_TSC);
    let read_ns = record.context("no clock.tsc")?.boottime_ns;
    let wall = boot.file.clock().wall_at(read_ns).context("no pings")?;
    let zero_if = |took_ns| tsc_zero(wall, read_ns, BeforeKernel { took_ns, ..before });
    let zero = zero_if(before.took_ns);
    ensure!(
        zero.meets(set),
        "TSC 0 in {zero:?} by {before:?}, its offset set in {set:?}: {trace}"
    );
    // Negative controls: nothing before the kernel, and a time that is wrong by more than the bound
    // on either side. The bound depends on the time by RATE_ERROR_PPM, less than a thousandth.
    let bound_ns = (zero.length_ns() + set.length_ns()) as u64;
    let wrong_ns = bound_ns + bound_ns / 1000 + 1;
    for took_ns in [
        0,
        before.took_ns.saturating_sub(wrong_ns),
        before.took_ns + wrong_ns,
    ] {
        ensure!(
            !zero_if(took_ns).meets(set),
            "{took_ns} ns would pass: {before:?}, {set:?}"
        );
    }

    let started = host.run(&format!("stat -c %.9W {}", guest.vmm_log_path()))?;
    let started: f64 = started.parse().context("birth of QEMU's log")?;
    let s = |ns: i64| ns as f64 / 1e9;
    let middle = |span: Span| s(span.least_ns + span.length_ns() / 2);
    Ok(format!(
        "TSC 0 {:.3} s before the kernel's clock, {:+.1} ms (+-{:.1}) from its offset (+-{:.1}), \
        which was set {:.1} s after the first vCPU was made, {:.1} s after QEMU's start",
        s(before.took_ns as i64),
        (middle(zero) - middle(set)) * 1e3,
        s(zero.length_ns()) * 500.0,
        s(set.length_ns()) * 500.0,
        middle(set) - middle(made),
        middle(set) - started,
    ))
}

/// Waits in a guest while QEMU maps the large BAR of a function that the init leaves alone.
fn stalls_under_kvm(host: &mut EmulatedHost, image: &KvmImage, gpu: &str) -> Result<String> {
    host.run("kill $(cat /run/guests/0a1b/pid) && mkdir /run/shared")?;
    let disk = "-drive if=none,id=disk,format=raw,readonly=on,file=/var/guests/initrd.cpio \
        -device virtio-blk-pci,drive=disk";
    let devices = format!("{disk} {PORTS} -device vfio-pci,host={gpu},bus=port0");
    let words = "testagent.guest=stalls testagent.function=0000:01:00.0";
    let guest = KvmGuest::start_shared(host, image, "2c3d", 34, words, "/run/shared", &devices)?;
    guest.wait_lines(host, 1, &format!("\"msg\":\"{}\"", stalls::OVER))?;
    judge(&guest.console(host)?, &[])
}

fn simulated(context: &TestContext) -> Result<Outcome> {
    let words = "fakepci.gpus=1 fakepci.enable_ms=1000 hardware.override=other \
        testagent.guest=stalls testagent.function=0001:00:00.0";
    let booted = Guest::new().append(words).boot(context, "guest")?;
    booted.agent(stalls::OVER, |_| true)?;
    let absent = [
        "a line on hvc0",
        "a disk's block",
        "a refused vsock connection",
        "a file by virtio-fs",
    ];
    Ok(Outcome::Measured(judge(&booted.console.text(), &absent)?))
}

/// Compares what waited with what waits on a real host; gives the longest call of each probe.
fn judge(console: &str, absent: &[&str]) -> Result<String> {
    let lines: Vec<AgentLine> = console.lines().filter_map(AgentLine::parse).collect();
    let mut shown = vec![];
    for probe in PROBES {
        let line = lines
            .iter()
            .find(|line| line.get("msg") == stalls::MESSAGE && line.get("probe") == probe.name);
        let line = line.with_context(|| format!("{}: no line: {console}", probe.name))?;
        if absent.contains(&probe.name) {
            continue;
        }
        ensure!(
            line.get("absent").is_empty(),
            "{}: {}",
            probe.name,
            line.get("absent")
        );
        let number = |key| {
            line.get(key)
                .parse::<f64>()
                .with_context(|| format!("{}: {key}={:?}", probe.name, line.get(key)))
        };
        let (longest, window) = (number("longest_ms")?, number("window_ms")?);
        ensure!(
            window > 50.0,
            "{}: the mapping took {window} ms",
            probe.name
        );
        shown.push(format!("{} {longest:.0} of {window:.0} ms", probe.name));
        ensure!(
            stalls::waited(longest, window) == probe.waits,
            "{}, waits: {}",
            shown.join(", "),
            probe.waits
        );
    }
    Ok(shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_is_set_in_its_call_and_one_that_stays_sets_nothing() {
        let trace = |reset: &str| {
            let first =
                "CPU 0/KVM-296 [000] .....  1795.000001: sys_ioctl(fd: e, cmd: ae41, arg: 0)
CPU 0/KVM-296 [000] d..1.  1795.000300: kvm_write_tsc_offset: vcpu=0 prev=0 next=18446743970
CPU 1/KVM-297 [000] d..1.  1795.100000: kvm_write_tsc_offset: vcpu=1 prev=0 next=18446743970
CPU 0/KVM-296 [000] .....  1797.000000: sys_ioctl(fd: f, cmd: 4008ae89, arg: 7f96)
CPU 1/KVM-297 [000] .....  1797.000020: sys_ioctl(fd: 11, cmd: 4008ae89, arg: 7f95)
CPU 0/KVM-296 [000] d..1.  1797.000050: kvm_write_tsc_offset: vcpu=0 prev=18446743970 next=";
            format!("# tracer: nop\n{first}{reset}\n")
        };
        let set_us = |reset: &str| -> Vec<(i64, i64)> {
            let spans = tsc_offsets_set(&trace(reset));
            spans
                .iter()
                .map(|s| (s.least_ns / 1_000, s.most_ns / 1_000))
                .collect()
        };
        let made = (1_795_000_000, 1_795_000_301);
        assert_eq!(set_us("18446743970"), [made]);
        assert_eq!(
            set_us("18446740000"),
            [made, (1_796_999_999, 1_797_000_051)]
        );
        assert!(tsc_offsets_set("").is_empty());
    }

    #[test]
    fn a_time_before_the_kernel_passes_within_its_bound_alone() {
        let wall = Wall {
            realtime_ns: 1_795_000_000_000_000_000,
            error_ns: 1_000_000,
        };
        let before = |took_ns| BeforeKernel {
            took_ns,
            error_ns: 500_000,
        };
        let zero = |took_ns| tsc_zero(wall, 2_000_000_000, before(took_ns));
        // 10 s at 100 ppm are 1 ms: with the others 2.5 ms.
        let set_ns = wall.realtime_ns - 10_000_000_000;
        let set = Span {
            least_ns: set_ns,
            most_ns: set_ns + 1_000,
        };
        for took_ns in [7_997_502_000, 8_000_000_000, 8_002_499_000] {
            assert!(zero(took_ns).meets(set), "{took_ns}: {:?}", zero(took_ns));
        }
        for took_ns in [0, 7_997_490_000, 8_002_502_000] {
            assert!(!zero(took_ns).meets(set), "{took_ns}: {:?}", zero(took_ns));
        }
    }
}
