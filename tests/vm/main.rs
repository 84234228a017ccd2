//! `vm-tests [NAME..] [--list]`: runs the VM tests whose name contains one of the words, two at a
//! time: a test waits for simulated hardware half of its time, and passes beside other load.

use kata_gpu_tests::vm::TESTS;
use kata_gpu_tests::vm::harness::{Outcome, Silent, TestContext, VmTest};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
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
    let next = AtomicUsize::new(0);
    let sum = Mutex::new(Sum::default());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(test) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let context = TestContext { target: target.clone(), work_dir: target.join("vm").join(short(test.name)) };
                    let start = Instant::now();
                    let result = outcome(test, &context);
                    let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
                    sum.report(test.name, &context.work_dir, start.elapsed().as_secs_f64(), result);
                }
            });
        }
    });
    let Sum { passed, failed, skipped } = sum.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("{passed} passed, {failed} failed{}", if skipped > 0 { format!(", {skipped} skipped") } else { String::new() });
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Outcome of a test. Where what carries it has stopped, which is no finding about what is tested, the
/// test runs once more, with a new machine.
fn outcome(test: &VmTest, context: &TestContext) -> anyhow::Result<Outcome> {
    let run = || std::panic::catch_unwind(|| (test.run)(context)).unwrap_or_else(|_| Err(anyhow::anyhow!("the test panicked")));
    match run() {
        Err(error) if error.chain().any(|cause| cause.is::<Silent>()) => {
            println!("vm {} ... once more: {error:#}", test.name);
            run()
        }
        result => result,
    }
}

/// Tests that run at the same time.
const AT_ONCE: usize = 2;

#[derive(Default)]
struct Sum {
    passed: u32,
    failed: u32,
    skipped: u32,
}

impl Sum {
    /// Counts a result and prints it, in one piece.
    fn report(&mut self, name: &str, work_dir: &Path, seconds: f64, result: anyhow::Result<Outcome>) {
        match result {
            Ok(Outcome::Passed) => println!("vm {name} ... ok ({seconds:.1} s)"),
            Ok(Outcome::Measured(what)) => println!("vm {name} ... ok ({seconds:.1} s): {what}"),
            Ok(Outcome::Skipped(reason)) => {
                println!("vm {name} ... skipped: {reason}");
                self.skipped += 1;
                return;
            }
            Err(error) => {
                println!("vm {name} ... FAILED ({seconds:.1} s)\n  {error:#}\n  logs: {}", work_dir.display());
                console_tail(work_dir);
                self.failed += 1;
                return;
            }
        }
        self.passed += 1;
    }
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
