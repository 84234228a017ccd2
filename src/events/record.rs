//! The wire format, schema 1: one JSON object per line, at most [`MAX_LINE`] bytes including the newline.
//!
//! A stream (vsock, unix socket, `boot.ndjson`) is a sequence of lines of three shapes, told apart by one key:
//!
//! - `{"schema":1,"stream":{..}}`: a [`Header`], first on every connection and first in the file;
//! - `{"schema":1,"seq":..,"kind":..}`: a [`Record`];
//! - `{"schema":1,"pong":ID,"boottime_ns":..}`: the answer to a peer's [`ping`]; never stored in the ring, has no `seq`.
//!
//! Records with one (boot id, seq) are the same record: a reader that reconnects sees them again and drops them. A `seq` that is
//! missing was lost, and the stream says so with a `stream.lost` event. Begin and end of a span are separate records, so that a step
//! that hangs is visible as a span without end. Unknown keys are ignored; another `schema` is refused.
//!
//! Nothing here trusts the other side: [`decode`] takes any bytes and gives a [`Line`] or a [`DecodeError`], never panics.

use crate::pci::PciAddress;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt;

/// The only schema version this code writes and reads.
pub const SCHEMA: u32 = 1;
/// Longest line in bytes, newline included. The writer cuts texts to stay below; a reader drops longer lines and counts them.
pub const MAX_LINE: usize = 16 * 1024;
/// Longest `name` in bytes.
pub const MAX_NAME: usize = 64;
/// The vsock port the stream uses on both sides: the host's collector listens on it at CID 2, the guest for local readers.
pub const DEFAULT_PORT: u32 = 10241;

/// What a record tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A span starts; `span` is its id.
    Begin,
    /// The span `span` ends; `error` is there if it failed.
    End,
    /// Something happened at one point in time; `parent` is the span it happened in.
    Event,
    /// A line of the kernel's log; `fields.text` is the line, `fields.kmsg_seq` and `fields.printk_us` are the kernel's own.
    Kmsg,
}

/// How much a record matters to somebody who reads along.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

/// One line of the stream's body.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub schema: u32,
    /// Position in this boot's stream, from 0, without gaps at the writer.
    pub seq: u64,
    /// CLOCK_BOOTTIME in ns when it happened (not when it was written): time since the kernel started.
    pub boottime_ns: u64,
    pub kind: Kind,
    /// What: a dotted name of [`names`], e.g. `gpu.bind`.
    pub name: String,
    #[serde(default, skip_serializing_if = "is_default")]
    pub level: Level,
    /// The GPU it is about, by guest PCI address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<PciAddress>,
    /// Id of the span that begins or ends here; unique in the boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub span: Option<u64>,
    /// Id of the span around this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<u64>,
    /// Ids of the spans whose end this span had to wait for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<u64>,
    /// Why the span failed, or what the event complains about: what, where, which value, what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub fields: Map<String, Value>,
}

impl Record {
    /// A record of this kind and name, of boot time 0 and with nothing else in it; `seq` is the ring's to give.
    pub fn new(kind: Kind, name: &str) -> Self {
        Self {
            schema: SCHEMA,
            seq: 0,
            boottime_ns: 0,
            kind,
            name: name.to_string(),
            level: Level::default(),
            gpu: None,
            span: None,
            parent: None,
            after: vec![],
            error: None,
            fields: Map::new(),
        }
    }
}

fn is_default(level: &Level) -> bool {
    *level == Level::default()
}

/// Who speaks: the first line of every connection and file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// `/proc/sys/kernel/random/boot_id`: names the boot, also across reconnects.
    pub boot_id: String,
    /// Version of kata-gpu-init.
    pub version: String,
    /// `uname -r` of the guest.
    pub kernel: String,
    /// `seq` of the first record that follows; more than 0 when older ones no longer fit the ring.
    pub first_seq: u64,
}

/// Answer to a ping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pong {
    /// The id of the ping.
    pub pong: u64,
    /// CLOCK_BOOTTIME of the guest in ns when the ping was read.
    pub boottime_ns: u64,
}

/// One decoded line.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    Header(Header),
    Record(Box<Record>),
    Pong(Pong),
}

