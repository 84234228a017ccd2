//! Would catch: a log as people have it that is refused, read as two boots, or gets another verdict
//! than the right one. The logs are in tests/fixtures/field.

use super::*;
use crate::data::compact_record::Record;
use kata_gpu_test_support::tests_dir;
use kata_gpu_wire::catalogue::logged;
use kata_gpu_wire::names;
use std::io::Cursor;

fn text(name: &str) -> String {
    std::fs::read_to_string(tests_dir("fixtures").join(name)).unwrap()
}

fn field(name: &str) -> String {
    text(&format!("field/{name}"))
}

fn boot_of(text: &str) -> BootFile {
    let mut logs = Logs::default();
    logs.add("log", Cursor::new(text.as_bytes().to_vec()))
        .unwrap();
    let made = logs.boot(None).unwrap();
    assert_eq!(made.boot.damaged, 0, "{:?}", made.boot.damage);
    made.boot
}

const VERDICTS: [&str; 4] = [
    names::GPU_FAILED,
    logged::GUEST_ENDED,
    logged::SANDBOX_FAILED,
    names::SETTLED,
];

/// `name reason whose` of each record of a verdict, with its GPU.
fn verdict(boot: &BootFile) -> Vec<String> {
    let records = boot
        .records
        .iter()
        .filter(|r| VERDICTS.contains(&r.name.as_str()));
    let one = |r: &Record| {
        let field = |key: &str| r.fields.text(key);
        let gpu = r.gpu.map(|gpu| gpu.to_string());
        let parts = [
            Some(&*r.name),
            gpu.as_deref(),
            field("reason"),
            field("whose"),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
    };
    records.map(one).collect()
}

/// Errors of the records of a verdict.
fn errors(boot: &BootFile) -> String {
    let records = boot
        .records
        .iter()
        .filter(|r| VERDICTS.contains(&r.name.as_str()));
    let errors: Vec<&str> = records.filter_map(|r| r.error.as_deref()).collect();
    errors.join("\n")
}

fn of_name<'a>(boot: &'a BootFile, name: &str) -> Vec<&'a Record> {
    boot.records.iter().filter(|r| r.name == name).collect()
}

