//! NVIDIA's services, by stand-ins (tests/services.rs): which start and when, what becomes of those
//! that fail, end, hang or write too much, and what a dead worker leaves.

use super::harness::{Booted, CONFIDENTIAL, Guest, Outcome, TestContext, VmTest, named};
use anyhow::{Context, Result, ensure};
use kata_gpu_init::gpu::topology::Topology;
use kata_gpu_init::services::service_table::{Argument, Name, SERVICES, Start};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Level, Record};
use std::collections::BTreeSet;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "each_topology_starts_its_services_and_no_others",
        run: topologies,
    },
    VmTest {
        name: "a_guest_without_services_has_no_events_of_them",
        run: without,
    },
    VmTest {
        name: "a_service_has_the_privileges_of_its_row_and_no_more",
        run: privileges,
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
        name: "a_daemon_restarts_unless_the_guest_is_confidential",
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
    with_services(Guest::new().append("fakepci.gpus=2"))
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

/// Waits for the end of the `number`-th start of a service.
fn start_of(booted: &Booted, service: &str, number: usize) -> Result<(Record, Record)> {
    let begins = booted
        .receiver
        .wait_several(super::harness::DEADLINE, number, |r| {
            r.kind == Kind::Begin
                && r.name == names::SERVICE_START
                && r.fields.get("service").is_some_and(|s| s == service)
        })
        .with_context(|| format!("{service} was not started {number} times"))?;
    let begin = begins.get(number - 1).context("no such start")?.clone();
    let end = booted.record(service, |r| r.kind == Kind::End && r.span == begin.span)?;
    Ok((begin, end))
}

/// Waits until the init has decided about every service; returns those that start.
fn planned(booted: &Booted) -> Result<BTreeSet<String>> {
    let plans = booted.events(names::SERVICE_PLAN, SERVICES.len())?;
    ensure!(
        plans.iter().all(|r| r.fields.contains_key("reason")),
        "{plans:?}"
    );
    let starts = plans.iter().filter(|r| r.fields["starts"] == true);
    Ok(starts
        .filter_map(|r| Some(r.fields["service"].as_str()?.to_string()))
        .collect())
}

/// One guest for each service that starts: the tests of the [plan](kata_gpu_init::services) have
/// every topology.
fn topologies(context: &TestContext) -> Result<Outcome> {
    for (topology, words) in [
        ("gpus", ""),
        ("gpus", CONFIDENTIAL),
        ("protected-pcie", CONFIDENTIAL),
        ("blackwell-fabric", CONFIDENTIAL),
        ("service-vm", "fakepci.gpus=0"),
    ] {
        let confidential = words == CONFIDENTIAL;
        let case = format!("{topology}{}", if confidential { "-cc" } else { "" });
        let booted = guest()
            .append(&format!("gpuinit.topology={topology} {words}"))
            .boot(context, &case)?;
        let planned = planned(&booted).with_context(|| case.clone())?;
        let column = Topology::named(topology).context("no such topology")?;
        let wanted = SERVICES
            .iter()
            .filter(|service| match service.start_in(column) {
                Start::Always => true,
                Start::IfConfidential => confidential,
                Start::IfManaged | Start::WhenAsked => false,
            });
        let wanted: BTreeSet<String> = wanted.map(|service| service.name.to_string()).collect();
        ensure!(
            planned == wanted,
            "{case}: {planned:?} start instead of {wanted:?}"
        );
        for service in &wanted {
            let (_, end) = start_of(&booted, service, 1)?;
            ensure!(end.error.is_none(), "{case}: {end:?}");
        }
        let records = booted.receiver.records();
        ensure!(
            named(&records, Kind::Begin, names::SERVICE_START).len() == wanted.len(),
            "{case}: more were started"
        );
        if wanted.contains("persistenced") {
            let (begin, end) = start_of(&booted, "persistenced", 1)?;
            ensure!(
                begin.boottime_ns >= booted.event(names::SETTLED)?.boottime_ns,
                "{case}: before the GPUs were settled"
            );
            let uvm = end.fields["uvm"].as_str().unwrap_or_default();
            ensure!(
                uvm.starts_with(if topology == "gpus" { "on: " } else { "off: " }),
                "{case}: {uvm}"
            );
            if wanted.contains("fabricmanager") {
                ensure!(
                    begin.seq > start_of(&booted, "fabricmanager", 1)?.1.seq,
                    "{case}: before fabric manager was ready"
                );
            }
        }
        if wanted.contains("nvlsm") {
            ensure!(
                start_of(&booted, "fabricmanager", 1)?.0.seq > start_of(&booted, "nvlsm", 1)?.1.seq,
                "{case}: before nvlsm"
            );
        }
    }
    // By the incumbent's word, in its order.
    let booted = guest()
        .append("nvrc.dcgm=on gpuinit.imex-daemon=on")
        .boot(context, "dcgm")?;
    ensure!(
        planned(&booted)?
            == ["dcgm-exporter", "hostengine", "imex-daemon"]
                .map(String::from)
                .into(),
        "{:?}",
        planned(&booted)?
    );
    ensure!(
        start_of(&booted, "dcgm-exporter", 1)?.0.seq > start_of(&booted, "hostengine", 1)?.1.seq,
        "the exporter came first"
    );
    start_of(&booted, "imex-daemon", 1)?;
    Ok(Outcome::Passed)
}

fn without(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::new()
        .append("fakepci.gpus=2 testagent.containers=all:all")
        .boot(context, "plain")?;
    booted.created("all")?;
    booted.event(names::LOCKDOWN)?;
    let records = booted.receiver.records();
    ensure!(
        records.iter().all(|r| !r.name.starts_with("service.")),
        "there are service events"
    );
    // Wanted, and not there: an error.
    let booted = Guest::new()
        .append("fakepci.gpus=2 gpuinit.topology=hopper-fabric")
        .boot(context, "missing")?;
    let plan = booted.event(names::SERVICE_PLAN)?;
    ensure!(
        plan.error
            .as_ref()
            .is_some_and(|e| e.contains("fabricmanager is wanted")),
        "{plan:?}"
    );
    ensure!(booted.settled()? == (2, 0), "{:?}", booted.settled()?);
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

fn configuration(context: &TestContext) -> Result<Outcome> {
    let of = |topology: &str, words: &str| {
        guest().append(&format!("gpuinit.topology={topology} {words}"))
    };
    for (case, guest, expected) in [
        (
            "hopper",
            of("hopper-fabric", "nvrc.fm.rail.policy=symmetric"),
            "mode 0 rails symmetric",
        ),
        ("service", of("service-vm", ""), "mode 1 rails greedy"),
        (
            "blackwell",
            of("blackwell-fabric", CONFIDENTIAL),
            "mode 0 rails symmetric",
        ),
    ] {
        let booted = guest
            .append(
                "testagent.guest=script \
                testagent.script=service.start!end>file:/run/kata-gpu-init/fabricmanager.cfg",
            )
            .boot(context, case)?;
        line(&booted, "fabricmanager", expected).with_context(|| case.to_string())?;
    }
    // The package's file is missing, or unknown to fabric manager, or no configuration at all.
    for (case, guest, expected) in [
        (
            "missing",
            guest().without_added(FM_PACKAGE),
            "put the file of the daemon's package into the image",
        ),
        (
            "unknown",
            guest().file(FM_PACKAGE, b"NO_SUCH_OPTION=1\n"),
            "unknown option NO_SUCH_OPTION",
        ),
        (
            "odd",
            guest().file(FM_PACKAGE, b"#!/bin/sh\nexec true\n"),
            "line 2: neither KEY=VALUE nor a comment",
        ),
    ] {
        let booted = guest
            .append("gpuinit.topology=hopper-fabric testagent.containers=all:all")
            .boot(context, case)?;
        let ended = booted.record(case, |r| {
            r.name == names::SERVICE_ENDED
                && (r.error.iter().any(|e| e.contains(expected))
                    || r.fields
                        .get("lines")
                        .is_some_and(|l| l.to_string().contains(expected)))
        })?;
        ensure!(ended.fields.get("restart_ms").is_some(), "{ended:?}");
        booted.created("all")?;
    }
    Ok(Outcome::Passed)
}

fn ports(context: &TestContext) -> Result<Outcome> {
    let blackwell = "fakepci.gpus=2 fakepci.device=0x2901 nvidia.barfw_ms=50 fakepci.cx7=2";
    let booted = guest()
        .append(&format!("{blackwell} mlx5_ib.closed=1"))
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
    let manager = start_of(&booted, "fabricmanager", 1)?.0;
    ensure!(
        manager.boottime_ns >= booted.event(names::SETTLED)?.boottime_ns,
        "it started before all GPUs were settled"
    );
    // Without a port that is open, neither program can work: each port has its reason.
    let booted = guest()
        .append(&format!("{blackwell} mlx5_ib.closed=2"))
        .boot(context, "none")?;
    let (_, end) = start_of(&booted, "nvlsm", 1)?;
    let error = end.error.unwrap_or_default();
    ensure!(
        error.matches("closed to subnet managers").count() == 2,
        "{error}"
    );
    // A subnet manager without its socket is late, and keeps nobody waiting for ever.
    let booted = guest()
        .append(&format!("{blackwell} standin.nvlsm=no-socket"))
        .boot(context, "no-socket")?;
    let late = booted.record("the missing socket", |r| {
        r.name == names::SERVICE_LATE
            && r.error
                .iter()
                .any(|e| e.contains("fm_sm_ipc.socket is not there"))
    })?;
    ensure!(
        start_of(&booted, "fabricmanager", 1)?.0.seq > late.seq,
        "fabric manager did not wait for nvlsm's socket"
    );
    Ok(Outcome::Passed)
}

fn service_vm(context: &TestContext) -> Result<Outcome> {
    let words = "fakepci.gpus=0 fakepci.switches=2 nvidia.switches=2 \
        standin.nv-fabricmanager=dies-once:300";
    let script = "testagent.guest=script testagent.script=service.start!end>nodes";
    let booted = guest()
        .append(&format!("{words} {script}"))
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
    let records = booted.receiver.records();
    ensure!(
        records
            .iter()
            .all(|r| r.name != names::MODULE_LOAD || r.error.is_none()),
        "the driver does not load for switches alone"
    );
    // Switches behind management functions need no driver of NVIDIA's.
    let booted = guest()
        .append("fakepci.gpus=0 fakepci.cx7=1")
        .boot(context, "management")?;
    for service in ["nvlsm", "fabricmanager"] {
        let (_, end) = start_of(&booted, service, 1)?;
        ensure!(end.error.is_none(), "{end:?}");
    }
    ensure!(
        !booted
            .receiver
            .records()
            .iter()
            .any(|r| r.name == names::MODULE_LOAD && r.error.is_some()),
        "a load failed"
    );
    Ok(Outcome::Passed)
}

fn failures(context: &TestContext) -> Result<Outcome> {
    for (fault, words) in [
        (
            "fail",
            vec![
                "exit status 1",
                "failed to initialize",
                "Failed to query NVIDIA devices",
            ],
        ),
        ("crash", vec!["exit status 1", "about to crash\\u{1b}[2J"]),
    ] {
        let words_of = format!(
            "{CONFIDENTIAL} standin.nvidia-persistenced={fault} testagent.containers=all:all"
        );
        let booted = guest().append(&words_of).boot(context, fault)?;
        let (begin, end) = start_of(&booted, "persistenced", 1)?;
        let error = end.error.clone().context("it did not fail")?;
        ensure!(
            words.iter().all(|word| error.contains(word)),
            "{fault}: {error}"
        );
        if fault == "fail" {
            let logged = line(&booted, "persistenced", "Failed to query NVIDIA devices")?;
            ensure!(
                logged.level == Level::Warn,
                "an error in syslog is no warning: {logged:?}"
            );
        }
        ensure!(
            end.boottime_ns - begin.boottime_ns < 15_000_000_000,
            "{fault}: reported after {} ns",
            end.boottime_ns - begin.boottime_ns
        );
        let ended = booted.event(names::SERVICE_ENDED)?;
        ensure!(
            !ended.fields.contains_key("restart_ms"),
            "{fault}: restarted in a confidential guest: {ended:?}"
        );
        booted.created("all")?;
        ensure!(
            booted.settled()? == (2, 0),
            "{fault}: {:?}",
            booted.settled()?
        );
    }
    Ok(Outcome::Passed)
}

fn restarts(context: &TestContext) -> Result<Outcome> {
    let words = "gpuinit.topology=hopper-fabric standin.nv-fabricmanager=dies-once:300 \
        gpuinit.persistenced=on standin.nvidia-persistenced=fail";
    let booted = guest().append(words).boot(context, "plain")?;
    start_of(&booted, "fabricmanager", 2)?;
    let (_, third) = start_of(&booted, "persistenced", 3)?;
    ensure!(third.error.is_some(), "{third:?}");
    let records = booted.receiver.records();
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
    // Fabric manager starts again in a confidential guest as well, persistenced does not.
    let words = format!(
        "{CONFIDENTIAL} gpuinit.topology=hopper-fabric standin.nv-fabricmanager=dies-once:3000 \
        standin.nvidia-persistenced=dies:200"
    );
    let booted = guest().append(&words).boot(context, "confidential")?;
    start_of(&booted, "fabricmanager", 2)?;
    let ended = booted.record("persistenced's end", |r| {
        r.name == names::SERVICE_ENDED && r.fields["service"] == "persistenced"
    })?;
    ensure!(!ended.fields.contains_key("restart_ms"), "{ended:?}");
    let records = booted.receiver.records();
    ensure!(
        of(&records, Kind::Begin, names::SERVICE_START, "persistenced").len() == 1,
        "persistenced was started again"
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
    let records = booted.receiver.records();
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
    let words = "gpuinit.topology=hopper-fabric gpuinit.persistenced=on";
    // Two deaths, the second one while persistenced's parent still waits: until that, it has two
    // processes. Both services are up at the end of the second start.
    let up = "service.start!end>sleep:0;service.start!end>serves:persistenced=1";
    let waits = "service.start!end>serves:persistenced=2";
    for (case, more, when) in [
        ("ready", "", up),
        ("waiting", "standin.nvidia-persistenced=hang", waits),
    ] {
        // Sleeps as proof, kept: nothing announces when a service that is started twice would be.
        let later = "process.died>sleep:0;settled>sleep:2000+services+sleep:500+services+sleep:3";
        let script = format!("{when}+services+kill;{later}");
        let words = format!(
            "{words} {more} testagent.containers=all:all testagent.guest=script \
            testagent.script={script}"
        );
        let booted = guest().append(&words).boot(context, case)?;
        booted.created("all")?;
        let mut seen = Vec::new();
        booted.record("services found", |r| {
            r.kind == Kind::Begin
                && r.name == names::SERVICE_START
                && r.fields.get("found").is_some_and(|f| f == true)
        })?;
        booted.agent("script", |l| l.get("did") == "sleep:3")?;
        for line in booted
            .console
            .agent_lines()
            .iter()
            .filter(|l| l.get("msg") == "services")
        {
            seen.push(line.get("all").to_string());
        }
        let first = seen.first().context("no services seen")?;
        ensure!(
            first.contains("fabricmanager=") && first.contains("persistenced="),
            "{case}: {first}"
        );
        ensure!(
            seen.len() == 3 && seen.iter().all(|s| s == first),
            "{case}: {seen:#?}"
        );
        let records = booted.receiver.records();
        let found = |service| of(&records, Kind::Begin, names::SERVICE_START, service).len();
        ensure!(
            found("fabricmanager") == 2 && found("persistenced") == 2,
            "{case}: {} and {} starts",
            found("fabricmanager"),
            found("persistenced")
        );
    }
    // A confidential guest whose persistenced ends while no worker watches it.
    let script = "service.start!end>serves:persistenced=1+stop+kill-service:persistenced+kill;\
        service.ended>services";
    let words = format!("{CONFIDENTIAL} testagent.guest=script testagent.script={script}");
    let booted = guest().append(&words).boot(context, "unwatched")?;
    let services = booted.agent("services", |_| true)?;
    ensure!(
        !services.get("all").contains("persistenced"),
        "{services:?}"
    );
    let ended = booted.event(names::SERVICE_ENDED)?;
    ensure!(
        ended
            .error
            .as_ref()
            .is_some_and(|e| e.contains("stays off")),
        "{ended:?}"
    );
    Ok(Outcome::Passed)
}

fn hangs(context: &TestContext) -> Result<Outcome> {
    let script = "service.late>services";
    let words = format!(
        "{CONFIDENTIAL} gpuinit.topology=hopper-fabric standin.nvidia-persistenced=hang \
        standin.nv-fabricmanager=hang testagent.containers=first:0;all:all testagent.guest=script \
        testagent.script={script}"
    );
    let mut booted = guest().append(&words).boot(context, "hang")?;
    booted.created("first")?;
    booted.created("all")?;
    ensure!(booted.settled()? == (2, 0), "{:?}", booted.settled()?);
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
        named(
            &booted.receiver.records(),
            Kind::Event,
            names::SERVICE_ENDED
        )
        .is_empty(),
        "a service has ended"
    );
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

fn ends(context: &TestContext) -> Result<Outcome> {
    let script = "settled>sleep:3000";
    let words = format!(
        "gpuinit.agent=child gpuinit.topology=hopper-fabric gpuinit.persistenced=on \
        testagent.poweroff=on testagent.guest=script testagent.script={script}"
    );
    let mut booted = guest().append(&words).boot(context, "child")?;
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
    let records = booted.receiver.records();
    ensure!(
        named(&records, Kind::Begin, names::SERVICE_START).len() == 2,
        "a service was started again"
    );
    Ok(Outcome::Passed)
}
