//! Guest halves of the VM tests, which run in the guest; their host halves are in tests/vm.

mod census;
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
