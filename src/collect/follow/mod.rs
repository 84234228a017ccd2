//! Boots while they happen, from the collector's files as they grow.

pub mod files; // the files of a directory as they grow
pub mod sandbox; // one sandbox, to its outcome
