//! A failure means that fifty hostile guests cost fifty honest ones a record, a scrape, the
//! collector's probe or its memory limit.

use crate::collect::{
    Collector, boot_id, boot_path, folder, garbage, program, read, socket, until,
};
use crate::fleet::{get, metrics_address, value};
use crate::worst_boots::{everything, trees};
use kata_gpu_init::stream::ring::Ring;
use kata_gpu_test_guest::halves::random::Random;
use kata_gpu_wire::record::{Header, Kind, Record, header_line};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const HONEST: u64 = 50;
const HOSTILE: u64 = 50;
const MEMORY: u64 = 128 << 20;
/// Numbers of the honest guests' boots begin here; the hostile ones' own lie below.
const HONEST_BOOTS: u64 = 1_000_000;
/// Probes that fail one after another before the DaemonSet's collector is started again.
const PROBES: u32 = 4;
/// The file of one boot, at most; what hostile guests fill the disk with.
const BOOT_BYTES: u64 = 4 << 20;

/// `KATA_GPU_SOAK_SECONDS=600` attacks for as long as a node is attacked; `KATA_GPU_SOAK_SEED`
/// chooses another attack.
fn environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(otherwise)
}

/// A control group with that much memory, where one can be made.
struct Group(PathBuf);

impl Group {
    fn new() -> Option<Self> {
        let name = format!("kata-gpu-boot-soak-{}", std::process::id());
        for (root, limit) in [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ] {
            let path = Path::new(root).join(&name);
            if std::fs::create_dir(&path).is_ok() {
                let group = Self(path);
                if std::fs::write(group.0.join(limit), MEMORY.to_string()).is_ok() {
                    return Some(group);
                }
            }
        }
        None
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _its_processes_have_ended = std::fs::remove_dir(&self.0);
    }
}

/// The collector, with a limit that the kernel keeps: of a control group and, everywhere, of what
/// it has for itself.
fn start(dir: &Path, group: Option<&Group>, otlp: u16) -> Collector {
    let join = group.map_or(String::new(), |group| {
        format!("echo $$ > {}/cgroup.procs && ", group.0.display())
    });
    let script = format!("{join}ulimit -d {} && exec \"$0\" \"$@\"", MEMORY >> 10);
    let mut command = Command::new("sh");
    command.args(["-c", &script]).arg(program());
    let (bytes, url) = (
        format!("bytes={BOOT_BYTES}"),
        format!("http://127.0.0.1:{otlp}"),
    );
    let words = "--metrics 0 --keep-size 100M --limit goodbye=1 --otlp";
    let mut words: Vec<&str> = words.split(' ').chain([&*url, "--limit", &bytes]).collect();
    let sockets: Vec<String> = (0..HONEST + HOSTILE)
        .map(|n| format!("{}/v{n}", dir.display()))
        .collect();
    words.extend(sockets.iter().flat_map(|socket| ["--uds", socket]));
    Collector::of(&mut Collector::add_words(command, dir, &words))
}

/// A receiver of traces that takes everything, slowly.
fn receiver() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut bytes = [0; 65536];
                let mut seen = Vec::new();
                while let Ok(n) = stream.read(&mut bytes)
                    && n > 0
                {
                    seen.extend_from_slice(&bytes[..n]);
                    let text = String::from_utf8_lossy(&seen).to_ascii_lowercase();
                    let Some((head, _)) = text.split_once("\r\n\r\n") else {
                        continue;
                    };
                    let length: usize = head
                        .lines()
                        .find_map(|l| l.strip_prefix("content-length: ")?.trim().parse().ok())
                        .unwrap_or(0);
                    if seen.len() >= head.len() + 4 + length {
                        seen.clear();
                        if stream
                            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                            .is_err()
                        {
                            return;
                        }
                    }
                }
            });
        }
    });
    port
}

fn header(boot: u64) -> String {
    header_line(&Header {
        boot_id: boot_id(boot),
        version: "0.1.0".into(),
        kernel: "6.1".into(),
        first_seq: 0,
    })
}

