//! Facts that a worker which takes over reads from the records of the one that died. Pure.

use crate::clock::boottime_ns;
use crate::events::names;
use crate::events::record::{Kind, Level, Record};
use crate::pci::PciAddress;
use std::collections::{BTreeMap, HashMap};

/// State of one GPU so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Set once its name was reported.
    pub found: bool,
    /// Device minor; set once bound.
    pub minor: Option<u32>,
    /// Set once usable, where names by UUID are configured.
    pub uuid: Option<String>,
    pub published: bool,
    pub usable: bool,
    pub failed: bool,
}

/// State read from the stream of earlier workers.
#[derive(Debug, Default)]
pub struct Previous {
    pub gpus: HashMap<PciAddress, Known>,
    /// Steps that began and did not end: their worker died in them.
    pub open: Vec<Record>,
    /// Greatest id of a step.
    pub last_step: u64,
    /// Sequence number of the last line of the kernel's log in the stream.
    pub last_kmsg: Option<u64>,
}

impl Previous {
    pub fn from_records(records: &[Record]) -> Self {
        let mut previous = Self::default();
        let mut open = BTreeMap::new();
        for record in records {
            match (record.kind, record.span) {
                (Kind::Begin, Some(span)) => {
                    previous.last_step = previous.last_step.max(span);
                    open.insert(span, record.clone());
                }
                (Kind::End, Some(span)) => {
                    open.remove(&span);
                }
                (Kind::Kmsg, _) => previous.last_kmsg = record.fields.get("kmsg_seq").and_then(|n| n.as_u64()).max(previous.last_kmsg),
                _ => previous.take_event(record),
            }
        }
        previous.open = open.into_values().collect();
        previous
    }

    fn take_event(&mut self, record: &Record) {
        let Some(gpu) = record.gpu else { return };
        let known = self.gpus.entry(gpu).or_default();
        match record.name.as_str() {
            // After a removal, no earlier fact holds.
            names::GPU_REMOVED => *known = Known::default(),
            names::GPU_FOUND => known.found = true,
            names::GPU_BOUND => known.minor = record.fields.get("minor").and_then(|n| u32::try_from(n.as_u64()?).ok()),
            names::GPU_PUBLISHED => known.published = true,
            names::GPU_USABLE => {
                known.usable = true;
                known.uuid = record.fields.get("uuid").and_then(|u| u.as_str()).map(str::to_string);
            }
            names::GPU_FAILED => known.failed = true,
            _ => {}
        }
    }

    pub fn gpu(&self, gpu: PciAddress) -> Known {
        self.gpus.get(&gpu).cloned().unwrap_or_default()
    }
}

/// End record of a step whose worker has died in it.
pub fn end_of(begin: &Record) -> Record {
    Record {
        boottime_ns: boottime_ns(),
        level: Level::Error,
        gpu: begin.gpu,
        span: begin.span,
        parent: begin.parent,
        error: Some("the worker died in this step; its successor goes on".into()),
        ..Record::new(Kind::End, &begin.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: Kind, name: &str, gpu: &str, span: Option<u64>) -> Record {
        Record { gpu: gpu.parse().ok(), span, ..Record::new(kind, name) }
    }

    #[test]
    fn open_steps_states_and_the_logs_end_are_found() {
        const GPU: &str = "0001:00:03.0";
        let mut line = record(Kind::Kmsg, "kmsg", "", None);
        line.fields.insert("kmsg_seq".into(), 812.into());
        let mut bound = record(Kind::Event, names::GPU_BOUND, GPU, None);
        bound.fields.insert("minor".into(), 5.into());
        let records = [
            record(Kind::Begin, names::GPU_BIND, GPU, Some(4)),
            record(Kind::End, names::GPU_BIND, GPU, Some(4)),
            bound,
            record(Kind::Begin, names::GPU_INIT, GPU, Some(9)),
            line,
            record(Kind::Event, names::GPU_FAILED, "0001:00:04.0", None),
            record(Kind::Event, names::GPU_USABLE, "0001:00:05.0", None),
            record(Kind::Event, names::GPU_REMOVED, "0001:00:05.0", None),
        ];
        let previous = Previous::from_records(&records);
        assert_eq!(previous.open.iter().map(|r| r.span).collect::<Vec<_>>(), [Some(9)]);
        assert_eq!((previous.last_step, previous.last_kmsg), (9, Some(812)));
        assert_eq!(previous.gpu(GPU.parse().unwrap()), Known { minor: Some(5), ..Known::default() });
        assert_eq!(previous.gpu("0001:00:04.0".parse().unwrap()), Known { failed: true, ..Known::default() });
        assert_eq!(previous.gpu("0001:00:05.0".parse().unwrap()), Known::default());
        let end = end_of(&previous.open[0]);
        assert_eq!((end.kind, end.span, end.gpu), (Kind::End, Some(9), GPU.parse().ok()));
    }
}
