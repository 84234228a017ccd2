//! kata-gpu-boot: the host's view of the boots of GPU guests.

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use kata_gpu_boot::{collect, compare, demo, doctor, image, install, list, manual, show};
use kata_gpu_report::data::text::{Colour, Screen, choose_colour};
use kata_gpu_report::terminal::stdout::print;
use std::process::ExitCode;

/// Explain the boots of Kata guests with NVIDIA GPUs: time by phase, failures, cures.
#[derive(Parser)]
#[command(name = "kata-gpu-boot", version, after_help = include_str!("help.txt"))]
struct Cli {
    /// Colour: auto, always or never.
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t = ColourWhen::Auto,
        value_name = "WHEN",
        hide_possible_values = true
    )]
    color: ColourWhen,
    #[command(subcommand)]
    command: Command,
}

/// Auto: on a terminal, unless NO_COLOR is set.
#[derive(Clone, Copy, ValueEnum)]
enum ColourWhen {
    Auto,
    Always,
    Never,
}

#[derive(Subcommand)]
enum Command {
    Collect(collect::Args),
    List(list::Args),
    Show(show::Args),
    Compare(compare::Args),
    Doctor(doctor::Args),
    Install(install::Args),
    Image(image::Args),
    Demo(demo::Args),
    #[command(hide = true)]
    Completions(manual::Completions),
    #[command(hide = true)]
    Man(manual::Man),
}

/// Verbs of earlier versions, and what does their work now.
const MOVED: [(&str, &str); 13] = [
    ("blame", "kata-gpu-boot show --by owner"),
    (
        "cdi",
        "the program kata-gpu-cdi-check (cargo build -p kata-gpu-cdi-check)",
    ),
    ("coverage", "kata-gpu-boot show --by gap"),
    ("critical-path", "kata-gpu-boot show --by path"),
    ("explain", "kata-gpu-boot show"),
    ("export", "kata-gpu-boot show --html, --perfetto or --otlp"),
    ("follow", "kata-gpu-boot show --follow"),
    ("import", "kata-gpu-boot show LOG.. -o FILE"),
    (
        "initrd",
        "kata-gpu-boot image (`repack` is `image replace-init`)",
    ),
    ("push", "kata-gpu-boot collect --otlp URL"),
    ("stats", "kata-gpu-boot list --stats"),
    ("trace", "kata-gpu-boot doctor --record"),
    ("uninstall", "kata-gpu-boot install --remove"),
];

fn main() -> ExitCode {
    if let Some(verb) = std::env::args().nth(1)
        && let Some((old, new)) = MOVED.iter().find(|(old, _)| *old == verb)
    {
        eprintln!("kata-gpu-boot: `{old}` has become {new}");
        return ExitCode::from(2);
    }
    let matches = Cli::command().long_version(version()).get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    choose_colour(match cli.color {
        ColourWhen::Auto => Colour::Auto,
        ColourWhen::Always => Colour::Always,
        ColourWhen::Never => Colour::Never,
    });
    match run(&cli.command, Screen::of_stdout()) {
        Ok(status) => status,
        Err(error) => {
            eprintln!("kata-gpu-boot: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Exit status: 0 well, 1 found something, 2 cannot.
fn run(command: &Command, screen: Screen) -> Result<ExitCode> {
    match command {
        Command::Collect(args) => collect::run(args)?,
        Command::List(args) => print(&list::text(args, &screen)?)?,
        Command::Show(args) => return show::run(args, screen),
        Command::Compare(args) => return compare::run(args, &screen),
        Command::Doctor(args) => return Ok(doctor::run(args)),
        Command::Install(args) => return Ok(install::run(args)),
        Command::Image(args) => return Ok(image::run(args)),
        Command::Demo(args) => demo::run(args)?,
        Command::Completions(args) => manual::completions(args, Cli::command()),
        Command::Man(args) => manual::man(args, Cli::command())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Text of `--version`, with the id that a release's BUILD-IDS lists.
fn version() -> String {
    format!(
        "{}\nbuild {}",
        env!("CARGO_PKG_VERSION"),
        collect::build_id()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Command, CommandFactory};

    #[test]
    fn the_version_is_printed_with_the_programs_own_name() {
        assert_eq!(
            Cli::command().render_version(),
            concat!("kata-gpu-boot ", env!("CARGO_PKG_VERSION"), "\n")
        );
    }

    /// A terminal's help is wrapped at its width: a command that is longer would be copied in two
    /// pieces.
    #[test]
    fn an_example_fits_into_a_line_of_100_columns() {
        fn check(command: &Command, examples: &mut usize) {
            let help = command
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            for line in help.lines() {
                assert!(
                    line.chars().count() <= 100,
                    "{}: {line}",
                    command.get_name()
                );
                *examples += usize::from(line.starts_with("  kata-gpu-boot "));
            }
            command
                .get_subcommands()
                .for_each(|command| check(command, examples));
        }
        let mut examples = 0;
        check(&Cli::command(), &mut examples);
        assert!(examples > 20, "only {examples} were looked at");
    }

    #[test]
    fn a_verbs_help_fits_a_screen() {
        for verb in Cli::command().get_subcommands_mut() {
            let lines = verb.render_help().to_string().lines().count();
            assert!(lines <= 50, "{}: {lines} lines", verb.get_name());
        }
    }

    #[test]
    fn an_old_verb_is_none_of_todays() {
        for (old, _) in MOVED {
            let now = Cli::command();
            assert!(now.get_subcommands().all(|verb| verb.get_name() != old));
        }
    }

    #[test]
    fn every_command_that_an_alert_names_is_one_of_this_program() {
        let tried = |command: &str| {
            Cli::command()
                .try_get_matches_from(command.split(' '))
                .map_err(|e| e.to_string())
        };
        let alerts = include_str!("../collect/deploy/alerts.yaml");
        let text = alerts.split_whitespace().collect::<Vec<_>>().join(" ");
        let own: Vec<&str> = text
            .split('`')
            .skip(1)
            .step_by(2)
            .map(|command| match command.split_once(" -- ") {
                Some((exec, own)) if exec.starts_with("kubectl exec ") => own,
                _ => command,
            })
            .filter(|command| command.starts_with("kata-gpu-boot "))
            .collect();
        assert!(own.len() > 15, "{own:?}");
        for command in own {
            assert!(tried(command).is_ok(), "{:?}", tried(command));
        }
        assert!(tried("kata-gpu-boot show --no-such-option").is_err());
    }
}
