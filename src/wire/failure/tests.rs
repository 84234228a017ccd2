//! Would catch: words that lead to another row than the one that the driver's authors meant, and a
//! row that nobody can act on.

use super::*;
use std::collections::HashSet;

fn gpu(device: u16) -> Facts {
    Facts {
        device: Some(device),
        gpus: 1,
        is_confidential: Some(false),
        ..Facts::default()
    }
}

fn of(step: FailedStep, messages: &[&str], facts: &Facts) -> (&'static str, &'static str) {
    let found = of_gpu(step, messages, facts);
    (found.reason.name(), found.sure.name())
}

#[test]
fn every_row_can_be_acted_on() {
    let mut names = HashSet::new();
    for reason in Reason::ALL {
        assert!(names.insert(reason.name()), "{reason} twice");
        for text in [reason.what(), reason.cure()] {
            assert!(text.len() > 15 && !text.ends_with('.'), "{reason}: {text}");
            assert!(text.is_ascii(), "{reason}: {text}");
        }
    }
}

#[test]
fn words_decide_before_codes_and_codes_before_the_step() {
    let code = |code: &str| format!("NVRM: GPU 0001:00:03.0: RmInitAdapter failed! ({code})");
    let wpr2 = "NVRM: GPU0 kgspBootstrap_GH100: unexpected WPR2 already up, cannot proceed with \
        booting GSP";
    let plain = gpu(0x2330);
    let confidential = Facts {
        is_confidential: Some(true),
        ..plain.clone()
    };
    let fabric = Facts {
        has_fabric: true,
        ..plain.clone()
    };
    for (facts, wanted, messages) in [
        (
            &plain,
            ("firmware-boot", "likely"),
            vec![code("0x62:0x65:1860")],
        ),
        (
            &plain,
            ("needs-reset", "certain"),
            vec![wpr2.into(), code("0x62:0x65:1860")],
        ),
        (
            &plain,
            ("needs-reset", "certain"),
            vec![code("0x62:0x40:1860")],
        ),
        (
            &plain,
            ("fabric-not-ready", "certain"),
            vec![code("0x25:0x81:1860")],
        ),
        (
            &confidential,
            ("cc-refused", "likely"),
            vec![code("0x22:0x56:774")],
        ),
        // The same code says nothing about confidential computing elsewhere.
        (
            &plain,
            ("attach-failed", "unsure"),
            vec![code("0x22:0x56:774")],
        ),
        (
            &fabric,
            ("fabric-or-mode", "unsure"),
            vec![code("0x22:0x56:774")],
        ),
        (
            &plain,
            ("fabric-or-mode", "unsure"),
            vec![code("0x22:0x3f:894")],
        ),
        (
            &plain,
            ("state-load-failed", "unsure"),
            vec![code("0x24:0x1:1")],
        ),
        (&plain, ("init-failed", "unsure"), vec![code("0x99:0x99:1")]),
        (&plain, ("init-failed", "unsure"), vec![]),
    ] {
        let messages: Vec<&str> = messages.iter().map(String::as_str).collect();
        assert_eq!(
            of(FailedStep::Init, &messages, facts),
            wanted,
            "{messages:?}"
        );
    }
    for (step, wanted, message) in [
        (
            FailedStep::Probe,
            "bar-unassigned",
            "NVRM: BAR0 is 0M @ 0x0 (PCI:0001:00:03.0)",
        ),
        (FailedStep::Probe, "probe-failed", "NVRM: something new"),
        (
            FailedStep::Enable,
            "bar-unassigned",
            "nvidia 0001:00:03.0: can't enable device: BAR 0 [mem size 0x1000000] not assigned",
        ),
        (
            FailedStep::Enable,
            "enable-failed",
            "nvidia 0001:00:03.0: can't enable device: BAR 0 [mem 0x0-0xffffff] not claimed",
        ),
        (
            FailedStep::Init,
            "no-interrupt",
            "NVRM: No interrupts of any type are available. Cannot use this GPU.",
        ),
    ] {
        assert_eq!(of(step, &[message], &plain).0, wanted, "{message}");
    }
    assert_eq!(of(FailedStep::Open, &[], &plain).0, "open-failed");
}

