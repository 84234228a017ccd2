//! An HTTP client that fetches nothing: what `jsonschema` wants of `reqwest` 0.12, see
//! ../README.md.

#[path = "../answer.rs"]
mod answer;

pub use answer::Error;

pub mod blocking {
    pub use super::answer::{Response, get};
}
