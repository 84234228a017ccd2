//! GPU guests of a Kata configuration start from our initrd or image, by one drop-in beside the
//! configuration. `uninstall` takes it away.
//!
//! Invariants: nothing but that drop-in is ever written; it is written whole or not at all; nothing
//! is written where it would not have the effect that was asked for, which is computed with the
//! runtime's own merge rule before the file exists. Everything that stands in the way is said at
//! once. The initrd is judged by `initrd verify`. Not here: building images, and what they need.

pub mod checks;
pub mod daemon_set;
pub mod drop_in;
pub mod guest;
pub mod here;
pub mod initrd;
pub mod kata_config;
pub mod kernel_params;
pub mod manifests;
pub mod merge;
pub mod node;
pub mod place;
pub mod plan;
pub mod refusal;
pub mod trial;
pub mod uninstall;
pub mod version;
pub mod write;

pub use here::{Args, Said, from_words};
