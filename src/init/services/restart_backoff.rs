//! Pauses before the restarts of a service. Pure.

use std::time::Duration;

/// Pause before the first restart.
const FIRST: Duration = Duration::from_secs(1);
/// Longest pause: a service that cannot work costs one start in this time.
const LONGEST: Duration = Duration::from_secs(300);
/// Lifetime after which the next restart counts as the first one.
const LONG_LIFE: Duration = Duration::from_secs(60);

/// Number of short lives in a row.
#[derive(Debug, Default)]
pub struct Backoff {
    short_lives: u32,
}

impl Backoff {
    /// Pause before the restart of a service that lived for this time.
    pub fn after(&mut self, life: Duration) -> Duration {
        if life >= LONG_LIFE {
            self.short_lives = 0;
        }
        let pause = FIRST
            .saturating_mul(1_u32.checked_shl(self.short_lives).unwrap_or(u32::MAX))
            .min(LONGEST);
        self.short_lives = self.short_lives.saturating_add(1);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_start_anew_after_a_long_life() {
        let mut backoff = Backoff::default();
        let mut pauses = |life, count| {
            (0..count)
                .map(|_| backoff.after(Duration::from_secs(life)).as_secs())
                .collect::<Vec<_>>()
        };
        assert_eq!(pauses(0, 11), [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(pauses(0, 100).last(), Some(&300));
        assert_eq!(pauses(60, 1), [1]);
        assert_eq!(pauses(59, 1), [2]);
    }
}
