//! kata-gpu-boot: the host's view of the boots of GPU guests.

use anyhow::Result;
use clap::{Parser, Subcommand};
use kata_gpu_boot::{
    blame, collect, compare, coverage, critical_path, demo, doctor, explain, export, follow,
    import, initrd, install, list, show, stats, trace, uninstall,
};
use kata_gpu_report::data::text::Screen;
use kata_gpu_report::terminal::stdout::print;
use std::process::ExitCode;

/// Show the boots of Kata guests with NVIDIA GPUs: steps with owner and duration.
#[derive(Parser)]
#[command(name = "kata-gpu-boot", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  kata-gpu-boot collect --dir boots --live     receive streams and watch
  kata-gpu-boot follow --dir boots             a boot as it happens: bars
  kata-gpu-boot show --dir boots               the newest boot as a table
  kata-gpu-boot list --dir boots --failed      boots that went wrong, whose
  kata-gpu-boot explain --dir boots            a boot phase by phase, and cures
  kata-gpu-boot critical-path --dir boots      what would have made it shorter
  kata-gpu-boot export --html -o boot.html     the newest boot as a page
  kata-gpu-boot demo --kernel vmlinuz --initrd demo.cpio
  kata-gpu-boot install --kata-config FILE --initrd gpu.initrd
  kata-gpu-boot initrd verify kata.initrd      can it boot as a GPU guest
  kata-gpu-boot doctor --dir boots             what makes this host slow
  kata-gpu-boot import containerd.log pod.json a boot from others' logs
  kata-gpu-boot trace --next --dir boots       what the host does for a VM
Each subcommand's --help ends with more.";

#[derive(Subcommand)]
enum Command {
    Collect(collect::Args),
    Follow(follow::Args),
    Show(show::Args),
    List(list::Args),
    Blame(blame::Args),
    CriticalPath(critical_path::Args),
    Coverage(coverage::Args),
    Explain(explain::Args),
    Compare(compare::Args),
    Stats(stats::Args),
    Export(export::Args),
    Demo(demo::Args),
    Doctor(doctor::Args),
    Install(install::Args),
    Uninstall(uninstall::Args),
    Initrd(initrd::Args),
    Import(import::Args),
    Trace(trace::Args),
    /// Moved.
    #[command(hide = true)]
    Cdi {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

fn main() -> ExitCode {
    let screen = Screen::of_stdout();
    let shown = |text: Result<String>| print(&text?);
    let done = match Cli::parse().command {
        Command::Collect(args) => collect::run(&args),
        // Exit status: outcome of the boot.
        Command::Follow(args) => return follow::run(&args),
        Command::Show(args) => show::run(&args),
        Command::List(args) => shown(list::text(&args, &screen)),
        Command::Blame(args) => shown(blame::text(&args, &screen)),
        Command::CriticalPath(args) => shown(critical_path::text(&args, &screen)),
        Command::Coverage(args) => coverage::run(&args),
        Command::Explain(args) => shown(explain::text(&args, &screen)),
        // Exit status: whether a value became slower.
        Command::Compare(args) => return compare::run(&args),
        Command::Stats(args) => shown(stats::text(&args, &screen)),
        // Exit status: whether something costs too much.
        Command::Doctor(args) => return doctor::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Import(args) => import::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Cdi { .. } => {
            eprintln!(
                "kata-gpu-boot: `cdi check` is a program of its own: kata-gpu-cdi-check (cargo build -p kata-gpu-cdi-check)"
            );
            return ExitCode::from(2);
        }
        Command::Install(args) => return install::run(&args),
        Command::Uninstall(args) => return uninstall::run(&args),
        Command::Initrd(args) => return initrd::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kata-gpu-boot: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Command, CommandFactory};
    use kata_gpu_collect::fleet::alerts;

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
    fn an_example_fits_into_a_line_of_80_columns() {
        fn check(command: &Command, examples: &mut usize) {
            let help = command
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            for line in help
                .lines()
                .filter(|line| line.starts_with("  kata-gpu-boot ") || line.starts_with("    "))
            {
                assert!(line.chars().count() <= 80, "{}: {line}", command.get_name());
                *examples += usize::from(line.starts_with("  kata-gpu-boot "));
            }
            command
                .get_subcommands()
                .for_each(|command| check(command, examples));
        }
        let mut examples = 0;
        check(&Cli::command(), &mut examples);
        assert!(examples > 40, "only {examples} were looked at");
    }

    #[test]
    fn every_command_that_an_alert_names_is_one_of_this_program() {
        let tried = |command: &str| {
            Cli::command()
                .try_get_matches_from(command.split(' '))
                .map_err(|e| e.to_string())
        };
        let groups = alerts::groups();
        let descriptions = groups
            .iter()
            .flat_map(|(_, alerts)| alerts)
            .map(|alert| alert.description);
        let commands: Vec<&str> = descriptions
            .flat_map(|text| text.split('`').skip(1).step_by(2))
            .collect();
        let own: Vec<&&str> = commands
            .iter()
            .filter(|command| command.starts_with("kata-gpu-boot "))
            .collect();
        assert!(own.len() > 15, "{own:?}");
        for command in own {
            assert!(tried(command).is_ok(), "{:?}", tried(command));
        }
        assert!(tried("kata-gpu-boot show --no-such-option").is_err());
    }
}
