//! The VM tests: a real kernel boots the real initrd, and the host looks at what comes out. Each
//! file holds the host halves of its tests; guest halves are in tests/guest/halves.
//! [`TESTS`] lists all tests.

pub mod harness;

mod agent;
mod beside;
mod bring_up;
mod clock;
mod cluster;
mod coherent_memory;
mod container_roots;
mod containers;
pub mod disk_root;
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
pub mod tiers;
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
    cluster::TESTS,
];
