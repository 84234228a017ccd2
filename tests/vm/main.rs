//! The VM tests as a test program of cargo (`cargo test --test vm`), run by libtest-mimic.
//!
//! With arm64 guests a test has the prefix `arm64_`. Some of those run with all others, each one
//! where the command line has a name that begins so.

use kata_gpu_tests::trials;
use kata_gpu_tests::vm::harness::{Outcome, Silent, TestContext, VmTest};
use kata_gpu_tests::vm::{TESTS, tiers};
use kata_gpu_wire::arch::Arch;
use libtest_mimic::{Completion, Failed, Trial};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Tests that run at the same time on a machine of two CPUs: each waits for simulated hardware half
/// of its time, and passes beside other load.
const AT_ONCE: usize = 4;

/// Name and prefix of the guests that are not this machine's.
const ARM64: &str = "arm64";

fn main() -> ExitCode {
    let words = trials::words();
    let all_of_arm64 = words.iter().any(|word| word.starts_with(ARM64));
    // A test that the command line names runs in either tier.
    let all = !words.is_empty() || std::env::var_os("TESTS_TIER").is_some_and(|tier| tier == "all");
    let tests = || TESTS.iter().copied().flatten();
    let x86_64 = tests()
        .filter(|test| all || tiers::why_only_in_all(test.name).is_none())
        .map(|test| trial(test, Arch::X86_64));
    let is_asked = |test: &&VmTest| {
        if all_of_arm64 {
            !tiers::needs_x86_64(test.name)
        } else {
            all && tiers::ON_ARM64.contains(&test.name)
        }
    };
    let arm64 = tests()
        .filter(is_asked)
        .map(|test| trial(test, Arch::Aarch64));
    trials::run(AT_ONCE, x86_64.chain(arm64).collect())
}

fn trial(test: &'static VmTest, arch: Arch) -> Trial {
    let name = match arch {
        Arch::X86_64 => test.name.to_string(),
        Arch::Aarch64 => format!("{ARM64}_{}", test.name),
    };
    Trial::ignorable_test(name, move || {
        if let Some(ignored) = trials::ignored_unless_built() {
            return Ok(ignored);
        }
        let target =
            trials::project().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or("target".into()));
        let context = TestContext::new(target, arch, &short(test.name));
        if let Some(reason) = missing(&context)? {
            return Ok(Completion::ignored_with(reason));
        }
        let start = Instant::now();
        let result = outcome(test, &context);
        let seconds = start.elapsed().as_secs_f64();
        match result {
            Ok(Outcome::Passed) => trials::print_line(&format!("{}: {seconds:.1} s", test.name)),
            Ok(Outcome::Measured(what)) => {
                trials::print_line(&format!("{}: {seconds:.1} s: {what}", test.name))
            }
            Ok(Outcome::Skipped(reason)) => return Ok(Completion::ignored_with(reason)),
            Err(error) => return Err(report(&error, seconds, &context.work_dir)),
        }
        Ok(Completion::Completed)
    })
}

/// Reason why there are no guests of another architecture, which take packages; an error where the
/// run requires them.
fn missing(context: &TestContext) -> Result<Option<String>, Failed> {
    if context.arch == Arch::X86_64 || context.target.join("initrd.cpio").exists() {
        return Ok(None);
    }
    let reason = format!(
        "no guest of {}: ARCH=arm64 initrd/setup reports what is missing",
        context.arch
    );
    if std::env::var_os("REQUIRE_ARM64").is_some() {
        Err(reason.into())
    } else {
        Ok(Some(reason))
    }
}

/// Outcome of a test. A machine that stopped under the test is no finding about what is tested: the
/// test runs once more, on a new machine.
fn outcome(test: &VmTest, context: &TestContext) -> anyhow::Result<Outcome> {
    let run = || {
        std::panic::catch_unwind(|| (test.run)(context))
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the test panicked")))
    };
    match run() {
        Err(error) if error.chain().any(|cause| cause.is::<Silent>()) => {
            trials::print_line(&format!("{}: once more: {error:#}", test.name));
            run()
        }
        result => result,
    }
}

/// Folder name of a test: short, for the sockets below it (108 bytes of path in all); unique by the
/// hash at its end.
fn short(name: &str) -> String {
    let hash = name
        .bytes()
        .fold(5381_u32, |h, b| h.wrapping_mul(33) ^ u32::from(b));
    format!("{}-{hash:08x}", name.chars().take(20).collect::<String>())
}

/// Report of a failed test: its error, where its logs are, and the end of each guest's console.
fn report(error: &anyhow::Error, seconds: f64, work_dir: &Path) -> Failed {
    let mut text = format!(
        "{error:#}\n  after {seconds:.1} s; logs: {}",
        work_dir.display()
    );
    let guests = std::fs::read_dir(work_dir).into_iter().flatten().flatten();
    guests.for_each(|guest| console_tail(&mut text, guest.path().join("console.log")));
    text.into()
}

/// Lines of a console that a report has, and characters of each.
const TAIL: usize = 25;
const WIDTH: usize = 220;

fn console_tail(report: &mut String, console: PathBuf) {
    let text = std::fs::read(&console)
        .map(|b| String::from_utf8_lossy(&b).into_owned())
        .unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(TAIL)..];
    let _infallible = write!(
        report,
        "\n  --- {} (last {} of {} lines)",
        console.display(),
        last.len(),
        lines.len()
    );
    for line in last {
        let clean: String = line
            .chars()
            .filter(|c| !c.is_control())
            .take(WIDTH)
            .collect();
        let _infallible = write!(report, "\n  | {clean}");
    }
}
