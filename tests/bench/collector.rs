//! `bench collector [VMS] [RECORDS]`: many VMs at once against one collector, a release build in a
//! process of its own.
//!
//! VMs are unix sockets where Kata's would be, found by the collector's own watching; each sends
//! header and records as fast as it is read, and answers pings. Meanwhile other VMs connect one
//! after another, from a thread of their own: how long each waits for the collector's first word
//! (accept, header, opening of the boot, ping) is what a guest feels while all others talk. Whoever
//! sends shares the cores with the collector. Ends with an error when a record is missing that
//! nobody counted, or a target is missed.

use super::{keep, machine};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_report::data::boot_file::{FileLine, SeqSet, for_each_line};
use kata_gpu_wire::record::{
    DEFAULT_PORT, Header, Kind, Pong, Record, header_line, ping, pong_line, record_line,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::json;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader as AsyncBufReader};

/// Limit of the collector's RSS.
const RSS_TARGET_KB: u64 = 64 << 10;
/// Longest that nearly all who connect may wait for the first word.
const ACCEPT_TARGET: Duration = Duration::from_millis(100);
/// VMs that connect one after another while the others talk, and the pause between two.
const PROBES: usize = 200;
const PROBE_PAUSE: Duration = Duration::from_millis(25);
/// For everything: on a busy machine this takes some ten seconds.
const DEADLINE: Duration = Duration::from_secs(300);

struct Collector {
    child: Child,
}

impl Drop for Collector {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _ended_already = self.child.wait();
    }
}

pub fn run(root: &Path, vms: usize, records: u64) -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let program = std::env::var_os("KATA_GPU_BOOT")
        .map_or(root.join("target/release/kata-gpu-boot"), PathBuf::from);
    // Names of sockets have to be short.
    let work = nix::unistd::mkdtemp(&std::env::temp_dir().join("kgb-XXXXXX"))?;
    let result = measure(&program, &work, vms, records);
    std::fs::remove_dir_all(&work)?;
    let measured = result?;
    let runs = json!({ "command": format!("tests/bench/run collector {vms} {records}"), "machine": machine(), "run": measured.json });
    let file = keep(root, "collector", &runs)?;
    println!(
        "raw run: {}",
        file.strip_prefix(root).unwrap_or(&file).display()
    );
    ensure!(
        measured.missed.is_empty(),
        "missed: {}",
        measured.missed.join(", ")
    );
    Ok(())
}

struct Measured {
    json: serde_json::Value,
    missed: Vec<&'static str>,
}

