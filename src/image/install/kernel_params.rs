//! Words of `kernel_params`: ours are merged in, all others stay as written, quotes included.
//!
//! Both runtimes and the kernel split at blanks outside double quotes. The kernel passes words
//! after `--` to the init, so ours go before `--`. Not here: the meaning of a word; `config` parses
//! ours.

use kata_gpu_init::config;
use kata_gpu_init::config::parameter_table::{ALIASES, INCUMBENTS, PARAMETERS, PREFIXES};

/// The kernel's COMMAND_LINE_SIZE on x86-64 and arm64, without the final zero. The kernel truncates
/// a longer line silently.
pub const MAX_COMMAND_LINE: usize = 2047;

/// Parameters of the kernel whose names are also ours without the prefix
/// (Documentation/admin-guide/kernel-parameters.txt).
const OF_THE_KERNEL: [&str; 3] = ["init", "lockdown", "topology"];

/// An odd number of double quotes: everything after the last belongs to one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenQuote;

/// Splits into words as written.
pub fn words(text: &str) -> Result<Vec<&str>, OpenQuote> {
    let mut words = Vec::new();
    let (mut quoted, mut start) = (false, None);
    for (at, c) in text.char_indices() {
        let blank = c.is_ascii_whitespace() && !quoted;
        if c == '"' {
            quoted = !quoted;
        }
        match (blank, start) {
            (false, None) => start = Some(at),
            (true, Some(from)) => {
                words.push(&text[from..at]);
                start = None;
            }
            _ => {}
        }
    }
    words.extend(start.map(|from| &text[from..]));
    if quoted { Err(OpenQuote) } else { Ok(words) }
}

/// The part before `=`. The kernel treats `-` and `_` alike, and quotes may enclose the whole word.
pub fn name(word: &str) -> String {
    let word = word.trim_start_matches('"');
    word.split_once('=')
        .map_or(word, |(name, _)| name)
        .trim_end_matches('"')
        .replace('-', "_")
}

/// Whether a word replaces an earlier word of the same name. Names with a dot belong to a module,
/// the agent or the init, where the last word counts. Others, like `pci` and `console`, may be
/// repeated and all count.
fn counts_once(name: &str) -> bool {
    name.contains('.')
}

/// Whether `newer` makes `word` redundant.
pub fn replaces(newer: &str, word: &str) -> bool {
    newer == word || counts_once(&name(newer)) && name(newer) == name(word)
}

/// `existing` with our words, without the words that ours replace.
pub fn merge(existing: &str, ours: &[String]) -> Result<String, OpenQuote> {
    let existing = words(existing)?;
    let end = existing
        .iter()
        .position(|word| *word == "--")
        .unwrap_or(existing.len());
    let (kernels, others) = existing.split_at(end);
    let mut merged: Vec<&str> = kernels
        .iter()
        .copied()
        .filter(|word| !ours.iter().any(|own| replaces(own, word)))
        .collect();
    merged.extend(ours.iter().map(String::as_str));
    merged.extend(others);
    Ok(merged.join(" "))
}

/// Checks one word given for the kernel's command line.
pub fn check(word: &str) -> Result<(), String> {
    if word.chars().any(char::is_control) {
        return Err("has a control character".into());
    }
    match words(word) {
        Err(OpenQuote) => return Err("has an open double quote".into()),
        Ok(words) if words.len() != 1 || words.first() != Some(&word) => {
            return Err("is not one word: put double quotes around blanks".into());
        }
        Ok(_) => {}
    }
    if name(word).is_empty() || word == "--" {
        return Err("has no name".into());
    }
    if let Some(meant) = without_prefix(word) {
        return Err(format!(
            "no parameter of the kernel, the agent or the init: {meant} is one"
        ));
    }
    match problem(word) {
        Some(problem) => Err(problem),
        None => Ok(()),
    }
}

/// Why the init would not take a word as it is.
fn problem(word: &str) -> Option<String> {
    let (_, notes) = config::Config::parse(word.as_bytes());
    notes.into_iter().find_map(|note| note.problem)
}

