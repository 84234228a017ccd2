//! GPU guests of a Kata configuration start from our initrd or image, by one drop-in beside the
//! configuration. `install --remove` removes it.
//!
//! Invariants: no other file is ever written. The drop-in is written whole or not at all, and only
//! where it has the requested effect. The runtime's own merge rule gives the effect before the file
//! exists. All refusals are reported at once. Initrd and image are judged by
//! `image verify`. Not here: building images, and the requirements on them.

pub mod checks;
pub mod drop_in_file;
pub mod drop_in_plan;
pub mod gpu_pods;
pub mod guest;
pub mod guest_check;
pub mod here;
pub mod kernel_params;
pub mod node;
pub mod place;
pub mod remove;
pub mod trial;

pub use here::{Args, Report};
