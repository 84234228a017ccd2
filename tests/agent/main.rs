//! The guest's test binary: which of its programs runs is said by the name it is started under.

fn main() {
    let name = std::env::args().next().unwrap_or_default();
    match name.rsplit('/').next() {
        Some("hardware") => kata_gpu_tests::hardware::run(),
        Some("minimal-init") => kata_gpu_tests::minimal_init::run(),
        _ => kata_gpu_tests::agent::run(),
    }
}