/// The init's parameter that a word names without its prefix, as a word. A name that is also the
/// kernel's is the init's only with a value of the init's.
fn without_prefix(word: &str) -> Option<String> {
    let bare = word.trim_matches('"');
    let (given, value) = bare.split_once('=').unwrap_or((bare, ""));
    let known = PARAMETERS
        .iter()
        .chain(INCUMBENTS)
        .map(|parameter| parameter.name)
        .chain(ALIASES.iter().map(|(alias, _)| *alias));
    let own = known.into_iter().find(|known| {
        PREFIXES.iter().any(|prefix| {
            known
                .strip_prefix(prefix)
                .is_some_and(|rest| name(rest) == name(given))
        })
    })?;
    let value = value.trim_matches('"');
    let meant = if value.is_empty() {
        own.to_string()
    } else {
        format!("{own}={value}")
    };
    let is_kernels = OF_THE_KERNEL.contains(&given) && problem(&meant).is_some();
    (!is_kernels).then_some(meant)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_their_quotes_and_blanks_in_quotes() {
        assert_eq!(
            words(" a  b=\"c d\"\t\"e f=g\"\n--  h "),
            Ok(vec!["a", "b=\"c d\"", "\"e f=g\"", "--", "h"])
        );
        assert_eq!(words(""), Ok(vec![]));
        assert_eq!(words("a b=\"c d"), Err(OpenQuote));
    }

    /// Existing text, our words, and the merged text.
    const MERGES: &[(&str, &[&str], &str)] = &[
        ("", &["gpuinit.bind=insmod"], "gpuinit.bind=insmod"),
        ("a=1 b=2", &[], "a=1 b=2"),
        (
            "a=1 gpuinit.bind=auto b=2",
            &["gpuinit.bind=insmod"],
            "a=1 b=2 gpuinit.bind=insmod",
        ),
        (
            "gpuinit.bind=auto gpuinit.bind=insmod",
            &["gpuinit.bind=pipelined"],
            "gpuinit.bind=pipelined",
        ),
        (
            "agent.cdi-timeout=5",
            &["agent.cdi_timeout=100"],
            "agent.cdi_timeout=100",
        ),
        (
            "pci=realloc pci=nocrs",
            &["gpuinit.gpus=8"],
            "pci=realloc pci=nocrs gpuinit.gpus=8",
        ),
        ("a=\"x  y\"   b", &["c=\"1 2\""], "a=\"x  y\" b c=\"1 2\""),
        (
            "pci=realloc pci=nocrs",
            &["pci=noaer"],
            "pci=realloc pci=nocrs pci=noaer",
        ),
        (
            "pci=realloc pci=nocrs quiet",
            &["pci=realloc", "quiet"],
            "pci=nocrs pci=realloc quiet",
        ),
        (
            "nvidia.NVreg_A=1 nvidia.NVreg_B=1",
            &["nvidia.NVreg_A=2"],
            "nvidia.NVreg_B=1 nvidia.NVreg_A=2",
        ),
        (
            "a=1 -- gpuinit.bind=auto x",
            &["gpuinit.bind=insmod"],
            "a=1 gpuinit.bind=insmod -- gpuinit.bind=auto x",
        ),
        (
            "\"gpuinit.log=debug\"",
            &["gpuinit.log=off"],
            "gpuinit.log=off",
        ),
    ];

    #[test]
    fn ours_replace_their_like_and_nothing_else() {
        for (existing, ours, wanted) in MERGES {
            let ours: Vec<String> = ours.iter().map(ToString::to_string).collect();
            let merged = merge(existing, &ours).unwrap();
            assert_eq!(merged, *wanted, "{existing}");
            assert_eq!(
                merge(&merged, &ours).unwrap(),
                merged,
                "twice is once: {existing}"
            );
        }
        assert_eq!(merge("a=\"b", &["c".into()]), Err(OpenQuote));
    }

    #[test]
    fn the_init_reads_what_was_merged() {
        let merged = merge(
            "quiet a=\"x gpuinit.bind=insmod\"",
            &["gpuinit.bind=pipelined".into()],
        )
        .unwrap();
        let (config, notes) = config::Config::parse(merged.as_bytes());
        assert_eq!(config.bind, config::Bind::Pipelined);
        assert_eq!(notes.len(), 1);
    }

    #[test]
    fn a_word_that_the_init_would_not_take_is_refused() {
        for good in [
            "gpuinit.bind=insmod",
            "quiet",
            "a=\"b c\"",
            "nvidia.NVreg_RegistryDwords=\"a=1;b=2\"",
            // The agent's and the kernel's.
            "agent.log=debug",
            "init=/sbin/init",
            "lockdown=integrity",
            "topology=off",
        ] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for (bad, why) in [
            ("gpuinit.bind=fast", "takes"),
            ("gpuinit.nosuch=1", "unknown parameter"),
            ("nvrc.mode=cc", "ignored"),
            ("a b", "one word"),
            ("", "one word"),
            ("=1", "no name"),
            ("--", "no name"),
            ("a=\"b", "open double quote"),
            ("a=\u{1b}[2J", "control character"),
            ("a=b\nc", "control character"),
            ("gpus=8", ": gpuinit.gpus=8 is one"),
            ("log=debug", ": gpuinit.log=debug is one"),
            ("log=debgu", ": gpuinit.log=debgu is one"),
            ("bind=pipelined", ": gpuinit.bind=pipelined is one"),
            ("relaxed", ": gpuinit.relaxed is one"),
            ("imex_daemon=on", ": gpuinit.imex-daemon=on is one"),
            (
                "\"fabricmanager.rail=greedy\"",
                ": gpuinit.fabricmanager.rail=greedy is one",
            ),
            ("smi.lgc=1000", ": nvrc.smi.lgc=1000 is one"),
            ("init=serial", ": gpuinit.init=serial is one"),
            ("lockdown=off", ": gpuinit.lockdown=off is one"),
        ] {
            let problem = check(bad).unwrap_err();
            assert!(problem.contains(why), "{bad:?}: {problem}");
        }
    }
}
