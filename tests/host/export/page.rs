//! A failure means that the page of `show --html` does not draw a step in a real browser, does
//! something else at a key than it says, or runs what a hostile guest wrote.

use crate::TempDir;
use crate::export::{DEADLINE_S, RECORDED, SIXTEEN, bars, export, fixture, program, skip, within};
use kata_gpu_boot::show::export::Format;

use std::path::{Path, PathBuf};

struct Browser {
    program: PathBuf,
    dir: TempDir,
}

impl Browser {
    /// None, with the reason printed, where there is none.
    fn find(test: &str) -> Option<Self> {
        let found = ["chromium", "chromium-browser", "google-chrome"]
            .into_iter()
            .find_map(program);
        if found.is_none() {
            skip("no chromium (Debian package chromium)");
        }
        Some(Self {
            program: found?,
            dir: TempDir::new(test),
        })
    }

    fn page(&self, name: &str, html: &[u8]) -> PathBuf {
        let path = self.dir.0.join(name);
        crate::write(&path, html);
        path
    }

    /// Standard output and what the page's console said.
    fn run(&self, page: &Path, args: &[&str]) -> (String, String) {
        let mut command = within(DEADLINE_S, &self.program);
        command.args([
            "--headless=new",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            "--disable-dev-shm-usage",
        ]);
        command
            .arg(format!(
                "--user-data-dir={}",
                self.dir.0.join("profile").display()
            ))
            .args(args);
        // Its sandbox refuses root.
        if nix::unistd::geteuid().is_root() {
            command.arg("--no-sandbox");
        }
        let output = command
            .arg(format!("file://{}", page.display()))
            .env("HOME", &self.dir.0)
            .output()
            .unwrap();
        let said = crate::stderr(&output);
        assert!(
            output.status.success(),
            "{}: {}\n{said}",
            page.display(),
            output.status
        );
        let console = said
            .lines()
            .filter(|line| line.contains("CONSOLE"))
            .collect::<Vec<_>>()
            .join("\n");
        (crate::stdout(&output), console)
    }
}

/// A `data-` attribute of the document's element.
fn state(dom: &str, name: &str) -> Option<String> {
    let head = dom.split("<html").nth(1)?.split('>').next()?;
    Some(
        head.split(&format!("data-{name}=\""))
            .nth(1)?
            .split('"')
            .next()?
            .to_string(),
    )
}

fn title(dom: &str) -> &str {
    dom.split("<title>")
        .nth(1)
        .and_then(|rest| rest.split("</title>").next())
        .unwrap_or("")
}

#[test]
fn the_page_draws_every_step_at_8_and_16_gpus() {
    let Some(browser) = Browser::find("export-page") else {
        return;
    };
    let eight = fixture(&format!("{RECORDED}.ndjson"));
    for (name, stream, gpus) in [("8-gpus", eight, 8), ("16-gpus", fixture(SIXTEEN), 16)] {
        let page = browser.page(
            &format!("{name}.html"),
            &export(&stream, Some(RECORDED), Format::Html),
        );
        let rows = bars(&stream, Some(RECORDED)).len();
        let (dom, console) = browser.run(&page, &["--dump-dom"]);
        assert_eq!(
            (console.as_str(), state(&dom, "error")),
            ("", None),
            "{name}"
        );
        assert_eq!(state(&dom, "steps"), Some(rows.to_string()), "{name}");
        assert!(title(&dom).starts_with("GPU boot "), "{}", title(&dom));
        let drawn = dom.split("<script").next().unwrap_or("");
        let bars = drawn.matches("data-step=").count();
        assert!(
            state(&dom, "bars") == Some(bars.to_string()) && bars * 2 > rows && bars <= rows,
            "{bars} of {rows}"
        );
        for gpu in 0..gpus {
            assert!(
                dom.contains(&format!(">GPU {gpu}</text>")),
                "no lane for GPU {gpu}"
            );
        }
        assert_eq!(
            dom.matches("class=\"hatched\"").count(),
            usize::from(gpus == 16),
            "hangs"
        );
        assert_eq!(
            dom.matches("mark failed").count() > 1,
            gpus == 16,
            "failures, beside the legend's"
        );
        assert!(
            dom.contains("Critical path")
                && dom.contains("critical driver")
                && dom.matches("<tr").count() > rows
        );
    }
}

