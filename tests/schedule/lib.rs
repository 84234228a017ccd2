//! The schedule before its judge: the locks of host and driver in virtual time, the best order that
//! a search can find, and the schedule itself run against both. No I/O, no floating point, no
//! clock.

pub mod drive;
pub mod locks;
pub mod optimum;
pub mod policies;
pub mod properties;
