//! The structure that src/lib.rs and src/boot/mod.rs promise, read from the text of src/: who
//! imports whom, and who alone may do what. Each rule has a negative control.

pub mod source;

use kata_gpu_init::config::parameter_table::parameters_markdown;
use source::{Kind, Source};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

/// Folders whose own folders stand in layers, lowest first: each may import itself and those before
/// it. Files beside them may import none.
const LAYERS: &[(&str, &[&str])] = &[
    ("src/boot/", &["wire", "gpus", "processes"]),
    ("src/host/", &["data", "system", "boot", "analysis", "views", "otlp", "collect", "tools", "cli"]),
];
/// Files of src/boot/gpus, with their submodules, that compute and do nothing else.
const PURE: &[&str] = &["schedule", "schedule_messages", "agent", "waves", "strategy", "deadlines", "slots"];
/// Modules that no pure file imports.
const IMPURE: &[&str] = &[
    "tokio",
    "tracing",
    "nix",
    "std::fs",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
    "crate::events",
    "crate::clock",
    "crate::step",
];
/// `unsafe` outside src/sys.rs: where, how often, and why.
const UNSAFE: &[(&str, usize, &str)] = &[
    ("src/bin/kata-gpu-init.rs", 1, "#[unsafe(link_section)]: function that libc calls before main"),
    ("src/nvml/library.rs", 12, "functions of NVML that nvml-wrapper lacks"),
    ("src/host/system/vm.rs", 1, "pre_exec: a VMM dies with its test"),
];
/// Parameters that texts outside src/config/ name: the cure of an error, or the reason of a
/// choice, for a person to read.
const NAMED: &[(&str, &[&str])] = &[
    ("src/boot/gpus/readiness.rs", &["gpuinit.cc.ready", "gpuinit.fabric.required", "gpuinit.ready"]),
    ("src/boot/gpus/reset.rs", &["gpuinit.reset"]),
    ("src/boot/gpus/scan.rs", &["gpuinit.gpus", "gpuinit.topology"]),
    ("src/boot/gpus/strategy.rs", &["gpuinit.bind", "gpuinit.init", "gpuinit.relaxed"]),
    ("src/boot/processes/worker.rs", &["gpuinit.events.vsock"]),
    ("src/events/sinks/vsock.rs", &["gpuinit.events.vsock"]),
    ("src/topology.rs", &["gpuinit.gpus", "gpuinit.nvlink", "gpuinit.topology"]),
    // The host's half writes command lines for guests, and shows how.
    ("src/host/cli/demo.rs", &["gpuinit.bind", "gpuinit.init"]),
    ("src/host/tools/install/here.rs", &["gpuinit.log"]),
];
/// Callers of `failure::power_off`, where PID 1 can do nothing else, and of its heir's, where the
/// worker finds an image that nobody vouches for.
const POWERED_OFF_BY: &[&str] =
    &["src/boot/processes/agent_child.rs", "src/boot/processes/images.rs", "src/boot/processes/pid1.rs", "src/boot/wire/handover.rs"];
/// Modules of lib.rs that are no hardware and no CDI: who imports what is ruled for each of them.
const OTHERS: &[&str] = &["boot", "host", "events"];

/// The project's own, read once.
fn source() -> &'static [Source] {
    static ALL: LazyLock<Vec<Source>> = LazyLock::new(|| source::read("src"));
    &ALL
}

/// Made-up files, for negative controls.
fn made_up(files: &[(&str, &str)]) -> Vec<Source> {
    source::of(&files.iter().map(|(file, text)| (file.to_string(), text.to_string())).collect::<Vec<_>>())
}

