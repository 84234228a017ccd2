//! Lanes: one per owner and one per GPU, and in each as many rows as steps are in it at once.
//!
//! Steps of one row do not overlap, so a row is also a valid track for programs that draw nested
//! slices.

use super::drawn::{Bar, Mark};
use crate::boot::gpu_name::GpuName;
use crate::boot::model::Boot;
use kata_gpu_wire::catalogue::Owner;
use kata_gpu_wire::pci_address::PciAddress;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};

/// GPUs that get a lane of their own; the marks and steps of more share one. No machine has more,
/// but a stream can say so.
pub const MAX_GPU_LANES: usize = 64;

/// Owners of lanes, in the order in which they hand over to each other.
pub const OWNERS: [Owner; 8] = [
    Owner::Client,
    Owner::Runtime,
    Owner::Vmm,
    Owner::Host,
    Owner::Kernel,
    Owner::Driver,
    Owner::Init,
    Owner::Agent,
];

/// A lane of a waterfall.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// `init`, `GPU 3`.
    pub name: String,
    pub of: LaneOf,
    /// At least 1.
    pub rows: usize,
}

/// Subject of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneOf {
    Owner(Owner),
    Gpu(GpuName),
    /// GPUs beyond [`MAX_GPU_LANES`].
    OtherGpus,
}

/// Makes the lanes that are needed, and gives every step and mark its place. `steps` are in order
/// of their beginning.
pub fn arrange(boot: &Boot, steps: &mut [Bar], marks: &mut [Mark]) -> Vec<Lane> {
    let used = |owner| {
        steps.iter().any(|s| s.gpu.is_none() && s.owner == owner)
            || marks.iter().any(|m| m.gpu.is_none() && m.owner == owner)
    };
    let lane = |name: String, of| Lane { name, of, rows: 1 };
    let mut lanes: Vec<Lane> = OWNERS
        .into_iter()
        .filter(|owner| used(*owner))
        .map(|owner| lane(owner.name().to_string(), LaneOf::Owner(owner)))
        .collect();
    let mut of_gpu: HashMap<PciAddress, usize> = HashMap::new();
    for gpu in boot.gpus.iter().take(MAX_GPU_LANES) {
        of_gpu.insert(gpu.address, lanes.len());
        let name = gpu.name();
        lanes.push(lane(format!("GPU {}", name.number()), LaneOf::Gpu(name)));
    }
    let others = lanes.len();
    let place = |gpu: Option<GpuName>, owner: Owner| {
        let lane = match gpu {
            Some(gpu) => of_gpu.get(&gpu.address).copied(),
            None => lanes.iter().position(|l| l.of == LaneOf::Owner(owner)),
        };
        lane.unwrap_or(others)
    };
    steps
        .iter_mut()
        .for_each(|step| step.lane = place(step.gpu, step.owner));
    marks
        .iter_mut()
        .for_each(|mark| mark.lane = place(mark.gpu, mark.owner));
    if steps
        .iter()
        .map(|s| s.lane)
        .chain(marks.iter().map(|m| m.lane))
        .any(|lane| lane == others)
    {
        lanes.push(lane("other GPUs".to_string(), LaneOf::OtherGpus));
    }
    let mut rows: Vec<Rows> = lanes.iter().map(|_| Rows::default()).collect();
    for step in steps {
        if let (Some(rows), Some(lane)) = (rows.get_mut(step.lane), lanes.get_mut(step.lane)) {
            step.row = rows.take(step.begin_ns, step.end_ns.unwrap_or(i64::MAX));
            lane.rows = lane.rows.max(step.row + 1);
        }
    }
    lanes
}

/// Hands out the lowest row that is free.
#[derive(Default)]
struct Rows {
    busy: BinaryHeap<Reverse<(i64, usize)>>,
    free: BTreeSet<usize>,
}

impl Rows {
    fn take(&mut self, begin_ns: i64, end_ns: i64) -> usize {
        while let Some(Reverse((end, row))) = self.busy.peek().copied() {
            if end > begin_ns {
                break;
            }
            self.busy.pop();
            self.free.insert(row);
        }
        let row = self.free.pop_first().unwrap_or(self.busy.len());
        // A step without duration takes its row all the same: two at once would hide each other.
        self.busy
            .push(Reverse((end_ns.max(begin_ns.saturating_add(1)), row)));
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_one_row_do_not_overlap_and_rows_are_used_again() {
        let mut rows = Rows::default();
        let taken: Vec<usize> = [
            (0, 10),
            (1, 3),
            (2, 5),
            (3, 4),
            (5, i64::MAX),
            (10, 11),
            (10, 10),
            (10, 10),
        ]
        .iter()
        .map(|(b, e)| rows.take(*b, *e))
        .collect();
        assert_eq!(taken, [0, 1, 2, 1, 1, 0, 2, 3]);
    }
}
