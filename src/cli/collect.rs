//! `kata-gpu-boot collect`: the collector as a program.

use anyhow::{Context, Result};
use kata_gpu_collect::connection::News;
use kata_gpu_collect::fleet::alerts;
use kata_gpu_collect::fleet::dashboard::dashboard;
use kata_gpu_collect::fleet::http_server::parse_address;
use kata_gpu_collect::fleet::pushing::Otlp;
use kata_gpu_collect::keep::Keep;
use kata_gpu_collect::limits::Limits;
use kata_gpu_collect::otlp_push::Target;
use kata_gpu_collect::privileges::RunAs;
use kata_gpu_collect::retention::parse_size;
use kata_gpu_collect::sandbox_pod::BUNDLES;
use kata_gpu_collect::vm_dirs::Pattern;
use kata_gpu_collect::{Collector, Config, NEWS_QUEUE, SANDBOXES, VM_SOCKETS, check, service};
use kata_gpu_host::sleep::sleep_until;
use kata_gpu_report::boot::model::RECONNECT_GRACE;
use kata_gpu_report::data::text::{Screen, printable};
use kata_gpu_report::otlp::of_this_machine;
use kata_gpu_report::terminal::stdout::print;
use kata_gpu_report::terminal::stdout::write_lines;
use kata_gpu_report::views::live::Live;
use kata_gpu_report::views::table::Table;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{DEFAULT_PORT, Kind};
use nix::sys::stat::{Mode, umask};
use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

const HELP: &str = "\
Guests connect by themselves. Where the kernel has vsock (vhost_vsock), guests of QEMU reach this machine at CID 2 and nothing else is needed. With \
hybrid vsock (Cloud Hypervisor, Firecracker, Dragonball) the collector makes the socket PATH_PORT as soon as the VMM's socket PATH exists: it watches \
Kata's directories of VMs (--vm), and accepts there the owner of PATH, and root; or it serves the paths of --uds, where the mode (0660) decides who may \
connect.

