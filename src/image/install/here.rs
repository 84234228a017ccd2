//! Installation in one configuration of this machine: arguments, refusals, and the drop-in written.

use super::checks::Facts;
use super::drop_in_plan::Plan;
use super::guest::Guest;
use super::guest_check::Wanted;
use super::{checks, drop_in_file, drop_in_plan, gpu_pods, guest, kernel_params, place, trial};
use crate::kata::drop_in::Found;
use crate::kata::merge::{Effective, Runtime};
use crate::kata::refusal::Refusal;
use crate::kata::version::{Configured, Known, Version};
use crate::kata::{drop_in, version};
use clap::builder::ArgPredicate;
use kata_gpu_init::config::Config;
use kata_gpu_report::data::text::{Ink, Screen, printable};
use kata_gpu_report::terminal::stdout::print;
use serde_json::{Value as Json, json};
use similar::TextDiff;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use toml::Value;

/// Longest shown value of a change, in bytes; the drop-in contains the whole value.
const MAX_SHOWN: usize = 120;

/// Make GPU guests of a Kata configuration start from our initrd or image.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Kata's configuration file, as containerd or CRI-O names it.
    #[arg(
        long,
        value_name = "FILE",
        required = false,
        required_unless_present = "what",
        default_value_if("what", ArgPredicate::IsPresent, ".")
    )]
    pub kata_config: PathBuf,
    /// The initrd [default: the installed one stays].
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// A disk image instead, with an erofs or ext4 root in partition 1.
    #[arg(long, value_name = "FILE", conflicts_with = "initrd")]
    pub image: Option<PathBuf>,
    /// The image's dm-verity parameters, root_hash=.. [default: those in the file IMAGE.verity,
    /// which image replace-init --verity writes].
    #[arg(
        long,
        value_name = "PARAMS",
        requires = "image",
        conflicts_with = "initrd"
    )]
    pub verity: Option<String>,
    /// Guest's parameter, like gpuinit.log=debug; replaces its former value.
    #[arg(long = "param", value_name = "WORD")]
    pub params: Vec<String>,
    /// Name of a parameter that an earlier --param added, to remove.
    #[arg(long, value_name = "NAME")]
    pub unset: Vec<String>,
    /// Do not require the driver's libraries and firmware in the initrd.
    #[arg(long)]
    pub no_user_space: bool,
    /// Kata's version, if its shim does not report it.
    #[arg(long, value_name = "X.Y.Z")]
    pub kata_version: Option<Version>,
    /// Print the changes as a diff, and exit.
    #[arg(long)]
    pub dry_run: bool,
    /// Pass refusals that end in "(or --force)"; with --remove: edits.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub place: place::Place,
    /// With --node: stay until SIGTERM, and install again what was removed.
    #[arg(long, requires = "node", conflicts_with_all = ["dry_run", "json"])]
    pub repeat: bool,
    /// Remove the drop-in, and with --node the copies and the label.
    #[arg(
        long,
        conflicts_with_all = ["initrd", "image", "params", "unset", "no_user_space", "kata_version"]
    )]
    pub remove: bool,
    #[command(flatten)]
    pub check: trial::Check,
    /// Facts about the node, from the caller.
    #[arg(skip)]
    pub seen: gpu_pods::Node,
}

/// Output of a subcommand, and its exit status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub out: String,
    pub err: String,
    pub code: u8,
}

impl Report {
    pub fn done(out: String) -> Report {
        Report {
            out,
            ..Report::default()
        }
    }

    pub fn refused(err: String) -> Report {
        Report {
            err,
            code: 1,
            ..Report::default()
        }
    }

    /// The report of an error, like one of I/O.
    pub fn failed(error: &anyhow::Error) -> Report {
        let mut said = Report::default();
        said.add_error(error);
        said
    }

    /// Adds a failure to the output.
    pub fn add(&mut self, result: anyhow::Result<()>) {
        if let Err(error) = result {
            self.add_error(&error);
        }
    }

