//! A failure means that `image verify` passes an image that does not boot, finds a fault in one
//! that does, or blames the wrong rule.

use crate::initrd::repack::{Case, content};
use crate::initrd::{Made, archive, directory, entries, file, gzip, image, link, made, program};
use kata_gpu_image::images::disk_image::hash_tree::State;
use kata_gpu_image::images::verify::image_rules::RULES;
use kata_gpu_image::images::verify::{Question, Report, check, verify_text};
use kata_gpu_init::gpu::topology::Topology;
use kata_gpu_init::services::configuration::package;
use kata_gpu_init::services::service_table::{Name, SERVICES};
use kata_gpu_report::data::text::Screen;
use kata_gpu_report::severity::Severity;
use kata_gpu_test_support::elf_stand_in as stand_in;
use std::collections::BTreeSet;
use std::sync::OnceLock;

pub const VERSION: &str = "550.163.01";
pub const KERNEL: &str = "6.18.5-nvidia-gpu";
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
const MANIFEST: &str = "usr/share/kata-gpu-init/driver-files.json";

fn module(version: Option<&str>, more: &str) -> Vec<u8> {
    let version = version.map_or(String::new(), |v| format!("version={v}\0"));
    stand_in::module(format!("{more}{version}vermagic={KERNEL} SMP mod_unload \0").as_bytes())
}

/// A program without a loader.
fn whole(name: &str) -> Made {
    program(name, stand_in::library(None, &[]))
}

/// A program with a loader, and the libraries that it needs.
fn needs(name: &str, libraries: &[&str]) -> Made {
    program(name, stand_in::program(LOADER, libraries, None))
}

fn library(path: &str, soname: &str, needed: &[&str]) -> Made {
    file(path, stand_in::library(Some(soname), needed))
}

fn libcuda() -> String {
    format!("usr/lib64/libcuda.so.{VERSION}")
}

fn nvml() -> String {
    format!("usr/lib64/libnvidia-ml.so.{VERSION}")
}

/// A guest with a driver, laid out as distributions do; without the list of its files.
pub fn guest() -> Vec<Made> {
    let firmware = format!(
        "firmware=nvidia/{VERSION}/gsp_ga10x.bin\0firmware=nvidia/{VERSION}/gsp_tu10x.bin\0"
    );
    let modules = format!("usr/lib/modules/{KERNEL}");
    let folders = ". dev proc sys run etc var usr usr/bin usr/own usr/lib usr/lib64 \
        usr/lib/modules usr/lib/firmware usr/lib/firmware/nvidia";
    let mut all: Vec<Made> = folders.split(' ').map(directory).collect();
    all.extend([
        directory(&modules),
        directory(&format!("{modules}/extra")),
        directory(&format!("usr/lib/firmware/nvidia/{VERSION}")),
        made("tmp", 0o041_777, ""),
        link("lib", "usr/lib"),
        link("lib64", "usr/lib64"),
        link("var/run", "../run"),
        whole("init"),
        needs("usr/bin/kata-agent", &["libc.so.6"]),
        program(
            "usr/bin/nvidia-smi",
            stand_in::program(LOADER, &["libc.so.6", "libown.so"], Some("$ORIGIN/../own")),
        ),
        library("usr/own/libown.so", "libown.so", &["libc.so.6"]),
        program(
            "usr/lib64/ld-linux-x86-64.so.2",
            stand_in::library(Some("ld-linux-x86-64.so.2"), &[]),
        ),
        library(
            "usr/lib64/libc.so.6",
            "libc.so.6",
            &["ld-linux-x86-64.so.2"],
        ),
        library(&libcuda(), "libcuda.so.1", &["libc.so.6"]),
        library(&nvml(), "libnvidia-ml.so.1", &["libc.so.6"]),
        file(&self::firmware("gsp_ga10x.bin"), "firmware"),
        file(&self::firmware("gsp_tu10x.bin"), "firmware"),
        file(
            &format!("{modules}/modules.dep"),
            "extra/nvidia-uvm.ko: extra/nvidia.ko extra/ecc.ko\nextra/nvidia.ko: \
             extra/ecc.ko\nextra/ecc.ko:\nextra/other.ko:\n",
        ),
        file(
            &format!("{modules}/extra/nvidia.ko"),
            module(Some(VERSION), &firmware),
        ),
        file(
            &format!("{modules}/extra/nvidia-uvm.ko"),
            module(Some(VERSION), ""),
        ),
        file(&format!("{modules}/extra/ecc.ko"), module(None, "")),
        file(&format!("{modules}/extra/other.ko"), module(None, "")),
    ]);
    all
}

