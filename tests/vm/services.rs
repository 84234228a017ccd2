//! A failure means that a service of NVIDIA's starts too early, twice, with too many rights or not
//! at all, or that one that fails, hangs or floods delays a GPU or goes unreported. The daemons are
//! stand-ins (tests/guest/services.rs).

use super::harness::{
    Booted, CONFIDENTIAL, Guest, Outcome, TestContext, VmTest, error_has, events, gpus_of, named,
};
use anyhow::{Context, Result, ensure};
use kata_gpu_init::services::service_table::{Argument, Name, SERVICES};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Level, Record};
use std::collections::BTreeSet;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "services_start_in_the_order_of_their_needs",
        run: topologies,
    },
    VmTest {
        name: "a_service_that_is_wanted_and_missing_is_an_error",
        run: without,
    },
    VmTest {
        name: "a_service_has_the_privileges_of_its_row_and_no_more",
        run: privileges,
    },
    VmTest {
        name: "with_cgroups_of_version_1_services_and_containers_run",
        run: cgroup_v1,
    },
    VmTest {
        name: "fabric_managers_configuration_is_made_from_the_packages",
        run: configuration,
    },
    VmTest {
        name: "a_failed_daemon_is_reported_at_its_death_with_its_last_lines",
        run: failures,
    },
    VmTest {
        name: "a_daemon_restarts_after_pauses_that_grow",
        run: restarts,
    },
    VmTest {
        name: "a_flood_of_a_services_lines_costs_bounded_records",
        run: flood,
    },
    VmTest {
        name: "a_new_worker_starts_no_service_twice",
        run: worker_dies,
    },
    VmTest {
        name: "a_daemon_that_hangs_delays_no_gpu_and_no_container",
        run: hangs,
    },
    VmTest {
        name: "nvlsm_and_fabric_manager_get_the_first_open_port",
        run: ports,
    },
    VmTest {
        name: "a_service_vm_has_its_switches_and_keeps_partitions",
        run: service_vm,
    },
    VmTest {
        name: "services_end_in_reverse_order_after_the_agent",
        run: ends,
    },
];

/// Fabric manager's configuration as its package has it, in short.
const PACKAGE: &str = "# Fabric Manager \
    configuration\nLOG_LEVEL=4\nLOG_FILE_NAME=/var/log/fabricmanager.log\nDAEMONIZE=1\n\
                       LOG_USE_SYSLOG=1\nFABRIC_MODE=0\n\
                           STATE_FILE_NAME=/var/tmp/fabricmanager.state\n\
                           PARTITION_RAIL_POLICY=greedy\n";
const FM_PACKAGE: &str = "usr/share/nvidia/nvswitch/fabricmanager.cfg";

fn guest() -> Guest {
    with_services(Guest::with("fakepci.gpus=2"))
}

/// The guest with the programs of all services, and their configurations, in its image.
pub fn with_services(guest: Guest) -> Guest {
    SERVICES
        .iter()
        .fold(guest, |guest, service| with_service(guest, service.name))
}

/// The guest with one service's program and its package's configuration in its image.
pub fn with_service(guest: Guest, name: Name) -> Guest {
    let guest = match name {
        Name::FabricManager => guest.file(FM_PACKAGE, PACKAGE.as_bytes()),
        Name::ImexDaemon => guest.file(
            "etc/nvidia-imex/config.cfg",
            b"LOG_LEVEL=4\nDAEMONIZE=1\nLOG_FILE_NAME=/var/log/nvidia-imex.log\n",
        ),
        Name::Nvlsm | Name::Persistenced | Name::HostEngine | Name::DcgmExporter => guest,
    };
    let program = SERVICES
        .iter()
        .filter(|service| service.name == name)
        .find_map(|service| service.programs.first());
    program.into_iter().fold(guest, |guest, path| {
        guest.file(path, b"#!/usr/bin/test-programs\n")
    })
}

