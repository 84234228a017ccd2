//! `show --follow`: a boot while it happens, from the collector's file as it grows.
//!
//! Reading is driven by inotify only. Timers exist for the picture on a terminal and for deadlines.
//! No file is written.

use crate::boots::block_on;
use anyhow::{Context, Result, bail};
use indicatif::ProgressDrawTarget;
use kata_gpu_collect::follow::files::{Files, Which};
use kata_gpu_host::sleep::sleep_until;
use kata_gpu_report::analysis::loaded::load;
use kata_gpu_report::analysis::verdict::Verdict;
use kata_gpu_report::data::boot_dir::find;
use kata_gpu_report::data::boot_file::{FileLine, HostEvent};
use kata_gpu_report::data::text::{Screen, printable, seconds};
use kata_gpu_report::terminal::stdout::write_lines;
use kata_gpu_report::views::follow::bars::{Bars, Look, REFRESH, tag};
use kata_gpu_report::views::follow::progress::{Outcome, Progress, ago};
use kata_gpu_report::views::live::Live;
use kata_gpu_report::views::rows::{Row, Tone};
use kata_gpu_report::views::table::Table;
use kata_gpu_report::views::verdict_lines;
use kata_gpu_wire::catalogue::Owner;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// Exit status after SIGINT, as a shell reports it.
const INTERRUPTED: u8 = 130;
/// Without a timeout: longest time since the last write to a boot in flight.
const IN_FLIGHT: Duration = Duration::from_secs(300);

/// The boot to follow, and the form of the output.
pub struct Follow<'a> {
    pub dir: &'a Path,
    /// Boot id, file, sandbox or NAMESPACE/POD; None: the boot in flight, else the next one.
    pub what: Option<&'a str>,
    /// Time without a new line after which the boot is given up; None: no limit.
    pub timeout: Option<Duration>,
    /// In a pipe: details too.
    pub verbose: bool,
    pub screen: Screen,
}

/// Follows a boot. Exit status: 0 all GPUs are ready, 1 the boot failed, 2 nothing came.
pub fn run(follow: &Follow) -> ExitCode {
    match block_on(until_over(follow)) {
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
            ExitCode::from(2)
        }
    }
}

/// Form of the output.
enum View {
    Plain {
        table: Table,
        verbose: bool,
        live: Option<Box<Live>>,
    },
    Terminal(Bars),
}

struct Follower {
    dir: PathBuf,
    screen: Screen,
    files: Files,
    view: View,
    /// The followed boot, by its file's name.
    boot: Option<(OsString, Progress)>,
    /// Files of other boots.
    others: BTreeSet<OsString>,
}

async fn until_over(follow: &Follow<'_>) -> Result<u8> {
    let mut interrupt = signal(SignalKind::interrupt()).context("catch SIGINT")?;
    let (dir, which) = place(follow)?;
    let view = match follow.screen.width {
        Some(_) => View::Terminal(Bars::new(
            ProgressDrawTarget::stdout(),
            Look::of_environment(follow.screen.colour),
        )),
        None => View::Plain {
            table: Table {
                screen: follow.screen,
            },
            verbose: follow.verbose,
            live: None,
        },
    };
    let mut follower = Follower {
        files: Files::watch(&dir, which)?,
        dir,
        screen: follow.screen,
        view,
        boot: None,
        others: BTreeSet::new(),
    };
    let mut heard = follower.begin(follow)?;
    loop {
        let now = Instant::now();
        follower.draw(now)?;
        if let Some(status) = follower.end(now)? {
            return Ok(status);
        }
        let give_up = follow.timeout.map(|timeout| heard + timeout);
        if give_up.is_some_and(|at| now >= at) {
            follower.finish(now)?;
            follower.report_silence(follow);
            return Ok(2);
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
                follower.finish(Instant::now())?;
                return Ok(INTERRUPTED);
            }
        }
    }
}

