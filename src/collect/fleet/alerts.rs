//! Alerting rules for Prometheus (`collect --print-alerts`): the problem, its shortest duration,
//! and the command to run next.
//!
//! No rule divides by a value that may be 0. Shares count only from a minimum of boots on: a fleet
//! with a boot a day alerts by its failures, not by its quantiles. A scrape every 2 minutes is
//! enough for the shortest window.

use super::metrics_table::{
    BOOTS, BOOTS_BEGUN, BOOTS_IN_FLIGHT, BOOTS_NOT_FOLLOWED, BUILD_INFO, CONNECTED,
    CONNECTIONS_REFUSED, DOCTOR_FINDING_SECONDS, FAILED, GPUS, KEEP_LIMIT_BYTES, KEPT_BYTES,
    MILESTONE_SECONDS, OTLP_DROPPED, OTLP_PUSHED, OTLP_QUEUE, RECORDS_CAPPED, RECORDS_DROPPED,
    RECORDS_LOST, WRITE_ERRORS,
};
use super::promql::failed_boots;
use super::tally::Outcome;
use kata_gpu_report::boot::model::SETTLED;
use std::fmt::Write;

/// Failed boots of a fleet in an hour: the least number, and the least share.
const FAILED_BOOTS: u32 = 3;
const FAILED_SHARE: f64 = 0.05;
/// Failed boots of one node in six hours: the least share.
const FAILED_SHARE_OF_NODE: f64 = 0.5;
/// Least boots in an hour for which times are judged, and compared with those of a day ago.
const BOOTS_TO_JUDGE: u32 = 10;
const BOOTS_TO_COMPARE: u32 = 20;
/// Slow: the 90th percentile of `settled`, in seconds. A bound of the histograms, where a
/// percentile has no error.
const SLOW_SECONDS: f64 = 120.0;
/// Slower than a day ago: the 90th percentile, and the mean. Boots that move a little over a bound
/// of the histograms can double the percentile; the mean knows no bounds.
const SLOWER_P90: f64 = 1.5;
const SLOWER_MEAN: f64 = 1.2;
/// Time in flight, without a later boot, after which a boot counts as hanging.
const HANGS: &str = "30m";
/// Seconds that one property of a node costs each of its boots, by `doctor --daemonset-check`.
const HOST_SECONDS: u32 = 10;
/// Connections of a node over a limit in an hour.
const REFUSED: u32 = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Guests do not start, or their starts are not observed.
    Critical,
    Warning,
}

impl Severity {
    pub fn name(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Warning => "warning",
        }
    }
}

/// A rule.
pub struct Alert {
    pub name: &'static str,
    pub severity: Severity,
    /// Time that the condition must last, as Prometheus writes durations.
    pub after: &'static str,
    pub expr: String,
    pub summary: &'static str,
    pub description: &'static str,
}

use Severity::{Critical, Warning};