fn measure(program: &Path, work: &Path, vms: usize, records: u64) -> Result<Measured> {
    let vm = |n: usize| work.join(format!("vm/{n}/clh.sock"));
    let boots = work.join("boots");
    let mut child = Command::new(program)
        .args(["collect", "--no-vsock", "--dir"])
        .arg(&boots)
        .arg("--vm")
        .arg(work.join("vm/*/clh.sock"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| {
            format!(
                "start {}: build it with --release --features host",
                program.display()
            )
        })?;
    let said = BufReader::new(child.stderr.take().context("no standard error")?);
    let mut collector = Collector { child };
    let said =
        std::thread::spawn(move || said.lines().map_while(Result::ok).collect::<Vec<String>>());

    // All VMMs at once; the collector has to see each and listen beside it.
    let start = Instant::now();
    for n in 0..vms + PROBES {
        std::fs::create_dir_all(vm(n).parent().context("no parent")?)?;
        drop(UnixListener::bind(vm(n))?);
    }
    for n in 0..vms + PROBES {
        while !socket(&vm(n)).exists() {
            ensure!(
                start.elapsed() < DEADLINE,
                "the collector does not listen for VM {n}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let listening = start.elapsed();

    let text: Arc<str> = (0..records).map(record).collect::<String>().into();
    let over = Arc::new(AtomicBool::new(false));
    let probes: Vec<PathBuf> = (vms..vms + PROBES).map(|n| socket(&vm(n))).collect();
    let probing = {
        let over = over.clone();
        std::thread::spawn(move || probe(&probes, vms, &over))
    };
    let start = Instant::now();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut waits = runtime.block_on(async {
        let mut guests = tokio::task::JoinSet::new();
        for n in 0..vms {
            guests.spawn(guest(n, socket(&vm(n)), text.clone()));
        }
        let all = async {
            let mut waits = Vec::new();
            while let Some(done) = guests.join_next().await {
                waits.push(done??);
            }
            anyhow::Ok(waits)
        };
        tokio::time::timeout(DEADLINE, all)
            .await
            .context("the load did not get through")?
    })?;
    let took = start.elapsed();
    over.store(true, Ordering::Relaxed);
    let mut probed = probing
        .join()
        .map_err(|_| anyhow::anyhow!("the probing thread panicked"))??;
    let rss = status(collector.child.id(), "VmHWM:")?;
    let rss_now = status(collector.child.id(), "VmRSS:")?;
    let stop = Instant::now();
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(collector.child.id() as i32),
        nix::sys::signal::Signal::SIGTERM,
    )?;
    let ended = collector.child.wait()?;
    let stopped = stop.elapsed();
    let said = said
        .join()
        .map_err(|_| anyhow::anyhow!("the reading thread panicked"))?;
    let counts = said.last().cloned().unwrap_or_default();
    ensure!(
        ended.success(),
        "the collector ended with {ended}: {counts}"
    );

    let (stored, missing) = stored(&boots, vms, records)?;
    let sent = vms as u64 * records;
    let bytes = text.len() as u64 * vms as u64;
    let rate = sent as f64 / took.as_secs_f64();
    let mut missed = Vec::new();
    let mut verdict = |what: &'static str, met: bool| {
        if met {
            return "met";
        }
        missed.push(what);
        "MISSED"
    };
    println!(
        "{vms} VMs at once, {records} records each, {:.0} MB in all, over the unix sockets of hybrid vsock",
        bytes as f64 / 1e6
    );
    println!(
        "sockets for all VMs after        {:>10.1} ms",
        ms(listening)
    );
    println!(
        "everything received after        {:>10.1} ms   {rate:.0} records/s, {:.0} MB/s",
        ms(took),
        bytes as f64 / 1e6 / took.as_secs_f64()
    );
    println!("records sent                     {sent:>10}");
    println!("records in the files             {stored:>10}");
    println!(
        "missing, and not counted         {missing:>10}   target 0: {}",
        verdict("missing records", missing == 0)
    );
    let p99 = line("first word while all talk", &mut probed);
    println!(
        "                                              p99 target {} ms: {}",
        ACCEPT_TARGET.as_millis(),
        verdict("first word", p99 <= ACCEPT_TARGET)
    );
    line("first word of those who talk", &mut waits);
    println!(
        "resident memory, highest         {:>10.1} MB   target 64: {}",
        rss as f64 / 1024.0,
        verdict("memory", rss <= RSS_TARGET_KB)
    );
    println!("SIGTERM to the end               {:>10.1} ms", ms(stopped));
    println!(
        "the collector says: {}",
        counts.trim_start_matches("kata-gpu-boot: ")
    );
    let micros = |all: &[Duration]| all.iter().map(|d| d.as_micros() as u64).collect::<Vec<_>>();
    let json = json!({
        "vms": vms, "records": records, "bytes": bytes, "listening_ms": ms(listening), "took_ms": ms(took), "records_per_s": rate, "stored": stored,
        "missing": missing, "rss_peak_kb": rss, "rss_kb": rss_now, "stop_ms": ms(stopped), "collector": counts,
        "first_word_us": micros(&probed), "first_word_of_talkers_us": micros(&waits),
    });
    Ok(Measured { json, missed })
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// Prints a distribution, gives its 99th percentile, and leaves it sorted.
fn line(what: &str, all: &mut [Duration]) -> Duration {
    all.sort_unstable();
    let at = |q: f64| {
        all.get(((all.len() as f64 * q) as usize).min(all.len().saturating_sub(1)))
            .copied()
            .unwrap_or_default()
    };
    println!(
        "{what:32} p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms, {} connections",
        ms(at(0.5)),
        ms(at(0.99)),
        ms(at(1.0)),
        all.len()
    );
    at(0.99)
}

fn socket(base: &Path) -> PathBuf {
    let mut name = base.as_os_str().to_owned();
    name.push(format!("_{DEFAULT_PORT}"));
    name.into()
}

fn boot_id(n: usize) -> String {
    format!("0f7a1f8e-0000-4000-8000-{n:012x}")
}

fn header(n: usize) -> String {
    header_line(&Header {
        boot_id: boot_id(n),
        version: "0.1.0".into(),
        kernel: "6.1.0-41-cloud-amd64".into(),
        first_seq: 0,
    })
}

/// A record like those of a boot, of about their size.
fn record(seq: u64) -> String {
    let mut record = Record::new(Kind::Event, "gpu.bound");
    (record.seq, record.boottime_ns) = (seq, 1_000_000_000 + seq * 1_000_000);
    record.gpu = "0001:00:03.0".parse().ok();
    record.parent = Some(seq / 4);
    record.fields.insert("minor".into(), (seq % 8).into());
    record.fields.insert(
        "text".into(),
        "nvidia 0001:00:03.0: enabling device (0000 -> 0002)".into(),
    );
    record_line(&record)
}

/// Plays a guest: connects, sends everything and answers pings meanwhile, then waits until the
/// collector has taken it all. Returns the wait for the first ping.
async fn guest(n: usize, socket: PathBuf, text: Arc<str>) -> Result<Duration> {
    let start = Instant::now();
    let stream = tokio::net::UnixStream::connect(&socket)
        .await
        .with_context(|| format!("connect to {}", socket.display()))?;
    let (reader, mut writer) = stream.into_split();
    let mut lines = AsyncBufReader::new(reader).lines();
    writer.write_all(header(n).as_bytes()).await?;
    let mut first = None;
    let mut rest = text.as_bytes();
    let mut pongs = String::new();
    while !rest.is_empty() {
        tokio::select! {
            ping_line = lines.next_line() => {
                first.get_or_insert(start.elapsed());
                let Some(ping_line) = ping_line? else { bail!("VM {n} was hung up on") };
                if let Some(pong) = ping(ping_line.as_bytes()) {
                    pongs.push_str(&pong_line(Pong { pong, boottime_ns: start.elapsed().as_nanos() as u64 }));
                }
            }
            // A pong goes between two records.
            sent = writer.write(rest) => rest = rest.get(sent?..).unwrap_or_default(),
        }
        if !pongs.is_empty() {
            let end = rest.iter().position(|b| *b == b'\n').map_or(0, |at| at + 1);
            let (line, after) = rest.split_at(if rest.len() == text.len() { 0 } else { end });
            writer.write_all(line).await?;
            writer
                .write_all(std::mem::take(&mut pongs).as_bytes())
                .await?;
            rest = after;
        }
    }
    writer.shutdown().await?;
    // The collector closes its connection after the last record.
    while let Some(_ping) = lines.next_line().await? {
        first.get_or_insert(start.elapsed());
    }
    first.with_context(|| format!("VM {n} was never asked for its clock"))
}

/// Connects for one VM after the other until all are through or the load is over.
fn probe(sockets: &[PathBuf], first: usize, over: &AtomicBool) -> Result<Vec<Duration>> {
    let mut waits = Vec::new();
    for (n, socket) in sockets.iter().enumerate() {
        if over.load(Ordering::Relaxed) && !waits.is_empty() {
            break;
        }
        let start = Instant::now();
        let mut stream = UnixStream::connect(socket)
            .with_context(|| format!("connect to {}", socket.display()))?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.write_all(header(first + n).as_bytes())?;
        let mut word = [0; 256];
        ensure!(stream.read(&mut word)? > 0, "probe {n} was hung up on");
        waits.push(start.elapsed());
        drop(stream);
        std::thread::sleep(PROBE_PAUSE);
    }
    Ok(waits)
}

/// A value of /proc/PID/status in kB.
fn status(pid: u32, field: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value = status
        .lines()
        .find_map(|l| l.strip_prefix(field))
        .with_context(|| format!("no {field}"))?;
    Ok(value.trim().trim_end_matches(" kB").parse()?)
}

/// Counts what stands in the files: records, each once, and those that are missing without the
/// file's saying so.
fn stored(boots: &Path, vms: usize, records: u64) -> Result<(u64, u64)> {
    use kata_gpu_report::data::boot_file::HostEvent;
    let (mut stored, mut missing) = (0, 0);
    for n in 0..vms {
        let path = boots.join(format!("{}.ndjson", boot_id(n)));
        let file =
            std::fs::File::open(&path).with_context(|| format!("open {}", path.display()))?;
        let (mut seqs, mut here, mut counted) = (SeqSet::default(), 0, 0);
        for_each_line(file, |_, _, line| match line {
            Ok(FileLine::Record(record)) => here += u64::from(seqs.insert(record.seq)),
            Ok(FileLine::Host(line)) => {
                if let HostEvent::Lost { count, .. } = line.event {
                    counted = count;
                }
            }
            _ => {}
        })?;
        stored += here;
        missing += records.saturating_sub(here + counted);
    }
    Ok((stored, missing))
}
