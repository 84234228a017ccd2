//! The page of one boot.

use super::account::{Account, Grouping, window_line};
use super::by_gap;
use super::rows::{Row, Tracker};
use super::summary::summary;
use super::table::Table;
use super::verdict_lines;
use crate::analysis::verdict::{Verdict, user_end};
use crate::boot::coverage::coverage;
use crate::boot::host_trace::HostStep;
use crate::boot::model::{Boot, KERNEL_START};
use crate::boot::timeline::Window;
use crate::data::agent_log::AgentEvent;
use crate::data::boot_file::BootFile;
use crate::data::clock_points::Placed;
use crate::data::compact_record::{Record, in_time};
use crate::data::text::{Ink, Screen, error_bound, printable, printable_start, wrap};
use anyhow::Result;
use kata_gpu_wire::catalogue::Owner;
use std::io::{self, Write};

/// Longest id of a build that is shown, in bytes; SHA-1 has 40 digits.
const MAX_BUILD: usize = 64;

/// Which steps are listed one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steps {
    None,
    Main,
    /// Details too: beginnings, the kernel's messages, each look of the agent.
    All,
}

/// A boot, and how it is shown.
pub struct Page<'a> {
    pub file: &'a BootFile,
    pub boot: &'a Boot,
    /// Time that is accounted for, and the account. None with fewer than two milestones.
    pub account: Option<(Window<'a>, Account)>,
    pub steps: Steps,
    /// Report on the logs that the boot was made of.
    pub report: &'a [String],
}

impl<'a> Page<'a> {
    /// A boot by phase, until its containers run.
    pub fn new(file: &'a BootFile, boot: &'a Boot) -> Self {
        let account = account(boot, Grouping::Phase, None, None);
        Self {
            file,
            boot,
            account: account.ok().flatten(),
            steps: Steps::None,
            report: &[],
        }
    }
}

/// The account of a boot between two milestones, by default from the first one until its containers
/// run, or to the last one. An error
/// names the milestone that the boot lacks.
pub fn account<'a>(
    boot: &'a Boot,
    by: Grouping,
    from: Option<&str>,
    to: Option<&str>,
) -> Result<Option<(Window<'a>, Account)>> {
    let timeline = &boot.timeline;
    let window = match timeline.window(from, to.or_else(|| user_end(timeline))) {
        Err(_) if from.is_none() && to.is_none() => return Ok(None),
        window => window?,
    };
    let account = Account::new(by, boot, &window);
    Ok(Some((window, account)))
}

/// Writes the page: what happened, the account, the GPUs and containers, and the steps. Row by row:
/// a boot can have as many as a reader keeps records, each of several thousand characters.
pub fn write(page: &Page, screen: Screen, out: &mut dyn Write) -> io::Result<()> {
    let boot = page.boot;
    let width = screen.width.unwrap_or(usize::MAX);
    let wrapped = |ink: Ink, text: &str| {
        let lines = wrap("", "    ", text, width).into_iter();
        lines.map(move |line| screen.paint(ink, &line))
    };
    let verdict = Verdict::with_time(boot);
    let mut lines = verdict_lines::lines(&verdict, &screen);
    if let Some(origin) = origin(page.file, boot) {
        lines.extend(wrapped(Ink::Dim, &origin));
    }
    lines.push(String::new());
    match &page.account {
        None => lines.push("fewer than two milestones are known: no account".to_string()),
        Some((window, account)) => {
            let found = coverage(&boot.timeline, window);
            lines.extend(wrapped(Ink::Plain, &window_line(window, &boot.host_clock)));
            lines.push(by_gap::sentence(&found));
            lines.push(String::new());
            lines.extend(account.lines(&screen));
        }
    }
    lines.extend(boot.timeline.notes.iter().map(|note| screen.note(note)));
    if let None | Some((_, Account::Phase(_))) = page.account {
        lines.push(String::new());
        lines.extend(summary(boot, &screen));
    }
    if !page.report.is_empty() {
        lines.push(String::new());
        lines.extend(page.report.iter().cloned());
    }
    for line in lines {
        writeln!(out, "{line}")?;
    }
    match page.steps {
        Steps::None => Ok(()),
        steps => write_steps(page, steps == Steps::All, screen, out),
    }
}

