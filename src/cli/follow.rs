//! `kata-gpu-boot follow`: boots while they happen, from the collector's files as they grow.
//!
//! Reading is driven by inotify alone. Timers exist only for the picture on a terminal and for
//! deadlines. No file is written.

use anyhow::{Context, Result, bail};
use indicatif::ProgressDrawTarget;
use kata_gpu_collect::follow::files::{Files, Which};
use kata_gpu_host::sleep::sleep_until;
use kata_gpu_report::data::boot_dir::find;
use kata_gpu_report::data::boot_file::{FileLine, HostEvent};
use kata_gpu_report::data::text::{Screen, printable, seconds};
use kata_gpu_report::terminal::stdout::write_lines;
use kata_gpu_report::views::follow::bars::{Bars, Look, REFRESH, tag};
use kata_gpu_report::views::follow::progress;
use kata_gpu_report::views::follow::progress::{Outcome, Progress, ago};
use kata_gpu_report::views::live::Live;
use kata_gpu_report::views::rows::{Row, Side, Tone};
use kata_gpu_report::views::table::Table;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

const HELP: &str = "\
Reads the files of `kata-gpu-boot collect --dir DIR` while they are written. On a terminal: a bar per GPU with the steps that are over (enabled, \
probed, initialised), the current step with its duration so far, and the duration of that step on other GPUs of this boot. The remaining time is not \
estimated: it depends on locks of host and driver. In a pipe: the lines of `collect --live`.

Steps: waiting, enabling (the host maps its BARs), enabled, probing, bound, initialising, ready; `published` means that containers can have the GPU.

Exit status: 0 when all GPUs are ready, 1 when one failed or the guest did (the reason is on standard error), 3 when no line came for --timeout.

Examples:
  # the boot that is in flight, or the next one
  kata-gpu-boot follow --dir /var/lib/kata-gpu-boot
  # a boot by its id, over or in flight
  kata-gpu-boot follow --dir boots --boot 70db
  # every boot of this node
  kata-gpu-boot follow --dir boots --all
  # start a pod, wait for its GPUs, and show the reason if they fail
  kubectl apply -f pod.yaml && kata-gpu-boot follow --dir boots --sandbox default/train-0 --timeout 600 ||
    journalctl -u kata-gpu-boot";

/// Watch a boot while it happens: a bar per GPU.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    /// Directory that the collector writes to.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Boot id (its first characters are enough) or file of a boot [default: the boot in flight,
    /// else the next one].
    #[arg(long, value_name = "ID", conflicts_with = "all")]
    boot: Option<String>,
    /// The boot of this sandbox or pod, be it over, in flight or to come.
    #[arg(long, value_name = "ID|NAMESPACE/POD", conflicts_with_all = ["all", "boot"])]
    sandbox: Option<String>,
    /// Follow every boot in flight and every one that comes, until interrupted.
    #[arg(long)]
    all: bool,
    /// With --all: exit when this many boots are over.
    #[arg(long, value_name = "N", requires = "all", value_parser = clap::value_parser!(u64).range(1..))]
    boots: Option<u64>,
    /// Seconds without a new line after which the program exits with status 3; 0: no limit.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    /// In a pipe: show details too.
    #[arg(short, long)]
    verbose: bool,
}

/// Exit status after a timeout.
const TIMED_OUT: u8 = 3;
/// Exit status after SIGINT, as a shell reports it.
const INTERRUPTED: u8 = 130;
/// Without a timeout: longest time since the last write to a boot in flight.
const IN_FLIGHT: Duration = Duration::from_secs(300);