    fn add_error(&mut self, error: &anyhow::Error) {
        let text = printable(&format!("{error:#}"));
        self.err.push_str(&format!("kata-gpu-boot: {text}\n"));
        self.code = 2;
    }

    pub fn print(self) -> ExitCode {
        let screen = Screen::of_stdout();
        let for_errors = Screen {
            colour: screen.colour && std::io::stderr().is_terminal(),
            ..screen
        };
        eprint!("{}", painted(&self.err, &for_errors));
        match print(&painted(&self.out, &screen)) {
            Ok(()) => ExitCode::from(self.code),
            Err(error) => {
                eprintln!("kata-gpu-boot: {error:#}");
                ExitCode::from(2)
            }
        }
    }
}

/// Starts of lines, and their colours.
const INKS: &[(&str, Ink)] = &[
    ("refused: ", Ink::Error),
    ("forced: ", Ink::Warning),
    ("note: ", Ink::Warning),
    ("wrote ", Ink::Good),
    ("removed ", Ink::Good),
    ("+++", Ink::Bold),
    ("---", Ink::Bold),
    ("@@", Ink::Dim),
    ("+", Ink::Good),
    ("-", Ink::Error),
];

/// Colours the start of a line, or a whole line of a diff.
fn painted(text: &str, screen: &Screen) -> String {
    let line = |line: &str| match INKS
        .iter()
        .find_map(|(start, ink)| Some((start, *ink, line.strip_prefix(start)?)))
    {
        Some((start, ink, rest)) if start.ends_with(' ') => {
            format!("{}{rest}", screen.paint(ink, start))
        }
        Some((_, ink, _)) => screen.paint(ink, line.trim_end_matches('\n')) + "\n",
        None => line.to_string(),
    };
    if screen.colour {
        text.split_inclusive('\n').map(line).collect()
    } else {
        text.to_string()
    }
}

/// Installs an initrd or image at its present path, without a copy.
pub fn say_here(args: &Args) -> Report {
    let refused = |refusals: Vec<Refusal>| {
        let reasons = if refusals.len() == 1 {
            "1 reason".into()
        } else {
            format!("{} reasons", refusals.len())
        };
        let mut err: String = refusals
            .iter()
            .map(|refusal| format!("refused: {refusal}\n"))
            .collect();
        err.push_str(&format!("nothing was written, for {reasons}\n"));
        let reasons: Vec<_> = refusals.iter().map(Refusal::json).collect();
        let json = json!({"action": "refused", "refusals": reasons});
        Report {
            out: if args.json {
                format!("{json}\n")
            } else {
                String::new()
            },
            err,
            code: 1,
        }
    };
    // Hold the lock until the drop-in is written: no other process changes the
    // directory that was read.
    let dir = std::fs::canonicalize(&args.kata_config)
        .ok()
        .and_then(|path| path.parent().map(Path::to_path_buf));
    let lock = match dir
        .filter(|_| !args.dry_run)
        .map(|dir| drop_in_file::lock(&dir))
    {
        Some(Err(error)) => {
            return Report::failed(&error);
        }
        lock => lock.and_then(Result::ok),
    };
    let said = match Install::prepare(args) {
        Ok(install) => install.act(args).unwrap_or_else(refused),
        Err(refusals) => refused(refusals),
    };
    drop(lock);
    said
}

/// A key's value before and after.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    key: String,
    before: Option<Value>,
    after: Option<Value>,
}

impl Change {
    pub fn json(&self) -> Json {
        let of = |value: &Option<Value>| {
            value.as_ref().map_or(Json::Null, |value| {
                serde_json::to_value(value).unwrap_or(Json::Null)
            })
        };
        json!({"key": self.key, "before": of(&self.before), "after": of(&self.after)})
    }

