//! `kata-gpu-boot show`: the table and the summary of one boot, from its file.

use super::agent_log::{self, AgentLine, ClockPoints, Placed};
use super::boot_file::{BootFile, EXTENSION, HostEvent, Sandbox};
use super::guest_clocks::GuestClocks;
use super::model::{Boot, KERNEL_START, in_time};
use super::record::Record;
use super::rows::{Row, Side, Tracker};
use super::summary::summary;
use super::table::Table;
use super::text::{Screen, error_bound, printable, write_ascii_json};
use crate::events::record::is_boot_id;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

const HELP: &str = "\
Columns: TIME is seconds since the guest's kernel started, SINCE the distance to the line above, SIDE where the time went (kernel, init, driver, \
agent, host), GPU its CDI name and guest PCI address, TOOK how long a step took. Wall-clock times are the host's; the bound beside them says how \
wrong they may be.

Examples:
  # the newest boot in this directory
  kata-gpu-boot show
  # the boot whose id starts with 0f7a
  kata-gpu-boot show 0f7a --dir /var/log/boots
  # with the agent's lines: when was it ready, when did containers start
  kata-gpu-boot show boot.ndjson --console console.log
  # with details: begins, kernel messages, every look of the agent
  kata-gpu-boot show -v
  kata-gpu-boot show --json | jq '.gpus[] | {index, bound: .bound.at_ns}'";

/// Show one boot as a table: what happened when, on whose side, and how long it took.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    /// A file, or a boot id (its first characters are enough); the newest boot if left away.
    boot: Option<String>,
    /// Where the collector wrote.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// The guest's console log, or containerd's log with its lines (vmconsole=), for the agent's own lines [default: the file beside the boot's that ends in .console].
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
    /// Print everything that is known as one JSON object: gpus, containers, milestones, spans; times in ns since kernel start.
    #[arg(long)]
    json: bool,
    /// Show details too.
    #[arg(short, long)]
    verbose: bool,
}

/// Runs `show`.
pub fn run(args: &Args) -> Result<()> {
    let path = find(args.boot.as_deref(), &args.dir)?;
    let file = read_boot(&path)?;
    let agent = agent_log::of_boot(&path, file.sandbox_id(), args.console.as_deref())?;
    let boot = Boot::new(&file, &agent);
    print_with(|out| match args.json {
        true => write_ascii_json(out, &boot),
        false => write_page(out, &file, &agent, &boot, args.verbose, Screen::of_stdout()),
    })
}

/// Reads a boot's file. A file with nothing of ours in it is an error; damage in one that has is not.
pub fn read_boot(path: &Path) -> Result<BootFile> {
    let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    let boot = BootFile::read(file).with_context(|| format!("read {}", path.display()))?;
    if boot.header.is_none() && boot.records.is_empty() {
        let first = boot.damage.first().map(|d| format!(" (line {}: {})", d.line, d.why)).unwrap_or_default();
        bail!("{}: no event stream in it{first}: give a file that `collect` wrote, or the guest's boot.ndjson", path.display());
    }
    Ok(boot)
}

/// Writes a text to standard output.
pub fn print(text: &str) -> Result<()> {
    print_with(|out| out.write_all(text.as_bytes()))
}

/// Writes to standard output, part by part. Somebody who closes it (head, a pager) has seen enough: no error.
pub fn print_with(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        done => done.context("write to standard output"),
    }
}

/// The file that somebody means.
pub fn find(boot: Option<&str>, dir: &Path) -> Result<PathBuf> {
    let Some(boot) = boot else {
        return newest(dir);
    };
    let path = Path::new(boot);
    if path.is_file() {
        return Ok(path.to_path_buf());
    }
    // What is no file may be the start of an id; anything else is a path that is not there.
    if !boot.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f' | b'-')) {
        bail!("{}: no such file, and not a boot id", printable(boot));
    }
    let mut found: Vec<PathBuf> =
        boots(dir)?.into_iter().filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(boot))).collect();
    match (found.pop(), found.len()) {
        (Some(path), 0) => Ok(path),
        (None, _) => bail!("no file and no boot {boot} in {}: name the collector's directory with --dir", dir.display()),
        (Some(_), more) => bail!("{} boots in {} start with {boot}: give more of the id", more + 1, dir.display()),
    }
}