fn of<'a>(records: &'a [Record], kind: Kind, name: &str, service: &str) -> Vec<&'a Record> {
    named(records, kind, name)
        .into_iter()
        .filter(|r| r.fields.get("service").is_some_and(|s| s == service))
        .collect()
}

/// The `number`-th start of a service.
fn start_of(booted: &Booted, service: &str, number: usize) -> Result<(Record, Record)> {
    booted.span_of(names::SERVICE_START, ("service", service), number)
}

/// The golden streams of `events` have the plan and the starts of each topology; here is their
/// order, where each waits for another.
fn topologies(context: &TestContext) -> Result<Outcome> {
    let booted = guest()
        .append(&format!("gpuinit.topology=blackwell-fabric {CONFIDENTIAL}"))
        .boot(context, "blackwell")?;
    let starts =
        ["nvlsm", "fabricmanager", "persistenced"].map(|service| start_of(&booted, service, 1));
    let [nvlsm, manager, persistenced] = starts;
    let (nvlsm, manager, persistenced) = (nvlsm?, manager?, persistenced?);
    ensure!(
        nvlsm.1.seq < manager.0.seq && manager.1.seq < persistenced.0.seq,
        "{nvlsm:?}, {manager:?}, {persistenced:?}"
    );
    for (_, end) in [&nvlsm, &manager, &persistenced] {
        ensure!(end.error.is_none(), "{end:?}");
    }
    ensure!(
        persistenced.0.seq > booted.event(names::SETTLED)?.seq
            && persistenced.1.fields["uvm"]
                .as_str()
                .is_some_and(|uvm| uvm.starts_with("off: ")),
        "{persistenced:?}"
    );
    // By the incumbent's word, in its order, in a guest of GPUs only.
    let booted = guest()
        .append(&format!(
            "nvrc.dcgm=on gpuinit.imex-daemon=on {CONFIDENTIAL}"
        ))
        .boot(context, "dcgm")?;
    ensure!(
        start_of(&booted, "dcgm-exporter", 1)?.0.seq > start_of(&booted, "hostengine", 1)?.1.seq,
        "the exporter came first"
    );
    start_of(&booted, "imex-daemon", 1)?;
    let (_, persistenced) = start_of(&booted, "persistenced", 1)?;
    ensure!(
        persistenced.fields["uvm"]
            .as_str()
            .is_some_and(|uvm| uvm.starts_with("on: ")),
        "{persistenced:?}"
    );
    Ok(Outcome::Passed)
}

fn without(context: &TestContext) -> Result<Outcome> {
    let booted =
        Guest::with("fakepci.gpus=2 gpuinit.topology=hopper-fabric").boot(context, "missing")?;
    let plan = booted.event(names::SERVICE_PLAN)?;
    error_has(&plan, &["fabricmanager is wanted"])?;
    booted.settles(2, 0)?;
    Ok(Outcome::Passed)
}

/// Waits for a line of a service.
fn line(booted: &Booted, service: &str, text: &str) -> Result<Record> {
    booted.record(text, |r| {
        r.name == names::SERVICE_LOG
            && r.fields.get("service").is_some_and(|s| s == service)
            && r.fields
                .get("text")
                .and_then(|t| t.as_str())
                .is_some_and(|t| t.contains(text))
    })
}