    fn text(&self) -> String {
        let key = printable(&self.key);
        if let (Some(Value::String(before)), Some(Value::String(after))) =
            (&self.before, &self.after)
            && self.key.ends_with(".kernel_params")
            && let (Ok(old), Ok(new)) = (kernel_params::words(before), kernel_params::words(after))
        {
            // Show only the words that differ: the line is long.
            let gone = old
                .iter()
                .filter(|word| !new.contains(word))
                .map(|word| format!("- {word}"));
            let come = new
                .iter()
                .filter(|word| !old.contains(word))
                .map(|word| format!("+ {word}"));
            let words: Vec<String> = gone.chain(come).collect();
            let words = if words.is_empty() {
                "the same words in another order".to_string()
            } else {
                words.join(" ")
            };
            return format!("  {key}: {}\n", printable(&words));
        }
        let of = |value: &Option<Value>| match value {
            None => "absent".to_string(),
            Some(value) => kata_gpu_report::data::text::printable_start(
                drop_in::inline(value).as_bytes(),
                MAX_SHOWN,
            ),
        };
        format!("  {key}: {} -> {}\n", of(&self.before), of(&self.after))
    }
}

pub fn changes_text(changes: &[Change]) -> String {
    changes.iter().map(Change::text).collect()
}

/// The driver's root that the guest's command line will name.
fn driver_root(of: &Configured, before: &Effective, parameters: &[String]) -> Option<PathBuf> {
    let others = before.text(&of.key("kernel_params")).unwrap_or_default();
    let words = format!("{others} {}", parameters.join(" "));
    Config::parse(words.as_bytes()).0.driver_root
}

/// Keys that differ between two configurations, among the keys that our drop-in may write.
fn changes(of: &Configured, before: &Effective, after: &Effective) -> Vec<Change> {
    let keys = [
        "image",
        "initrd",
        "kernel_params",
        "kernel_verity_params",
        "rootfs_type",
        "guest_extension_images",
    ];
    let change = |key: &str| {
        let path = of.key(key);
        let (before, after) = (before.get(&path).cloned(), after.get(&path).cloned());
        (before != after).then(|| Change {
            key: path.join("."),
            before,
            after,
        })
    };
    keys.into_iter().filter_map(change).collect()
}

/// Keys changed by our drop-in with this text, or by its removal; None if the files are unreadable.
pub fn effective_changes(config: &Path, text: Option<&str>) -> Option<Vec<Change>> {
    let of = Configured::read(config).ok()?;
    let after = of.with(text.map(str::as_bytes));
    Some(changes(&of, &of.now(), &after))
}

/// An install that can go ahead.
struct Install {
    of: Configured,
    version: Known,
    plan: Plan,
    guest: Guest,
    text: String,
    make_directory: bool,
    changes: Vec<Change>,
    /// Refusals that `--force` passed.
    forced: Vec<Refusal>,
    /// Values with which some pods fail.
    gpu_notes: Vec<String>,
}

