//! Initialisations at the same time: which GPU's a line of the driver without an address can be.
//! Pure.
//!
//! The driver's resource manager numbers GPUs in the order in which their initialisations begin,
//! with the lowest number that is free; a failed initialisation frees its number. An order is
//! known where the opens were some time apart: the kernel's threads that carry them out are woken
//! in any order.

use super::schedule_messages::GpuId;
use crate::stream::driver_lines::Whose;

/// Distance in ns of two opens from which on their order is the driver's, too: a thread of the
/// kernel that is woken runs within it.
const ORDERED_NS: u64 = 100_000_000;

/// One initialisation, and the adapter that it has left.
#[derive(Clone, Copy, Debug)]
struct Initialisation {
    gpu: GpuId,
    from_ns: u64,
    until_ns: Option<u64>,
    failed: bool,
    /// The resource manager's number; None: not known.
    number: Option<u32>,
}

/// Time of an initialisation, in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// None: an earlier worker knew it.
    pub from_ns: Option<u64>,
    /// None: not over.
    pub until_ns: Option<u64>,
    /// GPUs that may have logged lines without an address meanwhile.
    pub whose: Whose,
}

/// All initialisations of GPUs that are present, in the order of their begins. At most one a GPU.
#[derive(Debug, Default)]
pub struct Overlaps {
    all: Vec<Initialisation>,
    /// Numbers are not known: an earlier worker has initialised GPUs.
    continues: bool,
}

impl Overlaps {
    /// Goes on where an earlier worker has ended.
    pub fn continues(&mut self) {
        self.continues = true;
    }

    /// An initialisation begins, or, with `unknown`, was begun by an earlier worker.
    pub fn begin(&mut self, gpu: GpuId, now_ns: u64, unknown: bool) {
        self.gone(gpu);
        let mut taken = Some(Vec::new());
        let mut is_ordered = !unknown && !self.continues;
        for other in self.all.iter_mut().filter(|other| !other.failed) {
            let is_close = now_ns.saturating_sub(other.from_ns) < ORDERED_NS;
            if other.until_ns.is_none() && is_close {
                (other.number, is_ordered) = (None, false);
            }
            match (other.number, &mut taken) {
                (Some(number), Some(taken)) => {
                    taken.push(number);
                }
                _ => taken = None,
            }
        }
        let lowest = |taken: Vec<u32>| (0..).find(|number| !taken.contains(number));
        self.all.push(Initialisation {
            gpu,
            from_ns: if unknown { 0 } else { now_ns },
            until_ns: None,
            failed: false,
            number: taken.and_then(lowest).filter(|_| is_ordered),
        });
    }

    /// An initialisation is over.
    pub fn end(&mut self, gpu: GpuId, now_ns: u64, failed: bool) {
        let Some(at) = self.all.iter().position(|one| one.gpu == gpu) else {
            return;
        };
        for (later, other) in self.all.iter_mut().enumerate() {
            if later == at {
                (other.until_ns, other.failed) = (Some(now_ns), failed);
            } else if failed && later > at && other.until_ns.is_none() {
                // That one may have begun in the driver before or after this number was free.
                other.number = None;
            }
        }
    }

    /// A GPU has left, and its adapter with it.
    pub fn gone(&mut self, gpu: GpuId) {
        self.all.retain(|one| one.gpu != gpu);
    }

    /// Time of a GPU's initialisation. `one_by_one`: the driver lets none begin before another is
    /// over.
    pub fn of(&self, gpu: GpuId, one_by_one: bool) -> Option<Window> {
        let own = self.all.iter().find(|one| one.gpu == gpu)?;
        let number = own.number;
        let is_beside = |other: &&Initialisation| {
            other.gpu != gpu
                && own.until_ns.is_none_or(|end| other.from_ns < end)
                && other.until_ns.is_none_or(|end| end > own.from_ns)
        };
        let whose = match self.all.iter().find(is_beside) {
            None => Whose::Alone { number },
            Some(_) if one_by_one => Whose::OneByOne { number: None },
            Some(_) => Whose::Together { number },
        };
        Some(Window {
            from_ns: Some(own.from_ns).filter(|from| *from > 0),
            until_ns: own.until_ns,
            whose,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn gpu(slot: u8) -> GpuId {
        GpuId {
            address: format!("0001:00:0{slot}.0").parse().unwrap(),
            generation: 0,
        }
    }

    fn whose(overlaps: &Overlaps, slot: u8) -> Whose {
        overlaps.of(gpu(slot), false).unwrap().whose
    }

    #[test]
    fn one_after_another_each_is_alone_and_numbers_count_those_that_are_up() {
        let mut overlaps = Overlaps::default();
        for (slot, failed) in [(3, false), (4, true), (5, false), (6, true)] {
            let at = u64::from(slot) * S;
            overlaps.begin(gpu(slot), at, false);
            overlaps.end(gpu(slot), at + S, failed);
        }
        let numbers = [3, 4, 5, 6].map(|slot| whose(&overlaps, slot));
        assert_eq!(
            numbers,
            [0, 1, 1, 2].map(|number| Whose::Alone {
                number: Some(number)
            })
        );
        // An unbound GPU's number is free again.
        overlaps.gone(gpu(3));
        overlaps.begin(gpu(7), 20 * S, false);
        assert_eq!(whose(&overlaps, 7), Whose::Alone { number: Some(0) });
        assert_eq!(
            overlaps.of(gpu(6), false).unwrap().from_ns,
            Some(6 * S),
            "its begin"
        );
        assert_eq!(overlaps.of(gpu(3), false), None);
    }

    #[test]
    fn opens_some_time_apart_have_an_order() {
        let mut overlaps = Overlaps::default();
        overlaps.begin(gpu(3), S, false);
        overlaps.begin(gpu(4), 2 * S, false);
        let numbered = |number| Whose::Together {
            number: Some(number),
        };
        assert_eq!(whose(&overlaps, 3), numbered(0));
        overlaps.end(gpu(4), 3 * S, true);
        assert_eq!(whose(&overlaps, 4), numbered(1));
        assert_eq!(
            overlaps.of(gpu(4), true).unwrap().whose,
            Whose::OneByOne { number: None }
        );
        // A number that is freed meanwhile may be the next one's or not.
        overlaps.begin(gpu(5), 4 * S, false);
        assert_eq!(whose(&overlaps, 5), numbered(1));
        overlaps.end(gpu(3), 5 * S, true);
        assert_eq!(whose(&overlaps, 5), Whose::Together { number: None });
        assert_eq!(whose(&overlaps, 3), numbered(0));
    }

    #[test]
    fn opens_at_once_and_those_of_another_worker_have_no_order() {
        let none = Whose::Together { number: None };
        let mut overlaps = Overlaps::default();
        overlaps.begin(gpu(3), S, false);
        overlaps.begin(gpu(4), S + 1, false);
        overlaps.begin(gpu(5), 2 * S, false);
        assert_eq!([3, 4, 5].map(|slot| whose(&overlaps, slot)), [none; 3]);
        let mut overlaps = Overlaps::default();
        overlaps.begin(gpu(3), S, true);
        overlaps.begin(gpu(4), 2 * S, false);
        assert_eq!(whose(&overlaps, 4), none);
        let taken_over = Window {
            from_ns: None,
            until_ns: None,
            whose: none,
        };
        assert_eq!(overlaps.of(gpu(3), false), Some(taken_over));
        let mut overlaps = Overlaps::default();
        overlaps.continues();
        overlaps.begin(gpu(3), S, false);
        assert_eq!(whose(&overlaps, 3), Whose::Alone { number: None });
    }
}
