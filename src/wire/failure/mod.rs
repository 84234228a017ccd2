//! The catalogue of failures: what went wrong, whose it is, the cure, and how sure that is.
//!
//! A new cause is a row in [`reason`], a signature in [`signatures`], and a log in the tests'
//! fixtures. The live guest, `show`, `list`, the metrics, `install` and `doctor` read the same row.

pub mod facts; // what is known besides the words
pub mod reason; // the rows
mod signatures; // words and facts into a row
pub mod xid; // what an Xid means

pub use facts::{Facts, Module};
pub use reason::{FailedStep, Reason, Subject, Sure, Whose};

use crate::driver_log::init_code;
use signatures::{Signature, of_code};
use std::borrow::Cow;

/// A failure's row, by its words and facts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis<'a> {
    pub reason: Reason,
    pub sure: Sure,
    /// The message that decides; without one, the last.
    pub words: Option<&'a str>,
    /// The row's cure, with what the message itself names.
    pub cure: Cow<'static, str>,
}

impl<'a> Diagnosis<'a> {
    /// The row of a reason that is known without words.
    pub fn known(reason: Reason, words: Option<&'a str>) -> Self {
        Self::with(reason, words, reason.cure())
    }

    /// The same of a GPU.
    pub fn known_of_gpu(reason: Reason, words: Option<&'a str>) -> Self {
        Self::with(reason, words, reason.cure_of_gpu())
    }

    fn with(reason: Reason, words: Option<&'a str>, cure: &'static str) -> Self {
        Self {
            reason,
            sure: reason.sure(),
            words,
            cure: completed(cure, words),
        }
    }

    /// The failure of a sandbox whose guest is known to have run at that time: its agent was late,
    /// not missing, so that a longer time-out helps.
    pub fn while_guest_ran(self) -> Self {
        match self.reason {
            Reason::AgentNoAnswer => Self::known(Reason::AgentLate, self.words),
            _ => self,
        }
    }
}

/// Failure of a GPU in `step`. `messages`: the driver's about this GPU, or that can be about no
/// other, since the step began, in order; a message of several lines is one.
pub fn of_gpu<'a, T: AsRef<str>>(
    step: FailedStep,
    messages: &'a [T],
    facts: &Facts,
) -> Diagnosis<'a> {
    if let Some(found) = of_words(messages, facts) {
        return found;
    }
    let texts = || messages.iter().map(AsRef::as_ref);
    let coded = texts()
        .rev()
        .find_map(|text| Some((init_code(text)?, text)));
    if let Some((code, words)) = coded {
        let (reason, sure) = of_code(code, facts);
        return Diagnosis {
            sure,
            ..Diagnosis::known_of_gpu(reason, Some(words))
        };
    }
    Diagnosis::known_of_gpu(step.general(), texts().next_back())
}

/// Failure of a GPU that these messages show by words of their own, without a code.
pub fn of_words<'a, T: AsRef<str>>(messages: &'a [T], facts: &Facts) -> Option<Diagnosis<'a>> {
    let texts = || messages.iter().map(AsRef::as_ref);
    let shown = |signature: &&Signature| (signature.when)(facts);
    signatures::OF_GPUS
        .iter()
        .filter(shown)
        .find_map(|signature| {
            let words = texts().find(|text| signature.is_in(text))?;
            Some(Diagnosis {
                sure: signature.sure,
                ..Diagnosis::known_of_gpu(signature.reason, Some(words))
            })
        })
}

/// End of a guest, or of what runs in it, that a line of its console shows.
pub fn of_guest(text: &str) -> Option<Diagnosis<'_>> {
    first(signatures::OF_GUESTS, text)
}

/// Beginning of the verdict that PID 1 puts into a failed GPU's entry of the CDI spec, as the
/// destination of a mount: `/../GPU 0001:00:05.0 has failed (firmware-boot): ..`. kata-agent
/// refuses that, and prints it.
pub const VERDICT: &str = "/../GPU ";

/// Failure of a sandbox or container by an error of the runtime.
pub fn of_sandbox(error: &str) -> Option<Diagnosis<'_>> {
    let verdict = error.split_once(VERDICT).and_then(|(_, verdict)| {
        let (_, rest) = verdict.split_once(" has failed (")?;
        Reason::named(rest.split_once(')')?.0)
    });
    if let Some(reason) = verdict {
        return Some(Diagnosis::known(reason, Some(error)));
    }
    first(signatures::OF_SANDBOXES, error)
}

fn first<'a>(signatures: &[Signature], text: &'a str) -> Option<Diagnosis<'a>> {
    let signature = signatures.iter().find(|signature| signature.is_in(text))?;
    Some(Diagnosis {
        sure: signature.sure,
        ..Diagnosis::known(signature.reason, Some(text))
    })
}

/// Place of a driver branch in a cure, which the driver's message names.
const BRANCH: &str = "{branch}";

fn completed(cure: &'static str, words: Option<&str>) -> Cow<'static, str> {
    if !cure.contains(BRANCH) {
        return cure.into();
    }
    let branch =
        words.and_then(|words| words.split_once("through the NVIDIA ")?.1.split(' ').next());
    // A guest writes the words: only a number is put into a sentence of ours.
    let is_branch = |text: &&str| {
        (1..=12).contains(&text.len())
            && text
                .bytes()
                .all(|b| b.is_ascii_digit() || b == b'.' || b == b'x')
    };
    cure.replace(BRANCH, branch.filter(is_branch).unwrap_or("580.xx"))
        .into()
}

#[cfg(test)]
mod tests;
