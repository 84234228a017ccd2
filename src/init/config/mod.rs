//! Configuration: the kernel command line, read once into a [`Config`]. No other module knows a
//! parameter's name.
//!
//! [`PARAMETERS`] is the whole list; `kata-gpu-init parameters` prints it, and src/README.md has
//! it. A bad value never stops a boot: the default stays, and the [`Note`] names the fault, the
//! value used and the valid values.

mod command_line; // words of the kernel command line
pub mod parameter_table; // parameters and their setters
mod values; // settings of a boot

pub use command_line::{
    module_blacklist, module_parameters, parameter_value, with_registry_key, words,
};
pub use values::{
    Agent, Bind, Cdi, Config, Hooks, Init, Naming, RailPolicy, Range, Ready, ReadyState, Services,
    Switch, ToConsole,
};

use self::parameter_table::{ALIASES, FOREIGN, INCUMBENTS, PARAMETERS, PREFIXES};
use crate::extensions::{Extension, Name, Verity};

/// Kata's parameter for an extension disk, around the extension's name.
const EXTENSION: &str = "kata.extension.";
const VERITY_PARAMS: &str = ".verity_params";

/// Limit of notes; a command line has at most 4 kB, so more are noise.
const MAX_NOTES: usize = 32;
/// Limit of foreign text in a note, in characters.
const MAX_TEXT: usize = 64;

/// Result of one word of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pub parameter: String,
    pub value: String,
    /// None: valid. Else the fault and its consequence.
    pub problem: Option<String>,
}

/// Text from the command line, safe to print: cut, and control characters replaced.
fn printable(text: &str) -> String {
    text.chars()
        .take(MAX_TEXT)
        .map(|c| {
            if c.is_control() || c == '\u{fffd}' {
                '?'
            } else {
                c
            }
        })
        .collect()
}

impl Config {
    /// Parses `/proc/cmdline`. The last of several values counts, as in the kernel.
    pub fn parse(command_line: &[u8]) -> (Self, Vec<Note>) {
        let mut config = Self::default();
        let mut notes = Vec::new();
        let mut left_out = 0_usize;
        for word in words(command_line) {
            let (name, value) = word.split_once('=').unwrap_or((&word, ""));
            let extension = name
                .strip_prefix(EXTENSION)
                .and_then(|rest| rest.strip_suffix(VERITY_PARAMS));
            let problem = match extension {
                Some(extension) => config.declare(extension, value).err(),
                None if PREFIXES.iter().any(|prefix| name.starts_with(prefix)) => {
                    config.take(name, value)
                }
                None => continue,
            };
            if notes.len() < MAX_NOTES {
                notes.push(Note {
                    parameter: printable(name),
                    value: printable(value),
                    problem,
                });
            } else {
                left_out += 1;
            }
        }
        if left_out > 0 {
            let problem = Some(format!(
                "{left_out} more gpuinit.* and nvrc.* words are not listed here"
            ));
            notes.push(Note {
                parameter: "gpuinit.*".into(),
                value: String::new(),
                problem,
            });
        }
        (config, notes)
    }

    /// Adds an extension. Unlike other parameters, a bad one is fatal: without its check the guest
    /// would run unverified code.
    fn declare(&mut self, name: &str, parameters: &str) -> Result<(), String> {
        let declared = Name::parse(name).and_then(|name| match &self.extensions {
            Ok(all) if all.iter().any(|known| known.name == name) => {
                Err("declared twice: declare \
                each extension once"
                    .into())
            }
            _ if parameters.is_empty() => Err(
                "no verity parameters: give those of the image's build; an extension without \
                    them is not mounted"
                    .into(),
            ),
            _ => Ok(Extension {
                name,
                verity: Verity::parse(parameters)?,
            }),
        });
        match (declared, &mut self.extensions) {
            (Ok(extension), Ok(all)) => all.push(extension),
            (Err(problem), all) => {
                // Keep the first error.
                if all.is_ok() {
                    *all = Err(format!(
                        "{EXTENSION}{}{VERITY_PARAMS}: {problem}",
                        printable(name)
                    ));
                }
                return Err(format!("{problem}; the guest powers off"));
            }
            (Ok(_), Err(_)) => {}
        }
        Ok(())
    }

    /// Applies one parameter; returns its fault.
    fn take(&mut self, name: &str, value: &str) -> Option<String> {
        if let Some((_, hint)) = FOREIGN.iter().find(|(n, _)| *n == name) {
            return Some((*hint).to_string());
        }
        let own = ALIASES
            .iter()
            .find(|(n, _)| *n == name)
            .map_or(name, |(_, own)| own);
        let Some(parameter) = PARAMETERS.iter().chain(INCUMBENTS).find(|p| p.name == own) else {
            return Some(
                "unknown parameter, ignored: `kata-gpu-init parameters` lists them".into(),
            );
        };
        (parameter.set)(self, value).is_none().then(|| {
            format!(
                "takes {}; ignored, default: {}",
                parameter.values, parameter.default
            )
        })
    }
}

#[cfg(test)]
mod tests;
