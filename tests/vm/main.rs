//! `vm-tests [NAME..] [--list]`: runs the VM tests whose name contains one of the words, one after another (each guest has two CPUs, and so has the machine).

use kata_gpu_tests::vm::TESTS;
use kata_gpu_tests::vm::harness::{Outcome, TestContext, VmTest};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |test: &&VmTest| arguments.is_empty() || arguments.iter().any(|word| test.name.contains(word.as_str()));
    let list = arguments.iter().any(|a| a == "--list");
    let tests: Vec<&VmTest> = TESTS.iter().copied().flatten().filter(|t| list || wanted(t)).collect();
    if list {
        tests.iter().for_each(|t| println!("{}", t.name));
        return ExitCode::SUCCESS;
    }
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    // Short and free of "..": unix sockets lie below it.
    let target = target.canonicalize().unwrap_or(target);
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for test in tests {
        let context = TestContext { target: target.clone(), work_dir: target.join("vm").join(short(test.name)) };
        print!("vm {} ... ", test.name);
        let _unused = std::io::stdout().flush(); // only a line that comes late
        let start = Instant::now();
        let result = std::panic::catch_unwind(|| (test.run)(&context)).unwrap_or_else(|_| Err(anyhow::anyhow!("the test panicked")));
        let seconds = start.elapsed().as_secs_f64();
        match result {
            Ok(Outcome::Passed) => println!("ok ({seconds:.1} s)"),
            Ok(Outcome::Measured(what)) => println!("ok ({seconds:.1} s): {what}"),
            Ok(Outcome::Skipped(reason)) => {
                println!("skipped: {reason}");
                skipped += 1;
                continue;
            }
            Err(error) => {
                println!("FAILED ({seconds:.1} s)\n  {error:#}\n  logs: {}", context.work_dir.display());
                console_tail(&context.work_dir);
                failed += 1;
                continue;
            }
        }
        passed += 1;
    }
    println!("{passed} passed, {failed} failed{}", if skipped > 0 { format!(", {skipped} skipped") } else { String::new() });
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A folder name that leaves room for a socket's path (108 bytes in all), and is unique by the hash at its end.
fn short(name: &str) -> String {
    let hash = name.bytes().fold(5381_u32, |h, b| h.wrapping_mul(33) ^ u32::from(b));
    format!("{}-{hash:08x}", name.chars().take(20).collect::<String>())
}

/// The end of each guest's console.
fn console_tail(work_dir: &Path) {
    for guest in std::fs::read_dir(work_dir).into_iter().flatten().flatten() {
        let console = guest.path().join("console.log");
        let text = std::fs::read(&console).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        println!("  --- {} (last 25 of {} lines)", console.display(), lines.len());
        for line in lines.iter().rev().take(25).rev() {
            let clean: String = line.chars().filter(|c| !c.is_control()).take(220).collect();
            println!("  | {clean}");
        }
    }
}
