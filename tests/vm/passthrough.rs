//! GPUs with large BARs that a real host passes through: VFIO, an IOMMU, QEMU and KVM on the emulated
//! host. The functions are NVMe controllers with the ids of GPUs, and their driver is the simulator's.

use super::harness::{AgentLine, BOOTS, EmulatedHost, Guest, KvmGuest, KvmImage, Outcome, Size, TestContext, VmTest};
use super::host_guests::{Boot, SERVICE, event, sent};
use super::service;
use super::stalls::{self, PROBES};
use anyhow::{Context, Result, ensure};
use kata_gpu_init::events::names;
use kata_gpu_init::events::record::Record;
use std::time::UNIX_EPOCH;

pub const TESTS: &[VmTest] = &[
    VmTest { name: "emulated_host_passes_gpus_with_large_bars_to_a_guest", run: passed_through },
    VmTest { name: "what_waits_for_a_mapping_waits_for_a_simulated_one", run: simulated },
];

/// QEMU's name, and what makes an H100 of it in the guest.
fn function(address: &str, port: usize) -> String {
    format!("vfio-pci,host={address},bus=port{port},id=gpu{port},x-pci-vendor-id=0x10de,x-pci-device-id=0x2330,x-pci-class-code=0x030200")
}

/// Ports for two functions, with room for their BARs.
const PORTS: &str = "-device pcie-root-port,id=port0,chassis=1,slot=1,pref64-reserve=2G \
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

/// One GPU that is there from the start, one that is plugged in; gives where QEMU mapped their BARs:
/// of the first one in firmware and kernel alone, of the second one as it is bound.
fn cold_and_hot(host: &mut EmulatedHost, image: &KvmImage, gpus: &[String]) -> Result<String> {
    let trace = "-msg timestamp=on -trace vfio_listener_region_add_ram";
    let devices = format!("{PORTS} -device {} {trace}", function(&gpus[0], 0));
    let guest = KvmGuest::start_with(host, image, "0a1b", "cold", 33, "testagent.containers=all:all", &devices)?;
    sent(host, &guest, &event(names::SETTLED))?;
    guest.wait_lines(host, 1, "\"msg\":\"container \\(created\\|failed\\)\"")?;
    let console = guest.console(host)?;
    let created = console.lines().filter_map(AgentLine::parse).find(|line| line.get("msg") == "container created");
    let nodes = created.with_context(|| format!("no container: {console}"))?.get("nodes").to_string();
    ensure!(nodes.contains("/dev/nvidia0 195:0 666"), "nodes: {nodes}");
    let cold = mappings(&console);

    guest.monitor(host, &format!("device_add {}", function(&gpus[1], 1)))?;
    host.until("the GPU that was plugged in", &format!("grep -q '\"name\":\"{}\",\"gpu\":\"{HOT}\"' {BOOTS}/*.ndjson", names::GPU_USABLE))?;
    let boot = Boot::only(host, &guest)?;
    let all = mappings(&guest.console(host)?);
    let hot = &all[cold.len()..];

    let began = boot.wall("init.start", |r| r.name == names::INIT_START)?;
    // The kernel offers a GPU that is plugged in to the driver at once: enabling is part of the probe.
    let of_hot = |r: &Record| r.gpu.is_some_and(|gpu| gpu.to_string() == HOT);
    let from = boot.wall("record of the GPU that was plugged in", of_hot)?;
    let to = boot.wall("gpu.bound of the GPU that was plugged in", |r| of_hot(r) && r.name == names::GPU_BOUND)?;
    let (first, last) = (from.realtime_ns - from.error_ns as i64, to.realtime_ns + to.error_ns as i64);
    let began_ns = began.realtime_ns - began.error_ns as i64;
    ensure!(!cold.is_empty() && cold.iter().all(|at| *at < began_ns), "mapped at {cold:?} ns, the init began at {began_ns} ns");
    ensure!(
        !hot.is_empty() && hot.iter().all(|at| (first..last).contains(at)),
        "mapped at {hot:?} ns, there from {first} ns, bound at {last} ns"
    );
    Ok(format!("mapped {} times by firmware and kernel, {} times when plugged in", cold.len(), hot.len()))
}

