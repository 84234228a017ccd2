//! A failure means that a word of the kernel's command line gets a wrong value or is lost without a
//! note, that a bad value changes something, or that junk there grows without bound.

use super::parameter_table::{INCUMBENTS, PARAMETERS};
use super::*;
use crate::gpu::topology::{NvLink, Topology};
use kata_gpu_wire::record::Level;

#[test]
fn every_default_in_the_table_is_the_default() {
    for p in PARAMETERS.iter().filter(|p| p.default != "any") {
        let mut config = Config {
            expected_gpus: None,
            ..Config::default()
        };
        assert!(
            (p.set)(&mut config, p.default).is_some(),
            "{} does not take its own default",
            p.name
        );
        assert_eq!(
            config,
            Config::default(),
            "{}={} changes the default configuration",
            p.name,
            p.default
        );
    }
}

#[test]
fn a_confidential_guests_console_gets_errors_by_default() {
    let level = |line: &[u8], confidential| Config::parse(line).0.console.level(|| confidential);
    assert_eq!(level(b"", true), Some(Level::Error));
    assert_eq!(level(b"", false), Some(Level::Info));
    assert_eq!(level(b"gpuinit.log=debug", true), Some(Level::Debug));
    assert_eq!(level(b"gpuinit.log=off", false), None);
}

#[test]
fn good_values_are_taken_and_the_last_one_counts() {
    let (config, notes) = Config::parse(
        b"console=ttyS0 gpuinit.bind=insmod gpuinit.init=serial \
            gpuinit.bind=concurrent gpuinit.gpus=8 gpuinit.first=1 nvrc.log=debug\n",
    );
    assert_eq!(
        config,
        Config {
            bind: Bind::Concurrent,
            init: Init::Serial,
            first: 1,
            expected_gpus: Some(8),
            console: ToConsole::UpTo(Level::Debug),
            ..Config::default()
        }
    );
    assert!(notes.iter().all(|n| n.problem.is_none()), "{notes:?}");
}

#[test]
fn a_driver_root_is_a_path_that_means_the_same_everywhere() {
    let root = |value: &str| Config::parse(format!("gpuinit.driver-root={value}").as_bytes());
    for good in [
        "/",
        "/usr/local",
        "/run/nvidia/driver",
        "/run/kata-containersx",
    ] {
        assert_eq!(root(good).0.driver_root, Some(good.into()));
    }
    assert_eq!(root("auto").0.driver_root, None);
    for bad in [
        "",
        "usr/local",
        "/usr/../etc",
        "/a:b",
        // The host writes there, also while the guest runs.
        "/run/kata-containers/shared/containers/driver",
    ] {
        let (config, notes) = root(bad);
        let problem = notes[0].problem.as_deref().unwrap_or_default();
        assert!(
            config.driver_root.is_none() && problem.contains("takes auto, or a path"),
            "{bad}: {notes:?}"
        );
    }
}

#[test]
fn every_topology_can_be_asked_for() {
    let parameter = PARAMETERS
        .iter()
        .find(|p| p.name == "gpuinit.topology")
        .unwrap();
    let words: Vec<&str> = parameter.values.split(", ").collect();
    let all: Vec<String> = ["auto".to_string()]
        .into_iter()
        .chain(Topology::ALL.map(|t| t.to_string()))
        .collect();
    assert_eq!(words, all);
    let (config, _) = Config::parse(b"gpuinit.topology=shared-fabric gpuinit.nvlink=off");
    assert_eq!(
        (config.topology, config.nvlink),
        (Some(Topology::SharedFabric), NvLink::Off)
    );
}

