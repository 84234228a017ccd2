//! Start of the guest's test binary: the name it is started under selects one of its programs.

use crate::agent::config::AGENT_VERSION;
use crate::agent::{cdi, container_run};

/// Runs the program; the agent resolves devices by `specs`.
pub fn main(specs: cdi::Open) {
    cdi::resolve_with(specs);
    let name = std::env::args().next().unwrap_or_default();
    match name.rsplit('/').next() {
        Some("hardware") => crate::hardware::run(),
        Some("driver-script") => crate::driver_script::run(),
        Some("minimal-init") => crate::minimal_init::run(),
        Some("serial-init") => crate::serial_init::run(),
        Some(crate::serial_init::HOLDER) => crate::serial_init::hold(),
        Some(crate::agent::pod::process::PARKED) => crate::agent::pod::process::park(),
        Some("fork-panics") => fork_panics(),
        Some(crate::halves::inside::NAME) => crate::halves::inside::run(),
        Some(crate::halves::vmm::NAME) => crate::halves::vmm::run(),
        Some(crate::halves::forge::NAME) => crate::halves::forge::run(),
        // The interpreter of a script, whose path comes behind the script's own word.
        Some("test-programs")
            if std::env::args()
                .nth(1)
                .is_some_and(|word| word == crate::stamped::NAME) =>
        {
            crate::stamped::run(&std::env::args().skip(2).collect::<Vec<_>>())
        }
        // The interpreter of a script, whose path comes first.
        Some("test-programs")
            if std::env::args()
                .nth(1)
                .is_some_and(|script| script.starts_with('/')) =>
        {
            crate::services::run(&std::env::args().skip(1).collect::<Vec<_>>())
        }
        // Kata's shim, as far as an installer asks it.
        Some("containerd-shim-kata-v2") => println!(
            "Kata Containers containerd shim (Golang): id: \"io.containerd.kata.v2\", version: \
             {AGENT_VERSION}, commit: none"
        ),
        Some("trap-init") => crate::trap_init::run(),
        // The real one knows this option, too.
        _ if std::env::args().nth(1).is_some_and(|a| a == "--version") => {
            println!("kata-agent version {} (for tests)", AGENT_VERSION)
        }
        _ if std::env::args()
            .nth(1)
            .is_some_and(|a| a == container_run::WORD) =>
        {
            container_run::process(&std::env::args().skip(2).collect::<Vec<_>>())
        }
        _ => crate::agent::run(),
    }
}

/// Forks as PID 1 does, with a child that panics, and prints which process continues behind the
/// fork. A program does this, because a test has threads.
fn fork_panics() {
    let own = std::process::id();
    let forked = std::panic::catch_unwind(|| {
        kata_gpu_init::machine::sys::fork_single_threaded("both", |both| panic!("{both}"))
    });
    println!(
        "behind the fork: {}",
        if std::process::id() == own {
            "the parent"
        } else {
            "the child"
        }
    );
    match forked {
        Ok(Ok((child, both))) => println!(
            "{both}: {:?}",
            nix::sys::wait::waitpid(child, None).map(|s| (s.pid() == Some(child), s))
        ),
        other => println!("{other:?}"),
    }
}
