//! Module names and patterns as kmod compares them: `-` equals `_`; `*`, `?` and `[..]` are
//! wildcards.
//!
//! Bytes are compared, as in the C locale. Named classes (`[:alpha:]`) are unsupported: no alias
//! has one.

/// Kernel name of the module in a file: `extra/nvidia-uvm.ko.xz` is `nvidia_uvm`.
pub fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or_default();
    file.split('.').next().unwrap_or_default().replace('-', "_")
}

/// A name or pattern with `_` for `-` outside of brackets, where `-` is a range. None for an
/// unmatched bracket, which kmod refuses, too.
pub fn normalised(name: &str) -> Option<String> {
    let mut out = String::with_capacity(name.len());
    let mut bracket = false;
    for c in name.chars() {
        match (c, bracket) {
            ('-', false) => out.push('_'),
            (']', false) => return None,
            ('[', false) | (']', true) => {
                bracket = !bracket;
                out.push(c);
            }
            _ => out.push(c),
        }
    }
    (!bracket).then_some(out)
}

/// fnmatch(3) without flags. Worst-case time is proportional to both lengths, for any pattern.
pub fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // Restart after a mismatch behind the last `*`: one byte more for the `*`.
    let mut star = None;
    loop {
        match (pattern.get(p), text.get(t)) {
            (None, None) => return true,
            (Some(b'*'), _) => {
                p += 1;
                star = Some((p, t));
                continue;
            }
            (Some(_), Some(byte)) => {
                if let Some(next) = one(pattern, p, *byte) {
                    (p, t) = (next, t + 1);
                    continue;
                }
            }
            (Some(_), None) | (None, Some(_)) => {}
        }
        match star {
            Some((after, at)) if at < text.len() => {
                star = Some((after, at + 1));
                (p, t) = (after, at + 1);
            }
            _ => return false,
        }
    }
}

/// Whether the pattern's element at `p` matches this byte; returns the start of the next element.
fn one(pattern: &[u8], p: usize, byte: u8) -> Option<usize> {
    match pattern.get(p)? {
        b'?' => Some(p + 1),
        b'[' => match bracket(pattern, p + 1, byte) {
            Some((true, next)) => Some(next),
            Some((false, _)) => None,
            // A bracket that is never closed is a literal.
            None => (byte == b'[').then_some(p + 1),
        },
        b'\\' => match pattern.get(p + 1) {
            Some(escaped) => (*escaped == byte).then_some(p + 2),
            None => None, // a pattern that ends in a backslash matches nothing
        },
        literal => (*literal == byte).then_some(p + 1),
    }
}

/// A set that opened before `p`: whether it has the byte, and where the pattern continues. None if
/// the set is never closed.
fn bracket(pattern: &[u8], mut p: usize, byte: u8) -> Option<(bool, usize)> {
    let inverted = matches!(pattern.get(p), Some(b'!' | b'^'));
    p += usize::from(inverted);
    let first = p;
    let mut found = false;
    loop {
        let mut low = *pattern.get(p)?;
        if low == b']' && p > first {
            return Some((found != inverted, p + 1));
        }
        if low == b'\\' {
            p += 1;
            low = *pattern.get(p)?;
        }
        p += 1;
        let mut high = low;
        if pattern.get(p) == Some(&b'-') && !matches!(pattern.get(p + 1), None | Some(b']')) {
            p += 1;
            high = *pattern.get(p)?;
            if high == b'\\' {
                p += 1;
                high = *pattern.get(p)?;
            }
            p += 1;
        }
        found |= (low..=high).contains(&byte);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_kernels() {
        assert_eq!(module_name("extra/nvidia-uvm.ko.xz"), "nvidia_uvm");
        assert_eq!(module_name("nvidia.ko"), "nvidia");
        assert_eq!(module_name(""), "");
        assert_eq!(
            normalised("pci:v-*[0-9]-x").as_deref(),
            Some("pci:v_*[0-9]_x")
        );
        for unbalanced in ["a]", "[a", "a[b]]"] {
            assert_eq!(normalised(unbalanced), None, "{unbalanced}");
        }
    }

    #[test]
    fn patterns_match_as_fnmatch_does() {
        for (pattern, text) in [
            ("", ""),
            ("*", ""),
            ("**", "x"),
            ("a*b*c", "a-b-b-c"),
            (
                "pci:v000010DEd*sv*sd*bc03sc0[02]i00*",
                "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00",
            ),
            ("fs-*", "fs-/x"),
            ("?", "-"),
            ("[a-c]x", "bx"),
            ("[!a-c]x", "dx"),
            ("[^a]", "b"),
            ("[]a]", "]"),
            ("[a-]", "-"),
            ("[\\]]", "]"),
            ("\\*", "*"),
            ("[a", "[a"),
        ] {
            assert!(
                matches(pattern, text),
                "{pattern:?} does not match {text:?}"
            );
        }
        for (pattern, text) in [
            ("", "x"),
            ("?", ""),
            ("a*b", "a-b-c"),
            ("[a-c]", "d"),
            ("[!a]", "a"),
            ("[c-a]", "b"),
            ("\\*", "x"),
            ("a\\", "a"),
            ("[a", "a"),
            ("nvidia", "nvidia_uvm"),
        ] {
            assert!(!matches(pattern, text), "{pattern:?} matches {text:?}");
        }
    }

    #[test]
    fn a_pattern_made_to_take_long_does_not() {
        assert!(!matches(
            &"a*".repeat(1000),
            &format!("{}b", "a".repeat(900))
        ));
    }
}