Writes DIR/<boot id>.ndjson, one file per boot, only ever appended to: the guest's lines unchanged, each once, and the collector's own \
(\"kind\":\"host\"): peers, losses, Kata's names of the VM. `kata-gpu-boot show` and all other commands read the files while they are written. \
A record is handed to the kernel milliseconds after its arrival, and made durable (fdatasync) within 5 s. When the disk is full, the collector reports \
that, goes on receiving, counts the records that it drops, and requests them again when there is room.

A boot is over 2 s after it reported that its GPUs are settled or that it powers off, or when its connection has been gone for 60 s (limit goodbye). With \
--otlp the boot is then pushed as one trace, with an id of its own that the file has, too. A push without an answer, or to a busy receiver, is repeated \
after 1 s to 30 s, while up to 1024 boots wait (limit push-queue); boots that are refused or do not fit are counted and logged. There is no TLS: push to the \
OpenTelemetry Collector of the node or cluster. With --metrics Prometheus gets histograms per phase and per step, failures by reason, and \
counters of all possible losses. Neither slows down the receiving of guests.

Stops with SIGINT or SIGTERM, and writes all received records. After a restart, also after kill -9, guests send again the records that they have. Started \
as root, the collector drops the privileges that it does not need; with --user it also changes its user.

Examples:
  kata-gpu-boot collect --dir /var/lib/kata-gpu-boot --user nobody
  # watch the next boot, then exit
  kata-gpu-boot collect --dir boots --live --boots 1
  # a VM with hybrid vsock that is not Kata's
  kata-gpu-boot collect --dir boots --no-vsock --no-vms --uds /run/vm1/vsock
  # for a fleet: traces to an OpenTelemetry Collector, numbers to Prometheus
  kata-gpu-boot collect --dir boots --otlp http://127.0.0.1:4318 --metrics 9464
  # as a service
  cd /etc/systemd/system
  kata-gpu-boot collect --print-systemd-unit > kata-gpu-boot.service
  # as a DaemonSet: name your image at image:, then kubectl apply -f collect.yaml
  kata-gpu-boot collect --print-daemonset > collect.yaml
  # a dashboard for Grafana, and a file for Prometheus' rule_files
  kata-gpu-boot collect --print-dashboard > dashboard.json
  kata-gpu-boot collect --print-alerts > kata-gpu-boot.rules.yml";

/// Help below the options.
fn help() -> String {
    let mut text = format!("{HELP}\n\n{}", Limits::help());
    text.push_str("\nWatched without --vm:\n");
    for (pattern, whose) in VM_SOCKETS {
        text.push_str(&format!("  {pattern:42} {whose}\n"));
    }
    for (pattern, whose) in SANDBOXES {
        text.push_str(&format!("  {pattern:42} {whose}, which CID is whose\n"));
    }
    text
}

/// Receive the event streams of guests, one file per boot.
#[derive(clap::Args, Debug)]
#[command(after_help = help())]
pub struct Args {
    /// Directory for the boots' files; made if it does not exist.
    #[arg(long, required_unless_present_any = ["print_systemd_unit", "print_daemonset", "print_dashboard", "print_alerts"])]
    dir: Option<PathBuf>,
    /// Port that guests connect to.
    #[arg(long, default_value_t = DEFAULT_PORT, value_parser = clap::value_parser!(u32).range(1..i64::from(u32::MAX)))]
    port: u32,
    /// Base path of a hybrid vsock device; may be given several times.
    #[arg(long, value_name = "PATH")]
    uds: Vec<PathBuf>,
    /// Base paths of hybrid vsock devices that come and go, with * for the sandbox's id, instead of
    /// Kata's; may be given several times.
    #[arg(long, value_name = "PATTERN", conflicts_with = "no_vms")]
    vm: Vec<Pattern>,
    /// Do not look for VMs of hybrid vsock.
    #[arg(long)]
    no_vms: bool,
    /// Kata's files about sandboxes, with * for the id, instead of those of its runtimes.
    #[arg(long, value_name = "PATTERN")]
    sandbox: Vec<Pattern>,
    /// OCI configurations of sandbox containers, with * for the id, instead of containerd's and
    /// CRI-O's: they name the pod. A file in a directory `userdata` is read as CRI-O's, any other
    /// one as containerd's.
    #[arg(long, value_name = "PATTERN")]
    bundle: Vec<Pattern>,
    /// Do not listen on AF_VSOCK.
    #[arg(long)]
    no_vsock: bool,
    /// User (name or number, with :GROUP) that the collector becomes once everything is open, and
    /// that owns the files.
    #[arg(long, value_name = "USER", value_parser = RunAs::parse)]
    user: Option<RunAs>,
    /// Days from a boot's last record to its removal; 0: boots are kept for ever. No boot in flight
    /// is removed, and none for a day after this machine's clock was set.
    #[arg(long, value_name = "N", default_value_t = 30)]
    keep_days: u64,
    /// Size of all boots (10G, 500M) above which boots are removed: first the oldest of VMs that
    /// have more than an eighth of it, then the oldest; 0: no limit. No boot in flight is removed.
    #[arg(long, value_name = "SIZE", default_value = "10G", value_parser = parse_size)]
    keep_size: u64,
    /// Change a limit (the table below); may be given several times.
    #[arg(long, value_name = "NAME=N")]
    limit: Vec<String>,
    /// Push every boot that is over to an OTLP receiver: http://HOST:4318 (OTLP over HTTP,
    /// protobuf).
    #[arg(long, value_name = "URL")]
    otlp: Option<String>,
    /// A header for --otlp, for example x-tenant=gpu; may be repeated. Secrets belong into
    /// OTEL_EXPORTER_OTLP_HEADERS.
    #[arg(long, value_name = "KEY=VALUE", requires = "otlp")]
    otlp_header: Vec<String>,
    /// A resource attribute for --otlp, for example k8s.node.name=n1; may be repeated.
    /// OTEL_RESOURCE_ATTRIBUTES is read, too.
    #[arg(long, value_name = "KEY=VALUE", requires = "otlp")]
    otlp_attribute: Vec<String>,
    /// Address of http://ADDRESS/metrics for Prometheus; a port alone is a port of 127.0.0.1.
    #[arg(long, value_name = "[IP:]PORT", value_parser = parse_address)]
    metrics: Option<SocketAddr>,
    /// Exit when this many boots are complete (settled or powered off, or their connection over).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    boots: Option<u64>,
    /// Show boots as they happen.
    #[arg(long)]
    live: bool,
    /// With --live: show details too.
    #[arg(short, long, requires = "live")]
    verbose: bool,
    /// Check that the collector of this --dir receives, and exit (status 0: it does).
    #[arg(long, requires = "dir")]
    check: bool,
    /// Print a systemd unit that runs this program, and exit.
    #[arg(long, conflicts_with = "print_daemonset")]
    print_systemd_unit: bool,
    /// Print a Kubernetes DaemonSet, and exit.
    #[arg(long)]
    print_daemonset: bool,
    /// Print a dashboard of the metrics, for Grafana's import, and exit.
    #[arg(long, conflicts_with_all = ["print_systemd_unit", "print_daemonset"])]
    print_dashboard: bool,
    /// Print alerting rules about the metrics, for Prometheus, and exit.
    #[arg(long, conflicts_with_all = ["print_systemd_unit", "print_daemonset", "print_dashboard"])]
    print_alerts: bool,
}

/// Time without a record after which a boot that reported its completion counts as complete: some
/// records come just after the report.
const LINGER: Duration = Duration::from_secs(1);

/// Runs `collect`.
pub fn run(args: &Args) -> Result<()> {
    if args.print_systemd_unit {
        let program = std::env::current_exe().context("find this program's path")?;
        return print(&service::systemd_unit(&program)?);
    }
    if args.print_daemonset {
        return print(&service::daemonset());
    }
    if args.print_dashboard {
        return print(&format!("{:#}\n", dashboard()));
    }
    if args.print_alerts {
        return print(&alerts::yaml());
    }
    if let (true, Some(dir)) = (args.check, &args.dir) {
        return check::ask(dir);
    }
    // Files and directories are made with their own mode. Sockets must be open to VMMs of other
    // users.
    umask(Mode::empty());
    // Runtime of one thread: it drops its privileges, and later threads inherit that.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime.block_on(collect(args))
}

fn config(args: &Args) -> Result<Config> {
    let patterns =
        |given: &[Pattern], own: &mut dyn Iterator<Item = &'static str>| -> Result<Vec<Pattern>> {
            if given.is_empty() {
                own.map(str::parse).collect()
            } else {
                Ok(given.to_vec())
            }
        };
    let mut limits = Limits::default();
    args.limit.iter().try_for_each(|limit| limits.set(limit))?;
    Ok(Config {
        vsock: !args.no_vsock,
        uds: args.uds.clone(),
        vms: if args.no_vms {
            Vec::new()
        } else {
            patterns(
                &args.vm,
                &mut VM_SOCKETS.iter().map(|(pattern, _)| *pattern),
            )?
        },
        // Needed for the owners of CIDs.
        sandboxes: if args.no_vsock && args.sandbox.is_empty() {
            Vec::new()
        } else {
            patterns(
                &args.sandbox,
                &mut SANDBOXES.iter().map(|(pattern, _)| *pattern),
            )?
        },
        bundles: patterns(&args.bundle, &mut BUNDLES.iter().copied())?,
        limits,
        keep: Keep {
            age: Keep::days(args.keep_days),
            bytes: (args.keep_size > 0).then_some(args.keep_size),
        },
        run_as: args.user,
        otlp: args
            .otlp
            .as_deref()
            .map(|url| otlp(url, args))
            .transpose()?,
        metrics: args.metrics,
        watched: args.live || args.boots.is_some(),
        drop_privileges: true,
        ..Config::new(args.dir.clone().context("--dir is missing")?, args.port)
    })
}

