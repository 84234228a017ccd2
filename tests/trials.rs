//! Runs tests that are no `#[test]` functions as `cargo test` runs those: libtest-mimic's filters,
//! `--list`, `--exact`, `--skip`, `--test-threads`, results and exit status.
//!
//! Divergence from libtest-mimic: several names may be given, as with libtest.

use clap::Parser;
use libtest_mimic::{Arguments, Completion, Trial};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Command line of a test program.
#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    libtest: Arguments,
    /// Further names; a test runs if its name contains one of them.
    more: Vec<String>,
}

/// Names of tests that the command line has: parts of names, unless `--exact` is given.
pub fn words() -> Vec<String> {
    let CommandLine { libtest, more } = CommandLine::parse();
    libtest.filter.into_iter().chain(more).collect()
}

/// Runs the trials that the command line names, `at_once` at a time unless `--test-threads` is
/// given.
///
/// Relative paths in tests start at the project's folder, wherever cargo starts the program.
pub fn run(at_once: usize, trials: Vec<Trial>) -> ExitCode {
    if let Err(error) = std::env::set_current_dir(project()) {
        eprintln!("enter {}: {error}", project().display());
        return ExitCode::FAILURE;
    }
    run_anywhere(at_once, trials)
}

/// The same in the current folder: the program may be on another machine than the project.
pub fn run_anywhere(at_once: usize, mut trials: Vec<Trial>) -> ExitCode {
    let CommandLine {
        libtest: mut arguments,
        more,
    } = CommandLine::parse();
    if !more.is_empty() {
        let words: Vec<String> = arguments.filter.take().into_iter().chain(more).collect();
        trials.retain(|trial| {
            words
                .iter()
                .any(|word| !filtered_by(&arguments, word).is_filtered_out(trial))
        });
    }
    arguments.test_threads.get_or_insert(at_once);
    end_with_the_reader();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The same command line with this word as its only name.
fn filtered_by(arguments: &Arguments, word: &str) -> Arguments {
    Arguments {
        filter: Some(word.into()),
        ..arguments.clone()
    }
}

/// The result of a test that boots or runs what `tests/run` builds, where nothing was built.
pub fn ignored_unless_built() -> Option<Completion> {
    let missing = std::env::var_os("KATA_GPU_BUILT").is_none();
    missing.then(|| Completion::ignored_with("needs what tests/run builds"))
}

/// Prints a line in one piece. Errors are ignored: a reader that has gone fails no test.
pub fn print_line(line: &str) {
    let _unread = std::io::stdout()
        .lock()
        .write_all(format!("{line}\n").as_bytes());
}

/// The project's folder.
pub fn project() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    // Without "..": paths of unix sockets are short.
    folder.canonicalize().unwrap_or(folder)
}

/// Ends the program without a panic's report when the reader of its output has gone, as `head`
/// does. libtest-mimic panics then. Guests end with the program (PR_SET_PDEATHSIG).
fn end_with_the_reader() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let printer = panic
            .location()
            .is_some_and(|at| at.file().contains("libtest-mimic"));
        let text = panic.payload().downcast_ref::<String>();
        if printer && text.is_some_and(|text| text.contains("BrokenPipe")) {
            std::process::exit(CLOSED_PIPE);
        }
        report(panic);
    }));
}

/// Exit status of a program that SIGPIPE ends, as a shell reports it.
const CLOSED_PIPE: i32 = 128 + 13;