/// Each log with what went wrong, and words that must be in the errors.
const LOGS: &[(&str, &[&str], &str)] = &[
    (
        // H100 left in confidential mode; the incumbent panicked.
        "cc-on-plain.console",
        &[
            "gpu.failed 0000:01:00.0 cc-mode-on host",
            "guest.ended ctk-failed driver",
            "guest.ended nvrc-panic guest",
            "guest.ended powered-off guest",
        ],
        "CPU does not support confidential compute",
    ),
    (
        // A confidential guest whose kernel lacks ECDSA.
        "cc-no-crypto.console",
        &[
            "gpu.failed 0000:01:00.0 cc-no-crypto image",
            "guest.ended powered-off guest",
        ],
        "libspdm expects LKCA but found stubs",
    ),
    (
        // Tesla P40, open modules.
        "open-no-gsp.dmesg",
        &["gpu.failed 0000:02:00.0 needs-proprietary image"],
        "open nvidia.ko because it does not include the required GPU System Processor (GSP). \
         Please see the 'Open Linux Kernel Modules' and 'GSP Firmware' sections",
    ),
    (
        "open-no-gsp.console",
        &["gpu.failed 0000:02:00.0 needs-proprietary image"],
        "open nvidia.ko because it does not include the required GPU System Processor (GSP). \
         Please see the 'Open Linux Kernel Modules' and 'GSP Firmware' sections",
    ),
    (
        // Tesla P100, driver 595.
        "legacy-595.console",
        &["gpu.failed 0000:02:00.0 legacy-branch driver"],
        "installed in this system is supported through the NVIDIA 580.xx Legacy drivers.",
    ),
    (
        // A GeForce, open modules of 535; `journalctl -k -o short-monotonic`, pasted.
        "open-refused.monotonic.txt",
        &["gpu.failed 0000:02:00.0 open-refused image"],
        "'OpenRmEnableUnsupportedGpus' kernel module parameter",
    ),
    (
        // The GPU's security processor hangs; `dmesg -T`.
        "fsp-timeout.dmesg-T",
        &["gpu.failed 0000:01:00.0 fsp-timeout GPU"],
        "FSP command timed out",
    ),
    (
        // Two GPUs in no known order: the cause is beside the failure.
        "two-gpus-unordered.console",
        &["gpu.failed 0000:02:00.0 firmware-boot GPU"],
        "RmInitAdapter failed! (0x62:0x65:2027)",
    ),
    (
        // `journalctl -k`, pasted without the enumeration.
        "journal-k.txt",
        &["gpu.failed 0000:13:00.0 firmware-boot GPU"],
        "RmInitAdapter failed! (0x26:0x56:1463)",
    ),
    (
        // The same by `journalctl -o verbose` and `-o export`.
        "journal-k.verbose.txt",
        &["gpu.failed 0000:13:00.0 firmware-boot GPU"],
        "RmInitAdapter failed! (0x26:0x56:1463)",
    ),
    (
        "journal-k.export.txt",
        &["gpu.failed 0000:13:00.0 firmware-boot GPU"],
        "RmInitAdapter failed! (0x26:0x56:1463)",
    ),
    (
        // The kubelet's lines alone: one failure, three times.
        "vsock-timeout.kubelet.journal",
        &["sandbox.failed agent-no-answer guest"],
        "Failed to Check if grpc server is working",
    ),
    (
        // `kubectl describe pod`, with the verdict of kata-gpu-init in the agent's error.
        "failed-gpu.describe.txt",
        &["sandbox.failed firmware-boot GPU"],
        "has failed (firmware-boot)",
    ),
    (
        // NVRC's panic prints its place, then its message.
        "nvrc-panic.console",
        &[
            "guest.ended nvrc-panic guest",
            "guest.ended powered-off guest",
        ],
        "timeout waiting for /var/run/nvidia-persistenced/socket",
    ),
    (
        // An older release of NVRC, without a stamp.
        "nvrc-panic-old.console",
        &[
            "guest.ended nvrc-panic guest",
            "guest.ended powered-off guest",
        ],
        "nvidia-persistenced failed with exit status: 1",
    ),
    (
        // The image has modules of another kernel.
        "no-module.console",
        &[
            "guest.ended driver-missing image",
            "guest.ended nvrc-panic guest",
            "guest.ended powered-off guest",
        ],
        "Module nvidia not found in directory",
    ),
    (
        // A module that was built for another kernel.
        "other-kernels-module.console",
        &[
            "guest.ended driver-load-failed image",
            "guest.ended init-died image",
        ],
        "disagrees about version of symbol module_layout",
    ),
    (
        // A TDX guest with the default of its bounce buffer.
        "bounce-buffer.dmesg",
        &["gpu.failed 0000:00:03.0 no-bounce-buffer Kata's configuration"],
        "swiotlb buffer is full",
    ),
    (
        // QEMU's line alone, as the shim and as containerd log it.
        "no-huge-pages.journal",
        &["sandbox.failed vmm-out-of-memory host"],
        "unable to map backing store for guest RAM",
    ),
    (
        // The limit of VFIO's mappings.
        "dma-limit.journal",
        &[
            "sandbox.failed dma-limit host",
            "sandbox.failed vmm-failed host",
        ],
        "No space left on device",
    ),
    (
        // Kata's configuration has no port for GPUs.
        "no-port.describe.txt",
        &["sandbox.failed no-port Kata's configuration"],
        "port is not set for device",
    ),
    (
        // The node's network, before there was a VM.
        "no-network.describe.txt",
        &["sandbox.failed no-network host"],
        "failed to setup network for sandbox",
    ),
    (
        // A node without Kata.
        "no-runtime.describe.txt",
        &["sandbox.failed no-runtime host"],
        "no runtime for",
    ),
    (
        // A device that the node's own CDI specs lack.
        "host-cdi.describe.txt",
        &["sandbox.failed host-cdi-unknown host"],
        "CDI device injection failed",
    ),
    (
        // Output of ctr.
        "ctr.txt",
        &["sandbox.failed agent-no-answer guest"],
        "timed out connecting to vsock",
    ),
    (
        // No GPU in the guest, and the runtime's wait for it: the first is the cause.
        "no-gpu.journal",
        &[
            "guest.ended no-gpu Kata's configuration",
            "sandbox.failed agent-no-answer guest",
        ],
        "No NVIDIA GPU found",
    ),
    (
        // A pod that failed, then one that did not: the failed one is the boot.
        "failed-then-healthy.journal",
        &[
            "gpu.failed 0000:02:00.0 needs-reset host",
            "sandbox.failed cdi-timeout guest",
        ],
        "unexpected WPR2 already up",
    ),
    (
        // Errors alone, without the request for the sandbox: one boot.
        "iommufd.journal",
        &[
            "sandbox.failed vfio-group host",
            "sandbox.failed vmm-failed host",
        ],
        "error bind device",
    ),
    (
        // Negative control: a pod that runs, and an error about metrics.
        "healthy-metrics.journal",
        &["settled"],
        "",
    ),
    (
        "hotplug-no-space.console",
        &["gpu.failed 0000:00:06.0 bar-unassigned Kata's configuration"],
        "is invalid: BAR1 is 0M @ 0x0",
    ),
    (
        "hotplug-no-space-6.18.console",
        &["gpu.failed 0000:02:00.0 bar-unassigned Kata's configuration"],
        "is invalid: BAR1 is 0M @ 0x0",
    ),
    (
        // Cold plug; the agent never answered.
        "vsock-timeout.journal",
        &[
            "guest.ended no-gpu Kata's configuration",
            "sandbox.failed agent-no-answer guest",
        ],
        "timed out connecting to vsock 1234567890:1024",
    ),
    (
        // CRI-O; the guest's end comes before the runtime's error.
        "crio-guest-out-of-memory.journal",
        &[
            "guest.ended out-of-memory Kata's configuration",
            "sandbox.failed agent-no-answer guest",
        ],
        "Out of memory: Killed process 1",
    ),
    ("cdi-wait-3.19.journal", &[], ""),
    // Negative control, with a program's name and file that are the driver's words.
    ("healthy-nvrc-switches.console", &["settled"], ""),
];

