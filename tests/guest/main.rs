//! The guest's test binary for the demo, whose agent resolves devices without the real one's crate.

/// Called by the C library before Rust's runtime starts, which needs descriptors: a kernel without
/// a console gives its init none.
// SAFETY: libc calls what .init_array points to as a C function, which this is; the function uses
// nothing of Rust's runtime.
#[allow(
    unsafe_code,
    reason = "only the section attribute has the C library call a function"
)]
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = kata_gpu_init::machine::sys::before_main;

fn main() {
    kata_gpu_test_guest::start::main(kata_gpu_test_guest::agent::cdi_json::specs);
}
