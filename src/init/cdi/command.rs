//! `kata-gpu-init cdi ..`: the CDI generator outside a guest, on a directory tree or on a machine
//! with the driver loaded.

use super::devices::{OTHERS, Places};
use super::publish::replace;
use super::schema::{Edits, Spec};
use super::spec::{Options, edits_of, generate};
use super::yaml;
use crate::config::Hooks;
use crate::config::parameter_table::namings;
use crate::driver_files::{DriverFiles, Roots, manifest, scan};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Text of `cdi --help`.
pub const HELP: &str = "\
kata-gpu-init cdi: CDI specs of a machine or of a directory tree, as a guest publishes them

usage:
  kata-gpu-init cdi generate [OPTION..]    writes a spec: the GPUs that the driver has bound, and \
  the files that containers need for them
  kata-gpu-init cdi manifest [OPTION..]    writes the list of the driver's files into the root \
  (as the last step of building an image), so
                                           that a boot does not search for them

options:
  --root DIR           the root with /proc, /sys and the rest; default: /
  --driver-root DIR    the driver's user space, as seen from the root; default: /
  --dev-root DIR       the root with /dev, as seen from here; default: the root
  --driver-version V   the driver's version; default: that of the loaded module, or of its libraries
  --mode MODE          gpu (default), gds, mofed, nvswitch, gdrcopy, imex, management
  --names LIST         index, uuid, type-index, with commas between; default: index
  --hooks KIND         one (default), none
  --hook-path FILE     path of this program for the runtime; default: its path here
  --format FORMAT      json (default) or yaml
  --output FILE        replaces FILE when the spec is complete; default: standard output (-)

exit status: 0 the spec is complete; 3 the spec is written, with omissions (listed on standard \
error); 1 no spec; 2 wrong usage

examples:
  kata-gpu-init cdi generate                                        this machine
  kata-gpu-init cdi generate --root ./rootfs --driver-version 580.95.05
  kata-gpu-init cdi generate --mode imex --output /var/run/cdi/imex.json
";

/// Parsed options of `cdi`.
#[derive(Debug)]
struct Asked {
    root: PathBuf,
    driver_root: PathBuf,
    dev_root: Option<PathBuf>,
    driver_version: Option<String>,
    mode: String,
    yaml: bool,
    output: Option<PathBuf>,
    options: Options,
}

/// Reason why there is no spec.
#[derive(Debug)]
enum Error {
    Usage(String),
    Failed(String),
}

/// Runs `cdi` with the arguments that follow it.
pub fn main(words: &[String]) -> ExitCode {
    let (what, rest) = words
        .split_first()
        .map_or(("", words), |(first, rest)| (first.as_str(), rest));
    let help = words.iter().any(|w| w == "--help" || w == "-h");
    let result = match what {
        _ if help => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        "generate" => parse(rest).and_then(|asked| run(&asked)),
        "manifest" => parse(rest).and_then(|asked| write_manifest(&asked)),
        "" => Err(Error::Usage(
            "cdi needs a command: generate or manifest".into(),
        )),
        other => Err(Error::Usage(format!(
            "cdi has no command {other:?}: there are generate and manifest"
        ))),
    };
    match result {
        Ok(problems) if problems.is_empty() => ExitCode::SUCCESS,
        Ok(problems) => {
            problems.iter().for_each(|problem| log(problem));
            ExitCode::from(3)
        }
        Err(Error::Usage(error)) => {
            log(&format!("{error}; see `kata-gpu-init cdi --help`"));
            ExitCode::from(2)
        }
        Err(Error::Failed(error)) => {
            log(&error);
            ExitCode::FAILURE
        }
    }
}

/// Prints a line on standard error; control characters become `?`.
fn log(line: &str) {
    let line: String = line
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect();
    eprintln!("kata-gpu-init: {line}");
}

fn parse(words: &[String]) -> Result<Asked, Error> {
    let mut asked = Asked {
        root: "/".into(),
        driver_root: "/".into(),
        dev_root: None,
        driver_version: None,
        mode: "gpu".into(),
        yaml: false,
        output: None,
        options: Options {
            hook_path: own_path(),
            ..Options::default()
        },
    };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let (flag, value) = match word.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_string())),
            None => (word.as_str(), None),
        };
        let usage = |what: &str| Error::Usage(format!("{flag}: {what}"));
        let value = || {
            value
                .or_else(|| words.next().cloned())
                .filter(|v| !v.is_empty())
                .ok_or_else(|| usage("needs a value"))
        };
        match flag {
            "--root" => asked.root = value()?.into(),
            "--driver-root" => asked.driver_root = value()?.into(),
            "--dev-root" => asked.dev_root = Some(value()?.into()),
            "--driver-version" => asked.driver_version = Some(value()?),
            "--mode" => {
                asked.mode = value()?;
                let modes = || ["gpu"].into_iter().chain(OTHERS.iter().map(|o| o.mode));
                if !modes().any(|mode| mode == asked.mode) {
                    let modes: Vec<&str> = modes().collect();
                    let (mode, modes) = (asked.mode, modes.join(", "));
                    return Err(usage(&format!("{mode:?} is none of {modes}")));
                }
            }
            "--names" => {
                let value = value()?;
                asked.options.namings = namings(&value).ok_or_else(|| {
                    usage(&format!(
                        "{value:?}: takes index, uuid, type-index, with commas"
                    ))
                })?;
            }
            "--hooks" => {
                let value = value()?;
                asked.options.hooks = Hooks::named(&value)
                    .ok_or_else(|| usage(&format!("{value:?} is neither one nor none")))?
            }
            "--hook-path" => asked.options.hook_path = value()?,
            "--format" => {
                asked.yaml = match value()?.as_str() {
                    "json" => false,
                    "yaml" => true,
                    value => return Err(usage(&format!("{value:?} is neither json nor yaml"))),
                }
            }
            "--output" => asked.output = Some(value()?).filter(|v| v != "-").map(Into::into),
            _ => return Err(Error::Usage(format!("unknown option {flag:?}"))),
        }
    }
    Ok(asked)
}

