//! A failure means that the helper calls a function that NVIDIA's library lacks, that the stand-in
//! has one of its own, or that the helper needs a newer glibc than supported images have.

use crate::stderr;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn target(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../target")
        .join(name)
}

/// NVIDIA's library; None where it could not be had, with the reason printed.
fn real_library() -> Option<PathBuf> {
    let file = target("real-driver/libnvidia-ml.so.1");
    if file.exists() {
        return Some(file);
    }
    let why = "no library of NVIDIA's (tests/real-driver/build gets it where packages can be had)";
    crate::skip("REQUIRE_REAL_DRIVER", why);
    None
}
fn stand_in() -> PathBuf {
    target("nvml/libnvidia-ml.so.1")
}

/// Whether helper and stand-in are there.
fn are_built() -> bool {
    crate::are_built(&[target("debug/kata-gpu-nvml"), stand_in()], "nvml")
}

fn helper(library: &Path, requests: &str) -> Output {
    let mut child = Command::new(target("debug/kata-gpu-nvml"))
        .arg("--library")
        .arg(library)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A helper that ends at once does not read.
    let _unused = child.stdin.take().unwrap().write_all(requests.as_bytes());
    child.wait_with_output().unwrap()
}

/// Dynamic symbols of a file, as `nm` prints them with these options.
fn symbols(file: &Path, options: &[&str]) -> BTreeSet<String> {
    let output = Command::new("nm")
        .arg("-D")
        .args(options)
        .arg(file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = crate::stdout(&output);
    text.lines()
        .filter_map(|line| line.split_whitespace().last())
        .map(str::to_string)
        .collect()
}

/// NVML's functions in a library.
fn functions(file: &Path) -> BTreeSet<String> {
    let symbols = symbols(file, &["--defined-only"]);
    symbols
        .iter()
        .filter(|s| s.starts_with("nvml"))
        .map(|s| s.split('@').next().unwrap().to_string())
        .collect()
}

#[test]
fn every_function_of_the_stand_in_is_one_of_nvidias_library() {
    let Some(real) = real_library() else { return };
    let (ours, theirs) = (functions(&stand_in()), functions(&real));
    assert!(
        ours.len() > 20 && theirs.len() > 200,
        "{} and {} functions",
        ours.len(),
        theirs.len()
    );
    assert_eq!(
        ours.difference(&theirs).collect::<Vec<_>>(),
        Vec::<&String>::new()
    );
    assert!(
        !theirs.contains("nvmlDeviceGetGpuFabricInfoV9"),
        "a name that no library has"
    );
}

/// Stands for NVML: every function is there, reports its name on standard error, and succeeds; but
/// for the fabric's second version, so that its fallback is called, too.
const RECORDER: &str = r#"
#include <string.h>
#include <unistd.h>
#define FUNCTION(name) long name(void *a, void *b, void *c) { return answer(#name, a, b, c); }
static long answer(const char *name, void *a, void **b, void **c)
{
	static char handle[8];
	char line[128] = "called ";

	write(2, strcat(strcat(line, name), "\n"), strlen(name) + 8);
	if (!strcmp(name, "nvmlErrorString"))
		return (long)"";
	if (!strcmp(name, "nvmlDeviceGetGpuFabricInfoV"))
		return 13; /* function not found */
	if (!strcmp(name, "nvmlDeviceGetCount_v2"))
		*(unsigned *)a = 1;
	if (!strcmp(name, "nvmlDeviceGetMaxMigDeviceCount"))
		*(unsigned *)b = 1;
	if (strstr(name, "HandleByPciBusId") || (strstr(name, "HandleByIndex") && !strstr(name, "Mig")))
		*b = handle;
	if (strstr(name, "MigDeviceHandleByIndex"))
		*c = handle;
	return 0;
}
"#;

/// Names of NVML's functions in a program, each with C's end: those that it may look for.
fn names_in(program: &Path) -> BTreeSet<String> {
    let bytes = crate::bytes(program);
    let name = |text: &[u8]| {
        let start = text.windows(4).rposition(|four| four == b"nvml")?;
        let name = std::str::from_utf8(&text[start..]).ok()?;
        let is_name = name.as_bytes().get(4).is_some_and(u8::is_ascii_uppercase)
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        is_name.then(|| name.to_string())
    };
    bytes.split(|byte| *byte == 0).filter_map(name).collect()
}

/// Functions that the helper calls to answer every request.
fn called() -> BTreeSet<String> {
    let folder = crate::TempDir::new("nvml-recorder");
    let (source, library) = (
        folder.0.join("recorder.c"),
        folder.0.join("libnvidia-ml.so.1"),
    );
    let functions: String = names_in(&target("debug/kata-gpu-nvml"))
        .iter()
        .map(|name| format!("FUNCTION({name})\n"))
        .collect();
    crate::write(&source, format!("{RECORDER}{functions}"));
    let built = Command::new("gcc")
        .args(["-w", "-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source)
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", stderr(&built));
    let requests = "facts\nclocks 0000:01:00.0 graphics 1 2\nclocks 0000:01:00.0 memory 1 \
        2\npower 0000:01:00.0 5\nready on\n";
    let output = helper(&library, requests);
    let (answers, names) = (crate::stdout(&output), stderr(&output));
    assert_eq!(
        answers.lines().filter(|line| *line == "\"done\"").count(),
        4,
        "{answers}"
    );
    names
        .lines()
        .filter_map(|line| line.strip_prefix("called "))
        .map(str::to_string)
        .collect()
}

#[test]
fn nvidias_library_and_the_stand_in_have_each_called_function() {
    if !are_built() {
        return;
    }
    let called = called();
    assert!(called.len() >= 30, "{called:?}");
    let missing = |library: &BTreeSet<String>| -> Vec<String> {
        called.difference(library).cloned().collect()
    };
    // The fallback, which the stand-in's driver does not need.
    assert_eq!(
        missing(&functions(&stand_in())),
        ["nvmlDeviceGetGpuFabricInfo"]
    );
    let Some(real) = real_library() else { return };
    let mut theirs = functions(&real);
    assert_eq!(missing(&theirs), Vec::<String>::new());
    assert!(theirs.remove("nvmlDeviceGetComputeInstanceId"));
    assert_eq!(
        missing(&theirs),
        ["nvmlDeviceGetComputeInstanceId"],
        "a library that lacks one is not seen"
    );
}

#[test]
fn a_machine_without_the_driver_gives_the_librarys_error() {
    if !are_built() {
        return;
    }
    let none = helper(Path::new("/nonexistent/libnvidia-ml.so.1"), "facts\n");
    assert_eq!(none.status.code(), Some(1));
    let text = stderr(&none);
    assert!(
        text.starts_with("kata-gpu-nvml: load /nonexistent/libnvidia-ml.so.1: "),
        "{text}"
    );
    for library in [Some(stand_in()), real_library()].into_iter().flatten() {
        let output = helper(&library, "facts\n");
        let text = stderr(&output);
        assert!(
            !output.status.success() && text.contains("driver"),
            "{}: {output:?}",
            library.display()
        );
    }
}

#[test]
fn the_helper_needs_no_newer_glibc_than_ubuntu_22_04_has() {
    if !are_built() {
        return;
    }
    let versions: BTreeSet<(u32, u32)> = symbols(
        &target("debug/kata-gpu-nvml"),
        &["--undefined-only", "--with-symbol-versions"],
    )
    .iter()
    .filter_map(|symbol| symbol.split_once("@GLIBC_"))
    .filter_map(|(_, version)| version.split_once('.'))
    .map(|(major, rest)| {
        (
            major.parse().unwrap(),
            rest.split('.').next().unwrap().parse().unwrap(),
        )
    })
    .collect();
    let newest = versions.last().copied().expect("a program of glibc");
    assert!(newest <= (2, 35), "it needs glibc {newest:?}");
}
