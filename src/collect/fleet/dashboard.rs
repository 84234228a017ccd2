//! The dashboard for Grafana (`collect --print-dashboard`): rows of panels, laid out and written as
//! the JSON that Grafana imports. Queries name metrics by rows of the table alone.
//!
//! Boots are rare events: panels about boots count over a window of their own (variable `window`),
//! not over a few scrapes, and leave a gap where there was none.

use super::metrics_table::*;
use super::promql::{Series, failed_boots};
use super::tally::Outcome;
use serde_json::{Value, json};

/// Schema of Grafana 11.6; later versions migrate it.
const SCHEMA_VERSION: u32 = 41;
/// Columns of Grafana's grid.
const COLUMNS: u32 = 24;

/// Form of a panel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// The newest value.
    Stat,
    Lines,
    /// Stacked lines.
    Stacked,
    /// A bar for each series, over the dashboard's time.
    Bars,
    Heatmap,
}

struct Panel {
    form: Form,
    title: &'static str,
    description: &'static str,
    /// Unit, by Grafana's name.
    unit: &'static str,
    width: u32,
    /// Expression and legend.
    queries: Vec<(String, &'static str)>,
}

impl Panel {
    fn height(&self) -> u32 {
        if self.form == Form::Stat { 4 } else { 8 }
    }
}

/// Series of the chosen jobs and instances.
fn chosen(series: Series) -> Series {
    series
        .matching("job=~\"$job\"")
        .matching("instance=~\"$instance\"")
}

/// Increase of all series together, or by a label.
fn increase(by: &str, series: Series, window: &str) -> String {
    let by = if by.is_empty() {
        String::new()
    } else {
        format!(" by ({by})")
    };
    format!("sum{by} (increase({}[{window}]))", chosen(series))
}

/// Increases of metrics without labels, with the legend of each.
fn counted(rows: &[(&Metric, &'static str)]) -> Vec<(String, &'static str)> {
    rows.iter()
        .map(|(metric, legend)| (increase("", metric.series(), WINDOW), *legend))
        .collect()
}

fn percentile(p: f64, by: &str, buckets: Series, window: &str) -> String {
    let le = if by.is_empty() {
        "le".to_string()
    } else {
        format!("{by}, le")
    };
    format!(
        "histogram_quantile({p}, {})",
        increase(&le, buckets, window)
    )
}

fn percentiles(buckets: &Series) -> Vec<(String, &'static str)> {
    [(0.5, "p50"), (0.9, "p90"), (0.99, "p99")]
        .map(|(p, legend)| (percentile(p, "", buckets.clone(), WINDOW), legend))
        .into()
}

/// Mean of a histogram by its label; a gap where nothing was counted.
fn mean(by: &str, histogram: &Metric) -> String {
    let (sums, counts) = (
        increase(by, histogram.sums(), WINDOW),
        increase(by, histogram.counts(), WINDOW),
    );
    format!("{sums} / ({counts} > 0)")
}

/// Window of the dashboard, and Grafana's own.
const WINDOW: &str = "$window";
const RANGE: &str = "$__range";
const RATE: &str = "$__rate_interval";

fn rows() -> [(&'static str, Vec<Panel>); 4] {
    [
        ("Boots", boots()),
        ("Whose time", times()),
        ("What fails", failures()),
        ("Collectors", collectors()),
    ]
}

fn boots() -> Vec<Panel> {
    let all = || BOOTS.series();
    let settled = || BOOTS.series().of(Outcome::Settled.name());
    let of_milestone = MILESTONE_SECONDS.buckets().of("$milestone");
    let stat = |title, description, unit, query| Panel {
        form: Form::Stat,
        title,
        description,
        unit,
        width: 4,
        queries: vec![(query, "")],
    };
    vec![
        stat(
            "Boots",
            "Boots that were over in the time shown.",
            "short",
            increase("", all(), RANGE),
        ),
        stat(
            "Settled",
            "Of these, the share whose GPUs were all settled.",
            "percentunit",
            format!(
                "{} / ({} > 0)",
                increase("", settled(), RANGE),
                increase("", all(), RANGE)
            ),
        ),
        stat(
            "Boots failed",
            "Powered off, or gone before they were settled.",
            "short",
            increase("", failed_boots(), RANGE),
        ),
        stat(
            "GPUs failed",
            "GPUs that were not usable in boots that are over.",
            "short",
            increase("", GPUS.series().of(FAILED), RANGE),
        ),
        stat(
            "90 % are there after",
            "90th percentile of the chosen milestone in the time shown, from the kernel's start.",
            "s",
            percentile(0.9, "", of_milestone.clone(), RANGE),
        ),
        stat(
            "In flight",
            "Boots that are neither settled nor over, now.",
            "short",
            format!("sum ({})", chosen(BOOTS_IN_FLIGHT.series())),
        ),
        Panel {
            form: Form::Lines,
            title: "Time to $milestone",
            description: "Percentiles of boots in the window before each point, from the kernel's start. They are \
                          interpolated within bounds of a histogram: compare `kata-gpu-boot stats` on a node.",
            unit: "s",
            width: 12,
            queries: percentiles(&of_milestone),
        },
        Panel {
            form: Form::Heatmap,
            title: "Boots by time to $milestone",
            description: "How many boots took how long.",
            unit: "s",
            width: 12,
            queries: vec![(increase("le", of_milestone, RATE), "{{le}}")],
        },
        Panel {
            form: Form::Stacked,
            title: "Boots by how they ended",
            description: "Boots that were over in the window before each point.",
            unit: "short",
            width: 12,
            queries: vec![(increase("outcome", all(), WINDOW), "{{outcome}}")],
        },
        Panel {
            form: Form::Lines,
            title: "Boots in flight",
            description: "With a connection, and those that lost it lately; beside them how many began in the window.",
            unit: "short",
            width: 12,
            queries: vec![
                (
                    format!("sum by (state) ({})", chosen(BOOTS_IN_FLIGHT.series())),
                    "{{state}}",
                ),
                (increase("", BOOTS_BEGUN.series(), WINDOW), "begun"),
            ],
        },
    ]
}

fn times() -> Vec<Panel> {
    let bars = |title, description, queries| Panel {
        form: Form::Bars,
        title,
        description,
        unit: "s",
        width: 12,
        queries,
    };
    let of_steps = percentile(0.9, "step", STEP_SECONDS.buckets(), RANGE);
    vec![
        Panel {
            form: Form::Stacked,
            title: "Mean time of a boot in each phase",
            description: "At least one step of the phase was running. Phases overlap: their sum is more than a boot takes.",
            unit: "s",
            width: 12,
            queries: vec![(mean("phase", &PHASE_SECONDS), "{{phase}}")],
        },
        Panel {
            form: Form::Lines,
            title: "90th percentile of each phase",
            description: "Boots in the window before each point.",
            unit: "s",
            width: 12,
            queries: vec![(
                percentile(0.9, "phase", PHASE_SECONDS.buckets(), WINDOW),
                "{{phase}}",
            )],
        },
        bars(
            "Time of all boots by step",
            "The steps with the most time together. Of 8 GPUs at once each counts.",
            vec![(
                format!(
                    "topk(12, {} > 0)",
                    increase("step", STEP_SECONDS.sums(), RANGE)
                ),
                "{{step}}",
            )],
        ),
        bars(
            "90th percentile of a single step",
            "The slowest steps, wherever they are in a boot.",
            vec![(format!("topk(12, {of_steps} > 0)"), "{{step}}")],
        ),
        bars(
            "What hosts cost a boot",
            "Findings of `kata-gpu-boot doctor --daemonset-check`, the worst node of each. Several can be about the same seconds.",
            vec![(
                format!(
                    "topk(12, max by (rule) ({}))",
                    chosen(DOCTOR_FINDING_SECONDS.series())
                ),
                "{{rule}}",
            )],
        ),
    ]
}

fn failures() -> Vec<Panel> {
    let gpus_by_node = increase("instance", GPUS.series().of(FAILED), RANGE);
    let boots_by_node = increase("instance", failed_boots(), RANGE);
    vec![
        Panel {
            form: Form::Stacked,
            title: "Failures by reason",
            description: "What failed in boots that were over in the window: GPUs by reason, containers, boots that powered \
                          off or were not settled.",
            unit: "short",
            width: 12,
            queries: vec![(
                format!("{} > 0", increase("reason", FAILURES.series(), WINDOW)),
                "{{reason}}",
            )],
        },
        Panel {
            form: Form::Bars,
            title: "Reasons in the time shown",
            description: "The most frequent ones. `kata-gpu-boot show BOOT` has the driver's log lines of one boot.",
            unit: "short",
            width: 12,
            queries: vec![(
                format!(
                    "topk(12, {} > 0)",
                    increase("reason", FAILURES.series(), RANGE)
                ),
                "{{reason}}",
            )],
        },
        Panel {
            form: Form::Stacked,
            title: "GPUs by outcome",
            description: "GPUs of boots that were over in the window.",
            unit: "short",
            width: 8,
            queries: vec![(increase("result", GPUS.series(), WINDOW), "{{result}}")],
        },
        Panel {
            form: Form::Bars,
            title: "Nodes with failed GPUs",
            description: "Those with the most. `kata-gpu-boot list --failed` on a node names the boots.",
            unit: "short",
            width: 8,
            queries: vec![(format!("topk(10, {gpus_by_node} > 0)"), "{{instance}}")],
        },
        Panel {
            form: Form::Bars,
            title: "Nodes with failed boots",
            description: "Those with the most boots that powered off or were not settled.",
            unit: "short",
            width: 8,
            queries: vec![(format!("topk(10, {boots_by_node} > 0)"), "{{instance}}")],
        },
    ]
}

fn collectors() -> Vec<Panel> {
    let panel = |title, description, unit, queries| Panel {
        form: Form::Lines,
        title,
        description,
        unit,
        width: 8,
        queries,
    };
    let rate = |metric: &Metric| format!("sum (rate({}[{RATE}]))", chosen(metric.series()));
    let sum = |metric: &Metric| format!("sum ({})", chosen(metric.series()));
    vec![
        panel(
            "Collectors",
            "Those that were scraped, by version.",
            "short",
            vec![(
                format!("count by (version) ({})", chosen(BUILD_INFO.series())),
                "{{version}}",
            )],
        ),
        panel(
            "Lost",
            "Records, lines, files and boots in the window that are in no file or no number. All of these are 0 as a rule.",
            "short",
            counted(&[
                (&RECORDS_LOST, "records that never came"),
                (&RECORDS_CAPPED, "records over a limit"),
                (&RECORDS_DROPPED, "records dropped, asked for again"),
                (&GARBAGE_LINES, "lines of no format"),
                (&FILES_LOST, "removed files"),
                (&BOOTS_NOT_FOLLOWED, "boots too many to follow"),
            ]),
        ),
        panel(
            "Disk",
            "Bytes of boots on all nodes, and what --keep-size allows them together.",
            "bytes",
            vec![
                (sum(&KEPT_BYTES), "kept"),
                (sum(&KEEP_LIMIT_BYTES), "limit"),
            ],
        ),
        panel(
            "Files",
            "In the window: writes that failed, files that were too old or too much.",
            "short",
            counted(&[
                (&WRITE_ERRORS, "could not be written"),
                (&FILES_REMOVED, "removed by retention"),
            ]),
        ),
        panel(
            "Connections",
            "Guests that are connected, and in the window: accepted, over a limit, of no guest.",
            "short",
            [
                vec![(sum(&CONNECTIONS_OPEN), "open")],
                counted(&[
                    (&CONNECTIONS, "taken"),
                    (&CONNECTIONS_REFUSED, "refused"),
                    (&CONNECTIONS_OF_STRANGERS, "strangers"),
                ]),
            ]
            .concat(),
        ),
        panel(
            "Records",
            "A second: new ones, and those that came again after a reconnect.",
            "short",
            vec![(rate(&RECORDS), "new"), (rate(&RECORDS_DUPLICATE), "again")],
        ),
        panel(
            "Received",
            "From all guests.",
            "Bps",
            vec![(rate(&RECEIVED_BYTES), "bytes")],
        ),
        panel(
            "Push queue",
            "Boots that wait for the receiver of --otlp, and how many may.",
            "short",
            vec![
                (sum(&OTLP_QUEUE), "waiting"),
                (sum(&OTLP_QUEUE_CAPACITY), "capacity"),
            ],
        ),
        panel(
            "Pushes",
            "In the window: boots that the receiver took, tries that failed, boots that are given up, spans.",
            "short",
            counted(&[
                (&OTLP_PUSHED, "boots pushed"),
                (&OTLP_FAILURES, "tries failed"),
                (&OTLP_DROPPED, "boots dropped"),
                (&OTLP_PUSHED_SPANS, "spans pushed"),
                (&OTLP_REJECTED_SPANS, "spans rejected"),
            ]),
        ),
        panel(
            "Scrapes",
            "Answers in the window, and connections that gave way, broke or were too slow.",
            "short",
            counted(&[
                (&SCRAPES, "answered"),
                (&SCRAPES_REFUSED, "gave way"),
                (&SCRAPES_FAILED, "failed"),
            ]),
        ),
    ]
}

fn source() -> Value {
    json!({"type": "prometheus", "uid": "${datasource}"})
}

/// A variable that lists the values of a metric's label.
fn variable(name: &str, label: &str, metric: impl std::fmt::Display, many: bool) -> Value {
    let query = format!("label_values({metric}, {name})");
    let mut variable = json!({
        "type": "query", "name": name, "label": label, "datasource": source(),
        "query": {"qryType": 1, "query": query, "refId": name},
        "refresh": 2, "sort": 1, "multi": many, "includeAll": many,
    });
    if many {
        variable["allValue"] = ".+".into();
        variable["current"] = json!({"selected": true, "text": ["All"], "value": ["$__all"]});
    } else {
        variable["current"] = json!({"selected": true, "text": "settled", "value": "settled"});
    }
    variable
}

fn variables() -> Value {
    let window = |text: &str| json!({"text": text, "value": text, "selected": text == "1h"});
    let windows = ["15m", "1h", "6h", "1d"].map(window);
    json!([
        {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"},
        variable("job", "Job", &BUILD_INFO, true),
        variable("instance", "Instance", BUILD_INFO.series().matching("job=~\"$job\""), true),
        variable("milestone", "Milestone", MILESTONE_SECONDS.counts(), false),
        {
            "type": "interval", "name": "window", "label": "Window", "query": "15m,1h,6h,1d",
            "current": window("1h"), "options": windows,
        },
    ])
}

/// Fields of a panel, and its options, by its form.
fn look(panel: &Panel) -> (&'static str, Value, Value) {
    let reduce = json!({"calcs": ["lastNotNull"], "fields": "", "values": false});
    let plain = json!({"unit": panel.unit, "min": 0});
    match panel.form {
        Form::Stat => (
            "stat",
            plain,
            json!({"reduceOptions": reduce, "colorMode": "none", "graphMode": "none", "textMode": "value"}),
        ),
        Form::Bars => (
            "bargauge",
            plain,
            json!({"reduceOptions": reduce, "orientation": "horizontal", "displayMode": "basic", "valueMode": "color"}),
        ),
        Form::Heatmap => (
            "heatmap",
            json!({}),
            json!({"calculate": false, "yAxis": {"unit": panel.unit}, "cellGap": 1, "legend": {"show": true}}),
        ),
        Form::Lines | Form::Stacked => {
            let stacked = panel.form == Form::Stacked;
            let stacking = if stacked { "normal" } else { "none" };
            let fill = if stacked { 40 } else { 0 };
            (
                "timeseries",
                json!({
                    "unit": panel.unit, "min": 0,
                    "custom": {"fillOpacity": fill, "lineWidth": 1, "stacking": {"mode": stacking, "group": "A"}},
                }),
                json!({
                    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": true, "calcs": []},
                    "tooltip": {"mode": "multi", "sort": "desc"},
                }),
            )
        }
    }
}

/// A panel's JSON, at a place of the grid.
fn panel_json(panel: &Panel, id: u32, x: u32, y: u32) -> Value {
    let instant = matches!(panel.form, Form::Stat | Form::Bars);
    let format = if panel.form == Form::Heatmap {
        "heatmap"
    } else {
        "time_series"
    };
    let names = ["A", "B", "C", "D", "E", "F"];
    let targets: Vec<Value> = names
        .iter()
        .zip(&panel.queries)
        .map(|(name, (expr, legend))| {
            json!({
                "refId": name, "datasource": source(), "expr": expr, "legendFormat": legend,
                "format": format, "instant": instant, "range": !instant,
            })
        })
        .collect();
    let (kind, defaults, options) = look(panel);
    json!({
        "id": id, "type": kind, "title": panel.title, "description": panel.description,
        "datasource": source(), "gridPos": {"h": panel.height(), "w": panel.width, "x": x, "y": y},
        "targets": targets, "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options,
    })
}

/// Panels from left to right under the headings of their rows; a line is as high as its highest
/// panel.
fn panels() -> Vec<Value> {
    let (mut done, mut y) = (Vec::new(), 0);
    for (title, row) in rows() {
        let id = done.len() as u32 + 1;
        let place = json!({"h": 1, "w": COLUMNS, "x": 0, "y": y});
        done.push(json!({"id": id, "type": "row", "title": title, "collapsed": false, "gridPos": place, "panels": []}));
        y += 1;
        let (mut x, mut height) = (0, 0);
        for panel in &row {
            if x + panel.width > COLUMNS {
                (x, y, height) = (0, y + height, 0);
            }
            done.push(panel_json(panel, done.len() as u32 + 1, x, y));
            x += panel.width;
            height = height.max(panel.height());
        }
        y += height;
    }
    done
}

/// The dashboard.
pub fn dashboard() -> Value {
    json!({
        "title": "Boots of GPU guests",
        "description": "How long guests of Kata with NVIDIA GPUs take to boot, what fails, and whether kata-gpu-boot sees it all.",
        "tags": ["kata", "gpu"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": true,
        "graphTooltip": 1,
        "refresh": "1m",
        "time": {"from": "now-24h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": panels(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_on_the_dashboard() {
        let text = dashboard().to_string();
        for metric in TABLE {
            let name = metric.to_string();
            let suffixes = if metric.kind == Kind::Histogram {
                &["_bucket{", "_sum{", "_count{"][..]
            } else {
                &["{", "[", ","]
            };
            assert!(
                suffixes
                    .iter()
                    .any(|suffix| text.contains(&format!("{name}{suffix}"))),
                "{name}"
            );
        }
        assert!(!text.contains("kata_gpu_boot_nothing_of_that_name{"));
    }

    #[test]
    fn panels_lie_beside_each_other_and_have_their_own_ids() {
        let panels = panels();
        let place = |panel: &Value, of: &str| panel["gridPos"][of].as_u64().unwrap();
        let mut taken = std::collections::BTreeSet::new();
        for (n, panel) in panels.iter().enumerate() {
            assert_eq!(panel["id"].as_u64(), Some(n as u64 + 1));
            assert!(
                place(panel, "x") + place(panel, "w") <= u64::from(COLUMNS),
                "{panel}"
            );
            for y in place(panel, "y")..place(panel, "y") + place(panel, "h") {
                for x in place(panel, "x")..place(panel, "x") + place(panel, "w") {
                    assert!(taken.insert((x, y)), "two panels at {x}, {y}: {panel}");
                }
            }
        }
    }

    #[test]
    fn no_panel_has_more_queries_than_letters() {
        let most = rows()
            .iter()
            .flat_map(|(_, row)| row)
            .map(|panel| panel.queries.len())
            .max();
        assert_eq!(most, Some(6));
    }
}
