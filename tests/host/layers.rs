//! A failure means that the sources break a promise of src/README.md that the compiler does not
//! enforce: a pure file reads a clock, `unsafe` or a parameter's name stands where it must not, or
//! another place powers off. Each rule has a negative control.

pub mod source;

use kata_gpu_init::config::parameter_table::parameters_markdown;
use source::{Kind, Source};
use std::collections::BTreeSet;
use std::sync::LazyLock;

/// Files of src/init/boot/bring_up, with their submodules, that compute and do nothing else.
const PURE: &[&str] = &[
    "schedule",
    "schedule_messages",
    "agent",
    "waves",
    "strategy",
    "deadlines",
    "slots",
];
/// Modules and types that no pure file names: runtime, log, system, clock, and the rooms above.
const IMPURE: &[&str] = &[
    "tokio",
    "tracing",
    "nix",
    "fs",
    "thread",
    "Instant",
    "SystemTime",
    "stream",
    "machine",
    "step",
];
/// `unsafe` outside src/init/machine/sys.rs: where, how often, and why.
const UNSAFE: &[(&str, usize, &str)] = &[
    (
        "src/init/main.rs",
        1,
        "#[unsafe(link_section)]: function that libc calls before main",
    ),
    (
        "src/nvml/library.rs",
        12,
        "functions of NVML that nvml-wrapper lacks",
    ),
    ("src/host/vm.rs", 1, "pre_exec: a VMM dies with its test"),
    (
        "src/host/async_fd.rs",
        1,
        "tokio's promise about a descriptor",
    ),
];
/// Parameters that texts outside src/init/config/ name: the cure of an error, or the reason of a
/// choice, for a person to read.
const NAMED: &[(&str, &[&str])] = &[
    (
        "src/init/boot/bring_up/readiness.rs",
        &[
            "gpuinit.cc.ready",
            "gpuinit.fabric.required",
            "gpuinit.ready",
        ],
    ),
    ("src/init/driver_files/tree.rs", &["gpuinit.driver-root"]),
    ("src/init/boot/bring_up/reset.rs", &["gpuinit.reset"]),
    (
        "src/init/boot/bring_up/scan.rs",
        &["gpuinit.gpus", "gpuinit.topology"],
    ),
    (
        "src/init/boot/bring_up/strategy.rs",
        &["gpuinit.bind", "gpuinit.init", "gpuinit.relaxed"],
    ),
    (
        "src/init/boot/processes/worker.rs",
        &["gpuinit.events.vsock"],
    ),
    ("src/init/stream/sinks/vsock.rs", &["gpuinit.events.vsock"]),
    (
        "src/init/gpu/topology.rs",
        &["gpuinit.gpus", "gpuinit.nvlink", "gpuinit.topology"],
    ),
    // The host's programs write command lines for guests, and show how.
    ("src/cli/demo.rs", &["gpuinit.bind", "gpuinit.init"]),
];
/// Callers of `failure::power_off`, where PID 1 can do nothing else, and of
/// `PowerOffRight::power_off`, where the worker finds an image that is not verified.
const POWERED_OFF_BY: &[&str] = &[
    "src/init/boot/processes/agent_child.rs",
    "src/init/boot/processes/images.rs",
    "src/init/boot/processes/pid1.rs",
    "src/init/boot/ipc/handover.rs",
];

/// The project's own, read once.
fn source() -> &'static [Source] {
    static ALL: LazyLock<Vec<Source>> = LazyLock::new(|| source::read("src"));
    &ALL
}

/// Made-up files, for negative controls.
fn made_up(files: &[(&str, &str)]) -> Vec<Source> {
    source::of(
        &files
            .iter()
            .map(|(file, text)| (file.to_string(), text.to_string()))
            .collect::<Vec<_>>(),
    )
}

