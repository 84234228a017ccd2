//! The guest's test binary: which of its programs runs is said by the name it is started under.

use kata_gpu_tests::agent::config::AGENT_VERSION;
use kata_gpu_tests::agent::container_run;

fn main() {
    let name = std::env::args().next().unwrap_or_default();
    match name.rsplit('/').next() {
        Some("hardware") => kata_gpu_tests::hardware::run(),
        Some("driver-script") => kata_gpu_tests::driver_script::run(),
        Some("minimal-init") => kata_gpu_tests::minimal_init::run(),
        Some("trap-init") => kata_gpu_tests::trap_init::run(),
        // The real one knows this option, too.
        _ if std::env::args().nth(1).is_some_and(|a| a == "--version") => println!("kata-agent version {} (for tests)", AGENT_VERSION),
        _ if std::env::args().nth(1).is_some_and(|a| a == container_run::WORD) => {
            container_run::process(&std::env::args().skip(2).collect::<Vec<_>>())
        }
        _ => kata_gpu_tests::agent::run(),
    }
}
