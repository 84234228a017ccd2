//! Errors of steps on files: verb, path, cause.

use anyhow::{Context, Result};
use std::path::Path;

pub trait Doing<T> {
    /// Names the step of an error, like `read` of a path.
    fn doing(self, verb: &str, path: &Path) -> Result<T>;
}

impl<T, E> Doing<T> for Result<T, E>
where
    Result<T, E>: Context<T, E>,
{
    fn doing(self, verb: &str, path: &Path) -> Result<T> {
        self.with_context(|| format!("{verb} {}", path.display()))
    }
}