/// Impure names in paths and imports of pure files.
fn impure(all: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for source in all {
        let is_pure = match &source.module[..] {
            [boot, bring_up, name, ..] => {
                boot == "boot" && bring_up == "bring_up" && PURE.contains(&name.as_str())
            }
            _ => false,
        };
        let colons = |at: usize| {
            source
                .tokens
                .get(at)
                .is_some_and(|t| t.kind == Kind::Colons)
        };
        let mut is_import = false;
        for (at, token) in source.tokens.iter().enumerate().filter(|_| is_pure) {
            is_import |= source.word(at) == Some("use");
            is_import &= !source.is_sign(at, ';');
            let in_path = is_import || colons(at + 1) || at > 0 && colons(at - 1);
            if let Some(name) = source
                .word(at)
                .filter(|name| in_path && IMPURE.contains(name))
            {
                found.push(format!("{}:{}: {name}", source.file, token.line));
            }
        }
    }
    found
}

/// Files, src/init/machine/sys.rs apart, with another count of `unsafe` than listed.
fn unsafes(all: &[Source], listed: &[(&str, usize, &str)]) -> Vec<String> {
    let mut found = Vec::new();
    for source in all.iter().filter(|s| s.file != "src/init/machine/sys.rs") {
        let words = source
            .tokens
            .iter()
            .filter(|token| token.kind == Kind::Word("unsafe".into()));
        let lines: Vec<usize> = words.map(|token| token.line).collect();
        let allowed = listed
            .iter()
            .find(|(file, ..)| *file == source.file)
            .map_or(0, |(_, count, _)| *count);
        if lines.len() != allowed {
            found.push(format!(
                "{}: unsafe in lines {lines:?}, {allowed} allowed",
                source.file
            ));
        }
    }
    found
}

/// Names of parameters in a text.
fn parameters(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices("gpuinit.").map(|(at, _)| {
        let rest = &text[at..];
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '_' || c == '-';
        let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        rest[..end].trim_end_matches('.')
    })
}

/// Parameter names outside src/init/config/ that are not listed, and listed ones that are not
/// there.
fn parameters_named(all: &[Source], listed: &[(&str, &[&str])]) -> Vec<String> {
    let mut found = Vec::new();
    for source in all
        .iter()
        .filter(|s| !s.file.starts_with("src/init/config/"))
    {
        let allowed = listed.iter().find(|(file, _)| *file == source.file);
        let allowed = allowed.map_or(&[][..], |(_, names)| *names);
        let mut named = BTreeSet::new();
        for (text, line) in source.texts() {
            for name in parameters(text) {
                named.insert(name);
                if !allowed.contains(&name) {
                    found.push(format!("{}:{line}: {name}", source.file));
                }
            }
        }
        let unnamed = allowed.iter().filter(|name| !named.contains(*name));
        found.extend(unnamed.map(|name| format!("{}: {name} is not named any more", source.file)));
    }
    found
}

/// Calls that power off where they must not.
fn power_offs(all: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for source in all.iter().filter(|s| s.file != "src/init/boot/failure.rs") {
        for (at, token) in source.tokens.iter().enumerate() {
            let called = |name: &str| source.word(at) == Some(name) && source.is_sign(at + 1, '(');
            let names_mode = |word: &str| word.starts_with("RB_") || word == "RebootMode";
            let raw = called("reboot") || source.word(at).is_some_and(names_mode);
            let asked = called("power_off") && !POWERED_OFF_BY.contains(&source.file.as_str());
            let by_file = matches!(&token.kind, Kind::Text(text) if text.contains("sysrq"));
            if raw || asked || by_file {
                found.push(format!("{}:{}", source.file, token.line));
            }
        }
    }
    found
}

const NONE: &[&str] = &[];

#[test]
fn pure_files_import_no_runtime_no_files_and_no_clock() {
    let all = source();
    assert_eq!(impure(all), NONE);
    for name in PURE {
        let file = format!("src/init/boot/bring_up/{name}.rs");
        assert!(
            all.iter().any(|s| s.file == file),
            "{file} is not there any more"
        );
    }
    let text = "use std::time::{self, Duration, Instant as Now};\nuse crate::{pci, stream};\n\
                fn f(step: u8, fs: u8) { tracing::info!(\"\");\n\
                time::SystemTime::now(); std::thread::sleep(Duration::ZERO); g(step, fs); }\n\
                #[cfg(test)] mod tests { use tokio::sync; }";
    let found = [
        "1: Instant",
        "2: stream",
        "3: tracing",
        "4: SystemTime",
        "4: thread",
    ];
    for file in ["waves.rs", "schedule/holds.rs"] {
        let file = format!("src/init/boot/bring_up/{file}");
        let found = found.map(|line| format!("{file}:{line}"));
        let files = [
            (file.as_str(), text),
            ("src/init/boot/bring_up/gpu.rs", text),
        ];
        assert_eq!(impure(&made_up(&files)), found);
    }
}