impl Install {
    fn prepare(args: &Args) -> Result<Install, Vec<Refusal>> {
        let of = Configured::read(&args.kata_config)?;
        let config = &of.config;
        let one = |refusal| vec![refusal];
        let version = match args.kata_version {
            Some(version) => Known::Stated(version),
            None => version::ask(&config.base.path, of.runtime),
        };
        let (now, before) = (of.now(), of.with(None));
        let (installed, made_directory) = match &config.ours {
            // On a node, only the manifest's words count.
            Found::Ours { record, .. } if args.place.node.is_some() => {
                (Vec::new(), record.made_directory)
            }
            Found::Ours { record, .. } => (record.parameters.clone(), record.made_directory),
            _ => (Vec::new(), !config.dir_exists),
        };
        let parameters = drop_in_plan::parameters(&installed, &args.params, &args.unset)?;
        let guest = guest::choose(args, &of, &now)
            .and_then(|chosen| {
                chosen.look(&Wanted {
                    kernel: before.text(&of.key("kernel")),
                    user_space: !args.no_user_space,
                    driver_root: driver_root(&of, &before, &parameters),
                })
            })
            .map_err(one)?;
        let plan = Plan::of(&before, &of.section, &guest.root(), parameters).map_err(one)?;
        let text = drop_in::render(&plan, made_directory).ok_or_else(|| {
            one(Refusal::at(
                &config.drop_in_path(),
                "cannot be written as TOML",
            ))
        })?;
        let after = of.with(Some(text.as_bytes()));
        if args.place.node.is_some() && version.version().is_none() {
            // A key unknown to the installed Kata fails every pod on every node.
            let refusal = Refusal::of_argument(
                "--node",
                "Kata's version is not known: its shim does not run here, and no file has it",
            );
            return Err(one(refusal.cure("give it with --kata-version X.Y.Z")));
        }
        let facts = Facts {
            config,
            runtime: of.runtime,
            version: version.version(),
            before: &before,
            after: &after,
            plan: &plan,
            guest: &guest,
        };
        let (forced, refusals): (Vec<_>, Vec<_>) = checks::check(&facts)
            .into_iter()
            .partition(|refusal| args.force && refusal.forcible);
        if !refusals.is_empty() {
            return Err(refusals);
        }
        Ok(Install {
            gpu_notes: gpu_pods::notes(&of, &after, &args.seen),
            changes: changes(&of, &now, &after),
            make_directory: !config.dir_exists,
            of,
            version,
            plan,
            guest,
            text,
            forced,
        })
    }

    fn act(self, args: &Args) -> Result<Report, Vec<Refusal>> {
        let path = self.of.config.drop_in_path();
        let unchanged = self.of.config.ours.text() == Some(self.text.as_bytes());
        if !args.dry_run && !unchanged {
            if let Some(changed) = self.of.config.changed_since() {
                return Err(vec![
                    Refusal::at(&changed, "changed during the check").cure("run it again"),
                ]);
            }
            if let Err(error) =
                drop_in_file::put(&self.of.config.drop_in_dir, self.make_directory, &self.text)
            {
                return Ok(Report::failed(&error));
            }
        }
        let action = match (unchanged, args.dry_run) {
            (true, _) => "unchanged",
            (false, true) => "would-install",
            (false, false) => "installed",
        };
        let out = if args.json {
            self.json(action)
        } else {
            self.page(action, &path)
        };
        Ok(Report {
            err: if args.json {
                String::new()
            } else {
                self.forced_text()
            },
            ..Report::done(out)
        })
    }

    fn forced_text(&self) -> String {
        self.forced
            .iter()
            .map(|refusal| format!("forced: {refusal}\n"))
            .collect()
    }

    fn page(&self, action: &str, path: &Path) -> String {
        let version = match &self.version {
            Known::Stated(version) => format!("Kata {version}"),
            Known::Asked(version, shim) => format!("Kata {version} (by {})", shim.display()),
            Known::Unknown(why) => {
                let (major, minor) = self.of.runtime.drop_ins_since();
                format!(
                    "Kata of unknown version, it must be {major}.{minor} or later (give it with \
                     --kata-version; {why})"
                )
            }
        };
        let drop_ins = match self.of.config.others.len() {
            0 => "no other drop-in".to_string(),
            1 => "1 other drop-in".to_string(),
            n => format!("{n} other drop-ins"),
        };
        let mut page = format!(
            "{}\n{}\n",
            printable(&format!(
                "runtime  {}, hypervisor {}, {version}",
                self.of.runtime.name(),
                self.plan.section
            )),
            printable(&format!(
                "config   {}, {drop_ins}",
                self.of.config.base.path.display()
            )),
        );
        self.guest
            .shown()
            .iter()
            .for_each(|line| page.push_str(&format!("{}\n", printable(line))));
        page.push_str(&changes_text(&self.changes));
        for note in self.notes() {
            page.push_str(&format!("note: {}\n", printable(&note)));
        }
        let path = path.to_string_lossy();
        match action {
            "unchanged" => page.push_str(&format!(
                "nothing to do: {} is as it should be\n",
                printable(&path)
            )),
            "would-install" => page.push_str(&self.diff(&path)),
            _ => {
                page.push_str(&format!("wrote {}\n", printable(&path)));
                page.push_str(&format!(
                    "New pods start from this {}; running pods stay. To roll back:\n",
                    self.guest.key()
                ));
                page.push_str(&printable(&format!(
                    "  kata-gpu-boot install --remove --kata-config {}",
                    self.of.config.base.path.display()
                )));
                page.push('\n');
            }
        }
        page
    }

