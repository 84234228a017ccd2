//! Health of GPUs by NVML as a table.

use crate::boot::gpu_health::{Facts, GuestHealth};
use crate::boot::model::{Boot, Gpu};
use crate::data::text::{printable, seconds};
use kata_gpu_wire::fabric::{Fabric, FabricState};

/// Longest cell, in characters, so that a GPU's number and one column fit a terminal.
const MAX_CELL: usize = 64;

/// A column: its head, whether it is aligned to the right, and the cell of a GPU.
type Column = (&'static str, bool, fn(&Facts, &Facts) -> Option<String>);

/// Columns after the GPU's number and address, in the order in which people ask. The second
/// argument is the confidential state.
const COLUMNS: [Column; 15] = [
    ("Model", false, |gpu, _| gpu.text("model").map(cell)),
    ("MIG", true, |gpu, _| {
        gpu.text("mig")
            .map(|list| list.split(',').count().to_string())
    }),
    ("Persistence", false, |gpu, _| on_or_off(gpu, "persistence")),
    ("Ready", false, ready),
    ("ECC", false, ecc),
    ("Rows remapped", false, rows),
    ("Power W", true, power),
    ("Clock MHz", true, |gpu, _| {
        gpu.number("graphics_mhz").map(|mhz| mhz.to_string())
    }),
    ("Memory MHz", true, |gpu, _| {
        gpu.number("memory_mhz").map(|mhz| mhz.to_string())
    }),
    ("Clocks held by", false, |gpu, _| {
        gpu.text("throttle")
            .filter(|held| *held != "gpu_idle")
            .map(cell)
    }),
    ("NVLinks", true, nvlinks),
    ("Fabric", false, fabric),
    ("Fabric health", false, fabric_health),
    ("Clique", true, |gpu, _| {
        has_fabric(gpu)
            .then(|| gpu.number("clique").map(|n| n.to_string()))
            .flatten()
    }),
    ("Cluster", false, cluster),
];

/// A text of a guest as a cell.
fn cell(text: &str) -> String {
    let mut text = printable(text);
    if text.len() > MAX_CELL {
        text.truncate(MAX_CELL - 3);
        text.push_str("...");
    }
    text
}

fn on_or_off(facts: &Facts, name: &str) -> Option<String> {
    facts
        .flag(name)
        .map(|on| if on { "on" } else { "off" }.to_string())
}

/// Ready state of the system; a GPU has none of its own.
fn ready(_: &Facts, confidential: &Facts) -> Option<String> {
    let is_confidential = confidential.flag("enabled").unwrap_or(false);
    let ready = confidential.flag("ready").filter(|_| is_confidential)?;
    let devtools = if confidential.flag("devtools") == Some(true) {
        ", devtools"
    } else {
        ""
    };
    Some(format!("{}{devtools}", if ready { "yes" } else { "no" }))
}

fn ecc(gpu: &Facts, _: &Facts) -> Option<String> {
    let mode = on_or_off(gpu, "ecc")?;
    Some(match gpu.number("ecc_uncorrected") {
        None | Some(0) => mode,
        Some(errors) => format!("{mode}, {errors} uncorrected"),
    })
}

fn rows(gpu: &Facts, _: &Facts) -> Option<String> {
    let mut text = gpu.number("rows_remapped")?.to_string();
    for (flag, word) in [
        ("remap_pending", ", reset needed"),
        ("remap_failed", ", failed"),
    ] {
        text.push_str(if gpu.flag(flag) == Some(true) {
            word
        } else {
            ""
        });
    }
    Some(text)
}

/// `71/500`.
fn power(gpu: &Facts, _: &Facts) -> Option<String> {
    let watts = |name| {
        gpu.number(name).map_or("?".to_string(), |milliwatts| {
            (milliwatts / 1000).to_string()
        })
    };
    let known = gpu.number("power_mw").is_some() || gpu.number("power_limit_mw").is_some();
    known.then(|| format!("{}/{}", watts("power_mw"), watts("power_limit_mw")))
}

/// `17/18`.
fn nvlinks(gpu: &Facts, _: &Facts) -> Option<String> {
    let all = gpu.number("nvlinks")?;
    Some(format!(
        "{}/{all}",
        gpu.number("nvlinks_active")
            .map_or("?".to_string(), |active| active.to_string())
    ))
}

fn has_fabric(gpu: &Facts) -> bool {
    gpu.text("fabric")
        .is_some_and(|state| state != "not supported")
}

/// The state, and NVML's error of a fabric that is complete: before that its status means nothing.
fn fabric(gpu: &Facts, _: &Facts) -> Option<String> {
    let state = gpu.text("fabric").filter(|_| has_fabric(gpu))?;
    Some(match gpu.number("fabric_status") {
        Some(status) if status != 0 && state == "completed" => format!("completed, error {status}"),
        Some(_) | None => cell(state),
    })
}

/// Health mask in words; None where the driver has none.
fn fabric_health(gpu: &Facts, _: &Facts) -> Option<String> {
    let mask = u32::try_from(gpu.number("fabric_health")?)
        .ok()
        .filter(|mask| *mask != 0 && has_fabric(gpu))?;
    let fabric = Fabric {
        state: FabricState::Completed,
        health: Some(mask),
        ..Fabric::default()
    };
    Some(fabric.problem().unwrap_or("good".to_string()))
}

/// Cluster of a GPU; `None` for zeros: the GPU is in no cluster.
fn cluster(gpu: &Facts, _: &Facts) -> Option<String> {
    let cluster = gpu.text("cluster").filter(|_| has_fabric(gpu))?;
    cluster
        .bytes()
        .any(|b| !matches!(b, b'0' | b'-'))
        .then(|| cell(cluster))
}

/// Cell of a fact that a GPU does not have, where others have it.
const NONE: &str = "-";

/// Health of all GPUs as a table: only columns in which some GPU has a value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthTable {
    /// Heads, and whether the column is aligned to the right. The first two are the GPU's number
    /// and address.
    pub heads: Vec<(&'static str, bool)>,
    /// In the order of the boot's GPUs; the flag says that something is wrong with this one.
    pub rows: Vec<(bool, Vec<String>)>,
    /// Sentences about problems, in printable ASCII.
    pub sentences: Vec<String>,
    /// Versions of NVML and driver that reported all that, and the time of the report.
    pub source: Option<String>,
}

impl HealthTable {
    /// Makes the table; `None` where no GPU has a fact and nothing is wrong.
    pub fn of(boot: &Boot) -> Option<Self> {
        let no_guest = GuestHealth::default();
        let guest = boot.health.as_deref().unwrap_or(&no_guest);
        // Facts of the system are not shown for a GPU that NVML does not know.
        let facts = |gpu: &Gpu| {
            gpu.health
                .as_ref()
                .map(|health| health.facts.clone())
                .filter(|facts| !facts.is_empty())
        };
        let facts: Vec<Option<Facts>> = boot.gpus.iter().map(facts).collect();
        let columns: Vec<(&'static str, bool, Vec<Option<String>>)> = COLUMNS
            .iter()
            .map(|(head, right, cell)| {
                let cells = facts
                    .iter()
                    .map(|facts| cell(facts.as_ref()?, &guest.confidential));
                (*head, *right, cells.collect::<Vec<_>>())
            })
            .filter(|(_, _, cells)| cells.iter().any(Option::is_some))
            .collect();
        let mut table = Self {
            sentences: sentences(boot, guest),
            source: source(guest),
            ..Self::default()
        };
        if !columns.is_empty() {
            table.heads = [("GPU", true), ("Address", true)]
                .into_iter()
                .chain(columns.iter().map(|(head, right, _)| (*head, *right)))
                .collect();
            table.rows = boot
                .gpus
                .iter()
                .enumerate()
                .map(|(at, gpu)| {
                    let cells = columns.iter().map(|(_, _, cells)| {
                        cells.get(at).cloned().flatten().unwrap_or(NONE.to_string())
                    });
                    let wrong = gpu
                        .health
                        .as_ref()
                        .is_some_and(|health| health.sentences().next().is_some());
                    (
                        wrong,
                        [gpu.name().number(), gpu.address.to_string()]
                            .into_iter()
                            .chain(cells)
                            .collect(),
                    )
                })
                .collect();
        }
        (!table.rows.is_empty() || !table.sentences.is_empty()).then_some(table)
    }

    /// Columns as groups that each fit into `width` characters, `gap` of them between two columns:
    /// indices. Every group begins with the GPU's number. One group where there
    /// is no width.
    pub fn groups(&self, width: Option<usize>, gap: usize) -> Vec<Vec<usize>> {
        let widest = |column: usize| {
            self.rows
                .iter()
                .filter_map(|(_, cells)| Some(cells.get(column)?.len()))
                .max()
                .unwrap_or(0)
        };
        let heads = self.heads.iter().enumerate();
        let widths = heads.map(|(column, (head, _))| head.len().max(widest(column)));
        let mut widths = widths.enumerate();
        let Some((number, first)) = widths.next() else {
            return Vec::new();
        };
        let (mut groups, mut used) = (vec![vec![number]], first);
        for (column, long) in widths {
            used += gap + long;
            match groups.last_mut() {
                Some(group) if group.len() == 1 || width.is_none_or(|width| used <= width) => {
                    group.push(column);
                }
                _ => {
                    used = first + gap + long;
                    groups.push(vec![number, column]);
                }
            }
        }
        groups
    }
}

fn sentences(boot: &Boot, guest: &GuestHealth) -> Vec<String> {
    let mut all = Vec::new();
    for gpu in &boot.gpus {
        let of_gpu = gpu.health.iter().flat_map(|health| health.sentences());
        all.extend(of_gpu.map(|problem| {
            format!(
                "GPU {} {}: {}",
                gpu.name().number(),
                gpu.address,
                printable(problem)
            )
        }));
    }
    all.extend(guest.problems.iter().map(|problem| printable(problem)));
    let is = |name| guest.confidential.flag(name);
    if is("enabled") == Some(true) && is("ready") == Some(false) {
        all.push(
            "the ready state of the confidential GPUs is off: CUDA fails on them until \
                  whoever attests sets it"
                .to_string(),
        );
    }
    if is("enabled") == Some(true) && guest.confidential.text("environment") == Some("simulated") {
        all.push(
            "the confidential environment is simulated: nothing is protected from the host"
                .to_string(),
        );
    }
    if is("devtools") == Some(true) {
        all.push(
            "the confidential GPUs are in devtools mode: nothing in them is protected".to_string(),
        );
    }
    all
}

fn source(guest: &GuestHealth) -> Option<String> {
    let named = |what: &str, name: &str| {
        guest
            .nvml
            .text(name)
            .map(|version| format!("{what} {}", cell(version)))
    };
    let versions: Vec<String> = [named("NVML", "nvml"), named("driver", "driver")]
        .into_iter()
        .flatten()
        .collect();
    (!versions.is_empty())
        .then(|| format!("by {}, at {}", versions.join(", "), seconds(guest.at_ns)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::gpu_health::{Health, MAX_PROBLEMS, MAX_TEXT};
    use crate::data::boot_file::BootFile;
    use crate::data::text::Screen;
    use crate::views::summary::{health_lines, summary};
    use kata_gpu_test_support::{golden, tests_dir};
    use kata_gpu_wire::names;

    /// A boot of these records: kind, name, GPU's device number, the rest of the record.
    fn boot(records: &[(&str, &str, Option<usize>, &str)]) -> Boot {
        let mut text = String::from(concat!(
            r#"{"schema":1,"stream":{"boot_id":"0f7a1f8e-0000-4000-8000-00000000beef","version":"0.1.0","kernel":"6.1.0","first_seq":0}}"#,
            "\n"
        ));
        for (seq, (kind, name, gpu, rest)) in records.iter().enumerate() {
            let gpu = gpu
                .map(|device| format!(r#","gpu":"0000:{device:02x}:00.0""#))
                .unwrap_or_default();
            text.push_str(&format!(
                "{{\"schema\":1,\"seq\":{seq},\"boottime_ns\":1{seq:06},\"kind\":\"{kind}\",\"name\":\"{name}\"{gpu}{rest}}}\n"
            ));
        }
        Boot::new(&BootFile::read(text.as_bytes()).unwrap(), &[])
    }

    fn health(boot: &Boot) -> &Health {
        boot.gpus[0].health.as_deref().unwrap()
    }

    /// A report of NVML on GPU 1.
    fn report(rest: &str) -> (&str, &str, Option<usize>, &str) {
        ("event", names::GPU_HEALTH, Some(1), rest)
    }

    const WHOLE: &str =
        r#","fields":{"uuid":"GPU-1","model":"H","power_mw":71000,"fabric":"in progress"}"#;
    const WRONG: &str = r#","level":"error","error":"NVLink is not usable""#;

    #[test]
    fn a_later_report_replaces_an_earlier_one_fact_by_fact() {
        let (whole, wrong) = (report(WHOLE), report(WRONG));
        let partial = report(r#","fields":{"fabric":"completed"}"#);
        let brought_up = boot(&[whole, wrong, partial]);
        let facts = &health(&brought_up).facts;
        assert_eq!(
            (facts.text("fabric"), facts.number("power_mw")),
            (Some("completed"), Some(71000))
        );
        assert_eq!(
            health(&brought_up).problems,
            ["NVLink is not usable"],
            "one fact is no word about the others"
        );
        let other = report(r#","fields":{"uuid":"GPU-1","ecc":true}"#);
        let replaced = boot(&[whole, wrong, wrong, other]);
        assert_eq!(
            (
                health(&replaced).facts.number("power_mw"),
                health(&replaced).facts.flag("ecc")
            ),
            (None, Some(true))
        );
        assert!(health(&replaced).problems.is_empty(), "{replaced:?}");
        // The next GPU at that address is another one.
        assert_eq!(
            boot(&[whole, ("event", names::GPU_REMOVED, Some(1), "")]).gpus[0].health,
            None
        );
    }

    #[test]
    fn what_was_refused_outlives_the_report_after_it() {
        let refused = r#","level":"error","error":"power limit, mW, 9 to 9: no: the driver's value stays","fields":{"what":"power limit, mW","min":9,"max":9}"#;
        let boot = boot(&[
            ("event", names::GPU_SETTING, Some(1), refused),
            report(WHOLE),
        ]);
        let table = HealthTable::of(&boot).unwrap();
        assert_eq!(
            table.sentences,
            ["GPU ? 0000:01:00.0: power limit, mW, 9 to 9: no: the driver's value stays"]
        );
        assert!(table.rows[0].0, "its row is marked");
    }

    #[test]
    fn columns_without_a_value_are_left_out() {
        let heads = |fields: &str| -> Vec<&str> {
            let boot = boot(&[report(&format!(r#","fields":{{{fields}}}"#))]);
            let table = HealthTable::of(&boot).unwrap();
            table.heads.iter().map(|(head, _)| *head).collect()
        };
        assert_eq!(
            heads(r#""model":"L40S","fabric":"not supported","clique":0,"throttle":"gpu_idle""#),
            ["GPU", "Address", "Model"]
        );
        // No cluster is zeros.
        let zeros = r#""fabric":"completed","fabric_status":0,"clique":7,"cluster":"00000000-0000-0000-0000-000000000000""#;
        assert_eq!(heads(zeros), ["GPU", "Address", "Fabric", "Clique"]);
        assert_eq!(
            HealthTable::of(&boot(&[("event", names::GPU_FOUND, Some(1), "")])),
            None,
            "NVML was not asked"
        );
    }

    #[test]
    fn a_state_that_keeps_cuda_from_working_is_a_sentence() {
        let confidential =
            r#","fields":{"enabled":true,"devtools":true,"protected_pcie":false,"ready":false}"#;
        let mut records = vec![
            report(WHOLE),
            ("event", names::CONFIDENTIAL, None, confidential),
        ];
        let table = HealthTable::of(&boot(&records)).unwrap();
        assert_eq!(table.sentences.len(), 2, "{table:?}");
        assert!(
            table.rows[0].1.contains(&"no, devtools".to_string()),
            "{table:?}"
        );
        // Somebody has attested.
        records.push((
            "event",
            names::CONFIDENTIAL,
            None,
            r#","fields":{"ready":true}"#,
        ));
        let table = HealthTable::of(&boot(&records)).unwrap();
        assert_eq!(
            table.sentences,
            ["the confidential GPUs are in devtools mode: nothing in them is protected"]
        );
        assert!(
            table.rows[0].1.contains(&"yes, devtools".to_string()),
            "{table:?}"
        );
    }

    #[test]
    fn a_hostile_guest_is_bounded_and_drives_no_terminal() {
        let evil = "\\u001b[2J\\u202e".repeat(200);
        let fields = format!(
            r#","fields":{{"model":"{evil}","cluster":"{evil}","fabric":"{evil}","throttle":"{evil}","ecc":"{evil}","nvlinks":1e99}}"#
        );
        let errors: Vec<String> = (0..50)
            .map(|n| format!(r#","error":"{n}{evil}""#))
            .collect();
        let settings: Vec<String> = (0..50)
            .map(|n| format!(r#","error":"{evil}","fields":{{"what":"{n}{evil}"}}"#))
            .collect();
        let mut records = vec![report(&fields)];
        records.extend(errors.iter().map(|error| report(error)));
        records.extend(
            errors
                .iter()
                .map(|error| ("event", names::GPU_HEALTH, None, error.as_str())),
        );
        records.extend(
            settings
                .iter()
                .map(|setting| ("event", names::GPU_SETTING, Some(1), setting.as_str())),
        );
        let boot = boot(&records);
        let (gpu, guest) = (health(&boot), boot.health.as_deref().unwrap());
        assert_eq!(
            (gpu.problems.len(), gpu.settings.len(), guest.problems.len()),
            (MAX_PROBLEMS, MAX_PROBLEMS, MAX_PROBLEMS)
        );
        assert!(
            gpu.problems.iter().all(|text| text.len() <= MAX_TEXT)
                && gpu.facts.text("model").unwrap().len() <= MAX_TEXT
        );
        assert_eq!(
            (gpu.facts.flag("ecc"), gpu.facts.number("nvlinks")),
            (None, None),
            "values of another kind are none"
        );
        let lines = summary(&boot, &Screen::PLAIN);
        assert!(
            lines
                .iter()
                .all(|line| line.bytes().all(|b| (b' '..=b'~').contains(&b))),
            "{lines:#?}"
        );
        assert!(
            HealthTable::of(&boot).unwrap().rows[0]
                .1
                .iter()
                .all(|cell| cell.len() <= MAX_CELL)
        );
    }

    /// Four GPUs: as they should be, with bad memory, with a bad link, held back.
    fn fixture() -> Boot {
        let text = std::fs::read(tests_dir("fixtures/health-4-gpus.ndjson")).unwrap();
        Boot::new(&BootFile::read(&text[..]).unwrap(), &[])
    }

    #[test]
    fn the_health_table_is_the_golden_one() {
        let boot = fixture();
        let narrow = Screen {
            width: Some(80),
            colour: false,
        };
        for (form, screen) in [("show", Screen::PLAIN), ("show-80-columns", narrow)] {
            let text = summary(&boot, &screen).join("\n") + "\n";
            golden(&format!("health-4-gpus.{form}"), &text);
        }
        let json = serde_json::json!({ "gpu": boot.gpus[2].health, "guest": boot.health });
        golden(
            "health-4-gpus.json",
            &(serde_json::to_string_pretty(&json).unwrap() + "\n"),
        );
    }

    #[test]
    fn no_row_is_wider_than_the_terminal() {
        let boot = fixture();
        let table = HealthTable::of(&boot).unwrap();
        for width in 80..300 {
            let lines = health_lines(
                &table,
                &Screen {
                    width: Some(width),
                    colour: false,
                },
            );
            let rows = lines.iter().take_while(|line| !line.starts_with("by "));
            assert!(
                rows.clone().all(|line| line.len() <= width),
                "width {width}: {lines:#?}"
            );
            let groups = table.groups(Some(width), 2);
            let shown: usize = groups.iter().map(|group| group.len() - 1).sum();
            assert_eq!(
                shown + 1,
                table.heads.len(),
                "each column once, the GPU's number in each table"
            );
        }
        assert_eq!(table.groups(None, 2).len(), 1, "a pipe gets one table");
    }
}
