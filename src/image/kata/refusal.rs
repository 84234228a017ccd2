//! A reason why nothing is installed, in one line: place, key and value, why they cannot work, and
//! the cure.
//!
//! Not here: the rules; see [`crate::install::checks`]. Text from files is truncated and
//! made printable.

use kata_gpu_report::data::text::{printable, printable_start};
use serde_json::{Value as Json, json};
use std::path::Path;

/// Longest value that is shown, in bytes.
const MAX_VALUE: usize = 160;

/// Reason why nothing is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// A file, or an argument.
    pub place: String,
    /// `key = value` as in the file; empty where no key is to blame.
    pub what: String,
    pub why: String,
    pub cure: String,
    /// Whether `--force` passes the refusal: a user can know better than the rule.
    pub forcible: bool,
}

impl Refusal {
    pub fn at(place: &Path, why: impl Into<String>) -> Refusal {
        Refusal::of_argument(&place.to_string_lossy(), why)
    }

    /// Refusal of a command-line argument.
    pub fn of_argument(argument: &str, why: impl Into<String>) -> Refusal {
        Refusal {
            place: argument.into(),
            what: String::new(),
            why: why.into(),
            cure: String::new(),
            forcible: false,
        }
    }

    pub fn key(mut self, key: &str, value: &str) -> Refusal {
        self.what = format!("{key} = {}", printable_start(&value, MAX_VALUE));
        self
    }

    pub fn cure(mut self, cure: impl Into<String>) -> Refusal {
        self.cure = cure.into();
        self
    }

    pub fn forcible(mut self) -> Refusal {
        self.forcible = true;
        self
    }

    pub fn json(&self) -> Json {
        json!({
            "place": self.place,
            "what": self.what,
            "why": self.why,
            "cure": self.cure,
            "forcible": self.forcible,
        })
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&printable(&self.place))?;
        for part in [&self.what, &self.why]
            .into_iter()
            .filter(|part| !part.is_empty())
        {
            write!(f, ": {}", printable(part))?;
        }
        if !self.cure.is_empty() {
            write!(f, "; {}", printable(&self.cure))?;
        }
        if self.forcible {
            f.write_str(" (or --force)")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_line_with_place_key_value_reason_and_cure() {
        let refusal = Refusal::at(Path::new("/a\n/b.toml"), "it\u{202e} breaks")
            .key("hypervisor.qemu.image", "\"\x1b[2J\"")
            .cure("remove it")
            .forcible();
        assert_eq!(
            refusal.to_string(),
            "/a\\n/b.toml: hypervisor.qemu.image = \"\\x1b[2J\": it\\u{202e} breaks; remove it (or \
             --force)"
        );
        let long = Refusal::at(Path::new("/x"), "too long")
            .key("k", &"v".repeat(5000))
            .to_string();
        assert!(long.len() < 250 && long.contains("..."), "{long}");
    }
}
