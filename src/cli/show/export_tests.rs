//! A failure means that a format of `show` loses, moves or misnames a step, differs from its golden
//! file, or lets a hostile boot's text be more than text.

use super::export::{Format, save, write};
use kata_gpu_report::analysis::loaded::{Loaded, load};
use kata_gpu_report::boot::intervals::ns;
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::data::boot_dir::read_boot;
use kata_gpu_report::data::boot_file::{BootFile, HostEvent, HostLine};
use kata_gpu_report::data::clock_offset::Sample;
use kata_gpu_report::otlp::Resource;
use kata_gpu_report::views::waterfall::Waterfall;
use kata_gpu_test_support::{golden, tests_dir};
use kata_gpu_wire::catalogue::Owner;
use kata_gpu_wire::catalogue::derived;
use serde_json::Value;
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

const BOOT: &str = "hand-made-3-gpus-one-fails";
const RECORDED: &str = "recorded-8-gpus-fast-host";
const FORMATS: [Format; 3] = [Format::Html, Format::Perfetto, Format::Otlp];

fn path(boot: &str) -> PathBuf {
    tests_dir(&format!("fixtures/boots/{boot}.ndjson"))
}

fn file_of(boot: &str) -> BootFile {
    read_boot(&path(boot)).unwrap()
}

fn fixture(boot: &str) -> Waterfall {
    let Loaded { file, boot } = load(&path(boot), None).unwrap();
    Waterfall::new(&file, boot)
}

fn of_file(file: &BootFile) -> Waterfall {
    Waterfall::new(file, Boot::new(file, &[]))
}

fn text(format: Format, boot: &Waterfall) -> String {
    let resource = Resource::from([
        ("host.name".to_string(), "node-1".to_string()),
        ("k8s.pod.name".to_string(), "trainer-0".to_string()),
    ]);
    String::from_utf8(bytes(format, boot, &resource).unwrap()).unwrap()
}

fn bytes(format: Format, boot: &Waterfall, resource: &Resource) -> anyhow::Result<Vec<u8>> {
    let mut out = Vec::new();
    write(format, boot, resource, &mut out)?;
    Ok(out)
}

fn json(format: Format, boot: &Waterfall) -> Value {
    serde_json::from_str(&text(format, boot)).unwrap()
}

#[test]
fn a_request_of_otlp_is_the_golden_one() {
    let boot = fixture(BOOT);
    // A line per span, so that a person can read the difference.
    let text = text(Format::Otlp, &boot).replace(
        r#"{"attributes":[{"key":"boot.owner""#,
        "\n{\"attributes\":[{\"key\":\"boot.owner\"",
    );
    golden(
        &format!("{BOOT}.export.otlp"),
        &text.replace(env!("CARGO_PKG_VERSION"), "VERSION"),
    );
}

#[test]
fn a_step_is_in_every_format_with_its_times() {
    let timeline = fixture(RECORDED);
    let ended: Vec<(String, i64, i64)> = timeline
        .steps
        .iter()
        .filter_map(|step| Some((step.label(), step.begin_ns, step.end_ns?)))
        .collect();
    assert!(ended.len() > 40, "{}", ended.len());
    let page = text(Format::Html, &timeline);
    for (name, begin, end) in &ended {
        assert!(
            page.contains(&format!("\"begin\":{begin},"))
                && page.contains(&format!("\"end\":{end},")),
            "{name}"
        );
    }
    let otlp = json(Format::Otlp, &timeline);
    assert_eq!(
        otlp["resourceSpans"][0]["scopeSpans"][0]["spans"]
            .as_array()
            .unwrap()
            .len(),
        1 + timeline.steps.len()
    );
}

#[test]
fn no_two_steps_of_a_row_overlap() {
    for boot in [BOOT, RECORDED] {
        let mut busy: BTreeMap<(usize, usize), i64> = BTreeMap::new();
        for step in fixture(boot).steps {
            let until = busy.entry((step.lane, step.row)).or_insert(i64::MIN);
            assert!(step.begin_ns >= *until, "{step:?} begins before {until}");
            *until = step.end_ns.unwrap_or(i64::MAX);
        }
    }
}

