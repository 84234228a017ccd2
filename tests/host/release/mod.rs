//! A failure means that a release lacks what its page promises: packages, images, provenance and
//! signatures that the programs of others take, the same bytes each time.

mod crates;