#[test]
fn every_log_gets_its_verdict() {
    for (name, wanted, words) in LOGS {
        let boot = boot_of(&field(name));
        assert_eq!(verdict(&boot), *wanted, "{name}");
        assert!(errors(&boot).contains(words), "{name}: {}", errors(&boot));
        for record in &boot.records {
            let Some(reason) = record.fields.text("reason") else {
                continue;
            };
            let cure = record.fields.text("cure");
            assert!(
                cure.is_some_and(|cure| !cure.is_empty()),
                "{name}: {reason}"
            );
        }
    }
}

#[test]
fn a_guest_that_did_its_work_has_no_end() {
    for name in [
        "agent/kata-agent-4.1.0-info.console",
        "agent/kata-agent-4.1.0-warn.console",
        "agent/containerd-1.7-kata-4.1.0-cri.log",
        "agent/journal-kata-4.1.0-rust.log",
        "boots/real-h200-kata-agent.console",
        "import/two-gpus.console",
    ] {
        let found = verdict(&boot_of(&text(name)));
        let is_end = |v: &String| v.starts_with("guest.") || v.starts_with("sandbox.");
        assert!(!found.iter().any(is_end), "{name}: {found:?}");
    }
}

#[test]
fn what_decides_or_may_decide_is_beside_the_failure() {
    let fields = |name: &str, key: &str| -> Option<String> {
        let boot = boot_of(&field(name));
        let failed = of_name(&boot, names::GPU_FAILED);
        failed[0].fields.text(key).map(str::to_string)
    };
    let bars = |name| fields(name, "bars").unwrap();
    assert_eq!(
        bars("hotplug-no-space.console"),
        "BAR 1 of 16 GiB found no room"
    );
    assert_eq!(
        bars("hotplug-no-space-6.18.console"),
        "BAR 2 of 256 GiB found no room"
    );
    let nearby = fields("two-gpus-unordered.console", "nearby").unwrap();
    assert_eq!(
        nearby,
        "NVRM: GPU1 kfspPollForResponse_IMPL: FSP command timed out | NVRM: GPU0 \
         nvAssertFailedNoLog: Assertion failed: 0 @ kern_fsp.c:161"
    );
    // NVRC initialises one GPU after another: the GPU that RM named last is the one that failed.
    let log = field("two-gpus-unordered.console").replace(
        "[    3.500000] NVRM: GPU1 ",
        "[    3.400000] NVRC::mode[1]: mode: gpu 2 GPU\n[    3.500000] NVRM: GPU0 ",
    );
    assert_eq!(
        verdict(&boot_of(&log)),
        ["gpu.failed 0000:02:00.0 fsp-timeout GPU"]
    );
}