/// The same with the list, as repack writes it.
fn listed() -> Vec<Made> {
    static LIST: OnceLock<Vec<u8>> = OnceLock::new();
    let list = LIST.get_or_init(|| {
        let case = Case::new("listed", &archive(&guest()));
        let (_, _, tree) = case.repack(|_| ()).unwrap();
        content(&tree, MANIFEST).unwrap()
    });
    let more = [
        directory("usr/share"),
        directory("usr/share/kata-gpu-init"),
        file(MANIFEST, list),
    ];
    guest().into_iter().chain(more).collect()
}

fn report(bytes: &[u8], question: &Question) -> Report {
    let (image, tree) = image(bytes).unwrap();
    check(&image, &tree, question)
}

fn rules(report: &Report) -> BTreeSet<&'static str> {
    report.findings.iter().map(|f| f.rule.name).collect()
}

/// A guest with one thing changed.
struct Broken(Vec<Made>);

impl Broken {
    fn at(&mut self, name: &str) -> &mut Made {
        self.0
            .iter_mut()
            .find(|m| m.name == name.as_bytes())
            .unwrap_or_else(|| panic!("{name}"))
    }

    fn set(&mut self, new: Made) {
        let name = String::from_utf8(new.name.clone()).unwrap();
        *self.at(&name) = new;
    }

    fn remove(&mut self, name: &str) {
        let before = self.0.len();
        self.0.retain(|m| m.name != name.as_bytes());
        assert_eq!(self.0.len() + 1, before, "{name}");
    }

    fn mode(&mut self, name: &str, mode: u32) {
        self.at(name).header.mode = mode;
    }
    fn add(&mut self, new: Made) {
        self.0.push(new);
    }
    fn report(&self) -> Report {
        report(&archive(&self.0), &Question::default())
    }
}

type Break = fn(&mut Broken);

fn extra(name: &str) -> String {
    format!("usr/lib/modules/{KERNEL}/extra/{name}")
}

fn firmware(name: &str) -> String {
    format!("usr/lib/firmware/nvidia/{VERSION}/{name}")
}

fn modules_dep() -> String {
    format!("usr/lib/modules/{KERNEL}/modules.dep")
}

fn without_firmware(guest: &mut Broken) {
    for name in ["gsp_ga10x.bin", "gsp_tu10x.bin"] {
        guest.remove(&firmware(name));
    }
}