/// Alerts about boots of guests, and about their collectors.
pub fn groups() -> [(&'static str, Vec<Alert>); 2] {
    [
        ("kata-gpu-boot boots", boots()),
        ("kata-gpu-boot collectors", collectors()),
    ]
}

fn boots() -> Vec<Alert> {
    let all = BOOTS.series();
    let failed = failed_boots();
    let of_gpus = GPUS.series().of(FAILED);
    let buckets = MILESTONE_SECONDS.buckets().of(SETTLED);
    let (sums, counts) = (
        MILESTONE_SECONDS.sums().of(SETTLED),
        MILESTONE_SECONDS.counts().of(SETTLED),
    );
    let in_flight = BOOTS_IN_FLIGHT.series().of(CONNECTED);
    vec![
        Alert {
            name: "KataGpuBootsFail",
            severity: Critical,
            after: "5m",
            expr: format!(
                "sum by (job) (increase({failed}[1h])) >= {FAILED_BOOTS}\n\
                 and\n\
                 sum by (job) (increase({failed}[1h])) > {FAILED_SHARE} * sum by (job) (increase({all}[1h]))"
            ),
            summary: "{{ $value | printf \"%.0f\" }} boots of GPU guests failed within an hour",
            description: "More than 5 % of the guests powered off or went before their GPUs were \
                          settled. The dashboard names reasons and nodes; on a node, \
                          `kata-gpu-boot list --failed --dir /var/lib/kata-gpu-boot` names the \
                          boots, `kata-gpu-boot show BOOT --dir /var/lib/kata-gpu-boot` says why \
                          one failed.",
        },
        Alert {
            name: "KataGpuNodeBootsFail",
            severity: Warning,
            after: "5m",
            expr: format!(
                "sum by (job, instance) (increase({failed}[6h])) >= {FAILED_BOOTS}\n\
                 and\n\
                 sum by (job, instance) (increase({failed}[6h])) > {FAILED_SHARE_OF_NODE} * \
                 sum by (job, instance) (increase({all}[6h]))"
            ),
            summary: "most boots of GPU guests on {{ $labels.instance }} fail",
            description: "{{ $value | printf \"%.0f\" }} boots failed within 6 hours, more than \
                          half of this node's. Cordon the node; on it, `kata-gpu-boot list \
                          --failed --dir /var/lib/kata-gpu-boot` names the boots, `kata-gpu-boot \
                          show BOOT --dir /var/lib/kata-gpu-boot` shows why one failed.",
        },
        Alert {
            name: "KataGpuGpusFail",
            severity: Warning,
            after: "1m",
            expr: format!("sum by (job, instance) (increase({of_gpus}[1h])) > 0"),
            summary: "GPUs of guests on {{ $labels.instance }} failed to start",
            description: "{{ $value | printf \"%.0f\" }} GPUs were not usable in guests that \
                          booted within an hour. On the node, `kata-gpu-boot list --failed --dir \
                          /var/lib/kata-gpu-boot` names the boots, `kata-gpu-boot show BOOT --dir \
                          /var/lib/kata-gpu-boot` each GPU with its address, reason and the \
                          driver's log lines.",
        },
        Alert {
            name: "KataGpuBootsSlower",
            severity: Warning,
            after: "15m",
            expr: format!(
                "histogram_quantile(0.9, sum by (job, le) (increase({buckets}[1h])))\n  \
                   > {SLOWER_P90} * histogram_quantile(0.9, sum by (job, le) (increase({buckets}[1h] offset 1d)))\n\
                 and\n\
                 sum by (job) (increase({sums}[1h])) / (sum by (job) (increase({counts}[1h])) >= {BOOTS_TO_COMPARE})\n  \
                   > {SLOWER_MEAN} * sum by (job) (increase({sums}[1h] offset 1d))\n    \
                     / (sum by (job) (increase({counts}[1h] offset 1d)) >= {BOOTS_TO_COMPARE})"
            ),
            summary: "GPU guests take longer until their GPUs are settled than a day ago",
            description: "The 90th percentile of this hour is {{ $value | printf \"%.1f\" }} s, \
                          1.5 times that of the same hour a day ago, and the mean has grown by 20 \
                          %: something got slower, or guests have more GPUs. The dashboard says in \
                          which phase; on a node, `kata-gpu-boot stats --dir \
                          /var/lib/kata-gpu-boot` has the steps, `kata-gpu-boot compare OLD NEW \
                          --dir /var/lib/kata-gpu-boot` two boots beside each other.",
        },
        Alert {
            name: "KataGpuBootsSlow",
            severity: Warning,
            after: "15m",
            expr: format!(
                "histogram_quantile(0.9, sum by (job, le) (increase({buckets}[1h]))) > {SLOW_SECONDS}\n\
                 and\n\
                 sum by (job) (increase({counts}[1h])) >= {BOOTS_TO_JUDGE}"
            ),
            summary: "a tenth of the GPU guests take more than 2 minutes until their GPUs are settled",
            description: "The 90th percentile of this hour is {{ $value | printf \"%.0f\" }} s. On \
                          a node, `kata-gpu-boot critical-path --dir /var/lib/kata-gpu-boot` names \
                          what set the end of its newest boot, and what would have made it shorter.",
        },
        Alert {
            name: "KataGpuHostSlow",
            severity: Warning,
            after: "30m",
            expr: format!("{DOCTOR_FINDING_SECONDS} > {HOST_SECONDS}"),
            summary: "boots on {{ $labels.instance }} are slow by a property of the host: {{ $labels.rule }}",
            description: "It costs each boot {{ $value | printf \"%.0f\" }} s. On the node, \
                          `kata-gpu-boot doctor --dir /var/lib/kata-gpu-boot` has the evidence, \
                          and what to change.",
        },
        Alert {
            name: "KataGpuBootHangs",
            severity: Warning,
            after: HANGS,
            expr: format!(
                "{in_flight} > 0\nunless on (job, instance)\nincrease({BOOTS_BEGUN}[{HANGS}]) > 0"
            ),
            summary: "a GPU guest on {{ $labels.instance }} does not become settled",
            description: "{{ $value | printf \"%.0f\" }} boots are in flight since half an hour, \
                          and none began since. On the node, `kata-gpu-boot follow --dir \
                          /var/lib/kata-gpu-boot` shows which GPU is waited for; the boot is over \
                          when its VM is ended.",
        },
    ]
}

fn collectors() -> Vec<Alert> {
    let not_counted = BOOTS
        .series()
        .of_any(&[Outcome::Implausible.name(), Outcome::Unread.name()]);
    vec![
        Alert {
            name: "KataGpuBootCollectorDown",
            severity: Critical,
            after: "5m",
            // Only targets that were collectors, under any name of the job.
            expr: format!("up == 0\nand on (job, instance)\nmax_over_time({BUILD_INFO}[1d]) > 0"),
            summary: "the collector of boots on {{ $labels.instance }} does not answer",
            description: "Boots of its guests are not observed; guests keep their records and \
                          send them when it is back. On the node, `kata-gpu-boot collect --check \
                          --dir /var/lib/kata-gpu-boot` says whether it receives, `systemctl \
                          status kata-gpu-boot` or the DaemonSet's pod why not.",
        },
        Alert {
            name: "KataGpuBootNoCollector",
            severity: Critical,
            after: "10m",
            expr: format!("absent({BUILD_INFO})"),
            summary: "no collector of boots is scraped at all",
            description: "Boots of GPU guests are not observed. Is there a scrape configuration \
                          for the port of `kata-gpu-boot collect --dir /var/lib/kata-gpu-boot \
                          --metrics 9464`? On a node, `kata-gpu-boot collect --check --dir \
                          /var/lib/kata-gpu-boot` says whether its collector receives.",
        },
        Alert {
            name: "KataGpuBootCannotWrite",
            severity: Critical,
            after: "5m",
            expr: format!(
                "increase({WRITE_ERRORS}[10m]) > 0\nor\nincrease({RECORDS_DROPPED}[10m]) > 0"
            ),
            summary: "the collector on {{ $labels.instance }} cannot write boots",
            description: "Records are dropped while this lasts, and asked for again afterwards: \
                          make room on the disk, or keep less (`kata-gpu-boot collect --dir \
                          /var/lib/kata-gpu-boot --keep-days 7 --keep-size 5G`). Its log names the \
                          file and the error.",
        },
        Alert {
            name: "KataGpuBootDiskOverLimit",
            severity: Warning,
            after: "30m",
            expr: format!("{KEPT_BYTES} > {KEEP_LIMIT_BYTES}"),
            summary: "boots on {{ $labels.instance }} take more than --keep-size",
            description: "{{ $value | humanize1024 }}B are there, and all that are left are in \
                          flight, or cannot be removed. `kata-gpu-boot list --dir \
                          /var/lib/kata-gpu-boot` names them; the collector's log says what it \
                          could not remove.",
        },
        Alert {
            name: "KataGpuBootRecordsLost",
            severity: Warning,
            after: "10m",
            expr: format!(
                "increase({RECORDS_LOST}[1h]) > 0\nor\nincrease({RECORDS_CAPPED}[1h]) > 0"
            ),
            summary: "records of boots on {{ $labels.instance }} are lost",
            description: "{{ $value | printf \"%.0f\" }} records within an hour never came, or \
                          were over a limit of their boot: `kata-gpu-boot show BOOT --dir \
                          /var/lib/kata-gpu-boot` says what a boot lacks, `kata-gpu-boot collect \
                          --dir /var/lib/kata-gpu-boot --limit records=400000` keeps more of each.",
        },
        Alert {
            name: "KataGpuBootNotCounted",
            severity: Warning,
            after: "10m",
            expr: format!(
                "sum by (job, instance) (increase({not_counted}[1h])) > 0\nor\nincrease({BOOTS_NOT_FOLLOWED}[1h]) > 0"
            ),
            summary: "boots on {{ $labels.instance }} are in no number",
            description: "{{ $value | printf \"%.0f\" }} boots within an hour had numbers that no \
                          machine has, could not be read, or were too many at once. The \
                          collector's log names those that could not be read; `kata-gpu-boot list \
                          --failed --dir /var/lib/kata-gpu-boot` has the others, whose guests are \
                          broken or hostile.",
        },
        Alert {
            name: "KataGpuBootGuestsRefused",
            severity: Warning,
            after: "10m",
            expr: format!("increase({CONNECTIONS_REFUSED}[1h]) > {REFUSED}"),
            summary: "guests on {{ $labels.instance }} connect more often than they may",
            description: "{{ $value | printf \"%.0f\" }} connections within an hour were refused. \
                          The collector's log names the guests and the limits; `kata-gpu-boot \
                          collect --dir /var/lib/kata-gpu-boot --limit connects=120` raises one. A \
                          guest that connects endlessly costs others nothing.",
        },
        Alert {
            name: "KataGpuBootPushFails",
            severity: Warning,
            after: "5m",
            expr: format!(
                "min_over_time({OTLP_QUEUE}[15m]) > 0\nand\nincrease({OTLP_PUSHED}[15m]) == 0"
            ),
            summary: "the collector on {{ $labels.instance }} pushes no boots",
            description: "{{ $value | printf \"%.0f\" }} boots wait for the receiver of --otlp, \
                          which took none for 15 minutes. `kata-gpu-boot export --dir \
                          /var/lib/kata-gpu-boot --otlp --push http://127.0.0.1:4318` tries it \
                          with the newest boot and prints its answer.",
        },
        Alert {
            name: "KataGpuBootPushDropped",
            severity: Warning,
            after: "1m",
            expr: format!("increase({OTLP_DROPPED}[1h]) > 0"),
            summary: "boots on {{ $labels.instance }} were not pushed and will not be",
            description: "{{ $value | printf \"%.0f\" }} boots within an hour were refused by the \
                          receiver of --otlp, or more waited than may. Their files stay: \
                          `kata-gpu-boot export BOOT --dir /var/lib/kata-gpu-boot --otlp --push \
                          http://127.0.0.1:4318` pushes one, and the collector's log names them.",
        },
    ]
}

/// The rules as a file for `rule_files`.
pub fn yaml() -> String {
    let mut text = String::from(
        "# Alerts about boots of GPU guests and their collectors: put this file under rule_files in\n\
         # prometheus.yml. Thresholds stand in the expressions, and are yours to change.\ngroups:\n",
    );
    for (name, alerts) in groups() {
        // Writing into a String cannot fail.
        let _never = write!(text, "  - name: {name}\n    rules:\n");
        for alert in alerts {
            let _never = write_rule(&mut text, &alert);
        }
    }
    text
}

fn write_rule(text: &mut String, alert: &Alert) -> std::fmt::Result {
    writeln!(text, "      - alert: {}", alert.name)?;
    writeln!(text, "        expr: |")?;
    for line in alert.expr.lines() {
        writeln!(text, "          {line}")?;
    }
    writeln!(text, "        for: {}", alert.after)?;
    writeln!(
        text,
        "        labels:\n          severity: {}",
        alert.severity.name()
    )?;
    // Strings of JSON are strings of YAML.
    let quoted = |plain: &str| serde_json::Value::from(plain).to_string();
    writeln!(
        text,
        "        annotations:\n          summary: {}",
        quoted(alert.summary)
    )?;
    writeln!(text, "          description: {}", quoted(alert.description))
}

/// The table for people.
pub fn markdown() -> String {
    let mut table = String::from("| alert | severity | after | message |\n|---|---|---|---|\n");
    for alert in groups().iter().flat_map(|(_, alerts)| alerts) {
        let _never = writeln!(
            table,
            "| `{}` | {} | {} | {} |",
            alert.name,
            alert.severity.name(),
            alert.after,
            alert
                .summary
                .replace("{{ $value | printf \"%.0f\" }}", "N")
                .replace("{{ $labels.instance }}", "NODE")
                .replace("{{ $labels.rule }}", "RULE")
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::tally::BOUNDS;
    use super::*;
    use crate::service::systemd_unit;
    use std::path::Path;

    #[test]
    fn thresholds_and_commands_are_those_of_this_program() {
        assert!(
            BOUNDS.contains(&SLOW_SECONDS),
            "the percentile has an error there"
        );
        let unit = systemd_unit(Path::new("/kata-gpu-boot")).unwrap();
        assert!(
            unit.contains("--dir /var/lib/kata-gpu-boot"),
            "descriptions name this directory"
        );
        for alert in groups().iter().flat_map(|(_, alerts)| alerts) {
            assert!(
                alert.description.contains("`kata-gpu-boot "),
                "{}: no cure",
                alert.name
            );
        }
        let text = yaml();
        for said in [
            format!("More than {} % of", FAILED_SHARE * 100.0),
            format!("{SLOWER_P90} times that"),
            format!("grown by {:.0} %", (SLOWER_MEAN - 1.0) * 100.0),
            format!("more than {} minutes until", SLOW_SECONDS / 60.0),
        ] {
            assert!(text.contains(&said), "no text says: {said}");
        }
    }
}
