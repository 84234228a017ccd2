//! The CDI spec: what is generated, what `cdi check` says of it, and the crates that agents read it
//! with.

mod beside;
mod check;
mod driver_roots;
pub mod generate;
mod oracle;
mod publications;
mod schema;
