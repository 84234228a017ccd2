//! Structure that src/README.md promises and the compiler does not enforce, read from the text of
//! src/: the order of the folders inside a crate, who may do what alone, and the purity of
//! the schedule. Each rule has a negative control.

pub mod source;

use kata_gpu_init::config::parameter_table::parameters_markdown;
use source::{Kind, Source};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

/// Crates whose folders stand in the order of their lib.rs: each imports itself and those before
/// it.
const ORDERED: &[&str] = &["src/init", "src/report"];
/// Crates without a circle of files.
const CRATES: &[&str] = &[
    "src/wire",
    "src/host",
    "src/init",
    "src/nvml",
    "src/report",
    "src/collect",
    "src/image",
    "src/doctor",
    "src/cli",
    "src/cdi_check",
];
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
/// Modules that no pure file imports.
const IMPURE: &[&str] = &[
    "tokio",
    "tracing",
    "nix",
    "std::fs",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
    "crate::stream",
    "crate::machine",
    "crate::step",
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
    ("src/image/install/here.rs", &["gpuinit.log"]),
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

/// Whether a path is this one, or inside it.
fn is_in(path: &str, outer: &str) -> bool {
    path.strip_prefix(outer)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Which files each file imports, of the same sources.
fn imports(all: &[Source]) -> BTreeMap<&str, BTreeSet<&str>> {
    let path = |source: &Source| {
        [vec!["crate".into()], source.module.clone()]
            .concat()
            .join("::")
    };
    let files: BTreeMap<String, &str> = all.iter().map(|s| (path(s), s.file.as_str())).collect();
    let target = |path: &str| {
        let mut path = path;
        loop {
            if let Some(file) = files.get(path) {
                return Some(*file);
            }
            path = path.rsplit_once("::")?.0;
        }
    };
    let of = |source: &Source| -> BTreeSet<&str> {
        let targets = source.paths.iter().filter_map(|named| target(&named.path));
        targets.filter(|file| *file != source.file).collect()
    };
    all.iter().map(|s| (s.file.as_str(), of(s))).collect()
}

/// Imports of a later folder, in the order of the crate's lib.rs.
fn upward(all: &[Source]) -> Vec<String> {
    let lib = all.iter().find(|s| s.module.is_empty()).expect("no lib.rs");
    let order = modules(lib);
    let rank = |file: &str| {
        let source = all.iter().find(|s| s.file == file)?;
        order
            .iter()
            .position(|folder| source.module.first() == Some(folder))
    };
    let mut found = Vec::new();
    for (file, imported) in imports(all) {
        let Some(from) = rank(file) else { continue };
        let is_up = |to: &&str| rank(to).is_some_and(|to| to > from);
        found.extend(
            imported
                .into_iter()
                .filter(is_up)
                .map(|to| format!("{file} imports {to}")),
        );
    }
    found
}

/// Circles of a crate's files, each once, by its first file.
fn circles(all: &[Source]) -> Vec<String> {
    let imports = imports(all);
    let mut found = Vec::new();
    for start in imports.keys() {
        let mut waiting = vec![vec![*start]];
        let mut seen = BTreeSet::new();
        while let Some(way) = waiting.pop() {
            for to in &imports[way[way.len() - 1]] {
                if to == start && way.iter().min() == Some(start) {
                    found.push(format!("{} -> {start}", way.join(" -> ")));
                    waiting.clear();
                    break;
                }
                if seen.insert(*to) {
                    waiting.push([way.clone(), vec![*to]].concat());
                }
            }
        }
    }
    found
}

/// Forbidden imports of pure files.
fn impure(all: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    let is_pure = |module: &[String]| match module {
        [boot, bring_up, name, ..] => {
            boot == "boot" && bring_up == "bring_up" && PURE.contains(&name.as_str())
        }
        _ => false,
    };
    for source in all.iter().filter(|s| is_pure(&s.module)) {
        let barred = |path: &str| IMPURE.iter().any(|outer| is_in(path, outer));
        let offending = source.paths.iter().filter(|named| barred(&named.path));
        found.extend(
            offending.map(|named| format!("{}:{}: {}", source.file, named.line, named.path)),
        );
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
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '_';
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

/// Modules that lib.rs lists.
fn modules(lib: &Source) -> Vec<String> {
    let is_mod = |at: &usize| lib.word(*at) == Some("mod") && lib.is_sign(at + 2, ';');
    (0..lib.tokens.len())
        .filter(is_mod)
        .filter_map(|at| lib.word(at + 1).map(str::to_string))
        .collect()
}

/// Words that name nothing in src/init/boot: they need a glossary.
const VAGUE: &[&str] = &[
    "beside",
    "busy",
    "batch",
    "lateness",
    "adopt",
    "user_space",
    "agent_looks",
];
/// Names with vague words in src/init/boot, but for the events' own, which are constants.
fn vague(all: &[Source], known: &[&str]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for source in all.iter().filter(|s| s.file.starts_with("src/init/boot/")) {
        let names = source.tokens.iter().filter_map(|token| match &token.kind {
            Kind::Word(word) => Some(word.as_str()),
            _ => None,
        });
        for name in names.chain(source.module.iter().map(String::as_str)) {
            // BesideLoad is beside_load.
            let mut parts = String::from("_");
            for c in name.chars() {
                parts.extend(c.is_ascii_uppercase().then_some('_'));
                parts.push(c.to_ascii_lowercase());
            }
            parts.push('_');
            let constant = name.chars().all(|c| !c.is_ascii_lowercase());
            let vague = VAGUE
                .iter()
                .any(|word| parts.contains(&format!("_{word}_")));
            if vague && !constant && !known.contains(&name) {
                found.insert(format!("{}: {name}", source.file));
            }
        }
    }
    found
}

const NONE: &[&str] = &[];

#[test]
fn names_in_boot_say_what_a_thing_is() {
    assert_eq!(vague(source(), &[]), BTreeSet::new());
    let files = [
        (
            "src/init/boot/bring_up/user_space.rs",
            "use crate::x::CDI_EXTRA_DEVICES; // busy",
        ),
        (
            "src/init/boot/bring_up/lane.rs",
            "enum Probe { BesideLoad } fn lane_is_busy(batch: u8, besides: u8) {}",
        ),
        ("src/host/mod.rs", "fn adopt() {}"),
    ];
    let found = [
        "lane.rs: BesideLoad",
        "lane.rs: lane_is_busy",
        "user_space.rs: user_space",
    ];
    let found = found.map(|name| format!("src/init/boot/bring_up/{name}"));
    assert_eq!(vague(&made_up(&files), &["batch"]), BTreeSet::from(found));
}

#[test]
fn folders_import_those_before_them_in_lib_rs_and_none_after() {
    for folder in ORDERED {
        assert_eq!(upward(&source::read(folder)), NONE);
    }
    let offending = made_up(&[
        (
            "src/init/lib.rs",
            "pub mod machine; pub mod gpu; pub mod boot;",
        ),
        ("src/init/machine/mod.rs", "pub mod sys; pub mod clock;"),
        ("src/init/machine/sys.rs", "fn f() { crate::gpu::pci::f() }"),
        (
            "src/init/machine/clock.rs",
            "use super::sys; #[cfg(test)] mod tests { use crate::boot; }",
        ),
        (
            "src/init/gpu/mod.rs",
            "pub mod pci; use crate::machine::{sys};",
        ),
        ("src/init/gpu/pci.rs", "// use crate::boot;"),
        ("src/init/boot/mod.rs", "use crate::{gpu::pci, machine};"),
    ]);
    assert_eq!(
        upward(&offending),
        ["src/init/machine/sys.rs imports src/init/gpu/pci.rs"]
    );
}

#[test]
fn no_circle_of_files_is_in_a_crate() {
    for folder in CRATES {
        assert_eq!(circles(&source::read(folder)), NONE);
    }
    let offending = made_up(&[
        (
            "src/init/boot/mod.rs",
            "pub mod a; mod b; mod c; mod d; pub use d::D;",
        ),
        ("src/init/boot/a.rs", "use super::b::B;"),
        (
            "src/init/boot/b.rs",
            "fn f() -> super::c::C { super::c::C }",
        ),
        ("src/init/boot/c.rs", "use crate::boot::a;"),
        // Through what the folder passes on.
        ("src/init/boot/d.rs", "use super::D;"),
    ]);
    let found = circles(&offending);
    let [first, second] = found.as_slice() else {
        panic!("{found:?}")
    };
    assert!(
        first.starts_with("src/init/boot/a.rs -> src/init/boot/b.rs -> src/init/boot/c.rs"),
        "{first}"
    );
    assert_eq!(
        second,
        "src/init/boot/d.rs -> src/init/boot/mod.rs -> src/init/boot/d.rs"
    );
}

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
    let text = "use std::time::{self, Duration, Instant as Now};\nuse crate::stream::After;\n\
                use crate::pci;\nfn f() { tracing::info!(\"\");\n\
                time::SystemTime::now(); std::thread::sleep(Duration::ZERO); pci::clock::now(); }\n\
                #[cfg(test)] mod tests { use tokio::sync; }";
    let found = [
        "1: std::time::Instant",
        "2: crate::stream::After",
        "4: tracing::info", // a macro is a path as well
        "5: std::time::SystemTime::now",
        "5: std::thread::sleep",
    ];
    let found = found.map(|line| format!("src/init/boot/bring_up/waves.rs:{line}"));
    let files = [
        "src/init/boot/bring_up/waves.rs",
        "src/init/boot/bring_up/gpu.rs",
    ]
    .map(|file| (file, text));
    assert_eq!(impure(&made_up(&files)), found);
    let submodule = "src/init/boot/bring_up/schedule/holds.rs";
    assert_eq!(
        impure(&made_up(&[(submodule, "use tokio::sync;")])),
        [format!("{submodule}:1: tokio::sync")]
    );
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
