//! The CDI spec: what is generated, what `cdi check` says of it, and the crates that agents read it
//! with.

#[cfg(feature = "host")]
mod beside;
#[cfg(feature = "host")]
mod check;
#[cfg(feature = "host")] // for its stand-ins of libraries
mod driver_roots;
#[cfg(feature = "host")]
pub mod generate;
mod oracle;
mod publications;
mod schema;
