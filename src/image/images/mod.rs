//! Guest images: packing, listing, verifying, and replacing the init. Needs no root, and other
//! programs for disk images alone.
//!
//! Images are untrusted: reading is bounded, nothing is unpacked outside a private directory, and
//! output is printable ASCII.

pub mod components;
pub mod diff;
pub mod disk_image;
pub mod driver_list;
pub mod entry_list;
pub mod entry_text;
pub mod helper;
pub mod image;
pub mod kernel_release;
pub mod ls;
pub mod new_image;
pub mod newc;
pub mod output_file;
pub mod pack;
pub mod repack;
pub mod scratch_dir;
pub mod unpacked_root;
pub mod verify;
pub mod view;
