//! Guest images and Kata's configuration.

mod doing; // an error of a step on a file
pub mod guest_disk; // a guest's image as a disk: where its root is
pub mod images; // initrds and disk images: list, compare, verify, pack, replace the init
pub mod install; // guests of a configuration start from ours
pub mod kata; // Kata's configuration: its files, its merge rules, its version
