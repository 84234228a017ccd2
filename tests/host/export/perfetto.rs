//! A failure means that Perfetto's own protos do not find each step of a boot in `show --perfetto`,
//! or find it in another place or at another time.

use crate::TempDir;
use crate::export::{DEADLINE_S, Package, RECORDED, SIXTEEN, bars, export, fixture, within};
use kata_gpu_boot::show::export::Format;
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::views::waterfall::Bar;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The release that was tried.
const PERFETTO: Package = Package {
    name: "perfetto==0.59.1",
    module: "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
};
/// Reads a trace with the official messages and writes what is in it as JSON: tracks, slices by
/// track (matched as a stack), clocks.
const READER: &str = include_str!("perfetto.py");

fn read(python: &Path, trace: &[u8]) -> Result<Value, String> {
    let dir = TempDir::new(&format!("perfetto-{}", trace.len()));
    let path = dir.0.join("boot.pftrace");
    crate::write(&path, trace);
    let output = within(DEADLINE_S, python)
        .args(["-c", READER])
        .arg(&path)
        .output()
        .unwrap();
    if output.status.success() {
        Ok(serde_json::from_slice(&output.stdout).unwrap())
    } else {
        Err(crate::stderr(&output))
    }
}

/// (step with what makes it unique, begin, end) of the same boot.
fn steps(stream: &str) -> BTreeSet<(String, i64, Option<i64>)> {
    let row = |bar: Bar| {
        let module = bar.fields.iter().find(|(key, _)| key == "module");
        let name = module.map_or(bar.name.clone(), |(_, module)| {
            format!("{} {module}", bar.name)
        });
        (name, bar.begin_ns, bar.end_ns)
    };
    bars(stream, None).into_iter().map(row).collect()
}

#[test]
fn perfettos_own_protos_read_every_step_where_it_belongs() {
    let Some(python) = PERFETTO.python() else {
        return;
    };
    for (stream, gpus, open) in [
        (fixture(&format!("{RECORDED}.ndjson")), 8, 0),
        (fixture(SIXTEEN), 16, 1),
    ] {
        let trace = read(&python, &export(&stream, None, Format::Perfetto)).unwrap();
        assert_eq!(trace["unknown_fields"], 0);
        assert_eq!(
            trace["unmatched"],
            serde_json::json!([]),
            "an end without a beginning"
        );
        // One snapshot per sample at least, of both clocks, with the wall clock as the trace's own.
        let snapshots = trace["snapshots"].as_array().unwrap();
        assert!(
            !snapshots.is_empty()
                && snapshots
                    .iter()
                    .all(|s| s["primary"] == 1 && s["6"].is_u64() && s["1"].is_u64()),
            "{snapshots:?}"
        );
        let offset = |s: &Value| s["1"].as_u64().unwrap() - s["6"].as_u64().unwrap();
        assert!(
            snapshots
                .iter()
                .all(|s| offset(s).abs_diff(offset(&snapshots[0])) < 100_000_000),
            "{snapshots:?}"
        );

        let tracks: BTreeMap<u64, &Value> = trace["tracks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| (t["uuid"].as_u64().unwrap(), t))
            .collect();
        assert_eq!(
            tracks.len(),
            trace["tracks"].as_array().unwrap().len(),
            "a track id twice"
        );
        let roots: Vec<&&Value> = tracks.values().filter(|t| t["parent"].is_null()).collect();
        assert_eq!(roots.len(), 1, "{roots:?}");
        let named = |name: &str| tracks.values().filter(|t| t["name"] == name).count();
        for name in [
            "kernel",
            "driver",
            "init",
            "critical path",
            "GPUs usable",
            "GPUs published",
        ]
        .map(str::to_string)
        .into_iter()
        .chain((0..gpus).map(|i| format!("GPU {i}")))
        {
            assert!(named(&name) > 0, "no track {name}");
        }
        let slices = trace["slices"].as_array().unwrap();
        let on = |slice: &Value| {
            tracks[&slice["track"].as_u64().unwrap()]["name"]
                .as_str()
                .unwrap()
                .to_string()
        };
        let sample = BootFile::read(stream.as_bytes())
            .unwrap()
            .clock_samples()
            .min_by_key(|sample| sample.error_ns)
            .unwrap();
        let at = |wall: &Value| wall.as_i64().map(|ns| ns - sample.offset_ns);
        let read_back: BTreeSet<(String, i64, Option<i64>)> = slices
            .iter()
            .filter(|slice| on(slice) != "critical path")
            .map(|s| {
                (
                    s["name"].as_str().unwrap().to_string(),
                    at(&s["begin"]).unwrap(),
                    at(&s["end"]),
                )
            })
            .collect();
        assert_eq!(read_back, steps(&stream));
        // Sixteen GPUs: VMM and firmware have their time before the guest's clock began.
        let before = read_back
            .iter()
            .filter(|(name, begin, _)| name == "vmm+firmware" && *begin < 0)
            .count();
        assert_eq!(before, usize::from(gpus == 16), "{read_back:?}");
        for slice in slices
            .iter()
            .filter(|slice| slice["annotations"]["gpu_index"].is_u64())
        {
            assert_eq!(
                on(slice),
                format!("GPU {}", slice["annotations"]["gpu_index"]),
                "{slice}"
            );
        }
        assert_eq!(
            slices
                .iter()
                .filter(|s| s["end"].is_null() && on(s) != "critical path")
                .count(),
            open
        );
        assert!(slices.iter().any(|slice| on(slice) == "critical path"));
        // Every flow goes from one slice to another.
        let ids = |key: &str| {
            slices
                .iter()
                .flat_map(|s| {
                    s[key]
                        .as_array()
                        .unwrap()
                        .iter()
                        .map(|id| id.as_u64().unwrap())
                })
                .collect::<BTreeSet<_>>()
        };
        assert!(
            ids("flows").len() > 10 && ids("flows") == ids("terminating"),
            "{:?} {:?}",
            ids("flows"),
            ids("terminating")
        );
        let usable =
            |counter: &&Value| tracks[&counter["track"].as_u64().unwrap()]["name"] == "GPUs usable";
        let last = trace["counters"]
            .as_array()
            .unwrap()
            .iter()
            .rfind(usable)
            .unwrap();
        assert_eq!(last["value"], if gpus == 16 { 14 } else { 8 });
        assert_eq!(
            trace["instants"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|i| i["name"] == "gpu.failed")
                .count(),
            usize::from(gpus == 16)
        );
    }
}

#[test]
fn perfettos_own_protos_refuse_half_a_trace() {
    let Some(python) = PERFETTO.python() else {
        return;
    };
    let trace = export(
        &fixture(&format!("{RECORDED}.ndjson")),
        None,
        Format::Perfetto,
    );
    let error = read(&python, &trace[..trace.len() - 3]).unwrap_err();
    assert!(error.contains("DecodeError"), "{error}");
}
