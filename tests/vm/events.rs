//! A failure means that the stream holds the boot up, lacks a record, cannot be read in the guest
//! or from the host's side, or has another shape than its golden file.

use super::harness::{CONFIDENTIAL, Guest, Listener, Outcome, TestContext, VmTest, complete};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{DEFAULT_PORT, Kind, Line, Record};
use serde_json::Value;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "no_listener_and_a_deaf_one_delay_nothing",
        run: never_delays,
    },
    VmTest {
        name: "readers_in_the_guest_get_the_stream",
        run: guest_reader,
    },
    VmTest {
        name: "the_stream_of_a_full_boot_has_its_golden_shape",
        run: golden,
    },
    VmTest {
        name: "the_stream_of_each_topology_has_its_golden_shape",
        run: topologies,
    },
];

/// Everything comes to its end while there is no listener, or one that never reads: a wait for one
/// would have none. A late listener gets all of it.
fn never_delays(context: &TestContext) -> Result<Outcome> {
    for (name, listener) in [("absent", Listener::Absent), ("deaf", Listener::Deaf)] {
        let booted = Guest::with("testagent.containers=all:all fakepci.enable_ms=50")
            .listener(listener)
            .boot(context, name)?;
        booted.created("all")?;
        ensure!(
            booted
                .console
                .wait_text(super::harness::DEADLINE, "\"msg\":\"settled\""),
            "{name}: the console has no settled line"
        );
        match listener {
            Listener::Deaf => ensure!(
                booted.receiver.wait_deaf(super::harness::DEADLINE),
                "the guest never connected"
            ),
            _ => booted.receiver.arrive()?,
        }
        if !matches!(listener, Listener::Absent) {
            continue;
        }
        booted.settles(8, 0)?;
        let connected = booted.record("sink connected", |r| {
            r.name == names::SINK && r.fields.get("state") == Some(&"connected".into())
        })?;
        let records = booted.records();
        complete(&records)?;
        ensure!(records[0].name == names::INIT_START, "{:?}", records[0]);
        // PID 1 is the agent before the first try to reach anybody, and all is over before one
        // succeeds.
        let exec = booted.record("agent.exec", |r| r.name == names::AGENT_EXEC)?;
        let tried = records
            .iter()
            .find(|r| r.name == names::SINK && r.fields.get("sink") == Some(&"vsock".into()))
            .context("no try")?;
        let settled = booted.event(names::SETTLED)?;
        ensure!(
            exec.seq < tried.seq && settled.seq < connected.seq,
            "{exec:?}, {tried:?}, {settled:?}, {connected:?}"
        );
        let (garbage, headers) = (booted.receiver.garbage(), booted.receiver.headers());
        ensure!(
            garbage.is_empty() && headers.len() == 1 && headers[0].first_seq == 0,
            "{garbage:?} {headers:?}"
        );
    }
    Ok(Outcome::Passed)
}

/// Over the socket in the guest, from its file, and from the host over the guest's own port.
fn guest_reader(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::with("testagent.guest=listener").boot(context, "reader")?;
    let seen = booted.agent("listener", |_| true)?;
    ensure!(seen.get("error").is_empty(), "{seen:?}");
    let header: Value = serde_json::from_str(seen.get("first"))?;
    ensure!(
        header["stream"]["boot_id"] == booted.receiver.headers()[0].boot_id.as_str(),
        "another boot: {header}"
    );
    let settled = booted.event(names::SETTLED)?;
    ensure!(
        seen.get("records").parse::<u64>()? == settled.seq + 2
            && seen.get("file_lines").parse::<u64>()? > 50,
        "until seq {} the reader saw {seen:?}",
        settled.seq
    );
    // Hybrid vsock, host to guest: the device answers OK when the guest listens on that port, and
    // hangs up when it does not.
    let connect = |port: u32| -> Result<_> {
        let mut stream = UnixStream::connect(booted.vm.uds())?;
        stream.set_read_timeout(Some(super::harness::DEADLINE))?;
        stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
        Ok(BufReader::new(stream).lines())
    };
    let mut lines = connect(DEFAULT_PORT)?;
    let mut next = || lines.next().context("the stream ends")?.context("read");
    let answer = next()?;
    ensure!(answer.starts_with("OK "), "answer to CONNECT: {answer:?}");
    ensure!(
        matches!(decode(next()?.as_bytes()), Ok(Line::Header(_))),
        "no header first"
    );
    for expected in 0..=settled.seq {
        let line = next()?;
        ensure!(
            matches!(decode(line.as_bytes()), Ok(Line::Record(r)) if r.seq == expected),
            "not seq {expected}: {line}"
        );
    }
    // Negative control: nothing listens on the next port.
    let refused = connect(DEFAULT_PORT + 1)?.next();
    ensure!(
        !matches!(&refused, Some(Ok(line)) if line.starts_with("OK ")),
        "a port without a listener answers {refused:?}"
    );
    Ok(Outcome::Passed)
}

