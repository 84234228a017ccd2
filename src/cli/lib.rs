//! The verbs of kata-gpu-boot, a file each: its arguments, and running it. Only the program imports
//! these.

pub mod boots; // where boots are, and reading many of them
pub mod collect;
pub mod compare;
pub mod demo;
pub mod doctor;
pub mod image;
pub mod install;
pub mod list;
pub mod manual; // completions and manual pages, made by clap
pub mod show;

#[cfg(test)]
mod tests; // golden pages of recorded, hand-made and hostile boots
