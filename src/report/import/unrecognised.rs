//! Lines that mean nothing here, counted by their program: what a file holds instead of a boot.

use crate::data::line_prefix::{Clock, Line, Program};
use crate::data::text::printable;
use std::collections::BTreeMap;

/// Most programs that are told apart, and that are named.
const MAX_PROGRAMS: usize = 200;
const MAX_NAMED: usize = 4;
/// Longest name of a program.
const MAX_NAME: usize = 32;

#[derive(Clone, Debug, Default)]
pub struct Unrecognised(BTreeMap<String, u64>);

impl Unrecognised {
    pub fn add(&mut self, line: &Line) {
        if line.text.is_empty() {
            return;
        }
        let who = match (line.program, line.clock) {
            (Some(Program::Named(program)), _) => {
                let name = program.split('[').next().unwrap_or(program);
                name.chars().take(MAX_NAME).collect()
            }
            (Some(Program::Kernel), _) | (None, Some(Clock::Kernel(_))) => "the kernel".to_string(),
            (None, Some(_)) => "a log with times".to_string(),
            (None, None) => "a text without stamps".to_string(),
        };
        if self.0.len() < MAX_PROGRAMS || self.0.contains_key(&who) {
            *self.0.entry(who).or_default() += 1;
        }
    }

    /// `12 of sshd, 3 of the kernel`: the most frequent first.
    pub fn sentence(&self) -> String {
        let mut all: Vec<(&String, &u64)> = self.0.iter().collect();
        all.sort_by_key(|(name, count)| (std::cmp::Reverse(**count), *name));
        let named = all.iter().take(MAX_NAMED);
        let named = named.map(|(name, count)| format!("{count} of {}", printable(name)));
        let named: Vec<String> = named.collect();
        named.join(", ")
    }
}
