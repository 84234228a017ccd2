//! A failure means that some bytes crash a parser, that the rootfs builder or Dockerfile.initrd
//! makes a wrong image, or that a release depends on the folder in which it is built. The tests are
//! shell scripts, which list their cases with `--list` and print a line `NAME ... RESULT` for each.

use kata_gpu_tests::trials;
use libtest_mimic::{Completion, Failed, Trial};
use std::process::{Command, ExitCode, Output};
use std::sync::{Arc, OnceLock};

/// Seconds for which each parser is fuzzed.
const FUZZ_SECONDS: &str = "3";

fn main() -> ExitCode {
    let fuzz = cases("tests/fuzz/run").into_iter().map(|target| {
        Trial::ignorable_test(format!("fuzz_{target}"), move || {
            case(&target, || {
                script("tests/fuzz/run")
                    .args([FUZZ_SECONDS, &target])
                    .output()
            })
        })
    });
    // The first case that is asked for runs the script: each case stands on what earlier ones
    // built.
    let ran = Arc::new(OnceLock::new());
    let rootfs = cases("tests/rootfs/builder").into_iter().map(|name| {
        let ran = Arc::clone(&ran);
        Trial::ignorable_test(format!("rootfs_{name}"), move || {
            case(&name, || {
                let output = ran.get_or_init(|| {
                    script("tests/rootfs/builder")
                        .output()
                        .map_err(|e| e.to_string())
                });
                output.clone().map_err(std::io::Error::other)
            })
        })
    });
    let dockerfile = DOCKERFILE.map(|(name, arch)| {
        Trial::ignorable_test(name, move || {
            if !std::env::args().any(|word| word.contains("dockerfile")) {
                return Ok(Completion::ignored_with(
                    "10 minutes: tests/run dockerfile runs it",
                ));
            }
            case(name, || {
                script("tests/rootfs/dockerfile").env("ARCH", arch).output()
            })
        })
    });
    let reproducible = Trial::ignorable_test(REPRODUCIBLE, || {
        if !std::env::args().any(|word| word.contains("reproducible")) {
            return Ok(Completion::ignored_with(
                "4 minutes: tests/run reproducible runs it",
            ));
        }
        case(REPRODUCIBLE, || script("tests/reproducible").output())
    });
    // Run one at a time: the fuzzer counts what it tries in a few seconds.
    trials::run(
        1,
        fuzz.chain(rootfs)
            .chain(dockerfile)
            .chain([reproducible])
            .collect(),
    )
}

/// Names with architectures of guests.
const DOCKERFILE: [(&str, &str); 2] = [
    ("dockerfile_builds_the_same_image", "amd64"),
    ("arm64_dockerfile_builds_the_same_image", "arm64"),
];
const REPRODUCIBLE: &str = "reproducible_in_two_folders_with_two_homes";

fn script(path: &str) -> Command {
    let mut command = Command::new(trials::project().join(path));
    // cargo's, for programs that it builds. A script's compilers and programs have their own.
    command.env_remove("LD_LIBRARY_PATH");
    command
}

/// Names of a script's cases.
fn cases(path: &str) -> Vec<String> {
    let output = script(path)
        .arg("--list")
        .output()
        .unwrap_or_else(|e| panic!("run {path} --list: {e}"));
    let names: Vec<String> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(str::to_string)
        .collect();
    assert!(
        output.status.success() && !names.is_empty(),
        "{path} --list names no case: {output:?}"
    );
    names
}

/// Result of one case by the line that its script has printed, and the lines below it.
fn case(name: &str, run: impl FnOnce() -> std::io::Result<Output>) -> Result<Completion, Failed> {
    if let Some(ignored) = trials::ignored_unless_built() {
        return Ok(ignored);
    }
    let output = run()?;
    let printed = String::from_utf8_lossy(&output.stdout);
    let begin = format!("{name} ... ");
    let Some(result) = printed.lines().find_map(|line| line.strip_prefix(&begin)) else {
        let (status, errors) = (output.status, String::from_utf8_lossy(&output.stderr));
        return Err(format!("no result of {name} ({status}):\n{printed}{errors}").into());
    };
    if let Some(reason) = result.strip_prefix("skipped: ") {
        return Ok(Completion::ignored_with(reason));
    }
    if !result.starts_with("ok") {
        let lines = printed.lines().skip_while(|line| !line.starts_with(&begin));
        let below: Vec<&str> = lines
            .skip(1)
            .take_while(|line| line.starts_with("  "))
            .collect();
        return Err(format!("{result}\n{}", below.join("\n")).into());
    }
    if let Some(what) = result
        .strip_prefix("ok ")
        .or_else(|| result.strip_prefix("ok: "))
    {
        trials::print_line(&format!("{name}: {what}"));
    }
    Ok(Completion::Completed)
}