/// The directory to watch, and which of its boots.
fn place(follow: &Follow) -> Result<(PathBuf, Which)> {
    let dir = follow.dir.to_path_buf();
    let Some(what) = follow.what else {
        return Ok((dir, Which::Boots));
    };
    match find(Some(what), follow.dir) {
        Ok(path) => {
            let name = path
                .file_name()
                .with_context(|| format!("{}: not a file", path.display()))?;
            let dir = match path.parent() {
                Some(dir) if !dir.as_os_str().is_empty() => dir.to_path_buf(),
                _ => PathBuf::from("."),
            };
            Ok((dir, Which::One(name.to_os_string())))
        }
        // A sandbox or pod whose boot may be still to come.
        Err(_) => Ok((dir, Which::Sandbox(what.to_string()))),
    }
}

impl Follower {
    /// Takes the files that exist: the named boot, or one that may be in flight. Returns the time
    /// of the newest line.
    fn begin(&mut self, follow: &Follow) -> Result<Instant> {
        let named = follow.what.is_some();
        let in_flight = follow.timeout.unwrap_or(IN_FLIGHT);
        let now = Instant::now();
        let mut heard = now;
        for (name, age) in self.files.present()? {
            if !named && (age > in_flight || self.boot.is_some()) {
                // The directory is in order of age: all later entries are older.
                self.others.insert(name);
                continue;
            }
            self.read(&name, ago(now, age))?;
            // A file without a line has just been made.
            let Some((_, progress)) = self.boot.as_ref().filter(|(of, _)| *of == name) else {
                continue;
            };
            if named {
                heard = ago(now, age);
            } else if progress.outcome(now).is_some() {
                self.leave();
            }
        }
        if self.boot.is_none() {
            let dir = follow.dir.display();
            if follow.what.is_some_and(|what| Path::new(what).is_file()) {
                bail!("{dir}: no event stream in it: give a file that `collect` wrote");
            }
            let of = follow
                .what
                .map(|what| format!(" of {}", printable(what)))
                .unwrap_or_default();
            eprintln!("kata-gpu-boot: no boot{of} in flight in {dir}: waiting for one");
        }
        Ok(heard)
    }

    /// Reads the new lines of a file, as of `at`; true if the followed boot had one.
    fn read(&mut self, name: &OsStr, at: Instant) -> Result<bool> {
        let other = self.boot.as_ref().is_some_and(|(of, _)| of != name);
        if other || self.others.contains(name) {
            return Ok(false);
        }
        let Self {
            files, boot, view, ..
        } = self;
        let (mut heard, mut shown) = (false, Ok(()));
        files.read(name, |line| {
            heard = true;
            let (_, progress) =
                boot.get_or_insert_with(|| (name.to_os_string(), Progress::default()));
            if shown.is_ok() {
                shown = show_line(view, progress, &line, at);
            }
        })?;
        shown.map(|()| heard)
    }

    fn draw(&mut self, now: Instant) -> Result<()> {
        match (&mut self.view, &self.boot) {
            (View::Terminal(bars), Some((name, progress))) => {
                bars.update(&name.to_string_lossy(), progress, now);
                Ok(())
            }
            (View::Plain { live, .. }, _) => print(live.iter_mut().flat_map(|live| live.due(now))),
            (View::Terminal(_), None) => Ok(()),
        }
    }

    fn deadline(&self, now: Instant) -> Option<Instant> {
        let (_, progress) = self.boot.as_ref()?;
        let picture = match &self.view {
            View::Terminal(_) => Some(now + REFRESH),
            View::Plain { live, .. } => live.as_ref().and_then(|live| live.deadline()),
        };
        progress.deadline().into_iter().chain(picture).min()
    }

