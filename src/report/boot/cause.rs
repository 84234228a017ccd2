//! Why something failed, as its record says it: in the catalogue's words where this program knows
//! the reason, so that no guest chooses what an operator is told to do.

use crate::data::compact_record::{Fields, Record};
use crate::data::text::start;
use kata_gpu_wire::catalogue::logged;
use kata_gpu_wire::failure::{Diagnosis, FailedStep, Reason, Sure};
use kata_gpu_wire::names;
use serde::Serialize;

/// Limit of one text, in bytes.
const MAX_TEXT: usize = 2000;
/// The init's words in front of the driver's, in the error of a failed GPU.
const LOGGED: &str = "; the driver logged: ";

/// The cause of a failure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cause {
    /// Name of the reason in the catalogue of failures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub what: Option<String>,
    /// Place of the cure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whose: Option<String>,
    /// certain, likely or unsure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sure: Option<String>,
    /// The message that decides: the driver's, the kernel's or the runtime's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub words: Option<String>,
    /// Messages of the same time that may belong to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nearby: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cure: Option<String>,
}

impl Cause {
    /// The cause in the fields of a record, and in its error.
    pub fn of(fields: &Fields, error: Option<&str>) -> Self {
        let text = |key: &str| {
            let text = fields.text(key).filter(|text| !text.is_empty());
            text.map(|text| start(text, MAX_TEXT).to_string())
        };
        let code = text("reason");
        // Guests without this field have the words in their error, behind the init's own.
        let words = text("words").or_else(|| {
            let words = error?.split_once(LOGGED)?.1;
            Some(start(words, MAX_TEXT).to_string())
        });
        let known = code.as_deref().and_then(Reason::named);
        let sure = text("sure");
        let sure = sure.as_deref().and_then(Sure::named);
        let mut cause = match known {
            Some(reason) => Self::known(reason, words),
            None => Self {
                code,
                whose: text("whose"),
                words,
                cure: text("cure"),
                ..Self::default()
            },
        };
        cause.sure = sure.map(|sure| sure.name().into()).or(cause.sure);
        cause.nearby = text("nearby").or_else(|| text("bars"));
        cause
    }

    /// The catalogue's row.
    pub fn known(reason: Reason, words: Option<String>) -> Self {
        let row = Diagnosis::known(reason, words.as_deref());
        Self {
            code: Some(reason.name().into()),
            what: Some(reason.what().into()),
            whose: Some(reason.whose().name().into()),
            sure: Some(row.sure.name().into()),
            cure: Some(row.cure.into_owned()),
            words,
            nearby: None,
        }
    }
}

/// End of a guest or failure of its sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct End {
    pub at_ns: u64,
    /// Whether the runtime said it, not the guest.
    pub of_sandbox: bool,
    /// Time that the runtime had waited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waited_ms: Option<u64>,
    #[serde(flatten)]
    pub cause: Cause,
}

impl End {
    /// The end that a record reports, if it does.
    pub fn of(record: &Record) -> Option<Self> {
        let error = record.error.as_deref();
        let of_sandbox = match record.name.as_str() {
            names::SETTLED | names::DRIVER_FILES if error.is_some() => false,
            logged::GUEST_ENDED | names::POWER_OFF => false,
            logged::SANDBOX_FAILED => true,
            _ => return None,
        };
        let mut cause = Cause::of(&record.fields, error);
        if cause.code.is_none() {
            let reason = match of_sandbox {
                true => Reason::SandboxFailed,
                false if record.name == names::SETTLED => Reason::SpecNotFound,
                false if record.name == names::DRIVER_FILES => Reason::NoDriverFiles,
                false => Reason::PoweredOff,
            };
            cause = Cause::known(reason, None);
        }
        cause.words = cause
            .words
            .or_else(|| Some(start(error?, MAX_TEXT).to_string()));
        Some(Self {
            at_ns: record.boottime_ns,
            of_sandbox,
            waited_ms: record.fields.number("waited_ms"),
            cause,
        })
    }
}

/// The step of a failure for people, behind "failed".
pub fn step_phrase(step: &str) -> String {
    FailedStep::named(step).map_or_else(|| format!("in {step}"), |step| step.phrase().to_string())
}
