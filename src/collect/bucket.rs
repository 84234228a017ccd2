//! A token bucket: a burst at once, then a rate a second. No clock of its own.

use std::time::{Duration, Instant};

/// Fills at `rate` a second up to `size`. Spending may put it into debt; it gives no token until
/// the debt is paid.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    size: f64,
    rate: f64,
    level: f64,
    at: Instant,
}

impl Bucket {
    /// A full bucket.
    pub fn new(size: u64, rate_per_s: f64, now: Instant) -> Self {
        let size = size.max(1) as f64;
        // A rate of nothing would make every wait endless: one token a day instead.
        Self {
            size,
            rate: rate_per_s.max(1.0 / 86_400.0),
            level: size,
            at: now,
        }
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.level = (self.level + passed * self.rate).min(self.size);
    }

    /// Takes one token if a whole token is there.
    pub fn take_one(&mut self, now: Instant) -> bool {
        self.fill(now);
        let there = self.level >= 1.0;
        if there {
            self.level -= 1.0;
        }
        there
    }

    /// Takes the amount that was used, even if it is not there.
    pub fn spend(&mut self, amount: usize, now: Instant) {
        self.fill(now);
        self.level -= amount as f64;
    }

    /// Time until the bucket is out of debt; None if it is not in debt.
    pub fn wait(&mut self, now: Instant) -> Option<Duration> {
        self.fill(now);
        (self.level <= 0.0)
            .then(|| Duration::from_secs_f64(((1.0 - self.level) / self.rate).clamp(0.001, 3600.0)))
    }

    /// True if full, as if never used.
    pub fn is_full(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.level >= self.size
    }
}

/// Rate limit of lines for people about one thing, with a count of suppressed lines. A log must not
/// fill, whoever causes the lines.
#[derive(Debug)]
pub struct Lines {
    bucket: Bucket,
    suppressed: u64,
}

impl Lines {
    pub fn new(at_once: u64, rate_per_s: f64, now: Instant) -> Self {
        Self {
            bucket: Bucket::new(at_once, rate_per_s, now),
            suppressed: 0,
        }
    }

    /// A line at once, then one a minute.
    pub fn each_minute() -> Self {
        Self::new(1, 1.0 / 60.0, Instant::now())
    }

    /// The line to print now, with the number of suppressed lines before it; None if suppressed.
    pub fn admit(&mut self, text: &str, now: Instant) -> Option<String> {
        if !self.bucket.take_one(now) {
            self.suppressed += 1;
            return None;
        }
        Some(match std::mem::take(&mut self.suppressed) {
            0 => text.to_string(),
            more => format!("{text} ({more} more line(s) before it were not shown)"),
        })
    }

    /// Passes a line to `log`, unless it is suppressed.
    pub fn pass(&mut self, text: &str, log: impl FnOnce(String)) {
        if let Some(text) = self.admit(text, Instant::now()) {
            log(text);
        }
    }

    /// True if no limit is used up and no suppressed line is left to report.
    pub fn is_blank(&mut self, now: Instant) -> bool {
        self.suppressed == 0 && self.bucket.is_full(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_free_and_the_rest_has_to_wait() {
        let start = Instant::now();
        let mut bucket = Bucket::new(100, 10.0, start);
        assert_eq!(bucket.wait(start), None);
        bucket.spend(150, start);
        assert!(
            bucket
                .wait(start)
                .is_some_and(|w| (5.0..5.2).contains(&w.as_secs_f64()))
        );
        let later = start + Duration::from_secs(6);
        assert_eq!(bucket.wait(later), None);
        assert!(!bucket.is_full(later));
        assert!(bucket.is_full(later + Duration::from_secs(10)));
    }

    #[test]
    fn lines_are_limited_and_the_rest_is_counted() {
        let start = Instant::now();
        let mut lines = Lines::new(2, 1.0, start);
        let logged: Vec<String> = (0..5)
            .filter_map(|n| lines.admit(&format!("line {n}"), start))
            .collect();
        assert_eq!(logged, ["line 0", "line 1"]);
        assert!(
            !lines.is_blank(start + Duration::from_secs(10)),
            "three are still to be counted"
        );
        assert_eq!(
            lines
                .admit("line 5", start + Duration::from_secs(1))
                .as_deref(),
            Some("line 5 (3 more line(s) before it were not shown)")
        );
        assert!(lines.is_blank(start + Duration::from_secs(10)));
    }

    #[test]
    fn single_tokens_come_back_one_by_one() {
        let start = Instant::now();
        let mut bucket = Bucket::new(2, 1.0, start);
        assert_eq!(
            [
                bucket.take_one(start),
                bucket.take_one(start),
                bucket.take_one(start)
            ],
            [true, true, false]
        );
        assert!(bucket.take_one(start + Duration::from_secs(1)));
        assert!(!bucket.take_one(start + Duration::from_secs(1)));
        assert!(Bucket::new(1, 0.0, start).wait(start).is_none());
    }
}
