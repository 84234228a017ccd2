//! Rust files as a test of the structure reads them: words, string literals and signs, without
//! comments and without what is built for tests alone. Not a parser.

use crate::{files, project};
use std::collections::BTreeSet;
use std::path::Path;

/// A file, read.
pub struct Source {
    /// Below the project's folder, e.g. `src/init/boot/mod.rs`.
    pub file: String,
    /// Module path below the crate, e.g. `["boot", "bring_up"]`.
    pub module: Vec<String>,
    pub tokens: Vec<Token>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    pub kind: Kind,
    pub line: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Word(String),
    /// A string literal, without its quotes.
    Text(String),
    /// `::`
    Colons,
    Sign(char),
}

impl Source {
    pub fn word(&self, at: usize) -> Option<&str> {
        word(&self.tokens, at)
    }

    pub fn is_sign(&self, at: usize, sign: char) -> bool {
        is_sign(&self.tokens, at, sign)
    }

    pub fn texts(&self) -> impl Iterator<Item = (&str, usize)> {
        self.tokens.iter().filter_map(|token| match &token.kind {
            Kind::Text(text) => Some((text.as_str(), token.line)),
            _ => None,
        })
    }
}

/// Reads every Rust file below a folder of the project.
pub fn read(folder: &str) -> Vec<Source> {
    let name = |path: &Path| {
        path.strip_prefix(project())
            .unwrap()
            .to_string_lossy()
            .into_owned()
    };
    let text = |path: &Path| {
        std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    let all: Vec<_> = files(folder)
        .iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .map(|path| (name(path), text(path)))
        .collect();
    of(&all)
}

/// Files by name and text. Omits modules that are built for tests alone.
pub fn of(files: &[(String, String)]) -> Vec<Source> {
    let mut for_tests = BTreeSet::new();
    let mut read: Vec<(String, Vec<String>, Vec<Token>)> = Vec::new();
    for (file, text) in files {
        let module = module_of(file);
        let (tokens, omitted) = without_tests(tokens(text));
        for_tests.extend(
            omitted
                .into_iter()
                .map(|name| [module.clone(), vec![name]].concat()),
        );
        read.push((file.clone(), module, tokens));
    }
    read.retain(|(_, module, _)| !(1..=module.len()).any(|end| for_tests.contains(&module[..end])));
    let source = |(file, module, tokens)| Source {
        file,
        module,
        tokens,
    };
    read.into_iter().map(source).collect()
}

/// `src/init/gpu/pci.rs` is module `gpu::pci` of its crate.
fn module_of(file: &str) -> Vec<String> {
    let below = file
        .strip_prefix("src/")
        .and_then(|f| f.split_once('/'))
        .map_or(file, |(_, below)| below);
    let stem = below.strip_suffix(".rs").unwrap_or(below);
    let stem = stem.strip_suffix("/mod").unwrap_or(stem);
    if stem == "lib" {
        vec![]
    } else {
        stem.split('/').map(str::to_string).collect()
    }
}

fn word(tokens: &[Token], at: usize) -> Option<&str> {
    match &tokens.get(at)?.kind {
        Kind::Word(word) => Some(word),
        _ => None,
    }
}

fn is_sign(tokens: &[Token], at: usize, sign: char) -> bool {
    tokens
        .get(at)
        .is_some_and(|token| token.kind == Kind::Sign(sign))
}

/// Takes a text apart; comments are gone.
fn tokens(text: &str) -> Vec<Token> {
    let chars: Vec<char> = text.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let (mut tokens, mut i, mut line) = (Vec::new(), 0, 1);
    while i < chars.len() {
        let (start, begun) = (i, line);
        let mut push = |kind| tokens.push(Token { kind, line: begun });
        match at(i) {
            '/' if at(i + 1) == '/' => {
                while i < chars.len() && at(i) != '\n' {
                    i += 1;
                }
            }
            '/' if at(i + 1) == '*' => {
                let mut depth = 0;
                loop {
                    match (at(i), at(i + 1)) {
                        ('/', '*') => (depth, i) = (depth + 1, i + 2),
                        ('*', '/') => (depth, i) = (depth - 1, i + 2),
                        _ => i += 1,
                    }
                    if depth == 0 || i >= chars.len() {
                        break;
                    }
                }
            }
            '"' => {
                i += 1;
                while i < chars.len() && at(i) != '"' {
                    i += if at(i) == '\\' { 2 } else { 1 };
                }
                push(Kind::Text(
                    chars[start + 1..i.min(chars.len())].iter().collect(),
                ));
                i += 1;
            }
            // A character, or a lifetime, whose name is a word of its own.
            '\'' if at(i + 1) == '\\' => {
                i += 3;
                while i < chars.len() && at(i) != '\'' {
                    i += 1;
                }
                i += 1;
            }
            '\'' => i += if at(i + 2) == '\'' { 3 } else { 1 },
            ':' if at(i + 1) == ':' => {
                push(Kind::Colons);
                i += 2;
            }
            c if c.is_alphanumeric() || c == '_' => {
                while at(i).is_alphanumeric() || at(i) == '_' {
                    i += 1;
                }
                let word: String = chars[start..i].iter().collect();
                let hashes = (i..).take_while(|j| at(*j) == '#').count();
                if ["r", "br", "cr"].contains(&word.as_str()) && at(i + hashes) == '"' {
                    i += hashes + 1;
                    let from = i;
                    while i < chars.len()
                        && !(at(i) == '"' && (1..=hashes).all(|n| at(i + n) == '#'))
                    {
                        i += 1;
                    }
                    push(Kind::Text(chars[from..i.min(chars.len())].iter().collect()));
                    i += 1 + hashes;
                } else if !(["b", "c"].contains(&word.as_str()) && at(i) == '"') {
                    push(Kind::Word(word));
                }
            }
            c => {
                if !c.is_whitespace() {
                    push(Kind::Sign(c));
                }
                i += 1;
            }
        }
        line += chars[start..i.min(chars.len())]
            .iter()
            .filter(|c| **c == '\n')
            .count();
    }
    tokens
}

/// Removes every item behind `#[cfg(test)]`; returns the names of modules that are files among
/// them.
fn without_tests(tokens: Vec<Token>) -> (Vec<Token>, Vec<String>) {
    let wanted = [
        Kind::Sign('#'),
        Kind::Sign('['),
        Kind::Word("cfg".into()),
        Kind::Sign('('),
        Kind::Word("test".into()),
    ];
    let (mut kept, mut files, mut i) = (Vec::new(), Vec::new(), 0);
    while i < tokens.len() {
        let begins = tokens[i..]
            .iter()
            .take(wanted.len())
            .map(|t| &t.kind)
            .eq(&wanted)
            && is_sign(&tokens, i + 5, ')');
        if !begins {
            kept.push(tokens[i].clone());
            i += 1;
            continue;
        }
        while is_sign(&tokens, i, '#') {
            i = closing(&tokens, i + 1) + 1;
        }
        let mut item = i;
        while i < tokens.len() && !is_sign(&tokens, i, ';') && !is_sign(&tokens, i, '{') {
            i = closing(&tokens, i) + 1;
        }
        while word(&tokens, item).is_some_and(|w| w != "mod") {
            item += 1;
        }
        if is_sign(&tokens, i, ';') && item + 2 == i {
            files.extend(word(&tokens, item + 1).map(str::to_string));
        }
        i = closing(&tokens, i) + 1;
    }
    (kept, files)
}

/// Index of the token that closes the bracket opened at `at`; `at` where none opens.
fn closing(tokens: &[Token], at: usize) -> usize {
    let mut depth = 0;
    for (i, token) in tokens.iter().enumerate().skip(at) {
        match token.kind {
            Kind::Sign('(' | '[' | '{') => depth += 1,
            Kind::Sign(')' | ']' | '}') => depth -= 1,
            _ => {}
        }
        if depth <= 0 {
            return i;
        }
    }
    tokens.len()
}