fn otlp(url: &str, args: &Args) -> Result<Otlp> {
    Ok(Otlp {
        target: Target::new(url, &args.otlp_header)?,
        resource: of_this_machine(&args.otlp_attribute)?,
    })
}

async fn collect(args: &Args) -> Result<()> {
    // Signals are caught before anything is opened that must be closed in order.
    let mut interrupt = signal(SignalKind::interrupt()).context("catch SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("catch SIGTERM")?;
    let (sender, mut news) = mpsc::channel(NEWS_QUEUE);
    let collector = Collector::bind(&config(args)?, sender)?;
    for note in &collector.notes {
        eprintln!("kata-gpu-boot: {note}");
    }
    service::notify_ready()?;
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(collector.run(stopped));
    let mut view = args.live.then(|| {
        View::new(
            Table {
                screen: Screen::of_stdout(),
            },
            args.verbose,
        )
    });
    let mut count = args.boots.map(|wanted| (wanted, Count::default()));
    loop {
        let closing = count.as_ref().and_then(|(_, count)| count.deadline());
        let deadline = view
            .as_ref()
            .and_then(View::deadline)
            .into_iter()
            .chain(closing)
            .min();
        tokio::select! {
            Some(item) = news.recv() => {
                report(&item);
                if let Some((_, count)) = &mut count {
                    count.take(&item, Instant::now());
                }
                show(&mut view, |view, out| view.take(&item, out));
            }
            () = sleep_until(deadline) => {}
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
        }
        show(&mut view, |view, out| view.due(out));
        if count
            .as_mut()
            .is_some_and(|(wanted, count)| count.complete(Instant::now()) >= *wanted)
        {
            break;
        }
    }
    stop.send_replace(true);
    let counts = running
        .await
        .context("the collector stopped unexpectedly")??;
    // News that were on their way at the stop.
    while let Ok(item) = news.try_recv() {
        report(&item);
        show(&mut view, |view, out| view.take(&item, out));
    }
    show(&mut view, |view, out| view.finish(out));
    if counts.unseen > 0 && args.live {
        eprintln!(
            "kata-gpu-boot: {} record(s) came too fast to be shown; they are in the files",
            counts.unseen
        );
    }
    eprintln!("kata-gpu-boot: {}", counts.line());
    Ok(())
}

/// Prints through the view. A closed output ends the view, never the collecting.
fn show(view: &mut Option<View>, print: impl FnOnce(&mut View, &mut Vec<String>)) {
    let Some(v) = view else { return };
    let mut lines = Vec::new();
    print(v, &mut lines);
    if write_lines(&lines).is_err() {
        eprintln!("kata-gpu-boot: standard output is closed: collecting goes on unseen");
        *view = None;
    }
}

/// Reports news for the operator on standard error.
fn report(news: &News) {
    match news {
        News::Line { text } | News::Problem { text } => {
            eprintln!("kata-gpu-boot: {}", printable(text))
        }
        News::Connected { .. } | News::Ended { .. } | News::Record { .. } | News::Clock { .. } => {}
    }
}

/// The live views of all boots; each row begins with the start of its boot id.
struct View {
    table: Table,
    verbose: bool,
    boots: BTreeMap<Arc<str>, Live>,
    headed: bool,
}

/// Characters of a boot id at the beginning of a row.
const TAG: usize = 8;

impl View {
    fn new(mut table: Table, verbose: bool) -> Self {
        table.screen.width = table.screen.width.map(|w| w.saturating_sub(TAG + 1));
        Self {
            table,
            verbose,
            boots: BTreeMap::new(),
            headed: false,
        }
    }

    fn take(&mut self, news: &News, out: &mut Vec<String>) {
        let now = Instant::now();
        match news {
            News::Connected { boot } => {
                if !self.headed {
                    self.headed = true;
                    out.push(format!("{:TAG$} {}", "BOOT", self.table.head()));
                }
                self.boots
                    .entry(boot.clone())
                    .or_insert_with(|| Live::new(self.table, self.verbose, now));
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
            News::Line { .. } | News::Problem { .. } => {}
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

/// The boots that are complete.
#[derive(Debug, Default)]
struct Count {
    /// Times at which boots count as complete if no other record comes.
    closing: BTreeMap<Arc<str>, Instant>,
    /// Boots that are complete.
    done: HashSet<Arc<str>>,
    complete: HashSet<Arc<str>>,
}

impl Count {
    fn take(&mut self, news: &News, now: Instant) {
        match news {
            News::Record { boot, record } => {
                if record.kind == Kind::Event
                    && matches!(record.name.as_str(), names::SETTLED | names::POWER_OFF)
                {
                    self.done.insert(boot.clone());
                }
                if self.done.contains(boot) && !self.complete.contains(boot) {
                    self.closing.insert(boot.clone(), now + LINGER);
                }
            }
            News::Connected { boot } => {
                self.closing.remove(boot);
            }
            News::Ended { boot } => {
                let grace = if self.done.contains(boot) {
                    Duration::ZERO
                } else {
                    RECONNECT_GRACE
                };
                self.closing.insert(boot.clone(), now + grace);
            }
            News::Clock { .. } | News::Line { .. } | News::Problem { .. } => {}
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.closing.values().min().copied()
    }

    fn complete(&mut self, now: Instant) -> u64 {
        let over: Vec<Arc<str>> = self
            .closing
            .iter()
            .filter(|(_, at)| **at <= now)
            .map(|(boot, _)| boot.clone())
            .collect();
        for boot in over {
            self.closing.remove(&boot);
            self.complete.insert(boot);
        }
        self.complete.len() as u64
    }
}
