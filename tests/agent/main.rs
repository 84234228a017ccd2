//! The guest's test binary: the name it is started under selects one of its programs.

use kata_gpu_tests::agent::config::AGENT_VERSION;
use kata_gpu_tests::agent::container_run;

/// Called by the C library before Rust's runtime starts, which needs descriptors: a kernel without
/// a console gives its init none.
// SAFETY: libc calls what .init_array points to as a C function, which this is; the function uses
// nothing of Rust's runtime.
#[allow(unsafe_code, reason = "only the section attribute has the C library call a function")]
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = kata_gpu_init::sys::before_main;

fn main() {
    let name = std::env::args().next().unwrap_or_default();
    match name.rsplit('/').next() {
        Some("hardware") => kata_gpu_tests::hardware::run(),
        Some("driver-script") => kata_gpu_tests::driver_script::run(),
        Some("minimal-init") => kata_gpu_tests::minimal_init::run(),
        Some("serial-init") => kata_gpu_tests::serial_init::run(),
        Some(kata_gpu_tests::serial_init::HOLDER) => kata_gpu_tests::serial_init::hold(),
        Some(kata_gpu_tests::agent::pod::process::PARKED) => kata_gpu_tests::agent::pod::process::park(),
        Some("fork-panics") => fork_panics(),
        Some(kata_gpu_tests::vm::inside::NAME) => kata_gpu_tests::vm::inside::run(),
        Some(kata_gpu_tests::vm::vmm::NAME) => kata_gpu_tests::vm::vmm::run(),
        // The interpreter of a script, whose path comes first.
        Some("test-programs") if std::env::args().nth(1).is_some_and(|script| script.starts_with('/')) => {
            kata_gpu_tests::services::run(&std::env::args().skip(1).collect::<Vec<_>>())
        }
        Some("trap-init") => kata_gpu_tests::trap_init::run(),
        // The real one knows this option, too.
        _ if std::env::args().nth(1).is_some_and(|a| a == "--version") => println!("kata-agent version {} (for tests)", AGENT_VERSION),
        _ if std::env::args().nth(1).is_some_and(|a| a == container_run::WORD) => {
            container_run::process(&std::env::args().skip(2).collect::<Vec<_>>())
        }
        _ => kata_gpu_tests::agent::run(),
    }
}

/// Forks as PID 1 does, with a child that panics, and prints which process continues behind the
/// fork. A program does this, because a test has threads.
fn fork_panics() {
    let own = std::process::id();
    let forked = std::panic::catch_unwind(|| kata_gpu_init::sys::fork_single_threaded("both", |both| panic!("{both}")));
    println!("behind the fork: {}", if std::process::id() == own { "the parent" } else { "the child" });
    match forked {
        Ok(Ok((child, both))) => println!("{both}: {:?}", nix::sys::wait::waitpid(child, None).map(|s| (s.pid() == Some(child), s))),
        other => println!("{other:?}"),
    }
}