fn privileges(context: &TestContext) -> Result<Outcome> {
    let accounts: BTreeSet<&str> = SERVICES
        .iter()
        .flat_map(|service| service.accounts())
        .collect();
    let user_of = |account: &str| {
        990 + accounts
            .iter()
            .position(|other| *other == account)
            .unwrap_or_default()
    };
    let passwd: String = accounts
        .iter()
        .map(|name| format!("{name}:x:{0}:{0}::/:/bin/false\n", user_of(name)))
        .collect();
    let on: Vec<String> = SERVICES
        .iter()
        .map(|service| format!("gpuinit.{}=on", service.name))
        .collect();
    let status = |path: &str| {
        format!(
            "standin.{}=status",
            path.rsplit('/').next().unwrap_or_default()
        )
    };
    let shown: Vec<String> = SERVICES
        .iter()
        .filter_map(|service| service.programs.first())
        .map(|path| status(path))
        .collect();
    let words = format!("{} {}", on.join(" "), shown.join(" "));
    let booted = guest()
        .file("etc/passwd", passwd.as_bytes())
        .append(&words)
        .boot(context, "all")?;
    for service in &SERVICES {
        let name = service.name.name();
        let record = line(&booted, name, "status Uid=")?;
        let text = record.fields["text"].as_str().unwrap_or_default();
        let is = |key: &str, wanted: &str| -> Result<()> {
            let value = text
                .split(' ')
                .find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
            ensure!(
                value == Some(wanted),
                "{name}: {key} is {value:?}, its row has {wanted}: {text}"
            );
            Ok(())
        };
        let kept = service
            .capabilities
            .iter()
            .fold(0_u64, |mask, capability| mask | 1 << (*capability as u32));
        let (kept, none) = (format!("{kept:016x}"), format!("{:016x}", 0));
        is("CapBnd", &kept)?;
        is("CapInh", &none)?;
        is("CapAmb", &none)?;
        is("NoNewPrivs", "1")?;
        is("oom", &service.oom_score.to_string())?;
        is("cgroup", &format!("0::/gpu-services/{name}"))?;
        // Another user than root has none of the capabilities.
        let user = service
            .account
            .map_or("0".into(), |account| user_of(account).to_string());
        let effective = if service.account.is_some() {
            &none
        } else {
            &kept
        };
        is("CapEff", effective)?;
        is("CapPrm", effective)?;
        is("Uid", &[user.as_str(); 4].join(","))?;
        is("Gid", &[user.as_str(); 4].join(","))?;
        if service.account.is_some() {
            is("Groups", &user)?;
        }
        // Programs that drop by themselves have options for it.
        for argument in service.arguments {
            if let Argument::OwnAccount(option, account) = argument {
                line(&booted, name, &format!("{option} {account}"))?;
            }
        }
    }
    Ok(Outcome::Passed)
}

/// Services have cgroups of their own in version 2 only. The agent, as PID 1, mounts version 1.
fn cgroup_v1(context: &TestContext) -> Result<Outcome> {
    let booted = guest()
        .cgroup_v1()
        .append(
            "gpuinit.persistenced=on standin.nvidia-persistenced=status \
            testagent.containers=all:all",
        )
        .script("settled>file:/proc/self/mounts")
        .boot(context, "v1")?;
    booted.settles(2, 0)?;
    let all = booted.created("all")?;
    ensure!(gpus_of(&all) == 2, "{all:?}");
    let mounts = booted.agent("file", |_| true)?;
    let text = mounts.get("text");
    ensure!(
        text.contains("cgroup /sys/fs/cgroup/devices cgroup ") && !text.contains("cgroup2"),
        "these are not cgroups of version 1: {mounts:?}"
    );
    let status = line(&booted, "persistenced", "status Uid=")?;
    let text = status.fields["text"].as_str().unwrap_or_default();
    // The file has a line for each controller; the first one ends the status.
    ensure!(text.contains("cgroup=") && text.ends_with(":/"), "{text}");
    booted.has_no(names::SERVICE_ENDED)?;
    Ok(Outcome::Passed)
}

/// The values of each topology, and a file that is not a configuration, are unit tests of
/// `configuration`; here the daemon reads what was made.
fn configuration(context: &TestContext) -> Result<Outcome> {
    let booted = guest()
        .append("gpuinit.topology=hopper-fabric nvrc.fm.rail.policy=symmetric")
        .boot(context, "hopper")?;
    line(&booted, "fabricmanager", "mode 0 rails symmetric")?;
    Ok(Outcome::Passed)
}

