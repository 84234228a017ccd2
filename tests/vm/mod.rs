//! The VM tests: a real kernel boots the real initrd, and the host looks at what comes out. Each
//! file holds the host halves of its tests and, where there are any, their guest halves; [`guest`]
//! lists those, [`TESTS`] all tests.

mod census;
pub mod guest;
mod hot_plug_soak;
pub mod inside;
pub mod liar;
pub mod random;
pub(crate) mod script;
pub mod stalls;
pub mod vmm;

#[cfg(feature = "host")]
pub mod harness;

#[cfg(feature = "host")]
mod agent;
#[cfg(feature = "host")]
mod beside;
#[cfg(feature = "host")]
mod bring_up;
#[cfg(feature = "host")]
mod clock;
#[cfg(feature = "host")]
mod container_roots;
#[cfg(feature = "host")]
mod coherent_memory;
#[cfg(feature = "host")]
mod containers;
#[cfg(feature = "host")]
mod disk_root;
#[cfg(feature = "host")]
pub mod emulated_host;
#[cfg(feature = "host")]
mod events;
mod extensions;
#[cfg(feature = "host")]
mod fabric;
#[cfg(feature = "host")]
mod faults;
#[cfg(feature = "host")]
mod guest_lives;
#[cfg(feature = "host")]
mod hot_plug;
#[cfg(feature = "host")]
mod import;
#[cfg(feature = "host")]
mod initrd;
#[cfg(feature = "host")]
mod kata;
#[cfg(feature = "host")]
mod modules;
#[cfg(feature = "host")]
mod nvml;
#[cfg(feature = "host")]
mod readers;
#[cfg(feature = "host")]
mod real_driver;
#[cfg(feature = "host")]
mod reasons;
#[cfg(feature = "host")]
mod resets;
#[cfg(feature = "host")]
mod rootfs;
#[cfg(feature = "host")]
pub mod services;
#[cfg(feature = "host")]
mod simulator;
#[cfg(feature = "host")]
mod readiness;
#[cfg(feature = "host")]
pub mod soak;
#[cfg(feature = "host")]
mod topology;
#[cfg(feature = "host")]
mod vcpus;
#[cfg(feature = "host")]
mod worker;

/// Every VM test, in the order in which they run.
#[cfg(feature = "host")]
pub const TESTS: &[&[harness::VmTest]] = &[
    containers::TESTS,
    container_roots::TESTS,
    simulator::TESTS,
    bring_up::TESTS,
    guest_lives::TESTS,
    beside::TESTS,
    topology::TESTS,
    fabric::TESTS,
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
#[cfg(feature = "host")]
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
#[cfg(feature = "host")]
pub const ON_ARM64: &[&str] = &[
    "containers_load_the_guests_libcuda_and_see_only_their_gpus",
    "gpu_0s_container_starts_before_gpu_7_is_bound_pipelined",
    "every_strategy_binds_all_gpus",
    "a_gpu_that_fails_to_initialise_leaves_and_the_others_stay",
    "a_worker_killed_after_the_boot_leaves_the_spec_as_it_was",
    "a_gpu_that_is_removed_leaves_the_spec_and_comes_back",
    "the_stream_of_a_full_boot_has_its_golden_shape",
    "coherent_memory_goes_online_movable_before_the_first_open",
    "rootfs_sim_boots_to_a_container",
];
