//! Guest images and Kata's configuration.

pub mod guest_disk; // a guest's image as a disk: where its root is
pub mod images; // initrds and disk images: list, compare, verify, pack, replace the init
pub mod install;
pub mod kata; // Kata's configuration: its files, its merge rules, its version // guests of a configuration start from ours