#[test]
fn a_gpu_that_is_plugged_later_was_not_refused() {
    let log = field("legacy-595.console");
    let load: String = log
        .lines()
        .skip(2)
        .map(|line| format!("{line}\n"))
        .collect();
    let found = "[    9.000000] pci 0000:02:00.0: [10de:15f8] type 00 class 0x030200\n";
    let load = load.replace("supported through", "unsupported in");
    let late = format!("[    0.000000] Linux version 6.1 x\n{load}{found}");
    assert_eq!(verdict(&boot_of(&late)), Vec::<String>::new());
    // The control: present before, and refused.
    let before = found.replace("9.000000", "0.500000");
    let before = format!("[    0.000000] Linux version 6.1 x\n{before}{load}");
    assert_eq!(verdict(&boot_of(&before)).len(), 1);
}

/// The kernel's lines of a console in other forms.
fn in_forms(console: &str) -> Vec<(&'static str, String)> {
    let lines: Vec<(u32, &str, &str)> = console
        .lines()
        .filter_map(|line| {
            let (stamp, text) = line.strip_prefix('[')?.split_once("] ")?;
            let seconds: u32 = stamp.trim().split('.').next()?.parse().ok()?;
            Some((seconds.min(59), stamp, text))
        })
        .collect();
    let form = |one: &dyn Fn(u32, &str, &str) -> String| -> String {
        lines
            .iter()
            .map(|(s, stamp, text)| one(*s, stamp, text) + "\n")
            .collect()
    };
    let micros = |stamp: &str| -> u64 { stamp.trim().replace('.', "").parse().unwrap() };
    let deltas = |before: &str, after: &str| -> String {
        let mut last = None;
        let mut all = String::new();
        for (_, stamp, text) in &lines {
            let at = micros(stamp);
            let since = at - last.unwrap_or(at);
            let delta = format!("{}.{:06}", since / 1_000_000, since % 1_000_000);
            all.push_str(&format!("[{before}{delta}{after}] {text}\n"));
            last = Some(at);
        }
        all
    };
    vec![
        ("console.sock", {
            let crlf = form(&|_, stamp, text| format!("\x1b[0m[{stamp}] {text}\r\r"));
            format!("ond half of a line\r\n{crlf}")
        }),
        (
            "dmesg -x",
            form(&|_, stamp, text| format!("kern  :err   : [{stamp}] {text}")),
        ),
        (
            "dmesg -d",
            form(&|_, stamp, text| format!("[{stamp} <    0.000010>] {text}")),
        ),
        ("dmesg --time-format delta", deltas("<    ", ">")),
        ("dmesg -e", deltas("  +", "")),
        (
            "dmesg -T",
            form(&|s, _, text| format!("[Mon Feb  9 15:47:{s:02} 2026] {text}")),
        ),
        ("dmesg -t", form(&|_, _, text| text.to_string())),
        (
            "kubectl",
            form(&|_, stamp, text| format!("2026-02-19T15:00:22.1Z stdout F [{stamp}] {text}")),
        ),
        (
            "journal",
            form(&|s, _, text| format!("févr. 19 23:59:{s:02} node kernel: {text}")),
        ),
        (
            "iso",
            form(&|s, _, text| format!("2026-02-19T23:59:{s:02}+0100 node kernel: {text}")),
        ),
        (
            "monotonic",
            form(&|_, stamp, text| format!("[{stamp}] node kernel: {text}")),
        ),
        (
            "syslog",
            form(&|s, stamp, text| format!("Feb  9 23:59:{s:02} node kernel: [{stamp}] {text}")),
        ),
        (
            "json",
            form(&|s, _, text| {
                serde_json::json!({
                    "_TRANSPORT": "kernel",
                    "_SOURCE_MONOTONIC_TIMESTAMP": format!("{s}000000"),
                    "__REALTIME_TIMESTAMP": "1771509620000000",
                    "MESSAGE": text,
                })
                .to_string()
            }),
        ),
    ]
}

#[test]
fn every_form_of_a_kernel_log_gives_the_same_verdict() {
    for name in [
        "open-no-gsp.console",
        "legacy-595.console",
        "hotplug-no-space.console",
        "cc-no-crypto.console",
    ] {
        let console = field(name);
        let wanted = verdict(&boot_of(&console));
        for (form, text) in in_forms(&console) {
            let found = verdict(&boot_of(&text));
            assert_eq!(found, wanted, "{name} as {form}:\n{text}");
        }
    }
}

#[test]
fn a_piece_of_a_log_is_read() {
    for (name, lines) in [("open-no-gsp.console", 10), ("cc-on-plain.console", 10)] {
        let text = field(name);
        let all: Vec<&str> = text.lines().collect();
        let piece = all[all.len() - lines..].join("\n");
        let found = verdict(&boot_of(&piece));
        assert!(
            found[0].starts_with("gpu.failed 0000:0"),
            "{name}: {found:?}\n{piece}"
        );
    }
}