fn ports(context: &TestContext) -> Result<Outcome> {
    // The first port is closed, and nvlsm makes no socket: it is late, and keeps nobody waiting for
    // ever.
    let booted = guest()
        .append(
            "fakepci.gpus=2 fakepci.device=0x2901 nvidia.barfw_ms=50 fakepci.cx7=2 \
            mlx5_ib.closed=1 standin.nvlsm=no-socket",
        )
        .boot(context, "second")?;
    for service in ["nvlsm", "fabricmanager"] {
        let (_, end) = start_of(&booted, service, 1)?;
        ensure!(
            end.error.is_none() && end.fields["port_guid"] == "0xb83fd20300d41a21",
            "{end:?}"
        );
        line(&booted, service, "-g 0xb83fd20300d41a21")?;
    }
    // Fabric manager opens GPUs at its start: an open of one that initialises would stall the
    // others.
    line(&booted, "fabricmanager", "found 2 of 2 GPUs up")?;
    let late = booted.record("the missing socket", |r| {
        r.name == names::SERVICE_LATE
            && r.error
                .iter()
                .any(|e| e.contains("fm_sm_ipc.socket is not there"))
    })?;
    let manager = start_of(&booted, "fabricmanager", 1)?.0;
    ensure!(
        manager.seq > late.seq && manager.seq > booted.event(names::SETTLED)?.seq,
        "fabric manager did not wait: {manager:?}"
    );
    // Without a port that is open, no program can work: each port has its reason. Switches behind
    // management functions need no driver of NVIDIA's.
    let booted = guest()
        .append("fakepci.gpus=0 fakepci.cx7=2 mlx5_ib.closed=2")
        .boot(context, "none")?;
    let (_, end) = start_of(&booted, "nvlsm", 1)?;
    let error = end.error.unwrap_or_default();
    ensure!(
        error.matches("closed to subnet managers").count() == 2,
        "{error}"
    );
    no_load_fails(&booted)?;
    Ok(Outcome::Passed)
}

fn no_load_fails(booted: &Booted) -> Result<()> {
    let records = booted.records();
    let failed = records
        .iter()
        .find(|r| r.name == names::MODULE_LOAD && r.error.is_some());
    ensure!(failed.is_none(), "{failed:?}");
    Ok(())
}

fn service_vm(context: &TestContext) -> Result<Outcome> {
    let booted = guest()
        .append(
            "fakepci.gpus=0 fakepci.switches=2 nvidia.switches=2 \
            standin.nv-fabricmanager=dies-once:300",
        )
        .script("service.start!end>nodes")
        .boot(context, "switches")?;
    let nodes = booted.agent("nodes", |_| true)?;
    let names: Vec<&str> = nodes.get("names").split(' ').collect();
    for node in [
        "nvidiactl",
        "nvidia-nvlink",
        "nvidia-nvswitchctl",
        "nvidia-nvswitch0",
        "nvidia-nvswitch1",
    ] {
        ensure!(names.contains(&node), "no {node}: {names:?}");
    }
    // Which partitions are active is not lost: the next start is a restart.
    let (_, second) = start_of(&booted, "fabricmanager", 2)?;
    ensure!(second.error.is_none(), "{second:?}");
    line(&booted, "fabricmanager", "mode 1 rails greedy again")?;
    no_load_fails(&booted)?;
    Ok(Outcome::Passed)
}