/// Address in the guest of the GPU that is plugged in.
const HOT: &str = "0000:02:00.0";

/// CLOCK_REALTIME in ns of each mapping of a large BAR, as QEMU has traced it:
/// `TIME vfio_listener_region_add_ram region_add [ram] FIRST - LAST [ADDRESS]`.
fn mappings(log: &str) -> Vec<i64> {
    let parse = |line: &str| -> Option<i64> {
        let (time, region) = line.split_once(" vfio_listener_region_add_ram region_add [ram] ")?;
        let mut ends = region.split_whitespace().filter_map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
        let (first, last) = (ends.next()?, ends.next()?);
        let time = humantime::parse_rfc3339(time).ok()?.duration_since(UNIX_EPOCH).ok()?;
        (last - first + 1 == Size::BAR_BYTES).then(|| i64::try_from(time.as_nanos()).ok())?
    };
    log.lines().filter_map(parse).collect()
}

/// What waits while QEMU maps the large BAR of a function that the init leaves alone.
fn stalls_under_kvm(host: &mut EmulatedHost, image: &KvmImage, gpu: &str) -> Result<String> {
    host.run("kill $(cat /run/guests/0a1b/pid) && mkdir /run/shared")?;
    let disk = "-drive if=none,id=disk,format=raw,readonly=on,file=/var/guests/initrd.cpio -device virtio-blk-pci,drive=disk";
    let devices = format!("{disk} {PORTS} -device vfio-pci,host={gpu},bus=port0");
    let words = "testagent.guest=stalls testagent.function=0000:01:00.0";
    let guest = KvmGuest::start_shared(host, image, "2c3d", 34, words, "/run/shared", &devices)?;
    guest.wait_lines(host, 1, &format!("\"msg\":\"{}\"", stalls::OVER))?;
    judge(&guest.console(host)?, &[])
}

fn simulated(context: &TestContext) -> Result<Outcome> {
    let words = "fakepci.gpus=1 fakepci.enable_ms=1000 hardware.override=other testagent.guest=stalls testagent.function=0001:00:00.0";
    let booted = Guest::new().append(words).boot(context, "guest")?;
    booted.agent(stalls::OVER, |_| true)?;
    let absent = ["a line on hvc0", "a disk's block", "a refused vsock connection", "a file by virtio-fs"];
    Ok(Outcome::Measured(judge(&booted.console.text(), &absent)?))
}

/// Compares what waited with what waits on a real host; gives the longest call of each probe.
fn judge(console: &str, absent: &[&str]) -> Result<String> {
    let lines: Vec<AgentLine> = console.lines().filter_map(AgentLine::parse).collect();
    let mut shown = vec![];
    for probe in PROBES {
        let line = lines.iter().find(|line| line.get("msg") == stalls::MESSAGE && line.get("probe") == probe.name);
        let line = line.with_context(|| format!("{}: no line: {console}", probe.name))?;
        if absent.contains(&probe.name) {
            continue;
        }
        ensure!(line.get("absent").is_empty(), "{}: {}", probe.name, line.get("absent"));
        let number = |key| line.get(key).parse::<f64>().with_context(|| format!("{}: {key}={:?}", probe.name, line.get(key)));
        let (longest, window) = (number("longest_ms")?, number("window_ms")?);
        ensure!(window > 50.0, "{}: the mapping took {window} ms", probe.name);
        shown.push(format!("{} {longest:.0} of {window:.0} ms", probe.name));
        ensure!(stalls::waited(longest, window) == probe.waits, "{}, waits: {}", shown.join(", "), probe.waits);
    }
    Ok(shown.join(", "))
}