/// One line of a hostile guest.
fn line(random: &mut Random, seq: &mut u64) -> Vec<u8> {
    let numbers = [
        "0",
        "1",
        "-1",
        "1e308",
        "18446744073709551615",
        "9223372036854775807",
        "1.5",
        "null",
        "\"x\"",
        "[]",
        "{}",
    ];
    let texts = [
        "",
        "gpu.init",
        "gpu.failed",
        "settled",
        "power.off",
        "agent.exec",
        "kernel",
        "\\u0000",
        "\\u001b[2J",
        "../../etc",
        "\u{202e}x",
    ];
    let kinds = ["begin", "end", "event", "host", "metric", "ping", ""];
    *seq += 1;
    let n = *seq as usize;
    let record = |body: String| {
        format!("{{\"schema\":1,\"seq\":{n},\"boottime_ns\":{n},{body}}}\n").into_bytes()
    };
    match random.below(12) {
        0 => record(trees(n)),
        1..=4 => record(everything(n)),
        5 => {
            let mut field = |name: &str| format!("\"{name}\":{}", random.one_of(&numbers));
            let fields = [
                "seq",
                "boottime_ns",
                "span",
                "parent",
                "gpu",
                "after",
                "fields",
                "error",
            ]
            .map(&mut field)
            .join(",");
            format!(
                "{{\"schema\":1,\"kind\":\"{}\",\"name\":\"{}\",{fields}}}\n",
                random.one_of(&kinds),
                random.one_of(&texts)
            )
            .into_bytes()
        }
        6 => {
            // Gaps as large as can be.
            *seq = seq.saturating_add(random.below(1 << 30));
            record(format!(
                "\"kind\":\"event\",\"name\":\"{}\"",
                random.one_of(&texts)
            ))
        }
        7 => vec![b'['; 20_000 + random.below(20_000) as usize],
        8 => (0..random.below(500))
            .map(|_| random.below(256) as u8)
            .chain([b'\n'])
            .collect(),
        9 => format!(
            "{{\"schema\":1,\"pong\":{},\"boottime_ns\":{}}}\n",
            random.below(9),
            random.below(u64::MAX)
        )
        .into_bytes(),
        10 => vec![b'\n'; 1 + random.below(5000) as usize],
        _ => {
            let line = record(everything(n));
            line[..random.below(line.len() as u64) as usize].to_vec()
        }
    }
}

/// A hostile guest's life: connections, each with a purpose, until `stop` is set. How many bytes it
/// got rid of.
fn attack(n: u64, seed: u64, socket: &Path, stop: &AtomicBool) -> u64 {
    let mut random = Random::new(seed.wrapping_mul(1000) + n);
    let (mut sent, mut seq, mut silent) = (0, 0, Vec::new());
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut stream) = UnixStream::connect(socket) else {
            continue;
        };
        // Not read from any more it must not hold up the test.
        stream
            .set_write_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        let own = n * 1000 + random.below(100);
        let begin = match random.below(8) {
            // Into the story of an honest guest.
            0 => header(HONEST_BOOTS + random.below(HONEST)),
            1 => header(own).replace("0f7a1f8e", "../../.."),
            2 => String::new(),
            _ => header(own),
        };
        let mut bytes = begin.into_bytes();
        match random.below(6) {
            0 => {}
            1 => {
                // Slots that are held and never used.
                silent.push(stream);
                silent.truncate(8);
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            _ => {
                for _ in 0..random.below(300) {
                    bytes.extend(line(&mut random, &mut seq));
                }
                if random.below(10) == 0 {
                    bytes.extend(header(HONEST_BOOTS + random.below(HONEST)).bytes());
                    bytes.extend(line(&mut random, &mut seq));
                }
            }
        }
        for piece in bytes.chunks(32_768) {
            if stop.load(Ordering::Relaxed) || stream.write_all(piece).is_err() {
                break;
            }
            sent += piece.len() as u64;
        }
        std::thread::sleep(Duration::from_millis(random.below(20)));
    }
    sent
}

/// Memory that a process has for itself, in bytes.
fn anonymous(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib = status.lines().find_map(|l| {
        l.strip_prefix("RssAnon:")?
            .trim()
            .strip_suffix(" kB")?
            .trim()
            .parse::<u64>()
            .ok()
    });
    kib.unwrap_or(0) << 10
}

/// Every record of honest guest `n`, each once and in its own file, and none of anybody else.
fn assert_its_own(dir: &Path, n: u64, records: u64) {
    let file = read(dir, HONEST_BOOTS + n);
    let own = format!("honest {n}");
    let mut seqs: Vec<u64> = Vec::new();
    for record in &file.records {
        assert_eq!(
            record.error.as_deref(),
            Some(own.as_str()),
            "in the file of guest {n}: {record:?}"
        );
        seqs.push(record.seq);
    }
    seqs.sort_unstable();
    assert!(
        seqs.iter().copied().eq(0..records),
        "guest {n} sent {records} records, of which {} are there",
        seqs.len()
    );
    assert_eq!(
        (file.damaged, garbage(&file)),
        (0, 0),
        "guest {n}: {:?}",
        file.damage
    );
}

