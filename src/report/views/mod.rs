//! A boot as people and other programs see it. Views read the model and its timeline; none works
//! out anything of its own.

pub mod account; // what the accounts share
pub mod boot_page; // the table of one boot, and its summary
pub mod by_gap; // `show --by gap`
pub mod by_owner; // `show --by owner`
pub mod by_path; // `show --by path`
pub mod by_phase; // `show --by phase`, the default
mod drawn; // steps and marks of a waterfall
pub mod follow; // boots while they happen, from the files as they grow
pub mod grid; // tables of other columns
pub mod health_table; // report of NVML on the GPUs, as columns
pub mod lanes; // which lanes a waterfall has
pub mod live; // rows as they happen
mod markup; // shared by page and picture
pub mod page; // HTML
pub mod perfetto; // a trace for Perfetto
pub mod rows; // records into rows: side, what, how long
pub mod summary; // GPUs, containers, milestones, and what is wrong with the record
pub mod table; // rows into lines
pub mod verdict_lines; // the verdict, with which every view begins
pub mod waterfall; // lanes and steps, which all exports draw