/// Fields whose values differ from boot to boot.
const VOLATILE: &[&str] = &[
    "realtime_ns",
    "kmsg_seq",
    "printk_us",
    "minor",
    "bytes",
    "inode",
    "bind_inode",
    "pid",
    "first_enable_ms",
    "before_kernel_ns",
    "error_ns",
    "hz",
    "offset_ns",
    "late",
    "moved",
    "stay",
    "held_by",
    "main_pid",
    "build",
];

/// The stream in a form that is the same for every boot: times and volatile values masked, span ids
/// by name, what runs at once in order of GPU.
fn canonical(records: &[Record]) -> String {
    let names_of: HashMap<u64, &str> = records
        .iter()
        .filter_map(|r| Some((r.span?, r.name.as_str())))
        .collect();
    let of_service = |r: &Record| r.span.zip(r.fields.get("service").cloned());
    let services: HashMap<u64, Value> = records.iter().filter_map(of_service).collect();
    let of_module = |r: &Record| r.span.zip(r.fields.get("module").cloned());
    let modules: HashMap<u64, Value> = records.iter().filter_map(of_module).collect();
    let mut lines: Vec<(String, String)> = Vec::new();
    for r in records {
        // How often the agent looked, what it did meanwhile, for what the lane waited, which sink
        // was when ready, uevents and publications in between depend on the machine's speed. So
        // does how a service's lines are joined to records.
        let by_speed = [
            names::AGENT_LOOK,
            names::AGENT_CONTAINER,
            names::AGENT_HOOK,
            names::SINK,
            names::UEVENT,
            names::CDI_PUBLISH,
            names::LANE_WAIT,
            names::SERVICE_LOG,
        ];
        if matches!(r.kind, Kind::Kmsg) || by_speed.contains(&r.name.as_str()) {
            continue;
        }
        // A first part is seen to end only if somebody runs before the initialisation is over.
        let mut seen = r.clone();
        seen.fields.remove("attach_ms");
        let mut value = serde_json::to_value(seen).unwrap_or_default();
        for key in ["seq", "boottime_ns"] {
            value[key] = Value::from("#");
        }
        for key in ["span", "parent"] {
            if let Some(id) = value.get(key).and_then(Value::as_u64) {
                value[key] = Value::from(names_of.get(&id).copied().unwrap_or("?"));
            }
        }
        if let Some(after) = value.get_mut("after").and_then(Value::as_array_mut) {
            let name = |id: &Value| id.as_u64().and_then(|id| names_of.get(&id).copied());
            after.retain(|id| name(id) != Some(names::LANE_WAIT));
            after
                .iter_mut()
                .for_each(|id| *id = Value::from(name(id).unwrap_or("?")));
            if after.is_empty()
                && let Some(keys) = value.as_object_mut()
            {
                keys.remove("after");
            }
        }
        for key in VOLATILE
            .iter()
            .filter(|k| !value["fields"][**k].is_null())
            .collect::<Vec<_>>()
        {
            value["fields"][*key] = Value::from("#");
        }
        // Before the GPUs and after them in the order of the stream; each GPU for itself, and what
        // runs beside it.
        let beside = [
            names::GPU_PUBLISHED,
            names::AGENT_EXEC,
            names::CLOCK_PRINTK,
            names::DRIVER_LOOK,
            names::DRIVER_NODES,
            names::DRIVER_FILES,
        ]
        .contains(&r.name.as_str());
        // An end has no field that names its service: the step of its begin has.
        let service = r
            .span
            .and_then(|span| services.get(&span))
            .or(r.fields.get("service"));
        let group = if let Some(service) = service {
            format!("service {service}")
        } else if let Some(module) = r.span.and_then(|span| modules.get(&span)) {
            // Modules of services and of the driver are loaded by threads of their own.
            format!("module.load {module}")
        } else if beside {
            format!("{} {:?}", r.name, r.gpu)
        } else {
            r.gpu.map_or_else(
                || {
                    format!(
                        "{:?}",
                        r.name == names::SETTLED || r.name == names::LOCKDOWN
                    )
                },
                |g| format!("gpu {g}"),
            )
        };
        lines.push((group, value.to_string()));
    }
    let mut out = String::new();
    let mut groups: Vec<&String> = lines.iter().map(|(g, _)| g).collect();
    groups.sort();
    groups.dedup();
    for group in groups {
        lines.iter().filter(|(g, _)| g == group).for_each(|(_, l)| {
            out.push_str(l);
            out.push('\n');
        });
    }
    out
}