/// Why a line is not a line of this format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// More than [`MAX_LINE`] bytes.
    TooLong(usize),
    /// Not JSON, or not of one of the three shapes; the text says where.
    Malformed(String),
    /// Another schema version than [`SCHEMA`].
    Schema(u64),
    /// A value that no writer of this schema produces.
    Invalid(&'static str),
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(n) => write!(f, "line of {n} bytes, the limit is {MAX_LINE}"),
            Self::Malformed(why) => write!(f, "not a record: {why}"),
            Self::Schema(v) => write!(f, "schema {v}, this program reads schema {SCHEMA}: use a matching version"),
            Self::Invalid(what) => write!(f, "invalid record: {what}"),
        }
    }
}

impl std::error::Error for DecodeError {}

#[derive(Deserialize)]
struct Version {
    schema: u64,
}

#[derive(Deserialize)]
struct Shape {
    stream: Option<Header>,
    pong: Option<u64>,
    boottime_ns: Option<u64>,
}

/// Decodes one line, with or without its newline. Checks form and limits; says nothing about truth.
pub fn decode(line: &[u8]) -> Result<Line, DecodeError> {
    if line.len() > MAX_LINE {
        return Err(DecodeError::TooLong(line.len()));
    }
    let malformed = |e: serde_json::Error| DecodeError::Malformed(e.to_string());
    // The version first: the rest of another version's line may have any shape.
    let version: Version = serde_json::from_slice(line).map_err(malformed)?;
    if version.schema != u64::from(SCHEMA) {
        return Err(DecodeError::Schema(version.schema));
    }
    let shape: Shape = serde_json::from_slice(line).map_err(malformed)?;
    if let Some(header) = shape.stream {
        return if is_boot_id(&header.boot_id) { Ok(Line::Header(header)) } else { Err(DecodeError::Invalid("boot_id is not a UUID")) };
    }
    if let (Some(pong), Some(boottime_ns)) = (shape.pong, shape.boottime_ns) {
        return Ok(Line::Pong(Pong { pong, boottime_ns }));
    }
    let record: Record = serde_json::from_slice(line).map_err(malformed)?;
    if record.name.is_empty() || record.name.len() > MAX_NAME || !record.name.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(DecodeError::Invalid("name is empty, too long or not printable"));
    }
    if matches!(record.kind, Kind::Begin | Kind::End) != record.span.is_some() {
        return Err(DecodeError::Invalid("begin and end need a span id, event and kmsg have none"));
    }
    Ok(Line::Record(Box::new(record)))
}

/// Whether a text has the form of a boot id: a lower-case UUID. A peer chooses this text, and it becomes a file name.
pub fn is_boot_id(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(i, b)| match i {
            8 | 13 | 18 | 23 => b == b'-',
            _ => matches!(b, b'0'..=b'9' | b'a'..=b'f'),
        })
}