/// Text of a guest that tries to run something on the machine of its boot's reader.
const EVIL: &str = r#"</script><script>document.title='pwned'</script><img src=x onerror=document.title='pwned'><svg onload=document.title='pwned'><!--<script>\u2028\u2029"'{data}"#;

/// 10,000 records of texts like that, times that no clock has, steps in no order, and many GPUs.
fn hostile() -> String {
    let evil = EVIL.replace('"', "\\\"");
    let mut out = format!(
        "{{\"schema\":1,\"stream\":{{\"boot_id\":\"0f7a1f8e-0000-4000-8000-00000000beef\",\"version\":\"{evil}\",\"kernel\":\"{evil}\",\"first_seq\":0}}}}\n"
    );
    for seq in 0..10_000u64 {
        let time = [seq * 1_000_000, u64::MAX, 0, u64::MAX - seq][(seq % 4) as usize];
        let kind = ["begin", "end", "event", "kmsg"][(seq / 4 % 4) as usize];
        let span = if matches!(kind, "begin" | "end") {
            format!(",\"span\":{}", seq / 3)
        } else {
            String::new()
        };
        let name = [
            "gpu.found",
            "gpu.init",
            "</script>",
            "gpu.failed",
            "<img/src=x>",
        ][(seq % 5) as usize];
        out.push_str(&format!(
            "{{\"schema\":1,\"seq\":{seq},\"boottime_ns\":{time},\"kind\":\"{kind}\",\"name\":\"{name}\"{span},\"gpu\":\"{:04x}:00:00.0\",\"after\":[{},{}],\
             \"level\":\"error\",\"error\":\"{evil}\",\"fields\":{{\"{evil}\":\"{evil}\",\"step\":\"{evil}\",\"reason\":\"{evil}\",\"text\":\"{evil}\",\"index\":{seq}}}}}\n",
            seq % 40,
            seq / 3 + 1,
            seq / 5
        ));
    }
    out
}

#[test]
fn a_hostile_boot_runs_nothing_and_is_drawn() {
    let Some(browser) = Browser::find("export-hostile") else {
        return;
    };
    let page = browser.page("hostile.html", &export(&hostile(), None, Format::Html));
    let (dom, console) = browser.run(&page, &["--dump-dom"]);
    assert_eq!(
        (title(&dom), console.as_str(), state(&dom, "error")),
        ("GPU boot 0f7a1f8e", "", None)
    );
    assert!(
        !dom.contains("<img") && dom.matches("<script").count() == 2,
        "something of the boot became an element"
    );
    let drawn: usize = state(&dom, "steps").unwrap().parse().unwrap();
    // As many as fit into the budget of texts that a reader keeps of one boot.
    assert!(drawn > 500, "{drawn} steps");
}

#[test]
fn a_page_that_does_not_escape_is_caught_by_the_same_look() {
    let Some(browser) = Browser::find("export-control") else {
        return;
    };
    let page = browser.page(
        "control.html",
        format!("<!doctype html><title>GPU boot 0f7a1f8e</title><script>\"{EVIL}\"</script>")
            .as_bytes(),
    );
    let (dom, _) = browser.run(&page, &["--dump-dom"]);
    assert!(title(&dom) == "pwned" && dom.contains("<img"), "{dom}");
}

#[test]
fn the_policy_stops_a_script_that_got_into_the_page() {
    let Some(browser) = Browser::find("export-policy") else {
        return;
    };
    let page = String::from_utf8(export(
        &fixture(&format!("{RECORDED}.ndjson")),
        None,
        Format::Html,
    ))
    .unwrap();
    let inside = page.replace(
        "</main>",
        "<script>document.title='pwned'</script><img src=x \
                                          onerror=\"document.title='pwned'\"></main>",
    );
    assert_ne!(inside, page);
    let (dom, console) = browser.run(
        &browser.page("inside.html", inside.as_bytes()),
        &["--dump-dom"],
    );
    assert!(
        title(&dom).starts_with("GPU boot ") && console.contains("Content Security Policy"),
        "{} {console}",
        title(&dom)
    );
    assert!(state(&dom, "steps").is_some(), "the page's own script runs");
}