/// Changes that break only one rule, in a guest without the list of files.
const CASES: &[(&str, Break)] = &[
    ("no-init", |g| g.remove("init")),
    ("init-dangling", |g| g.set(link("init", "/bin/NVRC"))),
    ("no-agent", |g| g.remove("usr/bin/kata-agent")),
    ("no-agent", |g| g.set(link("usr/bin/kata-agent", "agent"))),
    ("not-a-program", |g| g.mode("init", 0o100_644)),
    ("not-a-program", |g| g.set(directory("init"))),
    ("not-a-program", |g| {
        g.set(program("usr/bin/kata-agent", "text"))
    }),
    ("loader-missing", |g| {
        g.set(program(
            "init",
            stand_in::program("/lib/ld-musl-x86_64.so.1", &[], None),
        ))
    }),
    ("loader-missing", |g| g.set(program("init", "#!/bin/sh\n"))),
    // Interpreters that are there and start nothing.
    ("loader-missing", |g| g.set(program("init", "#!/init\n"))),
    ("loader-missing", |g| g.set(program("init", "#!/usr/bin\n"))),
    ("loader-missing", |g| {
        g.set(program("init", "#!/usr/bin/sh\n"));
        g.add(file("usr/bin/sh", stand_in::library(None, &[])));
    }),
    ("loader-missing", |g| {
        g.set(program("init", "#!/usr/bin/sh\n"));
        g.add(program("usr/bin/sh", "text"));
    }),
    ("loader-missing", |g| {
        g.mode("usr/lib64/ld-linux-x86-64.so.2", 0o100_644);
        g.remove("usr/bin/nvidia-smi");
    }),
    ("library-missing", |g| {
        g.set(needs(
            "usr/bin/kata-agent",
            &["libc.so.6", "libseccomp.so.2"],
        ))
    }),
    ("library-missing", |g| {
        // One that a library needs.
        g.set(library("usr/lib64/libc.so.6", "libc.so.6", &["libdeep.so"]));
        g.remove("usr/bin/nvidia-smi");
    }),
    ("library-missing", |g| {
        // One of another machine's is none.
        g.at("usr/lib64/libc.so.6").data[18] = 183;
        g.remove("usr/bin/nvidia-smi");
    }),
    ("wrong-machine", |g| {
        g.set(whole("usr/bin/kata-agent"));
        g.at("usr/bin/kata-agent").data[18] = 183;
    }),
    ("program-broken", |g| g.remove("usr/own/libown.so")),
    // A library of one that the program opens when it runs.
    ("program-broken", |g| {
        g.add(needs("usr/bin/kata-gpu-nvml", &["libc.so.6"]));
        g.add(link(
            "usr/lib64/libnvidia-ml.so.1",
            &format!("libnvidia-ml.so.{VERSION}"),
        ));
        g.set(library(
            &nvml(),
            "libnvidia-ml.so.1",
            &["libc.so.6", "libpthread.so.0"],
        ));
    }),
    ("no-modules", |g| g.remove(&modules_dep())),
    ("several-kernels", |g| {
        let info = format!(
            "version={VERSION}\0vermagic=6.1.0 SMP\0firmware=nvidia/{VERSION}/gsp_ga10x.bin\0"
        );
        g.add(directory("usr/lib/modules/6.1.0"));
        g.add(file(
            "usr/lib/modules/6.1.0/modules.dep",
            "nvidia.ko:\nnvidia-uvm.ko:\n",
        ));
        for name in ["nvidia", "nvidia-uvm"] {
            let path = format!("usr/lib/modules/6.1.0/{name}.ko");
            g.add(file(&path, stand_in::module(info.as_bytes())));
        }
    }),
    ("no-driver", |g| {
        g.set(file(
            &modules_dep(),
            "extra/nvidia.ko: extra/ecc.ko\nextra/ecc.ko:\n",
        ))
    }),
    ("module-missing", |g| g.remove(&extra("ecc.ko"))),
    ("module-missing", |g| g.remove(&extra("nvidia-uvm.ko"))),
    ("other-module-missing", |g| g.remove(&extra("other.ko"))),
    ("not-a-module", |g| g.set(file(&extra("ecc.ko"), "text"))),
    ("vermagic", |g| {
        g.set(file(
            &extra("ecc.ko"),
            stand_in::module(b"vermagic=6.1.0 SMP\0"),
        ))
    }),
    ("vermagic", |g| {
        g.set(file(&extra("other.ko"), stand_in::module(b"license=GPL\0")))
    }),
    ("module-versions", |g| {
        g.set(file(&extra("nvidia-uvm.ko"), module(Some("580.95.05"), "")))
    }),
    ("no-firmware", without_firmware),
    ("no-firmware", |g| {
        // A module that does not say which it needs.
        g.set(file(&extra("nvidia.ko"), module(Some(VERSION), "")));
        without_firmware(g);
    }),
    ("firmware-partial", |g| g.remove(&firmware("gsp_tu10x.bin"))),
    ("firmware-partial", |g| {
        g.at(&firmware("gsp_tu10x.bin")).name.extend(b".xz")
    }),
    ("no-libcuda", |g| g.remove(&libcuda())),
    ("no-nvml", |g| g.remove(&nvml())),
    ("version-differs", |g| {
        g.at(&nvml()).name = b"usr/lib64/libnvidia-ml.so.580.95.05".to_vec()
    }),
    ("service-broken", |g| {
        g.add(needs("usr/bin/nv-fabricmanager", &["libc.so.6"]))
    }),
    ("service-differs", |g| {
        g.add(needs("usr/bin/nvidia-persistenced", &["libc.so.6"]));
        g.add(file("etc/netconfig", ""));
        g.add(library(
            "usr/lib64/libnvidia-cfg.so.1",
            "libnvidia-cfg.so.1",
            &[],
        ));
    }),
    ("var-run", |g| g.remove("var/run")),
    ("var-run", |g| g.set(link("var/run", "/tmp"))),
    ("var-run", |g| g.set(directory("var/run"))),
    ("var-run-directory", |g| {
        g.set(directory("var/run"));
        g.0.push(directory("var/run/cdi"));
    }),
    ("mount-point", |g| g.set(file("proc", ""))),
    ("mount-point", |g| g.set(link("dev", "/none"))),
    ("ptmx", |g| g.0.push(file("dev/ptmx", ""))),
    ("setuid", |g| g.mode("usr/bin/nvidia-smi", 0o104_755)),
    ("writable-by-all", |g| g.mode("tmp", 0o040_777)),
    ("left-out", |g| g.0.push(file("opt/x", ""))),
    ("odd-name", |g| g.0.push(file("/etc/x", ""))),
    ("odd-name", |g| g.0.push(file("etc/../x", ""))),
    ("again", |g| {
        g.0.extend([file("etc/x", "1"), file("etc/x", "2")])
    }),
    ("packed", |g| {
        g.0.push(program(
            "usr/bin/p",
            [stand_in::library(None, &[]), b"UPX!".to_vec()].concat(),
        ))
    }),
];

