//! A failure means that the init emits a record or field that the catalogue lacks, that the
//! catalogue has one that nobody emits, or that the page of the format says otherwise.

use crate::documents::has_table;
use crate::layers::source::{self, Kind, Source, Token};
use crate::project;
use kata_gpu_wire::catalogue::{Form, RECORDS, Row, TRACED, undocumented};
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::record::{Line, Record};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Macros that emit records: `tracing`'s events, and the steps of src/init/stream/layer.rs.
const EMITTERS: &[&str] = &["error", "warn", "info", "debug", "trace", "step"];
/// Fields that are keys of a record, not of its `fields`.
const KEYS: &[&str] = &["gpu", "error", "after", "at_ns", "step_id"];

/// Fields that the sources emit, by the constant of the record's name, and whether one is a span.
type Emitted = BTreeMap<String, (BTreeSet<String>, bool)>;

/// Fields of every emitting macro in the sources.
fn emitted(sources: &[Source]) -> Emitted {
    let mut emitted = Emitted::new();
    for source in sources {
        for at in 0..source.tokens.len() {
            let which = source.word(at).filter(|word| EMITTERS.contains(word));
            if let Some(which) = which
                && source.is_sign(at + 1, '!')
                && source.is_sign(at + 2, '(')
            {
                macro_call(which, arguments(&source.tokens[at + 3..]), &mut emitted);
            }
        }
    }
    emitted
}

/// Words and signs of each argument, up to the parenthesis that ends the call.
fn arguments(tokens: &[Token]) -> Vec<Vec<String>> {
    let (mut all, mut depth) = (vec![vec![]], 1);
    for token in tokens {
        let text = match &token.kind {
            Kind::Sign(')' | ']' | '}') if depth == 1 => break,
            Kind::Sign(',') if depth == 1 => {
                all.push(vec![]);
                continue;
            }
            Kind::Sign(sign) => {
                depth += i32::from("([{".contains(*sign)) - i32::from(")]}".contains(*sign));
                sign.to_string()
            }
            Kind::Word(word) => word.clone(),
            Kind::Text(_) | Kind::Colons => continue,
        };
        if let Some(argument) = all.last_mut() {
            argument.push(text);
        }
    }
    all.retain(|words| !words.is_empty());
    all
}

/// Fields of one call. A call whose name is no constant is omitted: the macro's own body.
fn macro_call(which: &str, mut arguments: Vec<Vec<String>>, emitted: &mut Emitted) {
    let is_name = |words: &Vec<String>| {
        words.first().is_some_and(|w| w == "name") && words.get(1).is_some_and(|w| w == ":")
    };
    let name = if which == "step" {
        Some(0)
    } else {
        arguments.iter().position(is_name)
    };
    let name = name
        .filter(|at| *at < arguments.len())
        .map(|at| arguments.remove(at));
    let Some(constant) = name.and_then(|words| words.last().cloned()) else {
        return;
    };
    let is_constant = constant
        .bytes()
        .all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_');
    if !is_constant {
        return;
    }
    let (fields, is_span) = emitted.entry(constant).or_default();
    *is_span |= which == "step";
    for words in arguments {
        let field = words
            .iter()
            .find(|word| !["%", "?"].contains(&word.as_str()));
        fields.extend(
            field
                .filter(|field| !KEYS.contains(&field.as_str()))
                .cloned(),
        );
    }
}

/// Values of the constants of `names`, in the catalogue's text.
fn constants() -> BTreeMap<String, String> {
    let text = crate::text(project().join("src/wire/catalogue.rs"));
    let records = text.split("rows! {").nth(1).expect("the first table");
    let row = |line: &str| {
        let (constant, rest) = line.trim().split_once(" = \"")?;
        Some((constant.to_string(), rest.split('"').next()?.to_string()))
    };
    records.lines().filter_map(row).collect()
}

/// Differences between the catalogue and what is emitted, a line each.
fn differences(emitted: &Emitted, constants: &BTreeMap<String, String>) -> Vec<String> {
    let mut found = Vec::new();
    for (constant, name) in constants {
        let row = RECORDS
            .iter()
            .find(|row| row.name == name)
            .expect("a constant has a row");
        let Some((fields, is_span)) = emitted.get(constant) else {
            found.push(format!("{name}: nobody emits it"));
            continue;
        };
        if *is_span != (row.form == Form::Span) {
            found.push(format!(
                "{name}: a span in one of catalogue and source, an event in the other"
            ));
        }
        found.extend(
            undocumented(name, fields.iter().map(String::as_str))
                .map(|field| format!("{name}: field {field} is not in the catalogue")),
        );
        let documented = row.fields.iter().map(|(field, _)| field);
        found.extend(
            documented
                .filter(|field| !fields.contains(**field))
                .map(|field| format!("{name}: nobody emits field {field}")),
        );
    }
    found.extend(
        emitted
            .keys()
            .filter(|constant| !constants.contains_key(*constant))
            .map(|constant| format!("{constant}: not in the catalogue")),
    );
    found
}