#[test]
fn otlp_ids_are_unique_and_stable_and_every_link_has_its_span() {
    let boot = fixture(RECORDED);
    let request = json(Format::Otlp, &boot);
    assert_eq!(request, json(Format::Otlp, &boot));
    let spans = request["resourceSpans"][0]["scopeSpans"][0]["spans"]
        .as_array()
        .unwrap();
    let id = |value: &Value| value.as_str().unwrap().to_string();
    let ids: HashSet<String> = spans.iter().map(|span| id(&span["spanId"])).collect();
    assert_eq!(ids.len(), spans.len(), "an id twice");
    let trace = boot.boot_id().replace('-', "");
    let mut links = 0;
    for span in spans {
        assert_eq!(id(&span["traceId"]), trace);
        assert!(
            span["parentSpanId"].is_null() == (span["name"] == "gpu guest boot"),
            "{span}"
        );
        assert!(
            span["parentSpanId"].is_null() || ids.contains(&id(&span["parentSpanId"])),
            "{span}"
        );
        for link in span["links"].as_array().into_iter().flatten() {
            assert!(ids.contains(&id(&link["spanId"])), "{link}");
            links += 1;
        }
        let time = |key: &str| id(&span[key]).parse::<u64>().unwrap();
        assert!(
            time("startTimeUnixNano") <= time("endTimeUnixNano"),
            "{span}"
        );
    }
    assert!(links > 20, "{links}");
    let gpus = spans
        .iter()
        .filter(|span| span["attributes"].to_string().contains("gpu.address"))
        .count();
    assert!(gpus >= 8, "{gpus}");
}

#[test]
fn otlp_names_a_missing_clock_and_a_clock_of_the_guest_alone() {
    let mut file = file_of(BOOT);
    file.host.clear();
    assert!(
        text(Format::Otlp, &of_file(&file))
            .contains(r#"{"key":"boot.clock","value":{"stringValue":"guest"}}"#)
    );
    file.records.retain(|record| record.name != "clock");
    let error = bytes(Format::Otlp, &of_file(&file), &Resource::new());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("no clock sample"), "{error}");
    assert!(text(Format::Html, &of_file(&file)).contains("wall clock not known"));
}

