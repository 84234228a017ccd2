//! Records, steps and timelines for unit tests.

use crate::boot::gpu_name::GpuName;
use crate::boot::story::{Milestone, RawStep, Story};
use crate::boot::timeline::Timeline;
use crate::data::boot_file::BootFile;
use crate::data::compact_record::Record;

/// A record of the stream; `rest`: its members from `boottime_ns` on.
pub fn record(seq: u64, rest: &str) -> Record {
    let line = format!(r#"{{"schema":1,"seq":{seq},{rest}}}"#);
    let mut file = BootFile::read((line.clone() + "\n").as_bytes()).unwrap();
    assert_eq!(file.damaged, 0, "{line}: {:?}", file.damage);
    file.records.remove(0)
}

/// A step that ended.
pub fn step(name: &str, begin_ns: i64, end_ns: i64) -> RawStep {
    RawStep {
        name: name.into(),
        begin_ns,
        end_ns: Some(end_ns),
        ..RawStep::default()
    }
}

/// The step as one of the GPU with this index.
pub fn of_gpu(index: u64, step: RawStep) -> RawStep {
    let address = format!("0001:00:{index:02x}.0").parse().unwrap();
    let index = Some(index);
    RawStep {
        gpu: Some(GpuName { index, address }),
        ..step
    }
}

/// Steps between two milestones; `after`: those that made the second one.
pub fn timeline(steps: Vec<RawStep>, from_ns: i64, to_ns: i64, after: &[usize]) -> Timeline {
    let at = |name: &str, at_ns, after: &[usize]| Milestone {
        name: name.into(),
        at_ns,
        after: after.to_vec(),
        ..Milestone::default()
    };
    Timeline::new(Story {
        steps,
        milestones: vec![at("a", from_ns, &[]), at("b", to_ns, after)],
        ..Story::default()
    })
}
