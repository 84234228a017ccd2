//! Analysis of a boot's timeline, and of many boots: owners of time, waits, regressions. No text
//! for people.

pub mod blame; // owners of time
pub mod chapters; // the phases of a boot, for people
pub mod compare; // regressions between boots
pub mod critical_path; // the chain that set the end, and possible gains
pub mod cures; // what the rules of the doctor would have gained
pub mod graph; // waits of steps for steps
pub mod held_up; // steps that waited for a vCPU that enables a GPU
pub mod loaded; // a boot read from its file, with model and timeline
pub mod many_boots; // the numbers of many boots
pub mod metrics; // a boot as numbers that can be compared
pub mod rules; // what makes boots slow on a host, as data
pub mod statistics; // medians, percentiles, bootstrap
pub mod verdict; // what happened, why, what to do