    /// The exit status, once the boot is over.
    fn end(&mut self, now: Instant) -> Result<Option<u8>> {
        let Some((name, progress)) = &self.boot else {
            return Ok(None);
        };
        let Some(outcome) = progress.outcome(now) else {
            return Ok(None);
        };
        let id = tag(&name.to_string_lossy());
        let path = self.dir.join(name);
        self.finish(now)?;
        let verdict = verdict(&path, &self.screen);
        print(verdict)?;
        match outcome {
            Outcome::Ready { gpus, at_ns } => {
                let at = seconds(at_ns);
                print([format!(
                    "boot {id}: all {gpus} GPUs ready {at} s after kernel start"
                )])?;
                Ok(Some(0))
            }
            Outcome::Failed(why) => {
                eprintln!("kata-gpu-boot: boot {id} failed: {why}");
                Ok(Some(1))
            }
        }
    }

    /// Prints what is left of the boot.
    fn finish(&mut self, now: Instant) -> Result<()> {
        match (&mut self.view, &self.boot) {
            (View::Terminal(bars), Some((name, progress))) => {
                bars.finish(&name.to_string_lossy(), progress, now);
                print([String::new()])
            }
            (View::Plain { live, .. }, _) => {
                print(live.iter_mut().flat_map(|live| live.finish(now)))
            }
            (View::Terminal(_), None) => Ok(()),
        }
    }

    fn report_silence(&self, follow: &Follow) {
        let timeout = follow.timeout.unwrap_or_default().as_secs();
        match &self.boot {
            None => eprintln!(
                "kata-gpu-boot: no boot has begun in {} within {timeout} s (--timeout): \
                 does the collector write there?",
                follow.dir.display()
            ),
            Some((name, progress)) => eprintln!(
                "kata-gpu-boot: boot {}: nothing new for {timeout} s (--timeout): {}",
                tag(&name.to_string_lossy()),
                progress.last_seen()
            ),
        }
    }

    /// Stops following the boot.
    fn leave(&mut self) {
        if let Some((name, _)) = self.boot.take() {
            self.files.forget(&name);
            self.others.insert(name);
        }
        if let View::Plain { live, .. } = &mut self.view {
            *live = None;
        }
    }
}

/// The verdict on a boot that is over; nothing if its file cannot be read again.
fn verdict(path: &Path, screen: &Screen) -> Vec<String> {
    let Ok(loaded) = load(path, None) else {
        return Vec::new();
    };
    verdict_lines::lines(&Verdict::with_time(&loaded.boot), screen)
}

/// Adds a line to the boot and shows the change.
fn show_line(view: &mut View, progress: &mut Progress, line: &FileLine, at: Instant) -> Result<()> {
    let row = progress.take(line, at);
    match view {
        View::Terminal(bars) => {
            // Bars show all successes.
            if let Some(row) = row.filter(is_news) {
                let gpu = row.gpu.map(|gpu| format!("{}: ", gpu)).unwrap_or_default();
                bars.say(&format!("{:>9} {gpu}{}", seconds(row.time_ns), row.what));
            }
            Ok(())
        }
        View::Plain {
            table,
            verbose,
            live,
        } => {
            if live.is_none() {
                print([table.head()])?;
            }
            let live = live.get_or_insert_with(|| Box::new(Live::new(*table, *verbose, at)));
            match line {
                FileLine::Record(record) => live.record(record, at),
                FileLine::Host(line) => {
                    if let HostEvent::Clock(sample) = line.event {
                        live.clock(sample);
                    }
                }
                FileLine::Header(..) | FileLine::Pong => {}
            }
            print(live.spill())
        }
    }
}

/// Whether a row is printed above the bars: a failure of a GPU or in the init. General lines of
/// the driver are left to `show`.
fn is_news(row: &Row) -> bool {
    let has_owner = row.gpu.is_some() || !matches!(row.owner, Owner::Kernel | Owner::Driver);
    matches!(row.tone, Tone::Warning | Tone::Error) && !row.detail && has_owner
}

fn print(lines: impl IntoIterator<Item = String>) -> Result<()> {
    let lines: Vec<String> = lines.into_iter().collect();
    write_lines(&lines).context("write to standard output")
}