#[test]
fn bad_values_leave_the_default_and_name_the_good_ones() {
    let (config, notes) = Config::parse(
        b"gpuinit.bind=fast gpuinit.gpus=-1 gpuinit.first=1025 gpuinit.nosuch=1 \
        nvrc.fm.mode=1 nvrc.dcgm=maybe gpuinit.log gpuinit.cdi.hooks=compat",
    );
    assert_eq!(config, Config::default());
    let problems: Vec<&str> = notes
        .iter()
        .map(|n| n.problem.as_deref().unwrap_or("none"))
        .collect();
    assert_eq!(
        problems,
        [
            "takes auto, insmod, pipelined, concurrent; ignored, default: auto",
            "takes 0 to 1024; ignored, default: any",
            "takes 0 to 1024; ignored, default: 0",
            "unknown parameter, ignored: `kata-gpu-init parameters` lists them",
            "ignored: fabric manager's mode follows from the topology; gpuinit.topology= \
                overrides it",
            "takes on, off; ignored, default: off",
            "takes auto, off, error, warn, info, debug, trace; ignored, default: auto",
            "takes one, none; ignored, default: one",
        ]
    );
}

#[test]
fn extensions_keep_their_order_and_a_bad_one_refuses_the_guest() {
    let verity = |root: char| {
        let root = root.to_string().repeat(64);
        format!("root_hash={root},salt=-,data_blocks=8,data_block_size=4096,hash_block_size=4096")
    };
    let parse = |line: &str| Config::parse(line.as_bytes());
    let (coco, gpu) = (verity('a'), verity('b'));
    let both = format!(
        "quiet kata.extension.coco.verity_params={coco} kata.extension.gpu.verity_params={gpu} \
            kata.extension.gpu.other=1"
    );
    let (config, notes) = parse(&both);
    let declared: Vec<(String, String)> = config
        .extensions
        .unwrap()
        .into_iter()
        .map(|e| (e.name.to_string(), e.verity.root_hash))
        .collect();
    assert_eq!(
        declared,
        [
            ("coco".into(), "a".repeat(64)),
            ("gpu".into(), "b".repeat(64))
        ]
    );
    assert!(
        notes.len() == 2 && notes.iter().all(|note| note.problem.is_none()),
        "{notes:?}"
    );

    for (line, wanted) in [
        (
            format!("{both} kata.extension.gpu.verity_params={coco}"),
            "kata.extension.gpu.verity_params: declared twice",
        ),
        (
            "kata.extension.gpu.verity_params".into(),
            "kata.extension.gpu.verity_params: no verity parameters: give",
        ),
        (
            "kata.extension.gpu.verity_params=".into(),
            "kata.extension.gpu.verity_params: no verity parameters: give",
        ),
        (
            format!("kata.extension.../x.verity_params={gpu}"),
            "kata.extension.../x.verity_params: \"../x\" is no name",
        ),
        (
            format!("kata.extension..verity_params={gpu}"),
            "kata.extension..verity_params: \"\" is no name",
        ),
        (
            "kata.extension.a.verity_params=x kata.extension.b.verity_params=y".into(),
            "kata.extension.a.verity_params: root_hash is missing",
        ),
    ] {
        let (config, notes) = parse(&line);
        let error = config.extensions.unwrap_err();
        assert!(error.starts_with(wanted), "{line}: {error}");
        assert!(
            notes
                .last()
                .unwrap()
                .problem
                .as_ref()
                .is_some_and(|problem| problem.ends_with("; the guest powers off")),
            "{notes:?}"
        );
    }
    assert_eq!(
        parse("kata.extensionist.gpu.verity_params=x kata.extension.gpu=1")
            .0
            .extensions,
        Ok(Vec::new())
    );
}

#[test]
fn the_incumbents_service_parameters_keep_their_meaning() {
    let services = |line: &[u8]| Config::parse(line).0.services;
    let asked =
        services(b"nvrc.dcgm=true nvrc.uvm.persistence.mode=off nvrc.fm.rail.policy=symmetric");
    assert_eq!(
        (asked.host_engine, asked.dcgm_exporter),
        (Switch::On, Switch::On)
    );
    assert_eq!(
        (asked.uvm_persistence, asked.rail_policy),
        (Switch::Off, Some(RailPolicy::Symmetric))
    );
    assert_eq!(
        services(b"nvrc.mode=gpu nvrc.fm.mode=1 nvrc.fm.rail.policy=auto"),
        Services::default()
    );
    let last = services(b"nvrc.dcgm=on gpuinit.hostengine=off");
    assert_eq!(
        (last.host_engine, last.dcgm_exporter),
        (Switch::Off, Switch::On)
    );
    assert_eq!(
        Config::parse(b"gpuinit.topology=hopper-fabric").0.topology,
        Some(Topology::HopperFabric)
    );
}