/// Records without their line of the log.
fn shown(boot: &BootFile) -> Vec<String> {
    let one = |r: &Record| {
        let fields = r.fields.iter().filter(|(key, _)| *key != "import");
        let fields: Vec<String> = fields
            .map(|(key, field)| format!("{key}={}", field.shown()))
            .collect();
        format!(
            "{} {:?} {:?} {:?} {fields:?}",
            r.boottime_ns, r.kind, r.name, r.error
        )
    };
    boot.records.iter().map(one).collect()
}

#[test]
fn lines_that_a_journal_has_twice_count_once() {
    let mut count = 0;
    for name in [
        "field/vsock-timeout.journal",
        "field/cdi-wait-3.19.journal",
        "field/crio-guest-out-of-memory.journal",
        "import/containerd.log",
        "agent/containerd-1.7-kata-4.1.0-cri.log",
    ] {
        let text = text(name);
        let mut once: Vec<&str> = Vec::new();
        for line in text.lines().filter(|line| line.contains("time=\"")) {
            let entry = line.find("time=\"").map_or(line, |at| &line[at..]);
            if !once.contains(&entry) {
                once.push(entry);
            }
        }
        // CRI-O's own lines are CRI-O's.
        let by = |by: &str, line: &str| format!("Feb 19 15:00:22 node {by}: {line}\n");
        let runtimes = if text.contains(" crio[") {
            "crio[8]"
        } else {
            "containerd[8]"
        };
        let of_shim = |line: &&&str| line.contains("name=containerd-shim-v2");
        let single: String = once.iter().map(|line| by(runtimes, line)).collect();
        let (mut kata, mut containerd) = (String::new(), String::new());
        let (mut first, mut second) = (String::new(), String::new());
        for line in &once {
            let is_shims = of_shim(&line);
            let copies = [by("kata[7]", line), by(runtimes, line)];
            if is_shims {
                kata.push_str(&copies[0]);
                first.push_str(&copies[0]);
                second.push_str(&copies[1]);
                second.push_str(&copies[0]);
            } else {
                second.push_str(&copies[1]);
            }
            containerd.push_str(&copies[1]);
            first.push_str(&copies[1]);
        }
        let wanted = shown(&boot_of(&single));
        let blocks = [format!("{kata}{containerd}"), format!("{containerd}{kata}")];
        for doubled in [first, second].into_iter().chain(blocks) {
            assert_eq!(shown(&boot_of(&doubled)), wanted, "{name}");
            count += 1;
        }
    }
    assert_eq!(count, 20);
}

#[test]
fn a_failed_sandbox_has_one_record_and_how_long_it_waited() {
    let log = field("vsock-timeout.journal");
    let boot = boot_of(&log);
    let failed = of_name(&boot, logged::SANDBOX_FAILED);
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0].fields.number("waited_ms"), Some(46_310));
    let run = of_name(&boot, logged::SANDBOX_RUN);
    assert_eq!(run[0].fields.text("pod"), Some("pod"));

    // A guest that still logged was only late.
    let console = log
        .lines()
        .find(|line| line.contains("No NVIDIA GPU found"))
        .unwrap();
    let late = console
        .replace("15:00:24.738886367", "15:01:05.000000000")
        .replace(
            "[    1.811168] NVRM: No NVIDIA GPU found.",
            "[   42.000000] NVRM: x",
        );
    let late = verdict(&boot_of(&format!("{log}{late}\n")));
    assert_eq!(
        late.last().unwrap(),
        "sandbox.failed agent-late Kata's configuration"
    );

    // A sandbox without a console is a boot, if it failed, beside one that has a console.
    let silent: String = log
        .lines()
        .filter(|line| !line.contains("vmconsole"))
        .map(|line| line.replace("aaaa", "bbbb").replace("T15:0", "T16:0") + "\n")
        .collect();
    let both = boot_of(&format!("{log}{silent}"));
    assert_eq!(verdict(&both), ["sandbox.failed agent-no-answer guest"]);
    // Without a shim, the pod's name stands for the sandbox.
    let requests: String = log
        .lines()
        .filter(|line| line.contains("RunPodSandbox"))
        .map(|line| format!("{line}\n"))
        .collect();
    let alone = boot_of(&requests);
    assert_eq!(verdict(&alone), ["sandbox.failed agent-no-answer guest"]);
}

