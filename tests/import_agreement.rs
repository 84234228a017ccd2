//! Disagreements of an import of a boot's console and the stream of the same boot, beyond the
//! import's stated error.
//!
//! A time that only one of the two has is a disagreement, too: a console has no beginnings of
//! steps, and may end early.

use kata_gpu_report::boot::model::{Boot, GpuStep};
use kata_gpu_report::data::agent_log::AgentLine;
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::data::compact_record::{Field, Record};
use kata_gpu_report::data::imported_record::mark;
use kata_gpu_wire::catalogue::logged as own;
use kata_gpu_wire::record::Kind;
use std::fmt;

/// A time on which stream and import disagree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disagreement {
    pub what: String,
    pub stream_ns: Option<u64>,
    pub import_ns: Option<u64>,
    /// Bound on the import's error.
    pub error_ns: u64,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {:?} and {:?}, error {}",
            self.what, self.stream_ns, self.import_ns, self.error_ns
        )
    }
}

/// Result of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Agreement {
    /// Number of times that both have and that agree.
    pub agreed: usize,
    pub disagreements: Vec<Disagreement>,
}

impl Agreement {
    fn compare(
        &mut self,
        what: String,
        stream_ns: Option<u64>,
        import_ns: Option<u64>,
        error_ns: u64,
    ) {
        match (stream_ns, import_ns) {
            (Some(a), Some(b)) if a.abs_diff(b) <= error_ns => self.agreed += 1,
            (None, None) => {}
            _ => self.disagreements.push(Disagreement {
                what,
                stream_ns,
                import_ns,
                error_ns,
            }),
        }
    }
}

/// Compares all milestones, each GPU's, each container's, and the kernel's lines. `agent`: the
/// console's lines of the agent, for the stream's half.
pub fn agreement(stream: &BootFile, agent: &[AgentLine], import: &BootFile) -> Agreement {
    let (a, b) = (Boot::new(stream, agent), Boot::new(import, &[]));
    let mut all = Agreement::default();
    let error_of = |name: &str| {
        import
            .records
            .iter()
            .filter(|r| r.name == *name)
            .filter_map(|r| Some(mark(r)?.error_ns))
            .max()
            .unwrap_or(0)
    };
    for milestone in &a.milestones {
        let error = match milestone.name {
            "agent ready" => error_of(own::AGENT_READY),
            "first container" | "last container" => error_of(own::CONTAINER_CREATED),
            _ => 0,
        };
        let imported = b
            .milestones
            .iter()
            .find(|m| m.name == milestone.name)
            .and_then(|m| m.boottime_ns);
        all.compare(
            milestone.name.into(),
            milestone.boottime_ns,
            imported,
            error,
        );
    }
    for gpu in &a.gpus {
        let imported = b.gpus.iter().find(|g| g.address == gpu.address);
        let at = |step: Option<GpuStep>| step.map(|s| s.at_ns);
        let mut compare = |what: &str, stream: Option<u64>, import: Option<u64>| {
            all.compare(format!("{} {what}", gpu.address), stream, import, 0);
        };
        compare("found", gpu.found_ns, imported.and_then(|g| g.found_ns));
        compare(
            "enabled",
            at(gpu.enabled),
            at(imported.and_then(|g| g.enabled)),
        );
        compare("bound", at(gpu.bound), at(imported.and_then(|g| g.bound)));
        compare(
            "published",
            at(gpu.published),
            at(imported.and_then(|g| g.published)),
        );
        compare(
            "usable",
            at(gpu.usable),
            at(imported.and_then(|g| g.usable)),
        );
    }
    for container in &a.containers {
        let same = b.containers.iter().find(|c| {
            (&c.name, &c.devices, c.tries) == (&container.name, &container.devices, container.tries)
        });
        all.compare(
            format!("container {}", container.name),
            container.at_ns,
            same.and_then(|c| c.at_ns),
            error_of(own::CONTAINER_CREATED),
        );
    }
    let text = |r: &Record| {
        r.fields
            .get("text")
            .and_then(Field::as_str)
            .unwrap_or("")
            .to_string()
    };
    for record in import.records.iter().filter(|r| r.kind == Kind::Kmsg) {
        let printk = record.fields.get("printk_us");
        let same = stream.records.iter().find(|r| {
            r.kind == Kind::Kmsg && text(r) == text(record) && r.fields.get("printk_us") == printk
        });
        let error = mark(record).map_or(0, |mark| mark.error_ns);
        all.compare(
            text(record),
            same.map(|r| r.boottime_ns),
            Some(record.boottime_ns),
            error,
        );
    }
    all
}
