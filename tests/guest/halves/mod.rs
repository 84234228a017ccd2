//! Guest halves of the VM tests, which run in the guest; their host halves are in tests/vm.

mod census;
pub mod console_lines;
pub mod extensions;
pub mod forge;
pub mod guest;
mod hot_plug_loop;
mod hot_plug_soak;
pub mod inside;
pub mod liar;
pub mod random;
pub mod script;
pub mod stalls;
pub mod vmm;

/// The value of a half's parameter, `NAME=`, on the kernel's command line.
fn parameter(name: &str) -> Option<String> {
    let line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let mut words = line.split_ascii_whitespace();
    words.find_map(|word| word.strip_prefix(name).map(str::to_string))
}
