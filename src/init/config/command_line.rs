//! Words of the kernel command line, and those that are for modules.

use std::fmt::Write;

/// Words of a kernel command line: separated by white space, which double quotes protect; the words
/// after ` -- ` are not for the kernel.
pub fn words(command_line: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(command_line);
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quoted = false;
    for c in text.chars() {
        match c {
            '"' => quoted = !quoted,
            c if c.is_ascii_whitespace() && !quoted => {
                if word == "--" {
                    return words;
                }
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            c => word.push(c),
        }
    }
    if !word.is_empty() && word != "--" {
        words.push(word); // the last one, or an open quote, which runs to the end
    }
    words
}

/// The words `module.parameter=value` for one module, in finit_module's format. `-` equals `_` in a
/// module's name.
pub fn module_parameters(command_line: &[u8], module: &str) -> String {
    let mut parameters = String::new();
    for word in words(command_line) {
        let Some((name, parameter)) = word.split_once('.') else {
            continue;
        };
        if name.replace('-', "_") == module.replace('-', "_") {
            let space = if parameters.is_empty() { "" } else { " " };
            // The kernel's parser accepts quotes around white space, as on the command line.
            let _unused = match parameter.split_once('=') {
                Some((key, value)) if value.contains(char::is_whitespace) => {
                    write!(parameters, "{space}{key}=\"{value}\"")
                }
                _ => write!(parameters, "{space}{parameter}"),
            }; // writing to a String cannot fail
        }
    }
    parameters
}

/// The driver's registry with one more key: `NVreg_RegistryDwords="A=1;B=2"` holds all keys, and a
/// second such parameter would replace the first.
pub fn with_registry_key(parameters: &str, key: &str) -> String {
    const NAME: &str = "NVreg_RegistryDwords";
    let asked = parameter_value(parameters, NAME).unwrap_or_default();
    let keys: Vec<&str> = asked
        .split(';')
        .filter(|k| !k.trim().is_empty())
        .chain([key])
        .collect();
    format!("{NAME}=\"{}\"", keys.join(";"))
}

/// Value of one parameter among a module's parameters; the last one counts.
pub fn parameter_value(parameters: &str, name: &str) -> Option<String> {
    words(parameters.as_bytes())
        .into_iter()
        .rev()
        .find_map(|word| {
            word.strip_prefix(name)?
                .strip_prefix('=')
                .map(str::to_string)
        })
}

/// Modules of all `modprobe.blacklist=a,b` words.
pub fn module_blacklist(command_line: &[u8]) -> Vec<String> {
    let words = words(command_line);
    let lists = words
        .iter()
        .filter_map(|w| w.strip_prefix("modprobe.blacklist="));
    lists
        .flat_map(|l| l.split(','))
        .filter(|m| !m.is_empty())
        .map(|m| m.replace('-', "_"))
        .collect()
}