fn failures(context: &TestContext) -> Result<Outcome> {
    let booted = guest()
        .append(&format!(
            "{CONFIDENTIAL} gpuinit.topology=hopper-fabric \
            standin.nv-fabricmanager=dies-once:3000 standin.nvidia-persistenced=fail \
            gpuinit.imex-daemon=on standin.nvidia-imex=crash testagent.containers=all:all"
        ))
        .boot(context, "failures")?;
    for (service, words) in [
        (
            "persistenced",
            &[
                "exit status 1",
                "failed to initialize",
                "Failed to query NVIDIA devices",
            ][..],
        ),
        ("imex-daemon", &["about to crash\\u{1b}[2J"]),
    ] {
        let (_, start) = start_of(&booted, service, 1)?;
        let ended = booted.record(service, |r| {
            r.name == names::SERVICE_ENDED && r.fields["service"] == service
        })?;
        // The lines of a daemon that fails before it is ready are in the start's error.
        let lines = ended.fields.get("lines").and_then(|lines| lines.as_str());
        let said = start.error.iter().map(String::as_str).chain(lines);
        let said = said.collect::<Vec<_>>().join("; ");
        ensure!(
            words.iter().all(|word| said.contains(word)),
            "{service}: {said}"
        );
        // At its death, not when it would be late.
        let records = booted.records();
        let late = of(&records, Kind::Event, names::SERVICE_LATE, service);
        ensure!(
            late.iter().all(|late| late.seq > ended.seq),
            "{service}: {late:?}"
        );
        ensure!(
            service != "persistenced" || !ended.fields.contains_key("restart_ms"),
            "restarted in a confidential guest: {ended:?}"
        );
    }
    let logged = line(&booted, "persistenced", "Failed to query NVIDIA devices")?;
    ensure!(
        logged.level == Level::Warn,
        "an error in syslog is not a warning: {logged:?}"
    );
    // Fabric manager starts again in a confidential guest as well.
    start_of(&booted, "fabricmanager", 2)?;
    booted.created("all")?;
    booted.settles(2, 0)?;
    Ok(Outcome::Passed)
}

fn restarts(context: &TestContext) -> Result<Outcome> {
    let words = "gpuinit.topology=hopper-fabric standin.nv-fabricmanager=dies-once:300 \
        gpuinit.persistenced=on standin.nvidia-persistenced=fail";
    let booted = guest().append(words).boot(context, "plain")?;
    start_of(&booted, "fabricmanager", 2)?;
    let (_, third) = start_of(&booted, "persistenced", 3)?;
    ensure!(third.error.is_some(), "{third:?}");
    let records = booted.records();
    let ended = of(&records, Kind::Event, names::SERVICE_ENDED, "fabricmanager");
    let ended = ended
        .first()
        .context("fabric manager's end is not reported")?;
    ensure!(
        ended.fields["status"] == "exit status 3" && ended.fields["restart_ms"] == 1000,
        "{ended:?}"
    );
    ensure!(
        ended.fields["lines"]
            .as_str()
            .is_some_and(|l| l.ends_with("last words")),
        "{ended:?}"
    );
    let pauses: Vec<_> = of(&records, Kind::Event, names::SERVICE_ENDED, "persistenced")
        .iter()
        .map(|r| r.fields["restart_ms"].clone())
        .collect();
    ensure!(
        pauses.get(..2) == Some(&[1000.into(), 2000.into()]),
        "{pauses:?}"
    );
    Ok(Outcome::Passed)
}

fn flood(context: &TestContext) -> Result<Outcome> {
    let words =
        format!("{CONFIDENTIAL} standin.nvidia-persistenced=flood testagent.containers=all:all");
    let booted = guest().append(&words).boot(context, "flood")?;
    let (begin, end) = start_of(&booted, "persistenced", 1)?;
    ensure!(end.error.is_none(), "{end:?}");
    booted.created("all")?;
    let records = booted.records();
    let lines = of(&records, Kind::Event, names::SERVICE_LOG, "persistenced");
    let seconds = (end.boottime_ns - begin.boottime_ns) / 1_000_000_000 + 10;
    ensure!(
        lines.len() as u64 <= 100 + 20 * seconds,
        "{} records in {seconds} s",
        lines.len()
    );
    let dropped: u64 = lines
        .iter()
        .filter_map(|r| r.fields.get("dropped")?.as_u64())
        .sum();
    ensure!(lines.len() >= 100, "{} lines", lines.len());
    Ok(Outcome::Measured(format!(
        "40,000 lines in {seconds} s at most: {} records, {dropped} lines counted in them",
        lines.len()
    )))
}

