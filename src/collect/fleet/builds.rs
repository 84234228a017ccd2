//! Boots that are over by the build of the guest's init, so that two inits of one rollout can be
//! told apart.
//!
//! Version and build id are guests' texts, the only ones that become labels. A text of another
//! form than those of a release counts as [`OTHER`], and only the [`MAX_BUILDS`] builds of the
//! newest boots are kept: a guest that makes up ids costs series up to that bound in each scrape
//! (Prometheus keeps former ones), and a real build that it displaces is back, from 0, with its
//! next boot.

use kata_gpu_report::analysis::metrics::{Metrics, OTHER};
use std::ops::RangeInclusive;

/// Most builds that have series of their own: some rollouts, of which two run at a time.
pub const MAX_BUILDS: usize = 16;
/// Longest version that is taken, in bytes.
const MAX_VERSION: usize = 32;
/// Digits of a build id: 40 of a release (`--build-id=sha1`), 16 with the shortest of linkers' own.
const ID_DIGITS: RangeInclusive<usize> = 16..=40;

/// Boots of one init.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Build {
    pub version: String,
    pub id: String,
    /// Boots in which nothing failed, and boots in which something did.
    pub well: u64,
    pub failed: u64,
}

/// Builds, that of the newest boot last; first the boots without one.
#[derive(Clone, Debug)]
pub struct Builds {
    others: Build,
    known: Vec<Build>,
}

impl Default for Builds {
    fn default() -> Self {
        Self {
            others: Build::new(OTHER, OTHER),
            known: Vec::new(),
        }
    }
}

impl Build {
    fn new(version: &str, id: &str) -> Self {
        let (version, id) = (version.to_string(), id.to_string());
        Self {
            version,
            id,
            well: 0,
            failed: 0,
        }
    }

    fn count(&mut self, boot: &Metrics) {
        match boot.settled && boot.failures.is_empty() {
            true => self.well += 1,
            false => self.failed += 1,
        }
    }
}

impl Builds {
    pub fn add(&mut self, boot: &Metrics) {
        let named = boot.version.as_deref().zip(boot.build.as_deref());
        let Some((version, id)) = named.filter(|(version, id)| is_version(version) && is_id(id))
        else {
            return self.others.count(boot);
        };
        let is_it = |build: &Build| build.version == version && build.id == id;
        let mut build = match self.known.iter().position(is_it) {
            Some(at) => self.known.remove(at),
            None => Build::new(version, id),
        };
        build.count(boot);
        if self.known.len() >= MAX_BUILDS {
            self.known.remove(0);
        }
        self.known.push(build);
    }

    pub fn all(&self) -> impl Iterator<Item = &Build> {
        [&self.others].into_iter().chain(&self.known)
    }
}

/// Whether a text has the form of a version: needs no escaping, and says nothing but that.
fn is_version(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".+-".contains(&byte);
    text.len() <= MAX_VERSION
        && text.starts_with(|c: char| c.is_ascii_digit())
        && text.bytes().all(plain)
}

fn is_id(text: &str) -> bool {
    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    ID_DIGITS.contains(&text.len()) && text.bytes().all(digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot(version: &str, build: &str) -> Metrics {
        Metrics {
            version: Some(version.into()),
            build: Some(build.into()),
            settled: true,
            ..Metrics::default()
        }
    }

    fn id(n: u32) -> String {
        format!("{n:040x}")
    }

    fn counts(builds: &Builds) -> Vec<(String, u64, u64)> {
        let of = |build: &Build| (build.id.clone(), build.well, build.failed);
        builds.all().map(of).collect()
    }

    #[test]
    fn two_builds_of_a_version_are_told_apart_by_what_failed() {
        let mut builds = Builds::default();
        builds.add(&boot("0.1.0", &id(1)));
        builds.add(&boot("0.1.0", &id(2)));
        let failed = Metrics {
            failures: vec!["init: needs-reset".into()],
            ..boot("0.1.0", &id(2))
        };
        builds.add(&failed);
        builds.add(&Metrics {
            settled: false,
            ..boot("0.1.0", &id(2))
        });
        let want = [(OTHER.into(), 0, 0), (id(1), 1, 0), (id(2), 1, 2)];
        assert_eq!(counts(&builds), want);
    }

    #[test]
    fn no_other_text_is_a_build() {
        let mut builds = Builds::default();
        let (good, long) = (id(1), "1".repeat(MAX_VERSION + 1));
        let (upper, quoted) = ("A".repeat(40), format!("{}\"}}", "a".repeat(38)));
        for (version, build) in [
            ("0.1.0\"", &*good),
            ("", &good),
            ("v1", &good),
            (&long, &good),
            ("0.1.0", ""),
            ("0.1.0", "abc"),
            ("0.1.0", &upper),
            ("0.1.0", &quoted),
        ] {
            builds.add(&boot(version, build));
        }
        builds.add(&Metrics::default());
        assert_eq!(counts(&builds), [(OTHER.into(), 8, 1)]);
    }

    #[test]
    fn made_up_builds_are_bounded_and_a_real_one_comes_back() {
        let mut builds = Builds::default();
        builds.add(&boot("0.1.0", &id(0)));
        for n in 1..=1000 {
            builds.add(&boot("0.1.0", &id(n)));
        }
        assert_eq!(builds.all().count(), MAX_BUILDS + 1);
        builds.add(&boot("0.1.0", &id(0)));
        assert_eq!(counts(&builds).last(), Some(&(id(0), 1, 0)));
        // Booted again and again, it stays.
        for n in 1..=1000 {
            builds.add(&boot("0.1.0", &id(n)));
            builds.add(&boot("0.1.0", &id(0)));
        }
        assert_eq!(counts(&builds).last(), Some(&(id(0), 1001, 0)));
    }
}
