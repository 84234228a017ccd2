//! `kata-gpu-boot collect`: the collector as a program.

use super::collector::{Collector, Config, NEWS_QUEUE};
use super::connection::News;
use super::live::Live;
use super::table::Table;
use super::text::{Screen, printable};
use crate::events::record::{DEFAULT_PORT, Kind, names};
use anyhow::{Context, Result};
use std::collections::{BTreeMap, HashSet};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

const HELP: &str = "\
Guests connect by themselves. Where the kernel has vsock (vhost_vsock), they reach this machine at CID 2 and nothing else is needed. With hybrid \
vsock (Cloud Hypervisor, Firecracker, vhost-device-vsock) give the device's socket path: the collector listens on PATH_PORT beside it.

Writes DIR/<boot id>.ndjson, one file per boot: the guest's lines as they came, and the collector's own (\"kind\":\"host\"). Stops with SIGINT \
or SIGTERM; started again, it goes on where it was.

Examples:
  kata-gpu-boot collect --dir /var/log/boots
  # watch the next boot, then leave
  kata-gpu-boot collect --dir boots --live --boots 1
  # a VM with hybrid vsock
  kata-gpu-boot collect --dir boots --no-vsock --uds /run/vm1/vsock";

/// Receive the event streams of guests, one file per boot.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    /// Where the files go; made if it is not there.
    #[arg(long)]
    dir: PathBuf,
    /// Port that guests connect to.
    #[arg(long, default_value_t = DEFAULT_PORT)]
    port: u32,
    /// Base path of a hybrid vsock device; may be given several times.
    #[arg(long, value_name = "PATH")]
    uds: Vec<PathBuf>,
    /// Do not listen on AF_VSOCK.
    #[arg(long)]
    no_vsock: bool,
    /// Leave when this many boots are complete (settled or powered off, or their connection over).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    boots: Option<u64>,
    /// Show boots as they happen.
    #[arg(long)]
    live: bool,
    /// With --live: details too.
    #[arg(short, long, requires = "live")]
    verbose: bool,
}

/// After a boot said that it is complete, how long without a record means that it is: some come just behind.
const LINGER: Duration = Duration::from_secs(1);
/// How long a guest whose connection broke may take to come back before its boot counts as over.
const RECONNECT_GRACE: Duration = Duration::from_secs(5);

/// Runs `collect`.
pub fn run(args: &Args) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(collect(args))
}

async fn collect(args: &Args) -> Result<()> {
    // Before anything that has to be closed in order.
    let mut interrupt = signal(SignalKind::interrupt()).context("catch SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("catch SIGTERM")?;
    let config = Config { dir: args.dir.clone(), port: args.port, vsock: !args.no_vsock, uds: args.uds.clone() };
    let (sender, mut news) = mpsc::channel(NEWS_QUEUE);
    let collector = Collector::bind(&config, sender)?;
    for note in &collector.notes {
        eprintln!("kata-gpu-boot: {note}");
    }
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(collector.run(stopped));
    let mut view = args.live.then(|| View::new(Table { screen: Screen::of_stdout() }, args.verbose));
    let mut count = Count::default();
    loop {
        let deadline = view.as_ref().and_then(View::deadline).into_iter().chain(args.boots.and(count.deadline())).min();
        tokio::select! {
            Some(item) = news.recv() => {
                report(&item);
                count.take(&item, Instant::now());
                show(&mut view, |view, out| view.take(&item, out));
            }
            () = sleep_until(deadline) => {}
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
        }
        show(&mut view, |view, out| view.due(out));
        if args.boots.is_some_and(|wanted| count.complete(Instant::now()) >= wanted) {
            break;
        }
    }
    stop.send_replace(true);
    let left_out = running.await.context("the collector stopped unexpectedly")?;
    // What was on its way when it was told to stop.
    while let Ok(item) = news.try_recv() {
        report(&item);
        show(&mut view, |view, out| view.take(&item, out));
    }
    show(&mut view, |view, out| view.finish(out));
    if left_out > 0 && args.live {
        eprintln!("kata-gpu-boot: {left_out} record(s) came too fast to be shown; they are in the files");
    }
    Ok(())
}

/// Sleeps until then; without a deadline, for ever.
pub async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// Lets the view print. A reader that is gone ends the view, never the collecting.
fn show(view: &mut Option<View>, print: impl FnOnce(&mut View, &mut Vec<String>)) {
    let Some(v) = view else { return };
    let mut lines = Vec::new();
    print(v, &mut lines);
    if write_lines(&lines).is_err() {
        eprintln!("kata-gpu-boot: standard output is closed: collecting goes on unseen");
        *view = None;
    }
}

/// Prints lines and makes sure that they are seen now.
pub fn write_lines(lines: &[String]) -> io::Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let mut out = io::stdout().lock();
    out.write_all((lines.join("\n") + "\n").as_bytes())?;
    out.flush()
}