#[test]
fn only_sys_is_unsafe_but_for_what_is_listed() {
    assert_eq!(unsafes(source(), UNSAFE), NONE);
    let text = "// unsafe\n/* unsafe /* */ unsafe */ #![deny(unsafe_op_in_unsafe_fn)]\n\
                const A: &str = \"unsafe\";\nfn f<'a>(c: char) { if c == '\"' { unsafe { g() } } }";
    let init = ("src/init/main.rs", "#[unsafe(no_mangle)]\nfn f() {}");
    let files = [
        ("src/init/machine/sys.rs", text),
        ("src/init/gpu/pci.rs", text),
        init,
        ("src/host/vm.rs", ""),
    ];
    let listed = [("src/init/main.rs", 1, ""), ("src/host/vm.rs", 1, "")];
    assert_eq!(
        unsafes(&made_up(&files), &listed),
        [
            "src/init/gpu/pci.rs: unsafe in lines [4], 0 allowed",
            "src/host/vm.rs: unsafe in lines [], 1 allowed"
        ]
    );
}

#[test]
fn only_config_has_parameter_names_except_in_listed_texts() {
    let all = source();
    assert_eq!(parameters_named(all, NAMED), NONE);
    let there = parameters_markdown();
    for name in NAMED.iter().flat_map(|(_, names)| *names) {
        let is_parameter = there.contains(&format!("`{name}"));
        assert!(
            is_parameter,
            "{name} is named outside src/init/config/, and no parameter"
        );
    }
    let text = "//! gpuinit.bind\n\
                const A: &str = r#\"set gpuinit.cdi.names=a, or \"gpuinit.log.\"\"#;\n\
                #[cfg(test)]\nmod tests { const B: &str = \"gpuinit.x\"; }";
    let found = [
        "src/init/gpu/pci.rs:2: gpuinit.cdi.names",
        "src/init/gpu/pci.rs: gpuinit.bind is not named any more",
    ];
    let files = made_up(&[
        ("src/init/gpu/pci.rs", text),
        ("src/init/config/parameter_table.rs", text),
    ]);
    assert_eq!(
        parameters_named(
            &files,
            &[("src/init/gpu/pci.rs", &["gpuinit.log", "gpuinit.bind"])]
        ),
        found
    );
}

#[test]
fn only_failure_powers_off_and_only_as_a_last_resort() {
    let all = source();
    assert_eq!(power_offs(all), NONE);
    let is_call = |s: &Source, at| s.word(at) == Some("power_off") && s.is_sign(at + 1, '(');
    let calls = |s: &Source| (0..s.tokens.len()).any(|at| is_call(s, at));
    for file in POWERED_OFF_BY {
        let called = all.iter().any(|s| s.file == *file && calls(s));
        assert!(called, "{file} does not call failure::power_off any more");
    }
    let text = "fn f(power_off: bool) { use nix::sys::reboot::reboot;\nreboot(RB_POWER_OFF);\n\
                failure::power_off(\"\");\nwrite(\"/proc/sysrq-trigger\") }";
    let allowed = (
        "src/init/boot/ipc/handover.rs",
        "fn f() { failure::power_off(\"\") }",
    );
    let files = [
        ("src/init/boot/failure.rs", text),
        allowed,
        ("src/init/gpu/pci.rs", text),
    ];
    assert_eq!(
        power_offs(&made_up(&files)),
        [2, 2, 3, 4].map(|line| format!("src/init/gpu/pci.rs:{line}"))
    );
}