#[test]
fn fifty_hostile_guests_cost_fifty_honest_ones_nothing() {
    let (seconds, seed) = (
        environment("KATA_GPU_SOAK_SECONDS", 10),
        environment("KATA_GPU_SOAK_SEED", 1),
    );
    let dir = folder();
    let group = Group::new();
    let collector = start(&dir.0, group.as_ref(), receiver());
    let address = metrics_address(&collector);
    let (stop, peak, sent) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut pushed = 0;
    let (mut scrapes, mut failed, mut longest) = (0, 0, Duration::ZERO);
    let honest: Vec<crate::collect::Guest> = (0..HONEST)
        .map(|n| {
            let socket = socket(&dir.0, &format!("v{n}"));
            crate::collect::Guest::with_ring(
                HONEST_BOOTS + n,
                socket,
                Ring::with_capacity(16 << 20),
            )
        })
        .collect();
    // A boot is whose connection was first; nobody guesses a boot's id before that.
    until("the honest guests' first lines", || {
        (0..HONEST).all(|n| boot_path(&dir.0, HONEST_BOOTS + n).exists())
    });
    std::thread::scope(|scope| {
        // A failed assertion must not leave them running.
        let _stop = StopAtEnd(&stop);
        for n in 0..HOSTILE {
            let socket = socket(&dir.0, &format!("v{}", HONEST + n));
            let (stop, sent) = (&stop, &sent);
            scope.spawn(move || sent.fetch_add(attack(n, seed, &socket, stop), Ordering::Relaxed));
        }
        while Instant::now() < end {
            for (n, guest) in honest.iter().enumerate() {
                for _ in 0..5 {
                    let mut record = Record::new(Kind::Event, "x");
                    record.boottime_ns = pushed;
                    record.error = Some(format!("honest {n}"));
                    guest.ring.push(record);
                }
            }
            pushed += 5;
            let answer = get(address, "/metrics");
            assert!(
                answer.contains("200 OK") && answer.contains("kata_gpu_boot_records_total"),
                "{answer:?}"
            );
            scrapes += 1;
            if scrapes % 5 == 1 {
                let asked = Instant::now();
                let check = Command::new(program())
                    .args(["collect", "--check", "--dir"])
                    .arg(dir.0.join("boots"))
                    .output()
                    .unwrap();
                longest = longest.max(asked.elapsed());
                failed = if check.status.success() {
                    0
                } else {
                    failed + 1
                };
                assert!(
                    failed < PROBES,
                    "{failed} probes failed, one after another: {check:?}"
                );
            }
            peak.fetch_max(anonymous(collector.pid()), Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(200));
        }
        // While the others go on.
        for n in 0..HONEST {
            until(&format!("all records of honest guest {n}"), || {
                std::fs::read_to_string(boot_path(&dir.0, HONEST_BOOTS + n)).is_ok_and(|text| {
                    text.matches(&format!("honest {n}\"")).count() as u64 >= pushed
                })
            });
        }
    });
    let text = get(address, "/metrics");
    let metric = |name: &str| value(&text, &format!("kata_gpu_boot_{name}"));
    assert!(
        metric("garbage_lines_total") > 0.0 && metric("connections_refused_total") > 0.0,
        "the attack was none: {text}"
    );
    drop(honest);
    (0..HONEST).for_each(|n| assert_its_own(&dir.0, n, pushed));
    let names = crate::names(dir.0.join("boots"));
    // Boots, the socket of the probes, and what outlives the collector of the host's clock.
    let is_expected =
        |name: &String| name.ends_with(".ndjson") || [".check", ".clock"].contains(&name.as_str());
    assert!(names.iter().all(is_expected), "{names:?}");
    let said = collector.stop();
    let peak = peak.load(Ordering::Relaxed);
    assert!(peak > 0 && peak < MEMORY, "{peak} bytes");
    println!(
        "{seconds} s, seed {seed}, {}: {} MB sent by {HOSTILE} hostile guests, \
         {} records of {HONEST} honest ones, {scrapes} scrapes, \
         a probe took {longest:.1?} at most, at most {} MiB, {} lines of log, {} files",
        if group.is_some() {
            "control group of 128 MiB"
        } else {
            "no control group"
        },
        sent.load(Ordering::Relaxed) / 1_000_000,
        pushed * HONEST,
        peak >> 20,
        said.len(),
        names.len()
    );
}

struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_record_in_anothers_file_is_found() {
    let dir = folder();
    crate::make_dir(dir.0.join("boots"));
    let record = |n: u64| {
        format!(
            "{{\"schema\":1,\"seq\":{n},\"boottime_ns\":1,\"kind\":\"event\",\"name\":\"x\",\
             \"error\":\"honest {n}\"}}\n"
        )
    };
    crate::write(
        boot_path(&dir.0, HONEST_BOOTS),
        header(HONEST_BOOTS) + &record(0),
    );
    assert_its_own(&dir.0, 0, 1);
    let file = boot_path(&dir.0, HONEST_BOOTS);
    crate::write(&file, header(HONEST_BOOTS) + &record(0) + &record(1));
    assert!(std::panic::catch_unwind(|| assert_its_own(&dir.0, 0, 2)).is_err());
    crate::write(&file, header(HONEST_BOOTS));
    assert!(std::panic::catch_unwind(|| assert_its_own(&dir.0, 0, 1)).is_err());
}