/// What the operator should know of, on standard error.
fn report(news: &News) {
    match news {
        News::Connected { boot, peer, header } => {
            eprintln!("kata-gpu-boot: boot {boot} connected from {peer}, kata-gpu-init {}", printable(&header.version));
        }
        News::Ended { boot } => eprintln!("kata-gpu-boot: boot {boot} disconnected"),
        News::Problem { text } => eprintln!("kata-gpu-boot: {}", printable(text)),
        News::Record { .. } | News::Clock { .. } => {}
    }
}

/// The live views of all boots; their rows are told apart by the start of the boot id.
struct View {
    table: Table,
    verbose: bool,
    boots: BTreeMap<Arc<str>, Live>,
    headed: bool,
}

/// Characters of a boot id that stand before a row.
const TAG: usize = 8;

impl View {
    fn new(mut table: Table, verbose: bool) -> Self {
        table.screen.width = table.screen.width.map(|w| w.saturating_sub(TAG + 1));
        Self { table, verbose, boots: BTreeMap::new(), headed: false }
    }

    fn take(&mut self, news: &News, out: &mut Vec<String>) {
        let now = Instant::now();
        match news {
            News::Connected { boot, .. } => {
                if !self.headed {
                    self.headed = true;
                    out.push(format!("{:TAG$} {}", "BOOT", self.table.head()));
                }
                self.boots.entry(boot.clone()).or_insert_with(|| Live::new(self.table, self.verbose, now));
            }
            News::Record { boot, record } => {
                if let Some(live) = self.boots.get_mut(boot) {
                    live.record(record, now);
                }
            }
            News::Clock { boot, sample } => {
                if let Some(live) = self.boots.get_mut(boot) {
                    live.clock(*sample);
                }
            }
            News::Ended { boot } => {
                if let Some(mut live) = self.boots.remove(boot) {
                    out.extend(tagged(boot, live.finish(now)));
                }
            }
            News::Problem { .. } => {}
        }
    }

    fn due(&mut self, out: &mut Vec<String>) {
        for (boot, live) in &mut self.boots {
            out.extend(tagged(boot, live.due(Instant::now())));
        }
    }

    fn finish(&mut self, out: &mut Vec<String>) {
        for (boot, live) in &mut self.boots {
            out.extend(tagged(boot, live.finish(Instant::now())));
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.boots.values().filter_map(Live::deadline).min()
    }
}

fn tagged(boot: &str, lines: Vec<String>) -> impl Iterator<Item = String> {
    let tag: String = boot.chars().take(TAG).collect();
    lines.into_iter().map(move |line| format!("{tag} {line}"))
}

/// Which boots are complete.
#[derive(Debug, Default)]
struct Count {
    /// When the boot will count as complete if nothing else comes.
    closing: BTreeMap<Arc<str>, Instant>,
    /// Boots that said that they are through.
    done: HashSet<Arc<str>>,
    complete: HashSet<Arc<str>>,
}

impl Count {
    fn take(&mut self, news: &News, now: Instant) {
        match news {
            News::Record { boot, record } => {
                if record.kind == Kind::Event && matches!(record.name.as_str(), names::SETTLED | names::POWER_OFF) {
                    self.done.insert(boot.clone());
                }
                if self.done.contains(boot) && !self.complete.contains(boot) {
                    self.closing.insert(boot.clone(), now + LINGER);
                }
            }
            News::Connected { boot, .. } => {
                self.closing.remove(boot);
            }
            News::Ended { boot } => {
                let grace = if self.done.contains(boot) { Duration::ZERO } else { RECONNECT_GRACE };
                self.closing.insert(boot.clone(), now + grace);
            }
            News::Clock { .. } | News::Problem { .. } => {}
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.closing.values().min().copied()
    }

    fn complete(&mut self, now: Instant) -> u64 {
        let over: Vec<Arc<str>> = self.closing.iter().filter(|(_, at)| **at <= now).map(|(boot, _)| boot.clone()).collect();
        for boot in over {
            self.closing.remove(&boot);
            self.complete.insert(boot);
        }
        self.complete.len() as u64
    }
}
