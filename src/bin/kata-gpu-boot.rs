//! Placeholder until the commit that brings the program.
fn main() {}
