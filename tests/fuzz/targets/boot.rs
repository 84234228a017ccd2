//! A failure means that some file of a boot crashes or stalls the reader, the model or a view of
//! it, or makes them take memory without bound. The first byte says how often the lines that follow
//! are repeated, as what costs too much does so only when there is much of it; each `#` in them
//! becomes the number of the repetition.

#![no_main]

use kata_gpu_boot::show::export;
use kata_gpu_boot::show::export::Format;
use kata_gpu_collect::fleet::tally::Tally;
use kata_gpu_report::analysis::blame::{By, blame};
use kata_gpu_report::analysis::compare::{Settings, Threshold, compare};
use kata_gpu_report::analysis::critical_path::critical_path;
use kata_gpu_report::analysis::many_boots::Collected;
use kata_gpu_report::analysis::metrics::metrics;
use kata_gpu_report::boot::coverage::coverage;
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::boot::steps;
use kata_gpu_report::boot::timeline::Timeline;
use kata_gpu_report::data::agent_log;
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::data::text::{Screen, write_ascii_json};
use kata_gpu_report::otlp;
use kata_gpu_report::otlp::Resource;
use kata_gpu_report::views::boot_page;
use kata_gpu_report::views::boot_page::{Page, Steps};
use kata_gpu_report::views::waterfall::Waterfall;
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::sink;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that repetitions stop at.
const MAX_BYTES: usize = 64 << 10;
/// Bytes of memory a byte of the input. In files too large for that the limits of the reader hold,
/// which tests/host proves.
const PER_BYTE: usize = 48;
/// Bytes of memory beside that.
const AT_LEAST: usize = 2 << 20;

/// Counts what is allocated, and the most that was.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on as it came; the counters touch no memory that is allocated here.
#[allow(unsafe_code, reason = "an allocator that counts")]
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the caller keeps the contract of GlobalAlloc, which is System's.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: as the caller promised for this very call.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: the caller keeps the contract of GlobalAlloc, which is System's.
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promised for this very call.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The lines, repeated.
fn repeated(times: u8, lines: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for n in 0..=usize::from(times) * 8 {
        if n > 0 && out.len() + lines.len() > MAX_BYTES {
            break;
        }
        for byte in lines {
            match byte {
                b'#' => out.extend_from_slice(n.to_string().as_bytes()),
                byte => out.push(*byte),
            }
        }
        out.push(b'\n');
    }
    out
}

fn views(bytes: &[u8]) {
    let Ok(file) = BootFile::read(bytes) else {
        return;
    };
    let Ok(agent) = agent_log::read(bytes) else {
        return;
    };
    let boot = Boot::new(&file, &agent);
    let page = Page {
        steps: Steps::All,
        ..Page::new(&file, &boot)
    };
    let screen = Screen {
        width: Some(80),
        colour: true,
    };
    boot_page::write(&page, screen, &mut sink()).expect("nothing to go wrong");
    write_ascii_json(&mut sink(), &boot).expect("a model is JSON");
    let timeline = Timeline::new(steps::story(&boot, &file));
    if let Ok(window) = timeline.window(None, None) {
        let covered = coverage(&timeline, &window);
        assert_eq!(
            covered.explained_ns.checked_add(covered.unexplained_ns),
            Some(covered.wall_ns)
        );
        blame(&timeline, &window, By::Owner);
        critical_path(&timeline, &window, 5);
    }
    let numbers = metrics(&boot, &file);
    let mut tally = Tally::default();
    tally.add(&numbers);
    let mut all = Collected::default();
    all.add(&numbers);
    all.stats();
    let settings = Settings {
        threshold: Threshold::Percent(5.0),
        seed: 1,
        gate: vec![],
    };
    let numbers = [numbers];
    let _nothing_to_compare = compare(&numbers, &numbers, &settings);
    for format in [Format::Html, Format::Perfetto, Format::Otlp] {
        let _no_clock = export::write(
            format,
            &Waterfall::new(&file, boot.clone()),
            &Resource::new(),
            &mut sink(),
        );
    }
    if let Ok(request) = otlp::request(Waterfall::new(&file, boot.clone()), &Resource::new()) {
        request.protobufs(1 << 20).for_each(drop);
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((times, lines)) = bytes.split_first() else {
        return;
    };
    let bytes = repeated(*times, lines);
    let before = NOW.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    views(&bytes);
    let most = MOST.load(Ordering::Relaxed) - before;
    assert!(
        most <= AT_LEAST + PER_BYTE * bytes.len(),
        "{most} bytes of memory for a file of {}",
        bytes.len()
    );
});
