//! Words of comments: a comment begins with its subject or a verb, and fits into 100 columns.

use crate::files;

/// Words that hide the subject of a sentence that begins with them.
const RIDDLES: [&str; 6] = ["It", "Of", "They", "What", "Where", "Who"];
/// Longest line of a comment that stands alone, in characters; rows of tables may be longer.
const COLUMNS: usize = 100;

/// Lines of comments with a fault.
fn faults(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut continues = false;
    for line in text.lines() {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            continues = false;
            continue;
        };
        let words = comment.trim_start_matches(['/', '!']).trim_start();
        let riddle = !continues && words.split(' ').next().is_some_and(|first| RIDDLES.contains(&first));
        let long = line.chars().count() > COLUMNS && !words.starts_with('|');
        found.extend((riddle || long).then(|| line.to_string()));
        continues = !words.is_empty();
    }
    found
}

#[test]
fn a_comment_names_its_subject_within_100_columns() {
    let mut sources: Vec<_> = ["src", "tests"].into_iter().flat_map(files).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    assert!(sources.len() > 300, "{} files", sources.len());
    let mut all = Vec::new();
    for path in sources {
        let found = faults(&std::fs::read_to_string(&path).unwrap());
        all.extend(found.iter().map(|line| format!("{}: {line}", path.display())));
    }
    assert!(all.is_empty(), "{} comments:\n{}", all.len(), all.join("\n"));
    // Negative controls.
    let what = "What a line is.";
    assert_eq!(faults(&format!("/// {what}\nfn f() {{}}\n    // A line.\n    // {what}\n//\n// {what}")).len(), 2);
    assert_eq!(faults(&format!("// {}\n//! | {} |", "x".repeat(COLUMNS), "x".repeat(COLUMNS))).len(), 1);
}