#[test]
fn another_guest_in_the_same_journal_is_another_boot() {
    let log = field("vsock-timeout.journal");
    let wanted = verdict(&boot_of(&log));
    // Another sandbox, earlier, whose GPU fails; and the host's own kernel.
    let console = log
        .lines()
        .find(|line| line.contains("Linux version"))
        .unwrap();
    let other = console.replace("aaaa", "cccc").replace(
        "[    0.000000] Linux version 6.12.47-172-nvidia-gpu",
        "[    9.000000] \
         NVRM: GPU 0000:02:00.0: RmInitAdapter failed! (0x62:0x65:1860) x",
    );
    let hosts =
        "Feb 19 15:00:23 node kernel: NVRM: GPU 0000:99:00.0: RmInitAdapter failed! (0x1:0x2:3)";
    let boot = boot_of(&format!("{other}\n{hosts}\n{log}"));
    assert_eq!(verdict(&boot), wanted);
}

#[test]
fn a_container_waited_for_devices_that_only_its_tries_name() {
    let log = field("cdi-wait-3.19.journal");
    let tries = |boot: &BootFile| -> Vec<(String, Option<u64>)> {
        let tries = of_name(boot, logged::AGENT_CDI_TRY);
        let one = |r: &&Record| {
            let container = r.fields.text("container").unwrap().to_string();
            (container, r.fields.number("try"))
        };
        tries.iter().map(one).collect()
    };
    let wanted: Vec<(String, Option<u64>)> = (1..=3).map(|n| ("#1".to_string(), Some(n))).collect();
    let boot = boot_of(&log);
    assert_eq!(tries(&boot), wanted);
    let asked = of_name(&boot, logged::CONTAINER_ASKED);
    assert_eq!(asked[0].fields.text("devices"), Some("nvidia.com/gpu=0"));
    let waits = of_name(&boot, logged::AGENT_CDI_WAIT);
    let kinds: Vec<_> = waits.iter().map(|r| r.kind).collect();
    assert_eq!(
        kinds,
        [kata_gpu_wire::record::Kind::Begin],
        "the wait has no end"
    );
    let last = boot.records.iter().map(|r| r.boottime_ns).max().unwrap();
    assert!((15_000_000_000..17_000_000_000).contains(&last), "{last}");
    // Words of an agent before 3.15.
    let mut old = log;
    for n in 0..3 {
        let numbered = format!("waiting for CDI spec(s) to be generated ({n} of 100 max tries) ");
        old = old.replace(&numbered, "error injecting devices: ");
    }
    assert_eq!(tries(&boot_of(&old)), wanted);
}

#[test]
fn a_load_ends_when_the_module_is_gone() {
    let boot = boot_of(&field("vsock-timeout.journal"));
    let load = of_name(&boot, names::MODULE_LOAD);
    let at: Vec<u64> = load.iter().map(|r| r.boottime_ns / 1_000_000).collect();
    assert_eq!(at, [1800, 1818]);
    assert_eq!(load[1].error.as_deref(), Some("unloaded again"));
}

#[test]
fn a_switchs_probe_is_a_step_of_its_own() {
    let boot = boot_of(&field("healthy-nvrc-switches.console"));
    let probes = of_name(&boot, logged::SWITCH_PROBE);
    let at: Vec<u64> = probes.iter().map(|r| r.boottime_ns / 1_000_000).collect();
    assert_eq!(at, [1001, 6002, 6002, 11_010]);
    let settled = of_name(&boot, names::SETTLED);
    assert_eq!(settled[0].fields.number("usable"), Some(2));
}

#[test]
fn a_file_without_a_boot_is_refused_with_what_it_has_and_what_to_do() {
    let log = "Feb 19 15:00:20 node sshd[7]: x\nFeb 19 15:00:20 node sshd[8]: y\nhello\n";
    let error = Logs::default().add("log", Cursor::new(log)).unwrap_err();
    let error = error.to_string();
    let lines: Vec<&str> = error.lines().collect();
    assert_eq!(lines.len(), 3, "{error}");
    let read = "none of its 3 line(s) is of a boot (2 of sshd, 1 of a text without stamps)";
    assert_eq!(lines[0], read);
    assert!(lines[1].contains("NVRM: "), "{error}");
    assert!(
        lines[2].contains("journalctl -u containerd -o json --all"),
        "{error}"
    );
}