#[test]
fn a_guest_that_boots_has_no_finding() {
    let good = report(
        &archive(&listed()),
        &Question {
            release: Some(KERNEL.into()),
            ..Question::default()
        },
    );
    assert!(
        good.findings.is_empty() && good.boots(),
        "{:#?}",
        good.findings
    );
    assert_eq!(
        (good.releases.as_slice(), good.modules),
        (&[KERNEL.to_string()][..], 4)
    );
    assert_eq!(
        (
            good.user_space.as_deref(),
            good.driver.as_ref().unwrap().version.as_deref()
        ),
        (Some(VERSION), Some(VERSION))
    );
    assert_eq!((good.init.linked, good.agent.linked), ("static", "dynamic"));
}

#[test]
fn every_rule_is_broken_alone_by_what_is_meant() {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for (index, (rule, change)) in CASES.iter().enumerate() {
        let mut broken = Broken(guest());
        change(&mut broken);
        let report = broken.report();
        let mut found = rules(&report);
        assert!(found.remove("no-manifest"), "case {index}: {rule}");
        assert_eq!(
            found,
            BTreeSet::from([*rule]),
            "case {index}: {:#?}",
            report.findings
        );
        let severity = RULES.iter().find(|r| r.name == *rule).unwrap().severity;
        assert_eq!(report.boots(), severity != Severity::Error, "{rule}");
        seen.insert(rule);
    }
    // Rules about more than one file, and about the question.
    let plain = Question::default();
    let of = |topology, confidential| Question {
        topologies: vec![topology],
        confidential,
        ..Question::default()
    };
    let asked = Question {
        release: Some("6.1.0".into()),
        ..Question::default()
    };
    let with_tree = Question {
        hash_tree: Some(State::Wrong("it is another".into())),
        ..Question::default()
    };
    let good = archive(&listed());
    let (mut stale, mut broken) = (Broken(listed()), Broken(listed()));
    stale.set(file(&firmware("gsp_tu10x.bin"), "longer firmware"));
    broken.set(file(MANIFEST, "{}"));
    for (rule, bytes, question) in [
        // Without the modules, the driver's version is the libraries'.
        ("other-kernel", good.clone(), &asked),
        ("compressed", gzip(&good), &plain),
        ("no-trailer", entries(&listed()), &plain),
        ("no-manifest", archive(&guest()), &plain),
        ("manifest-stale", archive(&stale.0), &plain),
        ("manifest-stale", archive(&broken.0), &plain),
        (
            "service-missing",
            good.clone(),
            &of(Topology::HopperFabric, false),
        ),
        ("service-wanted", good.clone(), &of(Topology::Gpus, true)),
        ("hash-tree", good, &with_tree),
        ("driver-elsewhere", archive(&without_driver().0), &plain),
    ] {
        assert_eq!(rules(&report(&bytes, question)), BTreeSet::from([rule]));
        seen.insert(rule);
    }
    let all: BTreeSet<&str> = RULES.iter().map(|r| r.name).collect();
    assert_eq!(seen, all, "every rule has a case");
}

