//! `kata-gpu-boot collect`: the collector as a program.

use super::boots::{BootDir, block_on};
use anyhow::{Context, Result};
use kata_gpu_collect::fleet::http_server::parse_address;
use kata_gpu_collect::fleet::pushing::{Kubernetes, Otlp};
use kata_gpu_collect::keep::Keep;
use kata_gpu_collect::kubernetes_events::Api;
use kata_gpu_collect::limits::Limits;
use kata_gpu_collect::otlp_push::Target;
use kata_gpu_collect::privileges::RunAs;
use kata_gpu_collect::retention::parse_size;
use kata_gpu_collect::sandbox_pod::BUNDLES;
use kata_gpu_collect::vm_dirs::Pattern;
use kata_gpu_collect::{Collector, Config, LINES_QUEUE, SANDBOXES, VM_SOCKETS, check, service};
use kata_gpu_report::data::text::printable;
use kata_gpu_report::otlp::{environment, of_this_machine};
use kata_gpu_wire::record::DEFAULT_PORT;
use nix::sys::stat::{Mode, umask};
use std::net::SocketAddr;
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

const HELP: &str = "\
Writes DIR/<boot id>.ndjson, one file per boot, which all other commands read while it grows.
Guests connect by themselves: those of QEMU where the kernel has vhost_vsock, those of other VMMs
to a socket that is made next to the VMM's. SIGINT and SIGTERM end it; after a restart, also after
kill -9, guests send again what they have. Unit, DaemonSet, dashboard, alerts, and the rest:
src/cli/README.md, \"Collect on every node\" and \"A fleet\". Limits: src/SPECIFICATION.md.

Examples:
  kata-gpu-boot collect --dir /var/lib/kata-gpu-boot --user nobody
  # a VM with hybrid vsock that is not Kata's
  kata-gpu-boot collect --dir boots --no-vsock --no-vms --uds /run/vm1/vsock
  # for a fleet: traces to an OpenTelemetry Collector, numbers to Prometheus
  kata-gpu-boot collect --dir boots --otlp http://127.0.0.1:4318 --metrics 9464";

/// Receive the event streams of guests, one file per boot.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    #[command(flatten)]
    dir: BootDir,
    /// Vsock port that guests connect to.
    #[arg(
        long,
        default_value_t = DEFAULT_PORT,
        value_parser = clap::value_parser!(u32).range(1..i64::from(u32::MAX))
    )]
    port: u32,
    /// Do not listen on AF_VSOCK.
    #[arg(long)]
    no_vsock: bool,
    /// Base path of a hybrid vsock device; may be repeated.
    #[arg(long, value_name = "PATH")]
    uds: Vec<PathBuf>,
    /// Sockets of VMMs, with * for the sandbox's id, instead of Kata's; may be repeated.
    #[arg(long, value_name = "PATTERN", conflicts_with = "no_vms")]
    vm: Vec<Pattern>,
    /// Do not look for VMs of hybrid vsock.
    #[arg(long)]
    no_vms: bool,
    /// Files about sandboxes, with * for the id, instead of Kata's; may be repeated.
    #[arg(long, value_name = "PATTERN")]
    sandbox: Vec<Pattern>,
    /// OCI configurations of sandbox containers, which name the pod, with * for the id, instead of
    /// containerd's and CRI-O's; may be repeated.
    #[arg(long, value_name = "PATTERN")]
    bundle: Vec<Pattern>,
    /// User (name or number, with :GROUP) to become once everything is open; owns the files.
    #[arg(long, value_parser = RunAs::parse)]
    user: Option<RunAs>,
    /// Days from a boot's last record to its removal; 0: boots are kept for ever.
    #[arg(long, value_name = "N", default_value_t = 30)]
    keep_days: u64,
    /// Size of all boots above which the oldest are removed; 0: no limit.
    #[arg(long, value_name = "SIZE", default_value = "10G", value_parser = parse_size)]
    keep_size: u64,
    /// Change a limit; may be repeated. A wrong NAME lists all of them.
    #[arg(long, value_name = "NAME=N")]
    limit: Vec<String>,
    /// Receiver of every boot that is over: http://HOST:4318 (OTLP over HTTP, protobuf). Headers
    /// and attributes: OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES.
    #[arg(long, value_name = "URL")]
    otlp: Option<String>,
    /// Address of http://ADDRESS/metrics for Prometheus; a port without an IP listens on 127.0.0.1.
    /// Brackets may be around any IP: [$(POD_IP)]:9464.
    #[arg(long, value_name = "[IP:]PORT", value_parser = parse_address)]
    metrics: Option<SocketAddr>,
    /// Way to the Kubernetes API, where each boot in which something failed becomes an Event of its
    /// pod: `kubectl proxy` at http://127.0.0.1:8001 or unix:/PATH. NODE_NAME is the node's name.
    #[arg(long, value_name = "URL")]
    kubernetes: Option<Api>,
    /// Check that the collector of this --dir receives, and exit (status 0: it does).
    #[arg(long)]
    check: bool,
}

