//! Guest halves of VM tests, by name: run by the test agent for `testagent.guest=NAME`.

/// Name and program of each guest half.
pub const GUEST_HALVES: &[(&str, fn())] = &[];