#[test]
fn the_catalogue_has_what_the_sources_emit_and_nothing_else() {
    let emitted_by_guest = emitted(&source::read("src/init"));
    let constants = constants();
    assert_eq!(constants.len(), RECORDS.len());
    let found = differences(&emitted_by_guest, &constants);
    assert!(found.is_empty(), "{found:#?}");
    // Negative control: an unknown field, a missing one, an event where a span is due, and a name
    // that is not in the catalogue.
    let text = "fn f() { info!(name: names::CLOCK, realtime_ns = 1, place); tracing::warn!(name: \
        names::GPU_BIND);
        step!(names::NEW); } #[cfg(test)] mod tests { fn g() { info!(name: names::CLOCK, other = \
            %1) } }";
    let made_up = emitted(&source::of(&[("src/init/made_up.rs".into(), text.into())]));
    let few: BTreeMap<_, _> = constants
        .into_iter()
        .filter(|(c, _)| ["CLOCK", "GPU_BIND", "SETTLED"].contains(&c.as_str()))
        .collect();
    assert_eq!(
        differences(&made_up, &few),
        [
            "clock: field place is not in the catalogue",
            "gpu.bind: a span in one of catalogue and source, an event in the other",
            "settled: nobody emits it",
            "NEW: not in the catalogue",
        ]
    );
}

/// Fields of a recorded boot that the catalogue lacks.
fn undocumented_in(text: &str) -> BTreeSet<String> {
    let decoded = |line: &str| match decode(line.as_bytes()) {
        Ok(Line::Record(record)) => Some(*record),
        _ => None,
    };
    let of = |record: Record| {
        let fields: Vec<&str> = record.fields.keys().map(String::as_str).collect();
        undocumented(&record.name, fields)
            .map(|field| format!("{}: {field}", record.name))
            .collect::<Vec<_>>()
    };
    text.lines()
        .filter_map(decoded)
        .filter(|record| record.name != "kmsg")
        .flat_map(of)
        .collect()
}

#[test]
fn recorded_boots_have_no_field_that_the_catalogue_lacks() {
    let mut boots = 0;
    for entry in std::fs::read_dir(project().join("tests/fixtures/boots"))
        .unwrap()
        .flatten()
    {
        let path = entry.path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with("recorded-") && name.ends_with(".ndjson") {
            boots += 1;
            assert_eq!(
                undocumented_in(&crate::text(&path)),
                BTreeSet::new(),
                "{name}"
            );
        }
    }
    assert!(boots >= 2, "{boots} recorded boots");
    let wrong = r#"{"schema":1,"seq":1,"boottime_ns":1,"kind":"event","name":"settled","fields":{"gpu_count":1}}"#;
    assert_eq!(
        undocumented_in(wrong),
        BTreeSet::from(["settled: gpu_count".to_string()])
    );
}

/// Table of these rows, as a page has it.
fn markdown(rows: &[Row]) -> String {
    let mut table =
        String::from("| name | form | whose time | fields | meaning |\n|---|---|---|---|---|\n");
    for row in rows {
        let field = |(name, meaning): &(&str, &str)| match *meaning {
            "" => format!("`{name}`"),
            meaning => format!("`{name}` ({meaning})"),
        };
        let fields: Vec<String> = row.fields.iter().map(field).collect();
        let form = if row.form == Form::Span {
            "span"
        } else {
            "event"
        };
        writeln!(
            table,
            "| `{}` | {form} | {} | {} | {} |",
            row.name,
            row.owner.name(),
            fields.join(", "),
            row.text.trim()
        )
        .unwrap();
    }
    table
}

#[test]
fn the_page_of_the_format_has_every_record() {
    has_table("src/wire/README.md", &markdown(RECORDS));
}

#[test]
fn the_page_of_the_host_has_everything_that_is_traced() {
    has_table("src/cli/README.md", &markdown(TRACED));
}