fn golden(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::with(IN_ORDER)
        .append("fakepci.gpus=2 testagent.containers=all:all")
        .boot(context, "golden")?;
    booted.created("all")?;
    booted.event(names::LOCKDOWN)?;
    let records = booted.records();
    let is = canonical(&records);
    // Nothing of the shape is lost by masking: another order of one GPU's steps must show.
    let mut swapped = records.clone();
    if let Some(r) = swapped.iter_mut().find(|r| r.name == names::GPU_BOUND) {
        r.name = names::GPU_USABLE.into();
    }
    ensure!(
        canonical(&swapped) != is,
        "the golden form does not see a changed step"
    );
    compare_with_golden(context, "boot-2-gpus", &records)?;
    Ok(Outcome::Passed)
}

/// One GPU after another, so that the order within the driver's part is the same every time.
const IN_ORDER: &str = "gpuinit.bind=pipelined gpuinit.init=serial";

/// Name and words of each topology; services that start there.
const TOPOLOGIES: [(&str, &str, usize); 6] = [
    ("none", "fakepci.gpus=0", 0),
    (
        "hopper-fabric",
        "fakepci.gpus=2 fakepci.switches=2 nvidia.switches=2 nvidia.fabric_state=2",
        1,
    ),
    (
        "protected-pcie",
        "fakepci.gpus=2 fakepci.switches=2 nvidia.switches=2 nvidia.fabric_state=2 nvidia.cc=1 \
        nvrc.smi.srs=1",
        2,
    ),
    (
        "blackwell-fabric",
        "fakepci.gpus=2 fakepci.device=0x2901 nvidia.barfw_ms=50 fakepci.cx7=2 \
        nvidia.fabric_state=2",
        2,
    ),
    (
        "service-vm",
        "fakepci.gpus=0 fakepci.switches=2 nvidia.switches=2",
        1,
    ),
    // The fabric, which NVML alone knows of, is complete after the GPUs were taken back.
    (
        "shared-fabric",
        "fakepci.gpus=2 nvidia.fabric_state=2 testagent.guest=script \
        testagent.script=gpu.held!begin/1>fabric:3",
        0,
    ),
];

fn topologies(context: &TestContext) -> Result<Outcome> {
    for (topology, words, services) in TOPOLOGIES {
        let guest = super::services::with_services(Guest::new())
            .append(IN_ORDER)
            .append(words);
        let guest = match topology {
            "none" | "service-vm" => guest,
            "protected-pcie" => guest.nvml().append(CONFIDENTIAL),
            _ => guest.nvml(),
        };
        let booted = guest.boot(context, topology)?;
        booted.settled().with_context(|| topology.to_string())?;
        booted.events(
            names::SERVICE_PLAN,
            kata_gpu_init::services::service_table::SERVICES.len(),
        )?;
        // Without a GPU the lockdown waits for one that may come.
        if !words.contains("fakepci.gpus=0") {
            booted.event(names::LOCKDOWN)?;
            booted.events(
                names::GPU_PUBLISHED,
                if topology == "shared-fabric" { 4 } else { 2 },
            )?;
        }
        // Two reports of each GPU: before and after the fabric is complete.
        if words.contains("nvidia.fabric_state") {
            booted.events(names::GPU_HEALTH, 4)?;
        }
        let starts = |r: &Record| r.kind == Kind::Begin && r.name == names::SERVICE_START;
        let begins = booted
            .receiver
            .wait_several(super::harness::DEADLINE, services, starts)
            .context("a service was not started")?;
        for begin in begins {
            booted.end_of(&begin)?;
        }
        compare_with_golden(context, &format!("boot-{topology}"), &booted.records())
            .with_context(|| topology.to_string())?;
    }
    Ok(Outcome::Passed)
}

/// Compares a stream with its golden file, or writes that file.
fn compare_with_golden(context: &TestContext, name: &str, records: &[Record]) -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("golden/{name}.ndjson"));
    complete(records)?;
    // One file for all architectures.
    let clock = |of: &str| format!("\"clocksource\":\"{of}\"");
    let is = canonical(records).replace(&clock(context.clocksource()), &clock("hpet"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().context("no folder")?)?;
        std::fs::write(&path, &is)?;
    }
    let should = std::fs::read_to_string(&path)
        .with_context(|| format!("read {} (UPDATE_GOLDEN=1 writes it)", path.display()))?;
    if is != should {
        let at = is
            .lines()
            .zip(should.lines())
            .position(|(a, b)| a != b)
            .unwrap_or_else(|| is.lines().count().min(should.lines().count()));
        anyhow::bail!(
            "line {} differs from {} (UPDATE_GOLDEN=1 refreshes it; read the diff):\n  is     \
            {}\n  should {}",
            at + 1,
            path.display(),
            is.lines().nth(at).unwrap_or("(end)"),
            should.lines().nth(at).unwrap_or("(end)")
        );
    }
    Ok(())
}