/// Path of this program, for the hooks of the spec.
fn own_path() -> String {
    std::env::current_exe().map_or_else(
        |_| Options::default().hook_path,
        |path| path.display().to_string(),
    )
}

impl Asked {
    fn roots(&self) -> Roots {
        Roots {
            root: self.root.clone(),
            driver_root: self.driver_root.clone(),
            dev_root: "/".into(),
        }
    }

    fn places(&self) -> Places {
        Places {
            root: self.root.clone(),
            dev_root: self.dev_root.clone().unwrap_or_else(|| self.root.clone()),
        }
    }

    /// Directory of the nodes at runtime, if that is not the runtime's own /dev.
    fn dev_prefix(&self) -> Option<String> {
        let dev_root = self
            .dev_root
            .as_ref()
            .filter(|dev_root| **dev_root != self.root)?;
        let seen = dev_root.strip_prefix(&self.root).unwrap_or(dev_root);
        Some(format!("/{}", seen.display().to_string().trim_matches('/')))
    }

    fn files(&self) -> Result<DriverFiles, Error> {
        scan(&self.roots(), self.driver_version.as_deref()).map_err(Error::Failed)
    }
}

/// Writes the spec; returns the parts that were left out.
fn run(asked: &Asked) -> Result<Vec<String>, Error> {
    let places = asked.places();
    let mut problems = Vec::new();
    let mut spec: Spec = match OTHERS.iter().find(|o| o.mode == asked.mode) {
        Some(other) => {
            let mut common = Edits::default();
            if other.mode == "management" {
                let mut files = asked.files()?;
                problems.append(&mut files.problems);
                common = edits_of(&files, &asked.options);
            }
            other.spec(&places, common).map_err(Error::Failed)?
        }
        None => {
            let found = places.gpus().map_err(Error::Failed)?;
            let mut files = asked.files()?;
            note_absent(&files, asked);
            problems.extend(found.problems);
            problems.append(&mut files.problems);
            generate(&found.gpus, &found.common, Some(&files), &asked.options)
        }
    };
    if let Some(prefix) = asked.dev_prefix() {
        spec.set_host_root(&prefix);
    }
    let mut text = spec.to_json();
    if asked.yaml {
        text = yaml::from_json(&text).into_bytes();
    } else {
        text.push(b'\n');
    }
    match &asked.output {
        // Write to a pipe, device or link; do not replace it: /dev/stdout is a link.
        Some(path) if path.symlink_metadata().is_ok_and(|meta| !meta.is_file()) => {
            std::fs::write(path, &text)
                .map_err(|e| Error::Failed(format!("write {}: {e}", path.display())))?;
        }
        Some(path) => replace(path, &text).map_err(|e| Error::Failed(e.to_string()))?,
        None => std::io::stdout()
            .write_all(&text)
            .map_err(|e| Error::Failed(format!("write to standard output: {e}")))?,
    }
    Ok(problems)
}

/// Prints what containers usually have and will lack: no omission, so the exit status stays.
fn note_absent(files: &DriverFiles, asked: &Asked) {
    for name in files.absent() {
        log(&format!(
            "note: {name} is nowhere below the driver root {}: containers get none",
            asked.driver_root.display()
        ));
    }
}

/// Writes the manifest into the root; prints its numbers of files and links.
fn write_manifest(asked: &Asked) -> Result<Vec<String>, Error> {
    let files = asked.files()?;
    note_absent(&files, asked);
    let (path, bytes) =
        manifest::write(&asked.roots(), &files).map_err(|e| Error::Failed(e.to_string()))?;
    println!(
        "{}: {} files and {} links of driver {}, {bytes} bytes",
        path.display(),
        files.mounts.len(),
        files.links.len(),
        files.version
    );
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn asked(words: &[&str]) -> Result<Asked, String> {
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        parse(&words).map_err(|e| match e {
            Error::Usage(text) | Error::Failed(text) => text,
        })
    }

    #[test]
    fn options_are_taken_with_a_space_or_an_equals_sign() {
        let asked = asked(&[
            "--root",
            "/r",
            "--dev-root=/d",
            "--names=uuid,index",
            "--format",
            "yaml",
            "--output",
            "-",
        ])
        .unwrap();
        assert_eq!(
            (
                asked.root.as_path(),
                asked.places().dev_root.as_path(),
                asked.yaml
            ),
            (Path::new("/r"), Path::new("/d"), true)
        );
        assert_eq!(asked.options.namings.len(), 2);
        assert_eq!(asked.output, None, "- is standard output");
    }

    #[test]
    fn what_is_wrong_is_named_with_what_there_is() {
        for (words, error) in [
            (&["--rot", "/"][..], "unknown option \"--rot\""),
            (&["--root"], "--root: needs a value"),
            (
                &["--mode", "gpus"],
                "--mode: \"gpus\" is none of gpu, gds, mofed, nvswitch, gdrcopy, imex, management",
            ),
            (
                &["--names", "index,x"],
                "--names: \"index,x\": takes index, uuid, type-index, with commas",
            ),
            (
                &["--format", "xml"],
                "--format: \"xml\" is neither json nor yaml",
            ),
        ] {
            assert_eq!(asked(words).unwrap_err(), error);
        }
    }
}