/// The boots in a directory: files that are named by a boot id. Nothing else of such a name is one: a pipe would be waited for, and /dev/zero has no end.
pub fn boots(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("read directory {}", dir.display()))? {
        let path = entry.with_context(|| format!("read directory {}", dir.display()))?.path();
        let named_by_id = path.file_stem().and_then(|s| s.to_str()).is_some_and(is_boot_id);
        // A link whose target is gone is none either, nor is what the retention has removed in between.
        if named_by_id && path.extension().is_some_and(|e| e == EXTENSION) && path.is_file() {
            found.push(path);
        }
    }
    Ok(found)
}

fn newest(dir: &Path) -> Result<PathBuf> {
    Ok(dated(dir)?.swap_remove(0))
}

/// The boots in a directory, at least one, that which was written to last first.
pub fn dated(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut dated = Vec::new();
    for path in boots(dir)? {
        match path.metadata().and_then(|m| m.modified()) {
            Ok(modified) => dated.push((modified, path)),
            // The retention was faster.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e).with_context(|| format!("look at {}", path.display())),
        }
    }
    if dated.is_empty() {
        bail!("no boot in {}: name the collector's directory with --dir, or give a file", dir.display());
    }
    dated.sort_unstable_by(|a, b| b.cmp(a));
    Ok(dated.into_iter().map(|(_, path)| path).collect())
}

/// Table and summary.
pub(crate) fn page(file: &BootFile, agent: &[AgentLine], boot: &Boot, verbose: bool, screen: Screen) -> Result<String> {
    let mut out = Vec::new();
    write_page(&mut out, file, agent, boot, verbose, screen)?;
    String::from_utf8(out).context("a page is ASCII")
}

/// The same row by row: a boot can have as many as a reader keeps records, each of several thousand characters.
pub fn write_page(out: &mut dyn Write, file: &BootFile, agent: &[AgentLine], boot: &Boot, verbose: bool, screen: Screen) -> io::Result<()> {
    let table = Table { screen };
    if let Some(header) = &file.header {
        let (version, kernel) = (printable(&header.version), printable(&header.kernel));
        writeln!(out, "boot {}, kata-gpu-init {version}, kernel {kernel}", header.boot_id)?;
        if let Some(sandbox) = file.sandbox() {
            writeln!(out, "{}", sandbox_line(sandbox))?;
        }
        writeln!(out)?;
    }
    writeln!(out, "{}", table.head())?;
    let mut last = None;
    let mut tracker = Tracker::default();
    for (_, moment) in moments(file, agent) {
        let row = moment.row(&mut tracker);
        if verbose || !row.detail {
            for line in table.lines(&row, last) {
                writeln!(out, "{line}")?;
            }
            last = Some(row.time_ns);
        }
    }
    writeln!(out)?;
    summary(boot, &screen).iter().try_for_each(|line| writeln!(out, "{line}"))
}

/// Whose VM it is.
fn sandbox_line(sandbox: &Sandbox) -> String {
    let pod = sandbox.pod.as_ref().map(|pod| {
        let namespace = sandbox.namespace.as_ref().map(|n| format!("{n}/")).unwrap_or_default();
        format!("pod {}, ", printable(&format!("{namespace}{pod}")))
    });
    format!("{}sandbox {}", pod.unwrap_or_default(), printable(&sandbox.id))
}