    /// The drop-in's present text against the planned text.
    fn diff(&self, path: &str) -> String {
        let old =
            String::from_utf8_lossy(self.of.config.ours.text().unwrap_or_default()).into_owned();
        let from = if self.of.config.ours.text().is_some() {
            path
        } else {
            "/dev/null"
        };
        let diff = TextDiff::from_lines(old.as_str(), self.text.as_str())
            .unified_diff()
            .header(from, path)
            .to_string();
        diff.lines()
            .map(|line| format!("{}\n", printable(line)))
            .collect()
    }

    /// Losses, oddities of the guest, and effective words that the init will not take as they are.
    fn notes(&self) -> Vec<String> {
        let after = self.of.with(Some(self.text.as_bytes()));
        let params = after
            .text(&self.of.key("kernel_params"))
            .unwrap_or_default();
        let (_, notes) = Config::parse(params.as_bytes());
        let of_word = |note: kata_gpu_init::config::Note| {
            Some(format!(
                "kernel_params: {}: {}",
                note.parameter, note.problem?
            ))
        };
        let had_verity = self
            .of
            .with(None)
            .text(&self.of.key("kernel_verity_params"))
            .is_some();
        let of_verity = match had_verity {
            true => self.guest.given_up(),
            false => self.guest.first_verity(),
        };
        of_verity
            .map(str::to_string)
            .into_iter()
            .chain(self.guest.note())
            .chain(notes.into_iter().filter_map(of_word))
            .chain(self.gpu_notes.iter().cloned())
            .collect()
    }

    pub fn json(&self, action: &str) -> String {
        let json = json!({
            "action": action,
            "file": self.of.config.drop_in_path().to_string_lossy(),
            "config": self.of.config.base.path.to_string_lossy(),
            "runtime": match self.of.runtime { Runtime::Go => "go", Runtime::Rust => "rust" },
            "hypervisor": self.plan.section,
            "kataVersion": self.version.version().map(|version| version.to_string()),
            self.guest.key(): self.guest.json(),
            "changes": self.changes.iter().map(Change::json).collect::<Vec<_>>(),
            "forced": self.forced.iter().map(Refusal::json).collect::<Vec<_>>(),
            "notes": self.notes(),
            "text": self.text,
        });
        format!("{json}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_terminals_alone_and_change_no_letter() {
        let text = "refused: a: b\n  x: 1 -> 2\nwrote /a\n--- /dev/null\n@@ -1 @@\n+a\n-b\n c\n";
        assert_eq!(painted(text, &Screen::PLAIN), text);
        let colour = painted(
            text,
            &Screen {
                width: Some(80),
                colour: true,
            },
        );
        assert!(
            colour.starts_with(
                "\x1b[31mrefused: \x1b[0ma: b\n  x: 1 -> 2\n\x1b[32mwrote \x1b[0m/a\n"
            ),
            "{colour:?}"
        );
        let mut plain = colour;
        for code in ["0", "1", "2", "31", "32", "33"] {
            plain = plain.replace(&format!("\x1b[{code}m"), "");
        }
        assert_eq!(plain, text);
    }
}