#[test]
fn the_same_words_mean_another_thing_on_another_chip() {
    let no_gsp = "NVRM: The NVIDIA GPU 0000:02:00.0 (PCI ID: 10de:1b38) installed in this system is \
        not supported by open nvidia.ko because it does not include the required GPU System \
        Processor (GSP).";
    let p40 = gpu(0x1b38);
    let h100 = gpu(0x2321);
    let step = FailedStep::Probe;
    assert_eq!(of(step, &[no_gsp], &p40), ("needs-proprietary", "certain"));
    assert_eq!(of(step, &[no_gsp], &h100), ("registers-garbled", "likely"));
    assert_eq!(
        of(step, &[no_gsp], &Facts::default()),
        ("needs-proprietary", "likely")
    );

    let release = "NVRM: The NVIDIA GPU 0001:00:01.0 (PCI ID: 10de:2321) installed in this system \
        is not supported by the NVIDIA 550.163.01 driver release.";
    let of_branch = |facts: &Facts, branch| Facts {
        branch: Some(branch),
        ..facts.clone()
    };
    assert_eq!(
        of(step, &[release], &of_branch(&h100, 550)).0,
        "vgpu-driver"
    );
    assert_eq!(
        of(step, &[release], &of_branch(&h100, 470)).0,
        "unsupported-gpu"
    );
    assert_eq!(of(step, &[release], &gpu(0xffff)).0, "unsupported-gpu");
    assert_eq!(
        of(step, &[release], &of_branch(&p40, 595)).0,
        "legacy-branch"
    );

    let refused = "NVRM: GPU0 confComputeConstructEngine_IMPL: CPU does not support confidential \
        compute.";
    let encryption = "NVRM: GPU0 spdmDheCheck_IMPL: Encryption FAILED";
    let confidential = Facts {
        is_confidential: Some(true),
        ..gpu(0x2321)
    };
    let step = FailedStep::Init;
    assert_eq!(of(step, &[refused], &h100), ("cc-mode-on", "certain"));
    assert_eq!(
        of(step, &[encryption], &confidential),
        ("cc-no-crypto", "certain")
    );
}

#[test]
fn a_branch_in_a_cure_is_the_drivers_own() {
    let message = "NVRM: The NVIDIA Tesla P100-PCIE-16GB GPU installed in this system is supported \
        through the NVIDIA 470.xx Legacy drivers. Please visit";
    let cure = |message: &str| {
        of_gpu(FailedStep::Probe, &[message], &gpu(0x15f8))
            .cure
            .into_owned()
    };
    assert!(
        cure(message).starts_with("use the NVIDIA 470.xx branch,"),
        "{}",
        cure(message)
    );
    // Negative control: nothing but a number gets into the sentence.
    let forged = message.replace("470.xx", "470.xx\u{1b}[2J");
    assert!(
        cure(&forged).starts_with("use the NVIDIA 580.xx branch,"),
        "{}",
        cure(&forged)
    );
}

#[test]
fn the_deciding_message_is_the_one_that_is_shown() {
    let messages = [
        "NVRM: first",
        "NVRM: the GPU has fallen off the bus",
        "NVRM: last",
    ];
    let words = |messages: &[&str]| {
        of_gpu(FailedStep::Probe, messages, &Facts::default())
            .words
            .map(str::to_string)
    };
    assert_eq!(words(&messages).as_deref(), Some(messages[1]));
    assert_eq!(words(&messages[..1]).as_deref(), Some(messages[0]));
    assert_eq!(words(&[]), None);
}

#[test]
fn ends_of_guests_and_sandboxes_have_an_owner() {
    for (text, wanted) in [
        (
            "Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100",
            "init-died",
        ),
        (
            "Kernel panic - not syncing: System is deadlocked on memory",
            "out-of-memory",
        ),
        (
            "Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)",
            "no-root",
        ),
        (
            "Kernel panic - not syncing: Fatal exception",
            "kernel-panic",
        ),
        (
            "NVRC::panic[1]: panic: panicked at src/execute.rs:24:9: /bin/nvidia-ctk failed with \
             status: exit status: 1",
            "ctk-failed",
        ),
        (
            "NVRC::panic[1]: panic: panicked at src/mount.rs:1:1: mount",
            "nvrc-panic",
        ),
        ("reboot: Power down", "powered-off"),
    ] {
        assert_eq!(
            of_guest(text).map(|found| found.reason.name()),
            Some(wanted),
            "{text}"
        );
    }
    for (text, wanted) in [
        (
            "Failed to Check if grpc server is working: rpc error: code = DeadlineExceeded desc = \
             timed out connecting to vsock 1234567890:1024",
            "agent-no-answer",
        ),
        ("failed to inject devices after CDI timeout", "cdi-timeout"),
        (
            "failed to create shim task: ttrpc: closed: unknown",
            "agent-gone",
        ),
        (
            "CreateContainerRequest timed out: context deadline exceeded",
            "create-timeout",
        ),
        (
            "the mount destination /../GPU 0001:00:01.0 has failed (fsp-timeout): reset the GPU on \
             the host, with its power if a reset does not help; see kata-gpu-boot show is invalid",
            "fsp-timeout",
        ),
        (
            "CDI device(s) [\"nvidia.com/gpu=/../GPU 0 has failed (no-such-row): x\"] do not exist: \
             unresolvable CDI devices",
            "cdi-unknown",
        ),
    ] {
        assert_eq!(
            of_sandbox(text).map(|found| found.reason.name()),
            Some(wanted),
            "{text}"
        );
    }
    // Negative controls: lines of a healthy guest.
    for text in [
        "Run /init as init process",
        "NVRM: loading NVIDIA UNIX Open Kernel Module",
        "",
    ] {
        assert_eq!((of_guest(text), of_sandbox(text)), (None, None), "{text}");
    }
}

#[test]
fn an_xid_has_a_sentence() {
    for number in [31, 48, 63, 64, 74, 79, 94, 95, 119, 120, 143, 154] {
        let xid = xid::meaning(number).unwrap();
        assert!(!xid.what.is_empty() && !xid.cure.is_empty(), "{number}");
    }
    assert_eq!(xid::meaning(9999), None);
}