/// Runs `follow`.
pub fn run(args: &Args) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime");
    match runtime.and_then(|runtime| runtime.block_on(follow(args))) {
        Ok(status) => ExitCode::from(status),
        // A reader (head, a pager) that closes the output is no error.
        Err(error)
            if error
                .downcast_ref::<io::Error>()
                .is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) =>
        {
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("kata-gpu-boot: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Form of the output.
enum View {
    Plain {
        table: Table,
        verbose: bool,
        boots: BTreeMap<OsString, Live>,
        tagged: bool,
    },
    Terminal(Bars),
}

struct Follower {
    files: Files,
    view: View,
    boots: BTreeMap<OsString, Progress>,
    /// Boots that are over, before this run or in it.
    over: BTreeSet<OsString>,
    all: bool,
    status: u8,
    ended: u64,
    dir: PathBuf,
}

async fn follow(args: &Args) -> Result<u8> {
    let mut interrupt = signal(SignalKind::interrupt()).context("catch SIGINT")?;
    let screen = Screen::of_stdout();
    let (dir, which) = match (&args.boot, &args.sandbox) {
        (None, None) => (args.dir.clone(), Which::Boots),
        (None, Some(sandbox)) => (args.dir.clone(), Which::Sandbox(sandbox.clone())),
        (Some(boot), _) => {
            let path = find(Some(boot), &args.dir)?;
            let name = path
                .file_name()
                .with_context(|| format!("{}: not a file", path.display()))?
                .to_os_string();
            let dir = path
                .parent()
                .filter(|p| !p.as_os_str().is_empty())
                .map_or_else(|| PathBuf::from("."), PathBuf::from);
            (dir, Which::One(name))
        }
    };
    let view = match screen.width {
        Some(_) => View::Terminal(Bars::new(
            ProgressDrawTarget::stdout(),
            Look::of_environment(screen.colour),
        )),
        None => View::Plain {
            table: Table { screen },
            verbose: args.verbose,
            boots: BTreeMap::new(),
            tagged: args.all,
        },
    };
    let mut follower = Follower {
        files: Files::watch(&dir, which)?,
        view,
        boots: BTreeMap::new(),
        over: BTreeSet::new(),
        all: args.all,
        status: 0,
        ended: 0,
        dir: args.dir.clone(),
    };
    let timeout = (args.timeout > 0).then(|| Duration::from_secs(args.timeout));
    let in_flight = if args.sandbox.is_some() {
        Duration::MAX
    } else {
        timeout.unwrap_or(IN_FLIGHT)
    };
    let mut heard = follower.begin(in_flight, args)?;
    loop {
        let now = Instant::now();
        follower.draw(now)?;
        let wanted = if args.all { args.boots } else { Some(1) };
        if follower.end_what_is_over(now)? && wanted.is_some_and(|wanted| follower.ended >= wanted)
        {
            return Ok(follower.status);
        }
        let give_up = timeout.map(|timeout| heard + timeout);
        if give_up.is_some_and(|at| now >= at) {
            follower.time_out(args.timeout, now)?;
            return Ok(TIMED_OUT);
        }
        let next = follower.deadline(now).into_iter().chain(give_up).min();
        tokio::select! {
            names = follower.files.changed() => {
                for name in names? {
                    if follower.read(&name, Instant::now())? {
                        heard = Instant::now();
                    }
                }
            }
            () = sleep_until(next) => {}
            _ = interrupt.recv() => {
                follower.finish_all(Instant::now())?;
                return Ok(INTERRUPTED);
            }
        }
    }
}

impl Follower {
    /// Takes the files that exist: the named boot, or those that may be in flight. Returns the time
    /// of the newest line.
    fn begin(&mut self, in_flight: Duration, args: &Args) -> Result<Instant> {
        let named = args.boot.is_some() || args.sandbox.is_some();
        let now = Instant::now();
        let mut heard = now;
        for (name, age) in self.files.present()? {
            if !named && (age > in_flight || !(self.all || self.boots.is_empty())) {
                // The directory is in order of age: all later entries are older.
                self.over.insert(name);
                continue;
            }
            self.read(&name, ago(now, age))?;
            // A file without a line has just been made.
            let over = self
                .boots
                .get(&name)
                .is_some_and(|p| p.outcome(now).is_some());
            if over && !named {
                self.leave(&name);
            } else if named && self.boots.contains_key(&name) {
                heard = ago(now, age);
            }
        }
        if self.boots.is_empty() {
            if args.boot.is_some() {
                bail!(
                    "{}: no event stream in it: give a file that `collect` wrote",
                    self.dir.display()
                );
            }
            let of = args
                .sandbox
                .as_ref()
                .map(|sandbox| format!(" of {}", printable(sandbox)))
                .unwrap_or_default();
            eprintln!(
                "kata-gpu-boot: no boot{of} in flight in {}: waiting for one",
                self.dir.display()
            );
        }
        Ok(heard)
    }

    /// Reads the new lines of a file, as of `at`; true if a followed boot had one.
    fn read(&mut self, name: &OsStr, at: Instant) -> Result<bool> {
        let known = self.boots.contains_key(name);
        if self.over.contains(name) || !(known || self.all || self.boots.is_empty()) {
            return Ok(false);
        }
        let Self {
            files,
            boots,
            view,
            all,
            ..
        } = self;
        let (mut heard, mut shown) = (false, Ok(()));
        files.read(name, |line| {
            heard = true;
            let progress = boots.entry(name.to_os_string()).or_default();
            if shown.is_ok() {
                shown = show_line(view, *all, name, progress, &line, at);
            }
        })?;
        shown.map(|()| heard)
    }

    fn draw(&mut self, now: Instant) -> Result<()> {
        match &mut self.view {
            View::Terminal(bars) => {
                self.boots.iter().for_each(|(name, progress)| {
                    bars.update(&name.to_string_lossy(), progress, now)
                });
                Ok(())
            }
            View::Plain { boots, tagged, .. } => {
                for (name, live) in boots {
                    let lines = live.due(now);
                    print_lines(name, lines, *tagged)?;
                }
                Ok(())
            }
        }
    }

    fn deadline(&self, now: Instant) -> Option<Instant> {
        let gone = self.boots.values().filter_map(Progress::deadline).min();
        let picture = match &self.view {
            View::Terminal(_) => (!self.boots.is_empty()).then(|| now + REFRESH),
            View::Plain { boots, .. } => boots.values().filter_map(Live::deadline).min(),
        };
        gone.into_iter().chain(picture).min()
    }

    /// Ends the boots that are over with a line each; true if there was one.
    fn end_what_is_over(&mut self, now: Instant) -> Result<bool> {
        let over: Vec<(OsString, Outcome)> = self
            .boots
            .iter()
            .filter_map(|(name, progress)| Some((name.clone(), progress.outcome(now)?)))
            .collect();
        for (name, outcome) in &over {
            let id = tag(&name.to_string_lossy());
            self.finish(name, now)?;
            match outcome {
                Outcome::Ready { gpus, at_ns } => {
                    let at = seconds(*at_ns);
                    self.say(&format!(
                        "boot {id}: all {gpus} GPUs ready {at} s after kernel start"
                    ))?;
                }
                Outcome::Failed(why) => {
                    self.status = 1;
                    // The bars must not overwrite the line where both go to one terminal.
                    match (&self.view, self.all) {
                        (View::Terminal(bars), true) => {
                            bars.say(&format!("boot {id} failed: {why}"))
                        }
                        _ => eprintln!("kata-gpu-boot: boot {id} failed: {why}"),
                    }
                }
            }
            self.leave(name);
            self.ended += 1;
        }
        Ok(!over.is_empty())
    }

    /// Prints the last line of a boot.
    fn finish(&mut self, name: &OsStr, now: Instant) -> Result<()> {
        let Some(progress) = self.boots.get(name) else {
            return Ok(());
        };
        match &mut self.view {
            View::Terminal(bars) if self.all => bars.remove(&name.to_string_lossy()),
            View::Terminal(bars) => bars.finish(&name.to_string_lossy(), progress, now),
            View::Plain { boots, tagged, .. } => {
                if let Some(live) = boots.get_mut(name) {
                    let lines = live.finish(now);
                    print_lines(name, lines, *tagged)?;
                }
            }
        }
        Ok(())
    }

    fn finish_all(&mut self, now: Instant) -> Result<()> {
        let names: Vec<OsString> = self.boots.keys().cloned().collect();
        if let View::Terminal(bars) = &mut self.view {
            self.boots
                .iter()
                .for_each(|(name, progress)| bars.finish(&name.to_string_lossy(), progress, now));
            return write_lines(&[String::new()]).context("write to standard output");
        }
        names.iter().try_for_each(|name| self.finish(name, now))
    }

    fn time_out(&mut self, timeout: u64, now: Instant) -> Result<()> {
        self.finish_all(now)?;
        if self.boots.is_empty() {
            eprintln!(
                "kata-gpu-boot: no boot has begun in {} within {timeout} s (--timeout): does the collector write there?",
                self.dir.display()
            );
        }
        for (name, progress) in &self.boots {
            let id = tag(&name.to_string_lossy());
            eprintln!(
                "kata-gpu-boot: boot {id}: nothing new for {timeout} s (--timeout): {}",
                progress.last_seen()
            );
        }
        Ok(())
    }

    /// Prints a line that stays, on standard output.
    fn say(&self, line: &str) -> Result<()> {
        match &self.view {
            View::Terminal(bars) if self.all => bars.say(line),
            View::Terminal(_) => write_lines(&[String::new(), line.to_string()])
                .context("write to standard output")?,
            View::Plain { .. } => {
                write_lines(&[line.to_string()]).context("write to standard output")?
            }
        }
        Ok(())
    }

    /// Stops following a boot.
    fn leave(&mut self, name: &OsStr) {
        self.boots.remove(name);
        self.files.forget(name);
        self.over.insert(name.to_os_string());
        if let View::Plain { boots, .. } = &mut self.view {
            boots.remove(name);
        }
    }
}

/// Adds a line to a boot and shows the change.
fn show_line(
    view: &mut View,
    all: bool,
    name: &OsStr,
    progress: &mut Progress,
    line: &FileLine,
    at: Instant,
) -> Result<()> {
    let row = progress.take(line, at);
    match view {
        View::Terminal(bars) => {
            // Bars show all successes.
            if let Some(row) = row.filter(is_news) {
                let gpu = row
                    .gpu
                    .map(|g| format!("{}: ", progress::name(g.address, g.index)))
                    .unwrap_or_default();
                let who = if all {
                    format!("{} ", tag(&name.to_string_lossy()))
                } else {
                    String::new()
                };
                bars.say(&format!(
                    "{who}{:>9} {gpu}{}",
                    seconds(row.time_ns),
                    row.what
                ));
            }
        }
        View::Plain {
            table,
            verbose,
            boots,
            tagged,
        } => {
            let live = match boots.get_mut(name) {
                Some(live) => live,
                None => {
                    if boots.is_empty() {
                        let head = if *tagged {
                            format!("{:8} {}", "BOOT", table.head())
                        } else {
                            table.head()
                        };
                        write_lines(&[head]).context("write to standard output")?;
                    }
                    boots
                        .entry(name.to_os_string())
                        .or_insert_with(|| Live::new(*table, *verbose, at))
                }
            };
            match line {
                FileLine::Record(record) => live.record(record, at),
                FileLine::Host(line) => {
                    if let HostEvent::Clock(sample) = line.event {
                        live.clock(sample);
                    }
                }
                FileLine::Header(..) | FileLine::Pong => {}
            }
            let lines = live.spill();
            if !lines.is_empty() {
                print_lines(name, lines, *tagged)?;
            }
        }
    }
    Ok(())
}

/// Whether a row is printed above the bars: a failure of a GPU or in the init. General lines of
/// the driver are left to `show`.
fn is_news(row: &Row) -> bool {
    let somebodys = row.gpu.is_some() || !matches!(row.side, Side::Kernel | Side::Driver);
    matches!(row.tone, Tone::Warning | Tone::Error) && !row.detail && somebodys
}

fn print_lines(name: &OsStr, lines: Vec<String>, tagged: bool) -> Result<()> {
    let id = tag(&name.to_string_lossy());
    let lines: Vec<String> = if tagged {
        lines
            .into_iter()
            .map(|line| format!("{id} {line}"))
            .collect()
    } else {
        lines
    };
    write_lines(&lines).context("write to standard output")
}
