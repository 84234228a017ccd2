//! Numbers in reports: sizes and histograms by powers of ten as people read them, zeros in JSON.

use std::collections::BTreeMap;

/// Bytes as people write them: `128 GiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match UNITS.iter().find(|(_, shift)| bytes >= 1 << shift) {
        Some((unit, shift)) if bytes % (1 << shift) == 0 => format!("{} {unit}", bytes >> shift),
        Some((unit, shift)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

/// The power of ten at or below a number; 0 for 0.
pub fn class(n: u64) -> u64 {
    n.checked_ilog10().map_or(0, |log| 10u64.pow(log))
}

/// Whether JSON leaves a number out.
pub fn is_zero<T: Default + PartialEq>(n: &T) -> bool {
    *n == T::default()
}

/// A histogram by powers of ten as text: `1-9: 12, 10-99: 3`.
pub fn histogram(classes: &BTreeMap<u64, u64>) -> String {
    let text = |(first, count): (&u64, &u64)| match first {
        0 => format!("0: {count}"),
        first => format!("{first}-{}: {count}", first.saturating_mul(10) - 1),
    };
    classes.iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_readable_units() {
        assert_eq!(
            [
                size(128 << 30),
                size(16 << 20),
                size(1500),
                size(512),
                size(3 << 39)
            ],
            ["128 GiB", "16 MiB", "1.5 KiB", "512 B", "1.5 TiB"]
        );
    }
}
