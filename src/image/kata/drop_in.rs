//! Our drop-in: name, text, and whether a file is our unedited drop-in.
//!
//! The second line is a record in JSON: the request, and a checksum (CRC-32) of the rest of the
//! file. The checksum detects accidents, not malice. The text depends on the plan alone: the same
//! plan gives the same bytes.

use nix::libc;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use toml::Value;

/// Directory of drop-ins, in the directory of the configuration.
pub const DIRECTORY: &str = "config.d";
/// kata-deploy reserves 10 to 50 and recommends 50 to 89 for others. 60 sorts after kata-deploy's
/// user overrides at 50, so this drop-in sees their values.
pub const NAME: &str = "60-kata-gpu-init.toml";

/// First line of an initrd's drop-in, and of an image's.
const HEAD: &str = "# kata-gpu-init: GPU guests start from its initrd. Written by `kata-gpu-boot \
                    install`, removed by `install --remove`: do not edit.";
const HEAD_OF_IMAGE: &str = "# kata-gpu-init: GPU guests start from its image. Written by \
                             `kata-gpu-boot install`, removed by `install --remove`: do not edit.";
/// How the first line names the removal, and how earlier releases named it.
const REMOVED_BY: &str = "`install --remove`";
const REMOVED_ONCE_BY: &str = "`kata-gpu-boot uninstall`";
const MARK: &str = "#: kata-gpu-boot ";
const FORMAT: u32 = 1;

/// Content of the drop-in.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// X of `[hypervisor.X]`.
    pub section: String,
    pub keys: Vec<(&'static str, Value)>,
    /// Words of `kernel_params` that are ours, merged into the key's value.
    pub parameters: Vec<String>,
    /// Whether guests start from an image.
    pub image: bool,
}

/// Record in the drop-in's second line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    format: u32,
    /// Whether `config.d` was made for the drop-in.
    pub made_directory: bool,
    /// Words of `kernel_params` that are ours.
    pub parameters: Vec<String>,
    /// Whether guests start from an image. Drop-ins written before image support omit the field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub image: bool,
    checksum: String,
}

/// Largest file that is read; the configurations that Kata ships have less than 40 kB.
const MAX_FILE: u64 = 1 << 20;

/// State of our drop-in's path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    Absent,
    Link,
    /// Not a regular file.
    Other,
    /// A file that install did not write.
    Foreign(Vec<u8>),
    Ours {
        text: Vec<u8>,
        record: Record,
        edited: bool,
    },
}

impl Found {
    /// The content of a regular file.
    pub fn text(&self) -> Option<&[u8]> {
        match self {
            Found::Foreign(text) | Found::Ours { text, .. } => Some(text),
            Found::Absent | Found::Link | Found::Other => None,
        }
    }
}

/// Looks at the path of our drop-in, without following a link.
pub fn look(path: &Path) -> io::Result<Found> {
    let file = match OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
        .open(path)
    {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Found::Absent),
        Err(e) if e.raw_os_error() == Some(libc::ELOOP) => return Ok(Found::Link),
        // The path is a socket.
        Err(e) if e.raw_os_error() == Some(libc::ENXIO) => return Ok(Found::Other),
        Err(e) => return Err(e),
    };
    if !file.metadata()?.is_file() {
        return Ok(Found::Other);
    }
    Ok(judge(read_bounded(file)?))
}

fn judge(text: Vec<u8>) -> Found {
    let Some(record) = std::str::from_utf8(&text)
        .ok()
        .and_then(|text| text.lines().find_map(|line| line.strip_prefix(MARK)))
    else {
        return Found::Foreign(text);
    };
    // A record that does not parse counts as edited.
    let record: Record = serde_json::from_str(record).unwrap_or_default();
    let untouched = record.format == FORMAT
        && seal(&record, &body(&text)).is_some_and(|sealed| {
            [
                sealed.clone(),
                sealed.replacen(REMOVED_BY, REMOVED_ONCE_BY, 1),
            ]
            .iter()
            .any(|sealed| sealed.as_bytes() == text.as_slice())
        });
    Found::Ours {
        text,
        record,
        edited: !untouched,
    }
}

/// Everything after the first two lines.
fn body(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.splitn(3, '\n').nth(2).unwrap_or_default().to_string()
}

/// The file's text for a record and a body, with the checksum over both.
fn seal(record: &Record, body: &str) -> Option<String> {
    let mut record = Record {
        checksum: String::new(),
        ..record.clone()
    };
    let mut checksum = flate2::Crc::new();
    checksum.update(serde_json::to_string(&record).ok()?.as_bytes());
    checksum.update(body.as_bytes());
    record.checksum = format!("{:08x}", checksum.sum());
    let head = if record.image { HEAD_OF_IMAGE } else { HEAD };
    Some(format!(
        "{head}\n{MARK}{}\n{body}",
        serde_json::to_string(&record).ok()?
    ))
}

/// The drop-in's text.
pub fn render(plan: &Plan, made_directory: bool) -> Option<String> {
    let record = Record {
        format: FORMAT,
        made_directory,
        parameters: plan.parameters.clone(),
        image: plan.image,
        checksum: String::new(),
    };
    seal(&record, &toml_text(plan))
}