/// Runs `collect`.
pub fn run(args: &Args) -> Result<()> {
    if args.check {
        return check::ask(&args.dir.dir);
    }
    // Files and directories are made with their own mode. Sockets must be open to VMMs of other
    // users.
    umask(Mode::empty());
    // Runtime of one thread: it drops its privileges, and later threads inherit that.
    block_on(collect(args))
}

/// The given patterns, else those of Kata and the container runtimes.
fn patterns(given: &[Pattern], own: &[&str]) -> Result<Vec<Pattern>> {
    if given.is_empty() {
        own.iter().map(|text| text.parse()).collect()
    } else {
        Ok(given.to_vec())
    }
}

/// Id of this program's build, which a release's BUILD-IDS lists.
pub fn build_id() -> String {
    kata_gpu_wire::build_id::of(std::fs::File::open("/proc/self/exe"))
        .unwrap_or_else(|| "unknown".into())
}

/// This machine's name.
fn own_name() -> Result<String> {
    let path = "/proc/sys/kernel/hostname";
    let name = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    Ok(name.trim().to_string())
}

fn config(args: &Args) -> Result<Config> {
    let mut limits = Limits::default();
    args.limit.iter().try_for_each(|limit| limits.set(limit))?;
    let mut config = Config {
        vsock: !args.no_vsock,
        uds: args.uds.clone(),
        bundles: patterns(&args.bundle, BUNDLES)?,
        limits,
        keep: Keep {
            age: Keep::days(args.keep_days),
            bytes: (args.keep_size > 0).then_some(args.keep_size),
        },
        run_as: args.user,
        metrics: args.metrics,
        build_id: build_id(),
        drop_privileges: true,
        ..Config::new(args.dir.dir.clone(), args.port)
    };
    if !args.no_vms {
        config.vms = patterns(&args.vm, VM_SOCKETS)?;
    }
    // Only these files name the owners of CIDs.
    if !args.no_vsock || !args.sandbox.is_empty() {
        config.sandboxes = patterns(&args.sandbox, SANDBOXES)?;
    }
    if let Some(url) = &args.otlp {
        config.otlp = Some(Otlp {
            target: Target::new(url)?,
            resource: of_this_machine()?,
        });
    }
    if let Some(api) = args.kubernetes.clone() {
        let node = environment("NODE_NAME")?.map_or_else(own_name, Ok)?;
        config.events = Some(Kubernetes { api, node });
    }
    Ok(config)
}

async fn collect(args: &Args) -> Result<()> {
    // Signals are caught before anything is opened that must be closed in order.
    let mut interrupt = signal(SignalKind::interrupt()).context("catch SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("catch SIGTERM")?;
    let (sender, mut lines) = mpsc::channel(LINES_QUEUE);
    let collector = Collector::bind(&config(args)?, sender)?;
    for note in &collector.notes {
        report(note);
    }
    service::notify_ready()?;
    let (stop, stopped) = watch::channel(false);
    let mut running = tokio::spawn(collector.run(stopped));
    let ended = loop {
        tokio::select! {
            Some(text) = lines.recv() => report(&text),
            _ = interrupt.recv() => {
                stop.send_replace(true);
            }
            _ = terminate.recv() => {
                stop.send_replace(true);
            }
            ended = &mut running => break ended,
        }
    };
    let counts = ended.context("the collector stopped unexpectedly")?;
    // Lines that were on their way at the stop.
    while let Ok(text) = lines.try_recv() {
        report(&text);
    }
    report(&counts?.line());
    Ok(())
}

/// Prints a line for the operator on standard error.
pub fn report(text: &str) {
    eprintln!("kata-gpu-boot: {}", printable(text));
}