#[test]
fn a_registry_key_joins_those_that_were_asked_for() {
    assert_eq!(with_registry_key("", "R=0"), "NVreg_RegistryDwords=\"R=0\"");
    assert_eq!(
        with_registry_key("a=1 NVreg_RegistryDwords=\"X=1;Y=2;\" b=\"c d\"", "R=0"),
        "NVreg_RegistryDwords=\"X=1;Y=2;R=0\""
    );
    assert_eq!(
        parameter_value("a=1 NVreg_X=2 a=3", "a").as_deref(),
        Some("3")
    );
    assert_eq!(parameter_value("ab=1", "a"), None);
}

#[test]
fn binary_junk_and_thousands_of_words_stay_small_and_printable() {
    let mut line = b"gpuinit.\xff\x1b[2J=\x07\xfe ".to_vec();
    line.extend(b"gpuinit.x=1 ".repeat(400));
    let (config, notes) = Config::parse(&line);
    assert_eq!(config, Config::default());
    assert_eq!(notes.len(), MAX_NOTES + 1);
    assert!(
        notes
            .iter()
            .all(|n| !n.parameter.contains(char::is_control) && n.value.len() <= 4 * MAX_TEXT)
    );
    assert!(
        notes[MAX_NOTES]
            .problem
            .as_deref()
            .unwrap()
            .starts_with("369 more")
    );
}

#[test]
fn words_follow_the_kernels_quotes_and_end_mark() {
    assert_eq!(
        words(b"a b=\"c d\" \te -- gpuinit.bind=insmod"),
        ["a", "b=c d", "e"]
    );
    assert_eq!(words(b"a=\"open quote"), ["a=open quote"]);
}

#[test]
fn module_parameters_are_those_of_the_module() {
    let line = b"nvidia.probe_ms=5 nvidia-uvm.x=1 nvidia_uvm.y=2 nvidia.NVreg_RegistryDwords=\"a \
        b\" quiet nvidia.flag";
    assert_eq!(
        module_parameters(line, "nvidia"),
        "probe_ms=5 NVreg_RegistryDwords=\"a b\" flag"
    );
    assert_eq!(module_parameters(line, "nvidia-uvm"), "x=1 y=2");
    assert_eq!(module_parameters(line, "vsock"), "");
}

#[test]
fn the_blacklist_is_that_of_all_its_words() {
    assert_eq!(
        module_blacklist(
            b"modprobe.blacklist=a-b,,c quiet modprobe.blacklist= modprobe.blacklist=d"
        ),
        ["a_b", "c", "d"]
    );
}

#[test]
fn a_confidential_guest_sends_no_events_unless_a_parameter_asks_for_them() {
    for (words, plain, confidential) in [
        ("", true, false),
        ("gpuinit.events.vsock=auto", true, false),
        ("gpuinit.events.vsock=on", true, true),
        ("gpuinit.events.vsock=off", false, false),
        // A value that is none of these changes nothing.
        ("gpuinit.events.vsock=yes", true, false),
    ] {
        let (config, _) = Config::parse(words.as_bytes());
        assert_eq!(config.sends_events(|| false), plain, "{words}");
        assert_eq!(config.sends_events(|| true), confidential, "{words}");
    }
}

#[test]
fn each_word_that_weakens_a_guest_has_an_effect() {
    let mut words = 0;
    for parameter in PARAMETERS.iter().chain(INCUMBENTS) {
        for value in parameter.weakens.iter().flat_map(|w| w.values) {
            let mut config = Config::default();
            assert!((parameter.set)(&mut config, value).is_some(), "{value}");
            assert_ne!(config, Config::default(), "{}={value}", parameter.name);
            words += 1;
        }
    }
    assert!(words > 10, "{words}");
}
