//! The schedule before its judge: the locks of host and driver in virtual time, and the best order
//! that a search can find. No I/O, no floating point, no clock.

pub mod locks;
pub mod optimum;
pub mod policies;
pub mod random;
