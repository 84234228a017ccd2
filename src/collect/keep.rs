//! Amount of boots that is kept.

use std::time::Duration;

pub const DAY: Duration = Duration::from_secs(24 * 3600);

/// Limits on age and size of kept boots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    pub age: Option<Duration>,
    pub bytes: Option<u64>,
}

impl Keep {
    /// Age limit in days; 0 is for ever.
    pub fn days(days: u64) -> Option<Duration> {
        (days > 0).then(|| DAY.saturating_mul(u32::try_from(days).unwrap_or(u32::MAX)))
    }
}
