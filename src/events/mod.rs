//! Structured timing events: what the boot did, when, and why it waited.
//!
//! [`record`] is the wire format (schema 1), the only thing that guest and host share.

pub mod record;
