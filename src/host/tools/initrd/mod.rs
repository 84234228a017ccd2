//! Guest images: packed, looked into, verified, and given another init. Needs no root, and no other
//! program but for disk images.
//!
//! Images are hostile: bounded, never unpacked outside a directory of their own, and printed as
//! printable ASCII.

pub mod components;
pub mod diff;
pub mod disk_image;
pub mod driver_list;
pub mod helper;
pub mod image;
pub mod kernel;
pub mod list;
pub mod ls;
pub mod newc;
pub mod output;
pub mod pack;
pub mod progress;
pub mod repack;
pub mod text;
pub mod tree;
pub mod verify;
pub mod view;