fn line_of(value: &impl Serialize) -> String {
    // Structs of strings, numbers and maps with string keys: serialising them cannot fail.
    let mut line = serde_json::to_string(value).unwrap_or_else(|e| format!(r#"{{"schema":{SCHEMA},"unwritable":"{e}"}}"#));
    line.push('\n');
    line
}

/// The header as a line.
pub fn header_line(header: &Header) -> String {
    line_of(&serde_json::json!({ "schema": SCHEMA, "stream": header }))
}

/// The answer to a ping as a line.
pub fn pong_line(pong: Pong) -> String {
    line_of(&serde_json::json!({ "schema": SCHEMA, "pong": pong.pong, "boottime_ns": pong.boottime_ns }))
}

/// A record as a line of at most [`MAX_LINE`] bytes. A record that would be longer (a hostile log line) keeps its frame and loses its
/// fields, and says so in `fields.cut_bytes`.
pub fn record_line(record: &Record) -> String {
    let line = line_of(record);
    if line.len() <= MAX_LINE {
        return line;
    }
    let mut short = record.clone();
    short.fields = Map::from_iter([("cut_bytes".to_string(), Value::from(line.len()))]);
    short.after.truncate(64);
    short.error = short.error.map(|e| e.chars().take(512).collect());
    line_of(&short)
}

/// What a reader may send to a writer: `{"schema":1,"ping":ID}`, answered by a [`Pong`].
pub fn ping_line(id: u64) -> String {
    line_of(&serde_json::json!({ "schema": SCHEMA, "ping": id }))
}

/// The id in a ping line, or None for anything else.
pub fn ping(line: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Ping {
        schema: u32,
        ping: u64,
    }
    serde_json::from_slice::<Ping>(line).ok().filter(|p| p.schema == SCHEMA).map(|p| p.ping)
}

/// The names of spans and events. Spans are marked (span); the rest are events.
pub mod names {
    /// First instruction of PID 1. Fields: pid, version.
    pub const INIT_START: &str = "init.start";
    /// (span) Everything PID 1 does before it becomes the agent; the steps are its children.
    pub const STAGE0: &str = "stage0";
    pub const STAGE0_MOUNTS: &str = "stage0.mounts";
    pub const STAGE0_CONSOLE: &str = "stage0.console";
    pub const STAGE0_CONFIG: &str = "stage0.config";
    /// (span) Extension disks mounted before the agent; those of [`EXTENSION_DISKS`] on are its children.
    pub const STAGE0_EXTENSIONS: &str = "stage0.extensions";
    /// (span) Finding the disks of all declared extensions, and matching them one to one. Fields: declared (how many).
    pub const EXTENSION_DISKS: &str = "extension.disks";
    /// (span) One extension, from its verity table to its mount. Fields: extension (its name), device, bytes (of data), verity (true). As an event:
    /// data that failed its check after the boot.
    pub const EXTENSION: &str = "extension";
    /// (span) Opening the dm-verity device.
    pub const EXTENSION_VERITY: &str = "extension.verity";
    /// (span) Mounting it: the first reads, and so the check of the root hash.
    pub const EXTENSION_MOUNT: &str = "extension.mount";
    /// (span) Binding the driver's firmware over the kernel's directory.
    pub const EXTENSION_FIRMWARE: &str = "extension.firmware";
    /// (span) Adding the driver's libraries to the cache of the guest's loader.
    pub const EXTENSION_LIBRARIES: &str = "extension.libraries";
    /// A parameter that was set, accepted under another name, or refused. Fields: parameter, value, used.
    pub const CONFIG: &str = "config";
    /// (span) From just before execve until the kernel has replaced PID 1's program. `error` when it could not.
    pub const AGENT_EXEC: &str = "agent.exec";
    /// The agent opened the CDI spec (or its directory). Fields: what.
    pub const AGENT_LOOK: &str = "agent.look";
    /// A trace of the agent making or removing a container. Fields: what (made, init began, program
    /// began, removed), container (its id, with made and removed).
    pub const AGENT_CONTAINER: &str = "agent.container";
    /// A CDI hook of the init was started by the agent, or has ended. Fields: what. Hooks at once may be one event.
    pub const AGENT_HOOK: &str = "agent.hook";
    /// CLOCK_REALTIME beside CLOCK_BOOTTIME, to place log lines that carry wall time. Fields: realtime_ns.
    pub const CLOCK: &str = "clock";
    /// TSC when CLOCK_BOOTTIME was 0: the time since the VM's first vCPU was made, or since the end
    /// of QEMU's reset of the VM where that took over 1 s (src/tsc.rs), if the TSC began with it.
    /// Fields: before_kernel_ns, error_ns, hz (of the TSC), clocksource. x86_64 only.
    pub const CLOCK_TSC: &str = "clock.tsc";
    /// CLOCK_BOOTTIME minus the clock of the kernel's log, and how wrong that may be. Fields: offset_ns, error_ns (none: not bounded from above).
    pub const CLOCK_PRINTK: &str = "clock.printk";
    /// The host's CLOCK_REALTIME at this time, from the hypervisor. Fields: source, realtime_ns, error_ns.
    pub const CLOCK_HOST: &str = "clock.host";
    /// (span) The worker, from its first instruction until it looks for GPUs: its helpers, its runtime, what it listens to.
    pub const WORKER_START: &str = "worker.start";
    /// (span) Reading the GPUs from sysfs. Fields: gpus.
    pub const PCI_SCAN: &str = "pci.scan";
    /// (span) Reading the VPD of Mellanox functions, before any GPU is enabled; not where the topology does not depend on it. Fields: functions
    /// (read), management (those of them that manage NVSwitches). As an event: one that cannot be read.
    pub const PCI_VPD: &str = "pci.vpd";
    /// Kind of this guest, and why; another one after the first where GPUs came before the driver's load. Fields: topology (see `topology`), gpus,
    /// switches, management (how many functions manage switches), functions (their addresses), reason, decided_by (scan, parameter, nvml), nvlink
    /// (disabled: the driver is loaded with NVreg_NvLinkDisable=1; unchanged), nvlink_reason.
    pub const TOPOLOGY: &str = "topology";
    /// GPUs came after the driver was loaded, and the topology it was loaded with does not fit them. Fields: gpus.
    pub const TOPOLOGY_OUTGROWN: &str = "topology.outgrown";
    /// A GPU was found, or has another name since others came or went. Fields: index (the CDI name), device, inode (of its directory in sysfs),
    /// hot_plugged (where it was not in the boot scan), generation: of this and the next records of a GPU, how many times one came to this address
    /// before (none: never).
    pub const GPU_FOUND: &str = "gpu.found";
    /// (span) Looking for the driver in the image: its version, its options. The strategy depends on it.
    pub const DRIVER_LOOK: &str = "driver.look";
    /// How this boot binds and initialises, and why. Fields: bind, init, reason, gpus, driver, confidential, vcpus, first_enable_ms.
    pub const STRATEGY: &str = "strategy";
    /// (span) Writing sysfs `enable`: the host maps the BARs.
    pub const GPU_ENABLE: &str = "gpu.enable";
    /// (span) The next GPU is not enabled yet: this one is probed and goes through the first part of its initialisation undisturbed.
    pub const LANE_WAIT: &str = "lane.wait";
    /// The enable lane has a vCPU to itself. Fields: cpu, and interrupts: moved off it, late (moved when they arrive the next time), stay.
    pub const LANE_CPU: &str = "lane.cpu";
    /// (span) Loading one module. Fields: module; at the end: already (the kernel had it), unpacked (the format, where the init decompressed it).
    pub const MODULE_LOAD: &str = "module.load";
    /// (span) The nodes that every container needs, from the end of the driver's load on; the load of nvidia-uvm is its child.
    pub const DRIVER_NODES: &str = "driver.nodes";
    /// A line of modprobe.d that is not followed, or a soft dependency that is left out. Fields: module, note; `error` when it may be missed.
    pub const MODULE_CONFIG: &str = "module.config";
    /// (span) From the first try to bind until the driver has it.
    pub const GPU_BIND: &str = "gpu.bind";
    /// (span) Asking the driver for the minor of a GPU that it has bound; the driver looks at the GPU for that.
    pub const GPU_INFORMATION: &str = "gpu.information";
    /// The driver has the GPU. Fields: minor, bind_inode (of its link to the driver in sysfs).
    pub const GPU_BOUND: &str = "gpu.bound";
    /// (span) Making device nodes.
    pub const GPU_NODES: &str = "gpu.nodes";
    /// (span) Adapter initialisation, from open() until the driver says how it ended. Fields at the end: rc, status.
    pub const GPU_INIT: &str = "gpu.init";
    /// (span) The reset of a GPU that an earlier guest left half initialised: unbind, reset, bind; once per GPU, after its initialisation has failed.
    /// The GPU then comes again: another generation. Fields: method (flr, bus), reason.
    pub const GPU_RESET: &str = "gpu.reset";
    /// (span) Looking for the driver's user space. Fields at the end: version, mounts, links, manifest (whether that spared a scan). As an event: what
    /// could not be looked at, or why the manifest was not used.
    pub const DRIVER_FILES: &str = "driver.files";
    /// (span) Writing the CDI spec. Fields: ready (indices), pending, failed, bytes.
    pub const CDI_PUBLISH: &str = "cdi.publish";
    /// The GPU's CDI entry is resolvable from now on.
    pub const GPU_PUBLISHED: &str = "gpu.published";
    /// What containers can get besides GPUs' own nodes. With a GPU: displays, instances (how many it has now). Without: kind, devices, bytes (a spec of
    /// another kind is published). `error` when it is missing.
    pub const CDI_BESIDE: &str = "cdi.beside";
    /// Adapter initialisation is done. Field: uuid, where that is a name of GPUs.
    pub const GPU_USABLE: &str = "gpu.usable";
    /// The GPU will not be usable, or no longer is. Fields: step, reason (see `reason`), cure, bind_inode (where the driver has it); `error` is the sentence for people.
    pub const GPU_FAILED: &str = "gpu.failed";
    /// The GPU has left the bus or its driver, or is about to: it is no longer in the spec, and its descriptors are given up.
    pub const GPU_REMOVED: &str = "gpu.removed";
    /// The driver reported an error of a GPU. Fields: xid.
    pub const GPU_XID: &str = "gpu.xid";
    /// A GPU is still in a step after a deadline; nothing is killed. Fields: step, waited_ms, stack (of the task in the kernel, innermost first, where readable).
    pub const GPU_LATE: &str = "gpu.late";
    /// A PCI uevent of a GPU. Fields: action, driver.
    pub const UEVENT: &str = "uevent";
    /// All GPUs are usable or failed. Fields: usable, failed.
    pub const SETTLED: &str = "settled";
    /// (span) Asking NVML, once all GPUs are settled, in a helper process. Fields at the end: devices, driver, nvml.
    pub const NVML: &str = "nvml";
    /// Conditions that a GPU must meet before containers get it. Fields: waits_for (bind, initialisation, fabric, ready state, or several), reason.
    pub const READINESS: &str = "readiness";
    /// (span) A usable GPU is kept from containers, from the first answer of NVML until it is given. Fields: waits_for (the state by NVML), deadline_ms; at the end: state.
    pub const GPU_HELD: &str = "gpu.held";
    /// A GPU that containers could get is kept from them again (field reason), or has been kept for too long (fields waits_for, waited_ms; `error` with
    /// the cure).
    pub const GPU_WITHHELD: &str = "gpu.withheld";
    /// Containers get a GPU that does not work as it should. Fields: state (of its fabric, or of the ready state), reason.
    pub const GPU_DEGRADED: &str = "gpu.degraded";
    /// NVML's facts of a GPU. Fields, as far as driver and GPU have them: uuid, model, mig (instances, as GPU-INSTANCE/COMPUTE-INSTANCE=UUID), persistence, graphics_mhz, memory_mhz, power_mw, power_limit_mw, ecc,
    /// ecc_uncorrected, rows_remapped, remap_pending, remap_failed, throttle, fabric, fabric_status, fabric_health, clique, cluster, nvlinks, nvlinks_active;
    /// With `error` alone: what of it is wrong, or differs from what PCI and the driver's /proc say.
    pub const GPU_HEALTH: &str = "gpu.health";
    /// A clock range or a power limit of a GPU. Fields: what, min, max; `error` where it was refused.
    pub const GPU_SETTING: &str = "gpu.setting";
    /// Confidential-computing state of the GPUs. Fields: enabled, environment (production, simulated, unavailable), devtools, protected_pcie, ready.
    pub const CONFIDENTIAL: &str = "confidential";
    /// No more modules can be loaded from here on.
    pub const LOCKDOWN: &str = "lockdown";
    /// Records that a reader will never see. Fields: lost, at (which reader or source).
    pub const STREAM_LOST: &str = "stream.lost";
    /// A sink got its peer, or lost it. Fields: sink, state.
    pub const SINK: &str = "sink";
    /// The machine is about to power off; `error` says why.
    pub const POWER_OFF: &str = "power-off";
    /// The kernel gave no thread; it is asked again until it does.
    pub const THREAD_LATE: &str = "thread.late";
    /// Decision about a service of NVIDIA's. Fields: service, starts, reason, after (services). `error` when the image lacks what the guest needs.
    pub const SERVICE_PLAN: &str = "service.plan";
    /// (span) From the start of a service until it is ready. Fields: service, program, found (it runs since an earlier worker); at the end: main_pid,
    /// uvm (why persistenced has UVM persistence mode or not). `error` with the last lines where it ended instead.
    pub const SERVICE_START: &str = "service.start";
    /// A service is not ready after a deadline; nothing is killed. Fields: service, waited_ms, waits_for.
    pub const SERVICE_LATE: &str = "service.late";
    /// A service that was ready has ended. Fields: service, status, lines (its last ones), restart_ms (pause before the next start; none: it stays off).
    pub const SERVICE_ENDED: &str = "service.ended";
    /// A line that a service wrote, within bounds. Fields: service, from (output, syslog), text, dropped (lines before it that are not here).
    pub const SERVICE_LOG: &str = "service.log";
    /// A process of the init died. Fields: process, status.
    pub const PROCESS_DIED: &str = "process.died";
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Record {
        Record {
            schema: SCHEMA,
            seq: 7,
            boottime_ns: 1_500_000_000,
            kind: Kind::Begin,
            name: names::GPU_BIND.into(),
            level: Level::Info,
            gpu: Some("0001:00:03.0".parse().unwrap()),
            span: Some(4),
            parent: Some(1),
            after: vec![2, 3],
            error: None,
            fields: Map::from_iter([("strategy".to_string(), Value::from("concurrent"))]),
        }
    }

    #[test]
    fn a_record_survives_the_wire() {
        let record = sample();
        let line = record_line(&record);
        assert!(line.ends_with('\n'));
        assert_eq!(decode(line.as_bytes()), Ok(Line::Record(Box::new(record))));
    }

    #[test]
    fn the_wire_form_is_what_schema_1_promises() {
        assert_eq!(
            record_line(&sample()),
            concat!(
                r#"{"schema":1,"seq":7,"boottime_ns":1500000000,"kind":"begin","name":"gpu.bind","gpu":"0001:00:03.0","span":4,"parent":1,"#,
                r#""after":[2,3],"fields":{"strategy":"concurrent"}}"#,
                "\n"
            )
        );
    }

    #[test]
    fn header_and_pong_survive_the_wire() {
        let header =
            Header { boot_id: "0f7a1f8e-0000-4000-8000-00000000beef".into(), version: "0.1.0".into(), kernel: "6.1".into(), first_seq: 0 };
        assert_eq!(decode(header_line(&header).as_bytes()), Ok(Line::Header(header)));
        let pong = Pong { pong: 3, boottime_ns: 99 };
        assert_eq!(decode(pong_line(pong).as_bytes()), Ok(Line::Pong(pong)));
        assert_eq!(ping(ping_line(3).as_bytes()), Some(3));
    }

    #[test]
    fn what_is_not_a_record_is_refused_with_its_reason() {
        assert!(matches!(decode(b""), Err(DecodeError::Malformed(_))));
        assert!(matches!(decode(b"{\"schema\":1,\"seq\":1"), Err(DecodeError::Malformed(_))));
        assert!(matches!(decode(b"\xff\xfe\x00"), Err(DecodeError::Malformed(_))));
        assert_eq!(decode(br#"{"schema":2,"seq":1}"#), Err(DecodeError::Schema(2)));
        assert_eq!(decode(br#"{"schema":2,"stream":{"other":true},"pong":"x"}"#), Err(DecodeError::Schema(2)));
        assert_eq!(decode(&vec![b' '; MAX_LINE + 1]), Err(DecodeError::TooLong(MAX_LINE + 1)));
        let path = br#"{"schema":1,"stream":{"boot_id":"../../../../etc/passwd-aaaaaaaaaaaaa","version":"","kernel":"","first_seq":0}}"#;
        assert_eq!(decode(path), Err(DecodeError::Invalid("boot_id is not a UUID")));
        let unnamed = br#"{"schema":1,"seq":1,"boottime_ns":1,"kind":"event","name":"a\u001b[2J"}"#;
        assert!(matches!(decode(unnamed), Err(DecodeError::Invalid(_))));
    }

    #[test]
    fn an_over_long_record_is_cut_and_says_so() {
        let mut record = sample();
        record.fields.insert("text".into(), Value::from("x".repeat(3 * MAX_LINE)));
        let line = record_line(&record);
        assert!(line.len() <= MAX_LINE);
        let Ok(Line::Record(read)) = decode(line.as_bytes()) else { panic!("cut record does not decode") };
        assert!(read.fields.contains_key("cut_bytes"));
    }
}