/// A base image of Kata 4: a guest whose driver comes on a disk of its own.
fn without_driver() -> Broken {
    let mut base = Broken(guest());
    base.0.retain(|made| {
        !["modules/", "firmware/", "libcuda", "libnvidia"]
            .iter()
            .any(|part| made.name.windows(part.len()).any(|w| w == part.as_bytes()))
    });
    base
}

#[test]
fn an_image_without_a_driver_boots_and_names_its_source() {
    let base = without_driver();
    let reported = base.report();
    assert!(
        reported.boots() && reported.driver_elsewhere && reported.services.is_none(),
        "{:#?}",
        reported.findings
    );
    let text = verify_text::page(&reported, &Screen::PLAIN);
    assert!(
        text.contains("driver  none: it comes on the extension disk `gpu`")
            && text.contains("0 errors, 0 warnings, 1 note"),
        "{text}"
    );
    // Any part of it, alone, is a driver that is not whole.
    for (index, part) in [
        file("usr/lib64/libcuda.so.1", ""),
        file(&format!("usr/lib64/libnvidia-ml.so.{VERSION}"), ""),
        file("usr/lib/nvidia.ko.xz", ""),
    ]
    .into_iter()
    .enumerate()
    {
        let mut broken = Broken(base.0.clone());
        broken.add(part);
        let reported = broken.report();
        assert!(
            !reported.boots() && !reported.driver_elsewhere,
            "case {index}: {:#?}",
            reported.findings
        );
    }
    // Its services cannot be vouched for.
    let asked = Question {
        topologies: vec![Topology::Gpus],
        ..Question::default()
    };
    let reported = report(&archive(&base.0), &asked);
    assert_eq!(
        rules(&reported),
        BTreeSet::from(["driver-elsewhere", "service-missing"])
    );
}

fn modules_builtin() -> String {
    format!("usr/lib/modules/{KERNEL}/modules.builtin")
}

/// A guest whose image has every service of the table, whole.
fn serviced() -> Broken {
    let mut made = guest();
    let mut put = |new: Made| {
        let path = String::from_utf8(new.name.clone()).unwrap();
        for (at, _) in path.match_indices('/') {
            if made.iter().all(|m| m.name != path.as_bytes()[..at]) {
                made.push(directory(&path[..at]));
            }
        }
        made.push(new);
    };
    let mut accounts = String::new();
    for service in &SERVICES {
        put(needs(service.programs[0], &["libc.so.6"]));
        for name in service.opens {
            put(library(&format!("usr/lib64/{name}"), name, &[]));
        }
        service.files.iter().for_each(|path| put(file(path, "")));
        if let Some(path) = package(service.name) {
            put(file(path, "KEY=VALUE\n"));
        }
        for account in &service.accounts() {
            accounts += &format!("{account}:x:143:143::/:/bin/false\n");
        }
    }
    put(file("etc/passwd", accounts));
    let builtin = SERVICES
        .iter()
        .flat_map(|service| service.modules)
        .map(|module| format!("kernel/{module}.ko\n"))
        .collect::<String>();
    put(file(&modules_builtin(), builtin));
    Broken(made)
}

