//! How long to wait before the next try: twice as long each time, up to a limit, and not the same
//! on every node.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);
/// A receiver that asks for more is asked again after this.
const LONGEST_ASKED: Duration = Duration::from_secs(300);

#[derive(Clone, Debug, Default)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    /// After another failure; `asked` is what the receiver wants.
    pub fn next(&mut self, asked: Option<Duration>) -> Duration {
        let pause = FIRST
            .saturating_mul(1u32.checked_shl(self.failures).unwrap_or(u32::MAX))
            .min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        // Between three quarters and all of it: a rack whose receiver was away does not come back
        // at once.
        let random = RandomState::new().hash_one(self.failures) % 256;
        let pause = pause - pause.mul_f64(random as f64 / 1024.0);
        asked.map_or(pause, |asked| asked.min(LONGEST_ASKED).max(pause))
    }

    /// Something was taken.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_a_receiver_may_extend_them() {
        let mut backoff = Backoff::default();
        for want in [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] {
            let pause = backoff.next(None).as_secs_f64();
            assert!((want * 0.75..=want).contains(&pause), "{pause} {want}");
        }
        assert_eq!(
            backoff.next(Some(Duration::from_secs(60))),
            Duration::from_secs(60)
        );
        assert_eq!(backoff.next(Some(Duration::MAX)), LONGEST_ASKED);
        backoff.reset();
        assert!(backoff.next(Some(Duration::ZERO)) <= FIRST);
    }
}