#[test]
fn a_step_that_never_ended_is_open_in_every_format() {
    let mut file = file_of(BOOT);
    // The third GPU's initialisation never comes to its end.
    file.records
        .retain(|record| record.boottime_ns < 11_000_000_000);
    let timeline = of_file(&file);
    let open: Vec<_> = timeline
        .steps
        .iter()
        .filter(|step| step.end_ns.is_none())
        .collect();
    let [step] = open.as_slice() else {
        panic!("{open:?}")
    };
    assert_eq!(
        (step.name.as_str(), step.gpu.unwrap().index, step.critical),
        ("gpu.init", Some(2), true)
    );
    let page = text(Format::Html, &of_file(&file));
    for said in [
        "2 of 3 GPUs usable",
        "GPU 2 (0001:00:02.0) is still in gpu.init since 7.223 s, for 2.499 s",
        "<b>next: see the driver",
    ] {
        assert!(page.contains(said), "no {said}: {page}");
    }
    assert_eq!(
        text(Format::Otlp, &of_file(&file))
            .matches(r#"{"key":"boot.open","value":{"boolValue":true}}"#)
            .count(),
        2,
        "it, and the boot"
    );
}

#[test]
fn the_page_has_a_failed_gpus_reason_and_the_drivers_line() {
    let boot = fixture(BOOT);
    let page = text(Format::Html, &boot);
    for said in [
        "2 of 3 GPUs usable after 11.520 s",
        "RmInitAdapter failed! (0x62:0x65:1971)",
        "\u{b1}0.2 ms",
    ] {
        assert!(page.contains(said), "no {said}");
    }
}

#[test]
fn every_cut_of_a_boot_can_be_written() {
    let whole = std::fs::read(tests_dir(&format!("fixtures/boots/{BOOT}.ndjson"))).unwrap();
    for end in (0..whole.len()).step_by(397) {
        let file = BootFile::read(&whole[..end]).unwrap();
        for format in FORMATS {
            let done = bytes(format, &of_file(&file), &Resource::new());
            assert!(
                done.is_ok() || format == Format::Otlp,
                "{format:?} {end}: {done:?}"
            );
        }
    }
}

/// Texts that try to be more than text, times that no clock has, edges in circles, steps without
/// end or beginning, hundreds of GPUs.
fn hostile(records: u64) -> Vec<u8> {
    let evil = r#"</script><script>pwn()</script><img src=x onerror=pwn()><!--\u2028\u202e\u001b[2J]]>\"'=cmd|' /C calc'!A0"#;
    let mut out = format!(
        "{{\"schema\":1,\"stream\":{{\"boot_id\":\"0f7a1f8e-0000-4000-8000-00000000beef\",\"version\":\"{evil}\",\"kernel\":\"{evil}\",\"first_seq\":0}}}}\n"
    );
    for seq in 0..records {
        let time = [seq * 1_000_000, u64::MAX, 0, u64::MAX - seq, 1][(seq % 5) as usize];
        let gpu = format!("{:04x}:00:{:02x}.0", seq % 17, seq % 32);
        let kind = ["begin", "end", "event", "begin", "kmsg"][(seq / 5 % 5) as usize];
        let span = if matches!(kind, "begin" | "end") {
            format!(
                r#","span":{}"#,
                [seq, seq / 2, u64::MAX][(seq % 3) as usize]
            )
        } else {
            String::new()
        };
        let name = [
            "gpu.found",
            "gpu.init",
            "=1+1",
            "gpu.failed",
            "</script>",
            "settled",
            "init.start",
        ][(seq % 7) as usize];
        out.push_str(&format!(
            r#"{{"schema":1,"seq":{seq},"boottime_ns":{time},"kind":"{kind}","name":"{name}"{span},"gpu":"{gpu}","parent":{},"after":[{},{}],"level":"error","error":"{evil}","fields":{{"{evil}":"{evil}","index":{},"text":"{evil}","reason":"{evil}","cure":"{evil}","step":"{evil}"}}}}"#,
            seq / 3,
            seq + 1,
            seq / 2,
            u64::MAX - seq % 40,
        ));
        out.push('\n');
    }
    out.push_str("{\"schema\":1,\"kind\":\"host\",\"realtime_ns\":-5,\"event\":\"connected\",\"peer\":\"</script>\",\"first_seq\":0}\n");
    for offset in [i64::MIN, i64::MAX, 0] {
        out.push_str(&format!(
            "{{\"schema\":1,\"kind\":\"host\",\"realtime_ns\":1,\"event\":\"clock\",\"boottime_ns\":{},\"offset_ns\":{offset},\"error_ns\":0}}\n",
            u64::MAX
        ));
    }
    out.into_bytes()
}

#[test]
fn a_hostile_boot_is_written_in_every_format_and_stays_text() {
    let file = BootFile::read(hostile(500).as_slice()).unwrap();
    assert_eq!(
        (file.records.len(), file.damaged),
        (500, 0),
        "{:?}",
        file.damage
    );
    for format in FORMATS {
        let out = bytes(format, &of_file(&file), &Resource::new()).unwrap();
        assert!(
            format == Format::Perfetto || !out.contains(&0x1b),
            "{format:?}"
        );
    }
    let page = text(Format::Html, &of_file(&file));
    let scripts: Vec<&str> = page
        .split("<script")
        .skip(1)
        .map(|rest| rest.split('>').next().unwrap_or(""))
        .collect();
    assert_eq!(
        scripts,
        [r#" type="application/json" id="boot""#, ""],
        "scripts that are not the page's own"
    );
    assert_eq!(page.matches("</script>").count(), 2);
    assert!(!page.contains("<img"));
}

#[test]
fn omissions_of_a_page_are_named() {
    let step = |n: u64| format!(r#"{n},"kind":"begin","name":"x","span":{n}"#);
    let event = |n: u64| format!(r#"{n},"kind":"event","name":"x""#);
    let file = boot_of((0..5_000).map(step).chain((0..20_100).map(event)));
    assert!(
        text(Format::Html, &of_file(&file)).contains("100 steps and events are not on this page")
    );
}

/// A boot of these records, `"boottime_ns"` and what follows.
fn boot_of(records: impl IntoIterator<Item = String>) -> BootFile {
    let lines: String = records
        .into_iter()
        .enumerate()
        .map(|(seq, record)| format!("{{\"schema\":1,\"seq\":{seq},\"boottime_ns\":{record}}}\n"))
        .collect();
    let file = BootFile::read(lines.as_bytes()).unwrap();
    assert_eq!(file.damaged, 0, "{:?}", file.damage);
    file
}

#[test]
fn many_named_gpus_are_not_each_searched_in_each_line() {
    let gpus = || (0..100).map(|n| format!("{n:04x}:00:00.0"));
    let said = gpus()
        .map(|gpu| format!(r#"5,"kind":"kmsg","name":"kmsg","level":"error","fields":{{"text":"NVRM: GPU {gpu}: fallen off the bus"}}"#));
    let failed = gpus()
        .map(|gpu| format!(r#"9,"kind":"event","name":"gpu.failed","gpu":"{gpu}","error":"gone""#));
    let timeline = of_file(&boot_of(said.chain(failed)));
    assert_eq!(
        (timeline.boot.gpus.len(), timeline.words.len()),
        (100, kata_gpu_report::views::lanes::MAX_GPU_LANES)
    );
}

#[test]
fn vmm_and_firmware_are_a_step_in_every_format() {
    let mut file = boot_of([
        r#"2000,"kind":"event","name":"init.start""#.to_string(),
        r#"3000,"kind":"event","name":"clock.tsc","fields":{"before_kernel_ns":960000000,"error_ns":40000}"#.to_string(),
        r#"9000,"kind":"event","name":"settled""#.to_string(),
    ]);
    let sample = Sample {
        boottime_ns: 9_000,
        offset_ns: 1_700_000_000_000_000_000,
        error_ns: 1_000,
    };
    file.host.push(HostLine::now(HostEvent::Clock(sample)));
    let timeline = of_file(&file);
    let [vmm, ..] = timeline.steps.as_slice() else {
        panic!("no step")
    };
    assert_eq!(
        (vmm.name.as_str(), vmm.owner, vmm.begin_ns, vmm.end_ns),
        (derived::VMM_FIRMWARE, Owner::Vmm, -960_000_000, Some(0))
    );
    assert_eq!(
        (timeline.begin_ns, timeline.path[0].begin_ns),
        (-960_000_000, -960_000_000)
    );
    assert_eq!(
        timeline.wall_at(vmm.begin_ns).unwrap().realtime_ns,
        1_699_999_999_040_000_000
    );
    assert_eq!(
        timeline.wall_at(vmm.begin_ns).unwrap().error_ns,
        41_000 + timeline.wall_at(0).unwrap().error_ns - 1_000
    );
    let html = text(Format::Html, &of_file(&file));
    assert!(
        html.contains("<dt>VMM and firmware</dt>\n<dd>0.960 <small>s</small>")
            && html.contains(r#""begin":-960000000"#)
    );
    let spans =
        json(Format::Otlp, &of_file(&file))["resourceSpans"][0]["scopeSpans"][0]["spans"].clone();
    for span in [&spans[0], &spans[1]] {
        assert_eq!(span["startTimeUnixNano"], "1699999999040000000", "{span}");
    }
    assert_eq!(spans[1]["endTimeUnixNano"], "1700000000000000000");
}

#[test]
fn an_output_that_is_a_link_is_written_through() {
    let dir = kata_gpu_test_support::temp_dir();
    let (target, link) = (dir.path().join("target"), dir.path().join("link"));
    std::fs::write(&target, "before").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    save(&link, |out| Ok(out.write_all(b"after")?)).unwrap();
    assert!(link.is_symlink(), "/dev/stdout would be gone");
    assert_eq!(std::fs::read(&target).unwrap(), b"after");
}

#[test]
fn bounds_hold_where_the_hosts_clock_was_stepped() {
    const HOUR_NS: u64 = 3_600_000_000_000;
    let mut file = file_of(BOOT);
    let honest = of_file(&file);
    assert!(
        honest
            .steps
            .iter()
            .all(|step| honest.wall_at(step.begin_ns).unwrap().error_ns < 10_000_000)
    );
    let best = file
        .clock_samples()
        .min_by_key(|sample| sample.error_ns)
        .unwrap();
    let later = Sample {
        boottime_ns: 9_000_000_000,
        offset_ns: best.offset_ns + HOUR_NS as i64,
        error_ns: 2 * best.error_ns,
    };
    file.host.push(HostLine::now(HostEvent::Clock(later)));
    let timeline = of_file(&file);
    let later_ns = ns(later.boottime_ns);
    assert!(
        timeline
            .steps
            .iter()
            .any(|step| step.begin_ns > later_ns || step.end_ns > Some(later_ns))
    );
    let bound = |boottime_ns| timeline.wall_at(ns(boottime_ns)).unwrap().error_ns;
    assert!(
        bound(best.boottime_ns) < 10_000_000 && bound(later.boottime_ns) >= HOUR_NS,
        "{}",
        bound(later.boottime_ns)
    );
    assert!(
        timeline.clock_error_ns().unwrap() >= HOUR_NS,
        "what the page says of any of its times"
    );
}