#[test]
fn verify_lists_the_services_of_each_topology_and_what_lacks() {
    let whole = serviced().report();
    let services = whole.services.as_ref().unwrap();
    assert_eq!(
        (rules(&whole), services.lacking()),
        (BTreeSet::from(["no-manifest"]), vec![]),
        "{:#?}",
        whole.findings
    );
    let text = verify_text::page(&whole, &Screen::PLAIN);
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let rows: BTreeSet<String> = text.lines().map(words).collect();
    for row in [
        "none none are started",
        "gpus, confidential starts persistenced",
        "hopper-fabric starts fabricmanager",
        "hopper-fabric, confidential starts fabricmanager, persistenced",
        "blackwell-fabric starts nvlsm, fabricmanager",
        "service-vm, with a management port starts nvlsm, fabricmanager",
    ] {
        assert!(rows.contains(row), "{row}:\n{text}");
    }
    // Each thing in turn; the topologies that need the service lack it, and the others do not.
    let fabric_manager = "usr/bin/nv-fabricmanager";
    let configuration = "usr/share/nvidia/nvswitch/fabricmanager.cfg";
    type Cut<'a> = &'a dyn Fn(&mut Broken);
    let cuts: &[(Cut, Name, &str)] = &[
        (
            &|g| g.remove(fabric_manager),
            Name::FabricManager,
            "no /usr/bin/nv-fabricmanager",
        ),
        (
            &|g| g.remove(configuration),
            Name::FabricManager,
            "no configuration /usr/share/nvidia/nvswitch/fabricmanager.cfg",
        ),
        (
            &|g| g.set(file(configuration, "#!/bin/sh\nexec\n")),
            Name::FabricManager,
            "line 2: neither KEY=VALUE",
        ),
        (
            &|g| g.mode(fabric_manager, 0o100_644),
            Name::FabricManager,
            "not executable, mode 0644",
        ),
        (
            &|g| g.set(needs(fabric_manager, &["libgone.so.1"])),
            Name::FabricManager,
            "library-missing: libgone.so.1",
        ),
        (
            &|g| g.remove("usr/lib64/libnvidia-cfg.so.1"),
            Name::Persistenced,
            "library libnvidia-cfg.so.1, which it opens when it runs",
        ),
        (
            &|g| g.remove("etc/netconfig"),
            Name::Persistenced,
            "no /etc/netconfig, without which it fails",
        ),
        (
            &|g| g.remove("opt/nvidia/nvlsm/sbin/nvlsm"),
            Name::Nvlsm,
            "no /opt/nvidia/nvlsm/sbin/nvlsm, /usr/bin/nvlsm",
        ),
        (
            &|g| g.set(file(&modules_builtin(), "kernel/mlx5_ib.ko\n")),
            Name::Nvlsm,
            "kernel modules ib_umad are neither in the image nor built in",
        ),
    ];
    for (index, (cut, name, why)) in cuts.iter().enumerate() {
        let mut broken = serviced();
        cut(&mut broken);
        let bytes = archive(&broken.0);
        let reported = report(&bytes, &Question::default());
        assert!(
            reported.boots(),
            "case {index}: a topology that nobody asked for failed the image: {:#?}",
            reported.findings
        );
        let services = reported.services.as_ref().unwrap();
        let lacking = services.lacking();
        assert!(
            lacking.len() == 1 && lacking[0].0 == *name && lacking[0].1.contains(why),
            "case {index}: {lacking:?}"
        );
        for case in &services.cases {
            let wanted = case.services.iter().any(|wanted| wanted.name == *name);
            let (_, lacks) = services.split(case);
            assert_eq!(
                lacks,
                if wanted { vec![*name] } else { vec![] },
                "case {index}, {}",
                case.title()
            );
            // Services that --topology asks for.
            let asked = Question {
                topologies: vec![case.topology],
                confidential: case.confidential,
                ..Question::default()
            };
            let needed = !case.managed
                && case
                    .services
                    .iter()
                    .any(|wanted| wanted.name == *name && wanted.needed);
            assert_eq!(
                report(&bytes, &asked).boots(),
                !(needed || case.managed && *name == Name::FabricManager),
                "case {index}, {}",
                case.title()
            );
        }
    }
    // Accounts: the service starts all the same, as root.
    let mut broken = serviced();
    broken.set(file("etc/passwd", "root:x:0:0::/:/bin/sh\n"));
    let reported = broken.report();
    assert_eq!(
        rules(&reported),
        BTreeSet::from(["no-manifest", "service-differs"])
    );
    assert!(reported.findings.iter().any(|f| f.value.as_deref()
        == Some("runs as root: no account nvidia-persistenced in /etc/passwd")));
    let json = reported.json();
    assert_eq!(
        json["services"]["programs"].as_array().unwrap().len(),
        SERVICES.len()
    );
    assert_eq!(json["services"]["topologies"][0]["topology"], "none");
}

