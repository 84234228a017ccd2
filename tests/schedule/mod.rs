//! The schedule before its judge: the locks of host and driver in virtual time. No I/O, no floating
//! point, no clock.

pub mod locks;
pub mod policies;
