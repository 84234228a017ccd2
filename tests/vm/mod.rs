//! The VM tests: a real kernel boots the real initrd, and the host looks at what comes out. Each file holds the host halves of its tests and, where
//! there are any, their guest halves; [`guest`] lists those, [`TESTS`] all tests.

pub mod guest;

#[cfg(feature = "host")]
pub mod harness;

#[cfg(feature = "host")]
mod agent;
#[cfg(feature = "host")]
mod bring_up;
#[cfg(feature = "host")]
mod containers;
#[cfg(feature = "host")]
mod events;
#[cfg(feature = "host")]
mod faults;
#[cfg(feature = "host")]
mod modules;
#[cfg(feature = "host")]
mod readers;

/// Every VM test, in the order in which they run.
#[cfg(feature = "host")]
pub const TESTS: &[&[harness::VmTest]] =
    &[containers::TESTS, bring_up::TESTS, faults::TESTS, events::TESTS, agent::TESTS, readers::TESTS, modules::TESTS];