/// Acts of a user, recorded by a script beside the page's own: the range after each act, and the
/// announced text.
const HAND: &str = r#"{
const said = [], note = () => said.push(document.getElementById("range").textContent);
const key = (key, shiftKey = false) => { chart.dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey, cancelable: true })); note(); };
const point = (kind, clientX, clientY, target = chart) => target.dispatchEvent(new PointerEvent(kind, { clientX, clientY, pointerId: 1, bubbles: true }));
note();
key("+"); key("ArrowRight", true); key("0");
chart.dispatchEvent(new WheelEvent("wheel", { deltaY: -300, ctrlKey: true, clientX: 700, cancelable: true })); note();
key("0"); key("ArrowRight"); key("ArrowDown"); key("Enter");
const reported = document.getElementById("said").textContent;
key("Escape"); key("0");
const box = chart.getBoundingClientRect();
chart.setPointerCapture = () => {};
point("pointerdown", box.left + 400, box.top + 5); point("pointermove", box.left + 600, box.top + 5); point("pointerup", box.left + 600, box.top + 5); note();
const bar = chart.querySelector(".bar");
point("pointermove", 0, 0, bar);
const hovered = document.getElementById("tip").textContent;
document.getElementById("filter").value = "gpu.init gpu 3";
document.getElementById("filter").dispatchEvent(new Event("input"));
const rows = document.getElementById("rows").children.length;
document.documentElement.dataset.hand = JSON.stringify({ said, reported, hovered, rows }).replaceAll('"', "'");
}"#;

/// A boot's page with a second script, without the policy, which would not run it.
fn page_with(stream: &str, console: Option<&str>, script: &str) -> String {
    let page = String::from_utf8(export(stream, console, Format::Html)).unwrap();
    let start = page
        .find("<meta http-equiv=\"Content-Security-Policy\"")
        .unwrap();
    let end = start + page[start..].find('>').unwrap() + 1;
    format!(
        "{}{}",
        &page[..start],
        page[end..].replace("</body>", &format!("<script>{script}</script></body>"))
    )
}

/// Resizes the page some times, as its observer does (a browser without a screen may deliver no
/// frame), and reports its headline and the drawn widths. Then comes an error as a page that breaks
/// has it, and the headline after that.
const RESIZE: &str = r##"{
const said = [], root = document.documentElement;
const headline = () => document.getElementById("headline").textContent;
const drawnAs = () => document.querySelector("#chart svg").getAttribute("viewBox");
const first = drawnAs(), widths = new Set();
for (const width of ["900px", "420px", "1100px", "600px"]) {
  document.body.style.width = width;
  resized();
  widths.add(drawnAs());
  said.push(headline());
}
document.body.style.width = "";
widths.delete(first);
dispatchEvent(new ErrorEvent("error", { message: "ResizeObserver loop completed" }));
said.push(headline());
const drawn = document.querySelectorAll("#chart svg").length;
const broken = root.dataset.error ?? null;
dispatchEvent(new ErrorEvent("error", { message: "torn", error: new Error("torn") }));
const overflow = root.scrollWidth - innerWidth;
const paper = getComputedStyle(document.body).backgroundColor;
const hand = { said, resized: widths.size, drawn, broken, torn: headline(), overflow, paper };
root.dataset.hand = JSON.stringify(hand).replaceAll('"', "'");
}"##;

