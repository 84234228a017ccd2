//! kata-gpu-cdi-check: CDI specs as agents read them. For the tests, and for whoever writes a spec.

use anyhow::Result;
use clap::Parser;
use kata_gpu_cdi_check::check_report::Question;
use kata_gpu_cdi_check::look::Look;
use kata_gpu_cdi_check::spec_rules::{Agent, Agents, RULES};
use kata_gpu_cdi_check::{check_report, check_text, spec_files};
use kata_gpu_report::data::text::{Screen, ascii_json};
use kata_gpu_report::terminal::stdout::print;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit status for specs that cannot be checked at all.
const USAGE: u8 = 2;

const HELP: &str = "\
Reads specs as kata-agent does: a directory with everything below it, *.json and *.yaml of any case. Two agents judge, with the very parsers that Kata \
releases contain: Kata <= 3.32 (container-device-interface 0.1.2) and Kata 4 (1.1.1). Each finding names the effect, the Kata versions concerned, and the cure.

A device that waits is no error: kata-gpu-init lists GPUs that are not ready with a path that does not exist, so that a container waits for them \
instead of failing. Without --here or --root, every other path is taken to exist.

Exit status: 0 nothing is wrong (warnings are printed), 1 an error was found, 2 the question itself cannot be answered.

Examples:
  # a spec before it goes into a guest
  kata-gpu-cdi-check nvidia.yaml
  # what a container with GPUs 0 and 1 gets
  kata-gpu-cdi-check nvidia.yaml 0 1
  # inside a guest: do all paths exist, and can all GPUs be had now
  kata-gpu-cdi-check /var/run/cdi --here --require-resolvable
  # an unpacked guest image, on the host
  kata-gpu-cdi-check root/var/run/cdi --root root
  # findings for Kata 4 alone, for programs
  kata-gpu-cdi-check nvidia.yaml --kata 4 --json |
    jq '.findings[] | {severity, rule, pointer}'
  # all rules
  kata-gpu-cdi-check --rules";

/// Check CDI specs as kata-agent reads them, and show what a container would get.
#[derive(Parser, Debug)]
#[command(name = "kata-gpu-cdi-check", version, after_help = HELP)]
struct Args {
    /// A spec, or a directory of specs like /var/run/cdi.
    #[arg(value_name = "FILE|DIR", required_unless_present = "rules")]
    path: Option<PathBuf>,
    /// Devices that one container requests: nvidia.com/gpu=0, or 0 [default: each device by
    /// itself].
    #[arg(value_name = "DEVICE")]
    devices: Vec<String>,
    /// Directory below which paths in specs are looked up.
    #[arg(long, value_name = "DIR", conflicts_with = "here")]
    root: Option<PathBuf>,
    /// Look up paths in specs on this machine.
    #[arg(long)]
    here: bool,
    /// Count a device that a container would wait for as an error.
    #[arg(long)]
    require_resolvable: bool,
    /// Major version of Kata whose rules count [default: both].
    #[arg(long, value_enum, value_name = "MAJOR")]
    kata: Option<Agent>,
    /// Print everything as one JSON object: files, agents, containers, findings.
    #[arg(long)]
    json: bool,
    /// Print the rules, and exit.
    #[arg(long, exclusive = true)]
    rules: bool,
}

fn main() -> ExitCode {
    match check(&Args::parse()).and_then(|(text, is_good)| print(&text).map(|()| is_good)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!(
                "kata-gpu-cdi-check: {}",
                kata_gpu_report::data::text::printable(&format!("{error:#}"))
            );
            ExitCode::from(USAGE)
        }
    }
}

/// The report, and whether there is no error in the specs.
fn check(args: &Args) -> Result<(String, bool)> {
    let screen = Screen::of_stdout();
    if args.rules {
        return Ok((check_text::rules(RULES, &screen), true));
    }
    let path = args.path.as_deref().unwrap_or(Path::new(""));
    let question = Question {
        look: match &args.root {
            Some(root) => Look::below(root)?,
            None if args.here => Look::below(Path::new("/"))?,
            None => Look::Nowhere,
        },
        agents: args
            .kata
            .map_or(Agents::BOTH, |kata| Agents::which(|agent| agent == kata)),
        devices: args.devices.clone(),
        require_resolvable: args.require_resolvable,
    };
    let report = check_report::check(spec_files::read(path)?, &question)?;
    let text = if args.json {
        ascii_json(&report.json())?
    } else {
        check_text::page(&report, &question, &screen)
    };
    Ok((text, !report.has_errors()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::{temp_dir, tests_dir};

    fn parse(words: &[&str]) -> Result<Args, clap::Error> {
        Args::try_parse_from(["kata-gpu-cdi-check"].iter().chain(words))
    }

    #[test]
    fn what_contradicts_itself_is_a_question_of_usage() {
        for words in [
            &["x", "0", "1"][..],
            &["x", "--here", "--json"],
            &["x", "--root", "/"],
            &["x", "--kata", "3"],
            &["--rules"],
        ] {
            assert!(parse(words).is_ok(), "{words:?}");
        }
        for words in [
            &[][..],
            &["x", "--here", "--root", "/"],
            &["x", "--kata", "5"],
            &["--rules", "x"],
            &["--json"],
        ] {
            assert_eq!(
                parse(words).unwrap_err().exit_code(),
                i32::from(USAGE),
                "{words:?}"
            );
        }
    }

    #[test]
    fn good_wrong_and_impossible_have_different_results() {
        let reference = tests_dir("fixtures/cdi/kata-8gpu-550.json")
            .display()
            .to_string();
        assert!(check(&parse(&[&reference, "--json"]).unwrap()).unwrap().1);
        let (text, is_good) =
            check(&parse(&[&reference, "no-such-device", "--json"]).unwrap()).unwrap();
        assert!(!is_good && text.contains("no-such-device"), "{text}");
        let dir = temp_dir();
        let missing = dir.path().join("none").display().to_string();
        assert!(check(&parse(&[&missing]).unwrap()).is_err());
        let error = check(&parse(&[&reference, "--root", &missing]).unwrap()).unwrap_err();
        assert!(error.to_string().contains("open root directory"), "{error}");
    }
}