#[test]
fn what_is_nearly_wrong_is_right() {
    let rights: &[Break] = &[
        |g| g.set(link("var/run", "/run")),
        // A script interpreted by a script starts as in the kernel.
        |g| {
            g.set(program("init", "#!/usr/bin/1 -x\n"));
            g.add(program("usr/bin/1", "#! /usr/bin/2\n"));
            g.add(whole("usr/bin/2"));
        },
        |g| g.remove("run"),
        |g| g.add(link("dev/ptmx", "pts/ptmx")),
        |g| {
            let mut ptmx = made("dev/ptmx", 0o020_666, "");
            ptmx.header.rdev = (5, 2);
            g.0.push(ptmx);
        },
        // A link that other links lead to, from outside the directory.
        |g| {
            g.set(link("init", "/sbin/init"));
            g.0.extend([
                directory("sbin"),
                link("sbin/init", "../bin/NVRC"),
                directory("bin"),
                whole("bin/NVRC"),
            ]);
        },
        // CUDA's libraries for older drivers.
        |g| {
            g.0.extend([
                directory("usr/compat"),
                file("usr/compat/libcuda.so.999.99.99", ""),
            ])
        },
        |g| {
            let path = format!("/{}", extra("ecc.ko"));
            let lines =
                format!("extra/nvidia.ko: {path}\nextra/nvidia-uvm.ko: extra/nvidia.ko\n{path}:\n");
            g.set(file(&modules_dep(), lines));
        },
    ];
    for (index, change) in rights.iter().enumerate() {
        let mut guest = Broken(guest());
        change(&mut guest);
        let report = guest.report();
        assert_eq!(
            rules(&report),
            BTreeSet::from(["no-manifest"]),
            "case {index}: {:#?}",
            report.findings
        );
    }
}

#[test]
fn another_init_and_a_driver_from_elsewhere_can_be_asked_for() {
    let mut guest = Broken(guest());
    guest.remove("init");
    guest.0.extend([directory("sbin"), whole("sbin/init")]);
    for name in [libcuda(), nvml(), firmware("gsp_ga10x.bin")] {
        guest.remove(&name);
    }
    let bytes = archive(&guest.0);
    let question = Question {
        init: "/sbin/init".into(),
        user_space: false,
        ..Question::default()
    };
    assert_eq!(rules(&report(&bytes, &question)), BTreeSet::new());
    assert!(
        rules(&report(&bytes, &Question::default())).is_superset(&BTreeSet::from([
            "no-init",
            "no-libcuda",
            "firmware-partial"
        ]))
    );
}

#[test]
fn the_page_says_what_the_report_holds_and_fits_a_terminal() {
    let mut broken = Broken(guest());
    broken.remove("usr/bin/kata-agent");
    (0..9).for_each(|n| broken.add(made(&format!("etc/{n}"), 0o104_755, "")));
    let report = broken.report();
    let text = verify_text::page(&report, &Screen::PLAIN);
    for part in [
        "error   no-agent  /usr/bin/kata-agent",
        "setuid  /etc/4: 4755",
        "4 more of these",
        "it cannot boot as a guest with GPUs: 1 error, 9 warnings, 1 note",
        "agent   /usr/bin/kata-agent: missing",
        "kernel  6.18.5-nvidia-gpu, 4 modules",
        "driver  module 550.163.01, user space 550.163.01",
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    let narrow = verify_text::page(
        &report,
        &Screen {
            width: Some(80),
            colour: false,
        },
    );
    assert!(narrow.lines().all(|line| line.len() <= 80), "{narrow}");
    let json = report.json();
    assert_eq!(
        (
            json["boots"].as_bool(),
            json["findings"].as_array().unwrap().len()
        ),
        (Some(false), 11)
    );
    assert_eq!(
        verify_text::rules(RULES, &Screen::PLAIN).lines().count(),
        RULES.len() + 1
    );
}