#[test]
fn the_verdict_outlives_a_resize_on_narrow_and_dark_screens() {
    let Some(browser) = Browser::find("export-resize") else {
        return;
    };
    let stream = fixture("made-8-gpus-one-failed.ndjson");
    let page = browser.page("resize.html", page_with(&stream, None, RESIZE).as_bytes());
    let look = |args: &[&str]| -> serde_json::Value {
        let args = [&["--dump-dom"], args].concat();
        let (dom, _) = browser.run(&page, &args);
        serde_json::from_str(&state(&dom, "hand").unwrap().replace('\'', "\"")).unwrap()
    };
    let wide = look(&["--window-size=1400,1000"]);
    let headline = wide["said"][0].as_str().unwrap();
    assert!(
        headline.starts_with("7 of 8 GPUs usable after 10.868 s"),
        "{wide}"
    );
    assert_eq!(
        wide["said"],
        serde_json::Value::from(vec![headline; 5]),
        "{wide}"
    );
    assert_eq!(
        (&wide["drawn"], &wide["broken"]),
        (&1.into(), &().into()),
        "{wide}"
    );
    assert!(wide["resized"].as_u64() >= Some(3), "{wide}");
    // Negative control: an error of the page's own is said in the headline's place.
    assert_eq!(wide["torn"], "This page failed to draw: torn");
    let narrow = look(&["--window-size=500,900"]);
    assert_eq!(narrow["said"], wide["said"]);
    assert!(narrow["overflow"].as_i64().unwrap() <= 0, "{narrow}");
    let dark = look(&["--blink-settings=preferredColorScheme=0"]);
    assert_ne!(dark["paper"], wide["paper"], "{dark}");
}

#[test]
fn a_failed_gpus_cure_is_on_the_page() {
    let stream = fixture("made-8-gpus-one-failed.ndjson");
    let page = String::from_utf8(export(&stream, None, Format::Html)).unwrap();
    for said in ["(firmware-boot)", "<b>cure: reset the GPU on the host;"] {
        assert!(page.contains(said), "no {said}");
    }
}

#[test]
fn keys_wheel_drag_and_filter_do_what_the_page_says() {
    let Some(browser) = Browser::find("export-hand") else {
        return;
    };
    let stream = fixture(&format!("{RECORDED}.ndjson"));
    let page = page_with(&stream, Some(RECORDED), HAND);
    let (dom, console) = browser.run(
        &browser.page("hand.html", page.as_bytes()),
        &["--dump-dom", "--window-size=1400,1200"],
    );
    assert_eq!((console.as_str(), state(&dom, "error")), ("", None));
    let hand: serde_json::Value =
        serde_json::from_str(&state(&dom, "hand").unwrap().replace('\'', "\"")).unwrap();
    let ranges: Vec<(f64, f64)> = hand["said"]
        .as_array()
        .unwrap()
        .iter()
        .map(|text| {
            let numbers: Vec<f64> = text
                .as_str()
                .unwrap()
                .split_whitespace()
                .filter_map(|word| word.parse().ok())
                .collect();
            (numbers[0], numbers[1])
        })
        .collect();
    let [
        whole,
        zoomed,
        panned,
        back,
        wheeled,
        again,
        right,
        down,
        entered,
        escaped,
        reset,
        chosen,
    ] = ranges.as_slice()
    else {
        panic!("{ranges:?}")
    };
    let long = |(from, to): &(f64, f64)| to - from;
    assert!(
        (long(whole) / long(zoomed) - 1.5).abs() < 0.01
            && (long(panned) - long(zoomed)).abs() < 0.002
            && panned.0 > zoomed.0,
        "{ranges:?}"
    );
    assert!(
        [back, again, right, down, reset]
            .iter()
            .all(|range| *range == whole),
        "{ranges:?}"
    );
    assert!(
        long(wheeled) < long(whole) / 2.0 && long(entered) < long(whole) && escaped == entered,
        "{ranges:?}"
    );
    assert!(chosen.0 > whole.0 && chosen.1 < whole.1, "{ranges:?}");
    assert!(
        hand["reported"].as_str().unwrap().contains("from"),
        "{hand}"
    );
    assert!(hand["hovered"].as_str().unwrap().contains("took"), "{hand}");
    assert_eq!(hand["rows"], 1, "{hand}");
}
