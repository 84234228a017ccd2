//! Steps that PID 1 has run: it has no recorder, whose set-up would delay the agent. The worker
//! replays them into the stream.

use super::{RunningStep, StepId};
use crate::machine::clock::boottime_ns;
use crate::step;
use kata_gpu_wire::names;

/// Kind of a step, with the fields of its record.
#[derive(Clone, Debug)]
pub enum What {
    Mounts,
    Console,
    Config,
    /// Only where the agent needs one.
    Extensions,
    Disks {
        declared: u64,
    },
    Extension {
        name: String,
        device: String,
        bytes: u64,
    },
    Verity,
    Mount,
    Firmware,
    Libraries,
}

/// A step that is over.
#[derive(Clone, Debug)]
pub struct Stamp {
    id: StepId,
    what: What,
    begin_ns: u64,
    end_ns: u64,
    error: Option<String>,
    inside: Vec<Stamp>,
}

impl Stamp {
    /// The step, in the stream of the process that ran it.
    pub fn id(&self) -> StepId {
        self.id
    }

    pub fn end_ns(&self) -> u64 {
        self.end_ns
    }
}

fn begin(what: &What, at_ns: u64) -> RunningStep {
    match what {
        What::Mounts => step!(names::STAGE0_MOUNTS, at_ns = at_ns),
        What::Console => step!(names::STAGE0_CONSOLE, at_ns = at_ns),
        What::Config => step!(names::STAGE0_CONFIG, at_ns = at_ns),
        What::Extensions => step!(names::STAGE0_EXTENSIONS, at_ns = at_ns),
        What::Disks { declared } => {
            step!(names::EXTENSION_DISKS, at_ns = at_ns, declared = *declared)
        }
        What::Extension {
            name,
            device,
            bytes,
        } => {
            step!(
                names::EXTENSION,
                at_ns = at_ns,
                extension = name,
                device = device,
                bytes = *bytes,
                verity = true
            )
        }
        What::Verity => step!(names::EXTENSION_VERITY, at_ns = at_ns),
        What::Mount => step!(names::EXTENSION_MOUNT, at_ns = at_ns),
        What::Firmware => step!(names::EXTENSION_FIRMWARE, at_ns = at_ns),
        What::Libraries => step!(names::EXTENSION_LIBRARIES, at_ns = at_ns),
    }
}

/// Runs a step, and keeps its stamp.
pub fn timed<T>(
    stamps: &mut Vec<Stamp>,
    what: What,
    work: impl FnOnce(&mut Vec<Stamp>) -> Result<T, String>,
) -> Result<T, String> {
    let begin_ns = boottime_ns();
    let mut inside = Vec::new();
    let step = begin(&what, begin_ns);
    let id = step.id();
    let result = step.run(|| work(&mut inside));
    stamps.push(Stamp {
        id,
        what,
        begin_ns,
        end_ns: boottime_ns(),
        error: result.as_ref().err().cloned(),
        inside,
    });
    result
}

/// Puts steps of another process into this one's stream.
pub fn replay(stamps: &[Stamp]) {
    for stamp in stamps {
        let step = begin(&stamp.what, stamp.begin_ns);
        step.note("at_ns", stamp.end_ns);
        // The error is that of the record.
        let _unused = step.run(|| {
            replay(&stamp.inside);
            stamp.error.clone().map_or(Ok(()), Err)
        });
    }
}