/// What becomes a row.
enum Moment<'a> {
    Fixed(Box<Row>),
    Record(&'a Record),
    Agent(&'a AgentLine, Placed),
    Connected { peer: &'a str, at_ns: u64 },
}

impl Moment<'_> {
    fn row(self, tracker: &mut Tracker) -> Row {
        match self {
            Self::Fixed(row) => *row,
            Self::Record(record) => tracker.row(record),
            Self::Agent(line, placed) => tracker.agent_row(&line.event, placed.boottime_ns, placed.approximate),
            Self::Connected { peer, at_ns } => Row::plain(at_ns, Side::Host, format!("collector connected to {}", printable(peer))),
        }
    }
}

/// Everything that has a time, in order.
fn moments<'a>(file: &'a BootFile, agent: &'a [AgentLine]) -> Vec<(u64, Moment<'a>)> {
    let clock = file.clock();
    let mut points = ClockPoints::default();
    file.records.iter().for_each(|record| points.add(record));
    let mut moments = Vec::new();
    let mut fixed = |row: Row| moments.push((row.time_ns, Moment::Fixed(Box::new(row))));
    if let Some(before) = GuestClocks::of(&file.records).before_kernel {
        let what = format!("VMM and firmware, until the kernel's clock began ({}, by the TSC)", error_bound(before.error_ns));
        fixed(Row { took_ns: Some(before.took_ns), ..Row::plain(0, Side::Host, what) });
    }
    let zero = file.imported().map(|i| i.zero.as_str()).filter(|zero| *zero != KERNEL_START);
    fixed(zero.map_or_else(Row::kernel_start, |zero| Row::plain(0, Side::Host, format!("0 is {}", printable(zero)))));
    moments.extend(in_time(&file.records).into_iter().map(|record| (record.boottime_ns, Moment::Record(record))));
    for line in agent {
        let placed = points.place(line.realtime_ns, &clock);
        moments.extend(placed.map(|placed| (placed.boottime_ns, Moment::Agent(line, placed))));
    }
    for line in &file.host {
        if let HostEvent::Connected { peer, .. } = &line.event
            && let Some(at_ns) = clock.boottime_at(line.realtime_ns)
        {
            moments.push((at_ns, Moment::Connected { peer, at_ns }));
        }
    }
    moments.sort_by_key(|(at_ns, _)| *at_ns);
    moments
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::{TempDir, golden, tests_dir};
    use crate::host::text::ascii_json;

    const BOOT: &str = "hand-made-3-gpus-one-fails";
    /// A boot of the simulator guest in QEMU without KVM, as the collector wrote it; of its console, the agent's lines.
    const RECORDED: &str = "recorded-8-gpus-fast-host";

    fn fixture_of(boot: &str) -> (BootFile, Vec<AgentLine>) {
        let file = read_boot(&tests_dir(&format!("fixtures/boots/{boot}.ndjson"))).unwrap();
        let console = File::open(tests_dir(&format!("fixtures/boots/{boot}.console"))).unwrap();
        (file, agent_log::read(console).unwrap())
    }

    fn fixture() -> (BootFile, Vec<AgentLine>) {
        fixture_of(BOOT)
    }

    #[test]
    fn a_recorded_boot_looks_as_it_did() {
        let (file, agent) = fixture_of(RECORDED);
        let boot = Boot::new(&file, &agent);
        assert_eq!((boot.gpus.len(), boot.containers.len(), boot.lost.records, boot.damaged_lines), (8, 2, 0, 0));
        golden(&format!("{RECORDED}.show"), &page(&file, &agent, &boot, false, Screen::PLAIN).unwrap());
    }

    #[test]
    fn a_log_of_either_of_katas_shims_has_the_agents_lines_of_its_own_sandbox_alone() {
        // containerd's, by the Go shim; the journal's, by the Rust one.
        for name in ["containerd-1.7-kata-4.1.0", "journal-kata-4.1.0-rust"] {
            log_of_a_shim(name);
        }
    }

    fn log_of_a_shim(name: &str) {
        let path = tests_dir(&format!("fixtures/agent/{name}.ndjson"));
        let log = path.with_extension("log");
        let file = read_boot(&path).unwrap();
        assert_eq!(file.sandbox_id(), Some("train-0"));
        let agent = agent_log::of_boot(&path, file.sandbox_id(), Some(&log)).unwrap();
        let boot = Boot::new(&file, &agent);
        golden(&format!("agent/{name}.show"), &page(&file, &agent, &boot, false, Screen::PLAIN).unwrap());
        assert!(boot.milestones.iter().all(|m| m.boottime_ns.is_some() && !m.approximate), "{:?}", boot.milestones);
        let devices: Vec<(&str, &str)> = boot.containers.iter().map(|c| (c.name.as_str(), c.devices.as_str())).collect();
        let asked = ["nvidia.com/gpu=0", "nvidia.com/gpu=1", "nvidia.com/gpu=all", "nvidia.com/gpu=7"];
        assert_eq!(
            devices,
            ["pause", "first", "second", "all", "other"].into_iter().zip([agent_log::NONE].into_iter().chain(asked)).collect::<Vec<_>>()
        );
        // Another pod's boot has nothing of it, and one that is nobody's does not guess.
        assert_eq!(agent_log::of_boot(&path, Some("train-1"), Some(&log)).unwrap(), []);
        let error = format!("{:#}", agent_log::of_boot(&path, None, Some(&log)).unwrap_err());
        assert!(error.contains("does not say which sandbox"), "{error}");
    }

    /// A boot with kata-agent 4.1.0 for real, in the simulator guest; of its console, the agent's lines, as they were torn.
    fn of_a_real_agent(what: &str) -> (BootFile, Vec<AgentLine>) {
        let path = tests_dir(&format!("fixtures/agent/kata-agent-4.1.0-{what}.ndjson"));
        (read_boot(&path).unwrap(), agent_log::of_boot(&path, None, None).unwrap())
    }

    #[test]
    fn a_real_agents_boot_has_every_milestone_and_containers_made_at_once_are_told_apart() {
        let (file, agent) = of_a_real_agent("info");
        let boot = Boot::new(&file, &agent);
        golden("agent/kata-agent-4.1.0-info.show", &page(&file, &agent, &boot, false, Screen::PLAIN).unwrap());
        assert!(boot.milestones.iter().all(|m| m.boottime_ns.is_some() && !m.approximate), "{:?}", boot.milestones);
        let names: std::collections::BTreeSet<&str> = boot.containers.iter().map(|c| c.name.as_str()).collect();
        assert_eq!((names.len(), boot.containers.len()), (10, 10));
        let coverage = boot.coverage.unwrap();
        assert!(coverage.unexplained_share < 1.0, "{coverage:?}");
        // Nobody else's lines: the milestones of the agent are gone, and it is said.
        let without = Boot::new(&file, &[]);
        assert!(without.milestones.iter().all(|m| m.name != "agent ready" || m.boottime_ns.is_none()));
    }

    #[test]
    fn where_the_agents_level_hides_its_lines_containers_are_those_that_the_init_saw() {
        let (file, agent) = of_a_real_agent("warn");
        let boot = Boot::new(&file, &agent);
        golden("agent/kata-agent-4.1.0-warn.show", &page(&file, &agent, &boot, false, Screen::PLAIN).unwrap());
        assert!(boot.containers.len() == 9 && boot.containers.iter().all(|c| c.seen_by_init && c.devices == agent_log::UNKNOWN));
        let container = |name: &str| boot.milestones.iter().find(|m| m.name == name).is_some_and(|m| m.approximate);
        assert!(container("first container") && container("last container"));
    }

    fn shown(verbose: bool, screen: Screen) -> String {
        let (file, agent) = fixture();
        page(&file, &agent, &Boot::new(&file, &agent), verbose, screen).unwrap()
    }

    #[test]
    fn the_table_is_the_golden_one() {
        golden(&format!("{BOOT}.show"), &shown(false, Screen::PLAIN));
        golden(&format!("{BOOT}.show-v"), &shown(true, Screen::PLAIN));
        golden(&format!("{BOOT}.show-100-columns-colour"), &shown(false, Screen { width: Some(100), colour: true }));
    }

    #[test]
    fn the_model_is_the_golden_one() {
        let (file, agent) = fixture();
        golden(&format!("{BOOT}.json"), &ascii_json(&Boot::new(&file, &agent)).unwrap());
    }

    #[test]
    fn without_a_clock_event_agent_lines_are_approximate_and_without_samples_there_is_no_wall_clock() {
        let (mut file, agent) = fixture();
        file.records.retain(|r| r.name != crate::events::record::names::CLOCK);
        let boot = Boot::new(&file, &agent);
        assert!(boot.milestones.iter().any(|m| m.name == "agent ready" && m.approximate));
        assert!(page(&file, &agent, &boot, false, Screen::PLAIN).unwrap().contains("~ approximate"));
        file.host.clear();
        let boot = Boot::new(&file, &agent);
        assert!(boot.milestones.iter().all(|m| m.wall.is_none()));
        assert_eq!(boot.milestones.iter().find(|m| m.name == "agent ready").unwrap().boottime_ns, None);
        assert_eq!(boot.containers.len(), 2, "what happened is known, only not when");
    }

    #[test]
    fn every_cut_of_a_boot_can_be_shown() {
        let whole = std::fs::read(tests_dir(&format!("fixtures/boots/{BOOT}.ndjson"))).unwrap();
        for end in (0..whole.len()).step_by(37) {
            let file = BootFile::read(&whole[..end]).unwrap();
            let boot = Boot::new(&file, &[]);
            assert_eq!(boot.damaged_lines, 0, "a half-written line is not damage");
            assert!(page(&file, &[], &boot, true, Screen::PLAIN).unwrap().contains("MILESTONE"));
        }
    }

    #[test]
    fn nothing_a_guest_writes_reaches_the_terminal_as_it_is() {
        let evil = "\\u001b[2J\\u202e\\u009b31m\\r\\n";
        let hostile = format!(
            concat!(
                r#"{{"schema":1,"stream":{{"boot_id":"0f7a1f8e-0000-4000-8000-00000000beef","version":"{0}","kernel":"{0}","first_seq":0}}}}"#,
                "\n",
                r#"{{"schema":1,"seq":0,"boottime_ns":18446744073709551615,"kind":"event","name":"gpu.failed","gpu":"0000:00:00.0","error":"{0}","fields":{{"{0}":"{0}","step":"{0}","index":18446744073709551615}}}}"#,
                "\n",
                r#"{{"schema":1,"seq":1,"boottime_ns":5,"kind":"kmsg","name":"kmsg","level":"error","fields":{{"text":"{0}"}}}}"#,
                "\n",
                r#"{{"schema":1,"seq":18446744073709551615,"boottime_ns":5,"kind":"event","name":"power-off","error":"{0}"}}"#,
                "\nfoo{1}\n"
            ),
            evil, "\x1b[2J"
        );
        let file = BootFile::read(hostile.as_bytes()).unwrap();
        assert_eq!((file.records.len(), file.damaged), (3, 1), "{:?}", file.damage);
        let boot = Boot::new(&file, &[]);
        for width in [None, Some(80)] {
            let text = page(&file, &[], &boot, true, Screen { width, colour: false }).unwrap();
            assert!(text.bytes().all(|b| b == b'\n' || (b' '..=b'~').contains(&b)), "{text:?}");
        }
    }

    #[test]
    fn a_boot_is_found_by_file_by_the_start_of_its_id_and_by_being_the_newest() {
        let dir = TempDir::new();
        let old = dir.path().join("0f7a1f8e-0000-4000-8000-00000000beef.ndjson");
        let new = dir.path().join("0f7b1f8e-0000-4000-8000-00000000beef.ndjson");
        std::fs::write(&old, "").unwrap();
        let file = File::create(&new).unwrap();
        file.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(5)).unwrap();
        std::fs::write(dir.path().join("zzz.ndjson"), "").unwrap();
        assert_eq!(find(None, dir.path()).unwrap(), new);
        assert_eq!(find(Some("0f7a"), dir.path()).unwrap(), old);
        assert_eq!(find(Some(old.to_str().unwrap()), Path::new("/")).unwrap(), old);
        assert!(find(Some("0f7"), dir.path()).unwrap_err().to_string().contains("2 boots"));
        assert!(find(Some("beef"), dir.path()).unwrap_err().to_string().contains("--dir"));
        assert!(find(Some("../no/such"), dir.path()).unwrap_err().to_string().contains("no such file"));
    }

    #[test]
    fn what_is_called_like_a_boot_and_is_no_file_is_not_looked_into() {
        let dir = TempDir::new();
        let named = |n: u8| dir.path().join(format!("0f7a1f8e-0000-4000-8000-00000000000{n}.ndjson"));
        std::fs::write(named(0), "").unwrap();
        std::os::unix::fs::symlink("/nonexistent", named(1)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", named(2)).unwrap();
        std::fs::create_dir(named(3)).unwrap();
        nix::unistd::mkfifo(&named(4), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(boots(dir.path()).unwrap(), [named(0)]);
        assert_eq!(find(None, dir.path()).unwrap(), named(0), "a link to nothing does not keep the others from being found");
    }

    #[test]
    fn a_file_of_something_else_is_refused_with_the_cure() {
        let dir = TempDir::new();
        let path = dir.path().join("x");
        std::fs::write(&path, "hello\n").unwrap();
        assert!(read_boot(&path).unwrap_err().to_string().contains("give a file that"));
    }
}
