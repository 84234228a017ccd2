//! Calls of programs. Nothing of a call needs the host.

use super::{Fact, Micros, PROGRAMS, Wait, World};

/// Calls of a program until it computes, the first one before it opens its GPUs. Their number and
/// their durations are assumed: 0.4 s where nobody is in the way.
pub const CALLS: u32 = 40;
/// Duration of a call, and of what a program does between two.
pub const CALL: Micros = 2_000;
pub const BETWEEN_CALLS: Micros = 8_000;

impl World<'_> {
    pub(super) fn begin_call(&mut self, program: usize) {
        self.calls.push((program, Wait::Driver));
        self.wait_for_driver(PROGRAMS + program);
    }

    /// A program that got A needs every G.
    pub(super) fn call_granted(&mut self, program: usize) {
        for (who, wait) in &mut self.calls {
            if *who == program {
                *wait = Wait::EveryGpu;
            }
        }
    }

    pub(super) fn next_call_ends(&self) -> Option<Micros> {
        self.calls.iter().find_map(|(_, wait)| match wait {
            Wait::Until(at) => Some(*at),
            _ => None,
        })
    }

    /// Begins the call whose G's are all free, or ends the one that is over; false if there is
    /// neither. One at most has A.
    pub(super) fn ends_call(&mut self) -> bool {
        let (now, boots) = (self.now, self.any_boots());
        for at in 0..self.calls.len() {
            let (program, wait) = self.calls[at];
            match wait {
                Wait::EveryGpu if !boots => {
                    self.calls[at].1 = Wait::Until(now + CALL);
                    return true;
                }
                Wait::Until(end) if end <= now => {
                    self.calls.swap_remove(at);
                    self.report(Fact::Called(program));
                    self.release_driver();
                    return true;
                }
                _ => {}
            }
        }
        false
    }
}