/// Whether a path is this one, or inside it.
fn is_in(path: &str, outer: &str) -> bool {
    path.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Which files each file imports, of the same sources.
fn imports(all: &[Source]) -> BTreeMap<&str, BTreeSet<&str>> {
    let path = |source: &Source| [vec!["crate".into()], source.module.clone()].concat().join("::");
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

/// Folder of layers that a file is in, and its layer there.
fn layer(file: &str) -> Option<(&'static str, usize)> {
    LAYERS.iter().find_map(|(folder, layers)| {
        let rest = file.strip_prefix(folder)?;
        let at = layers.iter().position(|layer| rest.strip_prefix(layer).is_some_and(|r| r.starts_with('/')));
        Some((*folder, at?))
    })
}

/// Imports that go up.
fn upward(all: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for (file, imported) in imports(all) {
        let Some((folder, _)) = LAYERS.iter().find(|(folder, _)| file.starts_with(folder)) else { continue };
        let rank = layer(file).map(|(_, rank)| rank);
        let is_up = |to: &&str| layer(to).is_some_and(|(of, to)| of == *folder && rank.is_none_or(|from| to > from));
        found.extend(imported.into_iter().filter(is_up).map(|to| format!("{file} imports {to}")));
    }
    found
}

/// Circles of files within one layer, each once, by its first file.
fn circles(all: &[Source]) -> Vec<String> {
    let imports = imports(all);
    let mut found = Vec::new();
    for start in imports.keys().filter(|file| layer(file).is_some()) {
        let mut waiting = vec![vec![*start]];
        let mut seen = BTreeSet::new();
        while let Some(way) = waiting.pop() {
            for to in &imports[way[way.len() - 1]] {
                if to == start && way.iter().min() == Some(start) {
                    found.push(format!("{} -> {start}", way.join(" -> ")));
                    waiting.clear();
                    break;
                }
                if layer(to) == layer(start) && seen.insert(*to) {
                    waiting.push([way.clone(), vec![*to]].concat());
                }
            }
        }
    }
    found
}

/// Imports of the boot sequence from where nobody knows order.
fn boot_imported(all: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for source in all.iter().filter(|s| !s.file.starts_with("src/boot/") && !s.file.starts_with("src/bin/")) {
        let of_host = |path: &str| source.file.starts_with("src/host/") && path == "crate::boot::AGENT";
        let barred = |path: &str| is_in(path, "crate::boot") && !of_host(path);
        let offending = source.paths.iter().filter(|named| barred(&named.path));
        found.extend(offending.map(|named| format!("{}:{}: {}", source.file, named.line, named.path)));
    }
    found
}

/// Forbidden imports of pure files.
fn impure(all: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    let is_pure = |module: &[String]| match module {
        [boot, gpus, name, ..] => boot == "boot" && gpus == "gpus" && PURE.contains(&name.as_str()),
        _ => false,
    };
    for source in all.iter().filter(|s| is_pure(&s.module)) {
        let barred = |path: &str| IMPURE.iter().any(|outer| is_in(path, outer));
        let offending = source.paths.iter().filter(|named| barred(&named.path));
        found.extend(offending.map(|named| format!("{}:{}: {}", source.file, named.line, named.path)));
    }
    found
}

/// Files, src/sys.rs apart, with another count of `unsafe` than listed.
fn unsafes(all: &[Source], listed: &[(&str, usize, &str)]) -> Vec<String> {
    let mut found = Vec::new();
    for source in all.iter().filter(|s| s.file != "src/sys.rs") {
        let words = source.tokens.iter().filter(|token| token.kind == Kind::Word("unsafe".into()));
        let lines: Vec<usize> = words.map(|token| token.line).collect();
        let allowed = listed.iter().find(|(file, ..)| *file == source.file).map_or(0, |(_, count, _)| *count);
        if lines.len() != allowed {
            found.push(format!("{}: unsafe in lines {lines:?}, {allowed} allowed", source.file));
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

/// Parameter names outside src/config/ that are not listed, and listed ones that are not there.
fn parameters_named(all: &[Source], listed: &[(&str, &[&str])]) -> Vec<String> {
    let mut found = Vec::new();
    for source in all.iter().filter(|s| !s.file.starts_with("src/config/")) {
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
    for source in all.iter().filter(|s| s.file != "src/failure.rs") {
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
    (0..lib.tokens.len()).filter(is_mod).filter_map(|at| lib.word(at + 1).map(str::to_string)).collect()
}

/// Forbidden imports of hardware and CDI modules.
fn hardware_imports(all: &[Source]) -> Vec<String> {
    let lib = all.iter().find(|s| s.file == "src/lib.rs").expect("no src/lib.rs");
    let mut hardware = modules(lib);
    hardware.retain(|module| !OTHERS.contains(&module.as_str()));
    let mut found = Vec::new();
    for source in all.iter().filter(|s| s.module.first().is_some_and(|first| hardware.contains(first))) {
        const BARRED: [&str; 3] = ["crate::boot", "crate::host", "crate::events::sinks"];
        let barred = |path: &str| BARRED.iter().any(|outer| is_in(path, outer));
        let offending = source.paths.iter().filter(|named| barred(&named.path));
        found.extend(offending.map(|named| format!("{}:{}: {}", source.file, named.line, named.path)));
    }
    found
}

/// Words that name nothing in src/boot: they need a glossary.
const VAGUE: &[&str] = &["beside", "busy", "batch", "lateness", "adopt", "user_space", "agent_looks"];
/// Names with vague words in src/boot, but for the events' own, which are constants.
fn vague(all: &[Source], known: &[&str]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for source in all.iter().filter(|s| s.file.starts_with("src/boot/")) {
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
            let vague = VAGUE.iter().any(|word| parts.contains(&format!("_{word}_")));
            if vague && !constant && !known.contains(&name) {
                found.insert(format!("{}: {name}", source.file));
            }
        }
    }
    found
}

/// Names of files that say their part in a folder, not what is inside.
const ROLES: &[&str] = &["mod.rs", "tests.rs", "error.rs"];

/// File names that more than one file has. A subcommand has the name of the file that it runs.
fn shared_names<'a>(files: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut by_name = BTreeMap::<&str, Vec<&str>>::new();
    for file in files {
        by_name.entry(file.rsplit('/').next().unwrap_or(file)).or_default().push(file);
    }
    by_name.retain(|name, files| {
        let is_subcommand = |file: &str| file.strip_prefix("src/host/cli/") == Some(name);
        let runs = |file: &str| file.starts_with("src/host/");
        let is_pair = files.len() == 2 && files.iter().any(|f| is_subcommand(f)) && files.iter().all(|f| runs(f));
        files.len() > 1 && !ROLES.contains(name) && !is_pair
    });
    by_name.values().map(|files| files.join(" and ")).collect()
}

const NONE: &[&str] = &[];

#[test]
fn no_two_source_files_share_a_name() {
    assert_eq!(shared_names(source().iter().map(|s| s.file.as_str())), NONE);
    let files = [
        "src/pci/mod.rs",
        "src/cdi/mod.rs",
        "src/host/cli/blame.rs",
        "src/host/analysis/blame.rs",
        "src/host/cli/clock.rs",
        "src/clock.rs",
        "src/host/boot/steps.rs",
        "src/host/tools/steps.rs",
    ];
    let found = ["src/host/cli/clock.rs and src/clock.rs", "src/host/boot/steps.rs and src/host/tools/steps.rs"];
    assert_eq!(shared_names(files.into_iter()), found);
}

#[test]
fn names_in_boot_say_what_a_thing_is() {
    assert_eq!(vague(source(), &[]), BTreeSet::new());
    let files = [
        ("src/boot/gpus/user_space.rs", "use crate::x::CDI_BESIDE; // busy"),
        ("src/boot/gpus/lane.rs", "enum Probe { BesideLoad } fn lane_is_busy(batch: u8, besides: u8) {}"),
        ("src/host/mod.rs", "fn adopt() {}"),
    ];
    let found = ["lane.rs: BesideLoad", "lane.rs: lane_is_busy", "user_space.rs: user_space"];
    let found = found.map(|name| format!("src/boot/gpus/{name}"));
    assert_eq!(vague(&made_up(&files), &["batch"]), BTreeSet::from(found));
}

#[test]
fn imports_go_from_a_layer_to_lower_ones_and_never_up() {
    assert_eq!(upward(source()), NONE);
    let offending = made_up(&[
        ("src/boot/mod.rs", "pub mod processes; pub mod gpus; pub mod wire; use wire::reply;"),
        ("src/boot/wire/mod.rs", "pub mod reply;"),
        ("src/boot/wire/reply.rs", "fn f() { crate::boot::gpus::lane::f() }"),
        ("src/boot/gpus/mod.rs", "pub mod lane; use super::processes::{keeper};"),
        (
            "src/boot/gpus/lane.rs",
            "use crate::boot::wire::reply;\
             #[cfg(test)] mod tests { use crate::boot::processes::keeper; }",
        ),
        ("src/boot/processes/mod.rs", "pub mod keeper; mod worker;"),
        ("src/boot/processes/keeper.rs", "use super::worker; use crate::boot::{gpus::lane, wire};"),
        ("src/boot/processes/worker.rs", "// use crate::boot::nothing;"),
        ("src/host/data/mod.rs", "pub mod text;"),
        ("src/host/data/text.rs", "use crate::host::views::table;"),
        ("src/host/views/mod.rs", "pub mod table;"),
        ("src/host/views/table.rs", "use crate::host::{data::text, cli::show};"),
        ("src/host/cli/mod.rs", "pub mod show;"),
        ("src/host/cli/show.rs", "use crate::host::views::table; use crate::boot::wire::reply;"),
    ]);
    assert_eq!(
        upward(&offending),
        [
            "src/boot/gpus/mod.rs imports src/boot/processes/keeper.rs",
            "src/boot/mod.rs imports src/boot/wire/reply.rs",
            "src/boot/wire/reply.rs imports src/boot/gpus/lane.rs",
            "src/host/data/text.rs imports src/host/views/table.rs",
            "src/host/views/table.rs imports src/host/cli/show.rs",
        ]
    );
}

#[test]
fn no_circle_of_files_is_inside_a_layer() {
    assert_eq!(circles(source()), NONE);
    let offending = made_up(&[
        ("src/boot/gpus/mod.rs", "mod a; mod b; mod c; mod d; pub use d::D;"),
        ("src/boot/gpus/a.rs", "use super::b::B;"),
        ("src/boot/gpus/b.rs", "fn f() -> super::c::C { super::c::C }"),
        ("src/boot/gpus/c.rs", "use crate::boot::gpus::{a, b};"),
        // Through what the folder passes on.
        ("src/boot/gpus/d.rs", "use super::D;"),
        ("src/host/boot/model.rs", "use super::gpu;"),
        ("src/host/boot/gpu.rs", "use crate::host::boot::model;"),
    ]);
    let found = circles(&offending);
    let [first, second, third, fourth] = found.as_slice() else { panic!("{found:?}") };
    assert!(first.starts_with("src/boot/gpus/a.rs -> src/boot/gpus/b.rs"), "{first}");
    assert!(second.starts_with("src/boot/gpus/b.rs -> src/boot/gpus/c.rs"), "{second}");
    assert_eq!(third, "src/boot/gpus/d.rs -> src/boot/gpus/mod.rs -> src/boot/gpus/d.rs");
    assert_eq!(fourth, "src/host/boot/gpu.rs -> src/host/boot/model.rs -> src/host/boot/gpu.rs");
}

#[test]
fn only_programs_and_the_agents_path_import_the_boot_sequence() {
    assert_eq!(boot_imported(source()), NONE);
    let offending = made_up(&[
        ("src/boot/mod.rs", "pub mod gpus; pub const AGENT: u8 = 0;"),
        ("src/boot/gpus.rs", "use super::AGENT;"),
        ("src/bin/init.rs", "use crate::boot::gpus;"),
        ("src/host/mod.rs", "use crate::boot::AGENT; fn f() { crate::boot::gpus::g() }"),
        ("src/pci.rs", "use crate::{boot::{self, AGENT}, clock};"),
    ]);
    let found = [("host/mod", "::gpus::g"), ("pci", ""), ("pci", "::AGENT")];
    let found = found.map(|(file, path)| format!("src/{file}.rs:1: crate::boot{path}"));
    assert_eq!(boot_imported(&offending), found);
}

#[test]
fn pure_files_import_no_runtime_no_files_and_no_clock() {
    let all = source();
    assert_eq!(impure(all), NONE);
    for name in PURE {
        let file = format!("src/boot/gpus/{name}.rs");
        assert!(all.iter().any(|s| s.file == file), "{file} is not there any more");
    }
    let text = "use std::time::{self, Duration, Instant as Now};\nuse crate::events::After;\n\
                use crate::pci;\nfn f() { tracing::info!(\"\");\n\
                time::SystemTime::now(); std::thread::sleep(Duration::ZERO); pci::clock::now(); }\n\
                #[cfg(test)] mod tests { use tokio::sync; }";
    let found = [
        "1: std::time::Instant",
        "2: crate::events::After",
        "4: tracing::info", // a macro is a path as well
        "5: std::time::SystemTime::now",
        "5: std::thread::sleep",
    ];
    let found = found.map(|line| format!("src/boot/gpus/waves.rs:{line}"));
    let files = ["src/boot/gpus/waves.rs", "src/boot/gpus/gpu.rs"].map(|file| (file, text));
    assert_eq!(impure(&made_up(&files)), found);
    let submodule = "src/boot/gpus/schedule/holds.rs";
    assert_eq!(impure(&made_up(&[(submodule, "use tokio::sync;")])), [format!("{submodule}:1: tokio::sync")]);
}

#[test]
fn only_sys_is_unsafe_but_for_what_is_listed() {
    assert_eq!(unsafes(source(), UNSAFE), NONE);
    let text = "// unsafe\n/* unsafe /* */ unsafe */ #![deny(unsafe_op_in_unsafe_fn)]\n\
                const A: &str = \"unsafe\";\nfn f<'a>(c: char) { if c == '\"' { unsafe { g() } } }";
    let init = ("src/bin/init.rs", "#[unsafe(no_mangle)]\nfn f() {}");
    let files = [("src/sys.rs", text), ("src/pci.rs", text), init, ("src/host/vm.rs", "")];
    let listed = [("src/bin/init.rs", 1, ""), ("src/host/vm.rs", 1, "")];
    assert_eq!(
        unsafes(&made_up(&files), &listed),
        ["src/pci.rs: unsafe in lines [4], 0 allowed", "src/host/vm.rs: unsafe in lines [], 1 allowed"]
    );
}

#[test]
fn only_config_has_parameter_names_except_in_listed_texts() {
    let all = source();
    assert_eq!(parameters_named(all, NAMED), NONE);
    let there = parameters_markdown();
    for name in NAMED.iter().flat_map(|(_, names)| *names) {
        let is_parameter = there.contains(&format!("`{name}"));
        assert!(is_parameter, "{name} is named outside src/config/, and no parameter");
    }
    let text = "//! gpuinit.bind\n\
                const A: &str = r#\"set gpuinit.cdi.names=a, or \"gpuinit.log.\"\"#;\n\
                #[cfg(test)]\nmod tests { const B: &str = \"gpuinit.x\"; }";
    let found = ["src/pci.rs:2: gpuinit.cdi.names", "src/pci.rs: gpuinit.bind is not named any more"];
    let files = made_up(&[("src/pci.rs", text), ("src/config/parameter_table.rs", text)]);
    assert_eq!(parameters_named(&files, &[("src/pci.rs", &["gpuinit.log", "gpuinit.bind"])]), found);
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
    let allowed = ("src/boot/wire/handover.rs", "fn f() { failure::power_off(\"\") }");
    let files = [("src/failure.rs", text), allowed, ("src/pci.rs", text)];
    assert_eq!(power_offs(&made_up(&files)), [2, 2, 3, 4].map(|line| format!("src/pci.rs:{line}")));
}

#[test]
fn hardware_and_cdi_import_neither_boot_nor_host_nor_sinks() {
    let all = source();
    assert_eq!(hardware_imports(all), NONE);
    let lib = "pub mod pci; pub mod cdi;\n\
               #[cfg(feature = \"host-base\")]\npub mod host; pub mod events; pub mod boot;";
    let files = [
        ("src/lib.rs", lib),
        ("src/pci.rs", "use crate::events::{names, sinks::console};"),
        ("src/cdi/mod.rs", "mod spec;"),
        ("src/cdi/spec.rs", "use super::super::host; fn f() { crate::boot::run(); crate::events::names::A }"),
        ("src/events/sinks.rs", "use crate::events::sinks;"),
        ("src/boot/mod.rs", "use crate::events::sinks;"),
    ];
    let found = [
        "src/pci.rs:1: crate::events::sinks::console", // one of two names in braces
        "src/cdi/spec.rs:1: crate::host",
        "src/cdi/spec.rs:1: crate::boot::run",
    ];
    assert_eq!(hardware_imports(&made_up(&files)), found);
}

#[test]
fn the_map_in_lib_rs_lists_every_module() {
    let all = source();
    let lib = all.iter().find(|s| s.file == "src/lib.rs").unwrap();
    let listed: BTreeSet<String> = modules(lib).into_iter().collect();
    let there = all.iter().filter_map(|s| s.module.first().cloned());
    assert_eq!(listed, there.filter(|module| module != "bin").collect());
}