/// TOML part of the drop-in.
pub fn toml_text(plan: &Plan) -> String {
    let mut text = format!("[hypervisor.{}]\n", plan.section);
    for (key, value) in &plan.keys {
        text.push_str(&format!("{key} = {}\n", inline(value)));
    }
    text
}

/// A value in one line, in the syntax that the TOML parsers of all Kata releases accept.
pub fn inline(value: &Value) -> String {
    match value {
        Value::String(text) => basic_string(text),
        Value::Array(all) => format!(
            "[{}]",
            all.iter().map(inline).collect::<Vec<_>>().join(", ")
        ),
        Value::Table(table) => {
            let pair = |(key, value): (&String, &Value)| {
                let bare = !key.is_empty()
                    && key
                        .chars()
                        .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
                format!(
                    "{} = {}",
                    if bare { key.clone() } else { basic_string(key) },
                    inline(value)
                )
            };
            format!(
                "{{ {} }}",
                table.iter().map(pair).collect::<Vec<_>>().join(", ")
            )
        }
        Value::Integer(number) => number.to_string(),
        Value::Float(number) if number.is_nan() => "nan".into(),
        // Debug formatting always has the point or exponent that TOML requires.
        Value::Float(number) => format!("{number:?}"),
        Value::Boolean(truth) => truth.to_string(),
        Value::Datetime(time) => time.to_string(),
    }
}

fn basic_string(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c.is_control() => out.push_str(&format!("\\u{:04X}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Reads at most [`MAX_FILE`] bytes of a regular file that is open.
pub fn read_bounded(file: File) -> io::Result<Vec<u8>> {
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(io::Error::other(format!("more than {MAX_FILE} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::kata_config::parse;
    use super::*;

    fn plan(params: &str) -> Plan {
        Plan {
            section: "qemu".into(),
            keys: vec![
                ("image", Value::String(String::new())),
                ("kernel_params", Value::String(params.into())),
            ],
            parameters: vec!["gpuinit.log=debug".into()],
            image: false,
        }
    }

    #[test]
    fn any_string_comes_back_from_the_text_as_it_was() {
        for params in [
            "",
            "a=\"b c\"",
            "back\\slash",
            "tab\tnewline\nbell\u{7}",
            "\u{feff}\u{202e}\u{10ffff} é",
            "'''\"\"\"",
            &"x=\"y z\" ".repeat(256),
        ] {
            let text = toml_text(&plan(params));
            let table = parse(text.as_bytes()).unwrap();
            assert_eq!(
                table["hypervisor"]["qemu"]["kernel_params"].as_str(),
                Some(params),
                "{text}"
            );
        }
    }

    #[test]
    fn inline_values_are_what_they_were() {
        let table: toml::Table =
            "a = [{name = 'x', n = 1, 'odd key' = true}, {f = 1.5}]\nb = []\nc = [1e300, inf, -1, \
             2026-01-02T03:04:05Z]"
                .parse()
                .unwrap();
        for (key, value) in &table {
            let again: toml::Table = format!("{key} = {}", inline(value)).parse().unwrap();
            assert_eq!(again.get(key), Some(value));
        }
    }

    #[test]
    fn what_we_wrote_is_known_again_and_any_edit_is_seen() {
        let text = render(&plan("a=1"), true).unwrap();
        let Found::Ours {
            record,
            edited: false,
            ..
        } = judge(text.clone().into_bytes())
        else {
            panic!("not ours:\n{text}")
        };
        assert!(record.made_directory);
        assert_eq!(record.parameters, ["gpuinit.log=debug"]);
        assert_eq!(
            render(&plan("a=1"), true).unwrap(),
            text,
            "the same plan, the same bytes"
        );
        let earlier = text.replacen(REMOVED_BY, REMOVED_ONCE_BY, 1);
        assert_ne!(earlier, text);
        assert!(matches!(
            judge(earlier.into_bytes()),
            Found::Ours { edited: false, .. }
        ));
        for (from, to) in [
            ("a=1", "a=2"),
            ("true", "false"),
            ("gpuinit.log=debug", "gpuinit.log=info"),
            ("\n[", "\n\n["),
            ("# kata", "#  kata"),
            ("{", ""),
        ] {
            let changed = text.replacen(from, to, 1);
            assert_ne!(changed, text);
            assert!(
                matches!(
                    judge(changed.clone().into_bytes()),
                    Found::Ours { edited: true, .. }
                ),
                "{changed}"
            );
        }
        let of_image = render(
            &Plan {
                image: true,
                ..plan("a=1")
            },
            true,
        )
        .unwrap();
        assert!(
            matches!(
                judge(of_image.clone().into_bytes()),
                Found::Ours { edited: false, record, .. } if record.image
            ),
            "{of_image}"
        );
        let changed = of_image.replace("its image", "its initrd");
        assert!(matches!(
            judge(changed.into_bytes()),
            Found::Ours { edited: true, .. }
        ));
        let appended = format!("{text}# a note\n");
        assert!(matches!(
            judge(appended.into_bytes()),
            Found::Ours { edited: true, .. }
        ));
        assert!(matches!(
            judge(b"[hypervisor.qemu]\nimage = ''\n".to_vec()),
            Found::Foreign(_)
        ));
        assert!(matches!(judge(b"\xff\xfe".to_vec()), Found::Foreign(_)));
    }
}
