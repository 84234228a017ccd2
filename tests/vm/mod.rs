//! The VM tests: a real kernel boots the real initrd, and the host looks at what comes out. Each
//! file holds the host halves of its tests; guest halves are in tests/guest/halves.
//! [`TESTS`] lists all tests.

pub mod harness;

mod agent;
mod beside;
mod bring_up;
mod clock;
mod coherent_memory;
mod container_roots;
mod containers;
mod disk_root;
pub mod emulated_host;
mod events;
mod extensions;
mod faults;
mod guest_lives;
mod hot_plug;
mod import;
mod initrd;
pub mod inside;
mod kata;
mod modules;
mod nvml;
mod readers;
mod readiness;
mod real_driver;
mod reasons;
mod resets;
mod rootfs;
pub mod services;
mod simulator;
pub mod soak;
mod topology;
mod vcpus;
mod worker;

/// Every VM test, in the order in which they run.
pub const TESTS: &[&[harness::VmTest]] = &[
    containers::TESTS,
    container_roots::TESTS,
    simulator::TESTS,
    bring_up::TESTS,
    guest_lives::TESTS,
    beside::TESTS,
    topology::TESTS,
    faults::TESTS,
    reasons::TESTS,
    coherent_memory::TESTS,
    resets::TESTS,
    worker::TESTS,
    vcpus::TESTS,
    services::TESTS,
    hot_plug::TESTS,
    soak::TESTS,
    events::TESTS,
    clock::TESTS,
    agent::TESTS,
    readers::TESTS,
    import::TESTS,
    modules::TESTS,
    initrd::TESTS,
    nvml::TESTS,
    readiness::TESTS,
    disk_root::TESTS,
    extensions::TESTS,
    real_driver::TESTS,
    rootfs::TESTS,
    emulated_host::service::TESTS,
    emulated_host::guests::TESTS,
    emulated_host::clock::TESTS,
    emulated_host::diagnosis::TESTS,
    emulated_host::root::TESTS,
    emulated_host::passthrough::TESTS,
    emulated_host::trace::TESTS,
    kata::TESTS,
];

/// Tests that boot no guest of another architecture: they have a whole host of x86-64.
pub const NEED_X86_64: &[&[harness::VmTest]] = &[
    emulated_host::service::TESTS,
    emulated_host::guests::TESTS,
    emulated_host::clock::TESTS,
    emulated_host::diagnosis::TESTS,
    emulated_host::root::TESTS,
    emulated_host::passthrough::TESTS,
    emulated_host::trace::TESTS,
    kata::TESTS,
];

/// Tests that a run of everything boots on arm64, too.
pub const ON_ARM64: &[&str] = &[
    "containers_load_the_guests_libcuda_and_see_only_their_gpus",
    "gpu_0s_container_starts_before_gpu_7_is_bound_pipelined",
    "a_gpu_that_fails_to_initialise_leaves_and_the_others_stay",
    "a_worker_killed_after_the_boot_leaves_the_spec_as_it_was",
    "a_gpu_that_is_removed_leaves_the_spec_and_comes_back",
    "the_stream_of_a_full_boot_has_its_golden_shape",
    "coherent_memory_goes_online_movable_before_the_first_open",
    "rootfs_sim_boots_to_a_container",
];