fn worker_dies(context: &TestContext) -> Result<Outcome> {
    // The worker dies while persistenced's parent still waits: until that is ready, it has two
    // processes. Sleeps as proof, kept: nothing announces when a service that is started twice
    // would be.
    let booted = guest()
        .append(
            "gpuinit.topology=hopper-fabric gpuinit.persistenced=on \
            standin.nvidia-persistenced=hang testagent.containers=all:all",
        )
        .script(
            "service.start!end>serves:persistenced=2+services+kill;process.died>sleep:0;\
            settled>sleep:2000+services+sleep:500+services+sleep:3",
        )
        .boot(context, "waiting")?;
    booted.created("all")?;
    booted.record("services found", |r| {
        r.kind == Kind::Begin
            && r.name == names::SERVICE_START
            && r.fields.get("found").is_some_and(|f| f == true)
    })?;
    booted.did("sleep:3")?;
    let lines = booted.lines();
    let seen: Vec<&str> = lines
        .iter()
        .filter(|l| l.get("msg") == "services")
        .map(|l| l.get("all"))
        .collect();
    ensure!(
        seen.len() == 3
            && seen.iter().all(|s| *s == seen[0])
            && seen[0].contains("fabricmanager=")
            && seen[0].contains("persistenced="),
        "{seen:#?}"
    );
    let records = booted.records();
    for service in ["fabricmanager", "persistenced"] {
        let starts = of(&records, Kind::Begin, names::SERVICE_START, service);
        ensure!(starts.len() == 2, "{service}: {starts:?}");
    }
    // A confidential guest whose persistenced ends while no worker watches it.
    let booted = guest()
        .append(CONFIDENTIAL)
        .script(
            "service.start!end>serves:persistenced=1+stop+kill-service:persistenced+kill;\
            service.ended>services",
        )
        .boot(context, "unwatched")?;
    let services = booted.agent("services", |_| true)?;
    ensure!(
        !services.get("all").contains("persistenced"),
        "{services:?}"
    );
    let ended = booted.event(names::SERVICE_ENDED)?;
    error_has(&ended, &["stays off"])?;
    Ok(Outcome::Passed)
}

fn hangs(context: &TestContext) -> Result<Outcome> {
    let mut booted = guest()
        .append(&format!(
            "{CONFIDENTIAL} gpuinit.topology=hopper-fabric standin.nvidia-persistenced=hang \
            standin.nv-fabricmanager=hang testagent.containers=first:0;all:all"
        ))
        .script("service.late>services")
        .boot(context, "hang")?;
    booted.created("first")?;
    booted.created("all")?;
    booted.settles(2, 0)?;
    let lockdown = booted.event(names::LOCKDOWN)?;
    let late = booted.event(names::SERVICE_LATE)?;
    ensure!(
        late.fields["service"] == "persistenced" && late.fields["waited_ms"] == 20_000,
        "{late:?}"
    );
    ensure!(lockdown.seq < late.seq, "the lockdown waited for a service");
    // Nothing is killed.
    let services = booted.agent("services", |_| true)?;
    ensure!(
        services.get("all").contains("persistenced="),
        "{services:?}"
    );
    ensure!(
        events(&booted.records(), names::SERVICE_ENDED).is_empty(),
        "a service has ended"
    );
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

fn ends(context: &TestContext) -> Result<Outcome> {
    let mut booted = guest()
        .append(
            "gpuinit.agent=child gpuinit.topology=hopper-fabric gpuinit.persistenced=on \
            testagent.poweroff=on",
        )
        .script("service.start!end>sleep:0;service.start!end>sleep:0")
        .boot(context, "child")?;
    booted.exit()?;
    let console = booted.console.text();
    let at = |text: &str| {
        console
            .find(text)
            .with_context(|| format!("no {text:?} on the console"))
    };
    let order = [
        at("service persistenced has ended")?,
        at("service fabricmanager has ended")?,
        at("kata-agent has ended")?,
    ];
    ensure!(order.is_sorted(), "{order:?}");
    let records = booted.records();
    ensure!(
        named(&records, Kind::Begin, names::SERVICE_START).len() == 2,
        "a service was started again"
    );
    Ok(Outcome::Passed)
}