fn write_steps(page: &Page, details: bool, screen: Screen, out: &mut dyn Write) -> io::Result<()> {
    let table = Table { screen };
    writeln!(out, "\n{}", table.head())?;
    let mut last = None;
    let mut tracker = Tracker::default();
    for (_, moment) in moments(page.file, page.boot) {
        let row = moment.row(&mut tracker);
        if details || !row.detail {
            for line in table.lines(&row, last) {
                writeln!(out, "{line}")?;
            }
            last = Some(row.time_ns);
        }
    }
    Ok(())
}

/// The boot, versions of init and kernel, and the sandbox.
fn origin(file: &BootFile, boot: &Boot) -> Option<String> {
    let header = file.header.as_ref()?;
    let build = boot.build.as_deref();
    let build = build.map(|build| printable_start(&build, MAX_BUILD));
    let sandbox = file.sandbox_id().map(printable);
    Some(format!(
        "boot {}, kata-gpu-init {}{}, kernel {}{}",
        printable(&header.boot_id),
        printable(&header.version),
        build.map(|id| format!(" (build {id})")).unwrap_or_default(),
        printable(&header.kernel),
        sandbox
            .map(|id| format!(", sandbox {id}"))
            .unwrap_or_default()
    ))
}

/// Source of a row.
enum Moment<'a> {
    Fixed(Box<Row>),
    Record(&'a Record),
    Agent(&'a AgentEvent, Placed),
    Connected { peer: &'a str, at_ns: u64 },
    Traced(&'a HostStep),
}

impl Moment<'_> {
    fn row(self, tracker: &mut Tracker) -> Row {
        match self {
            Self::Fixed(row) => *row,
            Self::Record(record) => tracker.row(record),
            Self::Agent(event, placed) => tracker.agent_row(event, placed),
            Self::Traced(step) => tracker.traced_row(step),
            Self::Connected { peer, at_ns } => Row::plain(
                at_ns,
                Owner::Host,
                format!("collector connected to {}", printable(peer)),
            ),
        }
    }
}

/// Everything that has a time, in order.
fn moments<'a>(file: &'a BootFile, boot: &'a Boot) -> Vec<(u64, Moment<'a>)> {
    let mut moments = Vec::new();
    let mut fixed = |row: Row| moments.push((row.time_ns, Moment::Fixed(Box::new(row))));
    if let Some(before) = boot.clock.before_kernel {
        let what = format!(
            "VMM and firmware, until the kernel's clock began ({}, by the TSC)",
            error_bound(before.error_ns)
        );
        fixed(Row {
            took_ns: Some(before.took_ns),
            ..Row::plain(0, Owner::Host, what)
        });
    }
    let zero = file
        .imported()
        .map(|i| i.zero.as_str())
        .filter(|zero| *zero != KERNEL_START);
    fixed(zero.map_or_else(Row::kernel_start, |zero| {
        Row::plain(0, Owner::Host, format!("0 is {}", printable(zero)))
    }));
    moments.extend(
        in_time(&file.records)
            .into_iter()
            .map(|record| (record.boottime_ns, Moment::Record(record))),
    );
    moments.extend(
        boot.agent_moments()
            .map(|(event, placed)| (placed.boottime_ns, Moment::Agent(event, placed))),
    );
    for step in boot
        .host
        .iter()
        .flat_map(|host| host.steps.iter().chain(&host.counts))
    {
        // A step has its row where it ends; before the kernel's start there is only that.
        moments.push((
            u64::try_from(step.end_ns()).unwrap_or(0),
            Moment::Traced(step),
        ));
    }
    moments.extend(
        file.connections(&boot.host_clock)
            .map(|(at_ns, peer)| (at_ns, Moment::Connected { peer, at_ns })),
    );
    moments.sort_by_key(|(at_ns, _)| *at_ns);
    moments
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::loaded::{Loaded, load};
    use crate::boot::model;
    use crate::data::agent_log;
    use crate::data::text::ascii_json;
    use kata_gpu_test_support::{golden, tests_dir};

    const BOOT: &str = "boots/hand-made-3-gpus-one-fails";
    /// A boot of the simulator guest in QEMU without KVM, as the collector wrote it; of its
    /// console, the agent's lines.
    const RECORDED: &str = "boots/recorded-8-gpus-fast-host";

    fn fixture(name: &str) -> Loaded {
        load(&tests_dir(&format!("fixtures/{name}.ndjson")), None).unwrap()
    }

    fn page(Loaded { file, boot }: &Loaded, steps: Steps, screen: Screen) -> String {
        let page = Page {
            steps,
            ..Page::new(file, boot)
        };
        let mut out = Vec::new();
        write(&page, screen, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// A file without the agent's lines.
    fn of_file(file: BootFile) -> Loaded {
        let boot = Boot::new(&file, &[]);
        Loaded { file, boot }
    }

    fn golden_page(name: &str, loaded: &Loaded, steps: Steps, screen: Screen) {
        golden(name, &page(loaded, steps, screen));
    }

    #[test]
    fn a_recorded_boot_looks_as_it_did() {
        let loaded = fixture(RECORDED);
        golden_page(
            "recorded-8-gpus-fast-host.show",
            &loaded,
            Steps::Main,
            Screen::PLAIN,
        );
    }

    #[test]
    fn either_shims_log_has_agent_lines_of_its_own_sandbox_alone() {
        // containerd's, by the Go shim; the journal's, by the Rust one.
        for name in ["containerd-1.7-kata-4.1.0", "journal-kata-4.1.0-rust"] {
            log_of_a_shim(name);
        }
    }

    fn log_of_a_shim(name: &str) {
        let path = tests_dir(&format!("fixtures/agent/{name}.ndjson"));
        let log = path.with_extension("log");
        let loaded = load(&path, Some(&log)).unwrap();
        assert_eq!(loaded.file.sandbox_id(), Some("train-0"));
        let name = format!("agent/{name}.show");
        golden_page(&name, &loaded, Steps::Main, Screen::PLAIN);
        assert_exact(&loaded.boot);
        let devices = loaded.boot.containers.iter();
        let devices: Vec<(&str, &str)> = devices
            .map(|c| (c.name.as_str(), c.devices.as_str()))
            .collect();
        let wanted = [
            ("pause", agent_log::NONE),
            ("first", "nvidia.com/gpu=0"),
            ("second", "nvidia.com/gpu=1"),
            ("all", "nvidia.com/gpu=all"),
            ("other", "nvidia.com/gpu=7"),
        ];
        assert_eq!(devices, wanted);
        // Another pod's boot has nothing of it, and a boot without a sandbox does not guess.
        let lines = |sandbox| agent_log::of_boot(&path, sandbox, Some(&log));
        assert_eq!(lines(Some("train-1")).unwrap(), []);
        let error = format!("{:#}", lines(None).unwrap_err());
        assert!(error.contains("does not name its sandbox"), "{error}");
    }

    fn assert_exact(boot: &Boot) {
        let mut milestones = boot.milestones.iter();
        assert!(
            milestones.all(|m| m.boottime_ns.is_some() && !m.approximate),
            "{:?}",
            boot.milestones
        );
    }

    /// A boot with kata-agent 4.1.0 for real, in the simulator guest; of its console, the agent's
    /// lines, as they were torn.
    fn of_a_real_agent(what: &str) -> Loaded {
        let name = format!("agent/kata-agent-4.1.0-{what}");
        let loaded = fixture(&name);
        let golden = format!("{name}.show");
        golden_page(&golden, &loaded, Steps::Main, Screen::PLAIN);
        loaded
    }

    #[test]
    fn a_real_agents_boot_has_all_milestones_and_each_container() {
        let Loaded { file, boot } = of_a_real_agent("info");
        assert_exact(&boot);
        let names: std::collections::BTreeSet<&str> =
            boot.containers.iter().map(|c| c.name.as_str()).collect();
        assert_eq!((names.len(), boot.containers.len()), (10, 10));
        let coverage = boot.coverage.unwrap();
        assert!(coverage.unexplained_share < 1.0, "{coverage:?}");
        assert_eq!(of_file(file).boot.milestone("agent ready"), None);
    }

    #[test]
    fn without_agent_lines_containers_are_those_that_the_init_saw() {
        let boot = of_a_real_agent("warn").boot;
        let seen = |c: &model::Container| c.seen_by_init && c.devices == agent_log::UNKNOWN;
        assert!(boot.containers.len() == 9 && boot.containers.iter().all(seen));
        let approximate = boot.milestones.iter().filter(|m| m.approximate);
        let approximate: Vec<&str> = approximate.map(|m| m.name).collect();
        assert_eq!(approximate, ["first container", "last container"]);
    }

    #[test]
    fn the_table_is_the_golden_one() {
        let loaded = fixture(BOOT);
        let wide = Screen {
            width: Some(100),
            colour: true,
        };
        for (form, steps, screen) in [
            ("show", Steps::Main, Screen::PLAIN),
            ("show-v", Steps::All, Screen::PLAIN),
            ("show-100-columns-colour", Steps::Main, wide),
        ] {
            let name = format!("hand-made-3-gpus-one-fails.{form}");
            golden_page(&name, &loaded, steps, screen);
        }
    }

    #[test]
    fn the_model_is_the_golden_one() {
        golden(
            "hand-made-3-gpus-one-fails.json",
            &ascii_json(&fixture(BOOT).boot).unwrap(),
        );
    }

    #[test]
    fn without_clock_events_times_are_approximate_or_absent() {
        let path = tests_dir(&format!("fixtures/{BOOT}.ndjson"));
        let agent = agent_log::of_boot(&path, None, None).unwrap();
        let mut file = fixture(BOOT).file;
        file.records
            .retain(|r| r.name != kata_gpu_wire::names::CLOCK);
        let boot = Boot::new(&file, &agent);
        let ready = boot.milestones.iter().find(|m| m.name == "agent ready");
        assert!(ready.unwrap().approximate);
        let mut loaded = Loaded { file, boot };
        let text = page(&loaded, Steps::Main, Screen::PLAIN);
        assert!(text.contains("~ approximate"), "{text}");
        loaded.file.host.clear();
        let boot = Boot::new(&loaded.file, &agent);
        assert!(boot.milestones.iter().all(|m| m.wall.is_none()));
        assert_eq!(boot.milestone("agent ready"), None);
        assert_eq!(
            boot.containers.len(),
            2,
            "what happened is known, only not when"
        );
    }

    #[test]
    fn every_cut_of_a_boot_can_be_shown() {
        let whole = std::fs::read(tests_dir(&format!("fixtures/{BOOT}.ndjson"))).unwrap();
        for end in (0..whole.len()).step_by(37) {
            let loaded = of_file(BootFile::read(&whole[..end]).unwrap());
            assert_eq!(
                loaded.boot.damaged_lines, 0,
                "a half-written line is not damage"
            );
            let has_times = loaded
                .boot
                .milestones
                .iter()
                .any(|m| m.boottime_ns.is_some());
            let page = page(&loaded, Steps::All, Screen::PLAIN);
            assert_eq!(page.contains("MILESTONE"), has_times, "{page}");
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
        let loaded = of_file(BootFile::read(hostile.as_bytes()).unwrap());
        let file = &loaded.file;
        assert_eq!((file.records.len(), file.damaged), (3, 1));
        for width in [None, Some(80)] {
            let screen = Screen {
                width,
                colour: false,
            };
            let text = page(&loaded, Steps::All, screen);
            assert!(
                text.bytes()
                    .all(|b| b == b'\n' || (b' '..=b'~').contains(&b)),
                "{text:?}"
            );
        }
    }
}
